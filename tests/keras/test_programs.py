"""What users write in Keras programs, on several ranks and in one process: the same losses,
metrics and weights, or a clear error.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

import parallel101 as p101
from tests.keras.cases import LINES, classifier, differences, in_float64, samples

FEW = {name: LINES[name] for name in ("tensor", "ZeRO-3")}


def numbers(history, model):
    """Of a fit: each epoch's losses and metrics, and the weights after it."""
    found = {
        name: torch.tensor(values, dtype=torch.float64) for name, values in history.history.items()
    }
    return found | {
        f"weight {i}": torch.from_numpy(w).double() for i, w in enumerate(model.get_weights())
    }


def against_one_process(build, use, layouts=FEW):
    """Layout → what differs.

    `use(model, keras, wrap)` returns named tensors; `wrap` is ParallelKeras, or nothing in one
    process.
    """
    keras, wrong = in_float64(), {}
    one = use(build(keras), keras, lambda model: model)
    for name, layout in layouts.items():
        wrap = partial(p101.keras.ParallelKeras, **layout)
        many = use(build(keras), keras, wrap)
        if found := differences(one, many):
            wrong[name] = found
    return wrong


def on_two_ranks(build, use, layouts=FEW):
    where = {"world_size": 2, "backend": "sim", "timeout": 150}
    return p101.launch(against_one_process, build, use, layouts, **where).results


def fit(model, keras, wrap):
    """The last batch has one sample, so that one rank has none."""
    model = wrap(model)
    model.compile("adam", "categorical_crossentropy", metrics=["accuracy"])
    x, y = samples(keras)
    history = model.fit(
        x, y, epochs=2, batch_size=8, verbose=0, shuffle=False, validation_data=(x[:5], y[:5])
    )
    return numbers(history, model)


# ── regularizers ──


def regularized(keras):
    keras.utils.set_random_seed(0)
    dense, penalties = keras.layers.Dense, keras.regularizers
    l1, both = penalties.L1(0.02), penalties.L1L2(0.01, 0.03)
    layers = [
        dense(7, activation="relu", kernel_regularizer="l2", bias_regularizer=l1),
        dense(8, activation="relu", kernel_regularizer=both, bias_regularizer="l2"),
        keras.layers.LayerNormalization(gamma_regularizer="l1"),
        dense(5, activation="softmax", kernel_regularizer="l2"),
        dense(5, kernel_regularizer="l2", trainable=False),
    ]
    return keras.Sequential([keras.Input((6,)), *layers])


def test_penalties_of_regularizers_count_once():
    assert on_two_ranks(regularized, fit, LINES) == [{}] * 2


def on_a_mesh():
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    programs = (regularized, fit, 3), (masked, fit_sequences, 1), (trained, go_on, 3)
    return [
        against_one_process(build, use, {f"{stage=}": {"mesh": mesh, "zero_stage": stage}})
        for build, use, stage in programs
    ]


@pytest.mark.slow
def test_regularizers_masks_and_optimizers_that_go_on_work_on_a_mesh():
    run = p101.launch(on_a_mesh, world_size=4, backend="sim", timeout=150)
    assert run.results == [[{}] * 3] * 4


def orthogonal(keras):
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense(5, kernel_regularizer=keras.regularizers.OrthogonalRegularizer(0.1))
    return keras.Sequential([keras.Input((6,)), dense])


def test_a_regularizer_of_whole_matrices_works_where_weights_are_whole():
    assert on_two_ranks(orthogonal, fit, {"data": {"plan": None}}) == [{}] * 2


# ── masks and recurrent layers, which keep a seed for their dropout ──


def masked(keras):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    x = keras.Input((5,), dtype="int32")
    both = layers.Bidirectional(layers.LSTM(3, return_sequences=True))
    y = layers.Dense(8, activation="relu")(both(layers.Embedding(7, 6, mask_zero=True)(x)))
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


def masked_by_value(keras):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    inner = layers.Masking(0.0), layers.Dense(4), layers.GRU(4), layers.Dense(3, "softmax")
    return keras.Sequential([keras.Input((5, 1)), *inner])


def fit_sequences(model, keras, wrap):
    """One label for each of five steps or for each sequence, whichever the model has.

    Zeros are masked: 1 to 5 of a sequence's steps.
    """
    random = torch.Generator().manual_seed(1)
    steps = torch.randint(1, 7, (17, 5), generator=random) * (
        torch.arange(5) < torch.randint(0, 6, (17, 1), generator=random)
    )
    labels = torch.randint(3, (17, 5), generator=random)
    x = steps.numpy() if len(model.inputs[0].shape) == 2 else steps[..., None].double().numpy()
    y = labels.numpy() if len(model.outputs[0].shape) == 3 else labels[:, 0].numpy()
    model = wrap(model)
    metrics = {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
    model.compile("adam", "sparse_categorical_crossentropy", **metrics)
    options = {"epochs": 2, "batch_size": 8, "verbose": 0, "validation_data": (x[:5], y[:5])}
    return numbers(model.fit(x, y, shuffle=False, **options), model)


@pytest.mark.parametrize("build", [masked, masked_by_value])
def test_masked_steps_count_neither_in_layers_nor_in_losses_and_metrics(build):
    assert on_two_ranks(build, fit_sequences) == [{}] * 2


# ── dropout ──


def noise(keras):
    """Its outputs show the masks: a mask of torch's generator, one of a seed, and noise."""
    keras.utils.set_random_seed(0)
    x, layers = keras.Input((40,)), keras.layers
    scaled = layers.Dense(40, kernel_initializer="identity")(x)
    drawn = layers.Dropout(0.5), layers.Dropout(0.5, seed=3), layers.GaussianNoise(1.0)
    return keras.Model(x, layers.Concatenate()([layer(scaled) for layer in drawn]))


def drawn_masks():
    """Layout → outputs of two steps, and the seeds and random numbers afterwards."""
    keras, found = in_float64(), {}
    for name, layout in LINES.items():
        found[name] = drawn_in_two_steps(p101.keras.ParallelKeras(noise(keras), **layout), keras)
    return found


def drawn_in_two_steps(model, keras):
    def loss(y, predicted):
        outputs.append(predicted.detach().clone())
        return predicted.mean(-1)

    outputs = []
    torch.manual_seed(torch.distributed.get_rank())  # a program may draw numbers on one rank only
    model.compile(keras.optimizers.SGD(0.0), loss)
    x = torch.ones(2, 40, dtype=torch.float64).numpy()
    for _ in range(2):
        model.train_on_batch(x, x[:, :1])
    seeds = [v.value.detach().clone() for v in model.draws.seeds]
    return outputs[-2:], [*seeds, torch.get_rng_state()]


def test_each_sample_has_its_own_dropout_mask():
    """Along tp ranks draw the same, along dp each its own, and afterwards all of them go on
    alike.
    """
    first, second = p101.launch(drawn_masks, world_size=2, backend="sim", timeout=150).results
    for name in LINES:
        (outputs, after), (same_outputs, same_after) = first[name], second[name]
        pairs = zip([*outputs, *after], [*same_outputs, *same_after])
        assert all(torch.equal(a, b) for a, b in pairs), name
        for drawn in torch.cat(outputs).chunk(3, dim=1):
            assert len(drawn.unique(dim=0)) == 4, name  # of two samples in two steps


def dropped(keras):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    noise = layers.Dropout(0.5), layers.GaussianNoise(0.1)
    steps = layers.Dense(8, "relu"), *noise, layers.Dense(5, "softmax")
    return keras.Sequential([keras.Input((6,)), *steps])


def test_dropout_on_a_tensor_axis_draws_the_masks_of_one_process():
    assert on_two_ranks(dropped, fit, {"tensor": {}}) == [{}] * 2


# ── freezing ──


def fit_once(model, keras):
    model.compile(keras.optimizers.Adam(0.01), "categorical_crossentropy")
    x, y = samples(keras)
    return numbers(model.fit(x, y, batch_size=8, verbose=0, shuffle=False), model)


def in_phases(*changes):
    """Fit after each change: of the model that was given to ParallelKeras (0) or of what it
    returned (1), a layer or the whole becomes trainable or not.
    """

    def use(model, keras, wrap):
        models, found = (model, wrap(model)), {}
        for phase, (which, layer, trainable) in enumerate(((1, None, True), *changes)):
            changed = models[which] if layer is None else models[which].layers[layer]
            changed.trainable = trainable
            values = fit_once(models[1], keras)
            found |= {f"phase {phase}: {name}": value for name, value in values.items()}
        return found

    return use


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
@pytest.mark.parametrize(
    "changes",
    [
        ((1, 0, False), (1, None, True), (0, 1, False), (1, None, False)),
        ((0, None, False), (0, 2, True), (1, None, True), (1, 2, False)),
    ],
    ids=["first what was returned", "first the original"],
)
def test_layers_may_be_frozen_after_wrapping(changes):
    assert on_two_ranks(classifier, in_phases(*changes)) == [{}] * 2


def frozen_at_the_start(keras):
    model = classifier(keras)
    model.layers[1].trainable = False
    return model


def freeze_between_batches(model, keras, wrap):
    """Without compile, Keras leaves out a frozen layer from the next step on."""
    x, y = samples(keras)
    wrapped, layer = wrap(model), model.layers[0]
    del model
    wrapped.compile("adam", "categorical_crossentropy")
    losses = []
    for step in range(4):
        layer.trainable = step < 2
        losses.append(wrapped.train_on_batch(x, y))
    weights = {f"weight {i}": torch.from_numpy(w) for i, w in enumerate(wrapped.get_weights())}
    return {"loss": torch.tensor(losses)} | weights


@pytest.mark.filterwarnings("ignore:A layer's `trainable` state has changed")
def test_freezing_holds_from_the_next_step_and_before_wrapping():
    assert on_two_ranks(classifier, freeze_between_batches) == [{}] * 2
    assert on_two_ranks(frozen_at_the_start, fit) == [{}] * 2


# ── training that goes on ──


def trained(keras):
    model = classifier(keras)
    model.compile(keras.optimizers.Adam(0.02), "categorical_crossentropy", metrics=["accuracy"])
    model.fit(*samples(keras), epochs=2, batch_size=8, verbose=0, shuffle=False)
    model.optimizer.learning_rate = 0.01
    return model


def go_on(model, keras, wrap):
    model, options = wrap(model), {"epochs": 2, "batch_size": 8, "verbose": 0}
    return numbers(model.fit(*samples(keras), shuffle=False, **options), model)


def compiled_again(model, keras, wrap):
    """With the same optimizer: Keras keeps its state."""
    optimizer, model = model.optimizer, wrap(model)
    model.compile(optimizer or model.optimizer, "mse", metrics=["mae"])
    found = numbers(model.fit(*samples(keras), batch_size=8, verbose=0, shuffle=False), model)
    model.compile(model.optimizer, "categorical_crossentropy")
    again = go_on(model, keras, lambda same: same)
    return found | {f"again, {name}": value for name, value in again.items()}


def loaded_from(folder):
    """A model that was trained, saved and loaded. Each rank has a file of its own."""

    def build(keras):
        path = folder / f"{torch.distributed.get_rank()}.keras"
        trained(keras).save(path)
        return keras.saving.load_model(path)

    return build


def test_the_optimizer_of_a_model_that_was_trained_goes_on(tmp_path):
    assert on_two_ranks(trained, go_on, LINES) == [{}] * 2
    assert on_two_ranks(trained, compiled_again) == [{}] * 2
    assert on_two_ranks(loaded_from(tmp_path), go_on) == [{}] * 2


def saved_with_a_frozen_layer(folder):
    def use(model, keras, wrap):
        alone = isinstance(wrapped := wrap(model), keras.Sequential)
        wrapped.layers[1].trainable = False
        fit_once(wrapped, keras)
        whose = f"of rank {torch.distributed.get_rank()}" if alone else "of all"
        wrapped.save(path := folder / f"{whose}.keras")
        return go_on(keras.saving.load_model(path), keras, lambda same: same)

    return use


def test_a_model_with_frozen_layers_is_saved_with_its_optimizer(tmp_path):
    assert on_two_ranks(classifier, saved_with_a_frozen_layer(tmp_path)) == [{}] * 2


class Interrupt(Exception):
    pass


def interrupted(folder):
    """A fit that ends after two of four epochs, and a new program that goes on with it."""

    def use(model, keras, wrap):
        model, found = wrap(model), {}
        alone = isinstance(model, keras.Sequential)
        backup = folder / (f"of rank {torch.distributed.get_rank()}" if alone else "of all")

        def end(epoch, logs=None):
            if epoch == 2:
                raise Interrupt

        ending = keras.callbacks.LambdaCallback(on_epoch_begin=end)
        for name, last in (("before", [ending]), ("after", [])):
            restore = keras.callbacks.BackupAndRestore(str(backup), double_checkpoint=True)
            options = {"epochs": 4, "batch_size": 8, "verbose": 0, "callbacks": [restore, *last]}
            model.compile("adam", "categorical_crossentropy")
            try:
                history = model.fit(*samples(keras), shuffle=False, **options)
                assert name == "after" and history.epoch == [2, 3]
                found = numbers(history, model)
            except Interrupt:
                assert name == "before" and (backup / "latest.weights.h5").exists()
                model.set_weights([0 * w for w in model.get_weights()])
        assert not backup.exists()
        return found

    return use


def test_backup_and_restore_goes_on_after_an_interruption(tmp_path):
    assert on_two_ranks(classifier, interrupted(tmp_path)) == [{}] * 2


# ── losses that layers add ──


def with_added_loss(keras):
    class Penalty(keras.layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.mean(keras.ops.square(x)))
            return x

    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    layers = dense(8), Penalty(name="penalty"), dense(5, activation="softmax")
    return keras.Sequential([keras.Input((6,)), *layers])


def test_losses_of_layers_count_on_a_tensor_axis():
    assert on_two_ranks(with_added_loss, fit, {"tensor": {}}) == [{}] * 2


# ── what cannot equal one process ──


def refused(layout):
    """Name → the error."""
    keras, rank, errors = in_float64(), torch.distributed.get_rank(), {}
    layers, parallel, (x, y) = keras.layers, p101.keras.ParallelKeras, samples(keras)

    def sequential(*more):
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((6,)), layers.Dense(5, name="first"), *more])

    def fitted(model):
        wrapped = parallel(model, **layout)
        wrapped.compile("sgd", "mse")
        wrapped.fit(x, y, verbose=0)
        return wrapped

    class OwnStep(keras.Model):
        def train_step(self, data): ...

    class OwnLoss(keras.Sequential):
        def compute_loss(self, *args, **kwargs): ...

    class OwnCall(keras.Model):
        def call(self, x, training=None):
            return 2 * super().call(x, training=training)

    class Counts(keras.layers.Layer):
        def __init__(self, **options):
            super().__init__(**options)
            self.seen = keras.metrics.Mean()

        def call(self, x):
            return x

    @keras.saving.register_keras_serializable()
    class CenteredInTraining(keras.layers.Layer):
        def call(self, x, training=False):
            return x - keras.ops.mean(x, axis=0) if training else x

    @keras.saving.register_keras_serializable()
    def centered(x):
        return x - keras.ops.mean(x, axis=0)

    @keras.saving.register_keras_serializable()
    def scaled(x):
        return x * keras.ops.mean(x)

    def functional(kind):
        x = keras.Input((6,))
        return kind(x, layers.Dense(5)(layers.Dense(4)(x)))

    def patched():
        model = sequential()
        model.train_step = lambda data: {}
        return model

    def between_layers():
        x = keras.Input((6,))
        y = layers.Dense(5)(x)
        return keras.Model(x, y - keras.ops.mean(y, axis=0), name="centered")

    def thawed():
        model = sequential(layers.Dense(5))
        model.layers[0].trainable = False
        wrapped = fitted(model)
        model.layers[0].trainable = True
        wrapped.compile("sgd", "mse")

    def frozen_on_one():
        wrapped = fitted(sequential(layers.Dense(5)))
        wrapped.layers[0].trainable = rank == 0
        wrapped.fit(x, y, verbose=0)

    def with_another_optimizer():
        model = sequential(layers.Dense(3))
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
        p101.keras.ParallelKeras(sequential(), **layout).compile(model.optimizer, "mse")

    inner, center = (
        keras.Sequential([keras.Input((5,)), CenteredInTraining(name="center")]),
        "center",
    )
    of_scaled = layers.Dropout(0.5), layers.Lambda(scaled, name=center)
    for name, work in {
        "train_step": lambda: fitted(functional(OwnStep)),
        "train_step of one model": lambda: fitted(patched()),
        "compute_loss": lambda: fitted(OwnLoss([keras.Input((6,)), layers.Dense(5)])),
        "call": lambda: fitted(functional(OwnCall)),
        "Lambda": lambda: fitted(sequential(layers.Lambda(centered, name=center))),
        "mean of all": lambda: fitted(sequential(*of_scaled)),
        "in training": lambda: fitted(sequential(CenteredInTraining(name=center))),
        "predict": lambda: parallel(between_layers(), **layout).predict(x, verbose=0),
        "axis": lambda: fitted(sequential(layers.Softmax(axis=0, name="softmax"))),
        "in a model": lambda: fitted(sequential(inner)),
        "operation": lambda: fitted(between_layers()),
        "add_loss": lambda: fitted(with_added_loss(keras)),
        "metric": lambda: fitted(sequential(Counts(name="counts"))),
        "orthogonal": lambda: fitted(orthogonal(keras)),
        "thawed": thawed,
        "frozen on one rank": frozen_on_one,
        "another optimizer": with_another_optimizer,
    }.items():
        try:
            work()
        except ValueError as error:
            errors[name] = str(error)
    return errors


ALWAYS = {
    "train_step": "'OwnStep' has its own train_step",
    "train_step of one model": "has its own train_step",
    "compute_loss": "'OwnLoss' has its own compute_loss",
    "thawed": "first/kernel' was frozen when ParallelKeras wrapped the model",
    "frozen on one rank": "'what is trained' on rank 1 differs from rank 0; every rank",
    "another optimizer": "built for other weights",
}
OTHERS = "computes a sample's output from other samples"
BY_SAMPLES = {
    "Lambda": f"'center' (Lambda) {OTHERS}",
    "mean of all": f"'center' (Lambda) {OTHERS}",
    "in training": f"'center' (CenteredInTraining) {OTHERS}",
    "axis": f"'softmax' (Softmax) {OTHERS}",
    "in a model": f"'center' (CenteredInTraining) {OTHERS}",
    "predict": f"'centered' {OTHERS} too, between its layers",
    "operation": f"'centered' {OTHERS} too, between its layers",
    "add_loss": "'penalty' (Penalty) adds a loss",
    "metric": "'counts' (Counts) keeps numbers",
}
ORTHOGONAL = {"orthogonal": "OrthogonalRegularizer, which looks at the whole weight"}
EXPECTED = {
    "tensor": ALWAYS | ORTHOGONAL | {"call": "'OwnCall' has its own call"},
    "data": ALWAYS | BY_SAMPLES,
    "ZeRO-3": ALWAYS | BY_SAMPLES | ORTHOGONAL,
}


@pytest.mark.parametrize("line", EXPECTED)
def test_what_cannot_equal_one_process_is_refused(line):
    where = {"world_size": 2, "backend": "sim", "timeout": 150}
    first, second = p101.launch(refused, LINES[line], **where).results
    assert first == second and first.keys() == EXPECTED[line].keys()
    for name, words in EXPECTED[line].items():
        assert words in first[name], first[name]
