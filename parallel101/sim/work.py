"""What isend, irecv and the async collectives return on the sim: to wait for it is to let virtual time pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from parallel101.record import torch_private
from parallel101.record.calls import Call
from parallel101.record.spans import recorder
from parallel101.sim.clock import Rank, World

if TYPE_CHECKING:
    _Work = dist.Work
else:
    _Work = object


class SimWork(_Work):
    """A message or a collective as one rank sees it. Whoever makes one sets all of it.

    It passes for a dist.Work. Of C++'s own making is only a collective's, which C++ may be given: to make one, and to find it again
    whenever it is used, takes C++ longer than all that is done with a message here.
    """

    __slots__ = ()
    world: World
    rank: Rank
    done: bool
    future: SimFuture | None

    @property  # type: ignore[misc]
    def __class__(self) -> type:  #  what isinstance asks
        return dist.Work

    def wait(self, timeout: object = None) -> bool:
        """Block this rank until the work is done. A time limit in wall time has no meaning here."""
        if not self.done:
            self.world.wait(self.rank, self)
        return True

    def is_completed(self) -> bool:
        """Whether it is done. Asked in vain twice at one moment of virtual time, it lets time pass to the next event."""
        if not self.done:
            self.world.poll(self.rank, self)
        return self.done

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
                self.settle()
            else:
                self.rank.promised.append(self)
                torch_private.after_backward(self.wait)
        return self.future

    def finish(self) -> None:
        """It is done: whoever waits for it can go on."""
        self.done = True
        rank = self.rank
        if self.future is not None:
            rank.promised.remove(self)
            rank.futures.append(self)
            self.world.wake(rank)
        elif rank.waiting is self:
            self.world.wake(rank)

    def settle(self) -> None:
        """Tell the future, on the rank's own thread."""
        if self.future is not None:
            self.future.set_result(self.result())

    # what a deadlock's report asks
    def call(self) -> Call:
        raise NotImplementedError

    def missing(self) -> set[int]:
        raise NotImplementedError


class SimFuture(torch.futures.Future):
    """The torch future of a work, or of what follows from it.

    C++ knows nothing of virtual time: where it waits for an unfinished future (as torch's DDP does at the end of its backward), it would
    wait for ever. So a work whose future is taken during a backward is waited for at the end of it, before what C++ puts there; and a
    program that waits for a future of its own, or for several, waits for the works that may finish it first (below).
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


def until(done: Callable[[], bool]) -> None:
    """Let virtual time pass until a future is done that the callbacks of this rank's works will set."""
    rank = recorder()
    if not isinstance(rank, Rank):  #  a thread that the program started: it may wait
        return
    while not done():
        if rank.futures:  #  a callback waits for what the next one sets
            rank.futures.pop(0).settle()
        elif rank.promised:
            outer, rank.waiting = rank.waiting, rank.promised[0]
            rank.world.block(rank)
            rank.waiting = outer
        elif rank.world.alone() and not done():
            raise RuntimeError(
                f"rank {rank.number} waits for a torch.futures.Future that nothing will set: it has no unfinished call whose get_future() "
                "was taken. Set it, or take the future that then() returns"
            )
        else:
            return  #  to another thread


def meanwhile() -> None:
    """A rank asked in vain whether a future is done: see World.poll."""
    rank = recorder()
    if isinstance(rank, Rank) and rank.promised:
        rank.world.poll(rank, rank.promised[0])
