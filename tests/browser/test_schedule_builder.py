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


def some_schedule(draw: random.Random) -> Lists:
    """A published schedule, or one whose ranks do in turn whatever they can; perhaps with messages,
    and perhaps with an overlap.
    """
    ranks, microbatches = draw.randint(1, 4), draw.randint(1, 4)
    name = draw.choice(["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "random", "random"])
    if name == "random":
        lists = some_order(draw, ranks, microbatches)
    else:
        chunks = draw.randint(1, 2) if name == "interleaved" else 1
        microbatches *= ranks if name == "interleaved" else 1
        made = p101.schedule(name, stages=ranks, microbatches=microbatches, chunks=chunks)
        lists = made.actions
    if draw.random() < 0.5:
        schedule = p101.Schedule(lists)
        messages = with_messages(schedule.ranks, schedule.placement)
        lists = [[str(action) for action in of_rank] for of_rank in messages]
    of_rank = draw.choice(lists)
    pairs = range(len(of_rank) - 1)  # sometimes with a message, which can't overlap
    if draw.random() < 0.2 and pairs:
        at = draw.choice(pairs)
        of_rank[at : at + 2] = [f"({of_rank[at]};{of_rank[at + 1]})OVERLAP_F_B"]
    return lists


def some_order(draw: random.Random, ranks: int, microbatches: int) -> Lists:
    """All stages' actions in a random order in which each has what it needs; stages anywhere."""
    stages = [*range(ranks), *(draw.randrange(ranks) for _ in range(draw.randint(0, 2)))]
    draw.shuffle(stages)
    todo = {}  # action → what it needs
    for i in range(microbatches):
        halves = {s: draw.random() < 0.5 for s in range(len(stages))}
        for s in halves:
            after = [f"{s + 1}{'I' if halves.get(s + 1) else 'B'}{i}"] * (s + 1 < len(stages))
            todo[f"{s}F{i}"] = [f"{s - 1}F{i}"] * (s > 0)
            todo[f"{s}{'I' if halves[s] else 'B'}{i}"] = [f"{s}F{i}", *after]
            if halves[s]:
                todo[f"{s}W{i}"] = [f"{s}I{i}"]
    lists: Lists = [[] for _ in range(ranks)]
    while todo:
        action = draw.choice([a for a in todo if not any(n in todo for n in todo[a])])
        del todo[action]
        lists[stages[int(action[0])]].append(action)
    return lists


def spoilt(draw: random.Random, lists: Lists) -> Lists:
    """The lists after a few changes: swapped, moved, left out, repeated, renamed."""
    for _ in range(draw.randint(0, 3)):
        of_rank = draw.choice(lists)
        if not of_rank:
            continue
        at, other = draw.randrange(len(of_rank)), draw.randrange(len(of_rank))
        match draw.choice(["swap", "swap", "swap", "near", "near", "move", "out", "twice", "name"]):
            case "swap":
                of_rank[at], of_rank[other] = of_rank[other], of_rank[at]
            case "near" if at:
                of_rank[at], of_rank[at - 1] = of_rank[at - 1], of_rank[at]
            case "move":
                draw.choice(lists).append(of_rank.pop(at))
            case "out":
                del of_rank[at]
            case "twice":
                of_rank.insert(other, of_rank[at])
            case "name":
                kind = draw.choice(["F", "B", "I", "W", "RECV_F", "SEND_B", "X"])
                of_rank[at] = f"{draw.randint(0, 4)}{kind}{draw.randint(0, 4)}"
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
    many = [spoilt(draw, some_schedule(draw)) for _ in range(2000)]
    costs = [[draw.choice([0.25, 0.5, 1, 2, 3]) for _ in range(3)] for _ in many]
    delays = [draw.choice([0, 0, 0.5, 2]) for _ in many]
    ours = {rules: [said(lists, rules) for lists in many] for rules in ("gloo", "nccl")}
    browser.js(RULES)
    for rules in ours:
        theirs = browser.js(f"{json.dumps(many)}.map(l => scheduleRules.check(l, '{rules}'))")
        assert [x for x in zip(many, theirs, ours[rules], strict=True) if x[1] != x[2]] == []
    kinds = Counter(
        next((w for w in ("NCCL", "forever", "missing", "twice", "early") if w in text), text[:3])
        for text in ours["nccl"]
    )
    assert min(kinds[w] for w in ("", "NCCL", "forever", "missing", "twice", "early")) > 10, kinds

    runs = [x for x, text in zip(zip(many, costs, delays), ours["gloo"], strict=True) if not text]
    times = browser.js(
        f"{json.dumps(runs)}.map(([lists, [F, I, W], communication]) => {{"
        "const found = scheduleRules.time(lists, { F, I, W }, communication);"
        "const slots = found.slots.map(s => [s.rank, s.parts[0].name, s.start, s.end]);"
        "return { ...found, slots }; })"
    )
    for (lists, cost, delay), found in zip(runs, times, strict=True):
        expected = p101.Schedule(lists).time(*cost, communication=delay)
        assert found["makespan"] == expected.makespan
        assert found["bubbleRate"] == pytest.approx(expected.bubble_rate, abs=1e-12)
        assert found["peaks"] == expected.peak_activations
        assert sorted(map(tuple, found["slots"])) == sorted(
            (slot.rank, str(slot.action.computed()[0]), slot.start, slot.end)
            for slot in expected.slots
        )


# ---- the page ----

SAID = "document.querySelector('#said').textContent"
PYTHON = "document.querySelector('.python').textContent"
LISTS = "state.lists"
ROWS = "[...document.querySelectorAll('.score tbody tr')].map(r => r.innerText.split('\\t'))"


def with_lists(browser: Browser, page: str, lists: Lists, microbatches: int = 2) -> None:
    browser.open("about:blank")
    browser.open(
        f"{page}#ranks={len(lists)}&microbatches={microbatches}&stages=one&times=1,1,1,0&lists="
        + "_".join(".".join(of_rank) for of_rank in lists)
    )


def button(kind: str, rank: int) -> str:
    return f"click document.querySelector('.next [data-rank=\"{rank}\"][data-kind={kind}]')"


ORDER = ("F0", "F1", "F0", "B1", "B0", "F0", "F1", "B1", "B0")  # kind and rank


def ran(python: str) -> dict:
    """The names that copied code defines."""
    names: dict = {}
    exec(python, names)
    return names


def test_the_mouse_builds_a_schedule_that_python_runs(browser, builder, capsys):
    with_lists(browser, builder, [[], []])
    browser.js("document.querySelector('.board').scrollIntoView()")
    browser.do(*(button(a[0], int(a[1])) for a in ORDER))
    browser.do("click document.querySelector('#copy-python')")
    browser.until("document.querySelector('#copied').textContent === 'Copied the Python.'")
    names = ran(browser.js(PYTHON))
    browser.do((LISTS, names["schedule"].actions), (f"{LISTS}[1].join()", "1F0,1B0,1F1,1B1"))
    assert "complete" in browser.js(SAID)
    rate = float(capsys.readouterr().out.split()[1])
    _, step, _, bubble, *_ = browser.js(ROWS)[0]
    assert [step, bubble] == [f"{names['times'].makespan:g}", f"{100 * rate:.1f} %"]
    browser.js("document.querySelector('.paste').open = true")
    for rules, words in (("gloo", "run under gloo's rules"), ("nccl", "under NCCL's rules, where")):
        browser.do(f"click document.querySelector('#check-{rules}')")
        assert words in browser.js("document.querySelector('#verdict').textContent")


def test_keys_build_the_same(browser, builder):
    with_lists(browser, builder, [[], []])
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


def test_what_is_impossible_and_what_a_bubble_waits_for_is_said(browser, builder):
    with_lists(browser, builder, [["0F0", "0F1"], ["1F0", "1B0", "1F1"]])
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
    with_lists(browser, builder, [["0F0", "0I0", "0F1", "0I1"], others])
    browser.js("choose(0, 'w0I1')")
    assert "Rank 0 waits from 6 to 9 for 1B1 on rank 1, which ends at 9" in browser.js(SAID)
    browser.do(button("W", 0), (f"{LISTS}[0].join()", "0F0,0I0,0F1,0W0,0I1"), button("W", 0))
    times = p101.Schedule([["0F0", "0I0", "0F1", "0W0", "0I1", "0W1"], others]).time()
    browser.do((f"{ROWS}[0][1]", f"{times.makespan:g}"))


def test_an_action_is_dragged_with_the_mouse_and_chosen_with_a_finger(browser, builder):
    with_lists(browser, builder, [["0F0", "0F1"], ["1F0", "1F1", "1B0"]])
    box = "document.querySelector('#a1F1')"
    browser.js(f"{box}.scrollIntoView({{block: 'center'}})")
    place = f"(b => [b.x + b.width / 2, b.y + 9, b.width])({box}.getBoundingClientRect())"
    x, y, width = browser.js(place)
    for kind, steps in (("Pressed", 0), ("Moved", 1), ("Moved", 3), ("Released", 3)):
        how = {"button": "left", "buttons": int(kind != "Released"), "clickCount": 1}
        event = {"type": f"mouse{kind}", "x": x + steps * width, "y": y, **how}
        browser.call("Input.dispatchMouseEvent", **event)
    browser.do((f"{LISTS}[1].join()", "1F0,1B0,1F1"))
    points = [{"x": x - width, "y": y}]
    browser.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=points)
    browser.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    browser.until("chosen?.id === 'a1F0'")


GAMES = """(() => {
    let seed = 7;
    const random = n => (seed = (seed * 48271) % 2147483647) % n;
    draw = () => {};
    return [...Array(40)].map(() => {
        state.ranks = 2 + random(2), state.microbatches = 1 + random(3);
        state.stages = ["one", "loop", "v"][random(3)];
        state.lists = Array.from({ length: state.ranks }, () => []);
        build();
        for (let turn = 0; turn < 5000 && !complete(); turn++) {
            const rank = random(state.ranks), stages = stagesOf(rank);
            place(rank, stages[random(stages.length)], "FBIW"[random(4)]);
            const names = state.lists[rank];
            if (names.length && !random(3))
                move(rank, names[random(names.length)], random(names.length));
            if (names.length && !random(400)) {
                chosen = { rank, id: `a${names[random(names.length)]}` };
                remove();
            }
        }
        return [state.lists, state.microbatches, placement(), address()]; }) })()"""


def test_what_was_accepted_on_the_way_is_a_schedule_in_the_end(browser, builder):
    with_lists(browser, builder, [[], []])
    for lists, microbatches, placement, address in browser.js(GAMES):
        schedule = p101.Schedule(lists)
        schedule.check("nccl")
        assert schedule.microbatches == microbatches
        assert [*schedule.placement.values()] == placement
        assert "_".join(".".join(of_rank) for of_rank in lists) in address


def test_the_address_carries_the_schedule(browser, builder):
    lists = [["0F0", "0F1", "0B0"], ["1F0", "1B0"]]
    with_lists(browser, builder, lists)
    browser.do((LISTS, lists), button("F", 1))
    browser.reload()
    assert ran(browser.js(PYTHON))["schedule"].actions == [lists[0], ["1F0", "1B0", "1F1"]]
    for spoilt_lists, why in (
        ("0B0.0F0_1F0.1B0", "0B0 needs 0F0, which comes later"),
        ("0F0.0X0_1F0", "it has 0X0"),
    ):
        browser.js(f"location.hash = location.hash.replace(/lists=.*/, 'lists={spoilt_lists}')")
        browser.until(f"{SAID}.includes({json.dumps(why)})")


def test_published_schedules_have_pythons_score_and_goals(browser, builder):
    with_lists(browser, builder, [[], [], []], 6)
    static = browser.js("document.querySelector('.score tbody').innerText.split('\\n').slice(1)")
    parsed = BeautifulSoup(schedule_builder_page(), "html.parser").select_one(".score tbody")
    assert [row.strip() for row in static] == [row.get_text("\t") for row in parsed("tr")]
    for name in NAMES:
        change = f"f.value = '{name}', f.dispatchEvent(new Event('change', {{bubbles: true}}))"
        browser.js(f"(f => ({change}))(document.querySelector('#from'))")
        mine, *others = browser.js(ROWS)
        assert mine[1:] == next(row[1:] for row in others if row[0] == NAMES[name])
        schedule = ran(browser.js(PYTHON))["schedule"]
        assert schedule == published(3, 6)[name]
        goals = "[...document.querySelectorAll('.goals li')].map(g => g.matches('.reached'))"
        of = score(schedule, 2 if name == "interleaved" else 1)
        browser.do((goals, [True, of.held <= 3, of.bubble_rate < 1e-9]))
