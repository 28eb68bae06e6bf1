"""Sends frames over a socket between the launching process and its ranks.

Tensors travel beside them.

    | kind | length of body | number of buffers | their lengths | body (pickle) | buffers, raw |

Functions are pickled by cloudpickle, so a lambda or a notebook cell's function works. A tensor's
memory is written to the socket from where it is, and read into where it will stay. (The messages of
the program itself do not come here: torch.distributed sends them.)
"""

from __future__ import annotations

import ctypes
import importlib
import io
import pickle
import random
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import BuiltinMethodType, MethodType, ModuleType
from typing import Any, NamedTuple

import cloudpickle
import torch

from parallel101.laboratory.record.calls import Call
from parallel101.laboratory.record.events import EventRow
from parallel101.laboratory.record.trace import collector_paused

# Kinds of frames to a rank: its Job; the packed program; "what are you doing?"; "what have you
# recorded?"; "you may exit".
JOB, PROGRAM, ASK_STACKS, ASK_RECORD, EXIT = b"j", b"f", b"w", b"t", b"q"
# And from a rank: the Calls that it has posted; its RankStatus; its RankRecord and status; its
# RankStack; what its function returned; its Failure.
CALLS, STATUS, RECORD, STACKS, RESULT, FAILURE = b"c", b"b", b"e", b"w", b"r", b"x"

HEAD = struct.Struct("!cQI")
LENGTH = struct.Struct("!Q")
SMALL = 1 << 16  # bytes of a storage that is sent whole, so that views of it stay views of it


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
    """One end of the socket between the launching process and a rank.

    Several threads may send; one reads.
    """

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self._sending = threading.Lock()
        # Ctrl-C may leave a frame half read; what follows is then no frame's beginning
        self._in_a_frame = False

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, kind: bytes, value: Any = None) -> None:
        """Pickle a value and send it as one frame."""
        self.send_packed(kind, *pack(value))

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
        return kind, unpack(body, buffers)

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


# ---- pickling ----


def pack(value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Pickle a value: the body, and the memory of its tensors, which is sent beside it."""
    file, buffers = io.BytesIO(), []  # type: ignore[var-annotated]
    _Pickler(file, buffers).dump(value)
    return file.getvalue(), buffers


def unpack(body: bytes, buffers: list) -> Any:
    """Return the value that `pack` pickled. Its tensors are in the memory of `buffers` itself."""
    with collector_paused():  # a record may have millions of events
        return pickle.loads(body, buffers=buffers)


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file, buffers):
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self.storages: dict[int, _PickledStorage] = {}

    def reducer_override(self, obj):
        if is_dense(obj):
            tensor = lean(obj)
            storage = tensor.untyped_storage()
            pickled = self.storages.setdefault(
                storage.data_ptr() if storage.nbytes() else id(storage), _PickledStorage(storage)
            )
            return _tensor, (
                pickled,
                tensor.dtype,
                tensor.storage_offset(),
                tensor.shape,
                tensor.stride(),
                tensor.requires_grad,
            )
        if (
            isinstance(obj, ModuleType)
            and type(obj) is not ModuleType
            and sys.modules.get(obj.__name__) is obj
        ):
            # torch's config modules: cloudpickle knows modules of the plain type only
            return importlib.import_module, (obj.__name__,)
        if generator := _global_generator(obj):
            return getattr, generator
        if isinstance(obj, BaseException) and type(obj).__reduce__ is BaseException.__reduce__:
            return _exception, (type(obj), obj.args, obj.__dict__)
        return super().reducer_override(obj)


def is_dense(obj: Any) -> bool:
    """Return whether an object is a plain tensor, whose memory is its values."""
    dense = type(obj) is torch.Tensor and obj.layout is torch.strided
    return dense and not (obj.is_meta or obj.is_quantized or obj.is_conj() or obj.is_neg())


def lean(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as it is sent: on the CPU, without a graph or the rest of its storage.

    The launching process may have no GPU.
    """
    sent = tensor.detach().cpu()
    if sent.untyped_storage().nbytes() > max(2 * sent.nbytes, SMALL):
        sent = sent.clone(memory_format=torch.contiguous_format)
    return sent.requires_grad_(tensor.requires_grad and tensor.is_leaf)


class _PickledStorage:
    """A tensor's storage, pickled as one out-of-band buffer.

    So views of one storage stay views of one storage.
    """

    def __init__(self, storage: torch.UntypedStorage):
        self.storage = storage

    def __reduce_ex__(self, protocol):
        return _storage, (pickle.PickleBuffer(bytes_of(self.storage)),)


def bytes_of(storage: torch.UntypedStorage) -> Any:
    window = (
        (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
        if storage.nbytes()
        else (ctypes.c_char * 0)()
    )
    window.keep = storage  # type: ignore[attr-defined]
    return window


def _storage(buffer) -> torch.UntypedStorage:
    if not len(memoryview(buffer)):
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _tensor(storage, dtype, offset, shape, stride, requires_grad) -> torch.Tensor:
    return (
        torch.empty(0, dtype=dtype)
        .set_(storage, offset, shape, stride)
        .requires_grad_(requires_grad)
    )


def _exception(cls: type[BaseException], args: tuple, state: dict) -> BaseException:
    """Rebuild an exception as it was.

    Its __init__ may take other arguments than it hands to Exception, and then pickle's own way
    fails.
    """
    try:
        error = cls(*args)
    except Exception:
        error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def _global_generator(obj: Any) -> tuple[Any, str] | None:
    """Return the module and the name of a global random generator, or of a method of it.

    `random.shuffle` is such a method. The result is None for any other object. A generator pickled
    by value would give every rank the same numbers.
    """
    own = {id(random._inst): random}  # the modules that have a generator's methods as functions
    known: dict[int, tuple[Any, str]] = {id(torch.default_generator): (torch, "default_generator")}
    if numpy := sys.modules.get("numpy.random"):
        own[id(numpy.mtrand._rand)] = numpy
        known[id(numpy.mtrand._rand)] = numpy.mtrand, "_rand"
    if isinstance(obj, MethodType | BuiltinMethodType):
        module = own.get(id(obj.__self__))
        return (module, obj.__name__) if hasattr(module, obj.__name__) else None
    return known.get(id(obj))
