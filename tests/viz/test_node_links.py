"""The picture of a node: the figures of hardware.py, and lines as wide as their bandwidth."""

from __future__ import annotations

import dataclasses
import re

import pytest

from parallel101.cost import CHIPS, Level
from parallel101.laboratory.viz.node_links import node_scene
from tests.viz.drawn import elements, texts

H100 = CHIPS["H100"]


def widths(scene, kind):
    """The widths of the lines of a kind, in the diagram and in the legend."""
    return {float(path.get("stroke-width")) for path in elements(scene, "path", f"link {kind}")}


@pytest.mark.parametrize("gpus", [1, 4, 8])
def test_lines_are_as_wide_as_their_bandwidth_and_each_gpu_has_its_card_and_rail(gpus):
    levels = (Level("node", gpus, 200e9, 1e-6), Level("leaf", 5, 50e9 * gpus, 1e-6, rails=gpus))
    scene = node_scene(dataclasses.replace(H100, name="G1", links=levels, pcie_bandwidth=100e9))
    (nvlink,), (pcie,), (net,) = (widths(scene, kind) for kind in ("nvlink", "pcie", "net"))
    assert (nvlink / pcie, nvlink / net) == (pytest.approx(2), pytest.approx(4))
    words = texts(scene)
    assert {f"{part} {gpus - 1}" for part in ("GPU", "card", "rail")} <= set(words)
    assert f"GPU {gpus}" not in words
    assert {"200 GB/s", "100 GB/s", "50 GB/s"} <= set(words)
    assert "G1" in scene.title and "Rail i connects card i of 5 nodes." in " ".join(words)


def test_the_figures_are_those_of_the_table():
    node, leaf, _ = H100.links
    words = " ".join(texts(node_scene()))
    for rate in (node.bandwidth, 2 * node.bandwidth, H100.pcie_bandwidth, leaf.bandwidth):
        assert f"{rate / 1e9:g} GB/s" in words
    assert re.search(rf"\b{8e-9 * leaf.bandwidth / leaf.rails:g} Gbit/s", words)
