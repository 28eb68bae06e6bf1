"""An explorer of memory: the bytes of weights, gradients and optimizer state on a rank.

one process   ▇▇▇▇ ▇▇▇▇ ▇▇▇▇▇▇▇▇▇▇▇▇     120 GB
ZeRO-2        ▇▇▇▇ ▇/// ▇///////////    16.6 GB

The reader chooses parameters, ranks, ZeRO stage and precision. Nothing runs:
parallel101.cost.model_states counts.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ipywidgets

from parallel101.cost.model_states import PRECISIONS, ModelStates, model_states
from parallel101.laboratory.record.units import decimal_bytes
from parallel101.laboratory.viz.explore.explorer import STYLE, WIDE, Explorer, ExplorerResult, menu
from parallel101.laboratory.viz.memory_per_rank import memory_scene

KINDS = ("weights", "gradients", "optimizer state")
QUANTITIES = dict.fromkeys(("total", *KINDS), "GB")  # and the unit of a prediction without one
MOST_DRAWN = 8  # ranks; of more, only rank 0 is drawn


def explore_memory(
    billions: float = 7.5,
    *,
    ranks: int = 64,
    zero_stage: int = 2,
    precision: str = "mixed",
    predict: str | None = None,
) -> Explorer:
    """Draw what a rank holds of a model's states while it is trained with Adam.

    Args:
        billions: of parameters.
        ranks: number of ranks that share the states.
        zero_stage: 0 (none shared), 1, 2 or 3.
        precision: one of `parallel101.cost.PRECISIONS`.
        predict: one of QUANTITIES, for which the reader is asked before the bytes are shown.

    Raises:
        ValueError: an unknown setting, or a number outside its field's range.
    """
    controls = {
        "billions": field(
            "parameters / 10⁹", ipywidgets.BoundedFloatText, 0.001, 10_000.0, billions
        ),
        "ranks": field("ranks", ipywidgets.BoundedIntText, 1, 65_536, ranks),
        "zero_stage": menu("ZeRO stage", (0, 1, 2, 3), zero_stage),
        "precision": menu("precision", PRECISIONS, precision),
    }
    return Explorer(controls, run, quantities=QUANTITIES, predict=predict)


def field(name: str, kind: Any, low: float, high: float, value: float) -> Any:
    """Return a field for a number. Raises ValueError if the value is out of range."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name}={value!r}: expected a number from {low} to {high}")
    return kind(value, description=name, min=low, max=high, layout=WIDE, style=STYLE)


def run(billions: float, ranks: int, zero_stage: int, precision: str) -> ExplorerResult:
    """Count the bytes, and draw them below those of one process."""
    parameters = round(billions * 1e9)
    alone = model_states(parameters, precision=precision)
    shared = model_states(parameters, ranks, zero_stage=zero_stage, precision=precision)
    drawn = range(ranks) if ranks <= MOST_DRAWN else range(1)
    panels = {
        "one process": holdings(alone, range(1)),
        f"ZeRO-{zero_stage} on {ranks} ranks" if zero_stage else f"{ranks} replicas": holdings(
            shared, drawn
        ),
    }
    rows = [
        (kind, decimal_bytes(of), decimal_bytes(one)) for kind, of, one in zip(KINDS, shared, alone)
    ]
    rows.append(("total", decimal_bytes(shared.total), decimal_bytes(alone.total)))
    note = PRECISIONS[precision].words + (
        " Rank 0 is drawn; the others hold as much." if ranks > MOST_DRAWN else ""
    )
    exact = {kind: [count] for kind, count in zip((*KINDS, "total"), (*shared, shared.total))}
    return ExplorerResult(
        memory_scene(panels, title="Model states per rank"),
        rows,
        ("each rank", "one process"),
        note,
        exact,
    )


def holdings(states: ModelStates, ranks: range) -> Any:
    """Return these bytes for each of the ranks that are drawn, as memory_scene takes them."""
    return SimpleNamespace(
        ranks=ranks, bytes={kind: [round(count)] * len(ranks) for kind, count in zip(KINDS, states)}
    )
