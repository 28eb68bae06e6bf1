"""Tensor parallel for Keras: Dense layers that hold a block of their kernel, and the plan.

    Dense(128, relu)     column          W (64, 128) │ W₀ │ W₁ │     each rank computes some of the
                                                                     outputs
    Dense(64, relu)      row             W (128, 64) ─ W₀ ─ W₁ ─     takes them as its inputs; the
                                                                     outputs are summed
    Dense(10, softmax)   column_gather   W (64, 10)  │ W₀ │ W₁ │     gathered, then the activation

So a column and a row layer cost one all-reduce forward and one backward. trainers/tensor/ does the
same for torch's models.

Source: Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import keras
import torch

from parallel101.autograd import (
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    scatter_to_group,
)
from parallel101.mesh import GroupLike, group_of, split_sizes
from parallel101.trainers.layout import Shard
from parallel101.trainers.tensor.plan import names_of

STYLES = ("column", "row", "column_gather")
ELEMENTWISE_LAYERS = (
    keras.layers.ReLU, keras.layers.LeakyReLU, keras.layers.ELU, keras.layers.Identity,
)  # fmt: skip


class CutDense(keras.layers.Layer):
    """A Dense layer of which this rank holds a block of columns or of rows.

    Attributes:
        shards: path of a weight → how it is cut. The bias of rows is whole on every rank.
    """

    def __init__(self, dense: Any, style: str, input_is_cut: bool, group: GroupLike):
        super().__init__(name=dense.name, dtype=dense.dtype_policy, trainable=dense.trainable)
        self.supports_masking = True
        members = group_of(group)
        assert members.position is not None
        self.style, self.input_is_cut, self.group = style, input_is_cut, group
        self.activation = dense.activation
        dim = 0 if style == "row" else 1
        self.sizes = split_sizes(dense.kernel.shape[dim], members.size)

        self.shards: dict[str, Shard] = {}

        def add(name: str, whole: Any, dim: int | None) -> Any:
            value = whole.value.detach()
            mine = value if dim is None else value.split(self.sizes, dim)[members.position]
            mine = mine.clone()
            like = {"dtype": whole.dtype, "regularizer": whole.regularizer, "name": name}
            made = self.add_weight(shape=mine.shape, initializer=lambda *_, **__: mine, **like)
            if dim is not None:
                self.shards[made.path] = Shard(dim, tuple(self.sizes))
            return made

        self.kernel = add("kernel", dense.kernel, dim)
        of_bias = None if style == "row" else 0
        self.bias = None if dense.bias is None else add("bias", dense.bias, of_bias)
        self.units = dense.units if style != "column" else self.sizes[members.position]

    def call(self, x: Any) -> Any:
        if self.style != "row":
            x = copy_to_group(x, group=self.group, algorithm="direct")
        elif not self.input_is_cut:
            x = scatter_to_group(x, -1, group=self.group, sizes=self.sizes)
        y = keras.ops.matmul(x, self.kernel)
        if self.style == "row":
            y = reduce_from_group(y, group=self.group, algorithm="direct")
        if self.bias is not None:
            y = keras.ops.add(y, self.bias)
        if self.style == "column_gather":
            y = gather_from_group(y, -1, group=self.group, sizes=self.sizes)
        return y if self.activation is None else self.activation(y)

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor((*x.shape[:-1], self.units), self.compute_dtype)


def cut_model(
    model: Any, plan: str | Mapping[str, str], group: GroupLike
) -> tuple[Any, dict[str, str]]:
    """Return a copy of the model whose Dense layers hold this rank's blocks, and the plan by name.

    Raises ValueError for a plan that doesn't fit the model.
    """
    users = users_of(model)
    styles = auto_plan(model, users, group_of(group).size) if plan == "auto" else match(plan, model)
    cut = check_plan(model, users, styles)

    def clone(layer: Any) -> Any:
        if layer.name in styles:
            return CutDense(layer, styles[layer.name], layer in cut, group)
        return layer.__class__.from_config(layer.get_config())

    def same_input(tensor: Any) -> Any:
        return keras.Input(
            batch_shape=tensor.shape, dtype=tensor.dtype, name=tensor._keras_history.operation.name
        )

    # a compiled model's copy would be compiled too, with an optimizer of its own
    compiled, model.compiled = model.compiled, False
    try:
        copy = keras.models.clone_model(
            model, keras.tree.map_structure(same_input, graph_of(model).input), clone_function=clone
        )
    finally:
        model.compiled = compiled
    for layer in model.layers:
        if layer.name not in styles and layer.variables:
            for mine, theirs in zip(copy.get_layer(layer.name).variables, layer.variables):
                mine.assign(theirs.value)
    set_trainable(layers_within(copy), trainable(model))
    return copy, styles


def layers_within(model: Any) -> list[Any]:
    """Return the model, its layers and the layers in these, containers first.

    The order is the same for a model and its copy.
    """
    return [model, *(part for layer in model.layers for part in layer._flatten_layers())]


def trainable(model: Any) -> list[bool]:
    """Return whether each layer of the model is trained, in the order of `layers_within`."""
    return [layer.trainable for layer in layers_within(model)]


def set_trainable(layers: list[Any], flags: list[bool]) -> None:
    """Set whether each layer is trainable; False freezes it.

    A flag that is set on a container holds for the layers in it, until theirs is set.
    """
    for layer, flag in zip(layers, flags, strict=True):
        if layer is not None:
            layer.trainable = flag


class Freezing:
    """Keeps the same layers frozen in a model and in its copy, as if they were one."""

    def __init__(self, model: Any, copy: Any):
        self.copy, self.seen = copy, trainable(model)
        # a reference gives None once the model is gone
        self.layers = [weakref.ref(layer) for layer in layers_within(model)]

    def follow(self) -> None:
        """Freeze or unfreeze in each of the two the layers that were changed in the other."""
        mine, theirs = layers_within(self.copy), [ref() for ref in self.layers]
        flags = [
            copy.trainable if layer is None or layer.trainable == old else not old
            for copy, layer, old in zip(mine, theirs, self.seen)
        ]
        if flags != self.seen:
            set_trainable(mine, flags)
            set_trainable(theirs, flags)
            self.seen = flags


def auto_plan(model: Any, users: Mapping[Any, list[Any]], ranks: int) -> dict[str, str]:
    """Return a plan: Dense layers with only elementwise functions between them are column and row.

    Others are column_gather; a layer with fewer outputs than ranks is cut by rows. Raises
    ValueError if there is no Dense layer.
    """
    styles: dict[str, str] = {}
    for layer in model.layers:
        if isinstance(layer, keras.layers.Dense) and layer.name not in styles:
            partner = next_dense(layer, users)
            if partner is not None and partner.name not in styles:
                styles |= {layer.name: "column", partner.name: "row"}
            else:
                styles[layer.name] = "column_gather" if layer.units >= ranks else "row"
    if not styles:
        raise ValueError(
            'plan="auto" found no Dense layer to cut: pass plan=None, or zero_stage=1 to 3, to '
            "cut over a data axis"
        )
    return styles


def match(plan: Mapping[str, str] | str, model: Any) -> dict[str, str]:
    """Return the plan by name of a Dense layer: name → style.

    An exact name counts for more than a pattern with `*`. Raises ValueError for names and styles
    that don't fit the model.
    """
    if not isinstance(plan, Mapping) or not plan:
        raise ValueError(
            f'plan={plan!r}: expected "auto", None or names of layers and their styles, such '
            f'as {{"dense": "column", "dense_1": "row"}}'
        )
    styles: dict[str, str] = {}
    for pattern in sorted(plan, key=lambda name: "*" not in name):
        if plan[pattern] not in STYLES:
            raise ValueError(
                f"plan: {pattern!r} has the style {plan[pattern]!r}: expected one of "
                f"{', '.join(map(repr, STYLES))}"
            )
        names = names_of(pattern, [layer.name for layer in model.layers], "layer")
        found = [layer for layer in model.layers if layer.name in names]
        dense = [layer for layer in found if isinstance(layer, keras.layers.Dense)]
        if not dense or (len(dense) < len(found) and "*" not in pattern):
            raise ValueError(
                f"plan: {pattern!r} is a {type(found[0]).__name__}: only Dense layers can be cut"
            )
        styles |= {layer.name: plan[pattern] for layer in dense}
    return styles


def check_plan(model: Any, users: Mapping[Any, list[Any]], styles: Mapping[str, str]) -> set[Any]:
    """Return the row layers whose inputs come cut from a column layer.

    Raises ValueError if a cut output goes elsewhere.
    """
    cut = set()
    for layer in model.layers:
        if layer.name not in styles:
            continue
        if layer.quantization_mode is not None or layer.lora_enabled:
            raise ValueError(
                f"{layer.name!r} is quantized or has LoRA weights: only plain Dense layers can "
                "be cut"
            )
        if styles[layer.name] == "column":
            partner = next_dense(layer, users)
            if partner is None or styles.get(partner.name) != "row":
                readers = ["the loss" if user is None else repr(user.name) for user in users[layer]]
                function = getattr(layer.activation, "__name__", layer.activation)
                raise ValueError(
                    f'plan: the outputs of {layer.name!r} stay cut ("column"). They go through its '
                    f"activation {function!r} to {' and '.join(readers)}, and only elementwise "
                    'functions and one Dense layer that is "row" can take them: make the next one '
                    '"row", or this one "column_gather"'
                )
            cut.add(partner)
    return cut


def next_dense(layer: Any, users: Mapping[Any, list[Any]]) -> Any:
    """Return the only Dense that reads this one's outputs, or None.

    Elementwise functions may come between the two.
    """
    if not elementwise(layer.activation) or len(layer._inbound_nodes) != 1:
        return None
    while len(users[layer]) == 1:
        (layer,) = users[layer]
        if isinstance(layer, keras.layers.Dense):
            return layer if len(layer._inbound_nodes) == 1 else None
        if not isinstance(layer, ELEMENTWISE_LAYERS) and not (
            isinstance(layer, keras.layers.Activation) and elementwise(layer.activation)
        ):
            return None
    return None


def elementwise(activation: Any) -> bool:
    """Try an activation: return whether columns of its inputs alone give these columns."""
    x = torch.linspace(-4, 4, 24).view(4, 6)
    try:
        whole, *parts = [activation(columns) for columns in (x, x[:, :2], x[:, 2:])]
        return torch.allclose(whole, torch.cat(parts, dim=1), rtol=1e-4, atol=1e-6)
    except Exception:
        return False  # it takes only some shapes


def users_of(model: Any) -> dict[Any, list[Any]]:
    """Return, for each layer, the layers that read its outputs, once per use.

    A reader of None means that an output is an output of the model.
    """
    graph = graph_of(model)
    nodes = [node for depth in graph._nodes_by_depth.values() for node in depth]
    users: dict[Any, list[Any]] = {node.operation: [] for node in nodes}
    for node in nodes:
        for parent in node.parent_nodes:
            users[parent.operation].append(node.operation)
    for tensor in graph.outputs:
        users[tensor._keras_history.operation].append(None)
    return users


def graph_of(model: Any) -> Any:
    """Return the functional model that has the graph: a keras.Sequential keeps one inside."""
    return getattr(model, "_functional", None) or model
