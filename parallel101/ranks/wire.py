"""What the launching process and its ranks say to each other: frames on a socket, tensors beside them and not inside.

    | kind | length of body | how many buffers | their lengths | body (pickle) | buffers, raw |

Functions travel by cloudpickle, so a notebook cell's function or a lambda will do. A tensor's memory is written to the socket
from where it lies and read into where it will stay; on Linux the sender's pages are given back as they leave, so that handing over
a gigabyte needs a gigabyte, and not two.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import mmap
import pickle
import random
import socket
import struct
import sys
import threading
from types import BuiltinMethodType, MethodType, ModuleType
from typing import Any

import cloudpickle
import torch

from parallel101.record.trace import collector_paused

HEAD = struct.Struct("!cQI")
LENGTH = struct.Struct("!Q")
#  kinds of frames to a rank: its Job; the packed program; where is it? what has it recorded? it may go
JOB, PROGRAM, WHERE, TELL, LEAVE = b"j", b"f", b"w", b"t", b"q"
#  and from a rank: a call as it is posted; it waits in a call; no longer; its record; what it imported; where it is; what came of it
CALL, BLOCKED, FREE, BOOKS, IMPORTED, PLACES, RESULT, ERROR = b"c", b"b", b"f", b"e", b"p", b"w", b"r", b"x"
PIECE = 4 << 20  #  bytes written at a time, and given back at a time
SMALL = 1 << 16  #  bytes of a storage that travels whole, however little of it is asked for: views of it stay views of it
GIVE_BACK = 32 << 20  #  only buffers at least this large are worth a system call a piece
DONT_NEED = getattr(mmap, "MADV_DONTNEED", 4)


class _Memory:
    """A tensor's storage on its way: pickled as one out-of-band buffer, so that views of one storage stay views of one storage."""

    def __init__(self, storage: torch.UntypedStorage):
        self.storage = storage

    def __reduce_ex__(self, protocol):
        return _storage, (pickle.PickleBuffer(_bytes_of(self.storage)),)


def _bytes_of(storage: torch.UntypedStorage) -> Any:
    window = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()) if storage.nbytes() else (ctypes.c_char * 0)()
    window.keep = storage  # type: ignore[attr-defined]
    return window


def _storage(buffer) -> torch.UntypedStorage:
    if not len(memoryview(buffer)):
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _tensor(storage, dtype, offset, shape, stride, requires_grad) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride).requires_grad_(requires_grad)


def _exception(cls: type[BaseException], args: tuple, state: dict) -> BaseException:
    """An exception as it was, also one whose __init__ wants something else than what it hands on to Exception (pickle's own way fails)."""
    try:
        error = cls(*args)
    except Exception:
        error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def _home(obj: Any) -> tuple[Any, str] | None:
    """Where to find what each process has one of: a global random generator, or (`from random import shuffle`) a method of one.

    By value all ranks would draw the same numbers. On sim a module's functions are those of the rank that runs.
    """
    generators = [(random, random._inst)]
    if numpy := sys.modules.get("numpy.random"):
        generators.append((numpy, numpy.mtrand._rand))
        if obj is numpy.mtrand._rand:
            return numpy.mtrand, "_rand"
    if isinstance(obj, MethodType | BuiltinMethodType):
        return next(((m, obj.__name__) for m, generator in generators if obj.__self__ is generator and hasattr(m, obj.__name__)), None)
    return (torch, "default_generator") if obj is torch.default_generator else None


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file, buffers):
        super().__init__(file, protocol=5, buffer_callback=buffers.append)
        self.memories: dict[int, _Memory] = {}

    def reducer_override(self, obj):
        dense = type(obj) is torch.Tensor and obj.layout is torch.strided
        if dense and not (obj.is_meta or obj.is_quantized or obj.is_conj() or obj.is_neg()):  #  these are not what their memory holds
            wants_grad = obj.requires_grad and obj.is_leaf
            tensor = obj.detach().cpu()  #  a GPU tensor comes back on the CPU: the launching process may have none
            if tensor.untyped_storage().nbytes() > max(2 * tensor.nbytes, SMALL):
                tensor = tensor.clone(memory_format=torch.contiguous_format)  #  a slice does not drag its whole base along
            storage = tensor.untyped_storage()
            memory = self.memories.setdefault(storage.data_ptr() if storage.nbytes() else id(storage), _Memory(storage))
            return _tensor, (memory, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride(), wants_grad)
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)  #  torch's config modules: cloudpickle knows modules of the plain type only
        if home := _home(obj):
            return getattr, home
        if isinstance(obj, BaseException) and type(obj).__reduce__ is BaseException.__reduce__:
            return _exception, (type(obj), obj.args, obj.__dict__)
        return super().reducer_override(obj)


def pack(value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Pickle a value: the body, and the memory that goes beside it."""
    file, buffers = io.BytesIO(), []  # type: ignore[var-annotated]
    _Pickler(file, buffers).dump(value)
    return file.getvalue(), buffers


def unpack(body: bytes, buffers: list) -> Any:
    """What `pack` packed, its tensors lying in the very memory of `buffers`."""
    with collector_paused():  #  a record may have millions of events
        return pickle.loads(body, buffers=buffers)


class Wire:
    """One end of the socket between the launching process and a rank. Several threads may send; one reads."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self._sending = threading.Lock()
        self._torn = False  #  reading a frame was begun and not ended: by Ctrl-C, what follows is no frame's beginning

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, kind: bytes, value: Any = None, *, give_back: bool = False) -> None:
        """Send a frame. With give_back, large buffers lose their content as they leave (the sender is done with them)."""
        self.send_packed(kind, *pack(value), give_back=give_back)

    def send_packed(self, kind: bytes, body: bytes, buffers: list[pickle.PickleBuffer], *, give_back: bool = False) -> None:
        views = [memoryview(buffer.raw()).cast("B") for buffer in buffers]
        head = HEAD.pack(kind, len(body), len(views)) + b"".join(LENGTH.pack(len(view)) for view in views)
        with self._sending:
            self.sock.sendall(head + body)
            for view in views:
                for start in range(0, len(view), PIECE):
                    self.sock.sendall(view[start : start + PIECE])
                    if give_back and len(view) >= GIVE_BACK:
                        _give_back(view, start, min(start + PIECE, len(view)))

    def receive(self) -> tuple[bytes, Any]:
        """Read one frame. Raises EOFError when the other end is gone."""
        kind, body, buffers = self.receive_packed()
        return kind, unpack(body, buffers)

    def receive_packed(self) -> tuple[bytes, bytes, list]:
        """Read one frame and leave it pickled."""
        if self._torn:
            raise EOFError
        self._torn = True
        kind, length, count = HEAD.unpack(self._exactly(HEAD.size))
        lengths = [LENGTH.unpack(self._exactly(LENGTH.size))[0] for _ in range(count)]
        body = self._exactly(length)
        buffers = [self._buffer(n) for n in lengths]
        self._torn = False
        return kind, body, buffers

    def close(self) -> None:
        self.sock.close()

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        self._fill(memoryview(data))
        return bytes(data)

    def _buffer(self, count: int) -> Any:
        storage = torch.UntypedStorage(count)  #  untouched pages: they become real as the bytes arrive
        window = _bytes_of(storage)
        self._fill(memoryview(window).cast("B"))
        return window

    def _fill(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            got = self.sock.recv_into(view[done:])
            if not got:
                raise EOFError
            done += got


def _give_back(view: memoryview, start: int, stop: int) -> None:
    """Return the whole pages of view[start:stop] to the system. Linux only: elsewhere the pages stay until the process ends."""
    if not sys.platform.startswith("linux"):
        return
    base = ctypes.addressof(ctypes.c_char.from_buffer(view))
    first = -(-(base + start) // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (base + stop) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), DONT_NEED)
