"""Everything that a few steps of training can change, kept and put back.

    tensors             weights, gradients, buffers, the optimizer's state: memory, once each
    objects             what __dict__ holds: modules, the optimizer, loss_fn, what they refer to
    containers          dicts, lists, sets, deques, in place: whoever has them sees them as before
    functions           attributes, default values, closure cells, the globals that they name, of
                        their module and of the program's others
    random numbers      of torch, Python and NumPy, and generators that an object holds

A Python generator, an open file or an object of a C library can't be put back: `lost` names those
that were met. Nor is printing or other input and output undone.
"""

from __future__ import annotations

import gc
import io
import operator
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# whose objects hold no state of the program's training, or none that could be put back …
INSTALLED = {"torch", "numpy", "tqdm", "pytest", "_pytest", "pluggy", "parallel101"}
LIBRARIES = INSTALLED | sys.stdlib_module_names
# … but for these: schedulers, scalers, queues, namespaces
STATEFUL = (
    *("collections", "queue", "types", "argparse", "torch.optim", "torch.amp", "torch.quasirandom"),
    *(f"parallel101.{name}" for name in ("trainers", "layers", "models", "keras")),
)
MISSING = object()


class Snapshot:
    """The state of everything that can be reached from some objects.

    Args:
        roots: the objects.
        skip: objects that are not looked into.

    Attributes:
        lost: the types of what was met and can't be put back.
    """

    def __init__(self, *roots: Any, skip: tuple[Any, ...] = ()):
        self.lost: set[str] = set()
        self.undo = random_numbers()
        self.met: dict[int, Any] = {id(obj): obj for obj in skip}  # which keeps their ids
        self.memory: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        waiting = list(roots)
        while waiting:
            obj = waiting.pop()
            if id(obj) not in self.met:
                self.met[id(obj)] = obj
                try:
                    waiting.extend(self.keep(obj))
                except Exception:  # whatever an object of some library raises if it is looked at
                    self.lost.add(name_of(obj))

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for put_back in self.undo:
                put_back()
            for storage, copy in self.memory.values():
                storage.copy_(copy)

    # ── by kind: remember how to put it back; the result is what it refers to ──

    def keep(self, obj: Any) -> Iterator[Any]:
        if isinstance(obj, Tensor):
            yield from self.tensor(obj)
        elif isinstance(obj, dict | list | deque | bytearray | set):
            before = dict(obj) if isinstance(obj, dict) else list(obj)
            add = obj.update if isinstance(obj, dict | set) else obj.extend
            self.undo.append(partial(fill, obj, before, add))
            yield from gc.get_referents(obj)
        elif isinstance(obj, tuple | frozenset | partial | types.MethodType):
            yield from gc.get_referents(obj)
        elif isinstance(obj, types.FunctionType):
            yield from self.function(obj)
        elif isinstance(obj, torch.Generator):
            self.undo.append(partial(obj.set_state, obj.get_state()))
        elif isinstance(obj, random.Random):
            self.undo.append(partial(obj.setstate, obj.getstate()))
        elif type(obj).__module__.partition(".")[0] == "numpy":
            self.numpy_object(obj)
        elif isinstance(obj, types.GeneratorType | io.IOBase) or hasattr(type(obj), "__next__"):
            self.lost.add(name_of(obj))
        elif looked_into(obj):
            yield from self.object(obj)

    def tensor(self, t: Tensor) -> Iterator[Any]:
        if t.layout != torch.strided:
            self.undo.append(partial(t.copy_, t.detach().clone()))
            return
        data, leaf = t.data, t.is_leaf
        gradient, hooks = (t.grad, t._backward_hooks) if leaf else (None, None)
        self.undo.append(partial(put_back_tensor, t, data, t.requires_grad, gradient, hooks))
        storage = data.untyped_storage()
        if not t.is_meta and storage.nbytes() and storage._cdata not in self.memory:
            self.memory[storage._cdata] = storage, storage.clone()
        yield from (t.__dict__, gradient, hooks)

    def function(self, function: types.FunctionType) -> Iterator[Any]:
        yield from (function.__dict__, function.__defaults__, function.__kwdefaults__)
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # it is empty
                self.undo.append(partial(setattr, cell, "cell_contents", cell.cell_contents))
                yield cell.cell_contents
        if not is_users(function):
            return
        here, names = function.__globals__, set(names_in(function.__code__))
        modules = (here[name] for name in names if isinstance(here.get(name), types.ModuleType))
        for space in (here, *(vars(module) for module in modules if is_program(module))):
            for name in names & space.keys():
                value = space[name]
                self.undo.append(partial(space.__setitem__, name, value))
                its = getattr(value, "__module__", None) or ""
                if (
                    not callable(value)
                    or its == function.__module__
                    or is_program(sys.modules.get(its))
                ):
                    yield value

    def object(self, obj: Any) -> Iterator[Any]:
        yield getattr(obj, "__dict__", None)
        for cls in type(obj).__mro__:
            if not is_users(cls):
                continue
            for name, value in vars(cls).items():
                if isinstance(value, types.MemberDescriptorType):  # of __slots__
                    if (held := getattr(obj, name, MISSING)) is not MISSING:
                        self.undo.append(partial(put_back_attribute, obj, name, held))
                        yield held
                elif isinstance(value, types.FunctionType):
                    yield value
                elif not name.startswith("__") and not hasattr(value, "__get__"):
                    self.undo.append(partial(put_back_attribute, cls, name, value))
                    yield value

    def numpy_object(self, obj: Any) -> None:
        if hasattr(obj, "bit_generator"):
            state = obj.bit_generator.state
            self.undo.append(partial(setattr, obj.bit_generator, "state", state))
        elif hasattr(obj, "get_state"):
            self.undo.append(partial(obj.set_state, obj.get_state()))
        elif hasattr(obj, "flags") and obj.flags.writeable:
            self.undo.append(partial(obj.__setitem__, ..., obj.copy()))


def put_back_tensor(
    t: Tensor, data: Tensor, trained: bool, gradient: Tensor | None, hooks: Any
) -> None:
    if t.data_ptr() != data.data_ptr() or t.shape != data.shape or t.dtype != data.dtype:
        t.data = data
    if t.is_leaf:
        t.grad, t._backward_hooks = gradient, hooks
        t.requires_grad_(trained)


def put_back_attribute(obj: Any, name: str, value: Any) -> None:
    if getattr(obj, name, MISSING) is not value:
        setattr(obj, name, value)


def name_of(obj: Any) -> str:
    return f"{type(obj).__module__}.{type(obj).__qualname__}"


def fill(container: Any, before: Any, add: Callable[[Any], object]) -> None:
    """Give a container its content again, unless it has it."""
    now, then = ([*c, *c.values()] if isinstance(c, dict) else list(c) for c in (container, before))
    same = len(now) == len(then) and all(map(operator.is_, now, then))
    if not same:
        container.clear()
        add(before)


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals (and attributes) in a function's code and inner functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def is_users(function_or_class: Any) -> bool:
    """Return whether a program has defined it, and no library."""
    root = (getattr(function_or_class, "__module__", None) or "builtins").partition(".")[0]
    return root not in LIBRARIES


def is_program(module: Any) -> bool:
    """Return whether a module belongs to the program, and isn't installed."""
    name, file = getattr(module, "__name__", "builtins"), getattr(module, "__file__", None) or ""
    return name.partition(".")[0] not in LIBRARIES and "site-packages" not in file


def looked_into(obj: Any) -> bool:
    """Return whether what this object holds may change in training."""
    cls = type(obj)
    if isinstance(obj, nn.Module | Optimizer):
        return True
    if isinstance(obj, type | types.ModuleType):
        return False
    return is_users(cls) or cls.__module__.startswith(STATEFUL)


# ── random numbers ──


def seed_torch(seed: int) -> None:
    """Do what torch.manual_seed does. Without a GPU, that writes down its callers each time."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def seed_all(seed: int) -> None:
    seed_torch(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)


def random_numbers() -> list[Callable[[], object]]:
    """Return what puts the global random numbers back to where they are now."""
    undo: list[Callable[[], object]] = [
        partial(torch.set_rng_state, torch.get_rng_state()),
        partial(random.setstate, random.getstate()),
    ]
    if torch.cuda.is_available():
        undo.append(partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    if numpy := sys.modules.get("numpy"):
        undo.append(partial(numpy.random.set_state, numpy.random.get_state()))
    return undo
