"""Pickles what ranks and the launching process send each other.

    pack   ──▶ a body (pickle), and beside it the memory of each tensor, which is not copied
    unpack ◀── the same

Functions are pickled by cloudpickle, so a lambda or a notebook cell's function works.

To unpickle is to run what the sender wrote. Between the ranks of a job, whose connections have no
password, values are therefore *plain*: they hold no code, and the reader makes objects of listed
classes only, as torch.load(weights_only=True) does: tensors, numbers, strings, containers, classes
of this package that only hold values, and those that the program has allowed by
torch.serialization.add_safe_globals.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import io
import pickle
import random
import sys
from collections.abc import Iterator
from types import BuiltinMethodType, MethodType, ModuleType
from typing import Any

import cloudpickle
import torch
from torch.serialization import get_safe_globals

from parallel101.laboratory.record import errors, torch_private
from parallel101.laboratory.record.trace import collector_paused

SMALL = 1 << 16  # bytes of a storage that is sent whole, so that views of it stay views of it
# what plain values may hold besides torch's list, since it runs nothing either
HARMLESS = (range, slice, frozenset, RuntimeError)
OWN_ERRORS = (errors.DeadlockError, errors.LaunchTimeout, errors.MisuseError, errors.RankFailed)


def pack(value: Any, plain: bool = False) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Pickle a value: the body, and the memory of its tensors, which is sent beside it."""
    file, buffers = io.BytesIO(), []  # type: ignore[var-annotated]
    pickler = _PlainPickler if plain else _Pickler
    pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    return file.getvalue(), buffers


def unpack(body: bytes, buffers: list, plain: bool = False) -> Any:
    """Return the value that `pack` pickled. Its tensors are in the memory of `buffers` itself.

    With `plain`, raise UnpicklingError for any class that isn't listed.
    """
    reader = _PlainUnpickler if plain else pickle.Unpickler
    # a record may have millions of events; the default device may be a GPU, or meta
    with collector_paused(), torch.device("cpu"):
        return reader(io.BytesIO(body), buffers=buffers).load()


def pack_result(value: Any, rank: int, plain: bool = False) -> tuple[bytes, list]:
    """Pickle what a rank returned. Raises TypeError, with advice, when that is not possible."""
    try:
        packed = pack(value, plain)
        if plain:
            unpack(*packed, plain)  # as the other ranks will do
    except Exception as error:
        raise TypeError(
            f"rank {rank} returned a {type(value).__name__} that can't be pickled, so it can't be "
            f"sent back: {error}. Return tensors, numbers, strings, or containers of them."
        ) from None
    return packed


# ---- writing ----


def _tensor_or_error(pickler: Any, obj: Any) -> Any:
    """Return how to rebuild a dense tensor, its storage or an exception.

    NotImplemented for anything else. Views of one storage stay views of one storage: a pickler
    writes each object once.
    """
    if isinstance(obj, torch.UntypedStorage) and obj.device.type == "cpu":
        return _storage, (pickle.PickleBuffer(bytes_of(obj)),)
    strided = type(obj) is torch.Tensor and obj.layout is torch.strided
    # so its memory is its values; to a launch's ranks, torch sends lazy conjugates and negatives
    lazy = strided and (obj.is_conj() or obj.is_neg()) and not isinstance(pickler, _PlainPickler)
    if strided and not (obj.is_meta or obj.is_quantized or lazy):
        sent = lean(obj)
        layout = sent.dtype, sent.storage_offset(), sent.shape, sent.stride(), sent.requires_grad
        return _tensor, (sent.untyped_storage(), *layout)
    if isinstance(obj, BaseException) and type(obj).__reduce__ is BaseException.__reduce__:
        return _exception, (type(obj), obj.args, obj.__dict__)
    return NotImplemented


class _PlainPickler(pickle.Pickler):
    reducer_override = _tensor_or_error


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj):
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType:
            # torch's config modules: cloudpickle knows modules of the plain type only
            return importlib.import_module, (obj.__name__,)
        if generator := _global_generator(obj):
            return getattr, generator
        reduced = _tensor_or_error(self, obj)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced


def lean(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as it is sent: on the CPU, without a graph or the rest of its storage.

    The launching process may have no GPU.
    """
    sent = tensor.detach().resolve_conj().resolve_neg().cpu()
    if sent.untyped_storage().nbytes() > max(2 * sent.nbytes, SMALL):
        sent = sent.clone(memory_format=torch.contiguous_format)
    return sent.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def bytes_of(storage: torch.UntypedStorage) -> Any:
    kind = ctypes.c_char * storage.nbytes()
    window = kind.from_address(storage.data_ptr()) if storage.nbytes() else kind()
    window.keep = storage  # type: ignore[attr-defined]
    return window


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


# ---- reading ----


def _storage(buffer) -> torch.UntypedStorage:
    empty = not len(memoryview(buffer))  # which frombuffer refuses
    whole = torch.empty(0) if empty else torch.frombuffer(buffer, dtype=torch.uint8)
    return whole.untyped_storage()


def _tensor(storage, dtype, offset, shape, stride, requires_grad) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
    return tensor.requires_grad_(requires_grad)


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


class _PlainUnpickler(pickle.Unpickler):
    """Reads what another rank of a job sent. It makes objects of listed classes only."""

    def find_class(self, module: str, name: str) -> Any:
        kind: Any = getattr(sys.modules.get(module), name, None)
        own = module.startswith("parallel101.") and isinstance(kind, type)
        # it only holds values, as a trainer's History or a Call does
        if own and (dataclasses.is_dataclass(kind) or issubclass(kind, tuple)):
            return kind
        allowed = [each if isinstance(each, tuple) else (each, "") for each in get_safe_globals()]
        made = (*HARMLESS, *OWN_ERRORS, _tensor, _storage, _exception, *_numpys_own())
        listed = torch_private.made_by_weights_only() | {
            name or f"{kind.__module__}.{kind.__qualname__}": kind
            for kind, name in [*allowed, *((kind, "") for kind in made)]
        }
        if (full := f"{module}.{name}") not in listed:
            raise pickle.UnpicklingError(
                f"the ranks of a job make no {full} of what another rank sent, unless all allow it "
                f"before the launch by torch.serialization.add_safe_globals([{name}])"
            )
        return listed[full]


def _numpys_own() -> Iterator[Any]:
    """Yield the types and functions that NumPy's arrays and numbers are rebuilt from.

    It yields nothing if the program doesn't use NumPy.
    """
    if (numpy := sys.modules.get("numpy")) is None:
        return
    yield from (numpy.ndarray, numpy.dtype)
    yield from {type(numpy.dtype(code)) for code in numpy.typecodes["All"] if code != "O"}
    for made in (numpy.float64(0.0), numpy.zeros(1)):
        yield from (made.__reduce__()[0], made.__reduce_ex__(5)[0])
