"""Every layout is one process, to ten digits: losses, gradients and weights of each step, buffers,
and an evaluation.

One table of cases. Each launch trains those of one subject on as many ranks, one after the other,
and a case that fails is named. Shares and microbatches are uneven, and batches of text change their
shapes from step to step.
"""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import parallel101 as p101
from parallel101.mesh import split_sizes
from parallel101.trainers import data_parallel
from tests.trainers.cases import (
    CUT_HEAD,
    DATA,
    OPTIMIZERS,
    STEPS,
    TASKS,
    TRAINERS,
    WITHOUT_HEAD,
    case,
    differences,
    mesh_of,
    on_ranks,
    one_process,
    text,
    trained,
    unlike_one_process,
    world_size,
)
from tests.trainers.models import TIME, in_place

BY_SHAPE = "adamw by shape"
AGAIN = {**TIME, "regather": True}
INTERLEAVED = {"schedule": "interleaved", "chunks": 2, "microbatches": 4}
ZB_H1 = {"schedule": "zb-h1", "microbatches": 3}
FIRST = "0F0 0SEND_F0 2RECV_F0 2F0 2SEND_F0 0F1 0SEND_F1 2RECV_F1 2F1 2SEND_F1 "
FIRST += "2RECV_B0 2B0 2SEND_B0 0RECV_B0 0B0 2RECV_B1 2B1 2SEND_B1 0RECV_B1 0B1"
SECOND = "1RECV_F0 1F0 1SEND_F0 3RECV_F0 3F0 1RECV_F1 1F1 1SEND_F1 3RECV_F1 3F1 "
SECOND += "3B0 3SEND_B0 1RECV_B0 1B0 1SEND_B0 3B1 3SEND_B1 1RECV_B1 1B1 1SEND_B1"
WITH_MESSAGES = p101.Schedule([FIRST.split(), SECOND.split()])
V = p101.Schedule.from_csv("0F0,3F0,3B0,0F1,3F1,0B0,3B1,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1")
TWO_ON_RANK_0 = p101.Schedule.from_csv("0F0,1F0,0F1,1F1,1B0,0B0,1B1,0B1\n2F0,2B0,2F1,2B1")
RING = {"overlap": False, "algorithm": "ring"}
SETTINGS = ("sgd", None, 2), ("sgd", 0.05, 1), ("adamw", None, 1), ("adamw", 0.05, 2)


def along_dp(task, n):
    """Each way of dp with another optimizer, clipped or not, accumulated or not."""
    for k, way in enumerate(DATA):
        optimizer, clip_norm, accumulate = SETTINGS[(k + n) % 4]
        yield case(f"dp {n}", task, optimizer, clip_norm, accumulate=accumulate, **DATA[way])


def alternating(tasks, n, **options):
    """Half of the ways of dp with each task."""
    for (i, task), (k, way) in itertools.product(enumerate(tasks.split(", ")), enumerate(DATA)):
        if (i + k + n) % 2:
            yield case(f"dp {n}", task, ("sgd", "adamw")[k // 2 % 2], **DATA[way], **options)


def scheduled(task, n):
    """Microbatches of 11 samples are uneven; interleaved takes a multiple of the stages."""
    for name in ("gpipe", "1f1b", "zb-h1", "zb-h2"):
        yield case(f"pp {n}", task, schedule=name, microbatches=4 if n < 4 else 7)
    chunks = 2 if n < 4 else 1
    options = {"schedule": "interleaved", "chunks": chunks, "microbatches": n * chunks}
    yield case(f"pp {n}", task, **options)


CASES = {
    "data": [
        *along_dp("sometimes", 2),
        *along_dp("tied gpt", 3),
        *along_dp("sometimes", 4),
        *(case("dp 3", "mlp", zero_stage=stage, **RING) for stage in range(4)),
        *(
            case("dp 3", "sometimes", accumulate=2, bucket_bytes=size, zero_stage=stage)
            for size, stage in ((0, 0), (1, 2), (10**9, 0), (None, 2))
        ),
    ],
    "unusual models": [
        *alternating("tied, unordered, out of order, skipped", 2),
        *alternating("tied, unordered, out of order, skipped", 3),
    ],
    "norms": [
        *alternating("norms", 2),
        *alternating("norms", 3),
        case("tp 2", "norms", sync_batch_norm=False),  # every rank has the whole batch
        case("dp 2, tp 2", "norms"),
        case("tp 2, dp 2", "norms", "sgd", zero_stage=2),
        case("dp 2, pp 2", "norms in order", microbatches=1),
    ],
    "tensor": [
        case("tp 2", "pairs"),
        case("tp 2", "gathered", "sgd", None, accumulate=2),
        case("tp 2", "chain", "sgd"),
        case("tp 2", "embedding", accumulate=2),
        case("tp 2", "fused", "sgd", accumulate=2),
        case("tp 2", "whole head", overlap=False),
        case("tp 2", "ignored targets"),
        case("tp 2", "checkpointed", **TIME),
        case("tp 2", "tied llama", "sgd"),
        case("tp 2", "llama", BY_SHAPE, accumulate=2, recompute="full", **TIME),
        case("tp 2", "llama, whole head", **AGAIN),
        case("tp 3", "mlp"),
        case("tp 3", "tied gpt", plan=WITHOUT_HEAD, loss_fn=TASKS["whole head"].loss_fn),
        case("tp 3", "fused", **TIME),
        case("tp 3", "embedding", "sgd"),
        case("tp 3", "untied gpt", **RING, **TIME),
        case("tp 4, dp 1", "tied gpt", BY_SHAPE),
        case("tp 4", "chain", accumulate=2),
        case("tp 4", "whole head", **TIME),
        case("tp 4", "llama", recompute="selective", **AGAIN),
        case("dp 2, tp 2", "pairs", overlap=False),
        case("dp 2, tp 2", "tied gpt", bucket_bytes=1000, **TIME),
        case("dp 2, tp 2", "pairs", zero_stage=2),
        case("tp 2, dp 2", "untied gpt", BY_SHAPE, accumulate=2, zero_stage=3, **TIME),
    ],
    "pipeline": [
        *scheduled("deep", 1),
        *scheduled("tied gpt", 2),
        case("pp 2", "0 frozen", "sgd", None, microbatches=4),
        case("pp 2", "3 frozen", "sgd", None, **ZB_H1),
        case("pp 2", "deep", schedule=WITH_MESSAGES, layers_per_stage=[1, 2, 10, 2]),
        case("pp 2", "tied gpt", schedule=V, layers_per_stage=[1, 1, 1, 2]),
        # stages that change in place what they receive, also from a stage on the same rank, whose
        # backward needs its output as it was
        case("pp 2", "activated", layers_per_stage=[2, 7], change=in_place),
        case("pp 2", "activated", **ZB_H1, layers_per_stage=[2, 7], change=in_place),
        case(
            *("pp 2", "activated"),
            schedule=TWO_ON_RANK_0,
            layers_per_stage=[2, 2, 5],
            change=in_place,
        ),
        *scheduled("deep", 3),
        case("pp 3", "tied llama", "sgd", **ZB_H1),
        *scheduled("deep", 4),
        *(
            case("pp 3, dp 2", task, microbatches=2, zero_stage=stage, layers_per_stage=layers)
            for task, layers, stage in (  # the first, the second, the last has no trained weights
                ("0 frozen", [3, 3, 3], 3),
                ("3 frozen", [3, 2, 4], 0),
                ("8 frozen", [3, 5, 1], 3),
            )
        ),
    ],
    "meshes": [
        case("dp 1, tp 1, pp 1", "tied gpt", microbatches=3),
        case("dp 2, pp 2", "llama", clip_norm=None, microbatches=5),
        case("pp 2, dp 2", "tied gpt", **ZB_H1, zero_stage=3),
        case("pp 2, dp 2", "llama", schedule=V, zero_stage=2, recompute="selective"),
        case("pp 2, tp 2", "tied llama", BY_SHAPE, microbatches=3, schedule="gpipe", **TIME),
        case("dp 2, tp 2, pp 2", "tied gpt", **ZB_H1, zero_stage=2),
        case("pp 2, tp 2, dp 2", "tied gpt", BY_SHAPE, **INTERLEAVED, zero_stage=1),
        case("tp 2, dp 2, pp 2", "llama", microbatches=2, zero_stage=3, **TIME),
        case(
            *("dp 1, tp 2, pp 4", "tied gpt"),
            microbatches=4,
            plan=WITHOUT_HEAD,
            loss_fn=TASKS["whole head"].loss_fn,
            **TIME,
        ),
    ],
    "context": [
        case("cp 1, dp 1", "tied gpt"),
        case("cp 2", "llama"),
        case("cp 2", "tied llama", context="ulysses", zero_stage=2, accumulate=2),
        case("cp 3", "llama", context="contiguous", recompute="full"),
        case("cp 3", "tied gpt", accumulate=2),
        case("cp 4", "tied gpt", BY_SHAPE),
        case("dp 2, cp 2", "tied gpt", zero_stage=2, accumulate=2),
        case("cp 2, dp 2", "tied gpt", BY_SHAPE, zero_stage=3),
        case("tp 2, cp 2", "llama", zero_stage=3, context="contiguous", **TIME),
        case("tp 2, cp 2", "llama", context="ulysses", **AGAIN),
        case("cp 2, pp 2", "llama", **ZB_H1, recompute="selective"),
        case("cp 2, pp 2", "tied llama", **INTERLEAVED, context="ulysses", recompute="full"),
        case("dp 2, cp 2, pp 2", "tied llama", **ZB_H1, zero_stage=2),
        case("cp 2, tp 2, pp 2", "llama", microbatches=2, zero_stage=3, recompute="full", **AGAIN),
        case("dp 2, cp 2, tp 2, pp 2", "tied gpt", **ZB_H1, zero_stage=1, **TIME),
    ],
    "experts": [
        case("ep 1", "five"),
        case("ep 2", "five", accumulate=2),
        case("ep 2", "one sample", accumulate=2, zero_stage=3),
        case("ep 2", "dropping", recompute="full"),
        case("ep 2", "stacked", bucket_bytes=64, verify=True),
        case("ep 2", "loop", bucket_bytes=64),
        case("ep 2", "nested", accumulate=8),  # more microbatches than samples on a rank
        case("ep 2", "stacked", zero_stage=2, accumulate=2),
        case("pp 2", "dropping", microbatches=3, zero_stage=1),  # the balancing loss travels
        case("ep 3", "one sample"),
        case("ep 4", "dropping", BY_SHAPE, accumulate=3),
        case("dp 2, ep 2", "dropping", zero_stage=2, accumulate=2),
        case("dp 2, ep 2", "five", zero_stage=3),
        case("pp 2, ep 2", "five", microbatches=2, zero_stage=3, schedule="zb-h1"),
        case("ep 2, tp 2", "dropping", zero_stage=1),
        case("ep 2, cp 2", "unbalanced", zero_stage=1),
        case("dp 2, ep 2, tp 2", "dropping", zero_stage=3),
        case("dp 2, cp 2, ep 2", "unbalanced", zero_stage=3),
        case("ep 2, pp 2, dp 2", "dropping", **{**ZB_H1, "microbatches": 2}, zero_stage=2),
    ],
    "samples": [  # fewer than ranks; means over the targets that count
        case(mesh, task, "sgd", clip_norm, **options)
        for (mesh, options), (task, clip_norm) in itertools.product(
            [
                *(("dp 4", DATA[way]) for way in ("overlapped", "ZeRO-2", "ZeRO-3")),
                ("dp 4", {"accumulate": 2}),
                ("dp 2, tp 2", {}),
                ("dp 2, pp 2", {"microbatches": 3, "zero_stage": 1}),
                ("pp 2, dp 2", {"microbatches": 2, "zero_stage": 3}),
                ("pp 4", {"schedule": "zb-h1", "microbatches": 4}),
            ],
            [("few", None), ("weighted", 0.05)],
        )
    ],
}


@pytest.mark.parametrize(
    ("subject", "n"),
    [(subject, n) for subject in CASES for n in {world_size(c.mesh): 0 for c in CASES[subject]}],
)
def test_equal_to_one_process(subject, n):
    """By NCCL's rules; gloo's are those of the test on real ranks."""
    cases = [c for c in CASES[subject] if world_size(c.mesh) == n]
    steps = STEPS if subject in ("data", "norms", "samples", "unusual models") else 2
    where = {"backend": "sim", "rules": "nccl", "timeout": 150}
    run = p101.launch(unlike_one_process, cases, steps=steps, world_size=n, **where)
    assert run.results == [[]] * n


ON_REAL_RANKS = [
    *list(along_dp("sometimes", 2))[2:],
    case("dp 2", "norms", zero_stage=1),
    case("dp 2", "weighted", zero_stage=3),
    case("tp 2", "gathered", "sgd"),
    case("tp 2", "untied gpt", accumulate=2, **TIME),
    case("pp 2", "deep", **INTERLEAVED),
    case("pp 2", "tied gpt", "sgd", **ZB_H1),
    case("cp 2", "llama", context="ulysses", zero_stage=3),
    case("cp 2", "tied gpt"),
    case("ep 2", "five", accumulate=2),
    case("ep 2", "dropping"),
    case("dp 2, pp 2", "tied gpt", **ZB_H1, zero_stage=3),
    case("pp 2, tp 2", "tied gpt", BY_SHAPE, microbatches=4, **TIME),
    case("tp 2, dp 2", "tied gpt", "sgd", accumulate=2, zero_stage=2),
]


@pytest.mark.parametrize("n", [2, 4])
def test_on_real_ranks(n, backend):
    cases = [c for c in ON_REAL_RANKS if world_size(c.mesh) == n]
    program = partial(unlike_one_process, device="cuda" if backend == "nccl" else "cpu", steps=2)
    # on one shared GPU, ranks take turns: 60 s weren't enough
    run = p101.launch(program, cases, world_size=n, backend=backend, timeout=170)
    assert run.results == [[]] * n


def test_without_a_process_group():
    assert unlike_one_process([]) == []
    for build in TRAINERS.values():
        task = TASKS["sometimes"]
        found = trained(build(task.build(), task.loss_fn, OPTIMIZERS["sgd"], accumulate=2), task)
        assert differences(found, one_process(task, "sgd", None)) == []


# ── shares, groups and ranks of any kind ──


SOME_RANKS = [  # the last two on a mesh of these axes
    (p101.DataParallelTrainer, {}),
    (p101.PipelineTrainer, {"microbatches": 4}),
    (p101.TensorParallelTrainer, {"plan": WITHOUT_HEAD}),
    (("pp", "tp"), {"microbatches": 3, "plan": WITHOUT_HEAD}),
    (("dp", "pp"), {"microbatches": 3, "zero_stage": 3}),
]


def on_some_ranks():
    """Rank 4 of the world does not train."""
    rank, task, wrong = dist.get_rank(), TASKS["tied gpt"], []
    for kind, options in SOME_RANKS:
        arguments = task.build(), task.loss_fn, OPTIMIZERS["adamw"]
        options = {"clip_norm": 0.05, "verify": False, **options}
        if isinstance(kind, tuple):
            mesh = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=kind)
            build = partial(p101.HybridTrainer, mesh=mesh)
        else:  # two of them, each on its own
            build = partial(kind, group=[3, 1] if rank in (1, 3) else [0, 2])
            with pytest.raises(ValueError, match="not in group"):
                kind(*arguments, **options, group=[(rank + 1) % 4])
        if rank < 4:
            found = trained(build(*arguments, **options), task, 2)
            wrong += differences(found, one_process(task, "adamw", 0.05, 2))
    return wrong


def test_some_ranks_of_the_world_in_another_order():
    assert on_ranks(5, on_some_ranks) == [[]] * 5


# ── gradients that are sent from where they are, optimizers, precisions ──


def some_in_place():
    """Gradients of at least so many bytes are sent from the memory that they are in."""
    wrong = []
    for data_parallel.LARGE in (0, 300):
        for size, m in itertools.product((1, 10**9), (1, 2)):
            wrong += unlike_one_process(
                [case("dp 3", "sometimes", bucket_bytes=size, accumulate=m)]
            )
        wrong += unlike_one_process([case("dp 3", "tied gpt")])
    return wrong


def test_large_gradients_are_summed_where_they_are():
    assert on_ranks(3, some_in_place) == [[]] * 3


def test_each_rank_adds_up_as_much():
    assert data_parallel.even_shares([4, 4, 4], 3) == [[4, 0, 0], [0, 4, 0], [0, 0, 4]]
    for ranks in (1, 2, 3, 5):
        shares = data_parallel.even_shares([7, 1, 0, 12], ranks)
        assert [sum(of_tensor) for of_tensor in shares] == [7, 1, 0, 12]
        assert [sum(of_rank) for of_rank in zip(*shares)] == split_sizes(20, ranks)


OWN_STATE = {
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "state from the start": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}


def with_other_optimizers():
    OPTIMIZERS.update(OWN_STATE)
    cases = [
        case("dp 3", "mlp", way, zero_stage=1 + i % 3)
        for i, way in enumerate((*OWN_STATE, BY_SHAPE))
    ]
    return unlike_one_process(cases)


def test_optimizers_with_groups_and_state_of_their_own():
    assert on_ranks(3, with_other_optimizers) == [[]] * 3


IN_OTHER_DTYPES = {
    "dp": [{"zero_stage": stage} for stage in range(4)],
    "tp": [{**TIME, **CUT_HEAD}, {"plan": WITHOUT_HEAD}],
}


def four_steps(axis, autocast, variants):
    batches, found, mesh = [text(0), text(1)], [], mesh_of(f"{axis} {dist.get_world_size()}")
    for options in variants:
        task, options = TASKS["untied gpt"], {"autocast": autocast, "clip_norm": 1.0, **options}
        trainer = p101.HybridTrainer(
            task.build().float(),
            optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3),
            mesh=mesh,
            **{"loss_fn": task.loss_fn, "verify": False, **options},
        )
        losses = trainer.fit([batches[s % 2] for s in range(4)], progress=False).losses
        found.append((losses, trainer.evaluate(batches), trainer.state_dict()))
    return found


@pytest.mark.parametrize(("autocast", "close"), [(None, 1e-4), (torch.bfloat16, 0.02)])
def test_float32_and_bfloat16_autocast_are_one_process_within_rounding(autocast, close):
    def of(axis, variants, n):
        return p101.launch(four_steps, axis, autocast, variants, world_size=n, backend="sim")

    ((losses, held_out, weights),) = of("dp", [{}], 1).results[0]
    found = [of(axis, variants, 2).results[0] for axis, variants in IN_OTHER_DTYPES.items()]
    for other_losses, other_held_out, other_weights in sum(found, []):
        torch.testing.assert_close(other_losses, losses, rtol=close, atol=0)
        assert other_held_out == pytest.approx(held_out, rel=close)
        torch.testing.assert_close(other_weights, weights, rtol=1e-3, atol=max(2 * close, 2e-4))
        assert {weight.dtype for weight in other_weights.values()} == {torch.float32}
