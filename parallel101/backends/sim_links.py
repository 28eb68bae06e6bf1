"""The links of the sim's network, and who gets them: first come, first served, and never two messages on one link.

Whenever no rank can run, `arbitrate` goes through the messages that ask for a link, in order of (time of asking, the sender's own
order of posting, rank). One whose links are all free gets them; any other is parked at a link that is taken, and asks again when
that is free.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Protocol


class Happening(Protocol):
    """Something with a time: the end of a message, of a collective, of a rank's compute."""

    def happen(self) -> None: ...


class Transfer(Happening, Protocol):
    """A message as the links see it."""

    stages: tuple[tuple[int, ...], ...]
    duration: float  #  how long it holds each of its links, in seconds

    def start(self, now: float) -> None: ...


# (time of asking, sender's order, sender, unique number, message, stage, the link where it was parked or -1)
Request = tuple[float, int, int, int, Transfer, int, int]


class Links:
    """Which links are taken, and who waits for each."""

    def __init__(self, at: Callable[[float, Happening], None]):
        self.at = at  #  at(time, item): calls item.happen() then
        self.asking: list[Request] = []
        self.freed: list[int] = []
        self.taken: set[int] = set()
        self.parked: dict[int, list[Request]] = {}

    def ask(self, now: float, order: int, sender: int, number: int, message: Transfer) -> None:
        """A message is ready to start: it asks for the links of its first stage."""
        self.asking.append((now, order, sender, number, message, 0, -1))

    def waiting(self) -> list[Transfer]:
        """The messages that have not got all of their links yet."""
        return [request[4] for requests in (self.asking, *self.parked.values()) for request in requests]

    def free(self, stage: tuple[int, ...]) -> None:
        """The links of a stage have been held for as long as they had to be."""
        for link in stage:
            self.taken.discard(link)
            if link in self.parked:
                self.freed.append(link)

    def arbitrate(self, now: float) -> None:
        """Hand out what is free, in order; a message that got a link of its path asks for the next one at once."""
        waiting, self.asking = self.asking, []
        freed, self.freed = self.freed, []
        waiting.sort(reverse=True)
        more: list[Request] = []  #  those that come to ask while we are at it
        for link in freed:
            self._unpark(link, more)
        heapify(more)
        taken = self.taken
        while waiting or more:
            request = heappop(more) if more and (not waiting or more[0] < waiting[-1]) else waiting.pop()
            _, order, sender, number, message, place, parked_at = request
            stages = message.stages
            stage = stages[place] if stages else ()
            for link in stage:
                if link in taken:
                    heappush(self.parked.setdefault(link, []), (*request[:6], link))
                    if parked_at >= 0 and parked_at not in taken:
                        self._unpark(parked_at, more)  #  it had its turn there, and the next in that queue has one too
                    break
            else:
                taken.update(stage)
                if place == 0:
                    message.start(now)
                if place + 1 >= len(stages):
                    self.at(now + message.duration, message)
                else:
                    self.at(now + message.duration, _Passed(self, stage))
                    heappush(more, (now, order, sender, number, message, place + 1, -1))

    def _unpark(self, link: int, into: list[Request]) -> None:
        queue = self.parked.get(link)
        if queue:
            heappush(into, heappop(queue))
        if queue is not None and not queue:
            del self.parked[link]


class _Passed:
    """The tail of a message has passed a link in the middle of its path."""

    __slots__ = ("links", "stage")

    def __init__(self, links: Links, stage: tuple[int, ...]):
        self.links = links
        self.stage = stage

    def happen(self) -> None:
        self.links.free(self.stage)
