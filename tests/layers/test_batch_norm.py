"""BatchNorm over a mesh equals torch's on the whole batch: outputs, gradients, running
statistics, evaluation.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

import parallel101 as p101
from parallel101.layers import BatchNorm
from parallel101.mesh import split_sizes
from tests.layers.cases import block, mesh_of

CASES = {  # mesh, shape of the whole batch; most as in DistDL's tests/layers/test_batchnorm.py
    "batch and length": ((2, 1, 2), (4, 3, 10)),
    "channels": ((1, 4, 1), (4, 4, 10)),
    "channels and length, uneven": ((1, 2, 2), (7, 13, 11)),
    "no further dims": ((2, 2), (7, 13)),
    "images": ((1, 2, 2, 1), (7, 13, 11, 3)),
    "a mesh of the batch alone": ((4,), (6, 5, 3, 3)),
    "ranks without samples": ((4,), (3, 5, 2)),
}
OPTIONS = [{}, {"momentum": None, "eps": 1e-3}, {"affine": False}, {"track_running_stats": False}]


def trained(norm, batches, channels=slice(None), cut=lambda x: x):
    """Two steps of training and an evaluation: outputs, gradients of x, weight and bias, and
    the state.
    """
    torch.manual_seed(0)
    found = {}
    if norm.weight is not None:
        for i, parameter in enumerate((norm.weight, norm.bias)):
            whole = torch.linspace(0.5, 2, 17, dtype=torch.float64).roll(3 * i)[: batches.shape[2]]
            parameter.data = whole[channels].clone() if parameter.numel() else parameter.data
    for step, batch in enumerate(batches):
        norm.train(step < 2)
        x, g = (cut(t).clone().requires_grad_() for t in (batch, batch.cos()))
        y = norm(x)
        (y * g.detach()).sum().backward()
        found[f"y {step}"], found[f"∂x {step}"] = y.detach(), x.grad
    found |= {f"∂{name}": parameter.grad for name, parameter in norm.named_parameters()}
    return found | {name: value.clone() for name, value in norm.state_dict().items()}


def batches_of(shape):
    made = torch.Generator().manual_seed(5)
    return torch.randn((3, *shape), generator=made, dtype=torch.float64) * 3 + 100


def differences(cases):
    """On this rank: what isn't as in one process."""
    wrong = []
    for name, (mesh_shape, shape) in cases.items():
        mesh = mesh_of(1, mesh_shape)  # rank 0 lies outside, or the ranks after it
        for options in OPTIONS if name == "no further dims" else OPTIONS[:1]:
            norm = BatchNorm(mesh, shape[1], dtype=torch.float64, **options)
            where = mesh.get_coordinate()
            if where is None:
                wrong += [name] * (norm(torch.empty(0)).numel() != 0)
                continue
            sizes = split_sizes(shape[1], *mesh_shape[1:2] or (1,))
            at = where[1] if len(mesh_shape) > 1 else 0
            channels = slice(sum(sizes[:at]), sum(sizes[: at + 1]))
            cut = functools.partial(block, mesh=mesh)
            found = trained(norm, batches_of(shape), channels, cut)
            kind = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
            torchs = kind(shape[1], dtype=torch.float64, **options)
            for key, whole in trained(torchs, batches_of(shape)).items():
                if whole.dim() > 1:
                    whole = cut(whole)
                elif whole.dim():
                    whole = whole[channels]
                if not torch.allclose(found[key].to(whole.dtype), whole, rtol=1e-10, atol=1e-11):
                    wrong.append((name, options, key))
    return wrong


def test_it_equals_torchs_of_the_whole_batch():
    run = p101.launch(differences, CASES, world_size=5, backend="sim", rules="nccl")
    assert run.results == [[]] * 5


def in_half_precision():
    """300 samples in bfloat16: more than it can count."""
    x = torch.linspace(-1, 3, 300 * 2).view(300, 2).bfloat16()
    y = BatchNorm(mesh_of(0, (2,)), 2)(block(x, mesh_of(0, (2,))))
    return y, block(nn.BatchNorm1d(2)(x), mesh_of(0, (2,)))


def test_half_precision():
    for y, expected in p101.launch(in_half_precision, world_size=2, backend="sim").results:
        torch.testing.assert_close(y, expected)


def messages_and_errors():
    mesh = mesh_of(0, (2,))
    norm = BatchNorm(mesh, 3)
    norm.eval()
    norm(torch.ones(4, 3, 2))
    said, only_one = [], torch.ones(1 - mesh.get_coordinate()[0], 3)
    for x in (torch.ones(4, 5), torch.ones(4), torch.ones(4, 3, dtype=torch.int64), only_one):
        try:
            norm.train()(x)
        except ValueError as error:
            said.append(str(error))
    return said


def test_evaluation_sends_nothing_and_what_it_refuses():
    run = p101.launch(messages_and_errors, world_size=2, backend="sim")
    *wrong, too_few = run.results[0]
    assert run.results[1] == run.results[0] and len(wrong) == 3
    assert all("expected (samples, 3 channels, …) of a floating-point dtype" in w for w in wrong)
    assert "expected at least 2 in training" in too_few
    assert sum(run.trace.messages_sent) == 2, "the all-reduce that found one value only"
