"""Keras models on torch's backend: our trainers train them unchanged, and `p101.keras.ParallelKeras` is a Keras model on several ranks."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F

import parallel101 as p101

os.environ["KERAS_BACKEND"] = "torch"  # before keras is imported, here and on the ranks

CLOSE = 1e-10


def in_float64():
    """Keras with weights and arithmetic in float64. By itself it computes in float32 even then; see the table below."""
    import keras
    from keras.src.backend.common import dtypes

    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.utils.set_random_seed(0)
    return keras


def differences(one, many):
    """The names of what is not equal, with both values."""
    assert one.keys() == many.keys()
    return {name: (one[name], many[name]) for name in one if not torch.allclose(one[name], many[name], rtol=CLOSE, atol=CLOSE)}


# ── our own trainers ──


def dense(keras):
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(3)]), (6,)


def convolution(keras):
    layers = [keras.layers.Conv2D(4, 3, activation="relu"), keras.layers.Flatten(), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((5, 5, 2)), *layers]), (5, 5, 2)


def one_in_another(keras):
    x = keras.Input((6,))
    inner = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6)])
    return keras.Model(x, keras.layers.Dense(3)(inner(inner(x) + x))), (6,)


def trained_by_zero_3():
    """Model → (its layers, losses, weights) after five steps."""
    keras, results = in_float64(), {}
    for build in dense, convolution, one_in_another:
        model, shape = build(keras)
        trainer = p101.ShardedTrainer(model, F.mse_loss, lambda p: torch.optim.AdamW(p, lr=1e-2), zero_stage=3, clip_norm=0.5)
        random = torch.Generator().manual_seed(0)
        batch = [torch.randn(11, *more, generator=random, dtype=torch.float64) for more in (shape, (3,))]
        losses = torch.tensor([trainer.step(*trainer.share(batch)) for _ in range(5)])
        layers = [layer.name for layer in trainer.gradient_sync.layers]
        results[build.__name__] = layers, {"loss": losses, **trainer.state_dict()}
    return results


def test_zero_3_gathers_the_layers_of_a_keras_model():
    """torch does not see them, and a keras.Sequential never calls the functional model inside it as a module."""
    (one,) = p101.launch(trained_by_zero_3, world_size=1, backend="sim").results  # in a new thread, Keras's names start again
    assert [layers for layers, _ in one.values()] == [["dense", "dense_1"], ["conv2d", "dense_2"], ["sequential_2.dense_3", "dense_4"]]
    for rank in p101.launch(trained_by_zero_3, world_size=3, backend="sim").results:
        for name, (layers, state) in rank.items():
            assert layers == one[name][0]
            assert not differences(one[name][1], state), name
