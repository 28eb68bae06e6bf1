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
from parallel101.laboratory.record.calls import (
    Call,
    CallChecker,
    disagreement,
    rank_at,
    tensor_changed,
)
from parallel101.laboratory.record.errors import MisuseError
from parallel101.laboratory.record.events import EventRow
from parallel101.laboratory.record.program_lines import caller
from parallel101.laboratory.record.signatures import (
    COLLECTIVES,
    CollectiveArguments,
    flat,
    own_limit,
    snapshot,
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
    Buffers,
    buffers_of,
    check_counts,
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
        world.find_misuse = self.find_misuse

    def label(self, name: str, ranks: list[int]) -> str:
        """Return the name of a group in the record.

        It is torch's name, unless a group of other ranks has it already.
        """
        if self.groups.setdefault(name, ranks) != ranks:
            name = f"{name} {ranks}"
            self.groups[name] = ranks
        return name

    def find_misuse(self) -> MisuseError | None:
        """Return an error for the first incomplete collective on which the ranks do not agree."""
        return next(
            (error for collective in self.incomplete.values() if (error := collective.misuse())),
            None,
        )

    def unfinished(self) -> list[EventRow]:
        """Return the events of all that has not ended, as if it ended now."""
        in_flight = self.world.in_flight()
        matched = [
            send for send in in_flight if isinstance(send, MessageWork) and send.receive is not None
        ]
        messages = [work.row(send.seq) for send in matched for work in (send, send.receive)]  # type: ignore[union-attr]
        collectives = [
            *self.incomplete.values(),
            *(item for item in in_flight if isinstance(item, RunningCollective)),
        ]
        works = [work for collective in collectives for work in collective.works.values()]
        unmatched = [work.row(number) for work, number in self.unmatched.numbered().items()]
        return unmatched + messages + [work.row(work.posted) for work in works]

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

    def __init__(
        self,
        shared: SharedState,
        member: VirtualRank,
        name: str,
        ranks: Sequence[int],
        torch_name: str | None = None,
    ):
        label = shared.label(name, list(ranks))
        super().__init__(
            shared.world, shared.unmatched, member, label, list(ranks), shared.payload_bytes
        )
        self.shared = shared
        self.torch_name = torch_name or name
        self.posted = 0  # how many collectives the rank has called
        self.callers = len(self.ranks)  # that have a thread
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
        group = self.sub_group(ranks, group_name)
        group.set_timeout(timeout)
        torch_private.describe_group(group, group_desc)
        NewGroupCall(group).wait()
        return group

    def sub_group(self, ranks: Sequence[int], name: str) -> SimGroup:
        """Make a group of some ranks, including this one, without waiting for the others."""
        return type(self)(self.shared, self.member, name, ranks)

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
        arguments = spec.arguments(args)
        if arguments.op is not None:
            check_reduction(arguments.op, arguments.tensors, self.averages_integers)
        if arguments.root is not None:
            rank_at(member.number, spec.kind, arguments.root, self.ranks)
        buffers = buffers_of(method, args, len(self.ranks)) if arguments.layout != "sparse" else []
        check_counts(spec.kind, buffers, len(self.ranks), arguments.root == self.rank())
        self.posted += 1
        return self._begin(spec.kind, arguments, buffers, args, where)

    def _begin(self, kind: str, *call: Any) -> CollectiveWork:
        work = CollectiveWork(self, self._collective_with((self.label, self.posted)), kind, *call)
        work.collective.join(work)
        return work

    def _collective_with(self, key: tuple) -> RunningCollective:
        """Return the collective that `key` numbers. The first rank that calls it makes it."""
        return self.shared.incomplete.setdefault(key, RunningCollective(self, key))


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
        if len(self.calls) == self.group.callers:
            world.schedule(world.now, self)
        world.wait(member, self)

    def fire(self) -> None:
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
    """One rank's call of a collective."""

    def __init__(
        self,
        group: SimGroup,
        collective: RunningCollective,
        kind: str,
        arguments: CollectiveArguments,
        buffers: list[Buffers],
        args: Sequence[Any],
        where: str,
    ):
        super().__init__()
        self.world = group.world
        self.rank = group.member
        self.done = False
        self.future = None
        self.group = group
        self.collective = collective
        self.kind = kind
        self.arguments = arguments
        self.buffers = buffers
        self.args = args  # keeps the tensors alive
        self.where = where
        self.posted = self.world.now
        self.seq = group.posted
        # the options are last, and may have a limit for this call only
        self.seconds = own_limit(args[-1].timeout)
        self.world.time_limits.in_use |= self.seconds is not None
        self.payload: list | None = None
        self.snapshots: list[tuple[torch.Tensor, bytes]] = []
        if arguments.layout != "sparse":
            with_numbers = [tensor for tensor in arguments.tensors if not tensor.is_meta]
            if arguments.nbytes <= group.payload_bytes:
                self.payload = [
                    value
                    for tensor in with_numbers
                    for value in tensor.detach().reshape(-1).tolist()
                ]
            self.snapshots = [
                (tensor, snapshot(tensor.data_ptr(), tensor.nbytes)) for tensor in with_numbers
            ]

    def result(self) -> list[torch.Tensor]:
        # the outputs are always the first argument
        return [] if self.kind == "barrier" or not self.args else flat(self.args[0])

    @property
    def root(self) -> int | None:
        return None if self.arguments.root is None else self.group.ranks[self.arguments.root]

    def call(self) -> Call:
        group, me = self.group, self.rank.number
        others = tuple(r for r in group.ranks if r != me)
        return Call(
            me,
            self.kind,
            others,
            group.label,
            self.seq,
            self.where,
            root=self.root,
            **self.arguments.compared(),
        )

    def missing(self) -> set[int]:
        return set(self.group.ranks) - set(self.collective.works)

    def row(self, started: float) -> EventRow:
        """Return this work's event, as if it ended now."""
        call, arguments, group = self.call(), self.arguments, self.group
        if (
            self.kind == "all_to_all" and len(arguments.tensors) == 1
        ):  # its shapes may differ between ranks, so `arguments` has none to compare
            call = call._replace(shape=tuple(arguments.tensors[0].shape))
        event_group = self.world.event_groups.of(
            group.label, group.ranks, torch_private.mesh_axis(group), None
        )
        posted, now = self.posted, self.world.now
        return tuple(
            call.event(
                event_group,
                peer=self.root,
                posted=posted,
                start=started,
                end=now,
                payload=self.payload,
            )
        )

    def changed(self) -> bool:
        """Return whether the rank has changed its input tensors since its call."""
        return any(
            snapshot(tensor.data_ptr(), tensor.nbytes) != before
            for tensor, before in self.snapshots
        )


def unfit_buffers(work: CollectiveWork, given: torch.Tensor, output: torch.Tensor) -> MisuseError:
    """Return the error for a rank that expects something else than another rank gives it."""
    rank, call = work.rank.number, work.call().brief
    if given.nbytes != output.nbytes:
        return MisuseError(
            f"rank {rank} expects {output.nbytes} bytes from a rank that gives it {given.nbytes}: "
            f"{call}. Tensor sizes and split sizes must match on all ranks.",
            rank,
        )
    return MisuseError(
        f"{call}: some ranks pass tensors on the meta device, which have no numbers, and others "
        f"pass tensors with numbers. {ON_META}",
        rank,
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
        self.agreed = True
        self.started = 0.0

    def join(self, work: CollectiveWork) -> None:
        """Add one more rank's call.

        Raises MisuseError in the last one if the ranks' calls do not agree.
        """
        first = next(iter(self.works.values()), work)
        self.works[work.rank.number] = work
        if work is not first and disagreement(first.call(), work.call()):
            self.agreed = False
        if len(self.works) == self.group.callers:
            world, shared, label = self.group.world, self.group.shared, self.group.label
            del shared.incomplete[self.key]
            if (error := self.misuse()) is not None:
                world.fail(error)
                raise error
            # The collectives of a group run one after the other, as on NCCL's stream and gloo's
            # threads.
            self.started = max(world.now, shared.busy_until.get(label, 0.0))
            nbytes = max(work.arguments.nbytes for work in self.works.values())
            shared.busy_until[label] = self.started + duration(
                work.kind, self.group.ranks, nbytes, world.route
            )
            world.schedule(shared.busy_until[label], self)

    def misuse(self) -> MisuseError | None:
        """Return an error naming the rank whose call differs from the others; None so far."""
        if self.agreed:
            return None
        call_checker = CallChecker()
        call_checker.differing = [work.call() for work in self.works.values()]
        return call_checker.error()

    def fire(self) -> None:
        """End the collective, because its time is over: all ranks get their results."""
        works = [self.call_of(rank) for rank in self.group.ranks]
        world = self.group.world
        world.without_modes(lambda: self._move(works))
        if world.failure is not None:
            return
        for work in dict.fromkeys(works):
            world.events.append(work.row(self.started))
            work.finish()

    def call_of(self, rank: int) -> CollectiveWork:
        return self.works[rank]

    @torch.no_grad()
    def _move(self, works: list[CollectiveWork]) -> None:
        world = self.group.world
        for work in works:
            if work.changed():
                world.fail(tensor_changed(work.call()))
                return
        first = works[0]
        counts = {len(work.buffers): work for work in works}
        if len(counts) > 1:
            one, other = list(counts.values())[:2]
            world.fail(
                MisuseError(
                    f"rank {one.rank.number} passes {len(one.buffers)} tensors to {first.kind}, "
                    f"and rank {other.rank.number} passes {len(other.buffers)}: "
                    f"{other.call().brief}. The lists must be equally long on all ranks.",
                    other.rank.number,
                )
            )
            return
        if first.arguments.layout == "sparse":
            sum_sparse([work.arguments.tensors for work in works])
        for buffers in zip(*(work.buffers for work in works), strict=True):
            moves = moves_of(first.kind, buffers, first.arguments.root)
            for position, output, inputs in moves:
                for given in inputs:
                    if given.nbytes != output.nbytes or (
                        given.nbytes and given.is_meta != output.is_meta
                    ):
                        world.fail(unfit_buffers(works[position], given, output))
                        return
            execute(moves, first.arguments.op)
