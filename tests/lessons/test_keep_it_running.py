"""Lesson 12: the answers to what the reader writes are right, and the text's numbers follow."""

from __future__ import annotations

import math

import pytest

from tests.lessons.lesson import answer, definitions

NAME = "12_keep_it_running"
LESSON = definitions(NAME, "DOWN")


@pytest.mark.parametrize(("save", "between"), [(1.0, 1e3), (60.0, 2e5)])
def test_the_readers_interval_is_the_best(save, between):
    interval, lost = answer(NAME, "saving-answer", LESSON)(save, between), LESSON["lost"]
    least = lost(interval, save, between)
    assert all(least < lost(interval * f, save, between) for f in (0.9, 1.1))
    assert least == pytest.approx(math.sqrt(2 * save / between))


def test_exercises_1_and_4_how_often_to_save():
    mine = answer(NAME, "saving-answer", LESSON)
    assert mine(60, 30 * 3600) == pytest.approx(3600)
    interval = mine(0.015, LESSON["between_failures"](16_384))
    assert interval == pytest.approx(18, abs=0.5)


def test_random_failures_agree_with_the_formula_where_the_loss_is_small():
    for save, between in ((1.0, 1e4), (6.3, 11_135)):
        T = math.sqrt(2 * save * between)
        expected = LESSON["lost"](T, save, between)
        assert LESSON["simulated"](T, save, between) == pytest.approx(expected, rel=0.1)


def test_the_readers_save_writes_the_weights_of_one_step():
    save = answer(NAME, "background-answer", LESSON)
    assert LESSON["saved_during_a_step"](save) == {"first": [5.0], "second": [5.0]}


def test_spare_nodes_are_the_fewest_that_are_enough():
    for expected in (0.5, 7.8, 30.0):
        spares = LESSON["spare_nodes"](expected)
        terms = [math.exp(-expected) * expected**k / math.factorial(k) for k in range(spares + 1)]
        assert sum(terms[:-1]) < 0.99 <= sum(terms)
