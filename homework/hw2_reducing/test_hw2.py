"""Grades homework 2. `pytest homework/hw2_reducing` runs it."""

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from parallel101.analysis.provenance import origin_tensor
from parallel101.grade.checks import (
    CHANGES_ITS_INPUT,
    MESSAGES,
    bytes_sent,
    close,
    communicated,
    factor,
    failed,
    origins,
    received,
    right,
    same,
    steps,
    value,
    weights,
)
from parallel101.grade.exercise import Case, Draw, Exercise, Misconception, Question, Trial

F64, I64 = torch.float64, torch.int64


def several_ranks(trials: Sequence[Trial], least: int = 2) -> list[Trial]:
    """The trials on at least so many ranks whose tensors are large enough to count bytes."""
    return [trial for trial in trials if trial.world_size >= least and trial.case.facts["xs"][0].nbytes >= 100 * trial.world_size]


def facts(xs: Sequence[torch.Tensor], **more: object) -> dict:
    return {"xs": list(xs), **more}


def share(case: Case) -> float:
    """(n − 1)/n of the bytes of x; the chunks are as large as the largest one."""
    x, n = case.facts["xs"][0], case.world_size
    return (n - 1) * math.ceil(x.shape[0] / n) * (x.nbytes // max(1, x.shape[0]))


# ---- what a sum is made of ----

Pieces = Callable[[Trial], Iterator[tuple[torch.Tensor, list[torch.Tensor]]]]  # of each result, with what it should be the sum of


def factors(trials: Sequence[Trial], pieces: Pieces) -> list[tuple[Trial, list[float]]]:
    """For each piece of the results that is a sum of the ranks' pieces with some factors, these factors."""
    found = [(trial, weights(piece, parts)) for trial in trials if trial.error is None for piece, parts in pieces(trial)]
    return [(trial, [round(c, 3) for c in cs]) for trial, cs in found if cs is not None]


def counted_twice(pieces: Pieces) -> Misconception:
    def seen(trials: Sequence[Trial]) -> bool:
        sums = [cs for trial, cs in factors(failed(trials), pieces) if trial.case.facts.get("op", "sum") == "sum"]
        return any(all(c == int(c) for c in cs) and max(cs) >= 2 for cs in sums)

    return Misconception(
        "counted twice",
        "The data of some ranks is added more than once: what arrives already contains it, or a finished sum is added in place of copied.",
        seen,
    )


def left_out(pieces: Pieces) -> Misconception:
    def seen(trials: Sequence[Trial]) -> bool:
        sums = [cs for trial, cs in factors(failed(trials), pieces) if trial.case.facts.get("op", "sum") == "sum"]
        return any(set(cs) == {0.0, 1.0} for cs in sums)

    return Misconception("ranks left out", "The sum lacks the data of some ranks: it is overwritten, or never added.", seen)


def divided_too_often(pieces: Pieces) -> Callable[[Sequence[Trial]], bool]:
    """Sums are right. In means, each rank's data is divided by n once or more, and somewhere more than once."""

    def seen(trials: Sequence[Trial]) -> bool:
        wrong = failed(trials)
        if not wrong or any(trial.case.facts["op"] == "sum" or trial.error is not None for trial in wrong):
            return False
        again = False
        for trial in wrong:
            n = trial.world_size
            for piece, parts in pieces(trial):
                cs = weights(piece, parts)
                if cs is None:
                    continue
                if not all(any(abs(c - n**-k) < 2e-3 * n**-k for k in range(n + 2)) for c in cs):
                    return False
                again = again or any(c < 0.9 / n for c in cs)
        return again

    return seen


def sum_for_mean(trials: Sequence[Trial]) -> bool:
    """Where the mean is asked for, the sum is returned."""
    wrong = failed(trials)
    return bool(wrong) and all(
        trial.case.facts["op"] == "mean" and trial.error is None and same_up_to(trial, float(trial.world_size)) for trial in wrong
    )


def same_up_to(trial: Trial, k: float) -> bool:
    """Whether every result is k times the expected one."""
    pairs = [(found, expected) for found, expected in zip(trial.results, trial.case.expected, strict=True) if expected is not None]
    found_k = [factor(found, expected) for found, expected in pairs]
    return all(f is not None and abs(f - k) < 1e-3 * abs(k) for f in found_k)


def only_powers_of_two(trials: Sequence[Trial]) -> bool:
    """Right wherever n is a power of two, and wrong somewhere else."""
    wrong = failed(trials)
    return bool(wrong) and all(trial.world_size & (trial.world_size - 1) for trial in wrong)


SUM_FOR_MEAN = Misconception("sum for mean", "Where the mean is asked for, the sum is returned: it is n times too large.", sum_for_mean)


# ---- 4: reduce ----


def reduce_case(xs: Sequence[torch.Tensor], root: int, op: str = "sum", note: str = "") -> Case:
    n, total = len(xs), torch.stack(list(xs)).sum(0)
    result = total / n if op == "mean" else total
    expected = [result if rank == root else None for rank in range(n)]
    return Case([(x, root, op) for x in xs], expected, f"root {root}, {op}{note and ', '}{note}", facts=facts(xs, root=root, op=op))


def reduce_cases(draw: Draw) -> list[Case]:
    rows = draw.integer(40, 60)
    cases = [
        reduce_case(draw.tensors(1, rows, 2), 0),
        reduce_case(draw.tensors(2, rows, 2), 0),
        reduce_case(draw.tensors(2, rows, 2), 1, "mean"),
    ]
    cases += [reduce_case(draw.tensors(3, rows, 2), 0, "mean"), reduce_case(draw.tensors(4, rows, 2), 0)]
    cases.append(reduce_case([x.t() for x in draw.tensors(3, 2, rows, dtype=F64)], draw.integer(1, 2), "sum", "transposed, float64"))
    cases.append(reduce_case(draw.tensors(4, 3, dtype=I64), draw.integer(1, 3), "sum", "3 whole numbers"))
    return [*cases, reduce_case(draw.tensors(4, rows, 2), draw.integer(1, 3), "mean"), reduce_case(draw.tensors(5, rows), 4, "mean")]


def x_from_others(case: Case) -> list[int]:
    return [0 if rank == case.facts["root"] else case.facts["xs"][0].nbytes for rank in range(case.world_size)]


def x_at_root(case: Case) -> list[int]:
    n = case.world_size
    return [case.facts["xs"][0].nbytes if n > 1 and rank == case.facts["root"] else 0 for rank in range(n)]


def root_pieces(trial: Trial) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    yield trial.results[trial.case.facts["root"]], trial.case.facts["xs"]


def only_root_zero(trials: Sequence[Trial]) -> bool:
    """Right wherever the root is 0, wrong wherever it is not."""
    zero = [trial for trial in trials if trial.world_size > 1 and trial.case.facts["root"] == 0]
    other = [trial for trial in trials if trial.case.facts["root"] != 0]
    return not failed(zero) and len(failed(other)) == len(other)


REDUCE_QUESTION = lambda: reduce_case([torch.ones(1000)] * 4, 0)  # noqa: E731

REDUCE = Exercise(
    number="4",
    function="reduce",
    title="Reduce",
    points=10,
    cases=reduce_cases,
    checks=(
        value("the root returns the sum or the mean, the others None; every x stays as it is", keeps="x"),
        bytes_sent(x_from_others, "every rank but the root sends x once"),
        steps(lambda case: case.world_size - 1, "n − 1 steps", slack=lambda case: case.world_size - 1),
    ),
    least_received=x_at_root,
    misconceptions=(
        *MESSAGES,
        Misconception(
            "mean divides on every rank",
            "More than one rank divides by n, so some of the data is divided by n twice or more: the result is too small.",
            divided_too_often(root_pieces),
        ),
        SUM_FOR_MEAN,
        CHANGES_ITS_INPUT,
        counted_twice(root_pieces),
        left_out(root_pieces),
        Misconception(
            "root hard-coded to 0",
            "The code is right if the root is rank 0, and only then: somewhere it takes rank 0 for the root.",
            only_root_zero,
        ),
    ),
    hints=(
        "It is a gather with an addition in place of each copy. Where is the one place at which the mean can be divided?",
        "The root adds what it receives to a clone of its own x: x itself must stay as it is. It divides once, at the end.",
        "On the root: total, arriving = x.clone(), torch.empty(x.shape, dtype=x.dtype); for each other rank: dist.recv(arriving, other); "
        "total += arriving. Return total / n if op == \"mean\" else total. Elsewhere: dist.send(x.contiguous(), root).",
    ),
    questions=(
        Question("received", "4 ranks, 1000 float32 numbers each: how many bytes does the root receive?",
                 REDUCE_QUESTION, lambda trial: received(trial)[0], "bytes"),
    ),
    watch=lambda: reduce_case([origin_tensor(rank, 4, 6) for rank in range(4)], 1),
)  # fmt: skip


# ---- 5: ring all-gather ----


def all_gather_case(xs: Sequence[torch.Tensor], note: str = "") -> Case:
    return Case([(x,) for x in xs], [torch.cat(list(xs))] * len(xs), note, facts=facts(xs))


def all_gather_cases(draw: Draw) -> list[Case]:
    cases = [all_gather_case(draw.tensors(n, 60, 2)) for n in (1, 2, 3, 4)]
    cases.append(all_gather_case(draw.tensors(3, 1, dtype=I64), "1 whole number each"))
    cases.append(all_gather_case([x.t() for x in draw.tensors(4, 3, 51, dtype=F64)], "transposed, float64"))
    return [*cases, all_gather_case(draw.tensors(5, 61, 2))]


def all_but_own(case: Case) -> list[int]:
    return [(case.world_size - 1) * case.facts["xs"][0].nbytes] * case.world_size


def through_one_rank(trials: Sequence[Trial]) -> bool:
    """Right, but some rank sends more than its part, while another sends its own x once at most."""
    large = several_ranks(trials)
    return bool(large) and all(
        right(t) and max(communicated(t)) > all_but_own(t.case)[0] and min(communicated(t)) <= t.case.facts["xs"][0].nbytes for t in large
    )


def by_step(trials: Sequence[Trial]) -> bool:
    """What arrives in step s lies in slot s or s + 1, on every rank. The rank's own x may lie anywhere."""
    wrong = [trial for trial in failed(trials) if trial.world_size > 2]
    return bool(wrong) and all(any(_arrivals(trial, way, shift) for way in (1, -1) for shift in (0, 1)) for trial in wrong)


def _arrivals(trial: Trial, way: int, shift: int) -> bool:
    n = trial.world_size
    for rank, result in enumerate(trial.results):
        found = origins(result, trial.case.facts["xs"])
        if found is None:
            return False
        in_place = [slot for slot, source in enumerate(found) if source == (rank - way * (slot + 1 - shift)) % n]
        if len(in_place) < n - 2 or any(found[slot] not in (rank, None) for slot in range(n) if slot not in in_place):
            return False
    return True


def another_order(trials: Sequence[Trial]) -> bool:
    """Every rank has every x once, in another order than that of the ranks."""
    wrong = failed(trials)
    orders = [origins(result, trial.case.facts["xs"]) for trial in wrong for result in trial.results]
    return bool(wrong) and all(order is not None and sorted(map(str, order)) == sorted(map(str, range(len(order)))) for order in orders)


def own_every_time(trials: Sequence[Trial]) -> bool:
    """All that a rank has received is the x of one neighbour."""
    wrong = [trial for trial in failed(trials) if trial.world_size > 2]
    for trial in wrong:
        n = trial.world_size
        for rank, result in enumerate(trial.results):
            found = origins(result, trial.case.facts["xs"])
            if found is None or not any(set(found) == {rank, (rank + way) % n} for way in (1, -1)):
                return False
    return bool(wrong)


GATHER_QUESTION = lambda: all_gather_case([torch.ones(250)] * 4)  # noqa: E731

RING_ALL_GATHER = Exercise(
    number="5",
    function="ring_all_gather",
    title="Ring all-gather",
    points=10,
    cases=all_gather_cases,
    checks=(
        value("every rank returns all x, in the order of the ranks", keeps="x"),
        bytes_sent(all_but_own, "every rank sends (n − 1)/n of the result"),
        steps(lambda case: case.world_size - 1, "n − 1 steps", slack=lambda case: 2 * (case.world_size - 1)),
    ),
    least_received=all_but_own,
    misconceptions=(
        *MESSAGES,
        Misconception(
            "gather then broadcast",
            "All data goes through one rank, which sends far more than the others: its link is busy while theirs are idle.",
            through_one_rank,
        ),
        Misconception(
            "sends its own x every time",
            "A rank sends its own x in each step, so its neighbour gets the same data again and again: nothing is passed on.",
            own_every_time,
        ),
        Misconception(
            "slot by step in place of origin",
            "What arrives is put into the slot of the step in which it arrived. In one step each rank gets another rank's x, so the ranks' "
            "results differ: the slot must be that of the rank from which the data came.",
            by_step,
        ),
        Misconception(
            "joined in the wrong order",
            "Every rank has all the data, but joins it in another order than that of the ranks.",
            another_order,
        ),
        CHANGES_ITS_INPUT,
    ),
    hints=(
        "In step 0 you send your own x. What do you send in step 1? Whose x arrives in step 0, and whose in step 1?",
        "In step s, rank r sends the block of rank r − s and receives that of rank r − s − 1, all mod n. Keep a list of n blocks.",
        "blocks[rank] = x. In each step: sending = dist.isend(blocks[(rank - step) % n], (rank + 1) % n); "
        "dist.recv(blocks[(rank - step - 1) % n], (rank - 1) % n); sending.wait(). At the end torch.cat(blocks).",
    ),
    questions=(
        Question("bytes", "4 ranks, 250 float32 numbers each: how many bytes does each rank send?",
                 GATHER_QUESTION, lambda trial: max(communicated(trial)), "bytes"),
        Question("steps", "How many steps does it take?", GATHER_QUESTION, lambda trial: int(trial.trace.makespan), "steps"),
    ),
    watch=lambda: all_gather_case([origin_tensor(rank, 4, 2) for rank in range(4)]),
)  # fmt: skip


# ---- 6: ring reduce-scatter ----


def reduce_scatter_case(xs: Sequence[torch.Tensor], note: str = "") -> Case:
    n = len(xs)
    chunks = list(torch.tensor_split(torch.stack(list(xs)).sum(0), n))
    return Case([(x,) for x in xs], chunks, note, facts=facts(xs, chunks=chunks))


def reduce_scatter_cases(draw: Draw) -> list[Case]:
    cases = [reduce_scatter_case(draw.tensors(n, 24 * n, 2)) for n in (1, 2, 3, 4)]
    cases.append(reduce_scatter_case(draw.tensors(3, 61, 2), "61 rows, which 3 doesn't divide"))
    cases.append(reduce_scatter_case(draw.tensors(4, 3, dtype=I64), "3 whole numbers, fewer than ranks"))
    cases.append(reduce_scatter_case([x.t() for x in draw.tensors(4, 3, 83, dtype=F64)], "transposed, float64"))
    return [*cases, reduce_scatter_case(draw.tensors(5, 103, 2))]


def own_chunk(case: Case) -> list[int]:
    return [chunk.nbytes if case.world_size > 1 else 0 for chunk in case.facts["chunks"]]


def chunk_pieces(trial: Trial) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    for rank, result in enumerate(trial.results):
        yield result, [torch.tensor_split(x, trial.world_size)[rank] for x in trial.case.facts["xs"]]


def all_then_slice(trials: Sequence[Trial]) -> bool:
    """Every rank receives as many bytes as x has: what an all-reduce takes."""
    large = several_ranks(trials)
    return bool(large) and all(right(t) and min(received(t)) >= t.case.facts["xs"][0].nbytes for t in large)


def sum_on_one_rank(trials: Sequence[Trial]) -> bool:
    """Right, but one rank receives more than a whole x while another gets no more than its own rows."""
    large = several_ranks(trials, least=3)
    return bool(large) and all(
        right(t) and max(received(t)) >= 2 * t.case.facts["xs"][0].nbytes and min(received(t)) <= max(own_chunk(t.case)) + 64 for t in large
    )


def off_by_one(trials: Sequence[Trial]) -> bool:
    """Every rank returns the finished chunk of the next rank, or of the one before."""
    wrong = failed(trials)
    return bool(wrong) and any(
        all(
            trial.error is None and same(result, trial.case.facts["chunks"][(rank + way) % trial.world_size])
            for trial in wrong
            for rank, result in enumerate(trial.results)
        )
        for way in (1, -1)
    )


SCATTER_QUESTION = lambda: reduce_scatter_case([torch.ones(1000)] * 4)  # noqa: E731

RING_REDUCE_SCATTER = Exercise(
    number="6",
    function="ring_reduce_scatter",
    title="Ring reduce-scatter",
    points=10,
    cases=reduce_scatter_cases,
    checks=(
        value("rank r returns its rows of the sum", keeps="x"),
        bytes_sent(lambda case: [int(share(case))] * case.world_size, "every rank sends (n − 1)/n of x"),
        steps(lambda case: case.world_size - 1, "n − 1 steps", slack=lambda case: 2 * (case.world_size - 1)),
    ),
    least_received=own_chunk,
    misconceptions=(
        *MESSAGES,
        Misconception(
            "all-reduce then slice",
            "Every rank gets the whole sum, and keeps only its own rows: that moves at least twice as many bytes as a reduce-scatter.",
            all_then_slice,
        ),
        Misconception(
            "reduce then scatter",
            "One rank receives everybody's data, adds it up and sends the rows out: its link is busy while the others are idle.",
            sum_on_one_rank,
        ),
        Misconception(
            "owner off by one",
            "The sums are right, but they end at the wrong ranks: every rank returns its neighbour's rows.",
            off_by_one,
        ),
        counted_twice(chunk_pieces),
        left_out(chunk_pieces),
        CHANGES_ITS_INPUT,
    ),
    hints=(
        "The all-gather backwards. Follow one chunk: it must arrive at its owner last, so at which rank does it start?",
        "The sum of chunk c starts at rank c + 1 and goes round the ring to rank c. So in step 1 rank r sends its part of chunk r − 1. "
        "In each step it adds its own part to what has arrived, and sends that on in the next step.",
        "partial = chunks[rank - 1].clone(). For step 1 … n − 1: send partial to rank + 1; receive `arriving`, as large as "
        "mine = chunks[(rank - step - 1) % n], from rank − 1; then partial = arriving + mine. At the end partial is chunk `rank`.",
    ),
    questions=(
        Question("bytes", "4 ranks, 1000 float32 numbers each: how many bytes does each rank send?",
                 SCATTER_QUESTION, lambda trial: max(communicated(trial)), "bytes"),
        Question("steps", "How many steps does it take?", SCATTER_QUESTION, lambda trial: int(trial.trace.makespan), "steps"),
    ),
    watch=lambda: reduce_scatter_case([origin_tensor(rank, 4, 8) for rank in range(4)]),
)  # fmt: skip


# ---- 7: ring all-reduce, and 8: recursive doubling ----


def all_reduce_case(xs: Sequence[torch.Tensor], op: str | None = "sum", note: str = "") -> Case:
    """`op`: None for a function that has no argument op."""
    n, total = len(xs), torch.stack(list(xs)).sum(0)
    result = total / n if op == "mean" else total
    notes = [part for part in (op, note) if part]
    return Case([(x, op) if op else (x,) for x in xs], [result] * n, ", ".join(notes), facts=facts(xs, op=op or "sum"))


def all_reduce_cases(draw: Draw) -> list[Case]:
    cases = [all_reduce_case(draw.tensors(n, 24 * n, 2), op) for n, op in ((1, "mean"), (2, "sum"), (2, "mean"), (3, "sum"), (4, "mean"))]
    cases.append(all_reduce_case(draw.tensors(4, 123), "sum", "123 elements, which 4 doesn't divide"))
    cases.append(all_reduce_case([x.t() for x in draw.tensors(3, 2, 51, dtype=F64)], "mean", "transposed, float64"))
    cases.append(all_reduce_case(draw.tensors(5, 3, dtype=I64), "sum", "3 whole numbers, fewer than ranks"))
    return [*cases, all_reduce_case(draw.tensors(5, 40, 3), "mean"), all_reduce_case(draw.tensors(5, 123), "sum", "123 elements")]


def ring_bytes(case: Case) -> list[int]:
    x, n = case.facts["xs"][0], case.world_size
    return [2 * (n - 1) * math.ceil(x.numel() / n) * x.element_size()] * n


def x_each(case: Case) -> list[int]:
    return [case.facts["xs"][0].nbytes if case.world_size > 1 else 0] * case.world_size


def flat_pieces(trial: Trial) -> Iterator[tuple[torch.Tensor, list[torch.Tensor]]]:
    """Each chunk of each rank's result."""
    n, xs = trial.world_size, trial.case.facts["xs"]
    for result in trial.results:
        if isinstance(result, torch.Tensor) and result.shape == xs[0].shape:
            parts = zip(*(torch.tensor_split(x.flatten(), n) for x in xs), strict=True)
            yield from zip(torch.tensor_split(result.flatten(), n), map(list, parts), strict=True)


def whole_round_ring(trials: Sequence[Trial]) -> bool:
    """Right, but every rank sends n − 1 times the whole x."""
    large = several_ranks(trials, least=3)
    return bool(large) and all(right(t) and min(communicated(t)) >= (t.world_size - 1) * t.case.facts["xs"][0].nbytes for t in large)


def reduce_broadcast(trials: Sequence[Trial]) -> bool:
    """Right, but some rank sends more than its part, while another sends x once at most."""
    large = several_ranks(trials, least=3)
    return bool(large) and all(
        right(t) and max(communicated(t)) > ring_bytes(t.case)[0] + 64 and min(communicated(t)) <= t.case.facts["xs"][0].nbytes + 64
        for t in large
    )


def not_divided(trial: Trial) -> bool:
    return trial.case.facts["xs"][0].numel() % trial.world_size != 0


def remainder_dropped(trials: Sequence[Trial]) -> bool:
    """Right in the elements that n equal chunks hold, and wrong in the rest, or without the rest."""
    wrong = failed(trials)
    whole = [trial for trial in wrong if trial.error is None and trial.case.expected[0].numel() > trial.world_size]
    for trial in whole:
        for found, expected in zip(trial.results, trial.case.expected, strict=True):
            count = expected.numel() // trial.world_size * trial.world_size
            if not isinstance(found, torch.Tensor) or found.numel() not in (count, expected.numel()):
                return False
            if not close(found.flatten()[:count], expected.flatten()[:count]):
                return False
    return bool(whole) and all(map(not_divided, wrong))


def one_n_only(trials: Sequence[Trial]) -> bool:
    """Every mean is the sum divided by the same number, whatever n is."""
    means = [trial for trial in trials if trial.case.facts["op"] == "mean" and trial.world_size > 1]
    if len({trial.world_size for trial in means}) < 2 or failed([t for t in trials if t.case.facts["op"] == "sum"]):
        return False
    divisors = set()
    for trial in means:
        found = {1.0 if same(f, e) else factor(f, e) for f, e in zip(trial.results, trial.case.expected, strict=True)}
        divisors |= {None if k is None else round(trial.world_size / k, 2) for k in found}
    return len(divisors) == 1 and None not in divisors


def scaled(trials: Sequence[Trial]) -> bool:
    """Every floating-point result is the expected one times a number. (Whole numbers are cut off, or cannot be divided at all.)"""
    wrong = [trial for trial in failed(trials) if trial.case.facts["xs"][0].is_floating_point()]
    return bool(wrong) and all(
        trial.error is None and all(factor(f, e) is not None for f, e in zip(trial.results, trial.case.expected, strict=True))
        for trial in wrong
    )


ALL_REDUCE_QUESTION = lambda: all_reduce_case([torch.ones(1000)] * 4)  # noqa: E731

RING_ALL_REDUCE = Exercise(
    number="7",
    function="ring_all_reduce",
    title="Ring all-reduce",
    points=20,
    cases=all_reduce_cases,
    checks=(
        value("every rank returns the sum, or the mean", keeps="x"),
        bytes_sent(ring_bytes, "no rank sends more than 2·(n − 1)/n of x"),
        steps(lambda case: 2 * (case.world_size - 1), "2·(n − 1) steps", slack=lambda case: 4 * (case.world_size - 1)),
    ),
    least_received=x_each,
    misconceptions=(
        *MESSAGES,
        SUM_FOR_MEAN,
        Misconception(
            "scaled",
            "The mean is divided by n more than once, so it is too small: by every rank, or before and after the all-gather.",
            divided_too_often(flat_pieces),
        ),
        Misconception(
            "scaled",
            "The sum is divided by the same number for every n. That is right for one number of ranks only.",
            one_n_only,
        ),
        Misconception("scaled", "Every element is wrong by the same factor: something is divided that should not be.", scaled),
        Misconception(
            "remainder dropped",
            "The code cuts n equal chunks. If n doesn't divide the number of elements, the last few are never added up.",
            remainder_dropped,
        ),
        Misconception(
            "works only if n divides the size",
            "The code is right if n divides the number of elements, and only then: it takes all chunks to be equally large.",
            lambda trials: bool(failed(trials)) and all(map(not_divided, failed(trials))),
        ),
        Misconception(
            "whole tensor round the ring",
            "Every rank's whole x goes round the ring, so each rank sends (n − 1)·S bytes. In chunks it stays below 2·S.",
            whole_round_ring,
        ),
        Misconception(
            "reduce then broadcast",
            "The total number of bytes is right, but they are uneven: one rank sends much more than the others, which wait for it.",
            reduce_broadcast,
        ),
        counted_twice(flat_pieces),
        left_out(flat_pieces),
        CHANGES_ITS_INPUT,
    ),
    hints=(
        "You have both halves already: what does rank r have after the reduce-scatter, and what does the all-gather need?",
        "The chunks differ in size by one: cut the elements with torch.tensor_split(x.flatten(), n), and let both loops send and receive "
        "these chunks. Divide once, between the halves.",
        "mine = ring_reduce_scatter(x.flatten()); divide mine by n for the mean; total = torch.empty(x.numel(), dtype=x.dtype); "
        "blocks = torch.tensor_split(total, n); blocks[rank].copy_(mine); then ring_all_gather's loop; return total.view(x.shape).",
    ),
    questions=(
        Question("bytes", "4 ranks, 1000 float32 numbers each: how many bytes does each rank send?",
                 ALL_REDUCE_QUESTION, lambda trial: max(communicated(trial)), "bytes"),
        Question("steps", "How many steps does it take?", ALL_REDUCE_QUESTION, lambda trial: int(trial.trace.makespan), "steps"),
    ),
    watch=lambda: all_reduce_case([origin_tensor(rank, 4, 8) for rank in range(4)]),
)  # fmt: skip


def doubling_cases(draw: Draw) -> list[Case]:
    rows = draw.integer(60, 80)
    cases = [all_reduce_case(draw.tensors(n, rows, 2), None) for n in (1, 2, 3, 4)]
    cases.append(all_reduce_case([x.t() for x in draw.tensors(4, 2, rows, dtype=F64)], None, "transposed, float64"))
    cases.append(all_reduce_case(draw.tensors(3, 2, dtype=I64), None, "2 whole numbers"))
    return [*cases, all_reduce_case(draw.tensors(5, rows, 2), None)]


def log2_down(n: int) -> int:
    return n.bit_length() - 1


def power_of_two(n: int) -> bool:
    return n & (n - 1) == 0


def doubling_bytes(case: Case) -> list[int]:
    n = case.world_size
    return [(log2_down(n) + (not power_of_two(n))) * case.facts["xs"][0].nbytes] * n


def ring_in_place(trials: Sequence[Trial]) -> bool:
    """Right, and no more bytes than a ring, but in more steps."""
    large = several_ranks(trials, least=4)
    return bool(large) and all(
        right(t) and max(communicated(t)) <= ring_bytes(t.case)[0] + 64 and t.trace.makespan >= 2 * (t.world_size - 1) - 0.5 for t in large
    )


def everything_to_everyone(trials: Sequence[Trial]) -> bool:
    """Right, but every rank sends x to every other."""
    large = several_ranks(trials, least=4)
    return bool(large) and all(right(t) and min(communicated(t)) >= (t.world_size - 1) * t.case.facts["xs"][0].nbytes for t in large)


DOUBLING_QUESTION = lambda: all_reduce_case([torch.ones(1000)] * 8, None)  # noqa: E731

DOUBLING_ALL_REDUCE = Exercise(
    number="8a",
    function="doubling_all_reduce",
    title="All-reduce by recursive doubling",
    points=10,
    cases=doubling_cases,
    checks=(
        value("every rank returns the sum", keeps="x"),
        bytes_sent(doubling_bytes, "no rank sends more than log₂ n times x (once more if n is no power of two)"),
        steps(
            lambda case: log2_down(case.world_size) + (0 if power_of_two(case.world_size) else 2),
            "log₂ n steps (⌊log₂ n⌋ + 2 if n is no power of two)",
            slack=lambda case: log2_down(case.world_size),
        ),
    ),
    least_received=x_each,
    misconceptions=(
        *MESSAGES,
        Misconception(
            "breaks at n = 3",
            "The code is right if n is a power of two, and only then. For other n, a partner is missing, or some ranks are left out or "
            "counted twice.",
            only_powers_of_two,
        ),
        Misconception(
            "ring in place of doubling",
            "The bytes are those of a ring, and so are the steps: 2·(n − 1). A sum of few bytes then takes n times as long as it must.",
            ring_in_place,
        ),
        Misconception(
            "everything to everyone",
            "Every rank sends its x to every other rank: n − 1 messages a rank, where log₂ n are enough.",
            everything_to_everyone,
        ),
        counted_twice(flat_pieces),
        left_out(flat_pieces),
        CHANGES_ITS_INPUT,
    ),
    hints=(
        "Take n = 4 first. Your partner at distance 1, 2, 4 is the rank whose number differs from yours in that bit: rank ^ distance.",
        "Both partners send their sum and add what they receive, which needs a second tensor. For n = 3, rank 2 gives "
        "its x to rank 0 and waits; ranks 0 and 1 do the rest; rank 0 sends the result back.",
        "m = 1 << (n.bit_length() - 1). Rank ≥ m: send total to rank − m, then receive it. rank + m < n: first receive from it and add. "
        "Then for distance 1, 2, … < m exchange with rank ^ distance and add. At the end send total to rank + m, if there is such a rank.",
    ),
    questions=(
        Question("steps", "8 ranks: how many steps does it take?", DOUBLING_QUESTION, lambda trial: int(trial.trace.makespan), "steps"),
        Question("bytes", "8 ranks, 1000 float32 numbers each: how many bytes does each rank send?",
                 DOUBLING_QUESTION, lambda trial: max(communicated(trial)), "bytes"),
    ),
    watch=lambda: all_reduce_case([origin_tensor(rank, 5, 6) for rank in range(5)], None),
)  # fmt: skip


# ---- 8: all-to-all ----


def all_to_all_case(xs: Sequence[torch.Tensor], note: str = "") -> Case:
    n = len(xs)
    return Case([(x,) for x in xs], [torch.stack([x[rank] for x in xs]) for rank in range(n)], note, facts=facts(xs))


def all_to_all_cases(draw: Draw) -> list[Case]:
    cases = [all_to_all_case(draw.tensors(n, n, 30, 2)) for n in (1, 2, 3, 4)]
    cases.append(all_to_all_case(draw.tensors(3, 3, dtype=I64), "1 whole number for each rank"))
    cases.append(all_to_all_case([x.t() for x in draw.tensors(4, 51, 4, dtype=F64)], "transposed, float64"))
    return [*cases, all_to_all_case(draw.tensors(5, 5, 61))]


def rows_for_others(case: Case) -> list[int]:
    n = case.world_size
    return [(n - 1) * case.facts["xs"][0].nbytes // n] * n


def rows_of(trial: Trial) -> list[list[tuple[int, int]]] | None:
    """For each rank and each row of its result: the rank and the row from which it came. None if a row is none of them."""
    xs, n = trial.case.facts["xs"], trial.world_size
    table = []
    for result in trial.results:
        if not isinstance(result, torch.Tensor) or result.shape != xs[0].shape:
            return None
        rows = [next(((s, j) for s in range(n) for j in range(n) if same(row, xs[s][j])), None) for row in result]
        if None in rows:
            return None
        table.append([row for row in rows if row is not None])
    return table


def not_transposed(trials: Sequence[Trial]) -> bool:
    """Ranks have rows that were meant for other ranks."""
    tables = [rows_of(trial) for trial in failed(trials)]
    return bool(tables) and all(
        table is not None and any(j != rank for rank, rows in enumerate(table) for _, j in rows) for table in tables
    )


def rows_in_other_order(trials: Sequence[Trial]) -> bool:
    """Every rank has its own rows, in another order than that of the ranks."""
    tables = [rows_of(trial) for trial in failed(trials)]
    return bool(tables) and all(
        table is not None and all(j == rank for rank, rows in enumerate(table) for _, j in rows) for table in tables
    )


def whole_to_everyone(trials: Sequence[Trial]) -> bool:
    """Every rank receives the other ranks' whole x."""
    large = several_ranks(trials)
    return bool(large) and all(min(received(t)) >= (t.world_size - 1) * t.case.facts["xs"][0].nbytes for t in large)


ALL_TO_ALL_QUESTION = lambda: all_to_all_case([torch.ones(4, 250)] * 4)  # noqa: E731

ALL_TO_ALL = Exercise(
    number="8b",
    function="all_to_all",
    title="All-to-all",
    points=10,
    cases=all_to_all_cases,
    checks=(
        value("row i of the result is what rank i had for this rank", keeps="x"),
        bytes_sent(rows_for_others, "every rank sends (n − 1)/n of x"),
        steps(lambda case: case.world_size - 1, "n − 1 steps", slack=lambda case: 2 * (case.world_size - 1)),
    ),
    least_received=rows_for_others,
    misconceptions=(
        *MESSAGES,
        Misconception(
            "whole tensor shipped",
            "Every rank sends all of x to every other rank, which needs only one row of it.",
            whole_to_everyone,
        ),
        Misconception(
            "blocks not transposed",
            "Ranks return rows that were meant for other ranks: the row that is sent to rank j must be row j.",
            not_transposed,
        ),
        Misconception(
            "joined in the wrong order",
            "Every rank has the rows that were meant for it, but not in the order of the ranks from which they came.",
            rows_in_other_order,
        ),
        CHANGES_ITS_INPUT,
    ),
    hints=(
        "Which row do you send to rank j? And into which row do you receive what comes from rank i?",
        "In step s, send to rank + s and receive from rank − s, mod n: then in each step every rank sends one row and receives one.",
        "result = torch.empty(x.shape, dtype=x.dtype); result[rank] = x[rank]. For step 1 … n − 1: to, source = (rank + step) % n, "
        "(rank - step) % n; sending = dist.isend(x[to].contiguous(), to); dist.recv(result[source], source); sending.wait().",
    ),
    questions=(
        Question("bytes", "4 ranks, 250 float32 numbers for each rank: how many bytes does each rank send?",
                 ALL_TO_ALL_QUESTION, lambda trial: max(communicated(trial)), "bytes"),
        Question("steps", "How many steps does it take?", ALL_TO_ALL_QUESTION, lambda trial: int(trial.trace.makespan), "steps"),
    ),
    watch=lambda: all_to_all_case([origin_tensor(rank, 4, 8).reshape(4, 2) for rank in range(4)]),
)  # fmt: skip

EXERCISES = [REDUCE, RING_ALL_GATHER, RING_REDUCE_SCATTER, RING_ALL_REDUCE, DOUBLING_ALL_REDUCE, ALL_TO_ALL]
