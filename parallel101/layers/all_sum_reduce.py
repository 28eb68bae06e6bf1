"""AllSumReduce: every rank gets the sum over the axes of a mesh. It is its own adjoint.

axes=(1,) of a mesh 2 × 3:     a b c      s s s        s = a + b + c
                               d e f      t t t        t = d + e + f
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel101.autograd import all_reduce
from parallel101.layers.axes import AxesLike, mesh_axes, outside


class AllSumReduce(nn.Module):
    """Sums tensors over some axes of the mesh; every rank gets the sum.

    On a mesh of shape (2, 2, 3), `AllSumReduce(mesh, axes=(1, 2))` sums over six ranks.

    Args:
        mesh: a DeviceMesh. A rank outside it gives and gets a zero-volume tensor, and sends
            nothing.
        axes: its axes by number or name. Without any, the result is a clone.

    Forward takes tensors of one shape, with any number of dims, on all ranks that are summed, and
    returns a new tensor of that shape. It is its own adjoint. Raises ValueError or TypeError for
    wrong arguments.

    Source: Hewett and Grady (arXiv 2006.03108).
    """

    def __init__(self, mesh: DeviceMesh, axes: AxesLike):
        super().__init__()
        self.mesh = mesh_axes(mesh, axes)

    def forward(self, x: Tensor) -> Tensor:
        if self.mesh.coordinate is None:
            return outside(x)
        return all_reduce(x, group=self.mesh.line(*self.mesh.axes)) if self.mesh.axes else x.clone()

    def extra_repr(self) -> str:
        return str(self.mesh)
