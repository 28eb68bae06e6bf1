"""Shared by the tests of the layers: meshes, and blocks computed in one process."""

from __future__ import annotations

import functools

import torch
from torch.distributed.device_mesh import DeviceMesh

from parallel101.mesh import split_sizes


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
