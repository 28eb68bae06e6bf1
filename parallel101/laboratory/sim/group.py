"""The process group that torch.distributed uses on the sim: one object per rank and group.

    dist.isend(x, 1) ──▶ SimGroup.send ──▶ PointToPointGroup (message_matching.py)
    dist.all_reduce(x) ──▶ SimGroup.allreduce ──▶ CollectiveWork joins the group's
        RunningCollective, which starts with the last rank
    dist.new_group([0, 2]) ──▶ SimGroup.new_group ──▶ NewGroupCall waits for the other members

Which bytes a collective moves, and how long it takes, is in torch_collectives.py. What NCCL's rules
change is in queues.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parallel101.laboratory.record import torch_private
from parallel101.laboratory.record.calls import Call, tensor_changed
from parallel101.laboratory.record.errors import MisuseError
from parallel101.laboratory.record.events import EventRow, event_group
from parallel101.laboratory.record.program_lines import caller
from parallel101.laboratory.record.signatures import (
    COLLECTIVES,
    flat,
    own_limit,
    snapshot,
    values,
    with_collectives,
)
from parallel101.laboratory.sim.async_work import SimWork
from parallel101.laboratory.sim.clock import VirtualRank, World
from parallel101.laboratory.sim.message_matching import (
    ON_META,
    MessageWork,
    PointToPointGroup,
    UnmatchedMessages,
    on_a_device,
    refuse,
)
from parallel101.laboratory.sim.torch_collectives import (
    GLOO_DTYPES,
    Buffers,
    buffers_of,
    check_buffers,
    check_dtypes,
    check_reduction,
    duration,
    execute,
    moves_of,
    sum_sparse,
)


class SharedState:
    """The state that all groups of a run share.

    That is the groups themselves, and all messages and collectives that have not ended.
    """

    def __init__(self, world: World, payload_bytes: int):
        self.world = world
        self.payload_bytes = payload_bytes
        self.unmatched = UnmatchedMessages(world.network.eager)
        # collectives that some ranks have not called yet, by (group, seq)
        self.incomplete: dict[tuple, RunningCollective] = {}
        self.groups: dict[str, list[int]] = {}  # their ranks, by label
        self.busy_until: dict[str, float] = {}  # when a group's last collective ends
        self.new_group_calls: dict[tuple[str, tuple[int, ...]], list[NewGroupCall]] = {}

    def label(self, name: str, ranks: list[int]) -> str:
        """Return the name of a group in the record.

        It is torch's name, unless a group of other ranks has it already.
        """
        if self.groups.setdefault(name, ranks) != ranks:
            name = f"{name} {ranks}"
            self.groups[name] = ranks
        return name

    def unfinished(self) -> list[EventRow]:
        """Return the events of all that has not ended, as if it ended now."""
        rows = [work.row(number) for work, number in self.unmatched.numbered().items()]
        collectives = [*self.incomplete.values()]
        for item in self.world.in_flight():
            if isinstance(item, RunningCollective):
                collectives.append(item)
            elif isinstance(item, MessageWork) and item.receive is not None:
                rows += [item.row(item.seq), item.receive.row(item.seq)]
        works = [work for collective in collectives for work in collective.works.values()]
        return rows + [work.row(work.posted) for work in works]

    def unwaited(self) -> list[MessageWork]:
        """Return the sends and receives for which no rank has waited, in the order of posting.

        Ask when all ranks have returned.
        """
        works = {work for rank in self.world.ranks for work in rank.unwaited}.union(
            self.unmatched.unwaited()
        )
        # a wait may have ended with an error
        return sorted((w for w in works if not w.waited), key=lambda work: work.number)

    def dropped(self) -> list[Call]:
        """Return the unwaited sends and receives whose works the program has dropped.

        Call it last, because it forgets them all.
        """
        known = [(weakref.ref(work), work.call()) for work in self.unwaited()]
        for rank in self.world.ranks:
            rank.unwaited.clear()
        for channels in self.unmatched.channels.values():
            channels.clear()
        return [call for work, call in known if work() is None]


@with_collectives
class SimGroup(PointToPointGroup):
    """One rank's view of a group of virtual ranks."""

    averages_integers = False
    dtypes = GLOO_DTYPES

    def __init__(
        self,
        shared: SharedState,
        member: VirtualRank,
        name: str,
        ranks: Sequence[int],
        torch_name: str | None = None,
    ):
        label = shared.label(name, list(ranks))
        super().__init__(shared, member, label, list(ranks))
        self.shared = shared
        self.torch_name = torch_name or name
        self.posted = 0  # how many collectives the rank has called
        self.callers = self.ranks  # those that have a thread
        member.groups.append(self)

    def getBackendName(self) -> str:
        return "sim"

    def new_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        *_: Any,
        group_name: str,
        group_desc: str | None = None,
        **__: Any,
    ) -> SimGroup | None:
        """Return a group of some of the ranks. dist.new_group calls it.

        A rank that is not in it gets None.
        """
        if self.member.number not in ranks:
            return None
        group = type(self)(self.shared, self.member, group_name, ranks)
        group.set_timeout(timeout)
        torch_private.describe_group(group, group_desc)
        NewGroupCall(group).wait()
        return group

    def _get_sequence_number_for_group(self) -> int:
        return self.posted

    def set_timeout(self, timeout: timedelta | None) -> None:
        """Give this rank's later calls of the group this time limit, in virtual time.

        See time_limits.py.
        """
        self.world.time_limits.set_limit(self, timeout)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        if timeout is not None:
            # zero would be no limit, and here it means at once
            timeout = max(timeout, timedelta(milliseconds=1))
        self.barrier(timeout=timeout).wait()

    def _collective(self, method: str, args: tuple) -> dist.Work:
        """Check and post a collective: all collectives come through here."""
        world, member = self.world, self.member
        world.enter(member)
        torch_private.count_loss_parallel()
        where = caller()
        spec = COLLECTIVES[method]
        elsewhere = (problem for t in flat(args) if (problem := on_a_device(t, spec.kind)))
        if problem := next(elsewhere, None) or spec.unfit(args, spec.kind):
            refuse(problem, member, where)
        check_dtypes(spec.kind, flat(args), self.dtypes)
        others = tuple(rank for rank in self.ranks if rank != member.number)
        call = Call(member.number, spec.kind, others, self.label, self.posted + 1, where)
        call = spec.with_arguments(call, args, self.ranks)
        if call.op is not None:
            check_reduction(call.op, spec.inputs(args), self.averages_integers)
        buffers = [] if call.layout == "sparse" else buffers_of(method, args, len(self.ranks))
        check_buffers(spec.kind, buffers, len(self.ranks), call.root == member.number)
        self.posted += 1
        return self._begin(call, spec.own_tensors(args), buffers, args)

    def _begin(self, call: Call, *given: Any) -> CollectiveWork:
        work = CollectiveWork(self, (self.label, self.posted), call, *given)
        work.collective.join(work)
        return work


class NewGroupCall:
    """One rank's call of dist.new_group.

    It returns when all members have called; if one never does, that is a deadlock, as on gloo.
    """

    def __init__(self, group: SimGroup):
        self.group = group
        self.where = caller()
        self.done = False
        # of all members so far
        self.calls = group.shared.new_group_calls.setdefault(
            (group.torch_name, tuple(group.ranks)), []
        )

    def wait(self) -> None:
        world, member = self.group.world, self.group.member
        world.enter(member)
        self.calls.append(self)
        if len(self.calls) == len(self.group.callers):
            world.schedule(world.now, self.end_all)
        world.wait(member, self)

    def end_all(self) -> None:
        """End all members' calls, because all have called."""
        for call in self.calls:
            call.done = True
            call.group.world.wake(call.group.member)
        self.calls.clear()

    def call(self) -> Call:
        me = self.group.member.number
        others = tuple(r for r in self.group.ranks if r != me)
        return Call(me, "new_group", others, group="new_group", seq=0, where=self.where)

    def missing(self) -> set[int]:
        return set(self.group.ranks) - {call.group.member.number for call in self.calls}


class CollectiveWork(SimWork, dist.Work):
    """One rank's call of the collective that `key` numbers. The first rank's call makes that."""

    def __init__(
        self,
        group: SimGroup,
        key: tuple,
        call: Call,
        tensors: list[torch.Tensor],
        buffers: list[Buffers],
        args: Sequence[Any],
    ):
        super().__init__()
        self.world = group.world
        self.rank = group.member
        self.done = False
        self.future = None
        self.group = group
        self.collective = group.shared.incomplete.setdefault(key, RunningCollective(group, key))
        self.own_call = call
        self.buffers = buffers
        self.tensors = tensors
        self.args = args  # keeps the tensors alive
        self.posted = self.world.now
        # the options are last, and may have a limit for this call only
        self.seconds = own_limit(args[-1].timeout)
        self.world.time_limits.in_use |= self.seconds is not None
        self.payload: list | None = None
        self.snapshots: list[tuple[torch.Tensor, bytes]] = []
        if call.layout != "sparse":
            with_numbers = [tensor for tensor in tensors if not tensor.is_meta]
            if call.nbytes <= group.payload_bytes:
                self.payload = values(with_numbers)
            self.snapshots = [
                (tensor, snapshot(tensor.data_ptr(), tensor.nbytes)) for tensor in with_numbers
            ]

    def result(self) -> list[torch.Tensor]:
        # the outputs are always the first argument
        return [] if self.own_call.kind == "barrier" or not self.args else flat(self.args[0])

    def call(self) -> Call:
        return self.own_call

    def missing(self) -> set[int]:
        return set(self.group.ranks) - set(self.collective.works)

    def row(self, started: float) -> EventRow:
        """Return this work's event, as if it ended now."""
        call, group = self.own_call, self.group
        of = event_group(group.label, group.ranks, torch_private.mesh_axis(group))
        return tuple(call.event(of, self.posted, started, self.world.now, self.payload))

    def changed(self) -> bool:
        """Return whether the rank has changed its input tensors since its call."""
        return any(
            snapshot(tensor.data_ptr(), tensor.nbytes) != before
            for tensor, before in self.snapshots
        )


class RunningCollective:
    """One collective of a group.

    It starts when the last rank has called it, and when its time is over, all ranks have the
    result.
    """

    def __init__(self, group: SimGroup, key: tuple):
        self.group = group  # any member's view of it
        self.key = key
        self.works: dict[int, CollectiveWork] = {}  # by rank of the world
        self.started = 0.0

    def join(self, work: CollectiveWork) -> None:
        """Add one more rank's call. The run fails in the last one if the calls do not agree."""
        group, call = self.group, work.own_call
        world, shared, label = group.world, group.shared, group.label
        self.works[call.rank] = work
        others = tuple(rank for rank in group.callers if rank != call.rank)
        world.check(call._replace(group=str(self.key), peers=others))
        if len(self.works) == len(group.callers):
            # The collectives of a group run one after the other, as on NCCL's stream and gloo's
            # threads.
            self.started = max(world.now, shared.busy_until.get(label, 0.0))
            nbytes = max(work.own_call.nbytes for work in self.works.values())
            shared.busy_until[label] = self.started + duration(
                call.kind, group.ranks, nbytes, world.route
            )
            world.schedule(shared.busy_until[label], self.end)
            del shared.incomplete[self.key]

    def end(self) -> None:
        """End the collective, because its time is over: all ranks get their results."""
        world, ranks = self.group.world, self.group.ranks
        if world.mirrors is not None:  # a rank's call counts for all that it stands for
            ranks = list(map(world.mirrors.representative, ranks))
        works = [self.works[rank] for rank in ranks]
        world.without_modes(lambda: self._move(works))
        if world.failure is not None:
            return
        for work in dict.fromkeys(works):
            world.events.append(work.row(self.started))
            work.finish()

    @torch.no_grad()
    def _move(self, works: list[CollectiveWork]) -> None:
        world = self.group.world
        for work in works:
            if work.changed():
                world.fail(tensor_changed(work.call()))
                return
        first = works[0].own_call
        counts = {len(work.buffers): work.own_call for work in works}
        if len(counts) > 1:
            (one, theirs), (other, call) = list(counts.items())[:2]
            world.fail(
                MisuseError(
                    f"rank {theirs.rank} passes {one} tensors to {first.kind}, and rank "
                    f"{call.rank} passes {other}: {call.brief}. The lists must be equally long on "
                    "all ranks.",
                    call.rank,
                )
            )
            return
        if first.layout == "sparse":
            sum_sparse([work.tensors for work in works])
        root = None if first.root is None else self.group.ranks.index(first.root)
        for buffers in zip(*(work.buffers for work in works), strict=True):
            moves = moves_of(first.kind, buffers, root)
            for position, output, inputs in moves:
                if any(x.nbytes and x.is_meta != output.is_meta for x in inputs):
                    work = works[position]
                    problem = (
                        f"{work.own_call.brief}: some ranks pass tensors on the meta device, which "
                        f"have no numbers, and others pass tensors with numbers. {ON_META}"
                    )
                    world.fail(MisuseError(problem, work.rank.number))
                    return
            execute(moves, first.op)
