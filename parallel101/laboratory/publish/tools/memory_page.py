"""The page that says whether a model fits into the memory of a GPU.

    memory_rules.js     bytes on each rank, and which layouts there are: those of cost.step_memory
    memory_changes.js   the changes that would make it fit, and what they cost, roughly
    memory_page.js      the settings, their address, the code to copy
    memory_answer.js    the verdict, the bars, the words, the table

Models, GPUs and constants come from this package's tables. What can be read without a script is
written here, with the memory of the layout with which the page opens.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cache

from markupsafe import Markup

from parallel101.cost.hardware import CHIPS, Chip, Torus
from parallel101.cost.model_shape import KNOWN, ModelShape
from parallel101.cost.parallel_layout import AVERAGES, ParallelLayout
from parallel101.cost.software import TRAINERS
from parallel101.cost.step_memory import MASTER, MOMENT, PARTS, step_memory
from parallel101.cost.update_seconds import BUCKET
from parallel101.laboratory.planner.known_models import KNOWN_MODELS
from parallel101.laboratory.planner.layout_rules import CHOICES
from parallel101.laboratory.publish.offline_page import Page, file_text, offline_html
from parallel101.laboratory.publish.templates import render
from parallel101.laboratory.record.units import decimal_bytes

PAGE = Page(
    "does_it_fit.html",
    "Does it fit?",
    "Choose a model, GPUs and a layout, and see what fills the memory of each GPU.",
    "how much GPU memory do I need, out of memory, OOM, calculator, does my model fit",
    "Does my model fit?",
)
# what the page opens with: a small model on the GPUs of one node
START = "llama-3-8b", "H100", ParallelLayout(dp=8, microbatches=4)
# a model of the reader's own numbers begins as the smallest GPT-2, which has tied weights
OWN = ModelShape(width=768, layers=12, heads=12, vocabulary=50257, time=1024)
KINDS = {"GPT": "gpt3-175b", "Llama": "llama-3-8b"}  # a model of each kind
KIND_FIELDS = "gated", "norm", "biases", "positions"
GPUS = {name: chip for name, chip in CHIPS.items() if not isinstance(chip.links, Torus)}


def _gpu(chip: Chip) -> dict[str, float]:
    """Return the figures with which the page computes."""
    assert not isinstance(chip.links, Torus), "a TPU has no node"
    inside, *outside = chip.links
    return {
        "memory": chip.hbm_bytes,
        "flops": chip.flops,
        "bandwidth": chip.hbm_bandwidth,
        "node": inside.size,
        "inside": inside.bandwidth,
        "network": outside[0].rail_bandwidth,
    }


SHAPES = {name: asdict(shape) for name, shape in KNOWN_MODELS.items()}
GIVEN = {  # what the script takes from Python's tables
    "constants": {
        "BUCKET": BUCKET,
        "MASTER": MASTER,
        "MOMENT": MOMENT,
        "PARTS": PARTS,
        "AVERAGES": AVERAGES,
        "OPTIMIZER_BYTES": TRAINERS.optimizer_bytes,
    },
    "models": SHAPES,
    "kinds": {
        kind: {field: SHAPES[name][field] for field in KIND_FIELDS} for kind, name in KINDS.items()
    },
    "shape": asdict(OWN),
    "layout": asdict(ParallelLayout()),
    "gpus": {name: _gpu(chip) for name, chip in GPUS.items()},
    "choices": {**CHOICES, **KNOWN, "optimizer": tuple(AVERAGES)},
    "start": {"model": START[0], "gpu": START[1], "layout": asdict(START[2])},
}
RULES = f"const GIVEN = {json.dumps(GIVEN, separators=(',', ':'))};\n" + "".join(
    file_text(f"tools/memory_{name}.js") for name in ("rules", "changes")
)


def files() -> dict[str, str]:
    """Return the page, by its path."""
    return {PAGE.address: offline_html(PAGE.title, memory_page())}


@cache
def memory_page() -> str:
    """Return the body of the page."""
    model, gpu, layout = START
    (stage,) = step_memory(KNOWN_MODELS[model], layout)  # the table has that one
    schedules = zip(CHOICES["schedule"], ("GPipe", "1F1B", "interleaved", "ZB-H1", "ZB-H2"))
    return render(
        "memory_page",
        title=PAGE.title,
        model=model,
        gpu=gpu,
        layout=layout,
        chips=CHIPS,
        bytes=decimal_bytes,
        parts=PARTS,
        peaks=[getattr(stage, name) for name in (*PARTS, "total")],
        models={**{name: name for name in KNOWN_MODELS}, "own": "your own numbers"},
        gpus={name: f"{name}, {decimal_bytes(chip.hbm_bytes)}" for name, chip in GPUS.items()},
        schedules=dict(schedules),
        recompute=CHOICES["recompute"],
        kinds=KINDS,
        choices=CHOICES,
        same=lambda names: {name: name for name in names},
        rules=Markup(RULES),
    )
