"""A message that carries its gradient back: send, and its transpose, receive.

    rank 0  x ── send ──┐                            ┌── receive ──▶ ∂x
    rank 1              └── receive ──▶ x … ∂x ── send ┘

Both ranks call `backward()`: the sender calls it on its zero-volume result, and waits there for the
gradient. Neither call is asynchronous.
"""

from __future__ import annotations

from torch import Size, Tensor

from parallel101.autograd.differentiable import differentiable, placeholder
from parallel101.collectives.blocks import flat_of
from parallel101.collectives.checks import nothing, root_of, tensor_of
from parallel101.collectives.comm import Comm, comm_of
from parallel101.mesh import GroupLike, group_of

__all__ = ["receive", "send"]


def send(x: Tensor, dst: int, *, group: GroupLike = None) -> Tensor:
    """Send x to position `dst`, which calls `receive`.

        rank 0  x ─┐            ∂x = g
        rank 1     └─▶ x        sends g back

    Backward: receive the gradient from there.

    Args:
        x: the tensor to send.
        dst: the receiver's position in the group, not its global rank.
        group: see `group_of`; None is all ranks. An idle rank sends nothing.

    Returns a zero-volume tensor that belongs to the graph: call `backward()` on it or its sum. On
    gloo it returns after the receive was posted. Raises ValueError or TypeError if `dst` isn't
    another position of the group.

    Example:
        >>> def program():
        ...     x = torch.tensor([3.0, 4.0])
        ...     return p101.send(x, dst=1) if dist.get_rank() == 0 else p101.receive(x, src=0)
        >>> p101.launch(program, world_size=2, backend="sim").results
        [tensor([]), tensor([3., 4.])]
    """

    def forward(x: Tensor) -> Tensor:
        x, comm = tensor_of(x), _comm_with("send", x, dst, "dst", group)
        if comm:
            comm.isend(flat_of(x), to=dst).wait()
        return nothing(x)

    def backward(g: Tensor, shape: Size, p: int) -> Tensor:
        return receive(placeholder(g, shape), dst, group=group)

    return differentiable("send", x, group, forward, backward, collective=False)


def receive(x: Tensor, src: int, *, group: GroupLike = None) -> Tensor:
    """Return what position `src` sends with `send`.

        rank 0  x ─┐            receives ∂x
        rank 1     └─▶ x        g

    Backward: send the gradient to it.

    Args:
        x: gives the shape and dtype; its values are ignored. It must require a gradient if the
            sender's x does.
        src: the sender's position in the group, not its global rank.
        group: see `group_of`; None is all ranks. An idle rank gets a zero-volume tensor.

    Returns a new contiguous tensor like x. Raises ValueError or TypeError if `src` isn't another
    position of the group.
    """

    def forward(x: Tensor) -> Tensor:
        x, comm = tensor_of(x), _comm_with("receive", x, src, "src", group)
        if not comm:
            return nothing(x)
        result = x.new_empty(x.shape)
        comm.irecv(result.view(-1), source=src).wait()
        return result

    def backward(g: Tensor, shape: Size, p: int) -> Tensor:
        return send(g, src, group=group)

    return differentiable("receive", x, group, forward, backward, collective=False)


def _comm_with(operation: str, x: Tensor, peer: int, name: str, group: GroupLike) -> Comm | None:
    """Return the Comm for messages with position `peer`; None on an idle rank.

    The peer may use dist.send or dist.recv itself, so the messages have no tag.
    """
    members = group_of(group)
    if root_of(members, peer, name) == members.position:
        raise ValueError(
            f"{name}={peer} is this rank's own position: a message goes to another rank"
        )
    return None if members.position is None else comm_of(members, x.device, operation, tag=0)
