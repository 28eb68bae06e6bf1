"""The thread in a rank that speaks while the program is blocked: what it waits for, where, and what it has posted so far.

    program's thread   … compute … ──wait()───────────────────────────▶ …
    watcher            ·    ·    ·    ·  "blocked in recv from 3, at a.py:7" ·    ·  "free"

It looks ten times a second. Counts of what was posted only grow, and a blocked rank posts nothing, so the reports of all ranks together are
enough to tell a deadlock for certain (see trace.calls.stuck).
"""

from __future__ import annotations

import os
import select
import sys
import threading

from parallel101.backends.record import Ledger, Posted
from parallel101.ranks.wire import Wire
from parallel101.trace.where import where

TICK = 0.1  #  seconds


class Watcher(threading.Thread):
    """Reports to the launching process and obeys it. `finish` is set when the rank may go."""

    def __init__(self, ledger: Ledger, wire: Wire):
        super().__init__(daemon=True, name="parallel101 watcher")
        self.ledger, self.wire = ledger, wire
        self.finish = threading.Event()

    def run(self) -> None:
        seen: Posted | None = None
        reported: Posted | None = None
        while not self.finish.is_set():
            if select.select([self.wire], [], [], TICK)[0]:
                self._obey()
            waiting = self.ledger.waiting
            try:
                if reported is not None and waiting is not reported:
                    self.wire.send(b"f")
                    reported = None
                if waiting is not None and waiting is seen and reported is None:
                    self.wire.send(b"b", (tuple(waiting.call(self._where())), dict(self.ledger.posted), dict(self.ledger.collectives)))
                    reported = waiting
            except (OSError, RuntimeError):
                pass  #  the socket is gone, which the next look tells; or a count was added while it was copied: at the next look then
            seen = waiting

    def _obey(self) -> None:
        try:
            kind, _ = self.wire.receive()
        except (EOFError, OSError):
            os._exit(1)  #  the launching process is gone: so are its ranks
        if kind == b"q":
            self.finish.set()
        elif kind == b"w":
            self.wire.send(b"w", self._where())
        elif kind == b"t":
            self.wire.send(b"e", (list(self.ledger.events), dict(self.ledger.groups), dict(self.ledger.posted), dict(self.ledger.collectives)))

    def _where(self) -> str:
        return where(sys._current_frames().get(self.ledger.thread))
