"""One process: a trainer on one rank, of the whole model as it was before it was cut.

before the cut    the first rank notes what __dict__ of every module holds
trainer()         the same modules have it again: model, loss_fn and hooks find whole weights,
                  and everything else as it is now; a Snapshot puts the cut model back
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn

from parallel101.trainers.layout import Axes
from parallel101.trainers.options import LossFn, Options, Trainer
from parallel101.trainers.verify.snapshot import MISSING

TENSORS, HOOKS = ("_parameters", "_buffers", "_modules"), "_hooks"
Values = Mapping[str, Tensor]


class WholeModel:
    """A model as it was before it was cut. Build it before, and call `note_cut` after.

    Args:
        model: on the first rank.
        loss_fn: as the user gave it.
        options: of the layout.
        build: HybridTrainer.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None,
        options: Options,
        build: Callable[..., Trainer],
    ):
        self.model, self.loss_fn, self.options, self.build = model, loss_fn, options, build
        self.before = {module: noted(module) for module in model.modules()}
        self.parameters = dict(model.named_parameters())
        kept = {id(t) for t in model.state_dict(keep_vars=True).values()}
        # of other stages they are freed, and the layout doesn't have them
        self.unsaved = {
            name: b.detach().clone() for name, b in model.named_buffers() if id(b) not in kept
        }

    def note_cut(self) -> None:
        """Note which attributes of the model the trainer has changed by cutting it."""
        self.changed: dict[nn.Module, dict[str, tuple[Any, Any]]] = {}
        for module, before in self.before.items():
            now = noted(module)
            keys = before.keys() | now.keys()
            pairs = {key: (before.get(key, MISSING), now.get(key, MISSING)) for key in keys}
            self.changed[module] = {key: pair for key, pair in pairs.items() if differ(*pair)}
        del self.before

    def free(self) -> None:
        """Free the memory of weights that the cut model doesn't have."""
        kept = {id(p) for p in self.model.parameters()}
        for p in self.parameters.values():
            if id(p) not in kept:
                p.data, p.grad = p.data.new_empty(0), None

    def make_whole(self, values: Values) -> None:
        """Make the model whole, with copies of these parameters and buffers."""
        for module, changed in self.changed.items():
            undo_cut(module.__dict__, changed)
            if isinstance(module, nn.SyncBatchNorm):  # nobody would answer this rank
                module.__dict__["forward"] = MethodType(nn.BatchNorm1d.forward, module)
        if type(self.model).forward is nn.Sequential.forward:
            self.model.__dict__["forward"] = partial(in_turn, self.model)
        for name, t in [*self.model.named_parameters(), *self.model.named_buffers()]:
            value = values.get(name, t.data if t.numel() else self.unsaved.get(name, t.data))
            t.data, t.grad = value.to(t.dtype, copy=True), None

    def trainer(self, of: Trainer, values: Values, state: Any) -> Trainer:
        """Return a trainer of the whole model on this rank alone.

        Args:
            of: the layout's trainer, whose optimizer it takes.
            values: parameters and buffers, by name; of mixed precision, the master weights.
            state: the optimizer's whole state and groups, as `ShardedOptimizer.state` gives them.
        """

        def optimizer(parameters: list[nn.Parameter]) -> Any:
            whole = dict(zip(names, parameters))
            for name, p in whole.items():
                p.data = values[name].clone()
            for group, of_all in zip(of.optimizer.param_groups, state["groups"]):
                group["params"] = [whole[name] for name in of_all["names"] if name in whole]
            of.optimizer.state.clear()
            for name in whole.keys() & state["state"].keys():
                of.optimizer.state[whole[name]] = dict(state["state"][name])
            return of.optimizer

        self.make_whole(values)
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        alone, given = Axes(of.axes.along([]), {"dp": 1}), self.options
        options = replace(
            Options(),
            clip_norm=given.clip_norm,
            autocast=given.autocast,
            precision=given.precision,
            gradient_dtype=given.gradient_dtype,
            verify=False,
        )
        return self.build(self.model, self.loss_fn, optimizer, mesh=alone, **vars(options))


def in_turn(modules: nn.Module, *inputs: Any, **named: Any) -> Any:
    """Call one module after the other. A Sequential takes one input, and a pipeline several."""
    first, *others = modules.children()
    outputs = first(*inputs, **named)
    for module in others:
        outputs = module(outputs)
    return outputs


# ── a module's __dict__, before and after ──


def noted(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes, with copies of the dicts of its tensors, modules and hooks."""
    return {
        key: dict(value) if key in TENSORS or key.endswith(HOOKS) else value
        for key, value in vars(module).items()
    }


def differ(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict) and a is not b:
        return list(a) != list(b) or any(a[key] is not b[key] for key in a)
    return a is not b


def undo_cut(now: dict[str, Any], changed: Mapping[str, tuple[Any, Any]]) -> None:
    """Undo the changes of the cut in a module's attributes. Hooks that came later stay."""
    for key, (before, after) in changed.items():
        if before is MISSING:
            now.pop(key, None)
        elif key.endswith(HOOKS):
            later = {i: hook for i, hook in now[key].items() if i not in after}
            now[key] = type(now[key])({**before, **later})
        else:
            now[key] = dict(before) if key in TENSORS else before
