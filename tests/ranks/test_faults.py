"""What goes wrong is reported at once, with rank and line, in every world. The table: faults.py."""

from __future__ import annotations

import inspect
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

import parallel101 as p101
from parallel101.laboratory.ranks.processes import preload
from tests.ranks import faults
from tests.ranks.failing import fails
from tests.ranks.faults import FAULTS, JOBS, WORLDS, Fault
from tests.ranks.job import Job

EVERYWHERE = [(name, world) for name, fault in FAULTS.items() for world in fault.worlds.split()]
CASES = [(name, world) for name, world in EVERYWHERE if world in WORLDS]


@pytest.fixture(scope="module", autouse=True)
def imports():
    """What DDP imports when it is first used: once, and not in each rank."""
    preload(["torch._dynamo"])


def expected(fault: Fault, job: bool = False):
    """Regular expressions of what a report must say: the table's, and those of its lines."""
    for text in fault.job if job and fault.job else fault.says:
        yield re.escape(text).replace("…", ".*")
    if job and fault.job:
        return
    lines, first = inspect.getsourcelines(fault.program)
    for number, line in enumerate(lines, first):
        if fault.program.__name__ != "<lambda>" and "  # rank" in line:
            for text in line.partition("  # ")[2].split(";"):
                yield rf"{re.escape(text.strip())}.*at {faults.__file__}:{number}:"


@pytest.mark.parametrize(("name", "world"), CASES, ids=[", ".join(case) for case in CASES])
def test_a_report_names_what_went_wrong_with_rank_and_line(name, world):
    fault = FAULTS[name]
    program, options = fault.program, {**fault.options, **WORLDS[world]}
    error = fails(fault.error, lambda: program(dist.get_rank()), world_size=fault.size, **options)
    text = str(error)
    assert [said for said in expected(fault) if not re.search(said, text)] == [], text
    assert "worker.py" not in text, "the library's own frames"
    assert fault.rank in (None, getattr(error, "rank", None))
    if fault.error is p101.RankFailed:
        assert (error.exitcode is None) == (error.__cause__ is not None)
    if isinstance(error, (p101.DeadlockError, p101.MisuseError)):
        assert f"{faults.__file__}:" in text
    if isinstance(error, p101.DeadlockError):
        for rank, (kind, _, where) in error.waiting.items():
            assert re.search(rf"rank {rank} waits in {re.escape(kind)} .*, at {where}", text)
        cycle = " → ".join(f"rank {rank}" for rank in [*error.cycle, *error.cycle[:1]])
        assert re.findall("the cycle: (.*)", text) == [cycle] * bool(cycle)
        assert [*map(int, re.findall(r"rank (\d+) has already", text))] == error.returned


@pytest.mark.parametrize("program", faults.END_WITHOUT_THESE_RULES, ids=lambda p: p.__name__)
def test_what_hangs_on_nccl_only_ends_elsewhere_and_if_messages_are_eager(program):
    eager = p101.Network(eager=4)
    launched = lambda **world: p101.launch(  # noqa: E731
        lambda: program(dist.get_rank()), world_size=2, backend="sim", **world
    )
    assert launched().results == [True, True]
    if "exchange" in program.__name__:
        assert launched(rules="nccl", network=eager).results == [True, True]


def test_in_a_job_every_rank_ends_and_the_reason_is_printed(tmp_path):
    """All jobs run at once, since most of the time they wait."""
    jobs = {
        (name, world): Job(tmp_path, size=FAULTS[name].size, fault=name, **JOBS[world])
        for name, world in EVERYWHERE
        if world in JOBS
    }
    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(Job.react, jobs.values()))
    for (name, world), job in jobs.items():
        unsaid = [x for x in expected(FAULTS[name], job=True) if not re.search(x, job.text)]
        assert unsaid == [], f"{name}, {world}:\n{job.text}"
    told = jobs["exception_while_the_others_wait", "srun"].text
    assert "rank 0 (on" not in told, "rank 0 ends when all have heard what it raised"
    for (name, _), job in jobs.items():
        assert (0 in job.exitcodes) == (name == "exit_on_a_thread_while_nobody_needs_the_rank"), (
            name,
            job.exitcodes,
        )
        assert None not in job.exitcodes


def test_a_rank_of_a_job_that_never_comes_is_named(tmp_path):
    job = Job(tmp_path, first=1, fault="receive_cycle", options={"timeout": 4})
    assert "rank 0 had not reached this launch" in job.react() and job.exitcodes == [None, 1]
