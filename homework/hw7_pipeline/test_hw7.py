"""Grades homework 7. `pytest homework/hw7_pipeline` runs it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel101.grade.checks import MESSAGES, bytes_sent, close, failed, value
from parallel101.grade.exercise import ANYTHING, AUTOGRAD, OPTIM, Case, Check, Draw, Exercise, Misconception, Question, Trial
from parallel101.record.errors import DeadlockError
from parallel101.record.spans import compute, span
from parallel101.sim.network import Network
from parallel101.trainers.schedules.schedule import schedule

FREE = Network(latency=0.0, bandwidth=math.inf)  # messages take no time, so a run takes as many seconds as it has slots
WIDTH, ROWS = 3, 2  # features, and samples in a microbatch
LEARNING_RATE = 0.5

# ---- the model, whole and cut ----


def stage_of(seed: int, number: int) -> nn.Sequential:
    """Stage `number` of the model with this seed: the same weights in one process and on every rank."""
    generator = torch.Generator().manual_seed(1000 * seed + number)
    linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return nn.Sequential(linear, nn.Tanh())


def mean_square(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def one_process(seed: int, stages: Sequence[int], inputs: list[Tensor], targets: list[Tensor]) -> tuple[Tensor, list[list[Tensor]]]:
    """The mean loss of the microbatches, and the gradients of each stage, from one process that runs the stages in this order."""
    model = nn.Sequential(*(stage_of(seed, number) for number in stages))
    loss = torch.stack([mean_square(model(x), target) for x, target in zip(inputs, targets, strict=True)]).mean()
    loss.backward()
    gradients = {number: [p.grad for p in part.parameters()] for number, part in zip(stages, model, strict=True)}
    return loss.detach(), [gradients[number] for number in sorted(gradients)]


# ---- what each rank runs ----


class InSlots(nn.Module):
    """A stage whose forwards and backwards take one slot each on the virtual clock, and stand in the record."""

    def __init__(self, inner: nn.Module, number: int):
        super().__init__()
        self.inner, self.number, self.calls = inner, number, 0

    def forward(self, x: Tensor) -> Tensor:
        i, self.calls = self.calls, self.calls + 1
        with span("forward", stage=self.number, microbatch=i):
            compute(1.0)
            y = self.inner(x)
        return _BackwardSlot.apply(y, self.number, i)


class _BackwardSlot(torch.autograd.Function):
    """The identity. Its backward, the first thing in the stage's backward, takes the slot."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, stage: int, microbatch: int) -> Tensor:
        ctx.labels = {"stage": stage, "microbatch": microbatch}
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        with span("backward", **ctx.labels):
            compute(1.0)
        return dy, None, None


def run_step(step: Callable[..., Any], seed: int, inputs: Any, targets: Any, microbatches: int) -> list[Any]:
    """One step on this rank. Returns the loss and the gradients of the stage."""
    rank = dist.get_rank()
    stage = InSlots(stage_of(seed, rank), rank)
    loss = step(stage, inputs, targets, mean_square, (ROWS, WIDTH), microbatches)
    return [loss, [p.grad for p in stage.parameters()]]


class SplitStage:
    """A stage whose backward has two halves. See zero_bubble_step for what its methods do."""

    def __init__(self, inner: nn.Module, number: int):
        self.inner, self.number = inner, number
        self.held: dict[int, tuple[Tensor, Tensor]] = {}
        self.left: dict[int, tuple[Tensor, Tensor]] = {}

    def _slot(self, name: str, i: int) -> None:
        with span(name, stage=self.number, microbatch=i):
            compute(1.0)

    def forward(self, i: int, x: Tensor) -> Tensor:
        self._slot("forward", i)
        x = x.detach().requires_grad_()
        self.held[i] = x, self.inner(x)
        return self.held[i][1].detach()

    def input_gradient(self, i: int, dy: Tensor) -> Tensor | None:
        self._slot("input gradient", i)
        x, y = self.held.pop(i)
        self.left[i] = y, dy
        (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        return dx if self.number else None

    def weight_gradient(self, i: int) -> None:
        self._slot("weight gradient", i)
        y, dy = self.left.pop(i)
        parameters = list(self.inner.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(y, parameters, dy), strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


class MarkedSGD(torch.optim.SGD):
    """SGD whose step stands in the record."""

    def step(self, closure: Any = None) -> Any:
        with span("optimizer step"):
            return super().step(closure)


def run_split_step(step: Callable[..., Any], seed: int, inputs: Any, targets: Any, microbatches: int) -> list[Any]:
    """One zero-bubble step on this rank. Returns the loss and the new weights of the stage."""
    rank = dist.get_rank()
    inner = stage_of(seed, rank)
    optimizer = MarkedSGD(inner.parameters(), lr=LEARNING_RATE)
    loss = step(SplitStage(inner, rank), inputs, targets, mean_square, (ROWS, WIDTH), microbatches, optimizer)
    return [loss, [p.detach() for p in inner.parameters()]]


def run_order(order: Callable[..., list[str]], seed: int, inputs: Any, targets: Any, microbatches: int, chunks: int) -> list[Any]:
    """Run the order of work that the learner's function gives for this rank. Returns the order, the loss and the gradients by stage."""
    rank, n = dist.get_rank(), dist.get_world_size()
    actions = order(rank, n, microbatches, chunks)
    last = n * chunks - 1
    stages = {number: stage_of(seed, number) for number in range(rank, n * chunks, n)}
    held: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    sends, losses = [], []

    def receive(stage: int, tag: int) -> Tensor:
        tensor = torch.empty(ROWS, WIDTH, dtype=torch.float64)
        dist.recv(tensor, stage % n, tag=tag) if stage % n != rank else tensor.copy_(local.pop(tag))
        return tensor

    def send(tensor: Tensor, stage: int, tag: int) -> None:
        if stage % n != rank:
            sends.append((dist.isend(tensor, stage % n, tag=tag), tensor))
        else:
            local[tag] = tensor

    local: dict[int, Tensor] = {}
    for text in actions:
        number, kind, i = _parsed(text)
        if number not in stages:
            raise ValueError(f"rank {rank} is told {text}, but stage {number} is on rank {number % n} (stage s is on rank s mod {n})")
        if kind == "B" and (number, i) not in held:
            raise ValueError(f"rank {rank} is told {text} before {number}F{i}: the backward of a microbatch comes after its forward")
        if kind == "F":
            x = inputs[i] if number == 0 else receive(number - 1, 1000 * (number - 1) + i).requires_grad_()
            with span("forward", stage=number, microbatch=i):
                compute(1.0 / chunks)
                y = stages[number](x)
            if number == last:
                y = mean_square(y, targets[i]) / microbatches
                losses.append(y.detach())
            else:
                send(y.detach(), number + 1, 1000 * number + i)
            held[number, i] = x, y
        else:
            dy = None if number == last else receive(number + 1, 100_000 + 1000 * (number + 1) + i)
            x, y = held.pop((number, i))
            with span("backward", stage=number, microbatch=i):
                compute(1.0 / chunks)
                y.backward(dy)
            if number:
                send(x.grad, number - 1, 100_000 + 1000 * number + i)
    for work, _ in sends:
        work.wait()
    return [actions, sum(losses) if losses else None, [[p.grad for p in stage.parameters()] for stage in stages.values()]]


def _parsed(text: str) -> tuple[int, str, int]:
    """ "4F1" as (4, "F", 1)."""
    for kind in "FB":
        stage, found, i = str(text).partition(kind)
        if found and stage.isdigit() and i.isdigit():
            return int(stage), kind, int(i)
    raise ValueError(f"{text!r} is not an action: expected, for example, '4F1' or '4B1'")


# ---- cases ----


def batch(draw: Draw, microbatches: int) -> tuple[list[Tensor], list[Tensor]]:
    xs, targets = (draw.tensors(microbatches, ROWS, WIDTH, dtype=torch.float64) for _ in range(2))
    return xs, targets


def make_case(draw: Draw, p: int, m: int, chunks: int | None = None, split: bool = False) -> Case:
    seed = draw.integer(1, 900)
    xs, targets = batch(draw, m)
    stages = range(p * (chunks or 1))
    loss, gradients = one_process(seed, stages, xs, targets)
    by_rank = [[g for number in range(rank, len(stages), p) for g in gradients[number]] for rank in range(p)]
    _, last = one_process(seed, stages, xs[-1:], targets[-1:])
    facts = {"p": p, "m": m, "chunks": chunks or 1, "gradients": by_rank, "last": last, "activation": xs[0].nbytes}
    arguments = [(seed, xs if rank == 0 else None, targets if rank == p - 1 else None, m) for rank in range(p)]
    losses = [loss if rank == p - 1 else None for rank in range(p)]
    note = f"{m} microbatch{'es' * (m != 1)}"
    if chunks is not None:
        grouped = [[gradients[number] for number in range(rank, len(stages), p)] for rank in range(p)]
        expected: list[Any] = [[ANYTHING, losses[rank], grouped[rank]] for rank in range(p)]
        arguments = [(*given, chunks) for given in arguments]
        note += f", {chunks} chunks"
    elif split:
        weights = [[w.detach() - LEARNING_RATE * g for w, g in zip(stage_of(seed, r).parameters(), gradients[r])] for r in range(p)]
        expected = [[losses[rank], weights[rank]] for rank in range(p)]
    else:
        expected = [[losses[rank], gradients[rank]] for rank in range(p)]
    return Case(arguments, expected, note, facts, FREE)


def step_cases(draw: Draw) -> list[Case]:
    return [make_case(draw, p, m) for p, m in ((1, 2), (2, 1), (2, 3), (3, 2), (4, 6))]


def split_cases(draw: Draw) -> list[Case]:
    return [make_case(draw, p, m, split=True) for p, m in ((1, 2), (2, 4), (3, 3), (4, 6))]


def order_cases(draw: Draw) -> list[Case]:
    return [make_case(draw, p, m, chunks) for p, m, chunks in ((1, 2, 2), (2, 4, 1), (2, 2, 2), (2, 4, 3), (3, 6, 2), (4, 8, 2))]


def example(maker: Callable[..., Case], *size: Any, **kind: Any) -> Callable[[], Case]:
    return lambda: maker(Draw("example"), *size, **kind)


# ---- checks ----


def messages_of(case: Case) -> list[int]:
    """The bytes that each rank must send: an activation to the next stage and a gradient to the one before, for each microbatch."""
    p, each = case.facts["p"], case.facts["m"] * case.facts["activation"]
    return [each * ((rank < p - 1) + (rank > 0)) for rank in range(p)]


def messages_between_chunks(case: Case) -> list[int]:
    p, chunks, each = case.facts["p"], case.facts["chunks"], case.facts["m"] * case.facts["activation"]
    if p == 1:
        return [0]
    return [each * sum((s < p * chunks - 1) + (s > 0) for s in range(rank, p * chunks, p)) for rank in range(p)]


def in_flight(trial: Trial) -> list[int]:
    """By rank, the most microbatches (of each stage) that it held at once: begun, and their last gradient not finished."""
    peak = [0] * trial.world_size
    for rank in range(trial.world_size):
        changes = []
        last_half = "weight gradient" if trial.trace.spans("weight gradient") else "backward"
        for event in trial.trace.spans():
            if event.rank == rank and event.name in ("forward", last_half):
                changes.append((event.start, 1) if event.name == "forward" else (event.end, -1))
        held = 0
        for _, change in sorted(changes):
            held += change
            peak[rank] = max(peak[rank], held)
    return peak


def holds_at_most(limit: Callable[[Case, int], int], says: str) -> Check:
    def wrong(trial: Trial) -> str | None:
        for rank, held in enumerate(in_flight(trial)):
            if held > limit(trial.case, rank):
                return f"rank {rank} held {held} microbatches at once; {limit(trial.case, rank)} are enough"
        return None

    return Check("memory", says, wrong)


def slots(expected: Callable[[Case], float], says: str) -> Check:
    def wrong(trial: Trial) -> str | None:
        took, enough = trial.trace.makespan, expected(trial.case)
        return None if took <= enough + 1e-9 else f"took {took:g} slots; {enough:g} are enough"

    return Check("steps", says, wrong)


def two_halves(case: Case) -> float:
    return 2 * (case.facts["m"] + case.facts["p"] - 1)


def interleaved_slots(case: Case) -> float:
    p, m, v = case.facts["p"], case.facts["m"], case.facts["chunks"]
    return 2 * m + 2 * (p - 1) / v


def interleaved_peak(case: Case, rank: int) -> int:
    p, m, v = case.facts["p"], case.facts["m"], case.facts["chunks"]
    return min(m * v, (v - 1) * p + 2 * (p - rank - 1) + 1 if v > 1 else p - rank)


def zero_bubble_slots(case: Case) -> float:
    return schedule("zb-h1", stages=case.facts["p"], microbatches=case.facts["m"]).time().makespan


# ---- misconceptions ----


def returned(trial: Trial, rank: int) -> list[Any]:
    """The gradients that a rank returned, flat."""
    result = trial.results[rank]
    found = result[-1] if isinstance(result, list) else []
    return [g for part in found for g in (part if isinstance(part, list) else [part])]


def gradients_are(trial: Trial, expected: Callable[[int], list[Tensor]]) -> bool:
    """Whether every rank's gradients are these."""
    if trial.error is not None:
        return False
    return all(
        len(returned(trial, rank)) == len(expected(rank))
        and all(isinstance(g, Tensor) and close(g, e) for g, e in zip(returned(trial, rank), expected(rank)))
        for rank in range(trial.world_size)
    )


def every(trials: Sequence[Trial], where: Callable[[Trial], bool], what: Callable[[Trial], bool]) -> bool:
    """Whether there are trials `where`, none of them right, and all of them show `what`."""
    wrong = [trial for trial in failed(trials) if where(trial)]
    return bool(wrong) and all(what(trial) for trial in wrong)


def several(trial: Trial) -> bool:
    return trial.case.facts["m"] > 1


def scaled(trial: Trial) -> bool:
    m = trial.case.facts["m"]
    return gradients_are(trial, lambda rank: [g * m for g in trial.case.facts["gradients"][rank]])


def last_only(trial: Trial) -> bool:
    m, last = trial.case.facts["m"], trial.case.facts["last"]
    return any(gradients_are(trial, lambda rank, k=k: [g * k for g in last[rank]]) for k in (1.0, 1.0 / m))


def detached(trial: Trial) -> bool:
    if trial.error is not None:
        after_backward = any(span.rank == getattr(trial.error, "rank", None) for span in trial.trace.spans("backward"))
        return "does not require grad" in str(trial.error) or (after_backward and "NoneType" in str(trial.error))  # it sends x.grad
    without = [all(g is None or not g.any() for g in returned(trial, rank)) for rank in range(trial.world_size)]
    return any(without[:-1])


NO_AVERAGE = Misconception(
    "no 1/M",
    "The gradients are M times too large: the losses of the microbatches were added, and the loss of the batch is their mean.",
    lambda trials: every(trials, several, scaled),
)
LAST_ONLY = Misconception(
    "only the last microbatch's gradient",
    "The gradients are those of the last microbatch alone. The gradients of the other microbatches were lost.",
    lambda trials: every(trials, several, last_only),
)
DETACHED = Misconception(
    "graph detached",
    "Earlier stages get no gradient: the backward ends at the tensor that was received, and nothing goes back to the stage before.",
    lambda trials: every(trials, lambda trial: trial.world_size > 1, detached),
)


def peaks_beyond(trials: Sequence[Trial], held: Callable[[Case, int], int]) -> bool:
    """Whether each rank of each run with many microbatches held exactly so many, which is more than P − rank somewhere."""
    many = [t for t in trials if t.error is None and t.case.facts["m"] > t.world_size > 1]
    return bool(many) and all(in_flight(t) == [held(t.case, rank) for rank in range(t.world_size)] for t in many)


RENAMED = Misconception(
    "GPipe with a new name",
    "Every rank does all its forwards before its first backward. That is GPipe: it holds the activations of all M microbatches.",
    lambda trials: peaks_beyond(trials, lambda case, rank: case.facts["m"]),
)


def _warm_up_off(trials: Sequence[Trial]) -> bool:
    """One forward too many or too few before the first backward, on some rank that should have more than one."""
    many = [t for t in trials if t.error is None and t.case.facts["m"] > t.world_size > 1]
    return bool(many) and all(any(abs(_warm_up(t, rank) - (t.world_size - rank)) == 1 for rank in range(t.world_size)) for t in many)


def _warm_up(trial: Trial, rank: int) -> int:
    spans = [e for e in trial.trace.spans() if e.rank == rank and e.name in ("forward", "backward")]
    first = next((k for k, event in enumerate(spans) if event.name == "backward"), len(spans))
    return first


WARM_UP = Misconception(
    "warm-up off by one",
    "The warm-up has one forward too many or one too few. One too many holds another microbatch; one too few lets the next ranks wait.",
    _warm_up_off,
)


def _chunk_map(trials: Sequence[Trial]) -> bool:
    wrong = [t.error for t in trials if t.error is not None]
    return bool(wrong) and all("stage s is on rank s mod" in str(error) for error in wrong)


CHUNK_MAP = Misconception(
    "wrong chunk map",
    "A rank's order has stages of other ranks, such as the neighbours of its first. Stage s is on rank s mod P: the stages of a rank "
    "are P apart.",
    _chunk_map,
)
ALL_FORWARDS = Misconception(
    "GPipe with a new name",
    "Every rank does all its forwards before its first backward. The bubble is as short, but the activations of all microbatches are held.",
    lambda trials: not failed(trials) and all(max(in_flight(t)) == t.case.facts["m"] * t.case.facts["chunks"] for t in trials),
)


def _warm_up_of_one_chunk(trials: Sequence[Trial]) -> bool:
    """It waits for ever as soon as a rank has several chunks, and only then."""
    stuck = {t.case.facts["chunks"] > 1 for t in trials if isinstance(t.error, DeadlockError) or "comes after its forward" in str(t.error)}
    return stuck == {True} and not any(t.error for t in trials if t.case.facts["chunks"] == 1)


SHORT_WARM_UP = Misconception(
    "warm-up of one chunk",
    "The warm-up is that of plain 1F1B. With several chunks a backward is then due before the forward through the "
    "later chunks: the ranks wait.",
    _warm_up_of_one_chunk,
)


def _stepped_early(trials: Sequence[Trial]) -> bool:
    for trial in trials:
        for rank in range(trial.world_size):
            ends = {e.name: (e.start, e.seq) for e in trial.trace.spans() if e.rank == rank}  # the last of each name
            if "optimizer step" in ends and ends.get("weight gradient", (-1.0, 0)) > ends["optimizer step"]:
                return True
            done = sum(e.rank == rank and e.name == "weight gradient" for e in trial.trace.spans())
            if trial.error is None and "optimizer step" in ends and done < trial.case.facts["m"]:
                return True
    return False


EARLY_STEP = Misconception(
    "optimizer steps before W is done",
    "The optimizer steps while weight gradients are still missing. They are lost, or reach the weights only with the next step.",
    _stepped_early,
)


def _never_apart(trials: Sequence[Trial]) -> bool:
    """Whether every weight gradient comes right after its input gradient, on every rank of runs with several stages."""
    order = {
        (number, rank): [
            (e.name, (e.args or {}).get("microbatch")) for e in trial.trace.spans() if e.rank == rank and e.name != "optimizer step"
        ]
        for number, trial in enumerate(trials)
        if trial.world_size > 1 and trial.error is None
        for rank in range(trial.world_size)
    }
    return bool(order) and all(
        all(names[k - 1] == ("input gradient", i) for k, (name, i) in enumerate(names) if name == "weight gradient")
        for names in order.values()
    )


NOT_SPLIT = Misconception(
    "W right after B",
    "Each weight gradient runs right after its input gradient, so nothing is left to fill the bubble with.",
    _never_apart,
)

# ---- the exercises ----

HELD = Question(
    "held", "P = 4 stages, M = 6 microbatches: how many microbatches does rank 0 hold at once?",
    example(make_case, 4, 6), lambda trial: in_flight(trial)[0], "microbatches",
)  # fmt: skip
SLOTS = Question(
    "slots", "P = 4 stages, M = 6 microbatches: how many slots does the step take?", example(make_case, 4, 6),
    lambda trial: trial.trace.makespan, "slots",
)  # fmt: skip

EXERCISES = [
    Exercise(
        number="18",
        function="gpipe_step",
        title="GPipe",
        points=10,
        cases=step_cases,
        program=run_step,
        imports=AUTOGRAD,
        checks=(
            value("the loss and every gradient equal one process", parts=("the loss", "the gradients")),
            bytes_sent(messages_of, "M activations forward and M gradients back, and nothing else"),
            slots(two_halves, "2(M + P − 1) slots"),
            holds_at_most(lambda case, rank: case.facts["m"], "at most M microbatches in flight"),
        ),
        least_received=messages_of,
        misconceptions=(*MESSAGES, NO_AVERAGE, LAST_ONLY, DETACHED),
        questions=(SLOTS, HELD),
        hints=(
            "Write down what rank 1 of 3 does for one microbatch: what it receives, from whom, what it computes, what it sends. "
            "Then put a loop around it.",
            "A received activation is a leaf: x.requires_grad_() before stage(x). After y.backward(dy), x.grad is "
            "what the rank before waits for. "
            "Keep (x, y) of each microbatch until its backward.",
            "for i in range(M): x = inputs[i] or a received leaf; y = stage(x); send y.detach() on, or loss_fn(y, "
            "targets[i]) / M on the last rank. "
            "Then for i in range(M): dy = received, or None on the last rank; y.backward(dy); send x.grad back. Wait "
            "for the sends at the end.",
        ),
        picture="pipeline",
    ),
    Exercise(
        number="19",
        function="one_f_one_b_step",
        title="1F1B",
        points=10,
        cases=step_cases,
        program=run_step,
        imports=AUTOGRAD,
        checks=(
            value("the loss and every gradient equal one process", parts=("the loss", "the gradients")),
            bytes_sent(messages_of, "M activations forward and M gradients back, and nothing else"),
            slots(two_halves, "2(M + P − 1) slots"),
            holds_at_most(lambda case, rank: min(case.facts["m"], case.facts["p"] - rank), "at most P − rank microbatches in flight"),
        ),
        least_received=messages_of,
        misconceptions=(*MESSAGES, NO_AVERAGE, LAST_ONLY, DETACHED, RENAMED, WARM_UP),
        questions=(HELD, SLOTS),
        hints=(
            "Draw the last rank first: it can do the backward of a microbatch right after its forward. When can the rank before it?",
            "Rank r can do P − r forwards before the first gradient comes back to it. Each backward then frees the "
            "activations of one microbatch.",
            "warm_up = min(M, P − rank). Do that many forwards. Then for i in range(M): backward(i), and forward(i + "
            "warm_up) if there is one.",
        ),
        picture="pipeline",
    ),
    Exercise(
        number="20a",
        function="interleaved_schedule",
        title="Interleaved 1F1B",
        points=5,
        cases=order_cases,
        program=run_order,
        imports=AUTOGRAD,
        checks=(
            value("the order runs, and the loss and every gradient equal one process", parts=("the order", "the loss", "the gradients")),
            slots(interleaved_slots, "2M + 2(P − 1)/v slots"),
            holds_at_most(interleaved_peak, "few activations in flight"),
        ),
        least_received=messages_between_chunks,
        misconceptions=(CHUNK_MAP, SHORT_WARM_UP, ALL_FORWARDS),
        questions=(
            Question(
                "slots",
                "P = 4 ranks, M = 8 microbatches, v = 2 chunks: how many slots does the step take?",
                example(make_case, 4, 8, 2),
                lambda trial: trial.trace.makespan,
                "slots",
            ),
        ),
        hints=(
            "Number the forwards of a rank k = 0, 1, 2, … and find, for each k, which chunk and which microbatch it is.",
            "k // (P·v) counts groups of P microbatches; the rest, divided by P, is the chunk. For backwards, count "
            "the chunks from the last.",
            "Warm-up for v > 1: (v − 1)·P + 2·(P − rank − 1) + 1 forwards, for v = 1 P − rank; at most v·M. Then one "
            "backward and one forward in turn. "
            "Chunk c of a rank is stage c·P + rank.",
        ),
        picture="pipeline",
    ),
    Exercise(
        number="20b",
        function="zero_bubble_step",
        title="Zero bubble",
        points=5,
        cases=split_cases,
        program=run_split_step,
        imports=OPTIM,
        checks=(
            value("the loss, and every weight after the step, equal one process", parts=("the loss", "the weights")),
            bytes_sent(messages_of, "M activations forward and M gradients back, and nothing else"),
            slots(zero_bubble_slots, "3M + (P − 1) slots"),
            holds_at_most(lambda case, rank: case.facts["p"], "at most P microbatches in flight"),
        ),
        least_received=messages_of,
        misconceptions=(*MESSAGES, EARLY_STEP, NOT_SPLIT),
        questions=(
            Question(
                "slots",
                "P = 4 stages, M = 6 microbatches: how many slots does the step take?",
                example(make_case, 4, 6, split=True),
                lambda trial: trial.trace.makespan,
                "slots",
            ),
        ),
        hints=(
            "The stage before waits for dx only. Nobody waits for a weight gradient, until the optimizer steps.",
            "Begin as in 1F1B. On rank r, let weight_gradient run r microbatches behind input_gradient; the r that "
            "are left come at the end.",
            "for i in range(M): input_gradient(i); if i ≥ rank: weight_gradient(i − rank); if i + warm_up < M: forward(i + warm_up). "
            "Then the last weight gradients, then optimizer.step().",
        ),
        picture="pipeline",
    ),
]
