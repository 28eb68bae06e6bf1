"""Do all ranks start from the same model? Asked once, with a few bytes; where they do not, the parameter and the ranks are named.

rank 0   hash of everything 3f9a…  ┐  all alike: 8 bytes a rank, and training starts;
rank 1   hash of everything 3f9a…  ┘  not alike: a hash a parameter, and an error that says which
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from parallel101.collectives import all_gather, broadcast
from parallel101.mesh import GroupLike, group_of

DIGEST = 8  #  bytes of a hash


def check_or_copy(model: nn.Module, group: GroupLike = None, sync: bool = False) -> None:
    """Make sure that parameters and buffers are the same on every rank, or, with `sync`, make them so: the first rank's.

    Raises ValueError, the same on every rank, where names, shapes or dtypes differ, or, without `sync`, values.
    """
    members = group_of(group)
    if members.size == 1:
        return
    check(model, group, values=not sync)
    if sync:
        with torch.no_grad():
            for _, tensor in tensors_of(model):
                tensor.copy_(broadcast(tensor, 0, group=group))


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name, each once, however often it is tied."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def check(model: nn.Module, group: GroupLike, values: bool) -> None:
    device = next((tensor.device for _, tensor in tensors_of(model)), torch.device("cpu"))
    lines = [f"{name}\t{tuple(t.shape)} {t.dtype}\t{fingerprint(t) if values else ''}" for name, t in tensors_of(model)]
    mine = "\n".join(lines).encode()
    head = torch.tensor([len(mine), *hashlib.blake2b(mine, digest_size=DIGEST).digest()], dtype=torch.int64, device=device)
    heads = all_gather(head, group=group).view(-1, 1 + DIGEST)
    if (heads == heads[0]).all():
        return
    sizes = heads[:, 0].tolist()
    told = all_gather(torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device), group=group, sizes=sizes).cpu()
    models = [dict(line.split("\t", 1) for line in bytes(t.tolist()).decode().splitlines()) for t in told.split(sizes)]
    raise ValueError(difference(models, group_of(group).ranks))


def fingerprint(tensor: Tensor) -> str:
    """A hash of the values, bit by bit: the same for the same numbers on any rank of the same kind of machine."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=DIGEST).hexdigest()


def difference(models: list[dict[str, str]], ranks: tuple[int, ...]) -> str:
    """What is wrong, in words: the first entry that some ranks have otherwise than the first rank."""
    for name in dict.fromkeys(name for model in models for name in model):
        entries = [model.get(name) for model in models]
        others = [rank for rank, entry in zip(ranks, entries) if entry != entries[0]]
        if not others:
            continue
        there = f"on rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
        other = next(entry for entry in entries if entry != entries[0])
        kinds = ["absent" if entry is None else entry.split("\t")[0] for entry in (entries[0], other)]
        if kinds[0] != kinds[1]:
            return (
                f"the models differ: {name!r} is {kinds[0]} on rank {ranks[0]} and {kinds[1]} {there}; build the same model on every rank"
            )
        return (
            f"the models differ at the start: {name!r} {there} has other values than on rank {ranks[0]}; seed all ranks alike before you "
            "build the model (torch.manual_seed(0)), or pass sync=True to take the first rank's weights"
        )
    return "the models list their parameters in different orders: build the same model on every rank"
