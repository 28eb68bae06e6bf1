"""Converts the record's time to the picture's: when each step of a collective is drawn, in seconds.

record     step 1 │ step 2      │3│
picture    step 1   │ step 2    │ step 3

Every step takes equally long in the picture. Within a step, messages start and arrive early or late
as in the record.
"""

from __future__ import annotations

import math

from parallel101.laboratory.analysis.replay import START, Replay

LEAD = 0.5  # seconds before the first step
FLIGHT = 0.68  # the part of a step in which tiles move; the rest shows what has arrived
GAP = 0.03  # seconds between the end of a stop and the next step


class Timing:
    """The seconds at which each step of a replay is drawn."""

    def __init__(self, replay: Replay):
        self.replay = replay
        self.steps = replay.steps
        self.step = min(1.5, max(0.8, 26.0 / max(self.steps, 1)))
        # from here on, what every rank returned and the verdict
        self.reveal = self.arrival(self.steps - 1) + 0.7
        # in hundredths, as the SVG writes it
        self.duration = math.ceil(100 * (self.reveal + 2.2)) / 100 if self.steps else 0.0
        of_steps = ([replay.messages[i] for i in replay.in_step(s)] for s in range(self.steps))
        # from when to when the messages of each step were recorded
        self._recorded = [(min(m.start for m in of), max(m.end for m in of)) for of in of_steps]

    def start(self, step: int) -> float:
        return LEAD + step * self.step if step < self.steps else self.duration + 1

    def arrival(self, step: int) -> float:
        """Return the second at which all messages of a step have arrived."""
        return LEAD + (step + FLIGHT) * self.step

    def end(self, step: int) -> float:
        return self.start(step + 1) - GAP if step < self.steps - 1 else self.duration

    def at(self, moment: float) -> float:
        """Return the second of one of the replay's moments (see START).

        Infinity is after the end.
        """
        if moment == START:
            return 0.0
        if moment == math.inf:
            return self.duration + 1
        step = int(moment)
        if step >= self.steps:
            return self.reveal
        return self.arrival(step) if moment > step else self.start(step)

    def flight(self, index: int) -> tuple[float, float]:
        """Return the seconds at which a message leaves and arrives, within the time of its step."""
        message, step = self.replay.messages[index], self.replay.step[index]
        begin, end = self._recorded[step]
        span, room = (end - begin) or 1.0, self.arrival(step) - self.start(step)
        leaves = 0.35 * (message.start - begin) / span
        arrives = 1.0 - 0.35 * (end - message.end) / span
        return self.start(step) + room * leaves, self.start(step) + room * arrives

    def cursor(self) -> list[tuple[float, float]]:
        """Return (second of the scene, second of the record) pairs for the cursor.

        It never moves back, even if steps overlap in the record.
        """
        frames, latest = [], self.replay.messages[0].start if self.replay.messages else 0.0
        for step, (begin, end) in enumerate(self._recorded):
            begin, end = max(begin, latest), max(end, latest)
            frames += [(self.start(step), begin), (self.arrival(step), end)]
            latest = end
        return frames
