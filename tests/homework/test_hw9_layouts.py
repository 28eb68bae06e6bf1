"""Homework 9: its formulas agree with the package, and its cases can be solved and not guessed."""

from __future__ import annotations

import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import parallel101 as p101
from parallel101.cost.model_shape import ModelShape
from parallel101.cost.parallel_layout import ParallelLayout
from parallel101.cost.step_memory import layer_kept, step_memory
from parallel101.cost.step_time import model_flops
from parallel101.laboratory.exercises.estimate_exercises import named
from parallel101.laboratory.exercises.layout_choice import Chosen, choose_on, layout_evaluator
from parallel101.laboratory.grade.exercise import Case, Draw, Trial
from parallel101.laboratory.grade.homework import find_sets
from parallel101.laboratory.grade.release import handed_out
from parallel101.laboratory.grade.remote import imported_modules
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.sim.network import Network
from tests.homework.test_solutions import EXERCISES, HOMEWORK, cases_of

REFERENCE = runpy.run_path(str(Path(__file__).parent / "hw9" / "reference.py"))
NUMBERS = ("memory", "step_seconds", "checkpoint_interval", "stragglers")


def answer(function: str, case: Case):
    exercise = EXERCISES[function]
    return exercise.program(REFERENCE[function], *case.arguments[0])


def in_package(facts: dict) -> tuple[ModelShape, ParallelLayout]:
    shape = ("width", "layers", "heads", "vocabulary", "time")
    layout = (
        "dp", "tp", "pp", "microbatch", "microbatches", "chunks", "recompute",
        "zero_stage", "sequence_parallel",
    )  # fmt: skip
    return (
        ModelShape(**{name: facts[name] for name in shape}),
        ParallelLayout(
            **{name: facts[name] for name in layout if name in facts}, gradient_dtype="fp32"
        ),
    )


def test_the_set_has_40_points_and_its_five_exercises_are_handed_out_as_stubs():
    (homework,) = find_sets(HOMEWORK / "hw9_thousand_gpus")
    assert [exercise.number for exercise in homework.exercises] == [
        "25a", "25b", "25c", "25d", "25e",
    ]  # fmt: skip
    assert sum(exercise.points for exercise in homework.exercises) == 40
    names = {file.name for file in handed_out(homework)}
    assert {"hw9.py", "hw9.ipynb"} <= names and "reference.py" not in names


@pytest.mark.parametrize("function", NUMBERS)
def test_no_number_is_the_same_in_two_cases(function):
    answers = [answer(function, case) for case in cases_of(function)]
    for name in answers[0]:
        found = [one[name] for one in answers if one[name] != 0]
        assert len({round(value, 9) for value in found}) == len(found) > 3, name


@pytest.mark.parametrize("function", [*NUMBERS, "choose_layout"])
def test_another_seed_draws_other_cases(function):
    exercise = EXERCISES[function]
    other = exercise.cases(Draw("another", function))
    assert [case.arguments for case in other] != [case.arguments for case in cases_of(function)]


def test_the_bytes_are_near_those_of_the_packages_own_model():
    """That one counts more, such as biases, positions and statistics of the norms. With ZeRO-1, or
    with overlap and without ZeRO, our trainer holds the gradients twice.
    """
    for case in cases_of("memory"):
        shape, layout = in_package(case.facts)
        stage = step_memory(shape, replace(layout, overlap=False))[0]
        found = answer("memory", case)
        for name in ("weights", "optimizer", *(["gradients"] if layout.zero_stage != 1 else [])):
            assert found[name] == pytest.approx(getattr(stage, name), rel=0.05), (name, case.note)
        layer = sum(layer_kept(shape, layout, regather=True).values())
        kept = answer("memory", one_microbatch(case, recompute="none"))["activations"]
        assert kept / (shape.layers / layout.pp) == pytest.approx(layer, rel=0.02), case.note


def test_as_many_microbatches_are_in_flight_as_the_schedules_have():
    for case in cases_of("memory"):
        facts = case.facts
        if facts["recompute"] == "full":
            continue
        schedule = p101.schedule(
            "interleaved" if facts["chunks"] > 1 else "1f1b",
            stages=facts["pp"],
            microbatches=facts["microbatches"],
            chunks=facts["chunks"],
        )
        chunk = facts["layers"] / facts["pp"] / facts["chunks"]
        alone = (
            answer("memory", one_microbatch(case))["activations"] / facts["layers"] * facts["pp"]
        )
        kept = schedule.time().peak_activations[0] * chunk * alone
        assert answer("memory", case)["activations"] == pytest.approx(kept)


def one_microbatch(case: Case, **others: str) -> Case:
    shape, layout = case.arguments[0]
    return Case([(shape, layout | {"microbatches": 1, "chunks": 1} | others)], [{}])


def test_the_models_work_is_that_of_the_papers_without_the_output_layer():
    for case in cases_of("step_seconds"):
        facts = case.facts
        shape, layout = in_package({**facts, "zero_stage": 0})
        found = answer("step_seconds", case)
        seconds = sum(found[name] for name in ("matmul", "tp", "bubble", "dp"))
        work = found["mfu"] * seconds * layout.gpus * facts["flops"]
        head = 6 * shape.vocabulary * shape.width * layout.batch * shape.time
        assert work + head == pytest.approx(model_flops(shape, layout.batch))


def test_the_estimate_of_megatrons_run_is_as_near_as_the_notebook_says():
    """The row of 145.6 billion parameters in Table 1 of Narayanan et al. Its step of 24.8 s follows
    from 148 TFLOP/s and the paper's formula (3).
    """
    (homework,) = find_sets(HOMEWORK / "hw9_thousand_gpus")
    text = homework.notebook.read_text(encoding="utf-8")
    shape = {"width": 12288, "layers": 80, "heads": 96, "vocabulary": 51200, "time": 2048}
    layout = {"dp": 24, "tp": 8, "pp": 8, "microbatch": 2, "microbatches": 48, "chunks": 2}
    layout |= {"recompute": "full"}
    cluster = {"flops": 312e12, "efficiency": 0.6, "node": 8, "nvlink": 300, "network": 1600}
    for given in (shape, layout, cluster):
        for name, value in given.items():
            if name != "flops" and value != "full":
                assert f"{name}={value}" in text
    found = named(REFERENCE["step_seconds"], shape, layout, cluster)
    assert f"you get {found['mfu']:.0%}".replace("%", " %") in text
    assert f"an MFU of {148 * 3 / 4 / 312:.0%}".replace("%", " %") in text
    assert sum(found[name] for name in ("matmul", "tp", "bubble", "dp")) == pytest.approx(24.8, 0.1)


def test_an_all_reduce_takes_the_seconds_that_a_ring_takes_on_the_virtual_clock():
    """Of tp in a node, and of dp across nodes: neighbours along dp are on other nodes."""

    def ring(gpus: int, bandwidth: float, numel: int) -> float:
        network = Network(latency=0.0, bandwidth=bandwidth)
        program = p101.algorithms("all_reduce")["ring"]

        def step() -> None:
            import torch

            program(torch.zeros(numel))

        run = p101.launch(step, world_size=gpus, backend="sim", network=network, trace=True)
        return run.trace.makespan

    shape = {"width": 16, "layers": 2, "heads": 2, "vocabulary": 64, "time": 8}
    layout = {
        "dp": 4, "tp": 2, "pp": 1, "microbatch": 1, "microbatches": 1, "chunks": 1,
        "recompute": "none",
    }  # fmt: skip
    cluster = {"flops": 1e12, "efficiency": 0.5, "node": 2, "nvlink": 8e-6, "network": 3.2e-5}
    found = named(REFERENCE["step_seconds"], shape, layout, cluster)
    # 8 all-reduces of (1, 8, 16) in bf16, as half as many fp32 numbers
    assert found["tp"] == pytest.approx(8 * ring(2, 8e3, 8 * 16 // 2))
    assert found["dp"] == pytest.approx(ring(4, 2e3, 12 * 16 * 16 * 2 // 2))


def test_the_interval_is_the_best_one():
    for case in cases_of("checkpoint_interval"):
        found, facts = answer("checkpoint_interval", case), case.facts

        def lost(interval: float, facts=facts) -> float:
            again = interval / 2 + facts["restart"]
            return facts["write"] / interval + again / facts["between"]

        assert found["lost"] == pytest.approx(lost(found["interval"]))
        assert all(lost(found["interval"] * factor) > found["lost"] for factor in (0.9, 1.1))


def test_a_secret_seed_draws_clusters_on_which_the_reference_finds_a_good_layout():
    exercise = EXERCISES["choose_layout"]
    for seed in ("secret",):
        for case in exercise.cases(Draw(seed, exercise.function)):
            found = choose_on(REFERENCE["choose_layout"], *case.arguments[0])
            chosen = Chosen(Trial(case, [found], Trace((), 1, "sim")))
            assert chosen.fits and chosen.share >= 0.95, (seed, case.note, found)


def test_no_rank_has_the_planner_or_the_formulas_in_its_memory():
    (homework,) = find_sets(HOMEWORK / "hw9_thousand_gpus")
    modules = {name for one in homework.exercises for name in imported_modules(one.source)}
    assert "parallel101.laboratory.exercises.layout_choice" in modules
    code = (
        f"import sys, parallel101.laboratory.grade.rank, {', '.join(modules)}; print(*sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "parallel101.cost.step_time" in found.stdout
    assert "parallel101.laboratory.planner" not in found.stdout
    assert "parallel101.laboratory.exercises.estimate_answers" not in found.stdout


def test_the_tool_says_what_is_wrong_and_counts_what_it_answers():
    shape = SimpleNamespace(width=1024, layers=8, heads=8, vocabulary=1024, time=512)
    evaluate = layout_evaluator(shape, "H100", gpus=16, batch=32)
    for layout, message in (
        ({"dp": 16, "microbatches": 1}, "samples"),
        ({"dp": 4, "microbatches": 8}, "16 GPUs"),
        ({"tp": 16, "microbatches": 32}, "heads"),
        ({"dp": 4, "pp": 4, "chunks": 4, "microbatches": 8}, "8 layers"),
        ({"dp": 16, "microbatches": 2, "sequence_parallel": True}, "sequence parallel"),
        ({"dp": 16, "microbatches": 2, "cp": 2}, "not a layout"),
        ({"dp": 16.0, "microbatches": 2}, "whole number"),
        ({"dp": 16, "microbatches": 2, "recompute": "some"}, "recompute"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate(**layout)
    for _ in range(400):
        evaluate.left = 10**9  # it is counted where nobody can change it
        assert 0 < evaluate(dp=16, microbatches=2)["mfu"] < 1
    with pytest.raises(RuntimeError, match="more than 400 times"):
        evaluate(dp=16, microbatches=2)
