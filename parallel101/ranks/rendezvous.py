"""Where the ranks of a launch meet: a store in which each leaves its address for the others (torch calls this rendezvous).

    launching process: MeetingPlace().address ──▶ each rank: meet(address, size) ──▶ a store for init_process_group

On Linux it is a file without a name, in memory, which is gone with the launching process. (Each client of torch's TCPStore asks the name
server for the name of ::ffff:127.0.0.1: nothing, usually; 5 s, where a network is slow to answer.) Elsewhere it is a port on loopback.
"""

from __future__ import annotations

import os
import socket

import torch.distributed as dist

Address = str | tuple[str, int]  #  a file's path, or host and port


class MeetingPlace:
    """Held by the launching process for as long as its ranks run."""

    def __init__(self, size: int):
        self.file = -1
        self.store: dist.TCPStore | None = None
        if hasattr(os, "memfd_create"):
            self.file = os.memfd_create("parallel101")
            self.address: Address = f"/proc/{os.getpid()}/fd/{self.file}"
        else:
            listener = socket.socket()
            listener.bind(("127.0.0.1", 0))  #  a port that the system chooses
            listener.listen(min(size * 2, 4096))
            host, port = self.address = listener.getsockname()
            self.store = dist.TCPStore(host, port, size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())

    def close(self) -> None:
        self.store = None
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    __del__ = close


def meet(address: Address, size: int) -> dist.Store:
    """The store, as a rank reaches it."""
    return dist.FileStore(address) if isinstance(address, str) else dist.TCPStore(*address, size, is_master=False)
