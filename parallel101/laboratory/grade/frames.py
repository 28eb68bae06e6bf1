"""The frames that the grader and a rank that runs a learner's code send each other.

    kind (1 byte) · length of the JSON · length of the bytes
    JSON: what it is, where in the code
    bytes of the tensors

Nothing is pickled on the way from a rank: unpickling would run code that the learner chose. A
tensor travels as its dtype, its shape and its bytes, and everything has a limit.
"""

from __future__ import annotations

import ctypes
import json
import math
import socket
import struct
import time
from typing import Any, NamedTuple

import torch

from parallel101.laboratory.record.signatures import COLLECTIVES

HEAD = struct.Struct("<cIQ")
MOST_TEXT = 4 << 20  # bytes of JSON in one frame
MOST_BYTES = 1 << 28  # bytes of tensors in one frame
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8"),
        *("uint8", "bool", "complex64", "complex128"),
    )
}

# From the grader to a rank
JOB, CASE, REPLY = b"J", b"C", b"D"
# From a rank to the grader
READY, CALL, NEW_GROUP, WAIT, TEST, CLOCK = b"K", b"A", b"G", b"W", b"T", b"N"
RESULT, FAILED = b"Y", b"E"
# Notes, which travel with such a frame
BEGIN, END, COMPUTE = "begin", "end", "compute"
# a process group's methods for messages, beside COLLECTIVES: what each is called
MESSAGES = {"send": "send", "recv": "recv", "recv_anysource": "recv"}


def operation_of(method: str) -> str:
    """Return the operation that a method of a process group belongs to: "recv", "all_reduce", …

    Raises KeyError if it is none.
    """
    return MESSAGES.get(method) or COLLECTIVES[method].kind


class Frame(NamedTuple):
    """One frame: its kind, its JSON, the bytes of its tensors, and how many its JSON had."""

    kind: bytes
    text: dict[str, Any]
    data: bytes | bytearray = b""
    size: int = 0


class BrokenFrame(Exception):
    """A rank sent something that is not a frame, or is larger than allowed."""


def send(
    sock: socket.socket, kind: bytes, text: dict[str, Any], data: bytes | bytearray = b""
) -> None:
    """Write one frame. Raises OSError if the other side is gone."""
    encoded = json.dumps(text).encode()
    sock.sendall(HEAD.pack(kind, len(encoded), len(data)) + encoded + data)


def receive(sock: socket.socket, until: float | None = None, limited: bool = True) -> Frame:
    """Read one frame. The grader limits what ranks send it; a rank trusts the grader.

    Raises EOFError at the end of the connection, and BrokenFrame for anything that is not a frame.

    Raises TimeoutError if the whole frame is not there at `until`, on time.monotonic()'s clock,
    however slowly its bytes come.
    """
    kind, texts, datas = HEAD.unpack(_read(sock, HEAD.size, until))
    if limited and (texts > MOST_TEXT or datas > MOST_BYTES):
        raise BrokenFrame(
            f"a frame of {texts} + {datas} bytes; at most {MOST_TEXT} + {MOST_BYTES} are allowed"
        )
    try:
        encoded = _read(sock, texts, until)
        text = json.loads(encoded.decode())
        # perhaps half of a surrogate pair, which isn't a character and can't be written to a file
        if b"\\u" in encoded:
            text = json.loads(json.dumps(text, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise BrokenFrame(f"a frame whose text is not JSON: {error}") from None
    if not isinstance(text, dict):
        raise BrokenFrame(f"a frame whose text is a {type(text).__name__}")
    return Frame(kind, text, _read(sock, datas, until), texts)


def _read(sock: socket.socket, size: int, until: float | None) -> bytearray:
    found = bytearray(size)
    rest = memoryview(found)
    while rest:
        if until is not None:
            sock.settimeout(max(0.01, until - time.monotonic()))
        count = sock.recv_into(rest)
        if not count:
            raise EOFError
        rest = rest[count:]
    return found


# ---- tensors, and containers of them ----


def tensor_text(tensor: torch.Tensor) -> dict[str, Any]:
    """Return a tensor's dtype and shape as JSON, with its strides if it isn't contiguous."""
    text = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    if text["dtype"] not in DTYPES or tensor.device.type == "meta":
        raise TypeError(
            f"a tensor of {tensor.dtype} on {tensor.device} can't be sent or returned here; it can "
            f"be one of {', '.join(DTYPES)}, on the CPU"
        )
    if not tensor.is_sparse and not tensor.is_contiguous():
        text["strides"] = list(tensor.stride())
    return text


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor, in the order of its elements."""
    if not tensor.numel():
        return b""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # without NumPy, which torch works without
    return bytes((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()))


def tensor_from(text: Any, data: memoryview) -> tuple[torch.Tensor, memoryview]:
    """Return the tensor with this dtype and shape that the bytes begin with, and the other bytes.

    Raises BrokenFrame if there are too few of them.
    """
    dtype, shape = DTYPES.get(text.get("dtype", "")), text.get("shape")
    if (
        dtype is None
        or not isinstance(shape, list)
        or not all(type(n) is int and 0 <= n <= MOST_BYTES for n in shape)
    ):
        raise BrokenFrame(f"a tensor described as {str(text)[:200]}")
    size = math.prod(shape) * dtype.itemsize
    if size > len(data):
        raise BrokenFrame(f"a {dtype} tensor of shape {shape} with {len(data)} bytes")
    own = bytearray(data[:size])
    flat = torch.frombuffer(own, dtype=dtype) if own else torch.empty(0, dtype=dtype)
    return flat.reshape(shape), data[size:]


def encode(value: Any) -> tuple[Any, bytes]:
    """Return a value as JSON and the bytes of its tensors.

    It may consist of tensors, numbers, text, None, and lists, tuples and dicts of them.

    Raises TypeError that names the type of anything else.
    """
    parts: list[bytes] = []

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            parts.append(tensor_bytes(value.to_dense() if value.is_sparse else value))
            return {"tensor": tensor_text(value)}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list):
            return [plain(item) for item in value]
        if isinstance(value, tuple):
            return {"tuple": [plain(item) for item in value]}
        if isinstance(value, dict):
            return {"dict": [[plain(key), plain(item)] for key, item in value.items()]}
        raise TypeError(
            f"returned an object of type {type(value).__name__}; return tensors, numbers, text, or "
            "lists, tuples and dicts of them"
        )

    return plain(value), b"".join(parts)


def decode(text: Any, data: bytes | bytearray, strided: bool = False) -> Any:
    """Return the value that `encode` was given.

    Raises BrokenFrame if the JSON and the bytes are not what `encode` writes.

    Its tensors are contiguous. If `strided`, they have the strides that they had: only a rank does
    that, with its arguments.
    """
    rest = memoryview(data)

    def value(text: Any) -> Any:
        nonlocal rest
        if isinstance(text, list):
            return [value(item) for item in text]
        if not isinstance(text, dict):
            return text
        if "tuple" in text:
            return tuple(value(item) for item in text["tuple"])
        if "dict" in text:
            return {value(key): value(item) for key, item in text["dict"]}
        tensor, rest = tensor_from(text["tensor"], rest)
        strides = text["tensor"].get("strides") if strided else None
        if strides:
            return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
        return tensor

    try:
        return value(text)
    except (TypeError, ValueError, AttributeError, KeyError, RecursionError) as error:
        raise BrokenFrame(f"a value that can't be read: {error}") from None
