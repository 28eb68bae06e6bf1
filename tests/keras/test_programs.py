"""What users write in Keras programs, on several ranks and in one process: the same losses,
metrics and weights, or a clear error.
"""

from __future__ import annotations

import pytest
import torch

import parallel101 as p101
from tests.keras.cases import LINES, classifier, differences, in_float64, samples

CUT_SAMPLES = {name: layout for name, layout in LINES.items() if name != "tensor"}


def numbers(history, model):
    """Of a fit: each epoch's losses and metrics, and the weights after it."""
    found = {
        name: torch.tensor(values, dtype=torch.float64) for name, values in history.history.items()
    }
    return found | {
        f"weight {i}": torch.from_numpy(w).double() for i, w in enumerate(model.get_weights())
    }


def against_one_process(build, use, layouts=LINES):
    """Layout → what differs.

    `use(model, keras, wrap)` returns named tensors; `wrap` is ParallelKeras, or nothing in one
    process.
    """
    keras, wrong = in_float64(), {}
    one = use(build(keras), keras, lambda model: model)
    for name, layout in layouts.items():
        many = use(
            build(keras),
            keras,
            lambda model, layout=layout: p101.keras.ParallelKeras(model, **layout),
        )
        if found := differences(one, many):
            wrong[name] = found
    return wrong


def on_two_ranks(build, use, layouts=LINES):
    return p101.launch(
        against_one_process, build, use, layouts, world_size=2, backend="sim", timeout=150
    ).results


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
    layers, penalties = keras.layers, keras.regularizers
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(
                7, activation="relu", kernel_regularizer="l2", bias_regularizer=penalties.L1(0.02)
            ),
            layers.Dense(
                8,
                activation="relu",
                kernel_regularizer=penalties.L1L2(0.01, 0.03),
                bias_regularizer="l2",
            ),
            layers.LayerNormalization(gamma_regularizer="l1"),
            layers.Dense(5, activation="softmax", kernel_regularizer="l2"),
            layers.Dense(5, kernel_regularizer="l2", trainable=False),
        ]
    )


def test_penalties_of_regularizers_count_once():
    assert on_two_ranks(regularized, fit) == [{}] * 2


def on_a_mesh():
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layouts = {f"zero_stage={stage}": {"mesh": mesh, "zero_stage": stage} for stage in (0, 1, 3)}
    return [
        against_one_process(*program, layouts)
        for program in ((regularized, fit), (masked, fit_sequences), (trained, go_on))
    ]


@pytest.mark.slow
def test_regularizers_masks_and_optimizers_that_go_on_work_on_a_mesh():
    assert (
        p101.launch(on_a_mesh, world_size=4, backend="sim", timeout=150).results == [[{}] * 3] * 4
    )


def orthogonal(keras):
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense(5, kernel_regularizer=keras.regularizers.OrthogonalRegularizer(0.1))
    return keras.Sequential([keras.Input((6,)), dense])


def test_a_regularizer_of_whole_matrices_works_where_weights_are_whole():
    assert on_two_ranks(orthogonal, fit, {"data": {"plan": None}}) == [{}] * 2


# ── masks ──


def masked(keras):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    x = keras.Input((5,), dtype="int32")
    y = layers.LSTM(4, return_sequences=True)(layers.Embedding(7, 6, mask_zero=True)(x))
    return keras.Model(
        x, layers.Dense(3, activation="softmax")(layers.Dense(8, activation="relu")(y))
    )


def masked_by_value(keras):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((5, 1)),
            layers.Masking(0.0),
            layers.Dense(4),
            layers.GRU(4),
            layers.Dense(3, activation="softmax"),
        ]
    )


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
    model.compile(
        "adam",
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        weighted_metrics=["accuracy"],
    )
    history = model.fit(
        x, y, epochs=2, batch_size=8, verbose=0, shuffle=False, validation_data=(x[:5], y[:5])
    )
    return numbers(history, model)


@pytest.mark.parametrize("build", [masked, masked_by_value])
def test_masked_steps_count_neither_in_layers_nor_in_losses_and_metrics(build):
    assert on_two_ranks(build, fit_sequences) == [{}] * 2


# ── recurrent layers, which keep a seed for their dropout ──


def recurrent(keras):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    both = layers.Bidirectional(layers.LSTM(3, return_sequences=True))
    return keras.Sequential(
        [keras.Input((5, 1)), both, layers.GRU(4), layers.Dense(3, activation="softmax")]
    )


def test_recurrent_layers_train_on_each_axis():
    assert on_two_ranks(recurrent, fit_sequences) == [{}] * 2


# ── dropout ──


def noise(keras):
    """Its outputs show the masks: a mask of torch's generator, one of a seed, and noise."""
    keras.utils.set_random_seed(0)
    x, layers = keras.Input((40,)), keras.layers
    scaled = layers.Dense(40, kernel_initializer="identity")(x)
    drawn = [
        layers.Dropout(0.5)(scaled),
        layers.Dropout(0.5, seed=3)(scaled),
        layers.GaussianNoise(1.0)(scaled),
    ]
    return keras.Model(x, layers.Concatenate()(drawn))


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
        assert all(
            torch.equal(a, b) for a, b in zip([*outputs, *after], [*same_outputs, *same_after])
        ), name
        for drawn in torch.cat(outputs).chunk(3, dim=1):
            assert len(drawn.unique(dim=0)) == 4, name  # of two samples in two steps


def dropped(keras):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    steps = [
        layers.Dense(8, activation="relu"),
        layers.Dropout(0.5),
        layers.GaussianNoise(0.1),
        layers.Dense(5, activation="softmax"),
    ]
    return keras.Sequential([keras.Input((6,)), *steps])


def test_dropout_on_a_tensor_axis_draws_the_masks_of_one_process():
    assert on_two_ranks(dropped, fit, {"tensor": {}}) == [{}] * 2


# ── freezing ──


def fit_once(model, keras):
    model.compile(keras.optimizers.Adam(0.01), "categorical_crossentropy")
    x, y = samples(keras)
    return numbers(model.fit(x, y, batch_size=8, verbose=0, shuffle=False), model)


def in_phases(*phases):
    """Fit after each phase, which freezes something in the model that was given to
    ParallelKeras or in what it returned.
    """

    def use(model, keras, wrap):
        wrapped, found = wrap(model), {}
        for number, freeze in enumerate((lambda *_: None, *phases)):
            freeze(model, wrapped)
            found |= {
                f"phase {number}: {name}": value for name, value in fit_once(wrapped, keras).items()
            }
        return found

    return use


def freeze_a_layer(original, wrapped):
    wrapped.layers[0].trainable = False


def freeze_a_layer_of_the_original(original, wrapped):
    original.layers[1].trainable = False


def freeze_the_original(original, wrapped):
    original.trainable = False
    original.layers[2].trainable = True


def thaw(original, wrapped):
    wrapped.trainable = True


def freeze_all(original, wrapped):
    wrapped.trainable = False


def freeze_all_but_the_last(original, wrapped):
    wrapped.trainable = True
    for layer in wrapped.layers[:-1]:
        layer.trainable = False


@pytest.mark.parametrize(
    "phases",
    [
        (freeze_a_layer, thaw, freeze_all_but_the_last),
        (freeze_a_layer_of_the_original, freeze_a_layer),
        (freeze_the_original, thaw, freeze_a_layer_of_the_original),
    ],
    ids=["in the wrapped model", "in the original", "in both"],
)
def test_layers_may_be_frozen_after_wrapping(phases):
    assert on_two_ranks(classifier, in_phases(*phases)) == [{}] * 2


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
def test_a_model_that_is_frozen_as_a_whole_keeps_its_weights():
    assert on_two_ranks(classifier, in_phases(freeze_all)) == [{}] * 2


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
    return {"loss": torch.tensor(losses)} | {
        f"weight {i}": torch.from_numpy(w) for i, w in enumerate(wrapped.get_weights())
    }


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
    model = wrap(model)
    return numbers(
        model.fit(*samples(keras), epochs=2, batch_size=8, verbose=0, shuffle=False), model
    )


def compiled_again(model, keras, wrap):
    """With the same optimizer: Keras keeps its state."""
    optimizer, model = model.optimizer, wrap(model)
    model.compile(optimizer or model.optimizer, "mse", metrics=["mae"])
    found = numbers(model.fit(*samples(keras), batch_size=8, verbose=0, shuffle=False), model)
    model.compile(model.optimizer, "categorical_crossentropy")
    return found | {
        f"again, {name}": value for name, value in go_on(model, keras, lambda same: same).items()
    }


class Loaded:
    """A model that was trained, saved and loaded. Each rank has a file of its own."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, keras):
        path = self.folder / f"{torch.distributed.get_rank()}.keras"
        trained(keras).save(path)
        return keras.saving.load_model(path)


def test_the_optimizer_of_a_model_that_was_trained_goes_on(tmp_path):
    assert on_two_ranks(trained, go_on) == [{}] * 2
    assert on_two_ranks(trained, compiled_again) == [{}] * 2
    assert on_two_ranks(Loaded(tmp_path), go_on) == [{}] * 2


def saved_with_a_frozen_layer(folder):
    def use(model, keras, wrap):
        alone = isinstance(wrapped := wrap(model), keras.Sequential)
        wrapped.layers[1].trainable = False
        fit_once(wrapped, keras)
        path = folder / (
            f"of rank {torch.distributed.get_rank()}.keras" if alone else "of all.keras"
        )
        wrapped.save(path)
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

        for name, last in (
            ("before", [keras.callbacks.LambdaCallback(on_epoch_begin=end)]),
            ("after", []),
        ):
            callbacks = [
                keras.callbacks.BackupAndRestore(str(backup), double_checkpoint=True),
                *last,
            ]
            model.compile("adam", "categorical_crossentropy")
            try:
                history = model.fit(
                    *samples(keras),
                    epochs=4,
                    batch_size=8,
                    verbose=0,
                    shuffle=False,
                    callbacks=callbacks,
                )
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
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8),
            Penalty(name="penalty"),
            layers.Dense(5, activation="softmax"),
        ]
    )


def test_losses_of_layers_count_on_a_tensor_axis():
    assert on_two_ranks(with_added_loss, fit, {"tensor": {}}) == [{}] * 2


# ── what cannot equal one process ──


def refused(layout):
    """Name → the error."""
    keras, rank, errors = in_float64(), torch.distributed.get_rank(), {}
    layers = keras.layers

    def attempt(name, work):
        try:
            work()
        except ValueError as error:
            errors[name] = str(error)

    def sequential(*more):
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((6,)), layers.Dense(5, name="first"), *more])

    def fitted(model):
        wrapped = p101.keras.ParallelKeras(model, **layout)
        wrapped.compile("sgd", "mse")
        wrapped.fit(samples(keras)[0], samples(keras)[1], verbose=0)
        return wrapped

    class OwnStep(keras.Model):
        def train_step(self, data):
            return super().train_step(data)

    class OwnLoss(keras.Sequential):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

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
        wrapped.fit(*samples(keras), verbose=0)

    def with_another_optimizer():
        model = sequential(layers.Dense(3))
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
        p101.keras.ParallelKeras(sequential(), **layout).compile(model.optimizer, "mse")

    attempt("train_step", lambda: fitted(functional(OwnStep)))
    attempt("train_step of one model", lambda: fitted(patched()))
    attempt("compute_loss", lambda: fitted(OwnLoss([keras.Input((6,)), layers.Dense(5)])))
    attempt("call", lambda: fitted(functional(OwnCall)))
    attempt("Lambda", lambda: fitted(sequential(layers.Lambda(centered, name="center"))))
    attempt(
        "mean of all",
        lambda: fitted(sequential(layers.Dropout(0.5), layers.Lambda(scaled, name="center"))),
    )
    attempt("in training", lambda: fitted(sequential(CenteredInTraining(name="center"))))
    attempt(
        "predict",
        lambda: p101.keras.ParallelKeras(between_layers(), **layout).predict(
            samples(keras)[0], verbose=0
        ),
    )
    attempt("axis", lambda: fitted(sequential(layers.Softmax(axis=0, name="softmax"))))
    attempt(
        "in a model",
        lambda: fitted(
            sequential(keras.Sequential([keras.Input((5,)), CenteredInTraining(name="center")]))
        ),
    )
    attempt("operation", lambda: fitted(between_layers()))
    attempt("add_loss", lambda: fitted(with_added_loss(keras)))
    attempt("metric", lambda: fitted(sequential(Counts(name="counts"))))
    attempt("orthogonal", lambda: fitted(orthogonal(keras)))
    attempt("thawed", thawed)
    attempt("frozen on one rank", frozen_on_one)
    attempt("another optimizer", with_another_optimizer)
    return errors


ALWAYS = {
    "train_step": "'OwnStep' has its own train_step",
    "train_step of one model": "has its own train_step",
    "compute_loss": "'OwnLoss' has its own compute_loss",
    "thawed": "first/kernel' was frozen when ParallelKeras wrapped the model",
    "frozen on one rank": "'what is trained' on rank 1 differs from rank 0; every rank",
    "another optimizer": "built for other weights",
}
BY_SAMPLES = {
    "Lambda": "'center' (Lambda) computes a sample's output from other samples",
    "mean of all": "'center' (Lambda) computes a sample's output from other samples",
    "in training": "'center' (CenteredInTraining) computes a sample's output from other samples",
    "axis": "'softmax' (Softmax) computes a sample's output from other samples",
    "in a model": "'center' (CenteredInTraining) computes a sample's output from other samples",
    "predict": "'centered' computes a sample's output from other samples too, between its layers",
    "operation": "'centered' computes a sample's output from other samples too, between its layers",
    "add_loss": "'penalty' (Penalty) adds a loss",
    "metric": "'counts' (Counts) keeps numbers",
}
ORTHOGONAL = {"orthogonal": "OrthogonalRegularizer, which looks at the whole weight"}
EXPECTED = {
    "tensor": ALWAYS | ORTHOGONAL | {"call": "'OwnCall' has its own call"},
    "data": ALWAYS | BY_SAMPLES,
    "ZeRO-1": ALWAYS | BY_SAMPLES | ORTHOGONAL,
    "ZeRO-3": ALWAYS | BY_SAMPLES | ORTHOGONAL,
}


@pytest.mark.parametrize("line", EXPECTED)
def test_what_cannot_equal_one_process_is_refused(line):
    first, second = p101.launch(
        refused, LINES[line], world_size=2, backend="sim", timeout=150
    ).results
    assert first == second and first.keys() == EXPECTED[line].keys()
    for name, words in EXPECTED[line].items():
        assert words in first[name], first[name]


def look_at_samples():
    """Whether the check before the first step changes anything: numbers of layers in training,
    and in all others.
    """
    keras, found = in_float64(), {}
    for name, layout in CUT_SAMPLES.items():
        model = p101.keras.ParallelKeras(dropped(keras), **layout)
        x = torch.from_numpy(samples(keras)[0])

        def state(model=model):
            return [*(v.value.detach().clone() for v in model.variables), torch.get_rng_state()]

        before = state()
        problem = p101.keras.model.check_samples(model.inner, x, model.run)
        found[name] = problem, all(torch.equal(a, b) for a, b in zip(before, state()))
    return found


def test_the_check_before_the_first_step_leaves_no_trace():
    for found in p101.launch(look_at_samples, world_size=2, backend="sim", timeout=150).results:
        assert found == dict.fromkeys(CUT_SAMPLES, ("", True))
