"""The page on which a schedule is built by hand: its rules are those of Schedule.check, its times
those of Schedule.time, and what a reader places, moves and copies is what Python gets.
"""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from bs4 import BeautifulSoup

import parallel101 as p101
from parallel101.laboratory.publish.tools.schedule_builder_page import (
    NAMES,
    RULES,
    published,
    schedule_builder_page,
    score,
)
from parallel101.trainers.schedules.actions import with_messages
from tests.browser.browser import Browser

pytestmark = pytest.mark.browser

Lists = list[list[str]]


CHANGES = ["swap", "swap", "swap", "near", "near", "near", "move", "out", "twice", "name"]


def some_schedule(draw: random.Random) -> Lists:
    """A published schedule; perhaps with messages, an overlap, and after a few changes: actions
    that are swapped, moved, left out, repeated or renamed.
    """
    name = draw.choice(["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"])
    ranks, microbatches, chunks = draw.randint(1, 4), draw.randint(1, 4), 1
    if name == "interleaved":
        microbatches, chunks = microbatches * ranks, draw.choice([1, 2])
    made = p101.schedule(name, stages=ranks, microbatches=microbatches, chunks=chunks)
    messages = with_messages(made.ranks, made.placement) if draw.random() < 0.5 else made.actions
    lists = [[*map(str, of_rank)] for of_rank in messages]
    of_rank = draw.choice(lists)
    if draw.random() < 0.2 and len(of_rank) > 1:  # sometimes of a message, which can't overlap
        at = draw.randrange(len(of_rank) - 1)
        of_rank[at : at + 2] = [f"({of_rank[at]};{of_rank[at + 1]})OVERLAP_F_B"]
    for change in draw.sample(CHANGES, draw.randint(0, 3)):
        if not (of_rank := draw.choice(lists)):
            continue
        at, other = draw.randrange(len(of_rank)), draw.randrange(len(of_rank))
        action = of_rank.pop(at)
        if change == "name":
            kind = draw.choice(["F", "B", "I", "W", "RECV_F", "SEND_B", "X"])
            action = f"{draw.randint(0, 4)}{kind}{draw.randint(0, 4)}"
        if change in ("name", "twice"):
            of_rank.insert(at, action)
        if change in ("swap", "near", "twice"):
            of_rank.insert(max(at - 1, 0) if change == "near" else other, action)
        elif change == "move":
            draw.choice(lists).append(action)
    return lists


def said(lists: Lists, rules: str) -> str:
    """What Schedule.check says, or "" if the schedule can be run."""
    try:
        p101.Schedule(lists).check(rules)
    except p101.ScheduleError as error:
        return str(error)
    return ""


def test_the_rules_and_the_times_are_pythons(browser):
    draw = random.Random(30)
    many = [some_schedule(draw) for _ in range(2000)]
    costs = [[draw.choice([0.25, 0.5, 1, 2, 3]) for _ in range(3)] for _ in many]
    delays = [draw.choice([0, 0, 0.5, 2]) for _ in many]
    ours = {rules: [said(lists, rules) for lists in many] for rules in ("gloo", "nccl")}
    browser.js(RULES)
    for rules in ours:
        theirs = browser.js(f"{json.dumps(many)}.map(l => scheduleRules.check(l, '{rules}'))")
        assert [x for x in zip(many, theirs, ours[rules], strict=True) if x[1] != x[2]] == []
    words = ("NCCL", "forever", "missing", "twice", "early", "")
    kinds = Counter(next(word for word in words if word in text) for text in ours["nccl"])
    assert min(kinds[word] for word in words) > 10 and ours["nccl"].count("") > 10, kinds

    runs = [x for x, text in zip(zip(many, costs, delays), ours["gloo"], strict=True) if not text]
    times = browser.js(f"""{json.dumps(runs)}.map(([lists, [F, I, W], communication]) => {{
        const found = scheduleRules.time(lists, {{ F, I, W }}, communication);
        const slots = found.slots.map(s => [s.rank, s.parts[0].name, s.start, s.end]);
        return {{ ...found, slots }}; }})""")
    for (lists, cost, delay), found in zip(runs, times, strict=True):
        of = p101.Schedule(lists).time(*cost, communication=delay)
        assert (found["makespan"], found["peaks"]) == (of.makespan, of.peak_activations)
        assert found["bubbleRate"] == pytest.approx(of.bubble_rate, abs=1e-12)
        slots = [(s.rank, str(s.action.computed()[0]), s.start, s.end) for s in of.slots]
        assert sorted(map(tuple, found["slots"])) == sorted(slots)


# ---- the page ----

SAID = "document.querySelector('#said').textContent"
PYTHON = "document.querySelector('.python').textContent"
LISTS = "state.lists"
ROWS = "[...document.querySelectorAll('.score tbody tr')].map(r => r.innerText.split('\\t'))"


@pytest.fixture
def page(site) -> str:
    return f"{site}/build_a_schedule.html"


def with_lists(browser: Browser, page: str, lists: Lists, microbatches: int = 2) -> None:
    text = "_".join(".".join(of_rank) for of_rank in lists)
    numbers = f"ranks={len(lists)}&microbatches={microbatches}&stages=one&times=1,1,1,0"
    browser.view(f"{page}#{numbers}&lists={text}")


def button(kind: str, rank: int) -> str:
    return f"click document.querySelector('.next [data-rank=\"{rank}\"][data-kind={kind}]')"


ORDER = ("F0", "F1", "F0", "B1", "B0", "F0", "F1", "B1", "B0")  # kind and rank


def ran(python: str) -> dict:
    """The names that copied code defines."""
    names: dict = {}
    exec(python, names)
    return names


def test_the_mouse_builds_a_schedule_that_python_runs(browser, page, capsys):
    with_lists(browser, page, [[], []])
    browser.js("document.querySelector('.board').scrollIntoView()")
    browser.do(*(button(a[0], int(a[1])) for a in ORDER))
    browser.do("click document.querySelector('#copy-python')")
    browser.until("document.querySelector('#copied').textContent === 'Copied the Python.'")
    names = ran(browser.js(PYTHON))
    browser.do((LISTS, names["schedule"].actions), (f"{LISTS}[1].join()", "1F0,1B0,1F1,1B1"))
    assert "complete" in browser.js(SAID)
    rate = float(capsys.readouterr().out.split()[1])
    browser.do((f"{ROWS}[0][1]", f"{names['times'].makespan:g}"))
    browser.do((f"{ROWS}[0][3]", f"{100 * rate:.1f} %"))
    browser.js("document.querySelector('.paste').open = true")
    for rules, words in (("gloo", "run under gloo's rules"), ("nccl", "under NCCL's rules, where")):
        browser.do(f"click document.querySelector('#check-{rules}')")
        assert words in browser.js("document.querySelector('#verdict').textContent")


def test_keys_build_the_same(browser, page):
    with_lists(browser, page, [[], []])
    for rank, keys in ((0, "f"), (1, "fb"), (0, "bf"), (1, "fb"), (0, "b")):
        browser.js(f"document.querySelector('[role=listbox][data-rank=\"{rank}\"]').focus()")
        browser.do(*keys)
    browser.do((LISTS, [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]))
    at = "document.activeElement.dataset.rank"  # above rank 0 is no rank
    browser.do("ArrowDown", (at, "1"), "ArrowUp", (at, "0"), "ArrowUp", (at, "0"))
    last = f"{LISTS}[0].slice(1).join()"
    browser.do("ArrowRight", "s", "ArrowLeft", (f"{SAID}.includes('input gradient')", True))
    browser.do((last, "0B0,0F1,0I1,0W1"), "Delete", (last, "0B0,0F1"))
    browser.do((f"{SAID}.includes('1 action that needs it')", True), "u", (last, "0B0,0F1,0I1,0W1"))


def test_what_is_impossible_and_what_a_bubble_waits_for_is_said(browser, page):
    with_lists(browser, page, [["0F0", "0F1"], ["1F0", "1B0", "1F1"]])
    missing = "Not possible: 0W0 needs 0I0, which isn't placed yet."
    browser.do(button("W", 0), (SAID, missing), ("choose(1, 'a1B0')", None))
    late = "Not possible: 1B0 needs 1F0, which comes later."
    browser.do("click document.querySelector('#earlier')", (SAID, late))
    browser.js("(choose(1, 'a1F1'), move(1, '1F1', 0))")
    browser.do((f"{LISTS}[1].join()", "1F1,1F0,1B0"), button("B", 0))
    browser.js("move(0, '0B0', 1)")
    assert "the ranks would wait for each other forever" in browser.js(SAID)
    browser.do((f"{LISTS}[0].join()", "0F0,0F1,0B0"))
    others = ["1F0", "1B0", "1F1", "1B1"]
    with_lists(browser, page, [["0F0", "0I0", "0F1", "0I1"], others])
    browser.js("choose(0, 'w0I1')")
    assert "Rank 0 waits from 6 to 9 for 1B1 on rank 1, which ends at 9" in browser.js(SAID)
    moved = ["0F0", "0I0", "0F1", "0W0", "0I1"]
    browser.do(button("W", 0), (f"{LISTS}[0]", moved), button("W", 0))
    times = p101.Schedule([[*moved, "0W1"], others]).time()
    browser.do((f"{ROWS}[0][1]", f"{times.makespan:g}"))


def test_an_action_is_dragged_with_the_mouse_and_chosen_with_a_finger(browser, page):
    with_lists(browser, page, [["0F0", "0F1"], ["1F0", "1F1", "1B0"]])
    box = "document.querySelector('#a1F1')"
    browser.js(f"{box}.scrollIntoView({{block: 'center'}})")
    place = f"(b => [b.x + b.width / 2, b.y + 9, b.width])({box}.getBoundingClientRect())"
    x, y, width = browser.js(place)
    for kind, steps in (("Pressed", 0), ("Moved", 1), ("Moved", 3), ("Released", 3)):
        how = {"button": "left", "buttons": int(kind != "Released"), "clickCount": 1}
        at = {"x": x + steps * width, "y": y}
        browser.call("Input.dispatchMouseEvent", type=f"mouse{kind}", **at, **how)
    browser.do((f"{LISTS}[1].join()", "1F0,1B0,1F1"))
    for kind, points in (("Start", [{"x": x - width, "y": y}]), ("End", [])):
        browser.call("Input.dispatchTouchEvent", type=f"touch{kind}", touchPoints=points)
    browser.until("chosen?.id === 'a1F0'")


GAMES = """(() => {
    let seed = 7;
    const random = n => (seed = (seed * 48271) % 2147483647) % n, any = l => l[random(l.length)];
    draw = () => {};
    return [...Array(40)].map(() => {
        state.ranks = 2 + random(2), state.microbatches = 1 + random(3);
        state.stages = any(["one", "loop", "v"]);
        state.lists = Array.from({ length: state.ranks }, () => []);
        build();
        for (let turn = 0; turn < 5000 && !complete(); turn++) {
            const rank = random(state.ranks), names = state.lists[rank];
            place(rank, any(stagesOf(rank)), any("FBIW"));
            if (names.length && !random(3)) move(rank, any(names), random(names.length));
            if (names.length && !random(400)) chosen = { rank, id: `a${any(names)}` }, remove();
        }
        return [state.lists, state.microbatches, placement(), address()]; }) })()"""


def test_what_was_accepted_on_the_way_is_a_schedule_in_the_end(browser, page):
    with_lists(browser, page, [[], []])
    for lists, microbatches, placement, address in browser.js(GAMES):
        schedule = p101.Schedule(lists)
        schedule.check("nccl")
        assert schedule.microbatches == microbatches
        assert [*schedule.placement.values()] == placement
        assert "_".join(".".join(of_rank) for of_rank in lists) in address


def test_the_address_carries_the_schedule(browser, page):
    lists = [["0F0", "0F1", "0B0"], ["1F0", "1B0"]]
    with_lists(browser, page, lists)
    browser.do((LISTS, lists), button("F", 1))
    browser.reload()
    assert ran(browser.js(PYTHON))["schedule"].actions == [lists[0], ["1F0", "1B0", "1F1"]]
    wrong = {"0B0.0F0_1F0.1B0": "0B0 needs 0F0, which comes later", "0F0.0X0_1F0": "it has 0X0"}
    for changed, why in wrong.items():
        browser.js(f"location.hash = location.hash.replace(/lists=.*/, 'lists={changed}')")
        browser.until(f"{SAID}.includes({json.dumps(why)})")


def test_published_schedules_have_pythons_score_and_goals(browser, page):
    with_lists(browser, page, [[], [], []], 6)
    static = browser.js("document.querySelector('.score tbody').innerText.split('\\n').slice(1)")
    parsed = BeautifulSoup(schedule_builder_page(), "html.parser").select_one(".score tbody")
    assert [row.strip() for row in static] == [row.get_text("\t") for row in parsed("tr")]
    for name in NAMES:
        browser.choose("document.querySelector('#from')", name)
        mine, *others = browser.js(ROWS)
        assert mine[1:] == next(row[1:] for row in others if row[0] == NAMES[name])
        schedule = ran(browser.js(PYTHON))["schedule"]
        assert schedule == published(3, 6)[name]
        goals = "[...document.querySelectorAll('.goals li')].map(g => g.matches('.reached'))"
        of = score(schedule, 2 if name == "interleaved" else 1)
        browser.do((goals, [True, of["held"] <= 3, of["bubble_rate"] < 1e-9]))
