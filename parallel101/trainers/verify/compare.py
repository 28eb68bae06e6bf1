"""A layout against one process: three of the optimizer's steps on the same whole batch.

    the first rank   the whole batch ──▶ one process (one_process.py) ─▶ loss, gradients, … ┐ =?
    every rank       its share ──▶ the trainer's own step ─▶ the same                        ┘

After each gradient is compared, both go on from that of one process, and after each update from its
weights: Adam turns the rounding of a zero gradient into a full step. Weights that are zero, such as
LoRA's B or a head, are moved a little at the start, since they would hide what comes before them.
The third loss is scaled, so that a hook that clamps only large gradients shows. Every rank notes
how far its numbers are off, and the first rank judges.

A result in precision u is rounded once in each of the d modules, there and back, and sums up to k
numbers. Such errors add up like a random walk, so two orders of summing differ by about √(d·k)·u.
The bound is 4 times that, relative to the largest number in the same module. If a difference
exceeds it, rounding is measured: one process computes the same steps with every weight and input
changed by its rounding.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from parallel101.trainers.batches import count_samples, join, map_tensors, tensors_of
from parallel101.trainers.layout import SAMPLES
from parallel101.trainers.losses import NoTargets
from parallel101.trainers.memory import readable
from parallel101.trainers.options import Trainer
from parallel101.trainers.step import clip, compute_gradients, gradient_norm
from parallel101.trainers.training_loop import evaluate_share, evaluation_mode
from parallel101.trainers.verify import halves
from parallel101.trainers.verify.deterministic import deterministic
from parallel101.trainers.verify.one_process import (
    Outcome,
    Share,
    Values,
    WholeModel,
    dtypes_of_trained,
    in_float64,
    largest,
    lift_learning_rates,
    train,
)
from parallel101.trainers.verify.report import (
    KINDS,
    STEPS,
    NotEqualError,
    Report,
    Row,
    refusal,
)
from parallel101.trainers.verify.snapshot import Snapshot, seed_all

SAFETY, NOISE = 4, 16
# How much more of the scaled step may be rounding. It is for what clamps large gradients, which
# differs grossly, and the gradient of a matrix exponential gets less exact than its size says.
LOOSE = 100
Difference = tuple[str, str, int, float]  # kind, name, step, how far
Bounds = dict[tuple[str, str], float]  # kind, name → the largest difference that is rounding


class Comparison:
    """One comparison with one process, in which all ranks take part.

    Args:
        verification: of the trainer, which has the model before it was cut, on the first rank.
        batch: this rank's share.
        snapshot: of the trainer, to which the first rank returns before it takes part.
        room: for activations on the first rank, in bytes.
    """

    def __init__(self, verification: Any, batch: Share, snapshot: Snapshot, room: float):
        self.trainer: Trainer = verification.trainer
        self.verification, self.snapshot, self.room = verification, snapshot, room
        self.whole: WholeModel | None = verification.whole
        self.batch, self.cause = batch, ""
        self.expected: list[Outcome] = []  # on the first rank
        self.differences: list[Difference] = []

    def run(self) -> Report:
        trainer, agree = self.trainer, self.trainer.agree
        if len(agree.ranks) > 1 and (words := messages_of_its_own(trainer.model)):
            return Report(cause=words)
        # of the ranks with the same samples, one gives them
        gives = all(axis in SAMPLES or not at for axis, at in trainer.axes.here.items())
        shares = agree.objects(self.batch if gives else None, first_only=True)
        values = trainer.layout.gather(trainer.parts, list(trainer.layout.entries), first_only=True)
        state, header = trainer.sharded_optimizer.state(), {}
        if self.whole is not None:
            try:
                given = [share for share in shares if share is not None]
                header = self.one_process(self.whole, given, values, state)
            except Exception as error:
                words = f"one process could not train on the whole batch ({type(error).__name__}"
                header = {"problem": f"It can't be compared: {words}: {error})."}
            self.snapshot.restore()
        header = agree.objects(header)[0]
        if "problem" in header:
            return Report(cause=header["problem"])
        if not math.isfinite(sum(header["losses"])):
            loss = header["losses"][0]
            return Report(reason=f"in one process the loss of the first batch is {loss}")
        try:
            self.steps(header)
        except (FloatingPointError, NoTargets) as error:  # on every rank, and not in one process
            if not (words := agree.objects(self.explain([]))[0]):
                raise
            return Report(cause=f"{words} In parts: {error}")
        except (RuntimeError, ValueError) as error:  # on each rank that raises it
            tp = trainer.axes.sizes.get("tp", 1)
            if tp == 1 or not SHAPES.search(str(error)):
                raise
            words = (
                f"One process can compute this batch, and with the layers cut over {tp} ranks "
                f"{type(error).__name__} was raised: {str(error).splitlines()[0]}. {HINTS['tp']}"
            )
            raise NotEqualError(refusal(report := Report(cause=words)), report) from error
        of_ranks, rows = agree.objects(self.differences), list[Row]()
        if self.whole is not None:
            rows = self.judged(of_ranks)
            self.cause = self.cause or self.explain(rows)
        rows, self.cause = agree.objects((rows, self.cause))[0]
        return Report([Row(*row) for row in rows], cause=self.cause, note=header["note"])

    # ── on the first rank ──

    def one_process(
        self, whole: WholeModel, shares: list[Share], values: Values, state: Any
    ) -> dict[str, Any]:
        """Take the steps of one process. Returns the results that every rank needs before."""
        trainer, few, note = self.trainer, None, ""
        if self.snapshot.lost:
            note = f"verify has not put back what it can't: {', '.join(sorted(self.snapshot.lost))}"
        if self.room < math.inf:
            whole.make_whole(values)
            samples = sum(count_samples(inputs) for inputs, _ in shares)
            needed = samples * whole.bytes_of_a_sample(shares[0][0])
            self.snapshot.restore()
            if needed > self.room:
                few = trainer.runner.microbatches
                shares = [map_tensors(lambda t: t[:few], share) for share in shares]
                note = (
                    f"verified with {few} sample{'s' * (few > 1)} a rank only: all activations of "
                    f"one process would take {readable(needed)} on rank {trainer.agree.ranks[0]}, "
                    f"and there are {readable(self.room)}"
                )
        with suppress(ValueError):  # samples of different shapes: one share after the other
            shares = [join(shares)]
        perturbed = without_zeros({name: values[name] for name in trainer.trained})
        self.start, self.shares = {**values, **perturbed}, shares
        precision = trainer.precision
        dtypes = [*dtypes_of_trained(trainer).values(), precision.weights, precision.autocast]
        self.eps = max(torch.finfo(dtype).eps for dtype in dtypes if dtype is not None)
        depth = sum(1 for module in whole.changed if module._parameters)
        lengths = [n for name in trainer.trained for n in trainer.layout.entries[name].shape]
        terms = max(*lengths, sum(t.numel() for t in tensors_of(shares)), 1)
        exact = min(self.eps, torch.finfo(torch.float32).eps)
        self.bound = SAFETY * exact * math.sqrt(max(depth, 1) * terms)
        self.expected = train(whole, trainer, self.start, state, shares)
        return {
            "note": note,
            "few": few,
            "samples": sum(count_samples(inputs) for inputs, _ in shares),
            "perturbed": perturbed,
            "losses": [outcome.loss for outcome in self.expected],
            "evaluated": whole.evaluate(shares),
        }

    def judged(self, of_ranks: Sequence[Sequence[Difference]]) -> list[Row]:
        """Return the largest of each difference over the ranks, beside its bound. If the bounds
        don't explain all, rounding is measured.
        """
        largest_of: dict[tuple[str, str, int], float] = {}
        for what, name, step, difference in (one for rank in of_ranks for one in rank):
            key = what, name, step
            largest_of[key] = max(difference, largest_of.get(key, 0.0))
        measured = False
        while True:
            bounds, rows = self.bounds(measured), []
            for (what, name, step), difference in largest_of.items():
                most = bounds[step - 1].get((what, name), 0.0)
                ratio = difference / most if most else math.inf if difference else 0.0
                rows.append(Row(what, name, step, difference, ratio))
            if measured or all(row.ratio <= 1 or row.what == "update" for row in rows):
                return sorted(rows, key=lambda row: KINDS.index(row.what))
            measured = True

    def bounds(self, measured: bool) -> list[Bounds]:
        """Return, for each step, the largest differences that are rounding: relative to the size of
        the numbers and, if it is measured, at least a multiple of the difference that a change of
        all weights and inputs by their rounding makes.
        """
        values, found, whole = dict(self.start), list[Bounds](), self.whole
        if measured:
            self.snapshot.restore()
        for outcome in self.expected:
            relative = max(self.bound, SAFETY * self.eps * measured)
            loose = relative * (LOOSE if outcome.scale > 1 else 1)
            # zero but for rounding, such as the gradient of a bias before a softmax
            zero = self.eps * max(map(largest, outcome.gradients.values()), default=0.0)
            most = {
                (what, name): loose * size + (zero if what == "gradient" else 0.0)
                for (what, name), size in sizes(outcome).items()
            }
            if measured and whole is not None:
                near = jittered(values, self.eps), jittered(self.shares, self.eps)
                again = whole.compute(*near, dtypes_of_trained(self.trainer), outcome.scale)
                noise = sizes(outcome, again)
                most = {key: max(size, NOISE * noise[key]) for key, size in most.items()}
            for name, updated in outcome.updated.items():
                rounding = 2 * torch.finfo(updated.dtype).eps * largest(updated)
                most["update", name] = self.bound * largest(updated - values[name]) + rounding
            values |= outcome.updated | outcome.buffers
            found.append(most)
        found[-1]["evaluate", ""] = max(most["loss", ""] for most in found)
        return found

    def explain(self, rows: Sequence[Row]) -> str:
        """Return why they differ, in words; "" if it can't be told, and on the other ranks."""
        kinds, whole = {row.what for row in rows if row.ratio > 1}, self.whole
        if whole is None or (rows and not kinds):
            return ""
        if kinds == {"update"}:
            return NOT_ELEMENTWISE
        words, (inputs, targets) = "", self.shares[0]
        bound, repeated = max(self.bound, SAFETY * self.eps), self.trainer.runner.microbatches > 1
        self.snapshot.restore()
        of_loss = self.verification.snapshot_of_loss()
        whole.make_whole(self.start)
        with suppress(Exception), whole.without_chance():  # loss_fn may raise for some samples
            with torch.no_grad():
                outputs = whole.outputs(map_tensors(torch.clone, inputs))
            words = halves.problem_of_loss(
                whole.loss_fn, outputs, targets, bound, of_loss.restore
            ) or halves.problem_of_model(whole, inputs, outputs, bound, repeated)
        axes = (axis for axis, size in self.trainer.axes.sizes.items() if size > 1 and rows)
        return words or next((HINTS[axis] for axis in axes if axis in HINTS), "")

    # ── all ranks ──

    def steps(self, header: Mapping[str, Any]) -> None:
        """Take the trainer's steps, and note how far its numbers are off."""
        trainer, agree = self.trainer, self.trainer.agree
        if few := header["few"]:
            self.batch = map_tensors(lambda t: t[:few], self.batch)
        self.load(header["perturbed"])
        lift_learning_rates(trainer.optimizer)
        # an optimizer's noise is the same on all ranks if they were seeded alike
        seeds = [
            1 if agree.same(str(state)) else 2 + trainer.position
            for state in (torch.get_rng_state().tolist(), random.getstate())
        ]
        for step in range(STEPS):
            told = self.expected[step][:5] if self.expected else None
            scale, *expected = agree.objects(told)[0]
            self.gradients(step + 1, header["samples"], scale, *expected)
            del told, expected  # before other whole tensors arrive
            clip(trainer)
            seed_all(seeds[1])
            torch.manual_seed(seeds[0])
            try:
                trainer.optimizer.step()
            except Exception:  # as Muon's, which wants matrices
                with torch.no_grad():
                    for p in trainer.owned.values():
                        p.fill_(torch.nan)
            updated = agree.objects(self.expected[step].updated if self.expected else None)[0]
            for name, p in trainer.owned.items():
                should = trainer.layout.cut(name, updated[name])
                self.note("update", name, step + 1, distance(p.detach(), should))
            self.load(updated)
        if not math.isnan(header["evaluated"]):
            self.note("evaluate", "", STEPS, abs(self.evaluate() - header["evaluated"]))

    def note(self, what: str, name: str, step: int, difference: float) -> None:
        self.differences.append((what, name, step, difference))

    @torch.no_grad()
    def load(self, values: Values) -> None:
        """Copy these whole weights to where they are on the ranks."""
        for name, p in self.trainer.owned.items():
            if name in values:
                p.copy_(self.trainer.layout.cut(name, values[name]))
        self.trainer.gradient_sync.publish()

    def gradients(
        self,
        step: int,
        samples: int,
        scale: float,
        of_loss: float,
        gradients: Mapping[str, Tensor | None],
        norm: float,
        buffers: Values,
    ) -> None:
        """Compute the gradients as the trainer does, of a scaled loss, compare them, and go on from
        those of one process.
        """
        trainer, verification = self.trainer, self.verification
        trainer.gradient_sync.scale = scale
        inputs, targets = map_tensors(torch.clone, self.batch)  # which may be changed in place
        with deterministic(trainer.model, self.called()):
            verification.always = True
            try:
                loss = compute_gradients(trainer, inputs, targets, samples)
            finally:
                verification.always = False
        if scale != 1 and not trainer.precision.scaled:  # else the trainer has divided them
            for p in trainer.owned.values():
                if p.grad is not None:
                    p.grad /= scale
        self.cause = verification.check_loss() or self.cause
        self.note("loss", "", step, abs(loss - of_loss))
        if trainer.clip_norm is not None:
            self.note("norm", "", step, abs(float(gradient_norm(trainer)) - norm))
        for name, b in trainer.model.named_buffers():
            if name in trainer.layout.entries and b.shape == buffers[name].shape:
                self.note("buffer", name, step, distance(b.detach(), buffers[name]))
        for name, p in trainer.owned.items():
            gradient, zero = gradients[name], torch.zeros_like(p)
            should = zero if gradient is None else trainer.layout.cut(name, gradient)
            self.note("gradient", name, step, distance(zero if p.grad is None else p.grad, should))
            p.grad = None
            if gradient is not None:
                p.grad = should.to(p.grad_dtype or p.dtype, copy=True)

    def evaluate(self) -> float:
        """Return the loss in evaluation mode."""
        trainer = self.trainer
        inputs, targets = map_tensors(torch.clone, self.batch)
        with (
            torch.no_grad(),
            evaluation_mode(trainer),
            deterministic(trainer.model, self.called()),
        ):
            mine, weight = evaluate_share(trainer, inputs, targets)
        sums, weights = trainer.agree.numbers(mine, weight)
        return math.fsum(sums) / math.fsum(weights)

    def called(self) -> list[nn.Module]:
        return list(getattr(self.trainer.runner, "parts", {0: self.trainer.model}).values())


NOT_ELEMENTWISE = (
    "From equal gradients the optimizer makes other weights: it does not update each element on "
    "its own, but looks at whole matrices or their norms, of which a rank has pieces, or it draws "
    "random numbers. Use SGD, Adam, AdamW or another elementwise optimizer, or "
    "DataParallelTrainer, where each rank has whole matrices."
)
# of torch's errors and Python's unpacking: sizes don't fit
SHAPES = re.compile("shape|size|unpack|unflatten", re.IGNORECASE)
HINTS = {
    "cp": (
        "Along cp a rank has some positions of each sequence. Code that looks at other positions "
        "must call torch's scaled_dot_product_attention itself (the calls of "
        "nn.MultiheadAttention aren't seen). What counts positions (an embedding, a router's "
        "balance or capacity) must not count those of one rank alone: the model's forward must "
        "take `positions`, (batch, time) whole numbers. A loss must be a mean over all positions; "
        "if some don't count, return (sum of losses, their number)."
    ),
    "tp": (
        "Along tp a rank has some features between a column and a row layer: code there must act "
        "on each feature (or head) alone. Where it counts those of the whole model, write -1, or "
        'give the plan the attribute that counts heads: p101.column(heads="num_heads"). With '
        "sequence_parallel, every module between the cut layers must act on each position alone. "
        "Leave the layers out of the plan, or make them 'column_gather'. Hooks on a weight that is "
        "cut are lost, and loss_fn sees only a part of it."
    ),
    "pp": (
        "Along pp a rank calls some modules of .sequence(), and not the model's forward: look for "
        "what forward does between them, for hooks on the model, and for weights in loss_fn."
    ),
}


def messages_of_its_own(model: nn.Module) -> str:
    """Return why a model with modules of parallel101.layers is refused; "" without any."""
    for name, module in model.named_modules():
        if type(module).__module__.startswith("parallel101.layers."):
            return (
                f"It can't be compared: {name!r} is a {type(module).__name__} of "
                "parallel101.layers, which sends messages to other ranks, and one process has "
                "none. Use a loop of your own; or, if it has no weights, whose gradients the "
                "trainer would sum again, compare it yourself and pass verify=False."
            )
    return ""


# ── weights that are zero, or changed by their rounding ──


def without_zeros(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those of these weights that have zeros, with about a tenth of an initial weight of
    this shape in their place.
    """
    generator, found = torch.Generator().manual_seed(0), {}
    for name, t in values.items():
        if (zero := t == 0).any():
            small = 0.3 / max(1, *t.shape[-1:]) ** 0.5
            found[name] = torch.where(
                zero, (small * torch.rand(t.shape, generator=generator)).to(t), t
            )
    return found


def jittered(tree: Any, eps: float) -> Any:
    """Return these tensors, each number changed by about the rounding of a dtype."""
    generator = torch.Generator().manual_seed(1)

    def change(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t
        return t * (1 + 4 * eps * (torch.rand(t.shape, generator=generator) - 0.5).sign().to(t))

    return map_tensors(change, tree)


# ── how large, how far ──


def sizes(outcome: Outcome, other: Outcome | None = None) -> Bounds:
    """Return, by kind and name, the largest number in the same module or, given another outcome,
    the largest difference from that.
    """
    other = other or Outcome(1.0, 0.0, {}, 0.0, {}, {})
    found = {
        ("loss", ""): abs(outcome.loss - other.loss),
        ("norm", ""): abs(outcome.norm - other.norm),
    }
    floating = {name: b for name, b in outcome.buffers.items() if b.is_floating_point()}
    pairs: list[tuple[str, Mapping, Mapping]] = [
        ("gradient", outcome.gradients, other.gradients),
        ("buffer", floating, other.buffers),
    ]
    for what, tensors, others in pairs:
        of_module: dict[str, float] = {}
        for name, t in tensors.items():
            module, b = name.rpartition(".")[0], others.get(name)
            size = largest(t) if t is None or b is None else distance(t, b)
            of_module[module] = max(of_module.get(module, 0.0), size)
        found |= {(what, name): of_module[name.rpartition(".")[0]] for name in tensors}
    return found


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference.

    The same infinity in both, or NaN in both, counts as equal: half precision overflows.
    """
    a, b = in_float64(a), in_float64(b)
    far = largest(a - b)
    if math.isfinite(far):
        return far
    return largest((a - b).masked_fill((a == b) | (a.isnan() & b.isnan()), 0))
