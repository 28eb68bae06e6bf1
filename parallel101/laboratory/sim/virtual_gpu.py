"""A virtual GPU: what torch's operations on meta tensors would cost on one, without computing them.

    y = x @ w             y has a shape and no numbers
    the rank's clock      moves by what the kernel takes on this chip (cost/kernels.py)
    flops, live, peak     count its arithmetic, and the bytes of all tensors that are alive

Each operation of torch is one kernel, with these costs:

    matrix products       by m, n, k: mm, addmm with its bias, bmm, baddbmm, convolutions
    fused attention       one kernel forward and one backward, which keep no (time, time) matrix;
                          with a causal mask they compute half of it
    views                 nothing
    everything else       by the bytes that it reads and writes, each tensor once

So a GELU, a LayerNorm, a softmax, a dropout, or the loss's log-softmax is one kernel that reads its
input once, as in CUDA's libraries; a fused optimizer (`_fused_adamw_`) and each `_foreach_*` is one
for all its tensors. Operations aren't fused with each other: two additions read and write twice. A
lookup in an embedding, or any other gather, reads the rows that it takes and not the table.
Products of 32-bit numbers run as TF32, and those of 64 bits as fast. What takes far longer than its
bytes and is no product of matrices is too cheap here: factorizations, inverses, sorting.

Only meta tensors cost time: what a program keeps on the CPU, such as the number of samples that the
ranks exchange, is free. No event is recorded for a kernel: time passes in the spans around it, and
kernels outside of any span become one span "compute" as long as they follow each other.

The peak of memory is that of training: it is counted from the first span "forward". A trainer
is given the whole model, and cuts it before that.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

# torch has no public name for it; tests/sim/test_virtual_gpu.py needs it
from parallel101.cost.hardware import Chip, chip_of
from parallel101.laboratory.record import torch_private
from parallel101.laboratory.sim.operation_costs import (
    FREE,
    NOTHING,
    OperationCost,
    kernel_of,
    tensors_in,
)
from parallel101.spans import listening, recorder

aten = torch.ops.aten


class GpuCount(NamedTuple):
    """The work of one rank's virtual GPU in a run."""

    flops: int  # floating-point operations of matrix products and attention
    busy: float  # seconds in which it computed
    peak_bytes: int  # the most that was alive at once, from the first span "forward"


class KnownOperation(NamedTuple):
    """The effects of an operation at its first call with arguments of these shapes."""

    kernel: OperationCost
    # of each output: (size, stride, dtype) of a new tensor, or which argument it is
    outputs: tuple[Any, ...] | None  # None: it must be called again
    several: bool


class _AliveStorage(weakref.ref):
    """A weak reference to a storage that counts."""

    __slots__ = ("key", "nbytes")
    key: int
    nbytes: int


class VirtualGPU(torch_private.DispatchMode):
    """Counts this thread's operations on meta tensors inside, and moves its rank's clock.

    An operation's cost and the tensors that it returns depend on its arguments' shapes. They are
    found once and then remembered: torch itself takes up to 2 ms to find the shape of a meta
    tensor.

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
        self._alive: dict[int, _AliveStorage] = {}  # by id of the storage
        self._known = KNOWN.setdefault(self.chip, {})  # by operation and arguments
        self._spans, self._trains = 0, False
        self._outside: tuple[float, float] | None = None  # start and end of kernels in no span

    def count(self) -> GpuCount:
        return GpuCount(self.flops, self.busy, self.peak)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        key = (func, *map(key_of, args), *map(key_of, kwargs.items()))
        known = self._known.get(key)
        if known is None and (made_of := composite(func)):
            with self:  # its own operations are counted
                return made_of(*args, **kwargs)
        if known is None or known.outputs is None:
            out = func(*args, **kwargs)
            if known is None:
                known = known_of(self.chip, func, args, kwargs, out)
                if len(self._known) == MOST_KNOWN:
                    self._known.clear()
                if not (BY_NUMBERS & {*func.tags} and has_numbers(args)):
                    self._known[key] = known
            outputs = out if isinstance(out, tuple | list) else (out,)
        else:
            given = {None: None, **dict(enumerate(args)), **kwargs}
            outputs = tuple(
                aten.empty_strided.default(*kept[:2], dtype=kept[2], device="meta")
                if type(kept) is tuple
                else given[kept]
                for kept in known.outputs
            )
            out = outputs if known.several else outputs[0]
        for t in outputs:
            if isinstance(t, Tensor) and t.is_meta:
                self._note(t)
        if known.kernel.seconds:
            self._run(known.kernel)
        return out

    def _run(self, kernel: OperationCost) -> None:
        """Let a kernel's time pass."""
        self.kernels += 1
        self.flops += kernel.flops
        self.busy += kernel.seconds
        rank = recorder()
        if rank is None:
            return
        if self._spans:
            rank.compute(kernel.seconds)
            return
        start, before = rank.now(), self._outside
        rank.compute(kernel.seconds)
        if before is not None and before[1] == start:
            start = before[0]
        else:
            self._record_outside()
        self._outside = start, rank.now()

    def _record_outside(self) -> None:
        """Record the kernels that ran in no span."""
        if self._outside is not None and (rank := recorder()):
            rank.add_span("compute", *self._outside, {})
        self._outside = None

    @contextmanager
    def _span(self, name: str | None, labels: Mapping[str, Any]) -> Iterator[None]:
        """Go around a span of the program."""
        self._record_outside()
        if name == "forward" and not self._trains:
            self._trains, self.peak = True, self.live
        self._spans += 1
        try:
            yield
        finally:
            self._spans -= 1

    def _note(self, t: Tensor) -> None:
        """Count the storage of this tensor from now on, until nothing holds it."""
        storage = t.untyped_storage()
        key = id(storage)  # the same as long as its memory
        if key in self._alive:
            return
        ref: Any = _AliveStorage(storage, self._freed)
        self._alive[key], ref.key, ref.nbytes = ref, key, storage.nbytes()
        self.live += ref.nbytes
        self.peak = max(self.peak, self.live)

    def _freed(self, ref: Any) -> None:
        key, nbytes = ref.key, ref.nbytes
        if self._alive.get(key) is ref:
            del self._alive[key]
            self.live -= nbytes


# what all ranks remember, by chip; of operations with numbers that change, not more than so many
KNOWN: dict[Chip, dict[Any, KnownOperation]] = {}
MOST_KNOWN = 50_000


def key_of(value: Any) -> Any:
    """Return the part of an argument that decides what an operation costs and returns."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.is_meta
    if isinstance(value, list | tuple):
        return tuple(map(key_of, value))
    return type(value), value  # 1 and 1.0 and True are equal


# what an operation returns, or its shape, depends on the numbers in its arguments
BY_NUMBERS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


NO_NUMBERS = (
    "A virtual GPU has no numbers: its tensors are on torch's meta device, and have only a shape "
    "and a dtype. Leave out what reads numbers (.item(), if, .cpu(), .numpy(), f'{loss:.3f}', "
    'x[mask]) and what asks for CUDA, make such tensors with device="cpu", or launch without '
    "device=. These read numbers, too: torch's DataLoader (make batches with torch.randint, or "
    'iterate inside `with torch.device("cpu")` and move each batch with .to("meta")), '
    "DistributedDataParallel and FSDP (use a trainer of parallel101 or dist.all_reduce), and the "
    "optimizers Adagrad, Adamax, Adafactor, ASGD, NAdam and RAdam (use SGD, Adam or AdamW)"
)


@contextmanager
def explained() -> Iterator[None]:
    """Add NO_NUMBERS to errors of torch about the meta device or a missing GPU."""
    try:
        yield
    except Exception as error:
        said = str(error)
        if NO_NUMBERS not in said and any(
            word in said for word in ("meta", "Meta", "cuda", "CUDA", "FSDP", "Tensor.__format__")
        ):
            error.args = (f"{said}\n{NO_NUMBERS}", *error.args[1:])
        raise


def has_numbers(args: tuple) -> bool:
    return not all(t.is_meta for t in tensors_in(args))


def known_of(chip: Chip, func: Any, args: tuple, kwargs: dict, out: Any) -> KnownOperation:
    """Return what to remember of an operation that has returned `out`."""
    if func.namespace == "_c10d_functional":
        raise NotImplementedError(
            f"{func} was called on the meta device, where torch's functional collectives (and so "
            "DTensor and FSDP2) send nothing: on virtual GPUs, use those of torch.distributed or "
            "of parallel101"
        )
    several = isinstance(out, tuple | list)
    outputs = out if several else (out,)
    inputs = [t for t in tensors_in((*args, *kwargs.values())) if t.is_meta]
    tensors = [t for t in tensors_in(outputs) if t.is_meta]
    if not (inputs or tensors) or torch.Tag.inplace_view in func.tags:
        # on the CPU, or it gives a tensor another shape
        return KnownOperation(NOTHING, None, several)
    free = func.overloadpacket in FREE
    kernel = NOTHING if free else kernel_of(chip, func, args, kwargs, inputs, tensors)
    # torch computes shapes, and goes on
    if kernel.flops and has_numbers((*args, *kwargs.values())):
        raise RuntimeError(
            f"{func.overloadpacket} has tensors on the CPU and tensors on the meta device, where "
            "those of a virtual GPU are: make all of them in the program, or move them with "
            ".to('meta')"
        )
    names = {id(value): name for name, value in [*enumerate(args), *kwargs.items()]}
    memory = {id(t.untyped_storage()) for t in inputs}
    described: list[Any] = []
    for t in outputs:
        if t is None:
            described.append(None)
        elif id(t) in names:
            described.append(names[id(t)])
        elif not isinstance(t, Tensor) or not t.is_meta or id(t.untyped_storage()) in memory:
            return KnownOperation(kernel, None, several)
        else:
            described.append((t.shape, t.stride(), t.dtype))
    again = several and not isinstance(out, tuple)
    return KnownOperation(kernel, None if again else tuple(described), several)


@contextmanager
def virtual_gpu(chip: str | Chip) -> Iterator[VirtualGPU]:
    """Let this rank compute on a virtual GPU: see VirtualGPU. Its tensors are meta tensors.

    `scaled_dot_product_attention`, `rms_norm` and `dropout` are then one kernel each, and
    optimizers take fused=True, as on a GPU.
    """
    gpu = VirtualGPU(chip)
    try:
        with _as_on_a_gpu(), listening(gpu._span), explained(), gpu:
            yield gpu
    finally:
        gpu._record_outside()


_lock, _users, _changes = threading.Lock(), [0], ExitStack()


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Give meta tensors the fused kernels that torch lacks for them, inside the block.

    This holds in all threads, as long as any thread is inside.
    """
    with _lock:
        _users[0] += 1
        if _users[0] == 1:
            library = torch.library.Library("aten", "IMPL")
            for operation, kernel in FUSED.items():
                library.impl(operation, kernel, "AutogradMeta")
            _changes.callback(library._destroy)
            _changes.enter_context(torch_private.optimizers_as_on_a_gpu())
            _changes.enter_context(mock.patch.multiple(torch.autocast, __init__=_autocast))
    try:
        yield
    finally:
        with _lock:
            _users[0] -= 1
            if not _users[0]:
                _changes.close()


_init_autocast = torch.autocast.__init__


def _autocast(
    block: torch.autocast,
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> None:
    """Initialize torch.autocast(…). If it is enabled, raise an error."""
    if enabled:
        raise RuntimeError(
            "torch.autocast does nothing on the meta device, and so on virtual GPUs: expected a "
            "model in the dtype to compute in. Call model.bfloat16(), or give a trainer "
            'precision="bf16" or "bf16-mixed"'
        )
    _init_autocast(block, device_type, dtype, enabled, cache_enabled)


def _fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run scaled_dot_product_attention by the operations that torch runs on a GPU."""
    if q.dim() != 4 or v.shape[-1] != q.shape[-1]:  # not fused there, either
        return aten._scaled_dot_product_attention_math(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    if attn_mask is None:
        fused = aten._scaled_dot_product_flash_attention
        return fused(q, k, v, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa:
        repeats = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(repeats, -3), v.repeat_interleave(repeats, -3)
    return aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]


def _fused_rms_norm(
    x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Run rms_norm by the kernel of LayerNorm.

    It moves as many bytes, and keeps one number more for each position. (torch has its own one for
    a GPU, but not for meta tensors.)
    """
    return aten.native_layer_norm(x, shape, weight, None, eps or 0.0)[0]


def _fused_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Run dropout by the kernel that torch runs on a GPU: its mask has a byte a number."""
    return aten.native_dropout(x, p, train)[0] if train and p else x


FUSED: dict[Any, Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: _fused_attention,
    aten.rms_norm.default: _fused_rms_norm,
    aten.dropout.default: _fused_dropout,
}


def composite(func: Any) -> Callable[..., Any] | None:
    """Return the function that carries out an operation that torch makes of others, such as linear.

    For any other operation, return None. Autograd decomposes composite operations before they come
    here, but not in torch.inference_mode.
    """
    if func in FUSED:
        return FUSED[func]
    return func.decompose if torch_private.is_composite(func) else None
