"""What a Keras model or optimizer must not have, so that several ranks equal one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from parallel101.keras.installed import keras


def check_model(model: Any, samples_are_cut: bool) -> None:
    """Raises ValueError for layers with which several ranks do not equal one process."""
    if model.losses:
        raise ValueError("the model adds losses (a regularizer or add_loss): on several ranks they would count several times; remove them")
    for layer in leaves(model):
        if getattr(layer, "activity_regularizer", None) is not None:
            raise ValueError(f"{layer.name!r} has an activity_regularizer: on several ranks it would count several times; remove it")
        if any(v.constraint is not None for v in layer.trainable_variables):
            raise ValueError(f"{layer.name!r} has a constraint: a rank would apply it to its shard, not to the whole weight; remove it")
        if samples_are_cut and (isinstance(layer, keras.layers.Masking) or getattr(layer, "mask_zero", False)):
            raise ValueError(f"{layer.name!r} makes a mask, which is lost when samples are cut: use a tensor axis, or sample_weight")
        if samples_are_cut and layer.trainable and layer.non_trainable_variables:
            raise ValueError(
                f"{layer.name!r} ({type(layer).__name__}) keeps numbers that change with each batch, and each rank sees a share of it: "
                "leave it out, set its trainable=False if they are fixed, or use a tensor axis, on which every rank sees the whole batch"
            )


def leaves(model: Any) -> Iterator[Any]:
    """The layers, those of models inside the model too."""
    for layer in model.layers:
        yield from leaves(layer) if isinstance(layer, keras.Model) else [layer]


def check_optimizer(optimizer: Any) -> None:
    """Raises ValueError unless it updates each element on its own, so that shards are updated as the whole is. It is tried."""
    hint = "expected one that updates each element on its own, such as SGD, Adam or AdamW"
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(f"a LossScaleOptimizer (float16) skips steps by what this rank's shards are: {hint}; use mixed_bfloat16")
    if getattr(optimizer, "_exclude_from_weight_decay", None):
        raise ValueError("exclude_from_weight_decay(var_list=…) names the model's weights, not their shards: use var_names=")
    start, steps = torch.linspace(-1, 1, 24).view(4, 6), torch.linspace(0.2, 3, 72).sin().view(3, 4, 6)
    plain = dict.fromkeys(["clipnorm", "global_clipnorm", "clipvalue", "gradient_accumulation_steps", "loss_scale_factor"])

    def updated(cut: Any) -> torch.Tensor:
        copy = type(optimizer).from_config({**optimizer.get_config(), **plain})
        variables = [keras.Variable(part.clone(), dtype="float32", name=f"part_{i}") for i, part in enumerate(cut(start))]
        for gradient in steps:
            copy.apply(list(cut(gradient)), variables)
        return torch.cat([v.value.detach().reshape(-1) for v in variables])

    whole, in_pieces = updated(lambda t: [t]), updated(lambda t: t.reshape(-1).split(9))
    if not torch.allclose(whole, in_pieces, rtol=1e-4, atol=1e-6):
        raise ValueError(f"{type(optimizer).__name__} looks at whole matrices or their norms, and a rank has shards of them: {hint}")
