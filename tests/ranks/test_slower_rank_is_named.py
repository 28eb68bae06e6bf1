"""`parallel101 run` names the rank that is slower in each step, which no rank can see in its own
times: all of them take as long as the slowest.
"""

from __future__ import annotations

import linecache
import os
import sys
import textwrap

from parallel101 import cli

SCRIPT = """
    import time, torch, torch.distributed as dist

    dist.init_process_group("gloo")
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(1, 9):
        if dist.get_rank() == 1 and step >= 4:
            time.sleep(0.15)  # a slow disk
        weight.grad = torch.ones(8)
        dist.all_reduce(weight.grad)
        optimizer.step()
"""


def test_a_rank_that_is_slower_from_step_4(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.delitem(
        linecache.cache, "train.py", raising=False
    )  # homework 8's, of the same name
    page = tmp_path / "page.html"
    arguments = ["run", "--world-size", "2", "--page", str(page), "train.py"]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out.splitlines()
    start = next(k for k, line in enumerate(out) if line.startswith("Slower ranks"))
    row = out[start + 2]
    assert row.split()[0] == "1" and "blocked: sleep, lock, file or GPU" in row, row
    assert "of 7, from " in row and "train.py:9: time.sleep(0.15)" in row, row
    assert "Slower ranks" in page.read_text() and os.environ["MASTER_PORT"] != "0"
