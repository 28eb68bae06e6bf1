"""Halo exchange: the published tables, one process's values and gradients, the adjoint, and no
message more than the sizes say.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import pytest
import torch
from torch import nn

import parallel101 as p101
from parallel101.layers.halo import HaloExchange, halos
from parallel101.layers.halo_spatial import SpatialParallel
from parallel101.layers.repartition import overlaps
from tests.autograd.test_collectives import inner_products, random, unequal
from tests.layers.cases import block, mesh_of

# The examples of Hewett and Grady (arXiv 2006.03108), for which DistDL's HaloMixin computes the
# same numbers, and one of DistDL's tests: (n, ranks, kernel_size, stride, padding) → left and right
# of each rank.
PUBLISHED = [
    ((11, 3, 5, 1, 2), [(0, 2), (2, 2), (2, 0)]),  # normal convolution
    ((11, 3, 5, 1, 0), [(0, 3), (1, 1), (3, 0)]),  # unbalanced convolution
    ((11, 3, 2, 2, 0), [(0, 0), (0, 0), (0, -1)]),  # simple unbalanced pooling
    # complex unbalanced pooling, and DistDL's test_halo_mixin
    ((20, 6, 2, 2, 0), [(0, 0), (0, 0), (0, 1), (-1, 2), (-2, 1), (-1, 0)]),
    ((10, 4, 2, 2, 0), [(0, 1), (-1, 0), (0, 0), (0, 0)]),
]


def test_the_published_tables():
    for arguments, expected in PUBLISHED:
        assert [(halo.left, halo.right) for halo in halos(*arguments)] == expected
    assert [halo.padding for halo in halos(4, 2, 4, padding=(1, 2))] == [(1, 0), (0, 2)]


def test_halos_are_what_the_kernel_touches():
    """Against a loop over all outputs and all entries under the kernel."""
    for n, p, k, s, pad, d in itertools.product(
        (1, 5, 11, 16), (1, 2, 3, 5), (1, 2, 3, 5), (1, 2, 3), (0, 1, 2), (1, 2)
    ):
        outputs = (n + 2 * pad - d * (k - 1) - 1) // s + 1
        if n + 2 * pad < d * (k - 1) + 1:
            with pytest.raises(ValueError, match="kernel covers"):
                halos(n, p, k, s, pad, d)
            continue
        line = halos(n, p, k, s, pad, d)
        assert [i for halo in line for i in halo.holds] == list(range(n))
        assert [i for halo in line for i in halo.computes] == list(range(outputs))
        held = [(halo.holds,) for halo in line]
        for halo in line:
            touched = [o * s - pad + d * tap for o in halo.computes for tap in range(k)]
            whole = range(min(touched), max(touched) + 1) if touched else range(0)
            assert list(halo.needs) == [i for i in whole if 0 <= i < n]
            assert halo.padding == (sum(i < 0 for i in whole), sum(i >= n for i in whole))
            found = {source: block for source, (block,) in overlaps((halo.needs,), held)}
            assert sorted(i for block in found.values() for i in block) == list(halo.needs)
            assert all(i in line[source].holds for source, block in found.items() for i in block)


def seeded(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def conv(dims, *arguments, **options):
    return lambda: (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](*arguments, **options)


def pool(kind, dims, *arguments):
    return functools.partial(getattr(nn, f"{kind}Pool{dims}d"), *arguments)


# DistDL's tests/layers/test_conv_feature.py and test_pooling.py: mesh, shape, kernel_size, padding,
# stride, dilation
DISTDL = {
    "no stride, ideal padding": ((1, 1, 2, 2), (1, 5, 10, 10), (3, 3), (1, 1), (1, 1), (1, 1)),
    "stride 2, ideal padding": ((1, 1, 2, 2), (1, 5, 10, 10), (5, 5), (2, 2), (2, 2), (1, 1)),
    "odd local shape with stride": ((1, 1, 2, 2), (1, 5, 5, 5), (3, 3), (1, 1), (2, 2), (1, 1)),
    "kernel needs offset": ((1, 1, 2, 2), (1, 5, 6, 10), (5, 5), (2, 2), (4, 4), (1, 1)),
    "non-ideal padding": ((1, 1, 2, 2), (1, 5, 10, 8), (5, 5), (1, 1), (1, 1), (1, 1)),
    "even kernel size": ((1, 1, 2, 2), (1, 5, 8, 8), (4, 4), (1, 1), (1, 1), (1, 1)),
    "3-D input": ((1, 1, 2, 1, 2), (1, 3, 5, 5, 6), (5, 5, 5), (2, 2, 2), (2, 2, 1), (1, 1, 1)),
    "1-D input": ((1, 1, 4), (1, 3, 15), (3,), (1,), (1,), (1,)),
    "dilation 2": ((1, 1, 2, 2), (1, 3, 10, 10), (5, 5), (1, 1), (1, 1), (2, 2)),
    "many ranks, small input": ((1, 1, 4, 4), (1, 3, 10, 10), (5, 5), (2, 2), (2, 2), (1, 1)),
}
# And what a user meets besides: the module, the mesh, the shape
OURS = {
    "same padding, even kernel": (
        *(conv(2, 2, 3, (4, 3), padding="same", dilation=(1, 2)), (1, 1, 3, 2), (2, 2, 7, 9)),
    ),
    "samples cut too, groups": (
        *(conv(2, 4, 4, 3, groups=2, bias=False, padding="valid"), (2, 1, 2, 3), (3, 4, 9, 8)),
    ),
    "a mesh of one axis": (conv(1, 2, 3, 3, padding=1), (3,), (5, 2, 8)),
    "shards smaller than the halo": (conv(1, 1, 2, 7, padding=3), (1, 1, 6), (2, 1, 8)),
    "fewer entries than ranks": (conv(1, 1, 2, 3, padding=1), (1, 1, 5), (2, 1, 3)),
    "fewer outputs than ranks": (conv(2, 1, 2, (3, 5), stride=2), (1, 1, 2, 4), (2, 1, 7, 9)),
    "a stride larger than the kernel": (conv(1, 1, 2, 2, stride=5), (1, 1, 4), (1, 1, 23)),
    "padded max pooling": (pool("Max", 2, 3, 2, 1), (1, 2, 2, 2), (2, 3, 7, 6)),
    "dilated max pooling": (pool("Max", 1, 3, 1, 0, 2), (1, 1, 4), (1, 2, 11)),
    "mean pooling": (pool("Avg", 2, 2), (1, 1, 3, 2), (2, 2, 11, 7)),
    "padded mean pooling": (pool("Avg", 1, 4, 3, 2), (1, 1, 5), (2, 2, 13)),
    "max pooling, fewer outputs than ranks": (pool("Max", 1, 4), (1, 1, 5), (2, 2, 13)),
}


class Whole(NamedTuple):
    """A case as one process computes it."""

    module: nn.Module
    mesh: tuple[int, ...]
    x: torch.Tensor
    y: torch.Tensor
    gradients: list[torch.Tensor]  # of x and the weights


@functools.cache
def one_process():
    cases = dict(OURS)
    for name, (mesh, shape, kernel, padding, stride, dilation) in DISTDL.items():
        dims = len(kernel)
        cases[name] = conv(dims, shape[1], 2, kernel, stride, padding, dilation), mesh, shape
        if all(2 * before <= k for before, k in zip(padding, kernel)):
            module = pool("Max", dims, kernel, stride, padding, dilation)
            cases[f"{name}, max pooling"] = module, mesh, shape
    wholes = {}
    for name, (make, mesh, shape) in cases.items():
        with torch.random.fork_rng():
            torch.manual_seed(3)
            module = make().double()
        x = seeded(shape).requires_grad_()
        y = module(x)
        gradients = torch.autograd.grad((y * seeded(y.shape, 1)).sum(), [x, *module.parameters()])
        wholes[name] = Whole(module, mesh, x.detach(), y.detach(), list(gradients))
    return wholes


def differences(wholes, meshes):
    """Where SpatialParallel differs from one process by more than 1e-10.

    The ranks beyond a mesh are outside.
    """
    meshes = {shape: mesh_of(0, shape) for shape in meshes}
    wrong = []
    for name, whole in wholes.items():
        mesh = meshes[whole.mesh]
        layer = SpatialParallel(whole.module, mesh, shape=whole.x.shape)
        x = block(whole.x, mesh).requires_grad_()
        layer(x.detach().sin())  # of which nothing is kept
        y = layer(x)
        (y * block(seeded(whole.y.shape, 1), mesh)).sum().backward()
        expected = [block(whole.y, mesh), block(whole.gradients[0], mesh)]
        found = [y, x.grad]
        if mesh.get_coordinate() is not None:
            found += [weight.grad for weight in layer.parameters()]
            expected += whole.gradients[1:]
        same = [close(a, b) for a, b in zip(found, expected, strict=True)]
        if not all(same) or layer.output_shape != whole.y.shape:
            wrong.append((name, same))
    return wrong


def close(a, b):
    return torch.allclose(a, b, rtol=1e-10, atol=1e-10)


WORLDS = pytest.mark.parametrize(
    ("ranks", "options"),
    [(17, {"backend": "sim", "rules": "nccl"}), (4, {"backend": "gloo"})],
    ids=["sim", "gloo"],
)


@WORLDS
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_convolutions_and_pooling_equal_one_process(ranks, options):
    wholes = {name: one for name, one in one_process().items() if math.prod(one.mesh) <= ranks}
    assert len(wholes) > 20
    meshes = sorted({whole.mesh for whole in wholes.values()})
    run = p101.launch(differences, wholes, meshes, world_size=ranks, **options)
    assert run.results == [[]] * ranks


# DistDL's tests/primitives/test_halo_exchange.py, then what it leaves out: corners, padding,
# strides, dilation, far neighbours
ADJOINTS = [  # mesh, shape, kernel_size, and the other options
    ((1, 1, 3, 3), (1, 1, 10, 7), (3, 3), {}),
    ((1, 1, 3), (1, 1, 10), 2, {"stride": 2}),
    ((2, 2, 3), (5, 6, 7), (3, 2, 5), {"stride": (1, 2, 1), "padding": (1, 0, 2)}),
    ((2, 4), (3, 9, 11), (5, 4), {"padding": ((0, 3), 1), "dilation": 2}),
    ((9,), (7,), 5, {"padding": 2}),
    ((4,), (9,), 1, {"stride": 3}),
    ((1,), (6,), 3, {}),
]


def layer_and_block(mesh, shape, kernel_size, options, seed=0):
    mesh = mesh_of(0, mesh)
    layer = HaloExchange(mesh, shape=shape, kernel_size=kernel_size, **options)
    return layer, block(seeded(shape, seed), mesh).requires_grad_()


def windows(layer, whole):
    """What every rank of the layer's mesh should get, as one process cuts it out of the padded
    tensor.
    """
    for dim, line in enumerate(layer.lines):
        before, after = (max(halo.padding[side] for halo in line) for side in (0, 1))
        whole = nn.functional.pad(whole, [0, 0] * (whole.dim() - dim - 1) + [before, after])
    for place in itertools.product(*(range(len(line)) for line in layer.lines)):
        y = whole
        for dim, (line, at) in enumerate(zip(layer.lines, place, strict=True)):
            halo = line[at]
            start = halo.needs.start - halo.padding[0] + max(halo.padding[0] for halo in line)
            y = y.narrow(dim, start if halo.computes else 0, len(halo.needs) + sum(halo.padding))
        yield y


def wrong_exchanges(cases):
    """Values, gradients and second derivatives against one process, and the adjoint test."""
    wrong, products = [], {}
    for i, case in enumerate(cases):
        x, mesh = seeded(case[1], i).requires_grad_(), mesh_of(0, case[0])
        layer, mine = layer_and_block(*case, i)
        y = layer(mine)
        wholes = list(windows(layer, x))
        inside = layer.mesh.coordinate is not None
        same = [torch.equal(y, wholes[layer.mesh.mesh.position] if inside else mine)]

        (g,) = torch.autograd.grad(y.pow(3).sum(), mine, create_graph=True)
        (h,) = torch.autograd.grad(g.pow(2).sum(), mine)
        (g_whole,) = torch.autograd.grad(sum(y.pow(3).sum() for y in wholes), x, create_graph=True)
        (h_whole,) = torch.autograd.grad(g_whole.pow(2).sum(), x)
        same += [close(g, block(g_whole, mesh)), close(h, block(h_whole, mesh))]

        def twice(x, layer=layer):
            return torch.cat([layer(x).flatten(), layer(x * 2).flatten()])

        products[i] = inner_products(layer, random(mine.shape, i))
        products[i, "used twice"] = inner_products(twice, random(mine.shape, i))
        kept = mine.detach().clone()
        plain = layer(mine.detach())
        same += [torch.equal(plain, y), not plain.requires_grad, torch.equal(kept, mine)]
        same.append(not plain.numel() or plain.data_ptr() != mine.data_ptr())
        wrong += [(i, same)] * (not all(same))
    return wrong + list(unequal(products, within=1e-13).items())


@WORLDS
def test_values_gradients_and_adjoints(ranks, options):
    cases = [case for case in ADJOINTS if math.prod(case[0]) <= ranks]
    run = p101.launch(wrong_exchanges, cases, world_size=ranks, **options)
    assert run.results == [[]] * ranks


def exchanged(case, backward=True):
    layer, x = layer_and_block(*case)
    y = layer(x)
    if backward:
        y.sum().backward()
    return layer.lines


def predicted(lines):
    """(source, destination, bytes of float64) of every message.

    The dims come in order, each with the halos of the dims before it.
    """
    places, found = list(itertools.product(*(range(len(line)) for line in lines))), []
    for dim, place in itertools.product(range(len(lines)), places):
        source, held = place[dim], [(halo.holds,) for halo in lines[dim]]
        here = [line[at] for line, at in zip(lines, place)]
        row = math.prod(len(halo.needs) + sum(halo.padding) for halo in here[:dim])
        row *= math.prod(len(halo.holds) for halo in here[dim + 1 :])
        for to, halo in enumerate(lines[dim]):
            entries = dict(overlaps((halo.needs,), held)).get(source, [()])[0]
            if to != source and row * len(entries):
                other = (*place[:dim], to, *place[dim + 1 :])
                found.append((places.index(place), places.index(other), 8 * len(entries) * row))
    return found


SENT = [
    *ADJOINTS[:4],
    ((1, 1, 4), (1, 1, 12), 3, {"stride": 3}),  # windows that lie within the blocks
    ((1, 3), (5, 7), 1, {}),  # a kernel of one
    ((3,), (6, 5), 3, {"padding": 1}),  # a dim that is not cut
]


@pytest.mark.parametrize("case", SENT, ids=lambda case: str(case[0]))
def test_the_sizes_predict_every_message_and_backward_sends_them_back(case):
    run = p101.launch(exchanged, case, world_size=math.prod(case[0]) + 1, backend="sim")
    there = predicted(run.results[0])
    back = [(destination, source, nbytes) for source, destination, nbytes in there]
    sent = [(message.src, message.dst, message.nbytes) for message in run.trace.messages()]
    assert sorted(sent) == sorted(there + back)


def test_two_steps_for_each_dim_that_is_cut():
    """A middle rank sends to its left, then to its right. Corners take no steps of their own."""
    steps = p101.Network(latency=1.0, bandwidth=math.inf)
    case = ((3, 3), (9, 9), (3, 3), {})
    for backward, expected in ((False, 4), (True, 8)):
        run = p101.launch(exchanged, case, backward, world_size=9, backend="sim", network=steps)
        assert run.trace.makespan == expected
