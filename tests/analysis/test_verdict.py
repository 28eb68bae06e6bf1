"""A collective's name and its ending are given to what the values prove, and to nothing beside it."""

from __future__ import annotations

import pytest

from parallel101.viz.collective import collective_scene
from tests.viz import algorithms as a
from tests.viz.virtual_ranks import run


def one_further(rank, n, x):
    """The first half of the textbook's ring all-reduce: rank r ends with chunk r + 1."""
    x, cut, right, left = list(x), a.parts(len(x), n), (rank + 1) % n, (rank - 1) % n
    for step in range(n - 1):
        out, into = cut[(rank - step) % n], cut[(rank - step - 1) % n]
        (got,) = yield a.Exchange([(right, x[out])], [left])
        x[into] = a.add(x[into], got)
    return x[cut[(rank + 1) % n]]


def shifted_scatter(rank, n, x):
    cut = a.parts(len(x), n)
    if rank:
        (got,) = yield a.Exchange([], [0])
        return got
    yield a.Exchange([(peer, x[cut[(peer + 1) % n]]) for peer in range(1, n)], [])
    return x[cut[1]]


def shifted_all_to_all(rank, n, x):
    cut, mine = a.parts(len(x), n), {rank: x[a.parts(len(x), n)[(rank + 1) % n]]}
    for shift in range(1, n):
        to, source = (rank + shift) % n, (rank - shift) % n
        (mine[source],) = yield a.Exchange([(to, x[cut[(to + 1) % n]])], [source])
    return sum((mine[r] for r in range(n)), [])


RIGHT = {
    "reduce-scatter": (a.ring_reduce_scatter, "its own part, with the data of all"),
    "scatter": (a.flat_scatter, "its own part."),
    "all-to-all": (a.direct_all_to_all, "its part of every rank's data."),
}
SHIFTED = {"reduce-scatter": one_further, "scatter": shifted_scatter, "all-to-all": shifted_all_to_all}


@pytest.mark.parametrize("numel", [lambda n: n, lambda n: 2 * n + 1], ids=["even", "uneven"])
@pytest.mark.parametrize("n", [3, 4, 6])
@pytest.mark.parametrize("operation", RIGHT)
def test_a_part_is_a_ranks_own_only_where_the_parts_are_in_the_order_of_the_ranks(operation, n, numel):
    program, ending = RIGHT[operation]
    right, shifted = (collective_scene(*run(p, n, numel(n))) for p in (program, SHIFTED[operation]))
    assert right.title.lower().endswith(operation) and f"Each rank ends with {ending}" in right.steps[-1].label
    assert operation not in shifted.title.lower() and "its own part" not in shifted.steps[-1].label
    told = ", ".join(f"rank {rank} ends with {'abcdef'[(rank + 1) % n]}" for rank in range(n))
    assert shifted.steps[-1].label.endswith(f" {told[0].upper()}{told[1:]}." if n <= 4 else " This is what each rank ends with.")


def exchange_with_all(rank, n, x):
    others = [r for r in range(n) if r != rank]
    got = dict(zip(others, (yield a.Exchange([(r, x) for r in others], others)), strict=True))
    return sum((got.get(r, x) for r in range(n)), [])


def there_and_back(rank, n, x):
    """A sum in rank 0, which sends it back."""
    if rank:
        yield a.Exchange([(0, x)], [])
        (x,) = yield a.Exchange([], [0])
        return x
    for got in (yield a.Exchange([], list(range(1, n)))):
        x = a.add(x, got)
    yield a.Exchange([(peer, x) for peer in range(1, n)], [])
    return x


@pytest.mark.parametrize(
    ("program", "numel", "three", "five"),
    [
        (a.ring_all_reduce, 2, "Ring all-reduce", "Ring all-reduce"),
        (a.bidirectional_all_gather, 2, "All-gather", "Bidirectional ring all-gather"),
        (exchange_with_all, 2, "Direct all-gather", "Direct all-gather"),
        (a.direct_all_to_all, 15, "Direct all-to-all", "Direct all-to-all"),
        (there_and_back, 2, "Flat all-reduce", "Flat all-reduce"),
    ],
)
def test_three_ranks_are_a_ring_in_both_directions_by_nature_and_are_not_called_so(program, numel, three, five):
    assert [collective_scene(*run(program, n, numel)).title for n in (3, 5)] == [three, five]
