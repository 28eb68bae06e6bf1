"""The page that says whether a model fits: its bytes are those of cost.step_memory, its refusals
those of the planner, and what a reader chooses and copies is what Python gets.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import asdict, replace

import pytest

from parallel101.cost import ModelShape, ParallelLayout, hardware_flops, step_memory
from parallel101.planner.known_models import KNOWN_MODELS
from parallel101.planner.layout_rules import CHOICES, why_not
from parallel101.publish.tools.memory_page import RULES
from parallel101.viz.chromium import Browser

pytestmark = pytest.mark.browser

MANY = 6000  # settings that are compared
NUMBERS = ("weights", "gradients", "optimizer", "activations", "buffers", "total")


@pytest.fixture(scope="module")
def browser(chromium: str):
    with Browser(chromium) as browser:
        yield browser


def some_shape(draw: random.Random) -> dict:
    """The fields of a known model, or of one with any numbers; some don't fit each other."""
    if draw.random() < 0.3:
        known = draw.choice([*KNOWN_MODELS.values()]).shape
        changes = {"time": draw.choice([1024, 8192, 131072]), "attention": attention(draw)}
        return asdict(replace(known, **changes))
    heads = draw.choice([1, 4, 6, 12, 32, 64])
    return asdict(ModelShape(1, 1, 1, 1, 1)) | {
        "width": heads * draw.choice([16, 64, 65, 128]) + (draw.random() < 0.02),
        "layers": draw.choice([1, 2, 6, 22, 24, 30, 61, 96]),
        "heads": heads,
        "vocabulary": draw.choice([512, 50257, 128256]),
        "time": draw.choice([1, 333, 1024, 2048, 32768]),
        "kv_heads": draw.choice([None, None, 1, 4, 8]),
        "feed_forward": draw.choice([None, None, 1408, 14336]),
        "gated": draw.random() < 0.5,
        "norm": draw.choice(["layer", "rms"]),
        "biases": draw.random() < 0.5,
        "positions": draw.choice(["learned", "rotary"]),
        "tied": draw.random() < 0.5,
        "attention": attention(draw),
        "experts": draw.choice([0, 0, 0, 1, 8, 64]),
        "top_k": draw.choice([1, 2, 2, 9]),
        "dropout": draw.random() < 0.3,
    }


def attention(draw: random.Random) -> str:
    return draw.choice(["fused", "fused", "unfused"])


def some_layout(draw: random.Random, experts: int) -> dict:
    """The fields of a layout; some don't fit each other, or the model."""
    axes = {name: draw.choice([1, 1, 2, 3, 8]) for name in ("dp", "tp", "pp", "cp")}
    axes |= {"pp": draw.choice([1, 2, 3, 4, 8, 16]), "ep": draw.choice([1, 1, 2, 8])}
    axes["ep"] = axes["ep"] if experts else 1
    chosen = {key: draw.choice(values) for key, values in CHOICES.items()}
    if axes["pp"] == 1 and draw.random() < 0.9:
        chosen["schedule"] = "1f1b"
    if axes["tp"] == 1 and draw.random() < 0.9:
        chosen["sequence_parallel"] = False
    if not chosen["precision"].endswith("mixed") and draw.random() < 0.9:
        chosen["gradient_dtype"] = None
    chunked = chosen["schedule"] == "interleaved" or draw.random() < 0.02
    many = axes["pp"] if chunked and draw.random() < 0.9 else 1
    return {
        **axes,
        **chosen,
        "chunks": draw.choice([1, 2, 3]) if chunked else 1,
        "microbatch": draw.choice([1, 1, 2, 5, 0 if draw.random() < 0.02 else 16]),
        "microbatches": many * draw.choice([1, 1, 2, 4, 7, 32]),
    }


def reason(shape: dict, layout: dict) -> str:
    """Why Python refuses these settings, or "" if it doesn't."""
    try:
        model, of = ModelShape(**shape), ParallelLayout(**layout)
        return why_not(model, of, {"context": of.context}) or ""
    except ValueError as error:
        return str(error)


def test_bytes_and_refusals_are_pythons(browser):
    draw = random.Random(30)
    shapes = [some_shape(draw) for _ in range(MANY)]
    given = [(shape, some_layout(draw, shape["experts"])) for shape in shapes]
    ours = [reason(*pair) for pair in given]
    browser.js(RULES)
    theirs = browser.js(f"(given = {json.dumps(given)}).map(pair => memoryRules.whyNot(...pair))")
    assert [x for x in zip(given, theirs, ours, strict=True) if x[1] != x[2]] == []
    kinds = Counter(" ".join(text.replace("a ", "").split()[:2]) for text in ours)
    assert kinds[""] > MANY / 5 and len(kinds) > 18, kinds

    possible = [pair for pair, text in zip(given, ours, strict=True) if not text]
    found = browser.js(
        f"given.filter((_, k) => {json.dumps([not text for text in ours])}[k]).map(([s, l]) => "
        "[memoryRules.stepMemory(s, l), memoryRules.parameters(s),"
        " memoryRules.hardwareFlops(s, 24, l.recompute)])"
    )
    moments: Counter[str] = Counter()
    for (shape, layout), (stages, parameters, flops) in zip(possible, found, strict=True):
        of = ModelShape(**shape)
        expected = step_memory(of, ParallelLayout(**layout))
        for mine, stage in zip(stages, expected, strict=True):
            assert mine["moment"] == stage.moment
            numbers = [getattr(stage, name) for name in NUMBERS]
            # buffers are the rest of `total`, so that their rounding is its
            assert [mine[name] for name in NUMBERS] == pytest.approx(
                numbers, rel=1e-9, abs=1e-12 * stage.total
            )
            moments[stage.moment] += 1
        assert parameters == of.parameters
        assert flops == pytest.approx(hardware_flops(of, 24, layout["recompute"]), rel=1e-12)
    assert min(moments.values()) > 20 and len(moments) == 4, moments
