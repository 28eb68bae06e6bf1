"""A run moves from one mesh to another, and its losses are those of one process that was never
interrupted.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parallel101 as p101
from parallel101.models.mlp import MLP
from tests.trainers.cases import adamw_by_shape, differing, randn
from tests.trainers.hybrid_cases import TASKS, mesh_of, world_size
from tests.trainers.tensor_cases import seeded


class Affine(nn.Module):
    """A weight that is not trained, a buffer that a checkpoint has, and one that it lacks."""

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 0.9), requires_grad=False)
        self.register_buffer("shift", torch.linspace(-1, 1, width))
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("ones", torch.ones(width), persistent=False)

    def forward(self, x):
        return x * self.scale + self.shift * self.ones


def partly_frozen():
    """Two stages are cut between layers 3 and 4, a column and a row layer; the bias of 3 is not
    trained, and is cut along tp.
    """
    model = seeded(
        nn.Sequential(
            nn.Linear(4, 8),
            Affine(8),
            nn.GELU(),
            nn.Linear(8, 6),
            nn.Linear(6, 8),
            Affine(8),
            nn.Linear(8, 3),
        )
    )
    model[3].bias.requires_grad_(False)
    return model


MODELS = {
    "tied gpt": (TASKS["tied"].build, TASKS["tied"].loss_fn, TASKS["tied"].batch, "auto"),
    "partly frozen": (
        partly_frozen,
        F.mse_loss,
        lambda step: (randn(step, 8, 4), randn(9 + step, 8, 3)),
        {"3": "column", "4": "row"},
    ),
}
CHAIN = [
    ("dp 4", {}),
    ("tp 2, pp 2", {"microbatches": 3}),
    ("dp 4", {"zero_stage": 1}),
    ("dp 2, pp 2", {"microbatches": 2, "zero_stage": 3, "schedule": "zb-h1"}),
    (None, {}),
    ("pp 2, tp 2, dp 2", {"microbatches": 2, "zero_stage": 2, "sequence_parallel": True}),
    ("pp 2", {"microbatches": 4, "schedule": "interleaved", "chunks": 2}),
    (None, {}),
]


def go_on(name, mesh, options, path, until):
    build, loss_fn, batch, plan = MODELS[name]
    if mesh is None:
        trainer = p101.DataParallelTrainer(build(), loss_fn, adamw_by_shape)
    else:
        options = {
            **options,
            "sequence_parallel": name == "tied gpt" and options.get("sequence_parallel", False),
        }
        trainer = p101.HybridTrainer(
            build(),
            loss_fn,
            adamw_by_shape,
            mesh=mesh_of(mesh),
            plan=plan if "tp" in mesh else "auto",
            **options,
        )
    if path.exists():
        trainer.resume(path)
        # an option that only the checkpoint can tell the next
        trainer.optimizer.param_groups[0]["lr"] *= 0.5
    history = trainer.fit(batch, until=until, save_to=path, progress=False)
    return history.losses, trainer.state_dict()


@pytest.mark.parametrize("name", MODELS)
def test_a_run_that_moves_between_meshes_has_the_losses_of_one_process(name, tmp_path):
    chain, alone = tmp_path / "chain.pt", tmp_path / "alone.pt"
    for i, (mesh, options) in enumerate(CHAIN):
        here = name, mesh, options, chain, i + 1
        results = (
            p101.launch(go_on, *here, world_size=world_size(mesh), backend="sim").results
            if mesh
            else [go_on(*here)]
        )
        losses, weights = go_on(name, None, {}, alone, i + 1)
        for other_losses, other_weights in results:
            assert other_losses == pytest.approx(losses, rel=1e-10), (mesh, options)
            assert differing(other_weights, weights, 1e-10) == [], (mesh, options)
    saved, expected = (torch.load(path) for path in (chain, alone))
    assert differing(saved["model"], expected["model"], 1e-10) == []
    assert saved["optimizer"]["groups"] == expected["optimizer"]["groups"]
    assert saved["optimizer"]["state"].keys() == expected["optimizer"]["state"].keys()
    for key, state in expected["optimizer"]["state"].items():
        assert differing(saved["optimizer"]["state"][key], state, 1e-10) == []


def refused(path):
    trainer = p101.HybridTrainer(
        seeded(MLP([4, 8, 8, 3])),
        F.mse_loss,
        adamw_by_shape,
        mesh=mesh_of("pp 2, tp 2"),
        plan={"layers.0": "column", "layers.1": "row"},
    )
    before = trainer.state_dict()
    with pytest.raises(
        ValueError, match=r"the checkpoint is another model's: .*'layers\.1\.weight' is"
    ) as error:
        trainer.resume(path)
    assert differing(trainer.state_dict(), before, 0) == []
    return str(error.value)


def test_another_models_checkpoint_is_refused_in_the_same_words_on_every_rank(tmp_path):
    path = tmp_path / "other.pt"
    p101.DataParallelTrainer(seeded(MLP([4, 8, 7, 3])), F.mse_loss, adamw_by_shape).save(path)
    assert len(set(p101.launch(refused, path, world_size=4, backend="sim").results)) == 1
