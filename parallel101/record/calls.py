"""What a rank asked of the others: one side of a message, or its part in a collective. Two questions are answered from calls.

do the two sides agree?        `disagreement`   (op, shape, dtype, size, root, reduction)
can everybody still go on?     `stuck`          (who waits for whom, and the circle)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from parallel101.record.errors import DeadlockError, MisuseError
from parallel101.record.events import Event, EventGroup
from parallel101.record.spans import COLLECTIVE_TAG, Collective
from parallel101.record.where import caller, shown

Key = tuple[str, "int | None", int, str]  #  kind, peer, tag, group: calls with the same key are numbered


class Call(NamedTuple):
    """One rank's call. Ranks are ranks of the world."""

    rank: int
    kind: str  #  "send", "recv", or a collective's name
    peers: tuple[int, ...]  #  whom it needs: the other end (empty: a receive from anyone), or the group's other members
    tag: int
    group: str
    seq: int  #  the how-manieth such call: of this kind, peer, tag and group; of a collective, of this group
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    op: str | None  #  the reduction ("sum", …) of a reducing collective
    root: int | None
    where: str
    alike: tuple[tuple[str, str], ...] = ()  # of a collective of parallel101's own: what else must be the same on all ranks
    given: dict[int, int] | None = None  #  of an all-to-all: the bytes for each rank of the group, whose shapes need not agree …
    taken: dict[int, int] | None = None  #  … and those expected of each
    within: tuple[str, tuple[int, ...]] | None = None  # of a message of parallel101's own collectives: the operation and its ranks

    @property
    def part(self) -> str:
        """What every rank of a collective must call, as far as a run knows that is not checked."""
        return part_in(self.kind, (self.rank, *self.peers))

    @property
    def terms(self) -> tuple:
        """What all ranks of a collective must agree on."""
        return self.kind, self.root, self.op, self.dtype, () if self.given else tuple(self.shape), self.alike

    @property
    def brief(self) -> str:
        """What the call was, in one phrase, for messages to people."""
        what = f"{self.kind}(" + ", ".join(
            part
            for part in (
                self.dtype and (f"shape {tuple(self.shape)}, {self.dtype}" if self.shape or not self.given else self.dtype),
                ", ".join(f"{name} {value}" for name, value in self.alike if name != "group"),
                self.op and f"op {self.op}",
                self.within and _named(self.within),
                self.root is not None and f"root {self.root}",
            )
            if part
        )
        return f"{what}) at {shown(self.where)}"

    def event(
        self, group: EventGroup, *, peer: int | None, posted: Any, start: Any, end: Any, seq: int | None = None, payload: list | None = None
    ) -> Event:
        """The event of this call. On NCCL its times are moments of the GPU's clock.

        Args:
            peer: the other rank of a message (None: not known), or the root of a collective.
            seq: its sequence number, if that is not the call's.
        """
        return Event(
            rank=self.rank, kind=self.kind, peer=peer, tag=self.tag, nbytes=self.nbytes, start=start, end=end, where=self.where,
            posted=posted, group=group, seq=self.seq if seq is None else seq, shape=self.shape, dtype=self.dtype, payload=payload,
            name=self.op,
        )  # fmt: skip


def terms_within(collective: Collective | None) -> tuple[str, tuple[int, ...]] | None:
    """What the two sides of a message of a collective must agree on. Nothing for p101.send and p101.receive, which may meet torch's own."""
    return None if collective is None or collective.operation in ("send", "receive") else (collective.operation, collective.ranks)


def _named(within: tuple[str, tuple[int, ...]]) -> str:
    operation, ranks = within
    return f"{operation} on ranks {list(ranks)}"


def tag_named(tag: int) -> str:
    return "the tag of parallel101's collectives" if tag == COLLECTIVE_TAG else f"tag {tag}"


def part_in(kind: str, members: Sequence[int]) -> str:
    """A collective as the ranks must agree on it: its name, and of a group that is being made its members."""
    return f"new_group({sorted(members)})" if kind == "new_group" else kind


def member_at(rank: int, kind: str, position: int, ranks: Sequence[int]) -> int:
    """The rank at a position of its group, which a rank's call names. Raises ValueError where there is none, or none to send to."""
    what = {"send": "sends to", "recv": "receives from"}.get(kind, f"calls {kind} with root")
    if not 0 <= position < len(ranks):
        ring = " On a ring, rank r's neighbours are (r + 1) % size and (r - 1) % size." if kind in ("send", "recv") else ""
        raise ValueError(f"rank {rank} {what} {position}, and its group of {len(ranks)} has ranks 0 to {len(ranks) - 1}.{ring}")
    if ranks[position] == rank and kind in ("send", "recv"):
        raise ValueError(f"rank {rank} {what} itself: it has its own data already, so leave that message out")
    return ranks[position]


def agreement(rank: int, kind: str, ranks: Sequence[int], within: str, alike: Mapping[str, Any], counts: dict[str, int]) -> Call:
    """A rank's word on a collective of parallel101's own, before its messages: to be compared, never waited for. It is counted, apart for
    each process group `within` which it talks: threads may each have their own."""
    others, label = tuple(r for r in ranks if r != rank), f"a collective of ours on {sorted(ranks)} {within}"
    seq = counts[label] = counts.get(label, 0) + 1
    terms = tuple((name, repr(value)) for name, value in {**alike, "group": list(ranks)}.items())
    return Call(rank, kind, others, 0, label, seq, 0, (), "", None, None, caller(), terms)


def disagreement(ours: Call, theirs: Call) -> str | None:
    """How two calls that belong together differ, in one sentence and the two calls below it, or None when they agree.

    For a message: its two sides (either order). For a collective: any two ranks' calls with the same group and seq.
    """
    pair = f"\n  rank {ours.rank}: {ours.brief}\n  rank {theirs.rank}: {theirs.brief}"
    if {ours.kind, theirs.kind} == {"send", "recv"}:
        send, recv = (ours, theirs) if ours.kind == "send" else (theirs, ours)
        if send.within and recv.within and send.within != recv.within:
            sender, receiver = _named(send.within), _named(recv.within)
            return f"a message of {sender} is received in {receiver}: all must make the same calls on the same ranks{pair}"
        if send.nbytes != recv.nbytes:
            word = "shorter" if send.nbytes < recv.nbytes else "longer"
            return f"the message is {word} than the receive: {send.nbytes} bytes sent, {recv.nbytes} expected{pair}"
        if send.dtype != recv.dtype:
            return f"sender and receiver have different dtypes: {send.dtype} sent, {recv.dtype} expected{pair}"
        if tuple(send.shape) != tuple(recv.shape):
            return f"sender and receiver have different shapes: {tuple(send.shape)} sent, {tuple(recv.shape)} expected{pair}"
        return None
    if ours.kind != theirs.kind:
        return f"the ranks call different operations: {ours.kind} and {theirs.kind}{pair}"
    if ours.root != theirs.root:
        return f"the ranks name different roots: {ours.root} and {theirs.root}{pair}"
    if ours.op != theirs.op:
        return f"the ranks use different reductions: {ours.op} and {theirs.op}{pair}"
    if ours.dtype != theirs.dtype:
        return f"the ranks have different dtypes: {ours.dtype} and {theirs.dtype}{pair}"
    if ours.given and theirs.given:
        for giver, taker in ((ours, theirs), (theirs, ours)):
            sent, wanted = (giver.given or {})[taker.rank], (taker.taken or {})[giver.rank]
            if sent != wanted:
                return f"rank {giver.rank} gives rank {taker.rank} {sent} bytes, and rank {taker.rank} expects {wanted}{pair}"
    elif tuple(ours.shape) != tuple(theirs.shape):
        return f"the ranks have different shapes: {tuple(ours.shape)} and {tuple(theirs.shape)}{pair}"
    for (name, our_value), (_, their_value) in zip(ours.alike, theirs.alike):
        if our_value != their_value:
            return f"{name} is not the same on all ranks: {our_value} and {their_value}{pair}"
    return None


def stuck(waits: Mapping[int, Call], missing: Callable[[Call], Collection[int]], returned: Collection[int]) -> DeadlockError | None:
    """The deadlock among ranks, if there is one.

    Args:
        waits: for each rank that is blocked, the call it is blocked in.
        missing: the ranks a call still needs that have not posted their part of it (empty: it is on its way, and will end).
        returned: ranks that have finished and will post nothing more.

    A rank can go on when its call is on its way, or when someone it misses is neither blocked nor gone: whoever runs may still post.
    A receive from anyone needs one of its peers, every other call all of them. What is left when nobody more can be freed is stuck.
    """
    held, gone = dict(waits), set(returned)

    def may_go_on(call: Call) -> bool:
        lacking = missing(call)
        lost = [peer for peer in lacking if peer in held or peer in gone]
        anyone = call.kind == "recv" and len(call.peers) != 1
        return len(lost) < len(lacking) if anyone else not lost

    while freed := [rank for rank, call in held.items() if not missing(call) or may_go_on(call)]:
        for rank in freed:
            del held[rank]
    if not held:
        return None
    needs = {rank: sorted(missing(call)) for rank, call in held.items()}
    waiting = {}
    for rank, call in sorted(held.items()):
        peer = None if call.kind == "recv" and len(call.peers) != 1 else needs[rank][0] if len(needs[rank]) == 1 else tuple(needs[rank])
        waiting[rank] = (call.kind, peer, call.where)
    return DeadlockError(
        waiting, cycle(needs), [r for r in gone if any(r in need for need in needs.values())], notes=_past_each_other(held)
    )


def _past_each_other(waits: Mapping[int, Call]) -> list[tuple[str, str]]:
    """Sends and receives of the same two ranks that never meet, in words: their tags or groups differ."""
    notes = []
    for send in waits.values():
        receive = waits.get(send.peers[0]) if send.kind == "send" else None
        if receive is not None and receive.kind == "recv" and receive.peers in ((send.rank,), ()):
            pair = f"rank {send.rank} sends to rank {receive.rank}"
            if send.group != receive.group:
                notes.append((f"{pair} in one group, and rank {receive.rank} receives in another: a message stays in its group", ""))
            elif send.tag != receive.tag:
                theirs = f"rank {receive.rank} receives with {tag_named(receive.tag)}"
                notes.append((f"{pair} with {tag_named(send.tag)}, and {theirs}: a message is received by its own tag", ""))
    return notes


def cycle(needs: Mapping[int, Sequence[int]]) -> list[int]:
    """The first circle found by following who waits for whom, its smallest rank first; empty when there is none."""
    for start in sorted(needs):
        path: list[int] = []
        rank = start
        while rank in needs and rank not in path:
            path.append(rank)
            onward = [peer for peer in needs[rank] if peer in needs]
            if not onward:
                break
            rank = onward[0]
        else:
            if rank in path:
                circle = path[path.index(rank) :]
                smallest = circle.index(min(circle))
                return circle[smallest:] + circle[:smallest]
    return []


# ── A checked run's referee: it hears every call as it is posted and says where two that belong together do not agree.


class Referee:
    """Pairs up sends with receives and the ranks' parts of a collective, by their numbers.

    `suspects` are the calls that showed the first disagreement; `verdict()` makes an error of them.
    """

    def __init__(self) -> None:
        self.messages: dict[tuple, Call] = {}
        self.from_anyone: set[tuple[int, int, str]] = set()  #  rank, tag, group that received from anyone: who knows whose message?
        self.collectives: dict[tuple[str, int], list[Call]] = defaultdict(list)
        self.suspects: list[Call] = []

    def hear(self, call: Call) -> bool:
        """Take note of a call. True when it shows the first disagreement."""
        if self.suspects:  #  one more rank of the same collective may tell which is the odd one out
            if call.kind not in ("send", "recv") and self.suspects is self.collectives.get((call.group, call.seq)):
                self.suspects.append(call)
            return False
        if call.kind in ("send", "recv"):
            if len(call.peers) != 1:
                self.from_anyone.add((call.rank, call.tag, call.group))
                return False
            src, dst = (call.rank, call.peers[0]) if call.kind == "send" else (call.peers[0], call.rank)
            if (dst, call.tag, call.group) in self.from_anyone:
                return False  #  nor, from then on, which message another receive got
            other = self.messages.pop((src, dst, call.tag, call.group, call.seq), None)
            if other is None or other.kind == call.kind:
                self.messages[src, dst, call.tag, call.group, call.seq] = call
            elif disagreement(other, call):
                self.suspects = [other, call]
        else:
            parts = self.collectives[call.group, call.seq]
            parts.append(call)
            if any(disagreement(part, call) for part in (parts[:-1] if call.given else parts[:1])):
                self.suspects = parts  #  kept as it is: more ranks may still add theirs
            elif len(parts) == len(call.peers) + 1:
                del self.collectives[call.group, call.seq]
        return bool(self.suspects)

    def verdict(self) -> MisuseError | None:
        """What was found, or None. It names the rank that differs from most (of a message, the receiver; of two ranks, the higher)."""
        if not self.suspects:
            return None
        parts = sorted(self.suspects, key=lambda c: (c.kind == "recv", c.rank))
        if {"send", "recv"} & {part.kind for part in parts}:
            send, recv = parts
            return MisuseError(f"{disagreement(send, recv)}", recv.rank)
        alike = Counter(c.terms for c in parts)
        usual = max(parts, key=lambda c: (alike[c.terms], -c.rank))
        if not any(disagreement(usual, c) for c in parts):  #  of an all-to-all, two others
            usual = next(a for a in parts if any(disagreement(a, b) for b in parts))
        odd = max((c for c in parts if disagreement(usual, c)), key=lambda c: (-alike[c.terms], c.rank))
        return MisuseError(f"{disagreement(usual, odd)}", odd.rank)
