"""Programs with the mistakes that students make: each with what the picture or the error must
say, and what they must not.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from tests.viz.programs import me


def exchange(outbox, to, inbox, source, wait_for=("receive", "send")):
    received, sent = dist.irecv(inbox, src=source), dist.isend(outbox, dst=to)
    for name, work in (("receive", received), ("send", sent)):
        if name in wait_for:
            work.wait()
    return inbox


def pass_right(outbox, inbox, **options):
    rank, p = me()
    return exchange(outbox, (rank + 1) % p, inbox, (rank - 1) % p, **options)


def all_gather(x, way=-1, make=torch.empty_like, **options):
    """Lesson 01's ring all-gather, with room for mistakes."""
    rank, p = me()
    blocks = [x if r == rank else make(x) for r in range(p)]
    for step in range(p - 1):
        into = blocks[(rank - step - 1) % p]
        pass_right(blocks[(rank + way * step) % p], into, **options)
    return torch.cat(blocks)


def reduce_scatter(x, shift=0, take=0, copy=False):
    """Lesson 01's ring reduce-scatter. The shifted ring ends with another rank's part."""
    rank, p = me()
    blocks = [block.clone() for block in x.tensor_split(p)]
    for step in range(1, p):
        into = blocks[(rank - step - 1 + shift) % p]
        inbox = pass_right(blocks[(rank - step + shift) % p], torch.empty_like(into))
        into.copy_(inbox) if copy else into.add_(inbox)
    return blocks[(rank + shift + take) % p]


def ring(x, **options):
    return all_gather(reduce_scatter(x, **options))


def without_the_remainder(x):
    return ring(x[: len(x) // me()[1] * me()[1]])


def gather_of_three(x):
    rank = me()[0]
    if rank:
        return dist.send(x, dst=0) if rank < 3 else None
    parts = [x, torch.empty_like(x), torch.empty_like(x)]
    for other in (1, 2):
        dist.recv(parts[other], src=other)
    return torch.cat(parts)


def all_to_all_without_own_part(x):
    rank, p = me()
    parts = list(p101.all_to_all(x).chunk(p))
    parts[rank] = torch.empty_like(parts[rank])
    return torch.cat(parts)


def rolled_by_rank(x):
    return p101.all_to_all(x).roll(2 + 2 * me()[0])


def star_of_three(x):
    """Rank 0 adds everything up and sends it back, and forgets the last rank."""
    rank, p = me()[0], 3
    if rank >= p:
        return x
    if rank:
        return exchange(x, 0, torch.empty_like(x), 0)
    total, inbox = x.clone(), torch.empty_like(x)
    for other in range(1, p):
        dist.recv(inbox, src=other)
        total += inbox
    for other in range(1, p):
        dist.send(total, dst=other)
    return total


def copied_before_the_wait(x):
    rank, p = me()
    work = dist.irecv(inbox := torch.zeros_like(x), (rank - 1) % p)
    dist.send(x, (rank + 1) % p)
    early = inbox.clone()
    work.wait()
    return early


FLOAT = {"dtype": torch.float64}
# what must be said → the program; and options of watch
WRONG: dict[str, Any] = {
    # a wrong index: it sends what it does not have
    "ends? memory that was never written.*On ranks 2 and 3, chunk a was never written": (
        lambda x: all_gather(x, way=1)
    ),
    "On ranks 2 and 3, the result lacks chunk a": lambda x: all_gather(x, 1, torch.zeros_like),
    "Rank 0 ends with chunk b, which is rank 1's part; rank 1 with c, rank 2 with d and rank 3": (
        lambda x: reduce_scatter(x, shift=1)
    ),
    "lacks": lambda x: reduce_scatter(x, take=1),
    r"rank \d ends with|lacks": lambda x: ring(x, copy=True),
    # order
    "On every rank, the parts lie in the order d, c, b, a, and not in the ranks' order": (
        lambda x: torch.cat(all_gather(x).chunk(4)[::-1])
    ),
    "On rank 0, the parts lie in the wrong order": rolled_by_rank,
    # place
    "Ranks 0 and 1 end with chunk a, and 2 of the 8 elements of rank 0's data are in no result": (
        lambda x: p101.scatter(torch.cat([x[:2], x[:-2]]))
    ),
    "Rank 0 ends with chunk b, which is rank 1's part": lambda x: p101.all_to_all(x.roll(-2)),
    # factor
    "On every rank, the result is 1/16 of the sum; the mean of 4 ranks is 1/4": (
        lambda x: p101.all_reduce(x) // 16
    ),
    "On rank 2, the result is 1/4 of the sum; other results are the whole sum": (
        lambda x: p101.all_reduce(x) // (4 if me()[0] == 2 else 1)
    ),
    # root
    "Rank 1 ends with all 4 chunks": lambda x: p101.gather(x, dst=1),
    "Every rank ends with all of rank 2's data": lambda x: p101.broadcast(x, 2),
    # dim
    "Every rank ends with all 4 chunks, joined along dim 1": (
        *(lambda x: p101.all_gather(x, dim=1), {"shape": (2, 3)}),
    ),
    "lie in the wrong order": (
        *(lambda x: torch.cat(p101.all_gather(x, dim=1).chunk(2, dim=1)), {"shape": (2, 3)}),
    ),
    # double count
    "the data of ranks 0–3 4 times": lambda x: p101.all_reduce(p101.all_reduce(x)),
    # mixed: shifted by one element
    "Elements from different positions were added together, on every rank": (
        lambda x: p101.all_reduce(x.roll(me()[0]))
    ),
    # a forgotten rank
    "On rank 3, the sum lacks the data of ranks 0–2. On ranks 0–2, the sum lacks rank 3's data": (
        star_of_three
    ),
    "No rank ends with rank 3's data": gather_of_three,
    # unwritten, or zeros
    "On rank 0, the result contains memory that was never": all_to_all_without_own_part,
    r"No rank ends with any of the data\.": copied_before_the_wait,
    # a lost remainder
    "Of the 10 elements of each rank's tensor, 2 elements are in no result": (
        *(without_the_remainder, {"numel": 10}),
    ),
    # numbers that say nothing are not vouched for
    "What the ranks return can't be read as copies, sums or means of the data, so it is not judg": (
        lambda x: p101.all_reduce(x) + 1
    ),
    "What rank 2 returns can't be read as": lambda x: p101.broadcast(x) + (me()[0] == 2),
    "What the ranks return can't be read as.*so it is not judged": (
        lambda x: x - pass_right(x, torch.empty_like(x))
    ),
}
VOUCHED = r"once|Every rank ends|ends? with all|own part|part of every|all-reduce"


def watched(program: Any) -> p101.Run:
    program, *options = program if isinstance(program, tuple) else (program,)
    return p101.watch(program, 4, backend="sim", **dict(*options))


def said(scene) -> str:
    """All that a picture says: its title, and the label of each step."""
    return " ".join([scene.title, scene.intro, *(stop.label for stop in scene.stops)])


@pytest.mark.parametrize("must", WRONG)
def test_a_wrong_program_is_called_wrong(must):
    run = watched(WRONG[must])
    scene, tables = run.animate(), run.before_after()
    assert re.search(must, said(scene)), said(scene)
    assert (">can't be read<" in tables.svg()) == ("can't be read" in must)
    if not re.search(VOUCHED, must):
        # a step may be called "all-reduce" in the middle of a run
        last = re.sub(r"^Step \d+ of \d+[^:]*: [^.]*\.", "", scene.stops[-1].label)
        for title, text in ((scene.title, last), (tables.title, tables.stops[-1].label)):
            assert title.startswith("Messages") and not re.search(VOUCHED, text), (title, text)


def send_first(x, spoil=False):
    rank, p = me()
    work = dist.isend(x, (rank + 1) % p)
    if spoil:
        x.zero_()
    else:
        work.wait()
    dist.recv(torch.empty_like(x), (rank - 1) % p)
    work.wait()


def too_small_an_inbox(x):
    if me()[0] < 2:
        dist.recv(x[:3], 0) if me()[0] else dist.send(x, 1)


def barrier_on_one(barrier, other):
    return lambda x: barrier() if me()[0] == 1 else other(x)


# what must be said → the program; and the error, if it isn't a MisuseError
ERRORS: dict[str, Any] = {
    r"do not wait for receives:(.|\n)*rank 1: recv from rank 0, at .*dist.irecv": (
        lambda x: all_gather(x, wait_for=("send",))
    ),
    "do not wait for receives": lambda x: all_gather(x, wait_for=()),
    "changed a tensor that was still being sent": lambda x: send_first(x, spoil=True),
    "longer than the receive": too_small_an_inbox,
    "src is not the same on all ranks: 0 and 1": lambda x: p101.broadcast(x, me()[0] % 2),
    "dim is not the same on all ranks: 0 and 1": lambda x: p101.all_gather(
        x.reshape(2, 4), dim=me()[0] % 2
    ),
    "different operations: all_reduce and barrier": barrier_on_one(
        p101.barrier, lambda x: p101.all_reduce(x[:1])
    ),
    "operations: all_reduce and barrier": barrier_on_one(dist.barrier, dist.all_reduce),
    "All of them send first": send_first,
}


@pytest.mark.parametrize("must", ERRORS)
def test_a_wrong_program_is_an_error(must):
    deadlock = "send first" in must
    with pytest.raises(p101.DeadlockError if deadlock else p101.MisuseError) as raised:
        watched(ERRORS[must])
    text = str(raised.value)
    assert re.search(must, text) and ("deadlock" in text) == deadlock, text
    for words, where in (("bytes sent", "longer"), ("do not wait", "do not wait")):
        assert (words in text) == (where in must), text


def all_reduce_of_three(x):
    three = dist.new_group([0, 1, 2])
    return p101.all_reduce(x, group=three) if me()[0] < 3 else x


ONCE, MEAN = (f"with the {of}data of all 4 ranks in it" for of in ("", "mean of the "))
RIGHT: dict[str, tuple[str, Any]] = {  # the end of the last sentence
    "ring all-reduce": (f"{ONCE} once", (ring, {"numel": 12})),
    "mean, rounded down": (MEAN, lambda x: p101.all_reduce(x) // 4),
    "mean, of integers": (MEAN, lambda x: p101.all_reduce(x) / 4),
    "mean, divided first": (MEAN, (lambda x: p101.all_reduce(x / 4), FLOAT)),
    "mean, by the package": (MEAN, (lambda x: p101.all_reduce(x, op="mean"), FLOAT)),
    "lesson 01's exercise": (
        *("all 4 chunks, with the mean of the data", lambda x: all_gather(reduce_scatter(x) / 4)),
    ),
    "into a list": ("Every rank ends with all 4 chunks.", lambda x: [*all_gather(x).chunk(4)]),
    "a group of three ranks": ("with the data of all 3 ranks in it once", all_reduce_of_three),
    "a slice": (f"{ONCE} once", lambda x: p101.all_reduce(x[:1])),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_is_not(name):
    ending, program = RIGHT[name]
    run = watched(program)
    scene, tables = run.animate(), run.before_after()
    assert ending in scene.stops[-1].label and not scene.title.startswith("Messages"), said(scene)
    assert ("mean of the data" in tables.stops[-1].label) == ("mean" in ending), said(tables)
