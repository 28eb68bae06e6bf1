"""A batch is a tree of tensors: a tensor, or dicts, tuples and lists of them, with the samples
along dim 0 of each tensor.

inputs                        the model is called with
tokens                        model(tokens)
(tokens, mask)                model(tokens, mask)
{"input_ids": …, …}           model(input_ids=…, …)           as Hugging Face's models expect it
"""

from __future__ import annotations

import ctypes
import hashlib
import operator
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

Batch = Any  # a tree of tensors
HASH = 6  # bytes


def map_tensors(function: Callable[[Tensor], Any], tree: Batch) -> Any:
    """Return the same tree with `function` applied to each tensor.

    A leaf that is not a tensor stays as it is.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        mapped = [map_tensors(function, value) for value in tree]
        return type(tree)(*mapped) if hasattr(tree, "_fields") else type(tree)(mapped)
    return tree


def copied(tree: Batch) -> Any:
    """Return the tree with copies of its tensors, without the rest of a larger one's memory."""
    return map_tensors(lambda t: t.detach().clone(), tree)


def cast(tree: Batch, dtype: torch.dtype | None) -> Batch:
    """Convert floating-point tensors to this dtype; None: leave them as they are."""
    if dtype is None:
        return tree
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


def leaves(tree: Batch) -> Iterator[Any]:
    """Yield the leaves of the tree, in order."""
    if not isinstance(tree, (Mapping, tuple, list)):
        yield tree
        return
    for value in tree.values() if isinstance(tree, Mapping) else tree:
        yield from leaves(value)


def tensors_of(tree: Batch) -> list[Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def count_samples(tree: Batch) -> int:
    """Return the number of samples in the batch.

    Raises TypeError if it isn't a tree of tensors, ValueError if its tensors disagree.
    """
    tensors = tensors_of(tree)
    known = all(isinstance(leaf, (Tensor, bool, type(None))) for leaf in leaves(tree))
    if not known or not tensors or not all(t.dim() for t in tensors):
        raise TypeError(
            f"a batch is {in_words(tree)}: expected tensors with the samples along dim 0, or "
            "dicts, tuples and lists of them"
        )
    if len({len(t) for t in tensors}) > 1:
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise ValueError(
            f"the tensors of a batch have the shapes {shapes}: expected the same number of "
            "samples along dim 0 of each"
        )
    return len(tensors[0])


def check_pair(batch: Any) -> tuple[Any, Any]:
    """Return (inputs, targets) of a batch, which may also be one tensor of two.

    Raises TypeError or ValueError for anything else.
    """
    rows = isinstance(batch, (tuple, list)) or (isinstance(batch, Tensor) and batch.dim() > 1)
    pair = tuple(batch) if rows else ()
    if len(pair) != 2:
        raise TypeError(
            f"a batch is {in_words(batch)}: expected (inputs, targets), with the samples along "
            "dim 0 of each tensor"
        )
    for part in (*pair, pair):  # each has samples, and both as many
        count_samples(part)
    return pair


def split(tree: Batch, sizes: Sequence[int]) -> list[Batch]:
    """Return the tree cut along dim 0 into parts of these sizes."""
    slices = [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes))]
    return [map_tensors(operator.itemgetter(part), tree) for part in slices]


def join(batches: Sequence[Batch]) -> Batch:
    """Join the samples of several batches. Raises ValueError for samples of different shapes."""
    columns = list(zip(*(tensors_of(batch) for batch in batches)))
    if any(t.shape[1:] != column[0].shape[1:] for column in columns for t in column):
        raise ValueError(
            "the ranks' samples have different shapes, but one process would take them together"
        )
    joined = iter([torch.cat(column) for column in columns])
    return map_tensors(lambda _: next(joined), batches[0])


def call(module: nn.Module, inputs: Batch) -> Any:
    """Return the module's outputs: the entries of a dict are keywords, those of a tuple or list
    are arguments.
    """
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, (tuple, list)) else module(inputs)


def number_of_shape(tree: Batch) -> int:
    """Return a number that identifies the shape of a sample and its dtype, on every rank."""
    return number_of_text(f"{[(tuple(t.shape[1:]), t.dtype) for t in tensors_of(tree)]}")


def number_of_text(text: str) -> int:
    """Return a hash of a text, 48 bits, which is exact as a float64."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=HASH).digest(), "big")


def number_of_values(tree: Batch) -> int:
    """Return a checksum of the values: equal batches have the same, on every rank.

    It takes 0.2 ms for a megabyte.
    """
    checksum = 0
    for t in tensors_of(tree):
        if not t.is_meta:  # which has no values
            copied = t.detach().contiguous().cpu()
            checksum = zlib.crc32(raw_memory(copied), checksum)
    return checksum


def raw_memory(tensor: Tensor) -> ctypes.Array | bytes:
    """Return the memory of a contiguous tensor on the CPU, as a buffer for `bytes` or a hash.

    Nothing is copied, so the buffer is valid only while the tensor exists.
    """
    if not tensor.nbytes:
        return b""  # an empty tensor may have no address
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())


def in_words(value: Any) -> str:
    """Describe a value for an error."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if not isinstance(value, Mapping | tuple | list):
        return "None" if value is None else f"a {type(value).__name__}"
    keys, entries = isinstance(value, Mapping), list(value)
    words = [
        repr(e) if keys else in_words(e) if isinstance(e, Tensor) else type(e).__name__
        for e in entries[:4]
    ]
    more = ", …" if len(entries) > 4 else ""
    return f"a {type(value).__name__} of {', '.join(words) or 'nothing'}{more}"
