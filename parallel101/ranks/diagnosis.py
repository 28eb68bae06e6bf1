"""What a rank that died left behind: its exit code, where it was, what it wrote last. An error is made of them.

exit code  ◀── the fork server          a place ◀── faulthandler, as the rank was killed          last lines ◀── its stderr
"""

from __future__ import annotations

import re
import signal
import sysconfig
from collections.abc import Sequence

import psutil

from parallel101.ranks.output import LAST_WORDS
from parallel101.record.errors import RankFailed
from parallel101.record.where import is_inside, shown

TOO_LONG = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")  #  gloo's, in bytes: what came, what was expected
LIBRARIES = tuple({path for name, path in sysconfig.get_paths().items() if name in ("stdlib", "platstdlib", "purelib", "platlib")})


class Ended(BaseException):
    """A virtual rank ended its process, as it believed: os._exit, or a signal it sent itself."""

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


def died(rank: int, code: int | None, dump: str = "", stderr: str = "", checked: bool = False) -> RankFailed:
    """The error for a rank that ended before it returned. `dump` is what faulthandler wrote of its last place, if anything."""
    if code is None:
        how = "was lost (its fork server ended)"
    elif code < 0:
        how = f"was killed by {signal.Signals(-code).name} (exit code {code})"
    else:
        how = f"ended by itself with exit code {code} before it returned"
    message = [f"rank {rank} {how}" + (f", at {shown(place)}" if (place := last_place(dump)) else "")]
    said = [line for line in stderr.splitlines() if line.strip()]
    if sizes := TOO_LONG.search(stderr):
        message += [
            f"gloo aborts a rank to which more comes than it expects: {sizes[1]} bytes came here where {sizes[2]} were expected.",
            "Either a receive is smaller than the message that comes for it, or the ranks of a collective disagree on its size.",
        ]
        if not checked:
            message.append("Run it again with trace=True: a checked run names the two calls that do not fit.")
        said = [line for line in said if not LAST_WORDS.match(line)]
    return RankFailed("\n  ".join([*message, *said[-3:]]), rank, code)


def last_place(dump: str) -> str:
    """The caller's file and line in what faulthandler wrote as the rank was killed, or nothing. The program's own before a library's."""
    found = re.findall(r'^  File "([^"]+)", line (\d+) in ', dump, re.MULTILINE)
    outside = [(name, line) for name, line in found if not is_inside(name)]
    own = [(name, line) for name, line in outside if not name.startswith(LIBRARIES)]
    return ":".join((own or outside)[0]) if outside else ""


# ── Whether ranks that all wait, each for what has been posted, still have work to do: the CPU time of their processes tells.


LOOK = 0.25  #  seconds between two looks
STILL = 1.0  #  seconds without work after which none is left
IDLE = 0.03  #  seconds of CPU time in these that a rank spends on nothing: its watcher looks about ten times a second


class Stillness:
    """Watches the processes of ranks that all wait."""

    def __init__(self, pids: Sequence[int]):
        self.pids = pids
        self.began: float | None = None
        self.before: list[float] = []
        self.due = 0.0

    def lasts(self, now: float, all_wait: bool) -> bool:
        """Whether all ranks have waited, and none of them has worked, for long enough. To be asked again at `due`."""
        if not all_wait:
            self.began = None
            return False
        if self.began is not None and now < self.due:
            return False
        spent = self._spent()
        if self.began is None or spent is None or any(after - before > IDLE for before, after in zip(self.before, spent)):
            self.began, self.before = now, spent or []
        self.due = now + LOOK
        return spent is not None and now - self.began >= STILL

    def _spent(self) -> list[float] | None:
        """CPU seconds of each rank up to now; None where that can't be known."""
        try:
            return [sum(psutil.Process(pid).cpu_times()[:2]) for pid in self.pids]
        except psutil.Error:
            return None
