"""Exercise 25c: choose a layout, to be held to the planner's best.

What a layout costs is predicted by parallel101.cost, on the learner's ranks and in the grader. The
planner runs in the grader only: no rank imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from parallel101.cost.parallel_layout import ParallelLayout
from parallel101.cost.step_time import step_time
from parallel101.laboratory.exercises.layout_choice import SHAPE, Chosen, choose_on, chosen
from parallel101.laboratory.grade.exercise import (
    Case,
    Check,
    Draw,
    Exercise,
    Misconception,
    Question,
    Trial,
)

ENOUGH = 0.95  # of the planner's MFU: full points
USELESS = 0.85  # of the planner's MFU: no points
SECONDS = 30.0  # of a case, in wall time


def choice_case(
    device: str, gpus: int, memory: float, batch: int, shape: Mapping[str, int]
) -> Case:
    return Case(
        [(device, dict(shape), gpus, memory, batch)],
        [{}],
        note=(
            f"{shape['layers']} layers of {shape['width']:,} features on {gpus:,} {device}s with "
            f"{memory / 1e9:g} GB, {batch:,} samples"
        ),
        facts={
            "device": device,
            "gpus": gpus,
            "memory": memory,
            "batch": batch,
            "shape": tuple(shape[name] for name in SHAPE),
        },
        seconds=SECONDS,
        computes=True,
    )


def shape_of(width: int, layers: int, time: int, vocabulary: int = 51200) -> dict[str, int]:
    return dict(zip(SHAPE, (width, layers, width // 128, vocabulary, time)))


def cases(draw: Draw) -> list[Case]:
    """A small model and large ones, whose best meshes nested loops don't reach early."""
    return [
        choice_case(
            "H100", 48, 80e9, 48 * draw.integer(2, 6),
            shape_of(4096, draw.choice((28, 32, 36)), 4096),
        ),
        choice_case(
            "A100", 512, 40e9, 128,
            shape_of(12288, draw.choice((80, 96)), 2048),
        ),
        choice_case(
            "A100", 1536, 40e9, 384,
            shape_of(12288, 96, 2048, draw.choice((32768, 51200))),
        ),
        choice_case(
            "H100", 768, 80e9, 96,
            shape_of(12288, 96, 4096, draw.choice((51200, 65536))),
        ),
    ]  # fmt: skip


# ---- judging ----


def does_not_fit(trial: Trial) -> str | None:
    try:
        found = Chosen(trial)
    except ValueError as error:
        return str(error)
    if found.fits:
        return None
    return (
        f"{text(found.layout)} needs {found.nbytes / 1e9:.1f} GB on its fullest GPU, which has "
        f"{found.cluster.memory_bytes / 1e9:g} GB"
    )


def too_slow(trial: Trial) -> str | None:
    found = Chosen(trial)
    if found.share >= ENOUGH:
        return None
    return (
        f"{text(found.layout)}: MFU {found.time.mfu:.1%}, {found.share:.0%} of the planner's "
        f"{found.best[1]:.1%}"
    )


def text(layout: ParallelLayout) -> str:
    from parallel101.laboratory.planner.search import layout_text  # in the grader only

    return layout_text(layout)


def part_that_fits(trials: Sequence[Trial]) -> float:
    return sum(found.fits for found in chosen(trials)) / len(trials)


def part_of_mfu(trials: Sequence[Trial]) -> float:
    """The mean over all cases of a score from 0 at USELESS to 1 at ENOUGH."""
    scores = [(found.share - USELESS) / (ENOUGH - USELESS) for found in chosen(trials)]
    return sum(min(max(score, 0.0), 1.0) for score in scores) / len(trials)


# ---- misconceptions ----


def losing(shows: Callable[[Chosen], bool]) -> Callable[[Sequence[Trial]], bool]:
    """Whether choices that show this lose two thirds of the MFU that all of them lose."""

    def seen(trials: Sequence[Trial]) -> bool:
        found = [one for one in chosen(trials) if one.fits and one.share < ENOUGH]
        lost = [ENOUGH - one.share for one in found]
        return sum(x for x, one in zip(lost, found) if shows(one)) >= 2 / 3 * sum(lost) > 0

    return seen


def more_tp(found: Chosen) -> bool:
    parts = found.time.parts
    return found.layout.tp > found.best[0].tp and parts["tp"] > parts["bubble"]


def long_bubble(found: Chosen) -> bool:
    """Whether the bubble takes the most time, besides the kernels."""
    lost = {k: v for k, v in found.time.parts.items() if k not in ("matmul", "memory-bound")}
    return max(lost, key=lambda name: lost[name]) == "bubble"


def needless_recomputation(found: Chosen) -> bool:
    return found.layout.recompute == "full" and found.best[0].recompute == "none"


def no_chunks(found: Chosen) -> bool:
    """A pipeline that is at least 2 % faster with several chunks on each GPU."""
    layout = found.layout
    most = found.shape.layers // layout.pp
    if layout.pp == 1 or layout.chunks > 1 or layout.microbatches % layout.pp:
        return False
    with_chunks = step_time(found.shape, replace(layout, chunks=most), found.cluster)
    return with_chunks.mfu > 1.02 * found.time.mfu


def one_for_all(trials: Sequence[Trial]) -> bool:
    found = chosen(trials)
    return len(found) > 2 and len({(one.layout.tp, one.layout.pp) for one in found}) == 1


MISTAKES = (
    Misconception(
        "more than a GPU has",
        "A layout doesn't fit: its fullest GPU needs more memory than it has. In a real run that "
        "ends in an error after some minutes of start-up, on all GPUs.",
        lambda trials: any(not found.fits for found in chosen(trials)),
    ),
    Misconception(
        "tp beyond the node",
        "In a layout that loses points, tp reaches beyond the 8 GPUs of a node. Its all-reduces "
        "then use the network in every layer.",
        lambda trials: any(f.layout.tp > 8 and f.share < ENOUGH for f in chosen(trials)),
    ),
    Misconception(
        "recomputation without need",
        "In the layouts that lose the most points, everything is recomputed, although the planner "
        "does without it. That costs a third more arithmetic, which MFU doesn't count.",
        losing(needless_recomputation),
    ),
    Misconception(
        "one layout for all",
        "Every model gets the same tp and pp. What is needed to fit a large model is a waste on a "
        "small one.",
        one_for_all,
    ),
    Misconception(
        "more tp than needed",
        "In the layouts that lose the most points, tp is larger than in the planner's, and its "
        "all-reduces take more time than the bubble. A smaller tp fits, too.",
        losing(more_tp),
    ),
    Misconception(
        "one chunk on each GPU",
        "In the layouts that lose the most points, each GPU of a pipeline has one stage. With "
        "several chunks on each, the bubble is shorter.",
        losing(no_chunks),
    ),
    Misconception(
        "bubble too long",
        "In the layouts that lose the most points, the bubble takes the most time besides "
        "arithmetic. Fewer stages or more microbatches make it shorter.",
        losing(long_bubble),
    ),
)

EXERCISES = [
    Exercise(
        number="25c",
        function="choose_layout",
        title="A layout for a cluster",
        points=14,
        weights={"value": 0.3, "mfu": 0.7},
        cases=cases,
        program=choose_on,
        checks=(
            Check("value", "a layout of all GPUs that fits", does_not_fit, part=part_that_fits),
            Check("mfu", "95 % of the planner's best MFU", too_slow, part=part_of_mfu),
        ),
        least_received=lambda case: [0],
        misconceptions=MISTAKES,
        hints=(
            "What would you try first, if everything fitted on one GPU? And what is the cheapest "
            "way to save memory if it doesn't?",
            "All numbers of GPUs here have few divisors, so you can go through tp and pp, and dp "
            "follows from them. Keep tp inside of a node, and skip what the ValueError of "
            "evaluate refuses. For each, try microbatches of 1, 2, 4 and 8 samples.",
            "With tp, sequence parallel always pays. For each mesh and microbatch, try the four "
            "stages of ZeRO, and recomputation only if none of them fits. With a pipeline, more "
            "chunks shorten the bubble: take as many as L allows. Keep the fastest layout whose "
            "bytes are below memory.",
        ),
        questions=(
            Question(
                "mfu",
                "80 layers of 8,192 features on 1,024 H100s: what MFU will your layout have, "
                "in percent? (A whole number.)",
                lambda: choice_case("H100", 1024, 80e9, 512, shape_of(8192, 80, 8192)),
                lambda trial: round(100 * Chosen(trial).time.mfu),
                "%",
            ),
        ),
    )
]
