"""Are all ranks of one mind? Asked with a few bytes; where they are not, it is said on every rank, with the parameter and the rank.

rank 0   hash of everything 3f9a…  ┐  all alike: 8 bytes a rank, and training goes on;
rank 1   hash of everything 3f9a…  ┘  not alike: a line a parameter, and an error that says which
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from parallel101.collectives import all_gather, broadcast
from parallel101.mesh import GroupLike, group_of
from parallel101.record.signatures import in_bytes

DIGEST = 8  #  bytes of a hash
SEED_ALIKE = "seed all ranks alike before you build the model (torch.manual_seed(0)), or pass sync=True to take the first rank's weights"


def check_or_copy(model: nn.Module, group: GroupLike, device: torch.device, sync: bool = False) -> None:
    """Make sure that parameters and buffers are the same on every rank, or, with `sync`, make them so: the first rank's.

    Raises ValueError, the same on every rank, where names, shapes or dtypes differ, or, without `sync`, values.
    """
    check(tensors_of(model), group, device, "the models differ at the start", SEED_ALIKE, values=not sync)
    if sync:
        with torch.no_grad():
            for _, tensor in tensors_of(model):
                tensor.copy_(broadcast(tensor, 0, group=group))


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name, each once, however often it is tied."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def check(
    tensors: Iterable[tuple[str, Tensor]], group: GroupLike, device: torch.device, what: str, advice: str, *, values: bool = True
) -> None:
    """Raises ValueError, the same on every rank, where names, shapes, dtypes or (if asked) values are not: `what`, where, `advice`."""
    if group_of(group).size == 1:
        return
    mine = "\n".join(f"{name}\t{tuple(t.shape)} {t.dtype}\t{fingerprint(t) if values else ''}" for name, t in tensors)
    if same_everywhere(mine, group, device):
        return
    models = [dict(line.split("\t", 1) for line in text.splitlines()) for text in tell(mine, group, device)]
    raise ValueError(f"{what}: {difference(models, group_of(group).ranks, advice)}")


def same_everywhere(text: str, group: GroupLike, device: torch.device) -> bool:
    """Whether all ranks say the same; they tell each other its hash, 8 bytes."""
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=DIGEST).digest(), "big", signed=True)
    return len(set(all_gather(torch.tensor([number], device=device), group=group).tolist())) == 1


def tell(text: str, group: GroupLike, device: torch.device) -> list[str]:
    """What every rank has to say, by position, on every rank."""
    mine = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    sizes = all_gather(torch.tensor([len(mine)], device=device), group=group).tolist()
    return [bytes(part.tolist()).decode() for part in all_gather(mine, group=group, sizes=sizes).split(sizes)]


def agree_that_none(problem: Exception | None, doing: str, group: GroupLike, device: torch.device) -> None:
    """Where something went wrong on any rank, raise on every rank, so that none goes on alone: `problem` where there is one.

    On the others an OSError or a ValueError, as it was there, that says which rank could not do what, and why.
    """
    kinds = {"OSError": OSError, "ValueError": ValueError}
    kind = "OSError" if isinstance(problem, OSError) else "ValueError"
    told = tell(f"{kind} {type(problem).__name__}: {problem}" if problem else "", group, device)
    if problem:
        raise problem
    for rank, text in zip(group_of(group).ranks, told):
        if text:
            kind, _, why = text.partition(" ")
            raise kinds[kind](f"rank {rank} could not {doing}: {why}")


def fingerprint(tensor: Tensor) -> str:
    """A hash of the values, bit by bit: the same for the same numbers on any rank of the same kind of machine."""
    return hashlib.blake2b(in_bytes(tensor.cpu()).numpy().data, digest_size=DIGEST).hexdigest()


def difference(models: list[dict[str, str]], ranks: tuple[int, ...], advice: str) -> str:
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
            return f"{name!r} is {kinds[0]} on rank {ranks[0]} and {kinds[1]} {there}; build the same model on every rank"
        return f"{name!r} {there} has other values than on rank {ranks[0]}; {advice}"
    return "they list their parameters in different orders; build the same model on every rank"
