"""Shows a page that plays in a notebook: `explore_schedule` and `explore_memory`.

    p101.explore_memory("llama-3-8b", dp=4, zero_stage=2)      Does it fit?, with these settings

The page is in the cell's output, in a frame. It keeps its settings in its address, which is how it
gets those of the call. On a lesson's page, a link to the tool's own page takes the frame's place.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any
from urllib.parse import urlencode

from parallel101.cost.model_shape import ModelShape
from parallel101.cost.parallel_layout import ParallelLayout
from parallel101.laboratory.planner.known_models import KNOWN_MODELS, shape_of_model
from parallel101.laboratory.publish.offline_page import offline_html
from parallel101.laboratory.publish.templates import render
from parallel101.laboratory.publish.tools import memory_page, schedule_builder_page
from parallel101.laboratory.publish.tools.schedule_builder_page import CHUNKS, MICROBATCHES, RANKS
from parallel101.trainers.schedules.schedule import schedule

WITHOUT_LINKS = "<style>body > nav { display: none }</style>"


class ToolFrame:
    """A page that plays, with some settings, as the output of a notebook's cell."""

    def __init__(self, tool: Any, body: str, settings: Mapping[str, object], predict: str | None):
        self.title, self.body, self.predict = tool.PAGE.title, body, predict
        self.address = f"{tool.PAGE.address}#{urlencode(settings)}"

    def __repr__(self) -> str:
        return f"<{self.title} {self.address}>"

    def _repr_html_(self) -> str:
        page = offline_html(self.title, WITHOUT_LINKS + self.body)
        return render(
            "tool_frame",
            title=self.title,
            address=self.address,
            page=f"data:text/html;base64,{b64encode(page.encode()).decode()}",
            settings=self.address.partition("#")[2],
            predict=self.predict,
        )


def explore_schedule(
    name: str = "1f1b",
    *,
    stages: int = 4,
    microbatches: int = 8,
    forward: float = 1,
    input_grad: float = 1,
    weight_grad: float = 1,
    communication: float = 0,
    predict: str | None = None,
) -> ToolFrame:
    """Show *Build a schedule* with a published schedule, whose actions can be moved.

    Args:
        name: "gpipe", "1f1b", "interleaved" (two stages on each rank), "zb-h1" or "zb-h2".
        stages, microbatches: 2 to 4 ranks, and 1 to 8 microbatches.
        forward, input_grad, weight_grad: time of F, I and W of one microbatch on one rank, from
            0.25 to 8, in any unit.
        communication: time until a result arrives at the next rank, up to 8.
        predict: for which figure the reader is asked before the page is shown.

    Raises:
        ValueError: an unknown schedule, or a number outside its range.
        ScheduleError: the schedule doesn't exist for these numbers.
    """
    costs = (forward, input_grad, weight_grad, communication)
    if stages not in RANKS or microbatches not in MICROBATCHES:
        raise ValueError(
            f"stages={stages} and microbatches={microbatches}: expected {RANKS[0]} to {RANKS[-1]} "
            f"stages and {MICROBATCHES[0]} to {MICROBATCHES[-1]} microbatches. "
            "p101.schedule(…).time(…).timeline() draws any number"
        )
    if not (min(costs[:3]) >= 0.25 and communication >= 0 and max(costs) <= 8):
        raise ValueError(
            f"times of F, I, W and a message: {costs}, expected 0.25 to 8, and 0 to 8 of a message"
        )
    chunks = CHUNKS.get(name, 1)
    made = schedule(name, stages=stages, microbatches=microbatches, chunks=chunks)
    settings = {
        "ranks": stages,
        "microbatches": microbatches,
        "stages": "one" if chunks == 1 else "loop",
        "times": ",".join(map(str, costs)),
        "lists": "_".join(".".join(of_rank) for of_rank in made.actions),
    }
    body = schedule_builder_page.schedule_builder_page()
    return ToolFrame(schedule_builder_page, body, settings, predict)


def explore_memory(
    model: str | ModelShape = "llama-3-8b",
    gpu: str = "H100",
    *,
    predict: str | None = None,
    **layout: Any,
) -> ToolFrame:
    """Show *Does it fit?*: what fills the memory of each GPU in a step of training.

    Args:
        model: a name as for `shape_of_model`, or a `cost.ModelShape`.
        gpu: a name in `cost.CHIPS`.
        predict: for which figure the reader is asked before the page is shown.
        layout: of a `cost.ParallelLayout`, such as `dp=8, zero_stage=2`.

    Raises:
        ValueError: an unknown model or GPU.
        TypeError: an unknown field of the layout.
    """
    if gpu not in memory_page.GPUS:
        one_of = f"expected one of {', '.join(memory_page.GPUS)}"
        raise ValueError(f"gpu={gpu!r} is unknown: {one_of}")
    known = isinstance(model, str) and model in KNOWN_MODELS
    settings: dict[str, Any] = {"model": model if known else "own", "gpu": gpu}
    shape = {} if known else asdict(shape_of_model(model))
    shape.pop("name", None)
    for field, value in (shape | asdict(ParallelLayout(**layout))).items():
        settings[field] = json.dumps(value).strip('"')
    return ToolFrame(memory_page, memory_page.memory_page(), settings, predict)
