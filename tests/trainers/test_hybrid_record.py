"""Each axis sends what theory says, and each rank holds its part: counted in the record, and
from live storages.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
import torch.nn.functional as F

import parallel101 as p101
from parallel101.models.mlp import MLP
from tests.trainers.cases import on_mesh, randn, world_size

# the model: pairs of a column layer NARROW → WIDE and a row layer WIDE → NARROW
SAMPLES, NARROW, WIDE, PAIRS = 8, 4, 8, 4
DOUBLE = 8  # bytes of a float64


def axes_of(mesh):
    return {"dp": 1, "tp": 1, "pp": 1} | {
        name: int(size) for name, size in (axis.split() for axis in mesh.split(", "))
    }


def trainer_of(mesh, narrow=NARROW, wide=WIDE, dtype=torch.float64, **options):
    model = MLP([narrow, wide] * PAIRS + [narrow], dtype=dtype)
    return on_mesh(mesh)(model, F.mse_loss, torch.optim.AdamW, **options)


def second_step(mesh):
    """In the first step, stages also tell each other the shapes of their messages."""
    trainer = trainer_of(mesh, **({"microbatches": 2} if "pp" in mesh else {}))
    batch = trainer.share((randn(0, SAMPLES, NARROW), randn(1, SAMPLES, NARROW)))
    trainer.step(*batch)
    p101.barrier()
    with p101.span("second step"):
        trainer.step(*batch)


@cache
def sent_in_second_step(mesh, backend):
    n = world_size(mesh)
    trace = p101.launch(second_step, mesh, world_size=n, backend=backend, trace=True).trace
    begun = {span.rank: span.start for span in trace.spans("second step")}
    return [e for e in trace.events if e.kind == "send" and e.posted >= begun[e.rank]]


@pytest.mark.parametrize(
    ("backend", "mesh"),
    [("sim", "dp 2, tp 2, pp 2"), ("sim", "pp 4, dp 2"), ("gloo", "pp 2, tp 2")],
)
def test_bytes_along_each_axis_equal_theory(backend, mesh):
    """Counts of samples, losses and errors go among all ranks at once: the axis of those events
    has all names, such as "dp_tp_pp".
    """
    size = axes_of(mesh)
    every_axis = "_".join(axis.split()[0] for axis in mesh.split(", "))
    sent = sent_in_second_step(mesh, backend)
    by_axis = {
        axis: sum(event.nbytes for event in sent if event.group.axis == axis)
        for axis in {event.group.axis for event in sent}
    }
    control = by_axis.pop(every_axis)
    assert control <= 6 * DOUBLE * world_size(mesh) ** 2
    weights_of_a_pair = 2 * NARROW * WIDE // size["tp"] + WIDE // size["tp"] + NARROW
    # the gradients of all ranks along tp and pp
    of_each_line = PAIRS * weights_of_a_pair * size["tp"]
    activation = SAMPLES * NARROW  # of the whole batch, between two pairs
    expected = {
        "dp": 2 * (size["dp"] - 1) * of_each_line * DOUBLE,
        # forward, and backward but for the first pair's inputs
        "tp": 2 * (size["tp"] - 1) * activation * (PAIRS + PAIRS - 1) * DOUBLE,
        # there and back, on every rank along tp
        "pp": 2 * (size["pp"] - 1) * activation * size["tp"] * DOUBLE,
    }
    assert by_axis == {axis: nbytes for axis, nbytes in expected.items() if nbytes}


def test_activations_go_between_neighbouring_stages_once_a_microbatch_and_way():
    along = [e for e in sent_in_second_step("pp 4, dp 2", "sim") if e.group.axis == "pp"]
    pipelines, microbatches = 2, 2
    assert Counter((e.rank // 2, e.peer // 2) for e in along) == {
        way: microbatches * pipelines for a in range(3) for way in ((a, a + 1), (a + 1, a))
    }
    assert {e.nbytes for e in along} == {SAMPLES // pipelines // microbatches * NARROW * DOUBLE}


# ── who holds what ──


def held(mesh, stages):
    found = []
    for zero_stage in stages:
        trainer = trainer_of(mesh, 32, 64, torch.float32, zero_stage=zero_stage)
        trainer.step(*trainer.share((torch.ones(8, 32), torch.ones(8, 32))))
        storages = [p.untyped_storage() for p in trainer.model.parameters()]
        in_the_model = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
        found.append((trainer.describe().bytes, in_the_model))
    return found


@pytest.mark.parametrize(
    ("mesh", "stages"), [("dp 2, tp 2, pp 2", (0, 1, 2, 3)), ("tp 4, dp 2", (2, 3))]
)
def test_a_rank_holds_its_stages_its_shards_and_with_zero_its_part_of_those(mesh, stages):
    """4 bytes a weight, 4 a gradient and 8 of AdamW's state; the biases of row layers are whole
    along tp.
    """
    size, n = axes_of(mesh), world_size(mesh)
    mine = 4 * PAIRS // size["pp"] * (2 * 32 * 64 // size["tp"] + 64 // size["tp"] + 32)
    for found in p101.launch(held, mesh, stages, world_size=n, backend="sim").results:
        for zero_stage, (holdings, in_the_model) in zip(stages, found):
            expected = {
                "weights": mine / (size["dp"] if zero_stage == 3 else 1),
                "gradients": mine / (size["dp"] if zero_stage >= 2 else 1),
                "optimizer state": 2 * mine / (size["dp"] if zero_stage >= 1 else 1),
            }
            for kind, nbytes in expected.items():
                assert holdings[kind] == pytest.approx([nbytes] * n, rel=0.01), kind
            left = 0 if zero_stage == 3 else mine
            assert in_the_model == pytest.approx(left, rel=0.01), "the rest is freed"
