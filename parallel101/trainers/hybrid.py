"""HybridTrainer: every way to train a model on many ranks, put together from the axes of a mesh.

    dp   each position has a share of the batch            data_parallel.py, zero_1_2_3.py
    cp   each has some positions of every sequence         context_parallel.py
    tp   each has a block of every matrix                  tensor_parallel.py
    pp   each has some of the layers                       pipeline_parallel.py
    ep   each has some experts, and a share of the batch   expert_parallel.py

    mesh (dp 2, tp 2, pp 2), row by row: rank 5 is at dp 1, tp 0, pp 1

The other trainers are this one on a single axis: one_axis.py. The step itself is in step.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel101.trainers import checkpoint, memory, training_loop
from parallel101.trainers.agreement import Agreement, named_tensors
from parallel101.trainers.axis import DataAxis, OneStage
from parallel101.trainers.batches import Batch
from parallel101.trainers.expect import expect
from parallel101.trainers.gradient_sync import nested
from parallel101.trainers.layout import Axes, Layout, state_names
from parallel101.trainers.options import (
    LossFn,
    OptimizerFn,
    Options,
    check_model,
    check_names,
    loss_over,
    need_numbers,
    takes,
)
from parallel101.trainers.precision import MasterWeights, choose_precision
from parallel101.trainers.recompute import modules_to_recompute, recompute_in_backward
from parallel101.trainers.sharded_optimizer import ShardedOptimizer, build_optimizer
from parallel101.trainers.step import RandomNumbers
from parallel101.trainers.step import step as train_on_batch
from parallel101.trainers.sync_batch_norm import Norms, norms_of
from parallel101.trainers.verify.report import Report
from parallel101.trainers.verify.verification import Verification

AXES = ("dp", "cp", "tp", "pp", "ep")
OPTIONS = [field.name for field in fields(Options)]


class HybridTrainer:
    """Trains one model on a mesh of ranks with up to five axes; equal to one process with the whole
    batch.

    Args:
        model: the whole model, the same on every rank; it knows nothing of parallelism.
        loss_fn: (outputs, targets) → the mean loss over the samples, which are along dim 0. The
            losses of shares and microbatches are weighted by their samples. Or → (sum of losses,
            their weight), such as the number of targets that count, if samples have different
            numbers of them (ignore_index, class weights): the gradients of the whole batch are
            divided by all weights together. None: the model returns its loss, or outputs with a
            `loss`.
        optimizer: a function of a list of parameters, such as `lambda p: torch.optim.AdamW(p,
            lr=1e-3)`.
        mesh: a DeviceMesh whose axes are named out of "dp", "cp", "tp", "pp" and "ep", in any
            order. Samples are cut along dp and ep alone: ranks that differ only along the others
            are given the same ones.
        zero_stage: 0: every position along dp has all of its stage's and shard's weights; 1, 2, 3:
            see `ShardedTrainer`.
        overlap, bucket_bytes: how gradients are synchronized along dp; see
            `DataParallelTrainer` and `ShardedTrainer`. With cp or ep, gradients leave after
            backward, which has messages of its own; on stage 3 they don't, and there all ranks'
            samples must take the same way through the model.
        algorithm: of all collectives, such as "ring"; see `p101.algorithms`. Other than None, it
            needs overlap=False.
        plan, sequence_parallel, regather: how modules are cut along tp; see
            `TensorParallelTrainer`. The style "experts" places modules along ep: see
            expert_parallel.py. Each rank has some of their experts, and sends tokens to the others;
            all else is the same on all of them. "auto": modules with the name "experts". Every rank
            must call them in each forward, with no rows if need be, and use what they return. A
            rank without samples calls the model with none, so that it computes its experts for
            others: model and loss_fn must take 0 samples, and no parameter may be applied after a
            mean over them.
        context: how attention is computed along cp, which cuts dim 1 of all inputs and targets, the
            time: "zigzag" or "contiguous", by ring attention, or "ulysses"; see
            context_parallel.py. The model must call torch's scaled_dot_product_attention (itself:
            calls of nn.MultiheadAttention aren't seen), with is_causal or without and with no other
            mask, and act on each position alone elsewhere; `verify` finds what doesn't.
            What depends on the position in the text, such as its embedding, takes `positions`,
            (batch, time) whole numbers, which the forward of the model (with pp: of modules of its
            sequence) has as an argument. Losses are weighted by positions.
        schedule, microbatches, chunks, layers_per_stage: how the model is cut along pp, and what
            runs when; see `PipelineTrainer`.
        accumulate: microbatches in a step, without pp. With pp, use `microbatches`.
        clip_norm: scale the gradients so that the norm of all of them together is at most this.
        autocast: a dtype such as torch.bfloat16 for the operations of the forward that allow it;
            weights and gradients keep their own.
        recompute: which modules keep their inputs only and are computed again in backward: "none",
            "selective" (the cores of attentions), "full" (all blocks), or a function of a module's
            name. Gradients and random numbers are the same. See recompute.py.
        precision: "fp32", "bf16", "bf16-mixed" or "fp16-mixed": the dtype of weights, buffers and
            activations. Floating-point inputs are cast to it, and loss_fn is given 32-bit outputs.
            Mixed: the optimizer updates a master copy of the weights in 32 bits, which ZeRO shards
            (Lightning's "bf16-mixed" is our autocast instead; its "bf16-true" is our "bf16"). fp16
            also scales the loss, and takes no step if a gradient overflows. None: the model's own
            dtypes. With master weights, `state_dict` and checkpoints have those.
        gradient_dtype: with a mixed precision, torch.float32 to add up, send and keep gradients in
            32 bits. None: in the weights' dtype.
        sync: copy the first rank's weights at the start. Without it, models that differ are an
            error that names the parameter.
        sync_batch_norm: BatchNorms take the statistics of the whole batch, with a message along dp
            in each forward and backward. So all ranks must use the same of them; and if samples
            take different paths through the model, train with overlap=False.
        verify: before the first step, compare this layout with one process on its batch, and refuse
            to train if they differ or can't be compared; see `verify`. True: in three steps; a
            number: in as many, for a model or a loss that changes later. It is not done on one rank
            without microbatches, nor on the meta device. If it would take more than half of the
            free memory, it is done with one sample a rank, or not at all, and a line says so.

    Between steps the weights belong to the trainer. What is done to the model's parameters there
    (clamping, row norms) reaches only what this rank has: nothing on ZeRO stage 3, a block along
    tp. Use `state_dict` and a new trainer. Freezing a parameter later is allowed; a parameter or
    BatchNorm that was frozen at the start stays so, or the next step raises ValueError.

    Attributes:
        model, optimizer: as they are used, for a learning-rate schedule or a look inside.
        steps: how many have been taken, those before `resume` included.
        history: of `fit`.
        position: this rank's, in the group. device: the model's.

    Raises ValueError, the same on every rank, for a mesh with other axes, or a model that can't be
    cut as asked.

    Example:
        >>> def loss(dp, tp):
        ...     torch.manual_seed(0)
        ...     mesh = dist.init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        ...     model, loss_fn = p101.models.MLP([4, 8, 2]), torch.nn.functional.mse_loss
        ...     trainer = p101.HybridTrainer(model, loss_fn, torch.optim.SGD, mesh=mesh)
        ...     return round(trainer.step(torch.ones(4, 4), torch.zeros(4, 2)), 3)
        >>> p101.launch(loss, 1, 1, world_size=1, backend="sim").results
        [1.152]
        >>> p101.launch(loss, 2, 2, world_size=4, backend="sim").results
        [1.152, 1.152, 1.152, 1.152]
    """

    steps = 0
    reached: Sequence[str] = ()  # names that some rank's samples reached in the last step
    reads_parts = False  # whether the model's own state_dict may be read now
    activations: Any = None  # an Activations, the last that were counted

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None,
        optimizer: OptimizerFn,
        *,
        mesh: DeviceMesh | Axes,
        **options: Any,
    ):
        # what is asked for, refused before anything is changed
        check_names(self, options, OPTIONS)
        given = Options(**options)
        self.axes = axes = mesh if isinstance(mesh, Axes) else Axes(mesh, axis_sizes(mesh))
        given.check_axes(axes)
        self.device = check_model(model, loss_fn)
        self.precision = choose_precision(given, self.device)
        recomputed = modules_to_recompute(given.recompute, model)
        stages, *cutting = other_axes(model, loss_fn, axes, given)

        # what is known of the whole model, before it is cut
        self.model, self.clip_norm, self.position = model, given.clip_norm, axes.position
        self.agree = Agreement(axes.group, self.device)
        self.agree.check_or_copy(model, given.sync)
        self.state = state_names(model)
        tensors = [(name, t) for name, t in named_tensors(model) if name in self.state.values()]
        shapes = {name: (t.shape, self.precision.kept(t.dtype)) for name, t in tensors}
        whole = self.precision.cast_model(model)
        self.trained = list(whole)
        self.optimizer = build_optimizer(optimizer, whole)
        self.verification = Verification(self, given, partial(HybridTrainer, model, loss_fn))
        over = [axis.name for axis in cutting if axis.cuts_logits]
        self.loss_fn = self.precision.wrap_loss(loss_over(axes.along(over), loss_fn))

        # cut
        cutting.append(stages)
        self.data = data = DataAxis(self, given, cutting)
        mesh_axes = [*cutting, data]
        for axis in mesh_axes:
            axis.cut(model, stages)
        for name in recomputed:
            recompute_in_backward(model.get_submodule(name), name)
        placed = {axis.name: axis.placements for axis in mesh_axes}
        self.layout = Layout(axes, shapes, placed, self.device)
        self.notes = [line for axis in mesh_axes for line in axis.describe()]
        self.local, self.sums = data.local, data.after

        # what runs
        self.cut_batch = next((axis.cut_batch for axis in mesh_axes if axis.cut_batch), None)
        self.checks = [axis.check_batch for axis in mesh_axes if axis.check_batch]
        self.least = max(axis.least for axis in mesh_axes)
        self.random_numbers = RandomNumbers(axes, self.agree, self.device)
        of_forward = [axis.forward for axis in mesh_axes if axis.forward]
        of_forward.append(self.random_numbers.during_forward)
        if (dtype := self.precision.autocast) is not None:
            of_forward.append(partial(torch.autocast, self.device.type, dtype=dtype))
        self.runner = stages.runner(data.syncs, axes, partial(nested, of_forward))
        sync = MasterWeights(self, whole) if self.precision.master else self.runner.sync
        self.gradient_sync, self.owned = sync, sync.owned
        self.sharded_optimizer = ShardedOptimizer(self.optimizer, whole, self.owned, self.layout)
        self.history = training_loop.History()
        checkpoint.refuse_parts(self)
        self.verification.note_cut(self)

    @property
    def parts(self) -> dict[str, Tensor]:
        """This rank's part of each tensor, by name: of trained parameters what it owns, and the
        others and buffers whole.
        """
        here = dict([*self.model.named_parameters(), *self.model.named_buffers()])
        others = self.layout.entries.keys() & self.local.keys() - set(self.trained)
        return {name: here[name] for name in here if name in others} | dict(self.owned)

    # each is a function of a trainer
    step = train_on_batch
    share = training_loop.share
    fit = training_loop.fit
    evaluate = training_loop.evaluate
    state_dict = checkpoint.state_dict
    gradients = checkpoint.gradients
    save = checkpoint.save
    resume = checkpoint.resume
    describe = memory.describe

    def verify(self, inputs: Batch, targets: Batch = None) -> Report:
        """Compare this layout with one process, in three steps on this batch (or `verify=N`).

        Collective; nothing is changed or recorded. It takes about six steps of one process.

        Each step compares the loss, every gradient, their norm if `clip_norm` is set, buffers, and
        the weights after the optimizer's step from equal gradients; the second takes the samples in
        another order, and the third scales the loss. Evaluation is compared after it. If ranks
        update parts of tensors, the optimizer takes nine more steps from known gradients, the last
        ones with its step counters moved ahead, since some couple elements only after a warm-up,
        now and then, or if gradients jump. The first rank computes all samples as one process
        does; the others wait. Random numbers of torch are replaced by the middle of their
        distribution meanwhile, so how often a model draws isn't compared; learning rates of zero
        are replaced by one above zero, and weights of zero by small ones.
        Afterwards everything is put back that can be: weights, optimizer, buffers, hooks, what
        modules, optimizer, loss_fn and the objects they refer to hold in attributes, closures and
        globals, and random numbers. Printing and other input and output isn't undone, nor are a
        Python generator, an iterator such as itertools.count, an open file or an object of a C
        library.

        Args:
            inputs, targets: as for `step`.

        Returns a Report, the same on every rank, which prints as a table.

        Raises NotEqualError, on every rank, with the report and, if it can be told, the cause; also
        if one process can't train on this batch. What a first batch does not show, it can't find:
        weights that are edited between steps, a layer that is unfrozen later, samples of a kind
        that comes later, a branch on statistics of samples that all shares take alike. (In the
        first step and in steps 2, 4, 8, 16, … each rank checks that the loss of its outputs is the
        weighted mean over two parts of them, and ranks along dp and cp that their weights and
        buffers are still equal.)
        """
        need_numbers(self, "verify")
        return self.verification.verify(self, inputs, targets)


def axis_sizes(mesh: DeviceMesh) -> dict[str, int]:
    """Return the size of each axis, by name; dp is always included.

    Raises TypeError or ValueError for other meshes.
    """
    example = 'init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "tp", "pp"))'
    expected = f"a DeviceMesh with named axes, such as {example}"
    expect("mesh", mesh, isinstance(mesh, DeviceMesh), expected, TypeError)
    names = tuple(mesh.mesh_dim_names or ())
    if not names or not set(names) <= set(AXES):
        have = f"a mesh with the axes {names}" if names else "a mesh whose axes have no names"
        raise ValueError(f"{have}: expected names from {', '.join(AXES)} (mesh_dim_names=…)")
    sizes = dict(zip(names, mesh.mesh.shape))
    return sizes if "dp" in sizes else {"dp": 1} | sizes


def other_axes(
    model: nn.Module, loss_fn: LossFn | None, axes: Axes, options: Options
) -> Iterator[Any]:
    """Yield what the axes besides dp do to the model: the stages, and those of tp, ep and cp that
    the mesh has; then its BatchNorms. The code of an axis is loaded only if the mesh has it.
    """
    stages = OneStage(model, axes, options)
    if "pp" in axes.sizes:
        from parallel101.trainers.pipeline.stages import PipelineStages

        stages = PipelineStages(model, axes, options)
    yield stages
    if "tp" in axes.sizes and options.tensor_plan is not None:
        from parallel101.trainers.tensor.tensor_axis import TensorAxis

        yield TensorAxis(model, loss_fn, axes, options)
    if "ep" in axes.sizes:
        from parallel101.trainers.expert_parallel import ExpertsAxis

        yield ExpertsAxis(model, axes, options)
    if axes.size(["cp"]) > 1:
        from parallel101.trainers.context.cut_time import ContextAxis

        yield ContextAxis(model, stages, axes, options)
    if any(norms_of(model)):
        yield Norms(model, axes, options, stages.microbatches)


takes(HybridTrainer.__init__, OPTIONS)
