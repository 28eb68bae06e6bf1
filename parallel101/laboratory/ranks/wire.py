"""Sends frames over a socket between the process that watches a run and its ranks.

Tensors travel beside them.

    | kind | number of pieces | their lengths | body (pickle) | buffers, raw |

A tensor's memory is written to the socket from where it is, and read into where it will stay. (The
messages of the program itself do not come here: torch.distributed sends them.)
"""

from __future__ import annotations

import math
import pickle
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from parallel101.laboratory.ranks.pickling import bytes_of, pack, unpack
from parallel101.laboratory.record.calls import Call
from parallel101.laboratory.record.events import EventRow

# Kinds of frames to a rank of a launch: its rank, its Job, where it meets the others, and the
# arguments of worker.prepare; the packed program.
JOB, PROGRAM = b"j", b"f"
# To any rank: "all have returned", in a job with what; and in a job, the error that ends the run,
# with the rank that says it to the user.
EXIT, FAILED = b"q", b"y"
# From a rank: the Calls that it has posted; its status; what its function returned; its Failure;
# the "file:line" at which its program is, each second and before it ends itself.
CALLS, STATUS, RESULT, FAILURE, PLACE = b"c", b"b", b"r", b"x", b"p"
# To any rank, without a value, and its answer: its RankRecord and status; its RankStacks.
RECORD, STACKS = b"e", b"w"
# From a rank of a job: that C++ is about to abort it; that a signal has asked it to end; that a
# signal has asked for a report.
ABORTS, LEAVES, WANTS_REPORT = b"a", b"l", b"s"

HEAD = struct.Struct("!cI")


@dataclass
class Job:
    """A run, as `launch` was asked for it: the same on all ranks and in all worlds.

    The meaning of each attribute is that of `launch`'s argument.
    """

    world_size: int
    backend: str
    timeout: float = math.inf
    recording: bool = False
    payload_bytes: int = 0  # messages up to this size are recorded with their values
    keep_waiting: bool = False
    stuck_after: float = math.inf
    device: str | None = None
    # on sim: `network`, `rules` and `mirrors`
    simulated: Mapping[str, Any] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        """Return the number of processes. On sim, one is all ranks."""
        return 1 if self.backend == "sim" else self.world_size

    @property
    def recorder_options(self) -> dict[str, Any]:
        """Return the options of a RankRecorder, and of `simulate`."""
        names = "recording", "payload_bytes", "keep_waiting"
        return {name: getattr(self, name) for name in names}


class RankRecord(NamedTuple):
    """The record of one process, as Trace.from_rows takes it.

    On sim that is what all virtual ranks have recorded.
    """

    events: list[EventRow]
    unfinished: list[EventRow]  # posted, and not ended
    # of a checked run: sends and receives that the program never waited for
    unwaited: Sequence[Call] = ()
    # by rank, of a run on virtual GPUs: a sim.virtual_gpu.GpuCount each
    gpus: Sequence[Any] = ()
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
    """A virtual rank called os._exit(code) or sent itself a signal.

    Its process holds the other virtual ranks too, so it must go on.
    """


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
        lengths = [len(body), *map(len, views)]
        head = HEAD.pack(kind, len(lengths)) + struct.pack(f"!{len(lengths)}Q", *lengths)
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
        kind, count = HEAD.unpack(self._exactly(HEAD.size))
        lengths = struct.unpack(f"!{count}Q", self._exactly(8 * count))
        body, *buffers = [self._exactly(length) for length in lengths]
        self._in_a_frame = False
        return kind, bytes(body), buffers

    def _exactly(self, count: int) -> Any:
        # its pages are not touched, so they take memory only as the bytes arrive
        window = bytes_of(torch.UntypedStorage(count))
        view = memoryview(window).cast("B")
        while view:
            got = self.sock.recv_into(view)
            if not got:
                raise EOFError
            view = view[got:]
        return window
