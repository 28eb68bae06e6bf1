"""Can a schedule be run, and how long does it take? A simulation answers both. Nothing is computed.

Every action must be there once and in order, and no ranks may wait for each other in a cycle:

    rank 0   0SEND_F1  2RECV_F0
    rank 1   1SEND_F0  1RECV_F1

Under gloo's rules each message starts by itself, and these lists are fine. Under NCCL's, a rank's
messages go one by one: each rank's send waits for a receive that is queued behind the other rank's
send. (The example is pytorch issue 172668.)

    bubble rate = 1 − (mean work of the ranks) / cost
    cost        = the most, over the ranks, of (its last end − its own first start)

Definitions: Qi et al. (arXiv 2401.10241), section 4 and Table 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

from parallel101.trainers.schedules.actions import (
    COMMUNICATION,
    Action,
    Placement,
    Ranks,
    ScheduleError,
    lists_messages,
    needs,
    partner,
)

Schedule = Any  # see schedule.py, which calls what is here
Cost = float | Sequence[float]
Places = dict[Action, tuple[int, int]]  # action → its rank, and its place in the rank's list


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
    schedule: Schedule, rules: str, costs: Sequence[Cost], communication: float
) -> list[Slot]:
    """Let all ranks carry out their lists, each action as soon as what it needs has arrived, and
    return what was computed when. See Schedule.time; `costs` are forward, input_grad, weight_grad.

    Sends and receives are posted in the order of a list and do not stop its rank. Under NCCL's
    rules those of a rank start one by one. Raises ScheduleError for the first thing that is wrong.
    """
    if rules not in ("gloo", "nccl"):
        raise ScheduleError(f"rules={rules!r}: expected 'gloo' or 'nccl'")
    ranks, placement = schedule.ranks, schedule.placement
    where, needed_by = checked(ranks, placement, schedule.microbatches)
    seconds, stages = dict[str, list[float]](), max(placement) + 1
    for kind, name, cost in zip("FIW", ("forward", "input_grad", "weight_grad"), costs):
        each = list(cost) if isinstance(cost, Sequence) else [cost] * stages
        if len(each) != stages or not all(map(is_seconds, each)):
            raise ScheduleError(
                f"{name}={cost!r}: expected seconds, 0 or more: a number, or one for each of the "
                f"{stages} stages"
            )
        seconds[kind] = list(map(float, each))
    seconds["B"] = [i + w for i, w in zip(seconds["I"], seconds["W"])]
    if not is_seconds(communication):
        raise ScheduleError(
            f"communication={communication!r}: expected one number of seconds, 0 or more"
        )
    slots, done = list[Slot](), dict[Action, float]()  # when its result is on its own rank
    now, place = [0.0] * len(ranks), [0] * len(ranks)
    posted: list[dict[Action, float]] = [{} for _ in ranks]  # and not complete: since when

    def needed(rank: int) -> list[tuple[Action, Action]]:
        """Return the parts of the rank's next action, each with what it needs."""
        return [(part, n) for part in ranks[rank][place[rank]].computed() for n in needed_by[part]]

    def startable(rank: int) -> list[Action]:
        """Return the rank's messages that start when the other side does."""
        return list(posted[rank])[: 1 if rules == "nccl" else None]

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(ranks):
            while place[rank] < len(actions) and all(n in done for _, n in needed(rank)):
                action, awaited = actions[place[rank]], [n for _, n in needed(rank)]
                away = [communication if placement[n.stage] != rank else 0.0 for n in awaited]
                start = max(now[rank], *(done[n] + far for n, far in zip(awaited, away)), 0.0)
                if action.kind in COMMUNICATION:
                    posted[rank][action] = start
                else:
                    parts = action.computed()
                    now[rank] = start + sum(seconds[p.kind][p.stage] for p in parts)
                    slots.append(Slot(rank, action, start, now[rank]))
                    done.update(dict.fromkeys(parts, now[rank]))
                place[rank], moved = place[rank] + 1, True
        for rank in range(len(ranks)):
            for send in startable(rank):
                receive = partner(send)
                other = where[receive][0]
                if send.kind.startswith("SEND") and receive in startable(other):
                    done[send] = posted[rank].pop(send)
                    done[receive] = done[send] + communication
                    del posted[other][receive]
                    moved = True

    waiting: dict[int, tuple[int, str]] = {}  # rank → the rank that it waits for, and for what
    for rank, actions in enumerate(ranks):
        if posted[rank]:
            part = next(iter(posted[rank]))
            missing = partner(part)
        elif place[rank] < len(actions):
            part, missing = next((part, n) for part, n in needed(rank) if n not in done)
        else:
            continue
        other = where[missing][0]
        waiting[rank] = other, f"rank {rank}'s {part} waits for {missing} of rank {other}"
    if waiting:
        cycle, rank = list[int](), min(waiting)
        while rank not in cycle:
            cycle.append(rank)
            rank = waiting[rank][0]
        words = "; ".join(waiting[r][1] for r in cycle[cycle.index(rank) :])
        how = " under NCCL's rules, where a rank's sends and receives start one by one"
        how *= rules == "nccl" and any(posted)
        raise ScheduleError(f"the ranks would wait for each other forever{how}: {words}")
    return sorted(slots, key=lambda slot: (slot.rank, slot.start, slot.end))


def checked(
    ranks: Ranks, placement: Placement, microbatches: int
) -> tuple[Places, dict[Action, list[Action]]]:
    """Return the place of each action, and what it needs.

    Raises ScheduleError if an action is missing, appears twice or comes too early, or if a stage is
    on two ranks.
    """
    where: Places = {}
    for rank, actions in enumerate(ranks):
        for place, action in enumerate(actions):
            for part in action.computed():
                if part in where:
                    other, _ = where[part]
                    both = f"rank {rank}" if other == rank else f"ranks {other} and {rank}"
                    raise ScheduleError(f"{part} appears twice: on {both}")
                if placement[part.stage] != rank:
                    raise ScheduleError(
                        f"stage {part.stage} is on rank {placement[part.stage]}, and rank {rank} "
                        f"has {part}"
                    )
                where[part] = rank, place
    if not placement:
        raise ScheduleError("the schedule is empty: expected at least one forward and its backward")
    if idle := set(range(len(ranks))) - set(placement.values()):
        raise ScheduleError(
            f"rank {min(idle)} has no stage: expected at least one on each of the {len(ranks)} "
            "ranks"
        )
    for stage, i in product(range(max(placement) + 1), range(microbatches)):
        has = {kind for kind in "FBIW" if Action(stage, kind, i) in where}
        halves = has & {"I", "W"}
        if "F" not in has:
            raise ScheduleError(
                f"{stage}F{i} is missing: {microbatches} microbatches pass stages 0 to "
                f"{max(placement)}"
            )
        if "B" in has and halves:
            raise ScheduleError(
                f"the backward of microbatch {i} on stage {stage} appears twice: "
                f"{stage}B{i} and {stage}{min(halves)}{i}"
            )
        if "B" not in has and len(halves) < 2:
            lacks = min({"I", "W"} - halves) if halves else "B"
            raise ScheduleError(
                f"{stage}{lacks}{i} is missing: stage {stage} has the forward of microbatch {i}"
            )
    listed = lists_messages(where)
    needed_by = {part: needs(part, placement, where, listed) for part in where}
    for part, (rank, position) in where.items():
        for before in needed_by[part]:
            if before not in where:
                raise ScheduleError(f"rank {rank}: {part} needs {before}, which is missing")
            if where[before][0] == rank and where[before][1] >= position:
                raise ScheduleError(
                    f"rank {rank}: {part} comes too early: it needs {before}, which comes later"
                )
    for part, (rank, _) in where.items():
        if part.kind in COMMUNICATION and partner(part) not in where:
            raise ScheduleError(f"rank {rank}: {part} needs {partner(part)}, which is missing")
    return where, needed_by


def summary(ranks: int, slots: list[Slot]) -> ScheduleTime:
    """Return the figures of what was computed when."""
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


def is_seconds(cost: object) -> bool:
    return isinstance(cost, (int, float)) and 0 <= cost < math.inf
