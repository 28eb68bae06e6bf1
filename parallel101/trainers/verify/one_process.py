"""One process: a trainer on one rank, of the whole model as it was before it was cut.

before the cut    the first rank notes what the dicts of every module hold
trainer()         the same modules have it again: model, loss_fn and hooks find whole weights,
                  and everything else as it is now; a Snapshot puts the cut model back
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, reduce
from types import MethodType
from typing import Any

from torch import Tensor, nn

from parallel101.trainers.batches import copied
from parallel101.trainers.layout import Axes
from parallel101.trainers.options import Options, Trainer

SHARED = ("clip_norm", "autocast", "precision", "gradient_dtype")  # options of both sides


class WholeModel:
    """A model as it was before it was cut. Build it before, and call `note_cut` after.

    Args:
        model: on the first rank.
        options: of the layout.
        build: HybridTrainer, of this model and its loss_fn.
    """

    def __init__(self, model: nn.Module, options: Options, build: Callable[..., Trainer]):
        shared = {name: getattr(options, name) for name in SHARED}
        self.model, self.build = model, partial(build, verify=False, **shared)
        spaces = [vars(module) for module in model.modules()]
        dicts = spaces + [d for space in spaces for d in space.values() if isinstance(d, dict)]
        self.dicts = [(d, dict(d), dict(d)) for d in dicts]  # as they are; before; after
        self.parameters = dict(model.named_parameters())
        kept = {id(t) for t in model.state_dict(keep_vars=True).values()}
        # of other stages they are freed, and the layout doesn't have them
        self.unsaved = {
            name: b.detach().clone() for name, b in model.named_buffers() if id(b) not in kept
        }

    def note_cut(self) -> None:
        """Note what the cut has made of the model, and forget what it has left alone."""
        noted = ((d, before, dict(d)) for d, before, _ in self.dicts)
        self.dicts = [
            (d, before, after)
            for d, before, after in noted
            if list(before) != list(after) or any(before[key] is not after[key] for key in before)
        ]

    def free(self) -> None:
        """Free the memory of weights that the cut model doesn't have."""
        kept = {id(p) for p in self.model.parameters()}
        for p in self.parameters.values():
            if id(p) not in kept:
                p.data, p.grad = p.data.new_empty(0), None

    def trainer(self, of: Trainer, values: Mapping[str, Tensor], state: Any) -> Trainer:
        """Return a trainer of the whole model on this rank alone.

        Args:
            of: the layout's trainer, whose optimizer it takes.
            values: parameters and buffers, by name; of mixed precision, the master weights.
            state: the optimizer's whole state and groups, as `ShardedOptimizer.state` gives them.
        """
        for d, before, after in self.dicts:  # what came or changed after the cut stays
            now = dict(d)
            same = {k: now[k] for k, v in before.items() if k in now and after.get(k) is v}
            d.clear()
            d.update(before | same | {key: now[key] for key in now if key not in after})
        for module in self.model.modules():
            if isinstance(module, nn.SyncBatchNorm):  # nobody would answer this rank
                vars(module)["forward"] = MethodType(nn.BatchNorm1d.forward, module)
        if type(self.model).forward is nn.Sequential.forward:
            vars(self.model)["forward"] = partial(in_turn, self.model)
        for name, t in [*self.model.named_parameters(), *self.model.named_buffers()]:
            value = values.get(name, t.data if t.numel() else self.unsaved.get(name, t.data))
            t.data, t.grad = value.to(t.dtype, copy=True), None
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]

        def optimizer(parameters: list[nn.Parameter]) -> Any:
            whole = dict(zip(names, parameters))
            for group, of_all in zip(of.optimizer.param_groups, state["groups"]):
                group["params"] = [whole[name] for name in of_all["names"] if name in whole]
            of.optimizer.state.clear()
            for name, p in whole.items():
                p.data = values[name].clone()
                if name in state["state"]:
                    of.optimizer.state[p] = copied(state["state"][name])
            return of.optimizer

        return self.build(optimizer, mesh=Axes(of.axes.along([]), {"dp": 1}))


def in_turn(modules: Any, *inputs: Any, **named: Any) -> Any:
    """Call one module after the other. A Sequential takes one input, and a pipeline several."""
    first, *others = modules
    return reduce(lambda outputs, module: module(outputs), others, first(*inputs, **named))
