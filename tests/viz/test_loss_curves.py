"""Loss curves: drawn at the right place, collected from ranks, redrawn in place in a notebook."""

from __future__ import annotations

import pickle
import re
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import pytest

import parallel101.laboratory.viz.loss_curves as loss
from parallel101.laboratory.viz.loss_curves import BOTTOM, LEFT, RIGHT, TOP, LiveLoss, loss_scene
from parallel101.laboratory.viz.palette import THEMES
from tests.viz.drawn import SVG


def lines(scene):
    found = ET.fromstring(scene.svg()).iter(f"{SVG}polyline")
    return [[tuple(map(float, p.split(","))) for p in line.get("points").split()] for line in found]


@pytest.mark.parametrize("length", [1, 2, 300, 5000])
def test_a_curve_goes_through_its_points(length):
    scene = loss_scene({"1 rank": [(s, 2.0 / (1 + s)) for s in range(length)]})
    (line,) = lines(scene)
    assert line[0] == pytest.approx((LEFT, BOTTOM - (BOTTOM - TOP) / 1.05), abs=0.1)
    assert line[-1][0] == pytest.approx(RIGHT if length > 1 else LEFT, abs=0.1)
    assert len(line) <= 1000 and all(a[1] <= b[1] for a, b in zip(line, line[1:], strict=False))


@pytest.mark.parametrize("high", [0.0007, 0.3, 1.0, 4.97, 5.066, 11.0, 250.0])
def test_the_axis_has_round_numbers(high):
    scene = loss_scene({"1 rank": [(0, high), (9, high / 2)]})
    texts = [
        t for t in ET.fromstring(scene.svg()).iter(f"{SVG}text") if t.get("x") == f"{LEFT - 8:g}"
    ]
    ticks = [float(t.text) for t in texts]
    assert 4 <= len(ticks) <= 7 and ticks[0] == 0
    assert all(float(f"{tick:.1e}") == tick for tick in ticks)
    assert [float(t.get("y")) - 4 for t in texts] == pytest.approx(
        [BOTTOM - (BOTTOM - TOP) * t / (1.05 * high) for t in ticks], abs=0.1
    )


def test_histories_have_labels_that_do_not_touch():
    histories = {
        f"{n} ranks": SimpleNamespace(steps=[0, 1], losses=[3.0, 1.0 + n / 1000]) for n in range(5)
    }
    root = ET.fromstring(loss_scene(histories).svg())
    heights = sorted(
        float(t.get("y")) for t in root.iter(f"{SVG}text") if (t.text or "").endswith(" ranks")
    )
    assert len(heights) == 5
    assert all(b - a >= 17.9 for a, b in zip(heights, heights[1:], strict=False))
    with pytest.raises(ValueError, match="6 curves"):
        loss_scene({str(n): [(0, 1)] for n in range(6)})


def test_a_long_name_does_not_touch_its_value():
    name = "two ranks, then one"
    root = ET.fromstring(loss_scene({name: [(0, 3.0), (1, 2.0)]}).svg())
    (label,) = (t for t in root.iter(f"{SVG}text") if t.text == name)
    assert float(label.get("x")) + 8 * len(name) < 932 - 50


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_curves_follow_the_theme(theme):
    scene = loss_scene(SimpleNamespace(steps=[0], losses=[1.0]))
    assert f".l0{{stroke:{THEMES[theme]['p0']}}}" in scene.svg(theme=theme)
    assert ".l0{stroke:var(--p0)}" in scene.svg() and f"--p0:{THEMES[theme]['p0']};" in scene.svg()
    ET.fromstring(scene.svg(theme=theme))


def test_ranks_add_to_what_the_notebook_draws():
    with LiveLoss(until=3) as live:
        there = pickle.loads(pickle.dumps(live))  # as it travels to a rank
        for step in range(3):
            there.add("2 ranks", step, 3.0 - step)
        live.add("1 rank", 0, 3.0)
        with open(live.path, "a", encoding="utf-8") as file:
            file.write('["2 ranks", 3')  # half a line, as if a rank were still writing it
        assert live.update()
        assert live.curves == {
            "2 ranks": [(0, 3.0), (1, 2.0), (2, 1.0)],
            "1 rank": [(0, 3.0)],
        }
        assert not live.update()
        with open(live.path, "a", encoding="utf-8") as file:
            file.write(", 0.5]\n")
    assert live.curves["2 ranks"][-1] == (3, 0.5) and not live.path.exists()
    assert "2 ranks" in live.scene().svg()


def test_it_is_redrawn_in_place_and_stays(monkeypatch):
    shown = []
    handle = SimpleNamespace(update=shown.append)
    monkeypatch.setattr(loss, "in_notebook", lambda: True)
    monkeypatch.setattr(
        "IPython.display.display", lambda first, display_id: shown.append(first) or handle
    )
    with LiveLoss("falling") as live:
        live.add("loss", 0, 1.0)
    assert re.search(r'<img alt="falling".*data:image/svg\+xml;base64,', shown[0].data)
    assert isinstance(shown[-1], loss.Scene) and "polyline" in shown[-1].svg()
