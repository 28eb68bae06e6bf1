"""A run is called by the name of a collective only if its values prove it."""

from __future__ import annotations

import pytest
import torch

from parallel101.laboratory.viz.collective import collective_scene
from tests.viz import programs as p
from tests.viz.programs import exchange, me, recorded


def one_further(x):
    """The first half of the textbook's ring all-reduce: rank r ends with chunk r + 1."""
    (rank, n), x = me(), x.clone()
    parts = x.tensor_split(n)
    for step in range(n - 1):
        out, into = parts[(rank - step) % n], parts[(rank - step - 1) % n]
        into += exchange([((rank + 1) % n, out)], [((rank - 1) % n, into)])[0]
    return parts[(rank + 1) % n]


def shifted_scatter(x):
    rank, n = me()
    parts = x.tensor_split(n)
    if rank:
        return exchange([], [(0, parts[(rank + 1) % n])])[0]
    exchange([(peer, parts[(peer + 1) % n]) for peer in range(1, n)], [])
    return parts[1]


def shifted_all_to_all(x):
    rank, n = me()
    parts = x.tensor_split(n)
    mine = {rank: parts[(rank + 1) % n]}
    for shift in range(1, n):
        to, source = (rank + shift) % n, (rank - shift) % n
        (mine[source],) = exchange([(to, parts[(to + 1) % n])], [(source, mine[rank])])
    return torch.cat([mine[r] for r in range(n)])


# a program, what is said of its end, and one in which each rank ends with the next one's part
IN_PARTS = {
    "reduce-scatter": (p.ring_reduce_scatter, "its own part, with the data of all", one_further),
    "scatter": (p.flat_scatter, "its own part of rank 0's data.", shifted_scatter),
    "all-to-all": (p.pairwise_all_to_all, "its part of every rank's data.", shifted_all_to_all),
}
OTHERS = {
    3: "rank 1 with c and rank 2 with a",
    4: "rank 1 with c, rank 2 with d and rank 3 with a",
    6: "rank 1 with c, rank 2 with d and 3 more ranks with another's",
}


@pytest.mark.parametrize("numel", [lambda n: n, lambda n: 2 * n + 1], ids=["even", "uneven"])
@pytest.mark.parametrize("n", OTHERS)
@pytest.mark.parametrize("operation", IN_PARTS)
def test_a_rank_has_its_own_part_only_if_the_parts_are_in_the_order_of_the_ranks(
    operation, n, numel
):
    program, ending, one_off = IN_PARTS[operation]
    right, shifted = (collective_scene(*recorded(of, n, numel(n))) for of in (program, one_off))
    end, ends = (scene.stops[-1].label for scene in (right, shifted))
    assert right.title.lower().endswith(operation) and f"Each rank ends with {ending}" in end
    assert operation not in shifted.title.lower() and "its own part" not in ends
    assert ends.endswith(f" Rank 0 ends with chunk b, which is rank 1's part; {OTHERS[n]}.")


def exchange_with_all(x):
    rank, n = me()
    others = [r for r in range(n) if r != rank]
    got = dict(
        zip(others, exchange([(r, x) for r in others], [(r, x) for r in others]), strict=True)
    )
    return torch.cat([got.get(r, x) for r in range(n)])


def there_and_back(x):
    """Rank 0 adds everything up and sends the sum back."""
    rank, n = me()
    if rank:
        exchange([(0, x)], [])
        return exchange([], [(0, x)])[0]
    total = x + sum(exchange([], [(peer, x) for peer in range(1, n)]))
    exchange([(peer, total) for peer in range(1, n)], [])
    return total


def halves_all_gather(x):
    """An all-gather on a ring that sends one half of each part to the right and the other half
    to the left.
    """
    rank, n = me()
    up, down = list(x.tensor_split(2)) if x.numel() > 1 else (x, x[:0])
    after, before = (rank + 1) % n, (rank - 1) % n
    right, left = {rank: up}, {rank: down}
    for step in range(n - 1):
        sends = (after, right[(rank - step) % n]), (before, left[(rank + step) % n])
        receives = (before, up), (after, down)
        right[(rank - step - 1) % n], left[(rank + step + 1) % n] = exchange(sends, receives)
    return torch.cat([half for r in range(n) for half in (right[r], left[r])])


@pytest.mark.parametrize(
    ("program", "numel", "three", "five"),
    [
        (p.ring_all_reduce, 2, "Ring all-reduce", "Ring all-reduce"),
        (halves_all_gather, 2, "All-gather", "Bidirectional ring all-gather"),
        (exchange_with_all, 2, "Direct all-gather", "Direct all-gather"),
        (p.pairwise_all_to_all, 15, "Pairwise all-to-all", "Pairwise all-to-all"),
        (there_and_back, 2, "Flat all-reduce", "Flat all-reduce"),
    ],
    ids=["ring", "both directions", "exchange with all", "pairwise", "there and back"],
)
def test_three_ranks_that_send_in_both_directions_are_not_called_a_ring(
    program, numel, three, five
):
    assert [collective_scene(*recorded(program, n, numel)).title for n in (3, 5)] == [three, five]
