"""Bad arguments raise at once, before any rank is started, with what was given and what to do."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys

import pytest
import torch

import parallel101 as p101


def ok():
    return 1


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"world_size": 0}, ValueError, "world_size is 0"),
        ({"world_size": -1}, ValueError, "world_size is -1"),
        ({"world_size": "4"}, TypeError, "world_size is '4'"),
        ({"world_size": 2.0}, TypeError, "world_size is 2.0"),
        ({"world_size": True}, TypeError, "world_size is True"),
        ({"world_size": torch.tensor(2.5)}, TypeError, "world_size is tensor"),
        ({"backend": "glue"}, ValueError, "'gloo', 'nccl', 'sim'"),
        ({"backend": None}, ValueError, "backend is None"),
        ({"trace": "yes"}, ValueError, "trace is 'yes'"),
        ({"timeout": 0}, ValueError, "timeout is 0"),
        ({"timeout": float("nan")}, ValueError, "timeout is nan"),
        ({"timeout": "1"}, ValueError, "timeout is '1'"),
        ({"stuck_after": 0}, ValueError, "stuck_after is 0"),
        ({"network": p101.Network()}, ValueError, "network works with backend='sim' only"),
        ({"network": 3, "backend": "sim"}, TypeError, "Network"),
        ({"device": "H1000", "backend": "sim"}, ValueError, "'A100', 'H100', 'H200', 'B200', N"),
        ({"device": torch.device("cuda"), "backend": "sim"}, ValueError, "'A100', 'H100'"),
        ({"device": "H100"}, ValueError, "works with backend='sim' only, and backend is 'gloo'"),
    ],
    ids=str,
)
def test_bad_arguments(kwargs, error, message):
    with pytest.raises(error, match=re.escape(message)):
        p101.launch(ok, **kwargs)


def test_something_that_is_no_function():
    with pytest.raises(TypeError, match="takes a function"):
        p101.launch(3)


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_the_argument_that_cannot_be_pickled_is_named(backend):
    with pytest.raises(TypeError, match=r"argument 1 \(a generator\) can't be pickled"):
        p101.launch(lambda *_: None, 0, (i for i in range(3)), backend=backend)
    with pytest.raises(TypeError, match=r"argument 'source' \(a generator\)"):
        p101.launch(lambda source: None, source=(i for i in range(3)), backend=backend)
    generator = (i for i in range(3))
    with pytest.raises(TypeError, match="the function"):
        p101.launch(lambda: generator, backend=backend)


@pytest.mark.skipif(torch.cuda.device_count() >= 64, reason="this machine has a GPU for each rank")
def test_nccl_without_enough_gpus():
    with pytest.raises(RuntimeError, match=r"gloo.*sim"):
        p101.launch(ok, world_size=64, backend="nccl")


def test_a_rank_cannot_launch():
    with pytest.raises(p101.RankFailed, match="inside rank 0"):
        p101.launch(lambda: p101.launch(lambda: None), world_size=1)


NO_ADDRESS = "MASTER_ADDR and MASTER_PORT, where rank 0 is found, are not both set"


@pytest.mark.parametrize(
    ("rank", "size", "address", "port", "message"),
    [
        ("abc", "2", "", "", r"\(RANK='abc' and WORLD_SIZE='2'\), but RANK must be"),
        ("0", "0", "", "", "RANK must be a whole number"),
        ("5", "2", "", "", "RANK must be a whole number"),
        ("0", "1", "", "29500", NO_ADDRESS),
        ("0", "1", "localhost", "x", "MASTER_PORT is 'x', which isn't a port number"),
    ],
)
def test_job_variables_that_make_no_sense_are_named(
    monkeypatch, rank, size, address, port, message
):
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name, value in zip(names, (rank, size, address, port)):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{message}.*unset RANK and WORLD_SIZE"):
        p101.launch(ok)


@pytest.mark.parametrize("timeout", [float("inf"), 10**400])
@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_no_time_limit(timeout, backend):
    limits = {"timeout": timeout, "stuck_after": timeout}
    assert p101.launch(ok, world_size=2, backend=backend, **limits).results == [1, 1]


def test_arguments_that_the_function_does_not_take():
    with pytest.raises(p101.RankFailed) as raised:
        p101.launch(lambda x: x, world_size=2)
    assert "missing 1 required positional argument: 'x'" in str(raised.value)
    assert "Traceback" not in str(raised.value)


class Unreadable:
    def __reduce__(self):
        return int, ("no number",)


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_a_program_that_the_ranks_cannot_unpickle(backend, tmp_path):
    (tmp_path / "plugin.py").write_text("def f():\n    return 1\n")
    spec = importlib.util.spec_from_file_location("plugin", tmp_path / "plugin.py")
    plugin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)
    sys.modules["plugin"] = plugin
    missing = r"a module that the ranks can't import: .*No module named 'plugin'.*sys\.path"
    try:
        with pytest.raises(p101.RankFailed, match=missing):
            p101.launch(plugin.f, world_size=2, backend=backend)
    finally:
        del sys.modules["plugin"]
    unreadable = "an argument was pickled, but the ranks can't unpickle it: ValueError"
    with pytest.raises(p101.RankFailed, match=unreadable):
        p101.launch(print, Unreadable(), world_size=2, backend=backend)
