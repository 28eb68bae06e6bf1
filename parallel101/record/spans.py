"""Named compute in the record: `with span("forward", microbatch=3): …`, and `compute(seconds)`, which moves a virtual rank's clock.

Outside a recorded run both do nothing, so that library code can carry them for free.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from parallel101.mesh import Group


class Recorder(Protocol):
    """Where a rank's spans go. One a process on gloo and NCCL, one a thread on sim. What `now` gives is for it alone to read."""

    def now(self) -> Any: ...
    def add_span(self, name: str, start: Any, end: Any, args: dict[str, Any]) -> None: ...
    def compute(self, seconds: float) -> None: ...
    def agree(self, kind: str, ranks: Sequence[int], within: str, alike: Mapping[str, Any]) -> int: ...


_thread = threading.local()
_process: list[Recorder | None] = [None]


def recorder() -> Recorder | None:
    """The recorder of this thread's rank (sim), or of this process's (gloo, NCCL), or None outside a recorded run."""
    return getattr(_thread, "recorder", None) or _process[0]


def record_into(target: Recorder | None, *, this_thread_only: bool = False) -> None:
    """Make `target` where this rank's spans go; None ends it. On sim every virtual rank is a thread of one process."""
    if this_thread_only:
        _thread.recorder = target
    else:
        _process[0] = target


@contextlib.contextmanager
def span(name: str, /, **labels: Any) -> Iterator[None]:
    """Name what happens inside in the record, with labels such as `microbatch=3`, which it keeps as they are now: see `plain`.

    A label may have any name, `name` too: the span's own comes first, without a keyword.
    """
    target = recorder()
    if target is None:
        yield
        return
    labels = {key: plain(value) for key, value in labels.items()}
    start = target.now()
    try:
        yield
    finally:
        target.add_span(str(name), start, target.now(), labels)


def plain(value: Any) -> Any:
    """A label as JSON can hold it, so that no record is lost for one: numbers, strings, None, lists and dicts of such stay what they are.

    A tensor or NumPy array of 0 dims is its number, a tuple a list; of anything else, NaN and infinity too, the record has the text.
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


def agree(kind: str, members: Group, **alike: Any) -> int:
    """Let a checked run see that all members of a group call `kind` with the same arguments: a sum on one and a maximum on the other are
    neither, and a backward that some of them lack would wait for ever. Returns the how-manieth such call of theirs it is; 0 where nobody
    compares."""
    target = recorder()
    if target is None:
        return 0
    within = "" if members.process_group is None else members.process_group.group_name
    return target.agree(kind, members.ranks, within, alike)


@contextlib.contextmanager
def part_of(collective: str) -> Iterator[None]:
    """Messages that this thread posts inside belong to `collective`: the same must be said on the other side (see `disagreement`)."""
    before, _thread.part = part(), (("in", collective),)
    try:
        yield
    finally:
        _thread.part = before


def part() -> tuple[tuple[str, str], ...]:
    """Which collective of parallel101's own this thread is in, as a Call says it; (): none, or one that nobody named."""
    return getattr(_thread, "part", ())


def compute(seconds: float) -> None:
    """Let a rank of the sim backend compute for `seconds` of virtual time. On real ranks it does nothing: their time is real."""
    try:
        fits = seconds >= 0
    except TypeError:  #  no number
        fits = False
    if not fits:
        raise ValueError(f"compute() takes the seconds to pass on a virtual rank's clock, zero or more; got {seconds!r}")
    target = recorder()
    if target is not None:
        target.compute(seconds)
