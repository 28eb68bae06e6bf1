"""The page on which a schedule is built by hand: its rules are those of Schedule.check, its times
those of Schedule.time, and what a reader places, moves and copies is what Python gets.
"""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

import parallel101 as p101
from parallel101.publish.tools.schedule_builder_page import RULES
from parallel101.trainers.schedules.with_messages import with_messages
from parallel101.viz.chromium import Browser

pytestmark = pytest.mark.browser

Lists = list[list[str]]


@pytest.fixture(scope="module")
def browser(chromium: str):
    with Browser(chromium) as browser:
        yield browser


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
    computed = [len(action) < 4 for action in of_rank]  # no send or receive
    if draw.random() < 0.2 and (pairs := [k for k in range(1, len(computed)) if all(computed[k - 1 : k + 1])]):
        at = draw.choice(pairs) - 1
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
    many = [spoilt(draw, some_schedule(draw)) for _ in range(3000)]
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
    assert min(kinds[w] for w in ("", "NCCL", "forever", "missing", "twice", "early")) > 20, kinds

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
