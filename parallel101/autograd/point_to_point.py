"""A message that carries its gradient back: send, and its adjoint, receive.

    rank 0  x ── send ──┐                            ┌── receive ──▶ ∂x
    rank 1              └── receive ──▶ x … ∂x ── send ┘

Both ranks call `backward()`: the sender on its zero-volume result, which waits there for the gradient.
"""

from __future__ import annotations

from torch import Tensor

from parallel101.autograd.linear import Linear, stand_in
from parallel101.collectives.blocks import flat_of
from parallel101.collectives.checks import nothing, root_of, tensor_of
from parallel101.collectives.comm import Comm, comm_of
from parallel101.mesh import GroupLike, group_of

__all__ = ["receive", "send"]


class Send(Linear):
    """
    rank 0  x ─┐            ∂x = g
    rank 1     └─▶ x        g goes back
    """


def send(x: Tensor, dst: int, *, group: GroupLike = None) -> Tensor:
    """Send x to position `dst`, which calls `receive`.

    Returns a zero-volume tensor that belongs to the graph: call `backward()` on (a sum of) it, and the gradient of x arrives from there.
    On gloo it returns when x was received. Raises ValueError or TypeError for what is no other position of the group.
    """

    def forward(x: Tensor) -> Tensor:
        x, comm = tensor_of(x), _with_peer("send", x, dst, "dst", group)
        if comm:
            comm.isend(flat_of(x), to=dst).wait()
        return nothing(x)

    return Send.of(x, group, forward, lambda g, shape, p: receive(stand_in(g, shape), dst, group=group))


class Receive(Linear):
    """
    rank 0  x ─┐            ∂x = g
    rank 1     └─▶ x        g goes back
    """


def receive(x: Tensor, src: int, *, group: GroupLike = None) -> Tensor:
    """What position `src` sends with `send`. x gives shape, dtype and whether a gradient goes back (`requires_grad`, as the sender's).

    Returns a new contiguous tensor like x. Raises ValueError or TypeError for what is no other position of the group.
    """

    def forward(x: Tensor) -> Tensor:
        x, comm = tensor_of(x), _with_peer("receive", x, src, "src", group)
        if not comm:
            return nothing(x)
        result = x.new_empty(x.shape)
        comm.irecv(result.view(-1), source=src).wait()
        return result

    return Receive.of(x, group, forward, lambda g, shape, p: send(g, src, group=group))


def _with_peer(operation: str, x: Tensor, peer: int, name: str, group: GroupLike) -> Comm | None:
    """The Comm to talk to `peer`, who may also use dist.send or dist.recv; None on an idle rank."""
    members = group_of(group)
    if root_of(members, peer, name) == members.position:
        raise ValueError(f"{name}={peer} is this rank's own position: a message goes to another rank")
    return None if members.position is None else comm_of(members, x.device, operation, tag=0)
