"""Memory per rank: bars are as long as their bytes, and each shard is at its own place."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from parallel101.laboratory.record.units import decimal_bytes
from parallel101.laboratory.viz.memory_per_rank import LEFT, RIGHT, memory_scene
from parallel101.trainers.memory import readable
from tests.viz.drawn import elements, texts, titled


def counted(**kinds):
    by_kind = {name.replace("_", " "): counts for name, counts in kinds.items()}
    return SimpleNamespace(ranks=range(len(next(iter(by_kind.values())))), bytes=by_kind)


def bars(scene, kind):
    """(left, width) of each solid bar of a kind, from the top."""
    found = sorted(titled(scene, f"{kind}: "), key=lambda r: float(r.get("y")))
    return [(float(r.get("x")), float(r.get("width"))) for r in found]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_shards_are_side_by_side_and_fill_the_whole_bar(n):
    held = {"all": 2400, "shared": 2400 // n}
    scene = memory_scene(
        {k: counted(weights=[1200] * n, optimizer_state=[of] * n) for k, of in held.items()}
    )
    states = bars(scene, "optimizer state")
    full, shared = states[:n], states[n:]
    assert {width for _, width in full} == {full[0][1]}
    for i, (left, width) in enumerate(shared):
        assert width == pytest.approx(full[0][1] / n, abs=0.1)
        assert left == pytest.approx(full[0][0] + i * width, abs=0.1)
    weights = bars(scene, "weights")
    assert weights[0] == weights[-1] and weights[0][1] * 2 == pytest.approx(full[0][1], abs=0.1)
    assert ">3.6 kB<" in scene.svg() and f">{decimal_bytes(1200 + 2400 // n)}<" in scene.svg()


def test_uneven_shards_stay_inside_the_bar_and_a_rank_may_hold_nothing():
    scene = memory_scene({"all": counted(weights=[900] * 3), "cut": counted(weights=[600, 600, 0])})
    full, *rest = bars(scene, "weights")
    assert len(rest) == 4
    assert all(left >= LEFT and left + width <= full[0] + full[1] + 0.1 for left, width in rest)
    assert full[0] + full[1] <= RIGHT
    # parts that several ranks hold are not side by side
    scene = memory_scene({"all": counted(weights=[800] * 4), "2 × 2": counted(weights=[400] * 4)})
    (left, whole), *_ = bars(scene, "weights")
    assert {*bars(scene, "weights")[4:]} == {(left, whole / 2)}


def test_bars_are_where_the_rank_s_part_of_the_model_is():
    parts = {"weights": [[(0.0, 0.25)], [(0.25, 0.5)], [(0.5, 0.75)], [(0.75, 0.8), (0.9, 1.0)]]}
    cut = counted(weights=[200, 200, 200, 120])
    cut.parts = parts
    whole = counted(weights=[800] * 4)
    whole.parts = {"weights": [[(0.0, 1.0)]] * 4}
    scene = memory_scene({"all": whole, "pp 2 × tp 2": cut})
    (left, width), *_ = bars(scene, "weights")
    expected = [part for of in parts["weights"] for part in of]
    for (at, wide), (low, high) in zip(bars(scene, "weights")[4:], expected, strict=True):
        assert at == pytest.approx(left + low * width, abs=0.1)
        assert wide == pytest.approx((high - low) * width, abs=0.1)


def test_without_a_rank_that_holds_everything_shards_are_side_by_side():
    """Then nothing in the picture says how long the whole model is, or there is no model at all."""
    cut = counted(weights=[300, 300])
    cut.parts = {"weights": [[(0.0, 0.5)], [(0.5, 1.0)]]}
    (one, width), (other, _) = bars(memory_scene(cut), "weights")
    assert one == other == LEFT and width > 600
    assert "0 B" in texts(memory_scene(counted(weights=[0, 0])))


def test_temporary_memory_is_not_drawn_as_a_shard():
    held = {"gathered (peak)": [100, 50], "weights": [200, 200]}
    scene = memory_scene(SimpleNamespace(ranks=[0, 1], bytes=held))
    weights, gathered = bars(scene, "weights"), bars(scene, "gathered (peak)")
    assert gathered[0][0] == gathered[1][0] > weights[0][0]
    assert len(elements(scene, "rect", "others")) == 2 and {"300 B", "250 B"} <= {*texts(scene)}


@pytest.mark.parametrize("count", [0, 999, 999.6, 1234, 18_874_368, 7.5e9, 2.8e12])
def test_the_picture_writes_bytes_as_the_table_does(count):
    assert decimal_bytes(count) == readable(count)
