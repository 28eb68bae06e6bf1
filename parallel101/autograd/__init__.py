"""The collectives with their gradients: the forward and the backward of each, side by side.

collectives.py      broadcast ↔ reduce, scatter ↔ gather, all_gather ↔ reduce_scatter,
                    all_reduce and all_to_all ↔ themselves
replicated.py       the same for replicated tensors, whose gradient counts once instead of once
                    per rank (Megatron's f and g)
point_to_point.py   send ↔ receive
differentiable.py   what they share: how a collective becomes a node of the graph
"""

from parallel101.autograd.collectives import (
    algorithms,
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from parallel101.autograd.point_to_point import receive, send
from parallel101.autograd.replicated import (
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    scatter_to_group,
)
