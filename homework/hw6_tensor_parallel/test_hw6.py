"""Grades homework 6. `pytest homework/hw6_tensor_parallel` runs it.

Each program below runs forward and backward on a rank, as spans of the record. What is expected comes from one process with the whole
weights, in float64. What the usual mistakes would give is computed here too, so that they can be named.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel101.grade.checks import MESSAGES, close, communicated, factor, failed, right, same, value
from parallel101.grade.exercise import ANYTHING, COLLECTIVES, P2P, Case, Check, Draw, Exercise, Misconception, Question, Trial
from parallel101.record.spans import compute, span, wait_span

NUMBER = 8  # bytes of a float64


# ---- what the programs share ----


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


def forward_backward(forward: Callable[[], Tensor], loss: Callable[[Tensor], Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, int]:
    """Run both, each in a span. Returns the result, and the bytes that autograd keeps for backward besides the weights.

    On the virtual clock only messages take time, so the spans are time in which the rank waits; the loss between them takes a second.
    """
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with wait_span("forward"), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = forward()
    with span("loss"):
        compute(1.0)
    with wait_span("backward"):
        loss(y).backward()
    for weight in weights:
        kept.pop(weight.untyped_storage().data_ptr(), None)
    return y.detach(), sum(kept.values())


def sent_in(trial: Trial, name: str) -> int:
    """Bytes that the busiest rank sent in the spans of this name."""
    spans = [event for event in trial.trace.events if event.kind == "span" and event.name == name]
    inside = [
        event
        for event in trial.trace.events
        if any(s.rank == event.rank and s.start <= event.start <= s.end for s in spans) and event.kind != "span"
    ]
    return max(communicated(Trial(trial.case, [], type(trial.trace)(inside, trial.world_size, trial.trace.backend))), default=0)


def sends_at_most(name: str, says: str) -> Check:
    """In the span of this name, no rank sends more than case.facts[name] bytes."""

    def wrong(trial: Trial) -> str | None:
        sent, most = sent_in(trial, name), trial.case.facts[name]
        return None if sent <= most + 64 else f"in {name}, a rank sent {sent} bytes; {most:g} are enough"

    return Check("bytes", says, wrong)


def keeps_at_most(says: str) -> Check:
    """Autograd keeps at most case.facts["kept"] bytes: the last part of each rank's result."""

    def wrong(trial: Trial) -> str | None:
        most = trial.case.facts["kept"]
        for rank, result in enumerate(trial.results):
            if not isinstance(result[-1], int) or result[-1] > most:
                return f"rank {rank} keeps {result[-1]} bytes of activations for backward; {most} are enough"
        return None

    return Check("memory", says, wrong)


def ring(nbytes: float, n: int, times: int = 1) -> int:
    """What a rank sends in an all-gather or reduce-scatter of so many bytes; an all-reduce is two times that."""
    return round(times * nbytes * (n - 1) / n)


def least_received(case: Case) -> list[int]:
    return [case.facts["least"] if case.world_size > 1 else 0] * case.world_size


# ---- what the misconceptions share ----

Seen = Callable[[Sequence[Trial]], bool]


def wrong_trials(trials: Sequence[Trial]) -> list[Trial]:
    """Those that ended with wrong values. A single rank can do no mistake that has to do with ranks."""
    return [trial for trial in trials if trial.error is None and not right(trial)]


def every_wrong(seen: Callable[[Trial], bool]) -> Seen:
    """Whether every wrong run shows this, and there is one."""
    return lambda trials: bool(wrong := wrong_trials(trials)) and all(seen(trial) for trial in wrong)


def is_close(found: Any, expected: Tensor) -> bool:
    alike = isinstance(found, Tensor) and found.shape == expected.shape
    return alike and (torch.equal(found, expected) or close(found, expected, 1e-8))  # equal: both may be infinite


def gives(part: int, fact: str) -> Seen:
    """Whether in every wrong run, part `part` of each rank's result is what `case.facts[fact]` says: by rank, the values of a mistake."""

    def seen(trial: Trial) -> bool:
        return all(same(result[part], mistaken) for result, mistaken in zip(trial.results, trial.case.facts[fact], strict=True))

    return every_wrong(seen)


def y_is_right(trials: Sequence[Trial]) -> bool:
    return all(same(found[0], expected[0]) for t in wrong_trials(trials) for found, expected in zip(t.results, t.case.expected))


def gives_one_of(part: int, fact: str) -> Seen:
    """The same where a mistake has several forms: each rank's value is in `case.facts[fact]`."""
    return every_wrong(lambda trial: all(any(is_close(r[part], mistaken) for mistaken in trial.case.facts[fact]) for r in trial.results))


def gradients_times(part: int, k: Callable[[int], float]) -> Seen:
    """Whether in every wrong run, the first gradient in part `part` is k(n) times the right one, on every rank."""

    def first(result: Any) -> Any:
        return result[0] if isinstance(result, list | tuple) and result else result

    def seen(trial: Trial) -> bool:
        pairs = [(first(found[part]), first(expected[part])) for found, expected in zip(trial.results, trial.case.expected)]
        factors = [factor(found, expected) for found, expected in pairs]
        return all(f is not None and abs(f - k(trial.world_size)) < 1e-6 for f in factors)

    return every_wrong(seen)


def costs(name: str, times: float) -> Seen:
    """Whether all values are right, and every run with messages sends about `times` as much as is enough in this span."""

    def seen(trials: Sequence[Trial]) -> bool:
        large = [trial for trial in trials if trial.world_size > 2]
        return bool(large) and not failed(trials) and all(sent_in(t, name) >= 0.9 * times * t.case.facts[name] for t in large)

    return seen


def n_times(part: int) -> Misconception:
    return Misconception(
        "gradient n times too large",
        "The gradient is n times the right one. Every rank has the same loss, which counts once, and a sum over the ranks counts it n "
        "times.",
        gradients_times(part, lambda n: n),
    )


def missing_dx(part: int) -> Misconception:
    return Misconception(
        "missing all-reduce of dX",
        "Each rank's gradient of x holds only what comes through its own block. x went into every rank's block, so these parts must be "
        "added.",
        gives(part, "parts of dx"),
    )


def output_not_summed(part: int) -> Misconception:
    return Misconception(
        "output never summed",
        "Each rank returns its own partial sum. The second matrix is cut by its inputs, so the outputs of all ranks must be added.",
        gives(part, "parts of y"),
    )


def bias_n_times(part: int) -> Misconception:
    return Misconception(
        "bias added n times",
        "Every rank adds the bias before the sum over the ranks, so the result holds it n times.",
        gives(part, "y with n biases"),
    )


GRAPH_CUT = Misconception(
    "graph cut by a message",
    "A message writes into a tensor that autograd does not follow. The result has no gradient, or it passes the layers before by.",
    lambda trials: (
        any("does not require grad" in str(trial.error) for trial in trials)
        or any(result[1] is None for trial in wrong_trials(trials) for result in trial.results)
    ),
)
WHOLE_ON_EVERY_RANK = Misconception(
    "whole layer on every rank",
    "Every rank holds the whole matrices and does all of the work. Nothing is cut, so n ranks need n times the memory.",
    every_wrong(
        lambda trial: all(
            isinstance(result[3], dict) and {name: p.numel() for name, p in result[3].items()} == trial.case.facts["whole"]
            for result in trial.results
        )
    ),
)

# ---- 15a: column, GELU, all-gather ----


def run_columns(function: Callable, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, c: Tensor) -> list[Any]:
    """Two layers. The loss of this rank is the sum of c · y."""
    weights = [leaf(tensor) for tensor in (w1, b1, w2, b2)]
    y, _ = forward_backward(lambda: function(function(x, *weights[:2]), *weights[2:]), lambda y: (y * c).sum(), weights)
    return [y, [weight.grad for weight in weights]]


Join = Callable[[list[Tensor]], list[Tensor]]  # from all ranks' gradients of a gathered tensor to the gradient of each rank's part


def columns_backward(join: Join, x: Tensor, weights: list[list[Tensor]], cs: list[Tensor]) -> list[list[Tensor]]:
    """Each rank's gradients of the two layers, if the backward of the all-gather is `join`."""

    def layer(x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        leaves = [leaf(tensor) for tensor in (x, w, b)]
        return torch.autograd.grad(F.gelu(F.linear(*leaves)), leaves, g)

    h = torch.cat([F.gelu(F.linear(x, w1, b1)) for w1, b1, _, _ in weights], 1)
    second = [layer(h, w2, b2, g) for (_, _, w2, b2), g in zip(weights, join(cs))]
    first = [layer(x, w1, b1, g) for (w1, b1, _, _), g in zip(weights, join([dx for dx, _, _ in second]))]
    return [[dw1, db1, dw2, db2] for (_, dw1, db1), (_, dw2, db2) in zip(first, second)]


def sum_then_cut(gs: list[Tensor]) -> list[Tensor]:
    return list(sum(gs).chunk(len(gs), 1))  # type: ignore[union-attr]


def own_cut(gs: list[Tensor]) -> list[Tensor]:
    return [g.chunk(len(gs), 1)[rank] for rank, g in enumerate(gs)]


def mean_then_cut(gs: list[Tensor]) -> list[Tensor]:
    return [g / len(gs) for g in sum_then_cut(gs)]


def column_case(draw: Draw, n: int, samples: int) -> Case:
    double = functools.partial(draw.tensor, dtype=torch.float64)
    inputs, hidden, outputs = 5, n * draw.integer(2, 3), n * draw.integer(1, 2)
    x, w1, b1, w2, b2 = double(samples, inputs), double(hidden, inputs), double(hidden), double(outputs, hidden), double(outputs)
    cs = [double(samples, outputs) for _ in range(n)]
    weights = [list(blocks) for blocks in zip(*(tensor.chunk(n) for tensor in (w1, b1, w2, b2)))]
    y = F.gelu(F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2))
    S = NUMBER * samples * (hidden + outputs)
    return Case(
        [(x, *weights[rank], cs[rank]) for rank in range(n)],
        [[y, gradients] for gradients in columns_backward(sum_then_cut, x, weights, cs)],
        note=f"{samples} samples, {inputs} → {hidden} → {outputs}",
        facts={
            "own": columns_backward(own_cut, x, weights, cs),
            "mean": columns_backward(mean_then_cut, x, weights, cs),
            "forward": ring(S, n),
            "backward": ring(S, n),
            "least": ring(S, n) + S // n,
        },
    )


COLUMN_LAYER = Exercise(
    number="15a",
    function="column_layer",
    title="The lecture's layer: column, GELU, all-gather",
    points=10,
    cases=lambda draw: [column_case(draw, n, samples) for n, samples in ((1, 3), (2, 4), (3, 2), (4, 5))],
    checks=(
        value("y and all gradients are those of one process", parts=("y", "the gradients of two layers")),
        sends_at_most("forward", "forward: one all-gather, (n − 1)/n·S bytes a rank"),
        sends_at_most("backward", "backward: one reduce-scatter, (n − 1)/n·S bytes a rank"),
    ),
    least_received=least_received,
    misconceptions=(
        *MESSAGES,
        GRAPH_CUT,
        Misconception(
            "slice of the gradient without the sum",
            "Each rank keeps its columns of its own gradient of y. But all ranks went on with these columns, each to its own loss, and "
            "the parts of the others are missing.",
            gives(1, "own"),
        ),
        Misconception(
            "mean for sum",
            "The gradient is divided by n. The loss is the sum of the ranks' losses, so their gradients are added.",
            gives(1, "mean"),
        ),
        Misconception(
            "all-reduce then slice",
            "The gradients are summed whole on every rank, and each rank then keeps its columns. The values are right, for twice the "
            "bytes: each rank receives sums that it throws away.",
            costs("backward", 2),
        ),
    ),
    hints=(
        "GELU acts on each number alone, so each rank may apply it before the all-gather. Autograd can do all of it but the all-gather.",
        "Write a torch.autograd.Function: forward gathers all ranks' columns. Its backward is the adjoint of an all-gather; see homework "
        "3.",
        "backward(ctx, g): cut g into n blocks of columns, make them contiguous, and reduce-scatter them. Rank r returns the sum of "
        "block r.",
    ),
    questions=(
        Question(
            "bytes",
            "Two layers, 5 → 12 → 8, on 4 ranks with 5 samples in float64. How many bytes does each rank send in backward?",
            lambda: next(case for seed in range(1000) if (case := column_case(Draw(str(seed)), 4, 5)).note.endswith("5 → 12 → 8")),
            lambda trial: sent_in(trial, "backward"),
            "bytes",
        ),
    ),
    program=run_columns,
    allowed=P2P | COLLECTIVES,
    picture="lanes",
)

# ---- 15b: MLP, column then row ----


def run_mlp(build: Callable, width: int, hidden: int, seed: int, x: Tensor, c: Tensor) -> list[Any]:
    """The loss, sum of c · y, is the same on every rank."""
    model = build(width, hidden, seed)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    x = leaf(x)
    y, kept = forward_backward(lambda: model(x), lambda y: (y * c).sum(), list(model.parameters()))
    return [y, x.grad, {name: p.grad for name, p in model.named_parameters()}, weights, kept]


MLP_PARTS = ("y", "the gradient of x", "the gradients of the weights", "the weights")


def draw_weights(width: int, hidden: int, seed: int) -> list[Tensor]:
    """As in hw6.py."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (hidden, width), (hidden,), (width, hidden), (width,)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5 for shape in shapes]


def mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)


def gradients_of(loss: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
    leaves = [leaf(tensor) for tensor in tensors]
    return list(torch.autograd.grad(loss(*leaves), leaves))


def cut_mlp(tensors: Sequence[Tensor], n: int) -> list[list[Tensor]]:
    """Each rank's w1, b1 and w2."""
    w1, b1, w2 = tensors
    return [list(blocks) for blocks in zip(w1.tensor_split(n), b1.tensor_split(n), w2.tensor_split(n, 1))]


def gelu_of_partial_sums(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, n: int) -> list[Tensor]:
    """The first layer cut by its inputs, with GELU on each rank's partial sum; the biases on every rank, on one rank, or in parts."""
    partial = [F.linear(mine, block) for mine, block in zip(x.tensor_split(n, 1), w1.tensor_split(n, 1))]
    shares = [[b1] * n, [b1, *[torch.zeros_like(b1)] * (n - 1)], [b1 / n] * n]
    sums = [F.linear(sum(F.gelu(z + b) for z, b in zip(partial, bias)), w2) for bias in shares]  # type: ignore[arg-type]
    after = F.linear(F.gelu(sum(partial)), w2)  # type: ignore[arg-type]
    return [total + k * b2 for total in (*sums, after) for k in (1, n)]


def mlp_case(draw: Draw, n: int, samples: int, width: int, hidden: int) -> Case:
    seed = draw.integer(1, 10**6)
    x, c = (draw.tensor(samples, width, dtype=torch.float64) for _ in range(2))
    whole = draw_weights(width, hidden, seed)
    y = mlp(x, *whole)
    dx, *gradients, db2 = gradients_of(lambda *tensors: (mlp(*tensors) * c).sum(), x, *whole)
    blocks = cut_mlp(whole[:3], n)
    zero = torch.zeros_like(whole[3])
    S, names = NUMBER * samples * width, ("w1", "b1", "w2", "b2")
    return Case(
        [(width, hidden, seed, x, c)] * n,
        [
            [y, dx, dict(zip(names, (*mine, db2))), dict(zip(names, (*block, whole[3]))), ANYTHING]
            for mine, block in zip(cut_mlp(gradients, n), blocks)
        ],
        note=f"{samples} samples, {width} → {hidden} → {width}",
        facts={
            "parts of y": [mlp(x, *block, whole[3]) for block in blocks],
            "whole": {name: p.numel() for name, p in zip(names, whole)},
            "parts of dx": [gradients_of(lambda x, block=block: (mlp(x, *block, zero) * c).sum(), x)[0] for block in blocks],
            "y with n biases": [y + (n - 1) * whole[3]] * n,
            "gelu of partial sums": gelu_of_partial_sums(x, *whole, n),
            "forward": ring(S, n, 2),
            "backward": ring(S, n, 2),
            "least": ring(S, n, 2),
            "kept": NUMBER * samples * (2 * width + 3 * math.ceil(hidden / n)) + 256,
        },
    )


def same_shards(trials: Sequence[Trial]) -> bool:
    """Whether the ranks hold the same block, where the blocks should differ."""
    several = [trial.results for trial in wrong_trials(trials) if trial.world_size > 1]
    return any(
        isinstance(results[0][3], dict)
        and any(same(results[0][3].get(name), results[1][3].get(name)) and name in results[0][3] for name in ("w1", "w2"))
        for results in several
    )


PARALLEL_MLP = Exercise(
    number="15b",
    function="ParallelMLP",
    title="MLP: column, then row",
    points=10,
    cases=lambda draw: [mlp_case(draw, n, *sizes) for n, sizes in ((1, (3, 6, 8)), (2, (4, 6, 11)), (3, (2, 7, 13)), (4, (5, 8, 32)))],
    checks=(
        value("y, the ranks' weights and all gradients are those of one process", parts=MLP_PARTS),
        sends_at_most("forward", "forward: one all-reduce, 2(n − 1)/n·S bytes a rank"),
        sends_at_most("backward", "backward: one all-reduce, 2(n − 1)/n·S bytes a rank"),
        keeps_at_most("each rank keeps hidden / n features for backward"),
    ),
    least_received=least_received,
    misconceptions=(
        *MESSAGES,
        GRAPH_CUT,
        WHOLE_ON_EVERY_RANK,
        Misconception(
            "GELU on partial sums",
            "GELU is applied before the sum over the ranks is complete. GELU of a sum is not the sum of the GELUs.",
            gives_one_of(0, "gelu of partial sums"),
        ),
        Misconception(
            "same seed, same shard",
            "Every rank draws its block with the same seed, so all ranks hold the same block. The joined matrix repeats it n times.",
            same_shards,
        ),
        bias_n_times(0),
        output_not_summed(0),
        missing_dx(1),
        n_times(1),
    ),
    hints=(
        "After the first layer, a rank has some of the hidden features. Which columns of W2 do they need? What is missing from y then?",
        "Two autograd functions: one copies x into the ranks' work (its backward is an all-reduce), the other sums the partial outputs "
        "(its backward passes the gradient on). Add b2 after the sum.",
        "Draw the whole matrices and keep one block: w1.tensor_split(n)[rank], w2.tensor_split(n, 1)[rank]. "
        "y = SumOfRanks.apply(F.linear(F.gelu(F.linear(CopyToRanks.apply(x), self.w1, self.b1)), self.w2)) + self.b2.",
    ),
    questions=(
        Question(
            "bytes",
            "A batch of 5 samples goes 8 → 32 → 8 features in float64, on 4 ranks. How many bytes does each rank send in forward?",
            lambda: mlp_case(Draw("question"), 4, 5, 8, 32),
            lambda trial: sent_in(trial, "forward"),
            "bytes",
        ),
    ),
    program=run_mlp,
    allowed=P2P | COLLECTIVES,
    picture="lanes",
)

# ---- 16: attention ----


def run_attention(build: Callable, qkv: Tensor, out: Tensor, heads: int, x: Tensor, c: Tensor) -> list[Any]:
    model = build(qkv, out, heads)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    x = leaf(x)
    y, kept = forward_backward(lambda: model(x), lambda y: (y * c).sum(), list(model.parameters()))
    return [y, x.grad, {name: p.grad for name, p in model.named_parameters()}, weights, kept]


def attention(x: Tensor, qkv: Tensor, out: Tensor, heads: int) -> Tensor:
    """As in hw6.py."""
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(0, 1) for t in (x @ qkv.T).chunk(3, dim=-1))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.transpose(0, 1).flatten(1) @ out.T


def cut_attention(qkv: Tensor, out: Tensor, n: int) -> list[tuple[Tensor, Tensor]]:
    thirds = [part.chunk(n) for part in qkv.chunk(3)]
    return [(torch.cat(blocks), columns) for blocks, columns in zip(zip(*thirds), out.chunk(n, 1))]


def attention_case(draw: Draw, n: int, time: int, heads: int, d: int) -> Case:
    double = functools.partial(draw.tensor, dtype=torch.float64)
    width = heads * d
    x, c, qkv, out = double(time, width), double(time, width), double(3 * width, width) / 2, double(width, width)
    y = attention(x, qkv, out, heads)
    dx, dqkv, dout = gradients_of(lambda x, qkv, out: (attention(x, qkv, out, heads) * c).sum(), x, qkv, out)
    blocks = cut_attention(qkv, out, n)
    contiguous = [attention(x, rows, columns, heads // n) for rows, columns in zip(qkv.chunk(n), out.chunk(n, 1))]
    S = NUMBER * time * width
    return Case(
        [(qkv, out, heads, x, c)] * n,
        [
            [y, dx, {"qkv": g, "out": h}, {"qkv": rows, "out": columns}, ANYTHING]
            for (g, h), (rows, columns) in zip(cut_attention(dqkv, dout, n), blocks)
        ],
        note=f"{time} positions, {heads} heads of {d}",
        facts={
            "parts of y": [attention(x, *block, heads // n) for block in blocks],
            "whole": {"qkv": qkv.numel(), "out": out.numel()},
            "parts of dx": [gradients_of(lambda x, b=b: (attention(x, *b, heads // n) * c).sum(), x)[0] for b in blocks],
            "contiguous": [sum(contiguous)],
            "forward": ring(S, n, 2),
            "backward": ring(S, n, 2),
            "least": ring(S, n, 2),
            "kept": NUMBER * (time * (2 * width + 8 * width // n) + 3 * time * time * heads // n) + 256,
        },
    )


PARALLEL_ATTENTION = Exercise(
    number="16a",
    function="ParallelAttention",
    title="Attention, cut by heads",
    points=10,
    cases=lambda draw: [attention_case(draw, n, *sizes) for n, sizes in ((1, (3, 2, 2)), (2, (4, 4, 3)), (3, (5, 6, 2)), (4, (3, 8, 2)))],
    checks=(
        value("y, the ranks' weights and all gradients are those of one process", parts=MLP_PARTS),
        sends_at_most("forward", "forward: one all-reduce, 2(n − 1)/n·S bytes a rank"),
        sends_at_most("backward", "backward: one all-reduce, 2(n − 1)/n·S bytes a rank"),
        keeps_at_most("each rank keeps the activations of heads / n heads for backward"),
    ),
    least_received=least_received,
    misconceptions=(
        *MESSAGES,
        GRAPH_CUT,
        WHOLE_ON_EVERY_RANK,
        Misconception(
            "fused QKV cut contiguously",
            "The fused matrix is cut into n equal pieces from top to bottom. So the first ranks get queries only, and the last ones "
            "values only. Each rank needs the rows of its own heads in all three parts.",
            gives_one_of(0, "contiguous"),
        ),
        output_not_summed(0),
        missing_dx(1),
        n_times(1),
        Misconception(
            "an all-reduce each for query, key and value",
            "The gradient of x is all-reduced three times, once for each of query, key and value. On each rank their sum needs no "
            "message, so one all-reduce of this sum is enough.",
            costs("backward", 3),
        ),
    ),
    hints=(
        "No head looks at another head. So a rank that has all rows of a head, in queries, keys and values, needs no message to attend.",
        "It is the same pair as the MLP: qkv is cut by its outputs, at the borders of heads, and out by its inputs. Cut each third of "
        "qkv alike.",
        "qkv: torch.cat([part.chunk(n)[rank] for part in qkv.chunk(3)]); out: out.chunk(n, 1)[rank]. In forward: "
        "SumOfRanks.apply(attention(CopyToRanks.apply(x), self.qkv, self.out, heads // n)).",
    ),
    questions=(
        Question(
            "bytes",
            "3 positions, 8 heads of 2 features, in float64 on 4 ranks. How many bytes does each rank send in backward?",
            lambda: attention_case(Draw("question"), 4, 3, 8, 2),
            lambda trial: sent_in(trial, "backward"),
            "bytes",
        ),
    ),
    program=run_attention,
    allowed=P2P | COLLECTIVES,
    picture="lanes",
)

# ---- 16: the vocabulary ----


def run_vocabulary_loss(function: Callable, logits: Tensor, targets: Tensor, vocabulary: int) -> list[Any]:
    logits = leaf(logits)
    loss, kept = forward_backward(lambda: function(logits, targets, vocabulary), lambda loss: loss, [])
    return [loss, logits.grad, kept]


def vocabulary_case(draw: Draw, n: int, vocabulary: int, scale: float = 3.0, positions: int = 6) -> Case:
    logits = scale * draw.tensor(positions, vocabulary, dtype=torch.float64)
    targets = torch.tensor([draw.integer(0, vocabulary - 1) for _ in range(positions)])
    (gradient,) = gradients_of(lambda logits: F.cross_entropy(logits, targets), logits)
    blocks = logits.tensor_split(n, 1)
    numbers = NUMBER * positions
    return Case(
        [(block, targets, vocabulary) for block in blocks],
        [[F.cross_entropy(logits, targets), block, ANYTHING] for block in gradient.tensor_split(n, 1)],
        note=f"{positions} positions, {vocabulary} tokens" + (", large logits" if scale > 100 else ""),
        facts={
            **vocabulary_mistakes(logits, targets, n),
            "large": scale > 100,
            "forward": ring(numbers, n, 8),
            "gathered": ring(numbers * vocabulary, n),
            "backward": 0,
            "least": ring(numbers, n, 2),
            "kept": int(NUMBER * positions * (2.2 * math.ceil(vocabulary / n) + 12)),
        },
    )


def vocabulary_mistakes(logits: Tensor, targets: Tensor, n: int) -> dict[str, list[Tensor]]:
    """The losses that usual mistakes give. m: each rank's own maximum, s: its sum of exponentials, t: the target's logit."""
    blocks = logits.tensor_split(n, 1)
    m = [block.amax(1) for block in blocks]
    s = [(block - largest[:, None]).exp().sum(1) for block, largest in zip(blocks, m)]
    total = torch.stack(s).sum(0)
    t = logits.gather(1, targets[:, None])[:, 0]
    owners = torch.cat([torch.full((block.shape[1],), rank) for rank, block in enumerate(blocks)])[targets]
    own_m = torch.stack(m).gather(0, owners[None])[0]
    shifted_wrongly = torch.zeros_like(t)
    for rank, block in enumerate(blocks):
        column = targets - rank * block.shape[1]
        here = (column >= 0) & (column < block.shape[1])
        shifted_wrongly += block.gather(1, (column * here)[:, None])[:, 0] * here
    largest = logits.amax(1)
    hits = sum((((c := targets - r * b.shape[1]) >= 0) & (c < b.shape[1])).to(t.dtype) for r, b in enumerate(blocks))
    log_total = logits.logsumexp(1)
    return {
        "local maximum": [(total.log() + k - t).mean() for k in (own_m, largest, 0 * t, *m)],
        "local sum": [(one.log() + k - t).mean() for one, own in zip(s, m) for k in (own, largest, own_m)]
        + [(block - largest[:, None]).exp().sum(1).log().add(largest - t).mean() for block in blocks],
        "equal blocks": [(log_total - shifted_wrongly).mean(), (log_total - largest - shifted_wrongly + hits * largest).mean()],
    }


def no_maximum(trials: Sequence[Trial]) -> bool:
    """Whether only large logits go wrong, with a loss that is infinite or no number."""
    wrong = wrong_trials(trials)
    return bool(wrong) and all(
        trial.case.facts["large"] and all(isinstance(r[0], Tensor) and not bool(r[0].isfinite().all()) for r in trial.results)
        for trial in wrong
    )


def logits_gathered(trials: Sequence[Trial]) -> bool:
    large = [trial for trial in trials if trial.world_size > 1]
    return bool(large) and not failed(trials) and all(sent_in(t, "forward") >= 0.9 * t.case.facts["gathered"] for t in large)


VOCABULARY_LOSS = Exercise(
    number="16b",
    function="vocabulary_loss",
    title="Cross-entropy of logits that are cut along the vocabulary",
    points=10,
    cases=lambda draw: [
        *(vocabulary_case(draw, n, vocabulary) for n, vocabulary in ((1, 40), (2, 81), (3, 80), (4, 90))),
        vocabulary_case(draw, 3, 82, scale=1000.0),
    ],
    checks=(
        value("the loss and the gradient of the logits are those of one process", parts=("the loss", "the gradient of the logits")),
        sends_at_most("forward", "at most four all-reduces of one number for each position"),
        sends_at_most("backward", "backward sends nothing"),
        keeps_at_most("no rank keeps the logits of other ranks"),
    ),
    least_received=least_received,
    misconceptions=(
        *MESSAGES,
        GRAPH_CUT,
        Misconception(
            "logits gathered",
            "All logits travel to every rank. The values are right, but a rank receives a number for every position and every token, "
            "where a few numbers for each position are enough.",
            logits_gathered,
        ),
        Misconception(
            "no maximum subtracted",
            "exp of a large logit is infinite. The loss is right for small logits only.",
            no_maximum,
        ),
        Misconception(
            "blocks taken as equally wide",
            "A rank takes its own width times its rank as its first token. Where n does not divide the vocabulary, the blocks before "
            "differ in width.",
            gives_one_of(0, "equal blocks"),
        ),
        Misconception(
            "softmax maximum kept local",
            "Each rank subtracts the maximum of its own block, and the sums of exponentials are then added. They have different factors, "
            "so their sum means nothing.",
            gives_one_of(0, "local maximum"),
        ),
        Misconception(
            "sum of exponentials kept local",
            "Each rank divides by the sum over its own tokens. Softmax divides by the sum over all tokens.",
            gives_one_of(0, "local sum"),
        ),
        n_times(1),
    ),
    hints=(
        "The loss of a position is log Σ exp(logit) − (logit of the target). Both terms can be put together from a number that each rank "
        "knows.",
        "First all-reduce the largest logit of each position (it needs no gradient). Then sum two numbers over the ranks: Σ exp(logit − "
        "max), and the target's logit − max, which is 0 on ranks that don't have the target.",
        "The first token of this rank is the sum of the widths before: sum(len(t) for t in "
        "torch.arange(vocabulary).tensor_split(n)[:rank]). The sum over ranks passes its gradient on unchanged (SumOfRanks). loss = "
        "(total.log() − chosen).mean().",
    ),
    questions=(
        Question(
            "bytes",
            "6 positions and 90 tokens in float64 on 4 ranks. How many bytes does each rank send in forward?",
            lambda: vocabulary_case(Draw("question"), 4, 90),
            lambda trial: sent_in(trial, "forward"),
            "bytes",
        ),
    ),
    program=run_vocabulary_loss,
    allowed=P2P | COLLECTIVES,
    picture="lanes",
)

# ---- 17: sequence parallel ----


def run_block(function: Callable, x: Tensor, *rest: Tensor) -> list[Any]:
    """The loss is the sum of c · y over this rank's positions; c comes last."""
    *weights, c = rest
    leaves = [leaf(weight) for weight in weights]
    x = leaf(x)
    y, kept = forward_backward(lambda: function(x, *leaves), lambda y: (y * c).sum(), leaves)
    gradients = [weight.grad for weight in leaves]
    return [y, x.grad, gradients[:2], gradients[2:5], gradients[5], kept]


def block_of(x: Tensor, norm_weight: Tensor, norm_bias: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return x + mlp(F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias), w1, b1, w2, b2)


def block_case(draw: Draw, n: int, positions: int, width: int, hidden: int) -> Case:
    """positions: of each rank."""
    double = functools.partial(draw.tensor, dtype=torch.float64)
    time = n * positions
    x, c = double(time, width), double(time, width)
    norm = [double(width), double(width)]
    w1, b1, w2, b2 = double(n * hidden, width), double(n * hidden), double(width, n * hidden), double(width)
    tensors = (x, *norm, w1, b1, w2, b2)
    y = block_of(*tensors)
    dx, *dnorm, dw1, db1, dw2, db2 = gradients_of(lambda *t: (block_of(*t) * c).sum(), *tensors)
    blocks, gradient_blocks = cut_mlp((w1, b1, w2), n), cut_mlp((dw1, db1, dw2), n)
    xs, ys, dxs, cs = (whole.chunk(n) for whole in (x, y, dx, c))

    normed = F.layer_norm(x, (width,), *norm)
    (dnormed,) = gradients_of(lambda normed: (mlp(normed, w1, b1, w2, b2) * c).sum(), normed)

    def norm_parts(rank: int) -> list[Tensor]:
        """What reaches the norm's weights from this rank's positions."""
        return gradients_of(lambda a, b: (F.layer_norm(xs[rank], (width,), a, b) * dnormed.chunk(n)[rank]).sum(), *norm)

    def dx_of_own(rank: int) -> Tensor:
        """The gradient of this rank's x if its MLP's part of dX is cut, and not summed over the ranks."""
        (part,) = gradients_of(lambda normed: (mlp(normed, *blocks[rank], 0 * b2) * c).sum(), normed)
        return gradients_of(lambda x: (x * cs[rank] + F.layer_norm(x, (width,), *norm) * part.chunk(n)[rank]).sum(), xs[rank])[0]

    S, small = NUMBER * time * width, NUMBER * 3 * width
    return Case(
        [(xs[rank], *norm, *blocks[rank], b2, cs[rank]) for rank in range(n)],
        [[ys[rank], dxs[rank], dnorm, gradient_blocks[rank], db2, ANYTHING] for rank in range(n)],
        note=f"{time} positions, {width} → {n * hidden} → {width}",
        facts={
            "parts of norm": [norm_parts(rank) for rank in range(n)],
            "parts of db2": [part.sum(0) for part in cs],
            "dx without sum": [dx_of_own(rank) for rank in range(n)],
            "y with n biases": [part + (n - 1) * b2 for part in ys],
            "forward": ring(S, n, 2),
            "backward": ring(S, n, 3) + ring(small, n, 2),
            "least": ring(S, n, 3),
            "kept": NUMBER * time * (width + 3 * width // n + 2 * hidden) + 256,
        },
    )


SEQUENCE_PARALLEL = Exercise(
    number="17",
    function="sequence_parallel_mlp",
    title="Sequence parallel: the norm on its own positions",
    points=10,
    cases=lambda draw: [block_case(draw, n, *sizes) for n, sizes in ((1, (3, 6, 8)), (2, (2, 6, 5)), (3, (1, 5, 4)), (4, (3, 8, 4)))],
    checks=(
        value(
            "y and all gradients are those of one process",
            parts=(
                "y",
                "the gradient of x",
                "the gradients of the norm's weight and bias",
                "the gradients of w1, b1 and w2",
                "the gradient of b2",
            ),
        ),
        sends_at_most("forward", "forward: as one all-reduce, 2(n − 1)/n·S bytes a rank"),
        sends_at_most("backward", "backward: the same, besides the norm's and b2's gradients (or gathering once more)"),
        keeps_at_most("a rank keeps time / n positions, besides the gathered input of w1"),
    ),
    least_received=least_received,
    misconceptions=(
        *MESSAGES,
        GRAPH_CUT,
        bias_n_times(0),
        Misconception(
            "slice of the gradient without the sum",
            "The backward of the all-gather keeps this rank's positions of its own gradient. Every rank used these positions with its "
            "own block of the MLP, and the parts of the others are missing.",
            lambda trials: gives(1, "dx without sum")(trials) and y_is_right(trials),
        ),
        Misconception(
            "norm's gradients never reduced",
            "Each rank has the gradient of the norm's weights from its own positions alone. Their gradient is the sum over all "
            "positions. Without it the ranks' norms drift apart.",
            gives(2, "parts of norm"),
        ),
        Misconception(
            "bias's gradient never reduced",
            "b2 is added to this rank's positions alone, so its gradient on this rank is a part. The parts of all ranks must be added.",
            lambda trials: gives(4, "parts of db2")(trials) and y_is_right(trials),
        ),
        Misconception(
            "mean for sum",
            "A gradient is divided by n. The loss is the sum over all positions, so the ranks' parts are added.",
            lambda trials: any(gradients_times(part, lambda n: 1 / n)(trials) for part in (1, 2, 4)),
        ),
        Misconception(
            "gradient n times too large",
            "A gradient is n times the right one: parts that are the same on all ranks are added, or the whole sum is added again.",
            lambda trials: any(gradients_times(part, lambda n: n)(trials) for part in (1, 2, 4)),
        ),
        Misconception(
            "norm of the whole sequence",
            "The positions of all ranks are gathered before the norm, so every rank keeps and normalizes all of them. The norm acts on "
            "each position alone: gather after it.",
            lambda trials: bool(trials) and not failed(trials) and any(keeps_at_most("").wrong(trial) for trial in trials),
        ),
        Misconception(
            "all-reduce then slice",
            "The output is summed whole on every rank, and then each rank keeps its positions. The values are right, for more bytes than a "
            "reduce-scatter sends.",
            costs("forward", 1.5),
        ),
    ),
    hints=(
        "An all-reduce is a reduce-scatter and then an all-gather. The norm acts on each position alone, so it fits between the two.",
        "Two autograd functions: all-gather along time (backward: reduce-scatter), and reduce-scatter along time (backward: all-gather). "
        "Then ask for each weight: on how many positions does this rank use it?",
        "norm_weight, norm_bias and b2 see this rank's positions only: pass each through a function that returns it in forward and all-"
        "reduces its gradient in backward (CopyToRanks of 15b).",
    ),
    questions=(
        Question(
            "bytes",
            "12 positions, 8 → 16 → 8 features, in float64 on 4 ranks. How many bytes does each rank send in forward?",
            lambda: block_case(Draw("question"), 4, 3, 8, 4),
            lambda trial: sent_in(trial, "forward"),
            "bytes",
        ),
    ),
    program=run_block,
    allowed=P2P | COLLECTIVES,
    picture="lanes",
)

EXERCISES = [COLUMN_LAYER, PARALLEL_MLP, PARALLEL_ATTENTION, VOCABULARY_LOSS, SEQUENCE_PARALLEL]
