"""The work that isend, irecv and async collectives return on the sim, with its torch future.

It is a dist.Work whose wait() lets virtual time pass. A message's work is in message_matching.py, a
collective's in group.py. This file has what they share.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from parallel101.laboratory.record import torch_private
from parallel101.laboratory.record.calls import Call
from parallel101.laboratory.record.signatures import own_limit
from parallel101.laboratory.sim.clock import VirtualRank, World
from parallel101.spans import recorder

if TYPE_CHECKING:  # for type checkers a SimWork is a dist.Work
    _Work = dist.Work
else:
    _Work = object


class SimWork(_Work):
    """A message or a collective as one rank sees it. Its subclasses set all of these attributes.

    It passes for a dist.Work, but only a collective's is a C++ object, because C++ code may receive
    it. C++ takes longer to make one, and to find its Python side at each use, than the sim needs
    for a whole message.
    """

    __slots__ = ("__weakref__",)
    world: World
    rank: VirtualRank
    done: bool
    future: SimFuture | None

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what isinstance() asks
        return dist.Work

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block this rank until the work is done, for up to `timeout` of virtual time.

        Raises RuntimeError if that is over.
        """
        if not self.done:
            self.world.wait(self.rank, self, own_limit(timeout))
        self.settle()
        return True

    def is_completed(self) -> bool:
        """Return whether the work is done.

        If a rank asks twice at the same virtual time, time moves to the next event.
        """
        if not self.done:
            self.world.poll(self.rank, self)
        if self.done:
            self.settle()
        return self.done

    def settle(self) -> None:
        """Note that the program knows that the work is done: its tensors are its own again."""

    def is_success(self) -> bool:
        return self.done

    def exception(self) -> None:
        return None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        raise NotImplementedError

    def get_future(self) -> SimFuture:
        if self.future is None:
            self.future = SimFuture(self)
            if self.done:
                self.set_future()
            else:
                self.rank.unfinished_futures.append(self)
                torch_private.after_backward(self.wait)
        if self.done:
            self.settle()
        return self.future

    def finish(self) -> None:
        """Note that the work is done, and wake the rank that waits for it."""
        self.done = True
        rank = self.rank
        if self.future is not None:
            rank.unfinished_futures.remove(self)
            rank.finished_futures.append(self)
            self.world.wake(rank)
        elif rank.waiting is self:
            self.world.wake(rank)

    def set_future(self) -> None:
        """Set the future's result, on the rank's own thread."""
        if self.future is not None:
            self.future.set_result(self.result())

    # ---- what the report of a deadlock needs: see Waitable ----

    def call(self) -> Call:
        raise NotImplementedError

    def missing(self) -> set[int]:
        raise NotImplementedError


class SimFuture(torch.futures.Future):
    """The torch future of a work, or one that follows from it by `then`.

    C++ code that waits for an unfinished future would wait forever, because only Python lets
    virtual time pass. torch's DDP does so at the end of its backward. So a work whose future is
    taken during a backward is waited for at the end of that backward, before C++ waits. If a
    program waits for a future of its own, or for several, `wait_for_future` waits for the works
    that may set it.
    """

    def __init__(self, work: SimWork):
        super().__init__()
        self.work = work

    def wait(self) -> Any:
        self.work.wait()
        return super().wait()

    def done(self) -> bool:
        return self.work.is_completed() and super().done()

    def then(self, callback: Any) -> SimFuture:
        following = SimFuture(self.work)

        def follow(_: Any) -> None:
            try:
                following.set_result(callback(self))
            except Exception as error:
                following.set_exception(error)

        self.add_done_callback(follow)
        return following


def wait_for_future(done: Callable[[], bool]) -> None:
    """Let virtual time pass until a future is done. Callbacks of this rank's works will set it."""
    rank = recorder()
    # a thread that the program started, which may simply wait
    if not isinstance(rank, VirtualRank):
        return
    while not done():
        if rank.finished_futures:  # a callback waits for a future that the next callback sets
            rank.finished_futures.pop(0).set_future()
        elif rank.unfinished_futures:
            outer, rank.waiting = rank.waiting, rank.unfinished_futures[0]
            rank.world.block(rank)
            rank.waiting = outer
        elif rank.world.only_rank_threads() and not done():
            raise RuntimeError(
                f"rank {rank.number} waits for a torch.futures.Future that nothing will set: the "
                "rank has no unfinished call whose get_future() was taken. Call set_result() on "
                "it, or wait for the future that then() returns"
            )
        else:
            return  # another thread of the program may set it


def poll_future() -> None:
    """Handle a rank's question whether a future is done, while it is not: see World.poll."""
    rank = recorder()
    if isinstance(rank, VirtualRank) and rank.unfinished_futures:
        rank.world.poll(rank, rank.unfinished_futures[0])
