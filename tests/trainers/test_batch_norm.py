"""BatchNorm on every trainer: the statistics of the whole batch, or a clear error.

Equal to one process in float64.
"""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import parallel101 as p101
from parallel101.mesh import group_of
from tests.trainers.cases import (
    OPTIMIZERS,
    TRAINERS,
    Case,
    Task,
    differing,
    on_mesh,
    randn,
    rows,
    unlike_one_process,
)
from tests.trainers.cases import world_size as ranks_of

CLOSE, STEPS = 1e-12, 3


class Net(nn.Module):
    """Norms after a convolution and after a linear layer, without biases that a norm would take
    away again.
    """

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        convolution, linear = nn.Conv2d(2, 3, 2, bias=False), nn.Linear(12, 5, bias=False)
        norm_2d, norm_1d = nn.BatchNorm2d(3, **options), nn.BatchNorm1d(5, **options)
        self.image = nn.Sequential(convolution, norm_2d, nn.ReLU(), nn.Flatten())
        self.rest = nn.Sequential(linear, norm_1d, nn.Tanh(), nn.Linear(5, 2))
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
    """Its second norm has a subclass."""

    def __init__(self):
        torch.manual_seed(0)
        first = nn.Flatten(), nn.BatchNorm1d(18), nn.Tanh(), nn.Linear(18, 4, bias=False)
        super().__init__(*first, WithReLU(4), nn.Linear(4, 2))
        self.double()


class Volumes(nn.Sequential):
    """Norms of sequences and of volumes."""

    def __init__(self):
        torch.manual_seed(0)
        sequence = nn.Unflatten(1, (3, 2)), nn.BatchNorm1d(3, affine=False), nn.Tanh()
        volume = nn.Unflatten(2, (1, 1, 2)), nn.BatchNorm3d(3), nn.Flatten()
        super().__init__(*sequence, *volume, nn.Linear(6, 2))
        self.double()


def images(step):
    return randn(step, 7, 2, 3, 3), randn(100 + step, 7, 2)


TASKS = {
    "plain": Task(Net, F.mse_loss, images),
    "not affine": Task(lambda: Net(affine=False), F.mse_loss, images),
    "mean of all": Task(lambda: Net(momentum=None), F.mse_loss, images),
    "of the batch": Task(lambda: Net(track_running_stats=False), F.mse_loss, images),
    "frozen": Task(Frozen, F.mse_loss, images),
    "checkpoint": Task(Again, F.mse_loss, images),
    "subclass": Task(Subclass, F.mse_loss, images),
    "volumes": Task(Volumes, F.mse_loss, rows(6, 2)),
}
# one sample a rank: torch's own norm refuses one value per channel
FEW = Task(Subclass, F.mse_loss, lambda step: tuple(t[:3] for t in images(step)))
SETTINGS = ("sgd", 0.05), ("adamw", None), ("sgd", None), ("adamw", 0.05)


def equal(cases):
    return unlike_one_process(cases, CLOSE, STEPS)


@pytest.mark.parametrize(
    ("world_size", "backend"), [(1, "sim"), (2, "sim"), (4, "sim"), (3, "gloo")]
)
def test_each_trainer_is_equal_to_one_process(world_size, backend):
    cases = [
        Case(task, trainer, *SETTINGS[(i + k) % 4], {"sync_batch_norm": True})
        for i, trainer in enumerate(TRAINERS.values())
        for k, task in enumerate(TASKS.values())
        if (i + k + world_size) % 3 == 0
    ]
    if world_size == 3:
        cases.append(Case(FEW, TRAINERS["ZeRO-1"], options={"sync_batch_norm": True}))
    run = p101.launch(equal, cases, world_size=world_size, backend=backend)
    assert run.results == [[]] * world_size


PLAN = {"rest.0": "column_gather"}
MESHES = {
    "dp 2, tp 2": {"plan": PLAN},
    "tp 2, dp 2": {"plan": PLAN, "zero_stage": 2},
    "dp 3, tp 1": {"plan": PLAN, "zero_stage": 3},
    "dp 2, pp 2": {"microbatches": 1},
    "tp 2": {"plan": PLAN, "sync_batch_norm": False},  # every rank has the whole batch
}


def sequential():
    return nn.Sequential(*Net().image, *Net().rest)


@pytest.mark.parametrize(("mesh", "options"), MESHES.items(), ids=str)
def test_on_a_mesh(mesh, options):
    task = TASKS["plain"]._replace(build=sequential) if "pp" in mesh else TASKS["plain"]
    case = Case(task, on_mesh(mesh), "sgd", 0.05, {"sync_batch_norm": True, **options})
    n = ranks_of(mesh)
    assert p101.launch(equal, [case], world_size=n, backend="sim").results == [[]] * n


class Far(nn.Sequential):
    """A norm of samples around 100, in bfloat16."""

    def __init__(self):
        super().__init__(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 3, bias=False))
        nn.init.eye_(self[1].weight)
        self.bfloat16()


def spread():
    """The mean square of the normed samples, which is 1."""
    trainer = TRAINERS["naive"](
        Far(), lambda y, _: y.float().square().mean(), OPTIMIZERS["sgd"], sync_batch_norm=True
    )
    return trainer.step(*trainer.share(((100 + randn(0, 100, 3)).bfloat16(), randn(1, 100, 3))))


def test_statistics_are_computed_in_float32_at_least():
    for loss in p101.launch(spread, world_size=2, backend="sim").results:
        assert loss == pytest.approx(1, abs=0.1)


# ── modules ──


def class_and_copies():
    model, x = Net(), images(0)[0]
    before, keys = copy.deepcopy(model), list(model.state_dict())
    trainer = TRAINERS["naive"](model, F.mse_loss, OPTIMIZERS["sgd"], sync_batch_norm=True)
    after = copy.deepcopy(trainer.model)  # as for an average of weights
    assert type(trainer.model.image[1]) is nn.BatchNorm2d
    assert list(trainer.model.state_dict()) == list(trainer.state_dict()) == keys
    trainer.step(*trainer.share(images(0)))
    buffers = {name: b.clone() for name, b in trainer.model.named_buffers()}
    trainer.evaluate([images(1)])
    assert differing(dict(trainer.model.named_buffers()), buffers, 0) == []
    assert all(module.training for module in trainer.model.modules())
    return (
        before,
        buffers,
        after.image[1].num_batches_tracked.item(),
        after(trainer.share((x, x))[0]),
    )


def test_the_modules_stay_what_they_are_and_can_be_copied():
    x = images(0)[0]
    # results are pickled
    (before, buffers, *first), (_, same, *second) = p101.launch(
        class_and_copies, world_size=2, backend="gloo"
    ).results
    expected = before(x)  # alone: it talks to nobody
    assert first[0] == second[0] == 0, "a copy has statistics of its own"
    torch.testing.assert_close(torch.cat([first[1], second[1]]), expected, rtol=0, atol=CLOSE)
    assert differing(buffers, same, 0) == [], "the same bits on all ranks"
    assert buffers["rest.1.num_batches_tracked"] == 1


# ── errors ──


def refusals():
    def said(build):
        with pytest.raises(ValueError, match="looks at the whole batch") as error:
            build()
        return str(error.value)

    def many(model, **options):
        return p101.DataParallelTrainer(model, F.mse_loss, OPTIMIZERS["sgd"], **options)

    def stages(microbatches):
        options = {"microbatches": microbatches}
        p101.PipelineTrainer(sequential(), F.mse_loss, OPTIMIZERS["sgd"], **options)

    found = {
        "microbatches": said(lambda: many(Net(), accumulate=2)),
        "synchronized": said(lambda: many(Net(), accumulate=2, sync_batch_norm=True)),
        "pipeline": said(lambda: stages(4)),
    }
    if group_of().size > 1:
        found["share"] = said(lambda: many(Net()))
        found["of the batch"] = said(lambda: many(Net(track_running_stats=False).eval()))
    many(Net().eval(), accumulate=2)  # frozen
    stages(1)
    return found


def test_what_a_norm_would_not_see_is_refused():
    (alone,) = p101.launch(refusals, world_size=1, backend="sim").results
    first, second = p101.launch(refusals, world_size=2, backend="sim").results
    assert first == second
    words = r"'image\.1' is a BatchNorm2d, .* runs it on 2 microbatches.*accumulate=1"
    assert re.search(words, alone["microbatches"])
    assert alone["microbatches"] == alone["synchronized"] == first["microbatches"]
    assert "'1' is a BatchNorm2d" in alone["pipeline"]
    assert "4 microbatches" in first["pipeline"]
    words = r"each rank has only its share.*sync_batch_norm=True.*get_submodule\('image\.1'\)\.eval"
    assert re.search(words, first["share"])
    assert "eval()" not in first["of the batch"], "it has no statistics but the batch's"
