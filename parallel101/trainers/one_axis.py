"""The trainers of one axis: each is HybridTrainer on a group of ranks, with its axis's options.

DataParallelTrainer      dp         TensorParallelTrainer    tp
ShardedTrainer           dp         PipelineTrainer          pp
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from parallel101.mesh import GroupLike, group_of
from parallel101.trainers.expect import expect
from parallel101.trainers.hybrid import HybridTrainer
from parallel101.trainers.layout import Axes
from parallel101.trainers.options import LossFn, OptimizerFn, check_names, takes

COMMON = ("clip_norm", "autocast", "recompute", "precision", "gradient_dtype", "sync", "verify")
DATA = ("overlap", "bucket_bytes", "algorithm", "accumulate", "sync_batch_norm")
TENSOR = ("plan", "sequence_parallel", "regather", "overlap", "algorithm", "accumulate")


def of_one_axis(axis: str, *names: str, **defaults: Any) -> Callable[..., None]:
    """Return the constructor of a HybridTrainer on a group of ranks, which are this axis.

    Args:
        names: of its options, besides the common ones.
        defaults: of some of them, if they are other than in `Options`.
    """

    def __init__(
        self: HybridTrainer,
        model: nn.Module,
        loss_fn: LossFn | None,
        optimizer: OptimizerFn,
        *,
        group: GroupLike = None,
        **options: Any,
    ) -> None:
        check_names(self, options, [*names, *COMMON])
        expected = "1, 2 or 3; to shard nothing, use DataParallelTrainer"
        expect("zero_stage", 0, options.get("zero_stage") != 0, expected)
        axes = Axes(group, {"dp": 1} | {axis: group_of(group).size})
        HybridTrainer.__init__(
            self, model, loss_fn, optimizer, mesh=axes, **{**defaults, **options}
        )

    takes(__init__, [*names, *COMMON], **defaults)
    return __init__


class DataParallelTrainer(HybridTrainer):
    """Trains one model on all ranks of a group, each with its share of the batch; equal to one
    process with the whole batch.

    Args:
        model, loss_fn, optimizer, clip_norm, autocast, recompute, precision, gradient_dtype, sync,
            sync_batch_norm, verify: see `HybridTrainer`.
        group: the ranks that train together; see `group_of`. None: all, or this one alone if there
            is no process group.
        overlap: send gradients while backward still computes others.
        bucket_bytes: how many bytes of gradients travel together, at least one gradient. None: half
            of them all, at most 25 MiB; 0: each on its own, and with overlap=False that is the
            naive all-reduce after backward.
        algorithm: of the all-reduce, such as "ring"; see `p101.algorithms`. Other than None, it
            needs overlap=False.
        accumulate: microbatches into which a rank's share of the batch is cut: as many forwards and
            backwards, one communication.

    Bytes sent by each rank in a step: 2(n−1)/n of the gradients' bytes, and to each other rank 32
    bytes: counts, losses, their weights. Source: Li et al., "PyTorch Distributed: Experiences on
    Accelerating Data Parallel Training" (2020), section 3.2.

    Example:
        >>> def losses():
        ...     torch.manual_seed(0)
        ...     model, loss_fn = p101.models.MLP([4, 8, 2]), torch.nn.functional.mse_loss
        ...     trainer = p101.DataParallelTrainer(model, loss_fn, torch.optim.Adam)
        ...     x, y = torch.ones(4, 4), torch.zeros(4, 2)
        ...     return [round(trainer.step(x, y), 3) for _ in range(3)]
        >>> [p101.launch(losses, world_size=n, backend="sim").results[0] for n in (1, 2)]
        [[1.152, 1.13, 1.108], [1.152, 1.13, 1.108]]
    """

    __init__ = of_one_axis("dp", *DATA)


class ShardedTrainer(HybridTrainer):
    """Trains one model on all ranks of a group, each with its share of the batch and of the memory;
    equal to one process.

                     weights   gradients   optimizer state      sent by each rank in a step
        zero_stage 1  all       all         1/n                  2(n−1)/n of the gradients' bytes
        zero_stage 2  all       1/n         1/n                  the same
        zero_stage 3  1/n       1/n         1/n                  3(n−1)/n of the weights' bytes

    Args:
        model: on stage 3 its parameters are empty outside of their layer's forward and backward;
            `state_dict` gathers them.
        loss_fn, clip_norm, autocast, recompute, precision, gradient_dtype, sync, sync_batch_norm,
            verify: see `HybridTrainer`.
        optimizer: a function of the whole parameters, so that it may make groups by name or shape.
            It is then handed this rank's pieces, which are 1-D. So it must be elementwise, as SGD,
            Adam, AdamW, Adagrad and most are. An optimizer that looks at whole matrices or their
            norms, as Muon, Adafactor and LAMB do, is refused before the first step; see `verify`.
        group: the ranks that train together; see `group_of`. None: all, or this one alone if there
            is no process group.
        zero_stage: 1, 2 or 3; see above.
        overlap: send gradients, and on stage 3 fetch the next layer, while this one computes.
        bucket_bytes: on stages 1 and 2, how many bytes of gradients travel together. None: a
            quarter of them all, at most 25 MiB.
        algorithm: of reduce_scatter and all_gather, such as "ring"; see `p101.algorithms`. Other
            than None, it needs overlap=False.
        accumulate: microbatches in a step. Stage 1 adds up their gradients where they are and sends
            them once. Stages 2 and 3 have no place to add them up: they send after each microbatch,
            and stage 3 gathers for each. That is the price of their memory.

    Parameters that need no gradient, and buffers, stay whole on every rank. `describe()` also tells
    the most bytes that were held for a moment in the last step: gathered layers, and gradients in
    flight. On stage 3 the model's layers (see `layers_of`) are gathered one at a time; parameters
    in none of them, or in several (tied weights), are whole for all of a forward and all of a
    backward. All ranks must use the layers in the same order, though each may leave some
    out, and a weight may be used only in the forward of a module that has it. Source: Rajbhandari
    et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), sections
    5 and 7.

    Example:
        >>> def weights(stage):
        ...     model, loss_fn = p101.models.MLP([4, 8, 2]), torch.nn.functional.mse_loss
        ...     trainer = p101.ShardedTrainer(model, loss_fn, torch.optim.Adam, zero_stage=stage)
        ...     trainer.step(torch.ones(4, 4), torch.zeros(4, 2))
        ...     return trainer.describe().bytes["weights"]
        >>> [p101.launch(weights, stage, backend="sim").results[0] for stage in (2, 3)]
        [[240, 240, 240, 240], [60, 60, 60, 60]]
    """

    __init__ = of_one_axis("dp", "zero_stage", *DATA, zero_stage=3)


class TensorParallelTrainer(HybridTrainer):
    """Trains one model on all ranks of a group, each of which has a block of every matrix; equal to
    one process.

    Args:
        model, loss_fn, optimizer, clip_norm, autocast, recompute, precision, gradient_dtype, sync,
            verify: see `HybridTrainer`. A model whose head is cut ("vocabulary") needs
            loss_fn=vocabulary_cross_entropy.
        group: the ranks that train together; see `group_of`. All are given the same samples.
        plan: name of a module → style, `*` for any part of a name; what no name matches is
            replicated. "auto": from the model's structure.
            "column": the outputs are cut, and backward sums the inputs' gradients. "row": the
            inputs are cut, and forward sums the outputs. "column_gather": the outputs are cut and
            then gathered. "vocabulary": an embedding's rows, or the head's columns.
            `column(parts=3, heads=h)`: a fused query, key and value, cut by heads.
            `column(heads="num_heads")`: as many heads as that attribute of the module around says,
            if its code counts them.
        sequence_parallel: between a row layer and the next column layer, cut activations (batch,
            time, features) along time. All modules there must act on each position alone.
        regather: with sequence_parallel, column layers (but no tied head) keep their inputs cut,
            and backward gathers them again: less memory, more bytes.
        overlap: compute weight gradients while the sum of the inputs' gradients is in flight.
        algorithm: of the layers' collectives (all_reduce; with sequence_parallel all_gather and
            reduce_scatter, too), such as "ring"; see `p101.algorithms`. Other than None, it needs
            overlap=False.
        accumulate: microbatches in a step.

    An MLP pair sends one all-reduce of the activations forward and one backward. Sources: Shoeybi
    et al. (arXiv 1909.08053), section 3; Korthikanti et al. (arXiv 2205.05198), section 4.2.2.
    Raises ValueError, on every rank, for a plan that does not fit the model.

    Example:
        >>> def shapes():
        ...     model, loss_fn = p101.models.MLP([4, 8, 2]), torch.nn.functional.mse_loss
        ...     trainer = p101.TensorParallelTrainer(model, loss_fn, torch.optim.SGD)
        ...     trainer.step(torch.ones(4, 4), torch.zeros(4, 2))
        ...     return [tuple(weight.shape) for weight in trainer.model.parameters()]
        >>> shapes()
        [(8, 4), (8,), (2, 8), (2,)]
        >>> p101.launch(shapes, world_size=2, backend="sim").results[0]
        [(4, 4), (4,), (2, 4), (2,)]
    """

    __init__ = of_one_axis("tp", *TENSOR)


class PipelineTrainer(HybridTrainer):
    """Trains one model on all ranks of a group, each of which has some of the layers; equal to one
    process.

    Args:
        model: an nn.Sequential, or one with a method `.sequence()`: modules in order, whose
            composition is its forward.
        loss_fn, optimizer, clip_norm, autocast, recompute, precision, gradient_dtype, sync, verify:
            see `HybridTrainer`.
        group: the ranks that train together; see `group_of`. All are given the same samples: the
            first stage reads the inputs, the last one the targets.
        schedule: "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2" or a Schedule.
        microbatches: how many in a step; a batch has at least as many samples. None: the
            schedule's, or one for each rank.
        chunks: stages on each rank, for "interleaved".
        layers_per_stage: how many modules of the sequence each stage has. None: as many modules
            with parameters as the other stages; a module without any goes with the one before it.

    Activations travel to the next stage and their gradients back, each once a microbatch. A tied
    weight is on each stage that uses it, and its gradients are summed. Sources: Huang et al.,
    "GPipe" (2019); Narayanan et al. (arXiv 2104.04473), section 2.2; Qi et al. (arXiv 2401.10241).
    Raises ValueError, on every rank, for a model that can't be cut, and ScheduleError for a
    schedule that can't run.

    Example:
        >>> def stages():
        ...     model, loss_fn = p101.models.MLP([4, 8, 8, 2]), torch.nn.functional.mse_loss
        ...     trainer = p101.PipelineTrainer(model, loss_fn, torch.optim.SGD, microbatches=4)
        ...     trainer.step(torch.ones(4, 4), torch.zeros(4, 2))
        ...     return trainer.describe().notes[:2]
        >>> for stage in p101.launch(stages, world_size=2, backend="sim").results[0]:
        ...     print(stage)
        stage 0 on position 0 of pp: modules 0 to 3 of the model's sequence
        stage 1 on position 1 of pp: modules 4 to 4 of the model's sequence
    """

    __init__ = of_one_axis("pp", "schedule", "microbatches", "chunks", "layers_per_stage")
