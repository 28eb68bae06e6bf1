"""Keras models, data and layouts that several tests use, and how they compare several ranks
with one process.
"""

from __future__ import annotations

import os

import torch

os.environ["KERAS_BACKEND"] = "torch"  # before keras is imported, here and on the ranks

CLOSE = 1e-10


def in_float64():
    """Keras with weights and arithmetic in float64.

    By itself it computes in float32 even then; see the table below.
    """
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
    return {
        name: (one[name], many[name])
        for name in one
        if not torch.allclose(one[name], many[name], rtol=CLOSE, atol=CLOSE)
    }


LINES = {  # on a line of ranks
    "tensor": {},
    "data": {"plan": None},
    "ZeRO-1": {"zero_stage": 1},
    "ZeRO-2": {"zero_stage": 2},
    "ZeRO-3": {"zero_stage": 3},
}


def classifier(keras):
    keras.utils.set_random_seed(0)
    widths = [(16, "relu"), (8, "relu"), (5, "softmax")]
    model = keras.Sequential(
        [keras.Input((6,)), *(keras.layers.Dense(n, activation=f) for n, f in widths)]
    )
    return model


def samples(keras, n=17):
    random = torch.Generator().manual_seed(1)
    x, labels = (
        torch.randn(n, 6, generator=random, dtype=torch.float64).numpy(),
        torch.randint(5, (n,), generator=random).numpy(),
    )
    return x, keras.utils.to_categorical(labels, 5).astype("float64")
