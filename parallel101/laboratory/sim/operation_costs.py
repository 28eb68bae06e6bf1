"""The cost of one operation of torch on a GPU: see virtual_gpu.py for the rules."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel101.cost import kernels
from parallel101.cost.hardware import Chip

aten = torch.ops.aten


class OperationCost(NamedTuple):
    """The cost of one operation."""

    seconds: float
    flops: int


NOTHING = OperationCost(0.0, 0)


def tensors_in(values: Any) -> list[Tensor]:
    """Return all tensors among these values, and in the lists among them."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += [t for t in value if isinstance(t, Tensor)]
    return tensors


def kernel_of(
    chip: Chip, func: Any, args: tuple, kwargs: dict, inputs: list[Tensor], outputs: list[Tensor]
) -> OperationCost:
    """Return the cost of one operation."""
    packet = func.overloadpacket
    if packet in PRODUCTS:
        a, b = (args[i] for i in PRODUCTS[packet])
        *batch, m, k = a.shape
        return product(chip, m, b.shape[-1] if b.dim() > 1 else 1, k, *batch, like=a)
    if packet is aten.convolution:
        return convolution(chip, args[1], args[0] if args[6] else outputs[0], groups=args[8])
    if packet is aten.convolution_backward:
        dy, x, weight = args[:3]
        forward = convolution(chip, weight, x if args[7] else dy, groups=args[9])
        passes = sum(args[10][:2])  # gradients of x, and of the weight
        return OperationCost(passes * forward.seconds, passes * forward.flops)
    if packet is aten._grouped_mm:
        ends = args[2] if len(args) > 2 else kwargs.get("offs")
        return grouped_product(chip, args[0], args[1], ends)
    if packet in ATTENTION:
        backward = packet in BACKWARD
        q, k = args[int(backward)], args[1 + int(backward)]
        names = [argument.name for argument in func._schema.arguments]
        causal = {**dict(zip(names, args)), **kwargs}.get("is_causal", False)
        flops = attention_flops(q, k, causal=causal, backward=backward)
        nbytes = sum(map(read_bytes, inputs)) + sum(t.nbytes for t in outputs)
        seconds = kernels.attention_seconds(
            chip, flops, nbytes, backward=backward, itemsize=q.element_size()
        )
        return OperationCost(seconds, flops)
    nbytes = moved_bytes(func, packet, args, kwargs, outputs)
    return OperationCost(kernels.memory_seconds(chip, nbytes) if nbytes else 0.0, 0)


def product(chip: Chip, m: int, n: int, k: int, many: int = 1, *, like: Tensor) -> OperationCost:
    """Return the cost of `many` products (m, k) · (k, n), in the dtype of `like`."""
    flops = 2 * many * m * n * k
    seconds = kernels.product_seconds(chip, m, n, k, batch=many, itemsize=like.element_size())
    return OperationCost(seconds if flops else 0.0, flops)


def convolution(chip: Chip, weight: Tensor, places: Tensor, groups: int) -> OperationCost:
    """Return the cost of a convolution, as a product for each group of channels.

    It multiplies the weight with the numbers under it at each place. Places are those of the
    result, (batch, channels, …); if it is transposed, those of its input.
    """
    own, *under = weight.shape
    rows = places.numel() // places.shape[1]
    return product(chip, rows, own // groups, math.prod(under), groups, like=weight)


def grouped_product(chip: Chip, a: Tensor, b: Tensor, ends: Tensor | None) -> OperationCost:
    """Return the cost of one product for each group, such as an expert: all are equally large."""
    groups = len(b if ends is None else ends)
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    if a.dim() == b.dim() == 2:
        k //= groups
    elif a.dim() == 2:
        m //= groups
    elif b.dim() == 2:
        n //= groups
    return product(chip, m, n, k, groups, like=a)


def attention_flops(q: Tensor, k: Tensor, *, causal: bool, backward: bool) -> int:
    """Count the FLOPs of attention: two products forward, five backward.

    q and k: (batch, heads, time, d).
    """
    batch, heads, queries, d = q.shape
    forward = 4 * batch * heads * queries * k.shape[-2] * d
    return int(forward * (0.5 if causal else 1) * (2.5 if backward else 1))


def moved_bytes(func: Any, packet: Any, args: tuple, kwargs: dict, outputs: list[Tensor]) -> int:
    """Count the bytes that an operation reads and writes."""
    written = sum(t.nbytes for t in outputs)
    if packet in WRITE_ONLY:
        return written
    if packet in ROWS:  # reads as much as it writes, and the numbers of the rows
        return 2 * written + sum(read_bytes(t) for t in tensors_in(args[1:]) if t.is_meta)
    if packet in BAGS:
        table, rows = args[0], args[1]
        taken = rows.numel() * table.shape[1] * table.element_size()
        return taken + written + sum(read_bytes(t) for t in tensors_in(args[1:]) if t.is_meta)
    if packet in INTO_ROWS:  # reads and writes the rows that it changes
        values = [t for t in tensors_in((*args[1:], *kwargs.values())) if t.is_meta]
        whole = read_bytes(args[0]) + written if packet is aten.index_put else 0  # it is copied
        return whole + sum(map(read_bytes, values)) + 2 * max(map(read_bytes, values), default=0)
    if packet is aten.copy_:
        return written + read_bytes(args[1])
    total = written
    for position, argument in enumerate(func._schema.arguments):
        if argument.is_out:  # it is among the outputs
            continue
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        nbytes = sum(read_bytes(t) for t in tensors_in((given,)) if t.is_meta)
        changed = argument.alias_info is not None and argument.alias_info.is_write
        # what is changed in place and also returned is among the outputs already; gradients are
        # changed by a fused optimizer only if it is given a grad_scale
        if changed and not func._schema.returns and argument.name != "grads":
            total += nbytes
        if not (changed and packet in OVERWRITTEN):
            total += nbytes
    return total


def read_bytes(t: Tensor) -> int:
    """Count the bytes of a tensor in memory: an expanded one has fewer than its elements."""
    sizes = (size for size, stride in zip(t.shape, t.stride()) if stride or not size)
    return math.prod(sizes) * t.element_size()


# where their two factors are in the arguments
PRODUCTS = dict.fromkeys((aten.mm, aten.bmm, aten.mv, aten._int_mm, aten._scaled_mm), (0, 1))
PRODUCTS |= dict.fromkeys((aten.addmm, aten.addmm_, aten.addmv, aten.addbmm), (1, 2))
PRODUCTS |= dict.fromkeys((aten.baddbmm, aten.baddbmm_), (1, 2))
BACKWARD = {
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward,
}
ATTENTION = BACKWARD | {
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
}
WRITE_ONLY = {aten.fill_, aten.zero_, aten.zeros, aten.zeros_like, aten.ones, aten.ones_like}
WRITE_ONLY |= {aten.full, aten.full_like, aten.arange, aten.scalar_tensor, aten.new_zeros}
WRITE_ONLY |= {aten.new_ones, aten.new_full, aten.randn, aten.rand, aten.randint, aten.eye}
WRITE_ONLY |= {aten.normal_, aten.uniform_, aten.bernoulli_}
OVERWRITTEN = {aten._foreach_copy_, aten._foreach_zero_}
ROWS = {aten.embedding, aten.index_select, aten.gather, aten.index, aten.take}
BAGS = {aten._embedding_bag, aten._embedding_bag_forward_only}
INTO_ROWS = {aten.index_put_, aten.index_put, aten.scatter_, aten.scatter_add_, aten.index_add_}
INTO_ROWS |= {aten.index_copy_, aten.scatter_reduce_}
FREE = {aten._unsafe_view, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty}
FREE |= {aten.new_empty_strided, aten.lift_fresh, aten._reshape_alias}
