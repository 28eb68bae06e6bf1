"""The shards of a Keras model's weights, with our trainers' layout and synchronization.

zero_stage 0      the model's own variables; gradients are summed over dp
zero_stage 1-3    a Keras variable for this rank's piece of each weight, in the same memory: the
                  Keras optimizer updates it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import torch
from torch.distributed.device_mesh import DeviceMesh

from parallel101.collectives import all_reduce
from parallel101.keras.dense import CutDense
from parallel101.keras.supported import check_regularizer
from parallel101.mesh import GroupLike, group_of
from parallel101.trainers.data_parallel import Overlapped
from parallel101.trainers.flat import ZeROGroup
from parallel101.trainers.gradient_sync import GradientSync, Parameters, default_bucket_bytes
from parallel101.trainers.layout import Axes, Layout
from parallel101.trainers.model_layers import layers_of
from parallel101.trainers.zero_1_2_3 import ZeRO3, ZeRO12


class Shards:
    """This rank's shard of every weight, and the synchronization of its gradients.

    Attributes:
        sync: see `GradientSync`.
        layout: how each weight is placed, by path: pieces over dp of this rank's shard over tp.
        trained: path → the Keras variable that the optimizer updates: the model's own or, under
            ZeRO, this rank's piece of it.
    """

    def __init__(self, inner: Any, axes: Axes, zero_stage: int):
        own = {v.path: v for v in inner.trainable_variables}
        if not own:
            raise ValueError(f"{inner.name!r} has no trainable weight: there is nothing to train")
        if len({v.path for v in inner.variables}) < len(inner.variables):
            raise ValueError(
                "two weights of the model have the same path: give the layers different names"
            )
        cut = {
            path: shard
            for layer in inner.layers
            if isinstance(layer, CutDense)
            for path, shard in layer.shards.items()
        }
        shapes = {}
        for v in inner.variables:
            shape = list(v.shape)
            if v.path in cut:
                shape[cut[v.path].dim] = sum(cut[v.path].sizes)
            shapes[v.path] = torch.Size(shape), v.value.dtype
        self.inner = inner
        parameters = {path: v.value for path, v in own.items()}
        self.sync = gradient_sync(inner, parameters, axes.along(["dp"]), zero_stage)
        placed = {"tp": cut, "dp": self.sync.placements}
        self.layout = Layout(axes, shapes, placed, inner.variables[0].value.device)
        self.trained = {path: self.piece(v) if zero_stage else v for path, v in own.items()}
        for v in self.regularized():
            if self.layout.entries[v.path].placements:
                check_regularizer(v.regularizer, v.path)

    # ── the whole model, collective ──

    def shape(self, path: str) -> tuple[int, ...]:
        """Return the shape of the whole weight."""
        return tuple(self.layout.entries[path].shape)

    def totals(self, of_parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return, for each path, the sum of a number over the parts of all ranks, the same on each.
        Collective.
        """
        numbers, layout = torch.stack(list(of_parts.values())), self.layout
        counts = torch.tensor([layout.counts(path) for path in of_parts], device=numbers.device)
        return all_reduce(numbers * counts, group=layout.axes.along(layout.cut_axes))

    def norms(self, parts: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Return the norm of each whole array, by path, from each rank's part of it. Collective."""
        squares = self.totals({path: part.double().square().sum() for path, part in parts.items()})
        return dict(zip(parts, squares.sqrt().tolist()))

    # ── regularizers ──

    def regularized(self) -> list[Any]:
        """Return the variables whose penalties count now. Keras leaves out frozen weights."""
        return [v for v in self.inner.trainable_variables if v.regularizer is not None]

    def penalty(self) -> list[torch.Tensor]:
        """Return the sum of the penalties of all whole weights, without a graph. Collective.

        The list is empty if there are none.
        """
        with torch.no_grad():
            of_parts = {
                v.path: v.regularizer(self.trained[v.path].value) for v in self.regularized()
            }
        return [self.totals(of_parts).sum()] if of_parts else []

    # ── on this rank ──

    def piece(self, variable: Any) -> Any:
        """Return a Keras variable in the memory of this rank's piece, empty if it has none."""
        empty = torch.nn.Parameter(variable.value.new_empty(0))
        piece = keras.Variable(
            self.sync.owned.get(variable.path, empty), dtype=variable.dtype, name=variable.name
        )
        piece._path = variable.path
        return piece

    def parts(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of each weight, by path."""
        return {v.path: self.trained.get(v.path, v).value for v in self.inner.variables}

    def gradients(self, unused: list[str], scale: float) -> dict[str, torch.Tensor | None]:
        """Return the whole batch's gradient for each variable in `trained`, by path, and with it
        that of its penalty times `scale`. None for weights that the loss does not depend on.
        """
        owned, gradients = self.sync.owned, dict[str, torch.Tensor | None]()
        for path, v in self.trained.items():
            gradient = owned[path].grad if path in owned else torch.empty_like(v.value)
            gradients[path] = None if path in unused else gradient
        for v in self.regularized():
            part = self.trained[v.path].value.detach().requires_grad_()
            (more,) = torch.autograd.grad(v.regularizer(part) * scale, part)
            gradient = gradients[v.path]
            gradients[v.path] = more if gradient is None else gradient + more
        return gradients

    # ── the optimizer ──

    def optimizer_state(self, optimizer: Any) -> list[torch.Tensor]:
        """Return each of the optimizer's variables for whole weights. Collective."""
        parts, state = self.parts(), []
        for variable in optimizer.variables:
            path, value = self.owner(variable, parts), variable.value.detach()
            state.append(value if path is None else self.layout.gather({path: value}, [path])[path])
        return state

    def set_optimizer_state(self, optimizer: Any, whole: Sequence[torch.Tensor]) -> None:
        """Set the state of an optimizer that was built for this rank's shards."""
        parts = self.parts()
        for variable, value in zip(optimizer.variables, whole, strict=True):
            path = self.owner(variable, parts)
            variable.assign(value if path is None else self.layout.cut(path, value))

    def owner(self, variable: Any, parts: Mapping[str, torch.Tensor]) -> str | None:
        """Return the path of the weight to which a variable of the optimizer belongs.

        Keras names the variable after the weight. None for the step count, for example.
        """
        paths = [path for path in parts if variable.name.startswith(path.replace("/", "_") + "_")]
        path = max(paths, key=len, default=None)
        return path if path is not None and variable.value.shape == parts[path].shape else None

    def for_my_shards(self, optimizer: Any, names: Mapping[str, str]) -> Any:
        """Return an optimizer for this rank's shards, which continues from the state of this one.

        It is `optimizer` itself, unless that was built for the whole model's weights. `names` maps
        the path of a variable in the wrapped model to its path here. Raises ValueError for another
        model's optimizer.
        """
        if not optimizer.built:
            return optimizer
        mine = {v.path: self.trained.get(v.path, v) for v in self.inner.variables}
        theirs = optimizer._trainable_variables
        if all(any(v is own for own in mine.values()) for v in theirs):
            return optimizer
        paths = [names.get(v.path) for v in theirs]
        if any(
            path is None or self.shape(path) != tuple(v.shape) for path, v in zip(paths, theirs)
        ):
            raise ValueError(
                "the optimizer was built for other weights than this model's: compile with a "
                "new one, or with that of the model you wrapped"
            )
        copy = type(optimizer).from_config(optimizer.get_config())
        copy.build([mine[path] for path in paths])
        self.set_optimizer_state(copy, [v.value.detach() for v in optimizer.variables])
        return copy


def gradient_sync(
    inner: Any, parameters: Parameters, dp: GroupLike, zero_stage: int
) -> GradientSync:
    """Return the object that sums gradients over the data axis."""
    zero = ZeROGroup(dict.fromkeys(parameters, (dp, None)))
    if zero_stage == 3:
        return ZeRO3(dict(layers_of(inner)), parameters, zero)
    size = default_bucket_bytes(parameters, 4)
    if zero_stage:
        return ZeRO12(parameters, zero, zero_stage=zero_stage, bucket_bytes=size)
    return GradientSync(parameters) if group_of(dp).size == 1 else Overlapped(parameters, dp, size)


def axes_of(group: GroupLike, mesh: DeviceMesh | None, plan: Any, zero_stage: int) -> Axes:
    """Return the axes "dp" and "tp" of the ranks. Raises ValueError."""
    names = (mesh.mesh_dim_names or ()) if mesh is not None else ("dp",)
    wrong = {
        f"zero_stage={zero_stage!r}: expected 0 (nothing is cut over the data axis), 1, 2 or 3": (
            zero_stage not in (0, 1, 2, 3)
        ),
        "both group= and mesh=: expected one of them": mesh is not None and group is not None,
        f'mesh has the axes {names}: expected "dp", "tp" or both; ParallelKeras has no pipeline '
        '("pp")': not names or not set(names) <= {"dp", "tp"},
        f"zero_stage={zero_stage} cuts over the data axis, and the mesh has none: name an axis "
        '"dp"': zero_stage and "dp" not in names,
    }
    for text in filter(wrong.get, wrong):
        raise ValueError(text)
    if mesh is not None:
        others = {name: 1 for name in ("dp", "tp") if name not in names}
        return Axes(mesh, others | dict(zip(names, mesh.shape)))  # in the mesh's order
    size, data = group_of(group).size, zero_stage > 0 or plan is None
    return Axes(group, {"dp": size if data else 1, "tp": 1 if data else size})
