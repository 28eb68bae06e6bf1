"""The possible layouts of a model on so many GPUs, and those that HybridTrainer accepts.

    meshes_of(…)     dp × tp × pp × cp × ep = GPUs: those that the model can be cut by, and how many
                     are refused for which reason
    layouts_of(…)    of one mesh: microbatches, chunks, ZeRO, recomputation, sequence parallel

Sizes that don't divide evenly are left out, although the trainer takes most of them: the rank with
the largest share would be waited for. tp stays inside a node, unless it is fixed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from itertools import product
from types import SimpleNamespace
from typing import Any

from parallel101.cost.cluster import Cluster
from parallel101.cost.model_shape import ModelShape, check_known, check_whole
from parallel101.cost.parallel_layout import KNOWN, ParallelLayout, stage_layers

AXES = ("dp", "tp", "pp", "cp", "ep")
KEYS = tuple(field.name for field in fields(ParallelLayout))
CHOICES = {**KNOWN, "optimizer": ("adamw",)}  # which the trainer is called with
# fixed, or as the layout has them by default
OTHERS = ("schedule", "precision", "gradient_dtype", "overlap", "context", "optimizer")
MICROBATCHES = (1, 2, 4, 8, 16)  # samples of a microbatch that are tried


Refusals = list[tuple[str, ParallelLayout]]  # the reason, and the refused mesh or layout


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def check_fixed(fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a layout that the user has fixed.

    Raises ValueError for unknown keys and for values that none can have.
    """
    if unknown := [key for key in fixed if key not in KEYS]:
        raise ValueError(
            f"layout has the unknown key {unknown[0]!r}: expected some of {', '.join(KEYS)}"
        )
    chosen, of = {key: CHOICES[key] for key in CHOICES if key in fixed}, SimpleNamespace(**fixed)
    try:
        check_known(of, chosen)
        check_whole(of, *(key for key in fixed if key not in chosen))
    except ValueError as error:
        raise ValueError(f"layout {error}") from None
    return dict(fixed)


# ── meshes ──


def meshes_of(
    shape: ModelShape, cluster: Cluster, batch: int, fixed: Mapping[str, Any], refused: Refusals
) -> Iterator[ParallelLayout]:
    """Yield each way to cut the GPUs into axes that the model can be cut by, as a layout of which
    only the axes count.
    """
    n, per_node = cluster.gpus, cluster.nodes_of
    sizes = divisors(n)
    for tp, cp, ep, pp in product(*(fixed_or(fixed, a, sizes) for a in ("tp", "cp", "ep", "pp"))):
        dp, rest = divmod(n, tp * cp * ep * pp)
        if rest or fixed.get("dp", dp) != dp or (ep > 1 and not shape.experts):
            continue
        mesh = ParallelLayout(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep)
        if tp > per_node and "tp" not in fixed:
            refused.append((f"tp is beyond the {per_node} GPUs of a node", mesh))
        elif reason := why_not_mesh(shape, mesh, batch, fixed):
            refused.append((reason, mesh))
        else:
            yield mesh


def fixed_or(fixed: Mapping[str, Any], key: str, others: Any) -> Any:
    return (fixed[key],) if key in fixed else others


def why_not_mesh(
    shape: ModelShape, mesh: ParallelLayout, batch: int, fixed: Mapping[str, Any]
) -> str | None:
    """Return why the model can't be cut by these axes, or None if it can."""
    if shape.heads % mesh.tp:
        return f"tp doesn't divide {shape.heads} heads"
    if shape.kv % mesh.tp:
        return f"tp doesn't divide {shape.kv} key/value heads"
    if shape.inside % mesh.tp:
        return f"tp doesn't divide the {shape.inside:,} features inside an MLP"
    if not can_be_staged(shape.layers, mesh.pp):
        return f"{shape.layers} layers can't be shared evenly by pp stages"
    if mesh.cp > 1 and shape.time % (2 * mesh.cp):
        return f"a sample's {shape.time:,} tokens aren't a multiple of 2 · cp"
    if mesh.cp > 1 and fixed.get("context") == "ulysses" and (shape.kv // mesh.tp) % mesh.cp:
        return "context='ulysses': cp doesn't divide the key/value heads of a rank"
    if mesh.cp > 1 and shape.attention == "unfused":
        return "cp needs attention='fused'"
    if mesh.ep > 1 and shape.experts % mesh.ep:
        return f"ep doesn't divide {shape.experts} experts"
    if batch % (mesh.dp * mesh.ep):
        return f"dp · ep doesn't divide the batch of {batch:,} samples"
    return None


def can_be_staged(layers: int, stages: int) -> bool:
    try:
        stage_layers(layers, stages)
    except ValueError:
        return False
    return True


# ── layouts of one mesh ──


def layouts_of(
    shape: ModelShape,
    mesh: ParallelLayout,
    batch: int,
    fixed: Mapping[str, Any],
    refused: Refusals,
) -> Iterator[ParallelLayout]:
    """Yield the layouts of one mesh that the trainer accepts."""
    data = mesh.dp * mesh.cp * mesh.ep
    share = batch // (mesh.dp * mesh.ep)
    microbatches = [size for size in MICROBATCHES if share % size == 0]
    if "microbatches" in fixed:
        microbatches = [max(share // fixed["microbatches"], 1)]
    chunks = [1]
    if mesh.pp > 1:
        most = (shape.layers + 2) // mesh.pp
        chunks += [c for c in range(2, most + 1) if can_be_staged(shape.layers, mesh.pp * c)]
    # nothing is sharded if there is nobody to share with, and cut along time without tp
    zero = CHOICES["zero_stage"] if data > 1 else (0,)
    in_time = (False, True) if mesh.tp > 1 else (False,)
    # fused attention keeps no matrix that "selective" would compute again
    recompute = KNOWN["recompute"] if shape.attention == "unfused" else ("none", "full")
    others = {key: fixed[key] for key in OTHERS if key in fixed}
    for microbatch, of_rank in product(
        fixed_or(fixed, "microbatch", microbatches),
        fixed_or(fixed, "chunks", chunks),
    ):
        count, rest = divmod(share, microbatch)
        one = replace(mesh, microbatch=microbatch, microbatches=max(count, 1), **others)
        if rest or fixed.get("microbatches", count) != count:
            refused.append(("microbatch · microbatches isn't the share of the batch", one))
            continue
        if reason := why_not_schedule(shape, one, of_rank):
            refused.append((reason, one))
            continue
        for stage, again, cut in product(
            fixed_or(fixed, "zero_stage", zero),
            fixed_or(fixed, "recompute", recompute),
            fixed_or(fixed, "sequence_parallel", in_time),
        ):
            layout = replace(
                one, chunks=of_rank, zero_stage=stage, recompute=again, sequence_parallel=cut
            )
            if reason := why_not_options(shape, layout):
                refused.append((reason, layout))
            else:
                yield layout


def why_not_schedule(shape: ModelShape, layout: ParallelLayout, chunks: int) -> str | None:
    """Return why the layout's pipeline can't have so many chunks, or its schedule; else None."""
    if layout.pp == 1:
        if chunks > 1 or layout.schedule != "1f1b":
            return "chunks and schedule are a pipeline's, and pp is 1"
        return None
    if chunks > 1 and layout.schedule not in ("1f1b", "interleaved"):
        return f"chunks above 1 are interleaved, and schedule is {layout.schedule!r}"
    if not can_be_staged(shape.layers, layout.pp * chunks):
        return f"{shape.layers} layers can't be shared evenly by pp · chunks stages"
    if (chunks > 1 or layout.schedule == "interleaved") and layout.microbatches % layout.pp:
        return "chunks need a multiple of pp microbatches"
    return None


def why_not_options(shape: ModelShape, layout: ParallelLayout) -> str | None:
    """Return why the trainer refuses the layout's options, or None if it doesn't."""
    if layout.sequence_parallel and layout.tp == 1:
        return "sequence_parallel needs tp above 1"
    if layout.sequence_parallel and shape.time % (layout.tp * layout.cp):
        return f"sequence_parallel: a sample's {shape.time:,} tokens aren't a multiple of tp · cp"
    if layout.sequence_parallel and shape.experts:
        return "sequence_parallel: a router of experts isn't cut along tp"
    if layout.gradient_dtype and not layout.precision.endswith("-mixed"):
        return "gradient_dtype='fp32' needs a mixed precision"
    return None


def why_not(shape: ModelShape, layout: ParallelLayout, fixed: Mapping[str, Any] = {}) -> str | None:
    """Return why HybridTrainer can't train this layout, or None if it can."""
    return (
        why_not_mesh(shape, layout, layout.batch, fixed)
        or why_not_schedule(shape, layout, layout.chunks)
        or why_not_options(shape, layout)
    )
