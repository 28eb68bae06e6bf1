"""The optimizer that a trainer is given as a function, and its state by the names of parameters, so that any layout can take it over.

optimizer = lambda p: torch.optim.AdamW(p, lr=1e-3)        the trainer calls it with the parameters that this rank updates
{"state": {"layers.0.weight": {"exp_avg": …}}, "groups": [{"names": […], "lr": 1e-3, …}]}
"""

from __future__ import annotations

from collections.abc import Mapping
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


def optimizer_state(optimizer: Optimizer, owned: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Its state and its options by parameter name. The tensors are the live ones: copy or save them before the next step."""
    names = {id(p): name for name, p in owned.items()}
    return {
        "state": {names[id(p)]: dict(state) for p, state in optimizer.state.items()},
        "groups": [
            {"names": [names[id(p)] for p in group["params"]], **{key: value for key, value in group.items() if key != "params"}}
            for group in optimizer.param_groups
        ],
    }


def load_optimizer_state(optimizer: Optimizer, owned: Mapping[str, nn.Parameter], saved: Mapping[str, Any]) -> None:
    """Give it what `optimizer_state` told, wherever each parameter's group was. Raises ValueError where the parameters differ."""
    names = {id(p): name for name, p in owned.items()}
    options = {name: group for group in saved["groups"] for name in group["names"]}
    missing = [name for name in owned if name not in options]
    if missing:
        raise ValueError(f"the checkpoint knows no optimizer state of {missing[0]!r}: was it saved with another model?")
    ordered = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    groups, start = [], 0
    for group in optimizer.param_groups:
        mine = ordered[start : start + len(group["params"])]
        kept = {key: value for key, value in options[mine[0]].items() if key != "names"}
        groups.append({**kept, "params": list(range(start, start + len(mine)))})
        start += len(mine)
    state = {index: saved["state"][name] for index, name in enumerate(ordered) if name in saved["state"]}
    optimizer.load_state_dict({"state": state, "param_groups": groups})
