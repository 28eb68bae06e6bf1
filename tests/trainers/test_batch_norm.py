"""BatchNorm on every trainer: the statistics of the whole batch, or a clear error.

Equal to one process in float64.
"""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import parallel101 as p101
from parallel101.mesh import group_of
from parallel101.trainers.batch_norm import batch_norm
from tests.trainers.cases import (
    OPTIMIZERS,
    TRAINERS,
    Task,
    differences,
    differing,
    one_process,
    randn,
    trained,
)
from tests.trainers.hybrid_cases import mesh_of
from tests.trainers.hybrid_cases import world_size as ranks_of

CLOSE = 1e-12

# ── the function ──

SHAPES = {"1d": (3,), "sequence": (3, 5), "2d": (3, 2, 4), "3d": (3, 2, 1, 2)}


def function_on_shares(shares):
    """For each shape, with and without weights: output, gradients and running statistics, on
    this rank.
    """
    found, rank = {}, dist.get_rank()
    for name, shape in SHAPES.items():
        for affine in (False, True):
            x = randn(1, sum(shares), *shape).split(shares)[rank].requires_grad_()
            w, b = (randn(i, 3).requires_grad_() if affine else None for i in (2, 3))
            mean, var = randn(4, 3), randn(5, 3).square()
            y = batch_norm(group_of(None), x, mean, var, w, b, training=True, momentum=0.3)
            (y * randn(6, sum(shares), *shape).split(shares)[rank]).sum().backward()
            found[name, affine] = [y.detach(), x.grad, mean, var] + (
                [w.grad, b.grad] if affine else []
            )
    return found


@pytest.mark.parametrize("shares", [[2, 3], [1, 2, 1], [4, 1, 1, 3]], ids=str)
def test_the_function_is_torchs_on_the_whole_batch(shares):
    results = p101.launch(function_on_shares, shares, world_size=len(shares), backend="sim").results
    for name, shape in SHAPES.items():
        for affine in (False, True):
            x = randn(1, sum(shares), *shape).requires_grad_()
            w, b = (randn(i, 3).requires_grad_() if affine else None for i in (2, 3))
            mean, var = randn(4, 3), randn(5, 3).square()
            y = F.batch_norm(x, mean, var, w, b, True, 0.3)
            (y * randn(6, sum(shares), *shape)).sum().backward()
            ys, xs, means, variances, *weights = zip(*(found[name, affine] for found in results))
            for of_ranks in (means, variances):
                assert all(torch.equal(of_rank, of_ranks[0]) for of_rank in of_ranks), (
                    "the same bits on all ranks"
                )
            torch.testing.assert_close(torch.cat(ys), y.detach(), rtol=0, atol=CLOSE)
            torch.testing.assert_close(torch.cat(xs), x.grad, rtol=0, atol=CLOSE)
            torch.testing.assert_close((means[0], variances[0]), (mean, var), rtol=0, atol=CLOSE)
            for parts, whole in zip(weights, (w, b)):
                torch.testing.assert_close(sum(parts), whole.grad, rtol=0, atol=CLOSE)


def in_bfloat16():
    x = (100 + randn(dist.get_rank(), 50, 3)).bfloat16()
    y = batch_norm(group_of(None), x, None, None, training=True)
    return y.dtype, y.float().std().item()


def test_it_computes_in_float32_at_least():
    for dtype, spread in p101.launch(in_bfloat16, world_size=2, backend="sim").results:
        assert dtype == torch.bfloat16
        assert spread == pytest.approx(1, abs=0.1)


# ── the trainers ──


class Net(nn.Module):
    """Norms after a convolution and after a linear layer, without biases that a norm would take
    away again.
    """

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Sequential(
            nn.Conv2d(2, 3, 2, bias=False), nn.BatchNorm2d(3, **options), nn.ReLU(), nn.Flatten()
        )
        self.rest = nn.Sequential(
            nn.Linear(12, 5, bias=False), nn.BatchNorm1d(5, **options), nn.Tanh(), nn.Linear(5, 2)
        )
        self.double()

    def forward(self, x):
        return self.rest(self.image(x))


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.image[1].eval()


class Again(Net):
    """The first part is computed again in backward."""

    def forward(self, x):
        return self.rest(checkpoint(self.image, x, use_reentrant=False))


class WithReLU(nn.BatchNorm1d):
    """A forward of its own."""

    def forward(self, x):
        return torch.relu(super().forward(x))


class Subclass(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(
            nn.Flatten(),
            nn.BatchNorm1d(18),
            nn.Tanh(),
            nn.Linear(18, 4, bias=False),
            WithReLU(4),
            nn.Linear(4, 2),
        )
        self.double()


def task(build):
    return Task(build, F.mse_loss, lambda step: (randn(step, 7, 2, 3, 3), randn(100 + step, 7, 2)))


TASKS = {
    "plain": task(Net),
    "not affine": task(lambda: Net(affine=False)),
    "mean of all": task(lambda: Net(momentum=None)),
    "of the batch": task(lambda: Net(track_running_stats=False)),
    "frozen": task(Frozen),
    "checkpoint": task(Again),
    "subclass": task(Subclass),
}


def unlike_one_process(trainers):
    wrong = []
    for i, trainer in enumerate(trainers):
        for k, (name, case) in enumerate(TASKS.items()):
            optimizer, clip_norm = (("sgd", 0.05), ("adamw", None), ("sgd", None), ("adamw", 0.05))[
                (i + k + group_of().size) % 4
            ]
            expected = one_process(case, optimizer, clip_norm, 3)
            built = TRAINERS[trainer](
                case.build(),
                F.mse_loss,
                OPTIMIZERS[optimizer],
                clip_norm=clip_norm,
                sync_batch_norm=True,
            )
            wrong += [
                (trainer, name, what)
                for what in differences(trained(built, case, 3), expected, CLOSE)
            ]
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_trainers_are_equal_to_one_process(world_size):
    run = p101.launch(unlike_one_process, list(TRAINERS), world_size=world_size, backend="sim")
    assert run.results == [[]] * world_size


def test_on_gloo():
    assert (
        p101.launch(unlike_one_process, ["overlapped", "ZeRO-3"], world_size=3).results == [[]] * 3
    )


def one_sample_each(trainer):
    """Its gradients; torch's own norm refuses one value per channel."""
    built = TRAINERS[trainer](Subclass(), F.mse_loss, OPTIMIZERS["sgd"], sync_batch_norm=True)
    x, y = TASKS["plain"].batch(0)
    built.step(*built.share((x[:3], y[:3])))
    return built.gradients()


def test_one_sample_a_rank():
    model, (x, y) = Subclass(), TASKS["plain"].batch(0)
    F.mse_loss(model(x[:3]), y[:3]).backward()
    for found in p101.launch(one_sample_each, "ZeRO-1", world_size=3, backend="sim").results:
        assert differing(found, {name: p.grad for name, p in model.named_parameters()}, CLOSE) == []


PLAN = {"rest.0": "column_gather"}
MESHES = {
    "dp 2, tp 2": {"plan": PLAN},
    "tp 2, dp 2": {"plan": PLAN, "zero_stage": 2, "clip_norm": 0.05},
    "dp 3, tp 1": {"plan": PLAN, "zero_stage": 3},
    "dp 1, tp 3": {"plan": PLAN},
}


def on_a_mesh(mesh, options):
    trainer = p101.HybridTrainer(
        Net(), F.mse_loss, OPTIMIZERS["sgd"], mesh=mesh_of(mesh), sync_batch_norm=True, **options
    )
    return differences(
        trained(trainer, TASKS["plain"], 3),
        one_process(TASKS["plain"], "sgd", options.get("clip_norm"), 3),
        CLOSE,
    )


@pytest.mark.parametrize(("mesh", "options"), MESHES.items(), ids=str)
def test_on_a_mesh_with_tp(mesh, options):
    n = ranks_of(mesh)
    assert p101.launch(on_a_mesh, mesh, options, world_size=n, backend="sim").results == [[]] * n


def sequential():
    return nn.Sequential(*Net().image, *Net().rest)


def on_stages(mesh):
    case = task(sequential)
    trainer = p101.HybridTrainer(
        sequential(),
        F.mse_loss,
        OPTIMIZERS["sgd"],
        mesh=mesh_of(mesh),
        microbatches=1,
        sync_batch_norm=True,
    )
    return differences(trained(trainer, case, 3), one_process(case, "sgd", None, 3), CLOSE)


def test_on_stages_with_one_microbatch():
    assert p101.launch(on_stages, "dp 2, pp 2", world_size=4, backend="sim").results == [[]] * 4


def dp_of_one():
    return [
        differences(
            trained(build(), TASKS["plain"], 3), one_process(TASKS["plain"], "sgd", None, 3), CLOSE
        )
        for build in (
            lambda: p101.TensorParallelTrainer(Net(), F.mse_loss, OPTIMIZERS["sgd"], plan=PLAN),
            lambda: p101.HybridTrainer(
                Net(), F.mse_loss, OPTIMIZERS["sgd"], mesh=mesh_of("tp 2"), plan=PLAN
            ),
        )
    ]


def test_tp_alone_needs_no_option():
    assert p101.launch(dp_of_one, world_size=2, backend="sim").results == [[[], []]] * 2


# ── statistics and evaluation ──


def buffers_and_evaluations():
    found = {}
    for name in ("plain", "mean of all", "of the batch", "frozen"):
        trainer = p101.DataParallelTrainer(
            TASKS[name].build(), F.mse_loss, OPTIMIZERS["sgd"], sync_batch_norm=True
        )
        for step in range(3):
            trainer.step(*trainer.share(TASKS[name].batch(step)))
        buffers = {key: buffer.clone() for key, buffer in trainer.model.named_buffers()}
        found[name] = buffers, trainer.evaluate([TASKS[name].batch(9)])
        assert differing(dict(trainer.model.named_buffers()), buffers, 0) == [], (
            "evaluation changes no statistics"
        )
        assert [m.training for m in trainer.model.modules()] == [
            m.training for m in TASKS[name].build().modules()
        ]
    return found


def test_statistics_are_the_same_bits_on_all_ranks_and_evaluation_uses_them():
    alone = p101.launch(buffers_and_evaluations, world_size=1, backend="sim").results[0]
    results = p101.launch(buffers_and_evaluations, world_size=3, backend="sim").results
    for name, (buffers, loss) in alone.items():
        for found in results:
            assert differing(found[name][0], results[0][name][0], 0) == []
            assert differing(found[name][0], buffers, CLOSE) == []
            assert found[name][1] == pytest.approx(loss, rel=CLOSE)
    assert alone["plain"][0]["rest.1.num_batches_tracked"] == 3
    assert alone["frozen"][0]["image.1.num_batches_tracked"] == 0


def class_and_copies():
    model, x = Net(), TASKS["plain"].batch(0)[0]
    before, keys = copy.deepcopy(model), list(model.state_dict())
    trainer = p101.DataParallelTrainer(model, F.mse_loss, OPTIMIZERS["sgd"], sync_batch_norm=True)
    after = copy.deepcopy(trainer.model)  # as for an average of weights
    assert type(trainer.model.image[1]) is nn.BatchNorm2d
    assert list(trainer.model.state_dict()) == list(trainer.state_dict()) == keys
    trainer.step(*trainer.share(TASKS["plain"].batch(0)))
    return before, after.image[1].num_batches_tracked.item(), after(trainer.share((x, x))[0])


def test_the_modules_stay_what_they_are_and_can_be_copied():
    x = TASKS["plain"].batch(0)[0]
    # results are pickled
    (before, *first), (_, *second) = p101.launch(
        class_and_copies, world_size=2, backend="gloo"
    ).results
    expected = before(x)  # alone: it talks to nobody
    assert first[0] == second[0] == 0, "a copy has statistics of its own"
    torch.testing.assert_close(torch.cat([first[1], second[1]]), expected, rtol=0, atol=CLOSE)


# ── errors ──


def refusals():
    def said(build):
        with pytest.raises(ValueError, match=r"looks at the whole batch") as error:
            build()
        return str(error.value)

    def many(model, **options):
        return p101.DataParallelTrainer(model, F.mse_loss, OPTIMIZERS["sgd"], **options)

    found = {
        "microbatches": said(lambda: many(Net(), accumulate=2)),
        "synchronised": said(lambda: many(Net(), accumulate=2, sync_batch_norm=True)),
        "pipeline": said(
            lambda: p101.PipelineTrainer(
                sequential(), F.mse_loss, OPTIMIZERS["sgd"], microbatches=4
            )
        ),
    }
    if group_of().size > 1:
        found["share"] = said(lambda: many(Net()))
        found["of the batch"] = said(lambda: many(Net(track_running_stats=False).eval()))
    many(Net().eval(), accumulate=2)  # frozen
    p101.PipelineTrainer(sequential(), F.mse_loss, OPTIMIZERS["sgd"], microbatches=1)
    return found


def test_what_a_norm_would_not_see_is_refused():
    (alone,) = p101.launch(refusals, world_size=1, backend="sim").results
    first, second = p101.launch(refusals, world_size=2, backend="sim").results
    assert first == second
    assert re.search(
        r"'image\.1' is a BatchNorm2d, .* runs it on 2 microbatches.*accumulate=1",
        alone["microbatches"],
    )
    assert alone["microbatches"] == alone["synchronised"] == first["microbatches"]
    assert "'1' is a BatchNorm2d" in alone["pipeline"]
    assert "4 microbatches" in first["pipeline"]
    assert re.search(
        r"each rank has only its "
        r"share.*sync_batch_norm=True.*get_submodule\('image\.1'\)\.eval\(\)",
        first["share"],
    )
    assert "eval()" not in first["of the batch"], "it has no statistics but the batch's"


def between_column_and_row():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    with pytest.raises(
        ValueError, match=r"'1' \(BatchNorm1d\) gets the cut outputs of column layer '0'"
    ):
        p101.TensorParallelTrainer(
            model, F.mse_loss, OPTIMIZERS["sgd"], plan={"0": "column", "2": "row"}
        )


def test_between_a_column_and_a_row_it_is_refused():
    p101.launch(between_column_and_row, world_size=2, backend="sim")


class Fails(nn.Module):
    """On rank 1 only."""

    def __init__(self, direction):
        super().__init__()
        self.direction = direction

    def forward(self, x):
        if dist.get_rank() == 1:
            if self.direction == "forward":
                raise IndexError("no such row")
            x.register_hook(self.backward)
        return x

    def backward(self, gradient):
        raise IndexError("no such row")


def fails(trainer, direction):
    model = Net()
    model.rest.insert(0 if direction == "forward" else 2, Fails(direction))  # a norm comes next
    built: p101.HybridTrainer = TRAINERS[trainer](
        model, F.mse_loss, OPTIMIZERS["sgd"], sync_batch_norm=True
    )
    built.step(*built.share(TASKS["plain"].batch(0)))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_an_error_on_one_rank_is_told_though_the_others_wait_for_it_in_a_norm(trainer, direction):
    with pytest.raises(p101.RankFailed, match=r"no such row") as failed:
        p101.launch(fails, trainer, direction, world_size=3, backend="sim")
    assert failed.value.rank == 1
