"""The page of a run shows its timeline, who waited for whom, its traffic and its tables, and
needs no network.
"""

from __future__ import annotations

import base64
import re

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.laboratory.publish import run_page as module
from parallel101.laboratory.publish.page import external_addresses
from parallel101.laboratory.publish.run_page import run_page
from parallel101.spans import OPTIMIZER_STEP, recorder, span


def run(program, size=3):
    def with_waits():
        recorder().record_waits = True
        program()

    return p101.launch(
        with_waits, world_size=size, backend="sim", network=p101.Network(latency=0.5, bandwidth=1e9)
    ).trace


def slow_rank_1():
    for _ in range(20):
        p101.compute(3.0 if dist.get_rank() == 1 else 1.0)
        dist.all_reduce(torch.ones(8))
        with span(OPTIMIZER_STEP):  # as `parallel101 run` marks it
            pass
    if dist.get_rank() == 0:
        dist.send(torch.ones(1000), 2)
    if dist.get_rank() == 2:
        dist.recv(torch.empty(1000), 0)


def pictures(page):
    return [
        base64.b64decode(data).decode()
        for data in re.findall(r'<img src="data:image/svg\+xml;base64,([^"]+)"', page)
    ]


def test_the_page_of_a_run(monkeypatch):
    trace = run(slow_rank_1)
    page = run_page(trace, "train.py <x>")
    assert list(external_addresses(page)) == []
    assert "<h1>train.py &lt;x&gt;</h1>" in page and "3 ranks on sim" in page
    timeline, zoom, between = pictures(page)
    assert ">Timeline<" in timeline and ">compute<" in timeline
    assert "The longest wait of the later half: rank 2 in all_reduce, 4.00 s, from" in zoom
    # 20 times 2 s for rank 1; 1000 floats from rank 0 to rank 2
    assert ">40 s<" in between and ">3.9 KiB<" in between
    assert "<h2>Time of each rank</h2>" in page and "40 s for rank 1" in page
    assert 'class="chooser"' not in page
    monkeypatch.setattr(module, "MOST_EVENTS", 50)  # as if it were a long run
    page = run_page(trace, "train.py")
    assert '<section class="chooser"' in page and list(external_addresses(page)) == []
    assert "20 steps (each ends with the optimizer" in page
    assert "Steps 3 to 5 can be chosen here" in run_page(trace, "train.py", steps=(3, 5))
    with pytest.raises(ValueError, match="steps 30:40 are not in the record, which has steps 1 to"):
        run_page(trace, "train.py", steps=(30, 40))


def test_the_page_of_a_deadlock_shows_who_waits():
    with pytest.raises(p101.DeadlockError) as failed:
        run(lambda: dist.recv(torch.ones(1), (dist.get_rank() + 1) % 3))
    page = run_page(failed.value.trace, "train.py", failed.value)
    assert "deadlock: no rank can go on" in page
    assert "Cycle" in pictures(page)[0]
