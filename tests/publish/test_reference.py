"""The reference has every public name and nothing else, and each of its links leads somewhere."""

from __future__ import annotations

import posixpath

from bs4 import BeautifulSoup

import parallel101 as p101
from parallel101 import cost, layers, models, sharding
from parallel101.laboratory.publish.page import external_addresses
from parallel101.laboratory.publish.reference import (
    ADDRESS,
    first_sentence,
    make_reference,
    with_columns,
)


def test_the_reference():
    """One test, since making the reference takes seconds."""
    made, names = make_reference()
    pages = {page: BeautifulSoup(html, "html.parser") for page, html in made.items()}
    # every public name has a section, and no other
    for module in (p101, cost, layers, models, sharding):
        page = pages[f"reference/{module.__name__.replace('.', '/')}.html"]
        assert {section["id"] for section in page.select("main > section")} == {*module.__all__}
    # with its signature, docstring, example and source
    whole = pages["reference/parallel101.html"]
    launch, trainer = (whole.find(id=name) for name in ("launch", "HybridTrainer"))
    text = " ".join(launch.get_text().split())
    assert "world_size: int | None = None" in text
    assert "Run fn(*args, **kwargs) on every rank" in text
    assert ">>> run.results" in launch.select_one(".docstring pre").get_text()
    assert "def launch(" in launch.select_one("details.source pre").get_text()
    assert "zero_stage: int = 0" in trainer.select_one(".definition").get_text()
    # classes link to each other, and every link leads to a page and a place on it
    assert launch.select_one('.definition a[href="#Run"]')
    inherited = '.inherited a[href$="HybridTrainer.fit"]'
    assert whole.find(id="ShardedTrainer").select_one(inherited)
    anchors = {page: {tag["id"] for tag in soup.select("[id]")} for page, soup in pages.items()}
    anchors["index.html"] = set()  # the site's
    for page, soup in pages.items():
        for link in soup.select("a[href]"):
            path, _, anchor = str(link["href"]).partition("#")
            if not path.startswith("http"):
                beside = posixpath.join(posixpath.dirname(page), path)
                target = posixpath.normpath(beside) if path else page
                assert target in anchors, f"{page}: {link}"
                assert not anchor or anchor in anchors[target], f"{page}: {link}"
    # the search has the names with their first sentence
    by_title = {name.title: name for name in names}
    assert by_title["Run.animate"].text == "Return an animation of the run's messages."
    assert by_title["cost.closed_form"].address == "reference/parallel101/cost.html#closed_form"
    assert {*p101.__all__} <= by_title.keys()
    # the pages load nothing and are small
    assert sum(map(len, made.values())) < 3e6 and ADDRESS in made
    for html in made.values():
        assert "default-src 'none'" in html
        assert "<script src" not in html and "<img" not in html
    assert list(external_addresses(made[ADDRESS])) == []


def test_aligned_columns_stay_aligned_and_a_sentence_ends_before_the_next():
    table = ["one.py      the first", "second.py   the second"]
    shown = with_columns("\n".join(["A sentence.", "", *table])).splitlines()[2:]
    assert shown == [f"    {line}" for line in table]
    assert with_columns("Words.\n\n>>> 1 + 1\n2") == "Words.\n\n>>> 1 + 1\n2"
    docstring = "Send x to\n`dst`, e.g. 3. It waits.\n\nMore."
    assert first_sentence(docstring) == "Send x to `dst`, e.g. 3."
