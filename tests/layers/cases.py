"""Shared by the tests of the layers: meshes, blocks computed in one process, and the adjoint
test.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from parallel101.mesh import split_sizes
from tests.autograd.test_collectives import random


@functools.lru_cache(maxsize=100)
def mesh_of(start, shape, transposed=False):
    """A mesh of the ranks from `start` on, row by row."""
    ranks = (start + torch.arange(torch.Size(shape).numel())).view(shape)
    return DeviceMesh("cpu", ranks.permute(*reversed(range(len(shape)))) if transposed else ranks)


def block(x, mesh, axes=None):
    """This rank's block of x, which these axes of the mesh cut (all by default).

    Outside the mesh: nothing.
    """
    if mesh.get_coordinate() is None:
        return x.new_empty(0)
    for axis, at in enumerate(mesh.get_coordinate()):
        if axes is None or axis in axes:
            x = x.split(split_sizes(x.shape[axis], mesh.shape[axis]), axis)[at]
    return x.contiguous()


def inner_products(layer, x):
    """This rank's part of ⟨Fx, y⟩ and of ⟨x, F*y⟩."""
    x = random(x.shape, 3).requires_grad_()
    y = layer(x)
    g = random(y.shape, 7)
    (y * g).sum().backward()
    return (y * g).sum().item(), (x * x.grad).sum().item()


def check(results):
    """What the ranks returned: a list of what is wrong, and the inner products by layer."""
    assert [wrong for wrong, _ in results] == [[]] * len(results)
    products = [products for _, products in results]
    assert products[0]
    for key in products[0]:
        there, back = (sum(pairs) for pairs in zip(*(of_rank[key] for of_rank in products)))
        assert there == pytest.approx(back, rel=1e-12, abs=1e-12), key
