"""All layers on real processes, in one launch. The other tests run on sim, under NCCL's rules."""

from __future__ import annotations

import parallel101 as p101
from tests.layers.test_batch_norm import differences
from tests.layers.test_layers import wrong_on_a_box
from tests.layers.test_partitions import wrong_between_two_meshes, wrong_repartitions

ROOTS_AND_MESH = {
    "each is the root of another's line": ((1, (2, 1)), (0, (2, 2)), False),
    "disjoint, transposed": ((0, (1, 2)), (2, (2, 1)), True),
}
SOURCE_AND_TARGET = {
    "other cuts": ((0, (2, 2)), (0, (4, 1)), [5, 7]),
    "more ranks": ((1, (2, 1)), (0, (2, 2)), [5, 7]),
    "fewer": ((0, (4,)), (3, (2,)), [9, 2]),
}
BATCHES = {
    "samples and channels, uneven": ((2, 2), (5, 3, 2)),
    "ranks without samples": ((4,), (3, 5, 2)),
}


def everything():
    return (
        wrong_on_a_box((2, 2), [(4, 2, 3), (3, 5), (1, 3)]),
        wrong_between_two_meshes(ROOTS_AND_MESH),
        wrong_repartitions(SOURCE_AND_TARGET),
        differences(BATCHES),
    )


def test_all_layers_on_gloo():
    assert p101.launch(everything, world_size=5).results == [([], [], [], [])] * 5
