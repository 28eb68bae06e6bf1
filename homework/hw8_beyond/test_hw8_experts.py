"""Exercise 22b: a mixture of experts whose experts are on different ranks."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from parallel101.laboratory.exercises.tensor_parallel_exercises import graph_cut
from parallel101.laboratory.exercises.wrong_values import every
from parallel101.laboratory.grade.compared_values import same
from parallel101.laboratory.grade.exercise import (
    ANYTHING,
    Case,
    Check,
    Draw,
    Exercise,
    Misconception,
    Trial,
    mistake,
)
from parallel101.laboratory.grade.exercise_checks import (
    CHANGES_ITS_INPUT,
    MESSAGES,
    ask_sent,
    bytes_sent,
    communicated,
    failed,
    right,
    value,
    wrong_trials,
)
from parallel101.laboratory.record.errors import DeadlockError
from parallel101.laboratory.sim.network import Network
from parallel101.spans import compute, span

WIDTH, HIDDEN = 16, 5
ROW = 8 * WIDTH  # bytes
SECONDS_PER_ROW = 1.0  # in an expert
ROWS = Network(latency=0.0, bandwidth=4 * ROW)  # four rows travel in a second


class Expert(nn.Module):
    """(rows, width) → (rows, width). It takes virtual time for each row."""

    def __init__(self, number: int, first: Tensor, second: Tensor):
        super().__init__()
        self.number, self.rows = number, 0
        self.first, self.second = nn.Parameter(first.clone()), nn.Parameter(second.clone())

    def forward(self, x: Tensor) -> Tensor:
        self.rows += len(x)
        with span(f"expert {self.number}", rows=len(x)):
            compute(SECONDS_PER_ROW * len(x))
            return torch.tanh(x @ self.first) @ self.second


def run_experts(
    function: Callable,
    x: Tensor,
    choice: Tensor,
    gate: Tensor,
    weights: list[tuple[Tensor, Tensor]],
    sizes: list[int],
    first: int,
    c: Tensor,
) -> list[Any]:
    """The loss of this rank is sum(c · y), and the whole loss is the sum of the ranks' losses."""
    experts = [Expert(first + i, *of) for i, of in enumerate(weights)]
    x, gate = x.clone().requires_grad_(), gate.clone().requires_grad_()
    y = function(x, choice.clone(), gate, list(experts), list(sizes))
    with span("loss"):
        compute(SECONDS_PER_ROW)
    if isinstance(y, Tensor) and y.requires_grad:
        (y * (c if c.shape == y.shape else 0)).sum().backward()
    gradients = [[grad_of(p, True) for p in expert.parameters()] for expert in experts]
    y = y.detach() if isinstance(y, Tensor) else y
    return [y, grad_of(x), grad_of(gate), gradients, [expert.rows for expert in experts]]


def grad_of(leaf: Tensor, zeros: bool = False) -> Tensor | None:
    """Its gradient. If there is none: zeros for a tensor without elements, or if asked for."""
    return (
        torch.zeros_like(leaf) if leaf.grad is None and (zeros or not leaf.numel()) else leaf.grad
    )


# ---- cases ----


def experts_case(
    draw: Draw, sizes: Sequence[int], choices: Sequence[Sequence[Sequence[int]]], note: str
) -> Case:
    """choices[rank][token] are the experts of that token; −1 is a slot that was dropped."""
    n, k = len(sizes), max(len(token) for rank in choices for token in rank)
    double = lambda *shape: draw.tensor(*shape, dtype=torch.float64)  # noqa: E731
    weights = [(double(WIDTH, HIDDEN) / 4, double(HIDDEN, WIDTH)) for _ in range(sum(sizes))]
    choice = [torch.tensor(rank, dtype=torch.int64).reshape(-1, k) for rank in choices]
    xs, cs = ([double(len(rank), WIDTH) for rank in choices] for _ in range(2))
    gates = [double(len(rank), k).abs() + 0.1 for rank in choices]
    starts = [0, *accumulate(sizes)]
    owner = [rank for rank, size in enumerate(sizes) for _ in range(size)]
    experts = [Expert(number, *of) for number, of in enumerate(weights)]
    leaves = [(x.clone().requires_grad_(), g.clone().requires_grad_()) for x, g in zip(xs, gates)]
    slots = [outputs(experts, x, which) for (x, _), which in zip(leaves, choice)]
    ys = [(out * gate[..., None]).sum(1) for out, (_, gate) in zip(slots, leaves)]
    sum((y * c).sum() for y, c in zip(ys, cs)).backward()
    gradients = [[grad_of(p, True) for p in expert.parameters()] for expert in experts]
    # rows that go from rank i to rank j; and how many different tokens they are
    rows = [[0] * n for _ in range(n)]
    tokens = [[0] * n for _ in range(n)]
    for rank, which in enumerate(choice):
        for token in which.tolist():
            to = [owner[e] for e in token if e >= 0]
            for other in range(n):
                rows[rank][other] += to.count(other)
                tokens[rank][other] += other in to
    used = torch.cat([which.flatten() for which in choice])
    return Case(
        [
            (
                xs[rank],
                choice[rank],
                gates[rank],
                weights[starts[rank] : starts[rank + 1]],
                list(sizes),
                starts[rank],
                cs[rank],
            )
            for rank in range(n)
        ],
        [
            [
                ys[rank].detach(),
                grad_of(leaves[rank][0]),
                grad_of(leaves[rank][1]),
                gradients[starts[rank] : starts[rank + 1]],
                ANYTHING,
            ]
            for rank in range(n)
        ],
        note=note,
        network=ROWS,
        facts={
            "symmetric": all(rows[i][j] == rows[j][i] for i in range(n) for j in range(n)),
            "equal": len({count for row in rows for count in row}) == 1,
            "uneven": len(set(sizes)) > 1,
            "dropped": bool((used < 0).any()),
            "empty": any(not (used == e).any() for e in range(sum(sizes)))
            or not all(len(x) for x in xs),
            "one each": k == 1 and not bool((used < 0).any()),
            "drops": [(which < 0).any(1) for which in choice],
            "outputs": [out.detach() for out in slots],
            "rows": [
                [int((used == e).sum()) for e in range(starts[r], starts[r + 1])] for r in range(n)
            ],
            "tokens": sum(len(x) for x in xs),
            "there and back": both_ways(rows),
            "least": [ROW * moved for moved in both_ways(tokens)],
        },
    )


def outputs(experts: Sequence[Expert], x: Tensor, choice: Tensor) -> Tensor:
    """(tokens, k, width): what the expert of each slot makes of its token. Dropped: zeros."""
    found = [x.new_zeros(len(x), choice.shape[1], WIDTH)]
    for number, expert in enumerate(experts):
        hit = (choice == number)[..., None]
        if bool(hit.any()):
            found.append(expert(x)[:, None] * hit)
    return torch.stack(found).sum(0)


def both_ways(rows: Sequence[Sequence[int]]) -> list[int]:
    """How many rows go from each rank to others, and come from others."""
    n = len(rows)
    return [
        sum(rows[rank][other] + rows[other][rank] for other in range(n) if other != rank)
        for rank in range(n)
    ]


def experts_cases(draw: Draw) -> list[Case]:
    a, b = draw.integer(4, 5), draw.integer(6, 7)

    def spread(tokens: int, experts: int, k: int, begin: int = 0) -> list[list[int]]:
        """Experts in an order that is not sorted, all different for one token."""
        return [[(begin + 5 * t + 2 * j) % experts for j in range(k)] for t in range(tokens)]

    dropped = [[[3, -1], [0, 2], [-1, -1], [1, 0]], [[-1, 0], [3, 1], [2, -1]], [[2, 3], [0, 1]]]
    return [
        experts_case(draw, (3,), [spread(a, 3, 2)], "3 experts"),
        experts_case(
            draw, (2, 2), [[[3], [0], [2], [1]], [[1], [3], [2], [0]]], "2 experts a rank, top 1"
        ),
        experts_case(
            draw,
            (2, 2, 2),
            [spread(a, 6, 2, 1), spread(b, 6, 2, 3), [[5, 1], [0, 4], [2, 3]]],
            "2 experts a rank, top 2",
        ),
        experts_case(
            draw, (3, 1), [spread(b, 4, 1, 2), spread(a, 4, 1, 3)], "3 experts and 1, top 1"
        ),
        experts_case(
            draw, (1, 1, 1, 1), [*dropped, [[1, 3], [2, 0]]], "an expert a rank, with drops"
        ),
        experts_case(
            draw, (1, 1, 1), [[[1]] * 3, [[1]] * a, [[1], [1]]], "every token chose expert 1"
        ),
        experts_case(
            draw, (2, 2, 2), [spread(a, 6, 2), [], spread(b, 6, 2, 2)], "rank 1 has no tokens"
        ),
    ]


def most_bytes(case: Case) -> list[int]:
    """Dispatch and combine, forward and backward."""
    return [2 * ROW * rows for rows in case.facts["there and back"]]


def slack(case: Case) -> int:
    """Counts, and two more numbers for each row, such as its expert."""
    return 64 + 64 * case.world_size + 2 * 2 * 8 * max(case.facts["there and back"])


# ---- checks and misconceptions ----


def only_chosen_rows() -> Check:
    def wrong(trial: Trial) -> str | None:
        for rank, (found, most) in enumerate(
            zip([result[4] for result in trial.results], trial.case.facts["rows"], strict=True)
        ):
            if sum(found) > sum(most):
                return (
                    f"rank {rank}'s experts computed {sum(found)} rows; {sum(most)} chose one of "
                    "them"
                )
        return bytes_sent(most_bytes, "", slack).wrong(trial)

    return Check("memory", "experts get and compute only the rows that chose them", wrong)


def fails_only_where(trials: Sequence[Trial], fact: str, holds: bool = True) -> bool:
    """Whether runs of several ranks fail, but none where facts[fact] is not `holds`.

    Runs with an expert or a rank that has no rows may fail for another reason.
    """
    several = [
        trial
        for trial in trials
        if trial.world_size > 1 and (fact == "empty" or not trial.case.facts["empty"])
    ]
    others = [trial for trial in several if trial.case.facts[fact] != holds]
    return bool(failed(several)) and bool(others) and all(map(right, others))


@mistake(
    "rank without rows stays away",
    "A rank without tokens, or whose experts nobody chose, leaves early, or builds no graph. "
    "The others wait for it, forward or backward.",
)
def stays_away(trials: Sequence[Trial]) -> bool:
    return fails_only_where(trials, "empty") and any(
        isinstance(trial.error, DeadlockError) for trial in failed(trials)
    )


@mistake(
    "empty expert fails",
    "An expert that nobody chose, or a rank without tokens, ends the program. With a trained "
    "router, that happens in many steps.",
)
def empty_expert(trials: Sequence[Trial]) -> bool:
    return fails_only_where(trials, "empty") and all(
        trial.error is not None for trial in failed(trials)
    )


def y_right(trial: Trial) -> bool:
    return all(same(f[0], e[0]) for f, e in zip(trial.results, trial.case.expected, strict=True))


@mistake(
    "inverse permutation missing",
    "The rows were sorted for their journey, and come back sorted. Each token gets what the "
    "experts made of another token.",
)
def in_another_order(trials: Sequence[Trial]) -> bool:
    """Each row of y belongs to another token of the rank, up to a factor.

    It is looked at where each token has one expert.
    """
    wrong = [trial for trial in wrong_trials(trials) if trial.case.facts["one each"]]
    moved = False
    for trial in wrong:
        for result, out in zip(trial.results, trial.case.facts["outputs"], strict=True):
            y, out = result[0], out[:, 0]
            cosine = nn.functional.normalize(y, dim=1) @ nn.functional.normalize(out, dim=1).T
            best = cosine.abs().max(1)
            if bool((best.values < 1 - 1e-9).any()):
                return False
            if sorted(best.indices.tolist()) != list(range(len(y))):
                return False
            moved |= best.indices.tolist() != list(range(len(y)))
    return moved


@mistake(
    "dropped tokens counted",
    "A slot with −1 adds something to y. Its expert was full: it contributes nothing, and its "
    "row stays at home. (In Python, −1 is also the last entry of a list.)",
)
def dropped_counted(trials: Sequence[Trial]) -> bool:
    """Only tokens with a dropped slot have a wrong y."""
    wrong = [trial for trial in wrong_trials(trials) if not trial.case.facts["empty"]]
    return fails_only_where(trials, "dropped") and all(
        same(result[0][~drops], expected[0][~drops])
        for trial in wrong
        for result, expected, drops in zip(
            trial.results, trial.case.expected, trial.case.facts["drops"], strict=True
        )
    )


@mistake(
    "gradients of the gate lost",
    "y is right, but gate gets no gradient, so the router never learns. The product with the "
    "gate must be part of the graph.",
)
@every(wrong_trials)
def gate_lost(trial: Trial) -> bool:
    """y is right, and no gate has a gradient."""
    return y_right(trial) and all(r[2] is None or not r[2].any() for r in trial.results)


@mistake(
    "gradient stops at the message",
    "y is right, but x gets no gradient: the rows' gradients never come home.",
)
@every(wrong_trials)
def x_lost(trial: Trial) -> bool:
    """y is right, and x or the experts of most ranks get no gradient."""
    return y_right(trial) and all(r[1] is None or not r[1].any() for r in trial.results)


@mistake(
    "gate forgotten",
    "The experts' results are added as they are. Each must be weighted by its gate.",
)
@every(wrong_trials)
def gate_forgotten(trial: Trial) -> bool:
    return same([r[0] for r in trial.results], [out.sum(1) for out in trial.case.facts["outputs"]])


@mistake(
    "every row to every rank",
    "The values are right, but each rank sends all its rows to all ranks, for any choice of "
    "the router. That is a dense layer in disguise.",
)
def every_row_everywhere(trials: Sequence[Trial]) -> bool:
    large = [trial for trial in trials if trial.world_size > 2]
    return (
        bool(large)
        and not failed(trials)
        and all(
            sum(communicated(t)) >= (t.world_size - 1) * ROW * t.case.facts["tokens"]
            and bytes_sent(most_bytes, "", slack).wrong(t) is not None
            for t in large[:1]
        )
    )


@mistake(
    "every expert computes every row",
    "The values are right, but experts compute rows that chose another expert, and the "
    "results are thrown away. The point of experts is to compute less.",
)
def every_expert(trials: Sequence[Trial]) -> bool:
    several = [trial for trial in trials if trial.world_size > 1]
    return (
        bool(several)
        and not failed(trials)
        and any(only_chosen_rows().wrong(trial) is not None for trial in several)
    )


def asked() -> Case:
    choices = [[[0, 3], [5, 2]], [[1, 4], [2, 0]], [[4, 5], [3, 1]]]
    return experts_case(Draw("question"), (2, 2, 2), choices, "2 tokens each, top 2")


def a_popular_expert() -> Case:
    """Most tokens chose expert 2."""
    choices = [[[2], [i], [2], [(i + 3) % 4], [2], [(i + 1) % 4]] for i in range(4)]
    return experts_case(Draw("watch"), (1, 1, 1, 1), choices, "an expert each, and a popular one")


def sent_rows(trial: Trial) -> int:
    """Bytes of rows that the busiest rank sends; small messages don't count."""
    sent = [0] * trial.world_size
    for event in trial.trace.events:
        sent[event.rank] += event.nbytes if event.kind == "send" and event.nbytes >= ROW else 0
    return max(sent)


EXERCISES = [
    Exercise(
        number="22b",
        function="mixture_of_experts",
        title="Experts on different ranks",
        points=10,
        cases=experts_cases,
        program=run_experts,
        weights={"value": 0.25, "bytes": 0.25, "memory": 0.5},
        checks=(
            value(
                "y and all gradients are those of one process",
                parts=(
                    "y",
                    "the gradient of x",
                    "the gradient of the gate",
                    "the gradients of the experts",
                ),
            ),
            bytes_sent(
                most_bytes, "each row goes to its expert and back, forward and backward", slack
            ),
            only_chosen_rows(),
        ),
        least_received=lambda case: case.facts["least"],
        misconceptions=(
            *MESSAGES,
            CHANGES_ITS_INPUT,
            stays_away,
            empty_expert,
            Misconception(
                "experts taken as evenly cut",
                "It is right only if every rank has equally many experts. Which rank has expert e "
                "follows from sizes.",
                lambda trials: fails_only_where(trials, "uneven"),
            ),
            dropped_counted,
            gate_forgotten,
            in_another_order,
            Misconception(
                "counts not exchanged",
                "It is right only if each rank gets as many rows from a rank as it sends there, or "
                "if all numbers are equal. A rank can't know what it gets until the sender tells "
                "it.",
                lambda trials: (
                    any(trial.case.facts["one each"] for trial in failed(trials))
                    and any(
                        fails_only_where(trials, fact, holds=False)
                        for fact in ("symmetric", "equal")
                    )
                ),
            ),
            graph_cut(
                lambda result: result[1] if result[1] is not None and result[1].numel() else None,
                lambda trial: max(communicated(trial)),
            ),
            gate_lost,
            x_lost,
            every_row_everywhere,
            every_expert,
        ),
        hints=(
            "Follow one row: sorted by its expert, sent, computed, sent back, and put where it "
            "came from. Which of these steps are an exercise that you have written already?",
            "Only slots with choice ≥ 0 travel. A rank must know how many rows each of its experts "
            "gets from each rank: send these numbers first. Rows come sorted by rank, then by "
            "expert, and one call of exchange_rows with the received counts sends them all back.",
            "A stable argsort of the slots by their expert brings the rows into the order in which "
            "they are sent. Keep that order: it says which token and which gate belong to each row "
            "that comes back. Which function adds rows to given places of a tensor? Call each "
            "expert, also with 0 rows, so that every rank builds the same graph.",
        ),
        questions=(
            ask_sent(
                "3 ranks have 2 experts and 2 tokens each, and every token chooses 2 experts. The "
                "router sends [1, 2, 1], [2, 1, 1] and [1, 1, 2] rows to ranks 0, 1 and 2. A row "
                "has 16 float64 numbers. How many bytes of rows does the busiest rank send, "
                "forward and backward together?",
                asked,
                sent_rows,
            ),
        ),
        watch=a_popular_expert,
        picture="lanes",
    )
]
