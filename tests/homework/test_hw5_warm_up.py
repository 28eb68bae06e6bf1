"""The warm-up before exercise 14: its check refuses the beginning and accepts the answer."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat

NOTEBOOK = Path(__file__).parents[2] / "homework" / "hw5_sharding" / "hw5.ipynb"


def test_the_check_of_the_warm_up_knows_the_answer(capsys):
    cells = {cell.id: cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells}
    (answer,) = re.findall(r"```python\n(.*?)```", cells["warm-up-answer"], re.DOTALL)
    names: dict[str, object] = {}
    for name in ("pieces", "run", "kept"):
        exec(cells[f"warm-up-{name}"], names)
    assert capsys.readouterr().out == "gathered: 2, still in memory: 1\n"
    for mine, verdict in ((cells["warm-up-mine"], "not right yet: 1 "), (answer, "right: 0 ")):
        exec(mine, names)
        exec(cells["warm-up-check"], names)
        assert capsys.readouterr().out.startswith(verdict), mine
