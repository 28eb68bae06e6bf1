"""Writes the text of the collective view: title, steps, facts, and what went wrong where.

Each step has a sentence, and the facts are at the right.

    ring, every rank sends, every arrival is added
        ──▶ "Each rank sends a partial sum to its right neighbour, which adds it to its own."

`Captions` makes the sentences. Who sends to whom in a step, and what, is put into words by
`route_of` and `contents_of`.

All of it comes from the replay of a record (`laboratory.analysis.replay`). An algorithm is named
only if the messages prove it. The last sentence of a picture, its verdict, comes from
`laboratory.analysis.verdict`.
"""

from __future__ import annotations

from functools import cached_property

from parallel101.laboratory.analysis.replay import START, ChunkPart, Replay, is_transposed
from parallel101.laboratory.analysis.verdict import Verdict, chunk_name, data_of
from parallel101.laboratory.record.events import P2P
from parallel101.laboratory.record.units import (
    chunk_letters,
    human_bytes,
    listed,
    ranks_text,
    sentence,
)
from parallel101.laboratory.viz.rows import unfinished_text
from parallel101.laboratory.viz.scene import Node, in_two_lines

UNWRITTEN = "memory that was never written"
NO_DATA = (
    "The messages carry no data of x, only zeros.",
    "Each says that its sender has come so far.",
)
NO_ORIGIN = (
    "These values do not show which rank they came from.",
    "p101.watch(fn) follows copies, sums and means, but not products.",
)
NEVER_WRITTEN = (
    "The messages carry memory that was never written.",
    "A tensor of torch.empty was sent before anything was put into it.",
)
TOO_MANY = (
    "There are too many ranks or chunks to draw them all.",
    "With fewer, the picture shows what is inside a message.",
)


class Captions:
    """All the text of one picture. `verdict`: if more of the run is known than is drawn."""

    def __init__(self, replay: Replay, verdict: Verdict | None = None):
        self.replay = replay
        self.verdict = verdict or Verdict(replay)
        self.operation = self.verdict.operation
        self.phases = [self._phase(step) for step in range(replay.steps)]

    @cached_property
    def title(self) -> str:
        """ "Ring all-reduce" if the values prove it, otherwise "Messages on a ring of 4 ranks"."""
        n, topology = len(self.replay.ranks), self.replay.topology
        if n == 1:
            return "One rank"
        if self._barrier:
            return "Barrier" if n > 2 else "Barrier on two ranks"
        if self.operation is None:
            if not self.replay.messages and self.replay.trace.unfinished:
                return f"Unfinished calls on {n} ranks"
            place = f"{n} ranks"
            if self.replay.messages and topology.kind in ("ring", "chain", "tree", "grid"):
                place = f"a {topology.kind} of {n} ranks"
            elif self.replay.messages and topology.kind == "star":
                place = f"rank {topology.root} and {n - 1} others"
            return f"Messages on {place}" if n > 2 else "Messages between two ranks"
        if not self.replay.messages:
            return self.operation.capitalize()
        if n == 2:
            return f"{self.operation.capitalize()} on two ranks"
        prefixes = {
            "ring": "Bidirectional ring" if topology.both_ways else "Ring",
            "chain": "Chain",
            "star": "Flat",
            "tree": "Tree",
        }
        prefix = prefixes.get(topology.kind, self._algorithm)
        return f"{prefix} {self.operation}" if prefix else self.operation.capitalize()

    @cached_property
    def _barrier(self) -> bool:
        """True if the messages carry no data, and each rank has heard from all others at the end.

        The ranks must return nothing.
        """
        replay = self.replay
        heard = all(replay.connected.get(rank) == set(replay.ranks) for rank in replay.ranks)
        return replay.no_data and heard and not any(replay.origins)

    @cached_property
    def intro(self) -> str:
        """The sentence before the first step."""
        replay = self.replay
        if len(replay.ranks) == 1:
            return "One rank has no other rank to send to."
        if not replay.messages:
            collectives = sorted({e.kind for e in replay.trace.events} - P2P - {"span"})
            if not collectives and replay.trace.unfinished:
                return f"No message has arrived: {unfinished_text(replay.trace)}"
            if not collectives:
                return "This record has no messages between ranks."
            return (
                f"torch's own {listed(collectives)} moved the data. The record has the calls, but "
                "not the messages inside them."
            )
        if self._barrier:
            return (
                "No rank can go on before it has heard from every other rank, directly or through "
                "others."
            )
        if not replay.known:
            return f"{_count(len(replay.messages), 'message')} between {len(replay.ranks)} ranks."
        own = "Each rank starts with its own data."
        if self.operation == "all-to-all":
            return f"{own} A chunk's letter says where it goes: {self._destinations(4)}."
        holders = {
            rank for (rank, _), states in replay.cells.items() if states and any(states[0][1])
        }
        return f"Rank {min(holders)} starts with all the data." if len(holders) == 1 else own

    def _destinations(self, most: int) -> str:
        """Return the receiver of each chunk: "a to rank 0, b to rank 1, and so on"."""
        owners = {c: rank for rank in self.replay.ranks for c in self.replay.final(rank)}
        parts = [f"{self.replay.chunks[c].label} to rank {owners[c]}" for c in sorted(owners)]
        return listed(parts) if len(parts) <= most else ", ".join([*parts[:2], "and so on"])

    @cached_property
    def legend(self) -> list[str]:
        """The lines below the cells."""
        replay = self.replay
        if replay.sums:
            full = " A full cell is finished." * (len(replay.chunks) > 1)
            return [f"Each stripe is one rank's data.{full}"]
        by_letter = [f"Chunks go by letter: {self._destinations(2)}."]
        by_letter *= self.operation == "all-to-all"
        if by_letter or any(len(chunk.stripes) > 1 for chunk in replay.chunks):
            return [*by_letter, "Each stripe is the part that came from one rank."]
        return ["A full cell: this rank has the chunk."]

    @cached_property
    def result(self) -> str:
        """The sentence after the last step.

        It is "" if the result isn't known, and nobody expects to see it.
        """
        if self.verdict.replay.known:
            return self.verdict.sentence()
        watched = self.replay.numel is not None and not self.replay.no_data
        if not watched or not any(m.payload for m in self.replay.messages):
            return ""
        return "These values do not show which rank they came from, so the result is not judged."

    @cached_property
    def size(self) -> str:
        """The fact at the top right: "4 ranks · gloo · 64 B in 4 chunks"."""
        replay, trace = self.replay, self.replay.trace
        some = f"{len(replay.ranks)} of " * (len(replay.ranks) != trace.world_size)
        head = f"{some}{_count(trace.world_size, 'rank')} · {trace.backend}"
        if not replay.known:
            unfinished = f" · {len(trace.unfinished)} unfinished" if trace.unfinished else ""
            return f"{head} · {_count(len(replay.messages), 'message')}{unfinished}"
        width = next((m.nbytes // len(m.payload) for m in replay.messages if m.payload), 0)
        size = human_bytes(width * sum(chunk.elements for chunk in replay.chunks))
        k = len(replay.chunks)
        parts = [size] * bool(width) + [f"{k} chunks"] * (k > 1)
        return head + (" · " + " in ".join(parts) if parts else "")

    def sent(self, step: int) -> str:
        """Return the fact below the size: the bytes sent so far, this step included."""
        sent = self.replay.sent_bytes(step)
        most = max(sent.values(), default=0)
        if not self.replay.messages:
            return ""
        if most == 0:
            return "nothing sent yet" if step < 0 else "0 B sent so far"
        if len(set(sent.values())) == 1:
            return f"{human_bytes(most)} sent by each rank so far"
        busiest = [rank for rank, nbytes in sent.items() if nbytes == most]
        who = f"rank {busiest[0]}" if len(busiest) == 1 else f"each of {len(busiest)} ranks"
        total = human_bytes(sum(sent.values()))
        return f"{human_bytes(most)} sent by {who} so far, {total} in total"

    def step(self, step: int) -> str:
        """Return the sentence of a step: who sends what to whom, and what receivers do with it."""
        replay, indices = self.replay, self.replay.in_step(step)
        pairs = {(replay.messages[i].src, replay.messages[i].dst) for i in indices}
        senders, receivers = (sorted({pair[k] for pair in pairs}) for k in (0, 1))
        n, everyone = len(replay.ranks), senders == replay.ranks
        ring = everyone and replay.topology.kind == "ring"
        exchange = not ring and len(pairs) > 1 and all((dst, src) in pairs for src, dst in pairs)
        who = "each rank" if everyone else ranks_text(senders)
        send = "sends" if everyone or len(senders) == 1 else "send"
        to = ranks_text(receivers) if len(receivers) <= 4 else f"{len(receivers)} others"
        if ring:  # the right neighbour of a rank is the one with the next higher number
            place = replay.ranks.index
            shifts = {(place(dst) - place(src)) % n for src, dst in pairs}
            near = {n - 1: "its left neighbour", 1: "its right neighbour"}
            one = near.get(min(shifts), "") if len(shifts) == 1 else ""
            to = "each of its two neighbours" if len(pairs) > n else one or "the next rank"
        elif everyone and len(receivers) > 1:
            to = "another rank"
        if not replay.known:
            sizes = {replay.messages[i].nbytes for i in indices}
            size = "up to " * (len(sizes) > 1) + human_bytes(max(sizes))
            return sentence(f"{who} {send} {size} to {to}")
        contents, plural = contents_of(replay, indices, exchange or send == "send")
        modes = {landing.added for i in indices for landing in replay.landings[i]}
        if exchange:
            who, in_pairs = ("The ranks", " in pairs") if n > 2 else ("The two ranks", "")
            then = "some of it is added, the rest is stored"
            if len(modes) < 2:
                then = "each stores what it receives"
            if modes == {True}:
                then = "each adds what it receives to its own"
            return f"{who} exchange {contents}{in_pairs}, and {then}."
        them, then = "them" if plural else "it", ""
        if modes == {True}:
            alone = ring or everyone or len(receivers) == 1
            add, own = ("adds", "its") if alone else ("add", "their")
            then = f", which {add} {them} to {own} own"
        elif len(modes) > 1:
            then = ", where some of it is added and the rest is stored"
        elif ring:
            then = f", which copies {them}"
        return sentence(f"{who} {send} {contents} to {to}{then}")

    def new_error(self, step: int) -> str:
        """Return a sentence about what went wrong in a step, or "" if nothing did.

        Either a rank sends memory that was never written, or a rank now has data in a sum more than
        once, and no rank had it before.
        """
        replay = self.replay
        unwritten = {replay.messages[i].src for i in replay.in_step(step) if replay.unwritten[i]}
        if unwritten:
            send = "sends" if len(unwritten) == 1 else "send"
            return sentence(f"{ranks_text(sorted(unwritten))} {send} {UNWRITTEN}")
        for (rank, chunk), states in sorted(replay.cells.items()):
            every = (state for r in replay.ranks for state in replay.cells[r, chunk])
            earlier = [counts for moment, counts in every if START < moment < step]
            origins = [
                origin
                for (_, before), (moment, after) in zip(states, states[1:], strict=False)
                for origin, count in enumerate(after)
                if step <= moment < step + 1
                if count > max(1, before[origin], *(counts[origin] for counts in earlier))
            ]
            if origins:
                what = f"{chunk_name(replay, chunk)} now contains {data_of(origins)}"
                return f"On rank {rank}, {what} more than once."
        return ""

    def _phase(self, step: int) -> str:
        """Return the label in the ring of steps.

        That is the phase of an all-reduce, otherwise the operation, or what receivers do.
        """
        replay = self.replay
        of_step = replay.in_step(step) if replay.known else []
        added = {landing.added for i in of_step for landing in replay.landings[i]}
        if not added:
            return ""
        if self.operation != "all-reduce":
            words = ["add"] * (True in added) + ["copy"] * (False in added)
            return self.operation or ", ".join(words)
        if all(landing.added for message in replay.landings for landing in message):
            return "all-reduce"
        parts = len(replay.chunks) > 1
        if added == {True}:
            return "reduce-scatter" if parts else "reduce"
        return "all-gather" if parts else "broadcast"

    @cached_property
    def _algorithm(self) -> str:
        """The algorithm of ranks on a circle or a grid, or "" if the record does not prove one."""
        replay = self.replay
        n, links = len(replay.ranks), replay.topology.links
        if replay.topology.wrap_around and replay.topology.closed:
            return "Two-level" if self.operation == "all-reduce" and self._two_level else "Torus"
        # with more messages, ranks pass on what others sent
        rounds = (1, 2) if self.operation == "all-reduce" else (1,)
        if len(links) == n * (n - 1) and len(replay.messages) in [len(links) * k for k in rounds]:
            for rank in replay.ranks:  # pairwise, a send waits for the message before it
                posted = sorted(m.send.posted for m in replay.messages if m.src == rank)
                arrived = sorted(m.recv.end for m in replay.messages if m.dst == rank)
                if any(after < before for after, before in zip(posted[1:], arrived)):
                    return "Direct"
            return "Pairwise"
        if n & (n - 1) or not all((a ^ b) & ((a ^ b) - 1) == 0 for a, b in links):
            return ""
        steps = [[replay.messages[i] for i in replay.in_step(s)] for s in range(replay.steps)]
        if any(len({m.src for m in of_step}) < n for of_step in steps):
            # in doubling and halving every rank sends in every step; in a tree it does not
            return ""
        sizes = [max(m.nbytes for m in of_step) for of_step in steps]
        grows = any(b > a for a, b in zip(sizes, sizes[1:], strict=False))
        shrinks = any(b < a for a, b in zip(sizes, sizes[1:], strict=False))
        if grows and shrinks:
            return "Halving and doubling"
        return "Recursive-halving" if shrinks else "Recursive-doubling"

    @cached_property
    def _two_level(self) -> bool:
        """True if all chunks on a grid are first sent along the rows, in one direction.

        On a torus they start along all its links.
        """
        replay, place, ways = self.replay, self.replay.topology.order.index, dict[int, bool]()
        for i in (i for step in range(replay.steps) for i in replay.in_step(step)):
            m, columns = replay.messages[i], replay.topology.columns
            for landing in replay.landings[i]:
                ways.setdefault(landing.chunk, place(m.src) // columns == place(m.dst) // columns)
        arcs = replay.topology.wrap_around
        return set(ways.values()) == {True} and not any((b, a) in arcs for a, b in arcs)


def matrix_sentence(
    captions: Captions, given: list[list[ChunkPart]], returned: list[list[ChunkPart]]
) -> str:
    """Return a sentence that says what happened to the matrix of the ranks' blocks."""
    replay, verdict = captions.replay, captions.verdict
    if all(result is None for result in replay.results):
        return "The function returned nothing."
    if verdict.faults or verdict.mean or verdict.unreadable:
        return verdict.sentence()
    if is_transposed(given, returned):
        return "Each column has become a row: the matrix of blocks is transposed."
    held = [len(row) > 1 or row[0].chunk is not None for row in given]
    holder = replay.ranks[held.index(True) if any(held) else 0]
    receiver = next((rank for rank, row in zip(replay.ranks, returned) if row), replay.ranks[0])
    sentences = {
        "all-gather": "The column of blocks has become a row, and every rank has it.",
        "gather": f"The column of blocks has become the row of rank {receiver}.",
        "scatter": f"The row of rank {holder} has become a column.",
        "reduce-scatter": "Each column is added up, and its sum becomes the row of one rank.",
        "all-reduce": "Each column is added up, and every rank has the sums.",
    }
    return sentences.get(captions.operation or "") or verdict.sentence()


def contents_of(replay: Replay, indices: list[int], senders: bool) -> tuple[str, bool]:
    """Return the contents of the messages, in words, and whether that is a plural.

    `senders`: whether the subject of the sentence is a plural.
    """
    carried = [(replay.messages[i].src, x) for i in indices for x in replay.landings[i]]
    if not carried and any(replay.unwritten[i] for i in indices):
        return UNWRITTEN, False
    if not carried:
        return ("messages" if senders else "a message") + " without data", senders
    whole, most = len(replay.chunks) == 1, max(len(replay.landings[i]) for i in indices)
    if len(indices) == 1 and not whole:
        names = [replay.chunks[x.chunk].label for _, x in carried]
        return f"chunk{'s' if len(names) > 1 else ''} {chunk_letters(names)}", len(names) > 1
    plural, their = senders or most > 1, "their" if senders else "its"
    own = all(sum(x.carried) == 1 == x.carried[src] for src, x in carried)
    fresh = all(replay.chunks[x.chunk].stripes == (src,) for src, x in carried)
    fresh = fresh and own and len(indices) > 1
    sums = any(x.added for _, x in carried)
    finished = all(x.carried[r] == 1 for _, x in carried for r in replay.chunks[x.chunk].stripes)
    alike = not senders and len({len(replay.landings[i]) for i in indices}) == 1
    kind = "finished " * (replay.sums and not sums and finished)
    several = f"{most} chunks" if alike else "chunks"
    cases = (  # whether it applies; the contents if there is one chunk, a chunk of several, chunks
        (not replay.sums and fresh, "the data", f"{their} own chunk", f"{their} own chunks"),
        (not replay.sums, "the data", "a chunk", several),
        (sums and not own, "", "a partial sum", "partial sums"),
        (sums, f"{their} data", "a chunk", f"{their} chunks"),
        (True, f"the {kind}sum", f"a {kind}chunk", f"{kind}chunks"),
    )
    one, single, plurals = next(words for applies, *words in cases if applies)
    if whole and one:
        return one, False
    return (plurals if plural else single), plural


def draw_caption(
    panel: Node, text: str, span: tuple[float, float], room: float = 904.0, wrong: bool = False
) -> Node:
    """Write a sentence under the title during a span of seconds.

    It fits into `room` pixels, in two lines if one would be too small.
    """
    group, lines = panel.add("g").show(span), [text]
    width = (8.7 if wrong else 7.7) * len(text)  # in DejaVu Sans, the widest of the usual fonts
    size = min(14.0, 14 * room / max(width, 1))
    if size < 10.5:
        size, lines = min(12.5, 2 * size * 0.95), in_two_lines(text)
    group.lines(lines, 28, 64 if len(lines) == 1 else 59, 16, size, "w b" if wrong else "m")
    return group


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
