"""A layout against one process: the same training on the same whole batch.

    the first rank   the whole batch ──▶ one process (one_process.py) ─▶ loss, gradients, … ┐ =?
    every rank       its share ──▶ the trainer's own steps ─▶ the same                      ┘

`training` runs on both sides. After each gradient is compared, both go on from that of one process,
and after each update from its weights: Adam turns the rounding of a zero gradient into a full step.
So that less is hidden

    weights    that are zero, such as LoRA's B or a head, are moved a little at the start
    samples    are sorted in the second step: ranks' shares differ as much as they can
    the loss   is scaled in the last step, for hooks that clamp only large gradients
    updates    if ranks update parts of tensors, the optimizer alone takes more steps from gradients
               that jump, and then some after its counters were moved ahead: it may couple elements
               after a warm-up, or now and then

Each rank finds how far its numbers are off, and the first rank judges (tolerance.py).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from parallel101.trainers.batches import (
    Batch,
    call,
    cast,
    copied,
    count_samples,
    join,
    map_tensors,
    split,
    tensors_of,
)
from parallel101.trainers.layout import SAMPLES
from parallel101.trainers.losses import NoTargets
from parallel101.trainers.memory import readable
from parallel101.trainers.options import Trainer
from parallel101.trainers.step import clip, compute_gradients, gradient_norm
from parallel101.trainers.training_loop import evaluate_share, evaluation_mode
from parallel101.trainers.verify.deterministic import deterministic
from parallel101.trainers.verify.one_process import WholeModel
from parallel101.trainers.verify.report import NOT_ELEMENTWISE, NotEqualError, Report, Row, hint
from parallel101.trainers.verify.snapshot import Snapshot
from parallel101.trainers.verify.tolerance import (
    Key,
    Numbers,
    distance,
    jittered,
    judge,
    without_zeros,
)

# what is left out if one process raises in it
SORTED, EVALUATION, JUMPS, AHEAD = OPTIONAL = (
    "the batch in another order",
    "evaluation",
    "the optimizer after jumps of gradients",
    "the optimizer many steps later",
)
# by how much gradients grow before each step of the optimizer alone
GROWTH = {JUMPS: (-1.1, 100.0, -0.01), AHEAD: (-1.1,) * 6}
THOUSAND = 1000  # counters move to three steps before a multiple of it: of 2, 5, 10, 50, …, too
LEAST_LR = 1e-3
SCALE = 2.0**10  # of the last loss
Share = tuple[Batch, Batch]
# of torch's errors and Python's unpacking: sizes don't fit
SHAPES = re.compile("shape|size|matrix|unpack|unflatten", re.IGNORECASE)


def compare(trainer: Trainer, batch: Share, room: float = math.inf) -> Report:
    """Compare a layout with one process, and put everything back. Collective.

    Args:
        batch: this rank's share.
        room: for activations on the first rank, in bytes.

    Raises NotEqualError, on every rank.
    """
    snapshot, whole = Snapshot(trainer), trainer.verification.whole
    one = whole and OneProcess(trainer, whole, snapshot, room)
    try:
        report = compared(trainer, one, batch)
    finally:
        snapshot.restore()
    trainer.agree.numbers(0.0)  # virtual ranks share objects: all have put them back
    if report.cause or report.wrong:
        raise NotEqualError(report)
    return report


def compared(trainer: Trainer, one: OneProcess | None, batch: Share) -> Report:
    """Compare, and leave traces."""
    agree, layout = trainer.agree, trainer.layout
    for name, module in trainer.model.named_modules():
        if type(module).__module__.startswith("parallel101.layers.") and len(agree.ranks) > 1:
            words = (
                f"It can't be compared: {name!r}, a {type(module).__name__} of parallel101.layers, "
                "sends messages to other ranks, and one process has none. Write the loop yourself; "
                "or, if it has no weights, compare it yourself and pass verify=False."
            )
            return Report(cause=words)
    # of the ranks with the same samples, one gives them
    gives = all(axis in SAMPLES or not at for axis, at in trainer.axes.here.items())
    shares = [share for share in agree.objects(batch if gives else None) if share is not None]
    start = layout.gather(trainer.parts, list(layout.entries), first_only=True)
    state = trainer.sharded_optimizer.state()
    plan = agree.objects(one.train(shares, start, state) if one else {})[0]
    if "instead" in plan:
        return Report(**plan["instead"])
    place, shares = trainer.axes.place(SAMPLES), first_of(shares, plan["few"])
    sent = (agree.objects(of_one)[0] for of_one in (one.expected if one else itertools.repeat({})))
    trainer.verification.checks = True  # so that outputs are kept
    try:
        steps_here = training(trainer, [shares[place]], [sorted_samples(shares)[place]], plan)
        far = differences(trainer, steps_here, sent)
    except (RuntimeError, ValueError) as error:  # on each rank that raises it
        if not SHAPES.search(str(error)):
            raise
        words = (
            f"One process can compute this batch, and cut over {len(agree.ranks)} ranks "
            f"{type(error).__name__} was raised: {str(error).splitlines()[0]}. {hint(trainer)}"
        )
        raise NotEqualError(Report(cause=words)) from error
    cause = trainer.verification.problem_of_loss(trainer)
    of_ranks = agree.objects([(*key, far[key]) for key in far], first_only=True)
    found = [*map(tuple, one.result(of_ranks))] if one else []
    rows = [Row(*row) for row in agree.objects(found)[0]]
    if wrong := {row.what for row in rows if row.ratio > 1}:
        cause = NOT_ELEMENTWISE if wrong == {"update"} else cause or hint(trainer)
    return Report(rows, cause=cause, note=plan["note"])


class OneProcess:
    """What the first rank does: it computes the whole batch, and judges.

    Args:
        trainer: the layout's.
        whole: its model.
        snapshot: to which this rank returns before it takes part in the layout.
        room: see `compare`.

    Attributes:
        expected: weights that were moved at the start, and then what `training` yields.
        eps: the coarsest rounding.
    """

    def __init__(self, trainer: Trainer, whole: WholeModel, snapshot: Snapshot, room: float):
        self.trainer, self.whole, self.snapshot, self.room = trainer, whole, snapshot, room

    @contextmanager
    def running(self, change: Callable[[Any], Any] = lambda values: values) -> Iterator[Any]:
        """Give a trainer of the whole model on this rank alone, inside."""
        self.snapshot.restore()
        alone = self.whole.trainer(self.trainer, change(self.start), self.state)
        try:
            yield alone
        finally:
            for part in (alone.runner, alone):  # their cycles would keep weights in memory
                part.__dict__.clear()
            self.snapshot.restore()

    def training(self, alone: Trainer, change: Callable[[Any], Any] = lambda shares: shares) -> Any:
        """Train on all shares together, or one after the other if shapes of samples differ."""
        batches = change(self.shares), change(sorted_samples(self.shares))
        run = alone.runner.run

        def run_in_turn(inputs: Any, targets: Any, losses: Any) -> None:
            for x, y in zip(inputs, targets):
                run(x, y, losses)

        try:
            batches = [join(batches[0])], [join(batches[1])]
        except ValueError:
            alone.runner.run = run_in_turn
        return training(alone, *batches, self.plan)

    def train(self, shares: list[Share], start: dict[str, Tensor], state: Any) -> dict[str, Any]:
        """Train in one process. Returns what every rank needs before it does the same; or
        "instead", what its report says.

        Args:
            shares: of the batch.
            start: parameters and buffers, by name.
            state: the optimizer's.
        """
        trainer, room, few, notes = self.trainer, self.room, None, list[str]()
        self.start, self.state = start, state
        if lost := sorted(self.snapshot.lost):
            notes.append(f"verify has not put back what it can't: {', '.join(lost)}")
        with self.running() as alone:
            needed, self.eps = kept_of_a_sample(alone, shares[0][0])
        needed *= sum(map(count_samples, shares))
        if needed > room:
            few = trainer.runner.microbatches
            notes.append(
                f"verified with {few} sample{'s' * (few > 1)} a rank only: all activations of one "
                f"process would take {readable(needed)} on rank {trainer.agree.ranks[0]}, and "
                f"there are {readable(room)}"
            )
        self.shares = first_of(shares, few)
        moved = without_zeros({name: start[name] for name in trainer.trained})
        start |= moved
        self.plan: dict[str, Any] = {
            "steps": trainer.verification.steps,
            "samples": sum(map(count_samples, self.shares)),
            "few": few,
            "draws": True,  # random numbers, other than in nn.Dropout
            "parts": list(OPTIONAL if trainer.layout.cut_axes else OPTIONAL[:2]),
        }
        while True:
            try:
                with self.running() as alone:
                    self.expected = list(map(copied, self.training(alone)))
                self.expected[0] = {("update", name, 0): t for name, t in moved.items()}
                return {**self.plan, "note": "\n".join(notes)}
            except Exception as error:
                part, words = self.plan["part"], f"{type(error).__name__}: {error}"
                if part in self.plan["parts"]:
                    (first, *_) = words.splitlines()
                    notes.append(f"{part} isn't compared: in one process it raises {first}")
                    self.plan["parts"].remove(part)
                    continue
                if isinstance(error, FloatingPointError | NoTargets):
                    return {"instead": {"reason": f"in one process, {error}"}}
                words = f"one process could not train on the whole batch ({words})"
                return {"instead": {"cause": f"It can't be compared: {words}."}}

    def result(self, of_ranks: Sequence[Any]) -> list[Row]:
        """Return the largest of each difference over the ranks, beside its bound. If the bounds
        don't explain all, rounding is measured.
        """
        far: dict[Key, float] = {}
        for *key, difference in itertools.chain(*of_ranks):
            far[tuple(key)] = max(difference, far.get(tuple(key), 0.0))
        judged = partial(judge, far, self.expected[1:], self.start, self.eps, self.plan["steps"])
        rows = judged({})
        if any(row.ratio > 1 and row.what != "update" for row in rows):
            change = partial(jittered, eps=self.eps)
            with self.running(change) as alone:
                steps = self.training(alone, change)
                rows = judged(differences(alone, steps, map(change, self.expected)))
        return rows


# ── of any trainer, the layout's or that of one process ──


def training(
    trainer: Trainer, shares: Sequence[Share], resorted: Sequence[Share], plan: dict[str, Any]
) -> Iterator[dict[Key, Any]]:
    """Take steps, and yield nothing at the start; loss, norm, gradients and buffers; weights; and
    so on. The caller may change gradients and weights meanwhile.

    Args:
        shares: of the batch, one after the other.
        resorted: of the second step.
        plan: as `OneProcess.train` returns it. Its "part" is what runs now.
    """
    steps, plan["part"] = plan["steps"], "the start"
    yield {}
    trainer.gradient_sync.publish()
    for group in trainer.optimizer.param_groups:
        if "lr" in group and not group["lr"]:
            group["lr"] = LEAST_LR  # a warm-up may begin at 0, and every update would be right
    for step in range(1, steps + 1):
        plan["part"] = SORTED if step == 2 else "a step"
        scaled = step == steps > 1 and trainer.precision.weights != torch.float16
        trainer.gradient_sync.scale = SCALE if scaled else 1.0
        used = resorted if plan["part"] in plan["parts"] else shares
        # which may be changed in place
        inputs, targets = map_tensors(torch.clone, used[0] if len(used) == 1 else (*zip(*used),))
        with deterministic(trainer, plan["draws"]) as chance:
            loss = compute_gradients(trainer, inputs, targets, plan["samples"])
        plan["draws"] = plan["draws"] and chance.met
        gradients = {("gradient", name, step): p.grad for name, p in trainer.owned.items()}
        for g in gradients.values():
            if g is not None and scaled:
                g /= SCALE
        numbers = {("loss", "", step): torch.tensor(loss, dtype=torch.float64), **gradients}
        if trainer.clip_norm is not None:
            numbers["norm", "", step] = gradient_norm(trainer)
        for name, b in trainer.model.named_buffers():
            if name in trainer.local and name in trainer.layout.entries:
                numbers["buffer", name, step] = b
        yield numbers
        clip(trainer)
        yield from updated(trainer, step, [1.0])
    if EVALUATION in plan["parts"]:
        plan["part"] = EVALUATION
        with torch.no_grad(), evaluation_mode(trainer), deterministic(trainer, plan["draws"]):
            parts = [evaluate_share(trainer, *map_tensors(torch.clone, share)) for share in shares]
        sums, of_weights = trainer.agree.numbers(*map(math.fsum, zip(*parts)))
        mean = math.fsum(sums) / math.fsum(of_weights)
        yield {("evaluate", "", steps): torch.tensor(mean, dtype=torch.float64)}
    for part, growth in GROWTH.items():
        if part in plan["parts"]:
            before, steps = numbers_of(trainer.optimizer), steps + len(growth)
            plan["part"] = part
            yield from updated(trainer, steps, growth)
            for numbers, key, number in before:
                now = number + len(growth)
                if numbers.get(key) == now:  # it counts steps
                    numbers[key] += 2 * THOUSAND - 3 - int(now) % THOUSAND


def updated(trainer: Trainer, step: int, growth: Sequence[float]) -> Iterator[dict[Key, Any]]:
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


def numbers_of(optimizer: Any) -> list[tuple[dict[Any, Any], Any, float]]:
    """Return single numbers that an optimizer keeps, each with its dict and key."""
    held = [vars(optimizer), *optimizer.param_groups, *optimizer.state.values()]
    return [
        (numbers, key, float(value))
        for numbers in held
        for key, value in numbers.items()
        if type(value) is int or (isinstance(value, Tensor) and not value.dim())
    ]


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


def first_of(shares: list[Share], few: int | None) -> list[Share]:
    """Return the first few samples of each share; None: all."""
    return [map_tensors(lambda t: t[:few], share) for share in shares]


def sorted_samples(shares: list[Share]) -> list[Share]:
    """Return shares of the same sizes with all samples, in the order of their means; the same
    shares if the shapes of samples differ.
    """
    with suppress(ValueError):
        whole = join(shares)
        first = tensors_of(whole)[0]
        order = first.real.double().reshape(len(first), -1).mean(1).argsort(stable=True)
        return split(map_tensors(lambda t: t[order], whole), [count_samples(s) for s in shares])
    return shares


def kept_of_a_sample(trainer: Trainer, inputs: Batch) -> tuple[float, float]:
    """Return the bytes that one sample's forward keeps for backward, 0 if it can't run alone, and
    the coarsest rounding of these and the weights: a model may use autocast itself.
    """
    parameters, nbytes = list(trainer.model.parameters()), dict[int, int]()
    dtypes = {p.dtype for p in parameters if p.requires_grad}
    dtypes.add(trainer.precision.autocast or torch.float64)

    def pack(t: Tensor) -> Tensor:  # which isn't kept: nobody would free its graph
        nbytes[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        dtypes.update([t.dtype] if t.is_floating_point() else [])
        return t

    sample = cast(map_tensors(lambda t: t[:1].clone(), inputs), trainer.precision.weights)
    with suppress(Exception), saved_tensors_hooks(pack, lambda t: t):
        call(trainer.model, sample)
    for p in parameters:
        nbytes.pop(p.untyped_storage()._cdata, None)
    return float(sum(nbytes.values())), max(torch.finfo(dtype).eps for dtype in dtypes)
