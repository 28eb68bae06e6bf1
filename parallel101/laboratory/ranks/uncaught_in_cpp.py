"""Holds a rank that C++ is about to abort, until its watcher has reported it.

    gloo's thread   throws, and nobody catches it ──▶ std::terminate ──▶ held ──▶ abort
    watcher                                     publishes this rank's last calls ──▶ a report

gloo throws in a thread of its own when more bytes arrive than a rank expects. Then C++ calls the
function that std::set_terminate has got. (Crashes by a signal do not come here.)
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# std::set_terminate, in the names that the C++ of Linux and macOS gives to functions
SET_TERMINATE = "_ZSt13set_terminatePFvvE"
LIBRARIES = ("libstdc++.so.6", "libc++.1.dylib")
HELD_FOR = 5.0  # seconds at most


class UncaughtInCpp:
    """Detects that C++ is about to abort this process, and delays it.

    Attributes:
        thrown: set when a thread has thrown an exception that nothing catches.
        may_abort: set it when that has been reported.
    """

    def __init__(self) -> None:
        self.thrown, self.may_abort = threading.Event(), threading.Event()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold an abort inside the block until it may come, for HELD_FOR seconds at most."""
        if (set_terminate := _set_terminate()) is None:
            yield
            return

        @HANDLER
        def terminate() -> None:
            self.thrown.set()
            self.may_abort.wait(HELD_FOR)
            HANDLER(before)()  # prints the exception, and aborts

        before = set_terminate(terminate)
        try:
            yield
        finally:
            set_terminate(HANDLER(before))


HANDLER = ctypes.CFUNCTYPE(None)


def _set_terminate() -> Any:
    """Return the function std::set_terminate, or None where it is not found."""
    for name in LIBRARIES:
        try:
            function = ctypes.CDLL(name)[SET_TERMINATE]
        except (OSError, AttributeError):
            continue
        function.argtypes, function.restype = [HANDLER], ctypes.c_void_p
        return function
    return None
