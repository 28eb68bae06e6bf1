"""Keras models, data and layouts that several tests use, and how they compare several ranks
with one process.
"""

from __future__ import annotations

import os
from functools import partial

import torch

import parallel101 as p101

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
TENSOR = {"tensor": {}}
FEW = {name: LINES[name] for name in ("tensor", "ZeRO-3")}


def classifier(keras):
    return sequential(keras, *((16, "relu"), (8, "relu"), (5, "softmax")))


def sequential(keras, *layers):
    """A model of 6 inputs; (n, activation) is a Dense layer."""
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    layers = [dense(*of[:1], activation=of[1]) if isinstance(of, tuple) else of for of in layers]
    return keras.Sequential([keras.Input((6,)), *layers])


DRAWN = torch.Generator().manual_seed(1)
X = torch.randn(17, 6, generator=DRAWN, dtype=torch.float64).numpy()
Y = torch.eye(5, dtype=torch.float64)[torch.randint(5, (17,), generator=DRAWN)].numpy()


# ── programs: what users write, in one process and on several ranks ──


def weights_of(model):
    return {f"weight {i}": torch.from_numpy(w).double() for i, w in enumerate(model.get_weights())}


def fitted(model, x=X, y=Y, **options):
    """Each epoch's losses and metrics, and the weights, after batches of 8, 8 and 1 samples.

    In the last one, most ranks have none.
    """
    options = {"epochs": 2, "batch_size": 8, "verbose": 0, "shuffle": False} | options
    history = model.fit(x, y, **options).history
    found = {name: torch.tensor(values).double() for name, values in history.items()}
    return found | weights_of(model)


def against_one_process(programs):
    """(program, layout) → what differs.

    A program is how it builds its model, how it uses it, and its layouts by name. `use(model,
    keras, wrap)` returns named tensors; `wrap` is ParallelKeras, or nothing in one process.
    """
    keras, wrong = in_float64(), {}
    for name, (build, use, layouts) in programs.items():
        wraps = {w: partial(p101.keras.ParallelKeras, **layout) for w, layout in layouts.items()}
        found = {}
        for where, wrap in {"one process": same, **wraps}.items():
            keras.utils.set_random_seed(0)
            found[where] = use(build(keras), keras, wrap)
        wrong |= {(name, w): differences(found["one process"], found[w]) for w in layouts}
    return {case: of_case for case, of_case in wrong.items() if of_case}


def same(model):
    return model


def fit(optimizer=lambda keras: "adam", more=lambda keras: {}):
    def use(model, keras, wrap):
        model, options = wrap(model), more(keras)
        model.compile(optimizer(keras), "categorical_crossentropy", metrics=["accuracy"])
        alone = not isinstance(model, p101.keras.ParallelKeras)
        if options.get("shuffle"):  # each rank would shuffle as it likes
            torch.manual_seed(0 if alone else torch.distributed.get_rank())
        found = fitted(model, **options)
        return found | {"predictions": torch.from_numpy(model.predict(X, batch_size=8, verbose=0))}

    return use
