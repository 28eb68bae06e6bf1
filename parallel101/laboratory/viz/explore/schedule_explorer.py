"""An explorer of pipeline schedules: the timeline, the bubble and the activations held.

The reader chooses stages, microbatches, and the times of F (forward), I (gradient of the input) and
W (gradients of the weights). A time is that of all of a rank's stages together, in any unit.

Idle time in closed form: Qi et al. (arXiv 2401.10241), Table 2. If a schedule is impossible, a
sentence says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parallel101.laboratory.viz.explore.explorer import Explorer, ExplorerResult, menu, slider
from parallel101.laboratory.viz.pipeline_timeline import duration
from parallel101.trainers.schedules.gpipe_1f1b_zero_bubble import SCHEDULES
from parallel101.trainers.schedules.schedule import schedule

# and the unit of a prediction without one
QUANTITIES = {"bubble rate": "%", "it is idle": "", "activations held, by rank": ""}


def explore_schedule(
    name: str = "1f1b",
    *,
    stages: int = 4,
    microbatches: int = 8,
    forward: float = 1,
    input_grad: float = 1,
    weight_grad: float = 1,
    chunks: int = 2,
    communication: float = 0,
    predict: str | None = None,
) -> Explorer:
    """Draw a pipeline schedule, and compare its idle time with the closed form.

    Args:
        name: "gpipe", "1f1b", "interleaved", "zb-h1" or "zb-h2".
        stages: number of ranks. chunks: stages on each rank, for "interleaved".
        forward, input_grad, weight_grad: time of F, I and W of one microbatch on one rank.
        communication: time until a result arrives at the next rank.
        predict: one of QUANTITIES, for which the reader is asked before the schedule is shown.

    Raises:
        ValueError: an unknown schedule, or a number outside its slider's range.
    """
    controls = {
        "name": menu("schedule", SCHEDULES, name),
        "stages": slider("stages", 1, 16, stages),
        "microbatches": slider("microbatches", 1, 48, microbatches),
        "chunks": slider("chunks", 1, 4, chunks),
        "forward": slider("F (forward)", 0.5, 4, forward, 0.5),
        "input_grad": slider("I (inputs)", 0.5, 4, input_grad, 0.5),
        "weight_grad": slider("W (weights)", 0.5, 4, weight_grad, 0.5),
        "communication": slider("communication", 0, 2, communication, 0.1),
    }
    return Explorer(controls, run, adjust, quantities=QUANTITIES, predict=predict)


def adjust(controls: Mapping[str, Any], changed: str) -> str:
    """Switch `chunks` off unless the schedule is interleaved, and return a sentence about it."""
    name = controls["name"].value
    controls["chunks"].disabled = name != "interleaved"
    return (
        f"{name} has one stage on each rank, so chunks has no effect."
        if name != "interleaved"
        else ""
    )


def run(
    name: str,
    stages: int,
    microbatches: int,
    chunks: int,
    forward: float,
    input_grad: float,
    weight_grad: float,
    communication: float,
) -> ExplorerResult:
    """Time the schedule.

    Each of a rank's `chunks` stages takes its part of F, I and W. Raises ScheduleError for an
    impossible schedule.
    """
    v = chunks if name == "interleaved" else 1
    times = schedule(name, stages=stages, microbatches=microbatches, chunks=v).time(
        forward / v, input_grad / v, weight_grad / v, communication
    )
    work = microbatches * (forward + input_grad + weight_grad)
    cost = work / (1 - times.bubble_rate)
    idle = idle_time(name, stages, microbatches, v, forward, input_grad, weight_grad, communication)
    rows = [
        ("a rank works", duration(work, False), f"M (F + I + W) = {duration(work, False)}"),
        (
            "it is idle",
            duration(cost - work, False),
            "–" if idle is None else f"{IDLE[name]} = {duration(idle, False)}",
        ),
        (
            "bubble rate",
            f"{100 * times.bubble_rate:.1f} %",
            "–" if idle is None else f"{100 * idle / (work + idle):.1f} %",
        ),
        ("activations held, by rank", ", ".join(map(str, times.peak_activations)), ""),
    ]
    note = (
        ""
        if idle is not None
        else (
            "The closed form needs free communication, enough microbatches, and W not longer than "
            "F and I."
        )
    )
    exact: dict[str, Sequence[float]] = {
        "bubble rate": [100 * times.bubble_rate],
        "it is idle": [cost - work],
        "activations held, by rank": times.peak_activations,
    }
    return ExplorerResult(
        times.timeline(title=f"{name} on {stages} ranks"),
        rows,
        ("this schedule", "closed form"),
        note,
        exact,
    )


IDLE = {
    "gpipe": "(P − 1)(F + I + W)",
    "1f1b": "(P − 1)(F + I + W)",
    "interleaved": "(P − 1)(F + I + W) / v",
    "zb-h1": "(P − 1)(F + I − W)",
    "zb-h2": "(P − 1)(F + I − 2W)",
}


def idle_time(
    name: str, p: int, m: int, v: int, f: float, i: float, w: float, communication: float
) -> float | None:
    """Return a rank's idle time in closed form, in the unit of F; None where it does not hold."""
    if (
        communication
        or m < (2 * p - 1 if name == "zb-h2" else p)
        or (name.startswith("zb") and (w > min(f, i) or 2 * w > f + i))
    ):
        return None
    return (p - 1) * {"zb-h1": f + i - w, "zb-h2": f + i - 2 * w}.get(name, (f + i + w) / v)
