"""Exercise 23: gradients and their norm on a mesh of two and three axes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from parallel101 import Network
from parallel101.laboratory.exercises.harness import (
    BACKWARD,
    FORWARD,
    OptimizerSteps,
    backward_takes,
)
from parallel101.laboratory.exercises.mesh_exercises import (
    AXES,
    CUT,
    ITS_SHARE,
    MISCONCEPTIONS,
    PARTIAL,
    bytes_along,
    coordinates,
    gradients_equal,
    norms_equal,
    sent,
)
from parallel101.laboratory.exercises.training_exercises import ITEM
from parallel101.laboratory.grade.exercise import (
    ANYTHING,
    COLLECTIVES,
    P2P,
    Case,
    Draw,
    Exercise,
)
from parallel101.laboratory.grade.exercise_checks import ask_sent
from parallel101.spans import compute, span

WIDTH, HIDDEN, SAMPLES, TIME, STEPS = 10, 12, 12, 8, 2


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
    n = math.prod(sizes.values())
    for axis in ("cp", "tp"):
        rows: dict[tuple, list[int]] = {}
        for rank in range(n):
            at = coordinates(sizes, rank)
            rows.setdefault(tuple(at[other] for other in AXES if other != axis), []).append(rank)
        for ranks in rows.values() if sizes[axis] > 1 else ():
            group = dist.new_group(ranks)
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
            if not steps.gradients and p.grad is not None:
                local[name] = p.grad.clone()

        return keep

    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(ready(name))
    steps = OptimizerSteps(model)
    batches = list(zip(inputs, targets))
    norms = function(
        model, F.mse_loss, steps.optimizer, batches, dict(sizes), set(CUT), set(PARTIAL), max_norm
    )
    if isinstance(norms, list | tuple):
        norms = [float(norm) for norm in norms]
    return {**steps.result(), "norms": norms, "local": local, "seen": model.seen}


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
