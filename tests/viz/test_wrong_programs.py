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


def me() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def exchange(outbox, to, inbox, source, wait_for=("receive", "send")):
    received, sent = dist.irecv(inbox, src=source), dist.isend(outbox, dst=to)
    for name, work in (("receive", received), ("send", sent)):
        if name in wait_for:
            work.wait()


def pass_right(outbox, inbox, **options):
    rank, p = me()
    exchange(outbox, (rank + 1) % p, inbox, (rank - 1) % p, **options)


def all_gather(
    mine, sends=lambda rank, step: rank - step, order=1, first=0, make=torch.empty_like, **options
):
    """Lesson 01's ring all-gather, with room for mistakes."""
    rank, p = me()
    blocks = [mine if r == rank else make(mine) for r in range(p)]
    for step in range(first, p - 1):
        pass_right(blocks[sends(rank, step) % p], blocks[(rank - step - 1) % p], **options)
    return torch.cat(blocks[::order])


def reduce_scatter(x, shift=0, take=0, copy=False):
    """Lesson 01's ring reduce-scatter. The shifted ring ends with another rank's part."""
    rank, p = me()
    blocks = [block.clone() for block in x.tensor_split(p)]
    for step in range(1, p):
        into = blocks[(rank - step - 1 + shift) % p]
        inbox = torch.empty_like(into)
        pass_right(blocks[(rank - step + shift) % p], inbox)
        into.copy_(inbox) if copy else into.add_(inbox)
    return blocks[(rank + shift + take) % p]


def without_the_remainder(x):
    _, p = me()
    each = len(x) // p
    return all_gather(reduce_scatter(x[: each * p]))


def with_an_untouched_remainder(x):
    total = x.clone()
    summed = without_the_remainder(x)
    total[: len(summed)] = summed
    return total


def gather_to_the_wrong_root(x, root=1):
    rank, p = me()
    if rank != root:
        dist.send(x, dst=root)
        return None
    parts = [torch.empty_like(x) for _ in range(p)]
    parts[rank] = x
    for other in range(p):
        if other != rank:
            dist.recv(parts[other], src=other)
    return torch.cat(parts)


def scatter_shifted(x):
    rank, p = me()
    parts = x.chunk(p)
    if rank == 0:
        for other in range(1, p):
            dist.send(parts[(other + 1) % p], dst=other)
        return parts[1]
    dist.recv(mine := torch.empty_like(parts[0]), src=0)
    return mine


def scatter_off_by_one(x):
    rank, p = me()
    parts = x.chunk(p)
    if rank == 0:
        for other in range(1, p):
            dist.send(parts[other - 1], dst=other)
        return parts[0]
    dist.recv(mine := torch.empty_like(parts[0]), src=0)
    return mine


def all_to_all_by_shift(x):
    """The parts are joined in the order in which they arrive, not in the order of the ranks."""
    rank, p = me()
    parts, got = x.chunk(p), []
    for shift in range(p):
        inbox = parts[rank].clone()
        if shift:
            exchange(parts[(rank + shift) % p], (rank + shift) % p, inbox, (rank - shift) % p)
        got.append(inbox)
    return torch.cat(got)


def all_to_all_shifted(x):
    rank, p = me()
    parts, got = x.chunk(p), [torch.empty(0)] * p
    for shift in range(p):
        inbox = parts[(rank + 1) % p].clone()
        if shift:
            exchange(parts[(rank + shift + 1) % p], (rank + shift) % p, inbox, (rank - shift) % p)
        got[(rank - shift) % p] = inbox
    return torch.cat(got)


def star_all_reduce(x, again=False, skip=0, roll=0):
    """Rank 0 adds everything up and sends it back."""
    rank, p = me()
    if rank:
        dist.send(x.roll(roll), dst=0)
        dist.recv(total := torch.empty_like(x), src=0)
        return total
    total = x + x if again else x.clone()
    inbox = torch.empty_like(x)
    for other in range(1, p):
        dist.recv(inbox, src=other)
        if other != skip:
            total += inbox
    for other in range(1, p):
        dist.send(total, dst=other)
    return total


def all_gather_one_slot_off(x):
    """Rank 1 stores what comes from rank 3 over what came from rank 2."""
    parts = list(p101.all_gather(x).chunk(me()[1]))
    if me()[0] == 1:
        parts[2] = parts[3]
    return torch.cat(parts)


def star_that_forgets_the_last(x):
    rank, p = me()
    if rank == p - 1:
        return x
    if rank:
        exchange(x, 0, total := torch.empty_like(x), 0)
        return total
    total, inbox = x.clone(), torch.empty_like(x)
    for other in range(1, p - 1):
        dist.recv(inbox, src=other)
        total += inbox
    for other in range(1, p - 1):
        dist.send(total, dst=other)
    return total


def ring_that_forgets_the_last(x):
    """The rank that is left out has the number p, and the ring is one of p ranks."""
    rank, p = me()[0], me()[1] - 1
    if rank == p:
        return x
    blocks = [block.clone() for block in x.tensor_split(p)]
    for step in range(2 * (p - 1)):
        into = blocks[(rank - step - 1) % p]
        exchange(
            blocks[(rank - step) % p],
            (rank + 1) % p,
            inbox := torch.empty_like(into),
            (rank - 1) % p,
        )
        into.add_(inbox) if step < p - 1 else into.copy_(inbox)
    return torch.cat(blocks)


def gather_that_forgets_the_last(x, add=False):
    rank, p = me()
    if rank:
        return dist.send(x, dst=0) if rank < p - 1 else None
    parts = [x, *(torch.empty_like(x) for _ in range(p - 2))]
    for other in range(1, p - 1):
        dist.recv(parts[other], src=other)
    return sum(parts) if add else torch.cat(parts)


def broadcast_that_forgets_the_last(x):
    rank, p = me()
    received = x if rank == 0 else torch.empty_like(x)
    if rank == 0:
        for other in range(1, p - 1):
            dist.send(x, dst=other)
    elif rank < p - 1:
        dist.recv(received, src=0)
    return received


def short_ring(x, make=torch.empty_like):
    """An all-gather with one step too few."""
    rank, p = me()
    blocks = [x if r == rank else make(x) for r in range(p)]
    for step in range(p - 2):
        pass_right(blocks[(rank - step) % p], blocks[(rank - step - 1) % p])
    return torch.cat(blocks)


def all_to_all_without_its_own(x):
    rank, p = me()
    parts = x.chunk(p)
    got = [torch.empty_like(parts[0]) for _ in range(p)]
    for shift in range(1, p):
        exchange(
            parts[(rank + shift) % p],
            (rank + shift) % p,
            got[(rank - shift) % p],
            (rank - shift) % p,
        )
    return torch.cat(got)


def copied_before_the_wait(x):
    rank, p = me()
    inbox = torch.zeros_like(x)
    work = dist.irecv(inbox, (rank - 1) % p)
    dist.send(x, (rank + 1) % p)
    early = inbox.clone()
    work.wait()
    return early


def minus_what_arrived(x):
    pass_right(x, inbox := torch.empty_like(x))
    return x - inbox


# program, what must be said, options of watch
WRONG: dict[str, tuple] = {
    "index, sends what it does not have": (
        lambda x: all_gather(x, sends=lambda rank, step: rank + step),
        "ends? memory that was never written.*On ranks 2 and 3, chunk a was never written",
    ),
    "index, wrong in one step": (
        lambda x: all_gather(x, sends=lambda rank, step: rank + 1 if step == 1 else rank - step),
        "[Rr]anks? .* sends? memory that was never written",
    ),
    "index, one step too few": (
        lambda x: all_gather(x, first=1),
        "Rank.* 0.* sends? memory that was never written",
    ),
    "index, zeros": (
        lambda x: all_gather(x, sends=lambda rank, step: rank + step, make=torch.zeros_like),
        "On ranks 2 and 3, the result lacks chunk a",
    ),
    "index, a ring that ends one further": (
        lambda x: reduce_scatter(x, shift=1),
        r"Rank 0 ends with chunk b, which is rank 1's part; rank 1 with c, rank 2 with d and "
        r"rank 3 with a",
    ),
    "index, the wrong block is returned": (lambda x: reduce_scatter(x, take=1), "lacks"),
    "index, copied in place of added": (
        lambda x: all_gather(reduce_scatter(x, copy=True)),
        r"rank \d ends with|lacks",
    ),
    "order, reversed": (
        lambda x: all_gather(x, order=-1),
        "On every rank, the parts lie in the order d, c, b, a, and not in the ranks' order",
    ),
    "order, by arrival": (all_to_all_by_shift, "On rank 0, the parts lie in the wrong order"),
    "order, elements reversed": (
        lambda x: p101.all_reduce(x).flip(0),
        "On every rank, the parts lie in the wrong order",
    ),
    "place, a scatter that is shifted": (
        scatter_shifted,
        "Rank 0 ends with chunk b, which is rank 1's part",
    ),
    "place, a scatter that is off by one": (
        scatter_off_by_one,
        r"Ranks 0 and 1 end with chunk a, and 2 of the 8 elements of rank 0's data are in no "
        r"result",
    ),
    "place, an all-to-all that is shifted": (
        all_to_all_shifted,
        "Rank 0 ends with chunk b, which is rank 1's part",
    ),
    "place, one slot is overwritten": (
        all_gather_one_slot_off,
        "On rank 1, the result lacks chunk c",
    ),
    "factor, divided twice": (
        lambda x: p101.all_reduce(x) // 16,
        "On every rank, the result is 1/16 of the sum; the mean of 4 ranks is 1/4",
    ),
    "factor, divided on each rank and again": (
        lambda x: p101.all_reduce(x / 4) / 4,
        "the result is 1/16 of the sum",
        {"dtype": torch.float64},
    ),
    "factor, only one rank divides": (
        lambda x: p101.all_reduce(x) // (4 if me()[0] == 2 else 1),
        "On rank 2, the result is 1/4 of the sum; other results are the whole sum",
    ),
    "factor, half": (
        lambda x: p101.all_reduce(x) / 2,
        "1/2 of the sum; the mean of 4 ranks is 1/4",
    ),
    "factor, multiplied": (
        lambda x: p101.all_reduce(x) * 2,
        "On every rank, the sum has the data of ranks 0–3 twice",
    ),
    "root, another one": (gather_to_the_wrong_root, "Rank 1 ends with all 4 chunks"),
    "root, of a broadcast": (
        lambda x: p101.broadcast(x, 2),
        "Every rank ends with all of rank 2's data",
    ),
    "dim, joined along the other": (
        lambda x: p101.all_gather(x, dim=1),
        "Every rank ends with all 4 chunks, joined along dim 1",
        {"shape": (2, 3)},
    ),
    "dim, halves joined the wrong way": (
        lambda x: torch.cat(p101.all_gather(x, dim=1).chunk(2, dim=1)),
        "lie in the wrong order",
        {"shape": (2, 3)},
    ),
    "double count, a rank's own data": (
        lambda x: star_all_reduce(x, again=True),
        "On every rank, the sum has rank 0's data twice",
    ),
    "double count, the sum of sums": (
        lambda x: p101.all_reduce(p101.all_reduce(x)),
        "the data of ranks 0–3 4 times",
    ),
    "missing, one rank is left out": (
        lambda x: star_all_reduce(x, skip=2),
        "On every rank, the sum lacks rank 2's data",
    ),
    "mixed, shifted by one element": (
        lambda x: star_all_reduce(x, roll=1),
        "Elements from different positions were added together, on every rank",
    ),
    "forgotten rank, all-reduce in a star": (
        star_that_forgets_the_last,
        r"On rank 3, the sum lacks the data of ranks 0–2. On ranks 0–2, the sum lacks rank 3's "
        r"data",
    ),
    "forgotten rank, all-reduce on a ring": (
        ring_that_forgets_the_last,
        "On rank 3, chunk a lacks the data of ranks 0–2",
        {"numel": 12},
    ),
    "forgotten rank, gather": (gather_that_forgets_the_last, "No rank ends with rank 3's data"),
    "forgotten rank, reduce": (
        lambda x: gather_that_forgets_the_last(x, add=True),
        "On rank 0, the sum lacks rank 3's data",
    ),
    "forgotten rank, broadcast": (
        broadcast_that_forgets_the_last,
        "On rank 3, the result was never written",
    ),
    "unwritten, a ring with one step too few": (short_ring, "On rank 3, chunk a was never written"),
    "zeros, a ring with one step too few": (
        lambda x: short_ring(x, torch.zeros_like),
        "On rank 3, the result lacks chunk a",
    ),
    "unwritten, an all-to-all without its own block": (
        all_to_all_without_its_own,
        "On rank 0, the result contains memory that was never written",
    ),
    "zeros, copied before the wait": (
        copied_before_the_wait,
        r"No rank ends with any of the data\.",
    ),
    "lost remainder, cut off": (
        without_the_remainder,
        "Of the 10 elements of each rank's tensor, 2 elements are in no result",
        {"numel": 10},
    ),
    "lost remainder, not summed": (
        with_an_untouched_remainder,
        "On ranks 1–3, chunk e lacks rank 0's data",
        {"numel": 10},
    ),
}


def said(scene) -> str:
    """All that a picture says: its title, and the label of each step."""
    return " ".join([scene.title, scene.intro, *(stop.label for stop in scene.stops)])


VOUCHED = r"once|Every rank ends|ends? with all|own part|part of every|all-reduce"


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_program_is_called_wrong(name):
    program, must, *options = WRONG[name]
    run = p101.watch(program, 4, backend="sim", **dict(*options))
    scene, tables = run.animate(), run.before_after()
    assert re.search(must, said(scene)), said(scene)
    if not re.search(VOUCHED, must):
        # a step may be called "all-reduce" in the middle of a run
        last = re.sub(r"^Step \d+ of \d+[^:]*: [^.]*\.", "", scene.stops[-1].label)
        for title, text in ((scene.title, last), (tables.title, tables.stops[-1].label)):
            assert title.startswith("Messages") and not re.search(VOUCHED, text), (title, text)


def test_numbers_that_say_nothing_are_not_vouched_for():
    label = p101.watch(lambda x: p101.all_reduce(x) + 1, 4, backend="sim").animate().stops[-1].label
    assert label.endswith(
        "What the ranks return can't be read as copies, sums or means of the data, so it is "
        "not judged."
    )
    label = (
        p101.watch(lambda x: p101.broadcast(x) + (me()[0] == 2), 4, backend="sim")
        .animate()
        .stops[-1]
        .label
    )
    assert "What rank 2 returns can't be read as" in label
    label = p101.watch(minus_what_arrived, 4, backend="sim").animate().stops[-1].label
    assert label.endswith("so it is not judged.")
    assert "What the ranks return can't be read as" in label


def all_reduce_of_three(x):
    three = dist.new_group([0, 1, 2])
    return p101.all_reduce(x, group=three) if me()[0] < 3 else x


ERRORS: dict[str, tuple[Any, str, str]] = {
    "no wait for the receive": (
        lambda x: all_gather(x, wait_for=("send",)),
        r"do not wait for receives:(.|\n)*rank 1: recv from rank 0, at .*dist.irecv",
        r"deadlock",
    ),
    "no wait at all": (
        lambda x: all_gather(x, wait_for=()),
        r"do not wait for receives",
        r"deadlock",
    ),
    "the sent tensor is changed": (
        lambda x: [
            work := dist.isend(x, (me()[0] + 1) % 4),
            x.zero_(),
            dist.recv(torch.empty_like(x), (me()[0] - 1) % 4),
            work.wait(),
        ],
        r"changed a tensor that was still being sent",
        r"deadlock",
    ),
    "too small an inbox": (
        lambda x: (
            dist.send(x, 1) if me()[0] == 0 else dist.recv(x[:3], 0) if me()[0] == 1 else None
        ),
        r"longer than the receive",
        r"deadlock",
    ),
    "the root differs": (
        lambda x: p101.broadcast(x, me()[0] % 2),
        r"src is not the same on all ranks: 0 and 1",
        r"bytes sent",
    ),
    "the dim differs": (
        lambda x: p101.all_gather(x.reshape(2, 4), dim=me()[0] % 2),
        r"dim is not the same on all ranks: 0 and 1",
        r"bytes sent",
    ),
    "the operation differs": (
        lambda x: p101.barrier() if me()[0] == 1 else p101.all_reduce(x[:1]),
        r"different operations: all_reduce and barrier",
        r"bytes sent",
    ),
    "torch's operations differ": (
        lambda x: dist.barrier() if me()[0] == 1 else dist.all_reduce(x),
        r"different operations: all_reduce and barrier",
        r"bytes sent",
    ),
    "all send first": (
        lambda x: [dist.send(x, (me()[0] + 1) % 4), dist.recv(x, (me()[0] - 1) % 4)],
        r"All of them send first",
        r"do not wait",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_wrong_program_is_an_error(name):
    program, must, must_not = ERRORS[name]
    with pytest.raises((p101.MisuseError, p101.DeadlockError)) as raised:
        p101.watch(program, 4, backend="sim")
    assert re.search(must, str(raised.value)) and not re.search(must_not, str(raised.value)), str(
        raised.value
    )


RIGHT: dict[str, tuple] = {
    "ring all-reduce": (
        lambda x: all_gather(reduce_scatter(x)),
        "with the data of all 4 ranks in it once",
        {"numel": 12},
    ),
    "mean, rounded down": (
        lambda x: p101.all_reduce(x) // 4,
        "with the mean of the data of all 4 ranks in it",
    ),
    "mean, of integers": (
        lambda x: p101.all_reduce(x) / 4,
        "with the mean of the data of all 4 ranks in it",
    ),
    "mean, divided first": (
        lambda x: p101.all_reduce(x / 4),
        "with the mean of the data",
        {"dtype": torch.float64},
    ),
    "mean, by the package": (
        lambda x: p101.all_reduce(x, op="mean"),
        "with the mean of the data",
        {"dtype": torch.float64},
    ),
    "mean, lesson 01's third exercise": (
        lambda x: all_gather(reduce_scatter(x) / 4),
        "all 4 chunks, with the mean of the data",
    ),
    "all-gather into a list": (
        lambda x: list(all_gather(x).chunk(4)),
        "Every rank ends with all 4 chunks.",
    ),
    "a group of three ranks": (all_reduce_of_three, "with the data of all 3 ranks in it once"),
    "a slice": (lambda x: p101.all_reduce(x[:1]), "with the data of all 4 ranks in it once"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_is_not(name):
    program, ending, *options = RIGHT[name]
    scene = p101.watch(program, 4, backend="sim", **dict(*options)).animate()
    assert ending in scene.stops[-1].label and not scene.title.startswith("Messages"), said(scene)
