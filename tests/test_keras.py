"""Keras models on torch's backend: our trainers train them unchanged, and `p101.keras.ParallelKeras` is a Keras model on several ranks."""

from __future__ import annotations

import os

import pytest
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


# ── ParallelKeras ──

OPTIMIZERS = {
    "sgd, momentum": lambda k: k.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda k: k.optimizers.Adam(0.01),
    "adamw, clipnorm": lambda k: k.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.05),
    "sgd, global_clipnorm": lambda k: k.optimizers.SGD(0.1, global_clipnorm=0.1),
    "adam, accumulation, average": lambda k: k.optimizers.Adam(0.01, gradient_accumulation_steps=2, use_ema=True, ema_momentum=0.5),
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
    model = keras.Sequential([keras.Input((6,)), *(keras.layers.Dense(n, activation=f) for n, f in widths)])
    return model


def samples(keras, n=17):
    random = torch.Generator().manual_seed(1)
    x, labels = torch.randn(n, 6, generator=random, dtype=torch.float64).numpy(), torch.randint(5, (n,), generator=random).numpy()
    return x, keras.utils.to_categorical(labels, 5).astype("float64")


def fitted(keras, model, optimizer, **options):
    """Two epochs of three batches, the last of which has one sample: losses, metrics, weights and predictions."""
    model.compile(OPTIMIZERS[optimizer](keras), loss="categorical_crossentropy", metrics=["accuracy"])
    x, y = samples(keras)
    history = model.fit(x, y, **{"epochs": 2, "batch_size": 8, "verbose": 0, "shuffle": False, **options}).history
    numbers = {name: torch.tensor(values, dtype=torch.float64) for name, values in history.items()}
    predictions = {"predictions": torch.from_numpy(model.predict(x, batch_size=8, verbose=0))}
    return numbers | predictions | {f"weight {i}": torch.from_numpy(w) for i, w in enumerate(model.get_weights())}


def equal_one_process(layouts):
    """Every layout with every optimizer, on every rank. Returns what differs, and the numbers that each layout leaves on this rank."""
    keras, wrong, held = in_float64(), {}, {}
    for optimizer in OPTIMIZERS:
        one = fitted(keras, classifier(keras), optimizer)
        for name, layout in layouts.items():
            model = p101.keras.ParallelKeras(classifier(keras), **layout)
            if found := differences(one, fitted(keras, model, optimizer)):
                wrong[optimizer, name] = found
            held[name] = sum(v.numpy().size for v in model.trainable_variables)
    return wrong, held


def on_a_mesh():
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return equal_one_process({f"mesh, zero_stage={zero}": {"mesh": mesh, "zero_stage": zero} for zero in (0, 1, 2, 3)})


@pytest.mark.slow
def test_parallel_keras_equals_one_process():
    results = p101.launch(equal_one_process, LINES, world_size=3, backend="sim", timeout=150).results
    assert [wrong for wrong, _ in results] == [{}] * 3
    assert [held["ZeRO-3"] for _, held in results] == [99, 99, 95] and [held["data"] for _, held in results] == [293] * 3
    assert max(held["tensor"] for _, held in results) < 293 / 3 * 1.2


@pytest.mark.slow
def test_parallel_keras_on_a_mesh_equals_one_process():
    results = p101.launch(on_a_mesh, world_size=4, backend="sim", timeout=150).results
    assert [wrong for wrong, _ in results] == [{}] * 4
