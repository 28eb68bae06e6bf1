"""What can go wrong with a run, each with its own error: a deadlock, a rank that failed, a misuse that torch lets pass.

Every one of them says which rank, what it was doing, at which file and line of the caller's code, and what to do next.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from types import TracebackType

from parallel101.record.where import cell_name, shown

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
Waiting = Mapping[int, tuple[str, "int | tuple[int, ...] | None", str]]


class _ShownInANotebook(BaseException):
    """What IPython asks an error for in place of its traceback: ours up to the cell's own call. How launch() found out explains nothing."""

    def _render_traceback_(self) -> list[str]:
        from IPython import get_ipython

        tb, own = self.__traceback__, []
        while tb is not None and not tb.tb_frame.f_code.co_filename.startswith(_HERE):
            own.append(tb)
            tb = tb.tb_next
        tb = None
        for outer in reversed(own):
            tb = TracebackType(tb, outer.tb_frame, outer.tb_lasti, outer.tb_lineno)
        return get_ipython().InteractiveTB.structured_traceback(type(self), self, tb)


class DeadlockError(RuntimeError, _ShownInANotebook):
    """Ranks wait for one another and none can go on.

    Attributes:
        waiting: for each rank that waits, `(kind, peer, "file:line")`: what it waits in ("send", "recv", "all_reduce", …), for whom
            (a rank; a tuple of ranks where it waits for several; None for a receive from anyone), and where in the caller's code.
        cycle: the ranks that wait for each other in a circle, in that order, the smallest first; empty where a rank waits for one
            that has already returned.
        returned: ranks that have returned while others wait for them.
        thrown_away: in words, the messages whose work nobody kept, where that may be why.
        notes: what else may be why, each in words and with its "file:line" ("" where it has none): tags or groups that differ, different
            collectives in one place, messages that the other side never posts.
    """

    def __init__(
        self,
        waiting: Waiting,
        cycle: Sequence[int] = (),
        returned: Sequence[int] = (),
        thrown_away: Sequence[str] = (),
        notes: Sequence[tuple[str, str]] = (),
    ):
        self.waiting = dict(waiting)
        self.cycle = list(cycle)
        self.returned = sorted(returned)
        self.thrown_away = list(thrown_away)
        self.notes = list(notes)
        super().__init__(self._message())

    def __reduce__(self):
        return type(self), (self.waiting, self.cycle, self.returned, self.thrown_away, self.notes)

    def _message(self) -> str:
        lines = ["deadlock: " + ("no rank can go on" if self.cycle else "a rank waits for something that will never come")]
        for rank, (kind, peer, where) in sorted(self.waiting.items()):
            lines.append(f"  rank {rank} waits in {kind} {_for_whom(kind, peer, self.returned)}, at {shown(where)}")
        if self.cycle:
            lines.append("  the circle: " + " → ".join(f"rank {r}" for r in [*self.cycle, self.cycle[0]]))
        lines += [f"  rank {rank} has already returned" for rank in self.returned]
        if self.thrown_away:
            lines += [f"  {what}" for what in self.thrown_away[:8]]
            lines += ["  gloo takes a message back when its work is thrown away: keep what isend and irecv return, and wait() for it."]
        lines += [f"  {note}, at {shown(where)}" if where else f"  {note}" for note, where in self.notes[:8]]
        return "\n".join(lines + (_advice(self.waiting) if self.cycle and not self.notes else []))

    def picture(self):
        """Who waits for whom, drawn: in a notebook as it is, elsewhere by `.save("deadlock.html")`."""
        from parallel101.viz.deadlock import deadlock_scene

        return deadlock_scene(self)


class RankFailed(RuntimeError, _ShownInANotebook):
    """A rank raised an exception or died.

    Attributes:
        rank: which one.
        exitcode: the exit status of a rank that died (negative: the signal that killed it), else None. A rank's own exception is this
            error's `__cause__`, and its traceback stands in the message.
    """

    def __init__(self, message: str, rank: int, exitcode: int | None = None):
        super().__init__(_with_cells(message))
        self.rank = rank
        self.exitcode = exitcode

    def __reduce__(self):
        return type(self), (self.args[0], self.rank, self.exitcode)


class MisuseError(RankFailed):
    """A call that gloo would let pass in silence, or answer with a crash or by waiting for ever. In a checked run: the two sides of a
    message, or the ranks of a collective, do not agree; a tensor must not be sent. In any: one message is waited for twice."""


def _with_cells(message: str) -> str:
    """A rank does not know which of its files are a notebook's cells; the notebook, where its error arrives, does."""

    def in_its_cell(place: re.Match[str]) -> str:
        cell = cell_name(place["traced"] or place["file"])
        return place[0] if cell is None else cell if place["traced"] else f"{cell}, line {place['line']}"

    return re.sub(r'File "(?P<traced>[^"]+)"|(?P<file>\S+\.py):(?P<line>\d+)', in_its_cell, message)


class LaunchTimeout(TimeoutError, _ShownInANotebook):
    """The ranks were still at work when the time limit came. The message says where each of them was."""


def named(error: BaseException) -> str:
    """An exception in one line: "ValueError: too short", and only its name where it says nothing more."""
    try:
        said = str(error)
    except Exception:  #  a __str__ that fails is the program's, and not what went wrong first
        said = ""
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def broken_connection(error: BaseException) -> bool:
    """Whether a rank's error only says that some other rank is gone: never the cause, where another error is known."""
    broken = ("onnection closed", "onnection reset", "onnection refused", "Broken pipe")
    return isinstance(error, RuntimeError) and any(part in named(error) for part in broken)


def reports_another(error: BaseException, rank: int) -> bool:
    """Whether an error that `rank` raised names another rank as the one that failed, by its attribute `failed_rank`.

    A trainer raises such an error on every rank when one of them has failed.
    """
    failed = getattr(error, "failed_rank", rank)
    return isinstance(failed, int) and failed != rank


def _for_whom(kind: str, peer: int | tuple[int, ...] | None, returned: Sequence[int]) -> str:
    if peer is None:
        return "from any rank"
    peers = peer if isinstance(peer, tuple) else (peer,)
    preposition = {"recv": "from", "send": "to"}.get(kind, "for")
    gone = " (returned)" if all(p in returned for p in peers) else ""
    return f"{preposition} {ranks_in_words(peers)}{gone}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 1"; of many, the first eight and how many more."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{more}"


def _advice(waiting: Waiting) -> list[str]:
    kinds = {kind for kind, _, _ in waiting.values()}
    if kinds == {"send"}:
        return [
            "  All of them send first. A send on gloo ends when its receive is posted: post a receive first (irecv), "
            "or let one rank start with it."
        ]
    if kinds == {"recv"}:
        return ["  All of them receive first, and nobody sends: let the sends go out first (isend), then receive."]
    return []
