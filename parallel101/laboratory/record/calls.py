"""One rank's call: its side of a message, or its part in a collective.

`disagreement` compares two calls that belong together: operation, size, dtype, shape, root,
reduction. A `CallChecker` does this for every call of a checked run.

    rank 0: send(shape (4,), float32)  ──┐
    rank 1: recv(shape (3,), float32)  ──┘  the shapes differ

wait_for.py finds out who waits for whom.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from parallel101.laboratory.record.errors import MisuseError
from parallel101.laboratory.record.events import P2P, Event, EventGroup
from parallel101.laboratory.record.program_lines import caller, shown
from parallel101.laboratory.record.units import ranks_text
from parallel101.spans import COLLECTIVE_TAG, Collective

# kind, peer, tag, group: the calls of a rank with the same key are numbered
CallKey = tuple[str, "int | None", int, str]
PostedMessage = tuple[int, str, int]  # sequence number, "file:line" and bytes
OperationOnRanks = tuple[str, tuple[int, ...]]  # operation and ranks


class Call(NamedTuple):
    """One rank's call. Ranks are ranks of the world."""

    rank: int
    kind: str  # "send", "recv", or a collective's name
    # the ranks it needs: the other side (empty: a receive from any rank), or the group's other
    # members
    peers: tuple[int, ...]
    group: str
    # sequence number: of a message, among those with the same key; of a collective, among those of
    # its group
    seq: int
    where: str
    tag: int = 0
    nbytes: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = ""
    op: str | None = None  # the reduction ("sum", …) of a reducing collective
    root: int | None = None
    # of parallel101's collectives: other arguments that must be the same on all ranks
    alike: tuple[tuple[str, str], ...] = ()
    gives: dict[int, int] | None = None  # of an all-to-all: the bytes for each rank of the group …
    # … and those expected from each rank; here the shapes need not agree
    takes: dict[int, int] | None = None
    # of a message of parallel101's collectives: the collective it belongs to
    within: OperationOnRanks | None = None
    # how a collective's tensor is laid out in memory, if it isn't contiguous (see signatures.py)
    layout: str = ""

    @property
    def peer(self) -> int | None:
        """Return the other rank of a message, if it is known."""
        return self.peers[0] if len(self.peers) == 1 and self.kind in P2P else None

    @property
    def key(self) -> CallKey:
        """Return what the messages have in common that are numbered together with this one."""
        return self.kind, self.peer, self.tag, self.group

    @property
    def from_anyone(self) -> bool:
        """Return whether any of the peers can end the call.

        True for a receive from any rank, and for a key of a store.
        """
        return (self.kind == "recv" and len(self.peers) != 1) or self.group == "store"

    @property
    def agreed(self) -> tuple:
        """Return the values that all ranks of a collective must agree on."""
        return (
            self.kind,
            self.root,
            self.op,
            self.dtype,
            () if self.gives else long_dims(self.shape),
            self.layout,
            self.alike,
        )

    @property
    def brief(self) -> str:
        """Describe the call in one phrase, for error messages."""
        parts = [
            self.dtype and (self.shape or not self.gives) and f"shape {tuple(self.shape)}",
            self.dtype,
            self.layout,
            *(f"{name} {value}" for name, value in self.alike if name != "group"),
            self.op and f"op {self.op}",
            self.within and _collective_text(self.within),
            self.root is not None and f"root {self.root}",
        ]
        given = ", ".join(part for part in parts if part)
        return f"{self.kind}({given}) at {shown(self.where)}"

    @property
    def wait_labels(self) -> dict[str, Any]:
        """Return the labels of a span in which the rank was blocked in this call."""
        return {"peer": self.peer, "group": self.group}

    def event(
        self,
        group: EventGroup,
        posted: Any,
        start: Any,
        end: Any,
        payload: list | None = None,
    ) -> Event:
        """Return the event of this call. On NCCL its times are moments of the GPU's clock."""
        return Event(
            rank=self.rank,
            kind=self.kind,
            peer=self.peer if self.kind in P2P else self.root,
            tag=self.tag,
            nbytes=self.nbytes,
            start=start,
            end=end,
            where=self.where,
            posted=posted,
            group=group,
            seq=self.seq,
            shape=self.shape,
            dtype=self.dtype,
            payload=payload,
            name=self.op,
        )


def operation_on_ranks(collective: Collective | None) -> OperationOnRanks | None:
    """Return the operation and ranks of a message's collective, on which both sides must agree.

    None for p101.send and receive, which also pair with torch's.
    """
    if collective is None or collective.operation in ("send", "receive"):
        return None
    return collective.operation, collective.ranks


def rank_at(rank: int, kind: str, position: int, ranks: Sequence[int]) -> int:
    """Return the rank at a position of the group, which a rank's call names.

    Raises ValueError if there is none, or if it is the rank itself.
    """
    if 0 <= position < len(ranks) and (ranks[position] != rank or kind not in ("send", "recv")):
        return ranks[position]
    what = {"send": "sends to", "recv": "receives from"}.get(kind, f"calls {kind} with root")
    if not 0 <= position < len(ranks):
        beyond_an_end = (position, rank) in ((-1, ranks[0]), (len(ranks), ranks[-1]))
        ring = (
            " On a ring, rank r's neighbours are (r + 1) % size and (r - 1) % size."
            if kind in ("send", "recv") and beyond_an_end
            else ""
        )
        raise ValueError(
            f"rank {rank} {what} {position}, and its group of {len(ranks)} has ranks 0 to "
            f"{len(ranks) - 1}.{ring}"
        )
    raise ValueError(
        f"rank {rank} {what} itself: it has its own data already, so leave that message out"
    )


def long_dims(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape without dims of size 1: they don't change where a value is.

    So what is sent as () may be received as (1,).
    """
    return tuple(n for n in shape if n != 1)


def call_to_compare(
    rank: int,
    kind: str,
    ranks: Sequence[int],
    within: str,
    alike: Mapping[str, Any],
    counts: dict[str, int],
) -> Call:
    """Return a rank's call of one of parallel101's collectives, to compare with other ranks' calls.

    It is posted before the collective's messages. Nobody waits for it. `counts` numbers such calls
    for each list of ranks and each process group `within` which the messages are sent, because each
    thread of a rank may use a process group of its own.
    """
    others, label = tuple(r for r in ranks if r != rank), f"collectives on {sorted(ranks)} {within}"
    seq = counts[label] = counts.get(label, 0) + 1
    same = tuple((name, repr(value)) for name, value in {**alike, "group": list(ranks)}.items())
    return Call(rank, kind, others, label, seq, caller(), alike=same)


def disagreement(ours: Call, theirs: Call) -> str | None:
    """Describe how two calls that belong together differ: one sentence, then the two calls.

    None if they agree.

    Args:
        ours, theirs: the two sides of a message, in either order; or the calls of any two ranks
            with the same group and seq.
    """
    sentence = _difference(ours, theirs)
    return (
        sentence
        and f"{sentence}\n  rank {ours.rank}: {ours.brief}\n  rank {theirs.rank}: {theirs.brief}"
    )


UNEVEN = (  # what to do about a size that a rank took from its own shard
    ". If the shards are uneven, pass the sizes of all of them as sizes=, or the whole tensor's "
    "shape as shape= to a layer"
)


SAME_ON_ALL_RANKS = {  # of a collective
    "kind": "call different operations",
    "root": "name different roots",
    "op": "use different reductions",
    "dtype": "have different dtypes",
}


def _difference(ours: Call, theirs: Call) -> str | None:
    if {ours.kind, theirs.kind} == {"send", "recv"}:
        send, recv = (ours, theirs) if ours.kind == "send" else (theirs, ours)
        if send.within and recv.within and send.within != recv.within:
            sender, receiver = _collective_text(send.within), _collective_text(recv.within)
            rule = "All ranks of a group must call the same collectives in the same order."
            return f"a message of {sender} is received in {receiver}. {rule}"
        different = "sender and receiver have different"
        if send.nbytes != recv.nbytes:
            word = "shorter" if send.nbytes < recv.nbytes else "longer"
            what, field, unit = f"the message is {word} than the receive", "nbytes", " bytes"
        elif send.dtype != recv.dtype:
            what, field, unit = f"{different} dtypes", "dtype", ""
        elif long_dims(send.shape) != long_dims(recv.shape):
            what, field, unit = f"{different} shapes", "shape", ""
        else:
            return None
        return f"{what}: {getattr(send, field)}{unit} sent, {getattr(recv, field)} expected"
    for name, what in SAME_ON_ALL_RANKS.items():
        values = [getattr(call, name) for call in (ours, theirs)]
        if values[0] != values[1]:
            return f"the ranks {what}: {values[0]} and {values[1]}"
    if ours.gives and theirs.gives:
        for giver, taker in ((ours, theirs), (theirs, ours)):
            sent, expected = (giver.gives or {})[taker.rank], (taker.takes or {})[giver.rank]
            if sent != expected:
                return (
                    f"rank {giver.rank} gives rank {taker.rank} {sent} bytes, and rank "
                    f"{taker.rank} expects {expected}"
                )
    elif long_dims(ours.shape) != long_dims(theirs.shape):
        return f"the ranks have different shapes: {tuple(ours.shape)} and {tuple(theirs.shape)}"
    if ours.layout != theirs.layout:
        layouts = f"{ours.layout or 'contiguous'} and {theirs.layout or 'contiguous'}"
        return (
            f"the ranks' tensors have different layouts in memory: {layouts}. Pass them in the "
            "same way on all ranks"
        )
    for (name, our_value), (_, their_value) in zip(ours.alike, theirs.alike):
        if our_value != their_value:
            advice = UNEVEN if name in ("sizes", "whole_shape") else ""
            return f"{name} is not the same on all ranks: {our_value} and {their_value}{advice}"
    return None


def tensor_changed(call: Call) -> MisuseError:
    """Return the error for a tensor that the program changed while it was being sent."""
    what, advice = f"that it passed to {call.kind}", "Call wait() first, or pass a clone."
    if call.kind == "send":
        what = f"that was still being sent to rank {call.peers[0]}"
        advice = "Call wait() on the send first, or send a clone."
    return MisuseError(
        f"rank {call.rank} changed a tensor {what}, before its wait(): {call.brief}. {advice}",
        call.rank,
    )


def waited_twice(rank: int, kind: str) -> MisuseError:
    """Return the error for a second wait() for one message."""
    return MisuseError(
        f"rank {rank} waits a second time for one {kind}, at {shown(caller())}. On gloo the second "
        "wait() would wait forever, for another message. Call wait() once on each message.",
        rank,
    )


NEVER_WAITED = {
    "recv": (
        "Before wait() returns, the data may not have arrived. Keep the work that irecv returns, "
        "and wait() for it."
    ),
    "send": (
        "A tensor must not change before wait() returns, and gloo may cancel a send whose work is "
        "dropped. Keep the work that isend returns, and wait() for it."
    ),
}


def never_waited(calls: Sequence[Call]) -> str:
    """Return the text about receives, or about sends, for which the program never waited."""
    ranks, kind = {call.rank for call in calls}, calls[0].kind
    noun = "receive" if kind == "recv" else "send"
    what = f"a {noun}" if len(calls) == 1 else f"{noun}s"
    who = f"{ranks_text(ranks)} do{'es' * (len(ranks) == 1)} not wait for {what}:"
    return "\n  ".join([who, *places_of(calls), NEVER_WAITED[kind]])


def places_of(calls: Sequence[Call], most: int = 8) -> list[str]:
    """Return a line for each message, with rank and place.

    If there are more than `most` different lines, it returns the first ones and counts the others.
    """
    different: dict[str, None] = {}  # in order, each once
    for call in sorted(calls, key=lambda call: call.rank):
        peer = f"rank {call.peers[0]}" if len(call.peers) == 1 else "any rank"
        to = "from" if call.kind == "recv" else "to"
        different[f"rank {call.rank}: {call.kind} {to} {peer}, at {shown(call.where)}"] = None
    lines = list(different)
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]


def _collective_text(within: OperationOnRanks) -> str:
    operation, ranks = within
    return f"{operation} on ranks {list(ranks)}"


def tag_text(tag: int) -> str:
    return "the tag of parallel101's collectives" if tag == COLLECTIVE_TAG else f"tag {tag}"


class CallChecker:
    """Compares the calls of a checked run.

    It pairs each send with its receive, and the ranks' calls of each collective by their numbers.
    Give each call to `check` when it is posted. `differing` are the calls of the first message or
    collective that does not agree.
    """

    def __init__(self) -> None:
        self.differing: list[Call] = []
        self._messages: dict[tuple, Call] = {}  # whose other side has not been posted
        # that not all ranks have called
        self._collectives: dict[tuple[str, int], list[Call]] = defaultdict(list)
        # (rank, tag, group) with a receive from any rank
        self._from_anyone: set[tuple[int, int, str]] = set()

    def check(self, call: Call) -> bool:
        """Compare a call with those it belongs to. True if it is the first that does not agree."""
        # another rank of the same collective may show which of the calls is the exception
        if self.differing:
            if call.kind not in ("send", "recv") and self.differing is self._collectives.get(
                (call.group, call.seq)
            ):
                self.differing.append(call)
            return False
        if call.kind not in ("send", "recv"):
            calls = self._collectives[call.group, call.seq]
            calls.append(call)
            earlier = calls[:-1] if call.gives else calls[:1]
            if any(disagreement(other, call) for other in earlier):
                self.differing = calls  # not a copy: the calls of more ranks may follow
            elif len(calls) == len(call.peers) + 1:
                del self._collectives[call.group, call.seq]
        elif len(call.peers) != 1:
            # from now on it is not known which of this rank's receives gets which message
            self._from_anyone.add((call.rank, call.tag, call.group))
        else:
            src, dst = (call.rank, *call.peers) if call.kind == "send" else (*call.peers, call.rank)
            if (dst, call.tag, call.group) in self._from_anyone:
                return False
            key = (src, dst, call.tag, call.group, call.seq)
            pair = self._messages.pop(key, None)
            if pair is None or pair.kind == call.kind:
                self._messages[key] = call
            elif disagreement(pair, call):
                self.differing = [pair, call]
        return bool(self.differing)

    def error(self) -> MisuseError | None:
        """Return the error for the calls that differ, or None.

        It names the rank that differs from most ranks.

        For a message it is the receiver, and for two ranks the higher one.
        """
        if not self.differing:
            return None
        calls = sorted(self.differing, key=lambda call: (call.kind == "recv", call.rank))
        if {"send", "recv"} & {call.kind for call in calls}:
            send, recv = calls
            return MisuseError(f"{disagreement(send, recv)}", recv.rank)
        same = Counter(call.agreed for call in calls)
        usual = max(calls, key=lambda call: (same[call.agreed], -call.rank))
        # in an all-to-all, it may be two other ranks that disagree
        if not any(disagreement(usual, call) for call in calls):
            usual = next(a for a in calls if any(disagreement(a, b) for b in calls))
        odd = max(
            (call for call in calls if disagreement(usual, call)),
            key=lambda call: (-same[call.agreed], call.rank),
        )
        # a line for each different call, with all the ranks that made it
        ranks: dict[str, list[int]] = {}
        for call in sorted(calls, key=lambda call: (call is not usual, call is not odd, call.rank)):
            same_as = next((c for c in (usual, odd) if not disagreement(c, call)), call)
            ranks.setdefault(same_as.brief, []).append(call.rank)
        lines = [f"{ranks_text(who)}: {brief}" for brief, who in ranks.items()]
        more = [f"and {len(lines) - 8} other calls"] if len(lines) > 8 else []
        sentence = _difference(usual, odd)
        return MisuseError("\n  ".join([f"{sentence}", *lines[:8], *more]), odd.rank)

    @property
    def all_called(self) -> bool:
        """Return whether the calls of all ranks are among those that differ."""
        return bool(self.differing) and len(self.differing) > len(self.differing[0].peers)
