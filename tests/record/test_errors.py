"""Errors survive pickling, and show places in the program as a reader knows them."""

from __future__ import annotations

import linecache
import pickle
import sys
import types

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.laboratory.record.program_lines import named, shown


def test_errors_survive_pickling():
    error = p101.DeadlockError({0: ("recv", 1, "a.py:1")}, [0], [1], ["a message"])
    again = pickle.loads(pickle.dumps(error))
    assert (vars(again), str(again)) == (vars(error), str(error))
    failed = pickle.loads(pickle.dumps(p101.MisuseError("why", 3)))
    assert (type(failed), failed.rank, str(failed)) == (p101.MisuseError, 3, "why")


def test_an_error_inside_a_collective_is_at_the_line_that_called_it():
    def one_rank_is_missing(rank_missing=2):
        if dist.get_rank() != rank_missing:
            p101.all_reduce(torch.ones(4), algorithm="ring")

    line = one_rank_is_missing.__code__.co_firstlineno + 2
    with pytest.raises(p101.DeadlockError) as error:
        p101.launch(one_rank_is_missing, world_size=3, backend="sim")
    assert {place for _, _, place in error.value.waiting.values()} == {f"{__file__}:{line}"}


def test_a_place_is_shown_with_its_line_and_a_cell_with_its_number(monkeypatch):
    monkeypatch.setitem(
        linecache.cache,
        "/tmp/ipykernel_1/2.py",
        (20, None, ["x = 1\n", "    dist.recv(x, 1)\n"], "/tmp/ipykernel_1/2.py"),
    )
    assert shown("/tmp/ipykernel_1/2.py:2") == "/tmp/ipykernel_1/2.py:2: dist.recv(x, 1)"
    shell = types.SimpleNamespace(
        compile=types.SimpleNamespace(
            format_code_name=lambda name: ("Cell", "In[5]") if "ipykernel" in name else None
        )
    )
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    assert shown("/tmp/ipykernel_1/2.py:2") == "cell [5], line 2: dist.recv(x, 1)"
    assert named("/tmp/ipykernel_1/2.py:2") == "cell [5], line 2" and named("a.py:2") == "a.py:2"
    sent = p101.MisuseError(
        "changed: send() at /tmp/ipykernel_1/2.py:2: dist.send(x), see a.py:3", 0
    )
    assert str(sent) == "changed: send() at cell [5], line 2: dist.send(x), see a.py:3"
    raised = p101.RankFailed(
        '  File "/tmp/ipykernel_1/2.py", line 2, in f\n  File "a.py", line 3', 0
    )
    assert str(raised) == '  cell [5], line 2, in f\n  File "a.py", line 3'
    assert shown("no/such/file.py:3") == "no/such/file.py:3"
    assert shown("?") == "?"
