"""Comm, on which algorithms run: a rank's position, their number, isend and irecv by position.

    received = comm.irecv(inbox, source=left)
    sent = comm.isend(outbox, to=right)
    received.wait(), sent.wait()

gloo and sim start each message at once. NCCL wants the messages that belong together in one batch:
there they start at the first wait, or at `comm.flush()`. Post the receive before you wait for a
send: gloo's send is complete only after its receive was posted. An empty tensor needs no message.
Messages between two ranks are matched in the order in which they were posted. Their tag only
distinguishes them from the program's own messages, and NCCL ignores even that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from parallel101.mesh import Group
from parallel101.spans import COLLECTIVE_TAG, Collective, recorder, set_current_collective

P = ParamSpec("P")


class Work(Protocol):
    """A message in flight. `wait` returns when the tensor was sent, or holds what was received."""

    def wait(self) -> object: ...


@dataclass(eq=False)
class Comm:
    """One rank's view of its group, with which it sends and receives.

    `rank` is this rank's position in the group, not its global rank; so are `to` and `source`.
    `size` is the number of ranks, `shape` the mesh's.

    Args:
        group: the group, of which this rank is a member.
        device: of the tensors that are sent.
        batched: whether messages start in batches; see `batches`.
        collective: in a recorded run, the collective to which the messages belong. None: nobody
            records.
        tag: of the messages.
    """

    group: Group
    device: torch.device
    batched: bool = False
    collective: Collective | None = None
    tag: int = COLLECTIVE_TAG

    def __post_init__(self) -> None:
        assert self.group.position is not None
        self.rank, self.size, self.shape = self.group.position, self.group.size, self.group.shape
        # torch's group that has the messages; None without init_process_group
        self.carrier: Any = self.group.process_group or dist.group.WORLD
        self._batch: list[Batched] = []  # posted but not started

    def isend(self, tensor: Tensor, to: int) -> Work:
        """Begin to send `tensor` (contiguous) to position `to`."""
        return self._post(dist.isend, tensor, to)

    def irecv(self, tensor: Tensor, source: int) -> Work:
        """Begin to receive from position `source` into `tensor`.

        `tensor` is contiguous, and as large as the tensor that is sent.
        """
        return self._post(dist.irecv, tensor, source)

    def flush(self) -> None:
        """Start the messages posted so far, if this group's messages start in batches.

        The first wait does the same.
        """
        if not self._batch:
            return
        batch, self._batch = sorted(self._batch, key=lambda message: message.order), []
        works = list(self._recorded(dist.batch_isend_irecv, [message.op for message in batch]))
        for message in batch:
            message.works = works

    def subset(self, positions: Sequence[int]) -> Comm | None:
        """Return the Comm of some positions, numbered anew in that order.

        Returns None on the other ranks.
        """
        if self.rank not in positions:
            return None
        ranks = tuple(self.group.ranks[position] for position in positions)
        place, shape = positions.index(self.rank), (len(ranks),)
        group = self.group._replace(ranks=ranks, position=place, shape=shape)
        return Comm(group, self.device, self.batched, self.collective, self.tag)

    def in_order(self, positions: Sequence[int]) -> Comm:
        """Return the Comm of the same ranks, numbered anew: a ring the other way, for example."""
        turned = self.subset(positions)
        assert turned is not None
        return turned

    def along(self, *axes: int) -> Comm:
        """Return the Comm of the ranks on my line (plane, …) along these axes of the mesh."""
        group = self.group.along(*axes)
        recorded = self.collective
        collective = recorded and collective_of(recorded.operation, group.ranks, group.axis)
        return Comm(group, self.device, self.batched, collective, self.tag)

    def _post(self, direction: Callable[..., Any], tensor: Tensor, peer: int) -> Work:
        if tensor.numel() == 0:
            return Nothing()
        rank, process_group = self.group.ranks[peer], self.group.process_group
        if self.batched:
            op = dist.P2POp(direction, tensor, rank, process_group, self.tag)
            self._batch.append(Batched(self, op))
            return self._batch[-1]
        # as torch's isend and irecv do, without looking up again what is known here: a quarter of
        # the time that Python takes for a small message
        if process_group is not None:
            rank = dist.get_group_rank(process_group, rank)
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        start = self.carrier.send if direction is dist.isend else self.carrier.recv
        if self.collective is None:
            return start([values], rank, self.tag)
        return self._recorded(start, [values], rank, self.tag)

    def _recorded(self, post: Callable[..., Any], *args: Any) -> Any:
        """Post messages so that a recorder knows to which collective they belong."""
        set_current_collective(self.collective)
        try:
            return post(*args)
        finally:
            set_current_collective(None)


class Nothing:
    """The work of a message that need not be sent, because it is empty."""

    def wait(self) -> None:
        pass


class Batched:
    """A message of a batch. All of them start when the first is waited for, or at a flush.

    Waiting for one waits for all. `order` is the same on both sides and on all ranks. torch may
    still post the messages of a batch one by one, as it does for a process group that is written in
    Python. In that order, ranks that wait for each other do not form a cycle.
    """

    def __init__(self, comm: Comm, op: dist.P2POp):
        me, peer = comm.group.ranks[comm.rank], op.peer
        source, to = (me, peer) if op.op is dist.isend else (peer, me)
        self.comm, self.op, self.order = comm, op, (min(me, peer), max(me, peer), source > to)
        # the batch's works that nobody has waited for yet; all its messages share this list
        self.works: list[dist.Work] | None = None

    def wait(self) -> None:
        if self.works is None:
            self.comm.flush()
        while self.works:
            self.works.pop(0).wait()


def wait_all(works: Iterable[Work]) -> None:
    """Wait for all of the messages."""
    for work in list(works):
        work.wait()


def blocking(steps: Callable[P, Iterator[None]]) -> Callable[P, None]:
    """Return the blocking form of an algorithm that is written as a generator.

    Such a generator yields each time the caller could compute while messages are in flight.
    """

    @functools.wraps(steps)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        for _ in steps(*args, **kwargs):
            pass

    run.__name__ = run.__qualname__ = steps.__name__.removesuffix("_steps")
    return run


def comm_of(group: Group, device: torch.device, operation: str, tag: int = COLLECTIVE_TAG) -> Comm:
    """Return the Comm with which `operation` sends tensors of `device`.

    Raises ValueError if the group's backend cannot send them.
    """
    batched = False
    if group.size > 1:
        config = dist.get_backend_config(group.process_group)
        backend = backends_in(config).get(device.type)
        if backend is None:
            raise ValueError(
                f"the tensor (or model) is on {device}, but the group ({config}) sends from "
                f"{' and '.join(backends_in(config))} only: "
                "move it there, or choose the other backend (gloo for the CPU, nccl for GPUs)"
            )
        batched = batches(backend)
    named = None if recorder() is None else collective_of(operation, group.ranks, group.axis)
    return Comm(group, device, batched, named, tag)


# equal ones are one object, so the simulator compares the two sides of a message at once
collective_of = functools.lru_cache(maxsize=1024)(Collective)


@functools.cache
def backends_in(config: str) -> dict[str, str]:
    """Return the backend that sends from each type of device.

    For "cpu:gloo,cuda:nccl" that is {"cpu": "gloo", "cuda": "nccl"}. gloo has no send on GPUs. The
    sim has tensors on the meta device, too.
    """
    pairs = dict(part.split(":") for part in config.split(","))
    if pairs.get("cpu", "").startswith("sim"):
        pairs["meta"] = pairs["cpu"]
    # gloo sends from the CPU only
    return {d: backend for d, backend in pairs.items() if d == "cpu" or backend[-4:] != "gloo"}


def batches(backend: str) -> bool:
    """Return whether this backend's messages start in batches.

    On NCCL a send and a receive between two ranks deadlock unless they start together. On gloo a
    batch has been seen to hang.
    """
    return backend.endswith("nccl")
