"""Values that encode their origin: copies and sums are decoded, and other values are recognized
as such.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel101.laboratory.analysis.provenance import (
    MOST,
    ElementOrigin,
    decode,
    flat_values,
    most_elements,
    origin_tensor,
)


@given(st.integers(1, 16), st.data())
def test_a_sum_shows_how_often_each_rank_is_in_it(n, data):
    numel = data.draw(st.integers(1, min(40, most_elements(n))))
    counts = data.draw(st.lists(st.integers(0, MOST), min_size=n, max_size=n))
    total = sum(
        (c * origin_tensor(r, n, numel) for r, c in enumerate(counts)),
        torch.zeros(numel, dtype=torch.int64),
    )
    expected = ElementOrigin(None, tuple(counts)) if not any(counts) else None
    assert decode(total.tolist(), n) == [
        expected or ElementOrigin(j, tuple(counts)) for j in range(numel)
    ]


@given(st.integers(2, 12), st.permutations(range(12)))
def test_copies_keep_their_positions(n, order):
    values = origin_tensor(n - 1, n, 12)[list(order)].tolist()
    assert [term.position for term in decode(values, n)] == list(order)


def test_a_sum_of_different_positions_is_mixed():
    missed = []
    for n in (2, 4, 8, 12):
        ours, theirs = (origin_tensor(rank, n, 32).tolist() for rank in (0, 1))
        terms = decode([a + b for a, b in itertools.permutations(ours, 2)], n)
        terms += decode([ours[i] + theirs[j] for i, j in itertools.permutations(range(32), 2)], n)
        assert all(sum(term.counts) == 2 for term in terms)
        missed += [not term.mixed for term in terms]
    # the check has 61 values, so a mixture rarely passes it
    assert sum(missed) / len(missed) < 0.02


@pytest.mark.parametrize(
    "values", [[0.5], [float("inf")], [-1], [1], [True], [3, 1.25], list(range(1, 9)), [8**4 * 3]]
)
def test_other_values_are_not_decoded(values):
    assert decode(values, 4) is None


def test_ordinary_data_is_not_decoded():
    noise = random.Random(0)
    assert all(decode([noise.randrange(1, 200) for _ in range(4)], 4) is None for _ in range(100))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 0, 4), "at least 1"),
        ((4, 4, 4), "0 … 3"),
        ((-1, 4, 4), "not one of the 4 ranks"),
        ((0, 4, -1), "numel=-1"),
        ((0, 4, 4, torch.float32), "torch.int64 or torch.float64"),
        ((0, 20, 1), "fewer ranks"),
        ((0, 16, 99), "can hold"),
        ((0, 16, 4, torch.float64), "torch.int64"),
    ],
)
def test_wrong_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        origin_tensor(*arguments)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
@pytest.mark.parametrize("n", [1, 3, 8, 11])
def test_the_largest_tensor_stays_exact_for_the_largest_sum(n, dtype):
    numel = min(most_elements(n, dtype), 5000)
    total = sum(MOST * origin_tensor(r, n, numel, dtype) for r in range(n))
    assert decode(total[-1:].tolist(), n) == [ElementOrigin(numel - 1, (MOST,) * n)]


def test_flat_values():
    assert flat_values(None) == []
    assert flat_values(torch.tensor([[1, 2], [3, 4]])) == [1, 2, 3, 4]
    assert flat_values((torch.tensor([1]), [torch.tensor(2), 3])) == [1, 2, 3]
    assert flat_values({"a": 1}) is None
    assert flat_values([torch.ones(2), "text"]) is None
    assert flat_values(torch.ones(1 << 17)) is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 8, 11])
def test_a_mean_is_exact_however_often_it_was_divided(n, dtype):
    total = sum(origin_tensor(r, n, 9, dtype) for r in range(n))
    for divisor in (n, n * n) if n <= 8 else (n,):
        expected = [ElementOrigin(j, (1,) * n, divisor) for j in range(9)]
        assert decode((total // divisor).tolist(), n) == expected
        assert decode((total.double() / divisor).tolist(), n) == expected
        if dtype == torch.float64:
            parts = sum(origin_tensor(r, n, 9, dtype) / divisor for r in range(n))
            assert decode(parts.tolist(), n) == expected


def test_other_factors_are_found():
    total = sum(origin_tensor(r, 4, 6) for r in range(4))
    for divisor in (2, 3, 5, 8, 12):
        assert decode((total // divisor).tolist(), 4) == [
            ElementOrigin(j, (1,) * 4, divisor) for j in range(6)
        ]
    assert decode((3 * total).tolist(), 4) == [ElementOrigin(j, (3,) * 4) for j in range(6)]


@pytest.mark.parametrize("n", [2, 4, 8, 12])
def test_memory_that_was_never_written_is_recognised(n):
    data, largest = origin_tensor(1, n, 4), torch.iinfo(torch.int64).max
    terms = decode([largest, (data[0] + largest).item(), float("nan")], n)
    assert all(term.unwritten and not any(term.counts) for term in terms)
    assert not any(term.unwritten for term in decode([0, *data.tolist()], n))
