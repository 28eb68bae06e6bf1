"""Can a schedule be run?

This file proves it without running it: every action is there once and in order, and no ranks wait
for each other in a cycle.

    rank 0   0SEND_F1  2RECV_F0
    rank 1   1SEND_F0  1RECV_F1

Under gloo's rules each message starts by itself, and these lists are fine. Under NCCL's, a rank's
messages go one by one: each rank's send waits for a receive that is queued behind the other rank's
send.

The example is pytorch issue 172668. time.py computes how long a schedule takes.
"""

from __future__ import annotations

from collections.abc import Mapping

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


def check(
    ranks: Ranks, placement: Placement, microbatches: int, rules: str
) -> list[tuple[int, Action]]:
    """Return (rank, action) of all actions, in an order in which they can be carried out.

    Raises ScheduleError for the first thing that is wrong.
    """
    if rules not in ("gloo", "nccl"):
        raise ScheduleError(f"rules={rules!r}: expected 'gloo' or 'nccl'")
    where = positions(ranks, placement)
    listed = lists_messages(where)
    check_complete(where, placement, microbatches, len(ranks))
    for rank, actions in enumerate(ranks):
        for place, part in ((i, part) for i, a in enumerate(actions) for part in a.computed()):
            for needed in needs(part, placement, where, listed):
                position = where.get(needed)
                if position is None:
                    raise ScheduleError(f"rank {rank}: {part} needs {needed}, which is missing")
                if position[0] == rank and position[1] >= place:
                    raise ScheduleError(
                        f"rank {rank}: {part} comes too early: it needs {needed}, which comes later"
                    )
    return progress(ranks, placement, where, listed, queued=rules == "nccl")


def positions(ranks: Ranks, placement: Placement) -> dict[Action, tuple[int, int]]:
    """Return the rank of each action and its place in the rank's list.

    Raises ScheduleError if one appears twice, or a stage is on two ranks.
    """
    where: dict[Action, tuple[int, int]] = {}
    for rank, actions in enumerate(ranks):
        for place, action in enumerate(actions):
            for part in action.computed():
                if part in where:
                    other = where[part][0]
                    both = f"rank {rank}" if other == rank else f"ranks {other} and {rank}"
                    raise ScheduleError(f"{part} appears twice: on {both}")
                if placement[part.stage] != rank:
                    raise ScheduleError(
                        f"stage {part.stage} is on rank {placement[part.stage]}, and rank "
                        f"{rank} has {part}"
                    )
                where[part] = rank, place
    return where


def check_complete(
    where: Mapping[Action, object], placement: Placement, microbatches: int, ranks: int
) -> None:
    """Raise ScheduleError unless each stage has each microbatch's forward, and its backward,
    whole or in both halves.
    """
    if not placement:
        raise ScheduleError("the schedule is empty: expected at least one forward and its backward")
    idle = set(range(ranks)) - set(placement.values())
    if idle:
        raise ScheduleError(
            f"rank {min(idle)} has no stage: expected at least one on each of the {ranks} ranks"
        )
    for stage in range(max(placement) + 1):
        for i in range(microbatches):
            has = {kind for kind in "FBIW" if Action(stage, kind, i) in where}
            if "F" not in has:
                raise ScheduleError(
                    f"{stage}F{i} is missing: {microbatches} microbatches pass stages 0 to "
                    f"{max(placement)}"
                )
            if "B" in has and has & {"I", "W"}:
                twice = min(has & {"I", "W"})
                raise ScheduleError(
                    f"the backward of microbatch {i} on stage {stage} appears twice: "
                    f"{stage}B{i} and {stage}{twice}{i}"
                )
            if "B" not in has and not has >= {"I", "W"}:
                lacks = min({"I", "W"} - has) if has & {"I", "W"} else "B"
                raise ScheduleError(
                    f"{stage}{lacks}{i} is missing: stage {stage} has the forward of microbatch {i}"
                )


def progress(
    ranks: Ranks,
    placement: Placement,
    where: Mapping[Action, tuple[int, int]],
    listed: bool,
    queued: bool,
) -> list[tuple[int, Action]]:
    """Let all ranks go as far as they can, and return the order in which they went.

    Raises ScheduleError with the cycle if they can't reach the end.

    Sends and receives are posted in the order of a list and do not stop its rank. `queued`: those
    of a rank start one by one.
    """
    done, order = set[Action](), list[tuple[int, Action]]()
    place = [0] * len(ranks)
    posted: list[list[Action]] = [[] for _ in ranks]  # and not complete
    for part, (rank, _) in where.items():
        if part.kind in COMMUNICATION and partner(part) not in where:
            raise ScheduleError(f"rank {rank}: {part} needs {partner(part)}, which is missing")
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(ranks):
            while place[rank] < len(actions):
                parts = actions[place[rank]].computed()
                if not all(
                    needed in done
                    for part in parts
                    for needed in needs(part, placement, where, listed)
                ):
                    break
                if parts[0].kind in COMMUNICATION:
                    posted[rank].append(parts[0])
                else:
                    done.update(parts)
                order.append((rank, actions[place[rank]]))
                place[rank], moved = place[rank] + 1, True
        for rank in range(len(ranks)):
            for action in posted[rank][: 1 if queued else None]:
                other = partner(action)
                there = posted[where[other][0]]
                if other in (there[:1] if queued else there):
                    posted[rank].remove(action)
                    there.remove(other)
                    done |= {action, other}
                    moved = True
    waiting: dict[int, tuple[int, str]] = {}  # rank → the rank that it waits for, and for what
    for rank, actions in enumerate(ranks):
        if posted[rank]:
            part, needed = posted[rank][0], partner(posted[rank][0])
        elif place[rank] < len(actions):
            parts = actions[place[rank]].computed()
            part, needed = next(
                (p, n) for p in parts for n in needs(p, placement, where, listed) if n not in done
            )
        else:
            continue
        awaited, _ = where[needed]
        waiting[rank] = awaited, f"rank {rank}'s {part} waits for {needed} of rank {awaited}"
    if waiting:
        cycle, rank = [], min(waiting)
        while rank not in cycle:
            cycle.append(rank)
            rank = waiting[rank][0]
        words = "; ".join(waiting[r][1] for r in cycle[cycle.index(rank) :])
        how = (
            " under NCCL's rules, where a rank's sends and receives start one by one"
            if queued and any(posted)
            else ""
        )
        raise ScheduleError(f"the ranks would wait for each other forever{how}: {words}")
    return order
