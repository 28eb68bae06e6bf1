"""Messages between pipeline stages: activations to the next stage, and their gradients back.

    rank 0 ══ group "up": activations ═══▶ rank 1
    rank 0 ◀═ group "down": gradients ════ rank 1

The ranks of a pipeline have two process groups, one for messages to later positions and one for
those to earlier ones: NCCL has no tags, and messages of one group between two ranks go one by one.
Receives are posted ahead, so their shape must be known. The first message of each shape of
microbatch is announced by a small one with its shape and dtype. Messages from one rank are received
in the order in which it sends them. A sent tensor is kept until it was received. That is known
without asking, when a message arrives that its sender could compute only with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel101.collectives.meta_device import numbers_device
from parallel101.spans import wait_span
from parallel101.trainers.batches import Batch, count_samples, number_of_shape
from parallel101.trainers.layout import Axes
from parallel101.trainers.schedules.actions import (
    Action,
    Placement,
    Ranks,
    ScheduleError,
    partner,
    receive_for,
)

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MOST_DIMS = 8
Spec = tuple[tuple[int, ...], torch.dtype]
HEADER: Spec = (2 + MOST_DIMS,), torch.int64


class Messages:
    """The messages of one rank's stages with its neighbours.

    Args:
        axes: the ranks; stages are along "pp".
        lists: of all ranks along "pp", with sends and receives.
        placement: global stage → position along "pp".
        device: of the tensors.
    """

    def __init__(self, axes: Axes, lists: Ranks, placement: Placement, device: torch.device):
        self.placement, self.me, self.device = placement, axes.here["pp"], device
        self.ranks = axes.along(["pp"]).ranks
        options: Any = {"use_local_synchronization": True, "group_desc": "mesh_pp"}
        ways = ("up", "down") if len(self.ranks) > 1 else ()
        self.groups = [dist.new_group(list(self.ranks), **options) for _ in ways]
        # from each position, what this rank receives, in the order in which it is sent
        self.incoming: dict[int, list[Action]] = {}
        # by receive, this rank's sends that must have been received before it could be computed
        self.acknowledged: dict[Action, list[Action]] = {}
        for source, of_rank in enumerate(lists):
            self.incoming[source], used = [], list[Action]()
            for action in of_rank if source != self.me else ():
                needed = receive_for(action, placement)
                if needed is not None and placement[partner(needed).stage] == self.me:
                    used.append(partner(needed))
                elif action.kind.startswith("SEND") and placement[partner(action).stage] == self.me:
                    receive = partner(action)
                    self.incoming[source].append(receive)
                    self.acknowledged[receive], used = used, []
        # (stage, shape of the microbatch) → shape and dtype of its message
        self.known: dict[Hashable, Spec] = {}

    def begin(self, actions: Sequence[Action], microbatches: Sequence[Batch]) -> None:
        """Begin to carry out this rank's actions. A microbatch without samples has no messages."""
        # what the shape of a microbatch's messages depends on
        self.shapes = [(count_samples(x), number_of_shape(x)) for x in microbatches]
        now = {action for action in actions if self.shapes[action.microbatch][0]}
        incoming = self.incoming.items()
        self.expected = {rank: deque(filter(now.__contains__, them)) for rank, them in incoming}
        self.arriving: dict[Action, tuple[Tensor, dist.Work]] = {}
        self.sent: dict[Action, list[tuple[dist.Work, Tensor]]] = {}

    # ── sending ──

    def send(self, action: Action, tensor: Tensor) -> None:
        """Begin to send it. Raises ScheduleError if it can't be sent, or has a new shape."""
        receive, spec = partner(action), (tuple(tensor.shape), tensor.dtype)
        key, to = self.key(receive), self.placement[receive.stage]
        possible = tensor.dtype in DTYPES and tensor.dim() <= MOST_DIMS
        if not possible or self.known.get(key, spec) != spec:
            before = " ".join(map(str, self.known.get(key, ())))
            raise ScheduleError(
                f"stage {action.stage} returned a tensor of shape {spec[0]} and {spec[1]} for "
                f"microbatch {action.microbatch}{before and f', but {before} for an earlier one'}: "
                f"expected floating-point activations of up to {MOST_DIMS} dims between two "
                "stages, and a shape that depends only on the inputs' shape"
            )
        if key not in self.known:  # of a gradient it is: the activation was announced
            rest = [0] * (MOST_DIMS - tensor.dim())
            header = [tensor.dim(), DTYPES.index(tensor.dtype), *tensor.shape, *rest]
            self.isend(action, torch.tensor(header, device=numbers_device(self.device)), to)
            self.known[key] = spec
        self.isend(action, tensor.contiguous(), to)

    def isend(self, action: Action, tensor: Tensor, to: int) -> None:
        work = dist.isend(tensor, self.ranks[to], self.groups[self.me > to])
        assert work is not None
        self.sent.setdefault(action, []).append((work, tensor))

    # ── receiving ──

    def post(self, action: Action, hear: bool = False) -> None:
        """Post this receive and those that come before it from the same rank, as far as their
        shapes are known. `hear`: wait for what announces the others.
        """
        source = self.placement[partner(action).stage]
        while action in (expected := self.expected[source]):
            key = self.key(expected[0])
            if key not in self.known:
                if not hear:
                    return
                numbers, work = self.irecv(source, HEADER, numbers_device(self.device))
                work.wait()
                dims, dtype, *shape = numbers.tolist()
                self.known[key] = tuple(shape[:dims]), DTYPES[dtype]
            self.arriving[expected.popleft()] = self.irecv(source, self.known[key], self.device)

    def irecv(self, source: int, spec: Spec, device: torch.device) -> tuple[Tensor, dist.Work]:
        box = torch.empty(spec[0], dtype=spec[1], device=device)
        work = dist.irecv(box, self.ranks[source], self.groups[source > self.me])
        assert work is not None
        return box, work

    def take(self, action: Action) -> Tensor:
        """Wait for this message."""
        what = "activations" if action.kind == "RECV_F" else "gradients"
        with wait_span(f"wait for {what}", microbatch=action.microbatch):
            self.post(action, hear=True)
            box, work = self.arriving.pop(action)
            work.wait()
            self.release(self.acknowledged.get(action, []))
        return box

    def finish(self) -> None:
        """Wait until everything is sent."""
        with wait_span("wait until sent"):
            self.release(list(self.sent))

    def release(self, actions: Sequence[Action]) -> None:
        """Let go of what was sent with these actions, once it was received."""
        for action in actions:
            for work, _ in self.sent.pop(action, []):
                work.wait()

    # ── which message, between which ranks ──

    def key(self, receive: Action) -> Hashable:
        """Return the key of its shape in `known`: a gradient has the shape of the activation."""
        stage = receive.stage if receive.kind == "RECV_F" else receive.stage + 1
        return stage, self.shapes[receive.microbatch]


def activations(stage: int, y: Any) -> Tensor:
    """Return a stage's output for the next one. Raises ScheduleError unless it is a tensor."""
    if not isinstance(y, Tensor):
        raise ScheduleError(
            f"stage {stage} returned a {type(y).__name__}: expected one tensor between two stages. "
            "Cut the model where one tensor is passed on "
            "(layers_per_stage=), or let the stage's last module join what it returns (torch.cat)"
        )
    return y.detach()
