"""The launching process while its ranks run: it hears them all, shows what they print, and knows when something is wrong.

rank r ──▶ printed lines ─────────▶ this process's output
       ──▶ calls, blocked, free ──▶ referee, who waits for whom ──▶ MisuseError, DeadlockError
       ──▶ result | error | death ─▶ results, RankFailed
"""

from __future__ import annotations

import contextlib
import marshal
import re
import select
import selectors
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from parallel101.ranks.diagnosis import Ended, Stillness, died
from parallel101.ranks.output import Lines, Screen, read_some
from parallel101.ranks.processes import Rank, kill
from parallel101.ranks.wire import BLOCKED, BOOKS, CALL, ERROR, FREE, IMPORTED, LEAVE, PLACES, RESULT, TELL, WHERE, Wire, unpack
from parallel101.record.calls import Call, Referee
from parallel101.record.errors import DeadlockError, LaunchTimeout, MisuseError, RankFailed
from parallel101.record.wait_for import Board, Standing
from parallel101.record.where import shown

SETTLE = 0.05  #  seconds after a failure in which other ranks' failures still count as the same event
CALLS = 0.05  #  seconds between two looks at what the ranks of a checked run have posted
ECHO = 1.0  #  the same, when all that is known is that a connection broke or that another rank failed: that rank will be heard of


@dataclass
class State:
    """What is known of one rank."""

    rank: int
    process: Rank
    wire: Wire
    lines: tuple[Lines, Lines]
    standing: Standing
    result: tuple[bytes, list] | None = None
    error: tuple[BaseException, str, str] | None = None  #  itself, in a line, and its traceback
    consequence: bool = False  #  its error only says that another rank has failed
    events: list[tuple] | None = None
    unfinished: list[tuple] = field(default_factory=list)
    places: list[tuple[int, str]] | None = None  #  where it is (each virtual rank, on sim), when it was asked
    status: bytes = b""
    exitcode: int | None = None
    ended: bool = False
    untold: bytes = b""  #  the beginning of a call whose end has not come yet

    def heard(self, report: tuple) -> None:
        """Take over a rank's own books (see record.Ledger.report)."""
        standing = self.standing
        standing.posted, standing.collectives, standing.dropped, standing.recent, standing.places = report


class Monitor:
    """Runs the launching side of a job to its end. `watch` returns when every rank has returned, and raises what went wrong."""

    def __init__(self, ranks: Sequence[Rank], timeout: float, names: Sequence[str], checked: bool = False, on_gloo: bool = False):
        self.board = Board(len(ranks))
        screen = Screen()
        self.states = [
            State(
                r,
                process,
                Wire(process.control),
                (Lines(names[r], "stdout", screen), Lines(names[r], "stderr", screen)),
                self.board.ranks[r],
            )
            for r, process in enumerate(ranks)
        ]
        self.timeout = timeout
        self.checked = checked and all(rank.calls is not None for rank in ranks)
        self.referee = Referee()
        self.selector = selectors.DefaultSelector()
        for state in self.states:
            self.selector.register(state.wire, selectors.EVENT_READ, (self._hear, state))
            for end, lines in zip((state.process.out, state.process.err), state.lines, strict=True):
                self.selector.register(end, selectors.EVENT_READ, (self._show, lines))
            self.selector.register(state.process.status, selectors.EVENT_READ, (self._status, state))
        self.stillness = Stillness([rank.pid for rank in ranks]) if on_gloo else None
        self.failed_at: float | None = None
        self.imported: set[str] = set()  #  slow imports that ranks had to make

    # ---- the loop ----

    def watch(self) -> None:
        deadline = time.monotonic() + self.timeout
        while not all(state.result is not None for state in self.states):
            now = time.monotonic()
            if self.failed_at is not None and now >= self.failed_at:
                raise self._failure()
            if (deadlock := self.board.deadlock(now)) is not None:
                raise self.referee.verdict() or deadlock
            if self.stillness is not None and self.stillness.lasts(now, all(s.blocked is not None or s.returned for s in self.board.ranks)):
                raise self.referee.verdict() or self.board.standstill(self.checked)
            if now >= deadline:
                raise self.referee.verdict() or self._too_late()
            again = self.board.due if self.board.suspected is not None else deadline
            if self.stillness is not None and self.stillness.began is not None:
                again = min(again, self.stillness.due)
            read_again = now + CALLS if self.checked else deadline
            self._listen(min(deadline, again, read_again, deadline if self.failed_at is None else self.failed_at) - now)
            self._read_calls()
        self._read_calls()
        if self.referee.suspects:
            raise self.referee.verdict()  # type: ignore[misc]

    def _listen(self, seconds: float) -> None:
        for key, _ in self.selector.select(min(max(0.0, seconds), 3600.0)):
            if key.fileobj in self.selector.get_map():  #  an earlier one of this round may have ended it
                handle, about = key.data
                handle(key.fileobj, about)

    def _show(self, end: Any, lines: Lines) -> None:
        data = read_some(end)
        if data:
            lines.feed(data)
        else:
            self.selector.unregister(end)

    def _status(self, end: Any, state: State) -> None:
        data = read_some(end)
        state.status += data
        told = re.search(rb"(?:\A|\n)(-?\d+)\n\Z", state.status)
        if data and told is None:
            return
        self.selector.unregister(end)
        state.exitcode = None if told is None else int(told[1])
        kill(state.process)  #  what it started may hold its ends of our pipes
        state.wire.sock.settimeout(SETTLE)
        while (
            state.wire in self.selector.get_map() and select.select([state.wire], [], [], 0)[0]
        ):  #  what it said before it died comes first
            self._hear(state.wire, state)
        if state.wire in self.selector.get_map():
            self.selector.unregister(state.wire)
        state.ended = True
        if state.result is None and state.error is None:
            self._fail_within(SETTLE)

    def _hear(self, wire: Wire, state: State) -> None:
        try:
            kind, body, buffers = wire.receive_packed()
        except (EOFError, OSError):
            self.selector.unregister(wire)
            return
        if kind == RESULT:
            state.result, state.standing.returned = (body, buffers), True
            return
        value = unpack(body, buffers)
        if kind == CALL:
            self._judge(Call(*value))
        elif kind == BLOCKED:
            call, report = value
            state.heard(report)
            state.standing.blocked = Call(*call)
        elif kind == FREE:
            state.standing.blocked = None
        elif kind == BOOKS:
            state.events, state.unfinished, report = value
            state.heard(report)
        elif kind == IMPORTED:
            self.imported.update(value)
        elif kind == PLACES:
            state.places = value
        elif kind == ERROR:
            rank, error, headline, text, state.consequence = value
            state.error, state.standing.blocked = (error, headline, text), None
            state.rank = rank
            self._fail_within(ECHO if state.consequence and len(self.states) > 1 else SETTLE)

    def _read_calls(self) -> None:
        """Let the referee hear what the ranks of a checked run have posted since the last time."""
        for state in self.states if self.checked else ():
            assert state.process.calls is not None
            while data := read_some(state.process.calls):
                data, start = state.untold + data, 0
                while len(data) - start >= 4 and len(data) - start >= 4 + (size := int.from_bytes(data[start : start + 4], "little")):
                    self._judge(Call(*marshal.loads(data[start + 4 : start + 4 + size])))
                    start += 4 + size
                state.untold = data[start:]

    def _judge(self, call: Call) -> None:
        if self.referee.hear(call):
            self._fail_within(SETTLE)

    def _fail_within(self, seconds: float) -> None:
        moment = time.monotonic() + seconds
        self.failed_at = moment if self.failed_at is None else min(self.failed_at, moment)

    # ---- what went wrong ----

    def _failure(self) -> BaseException:
        """The root cause among all that is known to have failed."""
        self._read_calls()
        for state in self.states:  #  a rank may have named the misuse before anything broke
            if state.error is not None and isinstance(state.error[0], MisuseError):
                return state.error[0]
        if (verdict := self.referee.verdict()) is not None:
            return verdict
        dead = [state for state in self.states if state.ended and state.result is None and state.error is None]
        raised = [state for state in self.states if state.error is not None]
        raised.sort(key=lambda state: (state.consequence, state.rank))
        if dead and (not raised or raised[0].consequence):
            state = dead[0]
            return died(state.rank, state.exitcode, state.status.decode(errors="replace"), state.lines[1].tail, self.checked)
        state = raised[0]
        assert state.error is not None
        error, headline, text = state.error
        if isinstance(error, DeadlockError | MisuseError):
            return error
        if isinstance(error, Ended):  #  a virtual rank's death
            return died(state.rank, error.code)
        failure = RankFailed(f"rank {state.rank} raised {headline}\n\n{text}".rstrip(), state.rank)
        failure.__cause__ = error
        return failure

    def _too_late(self) -> LaunchTimeout:
        self.ask_where()
        lines = [f"the ranks were still at work after {self.timeout:g} s (launch(..., timeout=seconds) allows more):"]
        for state in self.states:
            if state.result is not None:
                lines.append(f"  rank {state.rank} had returned")
            elif (call := state.standing.blocked) is not None:
                lines.append(
                    f"  rank {state.rank} waited in {call.kind} for {', '.join(map(str, call.peers)) or 'any rank'}, at {shown(call.where)}"
                )
            else:
                lines += [
                    f"  rank {rank} was at {shown(place)}" for rank, place in state.places or [(state.rank, "a place it could not tell")]
                ]
        return LaunchTimeout("\n".join(lines))

    # ---- the end ----

    def ask_where(self, seconds: float = 0.5) -> None:
        """Ask each rank that still runs where it is; one that does not answer in time keeps `places` None."""
        asked = [state for state in self.states if not state.ended and state.result is None and _tell(state, WHERE)]
        self._until(lambda: all(state.places is not None or state.ended for state in asked), seconds)

    def collect_events(self, seconds: float = 0.5) -> None:
        """Ask for what was recorded up to now by ranks that have not said."""
        asked = [state for state in self.states if not state.ended and state.events is None and _tell(state, TELL)]
        self._until(lambda: all(state.events is not None or state.ended for state in asked), seconds)

    def dismiss(self) -> None:
        """All is well: let the ranks go, and see them out."""
        for state in self.states:
            _tell(state, LEAVE)
        self._until(lambda: all(state.ended for state in self.states), 5.0)

    def close(self, explained: bool = False) -> None:
        """Leave nothing behind: no process, no socket, no unread line. `explained`: an error is about to say why the run failed."""
        with contextlib.ExitStack() as at_last:
            for close in (self.selector.close, *(state.process.close for state in self.states)):
                at_last.callback(close)
            for state in self.states:
                kill(state.process)
            self._until(lambda: all(state.ended for state in self.states), 5.0)
            self._until(lambda: False, 0.0)
            for state in self.states:
                for lines in state.lines:
                    lines.close(explained)

    def _until(self, done: Any, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not done() and self.selector.get_map():
            left = deadline - time.monotonic()
            self._listen(left)
            if left <= 0:
                return


def _tell(state: State, kind: bytes) -> bool:
    try:
        state.wire.send(kind)
    except OSError:
        return False
    return True
