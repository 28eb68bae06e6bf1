"""A deadlock ends a run at once, whatever the time limit of the program's groups.

With keep_waiting, or a limit given to one call, the program may catch the limit's error and go on.
"""

from __future__ import annotations

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101

LATE = "Timed out waiting 1000ms for recv operation to complete"
SECOND = timedelta(seconds=1)  # long enough to make a group of three ranks on a busy machine


def caught(call) -> str:
    """The first line of the error that a call raises, or "" if there is none."""
    try:
        call()
    except RuntimeError as error:
        return str(error).splitlines()[0].partition("] ")[2] or str(error).splitlines()[0]
    return ""


def missing_peers() -> list[str]:
    """Rank 0 waits for ranks that never come, in every way; then all go on with other groups."""
    x, rank = torch.ones(2), dist.get_rank()
    a, b, c = (dist.new_group(timeout=SECOND) for _ in range(3))
    rest = dist.new_group()
    seen = []
    if rank == 0:
        seen = [
            caught(lambda: dist.recv(x, 1, group=a)),
            caught(lambda: dist.recv(x, 1, group=a)),
            caught(lambda: dist.send(x, 1, group=b)),
            caught(lambda: c.allreduce([torch.ones(2)]).wait()),
        ]
    dist.barrier(rest)
    if rank == 1:
        seen = [caught(lambda: dist.send(x, 0, group=a)).partition(":")[0].partition(" by")[0]]
    y = torch.full((2,), float(rank))
    dist.all_reduce(y, group=rest)
    assert y.tolist() == [3.0, 3.0]
    return seen


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_a_program_may_catch_the_error_of_its_groups_time_limit(backend):
    run = p101.launch(missing_peers, world_size=3, backend=backend, trace=True, keep_waiting=True)
    late = LATE.replace("recv", "send")
    assert run.results[0] == [LATE, "Application timeout caused pair closure", late, LATE]
    assert run.results[1:] == [["Connection closed"], []]


def test_on_sim_the_clock_advances_to_the_limit():
    def program():
        group, rank = dist.new_group(timeout=timedelta(minutes=5)), dist.get_rank()
        if rank == 0:
            p101.compute(10.0)
            with p101.span("waits"):
                text = caught(lambda: dist.recv(torch.ones(1), 1, group=group))
            with p101.span("after"):
                p101.compute(1.0)
            return text

    run = p101.launch(program, world_size=2, backend="sim", keep_waiting=True)
    spans = {e.name: (e.start, e.end) for e in run.trace.spans()}
    assert spans == {"waits": (10.0, 310.0), "after": (310.0, 311.0)}


def own_limits() -> list[str]:
    """Limits that are not a new group's: of wait(), of a group's own method."""
    rank, rest, seen = dist.get_rank(), dist.new_group(), []
    for call in (
        lambda pair: dist.irecv(torch.ones(2), 1, group=pair).wait(SECOND),
        lambda pair: pair.monitored_barrier(SECOND),
    ):
        pair = dist.new_group([0, 1], use_local_synchronization=True)
        if rank == 0:
            seen.append(caught(lambda call=call, pair=pair: call(pair)))
    dist.barrier(rest)
    return seen


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_a_limit_may_stand_in_the_call_itself(backend):
    of_wait, of_barrier = p101.launch(own_limits, world_size=2, backend=backend).results[0]
    assert of_wait == LATE and of_barrier


def waits_without_limit(first_limit):
    """Rank 2 computes, so that on sim the limit of the others would come first."""
    dist.init_process_group("gloo", timeout=first_limit)
    group, rank = dist.new_group(timeout=SECOND), dist.get_rank()
    if rank == 0:
        caught(lambda: dist.recv(torch.ones(1), 1, group=group))
    if rank < 2:
        dist.recv(torch.ones(1), 1 - rank)
    else:
        p101.compute(100.0)


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_with_keep_waiting_what_has_no_limit_of_its_own_is_a_deadlock(backend, capfd):
    """And without it, whatever the limit."""
    for keep_waiting, limit in ((True, None), (False, timedelta(seconds=50))):
        began = time.monotonic()
        with pytest.raises(p101.DeadlockError) as deadlock:
            p101.launch(
                waits_without_limit,
                limit,
                world_size=3,
                backend=backend,
                keep_waiting=keep_waiting,
            )
        assert deadlock.value.cycle == [0, 1] and time.monotonic() - began < 40
        err = capfd.readouterr().err
        if keep_waiting and backend == "gloo":  # on sim no time passes until the limit
            assert "parallel101: deadlock: no rank can go on" in err
            assert "rank 0 waits in recv from rank 1, at" in err
            assert "rank 0 will go on by its own time limit, after 1 s: the run is not" in err


def test_a_slow_rank_is_no_deadlock_and_the_programs_limit_applies():
    def program():
        dist.init_process_group("gloo", timeout=timedelta(seconds=5))
        if dist.get_rank() == 1:
            p101.compute(10.0)
        return caught(lambda: dist.all_reduce(torch.ones(1)))

    late = p101.launch(program, world_size=2, backend="sim").results[0]
    assert late == LATE.replace("1000", "5000")


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_an_error_that_is_not_caught_fails_the_rank(backend):
    with pytest.raises(p101.RankFailed, match=LATE) as failed:
        p101.launch(waits_without_limit, SECOND, world_size=2, backend=backend, keep_waiting=True)
    assert type(failed.value.__cause__) is RuntimeError
    if backend == "sim":
        assert re.search(r"waited in recv for rank.*test_time_limits\.py:", str(failed.value))


def test_under_nccls_rules_too_and_a_monitored_barrier_without_time_ends_at_once():
    def program():
        group, rank = dist.new_group(timeout=SECOND), dist.get_rank()
        text = caught(lambda: dist.all_reduce(torch.ones(2), group=group)) if rank == 0 else ""
        dist.barrier()
        return text

    options = {"backend": "sim", "rules": "nccl", "keep_waiting": True}
    assert p101.launch(program, world_size=2, **options).results == [LATE, ""]

    def at_once():
        return dist.get_rank() and caught(lambda: dist.group.WORLD.monitored_barrier(timedelta(0)))

    late = LATE.replace("1000", "1")
    assert p101.launch(at_once, world_size=2, backend="sim").results == [0, late]
