"""Several hosts on one Linux machine, for tests: each has namespaces of its own.

    node0: network, name, processes, clock, /etc/hosts ── a bridge
    node1: the same                                    ── a cable (veth) to it, which can be cut

What a host is, dies with the first of its processes: its network, its clock and whatever runs on
it. That process reads a pipe that pytest holds, so nothing is left behind when pytest is killed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

INTERFACES = ("eth0", "ens3", "enp1s0", "bond0")  # hosts call their interfaces differently


class Host:
    """One host: nodeN at 10.101.0.N+1.

    Args:
        clock: how many seconds its clock is ahead of this machine's.
        own_name_is_loopback: its /etc/hosts has 127.0.1.1 for its own name, as Debian writes it.
    """

    def __init__(self, number: int, node0: Host | None, clock: int, own_name_is_loopback: bool):
        self.number, self.name, interface = number, f"node{number}", INTERFACES[number]
        self.node0, self.cable = node0 or self, f"cable{number}"
        own = {number: "127.0.1.1"} if own_name_is_loopback else {}
        names = [f"{own.get(n, f'10.101.0.{n + 1}')} node{n}" for n in range(len(INTERFACES))]
        files = {
            "/etc/hosts": "\\n".join(["127.0.0.1 localhost", *names]),
            "/etc/nsswitch.conf": "hosts: files",  # it has no name server to wait for
        }
        begin = f"hostname {self.name}; mount -t tmpfs none /mnt; mount -t proc proc /proc; "
        for n, (file, text) in enumerate(files.items()):
            begin += f"printf '{text}\\n' > /mnt/{n}; mount --bind /mnt/{n} {file}; "
        kinds = ["--net", "--uts", "--mount", "--pid", "--time", "--fork", "--kill-child"]
        self.process = subprocess.Popen(
            ["unshare", *kinds, f"--monotonic={clock}", "sh", "-c", f"{begin} echo; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert self.process.stdout is not None
            if not self.process.stdout.readline():
                raise OSError(self.process.communicate()[1].strip())
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            self.first = int(children.read_text())  # its process number 1
            if node0 is None:
                self.ip(f"link add {interface} type bridge")
            else:
                other = f"veth peer name {interface} netns {self.first}"
                node0.ip(f"link add {self.cable} type {other}")
                node0.ip(f"link set {self.cable} master {INTERFACES[0]} up")
            for link in ("lo", interface):
                self.ip(f"link set {link} up")
            self.ip(f"address add 10.101.0.{number + 1}/24 dev {interface}")
        except BaseException:
            self.die()
            raise

    def ip(self, command: str) -> None:
        """Run `ip` in its network."""
        inside = ["nsenter", "-t", str(self.first), "--net", "ip", *command.split()]
        subprocess.run(inside, check=True, capture_output=True)

    def cut(self) -> None:
        """Pull its cable out."""
        self.node0.ip(f"link set {self.cable} down")

    def mend(self) -> None:
        self.node0.ip(f"link set {self.cable} up")

    def die(self) -> None:
        """Kill all its processes, at once."""
        self.process.kill()  # and by it its process number 1, with which its namespaces go
        self.process.communicate()


class Starter:
    """A process that has imported torch, and forks what is to run on hosts.

    To import torch in each of torchrun's own processes would take longer than all the rest.
    """

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", STARTER],
            stdin=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    def order(self, **what: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Hosts:
    """Hosts that are connected."""

    def __init__(self, starter: Starter, folder: Path):
        self.starter, self.folder = starter, folder
        self.hosts: list[Host] = []
        self.names = 0

    def add(self, clock: int, own_name_is_loopback: bool) -> None:
        node0 = self.hosts[0] if self.hosts else None
        self.hosts.append(Host(len(self.hosts), node0, clock, own_name_is_loopback))

    def start(self, host: int, how: str, *arguments: str, **environ: str) -> Process:
        """Run torchrun, or a Python file, on a host. `how` is "torchrun" or "python"."""
        self.names += 1
        output = self.folder / f"{self.hosts[host].name}-{self.names}.txt"
        self.starter.order(
            host=self.hosts[host].first,
            how=how,
            arguments=arguments,
            folder=str(self.folder),
            output=str(output),
            environ=environ,
        )
        return Process(output)

    def close(self) -> None:
        for host in self.hosts:
            host.die()


class Process:
    """What was started on a host. Its output, and in another file its exit status."""

    def __init__(self, output: Path):
        self.output, self.status = output, output.with_suffix(".status")

    @property
    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def wait(self, seconds: float = 90.0) -> int:
        wait_for(self.status.exists, seconds, lambda: self.text)
        return int(self.status.read_text())


STARTER = """
import ctypes, json, os, runpy, signal, sys
import torch.distributed.run, parallel101.cli, parallel101.laboratory.ranks.script

libc = ctypes.CDLL(None, use_errno=True)

def enter(process):
    kinds = [f"/proc/{process}/ns/{kind}" for kind in ("time", "net", "uts", "pid", "mnt")]
    for namespace in [os.open(kind, os.O_RDONLY) for kind in kinds]:
        if libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "setns")

def run(order):
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1), os.dup2(output, 2)
    os.setsid()
    os.environ.update(order["environ"])
    if order["how"] == "torchrun":
        sys.exit(torch.distributed.run.main(order["arguments"]))
    sys.argv = order["arguments"]
    runpy.run_path(sys.argv[0], run_name="__main__")

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    order = json.loads(line)
    if os.fork() == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        enter(order["host"])
        os.chdir(order["folder"])
        child = os.fork()  # the first process that is inside the host's namespace of processes
        if child == 0:
            run(order)
            sys.exit()
        _, status = os.waitpid(child, 0)
        file = order["output"].removesuffix(".txt")
        with open(f"{file}.writing", "w") as writing:
            writing.write(str(os.waitstatus_to_exitcode(status)))
        os.rename(f"{file}.writing", f"{file}.status")
        os._exit(0)
"""


@contextlib.contextmanager
def hosts(
    starter: Starter,
    count: int,
    folder: Path,
    *,
    clocks: Sequence[int] = (0, 0, 0, 0),
    own_name_is_loopback: bool = False,
) -> Iterator[Hosts]:
    """So many hosts; see Host. Afterwards nothing of them is left.

    Args:
        folder: where output is written.
        clocks: by host, how many seconds its clock is ahead of this machine's.
    """
    made = Hosts(starter, folder)
    try:
        for number in range(count):
            made.add(clocks[number], own_name_is_loopback)
        yield made
    finally:
        made.close()


def wait_for(condition: Callable[[], bool], seconds: float, said: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s; output:\n{said()}"
        time.sleep(0.02)


@functools.cache
def why_not() -> str:
    """Why there can be no hosts on this machine; "" if there can."""
    if not sys.platform.startswith("linux"):
        return "needs Linux's namespaces"
    if missing := [name for name in ("unshare", "nsenter", "ip") if shutil.which(name) is None]:
        return f"needs {', '.join(missing)} (Debian: util-linux, iproute2)"
    try:
        Host(0, None, 0, False).die()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"needs the right to make namespaces and network interfaces: {error}"
    return ""
