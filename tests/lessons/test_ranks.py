"""Lesson 00: its line for hosted notebooks, what the reader writes, and the answers to its
exercises.
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
from tests.lessons.lesson import answer, definitions, read, source

LESSON = definitions("00_ranks")
IN_TURN = answer("00_ranks", "turns-answer", LESSON)
STEPS = p101.Network(latency=1.0, bandwidth=math.inf)


def steps(program, world_size):
    return p101.launch(program, world_size=world_size, backend="sim", network=STEPS).trace.makespan


def test_the_line_for_hosted_notebooks_installs_the_zip_that_github_makes(tmp_path):
    (line,) = re.findall(r"`(%pip [^`]+)`", source("00_ranks", "install-note"))
    assert 'run_line_magic("pip", ' in TransformerManager().transform_cell(line).replace("'", '"')
    for name in ("parallel101-main.zip", "parallel101.zip"):
        (tmp_path / name).touch()
        assert list(tmp_path.glob(line.split()[-1])) == [tmp_path / name]
        (tmp_path / name).unlink()


def test_a_cell_whose_error_the_reader_has_mended_prints_one_line_and_the_next_cells_run(capsys):
    """In a fresh kernel, where no earlier run has defined what the error would define."""
    cells = {cell.id: cell.source for cell in read("00_ranks").cells if cell.cell_type == "code"}
    attempts = [i for i, code in cells.items() if "attempt(" in code and i != "attempt"]
    for cell_id in attempts:
        names = definitions("00_ranks", "BACKEND")
        names["p101"] = types.SimpleNamespace(launch=lambda *_, **__: None)
        exec(cells["attempt"], names)
        exec(cells[cell_id], names)
        assert len(capsys.readouterr().out.splitlines()) == 1
        exec(cells.get(cell_id.removesuffix("-run") + "-picture", ""), names)
    assert len(attempts) == 5


def test_the_swap_in_turn_its_check_and_exercise_1(capsys):
    for written, says in ((LESSON["swap_in_turn"], "not swapped yet: [-1"), (IN_TURN, "swapped:")):
        exec(source("00_ranks", "turns-check"), LESSON | {"swap_in_turn": written})
        assert capsys.readouterr().out.startswith(says)
    assert (steps(IN_TURN, 2), steps(LESSON["swap"], 2)) == (2.0, 1.0)


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
    network = p101.Network(latency=5e-6, bandwidth=50e9)

    def messages():  # a round is as many of them as there are ranks
        token = torch.empty(nbytes, dtype=torch.uint8)
        for _ in range(4):
            dist.send(token, 1) if dist.get_rank() == 0 else dist.recv(token, 0)

    took = p101.launch(messages, world_size=2, backend="sim", network=network).trace.makespan
    assert took * 64 / 4 == pytest.approx(seconds, rel=0.01)


def test_exercise_4_a_ring_without_batches_under_nccls_rules():
    def ring():
        rank, n = dist.get_rank(), dist.get_world_size()
        sent = dist.isend(torch.ones(1), (rank + 1) % n)
        dist.irecv(torch.ones(1), (rank - 1) % n).wait()
        sent.wait()

    p101.launch(ring, world_size=3, backend="sim", rules="nccl")  # as without device_id
    with pytest.raises(p101.DeadlockError):
        p101.launch(ring, world_size=2, backend="sim", rules="nccl")
