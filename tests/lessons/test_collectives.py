"""Lesson 01: the code by hand is right on any number of ranks, the checks of what the reader writes
tell right from wrong, and the answers to the exercises are right.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from tests.lessons.lesson import definitions, source

LESSON = definitions("01_collectives", "STEPS", "BYTES")
RANKS = [1, 2, 5, 8]


def results(fn, p, numbers):
    """What fn returns on each rank, where rank r's array is 100r, 100r + 1, …"""

    def program():
        return fn(torch.arange(float(numbers)) + 100 * dist.get_rank())

    return p101.launch(program, world_size=p, backend="sim").results


def arrays(p, numbers):
    return [torch.arange(float(numbers)) + 100 * r for r in range(p)]


def same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert (a is None and b is None) or torch.equal(a, b), (found, expected)


@pytest.mark.parametrize("p", RANKS)
def test_the_code_by_hand_is_right_and_changes_no_input(p):
    x = arrays(p, 2 * p)
    total = sum(x)
    copies = {
        "flat_broadcast": [x[0]] * p,
        "tree_broadcast": [x[0]] * p,
        "reduce_broadcast": [total] * p,
    }
    new = {
        "scatter": x[0].chunk(p),
        "gather": [torch.cat(x)] + [None] * (p - 1),
        "tree_reduce": [total] + [None] * (p - 1),
        "ring_all_gather": [torch.cat(x)] * p,
        "ring_reduce_scatter": total.chunk(p),
        "ring_all_reduce": [total] * p,
        "all_to_all": [torch.cat([a.chunk(p)[r] for a in x]) for r in range(p)],
    }
    found = results(lambda x: [LESSON[name](x.clone()) for name in copies], p, 2 * p)
    for number, expected in enumerate(copies.values()):
        same([of_rank[number] for of_rank in found], expected)
    found = results(lambda x: [*[LESSON[name](x) for name in new], x], p, 2 * p)
    for number, expected in enumerate([*new.values(), x]):
        same([of_rank[number] for of_rank in found], expected)
    assert LESSON["count"](lambda x: LESSON["barrier"](), p)["steps"] == math.ceil(math.log2(p))


def test_same_messages_says_if_receivers_or_numbers_differ():
    flat = partial(p101.broadcast, algorithm="flat")
    by_hand = LESSON["flat_broadcast"]
    for fn in (LESSON["tree_broadcast"], lambda x: by_hand(x + 1)):
        assert LESSON["same_messages"](fn, flat) == "NOT the messages of the package's"


def test_the_check_of_the_mended_ring_tells_it_from_the_broken_one(capsys):
    before, last_add, after = source("01_collectives", "bug-code").rpartition("add_")
    assert last_add
    for code, says in ((before + "add_" + after, "not right"), (before + "copy_" + after, "right")):
        names = dict(LESSON)
        exec(code, names)
        exec(source("01_collectives", "bug-numbers"), names)
        assert capsys.readouterr().out.startswith(says)


def tree_from(x, root):
    rank, p = (dist.get_rank() - root) % dist.get_world_size(), dist.get_world_size()
    distance = 2 ** (p - 1).bit_length() // 2
    while distance > 0:
        if rank % (2 * distance) == 0 and rank + distance < p:
            dist.send(x, dst=(rank + distance + root) % p)
        elif rank % (2 * distance) == distance:
            dist.recv(x, src=(rank - distance + root) % p)
        distance //= 2
    return x


def test_a_tree_from_any_root_and_its_check(capsys):
    for root in (0, 2, 4):
        same(results(partial(tree_from, root=root), 5, 3), [arrays(5, 3)[root]] * 5)
    for answer, says in (
        (tree_from, "right"),
        (lambda x, root: LESSON["tree_broadcast"](x), "not right"),
    ):
        exec(source("01_collectives", "root-check"), LESSON | {"broadcast_from": answer})
        assert capsys.readouterr().out.startswith(says)


def test_exercise_1_ten_numbers_on_four_ranks():
    with pytest.raises(p101.MisuseError, match="shorter than the receive"):
        p101.watch(LESSON["ring_all_reduce"], world_size=4, numel=10)
    assert list(p101.split_sizes(10, 4)) == [3, 3, 2, 2]


def test_exercise_2_the_mean_is_divided_between_the_halves():
    def mean(x):
        return LESSON["ring_all_gather"](LESSON["ring_reduce_scatter"](x) / dist.get_world_size())

    same(results(mean, 4, 8), [sum(arrays(4, 8)) / 4] * 4)
