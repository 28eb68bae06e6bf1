"""What the state_dict of a whole model has, by key and by name of the parameter or buffer."""

from __future__ import annotations

from torch import Tensor, nn


def tensors_of_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that a state_dict has, by name, each once however often it is tied."""
    kept = {id(value) for value in model.state_dict(keep_vars=True).values()}
    return {
        name: t for name, t in [*model.named_parameters(), *model.named_buffers()] if id(t) in kept
    }


class StateNames:
    """What a whole model's state_dict has.

    Attributes:
        keys: all of them. names: key → name of the parameter or buffer; several keys have the same
            name if they are tied.
    """

    def __init__(self, model: nn.Module):
        names = {id(t): name for name, t in tensors_of_state(model).items()}
        state = model.state_dict(keep_vars=True)
        self.keys = list(state)
        self.names = {key: names[id(t)] for key, t in state.items() if id(t) in names}
