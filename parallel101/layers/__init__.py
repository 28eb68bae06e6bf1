"""Layers over the axes of a mesh, after DistDL: what moves data between ranks is a module, and its backward is its adjoint.

all_gather.py        AllGather ↔ ReduceScatter       blocks to whole tensors and back
all_sum_reduce.py    AllSumReduce ↔ itself           the sum over the axes, on every rank
halo.py              HaloExchange                    the entries around a block that a kernel needs; their sizes are in halo_sizes.py
halo_spatial.py      SpatialParallel                 a convolution or pooling over a cut tensor
axes.py              which axes, and how they cut a tensor: mesh axis i cuts dim i

Source: Hewett and Grady, "A Linear Algebraic Approach to Model Parallelism in Deep Learning" (arXiv 2006.03108), and DistDL,
https://github.com/distdl/distdl.
"""

from parallel101.layers.all_gather import AllGather, ReduceScatter
from parallel101.layers.all_sum_reduce import AllSumReduce
from parallel101.layers.halo import HaloExchange
from parallel101.layers.halo_sizes import halos
from parallel101.layers.halo_spatial import SpatialParallel

__all__ = ["AllGather", "AllSumReduce", "HaloExchange", "ReduceScatter", "SpatialParallel", "halos"]
