"""Keras 3 models on several ranks: `ParallelKeras` is a keras.Model whose forward, and whose step, use all ranks of a group or mesh.

    tp    x ─▶ Dense, columns ─▶ relu ─▶ Dense, rows ─▶ Σ ─▶ y         each rank holds 1/n of every kernel (dense.py)
    dp    x ─▶ this rank's samples ─▶ model ─▶ gather ─▶ y             each rank holds 1/n of what its optimizer updates (trainers/zero/)

Either way every rank gets the outputs of the whole batch. So Keras computes the loss and the metrics as it does in one process, and
compile, fit, evaluate, predict and callbacks are Keras's own.
Source: Rajbhandari et al., "ZeRO" (2020); Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from parallel101.autograd import gather_from_group
from parallel101.collectives import broadcast
from parallel101.keras.checks import check_model, check_optimizer
from parallel101.keras.dense import cut_model, graph_of
from parallel101.keras.installed import keras
from parallel101.keras.shards import Shards, axes_of
from parallel101.mesh import GroupLike, group_of, split_sizes
from parallel101.trainers.agreement import Agreement

ALIKE = "call keras.utils.set_random_seed(0) on every rank before you build the model"
SAME_DATA = "every rank passes the whole x and y; batch_size is that of the whole batch, and ParallelKeras cuts it"


class ParallelKeras(keras.Model):
    """A Keras model that is trained by all ranks of a group or mesh, and equals the model in one process.

    Args:
        model: a keras.Sequential or functional model that has its weights; the same on every rank. With zero_stage=3, its own weights are
            empty from now on, except in its forward and backward.
        group: the ranks; see `group_of`. They are a tensor axis if zero_stage is 0, and a data axis if it is 1 to 3 or if plan is None.
        mesh: instead of a group a DeviceMesh with axes named "dp", "tp" or both.
        plan: how Dense layers are cut over the tensor axis: name of a layer → "column", "row" or "column_gather"; `*` is allowed.
            Layers that no name matches are replicated. "auto": see `auto_plan`; `describe()` shows it. None: nothing is cut.
        zero_stage: what is cut over the data axis: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too.

    Every rank passes the whole x and y. batch_size is that of the whole batch. Samples come in the order that position 0 shuffles.
    Raises ValueError, on every rank, for what cannot equal one process: the text names the layer and says what to do.
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
                f"model is {type(model).__name__}: expected a keras.Sequential or functional model with its weights. "
                "A Sequential has them once it begins with keras.Input(shape)"
            )
        super().__init__(name=f"parallel_{model.name}")
        self.axes, lines = axes_of(group, mesh, plan, zero_stage)
        self.dp, self.tp = group_of(lines["dp"]), group_of(lines["tp"])
        self.dp_group, self.zero_stage = lines["dp"], zero_stage
        self.recipe = type(model), model.get_config()
        self.agree = Agreement(self.axes.group, model.variables[0].value.device)
        self.agree.check_same(((v.path, v.value) for v in model.variables), "the models differ at the start", ALIKE)
        if len(self.agree.ranks) > 1:
            check_model(model, samples_are_cut=self.dp.size > 1)
        self.inner, self.plan = (model, {}) if self.tp.size == 1 or plan is None else cut_model(model, plan, lines["tp"])
        self.shards = Shards(self.inner, lines, zero_stage)
        self.output_names = getattr(self.inner, "output_names", None)  # compile(loss={"name of an output": …})
        self.reached: list[str] = []
        self.built = True

    def call(self, x: Any, training: bool | None = None) -> Any:
        """The outputs for the whole batch, on every rank."""
        total = len(keras.tree.flatten(x)[0])
        if keras.tree.flatten(x)[0].device.type == "meta":  # Keras asks for shapes only
            return keras.tree.map_structure(lambda y: keras.ops.zeros((total, *y.shape[1:]), y.dtype), graph_of(self.inner).output)
        sizes = split_sizes(total, self.dp.size)
        mine = keras.tree.map_structure(lambda t: t.split(sizes)[self.dp.position], x)
        with self.shards.sync.forward():
            outputs = self.inner(mine, training=training)
        if self.dp.size == 1:
            return outputs
        return keras.tree.map_structure(lambda y: gather_from_group(y, 0, group=self.dp_group, sizes=sizes), outputs)

    def train_step(self, data: Any) -> Any:
        """One step on a batch, as Keras's own. Before the optimizer updates this rank's shards, gradients are summed over the data axis."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(self.checked(data))
        sync, optimizer = self.shards.sync, self.optimizer
        self.inner.zero_grad()
        sync.begin()
        outputs = self(x, training=True)
        loss = self.compute_loss(x, y, outputs, sample_weight, training=True)
        with sync.backward("B", last=True):
            optimizer.scale_loss(loss).backward()
        unused = sync.finish()
        gradients = self.shards.gradients(unused)
        self.reached = [name for name, g in gradients.items() if g is not None]
        with torch.no_grad():
            optimizer.apply(list(gradients.values()), self.trainable_variables)
        sync.publish()
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss.detach(), sample_weight=len(keras.tree.flatten(x)[0]))
        return self.compute_metrics(x, y, outputs, sample_weight=sample_weight)

    def test_step(self, data: Any) -> Any:
        return super().test_step(self.checked(data))

    def predict_step(self, data: Any) -> Any:
        return super().predict_step(self.checked(data))

    def checked(self, data: Any) -> Any:
        """The batch. Raises ValueError, on every rank, unless all of them have the same: 8 bytes a rank."""
        tensors = [t for t in keras.tree.flatten(data) if t is not None]
        self.agree.check_same(
            ((f"tensor {i} of the batch", torch.as_tensor(t)) for i, t in enumerate(tensors)), "the batches differ", SAME_DATA
        )
        return data

    # ── as in Keras, on all ranks ──

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """See keras.Model.compile. Raises ValueError for an optimizer that looks at whole matrices."""
        super().compile(*args, **kwargs)
        if self.jit_compile:
            raise ValueError("jit_compile=True: torch.compile cannot trace the messages between ranks; leave it out")
        if len(self.agree.ranks) > 1 and self.optimizer is not None:
            check_optimizer(self.optimizer)
            self.optimizer._clip_gradients = self.clip  # Keras's own would take the norm of this rank's shards

    def clip(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """As Keras clips, with norms over the shards of all ranks."""
        optimizer, named = self.optimizer, dict(zip(self.reached, gradients))
        if not optimizer.clipnorm and not optimizer.global_clipnorm:
            return type(optimizer)._clip_gradients(optimizer, gradients)
        norms = self.shards.norms(named)
        if most := optimizer.clipnorm:
            return [g * (most / max(norms[name], most)) for name, g in named.items()]
        most = optimizer.global_clipnorm
        return [g * (most / max(math.hypot(*norms.values()), most)) for g in gradients]

    def fit(self, x=None, y=None, batch_size=None, epochs=1, verbose="auto", callbacks=None, *args: Any, **kwargs: Any) -> Any:
        """See keras.Model.fit."""
        same_order = SameOrder(self.agree)
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks.append(same_order)
        else:
            callbacks = [*keras.tree.flatten(callbacks or []), same_order]
        history = super().fit(x, y, batch_size, epochs, self.shown(verbose), callbacks, *args, **kwargs)
        if self.optimizer.use_ema:
            self.shards.sync.publish()
        return history

    def evaluate(self, x=None, y=None, batch_size=None, verbose="auto", *args: Any, **kwargs: Any) -> Any:
        """See keras.Model.evaluate."""
        return super().evaluate(x, y, batch_size, self.shown(verbose), *args, **kwargs)

    def predict(self, x, batch_size=None, verbose="auto", *args: Any, **kwargs: Any) -> Any:
        """See keras.Model.predict. Every rank gets all outputs."""
        return super().predict(x, batch_size, self.shown(verbose), *args, **kwargs)

    def shown(self, verbose: Any) -> Any:
        """One rank shows progress."""
        return verbose if self.axes.position == 0 else 0

    # ── weights ──

    @property
    def weights(self) -> list[Any]:
        """What this rank holds: under ZeRO its pieces of the trained weights."""
        return self.mine("weights")

    @property
    def variables(self) -> list[Any]:
        return self.mine("variables")

    def mine(self, kind: str) -> list[Any]:
        shards = self.__dict__.get("shards")  # Keras asks before it is there
        return [] if shards is None else [shards.trained.get(v.path, v) for v in getattr(shards.inner, kind)]

    def get_weights(self) -> list[Any]:
        """The whole model's, in its order. Collective: all ranks call it."""
        names = [v.path for v in self.inner.weights]
        whole = self.shards.gather(self.shards.parts(), names)
        return [keras.ops.convert_to_numpy(whole[name]) for name in names]

    def set_weights(self, weights: list[Any]) -> None:
        """From the whole model's, in its order. Collective."""
        parts = self.shards.parts()
        names = [v.path for v in self.inner.weights]
        if [tuple(w.shape) for w in weights] != [self.shards.shape(name) for name in names]:
            raise ValueError("weights: expected arrays of the shapes that get_weights() returns")
        with torch.no_grad():
            for name, whole in zip(names, weights):
                if name in parts:
                    parts[name].copy_(self.shards.cut(name, torch.as_tensor(whole, device=parts[name].device)))
        self.shards.sync.publish()

    def save(self, filepath: Any, overwrite: bool = True, **kwargs: Any) -> None:
        """Write the whole model to a file that `keras.saving.load_model` reads in one process. Collective; position 0 writes."""
        self.write(lambda whole: whole.save(filepath, overwrite=overwrite, **kwargs))

    def save_weights(self, filepath: Any, overwrite: bool = True, **kwargs: Any) -> None:
        """See keras.Model.save_weights; the whole model's. Collective; position 0 writes."""
        self.write(lambda whole: whole.save_weights(filepath, overwrite=overwrite, **kwargs))

    def load_weights(self, filepath: Any, **kwargs: Any) -> None:
        """See keras.Model.load_weights; the whole model's. Collective; every rank reads, and keeps its shards."""
        kind, config = self.recipe
        whole = kind.from_config(config)
        self.agree.all_or_none(f"load {os.fspath(filepath)!r}", lambda: whole.load_weights(filepath, **kwargs))
        self.set_weights(whole.get_weights())

    def export(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("ParallelKeras has no export: save() the whole model, load it in one process and export it there")

    def write(self, save: Any) -> None:
        """Give position 0 the whole model, with its optimizer, to write."""
        weights = self.get_weights()
        optimizer = self.optimizer if self.compiled else None
        state = self.shards.optimizer_state(optimizer.variables) if optimizer is not None and optimizer.built else []

        def on_first() -> None:
            if self.axes.position == 0:
                kind, config = self.recipe
                whole = kind.from_config(config)
                whole.set_weights(weights)
                if self.compiled:
                    whole.compile_from_config(self.get_compile_config())
                if state:
                    whole.optimizer.build(whole.trainable_variables)
                    for variable, value in zip(whole.optimizer.variables, state):
                        variable.assign(value)
                save(whole)

        self.agree.all_or_none("save the model", on_first)

    # ── who holds what ──

    def get_parallelism_info(self) -> dict[str, Any]:
        """The number of ranks, the size of each axis, and the plan: name of a Dense layer → how it is cut."""
        return {"world_size": len(self.agree.ranks), "axes": dict(self.axes.sizes), "plan": dict(self.plan)}

    def get_gradient_sharding_info(self) -> dict[str, Any]:
        """Whether the optimizer of each rank gets shards of the gradients, and of how many of the trained weights it has a shard."""
        layouts = self.shards.over_dp, self.shards.over_tp
        names = [name for name in self.shards.trained if any(layout.entries[name].placements for layout in layouts)]
        enabled = len(self.agree.ranks) > 1 and bool(names)
        return {"enabled": enabled, "parameter_shards": len(names), "zero_stage": self.zero_stage}

    def describe(self) -> str:
        """The plan, and how each weight lies on the ranks."""
        plan = [f"{name}: {style}" for name, style in self.plan.items()]
        return "\n".join([f"{self.name} on {len(self.agree.ranks)} ranks", *plan, *self.shards.describe()])


class SameOrder(keras.callbacks.Callback):
    """Before each epoch all ranks take the state of position 0's random numbers, by which Keras shuffles on torch's backend."""

    def __init__(self, agree: Agreement):
        super().__init__()
        self.agree = agree

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        state = broadcast(torch.get_rng_state().to(self.agree.device), 0, group=self.agree.group)
        torch.set_rng_state(state.cpu())
