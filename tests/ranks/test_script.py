"""`parallel101 run` starts a script for torchrun on every rank as torchrun does, shows who
waited for whom, and reports what went wrong.
"""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from pathlib import Path

import pytest

import parallel101 as p101
from parallel101 import cli
from parallel101.laboratory.publish.page import external_addresses
from tests.ranks.job import Job

SCRIPT = """
    import argparse, atexit, json, os, sys, time
    from datetime import timedelta
    import torch, torch.distributed as dist
    from torch.utils.data import DataLoader
    import neighbour

    parser = argparse.ArgumentParser()
    parser.add_argument("--case", default="fine")
    case = parser.parse_args().case

    def see():
        names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR".split()
        names += ["OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID"]
        return [os.environ[name] for name in names]

    class Doubled:
        def __len__(self): return 4
        def __getitem__(self, i): return torch.tensor(2.0 * i)

    if __name__ == "__main__":
        limit = timedelta(seconds=1 if case == "handled" else 60)
        dist.init_process_group("nccl" if case == "fine" else "gloo", timeout=limit)
        rank = dist.get_rank()
        if case == "handled":
            try:
                dist.recv(torch.ones(1), 1 - rank)
            except RuntimeError:  # the limit has ended the wait
                print("handled by the script")
                sys.exit()
        if case == "crash" and rank == 1:
            raise ValueError("the loss is NaN")
        if case == "killed":  # rank 0 is blocked when rank 1 dies
            dist.all_reduce(torch.ones(1000))
            if rank == 1:
                time.sleep(0.5)
                os._exit(7)
            dist.recv(torch.ones(1), 1)
        log = open(f"log{rank}", "w")
        batches = [batch.tolist() for batch in DataLoader(Doubled(), batch_size=2, num_workers=1)]
        open(f"ready{rank}", "w").close()
        if rank == 1:
            while not os.path.exists("ready0"):  # also where rank 0 is the slower one
                time.sleep(0.01)
            time.sleep(0.2)
        x = torch.ones(1000)
        dist.all_reduce(x)
        environment = sys.modules["__main__"].see()
        told = [sys.argv, __name__, __file__, environment, batches, neighbour.NAME, x[0].item()]
        log.write(json.dumps(told))
        atexit.register(print, f"bye from {rank}")
        dist.destroy_process_group()
        sys.exit(0)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "train.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "lib" / "neighbour.py").write_text("NAME = 'next to the script'")
    monkeypatch.chdir(tmp_path)
    # the command changes both, as its process ends after the run
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("MASTER_PORT", "0")
    return os.path.join("lib", "train.py")


def test_a_script_runs_as_under_torchrun(script, tmp_path, capsys):
    assert cli.main(["run", "--world-size", "2", script, "--case", "fine"]) == 0
    out, err = capsys.readouterr()
    batches = [[0.0, 2.0], [4.0, 6.0]]
    for rank in (0, 1):
        told = json.loads((tmp_path / f"log{rank}").read_text())
        environment = [str(rank), str(rank), "2", "2", "127.0.0.1", "1", "none"]
        argv = [script, "--case", "fine"]
        assert told == [argv, "__main__", script, environment, batches, "next to the script", 2.0]
        assert f"[rank {rank}] bye from {rank}" in out
    asked = "the program asks for backend 'nccl', and this run uses 'gloo' instead"
    assert f"[rank 0] parallel101: {asked}" in err
    assert "[rank 1] parallel101" not in err
    waiting = next(line for line in out.splitlines() if line.split()[:1] == ["0"])
    assert "ms for rank 1" in waiting
    (slowest,) = [line for line in out.splitlines() if "dist.all_reduce(x)" in line]
    assert "on rank 0" in slowest and f"{script}:" in slowest


def test_what_goes_wrong_is_reported_and_with_keep_waiting_the_script_goes_on(script, capsys):
    assert cli.main(["run", "--world-size", "2", script, "--case", "crash"]) == 1
    err = capsys.readouterr().err
    assert "rank 1 raised ValueError: the loss is NaN" in err
    assert "parallel101/" not in err, "a traceback shows the script's frames only"
    command = ["run", "--keep-waiting", "--world-size", "2", script, "--case", "handled"]
    assert cli.main(command) == 0
    out, err = capsys.readouterr()
    assert "parallel101: deadlock: no rank can go on" in err
    assert "rank 0 waits in recv from rank 1, at" in err and "dist.recv(torch.ones(1), 1 -" in err
    assert "ranks 0 and 1 will go on by their own time limits, the first after 1 s" in err
    assert out.count("handled by the script") == 2


def test_wrong_arguments_are_refused_before_a_rank_starts(script, capsys):
    Path("broken.py").write_text("x = (")
    sim = ("--backend", "sim", "--record", "kept", script)
    refused = {
        ("nothing.py",): "can't run nothing.py",
        ("-m", "no_such_module"): "there is no module 'no_such_module'",
        ("--network", "fast", script): "neither a topology in front nor name=value",
        sim: "--record can't be used with --backend sim",
        ("--last-events", "0", script): "0 is not a whole number, 1 or more",
        ("--steps", "9:3", script): "expected FIRST:LAST, such as 100:120",
    }
    for argv, words in refused.items():
        with pytest.raises(SystemExit) as stopped:
            cli.main(["run", *argv])
        assert stopped.value.code == 2
        assert words in capsys.readouterr().err
    assert cli.main(["run", "broken.py"]) == 1
    assert "SyntaxError" in capsys.readouterr().err


def test_in_a_job_each_rank_writes_its_record_also_if_another_one_dies(script, tmp_path, capsys):
    job = Job(os.getcwd(), ["run", "--record", "kept", script, "--case", "killed"])
    text = job.react()
    assert job.exitcodes[1] == 7 and job.exitcodes[0], text
    assert os.listdir("kept") == ["rank-0.json.gz"]
    assert cli.main(["merge", "kept", "--page", "new/trace.html", "--chrome", "trace.json"]) == 0
    out, err = capsys.readouterr()
    assert "parallel101 merge: rank 1 wrote no file" in err
    assert "train.py --case killed: 2 ranks on gloo" in out and "all_reduce" in out
    assert "dist.recv(torch.ones(1), 1)" in out
    page = Path("new/trace.html").read_text()
    assert list(external_addresses(page)) == [] and "train.py --case killed" in page
    assert json.loads(Path("trace.json").read_text())["traceEvents"]
    assert p101.Trace.load("kept/trace.json.gz").world_size == 2


LOOP = """
    import time, torch, torch.distributed as dist

    dist.init_process_group()
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(60):
        if dist.get_rank() == 1 and step >= 54:
            time.sleep(0.15)  # a slow disk
        weight.grad = torch.ones(4)
        dist.all_reduce(weight.grad)
        optimizer.step()
        if dist.get_rank() == 0:
            dist.send(weight.detach(), 1)
        else:
            dist.recv(torch.empty(4), 0)
"""


def test_a_long_run_keeps_its_last_events_and_names_a_rank_that_becomes_slower(script, capsys):
    """No rank can see in its own times that it is slower: all take as long as the slowest."""
    Path("loop.py").write_text(textwrap.dedent(LOOP))
    record = ["--record", "kept", "--last-events", "50", "--page", "page.html"]
    assert cli.main(["run", "--world-size", "2", *record, "loop.py"]) == 0
    out = capsys.readouterr().out
    assert os.listdir("kept") == ["trace.json.gz"] and os.environ["MASTER_PORT"] != "0"
    trace = p101.Trace.load("kept/trace.json.gz")
    assert 0 < len(trace.events) <= 2 * 60 and trace.kept_text in out
    assert trace.messages_sent == [60, 0] and trace.bytes_received == [0, 60 * 16]
    rows = [line.split() for line in out.splitlines()]
    assert ["60", "960", "B", "16", "B", "all_reduce", "every", "rank"] in rows
    assert ["0", "→", "1", "60", "960", "B"] in [row[:6] for row in rows]
    slower = next(k for k, row in enumerate(rows) if row[:1] == ["Slower"]) + 2
    row = " ".join(rows[slower])
    assert row.startswith("1 ") and "blocked: sleep, lock, file or GPU" in row, row
    assert re.search(r" 6 of \d+, from 55\b", row), row
    assert "loop.py:9: time.sleep(0.15)" in row, row
    page = Path("page.html").read_text()
    assert "Slower ranks" in page and "to 60 can be chosen here" in page
    with pytest.raises(SystemExit):
        cli.main(["merge", "kept", "--page", "page.html", "--steps", "2:3"])
    assert "steps 2:3 are not in the record, which has steps" in capsys.readouterr().err
