"""The worked answers of "How to Scale Your Model" (Austin et al., 2025), to 1 %.

Each test quotes the number that the book prints.

The book rounds what it prints to two or three digits, so some numbers below are its formula with
its figures in it, as it writes them.
"""

from __future__ import annotations

import pytest

from parallel101 import cost

BF16 = 2
µs = 1e-6


def about(seconds: float):
    return pytest.approx(seconds, rel=0.01)


# ── Part 3, "Sharded Matrices and How to Multiply Them": TPUs


def test_case_2_pop_quiz_2_with_a_full_ring():
    """AllGather_Y([E_Y, F]), E = 2048, F = 8192, Y = 4, TPU v5e: "T_comms = 34e6 / 9e10 = 377
    µs".
    """
    assert cost.all_gather(34e6, 4, "TPU v5e", wraparound=True).seconds == about(377 * µs)


def test_case_2_pop_quiz_2_without_wraparound():
    """ "here we actually can't do a fully bidirectional AllGather … 3 * 8.4e6 / 4.5e10 = 560
    µs"; the wrap is known from the chip.
    """
    time = cost.all_gather(2048 * 8192 * BF16, 4, "TPU v5e")
    assert (time.seconds, time.bound) == (about(560 * µs), "bandwidth")
    # "at most 3 hops, so our latency bound is something like 3us"
    assert time.latency_seconds == about(3 * µs)


def test_case_2_pop_quiz_2_of_a_small_array():
    """E = F = 256: "32e3 / 4.5e10 = 0.7us, so we're latency bound … roughly 3 * 1us = 3us"."""
    time = cost.all_gather(256 * 256 * BF16, 4, "TPU v5e")
    assert (time.seconds, time.bound) == (about(3 * µs), "latency")


def test_a_note_on_ici_latency():
    """ "T_total = max[T_min · |X| / 2, V / W_ICI]"; "sending any buffer under 4.5e10 * 1e-6 =
    45kB will be latency bound".
    """
    n, shard = 16, 45e3
    assert cost.all_gather(n * shard, n, "TPU v5e").bandwidth_seconds == about(
        cost.all_gather(n * shard, n, "TPU v5e").latency_seconds
    )
    assert cost.all_gather(n * 0.9 * shard, n, "TPU v5e").bound == "latency"
    assert cost.all_gather(n * 1.1 * shard, n, "TPU v5e").bound == "bandwidth"


@pytest.mark.parametrize("axes", [[16], [4, 4], [4, 8, 16]], ids=str)
def test_what_happens_when_we_gather_over_multiple_axes(axes):
    """ "T_total = max[T_min · Σ|X_i| / 2, V / (W_ICI · n_axes)]"."""
    V, W = 1e9, 1.8e11
    assert cost.all_gather(V, axes, "TPU v5p").seconds == about(V / (W * len(axes)))
    assert cost.all_gather(1, axes, "TPU v5p").seconds == about(sum(axes) / 2 * µs)


def test_question_2_all_gather_over_x():
    """AllGather_X([B_X, D_Y]), B = 1024, D = 4096, TPU v4p 4x4x4: "2 · 1024 · 4096 / (9e10 · 4)
    = 23 µs".
    """
    assert (
        cost.all_gather(2 * 1024 * 4096 / 4, 4, "TPU v4p").seconds
        == about(2 * 1024 * 4096 / (9e10 * 4))
        == pytest.approx(23 * µs, rel=0.02)
    )


def test_question_2_all_gather_over_x_and_y():
    """ "T = 2BD / (2 * W) = 2*1024*4096 / (2 * 9e10) = 46us.

    This is far from the latency bound of 4us".
    """
    time = cost.all_gather(2 * 1024 * 4096, [4, 4], "TPU v4p")
    assert time.seconds == about(2 * 1024 * 4096 / (2 * 9e10)) == pytest.approx(46 * µs, rel=0.02)
    assert time.latency_seconds == about(4 * µs)


def test_question_2_all_reduce_over_z():
    """AllReduce_Z([B_X, D_Y] {U_Z}): "4 * 1024 * 4096 / (16 * 9e10) = 11.6us"."""
    assert cost.all_reduce(2 * 1024 * 4096 / 16, 4, "TPU v4p").seconds == about(11.6 * µs)


def test_question_3_latency_bound_all_gather():
    """AllGather_X([B_X]), 256 bytes, TPU v4p: "we can do the full gather in only 2 hops, so
    roughly 2us".
    """
    time = cost.all_gather(128 * BF16, 4, "TPU v4p")
    assert (time.seconds, time.bound) == (about(2 * µs), "latency")


def test_question_4_matmul_strategies():
    """ "C / W_ici ≈ 2550": flops for each byte over one axis of TPU v5p.

    Gathering Y[D, F] costs 2DF / W, all-reducing Z[B, F] 4BF / W.
    """
    chip = cost.CHIPS["TPU v5p"]
    assert chip.flops / chip.links.both_ways == about(2550)
    D, F, W = 8192, 32768, 1.8e11
    for B in (512, 8192):
        gather, reduce = (
            cost.all_gather(2 * D * F, 4, "TPU v5p"),
            cost.all_reduce(2 * B * F, 4, "TPU v5p"),
        )
        assert (gather.seconds, reduce.seconds) == (about(2 * D * F / W), about(4 * B * F / W))
        assert (reduce.seconds < gather.seconds) == (D > 2 * B)  # "which is true when D > 2B"
        assert cost.matmul(B, D, F, "TPU v5p").flop_seconds == about(2 * B * D * F / 4.59e14)


def test_what_have_we_learned():
    """ "ReduceScatter: Same as AllGather; AllReduce: 2 * AllGather; AllToAll: AllGather / 4 for
    a bidirectional ring".
    """
    V = 1e9
    gather = cost.all_gather(V, 16, "TPU v5e").seconds
    assert gather == about(V / 9e10)
    assert cost.reduce_scatter(V, 16, "TPU v5e").seconds == gather
    assert cost.all_reduce(V, 16, "TPU v5e").seconds == 2 * gather
    assert cost.all_to_all(V, 16, "TPU v5e").seconds == about(gather / 4)


@pytest.mark.parametrize("axes", [[16], [16, 16], [4, 8, 16]], ids=str)
def test_all_to_all_over_multiple_axes(axes):
    """ "T_comms per AllToAll = V · max(A, B, C, …) / (4 · N · W_ICI)"."""
    V, W, N = 1e9, 1.8e11, 1
    for n in axes:
        N *= n
    assert cost.all_to_all(V, axes, "TPU v5p").seconds == about(V * max(axes) / (4 * N * W))


def test_question_10_one_way_links():
    """One-way, N²(1 − 1/D) scalars cross each link in an all-gather, and half of that in an
    all-to-all. On a line that is what w allows.
    """
    V, D, w = 1e9, 8, 4.5e10
    assert cost.all_gather(V, D, "TPU v5e", wraparound=False).seconds == about(V * (1 - 1 / D) / w)


# ── Part 2, "How to Think About TPUs"


def test_part_2_question_6_gather_on_a_4x4():
    """A 16 GB array on a TPU v5e 4x4, no wraparound: "a full AllGather would also take roughly
    16e9 / (4.5e10 * 2)".
    """
    assert cost.all_gather(16e9, [4, 4], "TPU v5e").seconds == about(16e9 / (4.5e10 * 2))


def test_part_2_question_4_flops_against_memory():
    """int8[B, 4096] · int8[4096, 16384] on TPU v5e: max{(6.7e7 + 2e4 · B) / 8.1e11, …}; int8
    does twice the flops of bf16, 3.94e14.
    """
    for B in (64, 1024):
        product = cost.matmul(B, 4096, 16384, "TPU v5e", element_bytes=1)
        assert product.memory_seconds == about((6.71e7 + 2.048e4 * B) / 8.1e11)
        assert product.flop_seconds / 2 == about(1.342e8 * B / 3.94e14)


# ── Part 12, "How to Think About GPUs"


def test_gpus_quiz_2_question_3():
    """AllGather of bf16[D_X, F], D = 4096, F = 65536, on eight H100: "536e6 * (8 - 1) / 3.6e12
    = 1.04ms".
    """
    assert cost.all_gather(4096 * 65536 * BF16, 8, "H100").seconds == about(1.04e-3)


def test_gpus_intra_node_pop_quiz_1():
    """AllGather(bf16[B_X, F]), B = 1024, F = 16384: "roughly 75us, or more precisely, 65us"."""
    assert cost.all_gather(1024 * 16384 * BF16, 8, "H100").seconds == about(65 * µs)


def test_gpus_intra_node_pop_quiz_2():
    """AllToAll on eight H100: "B · (N - 1) / (W · N²)"."""
    B = 1e9
    assert cost.all_to_all(B, 8, "H100").seconds == about(B * 7 / (450e9 * 64))


def test_gpus_cross_node_collectives():
    """ "min(514GB/s, 413GB/s, 17.1TB/s) = 413GB/s" over 4 × 32 nodes of 8 H100; "AllReduces are
    still 2x the above cost".
    """
    B = 1e9
    assert B / cost.all_gather(B, 8, "H100").seconds == about(514e9)
    assert B / cost.all_gather(B, [32, 8], "H100").seconds == about(413e9)
    assert B / cost.all_gather(B, [4, 32, 8], "H100").seconds == about(413e9)
    assert B / cost.all_gather(B, [4, 1, 1], "H100").seconds == about(17.1e12)
    assert B / cost.all_reduce(B, [4, 32, 8], "H100").seconds == about(413e9 / 2)


def test_gpus_cross_node_all_to_all():
    """ "B · (M − 1) / (M² · W_node egress)"; "B / (8 * 450e9) within a single node, B / (2 *
    400e9) when spanning 2: more than 4x".
    """
    B = 1e9
    for M in (4, 16, 32):
        assert cost.all_to_all(B, [M, 8], "H100").seconds == about(B * (M - 1) / (M**2 * 400e9))
    assert (B / (2 * 400e9)) / (B / (8 * 450e9)) > 4


def test_gpus_quiz_4_question_5():
    """Exactly two nodes: "B * 7 / (8 * 450e9) = B / 514e9 while beyond … B / 800e9.

    We're actually bounded by the node level".
    """
    B = 1e9
    assert B / cost.all_gather(B, [2, 8], "H100").seconds == about(514e9)
    assert B / cost.all_gather(B, [2, 1], "H100").seconds == about(800e9)


def test_gpus_quiz_1_questions_3_and_4():
    """ "990e12 / 3.35e12 = 295"; fp16[64, 4096] · fp16[4096, 8192] on a B200: "69e6 / 8e12 =
    8.6us".
    """
    assert cost.CHIPS["H100"].flops / cost.CHIPS["H100"].hbm_bandwidth == about(295)
    product = cost.matmul(64, 4096, 8192, "B200")
    assert (product.seconds, product.bound) == (about(8.6 * µs), "memory")


# ── Wrong calls


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: cost.all_gather(1, 16, "TPU v9"),
            "chip='TPU v9' is not in the table: expected one of 'TPU v4p'",
        ),
        (
            lambda: cost.all_gather(1, 16, "H100"),
            r"axes=\[16\]: a node of H100 joins at most 8. .* as in \[2, 8\]",
        ),
        (lambda: cost.all_gather(1, [2, 2, 2], "TPU v5e"), r"axes=\[2, 2, 2\]: TPU v5e has 2 axes"),
        (lambda: cost.all_gather(1, [], "TPU v5e"), "expected the length of a mesh axis"),
        (lambda: cost.all_gather(1, 0, "TPU v5e"), "expected the length of a mesh axis"),
        (
            lambda: cost.all_gather(-1, 4, "TPU v5e"),
            "nbytes=-1: expected the bytes of the whole array",
        ),
        (lambda: cost.all_gather(1, 8, "H100", wraparound=True), "no axis is a ring or a line"),
        (lambda: cost.matmul(1.0, 2, 3, "H100"), "expected ints, 0 or more"),
    ],
    ids=["chip", "node", "axes", "none", "zero", "bytes", "wraparound", "matmul"],
)
def test_wrong_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_nothing_to_send_takes_no_time():
    assert (
        cost.all_gather(0, 16, "TPU v5e").seconds
        == cost.all_reduce(1e9, 1, "TPU v5e").seconds
        == cost.all_gather(8, 1, "H100").seconds
        == 0
    )


def test_a_time_reads_as_a_sentence():
    assert repr(cost.all_gather(2048 * 8192 * BF16, 4, "TPU v5e")) == (
        "all-gather of 33.6 MB on 4 TPU v5e: 559 µs, bandwidth-bound (bandwidth 559 µs, "
        "latency 3 µs)"
    )
