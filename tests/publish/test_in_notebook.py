"""A tool in a notebook: its settings are in the address that its page reads, and wrong ones are
refused. What the page shows of them is tested in tests/browser/test_memory_page.py and
test_schedule_builder.py.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl

import pytest
from bs4 import BeautifulSoup
from nbformat import v4

import parallel101 as p101
from parallel101.cost import ModelShape
from parallel101.laboratory.publish.page import lesson_body

SHAPE = ModelShape(width=768, layers=12, heads=12, vocabulary=50257, time=1024, tied=True)


def test_the_settings_are_in_the_address():
    for tool, page, expected in (
        (
            p101.explore_memory("llama-3-70b", "H200", dp=4, sequence_parallel=True),
            "does_it_fit.html",
            {"model": "llama-3-70b", "gpu": "H200", "dp": "4", "sequence_parallel": "true"},
        ),
        (
            p101.explore_memory(SHAPE),
            "does_it_fit.html",
            {"model": "own", "width": "768", "tied": "true", "kv_heads": "null", "dp": "1"},
        ),
        (
            p101.explore_schedule("interleaved", stages=2, microbatches=2, weight_grad=0.5),
            "build_a_schedule.html",
            {"ranks": "2", "stages": "loop", "times": "1,1,0.5,0"},
        ),
    ):
        address, _, given = tool.address.partition("#")
        assert address == page and expected.items() <= dict(parse_qsl(given)).items()


def test_a_page_of_the_site_has_a_link_instead_and_a_prediction_folds_the_frame():
    tool = p101.explore_memory(dp=2, predict="peak")
    soup = BeautifulSoup(tool._repr_html_(), "html.parser")
    assert "Write down the peak" in soup.details.summary.get_text()
    assert soup.details.iframe["src"].startswith("data:text/html;base64,")
    data = {"text/html": tool._repr_html_()}
    output = v4.new_output("execute_result", data, execution_count=1)
    notebook = v4.new_notebook(cells=[v4.new_code_cell("tool", outputs=[output])])
    body = BeautifulSoup(lesson_body(notebook, Path()), "html.parser")
    assert body.find("iframe") is None
    assert body.find("a", string="Does it fit?")["href"] == tool.address


def test_wrong_settings_are_refused():
    for explore, wrong, message in (
        (p101.explore_memory, {"gpu": "abacus"}, "gpu='abacus' is unknown: expected one of A100"),
        (p101.explore_memory, {"model": "eliza"}, "the model 'eliza' is unknown"),
        (p101.explore_memory, {"zero_stage": 5}, "zero_stage=5: expected 0 or 1"),
        (p101.explore_schedule, {"name": "2f2b"}, "'2f2b' is unknown: expected one of 'gpipe'"),
        (p101.explore_schedule, {"stages": 9}, "stages=9 .*expected 2 to 4 stages and 1 to 8"),
        (p101.explore_schedule, {"forward": 0}, "expected 0.25 to 8"),
    ):
        with pytest.raises(ValueError, match=message):
            explore(**wrong)
