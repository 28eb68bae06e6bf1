"""The atlas of collectives: a page that plays recorded runs of every collective and algorithm.

    recorded_collectives.py ── runs on the simulator, when the site is written
        ──▶ the page, with steps, bytes and seconds of all runs
        ──▶ atlas/all_reduce.ring.js, …: the pictures of one algorithm, loaded when it is chosen
    collectives_atlas.js    the choice, the address, and what is shown; viz/player.js plays it

A picture is an SVG of many elements, and most of them are the same in several runs. So a file has
each element once, and of each picture the numbers of its elements. It is compressed, and in base64,
because a page that was opened from a disk can load scripts only.
"""

from __future__ import annotations

import json
import re
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import groupby
from typing import Any, NamedTuple

from parallel101.laboratory.publish.tools.recorded_collectives import (
    BANDWIDTH,
    INSIDE_BANDWIDTH,
    INSIDE_LATENCY,
    LARGE,
    LATENCY,
    NETWORKS,
    OPERATIONS,
    RANKS,
    SMALL,
    Choice,
    RecordedRun,
    algorithm_name,
    algorithms,
    all_choices,
    record,
)
from parallel101.laboratory.record.units import human_bytes, human_seconds
from parallel101.laboratory.viz.scene import PLAYER, PLAYER_CSS, Scene

ADDRESS, TITLE = "atlas_of_collectives.html", "Atlas of collectives"
FOLDER = "atlas"
START = Choice("all_reduce", "ring", 8, "switch")
BESIDE = "recursive_doubling"  # the algorithm beside it when the page opens
Facts = dict[str, dict[str, dict[str, RecordedRun]]]  # by operation, algorithm, and ranks,network


class Atlas(NamedTuple):
    """What is written."""

    page: str  # its body
    records: dict[str, str]  # by the path of the file, from the page


def _file(name: str) -> str:
    return files("parallel101.laboratory.publish.tools").joinpath(name).read_text(encoding="utf-8")


def collectives_atlas(chosen: Sequence[Choice] | None = None) -> Atlas:
    """Record these runs, and return the page and the files beside it.

    By default all of them, which takes half a minute.
    """
    facts: Facts = {}
    records = {}
    of_algorithm = groupby(chosen or all_choices(), lambda choice: choice[:2])
    for (operation, algorithm), runs in of_algorithm:
        recorded = {_key(choice): record(choice) for choice in runs}
        facts.setdefault(operation, {})[algorithm] = {k: run for k, (run, _) in recorded.items()}
        name = f"{operation}.{algorithm}"
        pictures = {key: scene for key, (_, scene) in recorded.items()}
        records[f"{FOLDER}/{name}.js"] = record_script(name, pictures)
    return Atlas(collectives_atlas_page(facts), records)


def record_script(name: str, pictures: Mapping[str, Scene]) -> str:
    """The pictures of an algorithm as a script."""
    elements: dict[str, int] = {}
    runs = {}
    for key, scene in pictures.items():
        tags = re.split("(?=<)", scene.svg(smil=True))
        numbers = [elements.setdefault(tag, len(elements)) for tag in tags]
        runs[key] = {"svg": numbers, "alt": scene.alt, "setup": scene.player_setup()}
    text = _json({"elements": list(elements), "runs": runs})
    return f'atlasRecord("{name}","{b64encode(zlib.compress(text.encode())).decode()}");\n'


def collectives_atlas_page(facts: Facts) -> str:
    """Return the body of the page, for these runs."""
    large, small = sizes = [human_bytes(LARGE), human_bytes(SMALL)]
    given = {
        "operations": {name: OPERATIONS[name] for name in facts},
        "networks": NETWORKS,
        "names": {name: algorithm_name(name) for of in facts.values() for name in of},
        "what": {name: {a: what(name, a) for a in of} for name, of in facts.items()},
        "facts": facts,
        "start": START._asdict() | {"beside": BESIDE},
        "sizes": sizes,
        "css": PLAYER_CSS,
    }
    opening = facts.get(START.operation, {})
    return f"""<nav><a href="index.html">All lessons</a></nav>
<style>{_file("collectives_atlas.css")}</style>
<main class="atlas">
<h1>{TITLE}</h1>
<p class="text">In a collective, all ranks work together to copy, add or exchange arrays. Several
algorithms reach the same result with different messages. Choose one and watch a recorded run. Then
put another beside it: which is faster with a large array, and which with a small one?</p>
<noscript><p class="needs-kernel">Choosing and playing needs JavaScript, which is switched off
here. The table shows one choice.</p></noscript>
<form class="choice" hidden>
<label>Operation <select id="operation">{_options(given["operations"])}</select></label>
<label>Algorithm <select id="algorithm"></select></label>
<label>Beside it <select id="beside"></select></label>
<label>Ranks <select id="ranks">{_options({n: n for n in RANKS})}</select></label>
<label>Network <select id="network">{_options(NETWORKS)}</select></label>
</form>
<p id="said" role="status" hidden></p>
<div class="both" role="group" aria-label="Both pictures" hidden>
<button id="play-both">Play both from the start</button>
<button id="next-both">Next step in both</button></div>
<div class="shown" hidden></div>
<h2 id="all">All algorithms for this choice</h2>
<p class="text" id="chosen">{chosen_words(START)}</p>
<div class="scroll"><table class="algorithms"><thead><tr><th>Algorithm</th>
<th class="number">Steps</th><th class="number">Time, {large}</th>
<th class="number">Time, {small}</th><th class="number">Busiest rank sends</th>
<th class="number">All ranks send</th></tr></thead><tbody>{_rows(opening)}</tbody></table></div>
{_notes(large, small)}
<h2>The algorithms</h2>
<p class="text">Here p is the number of ranks, n the bytes of the array, and lg the logarithm to
base 2. Each name leads to its run.</p>
{_catalogue(facts)}
</main>
<script>{PLAYER}
const GIVEN = {_json(given)};
{_file("collectives_atlas.js")}</script>"""


def chosen_words(choice: Choice) -> str:
    """The choice of the table, in words."""
    return (
        f"{OPERATIONS[choice.operation]}, {choice.ranks} ranks, {NETWORKS[choice.network].lower()}."
    )


def what(operation: str, algorithm: str) -> str:
    """What an algorithm does: the first paragraph of its docstring."""
    said = algorithms(operation)[algorithm].__doc__ or ""
    return " ".join(said.partition("\n\n")[0].split())


def _key(choice: Choice) -> str:
    return f"{choice.ranks},{choice.network}"


def _json(value: Any) -> str:
    """JSON that is safe inside a <script>."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _options(names: Any) -> str:
    return "".join(f'<option value="{value}">{name}</option>' for value, name in names.items())


def _rows(of: Mapping[str, Mapping[str, RecordedRun]]) -> str:
    rows = []
    for name, run in [(name, runs[_key(START)]) for name, runs in of.items()]:
        cells = (
            f"{run.steps}",
            human_seconds(run.seconds),
            human_seconds(run.seconds_small),
            human_bytes(run.busiest),
            human_bytes(run.total),
        )
        numbers = "".join(f'<td class="number">{cell}</td>' for cell in cells)
        rows.append(f"<tr><td>{algorithm_name(name)}</td>{numbers}</tr>")
    return "".join(rows)


def _notes(large: str, small: str) -> str:
    link = f"{human_seconds(LATENCY)} and {BANDWIDTH / 1e9:g} GB/s"
    inside = f"{human_seconds(INSIDE_LATENCY)} and {INSIDE_BANDWIDTH / 1e9:g} GB/s"
    return f"""<h2>What is counted</h2>
<dl class="text notes">
<dt>Steps</dt><dd>The number of messages that follow one another, each of which pays the latency.
The picture's steps can differ, because it plays one message per rank at a time, or one per
neighbour along a ring. On a torus, the links of a rank work at once, so there are fewer steps than
in the picture. Where messages wait for a link, there are more.</dd>
<dt>Bytes</dt><dd>Sent with an array of {large}. The array is the result of a gather or an
all-gather, and the input of every other operation. Why 105? It is 3 · 5 · 7, so all these numbers
of ranks can cut the array into equal blocks. A barrier has no array and sends single bytes.</dd>
<dt>Time</dt><dd>In seconds of the simulator's virtual clock. Messages take time, additions
don't.</dd>
<dt>Pictures</dt><dd>The run with {large}. Up to 8 ranks, a picture shows whose data is where: each
block then has a few numbers, and the network takes each of them for an equal share of the {large}.
With 16 and 64 ranks, a picture sums up each step. A pipelined chain cuts its array into as many
segments as there are ranks, and at least 8.</dd>
<dt>Switch</dt><dd>Each rank has a link of {link} to a switch. A link carries one message at a time
in each direction.</dd>
<dt>Ring, torus</dt><dd>Each rank has such links to the ranks on its left and right, and on a torus
also to those above and below. The torus is the most square grid. A message to a rank further away
occupies every link on its way.</dd>
<dt>Two nodes</dt><dd>Each node has half of the ranks, with links of {inside} inside it. All ranks
of a node share one link of {link} to the other node.</dd>
</dl>"""


def _catalogue(facts: Facts) -> str:
    parts = []
    for operation, of in facts.items():
        links = "".join(
            f'<dt><a href="#operation={operation}&amp;algorithm={name}">{algorithm_name(name)}</a>'
            f"</dt><dd>{escape(what(operation, name))}</dd>"
            for name in of
        )
        parts.append(f"<h3>{OPERATIONS[operation]}</h3><dl>{links}</dl>")
    return f'<div class="catalogue">{"".join(parts)}</div>'
