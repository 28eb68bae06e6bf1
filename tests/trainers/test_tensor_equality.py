"""Tensor parallel on n ranks is one process, to ten digits: losses, gradients and weights after
five steps.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import parallel101 as p101
from parallel101.models.gpt import next_token_loss
from parallel101.models.mlp import MLP
from parallel101.models.plans import GPT_PLAN
from tests.trainers.cases import (
    EVERY_SETTING,
    OPTIMIZERS,
    STEPS,
    Setting,
    Task,
    differences,
    one_process,
    randn,
    setting,
    trained,
)
from tests.trainers.tensor_cases import FUSED_PLAN, WITHOUT_HEAD, fused, gpt, seeded


def text(step):
    tokens = torch.randint(13, (5, 7), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def rows(step):
    return randn(step, 5, 4), randn(100 + step, 5, 3)


def features(step):
    return randn(step, 5, 6, 8), randn(100 + step, 5, 6, 8)


GPT = Task(lambda: seeded(gpt()), next_token_loss, text)
UNTIED = Task(lambda: seeded(gpt(tied=False)), next_token_loss, text)
WIDE = Task(lambda: seeded(MLP([4, 7, 6, 5, 3])), F.mse_loss, rows)
FUSED = Task(lambda: seeded(fused()), F.mse_loss, features)
CUT_HEAD = {"loss_fn": p101.vocabulary_cross_entropy}
TRAINED = {  # what one process does, and how the ranks do it
    "mlp": (WIDE, {}),
    "mlp, last layer alone": (Task(lambda: seeded(MLP([4, 7, 6, 3])), F.mse_loss, rows), {}),
    "lecture": (WIDE, {"plan": {"layers.*": "column_gather"}}),
    "gpt": (GPT, CUT_HEAD),
    "gpt, whole head": (GPT, {"plan": WITHOUT_HEAD}),
    "untied gpt": (UNTIED, {**CUT_HEAD, "plan": GPT_PLAN}),
    "fused": (FUSED, {"plan": FUSED_PLAN}),
    "gpt, time cut": (GPT, {**CUT_HEAD, "sequence_parallel": True}),
    "gpt, whole head, time cut": (UNTIED, {"plan": WITHOUT_HEAD, "sequence_parallel": True}),
    "fused, time cut": (FUSED, {"plan": FUSED_PLAN, "sequence_parallel": True}),
}


def unlike_one_process(cases, trainer_class=None, **more):
    """A case: name, setting."""
    wrong = []
    for name, (optimizer, clip_norm, accumulate) in cases:
        task, options = TRAINED[name]
        options = {"loss_fn": task.loss_fn, **options, **more}
        trainer = (trainer_class or p101.TensorParallelTrainer)(
            task.build(),
            optimizer=OPTIMIZERS[optimizer],
            clip_norm=clip_norm,
            accumulate=accumulate,
            **options,
        )
        if different := differences(
            trained(trainer, task), one_process(task, optimizer, clip_norm)
        ):
            wrong.append((name, optimizer, clip_norm, accumulate, different))
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equal_to_one_process(world_size):
    """Each with one setting, and with another on another number of ranks."""
    cases = [(name, setting(i, world_size)) for i, name in enumerate(TRAINED)]
    assert (
        p101.launch(unlike_one_process, cases, world_size=world_size, backend="sim").results
        == [[]] * world_size
    )


def test_with_every_setting():
    cases = [("gpt, time cut" if i % 3 else "mlp", one) for i, one in enumerate(EVERY_SETTING)]
    assert p101.launch(unlike_one_process, cases, world_size=2, backend="sim").results == [[]] * 2


def test_on_gloo():
    cases = [
        (name, setting(i))
        for i, name in enumerate(("lecture", "gpt", "gpt, whole head, time cut", "fused, time cut"))
    ]
    assert p101.launch(unlike_one_process, cases, world_size=2, backend="gloo").results == [[]] * 2


def ignoring(loss):
    """Targets that are 4 do not count; 4 is among those of `text`."""
    return partial(loss, ignore_index=4)


def joined_loss(logits, targets, ignore_index):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=ignore_index)


def with_options_of_the_loss():
    task = GPT._replace(loss_fn=ignoring(joined_loss))
    trainer = p101.TensorParallelTrainer(
        task.build(), ignoring(p101.vocabulary_cross_entropy), OPTIMIZERS["sgd"]
    )
    return differences(trained(trainer, task), one_process(task, "sgd", None))


def test_a_partial_of_the_vocabularys_loss_is_one_too():
    assert p101.launch(with_options_of_the_loss, world_size=2, backend="sim").results == [[]] * 2


SYNC = [
    ("gpt", {"overlap": False}),
    ("mlp", {"bucket_bytes": 1000}),
    ("gpt, time cut", {"bucket_bytes": 1000}),
    ("mlp", {"zero_stage": 1}),
    ("gpt", {"zero_stage": 1}),
    ("gpt, time cut", {"zero_stage": 2}),
    ("mlp", {"zero_stage": 3}),
    ("gpt, time cut", {"zero_stage": 3}),
]


def on_a_mesh():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    cases = [([(name, Setting("adamw", 0.05, 1))], sync) for name, sync in SYNC]
    return [
        wrong
        for case, sync in cases
        for wrong in unlike_one_process(case, p101.HybridTrainer, mesh=mesh, **sync)
    ]


def test_with_data_parallel():
    """Weight gradients that are computed while the all-reduce over tp is in flight are
    synchronised over dp, each once.
    """
    assert p101.launch(on_a_mesh, world_size=4, backend="sim").results == [[]] * 4


def on_a_mesh_with_stages(name, schedule):
    task, options = TRAINED[name]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    trainer = p101.HybridTrainer(
        task.build(),
        optimizer=OPTIMIZERS["adamw"],
        mesh=mesh,
        schedule=schedule,
        microbatches=3,
        **{"loss_fn": task.loss_fn, **options},
    )
    return differences(trained(trainer, task), one_process(task, "adamw", None))


@pytest.mark.parametrize("name", ["untied gpt", "gpt, time cut", "fused, time cut"])
def test_in_a_pipeline_that_splits_backward(name):
    """I starts the all-reduce of the input's gradient and W computes the weight gradient, each
    once a layer and microbatch.
    """
    split, whole = (
        p101.launch(on_a_mesh_with_stages, name, schedule, world_size=4, backend="sim")
        for schedule in ("zb-h1", "1f1b")
    )
    assert split.results == whole.results == [[]] * 4
    assert bytes_by_axis(split.trace)["tp"] == bytes_by_axis(whole.trace)["tp"]
    computed = [
        len([e for e in split.trace.spans("weight gradient") if e.rank == rank])
        for rank in range(4)
    ]
    assert computed == [3 * STEPS] * 4, "a W for each microbatch and step, and none in between"


# ── messages ──


def bytes_by_axis(trace):
    """Of activations and gradients, which are float64, in the steps."""
    begun = {span.rank: span.start for span in reversed(trace.spans("step"))} or dict.fromkeys(
        range(trace.world_size), 0.0
    )
    sent = {}
    for event in trace.events:
        if event.kind == "send" and "float64" in event.dtype and event.posted >= begun[event.rank]:
            sent[event.group.axis] = sent.get(event.group.axis, 0) + event.nbytes
    return sent


def one_step(name):
    task, options = TRAINED[name]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    trainer = p101.HybridTrainer(
        task.build(), optimizer=OPTIMIZERS["sgd"], mesh=mesh, **{"loss_fn": task.loss_fn, **options}
    )
    p101.barrier()
    with p101.span("step"):
        trainer.step(*trainer.share(task.batch(0)))


ACTIVATIONS, POSITIONS = 5 * 6 * 24, 5 * 6  # of the whole batch, which dp shares out
OF_A_GPT = (4 * 2 + 1 + 1) * ACTIVATIONS + (POSITIONS + 2 * 2) + 2 * POSITIONS
# norms, biases of rows, positions: summed by each of two replicas
PARTIAL = 2 * (4 * 24 + 2 * 24) + 2 * 24 + 7 * 24
ALL_REDUCED = {"mlp": 5 * (6 + 3 + 6), "gpt": OF_A_GPT, "gpt, time cut": OF_A_GPT + 2 * PARTIAL}


@pytest.mark.parametrize("name", ALL_REDUCED)
@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_bytes_along_tp_equal_theory(name, backend):
    """With sequence parallel the same bytes, and the sums of gradients that are parts."""
    trace = p101.launch(one_step, name, world_size=4, backend=backend, trace=True).trace
    assert bytes_by_axis(trace)["tp"] == 2 * 8 * ALL_REDUCED[name]
