"""The search from disk: queries find what they should, with mouse, keyboard and screen reader; and
the reference's pages are readable.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.browser import Browser
from tests.browser.seen import without_a_name

pytestmark = pytest.mark.browser
BOX, LIST = "document.querySelector('#search-words')", "document.querySelector('#search-found')"
SAID = "document.querySelector('.search-count').textContent"


def ask(browser: Browser, query: str) -> list[str]:
    """Type a query, and return the results: "title | kind · place"."""
    browser.js(f"{BOX}.focus()")
    browser.until("document.querySelector('.search').dataset.asked === 'loaded'")
    browser.write(BOX, query)
    words = "e => `${e.querySelector('b').textContent} | ${e.childNodes[1].textContent.trim()}`"
    return browser.js(f"[...{LIST}.children].map({words})")


FIRST = {  # query → how its first result begins: title | kind · place
    "all_reduce": "all-reduce | Glossary",
    "allreduce": "all-reduce | Glossary",
    "ring all-reduce": "ring all-reduce | Glossary",
    "what is a bubble": "bubble | Glossary",
    "micro-batch": "microbatch | Glossary",
    "moe": "mixture of experts | Glossary",
    "gradient checkpointing": "recomputation | Glossary",
    "launch": "launch | Reference",
    "hybrid trainer": "HybridTrainer | Reference",
    "trainer fit": "HybridTrainer.fit | Reference",
    "Run.animate": "Run.animate | Reference",
    "step_memory": "cost.step_memory | Reference",
    "ring shift": "1 · Ring shift | Homework · Homework 1",
    "two ranks swap": "Two ranks swap numbers | Lesson · 00 Ranks",
    "tensor paralel": "06 Tensor parallel | Lesson",
    "zero stage 3": "Three stages | Lesson · 05 Sharding",
    "pipel": "07 Pipeline | Lesson",
    "deadlok": "deadlock",
    "nccl timeout": "Errors explained |",
    "why does my program hang": "Errors explained |",
    "how much memory do I need": "Does it fit? | Tool",
    "OOM": "Does it fit? | Tool",
}


def test_queries_find_what_they_should_first(browser, site):
    browser.view(f"{site}/index.html")
    browser.do(("!!globalThis.SEARCH_INDEX", False))  # it is loaded when needed
    first = {query: next(iter(ask(browser, query)), "") for query in FIRST}
    wrong = {query: got for query, got in first.items() if not got.startswith(FIRST[query])}
    assert wrong == {}
    assert ask(browser, "context parallel")[1].endswith("Longer sequences, more experts")
    assert ask(browser, "bubble xyzzy")[0].startswith("The bubble | Lesson")
    browser.do((f"{SAID}.includes('Nothing has all of these words')", True))
    for query, said in (("xyzzy", "Nothing found"), (" ", "")):
        assert ask(browser, query) == []
        browser.do((SAID, said))
    # what a screen reader hears: what it is, and how many were found
    ask(browser, "two ranks swap")
    browser.key("ArrowDown")
    nodes = [n for n in browser.call("Accessibility.getFullAXTree")["nodes"] if not n["ignored"]]
    named = [(n["role"]["value"], n.get("name", {}).get("value")) for n in nodes]
    assert {("combobox", "Search"), ("listbox", "Search results")} <= {*named}
    assert any(role == "option" and "Two ranks swap numbers" in name for role, name in named)
    browser.do(("document.querySelector('.search-count').role", "status"))
    browser.do((f"/results?$/.test({SAID})", True), "Tab", (f"{LIST}.hidden", True))
    assert without_a_name(browser) == []


def test_with_the_keyboard_a_result_is_chosen_and_opened(browser, site):
    browser.view(f"{site}/reference/parallel101/sharding.html")
    assert ask(browser, "step_memory")
    chosen = f"{LIST}.querySelector('[aria-selected=true]')?.id ?? ''"
    active, last = f"{BOX}.getAttribute('aria-activedescendant')", f"{LIST}.children.length - 1"
    browser.do((chosen, ""))
    moves = [("ArrowDown", 0), ("ArrowDown", 1), ("ArrowUp", 0), ("ArrowUp", browser.js(last))]
    for key, at in moves:
        browser.do(key, (chosen, f"found-{at}"), (active, f"found-{at}"))
    browser.do("Escape", (f"{LIST}.hidden", True), (f"{BOX}.ariaExpanded", "false"))
    browser.do("ArrowDown", (f"{LIST}.hidden", False), (f"{BOX}.ariaExpanded", "true"))
    first = browser.js(f"{LIST}.children[0].href")
    browser.do("Enter")
    browser.until(f"location.href === '{first}'")
    assert first.startswith(site)
    browser.until("document.getElementById(location.hash.slice(1))")


def test_a_missing_index_is_named(browser, site, tmp_path):
    index = Path(site.removeprefix("file://"), "index.html")
    page = tmp_path / "index.html"
    page.write_bytes(index.read_bytes())
    browser.view(page.as_uri())
    browser.js(f"{BOX}.focus()")
    browser.until(f"{SAID}.includes('search_index.js is missing')")
