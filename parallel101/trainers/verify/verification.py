"""The times at which a trainer is compared with one process, and the later checks.

before the first step              three steps, here and in one process       compare.py
in the first, and 2, 4, 8, 16, …   is the loss a mean over samples?           halves.py
                                   are copies of the model still equal?
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
from torch import nn

from parallel101.spans import unrecorded
from parallel101.trainers.agreement import Agreement, tensors_of
from parallel101.trainers.batches import Batch
from parallel101.trainers.layout import SAMPLES
from parallel101.trainers.losses import Losses, check_shares
from parallel101.trainers.memory import readable
from parallel101.trainers.options import LossFn, Options, Trainer
from parallel101.trainers.verify.compare import Comparison
from parallel101.trainers.verify.deterministic import deterministic
from parallel101.trainers.verify.halves import problem_of_loss
from parallel101.trainers.verify.one_process import WholeModel
from parallel101.trainers.verify.report import OF_KERAS, NotEqualError, Report
from parallel101.trainers.verify.snapshot import Snapshot

# of the first rank, for all that it holds at once; None: half of what is free
MOST_BYTES: int | None = None
STEPS = 3  # that verify=True compares


class Verification:
    """A trainer's comparison with one process.

    Args:
        trainer: that is being built; its model is not cut yet.
        model, loss_fn, options: as the user gave them.
        build: HybridTrainer, for the trainer of one process.

    Attributes:
        due: whether the comparison is still to be made.
        whole: the model before it was cut, on the first rank.
        steps: how many are compared.
        checks: whether the step that is being taken has the later checks.
    """

    def __init__(
        self,
        trainer: Trainer,
        model: nn.Module,
        loss_fn: LossFn | None,
        options: Options,
        build: Callable[..., Trainer],
    ):
        self.of_trainer = weakref.ref(trainer)  # otherwise only the garbage collector would free it
        self.loss_fn, self.asked = loss_fn, bool(options.verify)
        self.steps = STEPS if options.verify is True else options.verify
        self.whole: WholeModel | None = None
        self.due = self.checks = False
        self.losses: Losses | None = None  # of a step whose loss is checked
        self.comparable = self.asked and trainer.device.type != "meta"
        self.is_keras = any(cls.__module__.startswith("keras.") for cls in type(model).__mro__)
        if self.comparable and trainer.position == 0 and not self.is_keras:
            self.whole = WholeModel(model, loss_fn, options, build)

    @property
    def trainer(self) -> Trainer:
        return self.of_trainer()

    def note_cut(self) -> None:
        """Note that the trainer is built and its model cut."""
        trainer, microbatches = self.trainer, self.trainer.runner.microbatches
        if self.whole is not None:
            self.whole.note_cut()
        parts = len(trainer.axes.members.ranks) > 1 or microbatches > 1
        self.due = self.comparable and parts
        # whether samples of a batch are apart in a step
        self.cuts_samples = self.comparable and trainer.axes.size(SAMPLES) * microbatches > 1

    # ── in a step ──

    def before_step(self, inputs: Batch, targets: Batch) -> None:
        """Compare with one process, once. Raises NotEqualError."""
        first, step = self.due, self.trainer.steps + 1
        if first:
            with unrecorded():
                why, room = self.room()
                report = Report(reason=why) if why else self.compare(inputs, targets, room)
            if report.reason and not why:
                return  # the step itself will say it
            note = str(report) if why else report.note
            if note and self.trainer.position == 0:
                print(note, flush=True)
            self.settle()
        self.checks = self.comparable and (first or step & (step - 1) == 0)

    def watch(self, losses: Losses) -> None:
        """Let a step that begins keep the outputs of a microbatch if they are to be checked."""
        if self.checks and self.cuts_samples:
            losses.keep = self.trainer.steps.bit_length() % self.trainer.runner.microbatches
            self.losses = losses

    def after_gradients(self) -> None:
        """Check before the optimizer's step. Raises NotEqualError or ValueError, on every rank."""
        if self.checks:
            with unrecorded():
                self.check_loss()
                compare_copies(self.trainer)
        self.checks = False

    def check_loss(self) -> None:
        """Raise NotEqualError, on every rank, if the loss of the kept outputs is no mean on one."""
        trainer, words = self.trainer, ""
        kept, self.losses = None if self.losses is None else self.losses.kept, None
        if kept is not None:
            snapshot = self.loss_snapshot()
            eps = max(torch.finfo(t.dtype).eps for t in trainer.model.parameters())
            with deterministic(trainer):
                words = problem_of_loss(trainer.loss_fn, *kept, 16 * eps, snapshot.restore)
            snapshot.restore()
        if any(trainer.agree.numbers(bool(words))[0]):
            words = next(filter(None, trainer.agree.objects(words)))
            raise NotEqualError(Report(cause=words))

    def loss_snapshot(self) -> Snapshot:
        """Return a Snapshot of everything that a call of loss_fn can change."""
        return Snapshot(self.loss_fn, skip=(self.trainer.model, self))

    # ── the comparison ──

    def verify(self, inputs: Batch, targets: Batch) -> Report:
        """Compare this layout with one process: see `HybridTrainer.verify`."""
        if not self.asked:
            raise ValueError(
                "this trainer was built with verify=False and keeps no copy of the whole model: "
                "build it with verify=True"
            )
        if self.is_keras:
            return Report(reason=OF_KERAS)
        with unrecorded():
            check_shares(self.trainer, inputs, targets)
            report = self.compare(inputs, targets)
        if report.equal:
            self.settle()
        return report

    def compare(self, inputs: Batch, targets: Batch, room: float = math.inf) -> Report:
        """Run the whole comparison once, and put everything back. Collective.

        Args:
            room: for activations on the first rank, in bytes.
        """
        trainer = self.trainer
        snapshot = Snapshot(trainer, self.loss_fn, self.whole, skip=(self,))
        try:
            report = Comparison(self, (inputs, targets), snapshot, room).run()
        finally:
            snapshot.restore()
        trainer.agree.numbers(0.0)  # virtual ranks share objects: all have put them back
        if report.cause or report.wrong:
            raise NotEqualError(report)
        return report

    def settle(self) -> None:
        """Note that the comparison before the first step is made, and free its memory."""
        self.due = False
        if self.whole is not None:
            self.whole.free()
        return_freed_memory()

    def room(self) -> tuple[str, float]:
        """Return why there is no comparison, such as too little memory, the same on every rank; or
        "" and the number of bytes for activations on the first rank.
        """
        trainer = self.trainer
        if self.is_keras:
            return OF_KERAS, 0.0
        nbytes = {
            name: entry.shape.numel() * entry.dtype.itemsize
            for name, entry in trainer.layout.entries.items()
        }
        trained = sum(nbytes[name] for name in trainer.trained)
        # A snapshot, whole weights, and copies of them; gradients and weights after each step;
        # weights after the optimizer's own; Adam's state.
        needed = 4 * sum(nbytes.values()) + (2 * self.steps + 4) * trained
        free = free_bytes(trainer.device) / 2 if MOST_BYTES is None else MOST_BYTES
        (limit, *_) = trainer.agree.numbers(free)[0]
        if needed <= limit:
            return "", limit - needed
        return (
            f"a comparison with one process would take {readable(needed)} on rank "
            f"{trainer.agree.ranks[0]}, more than {readable(limit)}. Try the same options with "
            "fewer or narrower layers, or call trainer.verify(inputs, targets) if the memory is "
            "there"
        ), 0.0


def compare_copies(trainer: Trainer) -> None:
    """Raise ValueError, on every rank, if ranks that hold the same weights and buffers no longer
    hold the same bits. Without it each would train a model of its own, and no loss would show it.
    """
    axes = [axis for axis in ("dp", "cp") if axis in trainer.axes.sizes]
    trainer.agree.all_or_none(
        "compare its copy of the model",
        partial(
            Agreement(trainer.axes.along(axes), trainer.device).check_same,
            tensors_of(trainer.model),
            f"before step {trainer.steps + 1} the copies of the model are no longer equal",
            "something changes it on some ranks only, such as an nn.Embedding with max_norm, which "
            "shortens the rows that a rank's own samples use, or code between the steps",
        ),
    )


def free_bytes(device: torch.device) -> float:
    """Return the bytes that are free on this rank's device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with suppress(OSError, StopIteration):
        with open("/proc/meminfo") as lines:
            line = next(line for line in lines if line.startswith("MemAvailable"))
        return 1024.0 * int(line.split()[1])
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / 2


def return_freed_memory() -> None:
    """Return freed memory to the system. (glibc only; elsewhere nothing happens.)

    glibc keeps freed blocks of a few MB for later ones. After a comparison the first rank kept ten
    times the weights, which training never needed again.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
