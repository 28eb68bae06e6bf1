"""A layout against one process: three of the optimizer's steps on the same whole batch.

    the first rank   the whole batch ──▶ one process (one_process.py) ─▶ loss, gradients, … ┐ =?
    every rank       its share ──▶ the trainer's own step ─▶ the same                        ┘

After each gradient is compared, both go on from that of one process, and after each update from its
weights: Adam turns the rounding of a zero gradient into a full step. Weights that are zero, such as
LoRA's B or a head, are moved a little at the start, since they would hide what comes before them.
The third loss is scaled, so that a hook that clamps only large gradients shows.

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
    Training,
    WholeModel,
    lift_learning_rates,
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
LARGE = 1000.0  # about the largest gradient of the scaled loss
# How much more of its step may be rounding. It is for what clamps large gradients, which differs
# grossly, and the gradient of a matrix exponential gets less exact than its size says.
LOOSE = 100
Bounds = dict[tuple[str, str], float]  # kind, name → the largest difference that is rounding


class Comparison:
    """One comparison with one process, in which all ranks take part.

    Args:
        verification: of the trainer, which has the model before it was cut, on the first rank.
        batch: this rank's share.
        snapshot: of the trainer, to which the first rank returns before it takes part.
        room: for activations on the first rank, in bytes.
    """

    def __init__(
        self,
        verification: Any,  # a Verification
        batch: Share,
        snapshot: Snapshot,
        room: float,
    ):
        trainer: Trainer = verification.trainer
        self.trainer, self.verification, self.snapshot = trainer, verification, snapshot
        self.batch, self.room = batch, room
        self.whole: WholeModel | None = verification.whole
        self.rows, self.cause = list[Row](), ""
        self.expected: list[Outcome] = []  # on the first rank
        precision = trainer.precision
        entries = [trainer.layout.entries[name] for name in trainer.trained]
        dtypes = [*(entry.dtype for entry in entries), precision.weights, precision.autocast]
        self.eps = max(torch.finfo(dtype).eps for dtype in dtypes if dtype is not None)
        depth = sum(1 for module in trainer.model.modules() if module._parameters)
        terms = max(
            *(max(entry.shape, default=1) for entry in entries),
            *(t.numel() * trainer.axes.size(SAMPLES) for t in tensors_of(batch)),
        )
        sums = min(self.eps, torch.finfo(torch.float32).eps)
        (of_ranks,) = trainer.agree.numbers(SAFETY * sums * math.sqrt(max(depth, 1) * terms))
        self.bound = max(of_ranks)

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
        header = self.trainer.agree.objects(header)[0]
        if "problem" in header:
            return Report(cause=header["problem"])
        if not math.isfinite(sum(header["losses"])):
            loss = header["losses"][0]
            return Report(reason=f"in one process the loss of the first batch is {loss}")
        try:
            self.steps(header)
        except (FloatingPointError, NoTargets) as error:  # on every rank, and not in one process
            if not (words := self.explain([])):
                raise
            return Report(cause=f"{words} In parts: {error}")
        except (RuntimeError, ValueError) as error:  # on each rank that raises it
            if trainer.axes.sizes.get("tp", 1) == 1 or not SHAPES.search(str(error)):
                raise
            words = (
                f"One process can compute this batch, and with the layers cut over "
                f"{trainer.axes.sizes['tp']} ranks {type(error).__name__} was raised: "
                f"{str(error).splitlines()[0]}. {HINTS['tp']}"
            )
            raise NotEqualError(refusal(report := Report(cause=words)), report) from error
        rows = self.judged()
        if not self.cause and any(row.ratio > 1 for row in rows):
            self.cause = self.explain(rows)
        return Report(rows, cause=self.cause, note=header["note"])

    # ── one process, on the first rank ──

    def one_process(
        self,
        whole: WholeModel,
        shares: list[Share],
        values: dict[str, Tensor],
        state: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Take the steps of one process. Returns the results that every rank needs before."""
        trainer, few, note = self.trainer, None, ""

        def samples() -> int:
            return sum(count_samples(inputs) for inputs, _ in shares)

        if self.snapshot.lost:
            lost = ", ".join(sorted(self.snapshot.lost))
            note = f"verify has not put back what it can't: {lost}"
        if self.room < math.inf:
            needed = samples() * whole.bytes_of_a_sample(values, shares[0])
            self.snapshot.restore()
            if needed > self.room:
                few = trainer.runner.microbatches
                shares = [map_tensors(lambda t: t[:few], share) for share in shares]
                note = (
                    f"verified with {few} sample{'s' * (few > 1)} a rank only: all activations of "
                    f"one process would take {readable(needed)} on rank {trainer.agree.ranks[0]}, "
                    f"and there are {readable(self.room)}"
                )
        try:
            shares = [join(shares)]
        except ValueError:  # samples of different shapes: it computes one share after the other
            pass
        perturbed = without_zeros({name: values[name] for name in trainer.trained})
        self.start, self.shares, scales = values | perturbed, shares, [1.0] * STEPS
        self.training = Training(whole, self.start, trainer, state)
        for step in range(STEPS):
            if step == STEPS - 1:
                half = trainer.precision.weights == torch.float16
                scales[step] = scale_for(self.expected[-1].gradients, 16 if half else LARGE)
            self.expected.append(self.training.step(shares, scales[step]))
        self.scales = scales
        with whole.whole(self.training.values):
            evaluated = whole.evaluate(shares)
        return {
            "note": note,
            "few": few,
            "samples": samples(),
            "perturbed": perturbed,
            "scales": scales,
            "losses": [outcome.loss for outcome in self.expected],
            "evaluated": evaluated,
        }

    def bounds(self, outcome: Outcome, scale: float, least: float = 0.0) -> Bounds:
        relative = max(self.bound, least) * (LOOSE if scale > 1 else 1)
        # zero but for rounding, such as the gradient of a bias before a softmax
        zero = self.eps * max(map(largest, outcome.gradients.values()), default=0.0)
        return {
            (what, name): relative * size + (zero if what == "gradient" else 0.0)
            for (what, name), size in sizes(outcome).items()
        }

    def measured_bounds(self) -> list[Bounds]:
        """Return the difference that a change of all weights by their rounding makes, times a
        factor; at least what the coarsest dtype may.
        """
        found, values = [], dict(self.start)
        for outcome, scale in zip(self.expected, self.scales):
            near = jittered(values, self.eps), jittered(self.shares, self.eps)
            with self.training.computed(*near, scale) as again:
                noise = sizes(outcome, again)
            least = self.bounds(outcome, scale, SAFETY * self.eps)
            found.append({key: max(most, NOISE * noise[key]) for key, most in least.items()})
            values |= outcome.updated | outcome.buffers
        return found

    # ── all ranks ──

    def steps(self, header: Mapping[str, Any]) -> None:
        trainer = self.trainer
        if few := header["few"]:
            self.batch = map_tensors(lambda t: t[:few], self.batch)
        self.load(header["perturbed"])
        lift_learning_rates(trainer.optimizer)
        # an optimizer's noise is the same on all ranks if they were seeded alike
        self.seeds = [
            1 if trainer.agree.same(str(state)) else 2 + trainer.position
            for state in (torch.get_rng_state().tolist(), random.getstate())
        ]
        most = 0.0
        for step in range(STEPS):
            loss = self.gradients(header["samples"], header["scales"][step])
            expected = self.expected[step] if self.expected else None
            most = max(most, self.step(step + 1, loss, expected))
        self.add("evaluate", "", STEPS, abs(self.evaluate() - header["evaluated"]), most)

    def step(self, step: int, loss: float, expected: Outcome | None) -> float:
        """Compare the gradients, and an update from equal ones, with those of one process. Returns
        the bound of the loss.
        """
        trainer, cut = self.trainer, self.trainer.layout.cut
        told = expected and (*expected[:4], self.bounds(expected, self.scales[step - 1]))
        of_loss, gradients, norm, buffers, bounds = trainer.agree.objects(told)[0]

        def add(what: str, name: str, difference: float) -> None:
            self.add(what, name, step, difference, bounds.get((what, name), 0.0))

        add("loss", "", abs(loss - of_loss))
        if trainer.clip_norm is not None:
            add("norm", "", abs(float(gradient_norm(trainer)) - norm))
        for name, b in trainer.model.named_buffers():
            if name in trainer.layout.entries and b.shape == buffers[name].shape:
                add("buffer", name, distance(b.detach(), buffers[name]))
        for name, p in trainer.owned.items():
            gradient, zero = gradients[name], torch.zeros_like(p)
            should = zero if gradient is None else cut(name, gradient)
            add("gradient", name, distance(zero if p.grad is None else p.grad, should))
            p.grad = None
            if gradient is not None:
                p.grad = should.to(p.grad_dtype or p.dtype, copy=True)
        del told, gradients, buffers  # before other whole tensors arrive
        before = {name: p.detach().clone() for name, p in trainer.owned.items()}
        self.update()
        updated = trainer.agree.objects(expected and expected.updated)[0]
        for name, p in trainer.owned.items():
            should = cut(name, updated[name])
            rounding = 2 * torch.finfo(p.dtype).eps * largest(should)
            most = self.bound * largest(should - before[name]) + rounding
            self.add("update", name, step, distance(p.detach(), should), most)
        self.load(updated)
        return bounds["loss", ""]

    def add(self, what: str, name: str, step: int, difference: float, most: float) -> None:
        ratio = difference / most if most else math.inf if difference else 0.0
        self.rows.append(Row(what, name, step, difference, ratio))

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Copy these whole weights to where they are on the ranks."""
        for name, p in self.trainer.owned.items():
            if name in values:
                p.copy_(self.trainer.layout.cut(name, values[name]))
        self.trainer.gradient_sync.publish()

    def gradients(self, samples: int, scale: float) -> float:
        """Compute the gradients as the trainer does, of a scaled loss. Returns the loss."""
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
        return loss

    def update(self) -> None:
        """Take the optimizer's step, with clipping."""
        trainer = self.trainer
        clip(trainer)
        seed_all(self.seeds[1])
        torch.manual_seed(self.seeds[0])
        try:
            trainer.optimizer.step()
        except Exception:  # as Muon's, which wants matrices
            with torch.no_grad():
                for p in trainer.owned.values():
                    p.fill_(torch.nan)

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

    # ── the result ──

    def judged(self) -> list[Row]:
        """Return the worst result of each comparison over the ranks, on all of them. If bounds
        don't explain all differences, rounding is measured.
        """
        worst: dict[tuple[str, str, int], Row] = {}
        for rows in self.trainer.agree.objects([tuple(row) for row in self.rows]):
            for row in map(Row._make, rows):
                if row.ratio >= worst.setdefault(row[:3], row).ratio:
                    worst[row[:3]] = row
        rows = sorted(worst.values(), key=lambda row: KINDS.index(row.what))
        if all(row.ratio <= 1 or row.what == "update" for row in rows):
            return rows
        measured: list[Bounds] = []
        if self.whole is not None:
            self.snapshot.restore()
            measured = self.measured_bounds()
        measured = self.trainer.agree.objects(measured)[0]

        def again(row: Row) -> Row:
            what = "loss" if row.what == "evaluate" else row.what
            most = measured[row.step - 1].get((what, row.name))
            return row._replace(ratio=min(row.ratio, row.difference / most)) if most else row

        return list(map(again, rows))

    def explain(self, rows: Sequence[Row]) -> str:
        """Return why they differ, in words, the same on every rank; "" if it can't be told."""
        words, trainer = "", self.trainer
        if self.whole is not None:
            self.snapshot.restore()
            kinds = {row.what for row in rows if row.ratio > 1}
            try:
                words = NOT_ELEMENTWISE if kinds == {"update"} else self.from_halves(self.whole)
            except Exception:  # as loss_fn may raise for some of the samples
                words = ""
            if rows and not words:
                axes = (axis for axis, size in trainer.axes.sizes.items() if size > 1)
                words = next((HINTS[axis] for axis in axes if axis in HINTS), "")
        return trainer.agree.objects(words)[0]

    def from_halves(self, whole: WholeModel) -> str:
        inputs, targets = self.shares[0]
        bound, repeated = max(self.bound, SAFETY * self.eps), self.trainer.runner.microbatches > 1
        of_loss = self.verification.snapshot_of_loss()
        with whole.whole(self.start), whole.without_chance():
            with torch.no_grad():
                outputs = whole.outputs(map_tensors(torch.clone, inputs))
            return halves.problem_of_loss(
                whole.loss_fn, outputs, targets, bound, of_loss.restore
            ) or halves.problem_of_model(whole, inputs, outputs, bound, repeated)


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
        "Along pp a rank calls some modules of .sequence(), one after the other, and not the "
        "model's forward. Look for what forward does between them, and for hooks on the model. "
        "loss_fn sees only the weights of the last stage."
    ),
}


def messages_of_its_own(model: nn.Module) -> str:
    """Return why a model with modules of parallel101.layers is refused; "" without any."""
    for name, module in model.named_modules():
        if type(module).__module__.startswith("parallel101.layers."):
            return (
                f"It can't be compared: {name!r} is a {type(module).__name__} of "
                "parallel101.layers, which sends messages to other ranks, and one process has "
                "none. If it has weights, it sums their gradients itself, and the trainer sums "
                "them again: use affine=False, or a loop of your own. Without any, compare it "
                "yourself, and pass verify=False."
            )
    return ""


def scale_for(gradients: Mapping[str, Tensor | None], wanted: float) -> float:
    """Return a power of two that makes the largest gradient about as large as `wanted`."""
    size = max(map(largest, gradients.values()), default=0.0)
    if not 0 < size < math.inf:
        return 1.0
    return 2.0 ** max(0, min(40, round(math.log2(wanted / size))))


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
    other = other or Outcome(0.0, {}, 0.0, {}, {})
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
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float64)
    a, b = a.to(dtype), b.to(dtype)
    found = largest(a - b)
    if math.isfinite(found):
        return found
    return largest((a - b).masked_fill((a == b) | (a.isnan() & b.isnan()), 0))


def largest(t: Tensor | None) -> float:
    """Return the largest absolute value; infinity if one is not a number."""
    if t is None or not t.numel():
        return 0.0
    found = float(t.detach().to_dense().abs().max() if t.is_sparse else t.detach().abs().max())
    return math.inf if math.isnan(found) else found
