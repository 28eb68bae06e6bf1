"""Checks that refuse models and optimizers with which several ranks don't equal one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import keras
import torch

# methods of a keras.Model: ParallelKeras has its own, or calls Keras's on itself
OURS = (
    "train_step", "test_step", "predict_step", "compute_loss", "compute_metrics", "metrics",
    "reset_metrics", "get_metrics_result", "compile", "fit", "evaluate", "predict",
    "train_on_batch", "test_on_batch", "predict_on_batch", "make_train_function",
    "make_test_function", "make_predict_function",
)  # fmt: skip

MIXES = "computes a sample's output from other samples too"
SHARE = ", and each rank has only a share of them"


def check_methods(model: Any, names: Sequence[str] = OURS) -> None:
    """Raise ValueError if the model has its own version of one of these methods.

    ParallelKeras would not call it.
    """
    for name in names:
        owner = next(kind for kind in type(model).__mro__ if name in vars(kind))
        if name in vars(model) or not owner.__module__.startswith("keras."):
            who = model.name if name in vars(model) else owner.__name__
            raise ValueError(
                f"{who!r} has its own {name}, which ParallelKeras would not call: expected "
                "keras.Model's. Put what it does into layers, "
                "the loss or the metrics, or train in one process"
            )


def check_model(model: Any, samples_are_cut: bool) -> None:
    """Raise ValueError for layers with which several ranks do not equal one process."""
    for layer in leaves(model):
        counts = (layer.trainable and layer.non_trainable_weights) or layer.metrics
        wrong = {
            " has an activity_regularizer: on several ranks it would count several times; remove "
            "it": getattr(layer, "activity_regularizer", None) is not None,
            " has a constraint: a rank would apply it to its shard, not to the whole weight; "
            "remove it": any(v.constraint is not None for v in layer.trainable_variables),
            f" ({type(layer).__name__}) keeps numbers that change with each batch, and each rank "
            "sees a share of it: leave it out, set its trainable=False if they are fixed, or use "
            "a tensor axis, on which every rank sees the whole batch": samples_are_cut and counts,
        }
        for text in filter(wrong.get, wrong):
            raise ValueError(f"{layer.name!r}{text}")


def leaves(model: Any) -> Iterator[Any]:
    """Yield the layers, those of models inside the model too."""
    for layer in model.layers:
        yield from leaves(layer) if isinstance(layer, keras.Model) else [layer]


def check_regularizer(regularizer: Any, path: str) -> None:
    """Try a regularizer: raise ValueError unless a weight's penalty is the sum of its shards'."""
    whole = torch.linspace(-1, 1, 24).view(4, 6)
    try:
        parts = sum(float(regularizer(part)) for part in whole.reshape(-1).split(9))
        adds = math.isclose(parts, float(regularizer(whole)), rel_tol=1e-4)
    except Exception:
        adds = False  # it takes only some shapes
    if not adds:
        raise ValueError(
            f"{path!r} has a {type(regularizer).__name__}, which looks at the whole weight, "
            "and a rank has a shard of it: "
            "expected one that sums over elements, such as L1 or L2, or zero_stage=0 and "
            "plan=None, with which weights stay whole"
        )


def check_optimizer(optimizer: Any) -> None:
    """Try an optimizer: raise ValueError unless it updates each element on its own.

    Only such an optimizer updates shards as it does the whole.
    """
    hint = "expected one that updates each element on its own, such as SGD, Adam or AdamW"
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "a LossScaleOptimizer (float16) skips steps by what this rank's shards are: "
            f"{hint}; use mixed_bfloat16"
        )
    if getattr(optimizer, "_exclude_from_weight_decay", None):
        raise ValueError(
            "exclude_from_weight_decay(var_list=…) names the model's weights, not their "
            "shards: use var_names="
        )
    start = torch.linspace(-1, 1, 24).view(4, 6)
    steps = torch.linspace(0.2, 3, 72).sin().view(3, 4, 6)
    names = "clipnorm", "global_clipnorm", "clipvalue", "loss_scale_factor"
    plain = dict.fromkeys([*names, "gradient_accumulation_steps"])

    def updated(cut: Any) -> torch.Tensor:
        copy = type(optimizer).from_config({**optimizer.get_config(), **plain})
        variables = [keras.Variable(part.clone(), dtype="float32") for part in cut(start)]
        for gradient in steps:
            copy.apply(list(cut(gradient)), variables)
        return torch.cat([v.value.detach().reshape(-1) for v in variables])

    whole, in_pieces = updated(lambda t: [t]), updated(lambda t: t.reshape(-1).split(9))
    if not torch.allclose(whole, in_pieces, rtol=1e-4, atol=1e-6):
        raise ValueError(
            f"{type(optimizer).__name__} looks at whole matrices or their norms, and a rank "
            f"has shards of them: {hint}"
        )


def check_samples(model: Any, x: Any, run: Callable[[Any, bool], Any]) -> str:
    """Return what is wrong, in words, if a sample's outputs depend on other samples; else "".

    Collective. A layer that adds a loss is wrong too. Up to five samples of x are computed together
    and in two halves: each layer by itself, in training unless it draws random numbers there, and
    the whole model. This changes no variable and no random number.

    Args:
        model: the model.
        x: inputs of the model, two samples or more.
        run: (inputs, training) → outputs.
    """
    total = len(keras.tree.flatten(x)[0])
    count = min(total, 5)
    some = keras.tree.map_structure(
        lambda t: keras.ops.convert_to_tensor(t[[i * total // count for i in range(count)]]), x
    )
    device = model.variables[0].value.device
    problem = ""

    def halves(inputs: Any) -> list[Any]:
        def half(part: slice, t: Any) -> Any:
            of_samples = isinstance(t, torch.Tensor) and t.shape[:1] == (count,)
            return t[part] if of_samples else t

        parts = slice(count // 2), slice(count // 2, None)
        return [keras.tree.map_structure(partial(half, part), inputs) for part in parts]

    def look(layer: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        nonlocal problem
        named = f"{layer.name!r} ({type(layer).__name__})"
        if problem or scope.losses:
            added = f"{named} adds a loss with add_loss, and each rank would add that of its share"
            problem = problem or added
        elif not apart(outputs, [layer.forward(*args, **kwargs)]):  # no random numbers
            try:
                parts = [layer.forward(*some, **more) for some, more in halves((args, kwargs))]
            except Exception:
                return  # not all of its inputs have a row for each sample
            if apart(outputs, parts):
                problem = f"{named} {MIXES}{SHARE}"

    with (
        torch.no_grad(),
        keras.StatelessScope(collect_losses=True) as scope,
        torch.random.fork_rng([device] if device.type == "cuda" else []),
    ):
        hooks = [layer.register_forward_hook(look, with_kwargs=True) for layer in leaves(model)]
        try:
            run(some, True)
            whole = run(some, False)
        finally:
            for hook in hooks:
                hook.remove()
        if not problem and apart(whole, [run(part, False) for part in halves(some)]):
            problem = f"{model.name!r} {MIXES}, between its layers{SHARE}"
    advice = "leave it out, or use a tensor axis, on which every rank sees the whole batch"
    return problem and f"{problem}: {advice}"


def apart(whole: Any, parts: list[Any]) -> bool:
    """Return whether the parts differ from the whole.

    They don't if they are the whole when joined, or if each is equal to it, as a tensor is that
    does not depend on the samples.
    """

    def near(a: torch.Tensor, b: torch.Tensor) -> bool:
        part = max(1e-2, 10 * torch.finfo(a.dtype).eps)
        atol = part * float(a.abs().max()) if a.numel() else 0
        return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=atol, equal_nan=True)

    for one, *others in zip(*map(keras.tree.flatten, [whole, *parts])):
        if isinstance(one, torch.Tensor) and one.is_floating_point():
            like = one.ndim and all(other.shape[1:] == one.shape[1:] for other in others)
            equal = all(near(one, other) for other in others)
            if not equal and not (like and near(one, torch.cat(others))):
                return True
    return False
