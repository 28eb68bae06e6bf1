"""Named compute in the record: `with span("forward", microbatch=3): …`, and `compute(seconds)`, which moves a virtual rank's clock.

Outside a recorded run both do nothing, so that library code can carry them for free.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol


class Recorder(Protocol):
    """Where a rank's spans go. One a process on gloo and NCCL, one a thread on sim. What `now` gives is for it alone to read."""

    def now(self) -> Any: ...
    def add_span(self, name: str, start: Any, end: Any, args: dict[str, Any]) -> None: ...
    def compute(self, seconds: float) -> None: ...
    def agree(self, kind: str, ranks: Sequence[int], alike: Mapping[str, Any]) -> None: ...


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


@contextmanager
def span(name: str, **labels: Any) -> Iterator[None]:
    """Name what happens inside in the record, with labels such as `microbatch=3`."""
    target = recorder()
    if target is None:
        yield
        return
    start = target.now()
    try:
        yield
    finally:
        target.add_span(name, start, target.now(), labels)


def agree(kind: str, ranks: Sequence[int], **alike: Any) -> None:
    """Let a checked run see that all `ranks` call `kind` with the same arguments: a sum on one and a maximum on the other are neither, and
    a backward that some of them lack would wait for ever."""
    target = recorder()
    if target is not None:
        target.agree(kind, ranks, alike)


def compute(seconds: float) -> None:
    """Let a rank of the sim backend compute for `seconds` of virtual time. On real ranks it does nothing: their time is real."""
    if not seconds >= 0:
        raise ValueError(f"compute() takes the seconds to pass on a virtual rank's clock, zero or more; got {seconds!r}")
    target = recorder()
    if target is not None:
        target.compute(seconds)
