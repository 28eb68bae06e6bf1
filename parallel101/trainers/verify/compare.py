"""A layout against one process: three of the optimizer's steps on the same whole batch.

    the first rank   the whole batch ──▶ one process (one_process.py) ─▶ loss, gradients, … ┐ =?
    every rank       its share ──▶ the trainer's own step ─▶ the same                        ┘

After each gradient is compared, both go on from that of one process, and after each update from its
weights: Adam turns the rounding of a zero gradient into a full step. Weights that are zero, such as
LoRA's B or a head, are moved a little at the start, since they would hide what comes before them.
The third loss is scaled, so that a hook that clamps only large gradients shows.

A result in precision u is rounded once in each of the d modules, there and back, and sums up to k
numbers. Such errors add up like a random walk, so two orders of summing differ by about √(d·k)·u.
The bound is 4 times that, relative to the largest number in the same module. What exceeds it in
less than 64 bits is measured: one process computes the same step in 64 bits, and what that changes
is rounding.
"""

from __future__ import annotations

import json
import math
import random
import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parallel101.collectives import broadcast
from parallel101.trainers.layout import SAMPLES
from parallel101.trainers.step import Trainer
from parallel101.trainers.support.batches import count_samples, join, map_tensors, tensors_of
from parallel101.trainers.support.fit import evaluate_share, evaluation_mode
from parallel101.trainers.support.losses import NoTargets
from parallel101.trainers.support.memory import readable
from parallel101.trainers.support.optimizers import tell_first
from parallel101.trainers.verify import halves
from parallel101.trainers.verify.deterministic import deterministic
from parallel101.trainers.verify.halves import LossCheck
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
from parallel101.trainers.verify.snapshot import Snapshot

SAFETY, NOISE = 4, 16
LARGE = 1000.0  # about the largest gradient of the scaled loss
# How much more of its step may be rounding. It is for what clamps large gradients, which differs
# grossly, and the gradient of a matrix exponential gets less exact than its size says.
LOOSE = 100
Bounds = dict[str, dict[str, float]]  # kind → name → the largest difference that is rounding


class Comparison:
    """One comparison with one process, in which all ranks take part.

    Args:
        whole: the model before it was cut, on the first rank.
        batch: this rank's share.
        snapshot: of the trainer, to which the first rank returns before it takes part.
        room: for activations on the first rank, in bytes.
    """

    def __init__(
        self,
        trainer: Trainer,
        whole: WholeModel | None,
        loss_check: LossCheck,
        batch: Share,
        snapshot: Snapshot,
        room: float,
    ):
        self.trainer, self.snapshot, self.loss_check = trainer, snapshot, loss_check
        self.of_first = whole
        self.batch, self.room, self.first = batch, room, trainer.position == 0
        # what, name, step → the difference, and the largest that is rounding
        self.found: dict[tuple[str, str, int], tuple[float, float]] = {}
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
        shares = tell_first(self.batch if gives else None, agree.group, trainer.device)
        values = trainer.layout.gather(trainer.parts, list(trainer.layout.entries), first_only=True)
        state = trainer.sharded_optimizer.state()
        problem = ""
        if self.first:
            try:
                self.one_process([share for share in shares if share is not None], values, state)
            except Exception as error:
                problem = (
                    "It can't be compared: one process could not train on the whole batch "
                    f"({type(error).__name__}: {error})."
                )
            self.snapshot.restore()
        header = json.loads(agree.texts(json.dumps(self.header(problem)))[0])
        if problem := header.get("problem"):
            return Report(cause=problem)
        if reason := header.get("reason"):
            return Report(reason=reason)
        self.cause = ""
        try:
            self.steps(header)
        except (FloatingPointError, NoTargets) as error:  # on every rank, and not in one process
            words = self.explain([])
            if not words:
                raise
            return Report(self.rows(), cause=f"{words} In parts: {error}")
        except (RuntimeError, ValueError) as error:  # on each rank that raises it
            if trainer.axes.sizes.get("tp", 1) == 1 or not SHAPES.search(str(error)):
                raise
            words = (
                f"One process can compute this batch, and with the layers cut over "
                f"{trainer.axes.sizes['tp']} ranks {type(error).__name__} was raised: "
                f"{str(error).splitlines()[0]}. {HINTS['tp']} Where the model's code counts "
                "features or heads of the whole model, write -1, or give the plan the attribute "
                'that counts heads: p101.column(heads="num_heads"). With sequence_parallel, take '
                "the time from an output of these layers."
            )
            raise NotEqualError(refusal(report := Report(cause=words)), report) from error
        rows = self.judged()
        if not self.cause and any(row.ratio > 1 for row in rows):
            self.cause = self.explain(rows)
        return Report(rows, cause=self.cause, note=header["note"])

    # ── one process, on the first rank ──

    def one_process(
        self, shares: list[Share], values: dict[str, Tensor], state: Mapping[str, Any]
    ) -> None:
        trainer, whole = self.trainer, self.of_first
        assert whole is not None
        self.note, self.few = "", False
        samples = sum(count_samples(inputs) for inputs, _ in shares)
        if self.snapshot.lost:
            lost = ", ".join(sorted(self.snapshot.lost))
            self.note = f"verify has not put back what it can't: {lost}"
        if self.room < math.inf:
            needed = samples * whole.bytes_of_a_sample(values, shares[0])
            self.snapshot.restore()
            if needed > self.room:
                self.few, few = True, trainer.runner.microbatches
                shares = [map_tensors(lambda t: t[:few], share) for share in shares]
                self.note = (
                    f"verified with {few} sample{'s' * (few > 1)} a rank only: all activations of "
                    f"one process would take {readable(needed)} on rank {trainer.agree.ranks[0]}, "
                    f"and there are {readable(self.room)}"
                )
        try:
            self.shares = [join(shares)]
        except ValueError:  # samples of different shapes: it computes one share after the other
            self.shares = shares
        self.perturb = True
        self.take_steps(perturbed(values, trainer.trained), state)
        if not all(math.isfinite(outcome.loss) for outcome in self.expected):
            self.snapshot.restore()
            self.perturb = False
            self.take_steps(values, state)

    def take_steps(self, values: dict[str, Tensor], state: Mapping[str, Any]) -> None:
        trainer, whole = self.trainer, self.of_first
        assert whole is not None
        self.start, self.expected, self.scales = values, list[Outcome](), [1.0] * STEPS
        self.training = Training(whole, values, trainer, state)
        for step in range(STEPS):
            if step == STEPS - 1:
                half = trainer.precision.weights == torch.float16
                self.scales[step] = scale_for(self.expected[-1].gradients, 16 if half else LARGE)
            self.expected.append(self.training.step(self.shares, self.scales[step]))
        with whole.whole(self.training.values):
            self.evaluated = whole.evaluate(self.shares)

    def header(self, problem: str) -> dict[str, Any]:
        """Return the numbers of the first rank's results that every rank needs."""
        if not self.first or problem:
            return {"problem": problem}
        expected, entries = self.expected, self.trainer.layout.entries
        losses = [outcome.loss for outcome in expected]
        if not all(map(math.isfinite, losses)):
            return {"reason": f"in one process the loss of the first batch is {losses[0]}"}
        return {
            "note": self.note,
            "few": self.few,
            "perturb": self.perturb,
            "scales": self.scales,
            "samples": sum(count_samples(inputs) for inputs, _ in self.shares),
            "numbers": [{"loss": of.loss, "norm": of.norm} for of in expected],
            "evaluated": self.evaluated,
            "absent": [[name for name, g in of.gradients.items() if g is None] for of in expected],
            "buffers": [name for name in expected[0].buffers if name in entries],
            "bounds": list(map(self.bounds, expected, self.relative(self.bound))),
        }

    def relative(self, bound: float) -> list[float]:
        return [bound * (LOOSE if scale > 1 else 1) for scale in self.scales]

    def bounds(self, outcome: Outcome, relative: float) -> Bounds:
        found = {
            kind: {name: relative * size for name, size in of_kind.items()}
            for kind, of_kind in sizes(outcome).items()
        }
        # zero but for rounding, such as the gradient of a bias before a softmax
        zero = self.eps * max(map(largest, outcome.gradients.values()), default=0.0)
        found["gradient"] = {name: most + zero for name, most in found["gradient"].items()}
        return found

    def measured_bounds(self) -> list[Bounds]:
        """Return what 64 bits change, times a factor; at least what the coarsest dtype may. If the
        model has 64 bits, return what a change of the weights by their rounding does.
        """
        found, values = [], dict(self.start)
        of_steps = self.relative(max(self.bound, SAFETY * self.eps))
        for outcome, scale, relative in zip(self.expected, self.scales, of_steps):
            near = jittered(values) if self.eps == torch.finfo(torch.float64).eps else values
            exact = self.training.in_float64(self.shares, near, scale)
            least = self.bounds(outcome, relative)
            noise = sizes(outcome, exact)
            found.append(
                {
                    kind: {n: max(most, NOISE * noise[kind][n]) for n, most in of_kind.items()}
                    for kind, of_kind in least.items()
                }
            )
            values |= outcome.updated | outcome.buffers
        return found

    # ── all ranks ──

    def steps(self, header: Mapping[str, Any]) -> None:
        trainer = self.trainer
        if header["few"]:
            self.batch = map_tensors(lambda t: t[: trainer.runner.microbatches], self.batch)
        if header["perturb"]:
            perturb_owned(trainer)
        lift_learning_rates(trainer.optimizer)
        # an optimizer's noise is the same on all ranks if they were seeded alike
        self.seeds = [
            1 if trainer.agree.same(str(state)) else 2 + trainer.position
            for state in (torch.get_rng_state().tolist(), random.getstate())
        ]
        for step in range(STEPS):
            self.step(step, header, self.expected[step] if self.first else None)
        evaluated = self.evaluate()
        most = max(of_step["loss"][""] for of_step in header["bounds"])
        self.found["evaluate", "", STEPS] = abs(evaluated - header["evaluated"]), most

    def step(self, step: int, header: Mapping[str, Any], expected: Outcome | None) -> None:
        """Compare a step of the layout with the same step of one process."""
        trainer, cut = self.trainer, self.trainer.layout.cut
        bounds, numbers = header["bounds"][step], header["numbers"][step]

        def add(what: str, name: str, difference: float, most: float | None = None) -> None:
            most = bounds[what].get(name, 0.0) if most is None else most
            self.found[what, name, step + 1] = difference, most

        loss = self.gradients(header["samples"], header["scales"][step])
        add("loss", "", abs(loss - numbers["loss"]))
        if trainer.clip_norm is not None:
            add("norm", "", abs(float(trainer.norm()) - numbers["norm"]))
        here = dict(trainer.model.named_buffers())
        names = header["buffers"]
        for name, should in self.from_first(names, expected and expected.buffers).items():
            if name in here and here[name].shape == should.shape:
                add("buffer", name, distance(here[name].detach(), should))
        gradients = self.from_first(trainer.trained, expected and expected.gradients)
        for name, p in trainer.owned.items():
            should = cut(name, gradients[name])
            mine = torch.zeros_like(should) if p.grad is None else p.grad
            add("gradient", name, distance(mine, should))
            absent = name in header["absent"][step]
            p.grad = None if absent else should.to(p.grad_dtype or p.dtype, copy=True)
        del gradients
        before = {name: p.detach().clone() for name, p in trainer.owned.items()}
        self.update()
        updated = self.from_first(trainer.trained, expected and expected.updated)
        for name, p in trainer.owned.items():
            should = cut(name, updated[name])
            rounding = 2 * torch.finfo(p.dtype).eps * largest(should)
            most = self.bound * largest(should - before[name]) + rounding
            add("update", name, distance(p.detach(), should), most)
            with torch.no_grad():
                p.copy_(should)
        trainer.sync.publish()

    def gradients(self, samples: int, scale: float) -> float:
        """Compute the gradients as the trainer does, of a scaled loss. Returns the loss."""
        trainer, loss_check = self.trainer, self.loss_check
        called = list(getattr(trainer.runner, "parts", {0: trainer.model}).values())
        trainer.sync.scale = scale
        inputs, targets = map_tensors(torch.clone, self.batch)  # which may be changed in place
        with deterministic(trainer.model, called):
            loss_check.always = True
            try:
                loss = trainer.compute_gradients(inputs, targets, samples)
            finally:
                loss_check.always = False
        if scale != 1 and not trainer.precision.scaled:  # else the trainer has divided them
            for p in trainer.owned.values():
                if p.grad is not None:
                    p.grad /= scale
        self.cause = loss_check.check() or self.cause
        return loss

    def update(self) -> None:
        trainer = self.trainer
        if trainer.clip_norm is not None:
            parameters, norm = list(trainer.owned.values()), trainer.norm()
            nn.utils.clip_grads_with_norm_(parameters, trainer.clip_norm, norm)
        torch.manual_seed(self.seeds[0])
        random.seed(self.seeds[1])
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(self.seeds[1])
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
        called = list(getattr(trainer.runner, "parts", {0: trainer.model}).values())
        with torch.no_grad(), evaluation_mode(trainer), deterministic(trainer.model, called):
            mine, weight = evaluate_share(trainer, inputs, targets)
        sums, weights = trainer.agree.numbers(mine, weight)
        return math.fsum(sums) / math.fsum(weights)

    def from_first(
        self, names: Sequence[str], tensors: Mapping[str, Tensor | None] | None
    ) -> dict[str, Tensor]:
        """Return the first rank's tensors on all ranks; zeros where it has none."""
        entries, device, found = self.trainer.layout.entries, self.trainer.device, {}
        for dtype in dict.fromkeys(entries[name].dtype for name in names):
            alike = [name for name in names if entries[name].dtype == dtype]
            sizes = [entries[name].shape.numel() for name in alike]
            row = torch.zeros(sum(sizes), dtype=dtype, device=device)
            for name, part in zip(alike, row.split(sizes)):
                if tensors and (tensor := tensors[name]) is not None:
                    part.copy_(tensor.reshape(-1))
            if dtype == torch.bool:
                row = broadcast(row.byte(), 0, group=self.trainer.agree.group).bool()
            else:
                row = broadcast(row, 0, group=self.trainer.agree.group)
            for name, part in zip(alike, row.split(sizes)):
                found[name] = part.view(entries[name].shape)
        return found

    # ── the result ──

    def rows(self, bounds: Sequence[Bounds] | None = None) -> list[Row]:
        """Return the largest difference of each comparison over the ranks, on all of them."""
        found = dict(self.found)
        for (what, name, step), (difference, most) in found.items():
            kind = "loss" if what == "evaluate" else what
            if bounds is not None and name in bounds[step - 1].get(kind, ()):
                found[what, name, step] = difference, max(most, bounds[step - 1][kind][name])
        mine = json.dumps(
            [
                [*key, d, d / most if most else math.inf if d else 0.0]
                for key, (d, most) in found.items()
            ]
        )
        worst: dict[tuple[str, str, int], Row] = {}
        for text in self.trainer.agree.texts(mine):
            for row in map(Row._make, json.loads(text)):
                key = row[:3]
                if key not in worst or row.ratio > worst[key].ratio:
                    worst[key] = row
        return sorted(worst.values(), key=lambda row: KINDS.index(row.what))

    def judged(self) -> list[Row]:
        """Return the result of each comparison. If bounds don't explain all, measure rounding."""
        rows, bounds = self.rows(), list[Bounds]()
        if all(row.ratio <= 1 or row.what == "update" for row in rows):
            return rows
        if self.first:
            self.snapshot.restore()
            try:
                bounds = self.measured_bounds()
            except Exception:  # the model has numbers of its own in another dtype
                least = max(self.bound, 2 * SAFETY * self.eps)
                bounds = list(map(self.bounds, self.expected, self.relative(least)))
        return self.rows(json.loads(self.trainer.agree.texts(json.dumps(bounds))[0]))

    def explain(self, rows: Sequence[Row]) -> str:
        """Return why they differ, in words, the same on every rank; "" if it can't be told."""
        words, trainer = "", self.trainer
        if self.first:
            self.snapshot.restore()
            kinds = {row.what for row in rows if row.ratio > 1}
            try:
                words = NOT_ELEMENTWISE if kinds == {"update"} else self.from_halves()
            except Exception:  # as loss_fn may raise for some of the samples
                words = ""
            if rows and not words:
                axes = (axis for axis, size in trainer.axes.sizes.items() if size > 1)
                words = next((HINTS[axis] for axis in axes if axis in HINTS), "")
        return trainer.agree.texts(words)[0]

    def from_halves(self) -> str:
        whole, (inputs, targets) = self.of_first, self.shares[0]
        assert whole is not None
        bound, repeated = max(self.bound, SAFETY * self.eps), self.trainer.runner.microbatches > 1
        of_loss = self.loss_check.snapshot()
        with whole.whole(self.start), whole.without_chance():
            with torch.no_grad():
                outputs = whole.outputs(map_tensors(torch.clone, inputs))
            return halves.of_the_loss(
                whole.loss_fn, outputs, targets, bound, of_loss.restore
            ) or halves.of_the_model(whole, (inputs, targets), outputs, bound, repeated)


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
        "on each feature (or head) alone. With sequence_parallel, every module between the cut "
        "layers must act on each position alone. Leave the layers out of the plan, or make them "
        "'column_gather'. Hooks on a weight that is cut are lost, and loss_fn sees only a part of "
        "it."
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
            what = f"{name!r} is a {type(module).__name__} of parallel101.layers, which"
            if any(p.requires_grad for p in module.parameters()):
                return (
                    f"{what} sums the gradients of its weights over the ranks itself, and the "
                    "trainer sums them again. Use affine=False, or train with a loop of your own."
                )
            return (
                f"It can't be compared: {what} sends messages to other ranks, which one process "
                "has not. Compare it yourself, and pass verify=False."
            )
    return ""


def scale_for(gradients: Mapping[str, Tensor | None], wanted: float) -> float:
    """Return a power of two that makes the largest gradient about as large as `wanted`."""
    size = max(map(largest, gradients.values()), default=0.0)
    if not 0 < size < math.inf:
        return 1.0
    return 2.0 ** max(0, min(40, round(math.log2(wanted / size))))


# ── weights that are zero ──


def noise(name: str, shape: Sequence[int]) -> Tensor:
    """Return noise for this parameter, the same on every rank: about a tenth of an initial weight
    of this shape.

    These are fractional parts of the multiples of the golden ratio: as irregular as this needs, and
    faster than random numbers.
    """
    start = zlib.crc32(name.encode()) / 2**32
    steps = torch.arange(math.prod(shape), dtype=torch.float64, device="cpu")
    steps = steps.mul_(0.6180339887498949).add_(start).frac_().sub_(0.5)
    return steps.mul_(0.3 / max(1, shape[-1] if shape else 1) ** 0.5).view(tuple(shape))


def perturbed(values: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
    """Return the same weights, with noise in the place of zeros."""
    return {
        name: moved(t, noise(name, t.shape)) if name in names else t for name, t in values.items()
    }


def jittered(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return these weights, each changed by about its rounding."""
    eps = 4 * torch.finfo(torch.float64).eps
    return {
        name: t * (1 + eps * noise(name, t.shape).sign().to(t)) if t.is_floating_point() else t
        for name, t in values.items()
    }


def moved(t: Tensor, by: Tensor) -> Tensor:
    return torch.where(t == 0, by.to(t), t)


@torch.no_grad()
def perturb_owned(trainer: Trainer) -> None:
    layout = trainer.layout
    for name, p in trainer.owned.items():
        p.copy_(moved(p.detach(), layout.cut(name, noise(name, layout.entries[name].shape))))
    trainer.sync.publish()


# ── how large, how far ──


def sizes(outcome: Outcome, other: Outcome | None = None) -> Bounds:
    """Return, by kind and name, the largest number in the same module or, given another outcome,
    the largest difference from that.
    """
    gradients, buffers = outcome.gradients, outcome.buffers
    floating = {name: b for name, b in buffers.items() if b.is_floating_point()}
    zero = Outcome(0.0, {}, 0.0, {}, {}) if other is None else other

    def in_module(tensors: Mapping[str, Tensor | None], others: Mapping) -> dict[str, float]:
        of_module: dict[str, float] = {}
        for name, t in tensors.items():
            module, b = name.rpartition(".")[0], others.get(name)
            size = largest(t) if t is None or b is None else distance(t, b)
            of_module[module] = max(of_module.get(module, 0.0), size)
        return {name: of_module[name.rpartition(".")[0]] for name in tensors}

    return {
        "loss": {"": abs(outcome.loss - zero.loss)},
        "norm": {"": abs(outcome.norm - zero.norm)},
        "gradient": in_module(gradients, zero.gradients),
        "buffer": in_module(floating, zero.buffers),
    }


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
