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
import torch.distributed as dist
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
PUBLISHED = {
    "normal convolution": ((11, 3, 5, 1, 2), [(0, 2), (2, 2), (2, 0)]),
    "unbalanced convolution": ((11, 3, 5, 1, 0), [(0, 3), (1, 1), (3, 0)]),
    "simple unbalanced pooling": ((11, 3, 2, 2, 0), [(0, 0), (0, 0), (0, -1)]),
    "complex unbalanced pooling": (
        (20, 6, 2, 2, 0),
        [(0, 0), (0, 0), (0, 1), (-1, 2), (-2, 1), (-1, 0)],
    ),
    "DistDL's test_halo_mixin": ((10, 4, 2, 2, 0), [(0, 1), (-1, 0), (0, 0), (0, 0)]),
}


@pytest.mark.parametrize(("arguments", "expected"), PUBLISHED.values(), ids=PUBLISHED)
def test_the_published_tables(arguments, expected):
    assert [(halo.left, halo.right) for halo in halos(*arguments)] == expected


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


def test_padding_may_differ_before_and_after():
    assert [halo.padding for halo in halos(4, 2, 4, padding=(1, 2))] == [(1, 0), (0, 2)]


def seeded(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def conv(dims, *arguments, **options):
    return lambda: (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](*arguments, **options)


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
        conv(2, 2, 3, (4, 3), padding="same", dilation=(1, 2)),
        (1, 1, 3, 2),
        (2, 2, 7, 9),
    ),
    "samples cut too, groups": (conv(2, 4, 4, 3, groups=2, bias=False), (2, 1, 2, 3), (3, 4, 9, 8)),
    "a mesh of one axis": (conv(1, 2, 3, 3, padding=1), (3,), (5, 2, 8)),
    "shards smaller than the halo": (conv(1, 1, 2, 7, padding=3), (1, 1, 6), (2, 1, 8)),
    "fewer entries than ranks": (conv(1, 1, 2, 3, padding=1), (1, 1, 5), (2, 1, 3)),
    "fewer outputs than ranks": (conv(2, 1, 2, (3, 5), stride=2), (1, 1, 2, 4), (2, 1, 7, 9)),
    "a stride larger than the kernel": (conv(1, 1, 2, 2, stride=5), (1, 1, 4), (1, 1, 23)),
    "max pooling with padding": (
        lambda: nn.MaxPool2d(3, stride=2, padding=1),
        (1, 2, 2, 2),
        (2, 3, 7, 6),
    ),
    "max pooling with dilation": (
        lambda: nn.MaxPool1d(3, stride=1, dilation=2),
        (1, 1, 4),
        (1, 2, 11),
    ),
    "mean pooling": (lambda: nn.AvgPool2d(2), (1, 1, 3, 2), (2, 2, 11, 7)),
    "mean pooling with padding": (
        lambda: nn.AvgPool1d(4, stride=3, padding=2),
        (1, 1, 5),
        (2, 2, 13),
    ),
    "1-D max pooling, fewer outputs than ranks": (lambda: nn.MaxPool1d(4), (1, 1, 5), (2, 2, 13)),
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
            kind = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[dims - 1]
            cases[f"{name}, max pooling"] = (
                functools.partial(kind, kernel, stride, padding, dilation),
                mesh,
                shape,
            )
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
        mesh, rank = meshes[whole.mesh], dist.get_rank()
        layer = SpatialParallel(whole.module, mesh, shape=whole.x.shape)
        x = block(whole.x, mesh).requires_grad_()
        y = layer(x)
        (y * block(seeded(whole.y.shape, 1), mesh)).sum().backward()
        expected = [block(whole.y, mesh), block(whole.gradients[0], mesh)]
        found = [y, x.grad]
        if mesh.get_coordinate() is not None:
            found += [weight.grad for weight in layer.parameters()]
            expected += whole.gradients[1:]
        close = [
            torch.allclose(a, b, rtol=1e-10, atol=1e-10)
            for a, b in zip(found, expected, strict=True)
        ]
        if not all(close) or layer.output_shape != whole.y.shape:
            wrong.append((rank, name, close))
    return wrong


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(17, {"backend": "sim", "rules": "nccl"}), (4, {"backend": "gloo"})],
    ids=["sim", "gloo"],
)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_convolutions_and_pooling_equal_one_process(world_size, options):
    wholes = {
        name: whole for name, whole in one_process().items() if math.prod(whole.mesh) <= world_size
    }
    assert len(wholes) > 20
    meshes = sorted({whole.mesh for whole in wholes.values()})
    assert (
        p101.launch(differences, wholes, meshes, world_size=world_size, **options).results
        == [[]] * world_size
    )


def network(wrap=lambda module, shape: (module, module(torch.zeros(shape).double()).shape)):
    """Convolutions and pooling after each other, where `wrap` returns the layer and the shape
    of its output.
    """
    torch.manual_seed(5)
    shape, layers = torch.Size((2, 1, 12, 9)), []
    for module in (
        nn.Conv2d(1, 3, 3, padding=1),
        nn.MaxPool2d(2),
        nn.Conv2d(3, 2, (2, 3), stride=(1, 2)),
    ):
        layer, shape = wrap(module.double(), shape)
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers)


def trained(model, x, target):
    """The weights after three steps.

    The loss is a sum, so the ranks' losses add up to that of one process.
    """
    weights = list(model.parameters())
    for _ in range(3):
        loss = (model(x) - target).pow(2).sum()
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.data -= 0.01 * gradient
    return [weight.detach() for weight in weights]


def a_network_in_parallel(target):
    mesh = mesh_of(0, (1, 1, 3, 2))

    def wrap(module, shape):
        layer = SpatialParallel(module, mesh, shape=shape)
        return layer, layer.output_shape

    return trained(network(wrap), block(seeded((2, 1, 12, 9)), mesh), block(target, mesh))


def test_a_network_trains_as_in_one_process():
    model, x = network(), seeded((2, 1, 12, 9))
    target = seeded(model(x).shape, 1)
    expected = trained(model, x, target)
    for weights in p101.launch(
        a_network_in_parallel, target, world_size=6, backend="sim", rules="nccl"
    ).results:
        torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-12)


# DistDL's tests/primitives/test_halo_exchange.py, then what it leaves out: corners, padding,
# strides, dilation, far neighbours
ADJOINTS = [
    {"mesh": (1, 1, 3, 3), "shape": (1, 1, 10, 7), "kernel_size": (3, 3)},
    {"mesh": (1, 1, 3), "shape": (1, 1, 10), "kernel_size": 2, "stride": 2},
    {
        "mesh": (2, 2, 3),
        "shape": (5, 6, 7),
        "kernel_size": (3, 2, 5),
        "stride": (1, 2, 1),
        "padding": (1, 0, 2),
    },
    {
        "mesh": (2, 4),
        "shape": (3, 9, 11),
        "kernel_size": (5, 4),
        "padding": ((0, 3), 1),
        "dilation": 2,
    },
    {"mesh": (9,), "shape": (7,), "kernel_size": 5, "padding": 2},
    {"mesh": (4,), "shape": (9,), "kernel_size": 1, "stride": 3},
    {"mesh": (1,), "shape": (6,), "kernel_size": 3},
]


def layer_of(case):
    options = {name: value for name, value in case.items() if name != "mesh"}
    return HaloExchange(mesh_of(0, case["mesh"]), **options)


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
        layer, x = layer_of(case), seeded(case["shape"], i).requires_grad_()
        mine = block(x.detach(), mesh_of(0, case["mesh"])).requires_grad_()
        y = layer(mine)
        wholes = list(windows(layer, x))
        inside = layer.mesh.coordinate is not None
        same = [torch.equal(y, wholes[layer.mesh.mesh.position] if inside else mine)]

        (g,) = torch.autograd.grad(y.pow(3).sum(), mine, create_graph=True)
        (h,) = torch.autograd.grad(g.pow(2).sum(), mine)
        (g_whole,) = torch.autograd.grad(sum(y.pow(3).sum() for y in wholes), x, create_graph=True)
        (h_whole,) = torch.autograd.grad(g_whole.pow(2).sum(), x)
        for found, expected in ((g, g_whole), (h, h_whole)):
            same.append(
                torch.allclose(
                    found, block(expected, mesh_of(0, case["mesh"])), rtol=1e-10, atol=1e-10
                )
            )

        products[i] = inner_products(layer, random(mine.shape, i))
        products[i, "used twice"] = inner_products(
            lambda x, layer=layer: torch.cat([layer(x).flatten(), layer(x * 2).flatten()]),
            random(mine.shape, i),
        )
        with torch.no_grad():
            kept = mine.clone()
            plain = layer(mine.detach())
        same += [
            torch.equal(plain, y),
            not plain.requires_grad,
            torch.equal(kept, mine),
            not plain.numel() or plain.data_ptr() != mine.data_ptr(),
        ]
        wrong += [(i, same)] * (not all(same))
    return wrong + list(unequal(products, within=1e-13).items())


@pytest.mark.parametrize(
    ("world_size", "options"),
    [(13, {"backend": "sim", "rules": "nccl"}), (4, {"backend": "gloo"})],
    ids=["sim", "gloo"],
)
def test_values_gradients_and_adjoints(world_size, options):
    cases = [case for case in ADJOINTS if math.prod(case["mesh"]) <= world_size]
    assert (
        p101.launch(wrong_exchanges, cases, world_size=world_size, **options).results
        == [[]] * world_size
    )


def exchanged(case, backward=True):
    layer = layer_of(case)
    y = layer(block(seeded(case["shape"]), mesh_of(0, case["mesh"])).requires_grad_())
    if backward:
        y.sum().backward()
    return layer.lines


def predicted(lines):
    """(source, destination, bytes of float64) of every message.

    The dims come in order, each with the halos of the dims before it.
    """
    places = list(itertools.product(*(range(len(line)) for line in lines)))
    found = []
    for dim, line in enumerate(lines):
        held = [(halo.holds,) for halo in line]
        sent = [
            (source, to, entries)
            for to, halo in enumerate(line)
            for source, (entries,) in overlaps((halo.needs,), held)
            if source != to
        ]
        for source, to, entries in sent:
            for place in places:
                before = [
                    len(lines[d][at].needs) + sum(lines[d][at].padding)
                    for d, at in enumerate(place[:dim])
                ]
                after = [len(lines[d][at].holds) for d, at in enumerate(place) if d > dim]
                nbytes = 8 * len(entries) * math.prod(before + after)
                if place[dim] == source and nbytes:
                    found.append(
                        (
                            places.index(place),
                            places.index((*place[:dim], to, *place[dim + 1 :])),
                            nbytes,
                        )
                    )
    return found


@pytest.mark.parametrize("case", ADJOINTS[:4], ids=lambda case: str(case["mesh"]))
def test_the_sizes_predict_every_message_and_backward_sends_them_back(case):
    run = p101.launch(exchanged, case, world_size=math.prod(case["mesh"]) + 1, backend="sim")
    there = predicted(run.results[0])
    back = [(destination, source, nbytes) for source, destination, nbytes in there]
    assert sorted(
        (message.src, message.dst, message.nbytes) for message in run.trace.messages()
    ) == sorted(there + back)


NO_MESSAGES = {
    "pooling whose windows lie within the blocks": {
        "mesh": (1, 1, 3),
        "shape": (1, 1, 12),
        "kernel_size": 2,
        "stride": 2,
    },
    "a kernel of one": {"mesh": (1, 3), "shape": (5, 7), "kernel_size": 1},
    "a dim that is not cut": {"mesh": (3,), "shape": (6, 5), "kernel_size": 3, "padding": 1},
}


@pytest.mark.parametrize("case", NO_MESSAGES.values(), ids=NO_MESSAGES)
def test_no_message_where_none_is_needed(case):
    assert p101.launch(exchanged, case, world_size=4, backend="sim").trace.messages_sent == [0] * 4


def test_two_steps_for_each_dim_that_is_cut():
    """A middle rank sends to its left, then to its right. Corners take no steps of their own."""
    steps = p101.Network(latency=1.0, bandwidth=math.inf)
    case = {"mesh": (3, 3), "shape": (9, 9), "kernel_size": (3, 3)}
    for backward, expected in ((False, 4), (True, 8)):
        run = p101.launch(exchanged, case, backward, world_size=9, backend="sim", network=steps)
        assert run.trace.makespan == expected
