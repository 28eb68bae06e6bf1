"""Reports of a trainer's memory: the bytes that each rank holds, and what autograd keeps.

    rank 0   weights 4.2 MB   gradients 4.2 MB   optimizer state 8.4 MB
    rank 1   weights 4.2 MB   …                  two views of one storage count once

    forward    y = gelu(x) saves x           a storage is noted: its bytes are held
    backward   ∂x needs x, then lets it go   its memory is freed: they are not

Bytes are counted from the storages that are alive, not from sizes. `count_activations` counts while
a step runs, and keeps nothing alive: it has weak references to storages. A storage counts once,
from the first time that a tensor in it is saved until its memory is freed. What was in memory
before the count began (parameters, buffers, the batch) is not counted, and neither are weights that
ZeRO-3 gathers. Recomputed activations count while they are there.
"""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks

from parallel101.spans import listening
from parallel101.trainers.batches import tensors_of
from parallel101.trainers.layout import ORDER, Layout
from parallel101.trainers.options import Trainer

Part = tuple[float, float]  # from, to: fractions of the whole model


@dataclass(frozen=True)
class Holdings:
    """The result of `describe()`: for each rank of the group, in order, the bytes of each kind
    that it holds. Print it to see a table.

    Attributes: title: which trainer, on how many ranks. ranks: their ranks in the world. bytes:
        kind → bytes by position, such as {"weights": [4096, 4096], …}. notes: what else is worth
        telling, a line each: how modules are cut, parameters placed and gradients synchronized.
        parts: kind → by position, which parts of the whole model these bytes belong to; see
        `parts_held`.
    """

    title: str
    ranks: Sequence[int]
    bytes: Mapping[str, Sequence[int]]
    notes: Sequence[str] = ()
    parts: Mapping[str, Sequence[Sequence[Part]]] = field(default_factory=dict)

    def total(self, position: int) -> int:
        return sum(by_position[position] for by_position in self.bytes.values())

    def __str__(self) -> str:
        kinds = [*self.bytes.values(), [self.total(i) for i in range(len(self.ranks))]]
        rows = [["", *self.bytes, "together"]]
        for i, rank in enumerate(self.ranks):
            rows.append([f"rank {rank}", *(readable(of_kind[i]) for of_kind in kinds)])
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["   ".join(map(str.rjust, row, widths)) for row in rows]
        return "\n".join([self.title, *lines, *self.notes])

    __repr__ = __str__


def describe(trainer: Trainer) -> Holdings:
    """Return each rank's holdings in bytes, counted from the storages that are alive now.

    Collective; print it to see a table.
    """
    ranks = trainer.agree.ranks
    title = f"{type(trainer).__name__} on {len(ranks)} rank{'s'[: len(ranks) - 1]}"
    data, owned = trainer.data, trainer.owned
    parameters = [*trainer.model.parameters(), *trainer.runner.sync.owned.values()]
    held: dict[str, Iterable[Tensor]] = {
        "weights": [*parameters, *trainer.model.buffers()],
        "gradients": [p.grad for p in [*parameters, *owned.values()] if p.grad is not None],
        "optimizer state": tensors_of([*trainer.optimizer.state.values()]),
    }
    if trainer.precision.master:
        held["master weights"] = owned.values()
    nbytes = dict[str, int]()
    for kind, tensors in held.items():  # each storage once, however many tensors share it
        storages = {id(storage := t.untyped_storage()): storage.nbytes() for t in tensors}
        nbytes[kind] = sum(storages.values())
    if zero_stage := data.options.zero_stage:
        nbytes["gathered (peak)"] = data.zero.peak["weights"]
        nbytes["gradients in flight (peak)"] = data.zero.peak["gradients"]
    if trainer.activations is not None:
        nbytes["activations (peak)"] = trainer.activations.peak
    of_ranks = trainer.agree.objects(nbytes)
    # a stage without trained weights has fewer kinds
    kinds = dict.fromkeys(kind for of_rank in of_ranks for kind in of_rank)
    counts = {kind: [of_rank.get(kind, 0) for of_rank in of_ranks] for kind in kinds}
    how = "; ".join(dict.fromkeys(sync.how for _, sync in data.syncs))
    how += "; it updates master weights" * trainer.precision.master
    notes = [*trainer.notes, *trainer.layout.describe(), f"{len(owned)} gradients, {how}"]
    # dp cuts what its ZeRO stage says, and everything else is the same along it
    parts, names_of = {}, {"weights": trainer.layout.entries}
    cut_from = {"weights": 3, "gradients": 2, "optimizer state": 1, "master weights": 1}
    for kind in filter(counts.__contains__, cut_from):
        names, in_pieces = names_of.get(kind, trainer.trained), zero_stage >= cut_from[kind]
        parts[kind] = parts_held(trainer.layout, names, counts[kind], in_pieces)
    return Holdings(title, ranks, counts, notes, parts)


def parts_held(
    layout: Layout, names: Iterable[str], nbytes: Sequence[int], in_pieces: bool
) -> list[list[Part]]:
    """Return the part of the model that each rank holds, by position in the group.

        rank 0  ▇▇▇             [(0.0, 0.3)]
        rank 1  ▇▇▇             [(0.0, 0.3)]    a replica of rank 0
        rank 2     ▇▇▇▇▇▇▇      [(0.3, 1.0)]    another stage

    The parts are put side by side, in the order of the cuts: stages, in each stage the shards along
    tp and ep, in each shard the pieces along dp. What only some ranks cut (a norm is the same along
    tp) counts as cut.

    Args:
        layout: of the model.
        names: of the tensors that count.
        nbytes: of them, by position.
        in_pieces: whether dp cuts them.
    """
    cut = set().union(*(layout.entries[name].cut_by(in_pieces) for name in names))
    order = [axis for axis in (*ORDER, "cp") if axis in cut]
    everywhere = map(layout.axes.coordinates, range(len(nbytes)))
    places = [tuple(where[axis] for axis in order) for where in everywhere]
    sizes = dict(sorted(zip(places, nbytes)))
    ends, whole = dict(zip(sizes, accumulate(sizes.values()))), max(sum(sizes.values()), 1)
    return [[((ends[place] - sizes[place]) / whole, ends[place] / whole)] for place in places]


def readable(count: float) -> str:
    """Return 18_874_368 as "18.9 MB": in powers of 1000, as papers write memory."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


OUTSIDE = "(outside of the model)"  # where the loss saves
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a module's name: blocks.3.mlp
PHASES = ("forward", "backward", "input gradient", "weight gradient")


@contextmanager
def count_activations(of: nn.Module | Trainer) -> Iterator[Activations]:
    """Count what autograd keeps for the backward pass inside of the block.

    with p101.count_activations(trainer) as activations:
        trainer.step(inputs, targets)
    print(activations)

    Make the batch before the block, so that it isn't counted. Spans named "forward" and "backward"
    distinguish the microbatches; the trainers have them. What `verify` computes isn't counted.
    Afterwards `trainer.describe()` shows the peak, too.

    Args:
        of: a trainer, or any model in a loop of your own.

    Yields an Activations, which is filled while the block runs. A step that is counted takes
    longer; one that isn't costs nothing. Gradients that a zero-bubble schedule keeps for its weight
    gradients are not activations, and are not counted.

    Example:
        >>> model = p101.models.MLP([4, 8, 2])
        >>> with p101.count_activations(model) as activations:
        ...     model(torch.ones(16, 4)).sum().backward()
        >>> print(activations)
        1.28 kB of activations at the peak, in the program
             768 B   layers.*
             512 B   (the model)
    """
    trainer: Trainer = None if isinstance(of, nn.Module) else of
    model: nn.Module = trainer.model if trainer else of
    parts = getattr(trainer.runner, "parts", {}) if trainer else {}
    count = Count(model)
    names = dict.fromkeys(parts.values(), "") | {m: name for name, m in model.named_modules()}

    def enter(name: str, *_: Any) -> None:
        count.modules.append(name)

    def leave(*_: Any) -> None:
        count.modules.pop()

    with listening(count.span), ExitStack() as hooks:
        for module, name in names.items():
            hooks.enter_context(module.register_forward_pre_hook(partial(enter, name)))
            hooks.enter_context(module.register_forward_hook(leave, always_call=True))
        with _lock:
            _running[threading.get_ident()] = count
            saved_tensors_hooks.__enter__ = _enter  # type: ignore[method-assign]
        try:
            with saved_tensors_hooks(Tensor.detach, lambda saved: saved):
                yield count.activations
        finally:
            with _lock:
                del _running[threading.get_ident()]
                if not _running:
                    saved_tensors_hooks.__enter__ = _torchs  # type: ignore[method-assign]
    count.refs.clear()
    if trainer:
        trainer.activations = count.activations


class Count:
    """A count that is running, on one rank.

    Attributes: modules: names of those that compute now, the innermost last.
    """

    def __init__(self, model: nn.Module):
        self.activations = Activations()
        self.modules, self.phase, self.paused = [OUTSIDE], 0, False
        self.held, self.refs = 0, list[weakref.ref]()  # refs tell when a storage is freed
        # what doesn't count, or counts already; another storage may get the id of one that is gone
        self.seen: weakref.WeakSet[UntypedStorage] = weakref.WeakSet()
        there = [t for t in gc.get_objects() if issubclass(type(t), Tensor)]
        for t in (*model.parameters(), *model.buffers(), *there):
            with suppress(NotImplementedError, RuntimeError):  # some kinds have no storage
                self.seen.add(t.untyped_storage())

    def note(self, t: Tensor) -> None:
        """Note that autograd saves this tensor."""
        storage = t.untyped_storage()
        if self.paused or storage in self.seen:
            return
        self.seen.add(storage)
        if isinstance(t, nn.Parameter) or isinstance(t._base, nn.Parameter):
            return  # gathered during the step
        kept, nbytes = self.activations.kept, storage.nbytes()
        number, phase, dtype = len(kept), self.activations.phases[self.phase], str(t.dtype)[6:]
        kept.append(Kept(nbytes, self.modules[-1], phase, dtype, tuple(t.shape)))
        self.refs.append(weakref.ref(storage, lambda _: self.change(number, False, -nbytes)))
        self.change(number, True, nbytes)

    def change(self, number: int, saved: bool, nbytes: int) -> None:
        """Note that a storage was saved, or that nothing holds it any more."""
        self.held += nbytes
        self.activations.changes.append(Change(number, saved, self.phase, self.held))

    @contextmanager
    def span(self, name: str | None, labels: Mapping[str, Any]) -> Iterator[None]:
        """Follow a span; with name None, a block that is not recorded."""
        before = self.phase, self.paused
        self.paused = self.paused or name is None
        inner = self.phase and "microbatch" not in labels  # such as a column layer's ∂W
        if name in PHASES and not inner and not self.paused:
            self.phase = len(self.activations.phases)
            where = labels.get("microbatch"), labels.get("stage")
            self.activations.phases.append(Phase(name, *where))
        try:
            yield
        finally:
            self.phase, self.paused = before


# Every pair of saved_tensors_hooks of a thread tells the thread's count what it saves. torch calls
# the innermost pair only, such as that of a recomputation, and has no public name for the others.
_lock, _torchs = threading.Lock(), saved_tensors_hooks.__enter__
_running: dict[int, Count] = {}  # by thread; the ranks of the sim are threads of one process


def _enter(hooks: saved_tensors_hooks) -> None:
    """Enter hooks as torch does, with a pack hook that also notes what is saved as a tensor."""
    # on a GPU, backward and so recomputation run in threads of torch's
    count = _running.get(threading.get_ident()) or (
        next(iter(_running.values())) if len(_running) == 1 else None
    )
    pack = hooks.pack_hook

    def noting(t: Tensor) -> Any:
        packed: Any = t  # and if a recomputation ends with this tensor, by an exception
        try:
            packed = pack(t)
            return packed
        finally:
            if isinstance(packed, Tensor) and count is not None:
                count.note(t)

    hooks.pack_hook = noting
    _torchs(hooks)
    hooks.pack_hook = pack


# ── the result ──


class Phase(NamedTuple):
    """A forward or a backward, or one half of it: the span in which something was saved."""

    name: str  # "forward", "backward", "input gradient", "weight gradient"; "" outside of them
    microbatch: int | None = None
    stage: int | None = None

    def __str__(self) -> str:
        which = "" if self.microbatch is None else f" of microbatch {self.microbatch}"
        where = "" if self.stage is None else f" on stage {self.stage}"
        return f"{self.name or 'the program'}{which}{where}"


class Kept(NamedTuple):
    """A storage that autograd keeps for the backward pass."""

    nbytes: int  # of the whole storage, of which the saved tensor may be a part
    module: str  # whose code saved it first; "" is the model's own
    phase: Phase  # in which it was saved
    dtype: str  # of the tensor that was saved first
    shape: tuple[int, ...]


class Change(NamedTuple):
    """An event: a storage was saved for the first time, or its memory was freed."""

    kept: int  # index in `Activations.kept`
    saved: bool
    phase: int  # index in `Activations.phases`
    held: int  # bytes afterwards


@dataclass
class Activations:
    """The tensors that autograd kept for backward in a `count_activations` block, on one rank.

    Attributes:
        kept: every storage that was saved, in order.
        changes: when each was saved and freed.
        phases: the forwards and backwards, in order. The first one is "", for what is outside.
    """

    kept: list[Kept] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=lambda: [Phase("")])

    @property
    def peak(self) -> int:
        """The most bytes that were held at once."""
        return max((change.held for change in self.changes), default=0)

    def at_peak(self) -> list[Kept]:
        """Return the storages held when the most bytes were held for the first time."""
        peak, held = self.peak, set[int]()
        for change in self.changes:
            held.symmetric_difference_update([change.kept])
            if change.held == peak:
                break
        return [self.kept[i] for i in sorted(held)]

    def by_module(self, depth: int | None = None) -> dict[str, int]:
        """Return the bytes at the peak, by module.

        Args:
            depth: how many parts of a name to keep: "blocks.0" for 2. None: all.
        """
        return added(self.at_peak(), lambda kept: ".".join(kept.module.split(".")[:depth]))

    def by_microbatch(self) -> dict[int | None, int]:
        """Return the bytes at the peak, by microbatch; None where no span named a microbatch."""
        return added(self.at_peak(), lambda kept: kept.phase.microbatch)

    def __str__(self) -> str:
        if not self.changes:
            return "no activations were saved for a backward pass"
        first = next(change for change in self.changes if change.held == self.peak)
        lines = [f"{readable(self.peak)} of activations at the peak, in {self.phases[first.phase]}"]
        microbatches = self.by_microbatch()
        if microbatches.keys() != {None}:
            lines += [f"{readable(n):>10}   microbatch {i}" for i, n in microbatches.items()]
        modules = added(self.at_peak(), lambda kept: NUMBER.sub("*", kept.module) or "(the model)")
        rows = sorted(modules.items(), key=lambda item: -item[1])
        return "\n".join([*lines, *(f"{readable(n):>10}   {name}" for name, n in rows)])

    __repr__ = __str__


def added(kept: Iterable[Kept], key: Callable[[Kept], Any]) -> dict[Any, int]:
    """Return, for each key, the bytes of all that have it."""
    sums: dict[Any, int] = defaultdict(int)
    for one in kept:
        sums[key(one)] += one.nbytes
    return dict(sums)
