"""Spans keep labels of any kind, in the types that JSON has."""

from __future__ import annotations

import enum
import json
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import parallel101 as p101
from parallel101.spans import listening, unrecorded
from tests.sim.programs import run, trace

COLOUR = enum.IntEnum("COLOUR", "RED")
LABELS = {  # what is given: what the record has
    "number": (3, 3),
    "text": ("ring", "ring"),
    "nothing": (None, None),
    "yes": (True, True),
    "nested": ({"a": [1, 2.5, {"b": None}]}, {"a": [1, 2.5, {"b": None}]}),
    "tuple": ((1, (2, "x")), [1, [2, "x"]]),
    "shape": (torch.Size([2, 3]), [2, 3]),
    "keys": ({1: 2, (3, 4): 5}, {"1": 2, "(3, 4)": 5}),
    "enum": (COLOUR.RED, 1),
    "loss": (torch.tensor(1.5, requires_grad=True), 1.5),
    "losses": ([torch.tensor(1), np.float32(0.5)], [1, 0.5]),
    "wide": (np.float64(0.25), 0.25),
    "array": (np.array(7), 7),
    "half": (torch.tensor(2.0, dtype=torch.bfloat16), 2.0),
    "matrix": (torch.ones(2), "tensor([1., 1.])"),
    "meta": (torch.ones((), device="meta"), "tensor(..., device='meta', size=())"),
    "complex": (torch.tensor(1 + 2j), "(1+2j)"),
    "nan": (torch.tensor(float("nan")), "nan"),
    "infinite": (-float("inf"), "-inf"),
    "dtype": (torch.float32, "torch.float32"),
    "set": ({1}, "{1}"),
}


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_labels_of_any_kind(backend, tmp_path):
    def program():
        with p101.span("labelled", **{name: given for name, (given, _) in LABELS.items()}):
            pass

    recorded = p101.launch(program, world_size=1, backend=backend, trace=True).trace
    (span,) = recorded.spans("labelled")
    expected = {name: kept for name, (_, kept) in LABELS.items()}
    assert span.args == expected
    types = {name: type(value) for name, value in span.args.items()}
    assert types == {name: type(kept) for name, kept in expected.items()}
    recorded.save(tmp_path / "trace.json")
    assert p101.Trace.load(tmp_path / "trace.json").events == recorded.events
    recorded.to_chrome(tmp_path / "chrome.json")
    # JSON has no NaN
    json.loads((tmp_path / "chrome.json").read_text(), parse_constant=pytest.fail)


def test_a_label_has_the_value_from_the_start_of_the_span_and_may_be_called_name():
    def program(rank):
        steps, loss = [1], torch.tensor(1.0)
        with p101.span("step", steps=steps, loss=loss, name="x", start=1, self=2):
            steps.append(2), loss.add_(1)

    (span,) = trace(run(program, 1)).spans("step")
    assert span.args == {"steps": [1], "loss": 1.0, "name": "x", "start": 1, "self": 2}


@pytest.mark.parametrize("seconds", ["x", None, [1], -1, float("nan"), 1j])
def test_compute_refuses_what_is_no_time(seconds):
    with pytest.raises(
        ValueError, match=r"compute\(\) takes the seconds to pass .* zero or more; got"
    ):
        p101.compute(seconds)


def test_a_listener_is_told_of_the_spans_of_its_thread_and_of_what_is_not_recorded():
    def listener(heard):
        @contextmanager
        def told(name, labels):
            heard.append((name, dict(labels)))
            yield
            heard.append(name)

        return told

    outer, heard = [], []
    with p101.span("before"), listening(listener(outer)), listening(listener(heard)):
        with p101.span("forward", microbatch=torch.tensor(3)), unrecorded():
            pass
        threading.Thread(target=lambda: p101.span("elsewhere").__enter__()).start()
    with p101.span("after"):
        pass
    assert outer == heard == [("forward", {"microbatch": 3}), (None, {}), None, "forward"]
