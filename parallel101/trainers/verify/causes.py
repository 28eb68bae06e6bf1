"""Why a layout differs from one process, in words, as far as one process can tell: from halves of the samples that were compared.

the loss of two halves of the same outputs     is their mean, or loss_fn is no mean over samples
the outputs of two halves of the samples       are those of the whole, or something mixes samples
the modules of .sequence(), one by one         are the forward, or a pipeline computes something else
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from parallel101.trainers.pipeline.split import entries_of
from parallel101.trainers.support.batches import Batch, call, split, tensors_of
from parallel101.trainers.verify.one_process import OneProcess, mean_loss

FAR = 1e-3  # relative; more than rounding in any dtype that a loss is computed in


def explain(trainer: Any, batch: tuple[Batch, Batch], values: Mapping[str, Tensor], rows: Sequence[Any]) -> str:
    """The cause, on the first rank; "" if the layout raised an error, and that is not explained.

    Args:
        batch: the samples that were compared, and `values` the weights, by name.
        rows: of the report, if the layout computed anything.
    """
    kinds = {row.what for row in rows if row.ratio > 1}
    first = next((row.name for row in rows if row.what == "gradient" and row.ratio > 1), "")
    if kinds == {"update"}:
        return (
            "From equal gradients the optimizer makes other weights: it does not update each element on its own, but looks at whole "
            "matrices or their norms, and here a rank has pieces of them. Use SGD, Adam, AdamW or another elementwise optimizer, or "
            "DataParallelTrainer, where each rank has whole matrices."
        )
    try:
        with trainer.one_process.holding(values):
            found = of_the_loss(trainer.one_process, batch) or of_the_model(trainer, batch)
    except Exception:  # a model may refuse half of the samples
        found = ""
    return found or (of_the_layout(trainer, kinds, first) if rows else "")


def of_the_loss(whole: OneProcess, batch: tuple[Batch, Batch]) -> str:
    inputs, targets = batch
    sizes = halves(inputs)
    with torch.no_grad():
        outputs = whole.outputs(inputs)
    if whole.loss_fn is not None and mean_loss(whole.loss_fn, outputs, targets).requires_grad:
        return (
            "loss_fn uses the model's weights (a penalty, for example), and each rank has some of them only. "
            "Use the optimizer's weight_decay, or a data parallel trainer."
        )
    if not per_sample(outputs, sum(sizes)) or min(sizes) == 0:
        return ""
    means = [mean_loss(whole.loss_fn, o, t).item() for o, t in zip(split(outputs, sizes), split(targets, sizes))]
    together, of_halves = mean_loss(whole.loss_fn, outputs, targets).item(), weighted(means, sizes)
    if not far(together, of_halves):
        return ""
    return (
        f"loss_fn is no mean over samples: of the same outputs it gives {together:.6g}, and of their halves {of_halves:.6g} on average. "
        "Return (sum of losses, their weight) from loss_fn, such as the number of targets that count, and each is divided by the whole "
        "batch's weight. A loss that compares samples with each other can't be cut along them."
    )


def of_the_model(trainer: Any, batch: tuple[Batch, Batch]) -> str:
    whole, (inputs, targets) = trainer.one_process, batch
    sizes = halves(inputs)
    with torch.no_grad():
        outputs = whole.outputs(inputs)
        if trainer.axes.sizes.get("pp", 1) > 1 and differ(in_sequence(whole, inputs), outputs):
            return (
                "The modules of .sequence(), one after the other, are not the model's forward, which a pipeline does not call. "
                "Look for what forward does between them, and for hooks on the model itself: put it into modules of the sequence."
            )
        if min(sizes) == 0:
            return ""
        parts = [whole.outputs(part) for part in split(inputs, sizes)]
        if per_sample(outputs, sum(sizes)):
            whole_rows, rows = tensors_of(outputs), [torch.cat(of_halves) for of_halves in zip(*map(tensors_of, parts))]
            mixes = differ(rows, whole_rows)
        else:
            losses = [mean_loss(whole.loss_fn, o, t).item() for o, t in zip(parts, split(targets, sizes))]
            mixes = far(weighted(losses, sizes), mean_loss(whole.loss_fn, outputs, targets).item())
    if not mixes:
        return ""
    return (
        "Something in the model mixes samples: its outputs for half of the samples differ from those for all. It may look at statistics of "
        "the batch, or samples may not lie along dim 0 (a time-first LSTM, for example), where they are cut. BatchNorm works with "
        "sync_batch_norm=True."
    )


def of_the_layout(trainer: Any, kinds: set[str], first: str) -> str:
    sizes = trainer.axes.sizes
    where = f" The first gradient that differs is that of {first!r}." if first else ""
    if kinds == {"evaluate"}:
        return "Training is equal, and evaluation is not: a module computes in another way in eval mode."
    if kinds <= {"buffer", "update"}:
        return "A module keeps statistics of the samples in a buffer, and here it sees them in parts."
    if sizes.get("tp", 1) > 1 and any("tp" in entry.placements for entry in trainer.layout.entries.values()):
        in_time = "With sequence_parallel, every module between the cut layers must act on each position alone. " * trainer.in_time
        return (
            "The plan cuts what must not be cut: between a column and a row layer a rank sees only some features, so code there must "
            "act on each feature (or head) alone. Leave these layers out of the plan, or make them 'column_gather'. "
            f"{in_time}A hook on a parameter that is cut is lost.{where}"
        )
    return f"The model computes something else if its samples come in parts, or its layers on different ranks.{where}"


def in_sequence(whole: OneProcess, inputs: Batch) -> Any:
    first, *others = entries_of(whole.model)
    with whole.casting():
        x = call(first, inputs)
        for entry in others:
            x = entry(x)
    return x


def halves(inputs: Batch) -> list[int]:
    samples = len(tensors_of(inputs)[0])
    return [samples - samples // 2, samples // 2]


def per_sample(outputs: Any, samples: int) -> bool:
    """Whether each of these tensors has the samples along dim 0."""
    found = tensors_of(outputs)
    return bool(found) and all(t.dim() and len(t) == samples for t in found)


def weighted(means: list[float], sizes: list[int]) -> float:
    return sum(mean * size for mean, size in zip(means, sizes)) / sum(sizes)


def far(a: float, b: float) -> bool:
    return not abs(a - b) <= FAR * max(abs(a), abs(b))


def differ(a: Any, b: Any) -> bool:
    pairs = zip(tensors_of(a), tensors_of(b))
    return any(not torch.allclose(x, y, rtol=FAR, atol=FAR * float(y.abs().max())) for x, y in pairs if y.is_floating_point() and y.numel())
