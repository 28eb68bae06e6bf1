"""Draws what connects the GPUs of a node: each line is as wide as its bandwidth.

              NVSwitch                    inside the node: any GPU to any other
         ┃   ┃   ┃   ┃   ┃
       GPU 0   …      GPU 7
    CPU ─┼───┼───┼───┼───┤                PCIe
       card 0  …      card 7
─────────┼───┼───┼───┼───┼───────
       rail 0  …      rail 7              switches: card i of every node is on rail i
         │   │   │   │   │
           the next node

The figures are those of `parallel101.cost`. A picture of a run is in the other files.
"""

from __future__ import annotations

import textwrap

from parallel101.cost.hardware import Chip, Torus, chip_of
from parallel101.laboratory.record.units import decimal_bytes
from parallel101.laboratory.viz.scene import END, Node, Scene

LEFT, COLUMN, BOX = 122.0, 64.0, 50.0  # the first GPU's centre, to the next one's, a box's width
RIGHT = 606.0  # end of the nodes
LEGEND = 644.0
WIDE = 18.0  # the fastest link
MOST_GPUS = 8
# top and bottom of each row
SWITCH, GPU, CARD, RAIL, NEXT = (104, 136), (186, 218), (272, 304), (356, 388), (428, 460)
PCIE = (GPU[1] + CARD[0]) / 2
STYLE = (
    ".node{fill:none;stroke:var(--line);stroke-dasharray:4 4}"
    ".part{fill:var(--bg);stroke:var(--ink)}.port{fill:var(--bg);stroke:var(--p2);stroke-width:2}"
    ".nvlink{stroke:var(--p0)}.pcie{stroke:var(--p2)}.net{stroke:var(--p3)}"
)


def node_scene(chip: str | Chip = "H100") -> Scene:
    """Draw the links of a node of GPUs, with one network card for each GPU.

    Args:
        chip: a name in `cost.CHIPS`, or a Chip.

    Returns:
        A still Scene: the links at the left, their bytes per second in one direction at the right.

    Raises:
        ValueError: the chip has no switched nodes, more than 8 GPUs in one, or not one rail for
            each GPU; or its PCIe bandwidth is unknown.
    """
    chip = chip_of(chip)
    if isinstance(chip.links, Torus) or len(chip.links) < 2 or chip.pcie_bandwidth is None:
        raise ValueError(
            f"{chip.name} can't be drawn: expected a GPU whose levels are known inside the node "
            "and beyond it, and its pcie_bandwidth, such as the H100"
        )
    node, leaf = chip.links[0], chip.links[1]
    if not 1 <= node.size <= MOST_GPUS or leaf.rails != node.size:
        raise ValueError(
            f"{chip.name} has {node.size} GPUs and {leaf.rails} rails in a node: this picture "
            f"shows up to {MOST_GPUS} GPUs with one rail each"
        )
    card = leaf.rail_bandwidth
    scene = Scene(960, 488, f"What connects the GPUs of {chip.name} nodes")
    scene.description = (
        f"NVLink and NVSwitch inside the node: {per_second(node.bandwidth)} per GPU. PCIe to the "
        f"CPUs and to the GPU's card: {per_second(chip.pcie_bandwidth)}. Each card to the switch "
        f"of its rail: {per_second(card)}. All in one direction."
    )
    scene.style += STYLE
    scene.narrow = (640, 848)
    scene.head("", "Lines are as wide as their bandwidth. All figures are for one direction.")
    nvlink = "From each GPU into its node's NVSwitches. Both directions, as advertised: "
    nvlink += f"{per_second(2 * node.bandwidth)}."
    network = f"{8e-9 * card:.0f} Gbit/s InfiniBand or Ethernet, from each card into the switch "
    network += f"of its rail. {leaf.rails} rails carry {per_second(leaf.bandwidth)} for a node."
    links = {
        "nvlink": ("NVLink", node.bandwidth, nvlink),
        "pcie": ("PCIe", chip.pcie_bandwidth, "Between a GPU, its network card and the CPUs."),
        "net": ("Network", card, network),
    }
    widths = {kind: WIDE / node.bandwidth * rate for kind, (_, rate, _) in links.items()}
    # the node, the switches of the rails, and the top of the next node
    panel = scene.panel(narrow="translate(0,-24)")
    middles = [LEFT + COLUMN * i for i in range(node.size)]
    for title, top, bottom in (("node 0", 84.0, 324.0), ("node 1", 408.0, 472.0)):
        panel.rect(28, top, RIGHT - 28, bottom - top, "node", rx=8)
        panel.write(title, 38, top + 18, 14, "m")
    panel.path(f"M78 {PCIE}H{middles[-1]}", "link pcie", stroke_width=widths["pcie"])
    for x in middles:
        for kind, top, bottom in (
            ("nvlink", SWITCH[1], GPU[0]),
            ("pcie", GPU[1], CARD[0]),
            ("net", CARD[1], RAIL[0]),
            ("net", RAIL[1], NEXT[0]),
        ):
            panel.path(f"M{x} {top}V{bottom}", f"link {kind}", stroke_width=widths[kind])
        panel.rect(x - 5, PCIE - 5, 10, 10, "port", rx=2)
    across = middles[-1] - middles[0] + BOX
    _box(panel, middles[0] - BOX / 2, SWITCH, across, "NVSwitch")
    _box(panel, 36, (PCIE - 34, PCIE + 34), 42, "CPUs")
    rows = {"GPU": GPU, "card": CARD, "rail": RAIL}
    for i, x in enumerate(middles):
        for name, row in (*rows.items(), ("card", NEXT)):
            _box(panel, x - BOX / 2, row, BOX, f"{name} {i}")
    panel, y = scene.panel(narrow=f"translate({28 - LEGEND:g},376)"), 112.0
    for kind, (name, rate, text) in links.items():
        panel.path(f"M{LEGEND} {y - 5}h30", f"link {kind}", stroke_width=widths[kind])
        panel.write(name, LEGEND + 42, y, 15, "b")
        panel.write(per_second(rate), END, y, 15, "b e")
        lines = textwrap.wrap(text, 34)
        panel.lines(lines, LEGEND + 42, y + 20, 20, 14, "m")
        y += 20 * len(lines) + 44
    drawn = f"Rail i connects card i of {leaf.size} nodes. Two are drawn."
    panel.lines(textwrap.wrap(drawn, 34), LEGEND + 42, y, 20, 14)
    return scene


def per_second(rate: float) -> str:
    return f"{decimal_bytes(rate)}/s"


def _box(panel: Node, x: float, row: tuple[float, float], width: float, name: str) -> None:
    panel.rect(x, row[0], width, row[1] - row[0], "part", rx=5)
    panel.label(name, (x, row[0], width, row[1] - row[0]), "", 14, 0)
