"""A layout against one process: the same training on the same whole batch.

    the first rank   the whole batch ──▶ one process (one_process.py) ─▶ loss, gradients, … ┐ =?
    every rank       its share ──▶ the trainer's own steps ─▶ the same                      ┘

`training` runs on both sides. After each gradient is compared, both go on from that of one process,
and after each update from its weights: Adam turns the rounding of a zero gradient into a full step.
Weights that are zero, such as LoRA's B or a head, are moved a little at the start, since they would
hide what comes before them. The last loss is scaled, so that a hook that clamps only large
gradients shows. Then the optimizer alone takes more steps, from gradients that are known: one may
couple elements only after a warm-up, in every fifth step, or if gradients are suddenly large.

Each rank finds how far its numbers are off, and the first rank judges (tolerance.py).
"""

from __future__ import annotations

import itertools
import linecache
import math
import random
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from parallel101.trainers.batches import (
    Batch,
    call,
    cast,
    count_samples,
    join,
    map_tensors,
    number_of_text,
    tensors_of,
)
from parallel101.trainers.layout import SAMPLES, copied
from parallel101.trainers.losses import NoTargets
from parallel101.trainers.memory import readable
from parallel101.trainers.options import Trainer
from parallel101.trainers.step import clip, compute_gradients, gradient_norm
from parallel101.trainers.training_loop import evaluate_share, evaluation_mode
from parallel101.trainers.verify import halves
from parallel101.trainers.verify.deterministic import deterministic
from parallel101.trainers.verify.one_process import Values, WholeModel
from parallel101.trainers.verify.report import HINTS, NOT_ELEMENTWISE, NotEqualError, Report, Row
from parallel101.trainers.verify.snapshot import Snapshot, is_users, seed_all, seed_torch
from parallel101.trainers.verify.tolerance import (
    SAFETY,
    Differences,
    Numbers,
    Tolerance,
    distance,
    jittered,
    largest,
    without_zeros,
)

# steps of the optimizer alone: by how much gradients grow before each
MORE = (*(-1.1,) * 5, 100.0, -0.01, *(-1.1,) * 6)
LEAST_LR = 1e-3
LARGE, LARGE_IN_HALF = 1000.0, 16.0  # about the largest gradient of the scaled loss
FOREVER = itertools.repeat(None)
Share = tuple[Batch, Batch]
# of torch's errors and Python's unpacking: sizes don't fit
SHAPES = re.compile("shape|size|unpack|unflatten", re.IGNORECASE)


class Comparison:
    """One comparison with one process, in which all ranks take part.

    Args:
        verification: of the trainer, which has the model before it was cut, on the first rank.
        batch: this rank's share.
        snapshot: of the trainer, to which the first rank returns before it takes part.
        room: for activations on the first rank, in bytes.
    """

    def __init__(self, verification: Any, batch: Share, snapshot: Snapshot, room: float):
        self.trainer: Trainer = verification.trainer
        self.verification, self.snapshot, self.room = verification, snapshot, room
        self.steps: int = verification.steps
        self.whole: WholeModel | None = verification.whole
        self.batch, self.eps = batch, 0.0
        self.expected: list[tuple[int, Numbers]] = []  # of one process, on the first rank

    def run(self) -> Report:
        trainer, agree = self.trainer, self.trainer.agree
        if len(agree.ranks) > 1 and (words := messages_of_its_own(trainer.model)):
            return Report(cause=words)
        # of the ranks with the same samples, one gives them
        gives = all(axis in SAMPLES or not at for axis, at in trainer.axes.here.items())
        shares = agree.objects(self.batch if gives else None, first_only=True)
        values = trainer.layout.gather(trainer.parts, list(trainer.layout.entries), first_only=True)
        self.state, header = trainer.sharded_optimizer.state(), {}
        if self.whole is not None:
            self.shares, self.start = [share for share in shares if share is not None], values
            try:
                header = self.of_one_process()
            except (FloatingPointError, NoTargets) as error:
                header = {"instead": {"reason": f"in one process, {error}"}}
            except Exception as error:
                words = f"one process could not train on the whole batch ({type(error).__name__}"
                header = {"instead": {"cause": f"It can't be compared: {words}: {error})."}}
        header = agree.objects(header)[0]
        if "instead" in header:
            return Report(**header["instead"])
        try:
            found = self.of_ranks(**header)
        except (FloatingPointError, NoTargets) as error:  # on every rank, and not in one process
            if not (words := agree.objects(self.explain([]))[0]):
                raise
            return Report(cause=f"{words} In parts: {error}")
        except (RuntimeError, ValueError) as error:  # on each rank that raises it
            tp = trainer.axes.sizes.get("tp", 1)
            if tp == 1 or not SHAPES.search(str(error)):
                raise
            words = (
                f"One process can compute this batch, and with the layers cut over {tp} ranks "
                f"{type(error).__name__} was raised: {str(error).splitlines()[0]}. "
                f"{place_of(error)}{HINTS['tp']}"
            )
            raise NotEqualError(Report(cause=words)) from error
        of_ranks = agree.objects([(*key, far) for key, far in found.items()])
        rows, cause = list[Row](), ""
        if self.whole is not None:
            rows = self.judged(of_ranks)
            cause = self.explain(rows)
        rows, cause = agree.objects((rows, cause))[0]
        return Report([Row(*row) for row in rows], cause=cause, note=header["note"])

    # ── on the first rank ──

    @contextmanager
    def one_process(self, change: Callable[[Any], Any] = lambda values: values) -> Iterator[Any]:
        """Give a trainer of the whole model on this rank alone, inside."""
        assert self.whole is not None
        self.snapshot.restore()
        alone = self.whole.trainer(self.trainer, change(self.start), self.state)
        if len(self.shares) > 1:
            alone.runner.run = partial(run_in_turn, alone.runner.run)
        try:
            yield alone
        finally:
            for part in (alone.runner, alone):  # their cycles would keep weights in memory
                part.__dict__.clear()
            self.snapshot.restore()

    def of_one_process(self) -> dict[str, Any]:
        """Train in one process. Returns what every rank needs before it does the same."""
        trainer, few, notes = self.trainer, None, list[str]()
        if lost := sorted(self.snapshot.lost):
            notes.append(f"verify has not put back what it can't: {', '.join(lost)}")
        with self.one_process() as alone:
            needed, self.eps = kept_of_a_sample(alone, self.shares[0][0])
        needed *= sum(count_samples(inputs) for inputs, _ in self.shares)
        if needed > self.room:
            few = trainer.runner.microbatches
            self.shares = [map_tensors(lambda t: t[:few], share) for share in self.shares]
            notes.append(
                f"verified with {few} sample{'s' * (few > 1)} a rank only: all activations of "
                f"one process would take {readable(needed)} on rank {trainer.agree.ranks[0]}, "
                f"and there are {readable(self.room)}"
            )
        samples = sum(count_samples(inputs) for inputs, _ in self.shares)
        with suppress(ValueError):  # samples of different shapes: one share after the other
            self.shares = [join(self.shares)]
        moved = without_zeros({name: self.start[name] for name in trainer.trained})
        self.start = {**self.start, **moved}

        def evaluation(alone: Trainer) -> float | None:
            try:
                return evaluate(alone, self.shares)
            except Exception as error:  # as the model raises it in eval mode, with any trainer
                words = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                notes.append(f"evaluation isn't compared: in one process it raises {words}")
                return None

        with self.one_process() as alone:
            for step, numbers in training(alone, self.shares, samples, self.steps, evaluation):
                self.expected.append((step, copied(numbers)))
                if "loss" not in numbers:
                    alone.gradient_sync.publish()
        self.evaluates = any("evaluate" in numbers for _, numbers in self.expected)
        return {
            "note": "\n".join(notes),
            "few": few,
            "samples": samples,
            "moved": moved,
            "evaluates": self.evaluates,
        }

    def training(self, trainer: Trainer, shares: Sequence[Share], samples: int) -> Any:
        """Return `training`, with an evaluation if one process can evaluate."""
        evaluation = partial(evaluate, shares=shares) if self.evaluates else lambda trainer: None
        return training(trainer, shares, samples, self.steps, evaluation)

    def judged(self, of_ranks: Sequence[Any]) -> list[Row]:
        """Return the largest of each difference over the ranks, beside its bound. If the bounds
        don't explain all, rounding is measured.
        """
        far = Differences()
        for key, step, difference in itertools.chain(*of_ranks):
            far[key, step] = max(difference, far.get((key, step), 0.0))
        rows = self.tolerance.judge(far, {})
        if all(row.ratio <= 1 or row.what == "update" for row in rows):
            return rows
        change = partial(jittered, eps=self.tolerance.eps)
        with self.one_process(change) as alone:
            samples = sum(count_samples(inputs) for inputs, _ in self.shares)
            steps = self.training(alone, change(self.shares), samples)
            noise = differences(alone, steps, (change(numbers) for _, numbers in self.expected))
        return self.tolerance.judge(far, noise)

    @property
    def tolerance(self) -> Tolerance:
        trainer = self.trainer
        entries, precision = trainer.layout.entries, trainer.precision
        dtypes = [*(entries[name].dtype for name in trainer.trained), precision.weights]
        eps = [torch.finfo(d).eps for d in (*dtypes, precision.autocast) if d is not None] + [
            self.eps
        ]
        depth = len({name.rpartition(".")[0] for name in entries})
        lengths = [n for name in trainer.trained for n in entries[name].shape]
        terms = max(1, *lengths, sum(t.numel() for t in tensors_of(self.shares)))
        return Tolerance(self.start, self.expected, self.steps, depth * terms, max(eps))

    def explain(self, rows: Sequence[Row]) -> str:
        """Return why they differ, in words; "" if it can't be told, and on the other ranks."""
        kinds = {row.what for row in rows if row.ratio > 1}
        if self.whole is None or (rows and not kinds):
            return ""
        if kinds == {"update"}:
            return NOT_ELEMENTWISE
        words, (inputs, targets), tolerance = "", self.shares[0], self.tolerance
        bound = max(tolerance.bound, SAFETY * tolerance.eps)
        repeated, of_loss = self.trainer.runner.microbatches > 1, self.verification.loss_snapshot()
        # loss_fn may raise for some samples
        with suppress(Exception), self.one_process() as alone, deterministic(alone):
            outputs_of = partial(outputs, alone)
            whole = outputs_of(map_tensors(torch.clone, inputs))
            words = halves.problem_of_loss(
                alone.loss_fn, whole, targets, bound, of_loss.restore
            ) or halves.problem_of_model(outputs_of, inputs, whole, bound, repeated)
        axes = (axis for axis, size in self.trainer.axes.sizes.items() if size > 1 and rows)
        return words or next((HINTS[axis] for axis in axes if axis in HINTS), "")

    # ── on all ranks ──

    def of_ranks(
        self, few: int | None, samples: int, moved: Values, evaluates: bool, note: str
    ) -> Differences:
        """Train as the ranks do. Returns how far this rank's numbers are off."""
        trainer, agree, shares = self.trainer, self.trainer.agree, [self.batch]
        self.evaluates = evaluates
        if few:
            shares = [map_tensors(lambda t: t[:few], self.batch)]
        go_on_from(trainer, {f"update {name}": value for name, value in moved.items()})
        steps = itertools.groupby(self.expected, lambda entry: entry[0])
        of_steps = ([numbers for _, numbers in entries] for _, entries in steps)
        sent = (agree.objects(of_step)[0] for of_step in (of_steps if self.expected else FOREVER))
        expected = itertools.chain.from_iterable(sent)
        return differences(trainer, self.training(trainer, shares, samples), expected)


# ── of any trainer, the layout's or that of one process ──


def training(
    trainer: Trainer,
    shares: Sequence[Share],
    samples: int,
    steps: int,
    evaluation: Callable[[Trainer], float | None],
) -> Iterator[tuple[int, Numbers]]:
    """Take steps, and yield (step, loss, norm, gradients and buffers), (step, weights), … .

    The caller may change gradients and weights meanwhile, and publishes weights.

    Args:
        shares: of the batch, one after the other.
        samples: of all ranks.
    """
    scale, size, seeds = 1.0, 0.0, seeds_of_noise(trainer)
    for group in trainer.optimizer.param_groups:
        if "lr" in group and not group["lr"]:
            group["lr"] = LEAST_LR  # a warm-up may begin at 0, and every update would be right
    for step in range(1, steps + 1):
        if step == steps > 1:
            wanted = LARGE_IN_HALF if trainer.precision.weights == torch.float16 else LARGE
            scale = power_of_two(wanted / size) if 0 < size < math.inf else 1.0
        trainer.gradient_sync.scale = scale
        # which may be changed in place
        inputs, targets = map_tensors(
            torch.clone, shares[0] if len(shares) == 1 else (*zip(*shares),)
        )
        with deterministic(trainer):
            loss = compute_gradients(trainer, inputs, targets, samples)
        gradients = {f"gradient {name}": p.grad for name, p in trainer.owned.items()}
        for g in gradients.values():
            if g is not None and not trainer.precision.scaled:  # else the trainer has divided it
                g /= scale
        numbers = {"loss": torch.tensor(loss, dtype=torch.float64), **gradients}
        if trainer.clip_norm is not None:
            numbers["norm"] = gradient_norm(trainer)
        for name, b in trainer.model.named_buffers():
            if name in trainer.local and name in trainer.layout.entries:
                numbers[f"buffer {name}"] = b
        yield step, numbers
        if step == steps - 1:
            here = max((largest(p.grad) for p in trainer.owned.values()), default=0.0)
            size = max(trainer.agree.numbers(here)[0])
        clip(trainer)
        update(trainer, seeds)
        yield step, weights(trainer)
    if (evaluated := evaluation(trainer)) is not None:
        yield steps, {"evaluate": torch.tensor(evaluated, dtype=torch.float64)}
    update(trainer, seeds, MORE)
    yield steps + len(MORE), weights(trainer)


def differences(
    trainer: Trainer, steps: Iterable[tuple[int, Numbers]], expected: Iterable[Numbers]
) -> Differences:
    """Return how far this rank's numbers are from those of the whole model, with which it goes
    on after each.
    """
    found = Differences()
    for (step, here), there in zip(steps, expected):
        for key in here:
            name, whole = key.partition(" ")[2], there[key]
            if name and whole is not None:
                whole = trainer.layout.cut(name, whole)
            found[key, step] = distance(here[key], whole)
        go_on_from(trainer, there)
    return found


@torch.no_grad()
def go_on_from(trainer: Trainer, numbers: Numbers) -> None:
    """Copy what there is of whole gradients and weights to where they are on the ranks."""
    for name, p in trainer.owned.items():
        if (updated := numbers.get(f"update {name}")) is not None:
            p.copy_(trainer.layout.cut(name, updated))
        if (key := f"gradient {name}") in numbers:
            g, p.grad = numbers[key], None
            if g is not None:
                p.grad = trainer.layout.cut(name, g).to(p.grad_dtype or p.dtype, copy=True)
    if any(key.startswith("update ") for key in numbers):
        trainer.gradient_sync.publish()


def update(trainer: Trainer, seeds: Sequence[int], growth: Sequence[float] = (1.0,)) -> None:
    """Take steps of the optimizer, before each of which gradients grow by a factor."""
    seed_all(seeds[1])
    seed_torch(seeds[0])
    owned = trainer.owned.values()
    for factor in growth:
        for p in owned:
            if p.grad is not None and factor != 1:
                p.grad = factor * p.grad.to(p.dtype)  # of a master weight it is rounded
        try:
            trainer.optimizer.step()
        except Exception:  # as Muon's, which wants matrices
            if len(trainer.agree.ranks) == 1:
                raise
            for p in owned:
                p.data.fill_(torch.nan)


def seeds_of_noise(trainer: Trainer) -> list[int]:
    """Return seeds of torch's and Python's random numbers in the optimizer, the same on all ranks
    if they were seeded alike.
    """
    states = torch.get_rng_state().tolist(), random.getstate()
    of_ranks = trainer.agree.numbers(*(number_of_text(str(state)) for state in states))
    return [1 if len(set(of_state)) == 1 else 2 + trainer.position for of_state in of_ranks]


def weights(trainer: Trainer) -> Numbers:
    return {f"update {name}": p.detach() for name, p in trainer.owned.items()}


def evaluate(trainer: Trainer, shares: Sequence[Share]) -> float:
    """Return the loss in evaluation mode."""
    with torch.no_grad(), evaluation_mode(trainer), deterministic(trainer):
        parts = [evaluate_share(trainer, *map_tensors(torch.clone, share)) for share in shares]
    sums, of_weights = trainer.agree.numbers(*map(math.fsum, zip(*parts)))
    return math.fsum(sums) / math.fsum(of_weights)


def outputs(trainer: Trainer, inputs: Batch) -> Any:
    """Return the outputs of a model that is not cut."""
    with torch.no_grad(), trainer.precision.forward(trainer.device):
        return call(trainer.model, cast(inputs, trainer.precision.weights))


def run_in_turn(run: Callable[..., None], inputs: Any, targets: Any, losses: Any) -> None:
    for x, y in zip(inputs, targets):
        run(x, y, losses)


def kept_of_a_sample(trainer: Trainer, inputs: Batch) -> tuple[float, float]:
    """Return the bytes that one sample's forward keeps for backward, and their coarsest rounding: a
    model may use autocast itself. Both are 0 if it can't run alone.
    """
    weights = {p.untyped_storage()._cdata for p in trainer.model.parameters()}
    kept: dict[int, int] = {}
    eps = 0.0

    def pack(t: Tensor) -> Tensor:
        nonlocal eps
        eps = max(eps, torch.finfo(t.dtype).eps if t.is_floating_point() else 0.0)
        storage = t.untyped_storage()
        kept[storage._cdata] = 0 if storage._cdata in weights else storage.nbytes()
        return t

    with suppress(Exception), saved_tensors_hooks(pack, lambda t: t):
        call(
            trainer.model,
            cast(map_tensors(lambda t: t[:1].clone(), inputs), trainer.precision.weights),
        )
    return float(sum(kept.values())), eps


def power_of_two(wanted: float) -> float:
    return 2.0 ** max(0, min(40, round(math.log2(wanted))))


def place_of(error: Exception) -> str:
    """Return the line of the user's program that raised it, in words; "" if it is none's."""
    places = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if is_users(SimpleNamespace(__module__=frame.f_globals.get("__name__")))
    ]
    if not places:
        return ""
    path, line = places[-1]
    code = linecache.getline(path, line).strip()
    return f"It comes from line {line} of {Path(path).name}: `{code}`. "


def messages_of_its_own(model: nn.Module) -> str:
    """Return why a model with modules of parallel101.layers is refused; "" without any."""
    for name, module in model.named_modules():
        if type(module).__module__.startswith("parallel101.layers."):
            return (
                f"It can't be compared: {name!r} is a {type(module).__name__} of "
                "parallel101.layers, which sends messages to other ranks, and one process has "
                "none. Use a loop of your own; or, if it has no weights, whose gradients the "
                "trainer would sum again, compare it yourself and pass verify=False."
            )
    return ""
