"""AllGather, ReduceScatter and AllSumReduce: the documents' examples, values against one process, adjoints, and what is sent."""

from __future__ import annotations

import itertools

import torch
from torch.distributed.device_mesh import init_device_mesh

import parallel101 as p101

SHAPE, NAMES = (2, 2, 3), ("a", "b", "c")
SUBSETS = [axes for count in range(4) for axes in itertools.combinations(range(3), count)]


def the_documents_examples():
    mesh = init_device_mesh("cpu", SHAPE)
    gathered = p101.layers.AllGather(mesh, axes=(2,))(torch.rand(3, 7, 4))
    summed = p101.layers.AllSumReduce(mesh, axes=(1, 2))(torch.ones(3, 7, 5))
    return gathered.shape, summed.shape, summed.unique().tolist()


def test_the_documents_examples():
    results = p101.launch(the_documents_examples, world_size=12, backend="sim").results
    assert results == [((3, 7, 12), (3, 7, 5), [6.0])] * 12
