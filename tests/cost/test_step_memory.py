"""Predicted peaks of memory against those that are counted on virtual GPUs."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import parallel101 as p101
from parallel101.cost import step_memory
from parallel101.cost.model_shape import ModelShape
from parallel101.cost.parallel_layout import ParallelLayout as Layout
from parallel101.laboratory.planner.known_models import LLAMA as AS_LLAMA
from parallel101.laboratory.planner.trainer_call import mesh_of, model_of, trainer_options
from parallel101.models.gpt import balanced_next_token_loss, next_token_loss

GPT_SHAPE = ModelShape(width=256, layers=4, heads=8, vocabulary=512, time=256)
UNFUSED = replace(GPT_SHAPE, attention="unfused", time=512)
EXPERTS = replace(GPT_SHAPE, experts=4)
LLAMA = ModelShape(256, 4, 8, 2048, 256, 4, 704, **AS_LLAMA)


SHAPES = {"GPT": GPT_SHAPE, "unfused": UNFUSED, "experts": EXPERTS, "Llama": LLAMA}
SHAPES["dropout"] = replace(GPT_SHAPE, dropout=True)


def named(case):
    """The id of a test: the shape, and what of the layout is not the default."""
    (shape, layout), usual = case, vars(Layout())
    name = next(name for name, of in SHAPES.items() if of == shape)
    return "-".join([name, *(f"{k}={v}" for k, v in vars(layout).items() if v != usual[k])])


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1),
}


def trainer_of(shape, layout):
    sizes = mesh_of(layout)
    loss = p101.vocabulary_cross_entropy if layout.tp > 1 else next_token_loss
    return p101.HybridTrainer(
        model_of(shape),
        balanced_next_token_loss if shape.experts else loss,
        OPTIMIZERS[layout.optimizer],
        mesh=init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)),
        verify=False,
        **trainer_options(shape, layout),
    )


def tokens(shape, layout):
    samples = layout.microbatch * layout.microbatches
    return torch.zeros(samples, shape.time, dtype=torch.long)


def train(shape, layout):
    """Two steps: the first one makes the optimizer's state."""
    trainer, batch = trainer_of(shape, layout), tokens(shape, layout)
    trainer.step(batch, batch)
    trainer.step(batch, batch)


ONE_STAGE = [
    (GPT_SHAPE, Layout(microbatch=2)),
    (GPT_SHAPE, Layout(microbatch=16)),
    (GPT_SHAPE, Layout(microbatch=2, microbatches=3)),
    (GPT_SHAPE, Layout(microbatch=8, precision="fp32")),
    (GPT_SHAPE, Layout(microbatch=8, precision="bf16")),
    (GPT_SHAPE, Layout(microbatch=2, microbatches=2, gradient_dtype="fp32")),
    (GPT_SHAPE, Layout(microbatch=16, recompute="full")),
    (GPT_SHAPE, Layout(microbatch=2, optimizer="momentum")),
    (GPT_SHAPE, Layout(dp=2, zero_stage=1, optimizer="sgd")),
    (GPT_SHAPE, Layout(dp=2, microbatch=8, zero_stage=3, optimizer="momentum")),
    (LLAMA, Layout(microbatch=2, precision="fp32", optimizer="sgd")),
    (SHAPES["dropout"], Layout(microbatch=16)),
    (UNFUSED, Layout(microbatch=4)),
    (UNFUSED, Layout(microbatch=4, recompute="selective")),
    (GPT_SHAPE, Layout(dp=2, microbatch=4, microbatches=2)),
    (GPT_SHAPE, Layout(dp=2, microbatch=4, overlap=False)),
    (GPT_SHAPE, Layout(dp=4, microbatch=4, microbatches=2, zero_stage=1)),
    (GPT_SHAPE, Layout(dp=4, microbatch=16, zero_stage=2)),
    (GPT_SHAPE, Layout(dp=4, zero_stage=3)),
    (GPT_SHAPE, Layout(dp=2, microbatch=16, zero_stage=3, recompute="full")),
    (GPT_SHAPE, Layout(tp=2, microbatch=4)),
    (GPT_SHAPE, Layout(tp=2, microbatch=4, sequence_parallel=True)),
    (GPT_SHAPE, Layout(cp=2, microbatch=8)),
    (GPT_SHAPE, Layout(cp=2, microbatch=8, context="ulysses")),
    (EXPERTS, Layout(microbatch=8, ep=2, dp=2, zero_stage=1)),
    (EXPERTS, Layout(microbatch=8, tp=2)),
    (LLAMA, Layout(microbatch=8)),
    (LLAMA, Layout(microbatch=8, tp=4, sequence_parallel=True)),
    (LLAMA, Layout(microbatch=8, tp=2, recompute="full")),
    (LLAMA, Layout(microbatch=8, cp=2)),
]
PIPELINES = [
    (GPT_SHAPE, Layout(pp=4, microbatch=4, microbatches=8)),
    (GPT_SHAPE, Layout(pp=2, microbatch=4, microbatches=4, chunks=2)),
    (GPT_SHAPE, Layout(pp=2, microbatch=4, microbatches=4, schedule="gpipe")),
    (GPT_SHAPE, Layout(pp=2, microbatch=4, microbatches=4, schedule="zb-h1")),
    (GPT_SHAPE, Layout(pp=2, microbatch=8, microbatches=2, recompute="full")),
    (GPT_SHAPE, Layout(pp=2, dp=2, microbatch=8, microbatches=4, zero_stage=3)),
    (LLAMA, Layout(pp=2, dp=2, tp=2, microbatch=2, microbatches=4, zero_stage=1)),
    (LLAMA, Layout(pp=2, microbatch=4, microbatches=4)),
]


@pytest.mark.parametrize("case", ONE_STAGE + PIPELINES, ids=named)
def test_peak_of_virtual_gpus(case):
    shape, layout = case
    size = layout.gpus
    run = p101.launch(
        train, shape, layout, world_size=size, backend="sim", device="H100", timeout=120
    )
    predicted, each = step_memory(shape, layout), layout.gpus // layout.pp
    assert len(predicted) == layout.pp
    for position, stage in enumerate(predicted):  # pp is the outermost axis
        peak = max(gpu.peak_bytes for gpu in run.gpus[position * each : (position + 1) * each])
        assert stage.total == pytest.approx(peak, rel=0.04), (position, stage)


def held(shape, layout):
    trainer, batch = trainer_of(shape, layout), tokens(shape, layout)
    trainer.step(batch, batch)
    with p101.count_activations(trainer):
        trainer.step(batch, batch)
    return trainer.describe().bytes


def test_parts_are_those_that_trainers_report():
    """Of GPT, as in lesson 09."""
    layout = Layout(dp=2, pp=2, microbatch=2, microbatches=4, zero_stage=1)
    run = p101.launch(held, GPT_SHAPE, layout, world_size=4, backend="sim", timeout=120)
    for position, stage in enumerate(step_memory(GPT_SHAPE, layout)):
        of = {kind: by_rank[2 * position] for kind, by_rank in run.results[0].items()}
        optimizer = of["optimizer state"] + of["master weights"]
        assert stage.weights == pytest.approx(of["weights"], rel=0.01)
        assert stage.optimizer == pytest.approx(optimizer, rel=0.01)
        # its own block of them and, on stage 1, all that are sent
        assert stage.gradients == pytest.approx(of["gradients"], rel=0.01)
        assert stage.activations == pytest.approx(of["activations (peak)"], rel=0.05)


def test_the_most_at_once_and_when():
    few, many = (step_memory(GPT_SHAPE, Layout(microbatch=b))[0] for b in (1, 64))
    assert (few.moment, many.moment) == ("optimizer", "loss")
    assert few.weights == many.weights == 2 * GPT_SHAPE.parameters
    assert many.total > few.total
