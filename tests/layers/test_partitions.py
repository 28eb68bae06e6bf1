"""From one mesh to another: Repartition, and Broadcast and SumReduce between two meshes, on
DistDL's published shapes.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.layers import Broadcast, Repartition, SumReduce
from parallel101.mesh import split_sizes
from tests.autograd.test_collectives import inner_products, random, unequal
from tests.collectives.cases import values
from tests.layers.cases import block, mesh_of

# tests/primitives/test_broadcast.py and test_sum_reduce.py of DistDL: first rank and shape of both,
# transposed first
ROOTS_AND_MESH = {
    "overlap": ((4, (2, 2, 1)), (0, (2, 2, 3)), False),
    "disjoint, inactive": ((0, (2, 2, 1)), (5, (2, 2, 3)), False),
    "one rank": ((0, (1,)), (0, (1,)), False),
    "overlap, one source": ((2, (1,)), (0, (1, 1, 3)), False),
    "disjoint, inactive, one source": ((4, (1,)), (0, (1, 1, 3)), False),
    "overlap, transposed": ((4, (2, 2, 1)), (0, (3, 2, 2)), True),
    "disjoint, inactive, transposed": ((0, (2, 2, 1)), (5, (3, 2, 2)), True),
    "2D that once deadlocked": ((1, (1, 2)), (0, (2, 2)), False),
    "4D that once deadlocked": ((4, (1, 2, 2, 2)), (0, (2, 2, 2, 2)), False),
    "documentation, 1 to 4": ((0, (1,)), (0, (4,)), False),
    "documentation, 1 to 2x3": ((0, (1,)), (0, (2, 3)), False),
    "documentation, 3x1 to 3x4": ((0, (3, 1)), (0, (3, 4)), False),
    "documentation, 1x1x3 to 4x4x3 on fewer ranks": ((0, (1, 1, 3)), (0, (2, 2, 3)), False),
    "documentation, 1x3 to 3x4 transposed": ((0, (1, 3)), (0, (3, 4)), True),
    "documentation, 1x3 to 4x3": ((0, (1, 3)), (0, (4, 3)), False),
}
SOURCE_AND_TARGET = {  # tests/primitives/test_repartition.py and the documentation of DistDL
    "overlap": ((4, (4, 1)), (0, (3, 4)), [77, 55]),
    "disjoint, inactive": ((0, (4, 1)), (5, (3, 4)), [77, 55]),
    "one rank": ((0, (1, 1)), (0, (1, 1)), [77, 55]),
    "scatter, overlap": ((4, (1, 1)), (0, (3, 4)), [77, 55]),
    "scatter, disjoint, inactive": ((0, (1, 1)), (2, (3, 4)), [77, 55]),
    "gather, overlap": ((0, (3, 4)), (4, (1, 1)), [77, 55]),
    "gather, disjoint, inactive": ((2, (3, 4)), (0, (1, 1)), [77, 55]),
    "documentation, 5 to 3": ((0, (5,)), (0, (3,)), [16]),
    "documentation, 3x3 to 4x4": ((0, (3, 3)), (0, (4, 4)), [13, 11]),
    "documentation, 3x4 to 4x2": ((0, (3, 4)), (0, (4, 2)), [9, 10]),
    "documentation, 3x2x2 to 1x2x3": ((0, (3, 2, 2)), (0, (1, 2, 3)), [4, 5, 7]),
    "fewer axes than dims": ((0, (4,)), (2, (1, 3)), [6, 7, 2]),
    "blocks that are empty": ((0, (5,)), (1, (2, 3)), [2, 2]),
    "nothing to do": ((0, (2, 3)), (0, (2, 3)), [5, 5]),
}


def lines(roots, mesh):
    """{root: the ranks of its line}, in one process; and the axes along which it lies."""
    at = roots.mesh.view((1,) * (mesh.ndim - roots.ndim) + tuple(roots.shape))
    axes = [axis for axis in range(mesh.ndim) if at.shape[axis] == 1 and mesh.shape[axis] > 1]
    found = {int(root): [] for root in at.flatten()}
    for root, rank in zip(at.expand(mesh.shape).flatten().tolist(), mesh.mesh.flatten().tolist()):
        found[root].append(rank)
    return found, axes


def wrong_between_two_meshes(cases):
    me, wrong, products = dist.get_rank(), [], {}
    for name, (roots, shape, transposed) in cases.items():
        roots, mesh = mesh_of(*roots, transposed), mesh_of(*shape)
        members, axes = lines(roots, mesh)
        my_root = next((root for root, line in members.items() if me in line), None)
        absent, mine = torch.empty(0, 1, 7, 5, dtype=torch.float64), values(me, (1, 7, 5))
        down, up = SumReduce(mesh, axes, target=roots), Broadcast(mesh, axes, source=roots)
        x = absent if my_root is None else mine
        summed = [values(rank, (1, 7, 5)) for rank in members.get(me, [])]
        total, source = (torch.stack(summed).sum(0), mine) if summed else (absent, absent)
        copy = absent if my_root is None else values(my_root, (1, 7, 5))
        for layer, given, expected in ((down, x, total), (up, source, copy)):
            if not torch.equal(layer(given), expected):
                wrong.append((name, str(layer)))
            products[name, type(layer)] = inner_products(layer, random(given.shape, 3))
    return wrong + list(unequal(products).items())


def wrong_repartitions(cases):
    wrong, products = [], {}
    for name, (source, target, whole) in cases.items():
        x, source, target = values(3, whole), mesh_of(*source), mesh_of(*target)
        layer = Repartition(source, target, shape=whole)
        mine, expected = block(x, source), block(x, target)
        y = layer(mine)
        if not (torch.equal(y, expected) and (y.numel() == 0 or y.data_ptr() != mine.data_ptr())):
            wrong.append((name, "value"))
        if not torch.equal(Repartition(target, source, shape=whole)(y), mine):
            wrong.append((name, "and back"))
        products[name] = inner_products(layer, random(mine.shape, 3))
        if x.numel() < 1000:
            z = (mine / 1000).requires_grad_()
            (g,) = torch.autograd.grad((layer(z) ** 3).sum(), z, create_graph=True)
            g.square().sum().backward()
            if not torch.allclose(z.grad, 36 * z**3, rtol=1e-12):
                wrong.append((name, "second derivative"))
    return wrong + list(unequal(products).items())


def wrong_on_distdls_shapes():
    return wrong_between_two_meshes(ROOTS_AND_MESH) + wrong_repartitions(SOURCE_AND_TARGET)


def test_broadcast_sum_reduce_and_repartition_on_distdls_shapes():
    run = p101.launch(wrong_on_distdls_shapes, world_size=17, backend="sim", rules="nccl")
    assert run.results == [[]] * 17


def moved(source, target, whole):
    """How many elements go from which rank to which other one, counted one by one in one
    process.
    """

    def owners(start, shape):
        ranks = (start + torch.arange(torch.Size(shape).numel())).view(shape)
        for axis, n in enumerate(whole[: len(shape)]):
            ranks = ranks.repeat_interleave(torch.tensor(split_sizes(n, shape[axis])), axis)
        inner = [1] * (len(whole) - ranks.dim())
        return ranks.view(*ranks.shape, *inner).expand(whole).flatten().tolist()

    return Counter(pair for pair in zip(owners(*source), owners(*target)) if pair[0] != pair[1])


def repartitions():
    predicted = []
    for source, target, whole in SOURCE_AND_TARGET.values():
        layer = Repartition(mesh_of(*source), mesh_of(*target), shape=whole)
        layer(block(values(3, whole), mesh_of(*source)))
        predicted.append(layer.elements_sent(whole))
    return predicted


def test_each_rank_sends_what_the_blocks_have_in_common_and_nothing_else():
    run = p101.launch(repartitions, world_size=17, backend="sim")
    expected = [moved(*case) for case in SOURCE_AND_TARGET.values()]
    assert run.results == [expected] * 17
    sent = Counter()
    for event in run.trace.events:
        if event.kind == "send":
            sent[event.rank, event.peer] += event.nbytes
    assert sent == {pair: 8 * elements for pair, elements in sum(expected, Counter()).items()}
    assert sum(run.trace.messages_sent) == sum(map(len, expected)), "one message for each pair"
