"""Rendezvous: the store through which the ranks of a launch find each other's addresses.

    launching process: Rendezvous(size).address
        ──▶ each rank: connect(address, size) ──▶ a store for init_process_group

On Linux it is a file in memory that has no name and disappears with the launching process.
Elsewhere it is a port on loopback. (A client of torch's TCPStore asks the name server for the name
of ::ffff:127.0.0.1, which takes 5 s where the network answers slowly.)
"""

from __future__ import annotations

import os
import socket

import torch.distributed as dist

Address = str | tuple[str, int]  # a file's path, or host and port


class Rendezvous:
    """The store of one launch. The launching process holds it as long as its ranks run."""

    def __init__(self, size: int):
        self.file = -1
        self.store: dist.TCPStore | None = None
        if hasattr(os, "memfd_create"):
            self.file = os.memfd_create("parallel101")
            self.address: Address = f"/proc/{os.getpid()}/fd/{self.file}"
        else:
            listener = socket.socket()
            listener.bind(("127.0.0.1", 0))  # the system chooses the port
            listener.listen(min(size * 2, 4096))
            host, port = self.address = listener.getsockname()
            self.store = dist.TCPStore(
                host,
                port,
                size,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )

    def close(self) -> None:
        self.store = None
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    __del__ = close


def connect(address: Address, size: int) -> dist.Store:
    """Return the store that a rank connects to."""
    return (
        dist.FileStore(address)
        if isinstance(address, str)
        else dist.TCPStore(*address, size, is_master=False)
    )
