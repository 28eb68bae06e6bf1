"""The picture of a sharded product shows which blocks the ranks really held, in right programs
and in wrong ones.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
import torch

import parallel101 as p101
from parallel101.laboratory.analysis.held_blocks import bytes_by_step, columns_of, parts_of
from tests.viz.drawn import SVG, texts

made = torch.Generator().manual_seed(0)
A, B = (torch.randn(shape, generator=made, dtype=torch.float64) for shape in ((8, 12), (12, 8)))
TWO_AXES = "A[I_X, J_Y] · B[J, K] → C[I_X, K]", A, B
BOTH_CUT = "A[I, J_X] · B[J_X, K] → C[I, K]"


def held(run):
    """By column and rank: the letters of the blocks, and the counts of the terms."""
    found = []
    for column in columns_of(run):
        parts = [parts_of(run, column, rank) for rank in range(len(run.held))]
        letters = ["".join("?" if p.cell is None else chr(97 + p.cell) for p in of) for of in parts]
        found.append([(of, p[0].counts if p else ()) for of, p in zip(letters, parts)])
    return found


def test_before_and_after_each_collective():
    run = p101.sharding.run("A[I, J_X] · B[J_X, K] → C[I, K_X]", A, B, mesh={"X": 2})
    whole, first, second = (1,), (1, 0), (0, 1)
    assert held(run) == [
        [("a", whole), ("b", whole)],
        [("a", whole), ("b", whole)],
        [("ab", first), ("ab", second)],  # C[I, K] {U_X}
        [("a", (1, 1)), ("b", (1, 1))],
    ]
    said = texts(run.picture())
    assert said[0] == "A[I, JX] · B[JX, K] → C[I, KX]"
    assert "C[I, KX] on 2 ranks equals the whole A · B." in said
    assert said.count("1 of 2") == 2 and "ReduceScatterX,K" in said
    sent = [max(run.plan.sent_in(step)) for step in run.plan.steps]
    assert bytes_by_step(run.run.trace) == dict(enumerate(sent))
    assert "256 B a rank" in said and "no message" in said


def test_two_axes_on_gloo():
    run = p101.sharding.run(*TWO_AXES, mesh={"X": 2, "Y": 2}, backend="gloo")
    assert [[letters for letters, _ in of] for of in held(run)] == [
        ["a", "b", "c", "d"],
        ["a"] * 4,
        ["ab", "ab", "cd", "cd"],
        ["a", "a", "b", "b"],
    ]
    assert bytes_by_step(run.run.trace)[0] == max(run.plan.sent_in(run.plan.steps[0])) > 0


GATHERED = "A[I_X, J] · B[J, K] → C[I, K]"
SCATTERED = BOTH_CUT.replace("C[I, K]", "C[I_X, K]")
UNKNOWN = [("?", (1,))] * 2
WRONG = {  # the verdict → the product, what a rank does with its blocks, and what is drawn last
    "The ranks hold C[I, K] {U_X}: the sum over X is missing.": (
        *(BOTH_CUT, lambda a, b: a @ b, [("a", (1, 0)), ("a", (0, 1))]),
    ),
    "The ranks hold C[I, K_X].": (
        *(SCATTERED, lambda a, b: p101.reduce_scatter(a @ b, 1)),
        [("ac", (1, 1)), ("bd", (1, 1))],
    ),
    "The ranks hold C[I_X, K].": (GATHERED, lambda a, b: a @ b, [("a", (1,)), ("b", (1,))]),
    "Rank 0 returned shape (4, 16): expected shape (8, 8).": (
        *(GATHERED, lambda a, b: p101.all_gather(a @ b, 1), UNKNOWN),
    ),
    "Rank 0 has the right shape, (8, 8), with other values": (
        *(BOTH_CUT, lambda a, b: p101.all_reduce(a @ b) + a @ b, [("a", (2, 1)), ("a", (1, 2))]),
    ),
    "Rank 0 returned a int: expected shape (8, 8).": (*(BOTH_CUT, lambda a, b: 3, [("", ())] * 2),),
    "(8, 8), with other values.": (*(BOTH_CUT, lambda a, b: torch.zeros(8, 8) + 7, UNKNOWN),),
}


@pytest.mark.parametrize("verdict", WRONG)
def test_mistakes_are_visible(verdict):
    text, program, last = WRONG[verdict]
    run = p101.sharding.run(text, A, B, mesh={"X": 2}, program=program)
    assert run.wrong == [0, 1] and verdict in run.verdict
    assert held(run)[-1] == last
    svg = run.picture().svg()
    assert len(re.findall('class="bad"', svg)) == 2
    assert 'class="w"' in svg and "your program" in texts(run.picture())


def test_a_right_program_of_ones():
    """Values that don't tell the terms apart: what the plan says is taken if it fits."""
    given = BOTH_CUT, torch.ones(4, 4), torch.ones(4, 4)
    run = p101.sharding.run(*given, mesh={"X": 2}, program=lambda a, b: p101.all_reduce(a @ b))
    assert not run.wrong and held(run)[-1] == [("a", (1, 1))] * 2
    plan = p101.sharding.run(*given, mesh={"X": 2})
    assert held(plan)[2] == [("a", (1, 0)), ("a", (0, 1))]


def test_on_a_phone_a_program_is_seen_at_once_and_longer_ones_scroll():
    program = {"mesh": {"X": 2}, "program": lambda a, b: a @ b}
    forgotten = p101.sharding.run(BOTH_CUT, A, B, **program).picture()
    for said in ("the sum over X is missing", "Hatched: missing."):
        assert said in forgotten.intro
    assert forgotten.narrow[0] == 480 and texts(forgotten).count("terms") == 2
    for panel in ET.fromstring(forgotten.svg()).iter(f"{SVG}g"):
        if moved := re.match(r"translate\((-?[\d.]+)", panel.get("data-narrow", "none")):
            for rect in panel.iter(f"{SVG}rect"):
                left = float(rect.get("x")) + float(moved[1])
                assert left >= 0 and left + float(rect.get("width")) <= 480
    assert p101.sharding.run(*TWO_AXES, mesh={"X": 2, "Y": 2}).picture().narrow is None
