"""A learner's ranks are processes whose messages pass through the grader: what was not waited
for has not arrived, and nothing hangs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parallel101.laboratory.grade.exercise import COLLECTIVES, P2P, Case, Exercise
from parallel101.laboratory.grade.exercise_report import how_it_ended
from parallel101.laboratory.grade.grading import judge
from parallel101.laboratory.grade.remote import Submission, SubmissionRanks
from tests.grade.test_submissions import TESTS

HEAD = """import os, time, torch, torch.distributed as dist
from threading import Thread
def rank(): return dist.get_rank()
def size(): return dist.get_world_size()
"""
EXERCISE = Exercise(
    *("1", "swap", "a test", 1, lambda draw: [], (), lambda case: []),
    path="declared.py",
    source=TESTS,
)


def run(body: str, *arguments: tuple, allowed=P2P, **case):
    """The trial of a function `swap` with this body, on one rank for each tuple of arguments."""
    code = (
        HEAD + "def swap(x):\n" + "\n".join("    " + line for line in body.strip("\n").splitlines())
    )
    submission = Submission(Path("hw.py"), code)
    with SubmissionRanks(replace(EXERCISE, allowed=allowed), submission) as ranks:
        return ranks.run(Case(arguments, [None] * len(arguments), **case))


def tensors(n: int) -> list[tuple]:
    return [(torch.arange(3.0) + 10 * rank,) for rank in range(n)]


SHIFT = """
y = {out}
s = dist.isend(x, (rank() + 1) % size())
r = dist.irecv(y, (rank() - 1) % size())
{wait}
return y
"""
WAITS = {  # how a ring shift ends, and who waits for nothing
    "both": ("r.wait(); s.wait()", None),
    "asked until it is done": ("while not r.is_completed(): pass\ns.wait()", None),
    "not for the receive": ("s.wait()", "recv"),
}


@pytest.mark.parametrize(("wait", "forgotten"), WAITS.values(), ids=WAITS)
def test_only_what_was_waited_for_has_arrived(wait, forgotten):
    trial = run(SHIFT.format(out="torch.empty(3, 1)", wait=wait), *tensors(3))
    assert trial.error is None
    if forgotten:
        assert all(result.isnan().all() for result in trial.results)
    else:  # into another shape, as gloo allows it
        assert [result[:, 0].tolist() for result in trial.results] == [
            [ten, ten + 1, ten + 2] for ten in (20, 0, 10)
        ]
    calls = [(call.rank, call.kind, call.where) for call in trial.unwaited]
    assert calls == ([(rank, forgotten, "hw.py:8") for rank in range(3)] if forgotten else [])
    assert trial.trace.bytes_sent == [12, 12, 12] and trial.trace.makespan == 1.0
    assert {event.where for event in trial.trace.events} <= {"hw.py:7", "hw.py:8"}


def test_torchs_collectives_and_groups():
    body = """
dist.all_reduce(x)
some = dist.new_group([0, 2])
whole = [torch.empty_like(x) for _ in range(2)]
if rank() != 1:
    dist.all_gather(whole, x + rank(), group=some)
best = x.clone(); dist.all_reduce(best.mul_(rank()), op=dist.ReduceOp.MAX)
both = torch.zeros(3) + rank()  # in flight twice, as in a benchmark
works = [dist.broadcast(both, 2, async_op=True) for _ in range(2)]
for work in works: work.wait()
return [x, whole[1], best, both] if rank() == 0 else x
"""
    trial = run(body, *tensors(3), allowed=P2P | COLLECTIVES)
    assert trial.error is None
    total = torch.arange(3.0) * 3 + 30
    expected = total, total + 2, total * 2, torch.full((3,), 2.0)
    assert all(map(torch.equal, trial.results[0], expected))
    assert torch.equal(trial.results[1], total)


def test_arguments_and_results_travel_as_they_are():
    arguments = (torch.arange(6.0).reshape(3, 2).t(),), (torch.zeros(3, 2).t(),)
    trial = run("assert x.stride() == (1, 2)\nx[0] += 1\nreturn x", *arguments)
    assert trial.error is None and trial.changed == [[0], [0]]
    assert trial.results[0].tolist() == [[1, 3, 5], [1, 3, 5]]
    dataclass = "import dataclasses\n@dataclasses.dataclass\nclass A: x: 'int' = 1\nreturn A(2).x"
    assert run(dataclass, (0,)).results == [2]
    value = (1, [2.5, {3: (None, "x")}], True)
    assert run("return x", (value,)).results == [value]


def test_a_receive_from_any_rank_tells_the_source():
    body = "if rank() > 0: return dist.send(x, 0)\nreturn [dist.recv(x) for _ in range(2)]"
    assert sorted(run(body, *tensors(3)).results[0]) == [1, 2]


ENDINGS = {
    "exit": ("os._exit(0)", "died: "),
    "a transposed tensor": ("dist.isend(torch.ones(2, 3).t(), 1)", "raised: Send x.contiguous()"),
    "a send changed": (
        "w = dist.isend(x, 1 - rank()); x += 1; dist.recv(x.clone(), 1 - rank()); w.wait()",
        "raised: between isend and its wait",
    ),
    "endless loop": ("while True: pass", "time: "),
    "a collective that is not allowed": ("dist.all_reduce(x)", "not allowed: all_reduce"),
    "an operator of torch": (
        "torch.ops.c10d.allreduce_([x], dist.group.WORLD, 0, None)",
        "raised: ",
    ),
    "prints without end": ("while True: print('x' * 10000)", "printed: "),
    "memory": ("torch.ones(1 << 33)", "raised: memory"),
    "returns an object": ("return object()", "raised: an object of type object"),
    "imports parallel101": ("import parallel101", "not loaded: can't be imported"),
    "a stub of torch's": ("return torch.nn.Module()(x)", "raised: "),
    "a thread": ("Thread(target=dist.send, args=(x, 0)).start()", "raised: isend and irecv let"),
    "end of a file": ("raise EOFError('mine')", "raised: mine"),
}


@pytest.mark.parametrize(("body", "ending"), ENDINGS.values(), ids=ENDINGS)
def test_every_end_is_named(body, ending):
    how, _, text = ending.partition(": ")
    trial = run(body, *tensors(2), seconds=1.0 if how == "time" else 10.0)
    assert how_it_ended(trial.error) == how and text in str(trial.error)


STAYS = {  # what follows a deadlock, and whether the processes give up and stay
    "cleans up": ("try: dist.recv(x, 1 - rank())\n    finally: print('bye')", True),
    "tries again": (
        "while True:\n        try: dist.recv(x, 1 - rank())\n        except Exception: pass",
        True,
    ),
    "goes on": ("while True:\n        try: dist.recv(x, 1 - rank())\n        except: pass", False),
}


@pytest.mark.parametrize(("waits", "stay"), STAYS.values(), ids=STAYS)
def test_ranks_that_a_deadlock_leaves_waiting_give_up_or_are_replaced(waits, stay):
    code = f"{HEAD}def swap(x):\n    if x[0]: return x + rank()\n    {waits}\n"
    wrong, right = (Case([(x,)] * 2, [None] * 2) for x in (torch.zeros(1), torch.ones(1)))
    with SubmissionRanks(EXERCISE, Submission(Path("hw.py"), code)) as ranks:
        assert how_it_ended(ranks.run(wrong).error) == "deadlock"
        assert (len(ranks.ranks) == 2) == stay
        trial = ranks.run(right)
    assert [float(found) for found in trial.results] == [1, 2] and not any(trial.printed)


OUT = "torch.empty_like(x)"
LISTS = "1 tensor, and the group has 2 ranks"
WRONG_CALLS = {
    "all_gather, three outputs": (f"dist.all_gather([{OUT}, {OUT}, {OUT}], x)", "3 tensors"),
    "scatter": (f"dist.scatter({OUT}, [x] if rank() == 0 else None)", LISTS),
    "BAND on floats": ("dist.all_reduce(x, op=dist.ReduceOp.BAND)", "whole numbers"),
    "no such root": ("dist.broadcast(x, 7)", "has ranks 0 to 1"),
    "a group's own method": (f"dist.group.WORLD.allgather([[{OUT}]], [x]).wait()", LISTS),
    "float8": ("dist.broadcast(x.to(torch.float8_e5m2), 0)", "torch.float8_e5m2 on cpu can't"),
    "a tensor without data": ("dist.broadcast(torch.ones(1, device='meta'), 0)", "meta"),
}


@pytest.mark.parametrize(("body", "text"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_what_a_relayed_call_raises_is_the_verdict_with_its_rank_and_line(body, text):
    trial = run(body, *tensors(2), allowed=P2P | COLLECTIVES)
    assert how_it_ended(trial.error) in ("raised", "misuse") and text in str(trial.error)
    said = judge(EXERCISE, [trial]).problem
    assert "hw.py:6" in said and "rank " in said and "grader" not in said, said
