"""The weights of a Keras model on several ranks: their shards, and saving the whole model.

    save    rank 0  w[0:2] ─┐
            rank 1  w[2:4] ─┴▶ get_weights ─▶ w[0:4] ─▶ position 0 builds the model of one
                                                        process ─▶ file

    load    file ─▶ each rank builds the model of one process ─▶ w[0:4]
                                                 set_weights ─┬▶ rank 0  w[0:2]
                                                              └▶ rank 1  w[2:4]

So a file does not depend on the number of ranks, and Keras reads and writes the same files in one
process. If the model is compiled, they hold its optimizer's state too. The step, and fit, are in
model.py.
"""

from __future__ import annotations

import os
from typing import Any

import keras
import torch

from parallel101.keras.dense import layers_within, set_trainable, trainable
from parallel101.keras.randomness import nothing_drawn


def held(kind: str) -> property:
    """Return a model's property: this rank's variables of a kind, such as "trainable_weights"."""

    def variables(model: ShardedModel) -> list[Any]:
        shards = model.__dict__.get("shards")  # Keras asks before it is there
        if shards is None:
            return []
        return [shards.trained.get(v.path, v) for v in getattr(shards.inner, kind)]

    return property(variables)


class ShardedModel(keras.Model):
    """A keras.Model of which each rank holds shards.

    `ParallelKeras` sets the attributes and trains the model.

    Attributes:
        inner: the model that this rank computes with.
        shards: what this rank holds of each weight of `inner`.
        recipe: the class and the config of the whole model.
        agree, axes: the ranks; see `Agreement`, `Axes`.
        plan, zero_stage: how the weights are cut; see `ParallelKeras`.
        optimizer: updates this rank's shards; compile sets it.
    """

    optimizer: Any

    # those that this rank holds: under ZeRO, its pieces of the trained ones
    weights = held("weights")
    variables = held("variables")
    trainable_weights = held("trainable_weights")
    trainable_variables = held("trainable_variables")
    non_trainable_weights = held("non_trainable_weights")
    non_trainable_variables = held("non_trainable_variables")

    # ── the whole model, collective ──

    def get_weights(self) -> list[Any]:
        """Return the whole model's weights, in its order. Collective: all ranks call it."""
        names = [v.path for v in self.inner.weights]
        whole = self.shards.layout.gather(self.shards.parts(), names)
        return [keras.ops.convert_to_numpy(whole[name]) for name in names]

    def set_weights(self, weights: list[Any]) -> None:
        """Set this rank's shards from the whole model's weights, in its order. Collective."""
        parts = self.shards.parts()
        names = [v.path for v in self.inner.weights]
        if [tuple(w.shape) for w in weights] != [self.shards.shape(name) for name in names]:
            raise ValueError("weights: expected arrays of the shapes that get_weights() returns")
        with torch.no_grad():
            for name, whole in zip(names, weights):
                parts[name].copy_(self.shards.layout.cut(name, torch.as_tensor(whole)))
        self.shards.sync.publish()

    def save(self, filepath: Any, overwrite: bool = True, **kwargs: Any) -> None:
        """Write the whole model to a file that `keras.saving.load_model` reads in one process.

        Collective; position 0 writes.
        """
        self.write(lambda whole: whole.save(filepath, overwrite=overwrite, **kwargs))

    def save_weights(self, filepath: Any, overwrite: bool = True, **kwargs: Any) -> None:
        """Write the whole model's weights, as keras.Model.save_weights does.

        Collective; position 0 writes.
        """
        self.write(lambda whole: whole.save_weights(filepath, overwrite=overwrite, **kwargs))

    def load_weights(self, filepath: Any, **kwargs: Any) -> None:
        """Load the whole model's weights and optimizer state, as keras.Model.load_weights does.

        Collective; every rank reads, and keeps its shards.
        """
        weights, state = self.get_weights(), self.optimizer_state()

        def load() -> Any:
            whole = self.rebuilt(weights, state)
            whole.load_weights(filepath, **kwargs)
            return whole

        whole = self.agree.all_or_none(f"load {os.fspath(filepath)!r}", load)
        self.set_weights(whole.get_weights())
        if state:
            read = [v.value.detach() for v in whole.optimizer.variables]
            self.shards.set_optimizer_state(self.optimizer, read)

    def export(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "ParallelKeras has no export: save() the whole model, load it in one process and "
            "export it there"
        )

    def write(self, save: Any) -> None:
        """Give position 0 the whole model, with its optimizer, to write."""
        weights, state = self.get_weights(), self.optimizer_state()

        def on_first() -> None:
            if self.axes.position == 0:
                save(self.rebuilt(weights, state))

        self.agree.all_or_none("save the model", on_first)

    def optimizer_state(self) -> list[torch.Tensor]:
        """Return the optimizer's whole state; it is empty before the first step. Collective."""
        built = self.compiled and self.optimizer and self.optimizer.built
        return self.shards.optimizer_state(self.optimizer) if built else []

    def rebuilt(self, weights: list[Any], state: list[torch.Tensor]) -> Any:
        """Return the model of one process with these weights, compiled as this one is.

        Its optimizer has this state.
        """
        kind, config = self.recipe
        with nothing_drawn():
            whole = kind.from_config(config)
        set_trainable(layers_within(whole), trainable(self.inner))
        whole.set_weights(weights)
        if self.compiled:
            mine = self.optimizer
            optimizer = mine and type(mine).from_config(mine.get_config())
            whole.compile(**{**self._compile_config.config, "optimizer": optimizer})
        if state:
            same = {mine.path: theirs for mine, theirs in zip(self.inner.weights, whole.weights)}
            optimizer.build([same[v.path] for v in self.optimizer._trainable_variables])
            for variable, value in zip(optimizer.variables, state, strict=True):
                variable.assign(value)
        return whole

    # ── who holds what ──

    def get_parallelism_info(self) -> dict[str, Any]:
        """Return the number of ranks, the size of each axis, and the plan.

        The plan maps the name of a Dense layer to how it is cut.
        """
        return {
            "world_size": len(self.agree.ranks),
            "axes": dict(self.axes.sizes),
            "plan": dict(self.plan),
        }

    def get_gradient_sharding_info(self) -> dict[str, Any]:
        """Return whether each rank's optimizer gets gradient shards, and of how many weights."""
        entries = self.shards.layout.entries
        names = [name for name in self.shards.trained if entries[name].placements]
        enabled = len(self.agree.ranks) > 1 and bool(names)
        return {"enabled": enabled, "parameter_shards": len(names), "zero_stage": self.zero_stage}

    def describe(self) -> str:
        """Return a text with the plan and the ranks' shards of each weight."""
        plan = [f"{name}: {style}" for name, style in self.plan.items()]
        return "\n".join(
            [f"{self.name} on {len(self.agree.ranks)} ranks", *plan, *self.shards.layout.describe()]
        )
