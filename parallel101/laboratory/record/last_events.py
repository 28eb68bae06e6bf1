"""Keeps a rank's newest events only, so that the record of a long job stays small.

    program ──▶ recorded ──▶ batches of the last N events ──▶ sums (totals.py)
                                   │
                                   └ with a folder: rank-0.7.json.gz, rank-0.8.json.gz, …

A thread takes events away from the recorder in batches, so that the program itself only appends
to a list. A batch is packed: it takes a fifth of the memory, and the garbage collector does not
look through it. Files are written when a batch is full, and every ten seconds until then; those of
events that are no longer kept are deleted. So a job that is killed leaves all but its last seconds.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from parallel101.laboratory.record.events import Event, EventRow
from parallel101.laboratory.record.rank_files import RankFiles
from parallel101.laboratory.record.totals import summed

LAST_EVENTS = 100_000  # of a rank, which `parallel101 run` keeps by default
BATCHES = 10  # in which they are
TICK = 0.2  # seconds between two looks
WRITE_EVERY = 10.0  # seconds after which what has no file yet is written


class Batch(NamedTuple):
    """Some consecutive events of a rank, the same number in every batch."""

    number: int  # from 1
    packed: bytes  # the pickled rows
    earlier: list[Event]  # sums of all events before them


class LastEvents(threading.Thread):
    """The newest events of a rank.

    Args:
        limit: how many are kept at least. At most a tenth more are.
        recorded: the recorder's list, to which its program appends.
        in_seconds: events with the clock's moments → the same with seconds.
        unfinished: the rows of calls that have not ended.
        files: to which the batches are written, or None.
    """

    def __init__(
        self,
        limit: int,
        recorded: list[Event],
        in_seconds: Callable[[list[Event]], list[Event]],
        unfinished: Callable[[], Sequence[EventRow]],
        files: RankFiles | None = None,
    ):
        super().__init__(daemon=True, name="parallel101 last events")
        if limit < 1:
            raise ValueError(f"the last {limit} events can't be kept; it must be 1 or more")
        self.limit, self.size = limit, -(-limit // BATCHES)
        self.recorded, self.in_seconds, self.unfinished = recorded, in_seconds, unfinished
        self.files = files
        self.batches: deque[Batch] = deque()
        self.taken = 0  # how many events have left `recorded`
        self.summed: list[Event] = []  # sums over these
        # who reads or changes them holds it; what a garbage collection runs never does
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.written = time.monotonic()

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.join()

    def run(self) -> None:
        while not self.over.wait(TICK):
            self.take_batches()
            if time.monotonic() - self.written > WRITE_EVERY:
                self.write_rest()

    def take_batches(self) -> None:
        """Take full batches away from the recorder.

        A batch of newer events is left there: on a GPU they may not have ended yet.
        """
        with self.lock:
            while len(self.recorded) >= 2 * self.size:
                events = self.in_seconds(self.recorded[: self.size])
                number, earlier = self.taken // self.size + 1, self.summed
                packed = pickle.dumps(list(map(tuple, events)), pickle.HIGHEST_PROTOCOL)
                self.batches.append(Batch(number, packed, earlier))
                # one step each, so that nothing is lost that the program appends meanwhile
                del self.recorded[: self.size]
                self.taken += self.size
                self.summed = summed([*earlier, *events])
                if self.files is not None:
                    self.files.write(events, (), earlier, number)
                kept = self.size * len(self.batches) + len(self.recorded)
                while self.batches and kept - self.size >= self.limit:
                    oldest, kept = self.batches.popleft(), kept - self.size
                    if self.files is not None:
                        self.files.delete(oldest.number)

    def write_rest(self) -> None:
        """Write the events that are not in a full batch yet."""
        self.written = time.monotonic()
        if self.files is not None:
            unfinished = self.unfinished()  # and record which works without a wait have ended
            with self.lock:
                events = self.in_seconds(list(self.recorded))
                number = self.taken // self.size + 1
                self.files.write(events, unfinished, self.summed, number)

    def rows(self, newest: Callable[[], list[EventRow]]) -> tuple[list[EventRow], list[Event]]:
        """Return all events that are kept, and the sums of those before them.

        `newest` returns the rows of `recorded`.
        """
        self.take_batches()
        with self.lock:
            rows = [row for batch in self.batches for row in pickle.loads(batch.packed)]
            earlier = self.batches[0].earlier if self.batches else self.summed
            return rows + newest(), earlier
