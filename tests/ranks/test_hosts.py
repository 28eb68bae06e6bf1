"""Jobs over several hosts, each with its own network, name, processes and clock (see hosts.py)."""

from __future__ import annotations

import json
import re

import pytest

import parallel101 as p101
from parallel101.cli import main
from tests.ranks.hosts import hosts, why_not
from tests.ranks.job import Job

pytestmark = [pytest.mark.skipif(why_not() != "", reason=why_not()), pytest.mark.slow]


def line_of(text, script):
    """The line of a script on which `text` is."""
    return script[: script.index(text)].count("\n") + 1


SRUN = """
import json, os, socket, sys, torch, torch.distributed as dist, parallel101 as p101

def where():
    return socket.gethostname(), os.environ["LOCAL_RANK"]

def deadlock():
    rank, x = dist.get_rank(), torch.zeros(1)
    dist.all_reduce(x)
    if rank in (1, 4):
        dist.recv(x, 5 - rank)  # both receive first
    dist.barrier()

sys.stdout.write(json.dumps(p101.launch(where).results) + "\\n")  # in one piece
p101.launch(deadlock)
"""


def test_ranks_of_srun_on_three_hosts(tmp_path):
    """Each host calls its interface differently, and believes that its own name is loopback."""
    (tmp_path / "script.py").write_text(SRUN)
    with hosts(3, own_name_is_loopback=True) as cluster:
        job = Job(tmp_path, size=6, launcher="srun", hosts=cluster, script="script.py")
        text = job.react()
    assert job.exitcodes == [1] * 6, text
    results = re.findall(r"^\[\[.*", text, re.MULTILINE)
    expected = [[f"node{rank // 2}", str(rank % 2)] for rank in range(6)]
    assert [json.loads(each) for each in results] == [expected] * 6, "every rank gets all results"
    line = line_of("dist.recv(x, 5 - rank)", SRUN)
    for rank in (1, 4):
        assert f"rank {rank} waits in recv from rank {5 - rank}, at script.py:{line}" in text
    assert "the cycle: rank 1 → rank 4 → rank 1" in text


# The second loop goes on until the test has made the file. Then rank 3 dies. Rank 0 is on the other
# host.
TRAINING = """
import os, signal, sys, time, torch, torch.distributed as dist

dist.init_process_group("gloo")
done = torch.zeros(1)
for _ in range(20):
    dist.all_reduce(torch.ones(10))
sys.stderr.write("half way\\n")
while not done:
    time.sleep(0.02)  # it computes
    done.fill_(os.path.exists("enough"))
    dist.all_reduce(done)
if dist.get_rank() == 3:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
"""


def test_clocks_that_differ_a_network_that_is_gone_for_a_while_and_a_rank_that_dies(
    tmp_path, capsys
):
    (tmp_path / "script.py").write_text(TRAINING)
    command = ["run", "--stuck-after", "2", "--record", "trace", "script.py"]
    with hosts(2, clocks=(0, 5000)) as cluster:

        def mend():
            cluster[1].mend()
            (tmp_path / "enough").touch()

        job = Job(tmp_path, command, 4, launcher="srun", hosts=cluster)
        half_way = ("half way", lambda: None)
        text = job.react(*[half_way] * 3, ("half way", cluster[1].cut), ("not answer", mend))
    assert job.exitcodes == [1, 1, 1, 256 - 9], text
    assert f"script.py:{line_of('dist.all_reduce(done)', TRAINING)}" in text
    assert "rank 3 (on node1) has ended before its program: its process was killed" in text
    assert re.search(rf"script.py(:|\", line ){line_of('dist.barrier', TRAINING)}\b", text)
    assert main(["merge", str(tmp_path / "trace")]) == 0
    trace = p101.Trace.load(tmp_path / "trace" / "trace.json.gz")
    hosts_of = {e.rank: e.args["host"] for e in trace.spans() if "host" in (e.args or {})}
    assert hosts_of == {0: "node0", 1: "node0", 2: "node1"}
    assert trace.makespan < 100, "the clocks differ by 5000 s"
    sums = [[e for e in trace.events if e.kind == "all_reduce" and e.rank == r] for r in range(3)]
    assert len({len(mine) for mine in sums}) == 1 and len(sums[0]) > 20
    assert "script.py: 4 ranks on gloo" in capsys.readouterr().out


RESTARTED = """
import os, sys, time, torch, torch.distributed as dist
import parallel101.laboratory.record.last_events as last_events

last_events.WRITE_EVERY = 0.5
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
told = False
while size > 1:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.02)  # it computes
    if not told and os.path.exists(f"trace/rank-{rank}.1.json.gz"):
        told = sys.stderr.write(f"ready\\n")
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], "ends alone", flush=True)
"""


def test_a_host_that_dies_and_torchrun_that_restarts_the_others(tmp_path, capsys):
    (tmp_path / "script.py").write_text(RESTARTED)
    elastic = (
        "--nnodes 1:2 --nproc-per-node 1 --max-restarts 1 --rdzv-backend c10d --rdzv-id 7 "
        "--rdzv-endpoint node0:29400 --monitor-interval 0.1 --rdzv-conf "
        "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3 "
        "-m parallel101 run --record trace script.py"
    )
    with hosts(2) as cluster:
        job = Job(tmp_path, launcher="", hosts=cluster, torchrun=elastic)
        text = job.react(("ready", lambda: None), ("ready", cluster[1].die))
    assert job.exitcodes[0] == 0, text
    assert "rank 1 (on node1) has ended before its program" in text
    assert re.search(rf'script.py(:|", line ){line_of("dist.all_reduce", RESTARTED)}\b', text)
    assert "attempt 1 ends alone" in text
    # the folder is that of both hosts: the record of the one that died is still there
    assert main(["merge", str(tmp_path / "trace")]) == 0
    assert "the record of rank 1 is of another start of the job" in capsys.readouterr().err
    assert p101.Trace.load(tmp_path / "trace" / "trace.json.gz").world_size == 1
