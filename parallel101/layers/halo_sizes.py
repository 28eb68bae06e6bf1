"""Halos: the entries that a rank must get from others to slide a kernel over its own entries.

n = 11 entries, a kernel of 5, 3 ranks, no padding: 7 outputs, cut into 3, 2 and 2 (the
publication's unbalanced convolution)

                                              outputs    from the left    from the right
rank 0   [0  1  2  3] 4  5  6                 0 1 2      0 entries        3
rank 1             3 [4  5  6  7] 8           3 4        1                1
rank 2                   5  6  7 [8  9  10]   5 6        3                0

This file computes with sizes only and sends nothing.

Source: Hewett and Grady (arXiv 2006.03108), halo exchange; DistDL's HaloMixin.
"""

from __future__ import annotations

from typing import NamedTuple

from parallel101.mesh import split_ranges


class Halo(NamedTuple):
    """The entries that one rank holds, computes and needs along one dim.

    Entries are counted in the whole tensor: range(4, 8) means the entries 4, 5, 6 and 7.
    """

    holds: range  # of the input
    computes: range  # of the output
    needs: range  # of the input, to compute these outputs
    # entries that it adds before and after, because a kernel reaches over an end of the tensor
    padding: tuple[int, int]

    @property
    def left(self) -> int:
        """The number of entries that the rank gets from its left.

        A negative number counts the rank's own first entries that it does not need.
        """
        return self.holds.start - self.needs.start

    @property
    def right(self) -> int:
        """The number of entries that the rank gets from its right.

        A negative number counts the rank's own last entries that it does not need.
        """
        return self.needs.stop - self.holds.stop


def halos(
    n: int,
    p: int,
    kernel_size: int,
    stride: int = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int = 1,
) -> list[Halo]:
    """Return the entries that each of p ranks holds, computes and needs, of n along one dim.

    Inputs and outputs are both cut by `split_sizes`. A rank can get halos on both sides, on one or
    on none, of different sizes, and from ranks beyond its neighbours if the shards are small.

    Args:
        n: entries of the whole input along this dim.
        p: ranks that share them.
        kernel_size, stride, dilation: of the convolution or pooling, as in torch.
        padding: entries added at both ends of the whole input; or a pair, before and after.

    Returns one Halo per position. Raises ValueError for sizes that make no sense, and for a kernel
    larger than the padded input.
    """
    before, after = padding if isinstance(padding, tuple) else (padding, padding)
    for name, value, least in (
        ("kernel_size", kernel_size, 1),
        ("stride", stride, 1),
        ("padding", min(before, after), 0),
        ("dilation", dilation, 1),
    ):
        if type(value) is not int or value < least:
            raise ValueError(f"{name}={value!r}: expected an int, at least {least}")
    extent = dilation * (kernel_size - 1) + 1  # from the first entry under the kernel to the last
    if n + before + after < extent:
        raise ValueError(
            f"the kernel covers {extent} entries (kernel_size={kernel_size}, "
            f"dilation={dilation}), but the input has only "
            f"{n}, and {before + after} of padding: make the kernel smaller or the padding larger"
        )
    outputs = (n + before + after - extent) // stride + 1
    return [
        _halo(held, computed, n, extent, stride, before)
        for held, computed in zip(split_ranges(n, p), split_ranges(outputs, p))
    ]


def _halo(holds: range, computes: range, n: int, extent: int, stride: int, before: int) -> Halo:
    if not computes:  # more ranks than outputs: the last ranks compute nothing
        return Halo(holds, computes, range(holds.start, holds.start), (0, 0))
    # counted in the input: the padding before it has negative numbers
    start = computes.start * stride - before
    stop = (computes.stop - 1) * stride - before + extent
    needs = range(min(max(start, 0), n), min(max(stop, 0), n))
    return Halo(
        holds, computes, needs, (max(0, min(stop, 0) - start), max(0, stop - max(start, n)))
    )
