"""Several hosts on one Linux machine, for tests: each has namespaces of its own.

    node0: network, name, processes, clock, /etc/hosts ── a bridge
    node1: the same                                    ── a cable (veth) to it, which can be cut

What a host is, dies with the first of its processes: its network, its clock and whatever runs on
it. That process reads a pipe that pytest holds, so nothing is left behind when pytest is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

INTERFACES = ("eth0", "ens3", "enp1s0", "bond0")  # hosts call their interfaces differently


class Host:
    """One host: nodeN at 10.101.0.N+1.

    Args:
        clock: how many seconds its clock is ahead of this machine's.
        own_name_is_loopback: its /etc/hosts has 127.0.1.1 for its own name, as Debian writes it.
    """

    def __init__(self, number: int, node0: Host | None, clock: int, own_name_is_loopback: bool):
        self.interface = interface = INTERFACES[number]
        self.node0, self.cable = node0 or self, f"cable{number}"
        own = {number: "127.0.1.1"} if own_name_is_loopback else {}
        names = [f"{own.get(n, f'10.101.0.{n + 1}')} node{n}" for n in range(len(INTERFACES))]
        files = {
            "/etc/hosts": "\\n".join(["127.0.0.1 localhost", *names]),
            "/etc/nsswitch.conf": "hosts: files",  # it has no name server to wait for
        }
        begin = f"hostname node{number}; mount -t tmpfs none /mnt; mount -t proc proc /proc; "
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


@contextlib.contextmanager
def hosts(
    count: int, clocks: Sequence[int] = (0, 0, 0, 0), own_name_is_loopback: bool = False
) -> Iterator[list[Host]]:
    """So many hosts; see Host. Afterwards nothing of them is left.

    Args:
        clocks: by host, how many seconds its clock is ahead of this machine's.
    """
    made: list[Host] = []
    try:
        for clock in clocks[:count]:
            made.append(Host(len(made), made[0] if made else None, clock, own_name_is_loopback))
        yield made
    finally:
        for host in made:
            host.die()


def enter(first: int) -> None:
    """Let this process's children be on the host whose process number 1 that is."""
    libc = ctypes.CDLL(None, use_errno=True)
    kinds = ("time", "net", "uts", "pid", "mnt")
    for namespace in [os.open(f"/proc/{first}/ns/{kind}", os.O_RDONLY) for kind in kinds]:
        if libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "setns")


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
