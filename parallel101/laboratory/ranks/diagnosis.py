"""Makes the errors for ranks that raised, died or ran out of time.

    exception ────────────▶ rank_raised     "rank 2 raised ValueError: …", with the traceback
    exit code, stderr ────▶ rank_died       "rank 1 was killed by SIGABRT (exit code -6), at a.py:7"
    time limit ───────────▶ timed_out       where each rank was

Deadlocks and misuse are found elsewhere: see record/wait_for.py and record/calls.py.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from parallel101.laboratory.ranks.output import GLOO_ABORT
from parallel101.laboratory.ranks.wire import Failure
from parallel101.laboratory.record.calls import Call, places_of
from parallel101.laboratory.record.errors import LaunchTimeout, RankFailed, dropped_lines
from parallel101.laboratory.record.program_lines import is_inside, is_library, shown

# gloo's words: bytes that arrived, bytes expected
TOO_LONG = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
RUN_CHECKED = "Run it again with trace=True: a checked run names the two calls that disagree."


def rank_raised(failure: Failure, unwaited: Sequence[Call] = ()) -> RankFailed:
    """Return the error for a rank whose program raised.

    The exception is its cause. `unwaited`: messages that it posted and did not wait for.
    """
    message = f"rank {failure.rank} raised {failure.headline}\n\n{failure.traceback}".rstrip()
    if receives := [call for call in unwaited if call.kind == "recv" and call.rank == failure.rank]:
        before = "Before that, it received without a wait(), so the data may not have arrived:"
        message = "\n  ".join([f"{message}\n\n{before}", *places_of(receives)])
    error = RankFailed(message, failure.rank)
    error.__cause__ = failure.error
    return error


def rank_died(
    rank: int,
    code: int | None,
    crash_dump: str = "",
    stderr: str = "",
    checked: bool = False,
    others: Sequence[str] = (),
) -> RankFailed:
    """Return the error for a rank that ended before its function returned.

    Args:
        crash_dump: what faulthandler wrote, if anything.
        stderr: the end of what the rank wrote there.
        checked: whether its calls were compared with those of other ranks.
        others: what the other ranks did.
    """
    how = "was lost: its fork server ended" if code is None else how_it_ended(code)
    message = [
        f"rank {rank} {how}"
        + (f", at {shown(place)}" if (place := crash_place(crash_dump)) else "")
    ]
    last_lines = [line for line in stderr.splitlines() if line.strip()]
    if sizes := TOO_LONG.search(stderr):
        message += [
            f"gloo aborts a rank that receives more than it expects: {sizes[1]} bytes arrived, and "
            f"{sizes[2]} were expected.",
            "Either the receive is smaller than the message sent to it, or the ranks of a "
            "collective disagree on its size.",
            *others,
        ]
        others = () if checked else [RUN_CHECKED]
        last_lines = [line for line in last_lines if not GLOO_ABORT.match(line)]
    return RankFailed("\n  ".join([*message, *others, *last_lines[-3:]]), rank, code)


def how_it_ended(code: int) -> str:
    """Describe the early end of a rank by its exit code, for an error."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name} (exit code {code})"
    return f"exited with code {code} before its function returned"


def crash_place(dump: str) -> str:
    """Return the caller's "file:line" in a dump of faulthandler's, or "".

    It prefers the program's own files to a library's.
    """
    frames = re.findall(r'^  File "([^"]+)", line (\d+) in ', dump, re.MULTILINE)
    outside = [(name, line) for name, line in frames if not is_inside(name)]
    own = [(name, line) for name, line in outside if not is_library(name)]
    return ":".join((own or outside)[0]) if outside else ""


def timed_out(seconds: float, ranks: Sequence[str], dropped: Sequence[str] = ()) -> LaunchTimeout:
    """Return the error for a run that took too long.

    `ranks` says where each one was, `dropped` which messages nobody waited for.
    """
    how = "launch(..., timeout=seconds), or parallel101 run --timeout seconds"
    summary = (
        f"the ranks were still running after {seconds:g} s. If they need longer, raise the limit: "
        f"{how}."
    )
    return LaunchTimeout("\n  ".join([summary, *ranks, *dropped_lines(dropped)]))
