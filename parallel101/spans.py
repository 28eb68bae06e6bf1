"""Spans: what a rank computes or waits for, and which collective a message belongs to.

    with span("forward", microbatch=3): …        named compute
    with wait_span("wait for gradients"): …      a named wait: the rank computes nothing
    compute(0.5)                                 half a second on the clock of a virtual rank
    with unrecorded(): …                         nothing in it is recorded, messages included

Outside a recorded run all of these do nothing, so library code can keep them. This file imports
nothing of parallel101: copy it along with the collectives. It records nothing itself: the code that
records a run sets a `Recorder`. Code that needs to know in which span it is called, such as the
count of activations, sets a listener.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

# of the messages of our collectives, so that they never match a message that the program sends
# itself
COLLECTIVE_TAG = 101_101
# the span without length that `parallel101 run` records after each step of the script's optimizer
OPTIMIZER_STEP = "optimizer step"


class Collective(NamedTuple):
    """The collective of parallel101 to which a message belongs."""

    operation: str  # "all_reduce", …
    ranks: tuple[int, ...]  # ranks of the world, in the order of the group
    # the axis of the mesh along which they are; None if the group is not from a mesh, or its axes
    # have no names
    axis: str | None


class Recorder(Protocol):
    """Records one rank: one a process on gloo and NCCL, one a thread on sim.

    Only the recorder itself reads what `now` returns.
    """

    def now(self) -> Any: ...
    def add_span(
        self, name: str, start: Any, end: Any, args: dict[str, Any], waiting: bool = False
    ) -> None: ...
    def compute(self, seconds: float) -> None: ...
    def unrecorded(self) -> contextlib.AbstractContextManager[None]: ...

    def agree(self, kind: str, ranks: Sequence[int], within: str, alike: Mapping[str, Any]) -> int:
        """Compare `kind` and `alike` with what the other ranks pass in the same call.

        In a checked run, a difference raises. Calls are numbered for each list of ranks and
        `within`. Returns the number, or 0 in a run that checks nothing.
        """
        ...


class _Thread(threading.local):
    """This thread's own recorder, listeners and current collective."""

    recorder: Recorder | None = None
    listeners: tuple[Listener, ...] = ()
    collective: Collective | None = None


_thread = _Thread()
_process: list[Recorder | None] = [None]


def recorder() -> Recorder | None:
    """Return the recorder of this thread's rank (sim) or this process's rank (gloo, NCCL).

    Outside a recorded run it is None.
    """
    return _thread.recorder or _process[0]


def record_into(target: Recorder | None, *, this_thread_only: bool = False) -> None:
    """Make `target` the recorder of this process, or of this thread on sim. None ends it.

    On sim each rank is a thread.
    """
    if this_thread_only:
        _thread.recorder = target
    else:
        _process[0] = target


# what it returns goes around the span; the name is None for what `unrecorded` leaves out
Listener = Callable[[str | None, Mapping[str, Any]], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call the listener with the name and the labels of each of this thread's spans inside.

    The listeners of enclosing blocks are called, too.
    """
    before = _thread.listeners
    _thread.listeners = (*before, listener)
    try:
        yield
    finally:
        _thread.listeners = before


def current_collective() -> Collective | None:
    """Return the collective of parallel101 whose message this thread is posting.

    None means that the program posts a message of its own.
    """
    return _thread.collective


def axis_described(description: str) -> str | None:
    """Return the name of the mesh axis whose process group has this description.

    For "mesh_tp" that is "tp". For "mesh_dim_0", whose axis has no name, and for other groups it is
    None.
    """
    made_by, _, name = description.partition("_")
    named = made_by == "mesh" and name != "default" and not name.removeprefix("dim_").isdigit()
    return name if named else None


def set_current_collective(collective: Collective | None) -> None:
    """Set the collective to which the messages belong that this thread posts from now on."""
    _thread.collective = collective


def span(name: str, /, **labels: Any) -> contextlib.AbstractContextManager[None]:
    """Record what happens inside under `name`, with labels such as `microbatch=3`.

    `plain` turns the labels' values into JSON at once. A label may have any name, even
    `name`: the span's own name comes first, without a keyword.

    Example:
        >>> def program():
        ...     with p101.span("forward", microbatch=3):
        ...         p101.compute(seconds=0.5)
        >>> run = p101.launch(program, world_size=2, backend="sim")
        >>> [(e.rank, e.name, e.args, e.start, e.end) for e in run.trace.spans()]
        [(0, 'forward', {'microbatch': 3}, 0.0, 0.5), (1, 'forward', {'microbatch': 3}, 0.0, 0.5)]
    """
    return _span(name, labels, waiting=False)


def wait_span(name: str, /, **labels: Any) -> contextlib.AbstractContextManager[None]:
    """Record a `span` in which the rank waits for other ranks.

    Pictures and sums do not count it as compute.
    """
    return _span(name, labels, waiting=True)


@contextlib.contextmanager
def _span(name: str, labels: dict[str, Any], waiting: bool) -> Iterator[None]:
    target, listeners = recorder(), _thread.listeners
    if target is None and not listeners:
        yield
        return
    labels = {key: plain(value) for key, value in labels.items()}
    start = target.now() if target else None
    try:
        with contextlib.ExitStack() as stack:
            for listener in listeners:
                stack.enter_context(listener(str(name), labels))
            yield
    finally:
        if target:
            target.add_span(str(name), start, target.now(), labels, waiting)


def plain(value: Any) -> Any:
    """Return a label's value in the types that JSON has.

    Numbers, strings, None, and lists and dicts of them stay as they are. A tuple becomes a list,
    and a tensor or NumPy array of 0 dims becomes its number. NaN, infinity and everything else
    become text.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, int):
        return int(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        with contextlib.suppress(Exception):  # a tensor on the meta device has no number
            return plain(value.item())
    return str(value)


def compute(seconds: float) -> None:
    """Let a rank of the sim backend compute for `seconds` of virtual time.

    On real ranks it does nothing: their time is real.
    """
    if not (hasattr(seconds, "__float__") and float(seconds) >= 0):
        raise ValueError(
            "compute() takes the seconds to pass on a virtual rank's clock, zero or more; got "
            f"{seconds!r}"
        )
    target = recorder()
    if target is not None:
        target.compute(seconds)


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Leave what happens inside out of the run.

    This covers messages, collectives, spans, compute(), and on sim the time that they take. All
    ranks of a group enter and leave it together: make a collective of the group the first and the
    last thing inside. Wait inside for what was begun inside, and before it for what was begun
    before. Make process groups outside.

    Inside, deadlocks and calls that do not agree are found as elsewhere. On sim each rank goes on
    at the time at which it entered, as if the block had not been there (second_world.py names the
    one exception). On real ranks the time that passes inside is real: it is between the events
    before and after the block, and counts as computing.
    """
    with contextlib.ExitStack() as stack:
        for listener in _thread.listeners:
            stack.enter_context(listener(None, {}))
        if (target := recorder()) is not None:
            stack.enter_context(target.unrecorded())
        yield
