"""Rendezvous: the store through which the ranks of a launch find each other's addresses.

    launching process: Rendezvous().path
        ──▶ each rank: dist.FileStore(path) ──▶ a store for init_process_group

On Linux it is a file in memory that has no name and disappears with the launching process.
Elsewhere it is a temporary file. (A client of torch's TCPStore asks the name server for the name of
::ffff:127.0.0.1, which takes 5 s where the network answers slowly.)
"""

from __future__ import annotations

import contextlib
import os
import tempfile


class Rendezvous:
    """The store of one launch. The launching process holds it as long as its ranks run."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self.file = os.memfd_create("parallel101")
            self.path = f"/proc/{os.getpid()}/fd/{self.file}"
        else:
            self.file, self.path = tempfile.mkstemp()

    def close(self) -> None:
        if self.file >= 0:
            os.close(self.file)
            self.file = -1
            with contextlib.suppress(OSError):  # on Linux it is gone
                os.unlink(self.path)

    __del__ = close
