"""The time of a schedule, and the activations that it holds: a simulation of events, in which
nothing is computed.

    bubble rate = 1 − (mean work of the ranks) / cost
    cost        = the most, over the ranks, of (its last end − its own first start)

Whether a schedule can run at all is in check.py. Definitions: Qi et al. (arXiv 2401.10241),
section 4 and Table 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from parallel101.trainers.schedules.actions import (
    COMMUNICATION,
    Action,
    Placement,
    ScheduleError,
    lists_messages,
    needs,
    partner,
)

Cost = float | Sequence[float]


class Slot(NamedTuple):
    """An action in time."""

    rank: int
    action: Action
    start: float
    end: float


class ScheduleTime(NamedTuple):
    makespan: float  # seconds from the first start to the last end
    bubble_rate: float  # see above
    # by rank: (stage, microbatch) pairs from the start of F to the end of B or W, at most
    peak_activations: list[int]
    slots: list[Slot]  # every computed action, by rank and time

    def timeline(self, title: str = "Pipeline schedule") -> Any:
        """Draw the schedule.

        A notebook shows it; elsewhere call `.save("schedule.html")`.
        """
        from parallel101.laboratory.viz.pipeline_timeline import pipeline_scene

        return pipeline_scene(self, title=title)


def simulate(
    order: Sequence[tuple[int, Action]],
    placement: Placement,
    forward: Cost,
    input_grad: Cost,
    weight_grad: Cost,
    communication: float,
) -> ScheduleTime:
    """Run (rank, action) in an order in which they can be carried out, each action as soon as what
    it needs has arrived. See Schedule.time.
    """
    stages = max(placement) + 1
    costs = {
        "F": per_stage("forward", forward, stages),
        "I": per_stage("input_grad", input_grad, stages),
        "W": per_stage("weight_grad", weight_grad, stages),
    }
    costs["B"] = [i + w for i, w in zip(costs["I"], costs["W"])]
    if not isinstance(communication, (int, float)) or not 0 <= communication < math.inf:
        raise ScheduleError(
            f"communication={communication!r}: expected one number of seconds, 0 or more"
        )
    parts = {part for _, action in order for part in action.computed()}
    listed = lists_messages(parts)
    ready: dict[Action, float] = {}  # when an action's result is on its own rank
    now, slots = [0.0] * (1 + max(placement.values())), list[Slot]()
    for rank, action in order:
        if action.kind.startswith("RECV"):  # posted ahead: who needs it waits for the send
            continue
        start = now[rank]
        for part in action.computed():
            for needed in needs(part, placement, parts, listed):
                source = partner(needed) if needed.kind in COMMUNICATION else needed
                away = placement[source.stage] != rank
                start = max(start, ready[source] + (communication if away else 0.0))
        if action.kind in COMMUNICATION:
            ready[action] = start
        else:
            now[rank] = start + sum(costs[part.kind][part.stage] for part in action.computed())
            slots.append(Slot(rank, action, start, now[rank]))
            ready.update(dict.fromkeys(action.computed(), now[rank]))
    return summary(len(now), sorted(slots, key=lambda slot: (slot.rank, slot.start, slot.end)))


def summary(ranks: int, slots: list[Slot]) -> ScheduleTime:
    by_rank = [[slot for slot in slots if slot.rank == rank] for rank in range(ranks)]
    cost = max(of_rank[-1].end - of_rank[0].start for of_rank in by_rank)
    work = sum(slot.end - slot.start for slot in slots) / ranks
    peaks = []
    for of_rank in by_rank:
        held = peak = 0
        for slot in of_rank:
            kinds = [part.kind for part in slot.action.computed()]
            held += kinds.count("F")
            peak = max(peak, held)
            held -= kinds.count("B") + kinds.count("W")
        peaks.append(peak)
    makespan = max(slot.end for slot in slots) - min(slot.start for slot in slots)
    return ScheduleTime(makespan, 1 - work / cost if cost else 0.0, peaks, slots)


def per_stage(name: str, cost: Cost, stages: int) -> list[float]:
    """Return one number for each global stage.

    Raises ScheduleError for other numbers of them, and for negative ones.
    """
    costs = list(cost) if isinstance(cost, Sequence) else [cost] * stages
    if len(costs) != stages or not all(
        isinstance(c, (int, float)) and 0 <= c < math.inf for c in costs
    ):
        raise ScheduleError(
            f"{name}={cost!r}: expected seconds, 0 or more: a number, or one for each of the "
            f"{stages} stages"
        )
    return [float(c) for c in costs]
