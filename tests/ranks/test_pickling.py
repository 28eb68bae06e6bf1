"""What ranks send arrives as it was. Ranks of a job read plain values only: tensors, numbers,
records. Nothing that another rank sent runs code.
"""

from __future__ import annotations

import collections
import os
import pickle

import numpy as np
import pytest
import torch

import parallel101 as p101
from parallel101.laboratory.ranks.pickling import pack, pack_result, unpack
from parallel101.laboratory.ranks.wire import RankRecord
from parallel101.laboratory.record.calls import Call
from parallel101.laboratory.record.wait_for import RankStatus
from parallel101.trainers.training_loop import History, StepResult

CALL = Call(1, "all_to_all", (0, 2), "world", 3, "a.py:7", shape=torch.Size([2, 3]))
CALL = CALL._replace(alike=(("dim", "0"),), gives={0: 4, 2: 8}, within=("all_to_all", (0, 1, 2)))


def sent(value, plain=True):
    """What another rank of the job reads, or with `plain=False` a rank of a launch."""
    body, buffers = pack(value, plain)
    return unpack(body, [bytearray(buffer.raw()) for buffer in buffers], plain)


HISTORY = History()
HISTORY.add(StepResult(step=1, loss=2.5, seconds=0.1, samples=4, tokens=0))
WRITTEN = {
    "a result": {
        "numbers": (1, 2.5, 1j, None, True, {3}, frozenset({4}), range(5), b"\xff"),
        "numpy": [np.float32(1.5), np.int64(2)],
        "history": HISTORY,
        "ordered": collections.OrderedDict(a=[torch.float32, torch.Size([2])]),
    },
    "a status": RankStatus(
        CALL,
        posted={("send", 2, 0, "world"): [(3, "a.py:8", 4), (4, "a.py:9", 8)]},
        collectives={"world": (3, ["barrier", "all_reduce"])},
        dropped={(("recv", None, 0, "world"), 2): "a.py:9"},
    ),
    "calls": [CALL, CALL._replace(nbytes=5, gives=None)],
    "a record": RankRecord([("recv", 1, {"microbatch": 3})], [("send", None)], [CALL]),
    "a deadlock": p101.DeadlockError(
        {0: ("recv", 1, "a.py:1"), 1: ("all_reduce", (0, 2), "a.py:2")}, [0, 1], [2], ["d"]
    ),
    "a failure": p101.RankFailed("rank 1 raised ValueError: é", 1, -6),
    "a misuse": p101.MisuseError("different shapes", 3),
    "a time limit": p101.LaunchTimeout("after 3 s"),
}


def test_what_is_read_equals_what_was_written():
    for name, value in WRITTEN.items():
        again = sent(value)
        assert type(again) is type(value), name
        if isinstance(value, Exception):
            assert (str(again), vars(again)) == (str(value), vars(value)), name
        else:
            assert again == value, name


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize("plain", [False, True])
def test_tensors_arrive_as_they_were(plain):
    arrays = [np.arange(4), np.array(["a", "bc"]), np.eye(3).T]
    assert all(map(np.array_equal, sent(arrays, plain), arrays))
    base, leaf = torch.arange(12.0, dtype=torch.float64).view(3, 4), torch.ones(2).requires_grad_()
    tensors = [
        *(base.t(), torch.empty(0, 3), torch.tensor(True), torch.ones(3, dtype=torch.bfloat16)),
        *(leaf, leaf * 2, torch.nn.Parameter(torch.zeros(2)), torch.zeros(100_000)[3:5]),
        *(torch.ones(2).to_sparse(), torch.tensor([1 + 2j]).conj().imag, torch.ones(2, 2)[:, 0]),
    ]
    with torch.device("meta"):  # on NCCL the default device is a GPU
        again, (whole, row) = sent((tensors, (base, base[1])), plain)
    for a, b in zip(again, tensors, strict=True):
        assert torch.equal(a.to_dense(), b.to_dense())
        assert (a.dtype, a.shape, type(a), a.layout) == (b.dtype, b.shape, type(b), b.layout)
        assert a.requires_grad == (b.requires_grad and b.is_leaf), "a graph stays on its rank"
        assert a.layout != torch.strided or a.untyped_storage().nbytes() <= 96, "without its base"
    whole[1, 0] = 99.0
    assert row[0] == 99.0, "two views of one storage are still views of one storage"


def test_a_variable_with_the_name_of_a_module_of_torchs():
    """cloudpickle takes `dist` and `config` for the module torch.distributed.config, of a type
    that it can't pickle.
    """
    space = {"dist": torch.distributed, "config": 5}
    exec("def program():\n    return config, dist.is_initialized()", space)
    assert sent(space["program"], plain=False)() == (5, False)


def test_other_classes_are_refused_until_the_program_allows_them():
    allow = rf"rank 2 returned .* make no {__name__}\.Point .*add_safe_globals\(\[Point\]\)"
    with pytest.raises(TypeError, match=allow):
        pack_result([Point(1, 2)], 2, plain=True)
    with pytest.raises(TypeError, match="rank 2 returned a generator that can't be pickled"):
        pack_result((i for i in range(3)), 2, plain=True)
    with torch.serialization.safe_globals([Point]):
        assert pack_result(Point(1, 2), 2, plain=True) and sent([Point(1, 2)]) == [Point(1, 2)]


class Bomb:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


BOMBS = {
    "a system call": Bomb(os.system, "touch exploded"),
    "an import": Bomb(__import__, "antigravity"),
    "code": Bomb(exec, "open('exploded', 'w')"),
    "a file's name": Bomb(torch.load, "exploded"),
    "a function of this package": Bomb(unpack, b"", []),
    "a class of this package that does something": Bomb(p101.launch.__globals__["Monitor"], 1, 1.0),
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_what_would_run_code_is_not_run(bomb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pickle.UnpicklingError, match="add_safe_globals"):
        unpack(pickle.dumps([bomb]), [], plain=True)
    assert not (tmp_path / "exploded").exists()
