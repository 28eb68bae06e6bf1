"""What each rank holds of a Keras model's weights: the layout and the gradient synchronisation of our trainers, on Keras variables.

zero_stage 0    the model's own variables; gradients are summed over dp
zero_stage 1-3  a Keras variable for this rank's piece of each weight, in the same memory: what the Keras optimizer updates
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from parallel101.collectives import all_reduce
from parallel101.keras.dense import CutDense
from parallel101.keras.installed import keras
from parallel101.mesh import GroupLike, group_of
from parallel101.trainers.gradients import Alone, GradientSync, Overlapped, Parameters, default_bucket_bytes
from parallel101.trainers.layout import Axes, Entry, Layout
from parallel101.trainers.zero.stage3 import ZeRO3
from parallel101.trainers.zero.stage12 import ZeRO12


class Shards:
    """What this rank holds of every weight, and how gradients get there: the layout and the gradient synchronisation of our trainers.

    Attributes:
        sync: see `GradientSync`.
        over_dp, over_tp: where each weight lies, by path: pieces over dp of this rank's shard over tp, whose sizes may differ along tp.
        trained: path → the Keras variable that the optimizer updates: the model's own or, under ZeRO, this rank's piece of it.
    """

    def __init__(self, inner: Any, lines: Mapping[str, GroupLike], zero_stage: int):
        own = {v.path: v for v in inner.trainable_variables}
        if not own:
            raise ValueError(f"{inner.name!r} has no trainable weight: there is nothing to train")
        if len({v.path for v in inner.variables}) < len(inner.variables):
            raise ValueError("two weights of the model have the same path: give the layers different names")
        cut = {path: shard for layer in inner.layers if isinstance(layer, CutDense) for path, shard in layer.shards.items()}
        on_line, on_all = {}, {}
        for v in inner.variables:
            shape, shard = list(v.shape), cut.get(v.path)
            on_line[v.path] = Entry(torch.Size(shape), v.value.dtype)
            if shard is not None:
                shape[shard.dim] = sum(shard.sizes)
            on_all[v.path] = Entry(torch.Size(shape), v.value.dtype, {} if shard is None else {"tp": shard})
        device = inner.variables[0].value.device
        self.inner, self.lines = inner, lines
        self.sync = gradient_sync(inner, {path: v.value for path, v in own.items()}, lines["dp"], zero_stage)
        for path, pieces in self.sync.placements.items():
            on_line[path] = on_line[path]._replace(placements={"dp": pieces})
        dp, tp = (Axes(lines[name], {name: group_of(lines[name]).size}) for name in ("dp", "tp"))
        self.over_dp, self.over_tp = Layout(dp, on_line, device), Layout(tp, on_all, device)
        self.trained = {path: self.piece(v) if zero_stage else v for path, v in own.items()}

    # ── the whole model, collective ──

    def gather(self, parts: Mapping[str, torch.Tensor], paths: Sequence[str]) -> dict[str, torch.Tensor]:
        """Path → the whole, from each rank's part."""
        return self.over_tp.gather(self.over_dp.gather(parts, paths), paths)

    def cut(self, path: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of it."""
        return self.over_dp.cut(path, self.over_tp.cut(path, whole))

    def shape(self, path: str) -> tuple[int, ...]:
        """Of the whole."""
        return tuple(self.over_tp.entries[path].shape)

    def norms(self, parts: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Path → the norm of the whole, the same on every rank, from each rank's part."""
        squares = torch.stack([part.double().square().sum() for part in parts.values()])
        for axis, layout in (("dp", self.over_dp), ("tp", self.over_tp)):
            if layout.cut_axes:
                mine = torch.tensor([layout.counts(path) for path in parts], device=squares.device)
                squares = all_reduce(squares * mine, group=self.lines[axis])
        return dict(zip(parts, squares.sqrt().tolist()))

    # ── on this rank ──

    def piece(self, variable: Any) -> Any:
        """A Keras variable in the memory of this rank's piece, without elements if it has none."""
        empty = torch.nn.Parameter(torch.empty(0, dtype=variable.value.dtype, device=variable.value.device))
        piece = keras.Variable(self.sync.owned.get(variable.path, empty), dtype=variable.dtype, name=variable.name)
        piece._path = variable.path
        return piece

    def parts(self) -> dict[str, torch.Tensor]:
        """Path → what this rank holds of that weight."""
        return {v.path: self.trained.get(v.path, v).value for v in self.inner.variables}

    def gradients(self, unused: list[str]) -> dict[str, torch.Tensor | None]:
        """Path → the gradient of the whole batch for what `trained` has; None for weights that the loss does not depend on."""
        found: dict[str, torch.Tensor | None] = {}
        for path, v in self.trained.items():
            gradient = self.sync.owned[path].grad if path in self.sync.owned else torch.empty_like(v.value)
            found[path] = None if path in unused else gradient
        return found

    def optimizer_state(self, variables: list[Any]) -> list[torch.Tensor]:
        """The whole of each of the optimizer's variables. Keras names them after the weight to which they belong."""
        prefixes = {path.replace("/", "_") + "_": path for path in self.trained}
        whole = []
        for variable in variables:
            owner = max((prefix for prefix in prefixes if variable.name.startswith(prefix)), key=len, default=None)
            value = variable.value.detach()
            path = prefixes.get(owner or "")
            if path is not None and value.shape == self.trained[path].value.shape:
                value = self.gather({path: value}, [path])[path]
            whole.append(value)
        return whole

    def describe(self) -> Iterator[str]:
        """How the weights lie on the ranks."""
        yield from self.over_tp.describe()
        if self.over_dp.cut_axes:
            yield from self.over_dp.describe()


def gradient_sync(inner: Any, parameters: Parameters, dp: GroupLike, zero_stage: int) -> GradientSync:
    """How the data axis sums gradients."""
    if zero_stage == 3:
        return ZeRO3(inner, parameters, dp)
    size = default_bucket_bytes(parameters, 4)
    if zero_stage:
        return ZeRO12(parameters, dp, zero_stage=zero_stage, bucket_bytes=size, overlap=True)
    return Alone(parameters, dp) if group_of(dp).size == 1 else Overlapped(parameters, dp, size)


def axes_of(group: GroupLike, mesh: DeviceMesh | None, plan: Any, zero_stage: int) -> tuple[Axes, dict[str, GroupLike]]:
    """The axes "dp" and "tp" of the ranks, and this rank's line along each. Raises ValueError."""
    if zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage={zero_stage!r}: expected 0 (nothing is cut over the data axis), 1, 2 or 3")
    if mesh is None:
        size = group_of(group).size
        data = zero_stage > 0 or plan is None
        axes = Axes(group, {"dp": size if data else 1, "tp": 1 if data else size})
        return axes, {name: axes.along([name]) for name in ("dp", "tp")}
    names = mesh.mesh_dim_names or ()
    if group is not None:
        raise ValueError("both group= and mesh=: expected one of them")
    if not names or not set(names) <= {"dp", "tp"}:
        raise ValueError(f'mesh has the axes {names}: expected "dp", "tp" or both; ParallelKeras has no pipeline ("pp")')
    axes = Axes(mesh, {name: 1 for name in ("dp", "tp") if name not in names} | dict(zip(names, mesh.shape)))
    if axes.sizes["dp"] == 1 and zero_stage and "dp" not in names:
        raise ValueError(f'zero_stage={zero_stage} cuts over the data axis, and the mesh has none: name an axis "dp"')
    return axes, {name: mesh[name] if name in names else axes.along([name]) for name in ("dp", "tp")}
