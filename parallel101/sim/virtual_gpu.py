"""A virtual GPU: what torch's operations on meta tensors would cost on one, without computing them.

    y = x @ w             y has a shape and no numbers
    the rank's clock      moves by what the kernel takes on this chip (cost/kernels.py)
    flops, live, peak     count its arithmetic, and the bytes of all tensors that are alive

Each operation of torch is one kernel, with these costs:

    matrix products       by m, n, k: mm, addmm with its bias, bmm, baddbmm
    fused attention       one kernel forward and one backward, which keep no (time, time) matrix;
                          with a causal mask they compute half of it
    views                 nothing
    everything else       by the bytes that it reads and writes, each tensor once

So a GELU, a LayerNorm, a softmax, a dropout, or the loss's log-softmax is one kernel that reads its
input once, as in CUDA's libraries; a fused optimizer (`_fused_adamw_`) and each `_foreach_*` is one
for all its tensors. Operations aren't fused with each other: two additions read and write twice. A
lookup in an embedding, or any other gather, reads the rows that it takes and not the table.

Only meta tensors cost time: what a program keeps on the CPU, such as the number of samples that the
ranks exchange, is free. No event is recorded for a kernel: time passes in the spans around it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel101.cost import kernels
from parallel101.cost.hardware import Chip, chip_of
from parallel101.record.spans import recorder

aten = torch.ops.aten


class GpuCount(NamedTuple):
    """What one rank's virtual GPU did in a run."""

    flops: int  # floating-point operations of matrix products and attention
    busy: float  # seconds in which it computed
    peak_bytes: int  # the most that was alive at once


class Kernel(NamedTuple):
    """What one operation costs."""

    seconds: float
    flops: int


class _Alive(weakref.ref):
    """A weak reference to a storage that counts."""

    __slots__ = ("key", "nbytes")
    key: int
    nbytes: int


class VirtualGPU(TorchDispatchMode):
    """Inside, this thread's operations on meta tensors move its rank's clock, and are counted.

    Attributes:
        chip: whose kernels they are.
        flops, busy: arithmetic and seconds of all kernels so far.
        live, peak: bytes of the storages that are alive now, and the most so far.
        kernels: how many have run.
    """

    def __init__(self, chip: str | Chip):
        super().__init__()
        self.chip = chip_of(chip)
        self.flops, self.busy, self.kernels = 0, 0.0, 0
        self.live = self.peak = 0
        self._alive: dict[int, _Alive] = {}  # by address of the storage
        self._known: dict[Any, Kernel] = {}  # of operations with these shapes

    def count(self) -> GpuCount:
        return GpuCount(self.flops, self.busy, self.peak)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.is_view:
            return out
        outputs = [t for t in tensors_in(out if isinstance(out, tuple) else (out,)) if t.is_meta]
        for t in outputs:
            self._note(t)
        if func in FREE:
            return out
        inputs = [t for t in tensors_in((*args, *kwargs.values())) if t.is_meta]
        if not (outputs or inputs):
            return out
        kernel = self._cost(func, args, kwargs, inputs, outputs)
        if kernel.seconds:
            self.kernels += 1
            self.flops += kernel.flops
            self.busy += kernel.seconds
            if rank := recorder():
                rank.compute(kernel.seconds)
        return out

    def _cost(
        self, func: Any, args: tuple, kwargs: dict, inputs: list[Tensor], outputs: list[Tensor]
    ) -> Kernel:
        causal = next((a for a in (*args, *kwargs.values()) if a is True), False)
        key = (func, causal, *((t.dtype, t.shape, t.stride()) for t in inputs))
        if outputs and not inputs:
            key = (func, *((t.dtype, t.shape) for t in outputs))
        known = self._known.get(key)
        if known is None:
            known = kernel_of(self.chip, func, args, kwargs, inputs, outputs)
            self._known[key] = known
        return known

    def _note(self, t: Tensor) -> None:
        """From now on the storage of this tensor counts, until nothing holds it."""
        storage = t.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        ref = _Alive(storage, self._freed)
        ref.key, ref.nbytes = key, storage.nbytes()
        self._alive[key] = ref
        self.live += ref.nbytes
        self.peak = max(self.peak, self.live)

    def _freed(self, ref: Any) -> None:
        if self._alive.get(ref.key) is ref:
            del self._alive[ref.key]
            self.live -= ref.nbytes


@contextmanager
def virtual_gpu(chip: str | Chip) -> Iterator[VirtualGPU]:
    """Let this rank compute on a virtual GPU: see VirtualGPU. Its tensors are meta tensors."""
    gpu = VirtualGPU(chip)
    with gpu:
        yield gpu


def tensors_in(values: Any) -> list[Tensor]:
    """All tensors among these values, and in the lists among them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [t for t in value if isinstance(t, Tensor)]
    return found


# ── what a kernel costs ──


def kernel_of(
    chip: Chip, func: Any, args: tuple, kwargs: dict, inputs: list[Tensor], outputs: list[Tensor]
) -> Kernel:
    """The cost of one operation."""
    packet = func.overloadpacket
    if packet in PRODUCTS:
        a, b = (args[i] for i in PRODUCTS[packet])
        *batch, m, k = a.shape
        n, many = b.shape[-1], batch[0] if batch else 1
        flops = 2 * many * m * n * k
        itemsize = a.element_size()
        seconds = kernels.product_seconds(chip, m, n, k, batch=many, itemsize=itemsize)
        return Kernel(seconds if flops else 0.0, flops)
    if packet in ATTENTION:
        backward = packet in BACKWARD
        q, k = args[int(backward)], args[1 + int(backward)]
        flops = attention_flops(q, k, causal=any(a is True for a in args), backward=backward)
        nbytes = sum(map(read_bytes, inputs)) + sum(t.nbytes for t in outputs)
        seconds = kernels.attention_seconds(chip, flops, nbytes, backward=backward)
        return Kernel(seconds, flops)
    nbytes = moved_bytes(func, packet, args, kwargs, outputs)
    return Kernel(kernels.memory_seconds(chip, nbytes) if nbytes else 0.0, 0)


def attention_flops(q: Tensor, k: Tensor, *, causal: bool, backward: bool) -> int:
    """Of (batch, heads, time, d) queries and keys: two products forward, five backward."""
    batch, heads, queries, d = q.shape
    forward = 4 * batch * heads * queries * k.shape[-2] * d
    return int(forward * (0.5 if causal else 1) * (2.5 if backward else 1))


def moved_bytes(func: Any, packet: Any, args: tuple, kwargs: dict, outputs: list[Tensor]) -> int:
    """Bytes that an operation reads and writes."""
    written = sum(t.nbytes for t in outputs)
    if packet in WRITE_ONLY:
        return written
    if packet in ROWS:  # reads as much as it writes, and the numbers of the rows
        return 2 * written + sum(read_bytes(t) for t in tensors_in(args[1:]) if t.is_meta)
    if packet in INTO_ROWS:  # reads and writes the rows that it changes
        values = [t for t in tensors_in((*args[1:], *kwargs.values())) if t.is_meta]
        return sum(map(read_bytes, values)) + 2 * max(map(read_bytes, values), default=0)
    if packet is aten.copy_:
        return written + read_bytes(args[1])
    total = written
    schema = func._schema.arguments
    for position, argument in enumerate(schema):
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        mine = sum(read_bytes(t) for t in tensors_in((given,)) if t.is_meta)
        changed = argument.alias_info is not None and argument.alias_info.is_write
        # what is changed in place and also returned is among the outputs already
        total += mine * (1 + (changed and not func._schema.returns))
    return total


def read_bytes(t: Tensor) -> int:
    """Bytes of a tensor, of which an expanded one has fewer than elements."""
    return min(t.nbytes, t.untyped_storage().nbytes())


# where their two factors are in the arguments
PRODUCTS = {
    aten.mm: (0, 1),
    aten.bmm: (0, 1),
    aten.addmm: (1, 2),
    aten.baddbmm: (1, 2),
}
ATTENTION = {
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_backward,
}
BACKWARD = {aten._scaled_dot_product_flash_attention_backward}
WRITE_ONLY = {aten.fill_, aten.zero_, aten.zeros, aten.zeros_like, aten.ones, aten.ones_like}
WRITE_ONLY |= {aten.full, aten.full_like, aten.arange, aten.scalar_tensor, aten.new_zeros}
WRITE_ONLY |= {aten.new_ones, aten.new_full, aten.randn, aten.rand, aten.randint, aten.eye}
WRITE_ONLY |= {aten.normal_, aten.uniform_, aten.bernoulli_}
ROWS = {aten.embedding, aten.index_select, aten.gather, aten.index}
INTO_ROWS = {aten.index_put_, aten.index_put, aten.scatter_, aten.scatter_add_, aten.index_add_}
FREE: set[Callable] = {
    aten._unsafe_view.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.lift_fresh.default,
    aten._reshape_alias.default,
}
