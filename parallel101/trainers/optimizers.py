"""The optimizer that a trainer is given as a function, and its state by the names of parameters, so that any layout can take it over.

optimizer = lambda p: torch.optim.AdamW(p, lr=1e-3)        the trainer calls it with the parameters that this rank updates
{"state": {"layers.0.weight": {"exp_avg": …}}, "groups": [{"names": […], "lr": 1e-3, …}]}
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer


def build_optimizer(optimizer: Any, owned: Mapping[str, nn.Parameter]) -> Optimizer:
    """Call it with the owned parameters. Raises TypeError or ValueError where what comes back is not an optimizer of just these."""
    hint = "expected a function that builds one over the parameters it is given, such as lambda p: torch.optim.AdamW(p, lr=1e-3)"
    if isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__} that was built already, over whatever it was given: {hint}")
    if not callable(optimizer):
        raise TypeError(f"optimizer={optimizer!r}: {hint}")
    if not owned:
        raise ValueError("the model has no parameter that requires a gradient: there is nothing to train")
    built = optimizer(list(owned.values()))
    if not isinstance(built, Optimizer):
        raise TypeError(f"optimizer gave a {type(built).__name__}: {hint}")
    try:
        inspect.signature(built.step).bind()
    except TypeError as error:  #  LBFGS wants a function that computes the loss again
        raise ValueError(f"trainers call {type(built).__name__}.step() without arguments, and that fails: {error}") from error
    expected = {id(p): name for name, p in owned.items()}
    found = [p for group in built.param_groups for p in group["params"]]
    strangers = [p for p in found if id(p) not in expected]
    if strangers:
        raise ValueError(
            f"the optimizer was built over other parameters: {len(strangers)} of its {len(found)} (the first of shape "
            f"{tuple(strangers[0].shape)}) are not among those that it was given; {hint}"
        )
    left_out = [name for key, name in expected.items() if key not in {id(p) for p in found}]
    if left_out:
        raise ValueError(
            f"the optimizer leaves out {len(left_out)} of the parameters that it was given, {left_out[0]!r} first: expected all of them; "
            "what shall not be trained gets requires_grad_(False)"
        )
    return built


def names_by_group(optimizer: Optimizer, owned: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """The names of the parameters in each of its groups."""
    names = {id(p): name for name, p in owned.items()}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def optimizer_state(optimizer: Optimizer, owned: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Its state and its options by parameter name. The tensors are the live ones: copy or save them before the next step."""
    state = {name: dict(optimizer.state[p]) for name, p in owned.items() if p in optimizer.state}
    return told(optimizer, names_by_group(optimizer, owned), state)


def told(optimizer: Optimizer, names: Sequence[Sequence[str]], state: Mapping[str, Any]) -> dict[str, Any]:
    """`names` by group, and `state` by name, with the optimizer's type and its options: as a checkpoint keeps them."""
    groups = [
        {"names": list(in_group), **{key: value for key, value in group.items() if key != "params"}}
        for in_group, group in zip(names, optimizer.param_groups)
    ]
    return {"type": type(optimizer).__name__, "state": state, "groups": groups}


def to_load(
    optimizer: Optimizer,
    names: Sequence[Sequence[str]],
    saved: Mapping[str, Any],
    held: Collection[str],
    cut: Callable[[str, Any], Any] = lambda name, state: state,
) -> dict[str, Any]:
    """What `optimizer.load_state_dict` takes of what a checkpoint has `told`. Changes nothing.

    Args:
        names: of the model's parameters, by group of the optimizer.
        held: those that this rank's optimizer updates, or has a piece of.
        cut: name and state of a whole parameter → what of it this rank needs.

    Raises ValueError where the optimizer, the parameters or their groups differ.
    """
    here, there = type(optimizer).__name__, saved["type"]
    if here != there:
        raise ValueError(f"the checkpoint has the state of {there}, and this trainer's optimizer is {here}: expected the same")
    options = {name: {key: value for key, value in group.items() if key != "names"} for group in saved["groups"] for name in group["names"]}
    groups: list[dict[str, Any]] = []
    order: list[str] = []
    for i, (in_group, group) in enumerate(zip(names, optimizer.param_groups)):
        missing = [name for name in in_group if name not in options]
        if missing:
            raise ValueError(f"the checkpoint knows no optimizer state of {missing[0]!r}: was it saved with another model?")
        unlike = [name for name in in_group if options[name] != options[in_group[0]]]
        if unlike:
            raise ValueError(
                f"{in_group[0]!r} and {unlike[0]!r} are together in group {i} of the optimizer, and had unlike options in the checkpoint: "
                "expected the same groups"
            )
        mine = [name for name in in_group if name in held]
        numbers = list(range(len(order), len(order) + len(mine)))
        groups.append({**group, **(options[in_group[0]] if in_group else {}), "params": numbers})
        order += mine
    state = {number: cut(name, saved["state"][name]) for number, name in enumerate(order) if name in saved["state"]}
    return {"state": state, "param_groups": groups}
