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
from parallel101.trainers.flat import Flat
from parallel101.trainers.optimizers import names_by_group, to_load, told


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
        self.names = names_by_group(optimizer, whole)
        state = {name: optimizer.state[p] for name, p in whole.items() if p in optimizer.state}  #  Adagrad's is there from the start
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
        mine: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        for name, piece in self.pieces.items():
            state = self.optimizer.state.get(piece, {})
            cut = {key for key, value in state.items() if is_cut(key, value, piece.shape)}
            mine[name] = ({key: state[key] for key in cut}, {key: value for key, value in state.items() if key not in cut})
        whole = {}
        of_all = tell_first(mine, self.group, self.device)
        for name, shape in self.shapes.items():
            parts = [pieces[name] for pieces in of_all if name in pieces]
            if parts and any(parts[0]):
                joined = {key: torch.cat([cut[key] for cut, _ in parts]).view(shape) for key in parts[0][0]}
                whole[name] = {**joined, **parts[0][1]}
        return told(self.optimizer, self.names, whole)

    def to_load(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """What this rank's optimizer takes of what `whole` or `optimizer_state` told; see optimizers.py."""
        return to_load(self.optimizer, self.names, saved, self.pieces, self.cut)


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
