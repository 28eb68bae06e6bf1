"""What can't be trained on a mesh is an error at once, in the same words on every rank."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import parallel101 as p101
from parallel101.models.mlp import MLP
from tests.trainers.cases import differing, randn
from tests.trainers.hybrid_cases import TASKS, mesh_of
from tests.trainers.tensor_cases import seeded


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def mlp():
    return seeded(MLP([4, 8, 8, 3]))


class Closed(nn.Module):
    """It does not tell its modules in order."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.second(self.first(x))


def mesh_without_names():
    return init_device_mesh("cpu", (2, 2))


V_SHAPED = p101.Schedule.from_csv(
    "0F0,3F0,3B0,0F1,3F1,0B0,3B1,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1"
)
BUILDS = {
    "axes of other names": (
        lambda: {"mesh": mesh_of("data 2, tp 2")},
        ValueError,
        r"axes \('data', 'tp'\): expected names out of dp, tp, pp",
    ),
    "no names": (
        lambda: {"mesh": mesh_without_names()},
        ValueError,
        "axes have no names: expected names out of dp, tp, pp",
    ),
    "no mesh": (
        lambda: {"mesh": None},
        TypeError,
        "mesh=None: expected a DeviceMesh with named axes",
    ),
    "a mesh larger than the world": (
        lambda: {"mesh": mesh_of("dp 2, tp 2, pp 2")},
        (RuntimeError, ValueError),
        "Mesh should not be bigger than default world size 4",
    ),
    "accumulate with pp": (
        lambda: {"mesh": mesh_of("dp 2, pp 2"), "accumulate": 2},
        ValueError,
        "say microbatches=2",
    ),
    "microbatches without pp": (
        lambda: {"mesh": mesh_of("dp 2, tp 2"), "microbatches": 2},
        ValueError,
        "the mesh has no axis pp",
    ),
    "a schedule without pp": (
        lambda: {"mesh": mesh_of("dp 2, tp 2"), "schedule": "gpipe"},
        ValueError,
        "the mesh has no axis pp",
    ),
    "chunks without pp": (
        lambda: {"mesh": mesh_of("dp 2, tp 2"), "chunks": 2},
        ValueError,
        "the mesh has no axis pp",
    ),
    "layers_per_stage without pp": (
        lambda: {"mesh": mesh_of("dp 4"), "layers_per_stage": [2, 1]},
        ValueError,
        "is for the axis 'pp', and the mesh has dp",
    ),
    "a plan without tp": (
        lambda: {"mesh": mesh_of("dp 2, pp 2"), "plan": {"layers.0": "column"}},
        ValueError,
        "is for the axis 'tp', and the mesh has dp, pp",
    ),
    "sequence parallel without tp": (
        lambda: {"mesh": mesh_of("dp 4"), "sequence_parallel": True},
        ValueError,
        "is for the axis 'tp', and",
    ),
    "zero_stage 4": (
        lambda: {"mesh": mesh_of("dp 2, tp 2"), "zero_stage": 4},
        ValueError,
        "zero_stage=4: expected",
    ),
    "more stages than layers": (
        lambda: {"mesh": mesh_of("pp 4")},
        ValueError,
        "3 modules with parameters, too few for 4 pipeline stages",
    ),
    "too few layers_per_stage": (
        lambda: {"mesh": mesh_of("dp 2, pp 2"), "layers_per_stage": [5]},
        ValueError,
        "expected 2 numbers",
    ),
    "layers_per_stage that leave one out": (
        lambda: {"mesh": mesh_of("dp 2, pp 2"), "layers_per_stage": [2, 2]},
        ValueError,
        "add up to the 5 modules",
    ),
    "a stage without parameters": (
        lambda: {
            "mesh": mesh_of("dp 2, pp 2"),
            "layers_per_stage": [1, 4],
            "model": nn.Sequential(nn.GELU(), *mlp().layers[:2], nn.GELU(), nn.Linear(8, 3)),
        },
        ValueError,
        "stage 0 has no module with parameters",
    ),
    "a model that does not tell its modules": (
        lambda: {"mesh": mesh_of("dp 2, pp 2"), "model": Closed().double()},
        ValueError,
        "a Closed can't be cut into pipeline stages",
    ),
    "a cut head's loss without a plan that cuts it": (
        lambda: {
            "mesh": mesh_of("dp 2, tp 2"),
            "model": TASKS["tied"].build(),
            "loss_fn": p101.vocabulary_cross_entropy,
            "plan": {"blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row"},
        },
        ValueError,
        "takes logits that are cut, but the plan cuts no head",
    ),
    "ZeRO-3 with a tied weight on two stages of one rank": (
        lambda: {
            "mesh": mesh_of("dp 2, pp 2"),
            "model": TASKS["tied"].build(),
            "schedule": V_SHAPED,
            "zero_stage": 3,
        },
        ValueError,
        r"'embedding\.token\.weight' is tied between two stages on one rank",
    ),
    "an unknown schedule": (
        lambda: {"mesh": mesh_of("dp 2, pp 2"), "schedule": "2f2b"},
        ValueError,
        "schedule '2f2b' is unknown",
    ),
    "a schedule for other ranks": (
        lambda: {
            "mesh": mesh_of("dp 2, pp 2"),
            "schedule": p101.schedule("1f1b", stages=3, microbatches=3),
        },
        ValueError,
        "a schedule for 3 ranks",
    ),
    "a model that is not built": (
        lambda: {"mesh": mesh_of("dp 2, pp 2"), "model": MLP},
        TypeError,
        "expected an nn.Module that has been built",
    ),
    "models that differ": (
        lambda: {
            "mesh": mesh_of("dp 2, pp 2"),
            "model": MLP([4, 8, 3], seed=torch.distributed.get_rank()),
        },
        ValueError,
        "the models differ at the start",
    ),
}


def build(name):
    make, kind, match = BUILDS[name]
    with pytest.raises(kind, match=match) as error:
        p101.HybridTrainer(**{"model": mlp(), "loss_fn": F.mse_loss, "optimizer": sgd, **make()})
    return str(error.value)


def build_all():
    return {name: build(name) for name in BUILDS}


def test_what_cannot_be_built_is_refused_in_the_same_words_on_every_rank():
    first, *others = p101.launch(build_all, world_size=4, backend="sim").results
    assert others == [first] * 3


# ── in a step ──


def batch(samples, features=4, salt=0):
    return randn(salt, samples, features), randn(salt + 1, samples, 3)


def given_in_a_step(mesh, axis, other):
    """The ranks at position 1 of the axis give another batch.

    Returns the error, and the weights that it has not changed.
    """
    options = {"microbatches": 2} if "pp" in mesh else {}
    trainer = p101.HybridTrainer(mlp(), F.mse_loss, sgd, mesh=mesh_of(mesh), **options)
    before = trainer.state_dict()
    with pytest.raises(ValueError) as error:
        trainer.step(*(other if trainer.axes.here[axis] == 1 else batch(4)))
    assert differing(trainer.state_dict(), before, 0) == []
    return str(error.value), trainer.step(*batch(4))


@pytest.mark.parametrize(
    ("mesh", "axis", "other", "words"),
    [
        (
            "dp 2, tp 2",
            "tp",
            batch(3),
            (
                "rank 0 and rank 1 were given 4 and 3 samples, but ranks that differ only along tp "
                "or pp work on the same ones"
            ),
        ),
        (
            "pp 2, tp 2",
            "pp",
            batch(5),
            (
                "rank 0 and rank 2 were given 4 and 5 samples, but ranks that differ only along tp "
                "or pp work on the same ones"
            ),
        ),
        (
            "dp 2, pp 2",
            "pp",
            batch(4, 5),
            "rank 0 and rank 1 were given other samples, but ranks that differ only along tp or pp",
        ),
        (
            "dp 2, pp 2",
            "pp",
            batch(4, salt=5),
            "rank 0 and rank 1 were given other samples.*a DistributedSampler, or a loader that",
        ),
    ],
    ids=["along tp", "along pp", "of another shape", "in another order"],
)
def test_samples_that_do_not_fit_are_refused_and_the_next_step_is_right(mesh, axis, other, words):
    found = p101.launch(given_in_a_step, mesh, axis, other, world_size=4, backend="sim").results
    assert len(set(found)) == 1
    assert re.search(words, found[0][0])
    assert found[0][1] == pytest.approx(
        p101.launch(one_step_alone, world_size=1, backend="sim").results[0], rel=1e-10
    )


def one_step_alone():
    return p101.DataParallelTrainer(mlp(), F.mse_loss, sgd).step(*batch(4))


def with_a_nan(mesh, options):
    trainer = p101.HybridTrainer(mlp(), F.mse_loss, sgd, mesh=mesh_of(mesh), **options)
    inputs, targets = batch(4)
    targets = targets.clone()
    targets[-1] = math.nan
    with pytest.raises(FloatingPointError) as error:
        trainer.step(*trainer.share((inputs, targets)))
    return str(error.value), trainer.step(*trainer.share(batch(4)))


@pytest.mark.parametrize(
    ("mesh", "options", "words"),
    [
        (
            "pp 2, dp 2",
            {"microbatches": 2, "zero_stage": 3},
            "step 0: the loss is nan on rank 3; no weight was changed",
        ),
        (
            "pp 2, tp 2",
            {"microbatches": 2},
            "step 0: the loss is nan on rank 2, nan on rank 3; no weight was changed",
        ),
    ],
    ids=["dp", "tp"],
)
def test_a_nan_on_the_last_stage_is_the_same_error_on_all_and_the_next_step_is_right(
    mesh, options, words
):
    found = p101.launch(with_a_nan, mesh, options, world_size=4, backend="sim").results
    assert len(set(found)) == 1
    assert found[0][0].startswith(words)
    assert found[0][1] == pytest.approx(
        p101.launch(one_step_alone, world_size=1, backend="sim").results[0], rel=1e-10
    )


# ── replicas along tp ──


class Centred(nn.Module):
    """Between its column and its row layer it needs the mean of all features, and with tensor
    parallel it sees some.
    """

    def __init__(self):
        super().__init__()
        self.up, self.scale, self.down = (
            nn.Linear(4, 8),
            nn.Parameter(torch.ones(1)),
            nn.Linear(8, 3),
        )

    def forward(self, x):
        x = self.up(x)
        return self.down(x - self.scale * x.mean(-1, keepdim=True))


def with_dropout():
    return nn.Sequential(
        nn.Linear(4, 8),
        nn.Dropout(0.5),
        nn.LayerNorm(8),
        nn.Linear(8, 8),
        nn.GELU(),
        nn.Linear(8, 3),
    ).double()


class OwnNoise(nn.Module):
    """Random numbers that are not torch's global ones."""

    def __init__(self, seed):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, x):
        return x * torch.rand(x.shape, generator=self.generator, dtype=x.dtype)


def seeded_along_tp(seed_of, mesh, options):
    torch.manual_seed(0)
    model = with_dropout()
    tp = mesh_of(mesh)["tp"].get_local_rank()
    model[2] = nn.Sequential(OwnNoise(seed_of * tp), model[2])
    trainer = p101.HybridTrainer(
        model, F.mse_loss, sgd, mesh=mesh_of(mesh), plan={"3": "column", "5": "row"}, **options
    )
    torch.manual_seed(tp)  # dropout's masks don't depend on it
    before = trainer.state_dict()
    try:
        return trainer.step(*trainer.share(batch(8)))
    except ValueError as error:
        assert differing(trainer.state_dict(), before, 0) == []
        return str(error)


@pytest.mark.parametrize("options", [{}, {"zero_stage": 1}, {"zero_stage": 3}], ids=str)
@pytest.mark.parametrize("mesh", ["dp 2, tp 2", "tp 2, pp 2"])
def test_random_numbers_that_differ_along_tp_are_named_in_the_first_step(mesh, options):
    def run(seed_of):
        found = set(
            p101.launch(
                seeded_along_tp, seed_of, mesh, options, world_size=4, backend="sim"
            ).results
        )
        assert len(found) == 1
        return found.pop()

    assert isinstance(run(0), float)
    assert re.match(
        r"the gradient of '0\.weight' is not the same on all ranks along tp: its norms are "
        r"\S+, \S+\. .*torch\.Generator",
        run(1),
    )


def partly_computed():
    torch.manual_seed(0)
    trainer = p101.TensorParallelTrainer(
        Centred().double(), F.mse_loss, sgd, plan={"up": "column", "down": "row"}
    )
    with pytest.raises(
        p101.NotEqualError, match=r"loss differs(.|\n)*The plan cuts what must not be cut"
    ) as error:
        trainer.step(*batch(8))
    return str(error.value)


def test_a_replicated_module_that_sees_a_part_of_the_features_is_named():
    assert len(set(p101.launch(partly_computed, world_size=2, backend="sim").results)) == 1


class CountSamples(nn.Module):
    """A buffer that depends on the samples."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x):
        with torch.no_grad():
            self.last.copy_(x.sum())
        return x


def buffers_of_one_stage():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3), CountSamples()).double()
    trainer = p101.HybridTrainer(model, F.mse_loss, sgd, mesh=mesh_of("dp 2, pp 2"), microbatches=2)
    with pytest.raises(
        p101.NotEqualError, match=r"the buffer of '2\.last' differs(.|\n)*statistics of the samples"
    ) as error:
        trainer.step(*trainer.share(batch(8)))
    return str(error.value)


def test_buffers_that_differ_on_one_stage_are_an_error_on_all_stages():
    assert len(set(p101.launch(buffers_of_one_stage, world_size=4, backend="sim").results)) == 1


# ── what belongs to the trainer ──


PARTS = [
    ("tp 4", {"plan": {"layers.0": "column", "layers.1": "row"}}),
    ("pp 2, dp 2", {"microbatches": 2}),
    ("dp 4", {"zero_stage": 3}),
]
WHOLE = [("dp 4", {}), ("dp 4", {"zero_stage": 2})]


def state_and_copies(mesh, options):
    trainer = p101.HybridTrainer(mlp(), F.mse_loss, sgd, mesh=mesh_of(mesh), **options)
    said = []
    for use in (
        trainer.model.state_dict,
        lambda: torch.optim.swa_utils.AveragedModel(trainer.model),
    ):
        try:
            use()
        except RuntimeError as error:
            said.append(str(error))
    trainer.step(*trainer.share(batch(8)))
    again = mlp()
    again.load_state_dict(trainer.state_dict())
    return said


@pytest.mark.parametrize(("mesh", "options"), [*PARTS, *WHOLE], ids=str)
def test_a_model_that_is_cut_has_no_state_of_its_own(mesh, options):
    for said in p101.launch(state_and_copies, mesh, options, world_size=4, backend="sim").results:
        assert ["expected trainer.state_dict()" in text for text in said] == [True] * 2 * (
            (mesh, options) in PARTS
        )


def thawed(mesh, options):
    model = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8).eval(), nn.GELU(), nn.Linear(8, 3)
    ).double()
    model[0].requires_grad_(False)
    trainer = p101.HybridTrainer(model, F.mse_loss, sgd, mesh=mesh_of(mesh), **options)
    losses = [trainer.step(*trainer.share(batch(8)))]
    errors = []
    trainer.model[1].train()
    with pytest.raises(ValueError) as error:
        trainer.step(*trainer.share(batch(8)))
    errors.append(str(error.value))
    trainer.model[1].eval()
    if trainer.axes.here.get("pp", 0) == 0:
        trainer.model[0].weight.requires_grad_(True)
    with pytest.raises((ValueError, RuntimeError)) as error:
        trainer.step(*trainer.share(batch(8)))
    errors.append(str(error.value))
    trainer.model[0].weight.requires_grad_(False)
    return [*losses, trainer.step(*trainer.share(batch(8)))], errors


@pytest.mark.parametrize(
    ("mesh", "options"), [("dp 4", {"zero_stage": 1}), ("pp 2, dp 2", {"microbatches": 2})], ids=str
)
def test_what_was_frozen_stays_so(mesh, options):
    torch.manual_seed(0)
    for losses, (norm, weight) in p101.launch(
        thawed, mesh, options, world_size=4, backend="sim"
    ).results:
        assert losses[1] < losses[0]
        assert "'1' is a BatchNorm1d, which looks at the whole batch" in norm
        assert "'0.weight' was frozen when the trainer was built" in weight
