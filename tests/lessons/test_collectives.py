"""Lesson 01: what it writes by hand is right on any number of ranks, and so are the answers to its exercises."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from tests.lessons.lesson import definitions

LESSON = definitions("01_collectives", "STEPS", "BYTES")
RANKS = [1, 2, 3, 5, 8]


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
def test_what_the_lesson_writes_by_hand_is_right(p):
    n = 2 * p
    x = arrays(p, n)
    total = sum(x)
    same(results(LESSON["flat_broadcast"], p, n), [x[0]] * p)
    same(results(LESSON["tree_broadcast"], p, n), [x[0]] * p)
    same(results(LESSON["scatter"], p, n), x[0].chunk(p))
    same(results(LESSON["gather"], p, n), [torch.cat(x)] + [None] * (p - 1))
    same(results(LESSON["tree_reduce"], p, n), [total] + [None] * (p - 1))
    same(results(LESSON["ring_all_gather"], p, n), [torch.cat(x)] * p)
    same(results(LESSON["ring_reduce_scatter"], p, n), total.chunk(p))
    same(results(LESSON["reduce_broadcast"], p, n), [total] * p)
    same(results(LESSON["ring_all_reduce"], p, n), [total] * p)
    same(results(LESSON["all_to_all"], p, n), [torch.cat([a.chunk(p)[r] for a in x]) for r in range(p)])


@pytest.mark.parametrize("name", ["tree_reduce", "ring_all_gather", "ring_reduce_scatter", "ring_all_reduce", "all_to_all"])
def test_what_adds_or_gathers_leaves_its_input_alone(name):
    def program(x):
        LESSON[name](x)
        return x

    same(results(program, 4, 8), arrays(4, 8))


@pytest.mark.parametrize("p", RANKS)
def test_the_barrier_takes_lg_p_steps(p):
    assert LESSON["count"](lambda x: LESSON["barrier"](), p)["steps"] == math.ceil(math.log2(p))


def test_the_bug_is_one():
    assert all(not torch.equal(a, sum(arrays(4, 8))) for a in results(LESSON["my_ring"], 4, 8))


def test_exercise_1_a_tree_from_any_root():
    def broadcast_from(root):
        def fn(x):
            rank, p, distance = (dist.get_rank() - root) % dist.get_world_size(), dist.get_world_size(), 1
            while distance < p:
                if rank < distance and rank + distance < p:
                    dist.send(x, dst=(rank + distance + root) % p)
                elif distance <= rank < 2 * distance:
                    dist.recv(x, src=(rank - distance + root) % p)
                distance *= 2
            return x

        return fn

    for root in range(5):
        same(results(broadcast_from(root), 5, 3), [arrays(5, 3)[root]] * 5)


def test_exercise_2_ten_numbers_on_four_ranks():
    with pytest.raises(p101.MisuseError, match="shorter than the receive"):
        p101.watch(LESSON["ring_all_reduce"], world_size=4, numel=10)
    assert [len(c) for c in torch.ones(10).chunk(4)] == [3, 3, 3, 1]
    assert list(p101.split_sizes(10, 4)) == [3, 3, 2, 2]


def test_exercise_3_the_mean_is_divided_between_the_halves():
    def mean(x):
        return LESSON["ring_all_gather"](LESSON["ring_reduce_scatter"](x) / dist.get_world_size())

    same(results(mean, 4, 8), [sum(arrays(4, 8)) / 4] * 4)


def test_exercise_4_all_to_all_on_a_ring_of_wires():
    wires = p101.Network.ring(latency=0.0, bandwidth=1.0)

    def trace(fn, algorithm):
        return p101.launch(lambda: fn(torch.ones(128), algorithm=algorithm), world_size=8, backend="sim", network=wires).trace

    gathered, turned = trace(p101.all_gather, "bidirectional_ring"), trace(p101.all_to_all, "direct")
    assert (gathered.bytes_sent[0], turned.bytes_sent[0]) == (3584, 448)
    assert (gathered.makespan, turned.makespan) == (2048, 512)


def test_exercise_5_one_number_on_many_ranks():
    for p in (16, 32):
        ring, doubling = (
            LESSON["count"](lambda x, a=a: p101.all_reduce(x, algorithm=a), p, numbers=1)["steps"] for a in ("ring", "recursive_doubling")
        )
        assert doubling == math.log2(p) and ring <= 2 * (p - 1)
