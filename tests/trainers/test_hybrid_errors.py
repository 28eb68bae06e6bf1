"""What can't be trained on a mesh is an error at once, in the same words on every rank."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import parallel101 as p101
from parallel101.models.mlp import MLP
from tests.trainers.cases import (
    TASKS,
    TRAINERS,
    differing,
    gpt,
    mesh_of,
    on_mesh,
    raised,
    randn,
    seeded,
    sgd,
)


def mlp():
    return seeded(MLP([4, 8, 8, 3]))


class Closed(nn.Module):
    """It does not tell its modules in order, though one of them is called `sequence`."""

    def __init__(self):
        super().__init__()
        self.sequence, self.last = mlp(), nn.Linear(3, 3)

    def forward(self, x):
        return self.last(self.sequence(x))


class WithFunction(Closed):
    def sequence(self):
        return [self.last, F.relu]

    def __init__(self):
        nn.Module.__init__(self)
        self.last = nn.Linear(4, 4)


class Doubled(nn.Sequential):
    def forward(self, x):
        return super().forward(2 * x)


WAITING = p101.Schedule([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]])
V_SHAPED = p101.Schedule([["0F0", "3F0", "3B0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]])
TIED, TP, PP = TASKS["tied gpt"].build, "dp 2, tp 2", "dp 2, pp 2"
REFUSED = {  # on 4 ranks: the mesh, the options, and some words of the error
    "other names": (
        "data 2, tp 2",
        {},
        r"axes \('data', 'tp'\): expected names from dp, cp, tp, pp, ep",
    ),
    "no names": (None, {}, "axes have no names: expected names from dp, cp, tp, pp, ep"),
    "larger than the world": ("dp 2, tp 2, pp 2", {}, "bigger than default world size 4"),
    "accumulate with pp": (PP, {"accumulate": 2}, "say microbatches=2"),
    "microbatches without pp": (
        TP,
        {"microbatches": 2},
        "for the axis 'pp', but the mesh has only",
    ),
    "a schedule without pp": (
        TP,
        {"schedule": "gpipe"},
        "for the axis 'pp', but the mesh has only",
    ),
    "layers_per_stage without pp": ("dp 4", {"layers_per_stage": [2, 1]}, "for the axis 'pp'"),
    "a plan without tp": (PP, {"plan": {"layers.0": "column"}}, "for the axis 'tp', but the mesh"),
    "time without tp": ("dp 4", {"sequence_parallel": True}, "for the axis 'tp'"),
    "zero_stage 4": (TP, {"zero_stage": 4}, "zero_stage=4: expected"),
    "few layers": ("pp 4", {}, "3 modules with parameters, too few for 4 pipeline stages"),
    "chunks": (
        PP,
        {"schedule": "interleaved", "chunks": 2, "microbatches": 4},
        "3 modules with parameters, too few for 4",
    ),
    "few numbers": (PP, {"layers_per_stage": [5]}, "expected 2 numbers"),
    "numbers that leave one out": (PP, {"layers_per_stage": [2, 2]}, "add up to the 5 modules"),
    "a stage without parameters": (
        PP,
        {"layers_per_stage": [1, 2], "model": nn.Sequential(nn.GELU(), *mlp().layers[:2])},
        "stage 0 has no module with parameters",
    ),
    "no order": (PP, {"model": Closed()}, "a Closed can't be cut into pipeline stages"),
    "a function in the order": (
        PP,
        {"model": WithFunction()},
        r"a function in position 1 \(relu\)",
    ),
    "a forward of its own": (
        PP,
        {"model": Doubled(nn.Linear(2, 2), nn.Linear(2, 2))},
        "a Doubled can't be cut into pipeline stages: .*nn.Sequential without a forward",
    ),
    "heads": (
        "tp 4",
        {"model": gpt(heads=2), "plan": "auto"},
        r"'blocks\.0\.attention\.query' has 2 heads, which 4 ranks cannot share equally",
    ),
    "a plan that matches nothing": (TP, {"plan": {"no.*": "column"}}, "matches no module"),
    "a cut head's loss without a cut head": (
        TP,
        {
            "model": TIED(),
            "loss_fn": p101.vocabulary_cross_entropy,
            "plan": {"*.up": "column", "*.down": "row"},
        },
        "the plan cuts no head",
    ),
    "ZeRO-3 with a tied weight on two stages of one rank": (
        PP,
        {"model": TIED(), "schedule": V_SHAPED, "zero_stage": 3},
        r"'embedding\.token\.weight' is tied between two stages on one rank",
    ),
    "an unknown schedule": (PP, {"schedule": "2f2b"}, "schedule '2f2b' is unknown"),
    "a schedule for other ranks": ("pp 4", {"schedule": WAITING}, "expected one for the 4 ranks"),
    "a schedule that would deadlock": (PP, {"schedule": WAITING}, "wait for each other forever"),
    "a model that is not built": (PP, {"model": MLP}, "expected an nn.Module that has been built"),
    "models that differ": (PP, {"model": None}, "the models differ at the start"),
}


def build_all():
    def build(mesh, options):
        if (options := {"model": mlp(), **options})["model"] is None:
            options["model"] = MLP([4, 8, 3], seed=torch.distributed.get_rank())
        mesh = init_device_mesh("cpu", (2, 2)) if mesh is None else mesh_of(mesh)
        p101.HybridTrainer(**{"loss_fn": F.mse_loss, "optimizer": sgd, "mesh": mesh, **options})

    return {name: raised(build, mesh, options) for name, (mesh, options, _) in REFUSED.items()}


def test_what_cannot_be_built_is_refused_in_the_same_words_on_every_rank():
    first, *others = p101.launch(build_all, world_size=4, backend="sim").results
    assert others == [first] * 3
    for name, (_, _, words) in REFUSED.items():
        assert re.search(words, first[name]), first[name]


# ── in a step ──


def batch(samples, features=4, salt=0):
    return randn(salt, samples, features), randn(salt + 1, samples, 3)


OTHERS = [  # the mesh, the axis along which a batch differs, that batch, and what is said
    (TP, "tp", batch(3), "rank 0 and rank 1 were given 4 and 3 samples"),
    ("pp 2, tp 2", "pp", batch(5), "rank 0 and rank 2 were given 4 and 5 samples"),
    (PP, "pp", batch(4, 5), "rank 0 and rank 1 were given different samples"),
    (PP, "pp", batch(4, salt=5), "given different samples.*a DistributedSampler, or a loader that"),
]


def given_in_a_step():
    found = []
    for shape, axis, other, _ in OTHERS:
        trainer, here = on_mesh(shape)(mlp(), F.mse_loss, sgd), mesh_of(shape)[axis]
        before = trainer.state_dict()
        error = raised(trainer.step, *(other if here.get_local_rank() == 1 else batch(4)))
        assert differing(trainer.state_dict(), before, 0) == []
        found.append((error, trainer.step(*batch(4))))
    return found


def test_samples_that_do_not_fit_are_refused_and_the_next_step_is_right():
    first, *others = p101.launch(given_in_a_step, world_size=4, backend="sim").results
    assert others == [first] * 3
    expected = TRAINERS["naive"](mlp(), F.mse_loss, sgd).step(*batch(4))
    for (error, loss), (*_, words) in zip(first, OTHERS):
        assert re.search(words, error)
        assert loss == pytest.approx(expected, rel=1e-10)


class RunningSum(nn.Module):
    """A buffer that depends on the samples."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x):
        with torch.no_grad():
            self.last.copy_(x.sum())
        return x


def buffers_of_one_stage():
    model = nn.Sequential(*mlp().layers, RunningSum())
    trainer = on_mesh(PP)(model, F.mse_loss, sgd, microbatches=2, verify=True)
    return raised(trainer.step, *trainer.share(batch(8)))


def test_buffers_that_differ_on_one_stage_are_an_error_on_all_stages():
    (error,) = set(p101.launch(buffers_of_one_stage, world_size=4, backend="sim").results)
    assert re.search(r"NotEqualError(.|\n)*buffer of '3\.last' differs", error)


# ── what belongs to the trainer ──

CUT = {
    "tp 2": {"plan": {"layers.0": "column", "layers.1": "row"}},
    "pp 2": {},
    "dp 2": {"zero_stage": 3},
    "dp 2, pp 1": {},  # whole
}


def state_and_copies():
    said = {}
    for mesh, options in CUT.items():
        trainer = on_mesh(mesh)(mlp(), F.mse_loss, sgd, **options)
        mlp().load_state_dict(trainer.state_dict())
        average = torch.optim.swa_utils.AveragedModel
        said[mesh] = raised(trainer.model.state_dict), raised(average, trainer.model)
    return said


def test_a_model_that_is_cut_has_no_state_of_its_own():
    for said in p101.launch(state_and_copies, world_size=2, backend="sim").results:
        for mesh, errors in said.items():
            for error in errors:
                assert ("expected trainer.state_dict()" in error) == (mesh != "dp 2, pp 1")
