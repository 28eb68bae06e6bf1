"""A layout against one process: the same training on the same whole batch.

    the first rank   the whole batch ──▶ one process (one_process.py) ─▶ loss, gradients, … ┐ =?
    every rank       its share ──▶ the trainer's own steps ─▶ the same                      ┘

`training` runs on both sides. After each gradient is compared, both go on from that of one process,
and after each update from its weights: Adam turns the rounding of a zero gradient into a full step.
Weights that are zero, such as LoRA's B or a head, are moved a little at the start, since they would
hide what comes before them. The last loss is scaled, so that a hook that clamps only large
gradients shows. If ranks update parts of tensors, the optimizer alone takes more steps, from
gradients that are known: one may couple elements only after a warm-up, in every fifth step, or if
gradients are suddenly large.

Each rank finds how far its numbers are off, and the first rank judges (tolerance.py).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from parallel101.trainers.batches import Batch, call, cast, count_samples, join, map_tensors
from parallel101.trainers.layout import SAMPLES, copied
from parallel101.trainers.losses import NoTargets
from parallel101.trainers.memory import readable
from parallel101.trainers.options import Trainer
from parallel101.trainers.step import clip, compute_gradients, gradient_norm
from parallel101.trainers.training_loop import evaluate_share, evaluation_mode
from parallel101.trainers.verify.deterministic import deterministic
from parallel101.trainers.verify.halves import problem_of_loss, problem_of_model
from parallel101.trainers.verify.one_process import WholeModel
from parallel101.trainers.verify.report import (
    HINTS,
    KINDS,
    NOT_ELEMENTWISE,
    NotEqualError,
    Report,
    Row,
)
from parallel101.trainers.verify.snapshot import Snapshot
from parallel101.trainers.verify.tolerance import (
    Key,
    Numbers,
    bounds,
    distance,
    jittered,
    largest,
    of_modules,
    without_zeros,
)

NOISE = 16  # how much larger a difference may be than rounding that is measured
# How much more of the scaled step may be rounding. It is for what clamps large gradients, which
# differs grossly, and the gradient of a matrix exponential gets less exact than its size says.
LOOSE = 100
# steps of the optimizer alone: by how much gradients grow before each
MORE = (*(-1.1,) * 5, 100.0, -0.01, *(-1.1,) * 6)
LEAST_LR = 1e-3
SCALE = 2.0**10  # of the last loss
Share = tuple[Batch, Batch]
# of torch's errors and Python's unpacking: sizes don't fit
SHAPES = re.compile("shape|size|matrix|unpack|unflatten", re.IGNORECASE)


def compare(
    trainer: Trainer, whole: WholeModel | None, batch: Share, steps: int, room: float = math.inf
) -> Report:
    """Compare a layout with one process, and put everything back. Collective.

    Args:
        whole: the model before it was cut, on the first rank.
        batch: this rank's share.
        room: for activations on the first rank, in bytes.

    Raises NotEqualError, on every rank.
    """
    snapshot = Snapshot(trainer, whole)
    try:
        report = compared(trainer, whole, batch, steps, room, snapshot)
    finally:
        snapshot.restore()
    trainer.agree.numbers(0.0)  # virtual ranks share objects: all have put them back
    if report.cause or report.wrong:
        raise NotEqualError(report)
    return report


def compared(
    trainer: Trainer,
    whole: WholeModel | None,
    batch: Share,
    steps: int,
    room: float,
    snapshot: Snapshot,
) -> Report:
    """Compare, and leave traces."""
    agree, one, plan = trainer.agree, None, {}
    if len(agree.ranks) > 1 and (words := messages_of_its_own(trainer.model)):
        return Report(cause=words)
    # of the ranks with the same samples, one gives them
    gives = all(axis in SAMPLES or not at for axis, at in trainer.axes.here.items())
    shares = agree.objects(batch if gives else None, first_only=True)
    start = trainer.layout.gather(trainer.parts, list(trainer.layout.entries), first_only=True)
    state = trainer.sharded_optimizer.state()
    if whole is not None:
        shares = [share for share in shares if share is not None]
        one = OneProcess(trainer, whole, snapshot, shares, start, state)
        plan = one.train(steps, room)
    plan = agree.objects(plan)[0]
    if "instead" in plan:
        return Report(**plan["instead"])
    share = map_tensors(lambda t: t[: plan["few"]], batch)
    expected = one.expected if one else itertools.repeat(None)
    sent = (agree.objects(numbers)[0] for numbers in expected)
    go_on_from(trainer, {("update", name, 0): t for name, t in plan["moved"].items()})
    trainer.gradient_sync.publish()
    try:
        far = differences(trainer, training(trainer, [share], plan), sent)
    except (RuntimeError, ValueError) as error:  # on each rank that raises it
        if not SHAPES.search(str(error)):
            raise
        words = (
            f"One process can compute this batch, and cut over {len(agree.ranks)} ranks "
            f"{type(error).__name__} was raised: {str(error).splitlines()[0]}. {hint(trainer)}"
        )
        raise NotEqualError(Report(cause=words)) from error
    of_ranks = agree.objects([(*key, difference) for key, difference in far.items()])
    rows, cause = agree.objects(one.result(of_ranks) if one else None)[0]
    return Report([Row(*row) for row in rows], cause=cause, note=plan["note"])


@dataclass
class OneProcess:
    """What the first rank does: it computes the whole batch, and judges.

    Args:
        trainer: the layout's.
        whole: its model.
        snapshot: to which this rank returns before it takes part in the layout.
        shares: of the batch.
        start: parameters and buffers, by name.
        state: the optimizer's.
    """

    trainer: Trainer
    whole: WholeModel
    snapshot: Snapshot
    shares: list[Share]
    start: Mapping[str, Tensor]
    state: Any
    expected: list[Numbers] = field(default_factory=list)
    eps = 0.0  # the coarsest rounding

    @contextmanager
    def running(self, change: Callable[[Any], Any] = lambda values: values) -> Iterator[Any]:
        """Give a trainer of the whole model on this rank alone, inside."""
        self.snapshot.restore()
        alone = self.whole.trainer(self.trainer, change(self.start), self.state)
        if len(self.shares) > 1:  # of different shapes
            alone.runner.run = partial(run_in_turn, alone.runner.run)
        try:
            yield alone
        finally:
            for part in (alone.runner, alone):  # their cycles would keep weights in memory
                part.__dict__.clear()
            self.snapshot.restore()

    def train(self, steps: int, room: float) -> dict[str, Any]:
        """Train in one process. Returns what every rank needs before it does the same; or
        "instead", what its report says.
        """
        trainer, few, notes = self.trainer, None, list[str]()
        if lost := sorted(self.snapshot.lost):
            notes.append(f"verify has not put back what it can't: {', '.join(lost)}")
        with self.running() as alone:
            needed, eps = kept_of_a_sample(alone, self.shares[0][0])
        entries, precision = trainer.layout.entries, trainer.precision
        dtypes = [entries[name].dtype for name in trainer.trained]
        dtypes += filter(None, (precision.weights, precision.autocast))
        self.eps = max(eps, *(torch.finfo(dtype).eps for dtype in dtypes))
        needed *= sum(count_samples(inputs) for inputs, _ in self.shares)
        if needed > room:
            few = trainer.runner.microbatches
            self.shares = [map_tensors(lambda t: t[:few], share) for share in self.shares]
            notes.append(
                f"verified with {few} sample{'s' * (few > 1)} a rank only: all activations of "
                f"one process would take {readable(needed)} on rank {trainer.agree.ranks[0]}, "
                f"and there are {readable(room)}"
            )
        samples = sum(count_samples(inputs) for inputs, _ in self.shares)
        with suppress(ValueError):  # samples of different shapes: one share after the other
            self.shares = [join(self.shares)]
        moved = without_zeros({name: self.start[name] for name in trainer.trained})
        self.start = {**self.start, **moved}
        self.plan = {
            "steps": steps,
            "samples": samples,
            "few": few,
            "draws": True,  # random numbers, other than in nn.Dropout
            "evaluates": True,
            "more": bool(trainer.layout.cut_axes),
        }
        try:
            with self.running() as alone:
                self.expected += map(copied, training(alone, self.shares, self.plan, notes.append))
        except (FloatingPointError, NoTargets) as error:
            return {"instead": {"reason": f"in one process, {error}"}}
        except Exception as error:
            words = f"one process could not train on the whole batch ({type(error).__name__}"
            return {"instead": {"cause": f"It can't be compared: {words}: {error})."}}
        return {**self.plan, "moved": moved, "note": "\n".join(notes)}

    def result(self, of_ranks: Sequence[Any]) -> tuple[list[Row], str]:
        """Return the largest of each difference over the ranks, beside its bound, and the cause. If
        the bounds don't explain all, rounding is measured.
        """
        far: dict[Key, float] = {}
        for *key, difference in itertools.chain(*of_ranks):
            far[tuple(key)] = max(difference, far.get(tuple(key), 0.0))
        rows = self.judge(far, {})
        if any(row.ratio > 1 and row.what != "update" for row in rows):
            change = partial(jittered, eps=self.eps)
            with self.running(change) as alone:
                steps = training(alone, change(self.shares), self.plan)
                noise = differences(alone, steps, map(change, self.expected))
            rows = self.judge(far, noise)
        wrong = {row.what for row in rows if row.ratio > 1}
        if wrong and wrong != {"update"}:
            return rows, self.explain() or hint(self.trainer)
        return rows, NOT_ELEMENTWISE if wrong else ""

    def judge(self, far: Mapping[Key, float], noise: Mapping[Key, float]) -> list[Row]:
        """Return each difference beside its bound. `noise`: measured, or empty."""
        rows, before, (fine, coarse) = list[Row](), dict(self.start), bounds(self.eps)
        for numbers in self.expected:
            sizes = of_modules({key: largest(t) for key, t in numbers.items()})
            rounding = of_modules({key: noise.get(key, 0.0) for key in numbers})
            # zero but for rounding, such as the gradient of a bias before a softmax
            gradients = (size for key, size in sizes.items() if key[0] == "gradient")
            zero = self.eps * max(gradients, default=0.0)
            for key, t in numbers.items():
                what, name, step = key
                loose = LOOSE if step == self.plan["steps"] else 1
                relative = loose * (coarse if noise else fine)
                most = max(relative * sizes[key], NOISE * rounding[key])
                if what == "gradient":
                    most += zero
                elif what == "update" and t is not None:
                    rounded = 2 * step * torch.finfo(t.dtype).eps * largest(t)
                    most = fine * largest(t - before[name]) + rounded
                    before[name] = t
                elif what == "buffer" and t is not None and not t.is_floating_point():
                    most = 0.0
                difference = far.get(key, 0.0)
                ratio = difference / most if most else math.inf if difference else 0.0
                rows.append(Row(*key, difference, ratio))
        return sorted(rows, key=lambda row: KINDS.index(row.what))

    def explain(self) -> str:
        """Return in words what mixes samples; "" if nothing does."""
        loss_fn, (inputs, targets) = self.trainer.loss_fn, self.shares[0]
        of_loss = Snapshot(loss_fn, skip=(self.trainer, self.trainer.model))
        _, bound = bounds(self.eps)
        with self.running() as alone, deterministic(alone):
            outputs_of = partial(outputs, alone)
            whole = outputs_of(map_tensors(torch.clone, inputs))
            return problem_of_loss(
                alone.loss_fn, whole, targets, bound, of_loss.restore
            ) or problem_of_model(outputs_of, inputs, whole, bound)


# ── of any trainer, the layout's or that of one process ──


def training(
    trainer: Trainer,
    shares: Sequence[Share],
    plan: dict[str, Any],
    note: Callable[[str], object] | None = None,
) -> Iterator[dict[Key, Any]]:
    """Take steps, and yield loss, norm, gradients and buffers; weights; and so on.

    The caller may change gradients and weights meanwhile.

    Args:
        shares: of the batch, one after the other.
        plan: as `OneProcess.train` returns it.
        note: is told why there is no evaluation, in one process.
    """
    steps: int = plan["steps"]
    for group in trainer.optimizer.param_groups:
        if "lr" in group and not group["lr"]:
            group["lr"] = LEAST_LR  # a warm-up may begin at 0, and every update would be right
    for step in range(1, steps + 1):
        scaled = step == steps > 1 and trainer.precision.weights != torch.float16
        trainer.gradient_sync.scale = scale = SCALE if scaled else 1.0
        # which may be changed in place
        inputs, targets = map_tensors(
            torch.clone, shares[0] if len(shares) == 1 else (*zip(*shares),)
        )
        with deterministic(trainer, plan["draws"]) as chance:
            loss = compute_gradients(trainer, inputs, targets, plan["samples"])
        plan["draws"] = plan["draws"] and chance.met
        gradients = {("gradient", name, step): p.grad for name, p in trainer.owned.items()}
        for g in gradients.values():
            if g is not None and scaled:
                g /= scale
        numbers = {("loss", "", step): torch.tensor(loss, dtype=torch.float64), **gradients}
        if trainer.clip_norm is not None:
            numbers["norm", "", step] = gradient_norm(trainer)
        for name, b in trainer.model.named_buffers():
            if name in trainer.local and name in trainer.layout.entries:
                numbers["buffer", name, step] = b
        yield numbers
        clip(trainer)
        yield from updated(trainer, step)
    if plan["evaluates"]:
        try:
            evaluated = evaluate(trainer, shares)
            yield {("evaluate", "", steps): torch.tensor(evaluated, dtype=torch.float64)}
        except Exception as error:  # as the model raises it in eval mode, with any trainer
            if note is None:
                raise
            plan["evaluates"] = False
            words = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            note(f"evaluation isn't compared: in one process it raises {words}")
    if plan["more"]:
        yield from updated(trainer, steps + len(MORE), MORE)


def updated(
    trainer: Trainer, step: int, growth: Sequence[float] = (1.0,)
) -> Iterator[dict[Key, Any]]:
    """Take steps of the optimizer, before each of which gradients grow by a factor, and yield the
    weights.
    """
    owned = trainer.owned
    for factor in growth:
        for p in owned.values():
            if p.grad is not None and factor != 1:
                p.grad = factor * p.grad.to(p.dtype)  # of a master weight it is rounded
        trainer.optimizer.step()
    yield {("update", name, step): p.detach() for name, p in owned.items()}
    trainer.gradient_sync.publish()


def differences(
    trainer: Trainer, steps: Iterable[Numbers], expected: Iterable[Numbers]
) -> dict[Key, float]:
    """Return how far this rank's numbers are from those of the whole model, with which it goes
    on after each.
    """
    far = {}
    for here, there in zip(steps, expected):
        for key, t in here.items():
            whole, name = there[key], key[1]
            if name and whole is not None:
                whole = trainer.layout.cut(name, whole)
            far[key] = distance(t, whole)
        go_on_from(trainer, there)
    return far


@torch.no_grad()
def go_on_from(trainer: Trainer, numbers: Numbers) -> None:
    """Copy what there is of whole gradients and weights to where they are on the ranks."""
    for (what, name, _), whole in numbers.items():
        if (p := trainer.owned.get(name)) is None or what not in ("gradient", "update"):
            continue
        part = None if whole is None else trainer.layout.cut(name, whole)
        if what == "update":
            p.copy_(part)
        else:
            p.grad = None  # whose dtype may be another
            p.grad = None if part is None else part.to(p.grad_dtype or p.dtype, copy=True)


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
    nbytes, eps = dict[int, int](), [0.0]

    def pack(t: Tensor) -> Tensor:  # which isn't kept: nobody would free its graph
        nbytes[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        eps.append(torch.finfo(t.dtype).eps if t.is_floating_point() else 0.0)
        return t

    sample = cast(map_tensors(lambda t: t[:1].clone(), inputs), trainer.precision.weights)
    with suppress(Exception), saved_tensors_hooks(pack, lambda t: t):
        call(trainer.model, sample)
    weights = {p.untyped_storage()._cdata for p in trainer.model.parameters()}
    return float(sum(n for at, n in nbytes.items() if at not in weights)), max(eps)


def hint(trainer: Trainer) -> str:
    """Return what is special on the layout's first axis of which something is to be said."""
    sizes = trainer.axes.sizes.items()
    return next((HINTS[axis] for axis, size in sizes if size > 1 and axis in HINTS), "")


def messages_of_its_own(model: nn.Module) -> str:
    """Return why a model with modules of parallel101.layers is refused; "" without any."""
    for name, module in model.named_modules():
        if type(module).__module__.startswith("parallel101.layers."):
            return (
                f"It can't be compared: {name!r}, a {type(module).__name__} of parallel101.layers, "
                "sends messages to other ranks, and one process has none. Write the loop yourself; "
                "or, if it has no weights, compare it yourself and pass verify=False."
            )
    return ""
