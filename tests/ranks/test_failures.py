"""Every failure of a rank is reported at once, with its rank and place."""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from tests.ranks.failing import fails, line_of


@pytest.fixture(autouse=True, scope="module")
def _warm():
    p101.launch(lambda: None, world_size=1)  # the first launch starts the fork server


@pytest.mark.parametrize("trace", [False, True])
def test_an_exception_on_one_rank_while_the_others_wait(backend, trace):
    def program():
        if dist.get_rank() == 2:
            raise KeyError("my own mistake")
        dist.barrier()

    error = fails(p101.RankFailed, program, backend=backend, trace=trace)
    assert (error.rank, error.exitcode) == (2, None) and isinstance(error.__cause__, KeyError)
    assert "my own mistake" in str(error)
    line = line_of(program, "raise KeyError").rpartition(":")[2]
    assert line in str(error), "the traceback names the line"
    assert "worker.py" not in str(error), "and not the library's own frames"


class AnotherFailed(RuntimeError):
    """What a trainer raises on the ranks that have not failed themselves."""

    def __init__(self, failed_rank):
        super().__init__(f"rank {failed_rank} failed")
        self.failed_rank = failed_rank


class UnpicklableReport(AnotherFailed):
    def __reduce__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize(("world", "report"), [("gloo", UnpicklableReport), ("sim", AnotherFailed)])
@pytest.mark.parametrize("dies", [False, True])
def test_the_failing_ranks_own_end_is_raised_and_not_the_others_reports_of_it(world, report, dies):
    def program():
        if dist.get_rank() != 2:
            raise report(2)
        p101.compute(1.0)  # of virtual time, so that the reports come first
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            pass
        if dies:
            os._exit(3)
        error = ValueError("the loss is NaN")
        error.failed_rank = 2
        raise error

    error = fails(p101.RankFailed, program, backend=world)
    assert (error.rank, error.exitcode) == (2, 3 if dies else None)
    assert dies or repr(error.__cause__) == "ValueError('the loss is NaN')"


@pytest.mark.parametrize("others", ["return", "wait"])
@pytest.mark.parametrize("world", ["gloo", "sim"])
def test_a_report_of_a_rank_that_did_not_fail_is_raised_itself(world, others):
    def program():
        if dist.get_rank() == 0:
            raise AnotherFailed(2)
        if others == "wait":
            dist.barrier()

    error = fails(p101.RankFailed, program, world_size=3, backend=world)
    assert error.rank == 0 and error.__cause__.failed_rank == 2


class Particular(Exception):
    """Its __init__ takes other arguments than it passes to Exception."""

    def __init__(self, one, two):
        super().__init__("particular words")
        self.both = one + two


class Speechless(RuntimeError):
    def __str__(self):
        raise ValueError("no words")


class Stubborn(Particular):
    def __reduce__(self):
        raise RuntimeError("no")


def raises(error):
    raise error


OUTSIDE = "and its group of 2 has ranks 0 to 1"
# what rank 1 does while rank 0 is in a barrier → the error's beginning, its cause, the exit code
ENDS = {
    "an exception": (
        lambda: raises(Particular(1, 2)),
        ("raised Particular: particular words\n", Particular, None),
    ),
    "that can't be pickled": (
        lambda: raises(Stubborn(1, 2)),
        ("raised Stubborn: particular words\n", RuntimeError, None),
    ),
    "without words": (lambda: raises(Speechless()), ("raised Speechless\n", Speechless, None)),
    "without a message": (
        lambda: raises(AssertionError()),
        ("raised AssertionError\n\nTraceback", AssertionError, None),
    ),
    "sys.exit": (lambda: exit(5), ("raised SystemExit: 5", SystemExit, None)),
    "exit status 3": (lambda: os._exit(3), ("exited with code 3", type(None), 3)),
    "exit status 0": (lambda: os._exit(0), ("exited with code 0", type(None), 0)),
    "killed": (lambda: os.kill(os.getpid(), 9), ("was killed by SIGKILL", type(None), -9)),
    "send to nobody": (
        lambda: dist.send(torch.ones(1), 2),
        (f"raised ValueError: rank 1 sends to 2, {OUTSIDE}. On a ring", ValueError, None),
    ),
    "receive from itself": (
        lambda: dist.recv(torch.ones(1), 1),
        ("raised ValueError: rank 1 receives from itself", ValueError, None),
    ),
}


@pytest.mark.parametrize("world", ["gloo", "sim"])
@pytest.mark.parametrize("how", ENDS)
def test_a_rank_that_ends_early(how, world):
    if (how, world) == ("receive from itself", "sim"):
        pytest.skip("a rank of sim waits for itself")
    end, (words, cause, code) = ENDS[how]
    error = fails(
        p101.RankFailed,
        lambda: end() if dist.get_rank() == 1 else dist.barrier(),
        world_size=2,
        backend=world,
    )
    assert (error.rank, error.exitcode) == (1, code) and isinstance(error.__cause__, cause)
    assert str(error).startswith(f"rank 1 {words}")
    assert cause is not Particular or error.__cause__.both == 3


def test_arguments_that_the_function_does_not_take():
    with pytest.raises(p101.RankFailed) as raised:
        p101.launch(lambda x: x, world_size=2)
    assert "missing 1 required positional argument: 'x'" in str(raised.value)
    assert "Traceback" not in str(raised.value)


def test_the_lines_at_which_the_others_were_when_a_rank_was_killed():
    def program():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), 9)
        dist.barrier()

    _, *others = str(fails(p101.RankFailed, program)).splitlines()
    # "ranks 0 and 2 are at …"
    ranks = [re.split(" wait| is| are", line.strip())[0] for line in others]
    assert sorted(rank for rank in " ".join(ranks) if rank.isdigit()) == ["0", "2", "3"]
    assert all(line_of(program, "dist.barrier") in line for line in others)


def test_an_abort_of_gloo_is_explained_and_placed():
    def program():
        if dist.get_rank() == 0:
            dist.send(torch.ones(1000), 1)
        elif dist.get_rank() == 1:
            dist.recv(torch.empty(4), 0)
        dist.barrier()

    error = fails(p101.RankFailed, program)
    assert (error.rank, error.exitcode) == (1, -signal.SIGABRT)
    sent, expected = line_of(program, "dist.send"), line_of(program, "dist.recv")
    assert f"rank 0 sent 4000 bytes to rank 1, at {sent}" in str(error)
    assert f"rank 1 expected 16 bytes, at {expected}" in str(error)
    assert "trace=True" in str(error)
    assert "4000 bytes arrived, and 16 were expected" in str(error)
    assert "preamble" not in str(error)


def test_a_crash_in_a_library_is_placed_in_the_program():
    def program():
        ctypes.string_at(0)

    error = fails(p101.RankFailed, program)
    assert error.exitcode == -signal.SIGSEGV
    assert line_of(program, "string_at") in str(error)
    assert "gloo" not in str(error)


@pytest.mark.parametrize("how", [{"trace": True}, {"backend": "sim"}])
def test_a_root_that_is_outside_the_group(how):
    error = fails(p101.RankFailed, lambda: dist.broadcast(torch.ones(1), 2), world_size=2, **how)
    # both ranks raise it, and the one that is heard first is named
    assert "calls broadcast with root 2, and its group of 2 has ranks 0 to 1" in str(error)


@pytest.mark.parametrize("world", ["gloo", "sim"])
def test_the_time_limit_error_says_where_each_rank_was(world):
    def program():
        if dist.get_rank() == 1:
            return
        dist.irecv(torch.ones(1), 1)
        while True:
            torch.ones(10).sum()  # for ever

    error = fails(p101.LaunchTimeout, program, world_size=2, timeout=0.5, backend=world)
    assert "0.5 s" in str(error)
    lines, first = inspect.getsourcelines(program)
    assert any(f"rank 0 is at {__file__}:{first + i}" in str(error) for i in range(len(lines)))
    if world == "gloo":
        assert "rank 1 has returned" in str(error)
        dropped = (
            "rank 0 posted a recv from rank 1 and dropped its work object without a wait(), at "
        )
        assert dropped + line_of(program, "irecv") in str(error)


CELL = """import time, parallel101 as p101
def sleeps():
    while 1: time.sleep(.1)
def divides():
    1 / 0
try:
    p101.launch(sleeps, world_size=1, timeout=0.5)
except p101.LaunchTimeout as error:
    print(error)
p101.launch(divides, world_size=1)"""


def test_a_notebook_shows_the_cells_own_frames_only_and_names_places_by_the_cells_number():
    command = [sys.executable, "-m", "IPython", "--colors=NoColor", "-c", CELL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    told = done.stdout + done.stderr
    assert "rank 0 is at cell [1], line 3: while 1: time.sleep(.1)" in told
    assert "---> 10 p101.launch(divides, world_size=1)" in told
    assert "RankFailed: rank 0 raised ZeroDivisionError" in told
    assert "launch.py" not in told


@pytest.mark.parametrize("how", [{"trace": True}, {"backend": "sim"}])
def test_a_failed_recorded_run_keeps_its_record_and_what_had_not_ended(tmp_path, how):
    def program():
        peer = 1 - dist.get_rank()
        dist.all_reduce(torch.ones(2))
        work = dist.isend(torch.ones(3), peer, tag=5)
        dist.recv(torch.empty(1), peer)
        work.wait()

    error = fails(p101.DeadlockError, program, world_size=2, **how)
    trace = error.trace
    assert [event.kind for event in trace.events] == ["all_reduce", "all_reduce"]
    assert sorted((e.rank, e.kind, e.peer, e.tag, e.nbytes) for e in trace.unfinished) == [
        (0, "recv", 1, 0, 4),
        (0, "send", 1, 5, 12),
        (1, "recv", 0, 0, 4),
        (1, "send", 0, 5, 12),
    ]
    places = {line_of(program, text) for text in ("isend", "dist.recv")}
    assert {e.where for e in trace.unfinished} == places
    assert all(0 <= e.start <= e.end for e in trace.unfinished)
    assert trace.messages_sent == [0, 0], "what did not end is not counted"
    trace.save(tmp_path / "trace.json")
    assert p101.Trace.load(tmp_path / "trace.json").unfinished == trace.unfinished
    trace.to_chrome(tmp_path / "chrome.json")
    assert (tmp_path / "chrome.json").read_text().count("never ended") == 4


def test_messages_in_flight_on_sim_are_unfinished():
    def program():
        rank, x = dist.get_rank(), torch.ones(2)
        if rank < 4:  # two pairs
            (dist.send if rank % 2 == 0 else dist.recv)(x, rank ^ 1)
        elif rank < 7:  # two messages for one link
            (dist.send if rank < 6 else lambda x, _: [dist.recv(x, 4), dist.recv(x, 5)])(x, 6)
        else:
            p101.compute(0.5)
            raise ValueError(rank)

    network = p101.Network(latency=1.0)
    error = fails(p101.RankFailed, program, world_size=8, backend="sim", network=network)
    unfinished = sorted((e.rank, e.kind, e.peer) for e in error.trace.unfinished)
    sends = [(0, "send", 1), (2, "send", 3), (4, "send", 6), (5, "send", 6)]
    assert unfinished == sorted([*sends, (1, "recv", 0), (3, "recv", 2), (6, "recv", 4)])
    assert all((e.start, e.end) == (0.0, 0.5) for e in error.trace.unfinished)


@pytest.mark.parametrize("world", ["gloo", "sim"])
def test_a_result_that_cannot_be_pickled(world):
    def program():
        return (i for i in range(3)) if dist.get_rank() == 1 else None

    error = fails(p101.RankFailed, program, backend=world)
    assert error.rank == 1 and "Traceback" not in str(error), "it would have our own frames only"
    assert "generator" in str(error) and "can't be pickled" in str(error)


def waits_twice():
    x = torch.ones(3)
    work = dist.isend(x, 1) if dist.get_rank() == 0 else dist.irecv(x, 0)
    work.wait()
    work.wait()


@pytest.mark.parametrize("how", [{}, {"trace": True}, {"backend": "sim"}])
def test_a_second_wait_for_one_message_is_named_where_gloo_would_hang(how):
    twice = r"waits a second time for one (send|recv), at .*test_failures.py:\d+"
    with pytest.raises(p101.MisuseError, match=twice):
        p101.launch(waits_twice, world_size=2, **how)
