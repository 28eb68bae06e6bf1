"""From the record's time to the picture's: every step takes as long to watch as any other, and shows its own unevenness."""

from __future__ import annotations

import math

from parallel101.analysis.replay import START, History

LEAD = 0.5  #  seconds before the first step
FLIGHT = 0.68  #  of a step; the rest of it shows what has arrived
GAP = 0.03  #  "next" comes to rest this long before the following step begins


class Tempo:
    """When each step of a history is on stage, in seconds of the scene's clock."""

    def __init__(self, history: History):
        self.history = history
        self.steps = history.steps
        self.step = min(1.5, max(0.8, 26.0 / max(self.steps, 1)))
        self.reveal = self.land(self.steps - 1) + 0.7  #  from here on: what every rank returned, and the verdict
        self.duration = math.ceil(100 * (self.reveal + 2.2)) / 100 if self.steps else 0.0  #  in hundredths: an SVG says no more of it
        self._real = [self._interval(s) for s in range(self.steps)]

    def start(self, step: int) -> float:
        return LEAD + step * self.step if step < self.steps else self.duration + 1

    def land(self, step: int) -> float:
        return LEAD + (step + FLIGHT) * self.step

    def end(self, step: int) -> float:
        return self.start(step + 1) - GAP if step < self.steps - 1 else self.duration

    def at(self, moment: float) -> float:
        """The second of a moment of the history; infinity is after the end."""
        if moment == START:
            return 0.0
        if moment == math.inf:
            return self.duration + 1
        step = int(moment)
        if step >= self.steps:
            return self.reveal
        return self.land(step) if moment > step else self.start(step)

    def flight(self, index: int) -> tuple[float, float]:
        """When a message leaves and when it is there: early and late as in the record, within its step."""
        message, step = self.history.messages[index], self.history.step[index]
        begin, end = self._real[step]
        span, room = (end - begin) or 1.0, self.land(step) - self.start(step)
        leaves = 0.35 * (message.start - begin) / span
        arrives = 1.0 - 0.35 * (end - message.end) / span
        return self.start(step) + room * leaves, self.start(step) + room * arrives

    def cursor(self) -> list[tuple[float, float]]:
        """(second of the scene, second of the record) of the cursor under the picture: never backwards, though steps may overlap."""
        frames, latest = [], self.history.messages[0].start if self.history.messages else 0.0
        for step, (begin, end) in enumerate(self._real):
            begin, end = max(begin, latest), max(end, latest)
            frames += [(self.start(step), begin), (self.land(step), end)]
            latest = end
        return frames

    def _interval(self, step: int) -> tuple[float, float]:
        mine = [self.history.messages[i] for i in self.history.in_step(step)]
        return min(m.start for m in mine), max(m.end for m in mine)
