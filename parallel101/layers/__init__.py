"""Layers over the axes of a mesh, after DistDL: modules that move data between ranks.

The backward of each is its adjoint.

along_axes.py     AllGather ↔ ReduceScatter     blocks to whole tensors and back
                  AllSumReduce ↔ itself         the sum over the axes, on every rank
                  Broadcast ↔ SumReduce         copies along the axes, sums along them
repartition.py    Repartition ↔ Repartition     from the blocks of one mesh to those of another, and
                                                the exchange behind it and behind HaloExchange
halo.py           HaloExchange                  the entries around a block that a kernel needs
halo_spatial.py   SpatialParallel               a convolution or pooling over a cut tensor
batch_norm.py     BatchNorm                     an example: the statistics of a batch that is
                                                cut over ranks
axes.py           which axes, and how they cut a tensor: mesh axis i cuts dim i

In torch's words, a mesh axis that cuts dim i holds the tensor as Shard(i); along an axis that cuts
nothing it is Replicate() or, before a sum, Partial().

A rank that holds no part of a tensor has a zero-volume tensor in its place, and makes the same
calls as the others. A line of a mesh is a group, whose roots and peers are positions in the line,
not global ranks.

Source: Hewett and Grady, "A Linear Algebraic Approach to Model Parallelism in Deep Learning" (arXiv
2006.03108), and DistDL, https://github.com/distdl/distdl.
"""

from parallel101.layers.along_axes import (
    AllGather,
    AllSumReduce,
    Broadcast,
    ReduceScatter,
    SumReduce,
)
from parallel101.layers.batch_norm import BatchNorm
from parallel101.layers.halo import HaloExchange, halos
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
