"""Keras models on torch's backend: our trainers train them unchanged, and
`p101.keras.ParallelKeras` is a Keras model on several ranks.
"""

from __future__ import annotations

import builtins
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import parallel101 as p101
from tests.keras.cases import LINES, against_one_process, classifier, differences, fit, in_float64

# ── our own trainers ──


def dense(keras):
    layers = [keras.layers.Dense(8, activation="relu"), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((6,)), *layers]), (6,)


def convolution(keras):
    layers = keras.layers
    inner = [layers.Conv2D(4, 3, activation="relu"), layers.Flatten(), layers.Dense(3)]
    return keras.Sequential([keras.Input((5, 5, 2)), *inner]), (5, 5, 2)


def one_in_another(keras):
    x = keras.Input((6,))
    inner = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6)])
    return keras.Model(x, keras.layers.Dense(3)(inner(inner(x) + x))), (6,)


def trained_by_zero_3():
    """Model → (the line in which `describe` tells its layers, losses and weights) after five
    steps.
    """
    keras, results = in_float64(), {}
    for build in dense, convolution, one_in_another:
        model, shape = build(keras)
        trainer = p101.ShardedTrainer(
            model, F.mse_loss, lambda p: torch.optim.AdamW(p, lr=1e-2), zero_stage=3, clip_norm=0.5
        )
        random = torch.Generator().manual_seed(0)
        batch = [
            torch.randn(11, *more, generator=random, dtype=torch.float64) for more in (shape, (3,))
        ]
        losses = torch.tensor([trainer.step(*trainer.share(batch)) for _ in range(5)])
        (told,) = (line for line in trainer.describe().notes if "ZeRO stage 3" in line)
        results[build.__name__] = told, {"loss": losses, **trainer.state_dict()}
    return results


def test_zero_3_gathers_the_layers_of_a_keras_model():
    """torch does not see them, and a keras.Sequential never calls the functional model inside
    it as a module.
    """
    # in a new thread, Keras's names start again
    (one,) = p101.launch(trained_by_zero_3, world_size=1, backend="sim").results
    for rank in p101.launch(trained_by_zero_3, world_size=3, backend="sim").results:
        for name, (told, state) in rank.items():
            assert "in 2 layers" in told
            assert not differences(one[name][1], state), name


# ── ParallelKeras on processes of their own ──


def trained_by_parallel_keras():
    """What differs from one process, and what the model tells of each layout."""
    layouts = {name: LINES[name] for name in ("tensor", "ZeRO-2")}
    wrong, told = against_one_process({"fit": (classifier, fit(), layouts)}), {}
    for name, layout in LINES.items():
        model = p101.keras.ParallelKeras(classifier(in_float64()), **layout)
        sharding, axes = model.get_gradient_sharding_info(), model.get_parallelism_info()["axes"]
        held = sum(v.numpy().size for v in model.trainable_variables)
        told[name] = (axes, sharding["enabled"], sharding["parameter_shards"], held)
    return wrong, told


@pytest.mark.slow
def test_parallel_keras_runs_on_real_ranks():
    run = p101.launch(trained_by_parallel_keras, world_size=2, trace=True, timeout=120)
    for rank, (wrong, told) in enumerate(run.results):
        assert not wrong
        # of 293 numbers; the bias of a row layer is whole on both
        assert told["tensor"] == ({"dp": 1, "tp": 2}, True, 5, (155, 146)[rank])
        assert told["data"] == ({"dp": 2, "tp": 1}, False, 0, 293)
        for stage in ("ZeRO-1", "ZeRO-2", "ZeRO-3"):
            assert told[stage] == ({"dp": 2, "tp": 1}, True, 6, (147, 146)[rank])


# ── Keras itself ──

OTHER_BACKEND = SimpleNamespace(config=SimpleNamespace(backend=lambda: "jax"))


@pytest.mark.parametrize(
    ("keras", "words"),
    [
        (ModuleNotFoundError(name="keras"), r'pip install "parallel101\[keras\]"'),
        (ModuleNotFoundError(name="tensorflow"), "KERAS_BACKEND=torch before keras is imported"),
        (OTHER_BACKEND, "the backend 'jax'.*KERAS_BACKEND=torch before keras is imported"),
    ],
    ids=["not installed", "without its backend", "another backend"],
)
def test_keras_with_torch_is_needed(keras, words, monkeypatch):
    def imported(name, *more):
        if name != "keras":
            return load(name, *more)
        if isinstance(keras, Exception):
            raise keras
        return keras

    load = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", imported)
    with pytest.raises(ImportError, match=words):
        runpy.run_path(str(Path(p101.__file__).parent / "keras" / "__init__.py"))
