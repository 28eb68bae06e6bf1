"""Exercise 23: gradients and their norm on a mesh of two and three axes.

    rank = (dp · cp ranks + cp) · tp ranks + tp            the last axis runs fastest

Each rank returns the gradients of its first backward before any message ("local"). So a sum over
wrong ranks shows in its coefficients: found = Σ cᵣ · local of rank r. Calls from the exercise's own
program send activations, and don't count.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parallel101 import Network
from parallel101.laboratory.exercises.training_exercises import (
    BACKWARD,
    FORWARD,
    ITEM,
    NEVER_REDUCED,
    SGD,
    added_to_the_last,
    alike,
    all_reduce_bytes,
    backward_takes,
    equals_one_process,
    measured,
    recorded,
    scale,
)
from parallel101.laboratory.exercises.wrong_values import Seen
from parallel101.laboratory.grade.compared_values import close, difference, weights
from parallel101.laboratory.grade.exercise import (
    ANYTHING,
    COLLECTIVES,
    P2P,
    Case,
    Check,
    Draw,
    Exercise,
    Misconception,
    Trial,
)
from parallel101.laboratory.grade.exercise_checks import (
    MESSAGES,
    all_show,
    ask_sent,
    at_most,
    communicated,
    ended,
    on_ranks,
)
from parallel101.laboratory.record.events import Event
from parallel101.spans import compute, span

WIDTH, HIDDEN, SAMPLES, TIME, STEPS = 10, 12, 12, 8, 2


AXES = ("dp", "cp", "tp")
CUT = {"first": 1, "second": 0}  # the parameters that are cut along tp, each along this dimension
PARTIAL = ("norm.weight", "norm.bias")  # whose gradients are partial along tp
SMALL = 128  # bytes a step: norms and counts


def coordinates(sizes: dict[str, int], rank: int) -> dict[str, int]:
    """Return the position of a rank along each axis."""
    position = torch.unravel_index(torch.tensor(rank), [sizes[axis] for axis in AXES])
    return dict(zip(AXES, map(int, position)))


def axes_between(sizes: dict[str, int], ranks: Iterable[int]) -> set[str]:
    """Return the axes along which these ranks differ."""
    positions = [coordinates(sizes, rank) for rank in ranks]
    return {axis for axis in AXES if len({position[axis] for position in positions}) > 1}


def sharing(sizes: dict[str, int], rank: int, axes: Iterable[str]) -> set[int]:
    """Return the ranks that differ from this one along these axes only."""
    world = range(math.prod(sizes.values()))
    return {other for other in world if axes_between(sizes, (rank, other)) <= {*axes}}


# ---- the model: a layer norm, sequence parallel; an MLP, tensor parallel; a mean over time ----


class Gathered(torch.autograd.Function):
    """All-gather along the time; backward, reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        parts = [part.contiguous() for part in gradients[0].chunk(ctx.group.size(), 1)]
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts, group=ctx.group)
        return mine, None


class Summed(torch.autograd.Function):
    """All-reduce forward, and backward too if each rank's loss counts on its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, backward: bool) -> Tensor:
        ctx.group = group if backward else None
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        total = gradients[0].contiguous().clone()
        if ctx.group is not None:
            dist.all_reduce(total, group=ctx.group)
        return total, None, None


class Block(nn.Module):
    """One rank's part of the model, or the whole of it if there are no groups."""

    def __init__(self, parameters: dict[str, Tensor], groups: dict[str, Any]):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.first, self.second, self.bias = (
            nn.Parameter(torch.empty_like(parameters[name])) for name in ("first", "second", "bias")
        )
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.copy_(parameters[name])
        self.tp, self.cp = groups.get("tp"), groups.get("cp")
        self.seen: list[Tensor] = []  # a feature of each sample and time that went in

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x[..., 0].detach().clone())
        with span("forward"):
            compute(FORWARD)
        if self.tp is None:
            h = torch.tanh(self.norm(x) @ self.first) @ self.second
        else:
            part = x.tensor_split(self.tp.size(), 1)[self.tp.rank()]
            h = Gathered.apply(self.norm(part), self.tp)
            h = Summed.apply(torch.tanh(h @ self.first) @ self.second, self.tp, False)
        y = x + h + self.bias
        mean = y.mean(1, keepdim=True)
        if self.cp is not None:
            mean = Summed.apply(mean, self.cp, True) / self.cp.size()
        return backward_takes(BACKWARD, y + mean)


def groups_of(sizes: dict[str, int]) -> dict[str, Any]:
    """This rank's groups along tp and cp, for the activations."""
    found = {}
    for axis in (axis for axis in ("cp", "tp") if sizes[axis] > 1):
        rows = (sharing(sizes, rank, [axis]) for rank in range(math.prod(sizes.values())))
        for ranks in sorted({tuple(sorted(row)) for row in rows}):
            group = dist.new_group(list(ranks))
            if dist.get_rank() in ranks:
                found[axis] = group
    return found


def train(
    function,
    sizes: dict[str, int],
    parameters: dict[str, Tensor],
    inputs: Tensor,
    targets: Tensor,
    max_norm: float,
) -> dict[str, Any]:
    """What each rank runs. inputs: (steps, samples, time, features)."""
    model = Block(parameters, groups_of(sizes))
    local: dict[str, Tensor] = {}  # the gradients of the first step, before any message

    def ready(name: str) -> Callable[[Tensor], None]:
        def keep(p: Tensor) -> None:
            if not optimizer.steps and p.grad is not None:
                local[name] = p.grad.clone()

        return keep

    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(ready(name))
    optimizer = SGD(model.parameters())
    batches = list(zip(inputs, targets))
    norms = function(
        model, F.mse_loss, optimizer, batches, dict(sizes), set(CUT), set(PARTIAL), max_norm
    )
    if isinstance(norms, list | tuple):
        norms = [float(norm) for norm in norms]
    return {**recorded(model, optimizer), "norms": norms, "local": local, "seen": model.seen}


def train_whole(model, loss_fn, optimizer, batches, sizes, cut, partial, max_norm) -> list[float]:
    """One process."""
    norms = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_fn(model(inputs), targets).backward()
        norms.append(math.hypot(*(float(p.grad.norm()) for p in model.parameters())))
        for p in model.parameters():
            p.grad *= min(1.0, max_norm / norms[-1])
        optimizer.step()
    return norms


# ---- cases ----


def part_of(named: dict[str, Tensor], sizes: dict[str, int], rank: int) -> dict[str, Tensor]:
    """This rank's part of the parameters, or of their gradients."""
    tp = coordinates(sizes, rank)["tp"]
    return {
        name: value.chunk(sizes["tp"], CUT[name])[tp].clone() if name in CUT else value
        for name, value in named.items()
    }


def mesh_case(draw: Draw, dp: int, cp: int, tp: int, clips: bool, steps: int = STEPS) -> Case:
    sizes = {"dp": dp, "cp": cp, "tp": tp}
    shapes = {
        "first": (WIDTH, HIDDEN),
        "second": (HIDDEN, WIDTH),
        "bias": (WIDTH,),
        "norm.weight": (WIDTH,),
        "norm.bias": (WIDTH,),
    }
    parameters = {
        name: 0.4 * draw.tensor(*shape, dtype=torch.float64) for name, shape in shapes.items()
    }
    shape = steps, SAMPLES, TIME, WIDTH
    inputs, targets = (draw.tensor(*shape, dtype=torch.float64) for _ in range(2))
    one = dict.fromkeys(AXES, 1)
    free = train(train_whole, one, parameters, inputs, targets, math.inf)
    max_norm = 0.4 * free["norms"][0] if clips else math.inf
    whole = train(train_whole, one, parameters, inputs, targets, max_norm) if clips else free

    def of_rank(rank: int) -> dict[str, Any]:
        return {
            "start": part_of(whole["start"], sizes, rank),
            "gradients": [part_of(step, sizes, rank) for step in whole["gradients"]],
            "weights": part_of(whole["weights"], sizes, rank),
            "norms": whole["norms"],
            "local": ANYTHING,
            "seen": ANYTHING,
        }

    world = range(dp * cp * tp)
    return Case(
        [(sizes, part_of(parameters, sizes, r), inputs, targets, max_norm) for r in world],
        [of_rank(rank) for rank in world],
        note=" × ".join(f"{axis} {n}" for axis, n in sizes.items())
        + (", clipped" if clips else ""),
        facts={
            "sizes": sizes,
            "clips": clips,
            "times": free["norms"][0] / max_norm,  # the clipped gradients, unclipped
            "program": __file__,
            "tokens": SAMPLES * TIME,
            "replicated": 3 * WIDTH * ITEM,
            "steps": steps,
            "bytes": sum(p.nbytes for p in part_of(parameters, sizes, 0).values()),
            "squares": {
                name: float(free["gradients"][0][name].square().sum()) for name in parameters
            },
        },
        network=Network(latency=0.0, bandwidth=1e3),
        seconds=20.0,
    )


MESHES = (
    (1, 1, 1, True),
    (2, 1, 2, True),
    (3, 1, 2, False),
    (2, 2, 1, True),
    (2, 2, 2, False),
)


def cases(draw: Draw) -> list[Case]:
    return [mesh_case(draw, *mesh) for mesh in MESHES]


def least(case: Case) -> list[int]:
    """A rank gets the gradients of the others at least once, added up."""
    shares = case.facts["sizes"]["dp"] * case.facts["sizes"]["cp"]
    return [case.facts["steps"] * case.facts["bytes"] - 64 if shares > 1 else 0] * case.world_size


# ---- what was sent, and along which axes ----


def sent(trial: Trial, kind: str) -> int:
    """Return the bytes of the busiest rank along "data" (dp, cp) only, "tensor" only, or "both".

    Messages of activations, which the exercise's program sends, don't count.
    """
    facts = trial.case.facts

    def counts(event: Event) -> bool:
        ranks: Iterable[Any] = event.group.ranks or range(trial.world_size)
        if event.kind == "send":
            ranks = (event.rank, event.peer)
        axes = axes_between(facts["sizes"], ranks)
        data, tensor = bool(axes - {"tp"}), "tp" in axes
        own = event.where.rpartition(":")[0] != facts["program"]
        return own and (data, tensor) == (kind != "tensor", kind != "data")

    return max(communicated(trial, counts))


def most_along(case: Case, kind: str) -> int:
    """Return the bytes along axes of this kind that are enough for all steps."""
    facts, sizes = case.facts, case.facts["sizes"]
    if kind == "data":
        # a learner's own ring adds the remainders of its chunks
        each = 100 + sum(all_reduce_bytes(facts["bytes"], sizes[axis]) for axis in ("dp", "cp"))
    else:
        n = sizes["tp"] if kind == "tensor" else case.world_size
        each = all_reduce_bytes(facts["replicated"], n)
    return facts["steps"] * (each + SMALL)


def bytes_along(kind: str, which: str, says: str) -> Check:
    check = at_most(
        "bytes",
        says,
        lambda trial: sent(trial, kind),
        lambda case: most_along(case, kind),
        f"a rank sent {{found}} bytes of gradients {which}; {{most}} are enough",
    )
    return with_its_share(check)


# ---- checks ----


def gradients_equal() -> Check:
    one_process = equals_one_process()
    check = replace(
        one_process,
        says="without clipping, every step equals one process",
        wrong=lambda trial: None if trial.case.facts["clips"] else one_process.wrong(trial),
    )
    return with_its_share(check)


def wrong_norm(trial: Trial) -> str | None:
    """Return what is wrong with the norms, or with the gradients that they clip; else None.

    Five digits count: torch's clipping adds 1e-6.
    """
    for rank, (found, expected) in enumerate(zip(trial.results, trial.case.expected)):
        if (what := difference(found["norms"], expected["norms"])) is not None:
            return f"rank {rank}'s norms, one for each step: {what}"
        steps = list(zip(found["gradients"], expected["gradients"]))
        pairs = [(mine[name], right) for mine, theirs in steps for name, right in theirs.items()]
        whole = len(steps) == len(found["gradients"]) == len(expected["gradients"])
        right = whole and all(close(*pair, 1e-5) for pair in pairs)
        if trial.case.facts["clips"] and not right:
            return f"rank {rank}'s gradients were clipped by another factor, or not at all"
    return None


def norms_equal() -> Check:
    """Return a check of the norm, which weighs ten times as much as the gradients."""
    says = "the norm, and every step with clipping, equal one process"
    return Check("value", says, wrong_norm, weight=10.0)


ITS_SHARE = at_most(
    "memory",
    "each rank computes 1/(dp · cp) of the tokens",
    lambda trial: [sum(x.numel() for x in seen) for seen in measured(trial, "seen")],
    lambda case: case.facts["steps"] * case.facts["tokens"] // shares(case.facts["sizes"]),
    "rank {rank} computed {found} tokens; its share is {most}",
)


def with_its_share(check: Check) -> Check:
    """Return the check, which fails too if a rank computes the tokens of others."""
    return replace(check, wrong=lambda trial: check.wrong(trial) or ITS_SHARE.wrong(trial))


def shares(sizes: dict[str, int]) -> int:
    """Return the number of pieces of the batch."""
    return sizes["dp"] * sizes["cp"]


# ---- what a rank's first step shows ----


def first_step(trial: Trial, rank: int) -> dict[str, Tensor]:
    """Return the gradients of a rank's first optimizer step."""
    return trial.results[rank]["gradients"][0]


def right_step(trial: Trial, rank: int, step: int = 0) -> dict[str, Tensor]:
    """Return the right gradients of a rank's step."""
    return trial.case.expected[rank]["gradients"][step]


def free(trials: Sequence[Trial], least_tp: int = 1) -> list[Trial]:
    """Return the trials without clipping that ended, on several ranks and `least_tp` along tp."""
    several = [trial for trial in ended(trials, 2) if not trial.case.facts["clips"]]
    return [trial for trial in several if trial.case.facts["sizes"]["tp"] >= least_tp]


def on_free(shows: Callable[[Trial, int], bool], least_tp: int = 1) -> Seen:
    """Return a test of whether every rank of the free trials shows this."""
    return lambda trials: all_show(on_ranks(free(trials, least_tp)), shows)


def summed_ranks(trial: Trial, rank: int, name: str) -> set[int] | None:
    """Return the ranks whose gradients add up to this rank's; None if it is no sum of them."""
    locals_ = [local.get(name, torch.empty(0)) for local in measured(trial, "local")]
    parts = weights(first_step(trial, rank).get(name), locals_)
    return None if parts is None else {r for r, part in enumerate(parts) if abs(part) > 1e-4}


def sums_over(*axes: str, name: str = "first") -> Callable[[Trial, int], bool]:
    """Return a test of whether a rank's gradient of `name` is a sum over these axes."""
    return lambda trial, rank: (
        summed_ranks(trial, rank, name) == sharing(trial.case.facts["sizes"], rank, axes)
    )


def is_times(trial: Trial, rank: int, k: float, names: Collection[str] | None = None) -> bool:
    """Return whether a rank's first gradients of these names are k times the right ones."""
    expected = right_step(trial, rank)
    found = scale(first_step(trial, rank), {name: expected[name] for name in names or expected})
    return found is not None and math.isclose(found, k, rel_tol=1e-6)


def scaled(by: Callable[[dict[str, int]], float]) -> Seen:
    """Return a test of whether all gradients are `by` times the right ones, wherever it isn't 1."""
    return lambda trials: all_show(
        on_ranks(t for t in free(trials) if by(t.case.facts["sizes"]) != 1),
        lambda trial, rank: is_times(trial, rank, by(trial.case.facts["sizes"])),
    )


def norm_is(trials: Iterable[Trial], squares: Callable[[Trial, int], Iterable[float]]) -> bool:
    """Return whether on every rank, one of these squares explains the first step's norm."""
    return all_show(
        on_ranks(trials),
        lambda trial, rank: any(
            math.isclose(measured(trial, "norms")[rank][0] ** 2, square, rel_tol=1e-8)
            for square in squares(trial, rank)
        ),
    )


# ---- misconceptions ----


def over_the_world(trials: Sequence[Trial]) -> bool:
    """Return whether gradients of parts were sent across axes: to all ranks, if all took part."""
    across = all(sent(t, "both") > most_along(t.case, "both") for t in free(trials, 2))
    return across and on_free(
        lambda trial, rank: (
            summed_ranks(trial, rank, "first") in (set(range(trial.world_size)), None)
            or alike(first_step(trial, rank), right_step(trial, rank))
        ),
        2,
    )(trials)


def wrong_groups(trial: Trial) -> bool:
    """Return whether a rank summed gradients of ranks that are not those along dp and cp."""
    summed = [summed_ranks(trial, rank, "first") or set() for rank in range(trial.world_size)]
    return any(
        1 < len(ranks) < trial.world_size
        and not ranks <= sharing(trial.case.facts["sizes"], rank, ("dp", "cp"))
        for rank, ranks in enumerate(summed)
    )


def cut_is_right(trial: Trial, rank: int) -> bool:
    expected = right_step(trial, rank)
    return alike(first_step(trial, rank), {name: expected[name] for name in CUT})


def tokens(trial: Trial) -> list[list[float]]:
    """Return a number of each token that went through the model, by rank."""
    return [[float(x) for part in seen for x in part.flatten()] for seen in measured(trial, "seen")]


def share_along_tp(trial: Trial) -> bool:
    """Return whether ranks along tp computed with other samples, or another part of the time."""
    seen = tokens(trial)
    first = [
        min(sharing(trial.case.facts["sizes"], rank, ("tp",))) for rank in range(trial.world_size)
    ]
    return any(seen[rank] != seen[other] for rank, other in enumerate(first))


def whole_batch(trial: Trial) -> bool:
    """Return whether somewhere, ranks that differ along dp or cp computed the same tokens."""
    seen = [set(mine) for mine in tokens(trial)]
    return any(
        seen[rank] & seen[other]
        for rank in range(trial.world_size)
        for other in set(range(rank)) - sharing(trial.case.facts["sizes"], rank, ("tp",))
    )


def not_cleared(trial: Trial, rank: int) -> bool:
    """Return whether the first step is right, and the second has the gradients of both."""
    first, second = (right_step(trial, rank, step) for step in (0, 1))
    found = trial.results[rank]["gradients"][1]
    more = {name: found[name] - second[name] for name in CUT}
    return alike(first_step(trial, rank), first) and (
        scale(more, {name: first[name] for name in CUT}) is not None
    )


def never_clipped(trial: Trial, rank: int) -> bool:
    """Return whether the norm is right, but the optimizer got unclipped gradients."""
    right = trial.case.expected[rank]["norms"][0]
    unclipped = is_times(trial, rank, trial.case.facts["times"])
    return unclipped and norm_is([trial], lambda *_: [right**2])


def squares_of(trial: Trial, ranks: Iterable[int], names: Collection[str]) -> float:
    """Return the squares of these ranks' gradients which no message has touched."""
    local = measured(trial, "local")
    return sum(float(local[rank][name].square().sum()) for rank in ranks for name in names)


def untouched(trial: Trial, rank: int) -> Sequence[float]:
    """Return the squared norms of gradients before they are summed."""
    every = set(trial.case.facts["squares"])
    own, peers = [rank], sharing(trial.case.facts["sizes"], rank, ("tp",))
    return (
        squares_of(trial, own, every),
        squares_of(trial, peers, every),
        squares_of(trial, peers, CUT) + squares_of(trial, own, every - set(CUT)),
    )


def with_replicas(trial: Trial, _: int) -> Iterable[float]:
    """Return the squared norms that count the parts, or the rest, several times."""
    sizes, squares = trial.case.facts["sizes"], trial.case.facts["squares"]
    times = {1, *sizes.values(), shares(sizes), trial.world_size}
    parts, partial, bias = (sum(squares[n] for n in of) for of in (CUT, PARTIAL, ["bias"]))
    return (
        a * parts + b * partial + c * bias
        for a, b, c in itertools.product(times, repeat=3)
        if max(a, b, c) > 1
    )


def of_own_part(trial: Trial, rank: int) -> Sequence[float]:
    """Return the square of what the rank's own optimizer saw, before clipping."""
    return [sum(float(g.square().sum()) for g in first_step(trial, rank).values())]


MISCONCEPTIONS = (  # in the order in which they are tried
    *MESSAGES,
    Misconception(
        "share cut along tp too",
        "Ranks along tp computed different samples, or different times. They hold parts of the "
        "same matrices: only together can they compute a sample, so all of them need the same.",
        lambda trials: all_show(
            (t for t in ended(trials, 2) if t.case.facts["sizes"]["tp"] > 1), share_along_tp
        ),
    ),
    Misconception(
        "whole batch on every rank",
        "The ranks along dp or cp compute the same tokens again. The values may be right, but "
        "more ranks don't make a step any faster.",
        lambda trials: any(map(whole_batch, ended(trials, 2))),
    ),
    Misconception(
        "reduces over the world",
        "Gradients are added up over all ranks of the world. Ranks along tp hold different parts "
        "of the matrices: their gradients don't belong together.",
        over_the_world,
    ),
    Misconception(
        "parts summed over tp",
        "The gradients of parameters that are cut are added up along tp. Each rank has a "
        "different part of the matrix, so this adds gradients of different weights.",
        on_free(sums_over(*AXES), 2),
    ),
    Misconception(
        "groups of the wrong ranks",
        "Gradients are added up over ranks that don't share a part of the model: rows and columns "
        "of the mesh are confused. The last axis runs fastest.",
        lambda trials: all_show(free(trials, 2), wrong_groups),
    ),
    replace(NEVER_REDUCED, seen=on_free(sums_over())),
    Misconception(
        "cp left out",
        "Gradients are averaged along dp only. Ranks along cp computed other parts of the same "
        "sequences with the same weights, so their gradients count as well.",
        lambda trials: on_free(sums_over("dp"))(
            [t for t in trials if t.case.facts["sizes"]["cp"] > 1]
        ),
    ),
    Misconception(
        "divides by the world size",
        "The sum of the gradients is divided by the number of all ranks. Ranks along tp share one "
        "piece of the batch, so there are only dp · cp pieces to average.",
        scaled(lambda sizes: 1 / sizes["tp"]),
    ),
    Misconception(
        "sum for mean",
        "Gradients are added up and not averaged. Each belongs to the mean loss of one piece of "
        "the batch, so the sum is dp · cp times too large.",
        scaled(shares),
    ),
    Misconception(
        "partial gradients not summed",
        "The layer norm's gradients are not added up along tp. Each rank along tp used these "
        "weights for its own part of the time, so its copies now drift apart.",
        on_free(
            lambda *rank: sums_over("dp", "cp", name="norm.weight")(*rank) and cut_is_right(*rank),
            2,
        ),
    ),
    Misconception(
        "partial gradients averaged",
        "The layer norm's gradients are averaged along tp. They are parts of one sum, not "
        "gradients of several mean losses.",
        on_free(
            lambda trial, rank: (
                cut_is_right(trial, rank)
                and is_times(trial, rank, 1 / trial.case.facts["sizes"]["tp"], PARTIAL)
            ),
            2,
        ),
    ),
    replace(added_to_the_last, seen=on_free(not_cleared)),
    Misconception(
        "gradients never clipped",
        "The norm is right, but no gradient is multiplied by max_norm / norm before the "
        "optimizer's step.",
        lambda trials: all_show(
            on_ranks(t for t in ended(trials) if t.case.facts["clips"]), never_clipped
        ),
    ),
    Misconception(
        "norm before the sum",
        "Each rank takes the norm of its own gradients, before they are added up. The norm of a "
        "sum isn't that of its parts, so the ranks clip by factors that have no meaning.",
        lambda trials: norm_is(
            (t for t in free(trials) if t.world_size > t.case.facts["sizes"]["tp"]), untouched
        ),
    ),
    Misconception(
        "norm counts replicas twice",
        "Some numbers count several times in the norm, because several ranks hold them. A larger "
        "norm clips too much. Each number of the model must count once.",
        lambda trials: norm_is(filter(wrong_norm, ended(trials, 2)), with_replicas),
    ),
    Misconception(
        "norm of one rank's part",
        "The norm is that of the gradients on this rank. With parts of the matrices on other "
        "ranks, every rank then clips by another factor.",
        lambda trials: norm_is(free(trials, 2), of_own_part),
    ),
)


EXERCISES = [
    Exercise(
        number="23",
        function="train_on_mesh",
        title="Two and three axes",
        points=10,
        cases=cases,
        program=train,
        allowed=P2P | COLLECTIVES,
        weights={"value": 0.55, "bytes": 0.3, "memory": 0.15},
        checks=(
            gradients_equal(),
            norms_equal(),
            bytes_along("data", "along dp and cp", "2(n−1)/n of the gradients along dp and cp"),
            bytes_along("tensor", "along tp", "along tp, only what is replicated there"),
            bytes_along(
                "both",
                "along tp and another axis at once",
                "parts of matrices never leave their dp · cp ranks",
            ),
            ITS_SHARE,
        ),
        least_received=least,
        misconceptions=MISCONCEPTIONS,
        hints=(
            "For each parameter, ask twice: which ranks hold the same numbers of it? And which of "
            "them computed with other data? Sum over the second; count the first once.",
            "Make two groups: the ranks with this rank's tp coordinate, and those along tp. "
            "Average all gradients over the first. Then sum those in `partial` over the second. "
            "For the norm, add up the squares of `cut` over the second, and add the others once.",
            "The rank is (dp_i · cp + cp_i) · tp + tp_i: which ranks share this rank's "
            "tp coordinate, and which differ in nothing else? Every rank must make all "
            "groups, in the same order. The gradients are averaged before `partial` is "
            "summed, and the norm comes last. A parameter that is not in `cut` has the "
            "same squares on every rank of a tp group.",
        ),
        questions=(
            ask_sent(
                "The mesh is dp 2 × tp 2. Of 2,160 bytes of gradients, 1,920 belong to the "
                "two matrices that are cut along tp. How many bytes does a rank send along dp "
                "in one step?",
                lambda: mesh_case(Draw("question"), 2, 1, 2, False, steps=1),
                lambda trial: sent(trial, "data"),
            ),
        ),
        picture="lanes",
    )
]
