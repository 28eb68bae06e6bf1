"""A plan as text for a terminal, and as JSON for programs; and what a plan does not model."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from operator import attrgetter
from typing import Any

from parallel101.cost.step_memory import PARTS
from parallel101.cost.step_time import LIMITS
from parallel101.laboratory.planner.planned_layout import (
    PlannedLayout,
    RankedLayouts,
    fixed_words,
    layout_text,
)
from parallel101.laboratory.planner.trainer_call import why_no_model
from parallel101.laboratory.record.units import decimal_bytes, human_seconds
from parallel101.laboratory.viz.run_table import TextTable, as_text

NOT_MODELLED = {
    "allocator fragmentation": "PyTorch's allocator reserves more than the tensors need. Leave "
    "some headroom, or plan with a smaller --memory.",
    "throttling": "At its power limit a GPU lowers its clock, and its products slow down.",
    "stragglers and failures": "One slow GPU slows down all of them, and one that fails stops "
    "them.",
    "congestion between jobs": "The network belongs to this job alone.",
    "data loading": "A batch is there when its step begins.",
    "framework overhead": "Each kernel costs one launch. Python is never slower than the GPU.",
    "the start": "HybridTrainer is given the whole model on each rank, and cuts it before the "
    "first step.",
    "kernel versions": "Each GPU has one table of constants. Other versions of cuBLAS, NCCL or "
    "attention differ.",
    "imperfect overlap": "A message and a computation that overlap don't slow each other down.",
    "uneven routing": "Every expert gets the same number of tokens.",
}


# the columns of the table of layouts
COLUMNS: dict[str, Callable[[PlannedLayout], int | str]] = {
    **{axis: attrgetter(f"layout.{axis}") for axis in ("dp", "tp", "pp", "cp", "ep")},
    "microbatch": lambda of: f"{of.layout.microbatch} × {of.layout.microbatches}",
    "chunks": attrgetter("layout.chunks"),
    "ZeRO": attrgetter("layout.zero_stage"),
    "step": lambda of: human_seconds(of.seconds),
    "range": lambda of: f"{human_seconds(of.time.low)} – {human_seconds(of.time.high)}",
    "tokens/s": lambda of: f"{of.tokens_per_second:,.0f}",
    "MFU": lambda of: f"{of.mfu:.1%}",
    "HFU": lambda of: f"{of.time.hfu:.1%}",
    "first": lambda of: decimal_bytes(of.memory[0].total),
    "last": lambda of: decimal_bytes(of.memory[-1].total),
    "recompute": attrgetter("layout.recompute"),
    "along time": lambda of: "sequence parallel" * of.layout.sequence_parallel,
}
USED = ("cp", "ep", "chunks", "ZeRO")  # left out if all layouts have 0 or 1


# ── text ──


def quick_text(plan: RankedLayouts) -> str:
    """Return the tables of the quick model, for a terminal of about 130 columns."""
    best, shape, cluster = plan.best, plan.shape, plan.cluster
    count, nodes, reason = shape.parameters, cluster.gpus / cluster.nodes_of, why_no_model(shape)
    large = f"{count / 1e9:,.1f} billion" if count >= 1e8 else f"{count:,}"
    where = f" in {nodes:,.0f} nodes of {cluster.nodes_of}" if nodes > 1 else " in a node"
    call = textwrap.indent(f"No model can be built: {reason}." if reason else best.call, "  ")
    parts = [
        f"{plan.model}: {large} parameters, {shape.layers} layers of width {shape.width:,}, "
        f"samples of {shape.time:,} tokens\n{plan.gpus}{where}, "
        f"{decimal_bytes(cluster.memory_bytes)} each; {plan.batch:,} "
        f"sample{'s' * (plan.batch > 1)} or {plan.batch * shape.time:,} tokens a step; "
        f"{best.layout.precision}",
        *map(as_text, (layouts_table(plan), time_table(best), memory_table(best))),
        f"The HybridTrainer that has layout 1, on each rank\n{call}".rstrip(),
    ]
    rows = [[f"{of.count:,}", of.of, of.reason, layout_text(of.example)] for of in plan.why_not]
    tables = [TextTable("Refused", ["", "", "why", "for example"], rows, 1)] * bool(rows)
    rows = [[what, text] for what, text in NOT_MODELLED.items()]
    tables.append(
        TextTable("Not modelled", ["", "what the plan assumes, or leaves to you"], rows, 0)
    )
    return "\n\n".join([*parts, *map(as_text, tables)]) + "\n"


def simulated_text(plan: RankedLayouts) -> str:
    """Return what the trainer itself took on virtual GPUs, and what that changes; or ""."""
    seconds, rows, failed = {}, [], []
    for number, of in enumerate(plan, 1):
        if of.not_simulated:
            failed.append(f"Layout {number} couldn't be run on virtual GPUs: {of.not_simulated}")
        if step := of.simulated:
            seconds[str(number)] = step.seconds
            took = f"{human_seconds(step.seconds)} ({of.difference:+.1%})"
            peaks = [decimal_bytes(step.peak_bytes[stage]) for stage in (0, -1)]
            shown = [human_seconds(of.own_seconds), took, f"{step.mfu:.1%}", *peaks]
            rows.append([str(number), *shown, layout_text(of.layout)])
    order = sorted(seconds, key=seconds.__getitem__)
    note = "The order stays." if order == [*seconds] else f"The order changes: {', '.join(order)}."
    title = "The same steps on virtual GPUs, by the trainer itself, with its memory counted"
    title += " and its own ring attention" * bool(ring_note(plan))
    head = ["", "quick model", "simulated", "MFU", "first", "last", "layout"]
    table = as_text(TextTable(title, head, rows, 6, note if len(rows) > 1 else ""))
    return "".join(f"\n{part}\n" for part in [table] * bool(rows) + failed)


def layouts_table(plan: RankedLayouts) -> TextTable:
    """Return a table with one row for each of the best layouts."""
    columns = {name: [str(text(of)) for of in plan] for name, text in COLUMNS.items()}
    for name, cells in list(columns.items()):
        if not any(cells) or (name in USED and {*cells} <= {"0", "1"}):
            del columns[name]
    title = f"The best {len(plan)} of {plan.tried:,} layouts" if plan.tried > 1 else "The layout"
    title += ", one of each mesh" * (1 < len(plan) == len({of.layout.mesh for of in plan}))
    return TextTable(
        f"{title}{fixed_words(plan)}, by the quick model",
        ["", *columns],
        [[str(number), *cells] for number, cells in enumerate(zip(*columns.values()), 1)],
        numbers=1 + len({*columns} - {"recompute", "along time"}),
        note="first, last: the memory that a GPU of the first and of the last stage needs.\n"
        f"  range: {plan.cluster.kernels.runs_words}.{ring_note(plan)}",
    )


def ring_note(plan: RankedLayouts) -> str:
    """Return a note on the first layout's time along cp with HybridTrainer's ring attention."""
    for number, of in enumerate(plan, 1):
        if of.own_seconds != of.seconds:
            return (
                f"\n  cp: with a fused ring attention. HybridTrainer's own isn't fused, and layout "
                f"{number} takes {human_seconds(of.own_seconds)} with it (see --ring)."
            )
    return ""


def time_table(of: PlannedLayout) -> TextTable:
    """Return a table that shows where the time of a step goes."""
    rows = [
        [human_seconds(seconds), f"{seconds / of.seconds:.1%}", LIMITS[name]]
        for name, seconds in of.parts.items()
        if seconds
    ]
    rows.append([human_seconds(of.seconds), "", "a step"])
    most = of.parts["matmul"] == max(of.parts.values())
    besides = most and not of.time.limit.startswith("the tensor cores")
    note = f"What limits it{' besides the products' * besides}: {of.time.limit}."
    title = f"Time of layout 1: {layout_text(of.layout)}"
    return TextTable(title, ["seconds", "share", "goes to"], rows, 2, note)


def memory_table(of: PlannedLayout) -> TextTable:
    """Return a table of what fills the memory of a GPU of the first and of the last stage."""
    have = of.cluster.memory_bytes
    words = PARTS | {"total": "at the peak of all together"}
    ends = of.memory[0], of.memory[-1]
    rows = [[*(decimal_bytes(getattr(end, n)) for end in ends), text] for n, text in words.items()]
    left = [decimal_bytes(have - end.total) for end in ends]
    rows.append([*left, f"headroom of {decimal_bytes(have)}"])
    return TextTable("Memory of layout 1", ["first stage", "last stage", ""], rows, 2)


# ── JSON ──


def plan_json(plan: RankedLayouts) -> str:
    """Return everything that a plan has, as JSON. All times are seconds, all sizes bytes."""
    shape, cluster = plan.shape, plan.cluster
    found = {
        "model": {**asdict(shape), "parameters": shape.parameters},
        "cluster": {
            "device": cluster.chip.name,
            "gpus": cluster.gpus,
            "nodes_of": cluster.nodes_of,
            "memory": cluster.memory_bytes,
        },
        "batch": {"samples": plan.batch, "tokens": plan.batch * shape.time},
        "fixed": dict(plan.fixed),
        "tried": plan.tried,
        "layouts": [as_json(of) for of in plan],
        "why_not": [asdict(why) for why in plan.why_not],
        "not_modelled": NOT_MODELLED,
    }
    return json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def as_json(of: PlannedLayout) -> dict[str, Any]:
    names = ["seconds", "low", "high", "tokens_per_second", "mfu", "hfu", "parts", "limit"]
    simulated = of.simulated and {
        **{name: getattr(of.simulated, name) for name in ("seconds", "mfu", "hfu", "peak_bytes")},
        "difference": of.difference,
    }
    return {
        "layout": asdict(of.layout),
        **{name: getattr(of.time, name) for name in names},
        "headroom": of.headroom,
        "not_simulated": of.not_simulated,
        "memory": [asdict(stage) for stage in of.memory],
        "simulated": simulated,
        "call": None if why_no_model(of.shape) else of.call,
    }
