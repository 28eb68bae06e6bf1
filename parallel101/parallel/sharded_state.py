"""An optimizer over pieces: built over whole parameters, handed the pieces that this rank owns; its state saved whole, by name.

rank 0   exp_avg of weight[0:8]  ┐
rank 1   exp_avg of weight[8:16] ┘ ─▶ the first rank: exp_avg of weight, 4 × 4        so that any layout can take it up
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel101.collectives import all_gather, gather
from parallel101.mesh import GroupLike, group_of
from parallel101.parallel.flat import Flat


class ShardedState:
    """Cuts the state of a whole optimizer into this rank's pieces, and puts it together again.

    Args:
        optimizer: built over `whole`; from now on it updates the pieces, in the same groups.
        whole: the model's parameters by name.
        flats: where each of them lies.
        group: the ranks that have the other pieces.
    """

    def __init__(self, optimizer: Optimizer, whole: Mapping[str, nn.Parameter], flats: Sequence[Flat], group: GroupLike):
        self.optimizer, self.group, self.device = optimizer, group, flats[0].shard.device
        self.shapes = {name: shape for flat in flats for name, shape in flat.shapes.items()}
        self.spans = {name: span for flat in flats for name, span in flat.spans.items()}
        self.pieces = {name: piece for flat in flats for name, piece in flat.pieces.items()}
        names = {id(p): name for name, p in whole.items()}
        self.names = [[names[id(p)] for p in options["params"]] for options in optimizer.param_groups]
        state = {names[id(p)]: of_one for p, of_one in optimizer.state.items()}  #  Adagrad's is there from the start
        optimizer.state.clear()
        for options, in_group in zip(optimizer.param_groups, self.names):
            options["params"] = [self.pieces[name] for name in in_group if name in self.pieces]
        for name, piece in self.pieces.items():
            if name in state:
                optimizer.state[piece] = self.cut(name, state[name])

    def cut(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's piece of one parameter's state; what has not the parameter's shape, such as the number of steps, is everyone's."""
        low, high = self.spans[name]
        return {
            key: value.reshape(-1)[low:high].clone() if is_cut(key, value, self.shapes[name]) else value for key, value in state.items()
        }

    def whole(self) -> dict[str, Any]:
        """As `optimizer_state` tells it on one process, on the first rank; the others get a dict without state. Collective."""
        mine = {}
        for name, piece in self.pieces.items():
            state = self.optimizer.state.get(piece, {})
            cut = {key for key, value in state.items() if is_cut(key, value, piece.shape)}
            mine[name] = ({key: state[key] for key in cut}, {key: value for key, value in state.items() if key not in cut})
        state = {}
        told = tell_first(mine, self.group, self.device)
        for name, shape in self.shapes.items():
            parts = [pieces[name] for pieces in told if name in pieces]
            if parts and any(parts[0]):
                joined = {key: torch.cat([cut[key] for cut, _ in parts]).view(shape) for key in parts[0][0]}
                state[name] = {**joined, **parts[0][1]}
        options = [{key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups]
        return {"state": state, "groups": [{"names": names, **group} for names, group in zip(self.names, options)]}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Take up what `whole` or `optimizer_state` told. Raises ValueError where the parameters differ."""
        options = {name: group for group in saved["groups"] for name in group["names"]}
        missing = [name for name in self.shapes if name not in options]
        if missing:
            raise ValueError(f"the checkpoint knows no optimizer state of {missing[0]!r}: was it saved with another model?")
        mine = [[name for name in names if name in self.pieces] for names in self.names]
        numbers = {name: i for i, name in enumerate(name for names in mine for name in names)}
        groups = []
        for names, of_group in zip(self.names, mine):
            kept = {key: value for key, value in options[names[0]].items() if key != "names"}
            groups.append({**kept, "params": [numbers[name] for name in of_group]})
        state = {numbers[name]: self.cut(name, saved["state"][name]) for name in numbers if name in saved["state"]}
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


def is_cut(key: str, value: Any, shape: Sequence[int]) -> bool:
    return isinstance(value, Tensor) and value.shape == torch.Size(shape) and key != "step"  #  torch knows that key, too


def tell_first(content: Any, group: GroupLike, device: torch.device) -> list[Any]:
    """What every rank has to say (tensors, numbers, strings, in dicts and tuples), in order, on the first rank; [] on the others."""
    members = group_of(group)
    if members.size == 1:
        return [content]
    file = io.BytesIO()
    torch.save(content, file)
    packed = torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8).to(device)
    sizes = all_gather(torch.tensor([len(packed)], device=device), group=group).tolist()
    told = gather(packed, 0, group=group, sizes=sizes)
    if members.position != 0:
        return []
    return [torch.load(io.BytesIO(part.cpu().numpy().tobytes()), map_location=device, weights_only=True) for part in told.split(sizes)]
