"""The errors of a run: a deadlock, a rank that failed, a misuse, a run that took too long.

A misuse is a wrong call that torch does not report. Each says which rank it was, what it was doing,
at which file and line of the program, and what to do next.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from types import TracebackType

from parallel101.laboratory import PACKAGE
from parallel101.laboratory.record.program_lines import cell_name, shown
from parallel101.laboratory.record.units import ranks_text

_OWN = os.path.join(PACKAGE, "")
Waiting = Mapping[int, tuple[str, "int | tuple[int, ...] | None", str]]
ALL_OF_THEM = {  # advice if all ranks of a cycle wait in the same call
    "send": (
        "send first. On gloo a send ends when its receive is posted: post a receive first (irecv), "
        "or let one rank receive before it sends."
    ),
    "recv": "receive first, and nobody sends: start the sends first (isend), then receive.",
}


class _ShownInNotebook(BaseException):
    """Shortens the traceback that IPython shows.

    It ends with the cell's call, without the frames inside parallel101.
    """

    def _render_traceback_(self) -> list[str]:
        from IPython import get_ipython

        tb, own = self.__traceback__, []
        while tb is not None and not tb.tb_frame.f_code.co_filename.startswith(_OWN):
            own.append(tb)
            tb = tb.tb_next
        tb = None
        for outer in reversed(own):
            tb = TracebackType(tb, outer.tb_frame, outer.tb_lasti, outer.tb_lineno)
        return get_ipython().InteractiveTB.structured_traceback(type(self), self, tb)


class DeadlockError(RuntimeError, _ShownInNotebook):
    """Ranks wait for one another, and none of them can go on.

    Attributes:
        waiting: for each rank that waits, `(kind, peer, "file:line")`: the call ("send", "recv",
            "all_reduce", …), the rank it waits for (a tuple of ranks if it waits for several; None
            for a receive from any rank), and where in the program the call is.
        cycle: the ranks that wait for each other in a cycle, in that order, the smallest first.
            Empty if they wait for a rank that has already returned.
        returned: ranks that have returned while others wait for them.
        dropped: descriptions of messages whose work object was dropped, if that may be the cause.
        notes: other possible causes, as (description, "file:line" or ""): tags or groups that
            differ, different collectives, messages that the other side never posts.

    Example:
        >>> def program():
        ...     p101.receive(torch.ones(1), src=1 - dist.get_rank())
        >>> try:
        ...     p101.launch(program, world_size=2, backend="sim")
        ... except p101.DeadlockError as error:
        ...     print(error.cycle)
        [0, 1]
    """

    def __init__(
        self,
        waiting: Waiting,
        cycle: Sequence[int] = (),
        returned: Sequence[int] = (),
        dropped: Sequence[str] = (),
        notes: Sequence[tuple[str, str]] = (),
    ):
        self.waiting = dict(waiting)
        self.cycle = list(cycle)
        self.returned = sorted(returned)
        self.dropped = list(dropped)
        self.notes = list(notes)
        super().__init__(self._message())

    def __reduce__(self):
        return type(self), (self.waiting, self.cycle, self.returned, self.dropped, self.notes)

    def _message(self) -> str:
        forever = "a rank waits for something that will never come"
        lines = [f"deadlock: {'no rank can go on' if self.cycle else forever}"]
        for rank, (kind, peer, where) in sorted(self.waiting.items()):
            lines.append(
                f"  rank {rank} waits in {kind} {_for_whom(kind, peer, self.returned)}, at "
                f"{shown(where)}"
            )
        if self.cycle:
            lines.append(
                "  the cycle: " + " → ".join(f"rank {r}" for r in [*self.cycle, self.cycle[0]])
            )
        lines += [f"  rank {rank} has already returned" for rank in self.returned]
        lines += [f"  {line}" for line in dropped_lines(self.dropped)]
        lines += [
            f"  {note}, at {shown(where)}" if where else f"  {note}"
            for note, where in self.notes[:8]
        ]
        kinds = ", ".join({kind for kind, _, _ in self.waiting.values()})
        if self.cycle and not self.notes and kinds in ALL_OF_THEM:
            lines.append(f"  All of them {ALL_OF_THEM[kinds]}")
        return "\n".join(lines)

    def picture(self):
        """Draw who waits for whom.

        It shows itself in a notebook; elsewhere, use `.save("deadlock.html")`.
        """
        from parallel101.laboratory.viz.deadlock import deadlock_scene

        return deadlock_scene(self.waiting, self.cycle, self.returned, self.notes, str(self))


class RankFailed(RuntimeError, _ShownInNotebook):
    """A rank raised an exception or died.

    Attributes:
        rank: which one.
        exitcode: the exit status of a rank that died (negative: the signal that killed it), else
            None. If the rank raised an exception, that is this error's `__cause__`, and its
            traceback is in the message.
    """

    def __init__(self, message: str, rank: int, exitcode: int | None = None):
        super().__init__(_with_cells(message))
        self.rank = rank
        self.exitcode = exitcode

    def __reduce__(self):
        return type(self), (self.args[0], self.rank, self.exitcode)


class MisuseError(RankFailed):
    """A call that gloo accepts, and then computes a wrong result, crashes or waits forever.

    A checked run (trace=True, and always on sim) raises it if the two sides of a message or the
    ranks of a collective do not agree, if a tensor cannot be sent as it is, or if it changes while
    it is sent. Every run raises it for a second wait() on one message.
    """


class LaunchTimeout(TimeoutError, _ShownInNotebook):
    """The ranks were still running when the time limit was reached.

    The message says where each of them was.
    """


def dropped_lines(dropped: Sequence[str]) -> list[str]:
    """Return the lines of an error about messages whose work object was dropped.

    `dropped`: their descriptions. If there are no such messages, there are no lines.
    """
    advice = (
        "gloo cancels a message when its work object is dropped. Keep what isend and irecv return, "
        "and wait() for it."
    )
    return [*dropped[:8], advice] if dropped else []


def one_line(error: BaseException) -> str:
    """Format an exception in one line: "ValueError: too short", or only its name without a text."""
    try:
        text = str(error)
    except Exception:  # the program's own __str__ fails: that is not what went wrong first
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def broken_connection(error: BaseException) -> bool:
    """Return whether a rank's error only says that its connection to another rank broke.

    If another error is known, that one is the cause.
    """
    broken = ("onnection closed", "onnection reset", "onnection refused", "Broken pipe")
    return isinstance(error, RuntimeError) and any(part in one_line(error) for part in broken)


def reports_another(error: BaseException, rank: int) -> bool:
    """Return whether the `failed_rank` of an error that `rank` raised names another rank.

    A trainer raises such an error on every rank when one of them has failed.
    """
    failed = getattr(error, "failed_rank", rank)
    return isinstance(failed, int) and failed != rank


def _with_cells(message: str) -> str:
    """Return the message with the files of notebook cells replaced by "cell [5]".

    Only the notebook knows them, so a rank cannot do this.
    """

    def in_cell(place: re.Match[str]) -> str:
        cell = cell_name(place["traced"] or place["file"])
        if cell is None:
            return place[0]
        return cell if place["traced"] else f"{cell}, line {place['line']}"

    return re.sub(r'File "(?P<traced>[^"]+)"|(?P<file>\S+\.py):(?P<line>\d+)', in_cell, message)


def _for_whom(kind: str, peer: int | tuple[int, ...] | None, returned: Sequence[int]) -> str:
    if peer is None:
        return "from any rank" if kind == "recv" else "for a key that no rank has set"
    peers = peer if isinstance(peer, tuple) else (peer,)
    preposition = {"recv": "from", "send": "to"}.get(kind, "for")
    gone = " (returned)" if all(p in returned for p in peers) else ""
    return f"{preposition} {ranks_text(peers)}{gone}"
