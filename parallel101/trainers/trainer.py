"""The training step of every trainer, and the trainer that is put together from parts which each do
one thing.

    for each action:       forward → loss × (my samples / all samples), or backward         executor.py
    finish                 the gradients of all ranks are summed                            gradients.py, zero/
    agree                  on the loss, or on the error of a rank                           agreement.py
    clip, optimizer        each rank updates what it owns                                   layout.py, support/optimizers.py
    publish                and tells the others, if they need it

The objective is the mean loss of the whole batch, so that any number of ranks computes what one
process does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from parallel101.collectives import all_reduce
from parallel101.mesh import Group
from parallel101.record.spans import span, wait_span
from parallel101.trainers.agreement import Agreement
from parallel101.trainers.batch_norm import check_norms, norms_of, synchronise_norms
from parallel101.trainers.layout import Axes, Entry, Layout
from parallel101.trainers.pipeline.stage_syncs import Together
from parallel101.trainers.prepare import MakeSync, build_executor, prepare
from parallel101.trainers.random_numbers import RandomNumbers
from parallel101.trainers.replicas import check_alike
from parallel101.trainers.schedules.schedule import Schedule
from parallel101.trainers.shares import check_shares
from parallel101.trainers.support import checkpoint, fit, memory
from parallel101.trainers.support.arguments import LossFn, OptimizerFn, check_model, check_options
from parallel101.trainers.support.batches import Batch
from parallel101.trainers.support.history import History
from parallel101.trainers.support.optimizers import ShardedOptimizer, build_optimizer
from parallel101.trainers.tensor.plan import Plan
from parallel101.trainers.verify.compare import verify
from parallel101.trainers.verify.first_step import verify_once
from parallel101.trainers.verify.one_process import whole_model


class Trainer:
    """Trains one model on all ranks of a mesh; equal to one process with the whole batch.

    The public trainers are ways to assemble it.

    Args: model: the whole model, the same on every rank; it knows nothing of parallelism. loss_fn:
        (outputs, targets) → the mean loss over the samples, which lie along dim 0. The losses of
        shares and microbatches are
            weighted by their samples. Or → (sum of losses, their weight), such as the number of
            targets that count, if they are not
            equally many in each sample (ignore_index, class weights): the gradients of the whole
            batch are divided by all weights
            together. None: the model returns its loss, or outputs with a `loss`.
        optimizer: a function of a list of parameters, such as `lambda p: torch.optim.AdamW(p,
            lr=1e-3)`.
        axes: the ranks that train together, as a mesh; the samples are cut along its axis "dp".
        make_sync: (a stage, its parameters, …) → how the axis "dp" sums their gradients, and who
            owns what; see prepare.py.
        schedule: what each rank along "pp" does in a step. Without such an axis: gradient
            accumulation, as 1F1B on one stage.
        plan, sequence_parallel: how modules are cut along "tp"; see `TensorParallelTrainer`.
            layers_per_stage: see `PipelineTrainer`.
        clip_norm: scale the gradients so that the norm of all of them together is at most this.
        autocast: a dtype such as torch.bfloat16 for the operations of the forward that allow it;
            weights and gradients keep their own.
        sync: copy the first rank's weights at the start. Without it, models that differ are an
            error that names the parameter.
        sync_batch_norm: BatchNorms take the statistics of the whole batch, with a message along
            "dp" in each forward and backward. So all
            ranks must use the same of them; and if samples take different paths through the model,
            train with overlap=False.
        verify: before the first step, compare this layout with one process, on a few samples of its
            batch; see `verify`. It is not done on one rank without microbatches, nor if it would
            take more than 1 GiB: then a line says so.

    Between steps the weights belong to the trainer. What is done to the model's parameters there
    (clamping, row norms) reaches only what this rank has: nothing on ZeRO stage 3, a block along
    tp. Use `state_dict` and a new trainer. Freezing a parameter later is allowed; a parameter or
    BatchNorm that was frozen at the start stays so, or the next step raises ValueError.

    Attributes:
        model, optimizer: as they are used, for a learning-rate schedule or a look inside.
        steps: how many have been taken, those before `resume` included.
        history: of `fit`.
        position: this rank's, in the group. device: the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn | None,
        optimizer: OptimizerFn,
        *,
        axes: Axes,
        make_sync: MakeSync,
        schedule: Schedule,
        plan: Plan | None = None,
        sequence_parallel: bool = False,
        layers_per_stage: Sequence[int] | None = None,
        clip_norm: float | None = None,
        autocast: torch.dtype | None = None,
        sync: bool = False,
        sync_batch_norm: bool = False,
        verify: bool = True,
    ):
        check_options(loss_fn, clip_norm, autocast)
        self.model, self.axes, self.clip_norm = model, axes, clip_norm
        self.device = check_model(model)
        self.check_norms = partial(
            check_norms, model, axes.sizes["dp"], schedule.microbatches, sync_batch_norm
        )
        self.check_norms()
        self.synchronises_norms = (
            sync_batch_norm and axes.sizes["dp"] > 1 and any(True for _ in norms_of(model))
        )
        self.position = axes.position
        self.agree = Agreement(axes.group, self.device)
        self.agree.check_or_copy(model, sync)

        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.state_names = checkpoint.names_of_state(model)
        self.state_keys = list(model.state_dict())
        built = build_optimizer(optimizer, trained)
        self.verifies, self.in_time = verify, sequence_parallel
        self.one_process, self.why_no_copy = None, ""
        if verify and self.position == 0:
            self.one_process, self.why_no_copy = whole_model(model, built, loss_fn, autocast, axes)
        entries = {
            name: Entry(t.shape, t.dtype) for name, t in checkpoint.tensors_of_state(model).items()
        }
        self.prepared = prepare(
            model,
            loss_fn,
            axes,
            self.agree,
            entries,
            make_sync,
            schedule=schedule,
            plan=plan,
            sequence_parallel=sequence_parallel,
            layers_per_stage=layers_per_stage,
        )
        self.layout = Layout(axes, self.prepared.entries, self.device)
        syncs = [sync for _, sync in self.prepared.syncs]
        self.gradient_sync = syncs[0] if len(syncs) == 1 else Together(syncs)
        self.owned = self.gradient_sync.owned
        self.sharded_optimizer = ShardedOptimizer(built, trained, self.owned, self.layout)
        self.optimizer = built
        self.executor = build_executor(self.prepared, axes, schedule, autocast, self.device)
        self.random_numbers = RandomNumbers(axes, self.agree, self.device)
        if self.synchronises_norms:
            synchronise_norms(model, axes.along(["dp"]))
            # a rank that has failed can't take part in a norm's messages
            self.executor.goes_on = False

        self.trained = list(trained)
        self.frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        checkpoint.refuse_parts(self)
        self.reached: list[str] = []  # parameters that some rank's samples reached in the last step
        self.to_verify = verify and (len(axes.members.ranks) > 1 or self.executor.microbatches > 1)
        self.compared = False
        self.steps = 0
        self.history = History()

    # ── one step ──

    def step(self, inputs: Batch, targets: Batch = None) -> float:
        """Train on one batch, of which this rank gives its share, and return the loss of the whole,
        the same float on every rank.

        Args: inputs: this rank's samples, along dim 0 of each tensor; `share` cuts them out of a
            whole batch. Shares need not be equal,
                and some may be empty. The model is called with a tensor, or with the entries of a
                dict as keywords, or of a tuple as
                arguments.
            targets: of these samples, for loss_fn. None if loss_fn is None.

        Raises, on every rank: ValueError if the ranks' shares don't belong together,
        FloatingPointError if the loss of some rank is not finite, NotEqualError before the first
        step (see `verify`), and what the model raised on one rank. In each case no weight has been
        changed.
        """
        total, shape = check_shares(self, inputs, targets)
        if self.to_verify:
            self.verify_once(inputs, targets)
        loss = self.compute_gradients(inputs, targets, total, shape)
        with span("optimizer"):
            if self.clip_norm is not None:
                nn.utils.clip_grads_with_norm_(
                    list(self.owned.values()), self.clip_norm, self.norm()
                )
            self.optimizer.step()
            self.gradient_sync.publish()
        self.steps += 1
        return loss

    def compute_gradients(self, inputs: Batch, targets: Batch, total: int, shape: int) -> float:
        """Afterwards every owned .grad is the gradient of the mean loss of the whole batch,
        which is returned.
        """
        self.reached = []
        self.optimizer.zero_grad()
        self.gradient_sync.begin()
        self.executor.begin(inputs, targets, total, shape)
        with self.random_numbers.of_step(self.steps):
            for action in self.executor.actions:
                self.executor.run(action)
        return self.agree_on_loss(self.finish_gradients())

    def norm(self) -> Tensor:
        """Of all gradients together, each element counted once."""
        return self.layout.norm(
            {name: p.grad for name, p in self.owned.items() if p.grad is not None}
        )

    def finish_gradients(self) -> list[str]:
        """Afterwards every owned .grad is the whole batch's.

        Returns the parameters that this rank's samples did not reach.
        """
        try:
            self.executor.finish()
            with wait_span("synchronise"):
                unused = self.gradient_sync.finish()
                for names, group in self.prepared.sums:
                    self.sum_over(names, group)
                return unused
        except Exception as error:
            self.executor.fail(error)
            return []

    def sum_over(self, names: Sequence[str], group: Group) -> None:
        """The gradients of what several stages share, or of what each rank applied to its part
        of the sequences only.
        """
        owned = [self.owned[name] for name in names if name in self.owned]
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in owned]
        if parts:
            total = all_reduce(torch.cat([part.reshape(-1) for part in parts]), group=group)
            for p, part, summed in zip(owned, parts, total.split([part.numel() for part in parts])):
                p.grad = part.copy_(summed.view_as(part))

    # ── what the ranks agree on ──

    def agree_on_loss(self, unused: Sequence[str]) -> float:
        """The loss of the whole batch: the ranks' parts, added in their order, so the same
        float everywhere. Ranks along tp share one.
        """
        failure, weights = self.executor.failure, self.executor.weights
        try:
            mine = (
                sum(part.item() for part in self.executor.losses.values())
                if failure is None
                else math.nan
            )
            # the loss is a mean, or another rank's
            weight = math.fsum(weights.values()) if weights else -1
            parts, counts, of_ranks = self.agree.numbers(
                mine, len(unused) if failure is None else -1, weight
            )
        except Exception:
            # more interesting than a broken connection that may be its consequence
            if failure is not None:
                raise failure from None
            raise
        if min(counts) < 0:
            self.executor.forget()
            self.agree.raise_problem(
                failure, f"finish step {self.steps}, and no weight was changed"
            )
        broken = {
            rank: part for rank, part in zip(self.agree.ranks, parts) if not math.isfinite(part)
        }
        if broken:
            where = ", ".join(f"{part} on rank {rank}" for rank, part in broken.items())
            raise FloatingPointError(
                f"step {self.steps}: the loss is {where}; no weight was changed. "
                "Look at that rank's samples, or lower the learning rate, or set clip_norm"
            )
        once = [
            position
            for position in range(len(parts))
            if self.axes.coordinates(position).get("tp", 0) == 0
        ]
        loss = math.fsum(parts[position] for position in once)
        if max(of_ranks) >= 0:
            loss = self.divide_by_weight(
                loss, math.fsum(max(of_ranks[position], 0) for position in once)
            )
        left_out = self.reached_by_none(unused) if any(counts) else set()
        for name in left_out & self.owned.keys():
            self.owned[name].grad = None  # as in one process
        self.reached = [name for name in self.trained if name not in left_out]
        if not (self.to_verify or self.compared):
            self.check_replicas()
        return loss

    def check_replicas(self) -> None:
        """In the first step, if it was not compared with one process: ranks with equal
        parameters and buffers have equal gradients.
        """
        self.compared = True
        if self.axes.sizes.get("tp", 1) > 1 or next(self.model.buffers(), None) is not None:
            self.agree.check_on_all(
                lambda: check_alike(self.model, self.prepared, self.owned, self.axes, self.device)
            )

    def divide_by_weight(self, loss: float, weight: float) -> float:
        """What was summed becomes the mean: gradients, and the loss that is returned.

        `weight`: of the whole batch.
        """
        if not weight:
            raise ValueError(
                f"step {self.steps}: the weights of the loss add up to 0, so no target counts; "
                "no weight was changed"
            )
        for p in self.owned.values():
            if p.grad is not None:
                p.grad /= weight
        return loss / weight

    def reached_by_none(self, unused: Sequence[str]) -> set[str]:
        """The parameters that no rank's samples reached."""
        missed = set(unused)
        reached = [name in self.prepared.trained and name not in missed for name in self.trained]
        counts = all_reduce(
            torch.tensor(reached, dtype=torch.int32, device=self.device), group=self.agree.group
        ).tolist()
        return {name for name, count in zip(self.trained, counts) if not count}

    @property
    def parts(self) -> dict[str, Tensor]:
        """Name → what this rank has of it: of trained parameters what it owns, and the others
        and buffers whole.
        """
        others = set(self.prepared.local).intersection(self.layout.entries).difference(self.trained)
        here = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: t for name, t in here if name in others} | dict(self.owned)

    # ── what the whole model needs, on any layout ──

    share, fit, evaluate = fit.share, fit.fit, fit.evaluate
    gradients, state_dict = checkpoint.gradients, checkpoint.state_dict
    save, resume = checkpoint.save, checkpoint.resume
    describe = memory.describe
    verify, verify_once = verify, verify_once
