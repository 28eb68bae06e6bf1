"""The optimizer: given as a function, handed the pieces that this rank owns, saved whole by name.

optimizer = lambda p: torch.optim.AdamW(p, lr=1e-3)     called with the model's parameters

rank 0   exp_avg of weight[0:8]  ┐
rank 1   exp_avg of weight[8:16] ┘ ─▶ the first rank: exp_avg of weight, 4 × 4, for any layout
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from parallel101.trainers.gradient_sync import Parameters
from parallel101.trainers.layout import Layout


def build_optimizer(optimizer: Any, parameters: Parameters) -> Optimizer:
    """Call it with the parameters.

    Raises TypeError or ValueError if the result is not an optimizer of just these.
    """
    hint = (
        "expected a function that builds one over the parameters it is given, such as lambda "
        "p: torch.optim.AdamW(p, lr=1e-3)"
    )
    if isinstance(optimizer, Optimizer) or not callable(optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}: {hint}")
    if not parameters:
        raise ValueError(
            "the model has no parameter that requires a gradient: there is nothing to train"
        )
    built = optimizer(list(parameters.values()))
    if not isinstance(built, Optimizer):
        raise TypeError(f"optimizer returned a {type(built).__name__}: {hint}")
    try:
        # the class's, since a scheduler that was attached wraps the object's
        inspect.signature(type(built).step).bind(built)
    except TypeError as error:  #  LBFGS wants a function that computes the loss again
        raise ValueError(
            f"trainers call {type(built).__name__}.step() without arguments, and that fails: "
            f"{error}"
        ) from error
    given = {p for group in built.param_groups for p in group["params"]}
    missing = [name for name, p in parameters.items() if p not in given]
    others = given.difference(parameters.values())
    if missing or others:
        raise ValueError(
            f"the optimizer is not over the {len(parameters)} parameters that it was given: it has "
            f"{len(others)} others, and lacks {', '.join(missing[:3]) or 'none'}. "
            f"To leave out some, set requires_grad_(False) on them; {hint}"
        )
    return built


class ShardedOptimizer:
    """An optimizer that was built over the whole parameters, and from now on updates those that
    this rank owns, in the same groups.

    Args:
        optimizer: built over `whole`.
        whole: the model's trained parameters by name.
        owned: name → what this rank updates of them; the same parameters, or its pieces.
        layout: how the pieces make up the whole.
    """

    def __init__(self, optimizer: Optimizer, whole: Parameters, owned: Parameters, layout: Layout):
        self.optimizer, self.owned, self.layout = optimizer, owned, layout
        names = {id(p): name for name, p in whole.items()}
        self.names = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        # Adagrad has some from the start
        state = {name: optimizer.state[p] for name, p in whole.items() if p in optimizer.state}
        optimizer.state.clear()
        for options, in_group in zip(optimizer.param_groups, self.names):
            options["params"] = [owned[name] for name in in_group if name in owned]
        for name, p in owned.items():
            if name in state:
                optimizer.state[p] = self.cut(name, state[name])

    def cut(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of one parameter's state.

        A value of another shape, such as the number of steps, belongs to every rank.
        """
        shape = self.layout.entries[name].shape
        return {
            key: self.layout.cut(name, value).clone() if is_like(key, value, shape) else value
            for key, value in state.items()
        }

    def state(self) -> dict[str, Any]:
        """Return state and options by parameter name, as a checkpoint keeps them.

        Collective; complete on the first rank only.
        """
        states, parts = self.optimizer.state, {}
        for name, p in self.owned.items():
            if p in states:
                like = {k: v for k, v in states[p].items() if is_like(k, v, p.shape)}
                others = {k: v for k, v in states[p].items() if k not in like}
                parts[name] = {"like": like, "others": others}
        of_ranks = self.layout.collect(parts, first_only=True)
        whole: dict[str, dict[str, Any]] = {}
        for name in sum(self.names, []):
            of_name = [of_rank.get(name) for of_rank in of_ranks]
            first: dict[str, Any] = next((v for _, v in filter(None, of_name)), {"like": {}})
            for key in first["like"]:
                of_key = [part and (part[0], part[1]["like"][key]) for part in of_name]
                first["others"][key] = self.layout.join(name, of_key)
            if "others" in first:
                whole[name] = first["others"]
        pairs = zip(self.names, self.optimizer.param_groups)
        groups = [{**group, "names": in_group} for in_group, group in pairs]
        for group in groups:
            del group["params"]
        return {"type": type(self.optimizer).__name__, "state": whole, "groups": groups}

    def state_to_load(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's state for `optimizer.load_state_dict`, from what `state` returned.

        Changes nothing. Raises ValueError if the optimizer, the parameters or their groups differ.
        """
        known = {name for in_group in self.names for name in in_group}
        there = [[name for name in group["names"] if name in known] for group in saved["groups"]]
        kind, saved_kind = type(self.optimizer).__name__, saved["type"]
        if (saved_kind, there) != (kind, self.names):
            raise ValueError(
                f"the checkpoint has the state of {saved_kind} with the groups {there}, but this "
                f"trainer's optimizer is {kind} with the groups {self.names}: expected the same"
            )
        order = [name for in_group in self.names for name in in_group if name in self.owned]
        groups = [dict(group) for group in saved["groups"]]
        for group, now in zip(groups, self.optimizer.param_groups):
            group["params"] = [order.index(n) for n in group.pop("names") if n in self.owned]
            group |= {key: value for key, value in now.items() if key not in group}
        states = [(number, name) for number, name in enumerate(order) if name in saved["state"]]
        state = {number: self.cut(name, saved["state"][name]) for number, name in states}
        return {"state": state, "param_groups": groups}


def is_like(key: str, value: Any, shape: Sequence[int]) -> bool:
    """Return whether a value of an optimizer's state belongs to the elements of a parameter of
    this shape.
    """
    # torch treats that key specially, too
    return isinstance(value, Tensor) and value.shape == torch.Size(shape) and key != "step"
