"""Whether a trainer is compared with one process before its first step: always, unless that
takes too much memory.
"""

from __future__ import annotations

from parallel101.spans import unrecorded
from parallel101.trainers.layout import SAMPLES
from parallel101.trainers.support.batches import Batch, tensors_of
from parallel101.trainers.support.memory import readable
from parallel101.trainers.trainer import Trainer
from parallel101.trainers.verify.compare import compare, settle
from parallel101.trainers.verify.report import Report

MOST_BYTES = 2 * 2**30  # of the first rank, for all that it holds at once


def verify_once(trainer: Trainer, inputs: Batch, targets: Batch) -> None:
    """Before the first step.

    Raises NotEqualError; if nothing can be compared, a line says so, and training goes on.
    """
    with unrecorded():
        reason = too_much(trainer, inputs, targets)
        report = Report(reason=reason) if reason else compare(trainer, inputs, targets)
    if report.reason and trainer.position == 0:
        print(report, flush=True)
    settle(trainer, report)


def too_much(trainer: Trainer, inputs: Batch, targets: Batch) -> str:
    """Why it isn't done before the first step, the same on every rank."""
    entries = trainer.layout.entries
    if any(t.is_meta for t in trainer.model.parameters()):
        return "the model is on the meta device and has no values"
    nbytes = {name: entry.shape.numel() * entry.dtype.itemsize for name, entry in entries.items()}
    trained = sum(nbytes[name] for name in trainer.trained)
    samples = (
        sum(t[:1].nbytes for t in tensors_of((inputs, targets)))
        * (2 * trainer.runner.microbatches + 1)
        * trainer.axes.size(SAMPLES)
    )
    # Weights, slightly different ones, a copy that is trained, and those that are put back; of
    # trained ones, gradients and results of two steps, the gradients themselves, and Adam's state.
    mine = 4 * sum(nbytes.values()) + 7 * trained + samples
    needed = int(max(trainer.agree.numbers(mine)[0]))
    if needed <= MOST_BYTES:
        return ""
    return (
        f"a comparison with one process would take {readable(needed)} on rank "
        f"{trainer.agree.ranks[0]}, more than {readable(MOST_BYTES)}. "
        "Try the same options with fewer or narrower layers, or call trainer.verify(inputs, "
        "targets) if the memory is there"
    )
