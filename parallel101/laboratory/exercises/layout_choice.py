"""The basis for judging exercise 25c: layouts that a learner chose, and the planner's best.

evaluate(dp=…, tp=…, …)   what a step costs, by parallel101.cost; learners get it as a tool
Chosen(trial)             a learner's layout, as the grader sees it
planned(…)                the planner's best; it runs in the grader only, and no rank imports it
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from parallel101.cost.cluster import Cluster
from parallel101.cost.hardware import chip_of
from parallel101.cost.model_shape import ModelShape
from parallel101.cost.parallel_layout import ParallelLayout
from parallel101.cost.step_memory import step_memory
from parallel101.cost.step_time import step_time
from parallel101.laboratory.grade.exercise import Trial
from parallel101.laboratory.grade.exercise_checks import ended

ASKED = 400  # times that a learner's function may ask what a layout costs
SHAPE = ("width", "layers", "heads", "vocabulary", "time")
Evaluate = Callable[..., dict[str, float]]
KEYS: tuple[str, ...] = ("dp", "tp", "pp", "microbatch", "microbatches", "chunks")
KEYS += ("zero_stage", "recompute", "sequence_parallel")


def layout_of(shape: ModelShape, gpus: int, batch: int, said: Any) -> ParallelLayout:
    """Return the layout that a dict describes.

    Raises ValueError, in words, if there can't be one.
    """
    if not isinstance(said, dict) or not {*said} <= {*KEYS}:
        raise ValueError(
            f"{said!r:.100} is not a layout: expected a dict with some of {', '.join(KEYS)}"
        )
    layout = ParallelLayout(**said)
    sequence = layout.sequence_parallel
    for wrong, why in (
        (type(sequence) is not bool, f"sequence_parallel={sequence!r:.50}: expected a bool"),
        (layout.recompute == "selective", "recompute='selective': expected 'none' or 'full'"),
        (layout.gpus != gpus, f"dp · tp · pp is {layout.gpus}; expected {gpus} GPUs"),
        (layout.batch != batch, f"b · M · dp is {layout.batch}; expected {batch} samples"),
        (shape.heads % layout.tp, f"{shape.heads} heads can't be cut over tp {layout.tp}"),
        (
            shape.layers % (layout.pp * layout.chunks),
            f"{shape.layers} layers are not a multiple of {layout.pp} stages · {layout.chunks}",
        ),
        (
            sequence and (layout.tp == 1 or shape.time % layout.tp),
            f"sequence parallel can't cut {shape.time} tokens over tp {layout.tp}",
        ),
    ):
        if wrong:
            raise ValueError(why)
    return layout


def layout_evaluator(
    shape: Any, device: str, gpus: int, batch: int, memory: float | None = None
) -> Evaluate:
    """Return evaluate(dp=…, tp=…, …), the learners' tool: it says what a step of a layout costs.

    Args:
        shape: an object with SHAPE's attributes, such as hw9.Shape.
        device, gpus, memory: as those of a Cluster, with nodes of 8.
        batch: samples of a step.
    """
    model = ModelShape(**{name: getattr(shape, name) for name in SHAPE})
    cluster = Cluster(chip_of(device), gpus, memory=memory)
    left = ASKED

    def evaluate(**said: Any) -> dict[str, float]:
        nonlocal left
        if left == 0:
            raise RuntimeError(f"evaluate was called more than {ASKED} times for one choice")
        layout = layout_of(model, gpus, batch, said)
        left -= 1
        found = step_time(model, layout, cluster)
        nbytes = fullest(model, layout)
        return {"seconds": found.seconds, "mfu": found.mfu, "bytes": nbytes}

    return evaluate


def choose_on(
    function: Callable[..., Any],
    device: str,
    sizes: dict[str, Any],
    gpus: int,
    memory: float,
    batch: int,
) -> Any:
    """Call the learner's function on a rank.

    A Layout that it returns reaches the grader as a dict.
    """
    shape = SimpleNamespace(**sizes)
    evaluate = layout_evaluator(shape, device, gpus, batch, memory)
    found = function(shape, gpus, memory, batch, evaluate)
    return dict(vars(found)) if hasattr(found, "__dict__") else found


class Chosen:
    """The learner's choice in one trial. Raises ValueError if it is no layout.

    Attributes:
        shape, cluster, layout: the model, the GPUs, and what was chosen.
        nbytes, fits: the bytes on the fullest GPU, and whether it has as many.
        time: what a step costs.
        best: the planner's layout for the same model and cluster, and its MFU.
        share: the layout's MFU, as a share of the planner's MFU.
    """

    def __init__(self, trial: Trial):
        facts = trial.case.facts
        self.shape = ModelShape(**dict(zip(SHAPE, facts["shape"])))
        self.cluster = Cluster(chip_of(facts["device"]), facts["gpus"], memory=facts["memory"])
        self.layout = layout_of(self.shape, facts["gpus"], facts["batch"], trial.results[0])
        self.nbytes = fullest(self.shape, self.layout)
        self.fits = self.nbytes <= self.cluster.memory_bytes
        self.time = step_time(self.shape, self.layout, self.cluster)
        self.best = planned(
            self.shape, facts["device"], facts["gpus"], facts["memory"], facts["batch"]
        )
        self.share = self.time.mfu / self.best[1]


def fullest(shape: ModelShape, layout: ParallelLayout) -> float:
    """Return the bytes on the fullest GPU."""
    return max(stage.total for stage in step_memory(shape, layout))


@lru_cache(maxsize=64)
def planned(
    shape: ModelShape, device: str, gpus: int, memory: float, batch: int
) -> tuple[ParallelLayout, float]:
    """Return the planner's fastest layout without context and expert parallel, and its MFU."""
    # here, so that no rank has it in its memory
    from parallel101.laboratory.planner.search import plan

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
    return found.best.layout, found.best.mfu


def chosen(trials: Sequence[Trial]) -> list[Chosen]:
    """Return the choices that are layouts."""
    found = []
    for trial in ended(trials):
        with contextlib.suppress(ValueError):
            found.append(Chosen(trial))
    return found
