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

import re
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from itertools import groupby

from markupsafe import Markup
from tqdm import tqdm

from parallel101.laboratory.publish.offline_page import Page, offline_html
from parallel101.laboratory.publish.templates import render
from parallel101.laboratory.publish.tools.recorded_collectives import (
    BANDWIDTH,
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
from parallel101.laboratory.viz.collective_run import INSIDE_BANDWIDTH, INSIDE_LATENCY
from parallel101.laboratory.viz.scene import PLAYER, PLAYER_CSS, Scene, script_json

PAGE = Page(
    "atlas_of_collectives.html",
    "Atlas of collectives",
    "Play recorded runs of all collectives and algorithms, two side by side.",
    "watch animation compare",
    "Play with an all-reduce",
)
FOLDER = "atlas"
START = Choice("all_reduce", "ring", 8, "switch")
BESIDE = "recursive_doubling"  # the algorithm beside it when the page opens
Facts = dict[str, dict[str, dict[str, RecordedRun]]]  # by operation, algorithm, and ranks,network


def files(chosen: Sequence[Choice] | None = None) -> dict[str, str]:
    """Record these runs, and return the page and the scripts with their pictures.

    By default all of them, which takes half a minute.
    """
    facts: Facts = {}
    scripts = {}
    choices = list(chosen or all_choices())
    with tqdm(total=len(choices), desc=PAGE.title, unit="run", leave=False, disable=None) as bar:
        for (operation, algorithm), runs in groupby(choices, lambda choice: choice[:2]):
            pictures, found = {}, {}
            for choice in runs:
                found[_key(choice)], pictures[_key(choice)] = record(choice)
                bar.update()
            facts.setdefault(operation, {})[algorithm] = found
            name = f"{operation}.{algorithm}"
            scripts[f"{FOLDER}/{name}.js"] = record_script(name, pictures)
    html = offline_html(PAGE.title, collectives_atlas_page(facts), scripts_beside=True)
    return {**scripts, PAGE.address: html}


def record_script(name: str, pictures: Mapping[str, Scene]) -> str:
    """Return the pictures of an algorithm as a script."""
    elements: dict[str, int] = {}
    runs = {}
    for key, scene in pictures.items():
        tags = re.split("(?=<)", scene.svg(smil=True))
        numbers = [elements.setdefault(tag, len(elements)) for tag in tags]
        runs[key] = {"svg": numbers, "alt": scene.alt, "setup": scene.player_setup()}
    text = script_json({"elements": list(elements), "runs": runs})
    return f'atlasRecord("{name}","{b64encode(zlib.compress(text.encode())).decode()}");\n'


def collectives_atlas_page(facts: Facts) -> str:
    """Return the body of the page, for these runs."""
    given = {
        "operations": {name: OPERATIONS[name] for name in facts},
        "networks": NETWORKS,
        "names": {name: algorithm_name(name) for of in facts.values() for name in of},
        "what": {name: {a: what(name, a) for a in of} for name, of in facts.items()},
        "facts": facts,
        "start": START._asdict() | {"beside": BESIDE},
        "sizes": [human_bytes(LARGE), human_bytes(SMALL)],
        "css": PLAYER_CSS,
    }
    return render(
        "collectives_atlas",
        title=PAGE.title,
        given=given,
        ranks=RANKS,
        chosen=chosen_words(START),
        opening={name: runs[_key(START)] for name, runs in facts.get(START.operation, {}).items()},
        seconds=human_seconds,
        bytes=human_bytes,
        link=f"{human_seconds(LATENCY)} and {BANDWIDTH / 1e9:g} GB/s",
        inside=f"{human_seconds(INSIDE_LATENCY)} and {INSIDE_BANDWIDTH / 1e9:g} GB/s",
        player=Markup(PLAYER),
    )


def chosen_words(choice: Choice) -> str:
    """Return the choice of the table, in words."""
    operation, _, ranks, network = choice
    return f"{OPERATIONS[operation]}, {ranks} ranks, {NETWORKS[network].lower()}."


def what(operation: str, algorithm: str) -> str:
    """Return what an algorithm does: the first paragraph of its docstring."""
    said = algorithms(operation)[algorithm].__doc__ or ""
    return " ".join(said.partition("\n\n")[0].split())


def _key(choice: Choice) -> str:
    return f"{choice.ranks},{choice.network}"
