"""A learner's ranks are processes whose messages pass through the grader: what was not waited
for has not arrived, and nothing hangs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parallel101.laboratory.grade.endings import explain_error, how_it_ended
from parallel101.laboratory.grade.exercise import COLLECTIVES, P2P, Case, Exercise
from parallel101.laboratory.grade.remote import Submission, SubmissionRanks

HEAD = """import os, torch, torch.distributed as dist
def rank(): return dist.get_rank()
def size(): return dist.get_world_size()
"""
DECLARATION = """
from parallel101.laboratory.grade.exercise import Exercise
def nothing(case): return [0] * case.world_size
EXERCISES = [Exercise("0", "f", "a test", 1, lambda draw: [], (), nothing)]
"""


EXERCISE = Exercise("0", "f", "a test", 1, lambda draw: [], (), lambda case: [])


def run(body: str, *arguments: tuple, allowed=P2P, **case):
    """The trial of a function `f` with this body, on one rank for each tuple of arguments."""
    exercise = replace(EXERCISE, allowed=allowed, path="declared.py", source=DECLARATION)
    code = HEAD + "def f(x):\n" + "\n".join("    " + line for line in body.strip("\n").splitlines())
    submission = Submission(Path("hw.py"), code)
    with SubmissionRanks(exercise, submission) as ranks:
        return ranks.run(Case(arguments, [None] * len(arguments), **case))


SHIFT = """
y = torch.empty_like(x)
s = dist.isend(x, (rank() + 1) % size())
r = dist.irecv(y, (rank() - 1) % size())
{wait}
return y
"""


def tensors(n: int) -> list[tuple]:
    return [(torch.arange(3.0) + 10 * rank,) for rank in range(n)]


def test_a_ring_shift_gives_its_values_bytes_and_step():
    trial = run(SHIFT.format(wait="r.wait(); s.wait()"), *tensors(3))
    assert trial.error is None and not trial.unwaited
    assert [result.tolist() for result in trial.results] == [[20, 21, 22], [0, 1, 2], [10, 11, 12]]
    assert trial.trace.bytes_sent == [12, 12, 12] and trial.trace.makespan == 1.0
    assert {event.where for event in trial.trace.events} == {"hw.py:6", "hw.py:7"}


def test_what_was_not_waited_for_has_not_arrived():
    trial = run(SHIFT.format(wait="s.wait()"), *tensors(2))
    assert all(result.isnan().all() for result in trial.results)
    calls = [(call.rank, call.kind, call.where) for call in trial.unwaited]
    assert calls == [(rank, "recv", "hw.py:7") for rank in range(2)]


def test_a_receive_into_another_shape_takes_the_bytes_as_on_gloo():
    body = SHIFT.replace("torch.empty_like(x)", "torch.empty(3, 1)")
    trial = run(body.format(wait="r.wait(); s.wait()"), *tensors(2))
    assert [result.tolist() for result in trial.results] == [[[10], [11], [12]], [[0], [1], [2]]]


def test_is_completed_counts_as_a_wait():
    trial = run(SHIFT.format(wait="while not r.is_completed(): pass\ns.wait()"), *tensors(2))
    assert [result.tolist()[0] for result in trial.results] == [10, 0] and not trial.unwaited


def test_torchs_collectives_and_groups():
    body = """
dist.all_reduce(x)
some = dist.new_group([0, 2])
whole = [torch.empty_like(x) for _ in range(2)]
if rank() != 1:
    dist.all_gather(whole, x + rank(), group=some)
best = x.clone(); dist.all_reduce(best.mul_(rank()), op=dist.ReduceOp.MAX)
return [x, whole[1], best] if rank() == 0 else x
"""
    trial = run(body, *tensors(3), allowed=P2P | COLLECTIVES)
    assert trial.error is None
    total = torch.arange(3.0) * 3 + 30
    for found, expected in zip(trial.results[0], (total, total + 2, total * 2), strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(trial.results[1], total)


def test_arguments_keep_their_strides_and_a_changed_one_is_told():
    trial = run(
        "assert x.stride() == (1, 2)\nx[0] += 1\nreturn x",
        (torch.arange(6.0).reshape(3, 2).t(),),
        (torch.zeros(3, 2).t(),),
    )
    assert trial.error is None and trial.changed == [[0], [0]]
    assert trial.results[0].tolist() == [[1, 3, 5], [1, 3, 5]]


def test_values_travel_as_they_are():
    value = (1, [2.5, {3: (None, "x")}], True)
    assert run("return x", (value,)).results == [value]


def test_a_receive_from_any_rank_tells_the_source():
    body = """
if rank() > 0:
    dist.send(x, 0)
    return None
return [dist.recv(x) for _ in range(2)]
"""
    assert sorted(run(body, *tensors(3)).results[0]) == [1, 2]


ENDINGS = {
    "deadlock": (
        "dist.send(x, (rank() + 1) % size()); dist.recv(x, (rank() - 1) % size())",
        "deadlock: hw.py:5",
    ),
    "exception": ("return x[99]", "raised: out of bounds"),
    "no such rank": ("dist.send(x, rank() + 1)", "raised: has ranks 0 to 1"),
    "exit": ("os._exit(0)", "died: "),
    "a transposed tensor": ("dist.isend(torch.ones(2, 3).t(), 1)", "raised: must be contiguous"),
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
    "syntax": ("return (", "not loaded: never closed"),
    "imports parallel101": ("import parallel101", "not loaded: can't be imported"),
}


@pytest.mark.parametrize(("body", "ending"), ENDINGS.values(), ids=ENDINGS)
def test_every_end_is_named(body, ending):
    how, _, text = ending.partition(": ")
    trial = run(body, *tensors(2), seconds=1.0 if how == "time" else 10.0)
    assert how_it_ended(trial.error) == how and text in str(trial.error)


STAYS = {  # what follows a deadlock, and whether the processes give up and stay
    "gives up": ("dist.recv(x, 1 - rank())", True),
    "cleans up": ("try: dist.recv(x, 1 - rank())\n    finally: print('bye')", True),
    "tries again": (
        "while True:\n        try: dist.recv(x, 1 - rank())\n        except Exception: pass",
        True,
    ),
    "goes on": ("while True:\n        try: dist.recv(x, 1 - rank())\n        except: pass", False),
}


@pytest.mark.parametrize(("waits", "stay"), STAYS.values(), ids=STAYS)
def test_ranks_that_a_deadlock_leaves_waiting_give_up_or_are_replaced(waits, stay):
    exercise = replace(EXERCISE, path="declared.py", source=DECLARATION)
    code = f"{HEAD}def f(x):\n    if x[0]: return x + rank()\n    {waits}\n"
    right = Case([(torch.ones(1),)] * 2, [None] * 2)
    with SubmissionRanks(exercise, Submission(Path("hw.py"), code)) as ranks:
        assert (
            how_it_ended(ranks.run(Case([(torch.zeros(1),)] * 2, [None] * 2)).error) == "deadlock"
        )
        assert (len(ranks.ranks) == 2) == stay
        trial = ranks.run(right)
    assert [float(found) for found in trial.results] == [1, 2] and not any(trial.printed)


OUT = "torch.empty_like(x)"
LISTS = "1 tensor, and the group has 2 ranks"
WRONG_CALLS = {
    "all_gather, one output": (f"dist.all_gather([{OUT}], x)", LISTS),
    "all_gather, three outputs": (f"dist.all_gather([{OUT}, {OUT}, {OUT}], x)", "3 tensors"),
    "all_gather_into_tensor": ("dist.all_gather_into_tensor(torch.empty(5), x)", "2 equal pieces"),
    "all_gather_coalesced": (f"dist.all_gather_coalesced([[{OUT}]], [x])", LISTS),
    "scatter": (f"dist.scatter({OUT}, [x] if rank() == 0 else None)", LISTS),
    "gather": (f"dist.gather(x, [{OUT}] if rank() == 0 else None)", LISTS),
    "reduce_scatter": (f"dist.reduce_scatter({OUT}, [x])", LISTS),
    "reduce_scatter_tensor": ("dist.reduce_scatter_tensor(torch.empty(1), x)", "2 equal pieces"),
    "all_to_all": (f"dist.all_to_all([{OUT}], [x])", LISTS),
    "all_to_all_single": ("dist.all_to_all_single(x.clone(), x, [1, 1], [1, 2])", "split sizes"),
    "BAND on floats": ("dist.all_reduce(x, op=dist.ReduceOp.BAND)", "whole numbers"),
    "an average of whole numbers": ("dist.all_reduce(x.long(), op=dist.ReduceOp.AVG)", "average"),
    "all_reduce_coalesced": ("dist.all_reduce_coalesced([x] * (1 + rank()))", "equally long"),
    "no such root": ("dist.broadcast(x, 7)", "has ranks 0 to 1"),
    "a group's own method": (f"dist.group.WORLD.allgather([[{OUT}]], [x]).wait()", LISTS),
    "float8": ("dist.broadcast(x.to(torch.float8_e5m2), 0)", "torch.float8_e5m2 on cpu can't"),
    "a tensor without data": ("dist.broadcast(torch.ones(1, device='meta'), 0)", "meta"),
}


@pytest.mark.parametrize(("body", "text"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_what_a_relayed_call_raises_is_the_verdict_with_its_rank_and_line(body, text):
    trial = run(body, *tensors(2), allowed=P2P | COLLECTIVES)
    assert how_it_ended(trial.error) in ("raised", "misuse") and text in str(trial.error)
    said = explain_error(EXERCISE, trial)
    assert "hw.py:5" in said and "rank " in said and "grader" not in said, said


FROM_A_THREAD = {
    "late": "t = Thread(target=lambda: (time.sleep(0.2), dist.send(x, 1 - rank()))); t.start(); "
    "dist.recv(y, 1 - rank()); t.join()",
    "not joined": "Thread(target=dist.send, args=(x, 1 - rank())).start()",
    "a wait": "w = dist.irecv(y, 1 - rank()); s = dist.isend(x, 1 - rank()); "
    "t = Thread(target=w.wait); t.start(); s.wait(); t.join()",
}


@pytest.mark.parametrize("body", FROM_A_THREAD.values(), ids=FROM_A_THREAD)
def test_a_call_from_a_thread_is_always_told_with_the_same_words(body):
    imports = "import time; from threading import Thread; y = torch.empty_like(x)\n"
    trial = run(imports + body, *tensors(2), seconds=5.0)
    operation = "wait" if "w.wait" in body else "send"
    assert how_it_ended(trial.error) == "raised"
    assert str(trial.error).startswith(f"{operation} was called from a thread that the code has ")


def test_a_thread_that_only_computes_may_be_used():
    body = "import threading; t = threading.Thread(target=x.add_, args=(1,)); t.start(); t.join()\n"
    trial = run(body + SHIFT.format(wait="r.wait(); s.wait()"), *tensors(2))
    assert trial.error is None and trial.results[0].tolist() == [11, 12, 13]


def test_only_the_learners_own_stub_counts_as_not_written():
    trial = run("return torch.nn.Module()(x)", *tensors(1))
    assert how_it_ended(trial.error) == "raised"
