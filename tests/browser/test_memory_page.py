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
from parallel101.laboratory.planner.planned_layout import most_of
from parallel101.laboratory.planner.search import smallest_gpus
from parallel101.laboratory.publish.tools.memory_page import (
    GPUS,
    PARTS,
    RULES,
    START,
    memory_page,
)
from parallel101.laboratory.record.units import decimal_bytes

pytestmark = pytest.mark.browser

MANY = 3000  # settings that are compared
NUMBERS = (*PARTS, "total")


SHAPES = {  # fields of a model, some of which don't fit each other
    "width": [768, 1560, 4096, 8320, 8321], "layers": [1, 2, 6, 22, 24, 30, 61, 96],
    "heads": [1, 4, 6, 12, 32, 64], "vocabulary": [512, 50257, 128256],
    "time": [1, 333, 1024, 32768, 131072], "kv_heads": [None, None, 1, 4, 8],
    "feed_forward": [None, None, 1408, 14336], "norm": ["layer", "rms"],
    "positions": ["learned", "rotary"], "attention": ["fused", "unfused"],
    "experts": [0, 1, 8, 64], "top_k": [1, 2, 9],
    **{key: [True, False] for key in ("gated", "biases", "tied", "dropout")},
}  # fmt: skip
LAYOUTS = {  # of a layout
    **{key: [1, 2, 3, 4, 8] for key in ("dp", "tp", "cp", "ep")}, "pp": [2, 3, 4, 8, 16],
    **CHOICES, "optimizer": [*AVERAGES], "chunks": [1, 2, 3], "microbatch": [1, 2, 5, 16, 0],
    "microbatches": [2, 4, 7, 16, 32],
}  # fmt: skip


def some_shape(draw: random.Random) -> dict:
    """The fields of a known model, or of one in which some are others."""
    shape = asdict(draw.choice([*KNOWN_MODELS.values()]))
    others = draw.sample([*SHAPES], draw.choice([0, 3, 6]))
    shape |= {name: draw.choice(SHAPES[name]) for name in others}
    return shape | {"name": "" if others else shape["name"]}


def some_layout(draw: random.Random) -> dict:
    others = draw.sample([*LAYOUTS], draw.randint(1, 7))
    return asdict(ParallelLayout()) | {name: draw.choice(LAYOUTS[name]) for name in others}


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
    given = [(shape, some_layout(draw)) for shape in shapes]
    ours = [reason(*pair) for pair in given]
    browser.js(RULES)
    theirs = browser.js(f"{json.dumps(given)}.map(pair => memoryRules.whyNot(...pair))")
    assert [x for x in zip(given, theirs, ours, strict=True) if x[1] != x[2]] == []
    kinds = Counter(" ".join(text.replace("a ", "").split()[:2]) for text in ours)
    assert kinds[""] > MANY / 5 and len(kinds) > 18, kinds

    possible = [pair for pair, text in zip(given, ours, strict=True) if not text]
    found = browser.js(f"""{json.dumps(possible)}.map(([s, l]) => [memoryRules.stepMemory(s, l),
        memoryRules.parameters(s), memoryRules.hardwareFlops(s, 24, l.recompute)])""")
    moments: Counter[str] = Counter()
    for (shape, layout), (stages, parameters, flops) in zip(possible, found, strict=True):
        of = ModelShape(**shape)
        for own, stage in zip(stages, step_memory(of, ParallelLayout(**layout)), strict=True):
            assert own["moment"] == stage.moment
            # buffers are the rest of `total`, so that their rounding is its
            near = {"rel": 1e-9, "abs": 1e-12 * stage.total}
            numbers = [getattr(stage, name) for name in NUMBERS]
            assert [own[name] for name in NUMBERS] == pytest.approx(numbers, **near)
            moments[stage.moment] += 1
        assert parameters == of.parameters
        assert flops == pytest.approx(hardware_flops(of, 24, layout["recompute"]), rel=1e-12)
    assert min(moments.values()) > 20 and len(moments) == 4, moments


# ---- changes ----


def too_large(draw: random.Random) -> tuple[ModelShape, ParallelLayout]:
    """A published model in a layout that doesn't fit on an H100."""
    choices = {"dp": [1, 2, 4, 8, 16, 32], "tp": [1, 2, 4, 8], "pp": [1, 1, 2, 4, 8, 16],
               "microbatch": [1, 2, 4], "microbatches": [1, 4, 8, 32], "zero_stage": [0, 0, 1, 2],
               "recompute": ["none", "none", "full"]}  # fmt: skip
    while True:
        shape = draw.choice([*KNOWN_MODELS.values()])
        layout = ParallelLayout(**{name: draw.choice(values) for name, values in choices.items()})
        if not why_not(shape, layout) and 80e9 < most_of(step_memory(shape, layout)) < 400e9:
            return shape, layout


def test_the_cheapest_change_is_nearly_the_quick_models(browser):
    draw, chip = random.Random(30), CHIPS["H100"]
    cases = [too_large(draw) for _ in range(40)]
    browser.js(RULES)
    given = json.dumps([(asdict(shape), asdict(layout)) for shape, layout in cases])
    found = browser.js(f"{given}.map(([s, l]) => memoryChanges.fitting(s, l, GIVEN.gpus.H100))")
    slower = []
    for (shape, layout), changes in zip(cases, found, strict=True):
        seconds = []
        for change in changes[:60]:
            changed = ParallelLayout(**change["layout"])
            assert why_not(shape, changed) is None and changed.batch == layout.batch
            peak = most_of(step_memory(shape, changed))
            assert peak == pytest.approx(change["peak"]) and peak <= chip.hbm_bytes
            if change["gpus"] == changes[0]["gpus"]:
                cluster = Cluster(chip, changed.gpus)
                seconds.append(step_time(shape, changed, cluster).seconds)
        slower.append(seconds[0] / min(seconds))
    assert sum(ratio < 1.1 for ratio in slower) >= 0.85 * len(slower), sorted(slower)
    assert max(slower) < 1.25
    # where one GPU is too few, the fewest are the planner's
    for name, batch, gpu in (("llama-3-70b", 96, "H100"), ("llama-3-405b", 16, "B200")):
        shape, layout = KNOWN_MODELS[name], ParallelLayout(microbatches=batch)
        given = f"{json.dumps(asdict(shape))}, {json.dumps(asdict(layout))}, GIVEN.gpus.{gpu}"
        fewest = smallest_gpus(shape, Cluster(CHIPS[gpu], 1), batch, {})
        browser.do((f"memoryChanges.fitting({given})[0].gpus", fewest))


# ---- the page ----

VERDICT = "document.querySelector('#verdict').textContent"
MOST = "document.querySelector('#most').textContent"
ROWS = "[...document.querySelectorAll('.stages tbody tr')]"
TABLE = f"{ROWS}.map(r => [...r.children].map(c => c.textContent))"
SETTINGS = "[state.model, state.gpu, state.shape, state.layout]"


@pytest.fixture
def page(site) -> str:
    return f"{site}/does_it_fit.html"


def field(name: str) -> str:
    return f"document.querySelector('#{name}')"


def cells(stages) -> list[list[str]]:
    return [[decimal_bytes(getattr(stage, name)) for name in NUMBERS] for stage in stages]


def test_the_page_opens_with_what_it_says_without_a_script_and_keys_change_it(browser, page):
    browser.view(page)
    body = BeautifulSoup(memory_page(), "html.parser")
    rows = [[c.get_text() for c in row] for row in body.select(".stages tbody tr")]
    (stage,) = step_memory(KNOWN_MODELS[START[0]], START[2])
    total = f"{VERDICT}.includes('{decimal_bytes(stage.total)}')"
    browser.do((TABLE, rows), (total, True))
    browser.write(field("dp"), "2")
    browser.do("Tab", ("state.layout.dp", 2), ("location.hash.includes('dp=2')", True))
    for wrong in ("model=gpt-5", "width=0", "tp=1.5", "name=x", "gpu=X"):
        browser.view(f"{page}#{'' if 'model' in wrong else 'model=own&'}{wrong}")
        refused = f"{VERDICT}.includes('The address has {wrong}, which')"
        browser.do((refused, True), ("state.model", START[0]))


def test_copied_code_prints_the_pages_numbers(browser, page, capsys):
    draw = random.Random(3)
    many = [(some_shape(draw), some_layout(draw)) for _ in range(100)]
    browser.view(page)
    for shape, layout in [pair for pair in many if not reason(*pair)][:12]:
        state = {"model": shape["name"] or "own", "gpu": draw.choice([*GPUS])}
        state = json.dumps(state | {"shape": shape, "layout": layout})
        browser.js(f"""({field("copied")}.textContent = '', Object.assign(state, {state}),
            changed = true, show(), {field("copy-python")}.click())""")
        browser.until(f"{field('copied')}.textContent === 'Copied the Python.'")
        names: dict = {}
        exec(browser.js("document.querySelector('.python').textContent"), names)
        stages = step_memory(ModelShape(**shape), ParallelLayout(**layout))
        assert names["shape"] == ModelShape(**shape)
        assert step_memory(names["shape"], names["layout"]) == stages
        printed, shown = capsys.readouterr().out, cells(stages)
        for position, numbers in enumerate(shown):
            assert "  ".join([f"stage {position}:", *numbers[:-1]]) in printed
        assert all(numbers in shown for _, *numbers in browser.js(TABLE))
        before = browser.js(SETTINGS)
        browser.js("openAddress()")  # the address says the same
        browser.do((SETTINGS, before))


def test_fields_change_the_answer(browser, page):
    browser.view(page)
    layout = {"dp": 4, "tp": 8, "pp": 4, "microbatches": 32, "zero_stage": 1}
    layout |= {"sequence_parallel": True}

    def rows(optimizer: str) -> list[list[str]]:
        of = ParallelLayout(**layout, optimizer=optimizer)
        return cells(step_memory(KNOWN_MODELS["llama-3-70b"], of))

    numbers, one_gpu = f"{TABLE}.map(row => row.slice(1))", "[state.layout.schedule, "
    waits = f"{MOST}.includes('4 of 32 microbatches wait for backward')"
    for chosen, expression, value in (  # what a reader chooses, and what is then so
        ({}, f'{VERDICT}.startsWith("It doesn\'t fit.")', True),
        ({}, f"{MOST}.includes('Optimizer state takes the most')", True),
        ({"model": "llama-3-70b", **layout}, numbers, rows("adamw")),
        ({"optimizer": "sgd"}, numbers, rows("sgd")),
        ({}, f"{VERDICT}.startsWith('It fits.')", True),
        ({}, waits, True),
        ({"optimizer": "adamw", "schedule": "interleaved"}, "state.layout.chunks", 2),
        ({"pp": 1}, f"{one_gpu}state.layout.chunks]", ["1f1b", 1]),
        ({"tp": 3}, VERDICT, "Not possible: tp doesn't divide 64 heads."),
        ({"tp": 1, "width": 4096, "heads": 32}, "state.model + state.shape.width", "own4096"),
        ({"layers": 5000}, VERDICT, "layers: expected a whole number from 1 to 1,024."),
        ({}, "state.shape.layers", 80),
    ):
        for name, of in chosen.items():
            browser.choose(field(name), of)
        browser.do((expression, value))


def test_what_is_listed_as_a_change_and_what_would_fit_besides_fits(browser, page):
    browser.view(page)
    changes = browser.js("document.querySelectorAll('.changes button').length")
    assert changes > 2
    for k in range(changes):
        browser.view(page)
        words = browser.js(f"document.querySelectorAll('.changes li')[{k}].textContent")
        browser.click(f"document.querySelectorAll('.changes button')[{k}]")
        assert browser.js(VERDICT).startswith("It fits."), words
        assert browser.js(f"{TABLE}[0].at(-1)") in words or "pp" in words
        browser.do(("document.activeElement.id", "verdict"))
    browser.js("history.back()")
    browser.until(f"{VERDICT}.startsWith('It doesn')")
    browser.view(f"{page}#model=llama-3-8b&gpu=H200&dp=8&zero_stage=3&recompute=full")
    note = browser.js(f"{field('changes-note')}.textContent")
    layout = ParallelLayout(dp=8, zero_stage=3, recompute="full")
    shape = KNOWN_MODELS["llama-3-8b"]
    samples = int(note.split("microbatches of ")[1].split()[0])
    tokens = int(note.split("or samples of ")[1].split()[0].replace(",", ""))
    for times, fits in ((1, True), (2, False)):
        more = step_memory(shape, replace(layout, microbatch=times * samples))
        longer = step_memory(replace(shape, time=times * tokens), layout)
        assert (most_of(more) <= 141e9) is (most_of(longer) <= 141e9) is fits


def test_bars_are_as_long_as_their_bytes(browser, page):
    browser.view(f"{page}#model=llama-3-405b&dp=8&tp=8&pp=16&microbatches=32&zero_stage=1")
    rows = browser.js("""[...document.querySelectorAll('.bar')].map(bar => [
        bar.getAttribute('aria-label'), bar.clientWidth, bar.querySelector('.limit').offsetLeft + 2,
        [...bar.querySelectorAll('.part')].map(p => p.getBoundingClientRect().width)])""")
    layout = ParallelLayout(dp=8, tp=8, pp=16, microbatches=32, zero_stage=1)
    stages = step_memory(KNOWN_MODELS["llama-3-405b"], layout)
    unit = rows[0][1] / max(80e9, most_of(stages))
    assert 1 < len(rows) < 16
    for words, _, limit, parts in rows:
        stage = stages[int(words.split(":")[0].split()[-1])]
        assert sum(parts) == pytest.approx(unit * stage.total, abs=0.5)
        assert limit == pytest.approx(unit * 80e9, abs=1.5)
        assert f"{decimal_bytes(stage.total)} at its peak" in words
    assert "stages 3 to 13: " in browser.js("document.querySelector('.bars').innerText")
