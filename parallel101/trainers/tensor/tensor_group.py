"""The ranks over which layers are cut, and the messages between them.

                     TensorGroup                        with in_time: time is cut outside
    into columns     x is on every rank already         all-gather x
      and backward   all-reduce the gradient            reduce-scatter it
    out of rows      all-reduce the partial sums        reduce-scatter them
      and backward   the gradient is on every rank      all-gather it

An all-reduce is a reduce-scatter and an all-gather, so both send the same bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel101 import collectives
from parallel101.autograd import gather_from_group, scatter_to_group
from parallel101.collectives.asynchronous import all_reduce_async, reduce_scatter_async
from parallel101.collectives.meta_device import numbers_device
from parallel101.mesh import GroupLike, group_of, split_sizes
from parallel101.spans import wait_span
from parallel101.trainers.options import Options

TIME = 1  # the dim that sequence parallel cuts, of activations (batch, time, features)


class TensorGroup:
    """The ranks of a tensor axis. Outside of column … row, they all have the same activations or,
    with sequence parallel, each has some of the times.

    Args:
        group: see `group_of`.
        options: `algorithm` of the collectives; `overlap`: whether the sum of gradients is in
            flight while the rank computes.
        in_time: whether activations are cut along time outside. Then `regather`: column layers keep
            their input as it is cut, and backward gathers it again.

    Attributes: times: how the activations of now are cut over the ranks.
    """

    def __init__(self, group: GroupLike, options: Options, in_time: bool = False):
        self.group, self.overlap, self.in_time = group, options.overlap, in_time
        self.regather = in_time and options.regather
        self.options: dict[str, Any] = {"group": group, "algorithm": options.algorithm or "direct"}
        members = group_of(group)
        self.size, self.position = members.size, members.position or 0
        self.times: Sequence[int] = ()
        self.entered: tuple[weakref.ref[Tensor], Any, Any] | None = None

    def gather(self, x: Tensor, times: Sequence[int]) -> Tensor:
        """Return activations as a column layer needs them; times: how time was cut, if it was."""
        if not self.in_time:
            return x
        return collectives.all_gather(x, TIME, sizes=list(times), **self.options)

    def gather_again(self) -> Callable[[Tensor], Tensor]:
        """Return a function that gathers, in backward, what column layers with the same input have
        kept of it: once, and held by those that use it.
        """
        times, known = self.times, None

        def again(kept: Tensor) -> Tensor:
            nonlocal known
            x = None if known is None else known()
            if x is None:
                with wait_span("gather again"):
                    x = self.gather(kept, times)
                known = weakref.ref(x)
            return x

        return again

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum of what the ranks' row layers computed, or this rank's times of it."""
        if not self.in_time:
            return collectives.all_reduce(part, **self.options)
        self.time(part)
        return collectives.reduce_scatter(part, TIME, **self.options)

    def begin_sum(self, part: Tensor) -> Callable[[], Tensor]:
        """Begin to sum the gradients of what column layers took. The result waits for the sum."""
        self.forget()
        if not self.overlap:
            total = self.sum(part.contiguous())
            return lambda: total
        if self.in_time:
            pending = reduce_scatter_async(part.movedim(TIME, 0).contiguous(), group=self.group)
            return lambda: pending.wait().movedim(0, TIME)
        part = part.contiguous()  # it may be changed: only column layers used x
        return all_reduce_async(part, group=self.group, out=part).wait

    def join(self, y: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the outputs of all ranks, side by side."""
        return gather_from_group(y, -1, sizes=list(sizes), **self.options)

    def once(self, x: Tensor, enter: Callable[[Tensor], tuple[Tensor, Any]]) -> tuple[Tensor, Any]:
        """Return enter(x), or its earlier result if x is the same tensor, unchanged. So layers that
        take the same x share a message. It is kept as long as x lives.
        """
        state = -1 if x.is_inference() else x._version, torch.is_grad_enabled()
        if self.entered is None or self.entered[0]() is not x or self.entered[1] != state:
            result = enter(x)
            if result[0] is x:
                return result
            self.entered = weakref.ref(x, self.forget), state, result
        return self.entered[2]

    def forget(self, x: weakref.ref[Tensor] | None = None) -> None:
        """Forget the entered x, which has died or whose column layers all had their backward."""
        if self.entered is not None and (x is None or x is self.entered[0]):
            self.entered = None

    # ── between modules, where time is cut ──

    def time(self, x: Tensor) -> None:
        """Note how the times of x, which has all of them, are cut."""
        if x.dim() != 3:
            raise ValueError(
                f"sequence_parallel: activations have shape {tuple(x.shape)}, expected (batch, "
                "time, features)"
            )
        self.times = split_sizes(x.shape[TIME], self.size)

    def arrive(self, x: Tensor) -> None:
        """Ask the other ranks, 8 bytes each, how long the whole of x is, which comes from another
        stage of a pipeline, cut along time.
        """
        time = torch.tensor([x.shape[TIME]], device=numbers_device(x.device))
        self.times = collectives.all_gather(time, **self.options).tolist()

    def cut(self, x: Tensor) -> Tensor:
        """Return this rank's times of x; backward is an all-gather."""
        self.time(x)
        return scatter_to_group(x, TIME, **self.options)

    def whole(self, x: Tensor) -> Tensor:
        """Return all times of a tensor that is cut; backward keeps this rank's."""
        return gather_from_group(x, TIME, sizes=list(self.times), **self.options)

    def local(self, x: Tensor) -> Tensor:
        """Return this rank's times of x, without a message in either direction."""
        return x.split(self.times, TIME)[self.position]

    def among_zeros(self, x: Tensor) -> Tensor:
        """Return this rank's times, placed in a tensor of zeros for all times."""
        before, after = sum(self.times[: self.position]), sum(self.times[self.position + 1 :])
        return F.pad(x, (0, 0, before, after))
