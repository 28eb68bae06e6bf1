"""What users write in Keras programs, on several ranks and in one process: the same losses,
metrics and weights, or a clear error.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

import parallel101 as p101
from tests.keras.cases import (
    FEW,
    LINES,
    TENSOR,
    X,
    Y,
    against_one_process,
    classifier,
    fit,
    fitted,
    in_float64,
    same,
    sequential,
    weights_of,
)

OPTIMIZERS = {
    "sgd, momentum": lambda k: k.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda k: k.optimizers.Adam(0.01),
    "adamw, clipnorm": lambda k: k.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.05),
    "sgd, global_clipnorm": lambda k: k.optimizers.SGD(0.1, global_clipnorm=0.1),
    "adam, accumulation, average": lambda k: k.optimizers.Adam(
        0.01, gradient_accumulation_steps=2, use_ema=True, ema_momentum=0.5
    ),
}


# ── models ──


def regularized(keras):
    dense, penalties = keras.layers.Dense, keras.regularizers
    l1, both = penalties.L1(0.02), penalties.L1L2(0.01, 0.03)
    return sequential(
        keras,
        dense(7, activation="relu", kernel_regularizer="l2", bias_regularizer=l1),
        dense(8, activation="relu", kernel_regularizer=both, bias_regularizer="l2"),
        keras.layers.LayerNormalization(gamma_regularizer="l1"),
        dense(5, activation="softmax", kernel_regularizer="l2"),
        dense(5, kernel_regularizer="l2", trainable=False),
    )


def orthogonal(keras):
    penalty = keras.regularizers.OrthogonalRegularizer(0.1)
    return sequential(keras, keras.layers.Dense(5, kernel_regularizer=penalty))


def normalized(keras):
    layers = keras.layers
    return sequential(keras, (8, None), layers.BatchNormalization(), layers.ReLU(), (5, None))


def dropped(keras):
    noise = keras.layers.Dropout(0.5), keras.layers.GaussianNoise(0.1)
    return sequential(keras, (8, "relu"), *noise, (5, "softmax"))


def with_added_loss(keras):
    class Penalty(keras.layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.mean(keras.ops.square(x)))
            return x

    return sequential(keras, (8, None), Penalty(name="penalty"), (5, "softmax"))


def frozen_at_the_start(keras):
    model = classifier(keras)
    model.layers[1].trainable = False
    return model


def masked(keras):
    """Recurrent layers, too, which keep a seed for their dropout."""
    layers = keras.layers
    x = keras.Input((5,), dtype="int32")
    both = layers.Bidirectional(layers.LSTM(3, return_sequences=True))
    y = layers.Dense(8, activation="relu")(both(layers.Embedding(7, 6, mask_zero=True)(x)))
    return keras.Model(x, layers.Dense(3, activation="softmax")(y))


def with_two_outputs(keras):
    """Branches, Dense layers that no other follows, layers that are not cut, and dropout, whose
    masks depend on a seed.
    """
    x, layers = keras.Input((6,), name="x"), keras.layers
    y = layers.Dense(6, name="down")(layers.Dense(8, activation="gelu", name="up")(x))
    y = layers.Dropout(0.3)(layers.LayerNormalization()(y + x))
    z = layers.Dense(4)(layers.Activation("relu")(layers.Dense(8)(y)))
    labels = layers.Dense(5, activation="softmax", name="labels")(layers.Dense(4)(y) * z)
    return keras.Model(x, [labels, layers.Dense(1, name="height")(z)])


def trained(keras):
    model = classifier(keras)
    model.compile(keras.optimizers.Adam(0.02), "categorical_crossentropy", metrics=["accuracy"])
    fitted(model)
    model.optimizer.learning_rate = 0.01
    return model


def loaded_from(folder):
    """A model that was trained, saved and loaded. Each rank has a file of its own."""

    def build(keras):
        path = folder / f"{torch.distributed.get_rank()}.keras"
        trained(keras).save(path)
        return keras.saving.load_model(path)

    return build


# ── how they are used ──


def validated(keras):
    return {"validation_data": (X[:5], Y[:5])}


def with_callbacks(keras):
    stop = keras.callbacks.EarlyStopping(
        monitor="val_loss", mode="max", patience=0, restore_best_weights=True
    )
    slower = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    return validated(keras) | {"epochs": 3, "callbacks": [stop, slower]}


def fit_two_outputs(model, keras, wrap):
    model = wrap(model)
    losses = {"labels": "categorical_crossentropy", "height": "mse"}
    model.compile("adam", losses, loss_weights={"labels": 1.0, "height": 0.3})
    return fitted(model, {"x": X}, {"labels": Y, "height": X[:, :1]}, epochs=3)


def fit_sequences(model, keras, wrap):
    """One label for each of five steps. Zeros are masked: 1 to 5 of a sequence's steps."""
    random = torch.Generator().manual_seed(1)
    steps = torch.randint(1, 7, (17, 5), generator=random) * (
        torch.arange(5) < torch.randint(0, 6, (17, 1), generator=random)
    )
    x, y = steps.numpy(), torch.randint(3, (17, 5), generator=random).numpy()
    model = wrap(model)
    metrics = {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
    model.compile("adam", "sparse_categorical_crossentropy", **metrics)
    return fitted(model, x, y, validation_data=(x[:5], y[:5]))


def fit_once(model, keras):
    model.compile(keras.optimizers.Adam(0.01), "categorical_crossentropy")
    return fitted(model, epochs=1)


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


def freeze_between_batches(model, keras, wrap):
    """Without compile, Keras leaves out a frozen layer from the next step on."""
    wrapped, layer = wrap(model), model.layers[0]
    del model
    wrapped.compile("adam", "categorical_crossentropy")
    losses = []
    for step in range(4):
        layer.trainable = step < 2
        losses.append(wrapped.train_on_batch(X, Y))
    return {"loss": torch.tensor(losses)} | weights_of(wrapped)


def go_on(model, keras, wrap):
    return fitted(wrap(model))


def compiled_again(model, keras, wrap):
    """With the same optimizer: Keras keeps its state."""
    optimizer, model = model.optimizer, wrap(model)
    model.compile(optimizer or model.optimizer, "mse", metrics=["mae"])
    found = fitted(model, epochs=1)
    model.compile(model.optimizer, "categorical_crossentropy")
    return found | {f"again, {name}": value for name, value in fitted(model).items()}


def saved_in(folder):
    """One process reads the files of several ranks, and they those of one."""

    def use(model, keras, wrap):
        model = wrap(model)
        fit()(model, keras, same)
        if isinstance(model, p101.keras.ParallelKeras):
            model.save(folder / "model.keras")
            model.save_weights(folder / "model.weights.h5")
            again = p101.keras.ParallelKeras(classifier(keras))
            again.load_weights(folder / "model.weights.h5")
            assert all((a == b).all() for a, b in zip(again.get_weights(), model.get_weights()))
            model.set_weights([2 * w for w in model.get_weights()])
            assert all((2 * a == b).all() for a, b in zip(again.get_weights(), model.get_weights()))
            model = keras.saving.load_model(folder / "model.keras")
        return fitted(model)

    return use


def saved_with_a_frozen_layer(folder):
    def use(model, keras, wrap):
        alone = isinstance(wrapped := wrap(model), keras.Sequential)
        wrapped.layers[1].trainable = False
        fit_once(wrapped, keras)
        whose = f"of rank {torch.distributed.get_rank()}" if alone else "of all"
        wrapped.save(path := folder / f"{whose}.keras")
        return fitted(keras.saving.load_model(path))

    return use


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
            model.compile("adam", "categorical_crossentropy")
            try:
                found = fitted(model, epochs=4, callbacks=[restore, *last])
                assert name == "after" and model.history.epoch == [2, 3]
            except Interrupt:
                assert name == "before" and (backup / "latest.weights.h5").exists()
                model.set_weights([0 * w for w in model.get_weights()])
        assert not backup.exists()
        return found

    return use


# ── equal to one process ──

DATA, ZERO_1, ZERO_3 = ({name: LINES[name]} for name in ("data", "ZeRO-1", "ZeRO-3"))
PLANS = {"*": "row"}, {"dense*": "column_gather"}, {"up": "column_gather"}
FIRST_RETURNED = (1, 0, False), (1, None, True), (0, 1, False), (1, None, False)
FIRST_THE_ORIGINAL = (0, None, False), (0, 2, True), (1, None, True), (1, 2, False)


def programs(folder):
    """Name → how the model is built and used, and on which layouts; `folder` is for its files."""
    return {
        "regularizers": (regularized, fit(more=validated), LINES),
        "a regularizer of whole matrices": (orthogonal, fit(), DATA),
        "losses that layers add": (with_added_loss, fit(), TENSOR),
        "dropout on a tensor axis": (dropped, fit(), TENSOR),
        "batch statistics of the whole batch": (normalized, fit(), TENSOR),
        "masks": (masked, fit_sequences, FEW),
        "two outputs": (
            *(with_two_outputs, fit_two_outputs),
            TENSOR | {str(plan): {"plan": plan} for plan in PLANS},
        ),
        "shuffled as on position 0": (classifier, fit(more=lambda _: {"shuffle": True}), ZERO_3),
        "callbacks": (classifier, fit(more=with_callbacks), TENSOR),
        "sample_weight": (classifier, fit(more=lambda _: {"sample_weight": abs(X[:, 0])}), ZERO_1),
        "frozen: first what was returned": (classifier, in_phases(*FIRST_RETURNED), FEW),
        "frozen: first the original": (classifier, in_phases(*FIRST_THE_ORIGINAL), FEW),
        "frozen between batches": (classifier, freeze_between_batches, FEW),
        "frozen before wrapping": (frozen_at_the_start, fit(), FEW),
        "an optimizer goes on": (trained, go_on, LINES),
        "compiled again": (trained, compiled_again, FEW),
        "loaded": (loaded_from(folder), go_on, FEW),
        "saved": (classifier, saved_in(folder), FEW),
        "saved with a frozen layer": (classifier, saved_with_a_frozen_layer(folder), FEW),
        "interrupted": (classifier, interrupted(folder), FEW),
    }


def on_sim(world_size, program, *args):
    return p101.launch(program, *args, world_size=world_size, backend="sim", timeout=150).results


@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
@pytest.mark.filterwarnings("ignore:A layer's `trainable` state has changed")
@pytest.mark.parametrize("name", programs(Path()))
def test_a_program_equals_one_process(name, tmp_path):
    program = {name: programs(tmp_path)[name]}
    assert on_sim(2, against_one_process, program) == [{}] * 2


def optimizers(layouts):
    """Programs: each optimizer with its layouts."""
    return {
        name: (classifier, fit(optimizer), of)
        for (name, optimizer), of in zip(OPTIMIZERS.items(), layouts)
        if of
    }


@pytest.mark.slow
def test_each_optimizer_equals_one_process_on_three_ranks():
    """They share batches of 8, 8 and 1 samples: with the last, two ranks have none."""
    names = [*LINES]  # each optimizer has two of these layouts
    two = [{names[i]: LINES[names[i]] for i in (k - 1, k - 2)} for k in range(len(OPTIMIZERS))]
    assert on_sim(3, against_one_process, optimizers(two)) == [{}] * 3


def on_a_mesh():
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    zero = [{f"zero_stage={stage}": {"mesh": mesh, "zero_stage": stage}} for stage in range(4)]
    return against_one_process(
        {
            "regularizers": (regularized, fit(more=validated), zero[0]),
            "masks": (masked, fit_sequences, zero[1]),
            "an optimizer goes on": (trained, go_on, zero[3]),
            **optimizers([{}, {}, zero[3], zero[2]]),
        }
    )


@pytest.mark.slow
def test_programs_equal_one_process_on_a_mesh():
    assert on_sim(4, on_a_mesh) == [{}] * 4


# ── dropout along dp, which one process draws otherwise ──


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
    from parallel101.keras.randomness import seeds_of

    def loss(y, predicted):
        outputs.append(predicted.detach().clone())
        return predicted.mean(-1)

    outputs = []
    torch.manual_seed(torch.distributed.get_rank())  # a program may draw numbers on one rank only
    model.compile(keras.optimizers.SGD(0.0), loss)
    x = torch.ones(2, 40, dtype=torch.float64).numpy()
    for _ in range(2):
        model.train_on_batch(x, x[:, :1])
    seeds = [v.value.detach().clone() for v in seeds_of(model.inner)]
    return outputs[-2:], [*seeds, torch.get_rng_state()]


def test_each_sample_has_its_own_dropout_mask():
    """Along tp ranks draw the same, along dp each its own, and afterwards all of them go on
    alike.
    """
    first, second = on_sim(2, drawn_masks)
    for name in LINES:
        (outputs, after), (same_outputs, same_after) = first[name], second[name]
        pairs = zip([*outputs, *after], [*same_outputs, *same_after])
        assert all(torch.equal(a, b) for a, b in pairs), name
        for drawn in torch.cat(outputs).chunk(3, dim=1):
            assert len(drawn.unique(dim=0)) == 4, name  # of two samples in two steps


# ── what cannot equal one process ──

EVERYWHERE, BY_SAMPLES = ("tensor", "data", "ZeRO-3"), ("data", "ZeRO-3")


def refused(line):
    """Of each model: what the error must say, "" if this layout isn't refused, and the error."""
    keras, rank, layout, found = in_float64(), torch.distributed.get_rank(), LINES[line], []
    layers, parallel = keras.layers, p101.keras.ParallelKeras

    def stacked(*more):
        return sequential(keras, layers.Dense(5, name="first"), *more)

    def up(**options):
        return sequential(keras, layers.Dense(4, name="up", **options))

    def train(model, optimizer="sgd"):
        wrapped = parallel(model, **layout)
        wrapped.compile(optimizer, "mse")
        wrapped.fit(X, Y, verbose=0)
        return wrapped

    def predict(model, x, **layout):
        parallel(model, **layout).predict(x, verbose=0)

    def plan(plan, **options):
        first = layers.Dense(4, name="up", **options)
        inner = first, layers.ReLU(name="act"), layers.Dense(4, name="down")
        parallel(sequential(keras, *inner), plan=plan)

    def on_a_pipeline():
        mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        parallel(classifier(keras), mesh=mesh)

    class OwnStep(keras.Model):
        def train_step(self, data): ...

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
        model = stacked()
        model.train_step = lambda data: {}
        return model

    def between_layers():
        x = keras.Input((6,))
        y = layers.Dense(5)(x)
        return keras.Model(x, y - keras.ops.mean(y, axis=0), name="centered")

    def thawed():
        model = stacked(layers.Dense(5))
        model.layers[0].trainable = False
        wrapped = train(model)
        model.layers[0].trainable = True
        wrapped.compile("sgd", "mse")

    def frozen_on_one():
        wrapped = train(stacked(layers.Dense(5)))
        wrapped.layers[0].trainable = rank == 0
        wrapped.fit(X, Y, verbose=0)

    def with_another_optimizer():
        model = stacked(layers.Dense(3))
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
        parallel(stacked(), **layout).compile(model.optimizer, "mse")

    center, others = "center", "computes a sample's output from other samples"
    between = f"'centered' {others} too, between its layers"
    inner = keras.Sequential([keras.Input((5,)), CenteredInTraining(name=center)])
    of_scaled = layers.Dropout(0.5), layers.Lambda(scaled, name=center)
    of_rank = keras.initializers.Constant(rank)
    norm = layers.BatchNormalization(name="norm")
    everywhere = [
        ("'OwnStep' has its own train_step", lambda: train(functional(OwnStep))),
        ("has its own train_step", lambda: train(patched())),
        ("first/kernel' was frozen when ParallelKeras wrapped the model", thawed),
        ("'what is trained' on rank 1 differs from rank 0; every rank", frozen_on_one),
        ("built for other weights", with_another_optimizer),
    ]
    by_samples = [
        (f"'center' (Lambda) {others}", stacked(layers.Lambda(centered, name=center))),
        (f"'center' (Lambda) {others}", stacked(*of_scaled)),
        (f"'center' (CenteredInTraining) {others}", stacked(CenteredInTraining(name=center))),
        (f"'center' (CenteredInTraining) {others}", stacked(inner)),
        (between, between_layers()),
        ("'penalty' (Penalty) adds a loss", with_added_loss(keras)),
        ("'counts' (Counts) keeps numbers", stacked(Counts(name="counts"))),
    ]
    once = {
        "A Sequential has them once it begins with keras.Input": lambda: parallel(
            keras.Sequential([layers.Dense(4)])
        ),
        "set_random_seed(0) on every rank": lambda: parallel(up(bias_initializer=of_rank)),
        "every rank passes the whole x and y": lambda: predict(classifier(keras), X + rank),
        "'up' has a constraint": lambda: parallel(up(kernel_constraint="max_norm")),
        "'norm' (BatchNormalization) keeps": lambda: parallel(stacked(norm), zero_stage=1),
        "no Dense layer to cut": lambda: parallel(sequential(keras, layers.LayerNormalization())),
        "zero_stage=4: expected": lambda: parallel(classifier(keras), zero_stage=4),
        'has no pipeline ("pp")': on_a_pipeline,
        "Lamb looks at whole matrices": lambda: train(stacked(), keras.optimizers.Lamb()),
        "Muon looks at whole matrices": lambda: train(stacked(), keras.optimizers.Muon()),
        "Adafactor looks at whole matrices": lambda: train(stacked(), keras.optimizers.Adafactor()),
        "'nothing' matches no layer": lambda: plan({"nothing": "row"}),
        "'up' has the style 'vocabulary': expected one of": lambda: plan({"up": "vocabulary"}),
        "'act' is a ReLU": lambda: plan({"act": "row"}),
        "activation 'linear' to 'act', and only": lambda: plan({"*": "column"}),
        "activation 'softmax' to 'act', and only": lambda: plan(
            {"up": "column"}, activation="softmax"
        ),
    }
    rows = [(words, EVERYWHERE, work) for words, work in everywhere]
    rows += [(words, BY_SAMPLES, partial(train, model)) for words, model in by_samples]
    rows.append((between, BY_SAMPLES, lambda: predict(between_layers(), X, **layout)))
    rows.append(("'OwnCall' has its own call", TENSOR, lambda: train(functional(OwnCall))))
    words = "OrthogonalRegularizer, which looks at the whole weight"
    rows.append((words, FEW, lambda: train(orthogonal(keras))))
    rows += [(words, TENSOR, work) for words, work in once.items() if line == "tensor"]
    for words, lines, work in rows:
        try:
            work()
            error = ""
        except (ValueError, TypeError) as raised:
            error = str(raised)
        found.append((words if line in lines else "", error))
    return found


@pytest.mark.parametrize("line", EVERYWHERE)
def test_what_cannot_equal_one_process_is_refused(line):
    first, second = on_sim(2, refused, line)
    assert first == second
    for words, error in first:
        assert words in error if words else not error, (words, error)
