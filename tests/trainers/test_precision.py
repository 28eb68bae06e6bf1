"""Training in 16 bit: what it computes, what it holds, what it sends, and what it saves."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parallel101 as p101
from parallel101.cost import model_states
from parallel101.models.mlp import MLP
from tests.trainers.cases import (
    DATA,
    TASKS,
    Task,
    case,
    on_mesh,
    on_ranks,
    text,
    unlike_one_process,
    world_size,
)
from tests.trainers.cases import rows as batches
from tests.trainers.models import TIME

STEPS, SIM = 4, {"backend": "sim"}
GRADIENTS = (None, torch.float32)
MIXED = {"precision": "bf16-mixed"}


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def mlp():
    return MLP([6, 9, 5], seed=3)


def rows(step, samples=8):
    return tuple(t[:samples].float() for t in batches(6, 5)(step))


def trainer_of(mesh, **options):
    return on_mesh(mesh)(mlp(), F.mse_loss, adam, **options)


def by_hand(weights, gradients, master, shares, accumulate):
    """Losses, and what the optimizer updates, with nothing but torch. A share's microbatches add up
    in its gradient, and then the shares do.
    """
    model = mlp()
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    model.to(weights)
    kept = masters if master else list(model.parameters())
    optimizer, losses = adam(kept), []
    for step in range(STEPS):
        x, y = rows(step)
        loss_of_step, of_shares = 0.0, []
        for x_share, y_share in zip(x.chunk(shares), y.chunk(shares)):
            sums = [torch.zeros_like(p, dtype=gradients) for p in model.parameters()]
            for a, b in zip(x_share.chunk(accumulate), y_share.chunk(accumulate)):
                part = F.mse_loss(model(a.to(weights)).float(), b) * (len(a) / len(x))
                for total, g in zip(sums, torch.autograd.grad(part, list(model.parameters()))):
                    total += g
                loss_of_step += part.item()
            of_shares.append(sums)
        losses.append(loss_of_step)
        for p, *g in zip(kept, *of_shares):
            p.grad = sum(g[1:], g[0]).to(p.dtype)
        optimizer.step()
        if master:
            with torch.no_grad():
                for p, q in zip(masters, model.parameters()):
                    q.copy_(p)
    return losses, [p.detach().clone() for p in kept]


def train(cases):
    """By case: losses, and the whole model's state."""
    found = []
    for options in cases:
        trainer = trainer_of("dp 2", **options)
        losses = [trainer.step(*trainer.share(rows(step))) for step in range(STEPS)]
        found.append((losses, list(trainer.state_dict().values())))
    return found


def test_two_ranks_compute_what_torch_computes_bit_for_bit():
    # of two numbers there is only one sum, whoever adds them
    cases = [
        {"precision": precision, "gradient_dtype": dtype, "zero_stage": stage, "accumulate": many}
        for precision, dtype in (
            ("bf16-mixed", None),
            ("bf16-mixed", torch.float32),
            ("bf16", None),
        )
        for stage, many in product(range(4), (1, 2))
        # stages 2 and 3 send after each microbatch, so that 16-bit sums are rounded elsewhere
        if many == 1 or stage < 2
    ]
    for options, (losses, state) in zip(cases, on_ranks(2, train, cases)[0]):
        dtype, master = options["gradient_dtype"] or torch.bfloat16, options["precision"] != "bf16"
        expected, weights = by_hand(torch.bfloat16, dtype, master, 2, options["accumulate"])
        assert losses == pytest.approx(expected, rel=1e-6), options
        for ours, torchs in zip(state, weights):
            assert ours.dtype == torchs.dtype and torch.equal(ours, torchs), options


@pytest.mark.parametrize(("dtype", "close"), [(torch.float16, 0.02), (torch.bfloat16, 0.05)])
def test_a_model_in_half_precision(dtype, close):
    """The optimizer is SGD: AdamW's eps is 0 in float16."""
    TASKS["half"] = Task(
        lambda: MLP([4, 8, 4], dtype=dtype),
        F.mse_loss,
        lambda step: tuple(t.to(dtype) for t in batches(4, 4)(step)),
    )
    cases = [case("dp 2", "half", "sgd", None, **options) for options in DATA.values()]
    assert on_ranks(2, unlike_one_process, cases, close) == [[]] * 2


LAYOUTS = {
    "dp 3": ("tied gpt", {"accumulate": 2}),
    "tp 2": ("tied gpt", {"accumulate": 2}),
    "pp 2": ("tied gpt", {"microbatches": 4}),
    "dp 2, tp 2": ("llama", {"zero_stage": 2, **TIME}),
    "dp 2, pp 2": ("tied gpt", {"zero_stage": 3, "microbatches": 4}),
    "tp 2, pp 2": ("tied gpt", {"microbatches": 4}),
    "cp 2, pp 2": ("llama", {"microbatches": 2, "recompute": "full"}),
    "dp 2, tp 2, pp 2": ("tied gpt", {"zero_stage": 1, "microbatches": 2}),
}
PRECISIONS = [
    {"precision": "bf16-mixed"},
    {"precision": "fp16-mixed", "gradient_dtype": torch.float32},
    {"precision": "bf16"},
]


def verified(mesh, task, options, precision):
    """Verified within the rounding of 16 bit, and the losses of three steps."""
    of = TASKS[task]
    given = {"loss_fn": of.loss_fn, **(of.on_tp if "tp" in mesh else {}), **options, **precision}
    trainer = on_mesh(mesh)(of.build().float(), optimizer=adam, clip_norm=1.0, verify=True, **given)
    batch = trainer.share(text(0))
    said = str(trainer.verify(*batch)).splitlines()[0]
    return said, [trainer.step(*batch) for _ in range(3)]


@pytest.mark.parametrize(("number", "mesh"), [*enumerate(LAYOUTS)])
def test_every_layout_is_equal_to_one_process_in_the_same_precision(number, mesh):
    arguments = verified, mesh, *LAYOUTS[mesh], PRECISIONS[number % 3]
    results = on_ranks(world_size(mesh), *arguments)
    (said, losses) = results[0]
    assert results == [results[0]] * world_size(mesh)
    assert said == "equal to one process"
    assert losses[2] < losses[0]


def held(cases):
    """By case: bytes for each weight of the model."""
    found, x = [], torch.zeros(4, 64)
    for options in cases:
        model = MLP([64, 64, 64], seed=0)
        weights = sum(p.numel() for p in model.parameters())
        scalars = 4 * len(list(model.parameters()))  # Adam counts its steps for each
        trainer = on_mesh("dp 1")(model, F.mse_loss, adam, **options)
        trainer.step(x, x)
        found.append((trainer.describe().total(0) - scalars) / weights)
    return found


def test_bytes_a_weight():
    expected = {
        (None, None): "fp32",
        ("fp32", None): "fp32",
        ("bf16", None): "bf16",
        ("bf16-mixed", None): "mixed",
        ("bf16-mixed", torch.float32): "mixed, fp32 gradients",
        ("fp16-mixed", None): "mixed",
    }
    cases = [{"precision": p, "gradient_dtype": d} for p, d in expected]
    counted = on_ranks(1, held, cases)[0]
    assert counted == [model_states(1, precision=name).total for name in expected.values()]
    assert counted == [16, 16, 8, 16, 18, 16]


def placed():
    found = []
    for stage in range(4):
        trainer = trainer_of("dp 2", **MIXED, zero_stage=stage, verify=True)
        trainer.step(*trainer.share(rows(0)))
        whole, model = trainer.verification.whole, set(trainer.model.parameters())
        kept = [] if whole is None else [p for p in whole.parameters.values() if p not in model]
        found.append((trainer.describe().parts, sum(p.numel() for p in kept)))
    return found


def test_the_report_says_which_parts_are_sharded_and_verify_keeps_no_whole_model():
    sharded_from = {"weights": 3, "gradients": 2, "optimizer state": 1, "master weights": 1}
    for found in on_ranks(2, placed):
        for stage, (parts, kept) in enumerate(found):
            assert kept == 0 and parts.keys() == sharded_from.keys()
            for kind, (first, second) in parts.items():
                assert (first == second == [(0.0, 1.0)]) == (stage < sharded_from[kind]), kind


def test_gradients_are_sent_in_their_dtype():
    def step(dtype):
        trainer = trainer_of("dp 2", **MIXED, gradient_dtype=dtype)
        trainer.step(*trainer.share(rows(0)))

    runs = [p101.launch(step, dtype, world_size=2, **SIM) for dtype in GRADIENTS]
    half, full = (sum(run.trace.bytes_sent) for run in runs)
    # an all-reduce of n bytes on two ranks: each sends n
    assert full - half == 2 * sum(p.numel() for p in mlp().parameters()) * (4 - 2)


def overflow(stage):
    trainer = trainer_of("dp 2", precision="fp16-mixed", zero_stage=stage, clip_norm=1.0)
    scales, changed, losses = [trainer.gradient_sync.scale], [], []
    for factor in (1.0, 300.0, 1.0):  # in step 1, rank 1's gradients are too large for fp16
        x, y = trainer.share(rows(0))
        y = y * factor if trainer.position == 1 else y
        before = trainer.state_dict()
        losses.append(trainer.step(x, y))
        after = trainer.state_dict()
        changed.append(any(not torch.equal(before[name], after[name]) for name in before))
        scales.append(trainer.gradient_sync.scale)
    return scales, changed, losses[1] > losses[0]


def test_a_gradient_that_overflows_on_one_rank_skips_the_step_on_all():
    expected = [2.0**16, 2.0**16, 2.0**15, 2.0**15], [True, False, True], True
    assert on_ranks(2, lambda: [overflow(stage) for stage in range(4)]) == [[expected] * 4] * 2


def saved_or_resumed(path, mesh, options, resume):
    trainer = trainer_of(mesh, **options)
    if resume:
        trainer.resume(path)
    else:
        trainer.fit(rows, until=2, save_to=path, progress=False)
    return trainer.state_dict()


def test_a_checkpoint_has_the_master_weights_for_any_layout_and_precision(tmp_path):
    def of(mesh, options, resume=True):
        arguments = saved_or_resumed, str(tmp_path / "run.pt"), mesh, options, resume
        return on_ranks(world_size(mesh), *arguments)

    saved = of("dp 2", {**MIXED, "zero_stage": 3}, resume=False)[0]
    assert all(t.dtype == torch.float32 for t in saved.values())
    for mesh, options in {
        "dp 3": {**MIXED, "zero_stage": 1},
        "tp 2": MIXED,
        "dp 1": {},
        "pp 2": {**MIXED, "gradient_dtype": torch.float32, "microbatches": 2},
    }.items():
        for state in of(mesh, options):
            assert all(torch.equal(state[name], saved[name]) for name in saved), mesh
