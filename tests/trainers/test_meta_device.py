"""On virtual GPUs, whose tensors are on the meta device, every trainer does what it does with
numbers: it sends the same bytes in the same messages, and holds the same memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parallel101 as p101
from parallel101.models import Llama, LlamaConfig
from parallel101.models.gpt import GPT, GPTConfig, balanced_next_token_loss, next_token_loss
from parallel101.trainers.tensor.loss import vocabulary_cross_entropy
from tests.trainers.cases import on_mesh, raised, world_size

SMALL = {"vocabulary": 24, "context": 8, "layers": 2, "heads": 4, "width": 16}
EXPERTS = {"experts": 4, "top_k": 4}  # all of them: as many rows for each, as on meta
VOCABULARY = {"loss": vocabulary_cross_entropy}
SEQUENCE = {"sequence_parallel": True, **VOCABULARY}
ROUTED = {"loss": balanced_next_token_loss}
MIXED = {"precision": "bf16-mixed", "zero_stage": 1, "clip_norm": 1.0}


def small_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Its gradients don't overflow in fp16."""
    return next_token_loss(outputs, targets) * 1e-3


# mesh, options of the model, options of the trainer
Setup = tuple[str, Mapping[str, Any], Mapping[str, Any]]
SETUPS: dict[str, list[Setup]] = {
    "data, gloo": [
        ("dp 2", {"dropout": 0.1}, {"overlap": False, "recompute": "full"}),
        ("dp 2", {}, {"accumulate": 2, "clip_norm": 1.0}),
        ("dp 2", {}, {"zero_stage": 1, "clip_norm": 1.0}),
        ("dp 2", {}, {"zero_stage": 2, "bucket_bytes": 0}),
        ("dp 2", {}, {"zero_stage": 3, "recompute": "full", "accumulate": 2}),
    ],
    "precision, nccl": [
        ("dp 2", {}, {"precision": "bf16", "overlap": False}),
        ("dp 2", {}, {"precision": "bf16-mixed", "gradient_dtype": torch.float32, "zero_stage": 1}),
        ("dp 2", {}, {"precision": "bf16-mixed", "zero_stage": 3, "clip_norm": 1.0}),
        ("dp 2", {}, {"precision": "fp16-mixed", "loss": small_loss}),
    ],
    "tensor, gloo": [
        ("tp 2", {}, {"overlap": False, **VOCABULARY}),
        ("tp 2", {}, {"sequence_parallel": True, "recompute": "selective"}),
        ("tp 2", {"tied": False, "attention": "unfused"}, {**SEQUENCE, "regather": True}),
    ],
    "pipeline, nccl": [
        ("pp 2", {}, {"schedule": "gpipe", "microbatches": 2}),
        ("pp 2", {}, {"schedule": "1f1b", "microbatches": 3, "clip_norm": 1.0}),
        ("pp 2", {}, {"schedule": "zb-h1", "microbatches": 3, "recompute": "full"}),
        ("pp 2", {"tied": False}, {"schedule": "zb-h2", "microbatches": 3}),
        ("pp 2", {"layers": 3}, {"schedule": "interleaved", "chunks": 2, "microbatches": 2}),
    ],
    "context, gloo": [
        ("cp 2", {}, {"context": "zigzag"}),
        ("cp 2", {}, {"context": "contiguous", "recompute": "selective"}),
        ("cp 2", {}, {"context": "ulysses", "zero_stage": 1}),
    ],
    "experts, nccl": [
        ("ep 2", EXPERTS | {"capacity": 1.5}, ROUTED),
        ("ep 2", EXPERTS, {**ROUTED, "zero_stage": 2, "clip_norm": 1.0}),
    ],
    "together, gloo": [("pp 2, dp 2, tp 2", {}, {**SEQUENCE, "microbatches": 2, **MIXED})],
    "together, nccl": [("pp 2, ep 2, tp 2", EXPERTS, {**ROUTED, "microbatches": 2, **MIXED})],
    "llama, nccl": [("pp 2, cp 2", {}, {"microbatches": 2}), ("tp 2, dp 2", {}, VOCABULARY)],
}


def llama(options: Mapping[str, Any]) -> nn.Module:
    return Llama(LlamaConfig(**SMALL, kv_heads=2, hidden=32))


def gpt(options: Mapping[str, Any]) -> nn.Module:
    return GPT(GPTConfig(**SMALL | options))


def trainer_of(
    mesh: str, model: nn.Module, loss: Any = next_token_loss, **options: Any
) -> p101.HybridTrainer:
    return on_mesh(mesh)(model, loss, torch.optim.AdamW, **options)


def batch(samples: int = 6) -> tuple[Tensor, Tensor]:
    tokens = torch.ones(samples, SMALL["context"], dtype=torch.int64)
    return tokens, tokens


def train(setups: list[Setup], build: Any) -> list[tuple[list[float], Any]]:
    """Losses of two steps of each, and who held what."""
    found = []
    for number, (mesh, of_model, options) in enumerate(setups):
        with p101.span(f"setup {number}"):
            trainer = trainer_of(mesh, build(of_model), **options)
            share = trainer.share(batch())
            losses = [trainer.step(*share) for _ in range(2)]
            found.append((losses, trainer.describe()))
    return found


def communication(run: p101.Run) -> Counter[tuple]:
    events = (event for event in run.trace.events if event.kind != "span")
    return Counter((e.rank, e.kind, e.peer, e.nbytes, e.shape, e.dtype, e.group) for e in events)


def spans(run: p101.Run) -> Counter[tuple]:
    return Counter((e.rank, e.name) for e in run.trace.events if e.kind == "span")


@pytest.mark.parametrize("name", SETUPS)
def test_training_without_numbers_sends_what_training_with_numbers_sends(name):
    what, rules = name.split(", ")
    ranks = max(world_size(mesh) for mesh, *_ in SETUPS[name])
    program = partial(train, SETUPS[name], llama if what == "llama" else gpt)
    launch = partial(p101.launch, program, world_size=ranks, backend="sim", rules=rules)
    there, here = launch(), launch(device="H100")
    assert here.trace.bytes_sent == there.trace.bytes_sent
    assert here.trace.messages_sent == there.trace.messages_sent
    assert communication(here) == communication(there)
    assert not spans(there) - spans(here)
    for setup, of_meta, of_numbers in zip(SETUPS[name], here.results[0], there.results[0]):
        assert of_meta[0] == [0.0, 0.0] != of_numbers[0], setup
        assert of_meta[1].bytes == of_numbers[1].bytes, setup


def test_nothing_is_compared_with_one_process_and_nobody_is_told(capfd):
    def step():
        return trainer_of("dp 2", gpt({"layers": 1}), verify=True).step(*batch())

    there, here = (
        p101.launch(step, world_size=2, backend="sim", device=device) for device in (None, "H100")
    )
    assert communication(here) == communication(there)
    assert here.results == [0.0, 0.0]
    assert not capfd.readouterr().out


def test_activations_are_those_of_a_run_with_numbers():
    def peaks():
        trainer = trainer_of("dp 2", gpt({"attention": "unfused"}), recompute="selective")
        share = batch()
        with p101.count_activations(trainer) as activations:
            trainer.step(*share)
        return activations.peak, [(kept.nbytes, kept.module) for kept in activations.kept]

    there, here = (
        p101.launch(peaks, world_size=2, backend="sim", device=device) for device in (None, "H100")
    )
    assert here.results == there.results


def test_what_needs_numbers_is_refused_in_words():
    on_the_cpu = gpt({})

    def program():
        trainer = trainer_of("dp 1", gpt({}))
        trainer.step(*batch())
        calls = {
            "fit": partial(trainer.fit, [batch()]),
            "evaluate": partial(trainer.evaluate, [batch()]),
            "verify": partial(trainer.verify, *batch()),
            "state_dict": trainer.state_dict,
            "gradients": trainer.gradients,
            "save": partial(trainer.save, "a.pt"),
            "resume": partial(trainer.resume, "a.pt"),
        }
        expected = {
            f"{name}() needs numbers, but the model is on the meta device": call
            for name, call in calls.items()
        } | {
            'expected None for a model on the meta device, or precision="bf16"': partial(
                trainer_of, "dp 1", gpt({}), autocast=torch.bfloat16
            ),
            "is on cpu: expected a model on the meta": partial(trainer_of, "dp 1", on_the_cpu),
        }
        return {words: raised(call) for words, call in expected.items()}

    run = p101.launch(program, world_size=1, backend="sim", device="H100")
    assert {words: said for words, said in run.results[0].items() if words not in said} == {}


def test_optimizers_and_clipping_use_one_kernel_for_many_tensors_as_on_a_gpu():
    def program(foreach):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
        model(torch.ones(2, 8)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
        optimizer.step()

    default, many, single = (
        p101.launch(program, foreach, world_size=1, backend="sim", device="H100").gpus[0].busy
        for foreach in (None, True, False)
    )
    assert default == many < single
