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
from math import prod
from types import SimpleNamespace
from typing import Any

from parallel101.cost.cluster import Cluster
from parallel101.cost.model_shape import ModelShape, check_known, check_whole
from parallel101.cost.parallel_layout import KNOWN, ParallelLayout, stage_layers

KEYS = tuple(field.name for field in fields(ParallelLayout))
CHOICES = {**KNOWN, "optimizer": ("adamw",)}  # which the trainer is called with
# fixed, or as the layout has them by default
OTHERS = ("schedule", "precision", "gradient_dtype", "overlap", "context", "optimizer")
MICROBATCHES = (1, 2, 4, 8, 16)  # samples of a microbatch that are tried


Refusals = list[tuple[str, ParallelLayout]]  # the reason, and the refused mesh or layout


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def choices(tried: Mapping[str, Any], fixed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield all combinations of the values that are tried of each field, or of its fixed one."""
    values = [(fixed[key],) if key in fixed else tried[key] for key in tried]
    return (dict(zip(tried, combination)) for combination in product(*values))


def check_fixed(fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a layout that the user has fixed.

    Raises ValueError for unknown keys and for values that none can have.
    """
    if unknown := [key for key in fixed if key not in KEYS]:
        raise ValueError(
            f"layout has the unknown key {unknown[0]!r}: expected some of {', '.join(KEYS)}"
        )
    known, of = {key: CHOICES[key] for key in CHOICES if key in fixed}, SimpleNamespace(**fixed)
    try:
        check_known(of, known)
        check_whole(of, *(key for key in fixed if key not in known))
    except ValueError as error:
        raise ValueError(f"layout {error}") from None
    return dict(fixed)


def can_be_staged(layers: int, stages: int) -> bool:
    try:
        return bool(stage_layers(layers, stages))
    except ValueError:
        return False


# ── why not: publish/tools/memory_rules.js has the same reasons ──


def why_not(shape: ModelShape, layout: ParallelLayout, fixed: Mapping[str, Any] = {}) -> str | None:
    """Return why HybridTrainer can't train this layout, or None if it can."""
    return (
        why_not_mesh(shape, layout, layout.batch, fixed)
        or why_not_schedule(shape, layout, layout.chunks)
        or why_not_options(shape, layout)
    )


def why_not_mesh(
    shape: ModelShape, mesh: ParallelLayout, batch: int, fixed: Mapping[str, Any]
) -> str | None:
    """Return why the model can't be cut by these axes, or None if it can."""
    tp, cp, ep, kv, time, experts = mesh.tp, mesh.cp, mesh.ep, shape.kv, shape.time, shape.experts
    by_heads, staged = fixed.get("context") == "ulysses", can_be_staged(shape.layers, mesh.pp)
    uneven = "context='ulysses': cp doesn't divide the key/value heads of a rank"
    reasons: dict[str, Any] = {
        f"tp doesn't divide {shape.heads} heads": shape.heads % tp,
        f"tp doesn't divide {kv} key/value heads": kv % tp,
        f"tp doesn't divide the {shape.inside:,} features inside an MLP": shape.inside % tp,
        f"{shape.layers} layers can't be shared evenly by pp stages": not staged,
        f"a sample's {time:,} tokens aren't a multiple of 2 · cp": cp > 1 and time % (2 * cp),
        uneven: by_heads and kv // tp % cp,
        "cp needs attention='fused'": cp > 1 and shape.attention == "unfused",
        "ep is of experts, and this model has none": ep > 1 and not experts,
        f"ep doesn't divide {experts} experts": ep > 1 and experts % ep,
        f"dp · ep doesn't divide the batch of {batch:,} samples": batch % (mesh.dp * ep),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def why_not_schedule(shape: ModelShape, layout: ParallelLayout, chunks: int) -> str | None:
    """Return why the layout's pipeline can't have so many chunks, or its schedule; else None."""
    schedule, pp = layout.schedule, layout.pp
    if pp == 1 and (chunks > 1 or schedule != "1f1b"):
        return "chunks and schedule are a pipeline's, and pp is 1"
    if chunks > 1 and schedule not in ("1f1b", "interleaved"):
        return f"chunks above 1 are interleaved, and schedule is {schedule!r}"
    if not can_be_staged(shape.layers, pp * chunks):
        return f"{shape.layers} layers can't be shared evenly by pp · chunks stages"
    if (chunks > 1 or schedule == "interleaved") and layout.microbatches % pp:
        return "chunks need a multiple of pp microbatches"
    return None


def why_not_options(shape: ModelShape, layout: ParallelLayout) -> str | None:
    """Return why the trainer refuses the layout's options, or None if it doesn't."""
    cut, tp = layout.sequence_parallel, layout.tp
    if cut and tp == 1:
        return "sequence_parallel needs tp above 1"
    if cut and shape.time % (tp * layout.cp):
        return f"sequence_parallel: a sample's {shape.time:,} tokens aren't a multiple of tp · cp"
    if cut and shape.experts:
        return "sequence_parallel: a router of experts isn't cut along tp"
    if layout.gradient_dtype and not layout.precision.endswith("-mixed"):
        return "gradient_dtype='fp32' needs a mixed precision"
    return None


# ── which there are ──


def meshes_of(
    shape: ModelShape, cluster: Cluster, batch: int, fixed: Mapping[str, Any], refused: Refusals
) -> Iterator[ParallelLayout]:
    """Yield each way to cut the GPUs into axes that the model can be cut by, as a layout of which
    only the axes count.
    """
    n, per_node = cluster.gpus, cluster.nodes_of
    tried = dict.fromkeys(("tp", "cp", "ep", "pp"), divisors(n))
    tried |= {} if shape.experts else {"ep": [1]}
    for sizes in choices(tried, fixed):
        dp, rest = divmod(n, prod(sizes.values()))
        if rest or fixed.get("dp", dp) != dp:
            continue
        mesh = ParallelLayout(dp=dp, **sizes)
        reason = why_not_mesh(shape, mesh, batch, fixed)
        if mesh.tp > per_node and "tp" not in fixed:
            reason = f"tp is beyond the {per_node} GPUs of a node"
        if reason:
            refused.append((reason, mesh))
        else:
            yield mesh


def layouts_of(
    shape: ModelShape, mesh: ParallelLayout, batch: int, fixed: Mapping[str, Any], refused: Refusals
) -> Iterator[ParallelLayout]:
    """Yield the layouts of one mesh that the trainer accepts."""
    share = batch // (mesh.dp * mesh.ep)
    microbatches = [size for size in MICROBATCHES if share % size == 0]
    if "microbatches" in fixed:
        microbatches = [max(share // fixed["microbatches"], 1)]
    chunks = range(2, (shape.layers + 2) // mesh.pp + 1) if mesh.pp > 1 else ()
    staged = [1, *(c for c in chunks if can_be_staged(shape.layers, mesh.pp * c))]
    # nothing is sharded if there is nobody to share with, and cut along time without tp; fused
    # attention keeps no matrix that "selective" would compute again
    options = {
        "zero_stage": CHOICES["zero_stage"] if mesh.dp * mesh.cp * mesh.ep > 1 else (0,),
        "recompute": KNOWN["recompute"] if shape.attention == "unfused" else ("none", "full"),
        "sequence_parallel": (False, True) if mesh.tp > 1 else (False,),
    }
    others = {key: fixed[key] for key in OTHERS if key in fixed}
    for chosen in choices({"microbatch": microbatches, "chunks": staged}, fixed):
        size, of_rank = chosen.values()
        count, rest = divmod(share, size)
        one = replace(mesh, microbatch=size, microbatches=max(count, 1), **others)
        reason = why_not_schedule(shape, one, of_rank)
        if rest or fixed.get("microbatches", count) != count:
            reason = "microbatch · microbatches isn't the share of the batch"
        if reason:
            refused.append((reason, one))
            continue
        for option in choices(options, fixed):
            layout = replace(one, chunks=of_rank, **option)
            if reason := why_not_options(shape, layout):
                refused.append((reason, layout))
            else:
                yield layout
