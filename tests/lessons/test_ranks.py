"""Lesson 00: its line for hosted notebooks, its cells that show errors, what the reader writes, and
the answers to its exercises.
"""

from __future__ import annotations

import math
import re
import types

import pytest
import torch
import torch.distributed as dist
from IPython.core.inputtransformer2 import TransformerManager

import parallel101 as p101
from tests.lessons.lesson import answer, definitions, read

STEPS = p101.Network(latency=1.0, bandwidth=math.inf)


def steps(program, world_size):
    return p101.launch(program, world_size=world_size, backend="sim", network=STEPS).trace.makespan


def test_the_line_for_hosted_notebooks_installs_the_zip_that_github_makes(tmp_path):
    (note,) = (cell.source for cell in read("00_ranks").cells if cell.id == "install-note")
    (line,) = re.findall(r"`(%pip [^`]+)`", note)
    assert 'run_line_magic("pip", ' in TransformerManager().transform_cell(line).replace("'", '"')
    for name in ("parallel101-main.zip", "parallel101.zip"):
        (tmp_path / name).touch()
        assert list(tmp_path.glob(line.split()[-1])) == [tmp_path / name]
        (tmp_path / name).unlink()


ATTEMPTS = (
    "deadlock-run",
    "isend-changed",
    "dies-run",
    "dies-killed",
    "nccl-run",
)


@pytest.mark.parametrize("cell_id", ATTEMPTS)
def test_a_cell_without_its_error_prints_one_line_and_the_next_cells_run(cell_id, capsys):
    """In a fresh kernel, where no earlier run has defined what the error would define."""
    cells = {cell.id: cell.source for cell in read("00_ranks").cells if cell.cell_type == "code"}
    assert (
        tuple(i for i, source in cells.items() if "attempt(" in source and i != "attempt")
        == ATTEMPTS
    )
    errors = {name: getattr(p101, name) for name in ("DeadlockError", "MisuseError", "RankFailed")}
    names = {
        **definitions("00_ranks", "BACKEND"),
        "p101": types.SimpleNamespace(launch=lambda *_, **__: None, **errors),
    }
    exec(cells["attempt"], names)
    exec(cells[cell_id], names)
    assert len(capsys.readouterr().out.splitlines()) == 1
    if cell_id.removesuffix("-run") in ("deadlock", "nccl"):
        exec(cells[cell_id.replace("-run", "-picture")], names)


def test_exercise_1_taking_turns_takes_two_steps():
    lesson = definitions("00_ranks")
    in_turn = answer("00_ranks", "turns-answer", lesson)
    assert (steps(in_turn, 2), steps(lesson["swap"], 2)) == (2.0, 1.0)


def test_the_check_of_the_swap_knows_a_right_answer(capsys):
    (check,) = (cell.source for cell in read("00_ranks").cells if cell.id == "turns-check")
    lesson = definitions("00_ranks")
    for written, says in (
        (lesson["swap_in_turn"], "not swapped yet: [-1.0, -1.0]"),
        (answer("00_ranks", "turns-answer", lesson), "swapped: [1.0, 0.0]"),
    ):
        exec(check, lesson | {"swap_in_turn": written})
        assert capsys.readouterr().out.strip() == says


def test_exercise_2_one_rank_that_receives_first_prevents_the_deadlock():
    def ring(*first):
        rank, n = dist.get_rank(), dist.get_world_size()
        calls = [
            lambda: dist.send(torch.ones(1), (rank + 1) % n),
            lambda: dist.recv(torch.ones(1), (rank - 1) % n),
        ]
        for call in reversed(calls) if rank in first else calls:
            call()

    assert steps(lambda: ring(0), 4) == 4.0
    with pytest.raises(p101.DeadlockError, match="0 → rank 1 → rank 2 → rank 3"):
        steps(lambda: ring(), 4)


@pytest.mark.parametrize(("nbytes", "seconds"), [(8, 0.32e-3), (64_000_000, 82e-3)])
def test_exercise_3_one_round_of_a_small_token_and_of_a_large_one(nbytes, seconds):
    """Eight ranks instead of 64, with an eighth of the memory: one round is as many messages as
    there are ranks.
    """

    def one_round():
        rank, n = dist.get_rank(), dist.get_world_size()
        token = torch.empty(nbytes, dtype=torch.uint8)
        if rank > 0:
            dist.recv(token, rank - 1)
        dist.send(token, (rank + 1) % n)
        if rank == 0:
            dist.recv(token, n - 1)

    network = p101.Network(latency=5e-6, bandwidth=50e9)
    took = p101.launch(one_round, world_size=8, backend="sim", network=network).trace.makespan
    assert took * 64 / 8 == pytest.approx(seconds, rel=0.01)


def test_exercise_4_a_ring_without_batches_under_nccls_rules():
    def ring():
        rank, n = dist.get_rank(), dist.get_world_size()
        sent = dist.isend(torch.ones(1), (rank + 1) % n)
        dist.irecv(torch.ones(1), (rank - 1) % n).wait()
        sent.wait()

    p101.launch(ring, world_size=3, backend="sim", rules="nccl")  # as without device_id
    with pytest.raises(p101.DeadlockError):
        p101.launch(ring, world_size=2, backend="sim", rules="nccl")


def test_the_token_counts_the_ranks_for_any_world_size():
    token_ring = definitions("00_ranks")["token_ring"]
    for n in (2, 3, 5):
        run = p101.launch(token_ring, world_size=n, backend="sim", network=STEPS)
        assert run.results == [n, *range(1, n)] and run.trace.makespan == n
