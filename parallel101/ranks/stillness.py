"""Whether ranks that all wait, each for what has been posted, still have work to do: the CPU time of their processes tells.

On gloo a message is bytes that some thread copies. When sizes do not fit, gloo may wait for bytes that nobody will send; then no rank is
missing, and yet nothing moves: neither anybody's program nor anybody's CPU time.
"""

from __future__ import annotations

from collections.abc import Sequence

import psutil

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
