"""How matrices are cut: each block of a resolved plan is drawn once, as large as its part, with
the collectives of its style.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallel101.laboratory.viz.matrices import matrices_scene
from parallel101.models.gpt import GPT, GPTConfig
from parallel101.models.mlp import MLP
from parallel101.trainers.layout import Axes, Entry, Shard
from parallel101.trainers.options import Options
from parallel101.trainers.tensor.loss import vocabulary_cross_entropy
from parallel101.trainers.tensor.tensor_axis import TensorAxis
from tests.viz.drawn import texts, title_of, titled


def cut(model: nn.Module, size: int, loss=F.mse_loss, plan="auto"):
    """The entries of the layout, and the styles, of a plan for this model."""
    axes, options = Axes(None, {"tp": size}), Options(plan=plan)
    resolved = TensorAxis(model, loss, axes, options)
    placed = {name: {"tp": shard} for name, shard in resolved.placements.items()}
    return {
        name: Entry(p.shape, p.dtype, placed.get(name, {})) for name, p in model.named_parameters()
    }, resolved.styles


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_blocks_are_as_large_as_their_part_and_fill_the_matrix(size):
    entries, styles = cut(MLP([64, 250, 32]), size)
    scene = matrices_scene(entries, styles)
    for name, side, other in (("layers.0", "width", "height"), ("layers.1", "height", "width")):
        blocks = titled(scene, f" of {name}.weight")
        sizes = entries[f"{name}.weight"].placements["tp"].sizes
        told = (re.match(r"position \d+: (\d+) of 250", title_of(block)) for block in blocks)
        found = [int(size[1]) for size in told]
        assert found == list(sizes)
        whole = sum(float(block.get(side)) for block in blocks)
        for block, part in zip(blocks, sizes, strict=True):
            assert float(block.get(side)) == pytest.approx(whole * part / 250, abs=0.02)
        assert len({block.get(other) for block in blocks}) == 1
    told = {"backward: all-reduce input gradient", "forward: all-reduce outputs"}
    assert told | {"64", "250", "32"} <= set(texts(scene))
    assert "layers.0.weight: 64 × 250, columns cut into" in scene.description
    assert "layers.1.weight: 250 × 32, rows" in scene.description


def test_layers_that_differ_in_their_number_only_are_drawn_once():
    entries, styles = cut(GPT(GPTConfig(60, tied=False)), 4, vocabulary_cross_entropy)
    scene = matrices_scene(entries, styles)
    said = texts(scene)
    told = {"blocks.*.mlp.up  × 4", "embedding.token", "not cut"}
    assert told | {"vocabulary: 4 × 15 rows", "vocabulary: 4 × 15 columns"} <= set(said)
    assert Counter(text for text in said if text.startswith(("forward: ", "backward: "))) == {
        "backward: all-reduce input gradient": 5,
        "forward: all-reduce outputs": 3,
    }
    assert "Column layers with the same input share one collective." in " ".join(said)


def test_styles_follow_from_the_placements_if_they_are_not_given():
    entries, styles = cut(MLP([64, 256, 64]), 2)
    drawn = {matrices_scene(entries, s).svg() for s in (None, styles, {"layers.0": "column"})}
    assert len(drawn) == 1
    entries, styles = cut(MLP([64, 256, 64, 10]), 2)
    assert "forward: all-gather outputs" in texts(matrices_scene(entries, styles))


def test_fused_matrices_are_cut_in_each_part():
    entries = {"0.weight": Entry(torch.Size([24, 8]), torch.float32, {"tp": Shard(0, (12, 12), 3)})}
    blocks = titled(matrices_scene(entries), "position ")
    titles = [f"position {i}: 4 of 24 columns of 0.weight" for i in range(2)]
    assert [*map(title_of, blocks)] == 3 * titles


def test_sequence_parallel_has_other_collectives():
    entries, styles = cut(MLP([64, 256, 64]), 2)
    told = {*texts(matrices_scene(entries, styles, sequence_parallel=True))}
    assert {"forward: all-gather inputs", "forward: reduce-scatter outputs"} <= told
    assert "backward: reduce-scatter input gradient" in told
