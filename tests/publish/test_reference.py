"""The reference has every public name and nothing else, and each of its links leads somewhere."""

from __future__ import annotations

import posixpath

import pytest
from bs4 import BeautifulSoup

import parallel101 as p101
from parallel101 import cost, layers, models, sharding
from parallel101.laboratory.publish.page import external_addresses
from parallel101.laboratory.publish.reference import (
    ADDRESS,
    Reference,
    first_sentence,
    make_reference,
    with_columns,
)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return make_reference()


@pytest.fixture(scope="module")
def pages(reference) -> dict[str, BeautifulSoup]:
    return {page: BeautifulSoup(html, "html.parser") for page, html in reference.pages.items()}


def test_every_public_name_has_a_section_and_no_other(pages):
    for module in (p101, cost, layers, models, sharding):
        page = pages[f"reference/{module.__name__.replace('.', '/')}.html"]
        assert {section["id"] for section in page.select("main > section")} == {*module.__all__}


def test_a_section_has_the_signature_the_docstring_its_example_and_the_source(pages):
    section = pages["reference/parallel101.html"].find(id="launch")
    text = " ".join(section.get_text().split())
    assert "world_size: int | None = None" in text
    assert "Run fn(*args, **kwargs) on every rank" in text
    assert ">>> run.results" in section.select_one(".docstring pre").get_text()
    assert "def launch(" in section.select_one("details.source pre").get_text()
    trainer = pages["reference/parallel101.html"].find(id="HybridTrainer")
    assert "zero_stage: int = 0" in trainer.select_one(".definition").get_text()


def test_every_link_leads_to_a_page_and_a_place_on_it(pages):
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


def test_classes_link_to_each_other(pages):
    parallel101 = pages["reference/parallel101.html"]
    launch = parallel101.find(id="launch")
    assert launch.select_one('.definition a[href="#Run"]')
    assert parallel101.find(id="ShardedTrainer").select_one(
        '.inherited a[href$="HybridTrainer.fit"]'
    )


def test_the_search_has_the_names_with_their_first_sentence(reference):
    by_title = {name.title: name for name in reference.names}
    assert by_title["Run.animate"].text == "Return an animation of the run's messages."
    assert by_title["cost.closed_form"].address == "reference/parallel101/cost.html#closed_form"
    assert {*p101.__all__} <= by_title.keys()


def test_the_pages_load_nothing_and_are_small(reference):
    assert sum(map(len, reference.pages.values())) < 3e6
    assert ADDRESS in reference.pages
    for html in reference.pages.values():
        assert "default-src 'none'" in html
        assert "<script src" not in html
        assert "<img" not in html
    assert list(external_addresses(reference.pages[ADDRESS])) == []


def test_aligned_columns_stay_aligned():
    table = "one.py      the first\nsecond.py   the second"
    assert with_columns(f"A sentence.\n\n{table}").splitlines()[2:] == [
        "    one.py      the first",
        "    second.py   the second",
    ]
    assert with_columns("Words.\n\n>>> 1 + 1\n2") == "Words.\n\n>>> 1 + 1\n2"


def test_the_first_sentence_ends_before_the_next():
    assert (
        first_sentence("Send x to\n`dst`, e.g. 3. It waits.\n\nMore.") == "Send x to `dst`, e.g. 3."
    )
