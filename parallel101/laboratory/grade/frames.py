"""The frames that the grader and a rank that runs a learner's code send each other.

    length of the JSON · length of the bytes
    JSON: ["call", what it is, where in the code]
    bytes of the tensors

What a frame holds may consist of tensors, numbers, text, None, and lists, tuples and dicts of them.
Nothing is pickled on the way from a rank: unpickling would run code that the learner chose. A
tensor travels as its dtype, its shape and its bytes, and everything has a limit.
"""

from __future__ import annotations

import ctypes
import io
import json
import math
import socket
import struct
import time
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import torch

from parallel101.laboratory.record.signatures import COLLECTIVES

HEAD = struct.Struct("<IQ")
MOST_TEXT = 4 << 20  # bytes of JSON in one frame
TEXT_TAKES = 8  # bytes of memory that a byte of JSON takes, as objects
MOST_BYTES = 1 << 28  # bytes of tensors in one frame
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8"),
        *("uint8", "bool", "complex64", "complex128"),
    )
}
# a process group's methods for messages, beside COLLECTIVES: what each is called
MESSAGES = {"send": "send", "recv": "recv", "recv_anysource": "recv"}


def operation_of(method: str) -> str:
    """Return the operation that a method of a process group belongs to: "recv", "all_reduce", …

    Raises KeyError if it is none.
    """
    return MESSAGES.get(method) or COLLECTIVES[method].kind


class Frame(NamedTuple):
    """One frame: its kind, what it holds, and how many bytes of memory that takes."""

    kind: str
    content: dict[str, Any]
    size: int


def send(sock: socket.socket, kind: str, **content: Any) -> None:
    """Write one frame.

    Raises OSError if the other side is gone, and TypeError for what no frame can hold.
    """
    parts: list[bytes] = []
    named = {name: _as_json(value, parts) for name, value in content.items()}
    text, data = json.dumps([kind, named]).encode(), b"".join(parts)
    sock.sendall(HEAD.pack(len(text), len(data)) + text + data)


def receive(sock: socket.socket, until: float | None = None) -> Frame:
    """Read one frame.

    Raises EOFError at the end of the connection, and ValueError for anything that is not a frame or
    is larger than allowed.

    Raises TimeoutError if the whole frame is not there at `until`, on time.monotonic()'s clock,
    however slowly its bytes come.
    """
    texts, datas = HEAD.unpack(_read(sock, HEAD.size, until))
    if texts > MOST_TEXT or datas > MOST_BYTES:
        raise ValueError(
            f"a frame of {texts} + {datas} bytes; at most {MOST_TEXT} + {MOST_BYTES} are allowed"
        )
    body = _read(sock, texts + datas, until)
    data = io.BytesIO(memoryview(body)[texts:])
    try:
        text = body[:texts].decode()
        # perhaps half of a surrogate pair, which isn't a character and can't be written to a file
        if "\\u" in text:
            plain = json.dumps(json.loads(text), ensure_ascii=False)
            text = plain.encode("utf-8", "replace").decode()
        kind, content = json.loads(text, object_hook=partial(_from_json, data))
        if not isinstance(kind, str) or not isinstance(content, dict):  # even a tensor has items
            raise TypeError("expected a kind, and a dict")
        return Frame(kind, content, datas + TEXT_TAKES * texts)
    except Exception as error:
        raise ValueError(f"a frame that can't be read: {error}") from None


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


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor, in the order of its elements."""
    if not tensor.numel():
        return b""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # without NumPy, which torch works without
    return bytes((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()))


def _as_json(value: Any, parts: list[bytes]) -> Any:
    """Return a value as JSON; the bytes of its tensors are appended to `parts`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_as_json(item, parts) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_as_json(item, parts) for item in value]}
    if isinstance(value, dict):
        return {"dict": [_as_json(list(item), parts) for item in value.items()]}
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"returned an object of type {type(value).__name__}; return tensors, numbers, text, or "
            "lists, tuples and dicts of them"
        )
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in DTYPES or value.device.type == "meta":
        raise TypeError(
            f"a tensor of {value.dtype} on {value.device} can't be sent or returned here; it can "
            f"be one of {', '.join(DTYPES)}, on the CPU"
        )
    dense = value.to_dense() if value.is_sparse else value
    order = sorted(range(dense.dim()), key=dense.stride, reverse=True)  # as in memory
    dense = dense.permute(order)
    parts.append(tensor_bytes(dense))
    return {"tensor": dtype, "shape": dense.shape, "order": order}


def _from_json(data: BinaryIO, entry: dict[str, Any]) -> Any:
    """Return the value for an object of JSON, whose parts are values already.

    JSON is read from its beginning, so tensors' bytes come in the order in which they were written.
    """
    if "tuple" in entry:
        return tuple(entry["tuple"])
    if "dict" in entry:
        return dict(entry["dict"])
    if "tensor" not in entry:
        return entry
    dtype, shape, order = DTYPES[entry["tensor"]], entry["shape"], entry["order"]
    size = math.prod(shape) * dtype.itemsize
    if len(own := bytearray(data.read(size))) < size:
        raise ValueError(f"a {dtype} tensor of shape {shape} with {len(own)} bytes")
    flat = torch.frombuffer(own, dtype=dtype) if own else torch.empty(0, dtype=dtype)
    return flat.reshape(shape).permute(sorted(range(len(order)), key=order.__getitem__))
