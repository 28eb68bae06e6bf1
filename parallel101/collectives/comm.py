"""What an algorithm is given: who am I, how many are we, and isend and irecv between positions of the group.

    received = comm.irecv(inbox, source=left)      on gloo and sim both are under way at once; NCCL wants the messages that
    sent = comm.isend(outbox, to=right)            belong together in one batch, so there they leave together at the first wait
    received.wait(), sent.wait()

Post the receive before the wait for a send: gloo's send is complete only when it was received. An empty tensor needs no message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallel101.mesh import Group, along
from parallel101.record.calls import COLLECTIVE_TAG


class Work(Protocol):
    """A message under way: `wait` returns when the tensor has left (isend) or holds what was sent (irecv)."""

    def wait(self) -> object: ...


class Comm:
    """One rank's view of its group: `rank` is its position, `size` how many they are, `shape` the mesh's, `tag` its messages'."""

    def __init__(self, group: Group, position: int, device: torch.device, tag: int = COLLECTIVE_TAG, batch: Batch | None = None):
        self.group = group
        self.rank = position
        self.size = group.size
        self.shape = group.shape
        self.device = device
        self.tag = tag
        self.batch = batch or Batch()
        self.batched = in_batches(device)

    def isend(self, tensor: Tensor, to: int) -> Work:
        """Begin to send `tensor` (contiguous) to position `to`."""
        return self._post(dist.isend, tensor, to)

    def irecv(self, tensor: Tensor, source: int) -> Work:
        """Begin to receive into `tensor` (contiguous, as large as what is sent) from position `source`."""
        return self._post(dist.irecv, tensor, source)

    def subset(self, positions: Sequence[int]) -> Comm | None:
        """The Comm of some of the positions, numbered anew in that order; None on a rank that is not one of them."""
        return self._of(positions) if self.rank in positions else None

    def along(self, *axes: int) -> Comm:
        """The ranks of my line (plane, …) along these axes of the mesh."""
        return self._of(along(self.shape, self.rank, axes))

    def _of(self, positions: Sequence[int]) -> Comm:
        ranks, place = tuple(self.group.ranks[position] for position in positions), positions.index(self.rank)
        return Comm(Group(ranks, place, (len(ranks),), self.group.process_group), place, self.device, self.tag, self.batch)

    def _post(self, direction, tensor: Tensor, peer: int) -> Work:
        if tensor.numel() == 0:
            return Nothing()
        rank, process_group = self.group.ranks[peer], self.group.process_group
        if not self.batched:
            return direction(tensor, rank, process_group, self.tag)
        return self.batch.add(dist.P2POp(direction, tensor, rank, process_group), self.group.ranks[self.rank])


class Nothing:
    """The work of a message that need not be sent."""

    def wait(self) -> None:
        pass


def in_batches(device: torch.device) -> bool:
    """On NCCL a send and a receive between two ranks deadlock unless they leave together; on gloo a batch has been seen to hang."""
    return device.type == "cuda"


class Batch:
    """The messages since the last wait, which leave together."""

    def __init__(self) -> None:
        self.waiting: list[Batched] = []

    def add(self, message: dist.P2POp, me: int) -> Batched:
        source, to = (me, message.peer) if message.op is dist.isend else (message.peer, me)
        self.waiting.append(Batched(self, message, (min(me, message.peer), max(me, message.peer), source > to)))
        return self.waiting[-1]

    def leave(self) -> None:
        posted, self.waiting = sorted(self.waiting, key=lambda work: work.order), []
        works = dist.batch_isend_irecv([work.message for work in posted])
        for work in posted:
            work.works = works


class Batched:
    """One message of a batch, which leaves when the first of them is waited for.

    `order` is the same on both sides, and one for all ranks: where torch posts a batch one by one after all (a group that is watched
    from Python), nobody waits for another in a circle.
    """

    def __init__(self, batch: Batch, message: dist.P2POp, order: tuple[int, int, bool]):
        self.batch, self.message, self.order = batch, message, order
        self.works: list[dist.Work] | None = None

    def wait(self) -> None:
        if self.works is None:
            self.batch.leave()
        for work in self.works or ():
            work.wait()


def wait_all(works: Iterable[Work]) -> None:
    for work in list(works):
        work.wait()


def comm_of(group: Group, position: int, device: torch.device, tag: int = COLLECTIVE_TAG) -> Comm:
    """The Comm for tensors of `device`. Raises ValueError where the group's backend can't send those.

    (NCCL knows no tags: there all messages of two ranks meet in the order of posting.)
    """
    if group.size > 1:
        config = dist.get_backend_config(group.process_group)
        known = devices_in(config)
        if device.type not in known:
            raise ValueError(
                f"a tensor (or model) on {device}, and the group ({config}) sends from {' and '.join(known)} only: move it there, "
                "or choose the other backend (gloo for the CPU, nccl for GPUs)"
            )
    return Comm(group, position, device, tag)


def devices_in(config: str) -> list[str]:
    """The types of device between which ranks can send: "cpu:gloo,cuda:nccl" → ["cpu", "cuda"]. On gloo the CPU only."""
    pairs = [part.split(":") for part in config.split(",")]
    return [device for device, backend in pairs if device == "cpu" or not backend.endswith("gloo")]
