"""A lesson's page: it loads nothing, answers are folded, long output is shortened, and terms and
homework are links.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from nbformat import v4

from parallel101.laboratory.publish.find import homework_notebooks
from parallel101.laboratory.publish.glossary import read_terms
from parallel101.laboratory.publish.page import (
    Lesson,
    cover_of,
    external_addresses,
    homework_body,
    lesson_body,
)
from tests.lessons.lesson import LESSONS


def code(source: str, output: str = "", **data: str):
    shown = [v4.new_output("stream", name="stdout", text=output)] if output else []
    shown += [v4.new_output("display_data", data)] if data else []
    return v4.new_code_cell(source, outputs=shown)


def page(*cells, folder: Path = Path(), **options) -> BeautifulSoup:
    made = [v4.new_markdown_cell(cell) if isinstance(cell, str) else cell for cell in cells]
    return BeautifulSoup(lesson_body(v4.new_notebook(cells=made), folder, **options), "html.parser")


CELLS = (  # and in which answer each is folded, counted from 1; 0: in none
    ("# Title", 0),
    (code("shown = 1", "shown before"), 0),
    ("> **Predict.** What is it?", 0),
    (code("my_guess = '?'"), 0),
    (code("", "the answer"), 1),
    ("So it is.\n\n> **Takeaway.** What to keep.", 1),
    (code("more()", "a second look"), 1),
    ("> **Predict.** And now?", 0),
    (code("", "another"), 2),
    ("> **Homework 1, exercise 1.** Write it.", 0),
    (code("free()", "no reply"), 0),
    ("> **Predict.** The last one?", 0),
    (code("", "its result"), 3),
    ("| What you see | Why |\n|---|---|\n| a | b |", 0),
    ("## Next\n\nA text.", 0),
    (code("last()", "at last"), 0),
)


def test_what_follows_a_prediction_is_folded_up_to_the_next_heading_or_question():
    homework = {1: Lesson("hw1_moving", "Homework 1", "")}
    body = page(*(cell for cell, _ in CELLS), homework=homework)
    headings = [section.find(["h1", "h2"]).get_text() for section in body.find_all("section")]
    assert headings == ["Title", "Next"]
    assert body.select_one("blockquote.takeaway").get_text().strip() == "Takeaway. What to keep."
    assert body.select_one("blockquote a")["href"] == "hw1_moving.html"
    # a code cell shows the number by which errors cite it, and the number is a link to the cell
    numbers = body.select(".code_cell a.number")
    assert [number.get_text() for number in numbers] == [f"[{k}]" for k in range(1, 9)]
    assert all(body.find(id=n["href"][1:]).find("a", class_="number") == n for n in numbers)
    folded = [answer.extract() for answer in body.select("details.answer")]
    assert {answer.summary.get_text() for answer in folded} == {"Show what happened"}
    assert not any(answer.has_attr("open") for answer in folded)
    parts = [" ".join(part.get_text().split()) for part in (body, *folded)]
    for cell, at in CELLS:
        text = cell if isinstance(cell, str) else cell.outputs and cell.outputs[0].text
        for word in re.findall(r"\w+ \w+", text or ""):
            assert [word in part for part in parts] == [k == at for k in range(4)], word


def test_a_table_of_contents_leads_to_the_headings():
    parts = ("# Title\n\nWords.", "## One `x`", code("a"), "### Two: why & how?", "text")
    body = page(*parts, "## Same", "## Same")
    links = body.select("nav.contents a")
    for link in links:
        (heading,) = (h for h in body.find_all(["h2", "h3"]) if f"#{h['id']}" == link["href"])
        assert heading.get_text() == link.get_text() and heading.a["href"] == link["href"]
    assert [link.get_text() for link in links][::2] == ["One x", "Same"] and len(links) == 4
    assert links[0]["href"] == "#One-x", "as in JupyterLab"
    assert body.nav.find_previous("h1") and not body.nav.find_previous("h2")
    assert page("# Title", "## One").select("nav.contents") == []


def test_long_output_is_folded_in_the_middle_and_nothing_is_lost():
    lines = [f"line {i}\n" for i in range(5000)]
    (output,) = page(code("chatter()", "".join(lines))).select(".output_area")
    assert output.details.summary.get_text() == "4,960 more lines"
    assert not output.details.has_attr("open")
    assert "".join(pre.get_text() for pre in output.find_all("pre")) == "".join(lines)
    assert page(code("chatter()", "".join(lines[:60]))).select("details.lines") == []


def test_first_uses_of_terms_lead_to_the_glossary(tmp_path):
    terms = ["all-reduce\nThe sum. Everybody gets it.", "reduce\nOne gets it.", "ZeRO\nShards."]
    (tmp_path / "glossary.md").write_text("# Glossary\n\n## " + "\n\n## ".join(terms))
    first = "# All-reduce\n\nWith zero bytes, no `all-reduce` here. Read *all-reduce on a ring*."
    again = ("All-reduces are sums.", "Again all-reduce, then reduce.")
    body = page(first, *again, folder=tmp_path)
    assert [(a.get_text(), a["href"], a["title"]) for a in body.select("a.term")] == [
        ("All-reduce", "glossary.html#all-reduce", "The sum."),
        ("reduce", "glossary.html#reduce", "One gets it."),
    ]
    (tmp_path / "glossary.md").write_text("## ring\n\n## tree\nA tree.\n")
    with pytest.raises(ValueError, match="'ring' has no definition"):
        read_terms(tmp_path)


def test_the_lessons_use_every_term_of_the_glossary():
    text = " ".join(path.read_text(encoding="utf-8") for path in LESSONS.glob("*.ipynb")).lower()
    terms = read_terms(LESSONS)
    assert [t.name for t in terms if not any(form.lower() in text for form in t.forms)] == []


@pytest.mark.parametrize("number", homework_notebooks(LESSONS))
def test_a_homeworks_page_shows_the_specification_of_each_exercise(number):
    path = homework_notebooks(LESSONS)[number]
    body = BeautifulSoup(homework_body(path), "html.parser")
    asked = [cell for cell in body.select(".code_cell") if "help(" in cell.get_text()]
    code = ast.parse(path.with_suffix(".py").read_text(encoding="utf-8")).body
    stubs = {n.name: ast.get_docstring(n) for n in code if isinstance(n, ast.FunctionDef)}
    assert asked
    for cell in asked:
        name = re.search(r"help\(\w+\.(\w+)\)", cell.get_text())[1]
        head, *lines = cell.select_one(".output_text pre").get_text().splitlines()
        assert head.startswith(f"{name}(")
        assert [line.strip() for line in stubs[name].splitlines()] == [e.strip() for e in lines]


def test_the_picture_for_the_index_is_the_one_with_the_tag_or_the_first():
    image = '<figure class="p101"><picture><img src="data:image/svg+xml;base64,{}"></picture>'
    cells = [code("x", **{"text/html": image.format(k)}) for k in ("YQ==", "Yg==", "Yw==")]
    assert cover_of(str(page(*cells))).still.endswith("YQ==")
    cells[1].metadata["tags"] = ["cover"]
    cover = cover_of(str(page(*cells)))
    assert cover.still.endswith("Yg==")
    folded = page("> **Predict.** What?", *cells)
    assert cover == cover_of(str(folded)), "also if it is in a folded answer"
    assert cover_of(str(page("# No picture"))) is None


def test_what_becomes_of_links_of_explorers_and_of_folded_answers():
    text = "[one](05_sharding.ipynb), [two](07_pipeline.ipynb#Tied), [code](../step.py)"
    links = ["05_sharding.html", "07_pipeline.html#Tied", "../step.py", "https://a.org/x.ipynb"]
    body = page(f"{text}, [web](https://a.org/x.ipynb)")
    assert [link["href"] for link in body.find_all("a")] == links
    widget = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}}
    body = page(code("explorer", **widget, **{"text/html": "<b>picture</b>"}))
    assert body.find("b").get_text() == "picture"  # the last one
    assert "make lab" in body.find(class_="needs-kernel").get_text()
    answer = "<details><summary>Answer</summary>\n\nIt is $2$.\n\n- *Really.*\n\n</details>\n\nA."
    body = page(answer)
    assert body.details.find("em").get_text() == "Really." and body.details.find("math") is not None
    assert "A." not in body.details.get_text()


OFFLINE = {
    "would load https://example.org/x.png, but pages": "![x](https://example.org/x.png)",
    "would load missing.png": "![x](missing.png)",
    r"uses \\undefinedcommand": "$\\undefinedcommand x$",
}
LOADED = {  # what it loads → HTML
    "https://cdn.example/x.js": '<script src="https://cdn.example/x.js"></script>',
    "//cdn.example/x.css": '<link rel="stylesheet" href="//cdn.example/x.css">',
    "a.css c.png": "<style>@import 'a.css'; b { background: url(c.png) }</style>",
    "d.png": '<p style="background: url(&quot;d.png&quot;)">',
    "e.png": '<svg><image href="e.png"/><use xlink:href="#here"/></svg>',
    "": '<img src="data:image/gif;base64,R0"><a href="https://example.org">not loaded</a>',
}


def test_what_cannot_be_shown_offline_is_refused():
    for message, text in OFFLINE.items():
        with pytest.raises(ValueError, match=message):
            page(text)
    for addresses, html in LOADED.items():
        assert [*external_addresses(html)] == addresses.split()
