"""A tool in a notebook: it can be folded, the site has a link in its place, and wrong settings are
refused. That its page opens with its settings is tested in tests/browser/test_pages.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from nbformat import v4

import parallel101 as p101
from parallel101.laboratory.publish.page import lesson_body


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
        (p101.explore_schedule, {"name": "2f2b"}, "schedule='2f2b': expected one of 'gpipe'"),
        (p101.explore_schedule, {"stages": 9}, "stages=9 .*expected 2 to 4 stages and 1 to 8"),
        (p101.explore_schedule, {"forward": 0}, "expected 0.25 to 8"),
    ):
        with pytest.raises(ValueError, match=message):
            explore(**wrong)
