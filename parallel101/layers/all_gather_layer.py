"""AllGather joins the blocks along axes of a mesh; ReduceScatter is its adjoint.

ReduceScatter sums whole tensors and leaves each rank its block.

    axes=(1,) of a mesh 2 × 3:     a b c      abc abc abc        AllGather ─▶
                                   d e f      def def def        ◀─ ReduceScatter

Along several axes they take one axis after the other. A rank still receives each element once.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel101.autograd import all_gather, reduce_scatter
from parallel101.layers.axes import AxesLike, mesh_axes, outside, whole_shape


class AllGather(nn.Module):
    """Joins the blocks of a tensor along some axes of the mesh that cuts it.

    Mesh axis i cuts dim i, and its blocks are joined along dim i. On a mesh of shape (2, 2, 3),
    `AllGather(mesh, axes=(2,))` turns a block of [3, 7, 4] into [3, 7, 12].

    Args:
        mesh: a DeviceMesh. A rank outside it gives and gets a zero-volume tensor, and sends
            nothing.
        axes: its axes by number or name. Without any, the result is a clone.
        shape: of the whole tensor, whose blocks are then those of `split_sizes` along each dim.
            Default: all blocks are as large as mine.

    Forward takes this rank's block and returns a new tensor on every rank. Where the result has n
    elements and the axes have p ranks, each rank sends n(p−1)/p elements. Adjoint: ReduceScatter.

    Raises ValueError or TypeError for wrong arguments, and for a block that contradicts `shape`,
    before any message.

    Source: Hewett and Grady (arXiv 2006.03108).
    """

    def __init__(self, mesh: DeviceMesh, axes: AxesLike, *, shape: Sequence[int] | None = None):
        super().__init__()
        self.mesh = mesh_axes(mesh, axes)
        self.shape = whole_shape(shape, self.mesh.shape)

    def forward(self, x: Tensor) -> Tensor:
        if self.mesh.coordinate is None:
            return outside(x)
        self.mesh.check_block(x, self.shape, cut=range(len(self.mesh.shape)))
        y = x
        for axis in reversed(self.mesh.axes):
            y = all_gather(
                y, axis, group=self.mesh.line(axis), sizes=self.mesh.sizes(self.shape, axis)
            )
        return x.clone() if y is x else y

    def extra_repr(self) -> str:
        return str(self.mesh)


class ReduceScatter(nn.Module):
    """Sums tensors over some axes of the mesh, and leaves each rank its block of the sum.

    Mesh axis i cuts dim i. On a mesh of shape (2, 2, 3), `ReduceScatter(mesh, axes=(2,))` turns
    [3, 7, 12] into [3, 7, 4].

    Args:
        mesh, axes: see AllGather.
        shape: of the whole tensor; only checked. The blocks are always those of `split_sizes`.

    Forward takes a tensor that the mesh's other axes cut, and returns this rank's block, a new
    tensor. Each rank sends n(p−1)/p elements of the n it gives. Adjoint: AllGather. Raises
    ValueError or TypeError as AllGather does.

    Source: Hewett and Grady (arXiv 2006.03108).
    """

    def __init__(self, mesh: DeviceMesh, axes: AxesLike, *, shape: Sequence[int] | None = None):
        super().__init__()
        self.mesh = mesh_axes(mesh, axes)
        self.shape = whole_shape(shape, self.mesh.shape)

    def forward(self, x: Tensor) -> Tensor:
        if self.mesh.coordinate is None:
            return outside(x)
        self.mesh.check_block(
            x,
            self.shape,
            cut=[axis for axis in range(len(self.mesh.shape)) if axis not in self.mesh.axes],
        )
        y = x
        for axis in self.mesh.axes:
            y = reduce_scatter(y, axis, group=self.mesh.line(axis))
        return x.clone() if y is x else y

    def extra_repr(self) -> str:
        return str(self.mesh)
