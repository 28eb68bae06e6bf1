"""Applies rules="nccl": the guarantees on which a program may rely with NCCL.

Each rank has one queue per communicator, and operations leave it in order.

    rank 0's queue to rank 1       rank 1's queue to rank 0
    send to 1 ── starts            send to 0 ── starts
    recv from 1  behind it         recv from 0  behind it

    Both wait for a receive that is queued behind the other's send: a deadlock. In one batch, all
    four start together, and the program runs.

The rules, and where they come from (`NCCL.cpp` is torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp,
`guide` is the NCCL User Guide):

1. An operation starts when all that the rank put into the same queue before it has ended. torch
   runs each communicator on one stream (NCCL.cpp, `ncclStreams_` in `initNCCLComm`, `collective`
   and `pointToPoint`); a stream runs its kernels in order (CUDA), and a send or receive "is
   blocking for the GPU" (guide, "Point To Point Communication Functions"). It occupies the queue,
   not the rank.
2. A group's collectives and its batches share the group's communicator; an isend or irecv outside a
   batch uses a communicator of the two ranks. (NCCL.cpp, `pointToPoint`: key `getKeyFromDevice` if
   `ncclActiveGroupCounter_ > 0`, else `getKeySendRecv`.) If the program passes `device_id` to
   init_process_group, messages outside a batch use the group's queue as well, here too. So they do
   in torch's newer backend (c10d/nccl2): a batch is right everywhere.
3. What is in one batch_isend_irecv starts together and ends together (NCCL.cpp, `startCoalescing`
   and `endCoalescing`; guide, "Point-to-point communication": calls in a group "should never block
   each other"). So a wait for one message waits for all of the batch.
4. Tags do not exist: two ranks' messages through one communicator meet in order. (NCCL.cpp, `send`
   and `recv` leave `tag` unused.)
5. A receive from any rank is refused. (NCCL.cpp, `recvAnysource` raises NotImplementedError.)
6. Different collectives on the ranks of a group never meet: a hang, so a DeadlockError here.
   (Guide, "Collective Operations": not the same call on every rank is "undefined behavior,
   including hangs, crashes, or data corruption". If only sizes, dtypes or roots differ, NCCL may
   not hang. That is a MisuseError here, as under gloo's rules.)
7. A send ends when it is received, unless it fits `Network(eager=…)`. (Guide, "Point-to-point
   communication": a call blocks until it completes. NCCL promises no buffer.)

Not checked: if a batch is the first call of a group, torch wants all ranks of the group to take
part (torch's docs, batch_isend_irecv). On GPUs work.wait() blocks the stream and not the CPU. Here
it blocks the rank, so a run can't tell what the CPU would do meanwhile. What a deadlock's error
says about queues is in queue_notes.py, what may hang although a run ends in nccl_warnings.py.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist

from parallel101.laboratory.record import torch_private
from parallel101.laboratory.record.calls import Call
from parallel101.laboratory.record.events import EventRow
from parallel101.laboratory.record.program_lines import caller
from parallel101.laboratory.sim.async_work import SimFuture, SimWork
from parallel101.laboratory.sim.clock import World
from parallel101.laboratory.sim.group import CollectiveWork, SharedState, SimGroup
from parallel101.laboratory.sim.message_matching import MessageWork
from parallel101.laboratory.sim.nccl_warnings import CollectiveKey, NcclWarnings
from parallel101.laboratory.sim.torch_collectives import NCCL_DTYPES


class Operation(SimWork):
    """A message, a batch of messages, or a collective that a rank puts into a queue as one.

    All of it starts together.
    """

    def __init__(self, group: QueuedGroup):
        self.group = group
        self.world = group.world
        self.rank = group.member
        self.label = group.label
        self.done = self.in_queue = self.started = False
        self.future = None
        self.messages: list[MessageWork] = []
        self.collectives: list[QueuedCollective] = []
        self.tensors: list[torch.Tensor] = []
        self.to_end = 0  # messages and collectives that have not ended
        self.communicator = ""
        self.queue: deque[Operation]  # of its rank and communicator

    def add(self, one: MessageWork | QueuedCollective) -> None:
        self.to_end += 1
        if isinstance(one, QueuedCollective):
            one.operation = self
            self.collectives.append(one)
        else:
            one.on_end = self.one_ended
            self.messages.append(one)
            self.tensors += one.result()

    @property
    def to_meet(self) -> list[MessageWork]:
        """Return its messages whose other side has not started."""
        return [message for message in self.messages if not message.met]

    def put(self, communicator: str) -> None:
        """Put it into its rank's queue of a communicator."""
        queue = self.group.shared.queues[communicator, self.rank.number]
        self.communicator, self.queue, self.in_queue = communicator, queue, True
        queue.append(self)
        if len(queue) == 1:
            self.start()

    def start(self) -> None:
        self.started = True
        shared = self.group.shared
        for message in self.messages:
            shared.unmatched.meet(message, shared.channel(message, self.communicator))
        for collective in self.collectives:
            collective.collective.join(collective)

    def one_ended(self) -> None:
        self.to_end -= 1
        if not self.to_end:
            self.finish()
            self.queue.popleft()
            if self.queue:
                self.queue[0].start()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block this rank until all of it has ended.

        Within torch's coalescing manager this does nothing: the batch starts at its end.
        """
        return not self.in_queue or SimWork.wait(self, timeout)

    def finish(self) -> None:
        if self.future is not None:
            self.settle()
        SimWork.finish(self)

    def settle(self) -> None:
        """Give the tensors of its messages back to the program.

        Raises MisuseError if it has changed one that it sent.
        """
        for message in self.messages:
            message.settle()

    def result(self) -> list[torch.Tensor]:
        return self.tensors

    # ---- what the report of a deadlock needs: a rank waits for what the first operation of the
    # queue waits for ----

    def call(self) -> Call:
        return self.queue[0].first.own_call._replace(tag=0)  # tags play no part

    def missing(self) -> set[int]:
        operation = self.queue[0]
        peers = {peer for message in operation.to_meet for peer in message.missing()}
        return peers.union(*(collective.absent() for collective in operation.collectives))

    @property
    def first(self) -> MessageWork | QueuedCollective:
        """Return the operation to name it by: its first message that has no partner yet, if any."""
        return (self.to_meet or self.messages or self.collectives)[0]


class QueuedState(SharedState):
    """The state that all groups of a run share under NCCL's rules.

    A queue has the operations that one rank has put into one communicator and that have not ended.
    The first one has started, the others have not. A send and a receive meet when both have
    started.
    """

    def __init__(self, world: World, payload_bytes: int):
        super().__init__(world, payload_bytes)
        self.queues: dict[tuple[str, int], deque[Operation]] = defaultdict(deque)
        # ranks that passed device_id: their messages outside a batch use the group's queue
        self.with_device: set[int] = set()
        self.warnings = NcclWarnings(world.size)

    def channel(self, message: MessageWork, communicator: str) -> list:
        """Return the started messages of a communicator from one rank to another, without tags."""
        src, dst = message.rank.number, cast(int, message.peer)
        if message.kind == "recv":
            src, dst = dst, src
        return self.unmatched.channels[communicator][src * self.world.size + dst]

    def behind(self) -> list[Operation]:
        """Return the operations that are behind others in a queue."""
        return [one for queue in self.queues.values() for one in queue if not one.started]

    def unfinished(self) -> list[EventRow]:
        rows = super().unfinished()
        # of the last message with this communicator, kind, rank and peer
        numbers: dict[tuple[str, str, int, int | None], int] = {}
        for operation in self.behind():
            for message in operation.messages:
                matched, *unmatched = self.channel(message, operation.communicator)
                key = operation.communicator, message.kind, message.rank.number, message.peer
                before = matched + sum(work.kind == message.kind for work in unmatched)
                numbers[key] = numbers.get(key, before) + 1
                rows.append(message.row(numbers[key]))
            rows += [collective.row(collective.posted) for collective in operation.collectives]
        return rows

    def unwaited(self) -> list[MessageWork]:
        behind = (operation for operation in self.behind() if operation.future is None)
        return super().unwaited() + [message for one in behind for message in one.messages]


class QueuedCollective(CollectiveWork):
    """One rank's call of a collective, which joins the others when its turn in the queue comes."""

    operation: Operation
    group: QueuedGroup
    key: CollectiveKey

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.operation.in_queue:
            return True
        ended = super().wait(timeout)
        self.group.noted.waits(self.rank.number, self.key)
        return ended

    def get_future(self) -> SimFuture:
        self.group.noted.waits(self.rank.number, self.key)  # who waits for it later isn't known
        return super().get_future()

    def finish(self) -> None:
        super().finish()
        self.operation.one_ended()

    absent = CollectiveWork.missing

    def call(self) -> Call:
        return self.operation.call()

    def missing(self) -> set[int]:
        return self.operation.missing()


class QueuedGroup(SimGroup):
    """One rank's view of a group under NCCL's rules. Its backend is called "sim_nccl"."""

    averages_integers = True
    dtypes = NCCL_DTYPES
    shared: QueuedState

    def __init__(self, shared: QueuedState, *args: Any):
        super().__init__(shared, *args)
        self.noted = shared.warnings
        self.batch: Operation | None = None
        # the call of batch_isend_irecv that fills it; None: torch's coalescing manager does
        self.batch_call: FrameType | None = None
        self.called: dict[str, int] = defaultdict(int)  # how many collectives of each kind

    def getBackendName(self) -> str:
        return "sim_nccl"

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Any:
        raise RuntimeError(
            f"rank {self.member.number} receives from any rank, and NCCL does not support that "
            "(recvAnysource): name the sender, as in recv(tensor, src=…)"
        )

    def post(self, message: MessageWork, src: int, dst: int) -> Operation:
        """Put a send or a receive into a queue."""
        coalescing = self.batch is not None and self.batch_call is None
        call, messages = (None, 0) if coalescing else torch_private.running_batch(sys._getframe(2))
        if call is not None and call is not self.batch_call:
            self.batch, self.batch_call = Operation(self), call
        elif call is None and not coalescing:  # also after a batch that broke off with an error
            self.batch = self.batch_call = None
        if self.batch is None:
            operation = Operation(self)
            operation.add(message)
            with_device = self.member.number in self.shared.with_device
            pair = f"{self.label}: ranks {min(src, dst)} and {max(src, dst)}"
            operation.put(self.label if with_device else pair)
            return operation
        operation = self.batch
        operation.add(message)
        if len(operation.messages) == messages:
            self._end_batch()
        return operation

    def _begin(self, call: Call, *given: Any) -> CollectiveWork:
        if call.layout == "sparse":
            raise RuntimeError(
                f"rank {call.rank} passes a sparse tensor to {call.kind}, and NCCL does not "
                "support that (NCCL.cpp, allreduce_sparse: only in its experimental branch): pass "
                "x.to_dense()"
            )
        self.called[call.kind] += 1
        key = (self.label, self.called[call.kind], call.kind)
        work = QueuedCollective(self, key, call, *given)
        coalescing = self.batch is not None and self.batch_call is None
        operation = self.batch if self.batch is not None and coalescing else Operation(self)
        operation.add(work)
        work.key = key
        self.noted.begins(call.rank, key, self.ranks, call.where)
        if not coalescing:
            operation.put(self.label)
        return work

    def new_group(self, ranks: Sequence[int], *args: Any, group_name: str, **kwargs: Any) -> Any:
        self.noted.makes_group(self.member.number, group_name, list(ranks), caller())
        return super().new_group(ranks, *args, group_name=group_name, **kwargs)

    def has_device(self) -> None:
        """Note that the program has passed device_id to init_process_group: see rule 2."""
        self.shared.with_device.add(self.member.number)

    def _end_batch(self) -> Operation | None:
        operation, self.batch, self.batch_call = self.batch, None, None
        if operation is None or not operation.to_end:
            return None
        operation.put(self.label)
        return operation

    def _start_coalescing(self, device: object = None) -> None:
        """Begin a batch. torch's coalescing manager calls this first."""
        self.batch, self.batch_call = Operation(self), None

    def _end_coalescing(self, device: object = None) -> dist.Work:
        """End the batch. torch's coalescing manager calls this at its end."""
        return cast(dist.Work, self._end_batch())
