"""This layout against one process, on the same few samples, before the first step: equal, or refused.

    every rank       m or m + 1 of its samples ─▶ the trainer's own step ─▶ loss, gradients, updated weights ┐
    the first rank   all of those samples ──────▶ one process (one_process.py) ─▶ the same               ┴─▶ equal?

It is done twice: with the model's weights, and with slightly different ones, so that a weight that is zero now (LoRA's B, a head) hides
nothing. The optimizer is compared from equal gradients, since Adam turns the rounding of a zero gradient into a full step.

How close. A result in precision u is rounded once in each of the d modules, there and back, and sums up to k numbers. Such errors add up
like a random walk, so two orders of summing differ by about √(d·k)·u. In autocast the sums are in float32, and only results are rounded
to the coarser v: √d·v. The bound is 8 times that, relative to the largest gradient in the same module; and u, relative to the largest
of all, for a gradient that is zero but for rounding, such as that of a bias before a softmax.
"""

from __future__ import annotations

import copy
import json
import math
import random
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parallel101.collectives import broadcast
from parallel101.record.spans import unrecorded
from parallel101.trainers.explain import explain
from parallel101.trainers.one_process import OneProcess, Outcome, copy_of_optimizer, lift_learning_rates, without_dropout
from parallel101.trainers.support.batches import Batch, count_samples, map_tensors, number_of_shape, tensors_of
from parallel101.trainers.support.fit import evaluate_share, evaluation_mode
from parallel101.trainers.support.memory import readable
from parallel101.trainers.support.optimizers import tell_first

MOST_BYTES = 2**30  # of weights, gradients, optimizer copies and samples together: beyond that it is not done before the first step
WEIGHTS = ("weights as they are", "perturbed")
SAFETY = 8
ALSO = "One process can compute the first samples, but in parts they are an error:"
SHOWN = 5  # names of a kind


class Row(NamedTuple):
    """One comparison. `ratio`: the difference over the largest that rounding explains; above 1 it is a difference."""

    what: str  # "loss", "evaluate", "gradient", "norm", "update" or "buffer"
    name: str  # of the parameter or buffer
    weights: str  # one of WEIGHTS
    difference: float
    ratio: float


@dataclass(frozen=True)
class Report:
    """What `verify` returns. Print it to see a table.

    Attributes:
        rows: all comparisons, the same on every rank.
        reason: why nothing was compared, if nothing was.
        cause: of the first differences, in words.
    """

    rows: Sequence[Row] = field(default=(), repr=False)
    reason: str = ""
    cause: str = ""

    @property
    def worst(self) -> Row | None:
        """The row that comes closest to its bound, or exceeds it most."""
        return max(self.rows, key=lambda row: row.ratio, default=None)

    @property
    def equal(self) -> bool:
        """Whether something was compared, and no row exceeds its bound."""
        return bool(self.rows) and all(row.ratio <= 1 for row in self.rows)

    def __str__(self) -> str:
        if self.reason:
            return f"not verified: {self.reason}"
        compared: dict[tuple[str, str], dict[str, Row]] = {}
        for row in self.rows:
            compared.setdefault((row.what, row.name), {})[row.weights] = row
        lines = [("largest differences", *WEIGHTS, "of the bound")]
        for what in dict.fromkeys(row.what for row in self.rows):
            found = [(max(row.ratio for row in rows.values()), name, rows) for (kind, name), rows in compared.items() if kind == what]
            for worst, name, rows in sorted(found, key=lambda of_name: -of_name[0])[:SHOWN]:
                given, moved = (f"{rows[weights].difference:.1e}" if weights in rows else "" for weights in WEIGHTS)
                lines.append((f"{what} {name}".strip(), given, moved, f"{worst:.1%}" if worst <= 1 else "✗"))
            if len(found) > SHOWN:
                lines.append((f"{what}: {len(found) - SHOWN} more, all closer", "", "", ""))
        a, b, c, d = (max(len(line[column]) for line in lines) for column in range(4))
        table = [f"{name:{a}}   {given:>{b}}   {moved:>{c}}   {ratio:>{d}}" for name, given, moved, ratio in lines]
        title = "equal to one process" if self.equal else "not equal to one process"
        return "\n".join([title, *(line.rstrip() for line in table)])

    __repr__ = __str__


class NotEqualError(ValueError):
    """This layout computes something else than one process. `report` has all comparisons."""

    def __init__(self, message: str, report: Report):
        super().__init__(message, report)
        self.report = report

    def __str__(self) -> str:
        return str(self.args[0])


def verify(trainer: Any, inputs: Batch, targets: Batch = None) -> Report:
    """Compare this layout with one process, on some of these samples. Collective; it changes nothing and is not recorded.

    Loss, in training and evaluation, every gradient, their norm if `clip_norm` is set, buffers, and the weights after one update of the
    optimizer from equal gradients: with the model's weights, and once more with slightly perturbed ones and a learning rate above zero.
    Dropout keeps everything. The first rank computes microbatches + 1 samples of each position along dp at most, as one process does; the
    others wait.

    Args:
        inputs, targets: as for `step`.

    Returns a Report, the same on every rank, which prints as a table. If nothing could be compared, its `reason` says why: a model that
    draws random numbers of its own, or a model or optimizer that can't be copied.

    Raises NotEqualError, on every rank, with the report and, if it can be told, the cause. What a first batch does not show, it can't find:
    weights that are edited between steps, a layer that is unfrozen later, samples of a kind that comes later.
    """
    if not trainer.verifies:
        raise ValueError("this trainer was built with verify=False and keeps no copy of the whole model: build it with verify=True")
    with unrecorded():
        trainer.check_batch(inputs, targets)
        return compare(trainer, inputs, targets)


def compare(trainer: Any, inputs: Batch, targets: Batch) -> Report:
    with untouched(trainer):
        return Comparison(trainer, inputs, targets).run()


def verify_once(trainer: Any, inputs: Batch, targets: Batch) -> None:
    """Before the first step. Raises NotEqualError; if nothing can be compared, a line says so, and training goes on."""
    with unrecorded():
        reason = too_much(trainer, inputs, targets)
        report = Report(reason=reason) if reason else compare(trainer, inputs, targets)
    if report.reason and trainer.position == 0:
        print(report, flush=True)
    trainer.to_verify, trainer.compared = False, report.equal
    if trainer.one_process is not None:
        trainer.one_process.free()


def too_much(trainer: Any, inputs: Batch, targets: Batch) -> str:
    """Why it isn't done before the first step, the same on every rank."""
    entries = trainer.layout.entries
    if any(t.is_meta for t in trainer.model.parameters()):
        return "the model is on the meta device and has no values"
    nbytes = {name: entry.shape.numel() * entry.dtype.itemsize for name, entry in entries.items()}
    trained = sum(nbytes[name] for name in trainer.trained)
    samples = sum(t[:1].nbytes for t in tensors_of((inputs, targets))) * (trainer.executor.microbatches + 1) * trainer.axes.sizes["dp"]
    needed = int(max(trainer.agree.numbers(sum(nbytes.values()) + 4 * trained + samples)[0]))
    if needed <= MOST_BYTES:
        return ""
    return (
        f"a comparison with one process would take {readable(needed)} on rank {trainer.agree.ranks[0]}, more than {readable(MOST_BYTES)}. "
        "Try the same options with fewer or narrower layers, or call trainer.verify(inputs, targets) if the memory is there"
    )


class Comparison:
    """One verification. What all ranks do, in this order."""

    def __init__(self, trainer: Any, inputs: Batch, targets: Batch):
        self.trainer, self.first = trainer, trainer.position == 0
        wanted = trainer.executor.microbatches + (trainer.axes.here["dp"] % 2 == 0)  # uneven shares, if the batch allows it
        self.batch = map_tensors(lambda t: t[:wanted], (inputs, targets))
        self.rows: dict[tuple[str, str, str], tuple[float, float]] = {}

    def run(self) -> Report:
        trainer = self.trainer
        of_ranks = tell_first(self.batch if holds_share(trainer) else None, trainer.axes.group, trainer.device)
        values = trainer.layout.gather(trainer.parts, list(trainer.layout.entries), first_only=True)
        state = trainer.sharded_optimizer.state()
        reason, together = "", (None, None)
        expected: list[Outcome] = []
        if self.first:
            together = join([of_rank for of_rank in of_ranks if of_rank is not None])
            try:
                expected = self.one_process(together, values, state)
            except NotVerified as why:
                reason = str(why)
        header = json.loads(trainer.agree.texts(json.dumps(self.header(reason, expected)))[0])
        if header["reason"]:
            return Report(reason=header["reason"])

        def cause(rows: Sequence[Row]) -> str:
            words = explain(trainer, together, perturbed(values, trainer.trained), rows) if self.first else ""
            return trainer.agree.texts(words)[0]

        problem: BaseException | None = None
        try:
            for weights in WEIGHTS:
                self.compare(weights, header, expected[WEIGHTS.index(weights)] if self.first else None)
        except LayoutFailed as failed:
            problem = failed.__cause__
        if problem is not None:  # which one process had not
            if trainer.executor.goes_on and (words := cause(())):  # else the other ranks may be elsewhere
                raise NotEqualError(f"{words} {ALSO} {type(problem).__name__}: {problem}", Report(cause=words)) from problem
            raise problem
        report = Report(self.rows_of_all())
        if not report.equal:
            report = Report(report.rows, cause=cause(report.rows))
            raise NotEqualError(message(report), report)
        return report

    # ── one process, on the first rank ──

    def one_process(self, batch: tuple[Batch, Batch], values: Mapping[str, Tensor], state: Mapping[str, Any]) -> list[Outcome]:
        whole: OneProcess | None = self.trainer.one_process
        if whole is None:
            raise NotVerified(self.trainer.why_no_copy)
        outcomes = []
        try:
            for weights in WEIGHTS:
                mine = perturbed(values, self.trainer.trained) if weights == "perturbed" else values
                seed_all(1)
                with whole.holding(mine):
                    outcomes.append(whole.step(*batch, state, lift_lr=weights == "perturbed"))
                losses = outcomes[-1].loss, outcomes[-1].evaluated
                if not all(map(math.isfinite, losses)):
                    raise NotVerified(f"in one process the loss of the first samples is {losses[0]}")
            seed_all(2)
            with whole.holding(values), torch.no_grad():
                again = whole.loss(*batch).item()
        except NotVerified:
            raise
        except Exception as error:
            raise NotVerified(f"one process could not compute the first samples ({type(error).__name__}: {error})") from error
        if abs(again - outcomes[0].loss) > self.bound(batch) * abs(outcomes[0].loss):
            raise NotVerified("the model draws random numbers besides dropout, so that two runs of one process differ")
        return outcomes

    def bound(self, batch: Batch) -> float:
        """How much two ways of summing may differ, relative to the largest number."""
        trainer, model = self.trainer, self.trainer.one_process.whole
        shapes = [trainer.layout.entries[name].shape for name in trainer.trained]
        dtypes = [trainer.layout.entries[name].dtype for name in trainer.trained]
        depth = sum(1 for module in model.modules() if module._parameters)
        terms = max(*(max(shape, default=1) for shape in shapes), *(t.numel() for t in tensors_of(batch)))
        sums = max(torch.finfo(dtype).eps for dtype in dtypes)
        results = sums if trainer.executor.autocast is None else max(sums, torch.finfo(trainer.executor.autocast).eps)
        if sums > torch.finfo(torch.float32).eps:  # half precision: sums are in float32, and their results are rounded
            sums, results = torch.finfo(torch.float32).eps, max(sums, results)
        return SAFETY * (sums * math.sqrt(depth * terms) + (results * math.sqrt(depth) if results > sums else 0))

    def header(self, reason: str, expected: Sequence[Outcome]) -> dict[str, Any]:
        """The numbers that every rank needs of the first rank's results."""
        if not self.first or reason:
            return {"reason": reason}
        bound = self.bound(self.batch)
        return {
            "reason": "",
            "drops": any(of.drops for of in expected),
            "bound": bound,
            "numbers": [(of.loss, of.evaluated, of.norm) for of in expected],
            "absent": [[name for name, g in of.gradients.items() if g is None] for of in expected],
            "gradient": scales([of.gradients for of in expected], bound, self.eps()),
            "buffer": scales([of.buffers for of in expected], bound, 0),
            "buffers": [name for name in expected[0].buffers if name in self.trainer.layout.entries],
        }

    def eps(self) -> float:
        entries, autocast = self.trainer.layout.entries, self.trainer.executor.autocast
        dtypes = {entries[name].dtype for name in self.trainer.trained} | ({autocast} if autocast else set())
        return max(torch.finfo(dtype).eps for dtype in dtypes)

    # ── all ranks ──

    def compare(self, weights: str, header: Mapping[str, Any], expected: Outcome | None) -> None:
        trainer, number = self.trainer, WEIGHTS.index(weights)
        wanted, bound = header["numbers"], header["bound"]
        with with_buffers_restored(trainer.model):
            if weights == "perturbed":  # which no zero weight hides
                perturb_owned(trainer)
                difference = abs(self.evaluated() - wanted[number][1])
                self.add("evaluate", "", weights, difference, bound * abs(wanted[number][1]))
            seed_all(1)
            loss, norm = self.of_layout(header["drops"])
            here = {name: b.detach().clone() for name, b in trainer.model.named_buffers() if name in header["buffers"]}
        gradients = self.from_first(trainer.trained, expected and expected.gradients)
        updated = self.from_first(trainer.trained, expected and expected.updated)
        buffers = self.from_first(header["buffers"], expected and expected.buffers)
        self.add("loss", "", weights, abs(loss - wanted[number][0]), bound * max(abs(of[0]) for of in wanted))
        if trainer.clip_norm is not None:
            self.add("norm", "", weights, abs(norm - wanted[number][2]), bound * max(of[2] for of in wanted))

        cut = trainer.layout.cut
        for name, p in trainer.owned.items():
            mine = torch.zeros_like(p) if p.grad is None else p.grad
            self.add("gradient", name, weights, largest(mine - cut(name, gradients[name])), header["gradient"][name])
        for name in header["buffers"]:
            if name in here and here[name].shape == buffers[name].shape:
                self.add("buffer", name, weights, largest(here[name] - buffers[name]), header["buffer"][name])
        absent = set(header["absent"][number])
        for name, before, after in self.updates({name: None if name in absent else cut(name, g) for name, g in gradients.items()}, number):
            should = cut(name, updated[name])
            rounding = SAFETY * torch.finfo(after.dtype).eps * largest(should)
            self.add("update", name, weights, largest(after - should), bound * largest(should - before) + rounding)

    def of_layout(self, drops: bool) -> tuple[float, float]:
        """Loss and norm, as the trainer computes them."""
        trainer = self.trainer
        inputs, targets = self.batch
        total = int(sum(trainer.agree.numbers(count_samples(inputs) if holds_share(trainer) else 0)[0]))
        try:
            with without_dropout(trainer.model, functions=drops):
                loss = trainer.compute_gradients(inputs, targets, total, number_of_shape(inputs))
                norm = float(trainer.norm()) if trainer.clip_norm is not None else 0.0
        except Exception as error:
            raise LayoutFailed from error
        return loss, norm

    def evaluated(self) -> float:
        """The loss in evaluation mode."""
        try:
            with torch.no_grad(), evaluation_mode(self.trainer):
                mine = evaluate_share(self.trainer, *self.batch)
            sums, weights = self.trainer.agree.numbers(*mine)
        except Exception as error:
            raise LayoutFailed from error
        return math.fsum(sums) / math.fsum(weights)

    def updates(self, gradients: Mapping[str, Tensor | None], number: int) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Name, and what this rank owns of that parameter before and after an update of a copy of its optimizer."""
        memo: dict[int, Any] = {}
        optimizer = copy_of_optimizer(self.trainer.optimizer, memo)
        if number:
            lift_learning_rates(optimizer)
        copies = {name: memo[id(p)] for name, p in self.trainer.owned.items()}
        for name, p in copies.items():
            g = gradients[name]
            p.grad = None if g is None else g.clone()
        try:
            optimizer.step()
        except Exception:  # as Muon's, which wants matrices
            copies = {name: torch.full_like(p, torch.nan) for name, p in copies.items()}
        for name, p in copies.items():
            yield name, self.trainer.owned[name].detach(), p.detach()

    def from_first(self, names: Sequence[str], tensors: Mapping[str, Tensor | None] | None) -> dict[str, Tensor]:
        """What the first rank has, on all ranks; zeros where it has nothing. One broadcast a dtype."""
        entries, device = self.trainer.layout.entries, self.trainer.device
        names, found = [name for name in names if name in entries], {}
        for dtype in dict.fromkeys(entries[name].dtype for name in names):
            alike = [name for name in names if entries[name].dtype == dtype]
            sizes = [entries[name].shape.numel() for name in alike]
            row = torch.zeros(sum(sizes), dtype=dtype, device=device)
            for name, part in zip(alike, row.split(sizes)):
                if tensors and tensors[name] is not None:
                    part.copy_(tensors[name].reshape(-1))  # type: ignore[union-attr]
            row = broadcast(row, 0, group=self.trainer.axes.group)
            found.update({name: part.view(entries[name].shape) for name, part in zip(alike, row.split(sizes))})
        return found

    def add(self, what: str, name: str, weights: str, difference: float, most: float) -> None:
        self.rows[what, name, weights] = difference, difference / most if most else math.inf if difference else 0.0

    def rows_of_all(self) -> list[Row]:
        """The largest difference of each comparison over the ranks, the same list on all of them."""
        mine = json.dumps([[*key, *value] for key, value in self.rows.items()])
        found: dict[tuple[str, str, str], tuple[float, float]] = {}
        for text in self.trainer.agree.texts(mine):
            for what, name, weights, difference, ratio in json.loads(text):
                key = what, name, weights
                found[key] = max(found.get(key, (0.0, 0.0)), (difference, ratio), key=lambda pair: pair[1])
        kinds = ("loss", "evaluate", "norm", "gradient", "buffer", "update")
        return sorted((Row(*key, *value) for key, value in found.items()), key=lambda row: kinds.index(row.what))


class NotVerified(Exception):
    """Nothing can be compared; the text says why."""


class LayoutFailed(Exception):
    """The layout could not compute what one process could; its cause is why."""


def message(report: Report) -> str:
    wrong = sorted((row for row in report.rows if row.ratio > 1), key=lambda row: -row.ratio)
    kinds = list(dict.fromkeys(row.what for row in report.rows if row.ratio > 1))
    first = next(row for row in wrong if row.what == kinds[0])
    what = f"the {first.what}" + (f" of {first.name!r}" if first.name else "")
    more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return (
        f"this layout does not compute what one process does: {what} differs by {first.difference:.2g}{more}. {report.cause} "
        "No weight was changed. The error's .report is a table; verify=False trains without this comparison"
    )


def holds_share(trainer: Any) -> bool:
    """True on one of the ranks that have the same samples."""
    return all(trainer.axes.here.get(axis, 0) == 0 for axis in trainer.axes.sizes if axis != "dp")


def join(batches: Sequence[Batch]) -> Any:
    """The samples of several batches as one."""
    columns = iter(zip(*(tensors_of(batch) for batch in batches)))
    return map_tensors(lambda _: torch.cat(next(columns)), batches[0])


def largest(t: Tensor) -> float:
    """The largest absolute value; infinity for what is not a number."""
    if not t.numel():
        return 0.0
    found = float(t.detach().abs().max())
    return math.inf if math.isnan(found) else found


def scales(outcomes: Sequence[Mapping[str, Tensor | None]], bound: float, eps: float) -> dict[str, float]:
    """Name → the largest difference that rounding explains, from the largest numbers in its module and in all."""
    of_module: dict[str, float] = {}
    for outcome in outcomes:
        for name, t in outcome.items():
            module = name.rpartition(".")[0]
            of_module[module] = max(of_module.get(module, 0.0), 0.0 if t is None else largest(t))
    of_all = max(of_module.values(), default=0.0)
    return {name: bound * of_module[name.rpartition(".")[0]] + eps * of_all for name in outcomes[0]}


# ── weights that are slightly different ──


def noise(name: str, shape: Sequence[int]) -> Tensor:
    """For this parameter, the same on every rank: about a tenth of what an initial weight of this shape would be.

    Fractional parts of the multiples of the golden ratio: as irregular as this needs, and faster than random numbers.
    """
    start = zlib.crc32(name.encode()) / 2**32
    steps = torch.arange(math.prod(shape), dtype=torch.float64, device="cpu").mul_(0.6180339887498949).add_(start).frac_()
    return steps.sub_(0.5).mul_(0.3 / max(1, shape[-1] if shape else 1) ** 0.5).view(tuple(shape))


def perturbed(values: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    moved = {name: moved_by(values[name], noise(name, values[name].shape)) for name in names}
    return {**values, **moved}


def moved_by(t: Tensor, step: Tensor) -> Tensor:
    return (t.to(torch.complex128 if t.is_complex() else torch.float64) + step.to(t.device)).to(t.dtype)


@torch.no_grad()
def perturb_owned(trainer: Any) -> None:
    for name, p in trainer.owned.items():
        p.copy_(moved_by(p.detach(), trainer.layout.cut(name, noise(name, trainer.layout.entries[name].shape))))
    trainer.gradient_sync.publish()


# ── no trace ──


@contextmanager
def untouched(trainer: Any) -> Iterator[None]:
    """Afterwards weights, gradients, buffers, random numbers and everything that the trainer has learnt of the model are as before."""
    parameters = [*trainer.model.parameters(), *trainer.owned.values()]
    weights = [(p, p.detach().clone()) for p in parameters if p.numel()]  # ZeRO-3's are empty, and its owned pieces are not
    gradients = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in parameters]
    reached, state = trainer.reached, random_state()
    learnt = [(part, name, copy.copy(getattr(part, name))) for part in parts_of(trainer) for name in getattr(part, "LEARNT", ())]
    try:
        with with_buffers_restored(trainer.model):
            yield
    finally:
        set_random_state(state)
        with torch.no_grad():
            for p, value in weights:
                p.copy_(value)
            for p, gradient, value in gradients:
                p.grad = gradient if gradient is None else gradient.copy_(value)
        for part, name, known in learnt:
            setattr(part, name, known)
        trainer.reached = reached


@contextmanager
def with_buffers_restored(model: nn.Module) -> Iterator[None]:
    before = [(m, name, b, b.clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in before:
                module._buffers[name] = buffer  # a forward may have assigned another
                buffer.copy_(value)


def parts_of(trainer: Any) -> Iterator[Any]:
    """Those that learn something of the model, in attributes that they name in LEARNT."""
    yield trainer.executor.messages
    for _, sync in trainer.prepared.syncs:
        yield sync
        yield getattr(sync, "live", None)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


def random_state() -> list[Any]:
    numpy = sys.modules.get("numpy")
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    return [torch.get_rng_state(), random.getstate(), cuda, numpy.random.get_state() if numpy else None]


def set_random_state(state: list[Any]) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    if state[2] is not None:
        torch.cuda.set_rng_state_all(state[2])
    if state[3] is not None:
        sys.modules["numpy"].random.set_state(state[3])
