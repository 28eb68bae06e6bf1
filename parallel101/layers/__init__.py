"""Layers over the axes of a mesh, after DistDL: what moves data between ranks is a module, and its
backward is its adjoint.

all_gather_layer.py  AllGather ↔ ReduceScatter       blocks to whole tensors and back
all_sum_reduce.py    AllSumReduce ↔ itself           the sum over the axes, on every rank
broadcast_layer.py   Broadcast ↔ SumReduce           copies along the axes, sums along them
repartition.py       Repartition ↔ Repartition       from the blocks of one mesh to those of another
halo.py              HaloExchange                    the entries around a block that a kernel needs; their sizes are in halo_sizes.py
halo_spatial.py      SpatialParallel                 a convolution or pooling over a cut tensor
batch_norm.py        BatchNorm                       an example: the statistics of a batch that is cut over ranks
axes.py              which axes, and how they cut a tensor: mesh axis i cuts dim i

A rank that holds no part of a tensor has a zero-volume tensor in its place, and makes the same
calls as the others. Source: Hewett and Grady, "A Linear Algebraic Approach to Model Parallelism in
Deep Learning" (arXiv 2006.03108), and DistDL, https://github.com/distdl/distdl.
"""

from parallel101.layers.all_gather_layer import AllGather, ReduceScatter
from parallel101.layers.all_sum_reduce import AllSumReduce
from parallel101.layers.batch_norm import BatchNorm
from parallel101.layers.broadcast_layer import Broadcast, SumReduce
from parallel101.layers.halo import HaloExchange
from parallel101.layers.halo_sizes import halos
from parallel101.layers.halo_spatial import SpatialParallel
from parallel101.layers.repartition import Repartition

__all__ = [
    "AllGather",
    "AllSumReduce",
    "BatchNorm",
    "Broadcast",
    "HaloExchange",
    "ReduceScatter",
    "Repartition",
    "SpatialParallel",
]
__all__ += ["SumReduce", "halos"]
