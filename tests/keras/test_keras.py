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
from tests.keras.cases import LINES, classifier, differences, in_float64, samples

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


# ── ParallelKeras ──

OPTIMIZERS = {
    "sgd, momentum": lambda k: k.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda k: k.optimizers.Adam(0.01),
    "adamw, clipnorm": lambda k: k.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.05),
    "sgd, global_clipnorm": lambda k: k.optimizers.SGD(0.1, global_clipnorm=0.1),
    "adam, accumulation, average": lambda k: k.optimizers.Adam(
        0.01, gradient_accumulation_steps=2, use_ema=True, ema_momentum=0.5
    ),
}


def fitted(keras, model, optimizer):
    """Two epochs of three batches, the last of which has one sample: losses, metrics, weights
    and predictions.
    """
    loss = "categorical_crossentropy"
    model.compile(OPTIMIZERS[optimizer](keras), loss=loss, metrics=["accuracy"])
    x, y = samples(keras)
    history = model.fit(x, y, epochs=2, batch_size=8, verbose=0, shuffle=False).history
    found = {name: torch.tensor(values, dtype=torch.float64) for name, values in history.items()}
    found["predictions"] = torch.from_numpy(model.predict(x, batch_size=8, verbose=0))
    return found | {f"weight {i}": torch.from_numpy(w) for i, w in enumerate(model.get_weights())}


def equal_one_process(cases):
    """Of (layout's name, layout, optimizer): what differs on this rank, and how many numbers the
    rank holds in each layout.
    """
    keras, wrong, held, one = in_float64(), {}, {}, {}
    for name, layout, optimizer in cases:
        if optimizer not in one:
            one[optimizer] = fitted(keras, classifier(keras), optimizer)
        model = p101.keras.ParallelKeras(classifier(keras), **layout)
        if found := differences(one[optimizer], fitted(keras, model, optimizer)):
            wrong[optimizer, name] = found
        held[name] = sum(v.numpy().size for v in model.trainable_variables)
    return wrong, held


ON_A_LINE = [  # each optimizer with two layouts, and each layout with two optimizers
    (name, layout, list(OPTIMIZERS)[(i + more) % 5])
    for i, (name, layout) in enumerate(LINES.items())
    for more in (1, 2)
]


def on_a_mesh():
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    optimizers = "adamw, clipnorm", "sgd, global_clipnorm", "adam, accumulation, average"
    stages = zip((0, 1, 2, 3), (*optimizers, optimizers[0]))
    return equal_one_process(
        [(f"zero_stage={zero}", {"mesh": mesh, "zero_stage": zero}, name) for zero, name in stages]
    )


@pytest.mark.slow
def test_parallel_keras_equals_one_process():
    """Three ranks share batches of 8, 8 and 1 samples: with the last, two ranks have none."""
    results = p101.launch(
        equal_one_process, ON_A_LINE, world_size=3, backend="sim", timeout=150
    ).results
    assert [wrong for wrong, _ in results] == [{}] * 3
    held = {name: [held[name] for _, held in results] for name in LINES}
    assert held["data"] == [293] * 3
    assert held["ZeRO-1"] == held["ZeRO-2"] == held["ZeRO-3"] == [99, 99, 95]
    assert held["tensor"] == [  # 16 columns, 16 rows and 5 columns
        6 * 6 + 6 + 6 * 8 + 8 + 8 * 2 + 2,
        5 * 6 + 5 + 5 * 8 + 8 + 8 * 2 + 2,
        5 * 6 + 5 + 5 * 8 + 8 + 8 + 1,
    ]


@pytest.mark.slow
def test_parallel_keras_on_a_mesh_equals_one_process():
    results = p101.launch(on_a_mesh, world_size=4, backend="sim", timeout=150).results
    assert [wrong for wrong, _ in results] == [{}] * 4


def callbacks(keras):
    stop = keras.callbacks.EarlyStopping(
        monitor="val_loss", mode="max", patience=0, restore_best_weights=True
    )
    return [stop, keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)]


def with_two_outputs(keras):
    """Branches, Dense layers that no other follows, layers that are not cut, and dropout, whose
    masks depend on a seed.
    """
    keras.utils.set_random_seed(0)
    x, layers = keras.Input((6,), name="x"), keras.layers
    y = layers.Dense(6, name="down")(layers.Dense(8, activation="gelu", name="up")(x))
    y = layers.Dropout(0.3)(layers.LayerNormalization()(y + x))
    z = layers.Dense(4)(layers.Activation("relu")(layers.Dense(8)(y)))
    labels = layers.Dense(5, activation="softmax", name="labels")(layers.Dense(4)(y) * z)
    return keras.Model(x, [labels, layers.Dense(1, name="height")(z)])


def normalized(keras):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    inner = [layers.Dense(8), layers.BatchNormalization(), layers.ReLU(), layers.Dense(5)]
    return keras.Sequential([keras.Input((6,)), *inner])


def used_as_keras(folder):
    """What differs between ParallelKeras and Keras in what users do with a model."""
    keras, rank, wrong = in_float64(), torch.distributed.get_rank(), {}
    x, y = samples(keras)
    plainly = {"epochs": 3, "batch_size": 8, "verbose": 0}

    def compare(name, build, use, **layout):
        one = use(build(keras), keras)
        many = use(p101.keras.ParallelKeras(build(keras), **layout), keras)
        one, many = (
            {k: torch.as_tensor(v, dtype=torch.float64) for k, v in found.items()}
            for found in (one, many)
        )
        if found := differences(one, many):
            wrong[name, str(layout)] = found

    def fit(seed=0, shuffle=False, **options):
        def use(model, keras):
            model.compile("adam", "categorical_crossentropy", metrics=["accuracy"])
            # else each rank shuffles as it likes
            torch.manual_seed(seed + (rank if isinstance(model, p101.keras.ParallelKeras) else 0))
            more = {"callbacks": callbacks(keras)} if "validation_data" in options else {}
            return model.fit(x, y, shuffle=shuffle, **plainly, **options, **more).history

        return use

    def two_outputs(model, keras):
        losses = {"labels": "categorical_crossentropy", "height": "mse"}
        model.compile("adam", losses, loss_weights={"labels": 1.0, "height": 0.3})
        targets = {"labels": y, "height": x[:, :1]}
        return model.fit({"x": x}, targets, shuffle=False, **plainly).history

    def saved(model, keras):
        fit()(model, keras)
        if isinstance(model, p101.keras.ParallelKeras):
            model.save(folder / "model.keras")
            model.save_weights(folder / "model.weights.h5")
            again = p101.keras.ParallelKeras(classifier(keras))
            again.load_weights(folder / "model.weights.h5")
            assert all((a == b).all() for a, b in zip(again.get_weights(), model.get_weights()))
            model.set_weights([2 * w for w in model.get_weights()])
            assert all((2 * a == b).all() for a, b in zip(again.get_weights(), model.get_weights()))
            model = keras.saving.load_model(folder / "model.keras")
        return model.fit(x, y, shuffle=False, **plainly).history

    weights = {i: float(i) for i in range(5)}
    compare("shuffled as on position 0", classifier, fit(7, True), zero_stage=3)
    compare("callbacks", classifier, fit(validation_data=(x[:5], y[:5])))
    compare("validation_split", classifier, fit(validation_split=0.3), zero_stage=1)
    compare("sample_weight", classifier, fit(sample_weight=abs(x[:, 0])), zero_stage=1)
    compare("class_weight", classifier, fit(class_weight=weights), zero_stage=1)
    compare("batch statistics of the whole batch", normalized, fit())
    compare("functional", with_two_outputs, two_outputs)
    name = with_two_outputs(keras).layers[1].name
    for plan in ({"*": "row"}, {"dense*": "column_gather"}, {name: "column_gather"}):
        compare("plan", with_two_outputs, two_outputs, plan=plan)
    for layout in {}, {"zero_stage": 3}:
        compare("saved", classifier, saved, **layout)
    return wrong


@pytest.mark.slow
def test_fit_callbacks_plans_and_saving_are_as_in_keras(tmp_path):
    results = p101.launch(used_as_keras, tmp_path, world_size=2, backend="sim", timeout=150).results
    assert results == [{}] * 2


# ── refused ──


def refused():
    """Name → the error, of what cannot equal one process."""
    keras, rank, errors = in_float64(), torch.distributed.get_rank(), {}
    layers, parallel = keras.layers, p101.keras.ParallelKeras

    def sequential(*more):
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((6,)), *more])

    def dense(**options):
        return layers.Dense(4, name="up", **options)

    def fit(optimizer):
        model = parallel(classifier(keras))
        model.compile(getattr(keras.optimizers, optimizer)(), "categorical_crossentropy")
        model.fit(*samples(keras), verbose=0)

    def plan(plan, **options):
        down = layers.Dense(4, name="down")
        parallel(sequential(dense(**options), layers.ReLU(name="act"), down), plan=plan)

    def on_a_pipeline():
        mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        parallel(classifier(keras), mesh=mesh)

    of_rank = keras.initializers.Constant(rank)
    norm = layers.BatchNormalization(name="norm")
    for name, work in {
        "no weights": lambda: parallel(keras.Sequential([layers.Dense(4)])),
        "models differ": lambda: parallel(sequential(dense(bias_initializer=of_rank))),
        "batches differ": lambda: parallel(classifier(keras)).predict(
            samples(keras)[0] + rank, verbose=0
        ),
        "constraint": lambda: parallel(sequential(dense(kernel_constraint="max_norm"))),
        "statistics": lambda: parallel(sequential(dense(), norm), zero_stage=1),
        "no Dense": lambda: parallel(sequential(layers.LayerNormalization())),
        "zero_stage": lambda: parallel(classifier(keras), zero_stage=4),
        "pipeline": on_a_pipeline,
        "Lamb": lambda: fit("Lamb"),
        "Muon": lambda: fit("Muon"),
        "Adafactor": lambda: fit("Adafactor"),
        "no match": lambda: plan({"nothing": "row"}),
        "style": lambda: plan({"up": "vocabulary"}),
        "not Dense": lambda: plan({"act": "row"}),
        "column column": lambda: plan({"*": "column"}),
        "softmax": lambda: plan({"up": "column"}, activation="softmax"),
    }.items():
        try:
            work()
        except (ValueError, TypeError) as error:
            errors[name] = str(error)
    return errors


WORDS = {
    "no weights": "has them once it begins with keras.input",
    "models differ": "set_random_seed(0) on every rank",
    "batches differ": "every rank passes the whole x and y",
    "constraint": "'up' has a constraint",
    "statistics": "'norm' (batchnormalization) keeps numbers",
    "no Dense": "no dense layer to cut",
    "zero_stage": "zero_stage=4: expected",
    "pipeline": 'has no pipeline ("pp")',
    "Lamb": "lamb looks at whole matrices",
    "Muon": "muon looks at whole matrices",
    "Adafactor": "adafactor looks at whole matrices",
    "no match": "'nothing' matches no layer",
    "style": "'up' has the style 'vocabulary': expected one of",
    "not Dense": "'act' is a relu",
    "column column": "'down', which reads them, is not \"row\"",
    "softmax": "its activation 'softmax' needs whole ones",
}


def test_what_cannot_equal_one_process_is_refused():
    first, second = p101.launch(refused, world_size=2, backend="sim", timeout=150).results
    assert first == second
    assert first.keys() == WORDS.keys()
    for name, words in WORDS.items():
        assert words in first[name].lower(), first[name]


# ── the example of the gradient-sharding design ──


def example(parallel, **layout):
    import keras
    import numpy as np

    keras.utils.set_random_seed(0)
    sizes = {128: "relu", 64: "relu", 10: "softmax"}
    layers = [keras.layers.Dense(n, activation=function) for n, function in sizes.items()]
    model = keras.Sequential([keras.Input((64,)), *layers])
    if parallel:
        model = p101.keras.ParallelKeras(model, **layout)
    model.compile(optimizer="adam", loss="categorical_crossentropy", metrics=["accuracy"])
    random = np.random.default_rng(0)
    x_train = random.normal(size=(96, 64)).astype("float32")
    y_train = np.eye(10, dtype="float32")[random.integers(0, 10, 96)]
    history = model.fit(x_train, y_train, epochs=3, verbose=0).history
    if not parallel:
        return history, model.get_weights()
    told = model.get_parallelism_info(), model.get_gradient_sharding_info()
    numbers = sum(v.numpy().size for v in model.trainable_variables)
    return history, model.get_weights(), *told, numbers


def examples():
    p101.barrier()
    return example(False), example(True), example(True, zero_stage=2)


@pytest.mark.slow
def test_the_designs_example_runs_on_real_ranks():
    import numpy as np

    run = p101.launch(examples, world_size=2, trace=True, timeout=120)
    for (history, weights), *parallel in run.results:
        for number, (found, whole, info, sharding, held) in enumerate(parallel):
            assert info["world_size"] == 2
            assert sharding["enabled"] and sharding["parameter_shards"] == (5, 6)[number]
            # of 17,226; the bias of a row layer is whole on both
            assert held == (8645, 8613)[number]
            for name in history:
                np.testing.assert_allclose(found[name], history[name], rtol=1e-6)
            for one, many in zip(weights, whole):
                np.testing.assert_allclose(many, one, atol=1e-6)


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
        runpy.run_path(str(Path(p101.__file__).parent / "keras" / "installed.py"))
