"""Finds the rank that makes the others wait in each step, since when, and what it does meanwhile.

    step           1        2        3
    rank 0  ▇▇▇░░░░░░▇▇▇░░░░░░▇▇▇░░░░░░   own time 3     all ranks report 9
    rank 1  ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇   own time 9     6 more than the others
    rank 2  ▇▇▇░░░░░░▇▇▇░░░░░░▇▇▇░░░░░░   own time 3

In each step, a rank's own time (without its waits) is compared with the median of the others'. It
needs the events that `parallel101 run` records on gloo (record/host_time.py).
"""

from __future__ import annotations

import functools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from parallel101.laboratory.record.host_time import LineSamples, StepWindow, window_of
from parallel101.laboratory.record.trace import Trace
from parallel101.spans import HOST_TIME

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
        width: how many steps were measured together. If more than one, `slower`, `first` and
            `last` are estimates.
        causes: what it does meanwhile, the longest first.
    """

    rank: int
    seconds: float
    slower: int
    first: int
    last: int
    steps: int
    width: int
    causes: list[Cause]


def slower_ranks(trace: Trace) -> list[SlowerRank]:
    """Return the ranks that are slower than the others, the one that costs most time first."""
    windows = _windows(trace)
    if len(windows) < 2:
        return []
    common = sorted(set.intersection(*map(set, windows.values())))
    # in the first step, memory is allocated and kernels are chosen
    compared = common[1:] if len(common) > 1 else common
    rows = filter(None, (_compared(windows, rank, compared) for rank in windows))
    return sorted(rows, key=lambda row: (-row.seconds * row.slower, row.rank))


def _windows(trace: Trace) -> dict[int, dict[int, StepWindow]]:
    """Return the windows by rank and first step. On all ranks, a window has the same steps."""
    by_rank: dict[int, list[StepWindow]] = defaultdict(list)
    for span in trace.spans(HOST_TIME):
        if (said := span.args) is not None:
            by_rank[span.rank].append(window_of(said, span.start, span.end))
    width = max((w.steps for row in by_rank.values() for w in row), default=1) or 1
    windows: dict[int, dict[int, StepWindow]] = {}
    for rank, row in by_rank.items():
        measured = windows[rank] = {}
        for w in row:
            first = (w.first - 1) // width * width + 1 if w.steps else 0
            measured[first] = measured[first].joined(w) if first in measured else w
    return windows


def _compared(
    windows: dict[int, dict[int, StepWindow]], rank: int, compared: Sequence[int]
) -> SlowerRank | None:
    measured, others = windows[rank], [row for other, row in windows.items() if other != rank]
    more = {k: measured[k].own - statistics.median(row[k].own for row in others) for k in compared}
    elapsed = sum(measured[k].end - measured[k].start for k in compared)
    positive = [seconds for seconds in more.values() if seconds > 0]
    if not positive:
        return None
    # steps that are hardly slower don't count, whether most steps are or only some
    enough = max(statistics.median(positive) / 2, LEAST_SHARE * elapsed / len(compared))
    slower = [k for k in compared if more[k] > enough]
    steps = sum(measured[k].steps for k in slower)
    total = sum(more[k] for k in slower)
    least = max(LEAST_SHARE * elapsed, LEAST_SECONDS * steps)
    if not slower or len(slower) < min(LEAST_STEPS, len(compared)) or total < least:
        return None
    causes = _causes(measured, others, slower, total)
    per_step = 1 / max(1, steps)
    counts = _slower_steps(measured, more, slower)
    first, last = min(counts), max(counts)
    return SlowerRank(
        rank,
        total * per_step,
        sum(counts.values()),
        measured[first].first + measured[first].steps - counts[first]
        if measured[first].steps
        else 0,
        measured[last].first + counts[last] - 1 if measured[last].steps else 0,
        sum(measured[k].steps for k in compared),
        max(measured[k].steps for k in compared),
        [
            cause._replace(
                seconds=cause.seconds * per_step, seconds_there=cause.seconds_there * per_step
            )
            for cause in causes
        ],
    )


def _slower_steps(
    measured: dict[int, StepWindow], more: dict[int, float], slower: Sequence[int]
) -> dict[int, int]:
    """Return how many steps of each window were slower.

    A window of several steps can begin or end in the middle of the slower ones. Then its time
    beyond the others' is a part of that of a whole window, and as large a part of its steps is
    slower. These are at its end if it comes first, and else at its beginning.
    """
    windows, counts = list(more), {k: measured[k].steps for k in slower}
    per_step = [more[k] / max(1, measured[k].steps) for k in slower]
    usual = statistics.median(per_step[1:-1] or [max(per_step)])
    first, last = windows.index(slower[0]), windows.index(slower[-1])
    for k in windows[max(0, first - 1) : first + 1] + windows[last : last + 2]:
        count = min(measured[k].steps, round(more[k] / usual))
        if measured[k].steps > 1 and count > 0:
            counts[k] = count
    return counts


def _causes(
    measured: dict[int, StepWindow],
    others: Sequence[dict[int, StepWindow]],
    slower: Sequence[int],
    total: float,
) -> list[Cause]:
    """Return what took a rank longer than the others in its slower steps, in total seconds."""
    own, *theirs = (_doing([row[k] for k in slower]) for row in (measured, *others))
    more: dict[str, dict[str, float]] = defaultdict(dict)
    for what, where in {key for row in (own, *theirs) for key in row}:
        usual = statistics.median(row.get((what, where), 0.0) for row in theirs)
        more[what][where] = own.get((what, where), 0.0) - usual
    causes = []
    for what, lines in more.items():
        where = max(lines, key=lambda line: lines[line])
        causes.append(Cause(what, sum(lines.values()), where, lines[where]))
    causes.sort(key=lambda cause: -cause.seconds)
    return [cause for cause in causes if cause.seconds > LEAST_CAUSE * total][:MOST_CAUSES]


def _doing(windows: Sequence[StepWindow]) -> dict[tuple[str, str], float]:
    """Return the seconds of each activity and line in a rank's own time.

    The seconds are measured. Which lines they belong to is known from samples.
    """
    whole = functools.reduce(StepWindow.joined, windows)
    samples = whole.lines or {("", False): LineSamples(1, 1.0)}
    count = sum(sample.number for sample in samples.values())
    rest = max(0.0, whole.own - whole.collecting)
    doing: dict[tuple[str, str], float] = defaultdict(float)
    doing[COLLECTING, ""] = whole.own - rest
    loading = {where: sample.number for (where, loads), sample in samples.items() if loads}
    for where, many in loading.items():
        doing[LOADING, where] = rest * many / count
    rest *= 1 - sum(loading.values()) / count
    # of the loading, it is not known how much of it was on the CPU
    computing = min(rest, max(0.0, whole.busy - whole.collecting))
    # a time in the queue while it was blocked in a call is among the waits
    queued = min(rest - computing, whole.queued)
    others = {where: sample for (where, loads), sample in samples.items() if not loads}
    busy = {where: sample.busy for where, sample in others.items()}
    idle = {where: sample.number - sample.busy for where, sample in others.items()}
    for what, seconds, weights in (
        (COMPUTING, computing, busy),
        (QUEUED, queued, idle),
        (BLOCKED, rest - computing - queued, idle),
    ):
        total = sum(weights.values())
        for where, weight in weights.items():
            doing[what, where] += seconds * weight / total if total else 0.0
    return doing
