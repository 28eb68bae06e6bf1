"""Keras 3 models on several ranks: `ParallelKeras`, a keras.Model whose steps use all ranks.

    tp    x ─▶ Dense, columns ─▶ relu ─▶ Dense, rows ─▶ Σ ─▶ y
          each rank holds 1/n of every kernel (dense.py)
    dp    x ─▶ this rank's samples ─▶ model ─▶ gather ─▶ y
          each rank holds 1/n of what its optimizer updates (trainers/flat.py)

Either way every rank gets the outputs of the whole batch. So Keras computes the loss and the
metrics as it does in one process, and compile, fit, evaluate, predict and callbacks are Keras's
own. sharded_model.py holds this rank's weights, and saves and loads the whole model.

Source: Rajbhandari et al., "ZeRO" (2020); Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section
3.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import keras
import torch
from torch.distributed.device_mesh import DeviceMesh

from parallel101.autograd import gather_from_group
from parallel101.collectives import all_gather, barrier
from parallel101.keras.dense import Freezing, cut_model, graph_of, trainable
from parallel101.keras.randomness import draw_alike, nothing_drawn, own_draws, seeds_of
from parallel101.keras.sharded_model import ShardedModel
from parallel101.keras.shards import Shards, axes_of
from parallel101.keras.supported import check_methods, check_model, check_optimizer, check_samples
from parallel101.mesh import GroupLike, split_sizes
from parallel101.trainers.agreement import Agreement

ALIKE = "call keras.utils.set_random_seed(0) on every rank before you build the model"
SAME_DATA = (
    "every rank passes the whole x and y, and freezes the same layers; batch_size is that of "
    "the whole batch, and ParallelKeras cuts it"
)


class ParallelKeras(ShardedModel):
    """A Keras model trained by all ranks of a group or mesh, equal to the model in one process.

    Args:
        model: a keras.Sequential or functional model that has its weights; the same on every rank.
            With zero_stage=3, its own weights are empty from now on, except in its forward and
            backward.
        group: the ranks; see `group_of`. They are a tensor axis if zero_stage is 0, and a data axis
            if it is 1 to 3 or if plan is None.
        mesh: instead of a group a DeviceMesh with axes named "dp", "tp" or both.
        plan: how Dense layers are cut over the tensor axis: name of a layer → "column", "row" or
            "column_gather"; `*` is allowed. Layers that no name matches are replicated. "auto": see
            `auto_plan`; `describe()` shows it. None: nothing is cut.
        zero_stage: what is cut over the data axis: 0 nothing, 1 optimizer state, 2 gradients too, 3
            weights too.

    Every rank passes the whole x and y. batch_size is that of the whole batch. Samples come in the
    order that position 0 shuffles. Dropout draws the masks of one process over a tensor axis. Over
    a data axis each rank draws its own.

    A model that was compiled stays compiled, and its optimizer continues from its current state,
    also after `keras.saving.load_model`. With zero_stage 1 to 3 the optimizer is taken from the
    model. Layers that are frozen later, here or in the model itself, are not updated. Layers that
    are frozen now can't be trained later.

    Raises ValueError, on every rank, for a model that cannot equal one process: the text names the
    layer and says what to do. Refused are

    - a model class with its own train_step, test_step, compute_loss, fit or the like; over a tensor
      axis, with its own call
    - activity regularizers, weight constraints, and regularizers or optimizers that look at whole
      matrices of which ranks have shards
    - over a data axis, before the first batch: layers that mix samples (the mean of a batch in a
      Lambda), keep statistics of batches (BatchNormalization, unless it is frozen), have metrics,
      or call add_loss
    """

    def __init__(
        self,
        model: Any,
        group: GroupLike = None,
        mesh: DeviceMesh | None = None,
        plan: str | Mapping[str, str] | None = "auto",
        zero_stage: int = 0,
    ):
        if not isinstance(model, keras.Model) or getattr(model, "outputs", None) is None:
            raise TypeError(
                f"model is {type(model).__name__}: expected a keras.Sequential or functional "
                "model with its weights. "
                "A Sequential has them once it begins with keras.Input(shape)"
            )
        check_methods(model)
        super().__init__(name=f"parallel_{model.name}")
        self.axes, self.zero_stage = axes_of(group, mesh, plan, zero_stage), zero_stage
        self.dp, self.tp = (self.axes.along([name]) for name in ("dp", "tp"))
        self.recipe = type(model), model.get_config()
        self.agree = Agreement(self.axes.group, model.variables[0].value.device)
        self.agree.check_same(
            ((v.path, v.value) for v in model.variables), "the models differ at the start", ALIKE
        )
        if len(self.agree.ranks) > 1:
            check_model(model, samples_are_cut=self.dp.size > 1)
        self.inner, self.plan = model, dict[str, str]()
        if self.tp.size > 1 and plan is not None:
            check_methods(model, ["call"])
            with nothing_drawn():
                self.inner, self.plan = cut_model(model, plan, self.tp)
        self.freezing = Freezing(model, self.inner)
        self.shards = Shards(self.inner, self.axes, zero_stage)
        self.names = {v.path: own.path for v, own in zip(model.weights, self.inner.weights)}
        # compile(loss={"name of an output": …})
        self.output_names = getattr(self.inner, "output_names", None)
        self.reached: list[str] = []
        self.trains: Sequence[bool] = []  # which layers and weights the last step trained
        self.samples_checked = False
        self.built = True
        if model.compiled:
            self.compile(**{**model._compile_config.config, "optimizer": model.optimizer})
            if self.optimizer is not model.optimizer and self.inner is model:
                # the state of its optimizer would take the memory that ZeRO saves
                model.compiled, model.optimizer = False, None

    @property
    def layers(self) -> list[Any]:
        """The model's layers; over a tensor axis, copies of them, some of which hold shards."""
        return self.inner.layers

    def call(self, x: Any, training: bool | None = None) -> Any:
        """Return the outputs for the whole batch, on every rank."""
        total = len(keras.tree.flatten(x)[0])
        if keras.tree.flatten(x)[0].device.type == "meta":  # Keras asks for shapes only
            return keras.tree.map_structure(
                lambda y: keras.ops.zeros((total, *y.shape[1:]), y.dtype),
                graph_of(self.inner).output,
            )
        sizes = split_sizes(total, self.dp.size)
        mine = keras.tree.map_structure(lambda t: t.split(sizes)[self.dp.position], x)
        seeds = seeds_of(self.inner) if training and self.dp.size > 1 else []
        own = own_draws(seeds, self.dp.position or 0, self.agree.device) if seeds else nullcontext()
        with own:
            outputs = self.run(mine, training)
        if self.dp.size == 1:
            return outputs

        def whole(y: Any) -> Any:
            gathered: Any = gather_from_group(y, 0, group=self.dp, sizes=sizes)
            if (mask := getattr(y, "_keras_mask", None)) is not None:
                # losses and metrics use the mask as a weight
                gathered._keras_mask = all_gather(mask, group=self.dp, sizes=sizes)
            return gathered

        return keras.tree.map_structure(whole, outputs)

    def run(self, x: Any, training: bool | None) -> Any:
        """Return the outputs of the model for samples of this rank."""
        with self.shards.sync.forward():
            return self.inner(x, training=training)

    def train_step(self, data: Any) -> Any:
        """Train on a batch, as Keras's own step does.

        Before the optimizer updates this rank's shards, gradients are summed over the data axis.
        """
        self.freezing.follow()
        trains = [*trainable(self.inner), *(v.trainable for v in self.inner.weights)]
        x, y, sample_weight = self.checked(data, trains)
        if seeds_of(self.inner) and len(self.agree.ranks) > 1:
            draw_alike(self.agree)
        sync, optimizer = self.shards.sync, self.optimizer
        self.inner.zero_grad()
        sync.begin()
        outputs = self(x, training=True)
        loss = self.compute_loss(x, y, outputs, sample_weight, training=True)
        if variables := self.trainable_variables:
            with sync.backward("B", last=True):
                optimizer.scale_loss(loss).backward()
            scale = optimizer.loss_scale_factor or 1.0
            gradients = self.shards.gradients(sync.finish(), scale)
            gradients = {v.path: gradients[v.path] for v in variables}
            self.reached = [name for name, g in gradients.items() if g is not None]
            with torch.no_grad():
                optimizer.apply(list(gradients.values()), variables)
            sync.publish()
        else:
            warnings.warn("The model does not have any trainable weights.", stacklevel=2)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss.detach(), sample_weight=len(keras.tree.flatten(x)[0]))
        return self.compute_metrics(x, y, outputs, sample_weight=sample_weight)

    def _get_regularization_losses(self) -> list[Any]:
        """Return the penalties of the whole weights, which Keras adds to the loss. Collective.

        Their gradients are added in the step.
        """
        # Keras asks for shapes only
        in_symbols = self.inner.variables[0].value.device.type == "meta"
        return [] if in_symbols else self.shards.penalty()

    def check_trained(self) -> None:
        """Raise ValueError for layers that were frozen when wrapped and no longer are."""
        for v in self.inner.trainable_variables:
            if v.path not in self.shards.trained:
                raise ValueError(
                    f"{v.path!r} was frozen when ParallelKeras wrapped the model, and stays so: "
                    "wrap the model before you freeze layers, then they can be trained again"
                )
        if len(self.agree.ranks) > 1:
            check_model(self.inner, samples_are_cut=self.dp.size > 1)

    def test_step(self, data: Any) -> Any:
        self.checked(data)
        return super().test_step(data)

    def predict_step(self, data: Any) -> Any:
        self.checked(data)
        return super().predict_step(data)

    def checked(self, data: Any, trains: Sequence[bool] = ()) -> Any:
        """Return the batch's x, y and weights of samples. Sends 8 bytes a rank.

        Raises ValueError, on every rank, unless all of them have the same batch and train the same
        weights (`trains`, in a step of training), and if the first batch of two samples or more
        shows that samples depend on each other.
        """
        tensors = {
            f"tensor {i} of the batch": torch.as_tensor(t)
            for i, t in enumerate(keras.tree.flatten(data))
            if t is not None
        }
        tensors["what is trained"] = torch.tensor(trains, dtype=torch.bool)
        self.agree.check_same(tensors.items(), "the batches differ", SAME_DATA)
        if trains and self.trains != trains:
            self.check_trained()
            self.trains, self.samples_checked = trains, False
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        if self.dp.size > 1 and not self.samples_checked and len(keras.tree.flatten(x)[0]) > 1:
            for problem in filter(None, self.agree.objects(check_samples(self.inner, x, self.run))):
                raise ValueError(problem)
            self.samples_checked = True
        return x, y, sample_weight

    # ── as in Keras, on all ranks ──

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Set the optimizer, the loss and the metrics, as keras.Model.compile does.

        An optimizer that was built for the model continues from its current state. Raises
        ValueError for an optimizer that looks at whole matrices.
        """
        super().compile(*args, **kwargs)
        if self.jit_compile:
            raise ValueError(
                "jit_compile=True: torch.compile cannot trace the messages between ranks; "
                "leave it out"
            )
        self.freezing.follow()
        self.check_trained()
        if self.optimizer is not None:
            self.optimizer = self.shards.for_my_shards(self.optimizer, self.names)
        if len(self.agree.ranks) > 1 and self.optimizer is not None:
            check_optimizer(self.optimizer)
            # Keras's own method would take the norm of this rank's shards only
            self.optimizer._clip_gradients = self.clip

    def clip(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients, clipped as Keras does, with norms over the shards of all ranks."""
        optimizer, named = self.optimizer, dict(zip(self.reached, gradients))
        if not optimizer.clipnorm and not optimizer.global_clipnorm:
            return type(optimizer)._clip_gradients(optimizer, gradients)
        norms, most = self.shards.norms(named), optimizer.clipnorm or optimizer.global_clipnorm
        if not optimizer.clipnorm:
            norms = dict.fromkeys(norms, math.hypot(*norms.values()))
        return [g * (most / max(norms[name], most)) for name, g in named.items()]

    def fit(
        self, x=None, y=None, batch_size=None, epochs=1, verbose="auto", callbacks=None, *args, **kw
    ) -> Any:
        """Train the model, as keras.Model.fit does."""
        # on torch's backend, Keras shuffles with torch's random numbers
        same_order = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: draw_alike(self.agree)
        )
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks.append(same_order)
            used = callbacks.callbacks
        else:
            callbacks = used = [*keras.tree.flatten(callbacks or []), same_order]
        if self.axes.position:
            kind = keras.callbacks.BackupAndRestore
            used[:] = [BackupElsewhere(own) if isinstance(own, kind) else own for own in used]
        shown = self.shown(verbose)
        history = super().fit(x, y, batch_size, epochs, shown, callbacks, *args, **kw)
        barrier(group=self.agree.group)  # position 0 has deleted the files of a BackupAndRestore
        if self.optimizer.use_ema:
            self.shards.sync.publish()
        return history

    def evaluate(
        self, x=None, y=None, batch_size=None, verbose="auto", *args: Any, **kwargs: Any
    ) -> Any:
        """Return the loss and the metrics, as keras.Model.evaluate does."""
        return super().evaluate(x, y, batch_size, self.shown(verbose), *args, **kwargs)

    def predict(self, x, batch_size=None, verbose="auto", *args: Any, **kwargs: Any) -> Any:
        """Return all outputs, on every rank, as keras.Model.predict does."""
        return super().predict(x, batch_size, self.shown(verbose), *args, **kwargs)

    def shown(self, verbose: Any) -> Any:
        """Return `verbose` on the rank that shows progress, and 0 on the others."""
        return verbose if self.axes.position == 0 else 0


class BackupElsewhere(keras.callbacks.BackupAndRestore):
    """A BackupAndRestore on the ranks that write no files.

    They read files, and they take part in gathering the weights that position 0 writes.
    """

    def __init__(self, callback: Any):
        self.__dict__ = callback.__dict__

    def _save_model(self) -> None:
        self.model.save_weights(self._weights_path)

    def on_train_end(self, logs: Any = None) -> None:
        """Do nothing: position 0 deletes the files."""
