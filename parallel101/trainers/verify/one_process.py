"""One process: a trainer on one rank, of the whole model as it was before it was cut.

before the cut    the first rank notes what __dict__ of every module holds
trainer()         the same modules have it again: model, loss_fn and hooks find whole weights,
                  and everything else as it is now; a Snapshot puts the cut model back
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, reduce
from types import MethodType
from typing import Any

from torch import Tensor, nn

from parallel101.trainers.layout import Axes
from parallel101.trainers.options import Options, Trainer

TENSORS, HOOKS = ("_parameters", "_buffers", "_modules"), "_hooks"
SHARED = ("clip_norm", "autocast", "precision", "gradient_dtype")  # options of both sides
MISSING = object()


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
        self.noted = {module: noted(module) for module in model.modules()}
        self.parameters = dict(model.named_parameters())
        kept = {id(t) for t in model.state_dict(keep_vars=True).values()}
        # of other stages they are freed, and the layout doesn't have them
        self.unsaved = {
            name: b.detach().clone() for name, b in model.named_buffers() if id(b) not in kept
        }

    def note_cut(self) -> None:
        """Keep of what was noted the attributes that the trainer has changed by cutting the model,
        each as it was and as it is.
        """
        for module, before in self.noted.items():
            now = noted(module)
            pairs = {k: (before.get(k, MISSING), now.get(k, MISSING)) for k in before | now}
            self.noted[module] = {key: pair for key, pair in pairs.items() if differ(*pair)}

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
        for module, changed in self.noted.items():
            undo_cut(vars(module), changed)
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
                    of.optimizer.state[p] = dict(state["state"][name])
            return of.optimizer

        return self.build(optimizer, mesh=Axes(of.axes.along([]), {"dp": 1}))


def in_turn(modules: Any, *inputs: Any, **named: Any) -> Any:
    """Call one module after the other. A Sequential takes one input, and a pipeline several."""
    first, *others = modules
    return reduce(lambda outputs, module: module(outputs), others, first(*inputs, **named))


# ── a module's __dict__, before and after ──


def noted(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes, with copies of the dicts of its tensors, modules and hooks."""
    return {
        key: dict(value) if key in TENSORS or key.endswith(HOOKS) else value
        for key, value in vars(module).items()
    }


def differ(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
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
