"""The worked answers of "How to Scale Your Model" (Austin et al., 2025), to 1 %.

Each row quotes the number that the book prints. The book rounds what it prints to two or three
digits, so some numbers below are its formula with its figures in it, as it writes them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from parallel101 import cost

BF16, µs, GB = 2, 1e-6, 1e9
ONE_WAY, W = 4.5e10, 1.8e11  # TPU v5e's links one way; TPU v5p's W, both ways


def about(seconds: float):
    return pytest.approx(seconds, rel=0.01)


# operation, bytes, axes, chip, seconds, and what decides them
CASES = [
    # ── Part 3, "Sharded Matrices and How to Multiply Them": TPUs
    # Case 2, pop quiz 2, on a line: "here we actually can't do a fully bidirectional AllGather …
    # 3 * 8.4e6 / 4.5e10 = 560 µs"
    ("all_gather", 2048 * 8192 * BF16, 4, "TPU v5e", 560 * µs, "bandwidth"),
    # of a small array: "32e3 / 4.5e10 = 0.7us, so we're latency bound … roughly 3 * 1us = 3us"
    ("all_gather", 256 * 256 * BF16, 4, "TPU v5e", 3 * µs, "latency"),
    # "sending any buffer under 4.5e10 * 1e-6 = 45kB will be latency bound"
    ("all_gather", 16 * 0.9 * 45e3, 16, "TPU v5e", 8 * µs, "latency"),
    ("all_gather", 16 * 1.1 * 45e3, 16, "TPU v5e", 8.8 * µs, "bandwidth"),
    # over several axes: "T_total = max[T_min · Σ|X_i| / 2, V / (W_ICI · n_axes)]"
    *(("all_gather", GB, axes, "TPU v5p", GB / (W * len(axes)), "bandwidth")
      for axes in ([16], [4, 4], [4, 8, 16])),
    *(("all_gather", 1, axes, "TPU v5p", sum(axes) / 2 * µs, "latency")
      for axes in ([16], [4, 4], [4, 8, 16])),
    # question 2, AllGather_X: "2 · 1024 · 4096 / (9e10 · 4) = 23 µs"
    ("all_gather", 2 * 1024 * 4096 / 4, 4, "TPU v4p", 2 * 1024 * 4096 / (9e10 * 4), "bandwidth"),
    # AllGather_XY: "2*1024*4096 / (2 * 9e10) = 46us"
    ("all_gather", 2 * 1024 * 4096, [4, 4], "TPU v4p", 2 * 1024 * 4096 / (2 * 9e10), "bandwidth"),
    # AllReduce_Z: "4 * 1024 * 4096 / (16 * 9e10) = 11.6us"
    ("all_reduce", 2 * 1024 * 4096 / 16, 4, "TPU v4p", 11.6 * µs, "bandwidth"),
    # question 3: "we can do the full gather in only 2 hops, so roughly 2us"
    ("all_gather", 128 * BF16, 4, "TPU v4p", 2 * µs, "latency"),
    # "ReduceScatter: Same as AllGather; AllReduce: 2 * AllGather; AllToAll: AllGather / 4"
    ("all_gather", GB, 16, "TPU v5e", GB / 9e10, "bandwidth"),
    ("reduce_scatter", GB, 16, "TPU v5e", GB / 9e10, "bandwidth"),
    ("all_reduce", GB, 16, "TPU v5e", 2 * GB / 9e10, "bandwidth"),
    ("all_to_all", GB, 16, "TPU v5e", GB / 9e10 / 4, "bandwidth"),
    # over several axes: "T_comms per AllToAll = V · max(A, B, C, …) / (4 · N · W_ICI)"
    *(("all_to_all", GB, axes, "TPU v5p", GB * max(axes) / (4 * math.prod(axes) * W), "bandwidth")
      for axes in ([16], [16, 16], [4, 8, 16])),
    # ── Part 2, "How to Think About TPUs", question 6, a 4x4 without wraparound: "a full AllGather
    # would also take roughly 16e9 / (4.5e10 * 2)"
    ("all_gather", 16e9, [4, 4], "TPU v5e", 16e9 / (ONE_WAY * 2), "bandwidth"),
    # ── Part 12, "How to Think About GPUs", quiz 2: "536e6 * (8 - 1) / 3.6e12 = 1.04ms"
    ("all_gather", 4096 * 65536 * BF16, 8, "H100", 1.04e-3, "bandwidth"),
    # pop quiz 1: "roughly 75us, or more precisely, 65us"; 2: "B · (N - 1) / (W · N²)"
    ("all_gather", 1024 * 16384 * BF16, 8, "H100", 65 * µs, "bandwidth"),
    ("all_to_all", GB, 8, "H100", GB * 7 / (450e9 * 64), "bandwidth"),
    # "min(514GB/s, 413GB/s, 17.1TB/s) = 413GB/s"; "AllReduces are still 2x the above cost"
    ("all_gather", GB, 8, "H100", GB / 514e9, "bandwidth"),
    ("all_gather", GB, [32, 8], "H100", GB / 413e9, "bandwidth"),
    ("all_gather", GB, [4, 32, 8], "H100", GB / 413e9, "bandwidth"),
    ("all_gather", GB, [4, 1, 1], "H100", GB / 17.1e12, "bandwidth"),
    ("all_reduce", GB, [4, 32, 8], "H100", 2 * GB / 413e9, "bandwidth"),
    # "B · (M − 1) / (M² · W_node egress)"
    *(("all_to_all", GB, [M, 8], "H100", GB * (M - 1) / (M**2 * 400e9), "bandwidth")
      for M in (4, 16, 32)),
    # quiz 4, question 5, two nodes: "B * 7 / (8 * 450e9) = B / 514e9 while beyond … B / 800e9"
    ("all_gather", GB, [2, 8], "H100", GB / 514e9, "bandwidth"),
    ("all_gather", GB, [2, 1], "H100", GB / 800e9, "bandwidth"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_books_answers(case):
    operation, nbytes, axes, chip, seconds, bound = case
    time = getattr(cost, operation)(nbytes, axes, chip)
    assert (time.seconds, time.bound) == (about(seconds), bound)


def test_a_ring_and_a_line_as_the_caller_says():
    """With a full ring "T_comms = 34e6 / 9e10 = 377 µs".

    One-way, N²(1 − 1/D) scalars cross each link: on a line that is what w allows.
    """
    chip = cost.CHIPS["TPU v5e"]
    ring, line = (replace(chip, links=replace(chip.links, ring_multiple=n)) for n in (1, 1000))
    assert cost.all_gather(34e6, 4, ring).seconds == about(377 * µs)
    line = cost.all_gather(GB, 8, line).seconds
    assert line == about(GB * (1 - 1 / 8) / ONE_WAY)
    # "at most 3 hops, so our latency bound is something like 3us", also where bandwidth decides
    assert cost.all_gather(2048 * 8192 * BF16, 4, "TPU v5e").bounds["latency"] == about(3 * µs)


def test_flops_against_memory_and_links():
    """Part 3, question 4: "C / W_ici ≈ 2550" flops for each byte over one axis of TPU v5p.

    Part 2, question 4: max{(6.7e7 + 2e4 · B) / 8.1e11, …}; int8 does twice the flops of bf16. Part
    12, quiz 1: "990e12 / 3.35e12 = 295"; on a B200 "69e6 / 8e12 = 8.6us".
    """
    v5p, h100 = cost.CHIPS["TPU v5p"], cost.CHIPS["H100"]
    assert v5p.flops / v5p.links.both_ways == about(2550)
    assert h100.flops / h100.hbm_bandwidth == about(295)
    for B in (64, 1024):
        product = cost.matmul(B, 4096, 16384, "TPU v5e", element_bytes=1)
        assert product.bounds["memory"] == about((6.71e7 + 2.048e4 * B) / 8.1e11)
        assert product.bounds["flops"] / 2 == about(1.342e8 * B / 3.94e14)
    product = cost.matmul(64, 4096, 8192, "B200")
    assert (product.seconds, product.bound) == (about(8.6 * µs), "memory")


WRONG = {
    "chip='TPU v9' is not in the table: expected one of 'TPU v4p'": (1, 16, "TPU v9"),
    r"axes=\[16\]: a node of H100 joins at most 8. .* as in \[2, 8\]": (1, 16, "H100"),
    r"axes=\[2, 2, 2\]: TPU v5e has 2 axes": (1, [2, 2, 2], "TPU v5e"),
    r"axes=\[\]: expected the length of a mesh axis": (1, [], "TPU v5e"),
    "axes=0: expected the length of a mesh axis": (1, 0, "TPU v5e"),
    "nbytes=-1: expected the bytes of the whole array": (-1, 4, "TPU v5e"),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_calls(message):
    with pytest.raises(ValueError, match=message):
        cost.all_gather(*WRONG[message])


def test_sizes_of_a_product_are_whole():
    with pytest.raises(ValueError, match="expected ints, 0 or more"):
        cost.matmul(1.0, 2, 3, "H100")


def test_nothing_to_send_takes_no_time():
    for arguments in ((0, 16, "TPU v5e"), (1e9, 1, "TPU v5e"), (8, 1, "H100")):
        assert cost.all_reduce(*arguments).seconds == 0


def test_a_time_reads_as_a_sentence():
    assert repr(cost.all_gather(2048 * 8192 * BF16, 4, "TPU v5e")) == (
        "all-gather of 33.6 MB on 4 TPU v5e: 559 µs, bandwidth-bound (bandwidth 559 µs, "
        "latency 3 µs)"
    )
