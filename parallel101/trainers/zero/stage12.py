"""ZeRO stages 1 and 2: like data parallel, but each rank updates only 1/n of the weights and tells
the others.

            weights   gradients   optimizer state      sent by each rank in a step
    stage 1  all       all         1/n                  2(n−1)/n of the gradients' bytes: reduce-scatter, then all-gather of the weights
    stage 2  all       1/n         1/n                  the same; a bucket's gradients are freed as soon as they have left

Stage 3 shards the weights as well: stage3.py. Source: Rajbhandari et al., "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models" (2020), sections 5 and 7.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn

from parallel101.mesh import GroupLike, group_of
from parallel101.record.spans import span, wait_span
from parallel101.trainers.gradient_sync import GradientSync, Parameters, by_size, completed_twice
from parallel101.trainers.support.memory import LiveBytes, readable
from parallel101.trainers.zero.flat import Flat, GradientReducer


class ZeRO12(GradientSync):
    """A GradientSync (see gradients.py) that sends each flat array as soon as backward has made all
    its gradients.

    The order is the same on every rank, whatever came first. Stage 1 adds up the gradients of
    several microbatches where they are and sends them once; stage 2 has no place for whole
    gradients, and sends after each microbatch.
    """

    def __init__(
        self,
        parameters: Parameters,
        group: GroupLike,
        *,
        zero_stage: int,
        bucket_bytes: int,
        overlap: bool,
        apart: Mapping[str, str] = {},
    ):
        self.zero_stage, self.overlap = zero_stage, overlap
        self.live = LiveBytes()
        self.reducer = GradientReducer(group)
        self.ranks = group_of(group).size
        together = by_size(parameters, bucket_bytes, apart)
        self.flats = [
            Flat(names, group, self.live, weights=True, gradients=zero_stage == 1)
            for names in together
        ]
        self.owned = {name: piece for flat in self.flats for name, piece in flat.owned.items()}
        self.placements = {
            name: pieces for flat in self.flats for name, pieces in flat.placements.items()
        }
        self.listening = False
        self.sent = 0
        self.missing: dict[Flat, set[nn.Parameter]] = {}
        self.home = {p: (flat, name) for flat in self.flats for name, p in flat.parameters.items()}
        for p in self.home:
            p.register_post_accumulate_grad_hook(self.ready)

    def begin(self) -> None:
        self.live.begin()
        self.reducer.begin()
        for flat in self.flats:
            flat.begin()
        for p in self.home:
            p.grad = None

    def forward(self) -> AbstractContextManager:
        return nullcontext()

    @contextmanager
    def backward(self, kind: str = "B", last: bool = True) -> Iterator[None]:
        complete = last or (self.zero_stage == 2 and kind != "I")
        self.sent, self.missing = 0, {flat: set(flat.parameters.values()) for flat in self.flats}
        self.listening = complete
        try:
            yield
        except Exception:
            complete = False
            raise
        finally:  # after an error, too: the other ranks wait for these
            self.listening = False
            while complete and self.sent < len(
                self.flats
            ):  # those with a parameter that this rank's samples have not reached, and the next
                self.send_next()

    def ready(self, p: Tensor) -> None:
        """The gradient of p is complete."""
        assert isinstance(p, nn.Parameter) and p.grad is not None
        flat, name = self.home[p]
        self.live.watch("gradients", p.grad)
        if self.listening:
            if self.overlap and p not in self.missing[flat]:
                raise completed_twice(name)
            with span("gradient ready", parameter=name):
                self.missing[flat].discard(p)
            while (
                self.overlap
                and self.sent < len(self.flats)
                and not self.missing[self.flats[self.sent]]
            ):
                self.send_next()

    def send_next(self) -> None:
        flat, self.sent = self.flats[self.sent], self.sent + 1
        self.reducer.send(flat)

    def finish(self) -> list[str]:
        self.reducer.finish()
        return give_gradients(self.flats)

    def publish(self) -> None:
        """Every owner sends the weights that it has updated."""
        with wait_span("gather weights"):
            for flat in self.flats:
                flat.refresh()
            for flat in self.flats:
                flat.wait()

    def held(self) -> Mapping[str, list[Tensor]]:
        return held_by(self.flats)

    def peaks(self) -> Mapping[str, int]:
        return peaks_of(self.live)

    def describe(self) -> str:
        return in_words(self.zero_stage, self.flats, "buckets", self.ranks)


def give_gradients(flats: list[Flat]) -> list[str]:
    """To every piece its gradient.

    Returns the names of the parameters that this rank's samples gave none.
    """
    for flat in flats:
        flat.give_gradients()
    return [name for flat in flats for name in flat.parameters if name not in flat.reached]


def held_by(flats: list[Flat]) -> dict[str, list[Tensor]]:
    """Kind → what this rank holds now, besides the parameters themselves."""
    return {
        "weights": [t for flat in flats for t in (flat.shard, flat.whole) if t is not None],
        "gradients": [t for flat in flats for t in (flat.grad, flat.whole_grad) if t is not None],
    }


def peaks_of(live: LiveBytes) -> dict[str, int]:
    return {
        "gathered (peak)": live.peak["weights"],
        "gradients in flight (peak)": live.peak["gradients"],
    }


def in_words(zero_stage: int, flats: list[Flat], what: str, ranks: int) -> str:
    pieces, names = (
        sum(len(flat.owned) for flat in flats),
        sum(len(flat.parameters) for flat in flats),
    )
    largest, padding = (
        max(flat.shard.nbytes for flat in flats) * ranks,
        sum(flat.padding for flat in flats),
    )
    return (
        f"ZeRO stage {zero_stage}: {pieces} pieces of {names} parameters on this rank, in "
        f"{len(flats)} {what}, "
        f"the largest {readable(largest)}; {padding} elements of padding"
    )
