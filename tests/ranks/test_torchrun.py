"""A script with several launches and no main guard, under torchrun: every rank gets all results,
and what goes wrong ends the job with its reason. (Under `python`: test_left_behind.py.)
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

import pytest

# CPython tells an audit hook of each class or function that an unpickler looks up. torch.load with
# weights_only has an unpickler of its own, which looks up none.
SCRIPT = """
    import os, signal, sys, threading, torch, torch.distributed as dist, parallel101 as p101

    joined = True
    def hook(event, arguments):
        if event == "pickle.find_class" and joined:
            sys.stderr.write(f"unpickled {arguments}\\n")

    sys.addaudithook(hook)

    def total():
        x = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(x)
        return x.item(), torch.full((2,), dist.get_rank())

    first = p101.launch(total, world_size=int(sys.argv[1]), trace=True)
    second = p101.launch(lambda k: k + dist.get_rank(), 10, world_size=int(sys.argv[1]))
    def change():
        x = torch.ones(4)
        work = dist.isend(x, 1) if dist.get_rank() == 0 else dist.irecv(x, 0)
        x.mul_(2)
        work.wait()

    def op():
        return (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[dist.get_rank()]

    def report():  # rank 0's error comes first, and says that rank 1 has failed
        if dist.get_rank() == 1:
            threading.Event().wait(0.3)
            raise ValueError("the loss is NaN")
        error = RuntimeError("rank 1 failed")
        error.failed_rank = 1
        raise error

    wrong = [  # the job goes on after each of these
        (lambda: None, {"world_size": 3}),
        (lambda: 1 / 0 if dist.get_rank() == 1 else dist.barrier(), {}),
        (lambda: dist.all_reduce(torch.ones(2), op=op()), {"trace": True}),
        (change, {"trace": True}),
        (report, {}),
        (lambda: (i for i in range(3)) if dist.get_rank() == 1 else None, {}),
    ]
    for function, options in wrong if "caught" in sys.argv else []:
        try:
            p101.launch(function, **options)
        except Exception as error:
            sys.stderr.write(f"caught {type(error).__name__}: {error}\\n")
    if "sizes" in sys.argv:  # gloo waits for ever
        uneven = lambda: dist.all_reduce(torch.ones(2 + dist.get_rank()))
        p101.launch(uneven, world_size=2, trace=True)
    if "order" in sys.argv:
        calls = [dist.barrier, lambda: dist.all_reduce(torch.ones(1))]
        p101.launch(lambda: [call() for call in calls[:: 1 - 2 * dist.get_rank()]], world_size=2)
    if "absent" in sys.argv and os.environ["RANK"] == "1":
        p101.launch(total, world_size=2, timeout=1)
    if "abort" in sys.argv:
        p101.launch(lambda: os.abort() if dist.get_rank() == 1 else dist.barrier(), world_size=2)
    if "killed" in sys.argv:
        kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
        p101.launch(lambda: kill() if dist.get_rank() == 1 else dist.barrier(), world_size=2)
    if "left" in sys.argv:  # the other rank does not need it, so no connection breaks
        leave = lambda: os._exit(0) if dist.get_rank() == 1 else threading.Event().wait()
        p101.launch(leave, world_size=2)
    if "longer" in sys.argv or "unchecked" in sys.argv:  # a thread of gloo's throws
        send = lambda: dist.send(torch.ones(8), 1)
        exchange = lambda: send() if dist.get_rank() == 0 else dist.recv(torch.ones(4), 0)
        p101.launch(exchange, world_size=2, trace="longer" in sys.argv)
    watchers = [thread.name for thread in threading.enumerate() if "parallel101" in thread.name]
    assert not watchers, f"{watchers} would still run while Python ends"
    joined = False  # its ranks are this process's own, and their fork server takes seconds to start
    sim = "caught" in sys.argv
    if sim:
        sim = p101.launch(lambda: dist.get_rank(), world_size=3, backend="sim").results
    joined = True
    values = [value for value, _ in first.results], [t.tolist() for _, t in first.results]
    line = f"{values} {second.results} {len(first.trace.events)} {sim}\\n"
    sys.stdout.write(line)
    sys.stdout.flush()
    if "deadlock" in sys.argv:
        p101.launch(lambda: dist.recv(torch.empty(1), 1 - dist.get_rank()), world_size=2)
"""
SAID = "([3.0, 3.0], [[0, 0], [1, 1]]) [10, 11] 2 [0, 1, 2]"


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return str(path)


def _run(*command):
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=120, env=environ
    )


def _torchrun(*arguments):
    return _run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments)


def test_by_torchrun_where_errors_can_be_caught_and_a_deadlock_ends_the_job(script):
    done = _torchrun(script, "2", "caught", "deadlock")
    assert done.returncode and done.stdout.splitlines() == [SAID, SAID], done.stderr
    assert FAILURES["deadlock"] in done.stderr
    assert "unpickled" not in done.stderr, "nothing that another rank sent may be unpickled"
    caught = [line for line in done.stderr.splitlines() if line.startswith("caught ")]
    for message, ranks in [
        ("ValueError: world_size is 3, but this job has 2 ranks", 2),
        ("RankFailed: rank 1 raised ZeroDivisionError", 2),
        ("RankFailed: rank 1 raised ValueError: the loss is NaN", 2),
        ("MisuseError: the ranks use different reductions: sum and max", 2),
        ("MisuseError: rank 0 changed a tensor", 1),
        ("RankFailed: rank 1 returned a generator that can't be pickled", 1),
    ]:
        kind, text = message.split(": ", 1)
        assert sum(kind in line and text in line for line in caught) >= ranks, (message, caught)


# What torchrun does, for several jobs at a time: it holds the store of each job, and starts the
# ranks in an environment that names it. Here the ranks are forks of a process that has imported
# torch: to import it in each of them would take longer than all the rest.
JOBS = """
    import os, runpy, sys, torch.distributed as dist, parallel101.laboratory.ranks.launch

    script, folder, *jobs = sys.argv[1:]
    pipes, ranks = [os.pipe() for job in jobs], {}
    for job, (port, _) in zip(jobs, pipes):
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                os.environ.update(
                    dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
                    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2"),
                    MASTER_ADDR="localhost",
                    MASTER_PORT=os.read(port, 5).decode(),
                    TORCHELASTIC_USE_AGENT_STORE="True",
                )
                os.dup2(os.open(f"{folder}/{job}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
                sys.argv = [script, "2", job]
                runpy.run_path(script, run_name="__main__")
                sys.exit()
            ranks[pid] = f"{job}, rank {rank}"
    stores = [dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) for job in jobs]
    for store, (_, port) in zip(stores, pipes):
        os.write(port, 2 * f"{store.port:05}".encode())
    while ranks:
        pid, status = os.wait()
        if status:
            print(ranks[pid], "failed", flush=True)
        del ranks[pid]
"""


def line_of(text):
    """The line of the script on which `text` is."""
    return SCRIPT[: SCRIPT.index(text)].count("\n")


FAILURES = {
    "deadlock": "rank 0 waits in recv from rank 1",
    "sizes": "different shapes: (2,) and (3,)",
    "order": "all_reduce of 4 bytes on rank 1",
    "absent": "rank 0 had not reached this launch",
    "abort": f'script.py", line {line_of("os.abort") + 1} in <lambda>',
    "killed": "rank 1 (on ",
    "left": "rank 1 (on ",
    "longer": "message is longer than the receive: 32 bytes sent, 16 expected",
    "unchecked": f"aborts rank 1: .* The program is at .*script.py:{line_of('exchange =') + 1}",
}
# which end without an error: the first does not need the other rank again
SUCCEED = {("absent", 0), ("left", 1)}


def test_failures_that_block_a_rank_end_it_with_their_reason(script, tmp_path):
    done = _run("-c", textwrap.dedent(JOBS), script, str(tmp_path), *FAILURES)
    ends = sorted(line for line in done.stdout.splitlines() if ", rank " in line)
    failed = {(how, rank) for how in FAILURES for rank in range(2)} - SUCCEED
    assert ends == sorted(f"{how}, rank {rank} failed" for how, rank in failed), done.stderr
    for how, message in FAILURES.items():
        text = (tmp_path / how).read_text()
        assert message in text or re.search(message, text), text
