"""Agreement of the ranks in a few numbers, so that all go on together or all raise together.

    rank 0   loss 0.71, fine            ┐ all fine: a few bytes a rank, and training goes on
    rank 1   loss 0.64, fine            ┘
    rank 2   can't read the file        → every rank raises: rank 2 its own error, the others one
                                          that names rank 2 and quotes it

It compares hashes first, and texts only where they differ. It does not catch a rank that died or
never comes: the launcher does.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from parallel101.collectives import all_gather, broadcast, gather
from parallel101.collectives.meta_device import numbers_device
from parallel101.mesh import GroupLike, group_of
from parallel101.spans import wait_span
from parallel101.trainers.batches import number_of_text, number_of_values, raw_memory

FEW_STEPS = "bruck"  # a few bytes a rank, however many ranks there are
KINDS = {"OSError": OSError, "ValueError": ValueError, "RuntimeError": RuntimeError}
SEED_ALIKE = (
    "seed all ranks alike before you build the model (torch.manual_seed(0)), or pass sync=True "
    "to take the first rank's weights"
)


class Agreement:
    """Small exchanges among all ranks that train together.

    Every rank of the group calls the same methods in the same order.
    """

    def __init__(self, group: GroupLike, device: torch.device):
        # found once: a DeviceMesh takes its time to tell
        self.group, self.device = group_of(group), numbers_device(device)
        self.ranks = self.group.ranks

    def numbers(self, *here: float) -> list[list[float]]:
        """Return, for each of these numbers, a list of every rank's, by position."""
        sent = torch.tensor([here], dtype=torch.float64, device=self.device)
        with wait_span("agree"):
            return all_gather(sent, group=self.group, algorithm=FEW_STEPS).t().tolist()

    def objects(self, here: Any, first_only: bool = False) -> list[Any]:
        """Return every rank's object, by position: tensors, numbers and texts, in dicts, lists and
        tuples. Without tensors, tuples arrive as lists. With `first_only` the other ranks get [].
        """
        if len(self.ranks) == 1:
            return [here]
        try:
            content: Any = bytearray(json.dumps(here).encode())  # a few bytes
        except TypeError:  # there are tensors
            file = io.BytesIO()
            torch.save(here, file)
            content = file.getbuffer()
        data = torch.frombuffer(content, dtype=torch.uint8).to(self.device)
        sizes = [int(size) for size in self.numbers(len(data))[0]]
        if first_only:
            data = gather(data, 0, group=self.group, sizes=sizes)
        else:
            data = all_gather(data, group=self.group, sizes=sizes, algorithm=FEW_STEPS)
        parts = data.cpu().split(sizes) if len(data) else ()
        return [
            torch.load(io.BytesIO(raw), map_location=self.device, weights_only=True)
            if raw[:2] == b"PK"  # as a zip file begins
            else json.loads(raw)
            for raw in (bytes(raw_memory(part)) for part in parts)
        ]

    def same(self, text: str) -> bool:
        """Return whether all ranks pass the same text. They send each other its hash, 8 bytes."""
        (numbers,) = self.numbers(number_of_text(text))
        return len(set(numbers)) == 1

    def all_or_none(self, doing: str, work: Callable[[], Any]) -> Any:
        """Return the result of `work()` if it succeeds on all ranks, or raise on all of them."""
        done, problem = None, None
        try:
            done = work()
        except Exception as error:
            problem = error
        if any(self.numbers(problem is not None)[0]):
            self.raise_problem(problem, doing)
        return done

    def raise_problem(self, problem: Exception | None, doing: str) -> None:
        """Raise on every rank, after one of them or several failed: `problem` on those, on the
        others an error that quotes the first.

        That is an OSError or a ValueError if it was one there, else a RuntimeError. Its
        `failed_rank` tells a launcher whose error to report.
        """
        kind = next((name for name, k in KINDS.items() if isinstance(problem, k)), "RuntimeError")
        with wait_span("agree"):
            texts = self.objects(f"{kind} {type(problem).__name__}: {problem}" if problem else "")
        if problem:
            raise problem
        rank, text = next((rank, text) for rank, text in zip(self.ranks, texts) if text)
        kind, _, why = text.partition(" ")
        error = KINDS[kind](f"rank {rank} could not {doing}: {why}")
        error.failed_rank = rank  # type: ignore[attr-defined]
        raise error

    def check_same(
        self, tensors: Iterable[tuple[str, Tensor]], what: str, advice: str, *, values: bool = True
    ) -> None:
        """Raise the same ValueError on every rank if names, shapes, dtypes or (if asked) values
        differ. Its text is `what`, where, and `advice`.
        """
        if len(self.ranks) == 1:
            return
        own = {
            name: f"{tuple(t.shape)} {t.dtype}\t{number_of_values(t) if values else ''}"
            for name, t in tensors
        }
        if self.same(str(own)):
            return
        of_ranks, same = self.objects(own), "expected the same on every rank"
        for name in dict.fromkeys(name for of_rank in of_ranks for name in of_rank):
            entries = [of_rank.get(name, "absent") for of_rank in of_ranks]
            others = [i for i, entry in enumerate(entries) if entry != entries[0]]
            if others:
                ranks = ", ".join(str(self.ranks[i]) for i in others)
                there = f"on rank{'s' * (len(others) > 1)} {ranks}"
                first, other = (entries[i].partition("\t")[0] for i in (0, others[0]))
                where = f"is {first} on rank {self.ranks[0]} and {other} {there}: {same}"
                if first == other:
                    where = f"{there} differs from rank {self.ranks[0]}; {advice}"
                raise ValueError(f"{what}: {name!r} {where}")
        raise ValueError(f"{what}: they have them in different orders: {same}")

    @torch.no_grad()
    def check_or_copy(self, model: nn.Module, sync: bool) -> None:
        """Make sure that parameters and buffers are the same on every rank or, with `sync`, copy
        the first rank's.

        Raises ValueError, the same on every rank, if names, shapes or dtypes differ, or, without
        `sync`, values.
        """
        with wait_span("agree"):
            differ = "the models differ at the start", SEED_ALIKE
            self.check_same(named_tensors(model), *differ, values=not sync)
            for _, tensor in named_tensors(model) if sync else ():
                tensor.copy_(broadcast(tensor, 0, group=self.group))


def named_tensors(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers by name, each once, however often it is tied; or under all of
    its names.
    """
    yield from model.named_parameters(remove_duplicate=remove_duplicate)
    yield from model.named_buffers(remove_duplicate=remove_duplicate)
