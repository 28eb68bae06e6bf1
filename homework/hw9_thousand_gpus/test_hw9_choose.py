"""Exercise 25c: choose a layout, to be held to the planner's best.

What a layout costs is predicted by parallel101.cost, on the learner's ranks and in the grader. The
planner runs in the grader only: no rank imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from parallel101.cost.cluster import Cluster
from parallel101.cost.model_shape import ModelShape
from parallel101.cost.parallel_layout import ParallelLayout
from parallel101.cost.step_memory import step_memory
from parallel101.cost.step_time import StepTime, step_time
from parallel101.grade.exercise import Case, Check, Draw, Exercise, Misconception, Question, Trial
from parallel101.grade.training_exercises import ended

ASKED = 500  # times that the learner's function may ask what a layout costs
ENOUGH = 0.95  # of the planner's MFU: full points
USELESS = 0.5  # of the planner's MFU: no points
SECONDS = 30.0  # of a case, in wall time
SHAPE = ("width", "layers", "heads", "vocabulary", "time")
NUMBERS = ("dp", "tp", "pp", "microbatch", "microbatches", "chunks", "zero_stage")
KEYS = (*NUMBERS, "recompute", "sequence_parallel")


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
    )


def shape_of(width: int, layers: int, time: int, vocabulary: int = 51200) -> dict[str, int]:
    return dict(zip(SHAPE, (width, layers, width // 128, vocabulary, time)))


def cases(draw: Draw) -> list[Case]:
    """Small and large models, much and little memory, large and small batches."""
    return [
        choice_case(
            "H100", 64, 80e9, 64 * draw.integer(3, 6),
            shape_of(4096, draw.choice((28, 32, 36)), 4096),
        ),
        choice_case(
            "A100", 96, 40e9, 96 * draw.integer(3, 5),
            shape_of(5120, draw.choice((36, 48)), 2048),
        ),
        choice_case(
            "H100", 256, 80e9, 128 * draw.integer(1, 3),
            shape_of(8192, draw.choice((64, 72, 80)), 8192),
        ),
        choice_case(
            "A100", 512, 80e9, 512 * draw.integer(2, 4),
            shape_of(12288, draw.choice((80, 96)), 2048),
        ),
        choice_case(
            "H100", 1024, 80e9, 256 * draw.integer(1, 2),
            shape_of(draw.choice((6144, 8192)), 64, 8192),
        ),
    ]  # fmt: skip


# ---- what a layout costs ----


def layout_of(shape: ModelShape, gpus: int, batch: int, said: Any) -> ParallelLayout:
    """The layout that a dict describes. Raises ValueError, in words, if there can't be one."""
    if not isinstance(said, dict):
        raise ValueError(f"{said!r:.100} is not a layout: expected a dict or a Layout")
    for key, value in said.items():
        if key not in KEYS:
            raise ValueError(f"a layout has no {key!r}: expected some of {', '.join(KEYS)}")
        if key in NUMBERS and type(value) is not int:
            raise ValueError(f"{key}={value!r:.50}: expected a whole number")
    if type(said.get("sequence_parallel", False)) is not bool:
        raise ValueError(f"sequence_parallel={said['sequence_parallel']!r:.50}: expected a bool")
    if said.get("recompute", "none") not in ("none", "full"):
        raise ValueError(f"recompute={said['recompute']!r:.50}: expected 'none' or 'full'")
    layout = ParallelLayout(**said)
    for wrong, why in (
        (layout.gpus != gpus, f"dp · tp · pp is {layout.gpus}; expected {gpus} GPUs"),
        (layout.batch != batch, f"b · M · dp is {layout.batch}; expected {batch} samples"),
        (shape.heads % layout.tp, f"{shape.heads} heads can't be cut over tp {layout.tp}"),
        (
            shape.layers % (layout.pp * layout.chunks),
            f"{shape.layers} layers are not a multiple of {layout.pp} stages · {layout.chunks}",
        ),
        (
            layout.sequence_parallel and (layout.tp == 1 or shape.time % layout.tp),
            f"sequence parallel can't cut {shape.time} tokens over tp {layout.tp}",
        ),
    ):
        if wrong:
            raise ValueError(why)
    return layout


class Evaluate:
    """evaluate(dp=…, tp=…, …): what a step with this layout costs; the tool that learners get."""

    def __init__(self, shape: ModelShape, cluster: Cluster, batch: int):
        self.shape, self.cluster, self.batch, self.left = shape, cluster, batch, ASKED

    def __call__(self, **said: Any) -> dict[str, float]:
        if self.left == 0:
            raise RuntimeError(f"evaluate was called more than {ASKED} times for one choice")
        layout = layout_of(self.shape, self.cluster.gpus, self.batch, said)
        self.left -= 1
        found = step_time(self.shape, layout, self.cluster)
        nbytes = max(stage.total for stage in step_memory(self.shape, layout))
        return {"seconds": found.seconds, "mfu": found.mfu, "bytes": nbytes}


def choose_on(
    function: Callable[..., Any],
    device: str,
    shape: dict[str, int],
    gpus: int,
    memory: float,
    batch: int,
) -> Any:
    """What the rank runs. A Layout reaches the grader as a dict."""
    evaluate = Evaluate(ModelShape(**shape), Cluster(device, gpus, memory=memory), batch)
    found = function(SimpleNamespace(**shape), gpus, memory, batch, evaluate)
    return dict(vars(found)) if hasattr(found, "__dict__") else found


# ---- judging ----


class Chosen:
    """The learner's choice in one trial. Raises ValueError if it is no layout."""

    def __init__(self, trial: Trial):
        facts = trial.case.facts
        self.shape = ModelShape(**dict(zip(SHAPE, facts["shape"])))
        self.cluster = Cluster(facts["device"], facts["gpus"], memory=facts["memory"])
        self.layout = layout_of(self.shape, facts["gpus"], facts["batch"], trial.results[0])

    @property
    def nbytes(self) -> float:
        """On the fullest GPU."""
        return max(stage.total for stage in step_memory(self.shape, self.layout))

    @property
    def fits(self) -> bool:
        return self.nbytes <= self.cluster.memory_bytes

    @property
    def time(self) -> StepTime:
        return step_time(self.shape, self.layout, self.cluster)

    @property
    def share(self) -> float:
        """Of the planner's best MFU."""
        best = planned(
            self.shape,
            self.cluster.chip.name,
            self.cluster.gpus,
            self.cluster.memory_bytes,
            self.layout.batch,
        )
        return self.time.mfu / best


@lru_cache(maxsize=64)
def planned(shape: ModelShape, device: str, gpus: int, memory: float, batch: int) -> float:
    """The best MFU that the planner predicts, without context and expert parallel."""
    from parallel101.planner.plan import plan  # here, so that no rank has it in its memory

    found = plan(
        shape,
        gpus=gpus,
        device=device,
        memory=memory,
        batch_tokens=batch * shape.time,
        layout={"cp": 1, "ep": 1},
        simulate=0,
        top=1,
        progress=False,
    )
    return found.best.mfu


def chosen(trials: Sequence[Trial]) -> list[Chosen]:
    """The choices that are layouts."""
    found = []
    for trial in ended(trials):
        try:
            found.append(Chosen(trial))
        except ValueError:
            pass
    return found


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
        f"{found.time.mfu / found.share:.1%}"
    )


def text(layout: ParallelLayout) -> str:
    return f"dp {layout.dp} × tp {layout.tp} × pp {layout.pp}"


def part_that_fits(trials: Sequence[Trial]) -> float:
    return sum(found.fits for found in chosen(trials)) / len(trials)


def part_of_mfu(trials: Sequence[Trial]) -> float:
    """The mean over all cases of a score from 0 at USELESS to 1 at ENOUGH."""
    scores = [(found.share - USELESS) / (ENOUGH - USELESS) for found in chosen(trials)]
    return sum(min(max(score, 0.0), 1.0) for score in scores) / len(trials)


# ---- misconceptions ----


def losing(shows: Callable[[Chosen], bool]) -> Callable[[Sequence[Trial]], bool]:
    """Whether every choice that loses points for MFU shows this, and there is one."""

    def seen(trials: Sequence[Trial]) -> bool:
        found = [one for one in chosen(trials) if one.fits and one.share < ENOUGH]
        return bool(found) and all(map(shows, found))

    return seen


def largest_loss(*names: str) -> Callable[[Chosen], bool]:
    """Whether one of these parts takes the most time, besides the kernels."""

    def shows(found: Chosen) -> bool:
        lost = {k: v for k, v in found.time.parts.items() if k not in ("matmul", "memory-bound")}
        return max(lost, key=lambda name: lost[name]) in names

    return shows


def needless_recomputation(found: Chosen) -> bool:
    """The same layout fits and is faster without it."""
    from dataclasses import replace

    if found.layout.recompute == "none":
        return False
    most = max(
        stage.total for stage in step_memory(found.shape, replace(found.layout, recompute="none"))
    )
    return most <= found.cluster.memory_bytes


def one_for_all(trials: Sequence[Trial]) -> bool:
    found = chosen(trials)
    return len(found) > 2 and len({(one.layout.tp, one.layout.pp) for one in found}) == 1


MISTAKES = (
    Misconception(
        "more than a GPU has",
        (
            "A layout doesn't fit: its fullest GPU needs more memory than it has. In a real run "
            "that ends in an error after some minutes of start-up, on all GPUs."
        ),
        lambda trials: any(not found.fits for found in chosen(trials)),
    ),
    Misconception(
        "tp beyond the node",
        (
            "Where points are lost, tp reaches beyond the 8 GPUs of a node. Its all-reduces then "
            "use the network in every layer."
        ),
        losing(lambda found: found.layout.tp > 8),
    ),
    Misconception(
        "recomputation without need",
        (
            "Where points are lost, everything is recomputed, although the same layout fits "
            "without it. That costs a third more arithmetic, which MFU doesn't count."
        ),
        losing(needless_recomputation),
    ),
    Misconception(
        "one layout for all",
        (
            "Every model gets the same tp and pp. What is needed to fit a large model is a waste "
            "on a small one."
        ),
        one_for_all,
    ),
    Misconception(
        "more tp than needed",
        (
            "Where points are lost, the all-reduces along tp take the most time besides "
            "arithmetic. A smaller tp may fit, too."
        ),
        losing(largest_loss("tp")),
    ),
    Misconception(
        "bubble too long",
        (
            "Where points are lost, the bubble takes the most time besides arithmetic. Fewer "
            "stages, more microbatches, or more chunks make it shorter."
        ),
        losing(largest_loss("bubble")),
    ),
    Misconception(
        "too little work for each replica",
        (
            "Where points are lost, the gradients and weights along dp take the most time besides "
            "arithmetic. Fewer replicas have more microbatches each, and ZeRO-3 gathers the "
            "weights for each of them."
        ),
        losing(largest_loss("dp")),
    ),
)

EXERCISES = [
    Exercise(
        number="25c",
        function="choose",
        title="A layout for a cluster",
        points=14,
        weights={"value": 0.4, "mfu": 0.6},
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
            "evaluate refuses. For each, try microbatches of 1, 2 and 4 samples.",
            "With tp, sequence parallel saves memory and costs nothing. ZeRO-2 costs nearly "
            "nothing either. Try recomputation and ZeRO-3 only for a mesh that doesn't fit "
            "without. More chunks shorten the bubble: for each mesh, try 1, and the most that L "
            "allows. Keep the fastest layout whose bytes are below memory.",
        ),
        questions=(
            Question(
                "mfu",
                "80 layers of 8,192 features on 1,024 H100s: how many percent MFU will your "
                "layout have? (A whole number.)",
                lambda: choice_case("H100", 1024, 80e9, 512, shape_of(8192, 80, 8192)),
                lambda trial: round(100 * Chosen(trial).time.mfu),
                "%",
            ),
        ),
    )
]
