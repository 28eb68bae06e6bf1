"""A plan as text for a terminal, and as JSON for programs; and what a plan does not model."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from parallel101.cost.step_memory import PARTS
from parallel101.cost.step_time import LIMITS
from parallel101.laboratory.planner.layout_rules import AXES
from parallel101.laboratory.planner.planned_layout import PlannedLayout, RankedLayouts
from parallel101.laboratory.planner.search import layout_text
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


# ── text ──


def quick_text(plan: RankedLayouts) -> str:
    """Return the tables of the quick model, for a terminal of about 130 columns."""
    best = plan.best
    reason = why_no_model(best.shape)
    call = f"No model can be built: {reason}." if reason else best.call
    assumed = [[what, text] for what, text in NOT_MODELLED.items()]
    head = ["", "what the plan assumes, or leaves to you"]
    parts = [
        heading(plan),
        as_text(layouts_table(plan)),
        as_text(time_table(best)),
        as_text(memory_table(best)),
        "The HybridTrainer that has layout 1, on each rank\n"
        + textwrap.indent(call, "  ").rstrip(),
        as_text(TextTable("Not modelled", head, assumed, 0)),
    ]
    if plan.why_not:
        rows = [
            [f"{why.count:,}", why.of, why.reason, layout_text(why.example)] for why in plan.why_not
        ]
        head = ["", "", "why", "for example"]
        parts.insert(-1, as_text(TextTable("Refused", head, rows, 1)))
    return "\n\n".join(parts) + "\n"


def simulated_text(plan: RankedLayouts) -> str:
    """Return what the trainer itself took on virtual GPUs, and what that changes; or ""."""
    rows, seconds, failed = [], {}, []
    for number, of in enumerate(plan, 1):
        if of.not_simulated:
            failed.append(f"Layout {number} couldn't be run on virtual GPUs: {of.not_simulated}")
        if step := of.simulated:
            seconds[str(number)] = step.seconds
            took = f"{human_seconds(step.seconds)} ({of.difference:+.1%})"
            peaks = [decimal_bytes(step.peak_bytes[stage]) for stage in (0, -1)]
            shown = [human_seconds(of.own_seconds), took, f"{step.mfu:.1%}", *peaks]
            rows.append([str(number), *shown, layout_text(of.layout)])
    head = ["", "quick model", "simulated", "MFU", "first", "last", "layout"]
    order = sorted(seconds, key=seconds.__getitem__)
    note = f"The order changes: {', '.join(order)}."
    note = "The order stays." if order == [*seconds] else note
    title = "The same steps on virtual GPUs, by the trainer itself, with its memory counted"
    title += " and its own ring attention" * bool(ring_note(plan))
    table = as_text(TextTable(title, head, rows, 6, note if len(rows) > 1 else ""))
    return "".join(f"\n{part}\n" for part in [table] * bool(rows) + failed)


def heading(plan: RankedLayouts) -> str:
    """Return the model, the cluster and the batch, in two lines."""
    shape, cluster = plan.shape, plan.cluster
    count, nodes = shape.parameters, cluster.gpus / cluster.nodes_of
    large = f"{count / 1e9:,.1f} billion" if count >= 1e8 else f"{count:,}"
    where = f" in {nodes:,.0f} nodes of {cluster.nodes_of}" if nodes > 1 else " in a node"
    return (
        f"{model_words(plan)}: {large} parameters, {shape.layers} layers of width "
        f"{shape.width:,}, samples of {shape.time:,} tokens\n"
        f"{gpus_words(plan)}{where}, {decimal_bytes(cluster.memory_bytes)} each; {plan.batch:,} "
        f"sample{'s' * (plan.batch > 1)} or {plan.batch * shape.time:,} tokens a step; "
        f"{plan.best.layout.precision}"
    )


def model_words(plan: RankedLayouts) -> str:
    return plan.shape.name or "The model"


def gpus_words(plan: RankedLayouts) -> str:
    return f"{plan.cluster.gpus:,} {plan.cluster.chip.name}{'s' * (plan.cluster.gpus > 1)}"


# of the table of layouts, after the axes
COLUMNS: dict[str, Callable[[PlannedLayout], str]] = {
    "microbatch": lambda of: f"{of.layout.microbatch} × {of.layout.microbatches}",
    "chunks": lambda of: str(of.layout.chunks),
    "ZeRO": lambda of: str(of.layout.zero_stage),
    "step": lambda of: human_seconds(of.seconds),
    "range": lambda of: f"{human_seconds(of.time.low)} – {human_seconds(of.time.high)}",
    "tokens/s": lambda of: f"{of.tokens_per_second:,.0f}",
    "MFU": lambda of: f"{of.mfu:.1%}",
    "HFU": lambda of: f"{of.time.hfu:.1%}",
    "first": lambda of: decimal_bytes(of.memory[0].total),
    "last": lambda of: decimal_bytes(of.memory[-1].total),
    "recompute": lambda of: of.layout.recompute,
    "along time": lambda of: "sequence parallel" * of.layout.sequence_parallel,
}
USED = ("cp", "ep", "chunks", "ZeRO")  # left out if all layouts have 0 or 1


def layouts_table(plan: RankedLayouts) -> TextTable:
    """Return a table with one row for each of the best layouts."""
    columns = {axis: [str(getattr(of.layout, axis)) for of in plan] for axis in AXES}
    columns |= {name: [text(of) for of in plan] for name, text in COLUMNS.items()}
    head = [
        name
        for name, cells in columns.items()
        if any(cells) and not (name in USED and {*cells} <= {"0", "1"})
    ]
    rows = zip(map(str, range(1, len(plan) + 1)), *(columns[name] for name in head))
    fixed = ", ".join(f"{key}={value}" for key, value in plan.fixed.items())
    title = f"The best {len(plan)} of {plan.tried:,} layouts" if plan.tried > 1 else "The layout"
    title += ", one of each mesh" * (1 < len(plan) == len({of.layout.mesh for of in plan}))
    return TextTable(
        f"{title}{f' with {fixed}' if fixed else ''}, by the quick model",
        ["", *head],
        [list(row) for row in rows],
        numbers=1 + len({*head} - {"recompute", "along time"}),
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
    return TextTable(
        f"Time of layout 1: {layout_text(of.layout)}",
        ["seconds", "share", "goes to"],
        rows,
        2,
        note,
    )


def memory_table(of: PlannedLayout) -> TextTable:
    """Return a table of what fills the memory of a GPU of the first and of the last stage."""
    have = of.cluster.memory_bytes
    words = [*PARTS.values(), "at the peak of all together", f"headroom of {decimal_bytes(have)}"]
    columns = [
        [*(getattr(stage, name) for name in PARTS), stage.total, have - stage.total]
        for stage in (of.memory[0], of.memory[-1])
    ]
    rows = [[*map(decimal_bytes, row), name] for *row, name in zip(*columns, words)]
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
