"""Where ranks come from: a fork server that has imported torch and done nothing else, or a fresh interpreter each.

    this process ──▶ fork server ──▶ rank 0, rank 1, …      2 to 6 ms a rank (Linux, macOS)
    this process ──▶ python …    ×  world size               1 s a rank (elsewhere, or PARALLEL101_START=spawn)

A process that only imported torch can be forked safely: no op has run, so there are no OpenMP or autograd threads to lose, and CUDA is
untouched. (multiprocessing's own fork server would import the caller's script again in every rank, and has no place for the ranks' output.)
Nothing outlives the launching process: the server ends when its socket closes and takes its ranks with it.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO

End = io.FileIO | socket.socket
LIMITS = {
    errno.EMFILE: ("too many open files for {} ranks, which take about 10 each", "-n"),
    errno.EAGAIN: ("this user may start no more processes, and {} ranks were to be started", "-u"),
}
FORK = hasattr(os, "fork") and hasattr(socket, "send_fds")


@dataclass
class Rank:
    """A process that will be a rank, as the launching process holds it."""

    pid: int
    control: socket.socket  #  frames both ways (see wire)
    out: End  #  what it prints, C code included
    err: End
    status: End  #  its exit code, a line of text, once it has ended; closed without one: it was lost
    calls: io.FileIO | None  #  in a checked run, what it posts: a pipe nobody is woken by, read now and then; None: they come by control

    def close(self) -> None:
        for end in (self.control, self.out, self.err, self.status, self.calls):
            if end is not None:
                end.close()


def start_ranks(count: int) -> list[Rank]:
    """Bring `count` processes to the start of `worker.main`, each with its own control socket, output pipes and exit status."""
    ranks: list[Rank] = []
    one = _fork_one if start_method() == "fork server" else _spawn_one
    try:
        for _ in range(count):
            ranks.append(one())
    except BaseException as error:
        for rank in ranks:
            kill(rank)
            rank.close()
        if isinstance(error, OSError) and error.errno in LIMITS:
            what, limit = LIMITS[error.errno]
            raise OSError(error.errno, f"{what.format(count)}: take fewer ranks, or raise the limit (`ulimit {limit}`)") from None
        raise
    return ranks


def _program(what: str) -> str:
    """Python that does something with this process's own path. (What is no str there, Python passes over.)"""
    return f"import sys; sys.path[:] = {[place for place in sys.path if isinstance(place, str)]!r}; {what}"


def start_method() -> str:
    """How ranks are started on this machine: "fork server" or "spawn" (which PARALLEL101_START=spawn asks for)."""
    wanted = os.environ.get("PARALLEL101_START", "fork" if FORK else "spawn")
    if wanted not in ("fork", "spawn") or (wanted == "fork" and not FORK):
        raise ValueError(f"PARALLEL101_START is {wanted!r}; it may be {'fork or ' if FORK else ''}spawn on this machine")
    return "fork server" if wanted == "fork" else "spawn"


def kill(rank: Rank) -> None:
    """End a rank, and whatever it started, now. A rank leads a process group of its own."""
    try:
        os.killpg(rank.pid, signal.SIGKILL) if hasattr(os, "killpg") else os.kill(rank.pid, signal.SIGTERM)
    except (ProcessLookupError, PermissionError):
        pass  #  it and its children are gone already


# ---- the fork server, seen from the launching process ----


class _Server:
    """The one fork server of this process, started at the first launch and again if it was lost."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner = 0
        self.sock: socket.socket | None = None
        self.process: subprocess.Popen | None = None
        self.asked = 0

    def fork(self, fds: list[int]) -> int:
        with self.lock:
            for _attempt in (1, 2):
                if self.owner != os.getpid() or self.process is None or self.process.poll() is not None:
                    self._start()
                assert self.sock is not None
                try:
                    self.asked += 1
                    socket.send_fds(self.sock, [b"fork %d" % self.asked], fds)
                    answer = self._answer()
                except OSError:
                    self.stop()
                    continue
                if answer < 0:
                    raise OSError(-answer, os.strerror(-answer))
                return answer
        raise RuntimeError(
            "the fork server ended twice before it could start a rank; `parallel101 doctor` tells what works on this machine"
        )

    def preload(self, modules: Iterable[str]) -> None:
        with self.lock:
            if self.owner == os.getpid() and self.sock is not None:
                with contextlib.suppress(OSError):
                    self.asked += 1
                    self.sock.sendall(f"import {self.asked} {' '.join(modules)}".encode())
                    self._answer()

    def _answer(self) -> int:
        """The answer to the newest question. An older one may come first: Ctrl-C can fall between a question and its answer."""
        assert self.sock is not None
        while said := self.sock.recv(4096):
            number, _, answer = said.split(b"\n")[-2].partition(b" ")
            if int(number) == self.asked:
                return int(answer)
        raise ConnectionError("the fork server has ended")

    def _start(self) -> None:
        if self.sock is not None:
            self.sock.close()  #  of one that was lost, or, in a forked child, its parent's
        self.sock, theirs = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET if sys.platform.startswith("linux") else socket.SOCK_STREAM
        )
        program = _program(f"from parallel101.ranks.forkserver import serve; serve({theirs.fileno()})")
        #  a session of its own: Ctrl-C at the terminal is for the launching process, which then ends its ranks itself
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
        theirs.close()
        self.owner = os.getpid()

    def stop(self) -> None:
        if self.owner == os.getpid() and self.sock is not None and self.process is not None:
            self.sock.close()
            self.process.wait()
        elif self.process is not None:
            self.process.returncode = 0  #  a forked child's parent's: not for this process to wait for
        self.sock = self.process = None


_server = _Server()
atexit.register(lambda: _server.stop())


def preload(modules: Iterable[str]) -> None:
    """Let the fork server import modules that ranks turned out to need, so that the next ranks have them. It does so in its own time."""
    if modules := sorted(modules):
        _server.preload(modules)


def stop_server() -> None:
    """End the fork server; the next launch starts another. (It ends by itself with this process.)"""
    with _server.lock:
        _server.stop()


def _fork_one() -> Rank:
    control, control_there = socket.socketpair()
    (out, out_there), (err, err_there), (status, status_there), (calls, calls_there) = _pipe(), _pipe(), _pipe(), _roomy_pipe()
    rank = Rank(0, control, out, err, status, calls)
    there = (control_there, out_there, err_there, calls_there, status_there)
    try:
        rank.pid = _server.fork([end.fileno() for end in there])
    except BaseException:
        rank.close()
        raise
    finally:
        for end in there:
            end.close()
    return rank


def _pipe() -> tuple[io.FileIO, io.FileIO]:
    """A pipe, as objects: wherever Ctrl-C falls, what nobody holds any more is closed."""
    ours, theirs = os.pipe()
    return io.FileIO(ours, "rb"), io.FileIO(theirs, "wb")


def _roomy_pipe() -> tuple[io.FileIO, io.FileIO]:
    """A pipe that takes some thousand calls before its writer must wait, and whose reader never waits."""
    ours, theirs = _pipe()
    os.set_blocking(ours.fileno(), False)
    if sys.platform == "linux":
        import fcntl

        try:
            fcntl.fcntl(theirs.fileno(), fcntl.F_SETPIPE_SZ, 1 << 20)
        except OSError:
            pass  #  this user's pipes are at their limit: a smaller one will do
    return ours, theirs


# ---- a fresh interpreter a rank ----


def _spawn_one() -> Rank:
    control, theirs = socket.socketpair()
    status, reported = socket.socketpair()
    posix = os.name == "posix"
    calls, calls_there = _roomy_pipe() if posix else (None, None)
    inherited = [end.fileno() for end in (theirs, calls_there, reported) if end is not None]
    ticket = ",".join(map(str, inherited)) if posix else "share"
    program = _program(f"from parallel101.ranks.worker import main; main({ticket!r})")
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.DEVNULL if posix else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=inherited if posix else [],
        start_new_session=posix,
    )
    if not posix:  #  Windows hands a socket to a process that exists by a message, not by inheritance
        assert process.stdin is not None
        shared = theirs.share(process.pid)  # type: ignore[attr-defined]
        process.stdin.write(json.dumps(shared.hex()).encode() + b"\n")
        process.stdin.close()
    if calls_there is not None:
        calls_there.close()
    theirs.close()

    def report() -> None:
        code = process.wait()
        try:
            reported.sendall(f"{code}\n".encode())
        except OSError:
            pass
        reported.close()

    threading.Thread(target=report, daemon=True).start()
    assert process.stdout is not None and process.stderr is not None
    return Rank(process.pid, control, _selectable(process.stdout), _selectable(process.stderr), status, calls)


def _selectable(pipe: IO[bytes]) -> socket.socket:
    """A pipe as a socket: select() on Windows knows sockets alone."""
    ours, theirs = socket.socketpair()

    def pump() -> None:
        with pipe, theirs:
            try:
                while data := pipe.read1(1 << 16):  # type: ignore[attr-defined]
                    theirs.sendall(data)
            except OSError:
                pass  #  the launching process has stopped listening

    threading.Thread(target=pump, daemon=True).start()
    return ours
