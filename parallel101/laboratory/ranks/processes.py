"""Starts the processes that become ranks: forked by a fork server, or each a fresh interpreter.

    this process ──▶ fork server ──▶ rank 0, rank 1, …   2 to 6 ms a rank (Linux, macOS)
    this process ──▶ python …    ×  world size           1 s a rank (elsewhere, or
                                                         PARALLEL101_START=spawn)

The fork server has only imported torch. Such a process can be forked safely: no operation has run,
so no OpenMP or autograd threads would be lost, and CUDA is not initialized. (multiprocessing's own
fork server would import the caller's script again in every rank, and it can't capture output.) No
process outlives the launching one: the fork server exits when its socket closes, and kills its
ranks. Its side is in forkserver.py.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO

Channel = io.FileIO | socket.socket
CAN_FORK = hasattr(os, "fork") and hasattr(socket, "send_fds")


@dataclass
class RankProcess:
    """A process that becomes a rank, as the launching process holds it."""

    pid: int
    control: socket.socket  # frames both ways (see wire)
    out: Channel  # what it prints, C code included
    err: Channel
    # its exit code, a line of text, once it has ended; closed without one if its fork server ended
    # first
    status: Channel

    def close(self) -> None:
        for channel in (self.control, self.out, self.err, self.status):
            channel.close()


class Rendezvous:
    """The file through which the ranks of a launch find each other's addresses, a dist.FileStore.

    On Linux it is in memory, has no name, and disappears with the launching process. Elsewhere it
    is a temporary file. (A client of torch's TCPStore asks the name server for the name of
    ::ffff:127.0.0.1, which takes 5 s where the network answers slowly.)
    """

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            number = os.memfd_create("parallel101")
            self.path = f"/proc/{os.getpid()}/fd/{number}"
        else:
            number, self.path = tempfile.mkstemp()
        self.file = io.FileIO(number, "r+")

    def close(self) -> None:
        self.file.close()
        with contextlib.suppress(OSError):  # on Linux it is gone
            os.unlink(self.path)

    __del__ = close


def start_ranks(
    count: int, module: str = "parallel101.laboratory.ranks.worker"
) -> list[RankProcess]:
    """Start `count` processes.

    Each runs `main` of `module` with its own control socket, output pipes and exit status.

    Raises OSError, with nothing left running, when the system allows too few files or processes.
    """
    ranks: list[RankProcess] = []
    start_one = _fork_one if start_method() == "fork server" else _spawn_one
    try:
        for _ in range(count):
            ranks.append(start_one(module))
    except BaseException as error:
        for rank in ranks:
            kill(rank)
            rank.close()
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.EAGAIN):
            limit = "files (`ulimit -n`)" if error.errno == errno.EMFILE else "processes (`-u`)"
            raise OSError(
                error.errno,
                f"{error.strerror}: {count} ranks need a process each, and about 10 open files. "
                f"Use fewer ranks, or raise the limit of {limit}",
            ) from None
        raise
    return ranks


def start_method() -> str:
    """Return how ranks are started on this machine: "fork server" or "spawn".

    It is "spawn" where there is no fork or PARALLEL101_START=spawn asks for it.
    """
    methods = {"fork": "fork server", "spawn": "spawn"} if CAN_FORK else {"spawn": "spawn"}
    wanted = os.environ.get("PARALLEL101_START", next(iter(methods)))
    if wanted not in methods:
        raise ValueError(
            f"PARALLEL101_START is {wanted!r}; on this machine it must be "
            f"{' or '.join(map(repr, methods))}"
        )
    return methods[wanted]


def kill(rank: RankProcess) -> None:
    """Kill a rank and every process that it started. A rank leads a process group of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # all of them have ended
        if hasattr(os, "killpg"):
            os.killpg(rank.pid, signal.SIGKILL)
        else:
            os.kill(rank.pid, signal.SIGTERM)


def preload(modules: Iterable[str]) -> None:
    """Start the fork server, and let it import modules that the next ranks need.

    This does not wait for it.
    """
    # no server can be started, or PARALLEL101_START is wrong: start_ranks says so
    with contextlib.suppress(OSError, ValueError):
        if start_method() == "fork server":
            _server.preload(modules)


def stop_server() -> None:
    """End the fork server.

    The next launch starts another. (It ends by itself with this process.)
    """
    with _server.lock:
        _server.stop()


def _python_code(statements: str) -> str:
    """Return code for a fresh interpreter: `statements`, with this process's sys.path."""
    return f"import sys; sys.path[:] = {[*map(str, sys.path)]!r}; {statements}"


# ---- the fork server, seen from the launching process ----


class _Server:
    """The one fork server of this process.

    It is started at the first launch, and again if it was lost.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        # the pid of the process that started it: a forked child of that process must start its own
        self.owner = 0
        self.sock: socket.socket | None = None
        self.process: subprocess.Popen | None = None
        self.preloaded: set[str] = set()  # modules that it was asked to import

    def fork(self, fds: list[int], module: str) -> int:
        """Return the pid of a new process, to which the server has passed the file descriptors.

        It runs `main` of `module`.
        """
        with self.lock:
            for _attempt in (1, 2):
                self._start_if_needed()
                with contextlib.suppress(ConnectionError):
                    answer = self._ask(f"fork {module}", fds)
                    if answer < 0:
                        raise OSError(-answer, os.strerror(-answer))
                    return answer
        raise RuntimeError(
            "the fork server ended twice before it could start a rank. Run `parallel101 doctor` to "
            "see what works on this machine"
        )

    def preload(self, modules: Iterable[str]) -> None:
        with self.lock:
            self._start_if_needed()
            if new := sorted(set(modules) - self.preloaded):
                self.preloaded |= set(new)
                with contextlib.suppress(ConnectionError):
                    self._ask(f"import {' '.join(new)}", [])

    def _ask(self, request: str, fds: list[int]) -> int:
        """Return the answer to a request.

        Without one, the server is ended, also after Ctrl-C: it would answer the next request.
        """
        assert self.sock is not None
        try:
            socket.send_fds(self.sock, [f"{request}\n".encode()], fds)
            return int(self.sock.recv(64))
        except (OSError, ValueError):
            self.stop()
            raise ConnectionError("the fork server has ended") from None
        except BaseException:
            self.stop()
            raise

    def _start_if_needed(self) -> None:
        if self.owner == os.getpid() and self.process is not None and self.process.poll() is None:
            return
        self.preloaded = set()
        if self.sock is not None:
            self.sock.close()  # of a server that was lost or, in a forked child, of its parent's
        linux = sys.platform.startswith("linux")
        kind = socket.SOCK_SEQPACKET if linux else socket.SOCK_STREAM
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, kind)
        code = _python_code(
            f"from parallel101.laboratory.ranks.forkserver import serve; serve({theirs.fileno()})"
        )
        # A session of its own: Ctrl-C at the terminal reaches the launching process only, which
        # then ends its ranks itself.
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self.owner = os.getpid()

    def stop(self) -> None:
        if self.owner == os.getpid() and self.sock is not None and self.process is not None:
            self.sock.close()
            self.process.wait()
        elif self.process is not None:
            # it is the parent's of this forked child, which must not wait for it
            self.process.returncode = 0
        self.sock = self.process = None


_server = _Server()
atexit.register(lambda: _server.stop())


def _fork_one(module: str) -> RankProcess:
    control, their_control = socket.socketpair()
    (out, their_out), (err, their_err), (status, their_status) = _pipe(), _pipe(), _pipe()
    rank = RankProcess(0, control, out, err, status)
    theirs = (their_control, their_out, their_err, their_status)
    try:
        rank.pid = _server.fork([end.fileno() for end in theirs], module)
    except BaseException:
        rank.close()
        raise
    finally:
        for end in theirs:
            end.close()
    return rank


def _pipe() -> tuple[io.FileIO, io.FileIO]:
    """Return a pipe as two file objects: if Ctrl-C comes, an end that nobody holds is closed."""
    ours, theirs = os.pipe()
    return io.FileIO(ours, "rb"), io.FileIO(theirs, "wb")


# ---- a fresh interpreter for each rank ----


def _spawn_one(module: str) -> RankProcess:
    control, their_control = socket.socketpair()
    status, their_status = socket.socketpair()
    posix = os.name == "posix"
    inherited = [their_control.fileno(), their_status.fileno()]
    code = f"from {module} import main; main(control={inherited[0]}, status={inherited[1]})"
    if not posix:
        here = "from parallel101.laboratory.ranks.worker import shared_socket"
        code = f"{here}; from {module} import main; main(control=shared_socket())"
    process = subprocess.Popen(
        [sys.executable, "-c", _python_code(code)],
        stdin=subprocess.DEVNULL if posix else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=inherited if posix else [],
        start_new_session=posix,
    )
    # Windows shares a socket with a process that runs already, and does not let it inherit one
    if not posix:
        assert process.stdin is not None
        shared = their_control.share(process.pid)  # type: ignore[attr-defined]
        process.stdin.write(f"{shared.hex()}\n".encode())
        process.stdin.close()
    their_control.close()

    def report_exit() -> None:
        with their_status, contextlib.suppress(OSError):
            their_status.sendall(f"{process.wait()}\n".encode())

    threading.Thread(target=report_exit, daemon=True).start()
    assert process.stdout is not None and process.stderr is not None
    return RankProcess(
        process.pid, control, _selectable(process.stdout), _selectable(process.stderr), status
    )


def _selectable(pipe: IO[bytes]) -> socket.socket:
    """Return a socket with a pipe's bytes: on Windows select() takes sockets only."""
    ours, theirs = socket.socketpair()

    def forward() -> None:
        # an error: the launching process has stopped reading
        with pipe, theirs, contextlib.suppress(OSError):
            while data := pipe.read1(1 << 16):  # type: ignore[attr-defined]
                theirs.sendall(data)

    threading.Thread(target=forward, daemon=True).start()
    return ours
