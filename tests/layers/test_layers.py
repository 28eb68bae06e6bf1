"""The layers along mesh axes: values against one process, adjoints, uneven blocks, ranks
outside the mesh, and what is sent.
"""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import parallel101 as p101
from parallel101.layers import AllGather, AllSumReduce, Broadcast, ReduceScatter, SumReduce
from tests.autograd.test_collectives import inner_products, random, unequal
from tests.collectives.cases import values
from tests.layers.cases import block


class Box:
    """A mesh of all ranks but the last, in another order than the world's.

    It says, in one process, what the layers must return.
    """

    def __init__(self, shape):
        count = torch.Size(shape).numel()
        self.ranks = ((torch.arange(count) * 5 + 3) % count).view(shape)
        assert self.ranks.unique().numel() == count
        self.mesh = DeviceMesh("cpu", self.ranks, mesh_dim_names=("a", "b", "c")[: len(shape)])
        self.shape = shape
        self.where = self.mesh.get_coordinate()

    def at(self, coordinate):
        return int(self.ranks[tuple(coordinate)])

    def line(self, axes):
        """The ranks that differ from this one along these axes, row by row."""
        place = (slice(None) if axis in axes else c for axis, c in enumerate(self.where))
        return self.ranks[tuple(place)].flatten().tolist()

    def root(self, axes):
        return self.at(0 if axis in axes else c for axis, c in enumerate(self.where))


def expected_of(box, axes, whole, others):
    """By layer: what this rank gives, and what it must get.

    Without a mesh around it: nothing, twice.
    """
    if box.where is None:
        nothing = torch.empty(0, dtype=torch.float64)
        kinds = AllGather, ReduceScatter, AllSumReduce, SumReduce, Broadcast
        return dict.fromkeys(kinds, (nothing, nothing))
    x = values(7, whole)  # the whole tensor
    # of what is whole along the axes, and cut by the others
    shape = block(x, box.mesh, others).shape
    line, root = box.line(axes), box.root(axes)
    total = torch.stack([values(rank, shape) for rank in line]).sum(0)
    mine = values(dist.get_rank(), shape)
    absent = mine.new_empty(0, *shape)
    is_root = dist.get_rank() == root
    return {
        AllGather: (block(x, box.mesh), block(x, box.mesh, others)),
        ReduceScatter: (mine, block(total, box.mesh, axes)),
        AllSumReduce: (mine, total),
        SumReduce: (mine, total if is_root else absent),
        Broadcast: (mine if is_root else absent, values(root, shape)),
    }


def wrong_on_a_box(shape, wholes):
    """Everything that is wrong: every layer, with every subset of the axes, on tensors of these
    shapes.
    """
    box, wrong, products = Box(shape), [], {}
    every = range(len(shape))
    subsets = (itertools.combinations(every, count) for count in range(len(shape) + 1))
    for whole, axes in itertools.product(wholes, itertools.chain(*subsets)):
        equal = all(n % p == 0 for n, p in zip(whole, shape))
        others = [axis for axis in every if axis not in axes]
        for kind, (x, expected) in expected_of(box, axes, whole, others).items():
            known = kind is AllSumReduce or (equal and kind is not Broadcast)
            options = {} if known else {"shape": whole}
            layer, names = kind(box.mesh, axes, **options), [("a", "b", "c")[axis] for axis in axes]
            before, y = x.clone(), layer(x)
            checks = {
                "value": y.shape == expected.shape and torch.equal(y, expected),
                "no graph": not y.requires_grad,
                "x is kept": torch.equal(x, before),
                "not in place": y.numel() == 0 or y.data_ptr() != x.data_ptr(),
                "by name": kind(box.mesh, names, **options).mesh == layer.mesh,
            }
            products[kind, axes, whole] = inner_products(layer, random(x.shape, 3))
            wrong += [(kind.__name__, axes, whole, name) for name, ok in checks.items() if not ok]
        if whole == wholes[-1]:
            composed = used_twice_and_composed(box, axes, whole, others)
            wrong += [(axes, whole, name) for name in composed]
    return wrong + list(unequal(products).items())


def used_twice_and_composed(box, axes, whole, others):
    """An input used twice gets both gradients.

    SumReduce, then Broadcast, is AllSumReduce, though most ranks hold no tensor in between.
    """
    shape = (0,) if box.where is None else block(values(7, whole), box.mesh, others).shape
    x, u = values(dist.get_rank(), shape).requires_grad_(), values(dist.get_rank() + 50, shape)
    all_sum, down, up = (kind(box.mesh, axes) for kind in (AllSumReduce, SumReduce, Broadcast))
    ((all_sum(x) * u).sum() + (all_sum(x * 3) * u).sum()).backward()
    twice, x.grad = x.grad, None
    y = up(down(x))
    (y * u).sum().backward()
    if not torch.equal(twice, 4 * x.grad):
        yield "used twice"
    if not torch.equal(y, all_sum(x)):
        yield "SumReduce, then Broadcast"
    copied = Broadcast(box.mesh, axes, shape=whole)(x.detach())
    if box.where is not None and not torch.equal(copied, values(box.root(axes), shape)):
        yield "Broadcast ignores the values of the ranks that only receive"


# shapes of whole tensors: equal blocks; unequal ones; some are empty
WHOLES = [(2, 4, 6, 2), (5, 3, 7), (1, 2, 2)]


def test_every_layer_on_every_subset_of_the_axes():
    run = p101.launch(wrong_on_a_box, (2, 1, 3), WHOLES, world_size=7, backend="sim", rules="nccl")
    assert run.results == [[]] * 7
