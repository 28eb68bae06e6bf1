"""Seconds of kernels and of collectives: closed forms of small cases, and what must hold always."""

import pytest

from parallel101.cost import CHIPS, Cluster
from parallel101.cost.cluster import (
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    send_seconds,
)
from parallel101.cost.kernels import attention_seconds, memory_seconds, product_seconds

A100, H100 = CHIPS["A100"], CHIPS["H100"]


@pytest.mark.parametrize("name", ["A100", "H100", "B200"])
def test_figures_are_possible(name):
    has = CHIPS[name].kernels
    parts = (has.sustained, has.hbm, has.attention, has.attention_backward)
    assert all(0.2 < part < 1 for part in (*parts, has.nvlink_reached, has.network_reached))
    low, high = has.runs
    assert low <= 1 <= high and ("guess" in has.runs_words) == (name == "B200")


def test_one_tile_too_many_is_another_wave():
    """108 SMs compute 108 tiles at once."""
    has = A100.kernels
    full = product_seconds(A100, 256 * 9, 128 * 12, 8192)
    one_more = product_seconds(A100, 256 * 9 + 128, 128 * 12, 8192)
    flops = 2 * 256 * 9 * 128 * 12 * (8192 + has.tile_start)
    assert full == pytest.approx(flops / (A100.flops * has.sustained) + has.launch)
    assert one_more > 1.4 * full  # for 6 % more work


def test_a_product_with_a_small_side_is_bound_by_memory():
    has = A100.kernels
    nbytes = 2 * (8192 * 8192 + 2 * 8 * 8192)
    expected = nbytes / (A100.hbm_bandwidth * has.hbm) + has.launch
    assert product_seconds(A100, 8, 8192, 8192) == pytest.approx(expected)


@pytest.mark.parametrize("size", [(4096, 4096, 4096), (512, 12288, 1536), (100, 37, 5)])
def test_products_take_at_least_their_flops_and_more_work_takes_longer(size):
    m, n, k = size
    seconds = product_seconds(H100, m, n, k)
    assert seconds > 2 * m * n * k / H100.flops
    for more in ((2 * m, n, k), (m, 2 * n, k), (m, n, 2 * k)):
        assert product_seconds(H100, *more) >= seconds
    assert product_seconds(H100, m, n, k, itemsize=4) >= seconds
    assert product_seconds(H100, m, n, k, batch=3) >= seconds


def test_sizes_that_are_not_aligned_are_slow():
    """GPT-2's 50,257 words against 50,304, a multiple of 64."""
    odd, padded = (product_seconds(A100, 8192, words, 1024) for words in (50257, 50304))
    assert odd > 2.5 * padded


def test_memory_and_attention_are_the_larger_of_their_bounds():
    has = H100.kernels
    per_second = H100.hbm_bandwidth * has.hbm
    assert memory_seconds(H100, 1e9) == pytest.approx(1e9 / per_second + has.launch)
    assert memory_seconds(H100, 0) == 0
    busy = attention_seconds(H100, 1e12, 1e6)
    assert busy == pytest.approx(1e12 / (H100.flops * has.attention) + has.launch)
    assert attention_seconds(H100, 1e6, 1e9) == pytest.approx(1e9 / per_second + has.launch)
    assert attention_seconds(H100, 1e12, 1e6, backward=True) > busy


def test_a_chip_without_figures_is_refused():
    with pytest.raises(ValueError, match=r"TPU v5p has no figures.*'H100'"):
        memory_seconds(CHIPS["TPU v5p"], 1.0)
    with pytest.raises(ValueError, match="expected a GPU"):
        Cluster("GB200", 72)
    with pytest.raises(ValueError, match="gpus=0"):
        Cluster("H100", 0)


def test_collectives_inside_a_node_and_across():
    """tp 8 is inside; dp 4 with stride 8 has a card for each GPU; dp 32 uses all cards together."""
    cluster, S = Cluster("H100", 64), 1e9
    has = cluster.kernels
    inside, card = 450e9 * has.nvlink_reached, 50e9 * has.network_reached
    assert all_reduce_seconds(cluster, S, 8) == pytest.approx(
        2 * (7 / 8 * S / inside + 7 * has.nvlink_step)
    )
    assert all_gather_seconds(cluster, S, 4, 8) == pytest.approx(
        3 / 4 * S / card + 3 * has.network_step
    )
    across = 31 / 32 * S / min(8 * card, inside) + 3 * has.network_step + 28 * has.nvlink_step
    assert all_gather_seconds(cluster, S, 32, 1) == pytest.approx(across)
    direct = all_gather_seconds(cluster, S, 32, 1, algorithm="direct")
    assert direct > 24 / 32 * S / card > 4 * all_gather_seconds(cluster, S, 32, 1)
    assert send_seconds(cluster, S, 8) == pytest.approx(S / card + has.network_step)
    assert all_to_all_seconds(cluster, S, 8) == pytest.approx(7 / 8 * S / inside + has.nvlink_step)
    pairwise = 7 * (S / 16 / inside + has.nvlink_step) + 8 * (S / 16 / card + has.network_step)
    assert all_to_all_seconds(cluster, S, 16, algorithm="direct") == pytest.approx(pairwise)


def test_a_cluster_may_have_other_nodes_and_a_slower_network():
    slow = Cluster("A100", 64, network=100e9)  # four cards of 200 Gb/s
    assert slow.card_bandwidth == pytest.approx(Cluster("A100", 64).card_bandwidth / 2)
    assert Cluster("H100", 64, nodes_of=4).card_bandwidth == pytest.approx(0.95 * 50e9)
    assert slow.network_arguments()["ranks_per_node"] == 8
    assert Cluster("H100", 8, memory=40e9).memory_bytes == 40e9
    for bytes_ in (1.0, 1e6, 1e9):
        assert all_reduce_seconds(slow, bytes_, 1) == 0
