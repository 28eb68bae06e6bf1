"""A layout takes parameters apart and puts them together, on any mesh: nothing is lost, and
nothing counts twice.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

import parallel101 as p101
from parallel101.mesh import split_sizes
from parallel101.models.mlp import MLP
from parallel101.trainers.layout import Axes, Entry, Layout, Pieces, Shard, Stages

CPU = torch.device("cpu")


def bounds(n, p):
    """n elements cut into p pieces, the last ones possibly empty, as a flat block of ZeRO cuts
    them.
    """
    block = -(-n // p)
    return tuple((min(i * block, n), min((i + 1) * block, n)) for i in range(p))


def entries(sizes):
    """Parameters that are placed in every way these axes allow."""
    dp, tp, pp = (sizes.get(axis, 1) for axis in ("dp", "tp", "pp"))
    rows, columns = Shard(0, tuple(split_sizes(7, tp))), Shard(1, tuple(split_sizes(5, tp)))
    ways = {
        "replicated": {},
        "rows": {"tp": rows},
        "columns": {"tp": columns},
        "pieces": {"dp": Pieces(bounds(35, dp))},
        "on the last stage": {"pp": Stages((pp - 1,))},
        "tied": {"pp": Stages((0, pp - 1) if pp > 1 else (0,))},
        "columns on a stage": {"pp": Stages((pp - 1,)), "tp": columns},
    }
    found = {
        name: Entry(
            torch.Size((7, 5)),
            torch.float64,
            {axis: how for axis, how in placements.items() if axis in sizes},
        )
        for name, placements in ways.items()
    }
    if tp == 1 and "dp" in sizes:
        both = {"pp": Stages((0,)), "dp": Pieces(bounds(35, dp))}
        found["pieces on a stage"] = Entry(
            torch.Size((7, 5)), torch.float64, {a: how for a, how in both.items() if a in sizes}
        )
    found["whole numbers"] = Entry(
        torch.Size((3,)),
        torch.int64,
        {"tp": Shard(0, tuple(split_sizes(3, tp)))} if "tp" in sizes else {},
    )
    found["empty"] = Entry(
        torch.Size((0, 4)), torch.float64, {"dp": Pieces(bounds(0, dp))} if "dp" in sizes else {}
    )
    return found


def wholes(found):
    """Numbers that differ everywhere, so that no permutation passes."""
    values = {}
    for i, (name, entry) in enumerate(found.items()):
        values[name] = (
            (torch.arange(entry.shape.numel()) + 100 * i).view(entry.shape).to(entry.dtype)
        )
    return values


def taken_apart_and_put_together(sizes):
    axes = Axes(None, sizes)
    found = entries(sizes)
    layout, whole = Layout(axes, found, CPU), wholes(found)
    parts = {name: layout.cut(name, value) for name, value in whole.items()}
    held = {name: part for name, part in parts.items() if part.numel()}
    together = layout.gather(held, list(found))
    for name, value in whole.items():
        assert torch.equal(together[name], value), name
        assert torch.equal(
            layout.join(name, lambda at, name=name, value=value: layout.cut(name, value, at)), value
        ), name
        assert layout.shape(name) == parts[name].shape
    numbers = {name: part for name, part in held.items() if part.is_floating_point()}
    expected = torch.nn.utils.get_total_norm(
        [value for value in whole.values() if value.is_floating_point()]
    )
    return float(layout.norm(numbers)) / float(expected), {
        name: layout.counts(name) * parts[name].numel() for name in found
    }


MESHES = [
    {"dp": 1},
    {"dp": 3},
    {"tp": 4},
    {"pp": 3},
    {"dp": 2, "tp": 3},
    {"tp": 2, "dp": 2},
    {"dp": 2, "pp": 2},
    {"dp": 2, "pp": 2, "tp": 2},
    {"pp": 2, "dp": 2, "tp": 2},
]


@pytest.mark.parametrize(
    "sizes",
    MESHES,
    ids=[" x ".join(f"{axis} {n}" for axis, n in sizes.items()) for sizes in MESHES],
)
def test_every_part_is_found_again_and_every_element_counts_once(sizes):
    world_size = 1
    for n in sizes.values():
        world_size *= n
    results = p101.launch(
        taken_apart_and_put_together, sizes, world_size=world_size, backend="sim"
    ).results
    found = entries(sizes)
    cut = {axis for entry in found.values() for axis in entry.placements}
    copies = world_size
    for axis in cut:
        copies //= sizes[axis]  # lines of ranks that each have everything
    for name, entry in found.items():
        assert sum(counted[name] for _, counted in results) == copies * entry.shape.numel(), name
    assert {ratio for ratio, _ in results} == {results[0][0]}, "the same norm on every rank"
    assert results[0][0] == pytest.approx(1, rel=1e-12)


def step_on_a_mesh(sizes):
    """A whole model on every rank, samples cut over dp only: ranks along tp do the same."""
    axes, x = Axes(None, sizes), torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4)
    trainer = p101.HybridTrainer(
        MLP([4, 8, 4], dtype=torch.float64),
        F.mse_loss,
        lambda p: torch.optim.SGD(p, lr=0.1),
        mesh=axes,
        plan=None,
        overlap=False,
        bucket_bytes=0,
        accumulate=2,
        clip_norm=0.1,
    )
    losses = [trainer.step(*trainer.share((x, x.sin()))) for _ in range(3)]
    return losses, trainer.evaluate([(x, x.sin())]), trainer.state_dict()


def test_losses_errors_and_weights_are_agreed_on_over_the_whole_mesh():
    losses, evaluated, weights = step_on_a_mesh({"dp": 1})
    for sizes in ({"dp": 2, "tp": 2}, {"tp": 3, "dp": 1}, {"dp": 4}):
        world_size = sizes["dp"] * sizes.get("tp", 1)
        for found in p101.launch(
            step_on_a_mesh, sizes, world_size=world_size, backend="sim"
        ).results:
            assert found[0] == pytest.approx(losses, rel=1e-12)
            assert found[1] == pytest.approx(evaluated, rel=1e-12)
            torch.testing.assert_close(found[2], weights, rtol=1e-12, atol=1e-15)


def test_coordinates_and_lines_of_a_mesh():
    def lines():
        axes = Axes(None, {"dp": 2, "pp": 1, "tp": 3})
        return axes.here, axes.line(["tp"]), axes.line(["dp"]), axes.along(["tp", "dp"])

    for rank, (here, tp, dp, everything) in enumerate(
        p101.launch(lines, world_size=6, backend="sim").results
    ):
        assert here == {"dp": rank // 3, "pp": 0, "tp": rank % 3}
        assert tp == [3 * (rank // 3) + i for i in range(3)]
        assert dp == [rank % 3, rank % 3 + 3]
        assert everything.ranks == tuple(range(6)) and everything.position == rank


def test_a_layout_says_in_words_how_parameters_are_placed():
    layout = Layout(
        Axes(None, {"dp": 1, "tp": 1, "pp": 1}), entries({"dp": 1, "tp": 1, "pp": 1}), CPU
    )
    told = list(layout.describe())
    assert "replicated: replicated" in told
    assert "pieces: in flat pieces over dp" in told or any(
        "in flat pieces over dp" in line for line in told
    )
    assert "columns on a stage: on stage 0 over pp and sharded along dim 1 over tp" in told
    assert len(told) == len(set(itertools.chain(told)))
