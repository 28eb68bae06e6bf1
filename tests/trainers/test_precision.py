"""Training in 16 bit: what it computes, what it holds, what it sends, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parallel101 as p101
from parallel101.cost import model_states
from parallel101.models.gpt import GPT, GPTConfig, next_token_loss
from parallel101.models.mlp import MLP
from tests.trainers.cases import mesh_of, world_size

STEPS = 4
GRADIENTS = (None, torch.float32)
ZERO = (0, 1, 2, 3)


def adam(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, targets)


def mlp() -> nn.Module:
    return MLP([6, 9, 5], seed=3)


def rows(step: int, samples: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(samples, 6, generator=generator)
    return x, torch.randn(samples, 5, generator=generator)


def by_hand(
    weights: torch.dtype, gradients: torch.dtype, master: bool, shares: int, accumulate: int
) -> tuple[list[float], list[Tensor]]:
    """Losses, and what the optimizer updates, with nothing but torch. A share's microbatches add up
    in its gradient, and then the shares do.
    """
    model = mlp()
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    model.to(weights)
    optimizer = adam(masters if master else list(model.parameters()))
    losses = []
    for step in range(STEPS):
        x, y = rows(step)
        loss_of_step, of_shares = 0.0, []
        for x_share, y_share in zip(x.chunk(shares), y.chunk(shares)):
            sums = [torch.zeros_like(p, dtype=gradients) for p in model.parameters()]
            for a, b in zip(x_share.chunk(accumulate), y_share.chunk(accumulate)):
                part = mse(model(a.to(weights)).float(), b) * (len(a) / len(x))
                for total, g in zip(sums, torch.autograd.grad(part, list(model.parameters()))):
                    total += g
                loss_of_step += part.item()
            of_shares.append(sums)
        losses.append(loss_of_step)
        for p, q, *g in zip(masters, model.parameters(), *of_shares):
            total = sum(g[1:], g[0])
            if master:
                p.grad = total.float()
            else:
                q.grad = total
        optimizer.step()
        if master:
            with torch.no_grad():
                for p, q in zip(masters, model.parameters()):
                    q.copy_(p)
    kept = masters if master else list(model.parameters())
    return losses, [p.detach().clone() for p in kept]


def train(cases: Sequence[dict[str, Any]]) -> list[tuple[list[float], list[Tensor]]]:
    """By case: losses, and the whole model's state."""
    found = []
    for options in cases:
        trainer = p101.HybridTrainer(
            mlp(), mse, adam, mesh=mesh_of("dp 2"), verify=False, **options
        )
        losses = [trainer.step(*trainer.share(rows(step))) for step in range(STEPS)]
        found.append((losses, list(trainer.state_dict().values())))
    return found


def test_two_ranks_compute_what_torch_computes_bit_for_bit() -> None:
    # of two numbers there is only one sum, whoever adds them
    cases = [
        {"precision": precision, "gradient_dtype": dtype, "zero_stage": stage, "accumulate": many}
        for precision in ("bf16-mixed", "bf16")
        for dtype in (GRADIENTS if precision == "bf16-mixed" else (None,))
        for stage in ZERO
        for many in (1, 2)
        # stages 2 and 3 send after each microbatch, so that 16-bit sums are rounded elsewhere
        if many == 1 or stage < 2
    ]
    for options, (losses, state) in zip(
        cases, p101.launch(train, cases, world_size=2, backend="sim").results[0]
    ):
        expected, weights = by_hand(
            torch.bfloat16,
            options["gradient_dtype"] or torch.bfloat16,
            options["precision"] == "bf16-mixed",
            shares=2,
            accumulate=options["accumulate"],
        )
        assert losses == pytest.approx(expected, rel=1e-6), options
        for ours, torchs in zip(state, weights):
            assert ours.dtype == torchs.dtype and torch.equal(ours, torchs), options


LAYOUTS = ("dp 3", "tp 2", "pp 2", "dp 2, tp 2", "dp 2, pp 2", "tp 2, pp 2", "dp 2, tp 2, pp 2")


def train_gpt(layout: str, precision: str, dtype: torch.dtype | None, stage: int) -> list[float]:
    """Verified before the first step, within the rounding of 16 bit."""
    config = GPTConfig(vocabulary=32, context=8, width=16, heads=4, layers=2)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 32, (8, 9), generator=generator)
    trainer = p101.HybridTrainer(
        GPT(config),
        next_token_loss,
        adam,
        mesh=mesh_of(layout),
        precision=precision,
        gradient_dtype=dtype,
        zero_stage=stage,
        clip_norm=1.0,
        **({"microbatches": 4} if "pp" in layout else {"accumulate": 2}),
    )
    report = trainer.verify(*trainer.share((tokens[:, :-1], tokens[:, 1:])))
    assert report.equal and not report.reason, report
    return [trainer.step(*trainer.share((tokens[:, :-1], tokens[:, 1:]))) for _ in range(3)]


@pytest.mark.parametrize(("number", "layout"), [*enumerate(LAYOUTS)])
def test_every_layout_is_equal_to_one_process_in_the_same_precision(
    number: int, layout: str
) -> None:
    precision = ("bf16-mixed", "fp16-mixed", "bf16")[number % 3]
    dtype = GRADIENTS[number % 2] if precision != "bf16" else None
    stage = ZERO[number % 4] if "dp" in layout else 0
    size = world_size(layout)
    losses = p101.launch(
        train_gpt, layout, precision, dtype, stage, world_size=size, backend="sim"
    ).results
    assert all(of_rank == losses[0] for of_rank in losses)
    assert losses[0][2] < losses[0][0]


def held(cases: Sequence[dict[str, Any]]) -> list[float]:
    """By case: bytes for each weight of the model."""
    found = []
    for options in cases:
        model = MLP([64, 64, 64], seed=0)
        weights = sum(p.numel() for p in model.parameters())
        scalars = 4 * sum(1 for _ in model.parameters())  # Adam counts its steps for each
        trainer = p101.DataParallelTrainer(model, mse, adam, verify=False, **options)
        x = torch.zeros(4, 64)
        trainer.step(x, x)
        found.append((trainer.describe().total(0) - scalars) / weights)
    return found


def test_bytes_a_weight() -> None:
    expected = {
        (None, None): "fp32",
        ("fp32", None): "fp32",
        ("bf16", None): "bf16",
        ("bf16-mixed", None): "mixed",
        ("bf16-mixed", torch.float32): "mixed, fp32 gradients",
        ("fp16-mixed", None): "mixed",
    }
    cases = [{"precision": p, "gradient_dtype": d} for p, d in expected]
    counted = p101.launch(held, cases, world_size=1, backend="sim").results[0]
    assert counted == [model_states(1, precision=name).total for name in expected.values()]
    assert counted == [16, 16, 8, 16, 18, 16]


def placed(stage: int) -> Any:
    trainer = p101.HybridTrainer(
        mlp(), mse, adam, mesh=mesh_of("dp 2"), precision="bf16-mixed", zero_stage=stage
    )
    trainer.step(*trainer.share(rows(0)))
    whole, model = trainer.verification.whole, set(trainer.model.parameters())
    kept = [] if whole is None else [p for p in whole.parameters.values() if p not in model]
    return trainer.describe().parts, sum(p.numel() for p in kept)


@pytest.mark.parametrize("stage", ZERO)
def test_the_report_says_which_parts_are_sharded_and_verify_keeps_no_whole_model(
    stage: int,
) -> None:
    for parts, kept in p101.launch(placed, stage, world_size=2, backend="sim").results:
        assert kept == 0
        first_sharded = {"weights": 3, "gradients": 2, "optimizer state": 1, "master weights": 1}
        assert parts.keys() == first_sharded.keys()
        for kind, (first, second) in parts.items():
            assert (first == second == [(0.0, 1.0)]) == (stage < first_sharded[kind]), kind


def all_reduced(dtype: torch.dtype | None) -> None:
    trainer = p101.DataParallelTrainer(
        mlp(), mse, adam, precision="bf16-mixed", gradient_dtype=dtype, verify=False
    )
    trainer.step(*trainer.share(rows(0)))


def test_gradients_are_sent_in_their_dtype() -> None:
    sent, weights = {}, sum(p.numel() for p in mlp().parameters())
    for dtype in GRADIENTS:
        sent[dtype] = sum(
            p101.launch(all_reduced, dtype, world_size=2, backend="sim").trace.bytes_sent
        )
    # an all-reduce of n bytes on two ranks: each sends n
    assert sent[torch.float32] - sent[None] == 2 * weights * (4 - 2)


def overflow(stage: int) -> tuple[list[float], list[bool], list[float]]:
    trainer = p101.HybridTrainer(
        mlp(),
        mse,
        adam,
        mesh=mesh_of("dp 2"),
        precision="fp16-mixed",
        zero_stage=stage,
        clip_norm=1.0,
        verify=False,
    )
    scales, changed, losses = [trainer.gradient_sync.scale], [], []
    for factor in (1.0, 300.0, 1.0):  # in step 1, rank 1's gradients are too large for fp16
        x, y = trainer.share(rows(0))
        y = y * factor if trainer.position == 1 else y
        before = trainer.state_dict()
        losses.append(trainer.step(x, y))
        after = trainer.state_dict()
        changed.append(any(not torch.equal(before[name], after[name]) for name in before))
        scales.append(trainer.gradient_sync.scale)
    return scales, changed, losses


@pytest.mark.parametrize("stage", ZERO)
def test_a_gradient_that_overflows_on_one_rank_skips_the_step_on_all(stage: int) -> None:
    results = p101.launch(overflow, stage, world_size=2, backend="sim").results
    for scales, changed, losses in results:
        assert changed == [True, False, True]
        assert scales == [2.0**16, 2.0**16, 2.0**15, 2.0**15]
        assert losses[1] > losses[0]


def save_and_continue(path: str, layout: str, options: dict[str, Any]) -> dict[str, Tensor]:
    trainer = p101.HybridTrainer(mlp(), mse, adam, mesh=mesh_of(layout), verify=False, **options)
    for step in range(2):
        trainer.step(*trainer.share(rows(step)))
    trainer.save(path)
    return trainer.state_dict()


def resume(path: str, layout: str, options: dict[str, Any]) -> dict[str, Tensor]:
    trainer = p101.HybridTrainer(mlp(), mse, adam, mesh=mesh_of(layout), verify=False, **options)
    trainer.resume(path)
    return trainer.state_dict()


def test_a_checkpoint_has_the_master_weights_for_any_layout_and_precision(tmp_path: Path) -> None:
    path = str(tmp_path / "run.pt")
    mixed = {"precision": "bf16-mixed"}
    saved = p101.launch(
        save_and_continue, path, "dp 2", mixed | {"zero_stage": 3}, world_size=2, backend="sim"
    ).results[0]
    assert all(t.dtype == torch.float32 for t in saved.values())
    for layout, options in {
        "dp 3": mixed | {"zero_stage": 1},
        "tp 2": mixed,
        "dp 1": {},
        "pp 2": mixed | {"gradient_dtype": torch.float32, "microbatches": 2},
    }.items():
        size = world_size(layout)
        found = p101.launch(resume, path, layout, options, world_size=size, backend="sim").results
        for state in found:
            assert all(torch.equal(state[name], saved[name]) for name in saved), layout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "bf16-true"}, ["'bf16-true'", "'bf16-mixed'"]),
        ({"precision": "bf16", "autocast": torch.bfloat16}, ["autocast", "None with precision"]),
        ({"precision": "bf16", "gradient_dtype": torch.float32}, ["gradient_dtype", "None"]),
        ({"precision": "bf16-mixed", "gradient_dtype": torch.float16}, ["torch.float32"]),
        ({"gradient_dtype": torch.float32}, ["precision=None", "gradient_dtype"]),
    ],
    ids=["unknown", "with autocast", "not mixed", "other 16 bit", "alone"],
)
def test_refusals(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        p101.DataParallelTrainer(mlp(), mse, adam, **options)
    assert all(word in str(error.value) for word in words)
