"""Why a layout differs from one process, in words, as far as one process can tell: from parts of
the samples that were compared.

    the loss of two parts of the same outputs   is their mean, or loss_fn isn't a mean over samples
    the outputs of the same samples             are the same again, or the model remembers
    the outputs of two parts of the samples     are those of the whole, or something mixes samples
    the modules of .sequence(), one by one      are the forward, or a pipeline differs
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parallel101.trainers.support.arguments import loss_and_weight
from parallel101.trainers.support.batches import Batch, call, map_tensors, split, tensors_of
from parallel101.trainers.trainer import Trainer
from parallel101.trainers.verify.one_process import OneProcess, mean_loss

EXACT = 1e-9  # relative; rounding in float64 is less
NO_POSITIONS = (
    " This model's forward doesn't take `positions`, (batch, time) whole numbers, so it can't know "
    "which ones it has."
)


def explain(
    trainer: Trainer,
    batch: tuple[Batch, Batch],
    values: Mapping[str, Tensor],
    rows: Sequence[Any],
    bound: float,
) -> str:
    """The cause, on the first rank; "" if the layout raised an error, and that is not explained.

    Args:
        batch: the samples that were compared, and `values` the weights, by name.
        rows: of the report, if the layout computed anything.
        bound: how much of the largest number may be rounding.
    """
    kinds = {row.what for row in rows if row.ratio > 1}
    gradients = [row.name for row in rows if row.what == "gradient" and row.ratio > 1]
    if kinds == {"update"}:
        return of_the_optimizer(trainer)
    try:
        in_parts = any(
            p.shape != trainer.layout.entries[name].shape
            for name, p in trainer.model.named_parameters()
        )
        with trainer.one_process.holding(values):
            hooks = hooks_on(trainer.model, gradients) if kinds <= {"gradient", "norm"} else ""
            found = (
                hooks
                or of_the_loss(trainer.one_process, batch, in_parts, bound)
                or of_the_model(trainer, batch, bound)
            )
    except Exception:  # as loss_fn may raise for some of the samples
        found = ""
    return found or (of_the_layout(trainer, kinds, gradients) if rows else "")


def messages_of_its_own(model: nn.Module) -> tuple[str, str]:
    """Why a model with modules of parallel101.layers is refused, or else why it can't be
    compared: one process would wait for an answer.
    """
    for name, module in model.named_modules():
        if type(module).__module__.startswith("parallel101.layers."):
            kind = type(module).__name__
            if not any(p.requires_grad for p in module.parameters()):
                return (
                    "",
                    (
                        f"{name!r} ({kind}) sends messages to other ranks itself, which one "
                        "process has not"
                    ),
                )
            return (
                f"{name!r} is a {kind} of parallel101.layers, which sums the gradients of its "
                "weights over the ranks itself, and the "
                "trainer sums them again. Use affine=False, or train with a loop of your own."
            ), ""
    return "", ""


def of_the_optimizer(trainer: Trainer) -> str:
    if any(set(entry.placements) - {"pp"} for entry in trainer.layout.entries.values()):
        return (
            "From equal gradients the optimizer makes other weights: it does not update each "
            "element on its own, but looks at whole "
            "matrices or their norms, and here a rank has pieces of them. Use SGD, Adam, AdamW "
            "or another elementwise optimizer, or "
            "DataParallelTrainer, where each rank has whole matrices."
        )
    return (
        "From equal gradients a copy of the optimizer makes other weights: it draws random "
        "numbers, looks at all weights together, "
        "or keeps outside of its .state what it has learnt."
    )


def hooks_on(model: nn.Module, names: Sequence[str]) -> str:
    hooked = [name for name, p in model.named_parameters() if p._backward_hooks]
    if not names or not set(names) <= set(hooked):
        return ""
    return (
        f"A hook on {names[0]!r} (register_hook) changes its gradient. Here it gets the "
        "gradient of some samples only, or it is lost: "
        "where the parameter is cut, or a pipeline computes its gradient apart. Change the "
        "gradient in an optimizer's step hook, "
        "or use clip_norm."
    )


def of_the_loss(whole: OneProcess, batch: tuple[Batch, Batch], in_parts: bool, bound: float) -> str:
    inputs, targets = batch
    sizes = unequal_parts(inputs)
    with torch.no_grad():
        outputs = whole.outputs(inputs)
    with whole.casting():
        uses_weights = (
            whole.loss_fn is not None and mean_loss(whole.loss_fn, outputs, targets).requires_grad
        )
    if uses_weights and in_parts:
        return (
            "loss_fn uses the model's weights (a penalty, for example), and each rank has some "
            "of them only. "
            "Use the optimizer's weight_decay, or a data parallel trainer."
        )
    if not per_sample(outputs, sum(sizes)) or min(sizes) == 0:
        return ""
    try:  # exactly, if loss_fn can; then nothing is rounding
        y, t = map_tensors(lambda t: t.double() if t.is_floating_point() else t, (outputs, targets))
        together, of_parts = losses_in_parts(whole, y, t, sizes)
        bound = EXACT
    except Exception:
        with whole.casting():
            together, of_parts = losses_in_parts(whole, outputs, targets, sizes)
    if not far(together, of_parts, bound):
        return ""
    return (
        f"loss_fn isn't a mean over samples: of the same outputs it gives {together:.6g}, and "
        "on average of two parts of them "
        f"{of_parts:.6g}. Return (sum of losses, their weight) from loss_fn, such as the "
        "number of targets that count, and each "
        "is divided by the whole batch's weight. A loss that compares samples with each other "
        "can't be cut along them."
    )


@torch.no_grad()
def of_the_model(trainer: Trainer, batch: tuple[Batch, Batch], bound: float) -> str:
    whole, (inputs, targets) = trainer.one_process, batch
    sizes = unequal_parts(inputs)
    outputs = whole.outputs(inputs)
    if trainer.runner.microbatches > 1 and differ(whole.outputs(inputs), outputs, bound):
        return (
            "The model's outputs for the same samples change from one forward to the next, as "
            "spectral_norm's do in training, and here it "
            f"has {trainer.runner.microbatches} forwards in a step. Use fewer microbatches, "
            "or a module without such a state."
        )
    if trainer.axes.sizes.get("pp", 1) > 1 and not is_forward(whole, inputs, outputs, bound):
        return (
            "The modules of .sequence(), one after the other, are not the model's forward, "
            "which a pipeline does not call. "
            "Look for what forward does between them, and for hooks on the model itself: put "
            "it into modules of the sequence."
        )
    if min(sizes) == 0:
        return ""
    try:
        parts = [whole.outputs(part) for part in split(inputs, sizes)]
    except Exception as error:
        mixes, how = True, f"it can't compute some of them alone ({type(error).__name__}: {error})"
    else:
        how = "its outputs for some of the samples change if they come without the others"
        if per_sample(outputs, sum(sizes)):
            mixes = differ(
                [torch.cat(of_parts) for of_parts in zip(*map(tensors_of, parts))],
                tensors_of(outputs),
                bound,
            )
        else:
            of_parts = mean_of_parts(whole, zip(parts, split(targets, sizes), sizes))
            mixes = far(of_parts, whole.loss(inputs, targets).item(), bound)
    if not mixes:
        return ""
    return (
        f"Something in the model mixes samples: {how}. It may look at statistics of the batch, "
        "or samples may not lie along dim 0 "
        "(a time-first LSTM, for example), where they are cut. BatchNorm works with "
        "sync_batch_norm=True."
    )


def of_the_layout(trainer: Trainer, kinds: set[str], gradients: Sequence[str]) -> str:
    sizes = trainer.axes.sizes
    where = f" The first gradient that differs is that of {gradients[0]!r}." if gradients else ""
    if kinds == {"evaluate"}:
        return (
            "Training is equal, and evaluation is not: a module computes in another way in "
            "eval mode."
        )
    if kinds <= {"buffer", "update"}:
        return (
            "A module keeps statistics of the samples in a buffer, and here it sees them in parts."
        )
    if trainer.context is not None:
        takes = trainer.context.takes_positions
        return (
            "Along cp a rank has some positions of each sequence. Code that looks at other "
            "positions must call torch's scaled_dot_product_attention itself (the calls of "
            "nn.MultiheadAttention aren't seen), and what counts positions (an embedding, a "
            "router's balance or capacity) must not count those of one rank alone. A loss must be "
            "a mean over all positions; if some don't count, return (sum of losses, their number)."
            f"{'' if takes else NO_POSITIONS}{where}"
        )
    if sizes.get("tp", 1) > 1 and any(
        "tp" in entry.placements for entry in trainer.layout.entries.values()
    ):
        in_time = (
            " With sequence_parallel, every module between the cut layers must act on each "
            "position alone."
        ) * trainer.in_time
        return (
            "The plan cuts what must not be cut: between a column and a row layer a rank sees "
            "only some features, so code there must "
            "act on each feature (or head) alone. Leave these layers out of the plan, or make "
            "them 'column_gather'."
            f"{in_time}{where}"
        )
    return (
        "The model computes something else if its samples come in parts, or its layers on "
        f"different ranks.{where}"
    )


def is_forward(whole: OneProcess, inputs: Batch, outputs: Any, bound: float) -> bool:
    """Whether the entries of the sequence compute these outputs, one after the other."""
    from parallel101.trainers.pipeline.split import entries_of  # of pipelines only

    first, *others = entries_of(whole.model)
    try:
        with whole.casting():
            x = call(first, inputs)
            for entry in others:
                x = entry(x)
    except Exception:  # as for an LSTM, whose output is a tuple
        return False
    return not differ(x, outputs, bound)


def unequal_parts(inputs: Batch) -> list[int]:
    """Two thirds of the samples, and the others.

    Of equal parts a loss that divides by something else may be the mean by chance.
    """
    samples = len(tensors_of(inputs)[0])
    return [samples - samples // 3, samples // 3] if samples > 2 else [1, samples - 1]


def per_sample(outputs: Any, samples: int) -> bool:
    """Whether each of these tensors has the samples along dim 0."""
    found = tensors_of(outputs)
    return bool(found) and all(t.dim() and len(t) == samples for t in found)


def losses_in_parts(
    whole: OneProcess, outputs: Any, targets: Any, sizes: Sequence[int]
) -> tuple[float, float]:
    """The mean loss of these outputs, and the mean of the losses of their parts."""
    of_parts = mean_of_parts(whole, zip(split(outputs, sizes), split(targets, sizes), sizes))
    return mean_loss(whole.loss_fn, outputs, targets).item(), of_parts


def mean_of_parts(whole: OneProcess, parts: Iterable[tuple[Any, Any, int]]) -> float:
    """The mean loss of all parts, as a trainer computes it from the loss of each: outputs,
    targets, number of samples.
    """
    total, weights = 0.0, 0.0
    for outputs, targets, samples in parts:
        loss, weight = loss_and_weight(whole.loss_fn, outputs, targets)
        total += loss.item() * (samples if weight is None else 1)
        weights += samples if weight is None else weight
    return total / weights


def far(a: float, b: float, bound: float) -> bool:
    return not abs(a - b) <= bound * max(abs(a), abs(b))


def differ(a: Any, b: Any, bound: float) -> bool:
    """Whether the floating-point tensors in two trees do, relative to the largest number in
    each.
    """
    pairs = [
        (x, y) for x, y in zip(tensors_of(a), tensors_of(b)) if y.is_floating_point() and y.numel()
    ]
    return any(
        not torch.allclose(x, y, rtol=0, atol=bound * float(y.abs().max()), equal_nan=True)
        for x, y in pairs
    )
