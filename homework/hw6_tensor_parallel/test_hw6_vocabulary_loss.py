"""Exercise 16b: cross-entropy of logits that are cut along the vocabulary."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel101.laboratory.exercises.adjoint_exercises import forward_backward
from parallel101.laboratory.exercises.tensor_parallel_exercises import (
    N_TIMES,
    NUMBER,
    gives,
    gradients_of,
    graph_cut,
    keeps_at_most,
    leaf,
    least_received,
    ring,
    sends_at_most,
    sent_in,
)
from parallel101.laboratory.exercises.wrong_values import only_large_overflow, right_but
from parallel101.laboratory.grade.exercise import (
    ANYTHING,
    COLLECTIVES,
    P2P,
    Case,
    Draw,
    Exercise,
    Misconception,
    Trial,
    mistake,
)
from parallel101.laboratory.grade.exercise_checks import (
    MESSAGES,
    ask_sent,
    value,
)


def run_vocabulary_loss(
    function: Callable, logits: Tensor, targets: Tensor, vocabulary: int
) -> list[Any]:
    logits = leaf(logits)
    loss, kept = forward_backward(lambda: function(logits, targets, vocabulary), torch.ones(()))
    return [loss, logits.grad, kept]


def vocabulary_case(draw: Draw, n: int, vocabulary: int, scale: float = 3.0) -> Case:
    """Return a case whose targets include each rank's first and last token.

    A mistake at a border is then never missed.
    """
    borders = [
        int(tokens[k]) for tokens in torch.arange(vocabulary).tensor_split(n) for k in (0, -1)
    ]
    others = [draw.integer(0, vocabulary - 1) for _ in range(6 - len(borders))]
    targets = torch.tensor(borders + others)
    positions = len(targets)
    logits = scale * draw.tensor(positions, vocabulary, dtype=torch.float64)
    (gradient,) = gradients_of(lambda logits: F.cross_entropy(logits, targets), logits)
    blocks = logits.tensor_split(n, 1)
    numbers = NUMBER * positions
    return Case(
        [(block, targets, vocabulary) for block in blocks],
        [
            [F.cross_entropy(logits, targets), block, ANYTHING]
            for block in gradient.tensor_split(n, 1)
        ],
        note=f"{positions} positions, {vocabulary} tokens"
        + (", large logits" if scale > 100 else ""),
        facts={
            # with large logits, one term outweighs all others, and many mistakes look the same
            **({} if scale > 100 else vocabulary_mistakes(logits, targets, n)),
            "large": scale > 100,
            "forward": ring(numbers, n, 8),
            "gathered": ring(numbers * vocabulary, n),
            "backward": 0,
            "least": ring(numbers, n, 2),
            "kept": int(NUMBER * positions * (2.2 * math.ceil(vocabulary / n) + 12)),
        },
    )


def vocabulary_mistakes(logits: Tensor, targets: Tensor, n: int) -> dict[str, list]:
    """Return the losses that common mistakes give: by mistake, its forms.

    m is each rank's own maximum, s its sum of exponentials, and t the target's logit.
    """
    blocks = logits.tensor_split(n, 1)
    m = [block.amax(1) for block in blocks]
    s = [(block - largest[:, None]).exp().sum(1) for block, largest in zip(blocks, m)]
    total = torch.stack(s).sum(0)
    t = logits.gather(1, targets[:, None])[:, 0]
    owners = torch.cat([torch.full((block.shape[1],), rank) for rank, block in enumerate(blocks)])[
        targets
    ]
    own_m = torch.stack(m).gather(0, owners[None])[0]
    largest, log_total = logits.amax(1), logits.logsumexp(1)
    equal_blocks = []
    for width in (None, math.ceil(logits.shape[1] / n), logits.shape[1] // n):  # None: one's own
        chosen, hits = torch.zeros_like(t), torch.zeros_like(t)
        for rank, block in enumerate(blocks):
            column = targets - rank * (width or block.shape[1])
            here = (column >= 0) & (column < block.shape[1])
            chosen += block.gather(1, (column * here)[:, None])[:, 0] * here
            hits += here
        # the maximum is subtracted from the target's logit too, or added to the logarithm
        equal_blocks += [
            (log_total - largest - chosen + hits * largest).mean(),
            (log_total - chosen).mean(),
        ]
    own_sums = [
        [(one.log() + k - t).mean() for one, k in zip(s, ks)]
        for ks in (m, [largest] * n, [own_m] * n)
    ]
    return {
        "local maximum": [
            *([(total.log() + k - t).mean()] * n for k in (own_m, largest, 0 * t)),
            [(total.log() + k - t).mean() for k in m],
        ],
        "local sum": [
            *own_sums,
            [
                (block - largest[:, None]).exp().sum(1).log().add(largest - t).mean()
                for block in blocks
            ],
        ],
        "equal blocks": [[form] * n for form in equal_blocks],
    }


NO_MAXIMUM = Misconception(
    "no maximum subtracted",
    "exp of a large logit is infinite. The loss is right for small logits only.",
    only_large_overflow,
)


@mistake(
    "logits gathered",
    "All logits travel to every rank. The values are right, but a rank receives a number for "
    "every position and every token, where a few numbers for each position are enough.",
)
@right_but(2)
def logits_gathered(trial: Trial) -> bool:
    return sent_in(trial, "forward") >= 0.9 * trial.case.facts["gathered"]


VOCABULARY_LOSS = Exercise(
    number="16b",
    function="vocabulary_loss",
    title="Cross-entropy of logits that are cut along the vocabulary",
    points=10,
    weights={"value": 0.3, "bytes": 0.5, "memory": 0.2},
    cases=lambda draw: [
        *(
            vocabulary_case(draw, n, vocabulary)
            for n, vocabulary in ((1, 40), (2, 81), (3, 80), (4, 90))
        ),
        vocabulary_case(draw, 3, 82, scale=1000.0),
    ],
    checks=(
        value(
            "the loss and the gradient of the logits are those of one process",
            parts=("the loss", "the gradient of the logits"),
        ),
        replace(
            sends_at_most("forward", "at most four all-reduces of one number for each position"),
            weight=4.0,
        ),
        sends_at_most("backward", "backward sends nothing"),
        keeps_at_most("no rank keeps the logits of other ranks"),
    ),
    least_received=least_received,
    misconceptions=(
        *MESSAGES,
        graph_cut(lambda result: result[1]),
        logits_gathered,
        NO_MAXIMUM,
        Misconception(
            "blocks taken as equally wide",
            "A rank takes its rank times one width as its first token. Where n does not divide the "
            "vocabulary, the blocks before differ in width.",
            gives("equal blocks", 0),
        ),
        Misconception(
            "softmax maximum kept local",
            "Each rank subtracts the maximum of its own block, and the sums of exponentials are "
            "then added. They have different factors, so their sum means nothing.",
            gives("local maximum", 0),
        ),
        Misconception(
            "sum of exponentials kept local",
            "Each rank divides by the sum over its own tokens. Softmax divides by the sum over "
            "all tokens.",
            gives("local sum", 0),
        ),
        N_TIMES,
    ),
    hints=(
        "The loss of a position is log Σ exp(logit) − (logit of the target). Both terms can be put "
        "together from a number that each rank knows.",
        "First all-reduce the largest logit of each position (it needs no gradient). Then sum two "
        "numbers over the ranks: Σ exp(logit − max), and the target's logit − max, which is 0 on "
        "ranks that don't have the target.",
        "torch.arange(vocabulary).tensor_split(n) gives the tokens of each rank. Find out which "
        "targets are among your own, and let all others count 0. The sum over ranks passes its "
        "gradient on unchanged, as in the MLP. How does the loss follow from the two sums?",
    ),
    questions=(
        ask_sent(
            "8 positions and 90 tokens in float64 on 4 ranks. How many bytes does each rank "
            "send in forward?",
            lambda: vocabulary_case(Draw("question"), 4, 90),
            lambda trial: sent_in(trial, "forward"),
        ),
    ),
    program=run_vocabulary_loss,
    allowed=P2P | COLLECTIVES,
    picture="lanes",
)


EXERCISES = [VOCABULARY_LOSS]
