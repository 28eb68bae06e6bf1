"""Sends frames over a socket between the process that watches a run and its ranks.

Tensors travel beside them.

    | kind | length of body | number of buffers | their lengths | body (pickle) | buffers, raw |

A tensor's memory is written to the socket from where it is, and read into where it will stay. (The
messages of the program itself do not come here: torch.distributed sends them.)
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from parallel101.laboratory.ranks.pickling import bytes_of, pack, unpack
from parallel101.laboratory.record.calls import Call
from parallel101.laboratory.record.events import EventRow

# Kinds of frames to a rank of a launch: its Job; the packed program.
JOB, PROGRAM = b"j", b"f"
# To any rank: "what are you doing?"; "what have you recorded?"; "all have returned", in a job with
# what; and in a job, the error that ends the run, with the rank that says it to the user.
ASK_STACKS, ASK_RECORD, EXIT, FAILED = b"w", b"t", b"q", b"y"
# From a rank: the Calls that it has posted; its RankStatus; its RankRecord and status; its
# RankStack; what its function returned; its Failure.
CALLS, STATUS, RECORD, STACKS, RESULT, FAILURE = b"c", b"b", b"e", b"w", b"r", b"x"
# From a rank of a job: who it is; that C++ is about to abort it, and where it is; that a signal has
# asked it to end; that a signal has asked for a report.
HELLO, ABORTS, LEAVES, WANTS_REPORT = b"h", b"a", b"l", b"s"

HEAD = struct.Struct("!cQI")
LENGTH = struct.Struct("!Q")


@dataclass
class Job:
    """The facts that a rank must know before its program.

    On sim one process is all the ranks, and `rank` is 0.
    """

    rank: int
    world_size: int
    backend: str
    rendezvous: str | None  # the path of the file through which ranks meet; None on sim
    recording: bool
    payload_bytes: int  # messages up to this size are recorded with their values
    network: Any  # a parallel101.Network, or None
    rules: str  # on sim: "gloo" or "nccl"
    device: str | None  # on sim: the name of each rank's virtual GPU; None: the CPU
    mirrors: Any  # on sim: a MirroredAxes, or None: all ranks have a thread
    keep_waiting: bool  # the program handles the time limits of its groups itself
    stuck_after: float  # on sim: seconds without progress after which there is a report
    path: list[str]  # sys.path
    directory: str  # the working directory
    environ: dict[str, str]
    sources: dict[str, tuple]  # linecache's entries for code that is in no file: a notebook's cells


class RankRecord(NamedTuple):
    """The record of one process, as Trace.from_rows takes it.

    On sim that is what all virtual ranks have recorded.
    """

    events: list[EventRow]
    unfinished: list[EventRow]  # posted, and not ended
    # of a checked run: sends and receives that the program never waited for
    unwaited: Sequence[Call] = ()
    # by rank, of a run on virtual GPUs: a sim.virtual_gpu.GpuCount each
    gpus: Sequence[Any] | None = None
    warnings: Sequence[str] = ()  # on sim, under NCCL's rules: what may hang on GPUs
    # sums of the rank's events before `events`, if only the newest were kept
    earlier: Sequence[EventRow] = ()
    # slow modules, which the fork server may import for the next ranks
    imported: Sequence[str] = ()


class RankStack(NamedTuple):
    """The place and the stack of one rank, and how long it has called nothing."""

    rank: int
    place: str  # "file:line" in the program, or what it does outside of it
    lines: list[str]  # its Python stack, the innermost call last; as text, with source lines
    quiet: float | None = None  # seconds in which it has called nothing of torch.distributed
    busy: float = 0.0  # cores that its process has used in the last second or two
    waits: str = ""  # on sim: "in recv for rank 1", or "for its turn"


class Failure(NamedTuple):
    """The exception that ended a rank's program."""

    rank: int
    error: BaseException
    headline: str  # the exception in one line
    traceback: str
    consequence: bool  # it only says that another rank has failed
    place: str = ""  # "file:line" of the program's line that raised it


class VirtualExit(BaseException):
    """A virtual rank called os._exit or sent itself a signal.

    Its process holds the other virtual ranks too, so it must go on.
    """

    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


class Wire:
    """One end of the socket between a rank and the process that watches it.

    Several threads may send; one reads.

    Args:
        plain: whether only plain values are sent and read (see pickling.py).
    """

    def __init__(self, sock: socket.socket, plain: bool = False):
        self.sock, self.plain = sock, plain
        self._sending = threading.Lock()
        # Ctrl-C may leave a frame half read; what follows is then no frame's beginning
        self._in_a_frame = False

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, kind: bytes, value: Any = None) -> None:
        """Pickle a value and send it as one frame."""
        self.send_packed(kind, *pack(value, self.plain))

    def send_packed(self, kind: bytes, body: bytes, buffers: list[pickle.PickleBuffer]) -> None:
        """Send what `pack` returned."""
        views = [memoryview(buffer.raw()).cast("B") for buffer in buffers]
        head = HEAD.pack(kind, len(body), len(views)) + b"".join(
            LENGTH.pack(len(view)) for view in views
        )
        with self._sending:
            self.sock.sendall(head + body)
            for view in views:
                self.sock.sendall(view)

    def receive(self) -> tuple[bytes, Any]:
        """Read one frame: its kind and its value. Raises EOFError when the other end is gone."""
        kind, body, buffers = self.receive_packed()
        return kind, unpack(body, buffers, self.plain)

    def receive_packed(self) -> tuple[bytes, bytes, list]:
        """Read one frame and leave its value pickled: kind, body, buffers."""
        if self._in_a_frame:
            raise EOFError
        self._in_a_frame = True
        kind, length, count = HEAD.unpack(self._exactly(HEAD.size))
        lengths = [LENGTH.unpack(self._exactly(LENGTH.size))[0] for _ in range(count)]
        body = self._exactly(length)
        buffers = [self._buffer(n) for n in lengths]
        self._in_a_frame = False
        return kind, body, buffers

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        self._fill(memoryview(data))
        return bytes(data)

    def _buffer(self, count: int) -> Any:
        # its pages are not touched, so they take memory only as the bytes arrive
        storage = torch.UntypedStorage(count)
        window = bytes_of(storage)
        self._fill(memoryview(window).cast("B"))
        return window

    def _fill(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            got = self.sock.recv_into(view[done:])
            if not got:
                raise EOFError
            done += got
