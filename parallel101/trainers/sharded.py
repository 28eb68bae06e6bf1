"""Sharded data parallel (ZeRO, FSDP): like data parallel, but what every rank would hold alike, each holds 1/n of.

             weights   gradients   optimizer state          sent by each rank, per step
    stage 1  all       all         1/n                      2(n−1)/n of the gradients' bytes: reduce-scatter, then all-gather of the weights
    stage 2  all       1/n         1/n                      the same; a layer's gradients are gone as soon as they have left
    stage 3  1/n       1/n         1/n                      3(n−1)/n: weights are gathered for each forward and again for each backward

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), sections 5 and 7.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from parallel101.collectives.asynchronous import all_gather_async
from parallel101.mesh import GroupLike
from parallel101.record.spans import span
from parallel101.trainers.arguments import EMPTIED
from parallel101.trainers.buckets import by_size, check_bucket_bytes, part_of
from parallel101.trainers.elementwise import check_elementwise
from parallel101.trainers.flat import Flat, by_kind
from parallel101.trainers.gathered import Gathered, Layer
from parallel101.trainers.layers import layers_of, share_out
from parallel101.trainers.leaving import AsReady, Leaving
from parallel101.trainers.lent import lent_weights
from parallel101.trainers.live import Live
from parallel101.trainers.memory import readable
from parallel101.trainers.sharded_state import ShardedState
from parallel101.trainers.trainer import LossFn, OptimizerFn, Trainer

WHOLE = (
    "on stage 3 it is whole only in the forward of a module that has it. layers=(…) names the types that are gathered one at a time; "
    "what lies in none of them is whole for the model's whole forward"
)


class ShardedTrainer(Trainer):
    """Trains one model on all ranks of a group, each with its share of the batch and of the memory; equal to one process.

    Args:
        model: on stage 3 its parameters are empty outside of their layer's forward and backward; `state_dict` gathers them.
        loss_fn, group, clip_norm, autocast, sync: see `Trainer`.
        optimizer: a function of the whole parameters. It is built over them, so that it may make groups by name or shape, and is then
            handed this rank's pieces, which are 1-D. So it must be elementwise, as SGD, Adam, AdamW, Adagrad and most are; what looks at
            whole matrices or their norms, as Muon, Adafactor and LAMB do, is refused.
        stage: 1, 2 or 3; see above.
        accumulate: microbatches a step. Stage 1 adds up their gradients where they are and sends them once. Stages 2 and 3 hold no
            gradients to add to: they send after each microbatch, and stage 3 gathers for each, which is the price of their memory.
        overlap: send gradients, and on stage 3 fetch the next layer, while this one computes.
        bucket_bytes: on stages 1 and 2, how many bytes of gradients travel together. None: a quarter of them all, at most 25 MiB.
        layers: on stage 3, the types of the modules that are gathered one at a time, such as (Block,). None: see `layers_of`. What lies in
            none of them or, being tied, in several, is whole for all of a forward and all of a backward.

    Parameters that need no gradient, and buffers, stay whole on every rank. `describe()` also tells what was there for a moment in the last
    step, at most: gathered layers, and gradients on their way. On stage 3 all ranks must use the layers in the same order,
    though each may leave some out, and a weight may be used only in the forward of a module that has it.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        optimizer: OptimizerFn,
        *,
        group: GroupLike = None,
        stage: int = 3,
        overlap: bool = True,
        bucket_bytes: int | None = None,
        layers: Sequence[type[nn.Module]] | None = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        autocast: torch.dtype | None = None,
        sync: bool = False,
    ):
        if stage not in (1, 2, 3):
            raise ValueError(
                f"stage={stage!r}: expected 1 (optimizer state is sharded), 2 (gradients too) or 3 (weights too); "
                "for none of it there is DataParallelTrainer"
            )
        check_bucket_bytes(bucket_bytes)
        super().__init__(model, loss_fn, optimizer, group=group, clip_norm=clip_norm, accumulate=accumulate, autocast=autocast, sync=sync)
        check_elementwise(self.optimizer)
        self.stage = stage
        self._live = Live()
        self._leaving = Leaving(group)
        self._gathered: Gathered | None = None
        whole = self._owned
        if stage == 3:
            self._flats = self._by_layer(model, whole, layers, overlap)
        else:
            if bucket_bytes is None:
                bucket_bytes = part_of(whole, 4)
            self._flats = [self._flat(names) for names in by_size(whole, bucket_bytes)]
            self._as_ready = AsReady(self._flats, self._leaving, overlap)
        self._state = ShardedState(self.optimizer, whole, self._flats, group)
        self._owned = self._state.pieces
        if stage == 3:
            EMPTIED.update(model.modules())

    def _flat(self, parameters: Mapping[str, nn.Parameter]) -> Flat:
        return Flat(parameters, self._group, self._live, weights=self.stage < 3, gradients=self.stage < 2)

    def _by_layer(self, model: nn.Module, whole: Mapping[str, nn.Parameter], types: Any, overlap: bool) -> list[Flat]:
        modules = dict(layers_of(model, types and tuple(types)))
        own, shared = share_out(modules, whole)
        layers = [Layer(name, modules[name], [self._flat(names) for names in by_kind(own[name])]) for name in modules if own[name]]
        self._gathered = Gathered(model, layers, [self._flat(names) for names in by_kind(shared)], self._leaving, self._group, overlap)
        return self._gathered.flats()

    # ── one step ──

    def _zero_grad(self) -> None:
        super()._zero_grad()
        self._live.begin()
        self._leaving.drop()
        for flat in self._flats:
            flat.fresh, flat.reached = True, set()

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self._gathered is None:
            return super()._loss(inputs, targets)
        try:
            with lent_weights(self._gathered, self.autocast) if torch.is_grad_enabled() else nullcontext():
                return super()._loss(inputs, targets)
        except RuntimeError as error:
            if self._gathered.in_layer or not self._gathered.in_forward:
                raise
            raise RuntimeError(f"{error}. This was between two layers: if a weight was used there, it was empty, for {WHOLE}") from error

    def _backward(self, loss: Tensor, last: bool) -> None:
        if self._gathered is None:
            return self._as_ready.backward(loss, complete=last or self.stage == 2)
        try:
            self._gathered.backward(loss)
        except RuntimeError as error:
            if "got [0] but expected shape" not in str(error):
                raise
            raise RuntimeError(
                f"{error}. A weight was empty where it was used (a penalty in the loss, for example), for {WHOLE}"
            ) from error

    def _synchronise(self) -> None:
        self._leaving.finish()
        for flat in self._flats:
            flat.give_gradients()
        reached = set().union(*(flat.reached for flat in self._flats))
        self._unused = [name for name in self._names if name not in reached]

    def _gradient_norm(self) -> Tensor:
        mine = super()._gradient_norm()
        squares = self._of_all(float(mine) ** 2, group=self._group)[0]
        return mine.new_tensor(math.sqrt(math.fsum(squares)))

    def _apply(self) -> None:
        self.optimizer.step()
        if self.stage < 3:
            with span("gather weights"):
                for flat in self._flats:
                    flat.refresh()
                for flat in self._flats:
                    flat.wait()

    # ── the whole model ──

    def gradients(self) -> dict[str, Tensor | None]:
        found: dict[str, Tensor | None] = dict.fromkeys(self._names)
        arriving = [(flat, all_gather_async(flat.grad, group=self._group)) for flat in self._flats if not flat.fresh]
        for flat, gradients in arriving:
            found.update(flat.cut(gradients.wait()))
        return found | dict.fromkeys(self._left_out)

    @contextmanager
    def _all_gathered(self) -> Iterator[None]:
        """Where weights are sharded: all of them, on every rank."""
        sharded = self._flats if self.stage == 3 else []
        for flat in sharded:
            flat.gather()
        for flat in sharded:
            flat.wait()
        try:
            yield
            for flat in sharded:
                assert flat.whole is not None
                flat.shard.copy_(flat.mine(flat.whole))
        finally:
            for flat in sharded:
                flat.free()

    def state_dict(self) -> dict[str, Any]:
        with self._all_gathered():
            return super().state_dict()

    def _load_model(self, state: Mapping[str, Any]) -> None:
        with self._all_gathered():
            super()._load_model(state)

    def _optimizer_state(self) -> dict[str, Any]:
        return self._state.whole()

    def _optimizer_to_load(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        return self._state.to_load(saved)

    # ── who holds what ──

    def _holdings(self) -> dict[str, Iterator[Tensor]]:
        kept = [[flat.shard, flat.whole] for flat in self._flats]
        gradients = [[flat.grad, flat.whole_grad] for flat in self._flats]
        return {
            **super()._holdings(),
            "weights": iter([*(t for of_one in kept for t in of_one if t is not None), *self.model.parameters(), *self.model.buffers()]),
            "gradients": (t for of_one in gradients for t in of_one if t is not None),
        }

    def _moments(self) -> dict[str, int]:
        most = self._live.most
        return {"gathered, at most": most["weights"], "gradients on their way, at most": most["gradients"]}

    def _notes(self) -> list[str]:
        what = "layers" if self._gathered else "buckets"
        largest = max(self._flats, key=lambda flat: flat.shard.nbytes)
        padding = sum(flat.padding for flat in self._flats)
        return [
            f"stage {self.stage}: {len(self._owned)} pieces of {len(self._names)} parameters on this rank, in {len(self._flats)} {what}, "
            f"the largest {readable(largest.shard.nbytes * self.group.size)}; {padding} elements of padding"
        ]
