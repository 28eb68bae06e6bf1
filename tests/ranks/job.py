"""A job whose ranks are forks of this process's fork server, here or on several hosts (hosts.py).

It does what torchrun does, which takes seconds to start: it holds the job's store, and gives each
rank an environment that names it. The fork server calls `main` in each rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import selectors
import signal
import socket
import sys
import traceback

import torch.distributed as dist
import torch.distributed.run

import parallel101 as p101
from parallel101.cli import main as parallel101
from parallel101.laboratory.ranks.output import read_available
from parallel101.laboratory.ranks.processes import kill, start_ranks
from parallel101.laboratory.ranks.script import free_port
from parallel101.laboratory.ranks.worker import open_streams
from tests.ranks.faults import FAULTS
from tests.ranks.hosts import enter

ENVIRONMENTS = {  # of a rank; srun's rank 0 holds the store
    "torchrun": lambda rank, local, size: {
        "RANK": rank,
        "LOCAL_RANK": local,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    },
    "srun": lambda rank, local, size: {
        "SLURM_JOB_ID": 7,
        "SLURM_STEP_ID": 0,
        "SLURM_STEP_NUM_TASKS": size,
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": local,
    },
    "": lambda rank, local, size: {},  # these are no ranks
}


def main(*, control: int, status: int) -> None:
    """Be a rank: do what the control socket says, and exit."""
    with socket.socket(fileno=control) as sock, sock.makefile() as lines:
        request = json.loads(lines.readline())
    open_streams()
    try:
        code = on_host(request) if "host" in request else run(request)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit((code or 0) & 0xFF)  # Python would first free all that torch has made: half a second


def on_host(request):
    enter(request["host"])
    if child := os.fork():  # the first process that is inside the host's namespace of processes
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return run(request)


def run(request):
    os.environ.update(request["environ"])
    os.chdir(request["folder"])
    if "command" in request:
        return parallel101(request["command"])
    if "torchrun" in request:
        return torch.distributed.run.main(request["torchrun"].split())
    if "script" in request:
        return runpy.run_path(request["script"], run_name="__main__") and 0
    program = FAULTS[request["fault"]].program
    p101.launch(lambda: program(dist.get_rank()), **request["options"])
    return 0


class Job:
    """A job of `size` ranks.

    They run a command of parallel101 in a folder, or one of `about`: a `script`, `torchrun`'s
    arguments, or with `options` of launch the program of a `fault`.

    Attributes:
        text: what all ranks have written on stderr and stdout so far.
        exitcodes: by rank; None if it has not ended.
    """

    def __init__(
        self, folder, command=None, size=2, *, launcher="torchrun", first=0, hosts=(), **about
    ):
        """`first`: the first rank that comes. `hosts`: where equal parts of the ranks are."""
        self.text, self.exitcodes = "", [None] * size
        self.torchrun_ends_all = launcher == "torchrun" and not hosts
        self.ranks = dict(zip(range(first, size), start_ranks(size - first, __name__)))
        request = {"folder": str(folder)} | (about if command is None else {"command": command})
        if launcher == "torchrun":
            self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        port = self.store.port if launcher == "torchrun" else free_port()
        for rank, process in self.ranks.items():
            local = rank % (size // (len(hosts) or 1))
            environ = ENVIRONMENTS[launcher](rank, local, size)
            environ |= {"MASTER_ADDR": "node0" if hosts else "localhost", "MASTER_PORT": port}
            if hosts:
                host = hosts[rank * len(hosts) // size]
                environ["GLOO_SOCKET_IFNAME"], request["host"] = host.interface, host.first
            request["environ"] = {name: str(value) for name, value in environ.items()}
            process.control.sendall(f"{json.dumps(request)}\n".encode())

    def signal(self, number, *ranks):
        """Send a signal to these ranks, or to all of them, if they have not ended."""
        for rank in ranks or self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.ranks[rank].pid, number)

    def react(self, *reactions):
        """Read to the end. Call each function once, when its words have come, in this order.

        Afterwards nothing of the job is left, whether the test has passed or not.
        """
        todo, seen = list(reactions), 0
        with selectors.DefaultSelector() as selector:
            for rank, process in self.ranks.items():
                selector.register(process.out, selectors.EVENT_READ)
                selector.register(process.err, selectors.EVENT_READ)
                selector.register(process.status, selectors.EVENT_READ, rank)
            try:
                while selector.get_map():
                    ready = selector.select(60)
                    assert ready, f"the job hangs:\n{self.text}"
                    for key, _ in ready:
                        if not (data := read_available(key.fileobj)):
                            selector.unregister(key.fileobj)
                        elif key.data is None:
                            self.text += data.decode(errors="replace")
                        elif code := re.search(rb"^(-?\d+)$", data, re.MULTILINE):
                            self.exitcodes[key.data] = int(code[1])
                            if self.torchrun_ends_all and int(code[1]):
                                self.signal(signal.SIGTERM)
                    while todo and todo[0][0] in self.text[seen:]:
                        seen = self.text.index(todo[0][0], seen) + len(todo[0][0])
                        todo.pop(0)[1]()
            finally:
                for process in self.ranks.values():
                    kill(process)
                    process.close()
        assert not todo, self.text
        return self.text
