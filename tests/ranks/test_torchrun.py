"""A script with several launches and no main guard, in a job: every rank gets all results, and
errors can be caught. (What ends a job: faults.py. By torchrun itself: test_hosts.py.)
"""

from __future__ import annotations

import os
import socket
import textwrap

import torch.distributed as dist

from parallel101.laboratory.ranks import wire as frames
from parallel101.laboratory.ranks.monitor import Monitor
from parallel101.laboratory.ranks.pickling import pack, unpack
from parallel101.laboratory.ranks.torchrun import MonitorThread, connect
from tests.ranks.job import Job

# CPython tells an audit hook of each class or function that an unpickler imports. One that makes
# objects of listed classes only imports none.
SCRIPT = """
    import sys, threading, torch, torch.distributed as dist, parallel101 as p101

    joined = True
    def hook(event, arguments):
        if event == "pickle.find_class" and joined:
            sys.stderr.write(f"unpickled {arguments}\\n")

    sys.addaudithook(hook)

    def total():
        x = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(x)
        return x.item(), torch.full((2,), dist.get_rank())

    first = p101.launch(total, world_size=2, trace=True)
    second = p101.launch(lambda k: k + dist.get_rank(), 10, world_size=2)
    def op():
        return (dist.ReduceOp.SUM, dist.ReduceOp.MAX)[dist.get_rank()]

    def only_here():  # and nobody waits for it
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(2), async_op=True)
        return dist.get_rank()

    assert p101.launch(only_here).results == [0, 1]
    wrong = [  # the job goes on after each of these
        (lambda: None, {"world_size": 3}),
        (lambda: 1 / 0 if dist.get_rank() == 1 else dist.barrier(), {}),
        (lambda: dist.all_reduce(torch.ones(2), op=op()), {"trace": True}),
        (lambda: (i for i in range(3)) if dist.get_rank() == 1 else None, {}),
    ]
    for function, options in wrong:
        try:
            p101.launch(function, **options)
        except Exception as error:
            sys.stderr.write(f"caught {type(error).__name__}: {error}\\n")
    watchers = [thread.name for thread in threading.enumerate() if "parallel101" in thread.name]
    assert not watchers, f"{watchers} would still run while Python ends"
    joined = False  # its ranks are this process's own, and their fork server takes seconds to start
    sim = p101.launch(lambda: dist.get_rank(), world_size=3, backend="sim").results
    joined = True
    values = [value for value, _ in first.results], [t.tolist() for _, t in first.results]
    line = f"{values} {second.results} {len(first.trace.events)} {sim}\\n"
    sys.stdout.write(line)
    sys.stdout.flush()
    p101.launch(lambda: dist.recv(torch.empty(1), 1 - dist.get_rank()), world_size=2)
"""
SAID = "([3.0, 3.0], [[0, 0], [1, 1]]) [10, 11] 2 [0, 1, 2]"


def test_errors_can_be_caught_and_a_deadlock_ends_the_job(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    job = Job(tmp_path, script="script.py")
    text = job.react()
    assert 0 not in job.exitcodes and text.count(SAID) == 2, text
    assert "rank 0 waits in recv from rank 1" in text
    assert "unpickled" not in text, "nothing that another rank sent may be unpickled"
    caught = [line for line in text.splitlines() if line.startswith("caught ")]
    for message, ranks in [
        ("ValueError: world_size is 3, but this job has 2 ranks", 2),
        ("RankFailed: rank 1 raised ZeroDivisionError", 2),
        ("MisuseError: the ranks use different reductions: sum and max", 2),
        ("RankFailed: rank 1 returned a generator that can't be pickled", 1),
    ]:
        kind, text = message.split(": ", 1)
        assert sum(kind in line and text in line for line in caught) >= ranks, (message, caught)


def test_a_stranger_at_rank_0s_port_does_no_harm(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    store = dist.HashStore()
    monitor = MonitorThread(Monitor(frames.Job(1, "gloo")), store)
    monitor.start()
    _, port, *_ = store.get("monitor").decode().split()
    silent = socket.create_connection(("localhost", int(port)))
    for sent in (b"GET / HTTP/1.1\r\n\r\n", b"h", bytes(400)):
        with socket.create_connection(("localhost", int(port))) as stranger:
            stranger.sendall(sent)
            try:
                assert stranger.recv(1) == b""
            except ConnectionResetError:
                pass
    wire, pid = connect(0, store, 10.0)
    wire.send_packed(frames.RESULT, *pack([7], plain=True))
    kind, (results, _) = wire.receive()
    assert kind == frames.EXIT and unpack(*results[0], plain=True) == [7]
    assert pid == os.getpid()
    wire.sock.close()
    monitor.join()
    silent.close()
