"""What torch.distributed sees of the sim: a process group whose messages go through the mailbox and whose collectives are meetings.

dist.isend(x, 1) ──▶ SimGroup.send ──▶ Mailbox            dist.all_reduce(x) ──▶ SimGroup.allreduce ──▶ Meeting
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from parallel101.record.calls import Call, Referee, disagreement, member_at
from parallel101.record.errors import MisuseError
from parallel101.record.events import Row
from parallel101.record.signatures import COLLECTIVES, Told, flat
from parallel101.record.where import caller
from parallel101.sim.clock import Rank
from parallel101.sim.collectives import Part, carry_out, check_reduction, duration, parts_of, plan
from parallel101.sim.messages import Mailbox, Messenger, SendWork, contents, refuse
from parallel101.sim.work import SimWork

if TYPE_CHECKING:
    from parallel101.sim.clock import World


# ── The making of a sub-group on the sim: dist.new_group returns when all members have called it.


class Founding:
    """One rank's part in the making of a sub-group. It waits for all members: where one never comes, that is a deadlock, as on gloo."""

    def __init__(self, group: SimGroup):
        self.group = group
        self.where = caller()
        self.done = False
        self.come = group.traffic.founded.setdefault((group.torch_name, tuple(group.ranks)), [])

    def wait(self) -> None:
        world, member = self.group.world, self.group.member
        world.enter(member)
        self.come.append(self)
        if len(self.come) == len(self.group.ranks):
            world.at(world.now, self)
        world.wait(member, self)

    def happen(self) -> None:
        """All have come."""
        for part in self.come:
            part.done = True
            part.group.world.wake(part.group.member)
        self.come.clear()

    def call(self) -> Call:
        me = self.group.member.number
        others = tuple(r for r in self.group.ranks if r != me)
        return Call(me, "new_group", others, 0, "new_group", 0, 0, (), "", None, None, self.where)

    def missing(self) -> set[int]:
        return set(self.group.ranks) - {part.group.member.number for part in self.come}


class Traffic:
    """All that is posted in a run and has not ended: messages and collectives; and the groups there are."""

    def __init__(self, world: World, payload_bytes: int):
        self.world = world
        self.payload_bytes = payload_bytes
        self.mailbox = Mailbox()
        self.meetings: dict[tuple[str, int], Meeting] = {}
        self.groups: dict[str, list[int]] = {}
        self.busy: dict[str, float] = {}  #  until when a group's collectives keep it
        self.founded: dict[tuple[str, tuple[int, ...]], list[Founding]] = {}
        world.last_word = self.misused

    def misused(self) -> MisuseError | None:
        """Nothing goes on any more: is it because the ranks of a collective do not agree?"""
        return next((verdict for meeting in self.meetings.values() if (verdict := meeting.verdict())), None)

    def unfinished(self) -> list[Row]:
        """What was posted and has not ended, as events that end now."""
        under_way = self.world.under_way()
        matched = [send for send in under_way if isinstance(send, SendWork) and send.receive is not None]
        rows = [work.row(send.seq) for send in matched for work in (send, send.receive)]  # type: ignore[union-attr]
        meetings = [*self.meetings.values(), *(item for item in under_way if isinstance(item, Meeting))]
        parts = [part for meeting in meetings for part in meeting.present.values()]
        return self.mailbox.unfinished() + rows + [part.row(part.posted) for part in parts]

    def label(self, name: str, ranks: list[int]) -> str:
        """A group's name in the record: torch's, unless other ranks have it already."""
        if self.groups.setdefault(name, ranks) != ranks:
            name = f"{name} {ranks}"
            self.groups[name] = ranks
        return name


class SimGroup(Messenger):
    """One rank's view of a group of virtual ranks."""

    def __init__(self, traffic: Traffic, member: Rank, name: str, ranks: Sequence[int], torch_name: str | None = None):
        label = traffic.label(name, list(ranks))
        super().__init__(traffic.world, traffic.mailbox, member, label, list(ranks), traffic.payload_bytes)
        self.traffic = traffic
        self.torch_name = torch_name or name
        self.posted = 0  #  collectives so far

    def size(self) -> int:
        return len(self.ranks)

    def getBackendName(self) -> str:
        return "sim"

    # DDP, FSDP2 and the functional collectives look a group up by its name
    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self.torch_name

    def _set_group_name(self, name: str) -> None:
        self.torch_name = name

    def new_group(self, ranks: Sequence[int], *_: Any, group_name: str, group_desc: str | None = None, **__: Any) -> SimGroup | None:
        """What dist.new_group calls: a group of some of the ranks, or None for a rank that is not in it."""
        if self.member.number not in ranks:
            return None
        group = self.part(ranks, group_name)
        if group_desc is not None:
            group._set_group_desc(group_desc)
        Founding(group).wait()
        return group

    def part(self, ranks: Sequence[int], name: str) -> SimGroup:
        """A group of some of the ranks, this one among them."""
        return SimGroup(self.traffic, self.member, name, ranks)

    def shutdown(self) -> None:
        """There is nothing to close."""

    def abort(self) -> None:
        """There is nothing to close."""

    def set_timeout(self, timeout: Any) -> None:
        """Wall time has no meaning here."""

    # ---- collectives: one path for all ----

    def _collective(self, method: str, *args: Any) -> dist.Work:
        world, member = self.world, self.member
        world.enter(member)
        where = caller()
        spec = COLLECTIVES[method]
        for tensor in flat(args):
            if not tensor.is_contiguous() or not tensor.is_cpu or tensor.is_conj() or tensor.is_neg():
                refuse(tensor, spec.kind, member, where)
        told = spec.describe(args)
        if told.op is not None:
            check_reduction(told.op, told.tensors)
        if told.root is not None:
            member_at(member.number, spec.kind, told.root, self.ranks)
        parts = parts_of(method, args, len(self.ranks))
        self.posted += 1
        key = (self.label, self.posted)
        meeting = self.traffic.meetings.setdefault(key, Meeting(self))
        return meeting.join(CollectiveWork(self, meeting, spec.kind, told, parts, args, where))


class CollectiveWork(SimWork, dist.Work):
    """One rank's part in a collective."""

    def __init__(self, group: SimGroup, meeting: Meeting, kind: str, told: Told, parts: list[Part], args: Sequence[Any], where: str):
        super().__init__()
        self.world = group.world
        self.rank = group.member
        self.done = False
        self.future = None
        self.group = group
        self.meeting = meeting
        self.kind = kind
        self.told = told
        self.parts = parts
        self.args = args  #  keeps the tensors alive
        self.where = where
        self.posted = self.world.now
        self.seq = group.posted
        self.payload: list | None = None
        if told.nbytes <= group.payload_bytes:
            self.payload = [value for tensor in told.tensors for value in tensor.detach().reshape(-1).tolist()]
        self.given = [(tensor, contents(tensor.data_ptr(), tensor.nbytes)) for tensor in told.tensors]

    def result(self) -> list[torch.Tensor]:
        outputs = COLLECTIVES_OUTPUT.get(self.kind, 0)
        return flat(self.args[outputs]) if self.args and outputs is not None else []

    @property
    def root(self) -> int | None:
        return None if self.told.root is None else self.group.ranks[self.told.root]

    def call(self) -> Call:
        group, told, me = self.group, self.told, self.rank.number
        others = tuple(r for r in group.ranks if r != me)
        return Call(
            rank=me, kind=self.kind, peers=others, tag=0, group=group.label, seq=self.seq, nbytes=told.nbytes, shape=told.shape,
            dtype=told.dtype, op=told.op, root=self.root, where=self.where,
        )  # fmt: skip

    def row(self, started: float) -> Row:
        """Its event, if it ended now."""
        call, told, group = self.call(), self.told, self.group
        if self.kind == "all_to_all" and len(told.tensors) == 1:  # its shape need not be the other ranks', and is not compared
            call = call._replace(shape=tuple(told.tensors[0].shape))
        event_group = self.world.event_groups.of(group.label, group.ranks, group.group_desc, None)
        posted, now = self.posted, self.world.now
        return tuple(call.event(event_group, peer=self.root, posted=posted, start=started, end=now, payload=self.payload))

    def changed(self) -> bool:
        """Whether what the rank put in is no longer what it was when it did."""
        return any(contents(t.data_ptr(), t.nbytes) != seen for t, seen in self.given)

    def missing(self) -> set[int]:
        return set(self.group.ranks) - set(self.meeting.present)


COLLECTIVES_OUTPUT: dict[str, int | None] = {"barrier": None}  #  the outputs are the first argument of every other


class Meeting:
    """A collective: its members come one by one; when the last has come it takes its time, and then all have the result."""

    def __init__(self, group: SimGroup):
        self.group = group
        self.present: dict[int, CollectiveWork] = {}  #  by rank of the world
        self.agreed = True
        self.started = 0.0

    def join(self, work: CollectiveWork) -> CollectiveWork:
        first = next(iter(self.present.values()), work)
        self.present[work.rank.number] = work
        if work is not first and disagreement(first.call(), work.call()):
            self.agreed = False
        if len(self.present) == len(self.group.ranks):
            world = self.group.world
            del self.group.traffic.meetings[self.group.label, work.seq]
            if not self.agreed:
                error = self.verdict()
                assert error is not None
                world.fail(error)
                raise error
            busy, label = self.group.traffic.busy, self.group.label
            self.started = max(
                world.now, busy.get(label, 0.0)
            )  #  a group's collectives end in order, as on NCCL's stream and gloo's threads
            nbytes = max(member.told.nbytes for member in self.present.values())
            busy[label] = self.started + duration(work.kind, self.group.ranks, nbytes, world.route)
            world.at(busy[label], self)
        return work

    def verdict(self) -> MisuseError | None:
        """Which rank does not agree with the others, once it is known that one does not."""
        if self.agreed:
            return None
        referee = Referee()
        referee.suspects = [work.call() for work in self.present.values()]
        return referee.verdict()

    def happen(self) -> None:
        """Its time is over."""
        members = [self.present[rank] for rank in self.group.ranks]
        world = self.group.world
        world.on_main_thread(lambda: self._move(members))
        if world.failure is not None:
            return
        for work in members:
            world.events.append(work.row(self.started))
            work.finish()

    @torch.no_grad()
    def _move(self, members: list[CollectiveWork]) -> None:
        world = self.group.world
        for work in members:
            if work.changed():
                me = work.rank.number
                world.fail(MisuseError(f"rank {me} changed a tensor between its {work.call().brief} and the wait for it: wait first", me))
                return
        first = members[0]
        for part in zip(*(work.parts for work in members), strict=True):
            moves = plan(first.kind, part, first.told.root)
            for me, (goal, sources) in moves:
                if any(source.nbytes != goal.nbytes for source in sources):
                    other = next(source for source in sources if source.nbytes != goal.nbytes)
                    rank = members[me].rank.number
                    world.fail(
                        MisuseError(
                            f"rank {rank} expects {goal.nbytes} bytes of a rank that gives {other.nbytes}: {members[me].call().brief}. "
                            "Tensor and split sizes must fit each other on all ranks.",
                            rank,
                        )
                    )
                    return
            carry_out(moves, first.told.op)


def _passing(method: str) -> Callable[..., dist.Work]:
    def call(self: SimGroup, *args: Any, **options: Any) -> dist.Work:
        return self._collective(method, *args, *options.values())

    call.__name__ = method
    return call


for _method in COLLECTIVES:
    if _method != "monitored_barrier":
        setattr(SimGroup, _method, _passing(_method))
