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
GET_AND_SET = (("get_state", "set_state"), ("getstate", "setstate"))


class Snapshot:
    """The state of everything that can be reached from some objects, and of the global random
    numbers.

    Args:
        roots: the objects.
        skip: objects that are not looked into.

    Attributes:
        lost: the types of what was met and can't be put back.
    """

    def __init__(self, *roots: Any, skip: tuple[Any, ...] = ()):
        self.lost: set[str] = set()
        self.undo = list[Callable[[], object]]()
        self.met: dict[int, Any] = {id(obj): obj for obj in skip}  # which keeps their ids
        for generator in global_generators():
            self.generator(generator)
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

    # ── by kind: remember how to put it back; the result is what it refers to ──

    def keep(self, obj: Any) -> Iterator[Any]:
        if isinstance(obj, Tensor):
            yield from self.tensor(obj)
        elif isinstance(obj, dict | list | deque | bytearray | set):
            before = dict(obj) if isinstance(obj, dict) else list(obj)
            self.undo.append(partial(fill, obj, before))
            yield from gc.get_referents(obj)
        elif isinstance(obj, tuple | frozenset | partial | types.MethodType):
            yield from gc.get_referents(obj)
        elif isinstance(obj, types.FunctionType):
            yield from self.function(obj)
        elif isinstance(obj, torch.Generator | random.Random) or root_of(type(obj)) == "numpy":
            self.generator(obj)
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
        if not t.is_meta and storage.nbytes() and storage._cdata not in self.met:
            self.met[storage._cdata] = storage
            self.undo.append(partial(storage.copy_, storage.clone()))
        yield from (t.__dict__, gradient, hooks)

    def generator(self, obj: Any) -> None:
        """Keep a generator of random numbers, or an array of NumPy's."""
        for get, put in GET_AND_SET:
            if hasattr(obj, put):
                self.undo.append(partial(getattr(obj, put), getattr(obj, get)()))
                return
        if hasattr(obj, "bit_generator"):
            state = obj.bit_generator.state
            self.undo.append(partial(setattr, obj.bit_generator, "state", state))
        elif hasattr(obj, "flags") and obj.flags.writeable:
            self.undo.append(partial(obj.__setitem__, ..., obj.copy()))

    def function(self, function: types.FunctionType) -> Iterator[Any]:
        yield from (function.__dict__, function.__defaults__, function.__kwdefaults__)
        for cell in function.__closure__ or ():
            yield from self.attribute(cell, "cell_contents")
        if not is_users(function):
            return
        here, names = function.__globals__, set(names_in(function.__code__))
        modules = (here[name] for name in names if isinstance(here.get(name), types.ModuleType))
        for space in (here, *(vars(module) for module in modules if is_users(module))):
            for name in names & space.keys():
                self.undo.append(partial(space.__setitem__, name, space[name]))
                yield space[name]

    def object(self, obj: Any) -> Iterator[Any]:
        yield getattr(obj, "__dict__", None)
        for cls in filter(is_users, type(obj).__mro__):
            for name, value in vars(cls).items():
                if isinstance(value, types.MemberDescriptorType):  # of __slots__
                    yield from self.attribute(obj, name)
                elif isinstance(value, types.FunctionType):
                    yield value
                elif not name.startswith("__") and not hasattr(value, "__get__"):
                    yield from self.attribute(cls, name)

    def attribute(self, owner: Any, name: str) -> Iterator[Any]:
        """Keep an attribute that is in no __dict__."""
        try:
            value = getattr(owner, name)
        except (AttributeError, ValueError):  # an empty slot or cell
            return
        self.undo.append(partial(put_back_attribute, owner, name, value))
        yield value


def put_back_tensor(
    t: Tensor, data: Tensor, trained: bool, gradient: Tensor | None, hooks: Any
) -> None:
    if t.data_ptr() != data.data_ptr() or t.shape != data.shape or t.dtype != data.dtype:
        t.data = data
    if t.is_leaf:
        t.grad, t._backward_hooks = gradient, hooks
        t.requires_grad_(trained)


def put_back_attribute(owner: Any, name: str, value: Any) -> None:
    if getattr(owner, name, None) is not value:
        setattr(owner, name, value)


def name_of(obj: Any) -> str:
    return f"{type(obj).__module__}.{type(obj).__qualname__}"


def fill(container: Any, before: Any) -> None:
    """Give a container its content again, unless it has it."""
    now, then = ([*c, *c.values()] if isinstance(c, dict) else list(c) for c in (container, before))
    if len(now) != len(then) or not all(map(operator.is_, now, then)):
        container.clear()
        (container.update if isinstance(container, dict | set) else container.extend)(before)


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names of globals (and attributes) in a function's code and inner functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def root_of(obj: Any) -> str:
    """Return the name of the package that has defined a function, a class or a module."""
    name = obj.__name__ if isinstance(obj, types.ModuleType) else getattr(obj, "__module__", None)
    return (name or "builtins").partition(".")[0]


def is_users(obj: Any) -> bool:
    """Return whether a program has defined this function, class or module, and no library."""
    return root_of(obj) not in LIBRARIES


def looked_into(obj: Any) -> bool:
    """Return whether what this object holds may change in training."""
    if isinstance(obj, type | types.ModuleType):
        return False
    known = isinstance(obj, nn.Module | Optimizer) or type(obj).__module__.startswith(STATEFUL)
    return known or is_users(type(obj))


def global_generators() -> list[Any]:
    """Return what has the global random numbers of torch, Python and NumPy."""
    numpy = sys.modules.get("numpy")
    gpus = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [torch.default_generator, *gpus, random, *([numpy.random] if numpy else [])]


def seed_all(seed: int) -> None:
    # what torch.manual_seed does: without a GPU, that writes down its callers each time
    for generator in global_generators():
        getattr(generator, "manual_seed", generator.seed)(seed)
