"""Exercise 8d: an all-reduce on two levels, in which every rail carries the same bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from parallel101 import Network
from parallel101.laboratory.analysis.provenance import origin_tensor
from parallel101.laboratory.exercises.wrong_values import every, wrong_sums
from parallel101.laboratory.grade.compared_values import weights
from parallel101.laboratory.grade.exercise import (
    Case,
    Check,
    Draw,
    Exercise,
    Question,
    Trial,
    mistake,
)
from parallel101.laboratory.grade.exercise_checks import (
    ITS_INPUT,
    MESSAGES,
    SMALL,
    ask_sent,
    ask_steps,
    at_most,
    bytes_sent,
    communicated,
    failed,
    right,
    steps,
    unwritten_was_sent,
    value,
)


def two_level_case(xs: Sequence[torch.Tensor], k: int, note: str = "") -> Case:
    """Return an all-reduce in which every message takes a second, inside a node and on a rail."""
    n = len(xs)
    nodes = n // k
    return Case(
        [(x, k) for x in xs],
        [torch.stack(list(xs)).sum(0)] * n,
        f"{nodes} node{'s' * (nodes > 1)} of {k}{note and ', '}{note}",
        facts={"xs": xs, "k": k, "nodes": nodes},
        network=Network.two_level(
            k,
            latency=1.0,
            bandwidth=float("inf"),
            inside_latency=1.0,
            inside_bandwidth=float("inf"),
            rails=k,
        ),
    )


def two_level_cases(draw: Draw) -> list[Case]:
    cases = [
        two_level_case(draw.tensors(n, 24 * n, 2), k)
        for n, k in ((1, 1), (2, 2), (2, 1), (4, 2), (6, 3))
    ]
    cases.append(two_level_case(draw.tensors(4, 123), 2, "123 elements, which 4 doesn't divide"))
    cases.append(
        two_level_case(
            [x.t() for x in draw.tensors(6, 2, 51, dtype=torch.float64)], 2, "transposed, float64"
        )
    )
    cases.append(
        two_level_case(
            draw.tensors(4, 3, dtype=torch.int64), 2, "3 whole numbers, fewer than ranks"
        )
    )
    cases.append(two_level_case(draw.tensors(4, 1, 80), 2, "1 row"))
    return [
        *cases,
        two_level_case(draw.tensors(8, draw.integer(90, 110), 2), 4),
        two_level_case(draw.tensors(8, 30, 8), 2),
    ]


def between_bytes(case: Case) -> int:
    """Return the bytes that a rank sends to other nodes: 2·(N − 1)/N of its share of x."""
    x, k, nodes = case.facts["xs"][0], case.facts["k"], case.facts["nodes"]
    share = -(-x.numel() // k)
    return 2 * (nodes - 1) * -(-share // nodes) * x.element_size()


def all_bytes(case: Case) -> list[int]:
    x, k = case.facts["xs"][0], case.facts["k"]
    inside = 2 * (k - 1) * -(-x.numel() // k) * x.element_size()
    return [inside + between_bytes(case)] * case.world_size


def fewest(case: Case) -> int:
    return 2 * (case.facts["k"] - 1) + 2 * (case.facts["nodes"] - 1)


def x_each(case: Case) -> list[int]:
    return [case.facts["xs"][0].nbytes if case.world_size > 1 else 0] * case.world_size


def sent_between(trial: Trial) -> list[int]:
    """Return the bytes that each rank sends to other nodes, by rank."""
    k, sent = trial.case.facts["k"], [0] * trial.world_size
    for event in trial.trace.events:
        if event.kind == "send" and event.peer is not None and event.peer // k != event.rank // k:
            sent[event.rank] += event.nbytes
    return sent


def rails_share() -> Check:
    """Check a rank's bytes: to other nodes, and in all."""
    rails = at_most(
        "bytes",
        "every rail carries the same, 2·(N − 1)/N·S/k, and no rank sends more than that and "
        "2·(k − 1)·S/k",
        sent_between,
        between_bytes,
        "rank {rank} sent {found} bytes to other nodes; {most} are enough",
        lambda case: SMALL,
    )
    sent = bytes_sent(all_bytes, rails.says)
    return replace(sent, wrong=lambda trial: rails.wrong(trial) or sent.wrong(trial))


# ---- misconceptions ----


def several_nodes(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials with several nodes of several ranks, and enough bytes to matter."""
    return [
        trial
        for trial in trials
        if trial.case.facts["k"] > 1
        and trial.case.facts["nodes"] > 1
        and trial.case.facts["xs"][0].nbytes >= 100 * trial.world_size
    ]


def on_grid(trial: Trial, k: int) -> bool:
    """Check whether all messages stay in a row or a column, if each row has k ranks."""
    return all(
        event.peer // k == event.rank // k or event.peer % k == event.rank % k
        for event in trial.trace.events
        if event.kind == "send" and event.peer is not None
    )


def one_rail(trial: Trial) -> bool:
    """Check whether one rank of each node sends everything that leaves the node."""
    k, sent = trial.case.facts["k"], sent_between(trial)
    nodes = [sent[first : first + k] for first in range(0, trial.world_size, k)]
    return all(sum(count > 64 for count in node) == 1 for node in nodes)


@mistake(
    "flat ring over all ranks",
    "The ring of all ranks leaves each node by one rank, so it uses one rail, and it takes "
    "2·(n − 1) steps. All other rails are idle.",
)
@every(several_nodes)
def flat_ring(trial: Trial) -> bool:
    """Check whether every rank sends as much as in a ring of all ranks, on one rail.

    The results are right.
    """
    whole = trial.case.facts["xs"][0].nbytes * (1 - 1 / trial.world_size)
    return right(trial) and one_rail(trial) and min(communicated(trial)) >= 1.5 * whole


@mistake(
    "one rank talks for its node",
    "One rank of each node sends all that leaves the node: one rail is busy and all others "
    "are idle.",
)
@every(several_nodes)
def leaders_only(trial: Trial) -> bool:
    """Check whether results are right, but only one rail is busy."""
    return right(trial) and one_rail(trial)


@mistake(
    "strided ranks taken for a node",
    "Ranks i, i + N, i + 2·N, … are taken for a node. They are on different nodes, so the larger "
    "part of the bytes goes between nodes.",
)
@every(several_nodes)
def strided_nodes(trial: Trial) -> bool:
    """Check whether results are right, but nodes and rails are those of ranks N apart."""
    much = max(sent_between(trial)) > between_bytes(trial.case) + SMALL
    return right(trial) and on_grid(trial, trial.case.facts["nodes"]) and much


@mistake(
    "whole tensor between nodes",
    "Every rank sends the sum of its node, or its whole x, to other nodes. Its rail needs to "
    "carry only its share: after the reduce-scatter, that is S/k bytes.",
)
@every(several_nodes)
def whole_between_nodes(trial: Trial) -> bool:
    """Check whether every rank sends much more than its share to other nodes, on its own rail.

    The results are right.
    """
    much = min(sent_between(trial)) >= 1.5 * between_bytes(trial.case)
    return right(trial) and on_grid(trial, trial.case.facts["k"]) and much


def results(trial: Trial) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Yield each rank's result, with the tensors that should add up to it."""
    for result in trial.results:
        if isinstance(result, torch.Tensor):
            yield result.flatten(), [x.flatten() for x in trial.case.facts["xs"]]


@mistake(
    "sum of one node only",
    "Every rank has the sum of its own node. What the other nodes have is never added.",
)
@every(lambda trials: several_nodes(failed(trials)))
def node_only(trial: Trial) -> bool:
    """Check whether, with several nodes, every result is the sum over the rank's own node."""
    k, n = trial.case.facts["k"], trial.world_size
    found = [weights(*pair) or [] for pair in results(trial)]
    own = [[float(other // k == rank // k) for other in range(n)] for rank in range(n)]
    return [[round(c, 3) for c in counts] for counts in found] == own


@mistake(
    "works only if n divides the size",
    "The code is right if n divides the number of elements, and only then: it takes all "
    "chunks to be equally large.",
)
@every(failed)
def not_divided(trial: Trial) -> bool:
    """Check whether results are wrong only if n doesn't divide the number of elements."""
    return bool(trial.case.facts["xs"][0].numel() % trial.world_size)


QUESTION = lambda: two_level_case([torch.ones(1000)] * 8, 4)  # noqa: E731
TWO_LEVEL_ALL_REDUCE = Exercise(
    number="8d",
    function="two_level_all_reduce",
    title="All-reduce over two levels",
    points=10,
    weights={"value": 0.3, "bytes": 0.5, "steps": 0.2},
    cases=two_level_cases,
    checks=(
        value("every rank returns the sum", keeps="x"),
        rails_share(),
        steps(fewest, "2·(k − 1) + 2·(N − 1) steps", slack=lambda case: fewest(case) / 2),
    ),
    least_received=x_each,
    misconceptions=(
        *MESSAGES,
        unwritten_was_sent,
        node_only,
        flat_ring,
        leaders_only,
        strided_nodes,
        whole_between_nodes,
        not_divided,
        *wrong_sums(results),
        *ITS_INPUT,
    ),
    hints=(
        "You have all three parts already, as loops over the ranks of a ring. What are the two "
        "rings of a rank here: with whom is it in a node, and with whom on a rail?",
        "Write the two loops of the ring all-reduce as functions of a list of ranks and a list of "
        "chunks, so that they work for any ring. In which order does a rank call them, and on "
        "which ring?",
        "The ranks of a node share rank // k, and those of a rail share rank % k. Make three calls "
        "on the flat x: scatter its k chunks inside, all-reduce on the rail the chunk that you "
        "then have (cut into N chunks, again by tensor_split), and gather inside. A rank's place "
        "in a ring is not its number.",
    ),
    questions=(
        ask_steps("2 nodes of 4 ranks: how many steps does it take?", QUESTION),
        ask_sent(
            "2 nodes of 4 ranks, 1000 float32 numbers each: how many bytes does each rank send?",
            QUESTION,
        ),
        Question(
            "between",
            "How many of these bytes go to the other node?",
            QUESTION,
            lambda trial: max(sent_between(trial)),
            "bytes",
        ),
    ),
    watch=lambda: two_level_case([origin_tensor(rank, 6, 12) for rank in range(6)], 3),
)


EXERCISES = [TWO_LEVEL_ALL_REDUCE]
