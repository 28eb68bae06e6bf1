"""Pipeline schedules as data: for each rank the list of what it does, in
torch.distributed.pipelining's text form.

The trainers run these lists. Here they are checked and timed by a simulation, which computes
nothing. Those that were published are in gpipe_1f1b_zero_bubble.py.

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
from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from typing import Any, NamedTuple

from parallel101.trainers.expect import expect
from parallel101.trainers.schedules.actions import (
    COMMUNICATION,
    FSDP,
    Action,
    ScheduleError,
    lists_messages,
    needs,
    partner,
)
from parallel101.trainers.schedules.gpipe_1f1b_zero_bubble import SCHEDULES

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


class Schedule:
    """For each rank the actions of a step, in order.

    Attributes:
        ranks: by rank, the parsed actions.
        placement: by global stage, the rank that has it.
        microbatches: how many a step has.

    Example:
        >>> schedule = p101.Schedule([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])
        >>> schedule.check("nccl")
        >>> times = schedule.time(1, 1, 1)
        >>> times.makespan, times.peak_activations
        (9.0, [2, 1])
    """

    def __init__(self, actions: Sequence[Sequence[str]]):
        lists = isinstance(actions, (list, tuple))
        lists = lists and all(isinstance(of_rank, (list, tuple)) for of_rank in actions)
        expected = "a list for each rank, such as [['0F0', '0B0'], ['1F0', '1B0']]"
        expect("actions", actions, lists, expected, ScheduleError)
        self.ranks = tuple(tuple(map(Action.parse, of_rank)) for of_rank in actions)
        first = {part.stage: rank for rank, part in reversed(list(self.parts()))}
        self.placement = dict(sorted(first.items()))
        self.microbatches = 1 + max((part.microbatch for _, part in self.parts()), default=-1)

    @property
    def actions(self) -> list[list[str]]:
        """The actions by rank, as texts: a copy, so that nothing changes what `check` has seen."""
        return [[str(action) for action in of_rank] for of_rank in self.ranks]

    def parts(self) -> Iterator[tuple[int, Action]]:
        """Yield (rank, action) of everything that is computed or sent, with overlaps split up."""
        for rank, of_rank in enumerate(self.ranks):
            for action in of_rank:
                yield from ((rank, part) for part in action.computed())

    def check(self, rules: str = "gloo") -> None:
        """Raise ScheduleError if the schedule cannot be run, and name the action: missing, twice,
        too early, or waiting in a cycle.

        Args:
            rules: "gloo" or "nccl", for sends and receives that are in the lists. On gloo each is
                under way by itself. On NCCL those of a rank go one by one, in the order of its
                list, as torch's pipelining posts them. Lists of compute only have no such cycle:
                our executor has a group for each direction.
        """
        simulate(self, rules, (0.0, 0.0, 0.0), 0.0)

    def time(
        self,
        forward: Cost = 1.0,
        input_grad: Cost = 1.0,
        weight_grad: Cost = 1.0,
        communication: float = 0.0,
    ) -> ScheduleTime:
        """Return the time that a step would take; nothing is computed.

        Raises ScheduleError for a schedule that cannot be run.

        Args:
            forward, input_grad, weight_grad: seconds of F, I and W, each a number, or one for each
                global stage. B takes I + W, and its gradient leaves at its end. What a backward
                computes again belongs to I.
            communication: seconds until a result arrives at another rank, one number. It occupies
                neither rank.
        """
        slots = simulate(self, "gloo", (forward, input_grad, weight_grad), communication)
        by_rank = [[slot for slot in slots if slot.rank == r] for r in range(len(self.ranks))]
        cost = max(of_rank[-1].end - of_rank[0].start for of_rank in by_rank)
        work = sum(slot.end - slot.start for slot in slots) / len(self.ranks)
        peaks = []
        for of_rank in by_rank:
            parts = (sorted(s.action.computed(), key=lambda p: p.kind != "F") for s in of_rank)
            change = [{"F": 1, "I": 0}.get(part.kind, -1) for row in parts for part in row]
            peaks.append(max(accumulate(change)))
        makespan = max(slot.end for slot in slots) - min(slot.start for slot in slots)
        return ScheduleTime(makespan, 1 - work / cost if cost else 0.0, peaks, slots)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.actions == other.actions

    def __repr__(self) -> str:
        counts = len(self.ranks), len(self.placement), self.microbatches
        return "<Schedule: {} ranks, {} stages, {} microbatches>".format(*counts)

    def to_csv(self) -> str:
        """Return one line per rank, as torch.distributed.pipelining writes and reads schedules."""
        return "".join(",".join(of_rank) + "\n" for of_rank in self.actions)

    @classmethod
    def from_csv(cls, text: str) -> Schedule:
        """Read torch's CSV: compute only or with its sends and receives, whose order is kept.

        Empty cells (idle slots) and FSDP's actions (UNSHARD, RESHARD, REDUCE_GRAD) are left out.
        """
        rows = [[cell.strip() for cell in line.split(",")] for line in text.strip().splitlines()]
        return cls([[cell for cell in row if cell and not cell.endswith(FSDP)] for row in rows])


def schedule(name: str, *, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return a published schedule.

    Args:
        name: "gpipe", "1f1b", "interleaved", "zb-h1" or "zb-h2".
        stages: number of ranks P. microbatches: M in a step.
        chunks: stages on each rank, for "interleaved"; global stage s is on rank s mod P.

    Idle time of a step, for forward F, input gradient B, weight gradient W, free communication and
    M ≥ P (zb-h2: M ≥ 2P − 1): GPipe and 1F1B (P−1)(F+B+W), interleaved that over chunks, ZB-H1
    (P−1)(F+B−W), ZB-H2 (P−1)(F+B−2W). (arXiv 2401.10241, Table 2.) Raises ScheduleError for what
    cannot be.

    Example:
        >>> p101.schedule("1f1b", stages=2, microbatches=3).actions
        [['0F0', '0F1', '0B0', '0F2', '0B1', '0B2'], ['1F0', '1B0', '1F1', '1B1', '1F2', '1B2']]
    """
    for what, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        right = type(value) is int and value > 0
        expect(what, value, right, "a whole number, 1 or more", ScheduleError)
    known = isinstance(name, str) and name in SCHEDULES
    expect("schedule", name, known, f"one of {', '.join(map(repr, SCHEDULES))}", ScheduleError)
    expected = f"1, since {name!r} has one stage per rank; or the schedule 'interleaved'"
    expect("chunks", chunks, name == "interleaved" or chunks == 1, expected, ScheduleError)
    right = name != "interleaved" or microbatches % stages == 0
    expected = f"a multiple of stages={stages}: 'interleaved' runs them in groups of one per rank"
    expect("microbatches", microbatches, right, expected, ScheduleError)
    return Schedule([SCHEDULES[name](rank, stages, microbatches, chunks) for rank in range(stages)])


def schedule_for(
    given: str | Schedule, stages: int, microbatches: int | None, chunks: int
) -> Schedule:
    """Return the schedule that a trainer on this many ranks was given.

    Raises ScheduleError if it is for other numbers.
    """
    if not isinstance(given, Schedule):
        number = stages if microbatches is None else microbatches
        return schedule(given, stages=stages, microbatches=number, chunks=chunks)
    has = len(given.ranks), given.microbatches, len(given.placement)
    if (stages, microbatches or has[1]) != has[:2] or chunks * stages not in (stages, has[2]):
        raise ScheduleError(
            f"the schedule is for {has[0]} ranks, {has[1]} microbatches and {has[2]} stages: "
            f"expected one for the {stages} ranks of this pipeline, and microbatches and chunks "
            f"(here {microbatches} and {chunks}) left out, or the same"
        )
    return given


# ── the simulation ──


def simulate(
    schedule: Schedule, rules: str, costs: Sequence[Any], communication: Any
) -> list[Slot]:
    """Let all ranks carry out their lists, each action as soon as what it needs has arrived, and
    return what was computed when. See Schedule.time; `costs` are forward, input_grad, weight_grad.

    Sends and receives are posted in the order of a list and do not stop its rank. Under NCCL's
    rules those of a rank start one by one. Raises ScheduleError for the first thing that is wrong.
    """
    expect("rules", rules, rules in ("gloo", "nccl"), "'gloo' or 'nccl'", ScheduleError)
    ranks, placement = schedule.ranks, schedule.placement
    where, needed_by = checked(schedule)
    seconds, stages = dict[str, list[float]](), max(placement) + 1
    names = ("forward", "input_grad", "weight_grad", "communication")
    for kind, name, cost in zip(("F", "I", "W", ""), names, (*costs, communication)):
        each = list(cost) if kind and isinstance(cost, Sequence) else [cost] * stages
        right = all(isinstance(one, int | float) and 0 <= one < math.inf for one in each)
        each_stage = f"seconds, 0 or more: a number, or one for each of the {stages} stages"
        expected = each_stage if kind else "one number of seconds, 0 or more"
        expect(name, cost, right and len(each) == stages, expected, ScheduleError)
        seconds[kind] = each
    seconds["B"] = [i + w for i, w in zip(seconds["I"], seconds["W"])]
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


def checked(schedule: Schedule) -> tuple[Places, dict[Action, list[Action]]]:
    """Return the place of each action, and what it needs.

    Raises ScheduleError if an action is missing, appears twice or comes too early, or if a stage is
    on two ranks.
    """
    ranks, placement, microbatches = schedule.ranks, schedule.placement, schedule.microbatches
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
        if "F" in has and "B" in has and halves:
            raise ScheduleError(
                f"the backward of microbatch {i} on stage {stage} appears twice: "
                f"{stage}B{i} and {stage}{min(halves)}{i}"
            )
        for kind in "FIW" if halves else "FB":
            if kind not in has:
                why = f"stage {stage} has the forward of microbatch {i}"
                if kind == "F":
                    why = f"{microbatches} microbatches pass stages 0 to {max(placement)}"
                raise ScheduleError(f"{stage}{kind}{i} is missing: {why}")
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
