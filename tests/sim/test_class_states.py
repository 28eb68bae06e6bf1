"""accelerate keeps the state of a process in classes: each virtual rank has its own."""

from __future__ import annotations

import sys
from types import ModuleType

import torch.distributed as dist

from parallel101.laboratory.record import torch_private
from parallel101.laboratory.sim.process_state import ACCELERATE as NAME
from parallel101.laboratory.sim.process_state import ITS_CLASSES, ProcessStates

from .programs import run


def library():
    """accelerate's module, as far as it matters here; loaded once for all ranks."""
    if NAME not in sys.modules:
        sys.modules[NAME] = ModuleType(NAME)
        for name in ITS_CLASSES:
            kind = type(name, (), {"_shared_state": {}, "__init__": shares_its_state})
            setattr(sys.modules[NAME], name, kind)
    return sys.modules[NAME]


def shares_its_state(self):
    self.__dict__ = self._shared_state


def program():
    if dist.get_rank() == 1:
        dist.barrier()  # rank 0 imports it first
    state = library().PartialState()
    found = getattr(state, "index", None)
    state.index = dist.get_rank()
    library().GradientState().steps = dist.get_rank() + 10
    if dist.get_rank() == 0:
        dist.barrier()
    dist.barrier()
    try:
        again = library().PartialState()
        return found, again.index, state.index, library().GradientState().steps
    finally:
        dist.barrier()
        library().PartialState._shared_state.clear()  # as its _reset_state does
        assert library().PartialState().__dict__ == {}
        dist.barrier()
        sys.modules.pop(NAME, None)


def test_a_rank_reads_what_it_has_written(monkeypatch):
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    assert run(lambda rank: program(), 2).results == [
        (None, rank, rank, rank + 10) for rank in range(2)
    ]


def test_the_state_from_before_the_run_comes_back(monkeypatch):
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    try:
        state = library().PartialState()
        state.index = 7
        states = ProcessStates([torch_private.RankWorld() for _ in range(2)])
        assert library().PartialState().__dict__ == {}, "a fresh process has none"
        states.switch(1)
        library().PartialState().index = 1
        states.switch(0)
        states.restore()
        assert library().PartialState().index == 7 == state.index
    finally:
        sys.modules.pop(NAME, None)
