"""Finds the rank that makes the others wait in each step, since when, and what it does meanwhile.

    step           1        2        3
    rank 0  ▇▇▇░░░░░░▇▇▇░░░░░░▇▇▇░░░░░░   own time 3     all ranks report 9
    rank 1  ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇   own time 9     6 more than the others
    rank 2  ▇▇▇░░░░░░▇▇▇░░░░░░▇▇▇░░░░░░   own time 3

In each step, a rank's own time (without its waits) is compared with the median of the others'. It
needs the events that `parallel101 run` records on gloo (record/host_time.py).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from parallel101.laboratory.record.host_time import RankStep
from parallel101.laboratory.record.trace import Trace

LEAST_SHARE = 0.05  # of the time of all steps: a rank that is less slower is not reported
LEAST_SECONDS = 1e-3  # in a step
LEAST_STEPS = 2  # one step that is longer once is no slower rank
LEAST_CAUSE = 0.1  # of what a rank takes more: a cause that is less is not named
MOST_CAUSES = 3

# what a thread does
COMPUTING = "computing"
LOADING = "loading data"
COLLECTING = "garbage collection"
QUEUED = "waiting for a free core"
BLOCKED = "blocked: sleep, lock, file or GPU"


class Cause(NamedTuple):
    """An activity that takes a slower rank longer than the others.

    Times are in seconds per slower step, and more than the median of the others.
    """

    what: str  # COMPUTING, LOADING, …
    seconds: float
    where: str  # the "file:line" with most of it; "" for a garbage collection
    seconds_there: float


class SlowerRank(NamedTuple):
    """A rank whose own time is longer than the others'.

    Attributes:
        rank: which.
        seconds: how much longer in a step, on average over its slower steps.
        slower: in how many steps.
        first, last: the first and the last of these. 0 if the run has no steps: then its whole
            time counts as one.
        steps: how many steps were compared. The first is left out.
        causes: what it does meanwhile, the longest first.
    """

    rank: int
    seconds: float
    slower: int
    first: int
    last: int
    steps: int
    causes: list[Cause]


def slower_ranks(trace: Trace) -> list[SlowerRank]:
    """Return the ranks that are slower than the others, the one that costs most time first."""
    ranks: dict[int, dict[int, RankStep]] = defaultdict(dict)
    for span in trace.spans():
        if span.args and "collecting" in span.args:
            step = RankStep(*(span.args[name] for name in RankStep._fields))
            ranks[span.rank][step.step] = step
    if len(ranks) < 2:
        return []
    common = sorted(set.intersection(*map(set, ranks.values())))
    # in the first step, memory is allocated and kernels are chosen
    compared = common[1:] if len(common) > 1 else common
    rows = filter(None, (_compared(ranks, rank, compared) for rank in ranks))
    return sorted(rows, key=lambda row: (-row.seconds * row.slower, row.rank))


def _compared(
    ranks: dict[int, dict[int, RankStep]], rank: int, compared: Sequence[int]
) -> SlowerRank | None:
    measured, others = ranks[rank], [row for other, row in ranks.items() if other != rank]
    more = {k: measured[k].own - statistics.median(row[k].own for row in others) for k in compared}
    elapsed = sum(measured[k].elapsed for k in compared)
    positive = [seconds for seconds in more.values() if seconds > 0]
    if not positive:
        return None
    # steps that are hardly slower don't count, whether most steps are or only some
    enough = max(statistics.median(positive) / 2, LEAST_SHARE * elapsed / len(compared))
    slower = [k for k in compared if more[k] > enough]
    total = sum(more[k] for k in slower)
    least = max(LEAST_SHARE * elapsed, LEAST_SECONDS * len(slower))
    if not slower or len(slower) < min(LEAST_STEPS, len(compared)) or total < least:
        return None
    per_step, causes = total / len(slower), _causes(measured, others, slower, total)
    return SlowerRank(rank, per_step, len(slower), slower[0], slower[-1], len(compared), causes)


def _causes(
    measured: dict[int, RankStep],
    others: Sequence[dict[int, RankStep]],
    slower: Sequence[int],
    total: float,
) -> list[Cause]:
    """Return what took a rank longer than the others in its slower steps, which are `total`."""
    own, *theirs = (_doing([row[k] for k in slower]) for row in (measured, *others))
    more: dict[str, dict[str, float]] = defaultdict(dict)
    for what, where in {key for row in (own, *theirs) for key in row}:
        usual = statistics.median(row.get((what, where), 0.0) for row in theirs)
        more[what][where] = own.get((what, where), 0.0) - usual
    causes, n = [], len(slower)
    for what, lines in more.items():
        where = max(lines, key=lambda line: lines[line])
        if (longer := sum(lines.values())) > LEAST_CAUSE * total:
            causes.append(Cause(what, longer / n, where, lines[where] / n))
    return sorted(causes, key=lambda cause: -cause.seconds)[:MOST_CAUSES]


def _doing(steps: Sequence[RankStep]) -> dict[tuple[str, str], float]:
    """Return the seconds of each activity and line in a rank's own time.

    The seconds are measured. Which lines they belong to is known from samples.
    """
    own, on_cpu, in_queue, collecting = (
        sum(getattr(step, name) for step in steps)
        for name in ("own", "busy", "queued", "collecting")
    )
    loading, busy, idle = (defaultdict[str, float](float) for _ in range(3))
    lines = [line for step in steps for line in step.lines] or [["", False, 1, 1.0]]
    for where, loads, number, used in lines:
        if loads:
            loading[where] += number
        else:
            busy[where] += used
            idle[where] += number - used
    count = sum(number for _, _, number, _ in lines)
    rest = max(0.0, own - collecting)
    doing: dict[tuple[str, str], float] = defaultdict(float)
    doing[COLLECTING, ""] = own - rest
    for where, many in loading.items():
        doing[LOADING, where] = rest * many / count
    rest *= 1 - sum(loading.values()) / count
    # of the loading, it is not known how much of it was on the CPU
    computing = min(rest, max(0.0, on_cpu - collecting))
    # a time in the queue while it was blocked in a call is among the waits
    queued = min(rest - computing, in_queue)
    for what, seconds, weights in (
        (COMPUTING, computing, busy),
        (QUEUED, queued, idle),
        (BLOCKED, rest - computing - queued, idle),
    ):
        total = sum(weights.values())
        for where, weight in weights.items():
            doing[what, where] += seconds * weight / total if total else 0.0
    return doing
