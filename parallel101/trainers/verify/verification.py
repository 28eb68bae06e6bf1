"""The times at which a trainer is compared with one process, and the later checks.

before the first step              three steps, here and in one process       compare.py
in the first, and 2, 4, 8, 16, …   is the loss a mean over samples?
                                   are copies of the model still equal?

A trainer computes the loss for parts of a batch, and takes their mean. So loss_fn of some outputs
must be the weighted mean of loss_fn of two parts of them.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from parallel101.spans import unrecorded
from parallel101.trainers.agreement import Agreement, named_tensors
from parallel101.trainers.batches import Batch, map_tensors, split, tensors_of
from parallel101.trainers.layout import SAMPLES
from parallel101.trainers.losses import Losses, check_shares, loss_and_weight
from parallel101.trainers.memory import readable
from parallel101.trainers.options import Options, Trainer
from parallel101.trainers.verify.compare import compare
from parallel101.trainers.verify.deterministic import deterministic
from parallel101.trainers.verify.one_process import WholeModel
from parallel101.trainers.verify.report import OF_KERAS, NotEqualError, Report
from parallel101.trainers.verify.snapshot import Snapshot

STEPS = 3  # that verify=True compares
EXACT = 1e-9  # relative; rounding in float64 is less
NO_MEAN = (
    "loss_fn isn't a mean over samples: of the same outputs it gives {:.6g}, and on average of two "
    "parts of them {:.6g}. Return (sum of losses, their weight) from loss_fn, such as the number "
    "of targets that count, and each is divided by the whole batch's weight. A loss that compares "
    "samples with each other can't be cut along them."
)


class Verification:
    """A trainer's comparison with one process. Its methods are given the trainer.

    Args:
        trainer: that is being built; its model is not cut yet.
        options: as the user gave them.
        build: HybridTrainer, of this model and its loss_fn, for the trainer of one process.

    Attributes:
        steps: how many are compared; 0: none.
        due: whether the comparison before the first step is still to be made.
        whole: the model before it was cut, on the first rank.
        losses: of a step that has the later checks.
    """

    def __init__(self, trainer: Trainer, options: Options, build: Callable[..., Trainer]):
        model = trainer.model
        self.steps = STEPS if options.verify is True else int(options.verify)
        self.is_keras = any(cls.__module__.startswith("keras.") for cls in type(model).__mro__)
        self.comparable = self.steps > 0 and trainer.device.type != "meta"
        self.whole: WholeModel | None = None
        if self.comparable and trainer.position == 0 and not self.is_keras:
            self.whole = WholeModel(model, options, build)
        self.due = self.checks = False
        self.losses: Losses | None = None

    def note_cut(self, trainer: Trainer) -> None:
        """Note that the trainer is built and its model cut."""
        if self.whole is not None:
            self.whole.note_cut()
        parts = len(trainer.agree.ranks) * trainer.runner.microbatches
        self.due = self.comparable and parts > 1

    # ── in a step ──

    def before_step(self, trainer: Trainer, inputs: Batch, targets: Batch) -> None:
        """Compare with one process, once. Raises NotEqualError."""
        step = trainer.steps + 1
        if self.due:
            with unrecorded():
                note, room = self.room(trainer)
                report = Report(note=note) if note else compare(trainer, (inputs, targets), room)
            if report.reason:
                return  # the step itself will say it
            if report.note and trainer.position == 0:
                print(report.note, flush=True)
            self.settle()
        self.checks = self.comparable and step & (step - 1) == 0

    def watch(self, trainer: Trainer, losses: Losses) -> None:
        """Let a step that begins keep the outputs of a microbatch if they are to be checked."""
        microbatches = trainer.runner.microbatches
        if self.checks and trainer.axes.size(SAMPLES) * microbatches > 1:  # samples are apart
            losses.keep = trainer.steps.bit_length() % microbatches
            self.losses = losses

    def after_gradients(self, trainer: Trainer) -> None:
        """Check before the optimizer's step. Raises NotEqualError or ValueError, on every rank."""
        if self.checks:
            with unrecorded():
                if words := self.problem_of_loss(trainer):
                    raise NotEqualError(Report(cause=words))
                compare_copies(trainer)
        self.checks = False

    def problem_of_loss(self, trainer: Trainer) -> str:
        """Return why the loss of the outputs that a rank has kept is no mean, the same on every
        rank; "" if it is one.
        """
        kept, self.losses = self.losses and self.losses.kept, None
        with deterministic(trainer):
            words = not_a_mean(trainer, *kept) if kept else ""
        return next(filter(None, trainer.agree.objects(words)), "")

    # ── the comparison ──

    def verify(self, trainer: Trainer, inputs: Batch, targets: Batch) -> Report:
        """Compare this layout with one process: see `HybridTrainer.verify`."""
        if not self.steps:
            raise ValueError(
                "this trainer was built with verify=False and keeps no copy of the whole model: "
                "build it with verify=True"
            )
        if self.is_keras:
            return Report(reason=OF_KERAS)
        with unrecorded():
            check_shares(trainer, inputs, targets)
            report = compare(trainer, (inputs, targets))
        if report.equal:
            self.settle()
        return report

    def settle(self) -> None:
        """Note that the comparison before the first step is made, and free its memory."""
        self.due = False
        if self.whole is not None:
            self.whole.free()
        # glibc keeps freed blocks of a few MB for later ones: ten times the weights, on the first
        # rank, which training never needs again
        with suppress(OSError, AttributeError, TypeError):  # elsewhere
            ctypes.CDLL(None).malloc_trim(0)

    def room(self, trainer: Trainer) -> tuple[str, float]:
        """Return why there is no comparison, such as too little memory, the same on every rank; or
        "" and the number of bytes for activations on the first rank.
        """
        if self.is_keras:
            return f"not verified: {OF_KERAS}", 0.0
        entries = trainer.layout.entries.items()
        nbytes = {name: t.shape.numel() * t.dtype.itemsize for name, t in entries}
        trained = sum(nbytes[name] for name in trainer.trained)
        # A snapshot, whole weights, and copies of them; gradients and weights after each step;
        # weights after the optimizer's own; Adam's state.
        needed = 4 * sum(nbytes.values()) + (2 * self.steps + 4) * trained
        # of the first rank, for all that it holds at once
        (limit, *_) = trainer.agree.numbers(free_bytes(trainer.device) / 2)[0]
        if needed <= limit:
            return "", limit - needed
        return (
            f"not verified: a comparison with one process would take {readable(needed)} on rank "
            f"{trainer.agree.ranks[0]}, more than {readable(limit)}. Try the same options with "
            "fewer or narrower layers, or call trainer.verify(inputs, targets) if the memory is "
            "there"
        ), 0.0


def compare_copies(trainer: Trainer) -> None:
    """Raise ValueError, on every rank, if ranks that hold the same weights and buffers no longer
    hold the same bits. Without it each would train a model of its own, and no loss would show it.
    """
    copies = trainer.axes.along([axis for axis in ("dp", "cp") if axis in trainer.axes.sizes])
    check = partial(
        Agreement(copies, trainer.device).check_same,
        named_tensors(trainer.model),
        f"before step {trainer.steps + 1} the copies of the model are no longer equal",
        "something changes it on some ranks only, such as an nn.Embedding with max_norm, which "
        "shortens the rows that a rank's own samples use, or code between the steps",
    )
    trainer.agree.all_or_none("compare its copy of the model", check)


@torch.no_grad()
def not_a_mean(trainer: Trainer, outputs: Any, targets: Any) -> str:
    """Return what is wrong with cutting these outputs along the samples; "" if nothing is, or if
    it can't be told. What loss_fn has changed, such as a counter, is put back after each call.
    """
    loss_fn = trainer.loss_fn
    (samples, *others) = {len(t) if t.dim() else 0 for t in tensors_of(outputs)} or {0}
    if loss_fn is None or others or samples < 2:
        return ""
    snapshot = Snapshot(loss_fn, skip=(trainer, trainer.model))
    # where loss_fn can't compute in float64
    bound = 16 * max(torch.finfo(t.dtype).eps for t in trainer.model.parameters())

    def mean_loss(y: Any, t: Any, sizes: Sequence[int]) -> float:
        """Return what a trainer computes from the losses of parts of these sizes; NaN if loss_fn
        can't compute some of them.
        """
        total, weights = 0.0, 0.0
        # loss_fn may change them in place
        ys, ts = (split(tree, sizes) for tree in map_tensors(torch.clone, (y, t)))
        for of_part, size in zip(zip(ys, ts), sizes):
            try:
                loss, weight = loss_and_weight(loss_fn, *of_part)
            except Exception:
                return math.nan
            finally:
                snapshot.restore()
            total += loss.item() * (size if weight is None else 1)
            weights += size if weight is None else weight
        return total / weights if weights else 0.0

    exactly = map_tensors(lambda t: t.double() if t.is_floating_point() else t, (outputs, targets))
    for (y, t), most in ((exactly, EXACT), ((outputs, targets), bound)):
        whole, *means = (mean_loss(y, t, sizes) for sizes in ([samples], *two_parts(samples)))
        if not math.isnan(whole):
            moved = map_tensors(lambda t: t.roll(1, 0), (y, t))
            rolled = mean_loss(moved[0], moved[1], [samples])
            right = [math.isclose(whole, mean, rel_tol=most) for mean in (rolled, *means)]
            wrong = [mean for mean, same in zip(means, right[1:]) if not (same or math.isnan(mean))]
            # if their order matters, samples may belong together, and stay so in one of these ways
            together = not right[0] and any(right)
            return "" if together or not wrong else NO_MEAN.format(whole, wrong[0])
    return ""


def two_parts(samples: int) -> Iterator[list[int]]:
    """Yield ways to split samples in two, unequally if possible: with equal parts, a loss that
    divides by something else may be the mean by chance.

    Some keep pairs, and groups of 4, 8, …, together, and others groups of 3.
    """
    unit = samples & -samples  # the largest power of two that divides it
    for together in {unit // 2 if unit == samples else unit, 1 if samples % 3 else 3}:
        if samples >= 2 * together:
            size = max(together, samples // 3 // together * together)
            yield from ([samples - size, size], [size, samples - size])


def free_bytes(device: torch.device) -> float:
    """Return the bytes that are free on this rank's device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with suppress(OSError, StopIteration):
        with open("/proc/meminfo") as lines:
            line = next(line for line in lines if line.startswith("MemAvailable"))
        return 1024.0 * int(line.split()[1])
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / 2
