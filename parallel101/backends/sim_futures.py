"""torch futures of works on the sim. Waiting for one lets virtual time pass, also where C++ would wait (torch's DDP does).

C++ knows nothing of virtual time: it would block on an unfinished future for ever. So during backward every work whose future was taken
is waited for at the end of that backward, before the callbacks that C++ itself puts there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from parallel101.backends import torch_private

if TYPE_CHECKING:
    from parallel101.backends.sim_messages import SimWork


class SimFuture(torch.futures.Future):
    """The future of a work, or of what follows from it."""

    def __init__(self, work: SimWork):
        super().__init__()
        self.work = work

    def wait(self) -> Any:
        self.work.wait()
        return super().wait()

    def done(self) -> bool:
        return self.work.is_completed() and super().done()

    def then(self, callback: Callable[[Any], Any]) -> SimFuture:
        following = SimFuture(self.work)

        def follow(_: Any) -> None:
            try:
                following.set_result(callback(self))
            except Exception as error:
                following.set_exception(error)

        self.add_done_callback(follow)
        return following


def future_of(work: SimWork) -> SimFuture:
    """The work's future, made when it is first asked for."""
    if work.future is None:
        work.future = SimFuture(work)
        if work.done:
            work.future.set_result(work.result())
        else:
            torch_private.after_backward(work.wait)
    return work.future
