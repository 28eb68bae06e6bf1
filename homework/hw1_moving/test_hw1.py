"""Grade homework 1; run it with `pytest homework/hw1_moving`."""

import math
from collections.abc import Callable, Sequence

import torch

from parallel101 import compute
from parallel101.laboratory.analysis.provenance import origin_tensor
from parallel101.laboratory.exercises.wrong_values import every, more_than
from parallel101.laboratory.grade.compared_values import origins, same
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
    ask_sent,
    ask_steps,
    bytes_sent,
    communicated,
    failed,
    on_ranks,
    only_root_zero,
    only_where_none_is_due,
    received,
    right,
    steps,
    unwritten_was_sent,
    value,
)

F32, F64, I64 = torch.float32, torch.float64, torch.int64


def log2_up(n: int) -> int:
    return math.ceil(math.log2(n))


def largest_chunk(case: Case) -> int:
    """Return the bytes of the largest of the n parts of x."""
    x = case.facts["x"]
    return x[: math.ceil(x.shape[0] / case.world_size)].nbytes


# ---- 1: ring shift ----


def ring_shift_case(xs: Sequence[torch.Tensor], note: str = "") -> Case:
    n = len(xs)
    return Case(
        [(x,) for x in xs],
        [xs[(rank - 1) % n] for rank in range(n)],
        note,
        facts={"nbytes": xs[0].nbytes, "xs": xs},
    )


def ring_shift_cases(draw: Draw) -> list[Case]:
    rows = draw.integer(40, 60)
    cases = [ring_shift_case(draw.tensors(n, rows, 2)) for n in (1, 2, 3, 4)]
    cases.append(ring_shift_case(draw.tensors(3, 5, dtype=I64), "5 whole numbers"))
    cases.append(
        ring_shift_case([x.t() for x in draw.tensors(4, 2, rows, dtype=F64)], "transposed, float64")
    )
    return [*cases, ring_shift_case(draw.tensors(5, rows, 2))]


def x_if_not_alone(case: Case) -> list[int]:
    return [case.facts["nbytes"] if case.world_size > 1 else 0] * case.world_size


@mistake(
    "shifted the wrong way",
    "Every rank returns the x of the rank after it: the data goes round the ring backwards.",
)
@every(lambda trials: on_ranks(more_than(2)(trials)))
def shifted_backwards(trial: Trial, rank: int) -> bool:
    """Check whether every rank has the next rank's x, on three ranks or more.

    On two ranks, both directions are the same.
    """
    return same(trial.results[rank], trial.case.facts["xs"][(rank + 1) % trial.world_size])


RING_SHIFT = Exercise(
    number="1",
    function="ring_shift",
    title="Ring shift",
    points=10,
    weights={"value": 0.4, "bytes": 0.3, "steps": 0.3},
    cases=ring_shift_cases,
    checks=(
        value("every rank returns the x of the rank before it", keeps="x"),
        bytes_sent(x_if_not_alone, "every rank sends x once"),
        steps(lambda case: 1, "one step", slack=lambda case: 2),
    ),
    least_received=x_if_not_alone,
    misconceptions=(*MESSAGES, shifted_backwards, *ITS_INPUT, unwritten_was_sent),
    hints=(
        "If every rank calls dist.send first, who receives? Start one of the two without waiting "
        "for it.",
        "dist.isend and dist.irecv return at once, with a work. Start both, then wait for both. "
        "Receive into a tensor of your own: torch.empty(x.shape, dtype=x.dtype).",
        "The neighbours are (rank + 1) % n and (rank - 1) % n. Only the call that "
        "comes first has to be asynchronous. What must you still call before you "
        "return? And whom does a single rank send to?",
    ),
    questions=(
        ask_sent(
            "4 ranks, 1000 float32 numbers each: how many bytes does each rank send?",
            lambda: ring_shift_case([torch.ones(1000)] * 4),
        ),
        ask_steps(
            "4 ranks: how many steps does it take?", lambda: ring_shift_case([torch.ones(1000)] * 4)
        ),
    ),
    watch=lambda: ring_shift_case([origin_tensor(rank, 4, 6) for rank in range(4)]),
)


# ---- 2: broadcast ----


def broadcast_case(xs: Sequence[torch.Tensor], root: int, note: str = "") -> Case:
    n, x = len(xs), xs[root]
    return Case(
        [(mine, root) for mine in xs],
        [x] * n,
        f"root {root}{note and ', '}{note}",
        facts={"root": root, "x": x},
    )


def broadcast_cases(draw: Draw) -> list[Case]:
    rows = draw.integer(40, 60)
    cases = [
        broadcast_case(draw.tensors(n, rows, 2), root)
        for n, root in ((1, 0), (2, 0), (2, 1), (3, 0), (3, 2), (4, 0))
    ]
    cases.append(
        broadcast_case(draw.tensors(4, 3, dtype=I64), draw.integer(1, 3), "3 whole numbers")
    )
    cases.append(
        broadcast_case(
            [x.t() for x in draw.tensors(5, 2, rows, dtype=F64)], 0, "transposed, float64"
        )
    )
    return [*cases, broadcast_case(draw.tensors(5, rows, 2), draw.integer(1, 4))]


def tree_cases(draw: Draw) -> list[Case]:
    """Return the broadcast cases and one with seven ranks.

    With up to six ranks, a tree in which ranks stop sending early is fast enough.
    """
    seven = broadcast_case(draw.tensors(7, 40, 2), draw.integer(0, 6))
    return [*broadcast_cases(draw), seven]


def x_except_on_root(case: Case) -> list[int]:
    return [
        0 if rank == case.facts["root"] else case.facts["x"].nbytes
        for rank in range(case.world_size)
    ]


def flat_bytes(case: Case) -> list[int]:
    most = (case.world_size - 1) * case.facts["x"].nbytes
    return [most if rank == case.facts["root"] else 0 for rank in range(case.world_size)]


def tree_bytes(case: Case) -> list[int]:
    return [log2_up(case.world_size) * case.facts["x"].nbytes] * case.world_size


@mistake(
    "non-power-of-two loses ranks",
    "The code is right if n is a power of two. For other n the tree reaches for ranks that do "
    "not exist, or leaves some ranks out.",
)
def only_powers_of_two(trials: Sequence[Trial]) -> bool:
    """Check whether results are wrong for some n, but never for a power of two, such as 4."""
    wrong = failed(trials)
    four = [trial for trial in trials if trial.world_size == 4]
    return bool(wrong and four) and all(
        trial.world_size & (trial.world_size - 1) for trial in wrong
    )


@mistake(
    "flat in place of a tree",
    "The root sends to every rank itself, in n − 1 steps, while the ranks that already have x "
    "do nothing.",
)
@every(more_than(2))
def root_sends_to_all(trial: Trial) -> bool:
    """Check whether results are right, but all messages come from the root."""
    sent = communicated(trial)
    return right(trial) and sum(sent) == sent[trial.case.facts["root"]]


@mistake(
    "ranks stop sending",
    "Each rank sends x to two others and is then idle, as in a heap. In every step, every "
    "rank that has x must send it, or the tree grows too slowly.",
)
def stops_sending(trials: Sequence[Trial]) -> bool:
    """Check whether no rank sends x more than twice.

    The results are then right, and only seven ranks are too slow.
    """
    several = [trial for trial in trials if trial.world_size > 2]
    slow = [trial for trial in several if trial.trace.makespan > log2_up(trial.world_size) + 0.5]
    return (
        bool(slow)
        and all(right(trial) and max(trial.trace.messages_sent) <= 2 for trial in several)
        and all(trial.world_size > 5 for trial in slow)
    )


@mistake(
    "chain in place of a tree",
    "Every rank passes x on once, so only one message is under way at a time, and it takes n "
    "− 1 steps.",
)
@every(more_than(3))
def one_after_the_other(trial: Trial) -> bool:
    """Check whether results are right, but take n − 1 steps: no rank sends x more than once."""
    slow = trial.trace.makespan >= trial.world_size - 1
    once = max(communicated(trial)) < 2 * trial.case.facts["x"].nbytes
    return right(trial) and slow and once


BROADCAST_QUESTION = lambda: broadcast_case([torch.ones(1000)] * 8, 0)  # noqa: E731

FLAT_BROADCAST = Exercise(
    number="2a",
    function="flat_broadcast",
    title="Broadcast, flat",
    points=10,
    weights={"value": 0.4, "bytes": 0.3, "steps": 0.3},
    cases=broadcast_cases,
    checks=(
        value("every rank returns the root's x", keeps="x"),
        bytes_sent(flat_bytes, "the root sends x to each other rank once, the others send nothing"),
        steps(
            lambda case: case.world_size - 1, "n − 1 steps", slack=lambda case: case.world_size - 1
        ),
    ),
    least_received=x_except_on_root,
    misconceptions=(*MESSAGES, only_root_zero, *ITS_INPUT, unwritten_was_sent),
    hints=(
        "What does the root do, and what do the others do? The two halves of an if.",
        "The root loops over all ranks except itself and sends x. Every other rank receives "
        "once, from the root.",
        "Only the root may return a copy of its own x. What do the others receive into, of which "
        "shape and dtype? A message must be contiguous, but x may be transposed.",
    ),
    questions=(
        ask_sent(
            "8 ranks, 1000 float32 numbers: how many bytes does the root send?",
            BROADCAST_QUESTION,
            lambda trial: communicated(trial)[0],
        ),
        ask_steps("8 ranks: how many steps does it take?", BROADCAST_QUESTION),
    ),
    watch=lambda: broadcast_case([origin_tensor(rank, 4, 6) for rank in range(4)], 1),
)

TREE_BROADCAST = Exercise(
    number="2b",
    function="tree_broadcast",
    title="Broadcast, along a tree",
    points=10,
    weights={"value": 0.3, "bytes": 0.2, "steps": 0.5},
    cases=tree_cases,
    checks=(
        value("every rank returns the root's x", keeps="x"),
        bytes_sent(tree_bytes, "no rank sends more than ⌈log₂ n⌉ times x"),
        steps(lambda case: log2_up(case.world_size), "⌈log₂ n⌉ steps"),
    ),
    least_received=x_except_on_root,
    misconceptions=(
        *MESSAGES,
        only_root_zero,
        only_powers_of_two,
        root_sends_to_all,
        stops_sending,
        one_after_the_other,
        *ITS_INPUT,
        unwritten_was_sent,
    ),
    hints=(
        "Count the ranks from the root: position = (rank − root) mod n. The root has position 0. "
        "You need it again only where you send.",
        "Let the distance be 1, 2, 4, … below n. In each step the positions below the distance "
        "have x. Position p sends to p + distance, if there is one.",
        "So each position receives exactly once: position p does in the step with "
        "distance ≤ p < 2 · distance. From which position? To turn positions back "
        "into ranks, recall which rank has position 0.",
    ),
    questions=(
        ask_steps("8 ranks: how many steps does it take?", BROADCAST_QUESTION),
        ask_sent(
            "8 ranks, 1000 float32 numbers: how many bytes does the busiest rank send?",
            BROADCAST_QUESTION,
        ),
    ),
    watch=lambda: broadcast_case([origin_tensor(rank, 5, 6) for rank in range(5)], 1),
)


# ---- 3: scatter and gather ----


def scatter_case(xs: Sequence[torch.Tensor], root: int, note: str = "") -> Case:
    chunks = list(torch.tensor_split(xs[root], len(xs)))
    return Case(
        [(x, root) for x in xs],
        chunks,
        f"root {root}{note and ', '}{note}",
        facts={"root": root, "x": xs[root], "chunks": chunks},
    )


def scatter_cases(draw: Draw) -> list[Case]:
    cases = [
        scatter_case(draw.tensors(n, 24 * n, 2), root)
        for n, root in ((1, 0), (2, 0), (2, 1), (3, 0), (4, 0))
    ]
    cases.append(
        scatter_case(draw.tensors(3, 61, 2), draw.integer(1, 2), "61 rows, which 3 doesn't divide")
    )
    cases.append(
        scatter_case(
            draw.tensors(4, 3, dtype=I64), draw.integer(1, 3), "3 whole numbers, fewer than ranks"
        )
    )
    cases.append(
        scatter_case(
            [x.t() for x in draw.tensors(4, 3, 83, dtype=F64)],
            draw.integer(1, 3),
            "transposed, float64",
        )
    )
    return [
        *cases,
        scatter_case(draw.tensors(5, 102, 2), 0),
        scatter_case(draw.tensors(5, 103, 2), draw.integer(1, 4)),
    ]


def own_chunk(case: Case) -> list[int]:
    return [
        0 if rank == case.facts["root"] else chunk.nbytes
        for rank, chunk in enumerate(case.facts["chunks"])
    ]


def all_but_one_chunk(case: Case) -> list[int]:
    return [(case.world_size - 1) * largest_chunk(case)] * case.world_size


def of_others(values: Sequence[int], trial: Trial) -> list[int]:
    """Return the values of all ranks but the root."""
    return [one for rank, one in enumerate(values) if rank != trial.case.facts["root"]]


@mistake(
    "whole tensor shipped",
    "Every rank is sent all of x, and keeps only its own rows: that is n times as many bytes "
    "as it needs.",
)
@every(more_than(1))
def whole_scattered(trial: Trial) -> bool:
    """Check whether every rank but the root receives as many bytes as the whole x has."""
    return min(of_others(received(trial), trial)) >= trial.case.facts["x"].nbytes


@mistake(
    "chunks in the wrong order",
    "Ranks get rows of x, but not their own: the chunks are not dealt out by rank.",
)
@every(failed)
def others_chunks(trial: Trial) -> bool:
    """Check whether each rank has a chunk of x, but not always its own."""
    chunks = trial.case.facts["chunks"]
    return all(any(same(result, chunk) for chunk in chunks) for result in trial.results)


@mistake(
    "chunk in place of tensor_split",
    "The rows are cut as torch.chunk cuts them: the last rank gets fewer, and with few rows "
    "some ranks have no chunk at all. torch.tensor_split gives n parts, always.",
)
def as_chunk_cuts(trials: Sequence[Trial]) -> bool:
    """Check whether the wrong results are those of torch.chunk.

    They are wrong only where it cuts x differently from torch.tensor_split.
    """

    def pieces(trial: Trial) -> Sequence[torch.Tensor]:
        return trial.case.facts["x"].chunk(trial.world_size)

    wrong = failed(trials)
    returned = [trial for trial in wrong if trial.error is None]
    return (
        bool(returned)
        and not any(same(list(pieces(trial)), trial.case.facts["chunks"]) for trial in wrong)
        and all(
            same(result, piece)
            for trial in returned
            for result, piece in zip(trial.results, pieces(trial))
        )
    )


SCATTER_QUESTION = lambda: scatter_case([torch.ones(1000)] * 4, 0)  # noqa: E731

SCATTER = Exercise(
    number="3a",
    function="scatter",
    title="Scatter",
    points=10,
    weights={"value": 0.3, "bytes": 0.5, "steps": 0.2},
    cases=scatter_cases,
    checks=(
        value("every rank returns its own rows", keeps="x"),
        bytes_sent(all_but_one_chunk, "no rank sends more than (n − 1)/n of x"),
        steps(
            lambda case: case.world_size - 1, "n − 1 steps", slack=lambda case: case.world_size - 1
        ),
    ),
    least_received=own_chunk,
    misconceptions=(
        *MESSAGES,
        whole_scattered,
        as_chunk_cuts,
        others_chunks,
        only_root_zero,
        *ITS_INPUT,
        unwritten_was_sent,
    ),
    hints=(
        "torch.tensor_split(x, n) gives n chunks on every rank. On ranks other than the root only "
        "their shapes count.",
        "The root sends chunk r to rank r, for every r except itself. Rank r receives into a "
        "new tensor of the shape of its chunk.",
        "The chunks are views of x. Which of them must be made contiguous before it "
        "is sent, and which copied before it is returned? A chunk may have no rows at "
        "all; its sender and its receiver both know that.",
    ),
    questions=(
        ask_sent(
            "4 ranks, 1000 float32 numbers on the root: how many bytes does the root send?",
            SCATTER_QUESTION,
            lambda trial: communicated(trial)[0],
        ),
    ),
    watch=lambda: scatter_case([origin_tensor(rank, 4, 8) for rank in range(4)], 1),
)


def gather_case(xs: Sequence[torch.Tensor], root: int, note: str = "") -> Case:
    """Return a gather in which messages do not arrive in rank order.

    The higher the rank, the earlier it calls.
    """
    n = len(xs)
    expected = [torch.cat(list(xs)) if rank == root else None for rank in range(n)]
    arguments = [(x, root, 0.1 * (n - 1 - rank)) for rank, x in enumerate(xs)]
    return Case(
        arguments, expected, f"root {root}{note and ', '}{note}", facts={"root": root, "xs": xs}
    )


def call_late(function: Callable, x: torch.Tensor, root: int, seconds: float) -> object:
    compute(seconds)
    return function(x, root)


def gather_cases(draw: Draw) -> list[Case]:
    cases = [
        gather_case(draw.tensors(n, 40, 2), root)
        for n, root in ((1, 0), (2, 0), (2, 1), (3, 0), (4, 0))
    ]
    cases.append(
        gather_case(draw.tensors(4, 1, dtype=I64), draw.integer(1, 3), "1 whole number each")
    )
    cases.append(
        gather_case(
            [x.t() for x in draw.tensors(3, 3, 31, dtype=F64)],
            draw.integer(1, 2),
            "transposed, float64",
        )
    )
    return [
        *cases,
        gather_case(draw.tensors(5, 41, 2), 0),
        gather_case(draw.tensors(5, 40, 2), draw.integer(1, 4)),
    ]


def others_at_root(case: Case) -> list[int]:
    most = (case.world_size - 1) * case.facts["xs"][0].nbytes
    return [most if rank == case.facts["root"] else 0 for rank in range(case.world_size)]


def each_once_at_root(trial: Trial) -> str | None:
    """Check that nothing arrives at the root twice.

    All ranks together may send as much as when each passes everything it has to the next rank.
    """
    n, root, nbytes = trial.world_size, trial.case.facts["root"], trial.case.facts["xs"][0].nbytes
    if (got := received(trial)[root]) > (n - 1) * nbytes + 64 * n:
        return f"rank {root}, the root, received {got} bytes; {(n - 1) * nbytes} are enough"
    if (total := sum(communicated(trial))) > n * (n - 1) // 2 * nbytes + 64 * n:
        return f"all ranks together sent {total} bytes; {(n - 1) * nbytes} are enough"
    return None


@mistake(
    "whole tensor shipped",
    "Every rank sends a tensor as large as the whole result, though only its own part of it "
    "is new to the root.",
)
@every(more_than(1))
def whole_gathered(trial: Trial) -> bool:
    """Check whether every rank but the root sends as many bytes as the whole result has."""
    whole = trial.world_size * trial.case.facts["xs"][0].nbytes
    return min(of_others(communicated(trial), trial)) >= whole


@mistake(
    "everyone gathers",
    "Every rank receives all the others' tensors, though only the root needs them.",
)
@every(more_than(1))
def everybody_gathers(trial: Trial) -> bool:
    """Check whether every rank receives what only the root needs."""
    return min(received(trial)) >= (trial.world_size - 1) * trial.case.facts["xs"][0].nbytes


@mistake(
    "arrival order kept in place of rank order",
    "The root joins the tensors in the order in which it got them. That need not be the order "
    "of the ranks.",
)
@every(lambda trials: more_than(1)(failed(trials)))
def another_order(trial: Trial) -> bool:
    """Check whether the root has every rank's x once, but not in rank order."""
    ranks, root = list(range(trial.world_size)), trial.case.facts["root"]
    order = origins(trial.results[root], trial.case.facts["xs"]) or []
    return {*order} == {*ranks} and order != ranks


GATHER_QUESTION = lambda: gather_case([torch.ones(250)] * 4, 0)  # noqa: E731

GATHER = Exercise(
    number="3b",
    function="gather",
    title="Gather",
    points=10,
    weights={"value": 0.3, "bytes": 0.5, "steps": 0.2},
    cases=gather_cases,
    program=call_late,
    checks=(
        value(
            "the root returns every rank's x, in the order of the ranks; the others return None",
            keeps="x",
        ),
        Check("bytes", "the root receives each other rank's x once", each_once_at_root),
        steps(
            lambda case: case.world_size - 1, "n − 1 steps", slack=lambda case: case.world_size - 1
        ),
    ),
    least_received=others_at_root,
    misconceptions=(
        *MESSAGES,
        whole_gathered,
        everybody_gathers,
        another_order,
        only_where_none_is_due,
        only_root_zero,
        *ITS_INPUT,
        unwritten_was_sent,
    ),
    hints=(
        "It is a scatter backwards: every arrow turns round.",
        "Give each rank a place in a list on the root: parts[r] is for rank r, whenever it "
        "arrives. The root's own x is parts[root].",
        "If the root names the source of each receive, it doesn't matter who is late. "
        "Which function joins a list of tensors along dim 0? Every other rank makes "
        "one call and returns None.",
    ),
    questions=(
        Question(
            "received",
            "4 ranks, 250 float32 numbers each: how many bytes does the root receive?",
            GATHER_QUESTION,
            lambda trial: received(trial)[0],
            "bytes",
        ),
        ask_sent(
            "And how many bytes does the root send?",
            GATHER_QUESTION,
            lambda trial: communicated(trial)[0],
        ),
    ),
    watch=lambda: gather_case([origin_tensor(rank, 4, 2) for rank in range(4)], 1),
)

EXERCISES = [RING_SHIFT, FLAT_BROADCAST, TREE_BROADCAST, SCATTER, GATHER]
