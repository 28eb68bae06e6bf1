"""Jobs over several hosts, each with its own network, name, processes and clock (see hosts.py)."""

from __future__ import annotations

import json
import re
import textwrap

import pytest

import parallel101 as p101
from parallel101.cli import main
from tests.ranks.hosts import INTERFACES, Starter, hosts, wait_for, why_not

pytestmark = [pytest.mark.skipif(why_not() != "", reason=why_not()), pytest.mark.slow]


@pytest.fixture(scope="module")
def starter():
    made = Starter()
    yield made
    made.close()


def write(folder, text):
    (folder / "script.py").write_text(textwrap.dedent(text))


def line_of(text, script):
    """The line of a script on which `text` is."""
    return textwrap.dedent(script)[: textwrap.dedent(script).index(text)].count("\n") + 1


SRUN = """
    import json, os, socket, torch, torch.distributed as dist, parallel101 as p101

    def where():
        return socket.gethostname(), os.environ["LOCAL_RANK"]

    def deadlock():
        rank, x = dist.get_rank(), torch.zeros(1)
        dist.all_reduce(x)
        if rank in (1, 4):
            dist.recv(x, 5 - rank)  # both receive first
        dist.barrier()

    print(json.dumps(p101.launch(where).results), flush=True)
    p101.launch(deadlock)
"""


def test_ranks_of_srun_on_three_hosts(starter, tmp_path):
    """Each host calls its interface differently, and believes that its own name is loopback."""
    write(tmp_path, SRUN)
    with hosts(starter, 3, tmp_path, own_name_is_loopback=True) as cluster:
        ranks = [
            cluster.start(
                rank // 2,
                "python",
                "script.py",
                MASTER_ADDR="node0",
                MASTER_PORT="29500",
                GLOO_SOCKET_IFNAME=INTERFACES[rank // 2],
                SLURM_JOB_ID="7",
                SLURM_STEP_ID="0",
                SLURM_STEP_NUM_TASKS="6",
                SLURM_STEP_NODELIST="node[0-2]",
                SLURM_PROCID=str(rank),
                SLURM_LOCALID=str(rank % 2),
            )
            for rank in range(6)
        ]
        assert all(rank.wait() == 1 for rank in ranks)
    results = {re.findall(r"^\[\[.*", rank.text, re.MULTILINE)[0] for rank in ranks}
    assert len(results) == 1, "every rank gets all results"
    assert json.loads(results.pop()) == [[f"node{r // 2}", str(r % 2)] for r in range(6)]
    line = line_of("dist.recv(x, 5 - rank)", SRUN)
    assert f"rank 1 waits in recv from rank 4, at script.py:{line}" in ranks[0].text
    assert f"rank 4 waits in recv from rank 1, at script.py:{line}" in ranks[0].text
    assert "the cycle: rank 1 → rank 4 → rank 1" in ranks[0].text


# The second loop goes on until the test has made the file. Then rank 3 dies. Rank 0 is on the other
# host.
TRAINING = """
    import os, signal, time, torch, torch.distributed as dist

    dist.init_process_group("gloo")
    done = torch.zeros(1)
    for _ in range(20):
        dist.all_reduce(torch.ones(10))
    open(f"half way {dist.get_rank()}", "w").close()
    while not done:
        time.sleep(0.02)  # it computes
        done.fill_(os.path.exists("enough"))
        dist.all_reduce(done)
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
"""


def test_clocks_that_differ_a_network_that_is_gone_for_a_while_and_a_rank_that_dies(
    starter, tmp_path, capsys
):
    write(tmp_path, TRAINING)
    options = "--nnodes 2 --nproc-per-node 2 --rdzv-backend static --rdzv-endpoint node0:29500"
    script = "-m parallel101 run --stuck-after 2 --record trace script.py"
    with hosts(starter, 2, tmp_path, clocks=(0, 5000)) as cluster:
        jobs = [
            cluster.start(n, "torchrun", *f"{options} --node-rank {n} {script}".split())
            for n in range(2)
        ]

        def said():
            return "".join(job.text for job in jobs)

        wait_for(lambda: len(list(tmp_path.glob("half way *"))) == 4, 90, said)
        cluster.hosts[1].cut()
        wait_for(lambda: re.search("ranks 2 and 3 .* not answer", jobs[0].text), 30, said)
        line = line_of("dist.all_reduce(done)", TRAINING)
        assert f"script.py:{line}" in jobs[0].text
        cluster.hosts[1].mend()
        (tmp_path / "enough").touch()
        assert [job.wait() for job in jobs] == [1, 1], said()
        told = said()
    assert "rank 3 (on node1) has ended before its program: its process was killed" in told
    assert re.search(rf"script.py(:|\", line ){line_of('dist.barrier', TRAINING)}\b", told)
    assert main(["merge", str(tmp_path / "trace")]) == 0
    trace = p101.Trace.load(tmp_path / "trace" / "trace.json.gz")
    hosts_of = {e.rank: e.args["host"] for e in trace.spans() if "host" in (e.args or {})}
    assert hosts_of == {0: "node0", 1: "node0", 2: "node1"}
    assert trace.makespan < 100, "the clocks differ by 5000 s"
    sums = [[e for e in trace.events if e.kind == "all_reduce" and e.rank == r] for r in range(3)]
    assert len({len(mine) for mine in sums}) == 1 and len(sums[0]) > 20
    assert "script.py: 4 ranks on gloo" in capsys.readouterr().out


RESTARTED = """
    import os, time, torch, torch.distributed as dist
    import parallel101.laboratory.record.last_events as last_events

    last_events.WRITE_EVERY = 0.5
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    while size > 1:
        dist.all_reduce(torch.ones(1))
        time.sleep(0.02)  # it computes
        if os.path.exists(f"trace/rank-{rank}.1.json.gz"):
            open(f"ready {rank} of {size}", "w").close()
    print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], "ends alone", flush=True)
"""


def test_a_host_that_dies_and_torchrun_that_restarts_the_others(starter, tmp_path, capsys):
    write(tmp_path, RESTARTED)
    elastic = (
        "--nnodes 1:2 --nproc-per-node 1 --max-restarts 1 --rdzv-backend c10d --rdzv-id 7 "
        "--rdzv-endpoint node0:29400 --monitor-interval 0.1 --rdzv-conf "
        "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3 "
        "-m parallel101 run --record trace script.py"
    )
    with hosts(starter, 2, tmp_path) as cluster:
        first, second = (cluster.start(n, "torchrun", *elastic.split()) for n in range(2))
        wait_for(
            lambda: len(list(tmp_path.glob("ready * of 2"))) == 2,
            90,
            lambda: first.text + second.text,
        )
        cluster.hosts[1].die()
        assert first.wait() == 0, first.text
    assert "rank 1 (on node1) has ended before its program" in first.text
    line = line_of("dist.all_reduce", RESTARTED)
    assert re.search(rf'script.py(:|", line ){line}\b', first.text)
    assert "attempt 1 ends alone" in first.text
    # the folder is that of both hosts: the record of the one that died is still there
    assert main(["merge", str(tmp_path / "trace")]) == 0
    assert "the record of rank 1 is of another start of the job" in capsys.readouterr().err
    assert p101.Trace.load(tmp_path / "trace" / "trace.json.gz").world_size == 1
