"""The training step of every trainer, and the trainer that is put together from parts which each do one thing.

    for each action:       forward → loss × (my samples / all samples), or backward         executor.py
    finish                 the gradients of all ranks are summed                            gradients.py, zero/
    agree                  on the loss, or on the error of a rank                           agreement.py
    clip, optimizer        each rank updates what it owns                                   layout.py, support/optimizers.py
    publish                and tells the others, if they need it

The objective is the mean loss of the whole batch, so that any number of ranks computes what one process does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parallel101.collectives import all_reduce
from parallel101.mesh import Group
from parallel101.record.spans import span, wait_span
from parallel101.trainers.agreement import Agreement
from parallel101.trainers.gradients import Together
from parallel101.trainers.layout import Axes, Entry, Layout
from parallel101.trainers.prepare import MakeSync, build_executor, prepare
from parallel101.trainers.replicas import check_alike
from parallel101.trainers.schedules.schedule import Schedule
from parallel101.trainers.support import checkpoint, fit, memory
from parallel101.trainers.support.arguments import LossFn, OptimizerFn, check_batch, check_model, check_options, shape_number
from parallel101.trainers.support.history import History
from parallel101.trainers.support.optimizers import ShardedOptimizer, build_optimizer
from parallel101.trainers.tensor.plan import Plan


class Trainer:
    """Trains one model on all ranks of a mesh; equal to one process with the whole batch. The public trainers are ways to assemble it.

    Args:
        model: the whole model, the same on every rank; it knows nothing of parallelism.
        loss_fn: (outputs, targets) → the mean loss over the samples, which lie along dim 0. The losses of shares and microbatches are
            weighted by their samples, so a sum, or a mean that leaves out some targets (ignore_index), would differ from one process.
        optimizer: a function of a list of parameters, such as `lambda p: torch.optim.AdamW(p, lr=1e-3)`.
        axes: the ranks that train together, as a mesh; the samples are cut along its axis "dp".
        make_sync: (a stage, its parameters, …) → how the axis "dp" sums their gradients, and who owns what; see prepare.py.
        schedule: what each rank along "pp" does in a step. Without such an axis: gradient accumulation, as 1F1B on one stage.
        plan, sequence_parallel: how modules are cut along "tp"; see `TensorParallelTrainer`. layers_per_stage: see `PipelineTrainer`.
        elementwise: refuse optimizers that look at whole matrices, since this rank will own pieces.
        clip_norm: scale the gradients so that the norm of all of them together is at most this.
        autocast: a dtype such as torch.bfloat16 for the operations of the forward that allow it; weights and gradients keep their own.
        sync: copy the first rank's weights at the start. Without it, models that differ are an error that names the parameter.

    Attributes:
        model, optimizer: as they are used, for a learning-rate schedule or a look inside.
        steps: how many have been taken, those before `resume` included.
        history: of `fit`.
        position: this rank's, in the group. device: the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        optimizer: OptimizerFn,
        *,
        axes: Axes,
        make_sync: MakeSync,
        schedule: Schedule,
        plan: Plan | None = None,
        sequence_parallel: bool = False,
        layers_per_stage: Sequence[int] | None = None,
        elementwise: bool = False,
        clip_norm: float | None = None,
        autocast: torch.dtype | None = None,
        sync: bool = False,
    ):
        check_options(loss_fn, clip_norm, autocast)
        self.model, self.axes, self.clip_norm = model, axes, clip_norm
        self.device = check_model(model, axes.members)
        self.position = axes.position
        self.agree = Agreement(axes.group, self.device)
        self.agree.check_or_copy(model, sync)

        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.state_names = checkpoint.names_of_state(model)
        built = build_optimizer(optimizer, trained, elementwise)
        entries = {name: Entry(t.shape, t.dtype) for name, t in checkpoint.tensors_of_state(model).items()}
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

        self.trained = list(trained)
        self.reached: list[str] = []  # parameters that some rank's samples reached in the last step
        self.checked_replicas = False
        self.steps = 0
        self.history = History()

    # ── one step ──

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Train on one batch, of which this rank gives its share, and return the loss of the whole, the same float on every rank.

        Args:
            inputs, targets: this rank's samples, along dim 0; `share` cuts them out of a whole batch. Shares need not be equal.

        Raises, on every rank: ValueError if a rank has fewer samples than microbatches, FloatingPointError if the loss of some rank is
        not finite, and what the model raised on one rank. In each case no weight has been changed.
        """
        total, shape = self.count_samples((inputs, targets))
        self.reached = []
        self.optimizer.zero_grad()
        self.gradient_sync.begin()
        self.executor.begin(inputs, targets, total, shape)
        for action in self.executor.actions:
            self.executor.run(action)
        unused = self.finish_gradients()
        loss = self.agree_on_loss(unused)
        with span("optimizer"):
            if self.clip_norm is not None:
                gradients = {name: p.grad for name, p in self.owned.items() if p.grad is not None}
                nn.utils.clip_grads_with_norm_(list(self.owned.values()), self.clip_norm, self.layout.norm(gradients))
            self.optimizer.step()
            self.gradient_sync.publish()
        self.steps += 1
        return loss

    def finish_gradients(self) -> list[str]:
        """Afterwards every owned .grad is the whole batch's. Returns the parameters that this rank's samples did not reach."""
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
        """The gradients of what several stages share, or of what each rank applied to its part of the sequences only."""
        owned = [self.owned[name] for name in names if name in self.owned]
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in owned]
        if parts:
            total = all_reduce(torch.cat([part.reshape(-1) for part in parts]), group=group)
            for p, part, summed in zip(owned, parts, total.split([part.numel() for part in parts])):
                p.grad = part.copy_(summed.view_as(part))

    # ── what the ranks agree on ──

    def count_samples(self, batch: Any) -> tuple[int, int]:
        """How many samples the whole batch has, and a number for their shape. An error on all ranks if one of them has too few."""
        problem, mine, shape = None, -1, 0
        try:
            inputs, _ = check_batch(batch)
            mine, shape = len(inputs), shape_number(inputs)
        except (TypeError, ValueError) as error:
            problem = error
        several = len(self.agree.ranks) > self.axes.sizes["dp"]  # ranks with the same samples
        counts, *told = self.agree.numbers(mine, shape) if several else self.agree.numbers(mine)
        shapes = told[0] if told else [shape] * len(counts)
        if min(counts) < 0:
            self.agree.raise_problem(problem, f"take its batch in step {self.steps}")
        firsts: dict[int, int] = {}  # position along dp → the first rank there
        for position, count in enumerate(counts):
            first = firsts.setdefault(self.axes.coordinates(position)["dp"], position)
            if (count, shapes[position]) != (counts[first], shapes[first]):
                a, b = self.agree.ranks[first], self.agree.ranks[position]
                raise ValueError(
                    f"rank {a} was given {counts[first]:.0f} samples and rank {b} {count:.0f}, or samples of another shape: ranks that "
                    "differ only along tp or pp work on the same samples; share(batch) cuts over dp alone"
                )
        total = sum(counts[first] for first in firsts.values())
        for position, count in enumerate(counts):
            if count < (least := self.executor.microbatches):
                wanted = "at least one sample a rank" if least == 1 else f"at least accumulate={least} samples a rank"
                if self.axes.sizes.get("pp", 1) > 1:
                    wanted = f"at least microbatches={least} samples for each position along dp"
                raise ValueError(
                    f"the batch is too small: rank {self.agree.ranks[position]} has {count:.0f} of its "
                    f"{total:.0f} samples, and {len(self.agree.ranks)} ranks train; "
                    f"expected {wanted}: use a larger batch or fewer {'ranks' if least == 1 else 'microbatches'}"
                )
        return int(total), shape

    def agree_on_loss(self, unused: Sequence[str]) -> float:
        """The loss of the whole batch: the ranks' parts, added in their order, so the same float everywhere. Ranks along tp share one."""
        failure = self.executor.failure
        try:
            mine = sum(part.item() for part in self.executor.losses.values()) if failure is None else math.nan
            parts, counts = self.agree.numbers(mine, len(unused) if failure is None else -1)
        except Exception:
            if failure is not None:  # more interesting than a broken connection that may be its consequence
                raise failure from None
            raise
        if min(counts) < 0:
            self.executor.forget()
            self.agree.raise_problem(failure, f"finish step {self.steps}, and no weight was changed")
        broken = {rank: part for rank, part in zip(self.agree.ranks, parts) if not math.isfinite(part)}
        if broken:
            where = ", ".join(f"{part} on rank {rank}" for rank, part in broken.items())
            raise FloatingPointError(
                f"step {self.steps}: the loss is {where}; no weight was changed. "
                "Look at that rank's samples, or lower the learning rate, or set clip_norm"
            )
        left_out = self.reached_by_none(unused) if any(counts) else set()
        for name in left_out & self.owned.keys():
            self.owned[name].grad = None  # as in one process
        self.reached = [name for name in self.trained if name not in left_out]
        if not self.checked_replicas:
            self.check_replicas()
        return math.fsum(part for position, part in enumerate(parts) if self.axes.coordinates(position).get("tp", 0) == 0)

    def check_replicas(self) -> None:
        """After the first step: ranks that have the same parameters and buffers must have the same gradients and values."""
        self.checked_replicas = True
        if self.axes.sizes.get("tp", 1) > 1 or next(self.model.buffers(), None) is not None:
            self.agree.check_on_all(lambda: check_alike(self.model, self.prepared, self.owned, self.axes, self.device))

    def reached_by_none(self, unused: Sequence[str]) -> set[str]:
        """The parameters that no rank's samples reached."""
        missed = set(unused)
        reached = [name in self.prepared.trained and name not in missed for name in self.trained]
        counts = all_reduce(torch.tensor(reached, dtype=torch.int32, device=self.device), group=self.axes.group).tolist()
        return {name for name, count in zip(self.trained, counts) if not count}

    @property
    def untrained(self) -> dict[str, Tensor]:
        """Parameters and buffers of this rank that no optimizer changes, by name."""
        local = set(self.prepared.local).difference(self.trained)
        return {name: t for name, t in checkpoint.tensors_of_state(self.model).items() if name in local}

    # ── what the whole model needs, on any layout ──

    share, fit, evaluate = fit.share, fit.fit, fit.evaluate
    gradients, state_dict = checkpoint.gradients, checkpoint.state_dict
    save, resume = checkpoint.save, checkpoint.resume
    describe = memory.describe
