"""The page that says whether a model fits: its bytes are those of cost.step_memory, its refusals
those of the planner, and what a reader chooses and copies is what Python gets.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import asdict, replace

import pytest
from bs4 import BeautifulSoup

from parallel101.cost import (
    CHIPS,
    Cluster,
    ModelShape,
    ParallelLayout,
    hardware_flops,
    step_memory,
    step_time,
)
from parallel101.cost.parallel_layout import AVERAGES
from parallel101.laboratory.planner.known_models import KNOWN_MODELS
from parallel101.laboratory.planner.layout_rules import CHOICES, why_not
from parallel101.laboratory.planner.search import most_of, smallest_gpus
from parallel101.laboratory.publish.tools.memory_page import (
    GPUS,
    PARTS,
    RULES,
    START,
    memory_page,
)
from parallel101.laboratory.record.units import decimal_bytes
from tests.browser.browser import Browser

pytestmark = pytest.mark.browser

MANY = 5000  # settings that are compared
NUMBERS = (*PARTS, "total")


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
        "optimizer": draw.choice([*AVERAGES]),
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


# ---- changes ----


def too_large(draw: random.Random) -> tuple[ModelShape, ParallelLayout]:
    """A published model in a layout that doesn't fit on an H100."""
    while True:
        shape = draw.choice([*KNOWN_MODELS.values()]).shape
        layout = ParallelLayout(
            dp=draw.choice([1, 2, 4, 8, 16, 32]),
            tp=draw.choice([1, 2, 4, 8]),
            pp=draw.choice([1, 1, 2, 4, 8, 16]),
            microbatch=draw.choice([1, 2, 4]),
            microbatches=draw.choice([1, 4, 8, 32]),
            zero_stage=draw.choice([0, 0, 1, 2]),
            recompute=draw.choice(["none", "none", "full"]),
        )
        if not why_not(shape, layout) and 80e9 < most_of(step_memory(shape, layout)) < 400e9:
            return shape, layout


def test_the_cheapest_change_is_nearly_the_quick_models(browser):
    draw, chip = random.Random(30), CHIPS["H100"]
    cases = [too_large(draw) for _ in range(40)]
    browser.open("about:blank")
    browser.js(RULES)
    given = json.dumps([(asdict(shape), asdict(layout)) for shape, layout in cases])
    found = browser.js(f"{given}.map(([s, l]) => memoryChanges.fitting(s, l, GIVEN.gpus.H100))")
    slower = []
    for (shape, layout), changes in zip(cases, found, strict=True):
        first = changes[0]
        seconds = []
        for change in changes[:60]:
            changed = ParallelLayout(**change["layout"])
            assert why_not(shape, changed) is None and changed.batch == layout.batch
            peak = most_of(step_memory(shape, changed))
            assert peak == pytest.approx(change["peak"]) and peak <= chip.hbm_bytes
            if change["gpus"] == first["gpus"]:
                cluster = Cluster(chip, changed.gpus)
                seconds.append(step_time(shape, changed, cluster).seconds)
        slower.append(seconds[0] / min(seconds))
    assert sum(ratio < 1.1 for ratio in slower) >= 0.85 * len(slower), sorted(slower)
    assert max(slower) < 1.25


def test_one_gpu_is_too_few_and_the_fewest_are_the_planners(browser):
    cases = [("llama-3-70b", 96, "H100"), ("llama-3-405b", 16, "B200"), ("gpt3-175b", 16, "H100")]
    browser.open("about:blank")
    browser.js(RULES)
    for name, batch, chip in cases:
        shape = KNOWN_MODELS[name].shape
        given = (
            f"{json.dumps(asdict(shape))}, {json.dumps(asdict(ParallelLayout(microbatches=batch)))}"
        )
        found = browser.js(f"memoryChanges.fitting({given}, GIVEN.gpus.{chip})[0].gpus")
        assert found == smallest_gpus(shape, Cluster(CHIPS[chip], 1), batch, {})


# ---- the page ----

VERDICT = "document.querySelector('#verdict').textContent"
MOST = "document.querySelector('#most').textContent"
ROWS = "[...document.querySelectorAll('.stages tbody tr')]"
TABLE = f"{ROWS}.map(r => [...r.children].map(c => c.textContent))"
GPT = "#model=llama-3-405b&dp=8&tp=8&pp=16&microbatches=32&zero_stage=1"


def opened(browser: Browser, page: str, address: str = "") -> Browser:
    browser.open("about:blank")
    browser.open(page + address)
    return browser


def field(name: str) -> str:
    return f"document.querySelector('#{name}')"


def choose(browser: Browser, **values: object) -> None:
    """What a reader does with a menu, a box or a number."""
    for name, value in values.items():
        what = "checked = true" if value is True else f"value = '{value}'"
        change = f"f.{what}; f.dispatchEvent(new Event('change', {{ bubbles: true }}))"
        browser.js(f"(f => {{ {change} }})({field(name)})")


def cells(stages) -> list[list[str]]:
    return [[decimal_bytes(getattr(stage, name)) for name in NUMBERS] for stage in stages]


def test_the_page_opens_with_what_it_says_without_a_script_and_keys_change_it(browser, memory):
    opened(browser, memory)
    body = BeautifulSoup(memory_page(), "html.parser")
    rows = [[c.get_text() for c in row] for row in body.select(".stages tbody tr")]
    browser.do((TABLE, rows))
    (stage,) = step_memory(KNOWN_MODELS[START[0]].shape, START[2])
    assert decimal_bytes(stage.total) in browser.js(VERDICT)
    browser.js(f"({field('dp')}.focus(), {field('dp')}.select())")
    browser.do("2", "Tab", ("state.layout.dp", 2), ("location.hash.includes('dp=2')", True))


def test_copied_code_prints_the_pages_numbers(browser, memory, capsys):
    draw, seen = random.Random(3), 0
    opened(browser, memory)
    while seen < 12:
        shape = some_shape(draw)
        layout = some_layout(draw, shape["experts"])
        if reason(shape, layout):
            continue
        seen += 1
        state = {"model": shape["name"] or "own", "gpu": draw.choice([*GPUS])}
        state = json.dumps(state | {"shape": shape, "layout": layout})
        browser.js(
            f"({field('copied')}.textContent = '', Object.assign(state, {state}), changed = true, "
            f"show(), {field('copy-python')}.click())"
        )
        browser.until(f"{field('copied')}.textContent === 'Copied the Python.'")
        names: dict = {}
        exec(browser.js("document.querySelector('.python').textContent"), names)
        printed = capsys.readouterr().out
        assert names["shape"] == ModelShape(**shape)
        stages = step_memory(names["shape"], names["layout"])
        assert stages == step_memory(ModelShape(**shape), ParallelLayout(**layout))
        for name, *numbers in browser.js(TABLE):
            position = int(name.split()[-1]) if stages[1:] else 0
            assert [numbers] == cells([stages[position]])
            assert "  ".join([f"stage {position}:", *numbers[:-1]]) in printed
        settings = "[state.model, state.gpu, state.shape, state.layout]"
        before = browser.js(settings)
        browser.js("openAddress()")  # the address says the same
        browser.do((settings, before))


def test_fields_change_the_answer(browser, memory):
    opened(browser, memory)
    assert browser.js(VERDICT).startswith("It doesn't fit.")
    assert "Optimizer state takes the most" in browser.js(MOST)
    layout = {"dp": 4, "tp": 8, "pp": 4, "microbatches": 32, "zero_stage": 1}
    layout |= {"sequence_parallel": True}
    choose(browser, model="llama-3-70b", **layout)
    numbers = f"{TABLE}.map(row => row.slice(1))"
    for optimizer in ("adamw", "sgd"):
        choose(browser, optimizer=optimizer)
        of = ParallelLayout(**layout, optimizer=optimizer)
        browser.do((numbers, cells(step_memory(KNOWN_MODELS["llama-3-70b"].shape, of))))
    assert browser.js(VERDICT).startswith("It fits.")
    assert "4 of 32 microbatches wait for backward" in browser.js(MOST)
    choose(browser, optimizer="adamw", schedule="interleaved")
    browser.do(("state.layout.chunks", 2))
    choose(browser, pp=1)
    browser.do(("[state.layout.schedule, state.layout.chunks]", ["1f1b", 1]))
    choose(browser, tp=3)
    browser.do((VERDICT, "Not possible: tp doesn't divide 64 heads."))
    choose(browser, tp=1, width=4096, heads=32)
    browser.do(("[state.model, state.shape.width]", ["own", 4096]))
    choose(browser, layers=5000)
    browser.do((VERDICT, "layers: expected a whole number from 1 to 1,024."))
    browser.do(("state.shape.layers", 80))


def test_a_change_that_is_listed_makes_it_fit(browser, memory):
    opened(browser, memory)
    changes = browser.js("document.querySelectorAll('.changes button').length")
    assert changes > 2
    for k in range(changes):
        opened(browser, memory)
        words = browser.js(f"document.querySelectorAll('.changes li')[{k}].textContent")
        browser.click(f"document.querySelectorAll('.changes button')[{k}]")
        assert browser.js(VERDICT).startswith("It fits."), words
        assert browser.js(f"{TABLE}[0].at(-1)") in words or "pp" in words
        browser.do(("document.activeElement.id", "verdict"))
    browser.js("history.back()")
    browser.until(f"{VERDICT}.startsWith('It doesn')")


def test_what_would_fit_besides_fits(browser, memory):
    opened(browser, memory, "#model=llama-3-8b&gpu=H200&dp=8&zero_stage=3&recompute=full")
    note = browser.js(f"{field('changes-note')}.textContent")
    shape = KNOWN_MODELS["llama-3-8b"].shape
    samples = int(note.split("microbatches of ")[1].split()[0])
    tokens = int(note.split("or samples of ")[1].split()[0].replace(",", ""))
    layout = ParallelLayout(dp=8, zero_stage=3, recompute="full")
    for times, fits in ((1, True), (2, False)):
        more = replace(layout, microbatch=times * samples)
        longer = replace(shape, time=times * tokens)
        for of in (step_memory(shape, more), step_memory(longer, layout)):
            assert (most_of(of) <= 141e9) is fits


def test_bars_are_as_long_as_their_bytes(browser, memory):
    browser.resize(1100, 900)
    opened(browser, memory, GPT)
    rows = browser.js("""[...document.querySelectorAll('.bar')].map(bar => [
        bar.getAttribute('aria-label'), bar.clientWidth, bar.querySelector('.limit').offsetLeft + 2,
        [...bar.querySelectorAll('.part')].map(p => p.getBoundingClientRect().width)])""")
    layout = ParallelLayout(dp=8, tp=8, pp=16, microbatches=32, zero_stage=1)
    stages = step_memory(KNOWN_MODELS["llama-3-405b"].shape, layout)
    unit = rows[0][1] / max(80e9, most_of(stages))
    positions = [int(words.split(":")[0].split()[-1]) for words, *_ in rows]
    assert positions[0] == 0 and positions[-1] == 15 and len(positions) < 16
    for position, (words, _, limit, parts) in zip(positions, rows, strict=True):
        assert sum(parts) == pytest.approx(unit * stages[position].total, abs=0.5)
        assert limit == pytest.approx(unit * 80e9, abs=1.5)
        assert f"{decimal_bytes(stages[position].total)} at its peak" in words
    assert "stages 3 to 13: " in browser.js("document.querySelector('.bars').innerText")


def test_an_address_that_is_unknown_is_refused(browser, memory):
    for wrong in ("model=gpt-5", "width=0", "tp=1.5", "name=x", "gpu=X"):
        opened(browser, memory, f"#{'' if 'model' in wrong else 'model=own&'}{wrong}")
        assert f"The address has {wrong}, which" in browser.js(VERDICT)
        browser.do(("state.model", START[0]))
