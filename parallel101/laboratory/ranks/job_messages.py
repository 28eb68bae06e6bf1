"""The messages between the ranks of a torchrun job. Nothing that another rank sent is unpickled.

To unpickle is to run what the sender wrote, and a job's store and connections have no password.

    status, calls, verdict ──▶ to_json ──▶ the job's store ──▶ from_json
    what a rank recorded   ──▶ a Trace's own JSON ─────┐
    what its function      ──▶ torch.save ─────────────┴▶ broadcast ──▶ torch.load(…,
        returned                                                         weights_only=True)
"""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
import re
import sys
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from parallel101.laboratory.ranks.wire import RankRecord, RankStack, bytes_of, is_dense, lean
from parallel101.laboratory.record.calls import Call
from parallel101.laboratory.record.errors import (
    DeadlockError,
    LaunchTimeout,
    MisuseError,
    RankFailed,
)
from parallel101.laboratory.record.events import events_of
from parallel101.laboratory.record.trace import Trace, trace_in
from parallel101.laboratory.record.wait_for import RankStatus

# ---- JSON: what is said about the ranks ----

KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (Call, RankStatus, RankStack, DeadlockError, MisuseError, RankFailed, LaunchTimeout)
}


ATOMS = frozenset({str, int, float, bool, type(None)})


def to_json(value: Any) -> str:
    """Return text for the job's store, from which `from_json` makes an equal value.

    A value consists of None, booleans, numbers, strings, lists, tuples, dicts and KINDS.
    """
    return json.dumps(_plain(value))


def from_json(text: str | bytes) -> Any:
    """Return the value that another rank wrote with `to_json`.

    Raises ValueError for any other text.
    """
    try:
        return _value(json.loads(text))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"another rank wrote to the job's store what this one can't read: {text[:80]!r}. Use "
            "the same version of parallel101 on all ranks"
        ) from error


def _plain(value: Any) -> Any:
    """Return the value in JSON's types. A list is itself, and {"Call": [...]} is a Call."""
    if type(value) in ATOMS or _are_atoms(value):
        return value
    name = type(value).__name__
    if KINDS.get(name) is type(value):
        return {name: [_plain(part) for part in _parts(value)]}
    if isinstance(value, Mapping):
        return {"dict": [[_plain(key), _plain(entry)] for key, entry in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [_plain(part) for part in value]}
    return [_plain(part) for part in value] if isinstance(value, list) else value


def _are_atoms(value: Any) -> bool:
    """Return whether a value is a list that JSON can hold unchanged.

    A status has thousands of names in such lists.
    """
    return type(value) is list and ATOMS.issuperset(map(type, value))


def _parts(value: Any) -> tuple:
    """Return the arguments with which the value's class makes an equal value."""
    if isinstance(value, BaseException):
        return value.__reduce__()[1]  # type: ignore[return-value]
    if isinstance(value, tuple):
        return value
    return tuple(getattr(value, field.name) for field in dataclasses.fields(value))


def _value(plain: Any) -> Any:
    if type(plain) in ATOMS or _are_atoms(plain):
        return plain
    if isinstance(plain, list):
        return [_value(part) for part in plain]
    ((name, parts),) = plain.items()
    values = _value(parts)
    if name == "tuple":
        return tuple(values)
    return dict(values) if name == "dict" else KINDS[name](*values)


# ---- what ranks return ----

# what torch's weights-only form may hold besides, since it runs nothing either
HARMLESS = (range, slice, frozenset)


def pack_for_all(value: Any, rank: int) -> bytes:
    """Pack the value that a rank returned, so that `unpack_from` can read it on all ranks.

    Raises TypeError, with advice, if they can't read it.
    """
    file = io.BytesIO()
    try:
        torch.save(value, file, pickle_module=SimpleNamespace(__name__="lean", Pickler=_Lean))
    except Exception as error:
        raise TypeError(
            f"rank {rank} returned a {type(value).__name__} that can't be pickled, so it can't be "
            f"sent to the other ranks: {error}. Return tensors, numbers, strings, or containers of "
            "them."
        ) from None
    unpack_from(file.getvalue(), rank)
    return file.getvalue()


def unpack_from(data: bytes, rank: int) -> Any:
    """Return the value that `rank` returned: tensors, numbers, strings, and containers of them.

    Raises TypeError for a value with other classes, unless the program has allowed these with
    torch.serialization.add_safe_globals.
    """
    with safe_globals([*HARMLESS, *_numpys_own()]):
        try:
            names = get_unsafe_globals_in_checkpoint(io.BytesIO(data))
            with safe_globals(list(_records_of_ours(names))):
                return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:
            name = re.search(r"GLOBAL (\S+)", str(error))
            what = f"a value with a {name[1]}" if name else "a value that can't be read"
            example = name[1].rpartition(".")[2] if name else "MyClass"
            raise TypeError(
                f"rank {rank} returned {what}, and the ranks of a job unpickle nothing that "
                "another rank sent. Return tensors, numbers, strings, or containers of them. If "
                "all ranks may make such objects, allow it before the launch: "
                f"torch.serialization.add_safe_globals([{example}])"
            ) from None


def _numpys_own() -> Iterator[Any]:
    """Yield the types and functions that NumPy's arrays and numbers are rebuilt from.

    It yields nothing if the program doesn't use NumPy.
    """
    if (numpy := sys.modules.get("numpy")) is None:
        return
    yield from (numpy.ndarray, numpy.dtype)
    yield from {type(numpy.dtype(code)) for code in numpy.typecodes["All"] if code != "O"}
    for made in (numpy.float64(0.0), numpy.zeros(1)):
        yield made.__reduce__()[0]


def _records_of_ours(names: list[str]) -> Iterator[type]:
    """Yield the classes of parallel101 that only hold values, such as a trainer's History."""
    for name in names:
        module, _, attribute = name.rpartition(".")
        kind = getattr(sys.modules.get(module), attribute, None)
        if (
            module.startswith("parallel101.")
            and isinstance(kind, type)
            and (dataclasses.is_dataclass(kind) or issubclass(kind, tuple))
        ):
            yield kind


class _Lean(pickle.Pickler):
    """Pickles a tensor as `launch` hands it over: on the CPU, without the rest of its storage."""

    def reducer_override(self, obj: Any) -> Any:
        return lean(obj).__reduce_ex__(2) if is_dense(obj) else NotImplemented


# ---- what ranks recorded ----


def pack_record(record: RankRecord, size: int, backend: str) -> bytes:
    trace = Trace(events_of(record.events), size, backend, events_of(record.unfinished))
    return json.dumps([to_json(list(record.unwaited)), trace.content()], default=str).encode()


def unpack_record(data: bytes) -> RankRecord:
    unwaited, content = json.loads(data)
    trace = trace_in(content)
    return RankRecord(list(trace.events), list(trace.unfinished), from_json(unwaited))


# ---- bytes for all ranks ----


def exchange(name: str, data: bytes, store: dist.Store, device: str) -> list[bytes]:
    """Return every rank's bytes, by rank. All ranks call it, each with bytes of its own.

    The lengths go through the store, under this name. The bytes are broadcast, by each rank in
    turn.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    store.set(f"{name}/{rank}", to_json(len(data)))
    # all are read before any rank is through, since the store may end with rank 0
    lengths = [from_json(store.get(f"{name}/{source}")) for source in range(size)]
    received = []
    for source, length in enumerate(lengths):
        sent = torch.empty(length, dtype=torch.uint8, device=device)
        if source == rank:
            sent.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(sent, source)
        received.append(bytes(bytes_of(sent.cpu().untyped_storage())))
    return received
