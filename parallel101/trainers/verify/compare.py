"""This layout against one process, on the same few samples, before the first step: equal, or
refused.

    every rank       some of its samples ─▶ the trainer's own step ─▶ loss, gradients, weights ┐ =?
    the first rank   all those samples ──▶ one process (one_process.py) ─▶ the same            ┘

It is done twice: with the model's weights, and with slightly different ones, so that a weight that
is zero now (LoRA's B, a head) hides nothing. The optimizer is compared from equal gradients, since
Adam turns the rounding of a zero gradient into a full step. How much two results may differ is in
rounding.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from parallel101.collectives import broadcast
from parallel101.spans import unrecorded
from parallel101.trainers.layout import SAMPLES
from parallel101.trainers.support.batches import (
    Batch,
    count_samples,
    join,
    map_tensors,
    tensors_of,
)
from parallel101.trainers.support.fit import evaluate_share, evaluation_mode
from parallel101.trainers.support.losses import NoTargets
from parallel101.trainers.support.optimizers import tell_first
from parallel101.trainers.trainer import Trainer
from parallel101.trainers.verify.causes import explain, messages_of_its_own
from parallel101.trainers.verify.no_trace import (
    return_freed_memory,
    seed_all,
    untouched,
    with_buffers_restored,
)
from parallel101.trainers.verify.one_process import (
    OneProcess,
    Outcome,
    copy_of_optimizer,
    lift_learning_rates,
    without_dropout,
)
from parallel101.trainers.verify.perturb import perturb_owned, perturbed
from parallel101.trainers.verify.report import WEIGHTS, NotEqualError, Report, Row, message
from parallel101.trainers.verify.rounding import apart, eps_of, largest, most_rounding, scales


def verify(trainer: Trainer, inputs: Batch, targets: Batch) -> Report:
    """See `HybridTrainer.verify`."""
    if not trainer.verifies:
        raise ValueError(
            "this trainer was built with verify=False and keeps no copy of the whole model: "
            "build it with verify=True"
        )
    with unrecorded():
        trainer.shares.check(inputs, targets, trainer.steps)
        report = compare(trainer, inputs, targets)
    if report.equal:
        settle(trainer, report)
    return report


def settle(trainer: Trainer, report: Report) -> None:
    """The comparison before the first step is made, and what it took is freed.

    If nothing could be compared, the ranks are compared with each other in the first step.
    """
    trainer.before_first = None
    if report.reason:
        trainer.after_first = trainer.compare_replicas
    if trainer.one_process is not None:
        trainer.one_process.free()
    if not report.reason:
        return_freed_memory()


def compare(trainer: Trainer, inputs: Batch, targets: Batch) -> Report:
    """All of it, once. Collective; only `unrecorded` is the caller's."""
    try:
        with untouched(trainer):
            report = Comparison(trainer, inputs, targets, of_each=1).run()
        if report.equal:
            return report
    except (NotEqualError, NeedsTwoSamples, FloatingPointError, NoTargets):
        pass  # on every rank
    with untouched(trainer):
        return Comparison(trainer, inputs, targets, of_each=2).run()


class Comparison:
    """One verification. What all ranks do, in this order."""

    def __init__(self, trainer: Trainer, inputs: Batch, targets: Batch, of_each: int):
        self.trainer, self.first, self.of_each = trainer, trainer.position == 0, of_each
        # of the ranks with the same samples, one gives them
        self.holds_share = not any(
            position for axis, position in trainer.axes.here.items() if axis not in SAMPLES
        )
        # so that shares are uneven, if the batch allows it
        even = trainer.axes.place(SAMPLES) % 2 == 0
        wanted = of_each * trainer.runner.microbatches + even
        self.batch = map_tensors(lambda t: t[:wanted], (inputs, targets))
        self.needs_two = False
        self.rows: dict[tuple[str, str, str], tuple[float, float]] = {}
        entries = [trainer.layout.entries[name] for name in trainer.trained]
        precision = trainer.precision
        self.shapes = [entry.shape for entry in entries]
        self.dtypes = {entry.dtype for entry in entries}
        self.dtypes |= {d for d in (precision.weights, precision.autocast) if d is not None}

    def run(self) -> Report:
        trainer = self.trainer
        if len(trainer.agree.ranks) > 1:
            cause_of_layers, reason = messages_of_its_own(trainer.model)
            if cause_of_layers:
                raise NotEqualError(
                    f"this layout does not compute what one process does: {cause_of_layers}",
                    Report(cause=cause_of_layers),
                )
            if reason:
                return Report(reason=reason)
        of_ranks = tell_first(
            self.batch if self.holds_share else None, trainer.agree.group, trainer.device
        )
        values = trainer.layout.gather(trainer.parts, list(trainer.layout.entries), first_only=True)
        state = trainer.sharded_optimizer.state()
        reason, together = "", (None, None)
        expected: list[Outcome] = []
        if self.first:
            try:
                together = join([of_rank for of_rank in of_ranks if of_rank is not None])
                self.bound = most_rounding(
                    trainer.model, self.shapes, self.dtypes, tensors_of(together)
                )
                expected = self.one_process(together, values, state)
            except (NotVerified, ValueError) as why:
                reason = str(why)
        header = json.loads(
            trainer.agree.texts(json.dumps(self.header(reason, together, expected)))[0]
        )
        if header["needs_two"]:
            raise NeedsTwoSamples
        if header["reason"]:
            return Report(reason=header["reason"])

        def cause(rows: Sequence[Row]) -> str:
            moved = perturbed(values, trainer.trained) if self.first else {}
            words = explain(trainer, together, moved, rows, self.bound) if self.first else ""
            return trainer.agree.texts(words)[0]

        try:
            for weights in WEIGHTS:
                outcome = expected[WEIGHTS.index(weights)] if self.first else None
                self.compare(weights, header, outcome)
        except (FloatingPointError, NoTargets) as error:  # on every rank, and not in one process
            if words := cause(()):
                raise NotEqualError(f"{words} In parts: {error}", Report(cause=words)) from error
            raise
        report = Report(self.rows_of_all())
        if not report.equal:
            report = Report(report.rows, cause=cause(report.rows))
            raise NotEqualError(message(report), report)
        return report

    # ── one process, on the first rank ──

    def one_process(
        self, batch: tuple[Batch, Batch], values: Mapping[str, Tensor], state: Mapping[str, Any]
    ) -> list[Outcome]:
        whole: OneProcess | None = self.trainer.one_process
        if whole is None:
            raise NotVerified(self.trainer.why_no_copy)
        outcomes = []
        if self.of_each == 1 and not self.takes_one_sample(whole, batch[0], values):
            self.needs_two = True
            return []
        try:
            for weights in WEIGHTS:
                mine = perturbed(values, self.trainer.trained) if weights == "perturbed" else values
                seed_all(1)
                with whole.holding(mine):
                    outcomes.append(
                        whole.step(
                            *batch, self.trainer.optimizer, state, perturbed=weights == "perturbed"
                        )
                    )
                losses = outcomes[-1].loss, outcomes[-1].evaluated
                if not all(map(math.isfinite, losses)):
                    raise NotVerified(
                        f"in one process the loss of the first samples is {losses[0]}"
                    )
            seed_all(2)
            with whole.holding(values), torch.no_grad():
                again = whole.loss(*batch).item()
        except NotVerified:
            raise
        except Exception as error:
            raise NotVerified(
                f"one process could not compute the first samples ({type(error).__name__}: {error})"
            ) from error
        if abs(again - outcomes[0].loss) > self.bound * abs(outcomes[0].loss):
            raise NotVerified(
                "the model draws random numbers besides dropout, so that two runs of one "
                "process differ"
            )
        return outcomes

    def takes_one_sample(
        self, whole: OneProcess, inputs: Batch, values: Mapping[str, Tensor]
    ) -> bool:
        """False if the forward of one sample alone raises, as it would on some rank."""
        try:
            with whole.holding(values), torch.no_grad():
                whole.outputs(map_tensors(lambda t: t[:1], inputs))
        except Exception:
            return False
        return True

    def header(self, reason: str, together: Batch, expected: Sequence[Outcome]) -> dict[str, Any]:
        """The numbers that every rank needs of the first rank's results."""
        if not self.first or reason or self.needs_two:
            return {"reason": reason, "needs_two": self.needs_two}
        return {
            "reason": "",
            "needs_two": self.needs_two,
            "samples": count_samples(together),
            "drops": any(of.drops for of in expected),
            "bound": self.bound,
            "numbers": [(of.loss, of.evaluated, of.norm) for of in expected],
            "absent": [[name for name, g in of.gradients.items() if g is None] for of in expected],
            "gradient": scales([of.gradients for of in expected], self.bound, eps_of(self.dtypes)),
            "buffer": scales([of.buffers for of in expected], self.bound, 0),
            "buffers": [
                name for name in expected[0].buffers if name in self.trainer.layout.entries
            ],
        }

    # ── all ranks ──

    def compare(self, weights: str, header: Mapping[str, Any], expected: Outcome | None) -> None:
        trainer, number = self.trainer, WEIGHTS.index(weights)
        wanted, bound = header["numbers"], header["bound"]
        with with_buffers_restored(trainer.model):
            if weights == "perturbed":
                perturb_owned(trainer)
            seed_all(1)
            loss, norm = self.of_layout(header["samples"], header["drops"])
            if weights == "perturbed":  # which no zero weight hides
                difference = abs(self.evaluated() - wanted[number][1])
                self.add("evaluate", "", weights, difference, bound * abs(wanted[number][1]))
            here = {
                name: b.detach().clone()
                for name, b in trainer.model.named_buffers()
                if name in header["buffers"]
            }
        # as few at a time as possible: each is as large as all weights
        gradients = self.from_first(trainer.trained, expected and expected.gradients)
        buffers = self.from_first(header["buffers"], expected and expected.buffers)
        self.add(
            "loss",
            "",
            weights,
            abs(loss - wanted[number][0]),
            bound * max(abs(of[0]) for of in wanted),
        )
        if trainer.clip_norm is not None:
            self.add(
                "norm",
                "",
                weights,
                abs(norm - wanted[number][2]),
                bound * max(of[2] for of in wanted),
            )

        cut = trainer.layout.cut
        for name, p in trainer.owned.items():
            mine = torch.zeros_like(p) if p.grad is None else p.grad
            self.add(
                "gradient",
                name,
                weights,
                apart(mine, cut(name, gradients[name])),
                header["gradient"][name],
            )
        for name in header["buffers"]:
            if name in here and here[name].shape == buffers[name].shape:
                self.add(
                    "buffer",
                    name,
                    weights,
                    apart(here[name], buffers[name]),
                    header["buffer"][name],
                )
        absent = set(header["absent"][number])
        after = self.after_update(
            {name: None if name in absent else cut(name, g) for name, g in gradients.items()},
            number,
        )
        del gradients
        updated = self.from_first(trainer.trained, expected and expected.updated)
        for name, p in trainer.owned.items():
            before, should = p.detach(), cut(name, updated[name])
            rounding = 2 * torch.finfo(before.dtype).eps * largest(should)
            self.add(
                "update",
                name,
                weights,
                apart(after[name], should),
                bound * largest(should - before) + rounding,
            )

    def of_layout(self, total: int, drops: bool) -> tuple[float, float]:
        """Loss and norm, as the trainer computes them."""
        trainer = self.trainer
        trainer.sync.scale = 1.0  # as in one process; a gradient that overflows would hide the rest
        inputs, targets = self.batch
        with without_dropout(trainer.model, functions=drops):
            loss = trainer.compute_gradients(inputs, targets, total)
            norm = float(trainer.norm()) if trainer.clip_norm is not None else 0.0
        return loss, norm

    def evaluated(self) -> float:
        """The loss in evaluation mode."""
        with torch.no_grad(), evaluation_mode(self.trainer):
            mine, weight = evaluate_share(self.trainer, *self.batch)
        sums, weights = self.trainer.agree.numbers(mine, weight)
        return math.fsum(sums) / math.fsum(weights)

    def after_update(
        self, gradients: Mapping[str, Tensor | None], number: int
    ) -> dict[str, Tensor]:
        """What this rank owns of each parameter after an update of a copy of its optimizer."""
        memo: dict[int, Any] = {}
        optimizer = copy_of_optimizer(self.trainer.optimizer, memo)
        if number:
            lift_learning_rates(optimizer)
        copies = {name: memo[id(p)] for name, p in self.trainer.owned.items()}
        for name, p in copies.items():
            g = gradients[name]
            p.grad = None if g is None else g.clone()
        try:
            optimizer.step()
        except Exception:  # as Muon's, which wants matrices
            return {name: torch.full_like(p.detach(), torch.nan) for name, p in copies.items()}
        return {name: p.detach() for name, p in copies.items()}

    def from_first(
        self, names: Sequence[str], tensors: dict[str, Tensor | None] | None
    ) -> dict[str, Tensor]:
        """What the first rank has, on all ranks; zeros where it has nothing.

        One broadcast a dtype. The first rank's `tensors` are taken out, one by one.
        """
        entries, device = self.trainer.layout.entries, self.trainer.device
        names, found = [name for name in names if name in entries], {}
        for dtype in dict.fromkeys(entries[name].dtype for name in names):
            alike = [name for name in names if entries[name].dtype == dtype]
            sizes = [entries[name].shape.numel() for name in alike]
            row = torch.zeros(sum(sizes), dtype=dtype, device=device)
            for name, part in zip(alike, row.split(sizes)):
                if tensors and (tensor := tensors.pop(name)) is not None:
                    part.copy_(tensor.reshape(-1))
            row = broadcast(row, 0, group=self.trainer.agree.group)
            found.update(
                {
                    name: part.view(entries[name].shape)
                    for name, part in zip(alike, row.split(sizes))
                }
            )
        return found

    def add(self, what: str, name: str, weights: str, difference: float, most: float) -> None:
        self.rows[what, name, weights] = (
            difference,
            difference / most if most else math.inf if difference else 0.0,
        )

    def rows_of_all(self) -> list[Row]:
        """The largest difference of each comparison over the ranks, the same list on all of
        them.
        """
        mine = json.dumps([[*key, *value] for key, value in self.rows.items()])
        found: dict[tuple[str, str, str], tuple[float, float]] = {}
        for text in self.trainer.agree.texts(mine):
            for what, name, weights, difference, ratio in json.loads(text):
                key = what, name, weights
                found[key] = max(
                    found.get(key, (0.0, 0.0)), (difference, ratio), key=lambda pair: pair[1]
                )
        kinds = ("loss", "evaluate", "norm", "gradient", "buffer", "update")
        return sorted(
            (Row(*key, *value) for key, value in found.items()),
            key=lambda row: kinds.index(row.what),
        )


class NotVerified(Exception):
    """Nothing can be compared; the text says why."""


class NeedsTwoSamples(Exception):
    """The model can't take one sample alone, as models that squeeze can't."""
