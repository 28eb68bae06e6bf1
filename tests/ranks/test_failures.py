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
    assert error.rank == 2
    assert error.exitcode is None
    assert isinstance(error.__cause__, KeyError)
    assert "my own mistake" in str(error)
    assert line_of(program, "raise KeyError").rpartition(":")[2] in str(error), (
        "the traceback names the line"
    )
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
def test_the_failing_ranks_own_error_is_raised_and_not_the_others_reports_of_it(world, report):
    def program():
        if dist.get_rank() != 2:
            raise report(2)
        p101.compute(1.0)  # of virtual time, so that the reports come first
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            pass
        error = ValueError("the loss is NaN")
        error.failed_rank = 2
        raise error

    with pytest.raises(p101.RankFailed) as raised:
        p101.launch(program, world_size=4, backend=world)
    error = raised.value
    assert error.rank == 2
    assert (type(error.__cause__), str(error.__cause__)) == (ValueError, "the loss is NaN")


@pytest.mark.parametrize("others", ["return", "wait"])
@pytest.mark.parametrize("world", ["gloo", "sim"])
def test_a_report_of_a_rank_that_did_not_fail_is_raised_itself(world, others):
    def program():
        if dist.get_rank() == 0:
            raise AnotherFailed(2)
        if others == "wait":
            dist.barrier()

    with pytest.raises(p101.RankFailed) as raised:
        p101.launch(program, world_size=3, backend=world)
    assert raised.value.rank == 0
    assert raised.value.__cause__.failed_rank == 2


@pytest.mark.parametrize("world", ["gloo", "sim"])
def test_a_ranks_death_is_raised_and_not_the_others_reports_of_it(world):
    def program():
        if dist.get_rank() != 2:
            raise AnotherFailed(2)
        p101.compute(1.0)
        os._exit(3)

    error = fails(p101.RankFailed, program, backend=world)
    assert (error.rank, error.exitcode) == (2, 3)


class Particular(Exception):
    """Its __init__ takes other arguments than it passes to Exception."""

    def __init__(self, one, two):
        super().__init__("particular words")
        self.both = one + two


class Speechless(RuntimeError):
    def __str__(self):
        raise ValueError("no words")


def test_an_exception_whose_str_raises_is_named():
    def program():
        raise Speechless

    assert str(fails(p101.RankFailed, program, world_size=1)).startswith(
        "rank 0 raised Speechless\n"
    )


class Stubborn(Particular):
    def __reduce__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize("world", ["gloo", "sim"])
def test_an_exception_keeps_its_type_whatever_arguments_its_init_takes(world):
    def program():
        raise Particular(1, 2)

    error = fails(p101.RankFailed, program, backend=world)
    assert str(error).startswith(f"rank {error.rank} raised Particular: particular words\n")
    assert (type(error.__cause__), error.__cause__.both) == (Particular, 3)


def test_an_exception_that_cannot_be_pickled_still_arrives_as_text():
    def program():
        raise Stubborn(1, 2)

    error = fails(p101.RankFailed, program)
    assert str(error).startswith(f"rank {error.rank} raised Stubborn: particular words\n")


def test_an_exception_without_a_message():
    def program():
        if dist.get_rank() == 1:
            raise AssertionError

    error = fails(p101.RankFailed, program)
    assert str(error).startswith("rank 1 raised AssertionError\n\nTraceback")


def test_arguments_that_the_function_does_not_take():
    with pytest.raises(p101.RankFailed) as raised:
        p101.launch(lambda x: x, world_size=2)
    assert "missing 1 required positional argument: 'x'" in str(raised.value)
    assert "Traceback" not in str(raised.value)


@pytest.mark.parametrize(
    ("death", "code"),
    [(lambda: os._exit(3), 3), (lambda: os._exit(0), 0), (lambda: os.kill(os.getpid(), 9), -9)],
    ids=["exit status 3", "exit status 0", "killed"],
)
@pytest.mark.parametrize("world", ["gloo", "sim"])
def test_a_rank_that_dies(death, code, world):
    def program():
        if dist.get_rank() == 1:
            death()
        dist.barrier()

    error = fails(p101.RankFailed, program, backend=world)
    assert (error.rank, error.exitcode) == (1, code)
    assert "rank 1" in str(error)


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


@pytest.mark.parametrize("world", ["gloo", "sim"])
def test_sys_exit_is_an_exception_like_any_other(world):
    error = fails(
        p101.RankFailed, lambda: exit(5) if dist.get_rank() == 3 else dist.barrier(), backend=world
    )
    assert error.rank == 3
    assert isinstance(error.__cause__, SystemExit)


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


@pytest.mark.parametrize("how", [{}, {"backend": "sim"}])
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: dist.send(torch.ones(1), dist.get_rank() + 1),
            "rank 1 sends to 2, and its group of 2 has ranks 0 to 1",
        ),
        (lambda: dist.recv(torch.ones(1), dist.get_rank() - 1), "rank 0 receives from -1"),
    ],
    ids=["send", "receive"],
)
def test_a_peer_that_is_outside_the_group(call, message, how):
    error = fails(p101.RankFailed, call, world_size=2, **how)
    assert isinstance(error.__cause__, ValueError)
    assert message in str(error)


@pytest.mark.parametrize("how", [{"trace": True}, {"backend": "sim"}])
def test_a_root_that_is_outside_the_group(how):
    error = fails(p101.RankFailed, lambda: dist.broadcast(torch.ones(1), 2), world_size=2, **how)
    # both ranks raise it, and the one that is heard first is named
    assert "calls broadcast with root 2, and its group of 2 has ranks 0 to 1" in str(error)


def test_gloo_has_no_message_to_oneself():
    error = fails(
        p101.RankFailed,
        lambda: dist.recv(torch.ones(1), dist.get_rank()),
        world_size=2,
    )
    assert "receives from itself" in str(error)


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
        place = f"{__file__}:{first + next(i for i, line in enumerate(lines) if 'irecv' in line)}"
        assert (
            "rank 0 posted a recv from rank 1 and dropped its work object without a wait(), "
            f"at {place}"
        ) in str(error)


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
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "--colors=NoColor", "-c", CELL],
        capture_output=True,
        text=True,
        timeout=60,
    )
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
    assert {e.where for e in trace.unfinished} == {
        line_of(program, "isend"),
        line_of(program, "dist.recv"),
    }
    assert all(0 <= e.start <= e.end for e in trace.unfinished)
    assert trace.messages_sent == [0, 0], "what did not end is not counted"
    trace.save(tmp_path / "trace.json")
    assert p101.Trace.load(tmp_path / "trace.json").unfinished == trace.unfinished
    trace.to_chrome(tmp_path / "chrome.json")
    assert (tmp_path / "chrome.json").read_text().count("never ended") == 4


@pytest.mark.parametrize("how", [{"trace": True}, {"backend": "sim"}])
def test_calls_that_a_raising_rank_had_posted_are_unfinished(how):
    def program():
        if dist.get_rank() == 1:
            work = dist.irecv(torch.empty(1), 0)
            raise ValueError(work.is_completed())
        dist.barrier()

    error = fails(p101.RankFailed, program, world_size=2, **how)
    assert sorted((e.rank, e.kind) for e in error.trace.unfinished) == [(0, "barrier"), (1, "recv")]
    assert error.trace.events == []


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
    assert error.rank == 1
    assert "generator" in str(error)
    assert "can't be pickled" in str(error)
    assert "Traceback" not in str(error), "it would have our own frames only"


def waits_twice():
    x = torch.ones(3)
    work = dist.isend(x, 1) if dist.get_rank() == 0 else dist.irecv(x, 0)
    work.wait()
    work.wait()


@pytest.mark.parametrize("how", [{}, {"trace": True}, {"backend": "sim"}])
def test_a_second_wait_for_one_message_is_named_where_gloo_would_hang(how):
    with pytest.raises(
        p101.MisuseError,
        match=r"waits a second time for one (send|recv), at .*test_failures.py:\d+",
    ):
        p101.launch(waits_twice, world_size=2, **how)
