"""Runs a few microbatches of a step for real, and plays the others from what these did.

    forward of microbatch 0, 1     real: every operation on the virtual GPU, every message
    forward of microbatch 2 …      played: the same times and messages, the same bytes kept

A tape has what the simulator saw of an action, such as a stage's forward: time that passed,
messages that were posted, and waits. The tape of the last real one is played. Its messages are
really sent, so that they meet others on their links; if nothing else uses these links, only the
tape's seconds pass, which is the same. Real are, for each stage,

    the first two microbatches    since the first backward makes the gradients (with ZeRO 2 and 3
                                  three: they free them later)
    the last                      in which gradients leave (with ZeRO 2 and 3 the last two)
    a forward behind a backward   and any other pair the first time, since an action may free what
                                  the one before it has kept

Each action of a runner (trainers/pipeline_parallel.py, step.py) is carried out by its `perform`,
which is replaced. The runner does everything else itself: it posts, waits and sends as always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from parallel101.laboratory.record import torch_private
from parallel101.laboratory.sim.clock import VirtualRank
from parallel101.laboratory.sim.virtual_gpu import VirtualGPU
from parallel101.spans import Collective, current_collective, set_current_collective
from parallel101.trainers.batches import Batch
from parallel101.trainers.hybrid import HybridTrainer
from parallel101.trainers.losses import Losses
from parallel101.trainers.pipeline_parallel import NAMES, Held, Pipeline
from parallel101.trainers.schedules.actions import Action
from parallel101.trainers.weight_gradients import WeightGradients

Key = tuple[int, str]  # stage and kind of an action
Event = tuple[float, Callable[[], None]]  # a message or a wait, after so many seconds of computing


@dataclass
class Tape:
    """The record of one action.

    Attributes:
        rest, seconds: after the last event, and altogether.
        links: which its messages held.
        closed: whether it waited for all of its messages, and for no others.
        live, peak: bytes by which it changed what is alive, and the most that it had besides.
        counts: what it added to the GPU's flops, busy and kernels.
        sent: what it made for another stage: shape and dtype; None: nothing.
        loss: the same of what it added to the losses. weights: of losses with a weight.
    """

    events: list[Event] = field(default_factory=list)
    rest: float = 0.0
    seconds: float = 0.0
    links: set[int] = field(default_factory=set)
    closed: bool = True
    live: int = 0
    peak: int = 0
    counts: tuple[int, float, int] = (0, 0.0, 0)
    sent: Tensor | None = None
    loss: Tensor | None = None
    weights: Sequence[float] = ()

    def loss_again(self, losses: Losses) -> Tensor | None:
        """Add the loss that it has added once more, and return it."""
        if self.loss is None:
            return None
        losses.parts.append(torch.empty_like(self.loss))
        losses.weights.extend(self.weights)
        return losses.parts[-1]


class TapedWork:
    """A message of a tape that is being recorded: a wait for it is recorded, too."""

    def __init__(self, recorder: TapeRecorder, work: Any, number: int):
        self.recorder, self.work, self.number = recorder, work, number
        self.key, self.count = recorder.key, recorder.played.get(recorder.key, 0)

    def wait(self) -> bool:
        return self.recorder.wait(self)


class TapeRecorder:
    """Records one rank's tapes, and plays them.

    Attributes:
        planned, final: see `real_microbatches`.
        real: (stage, microbatch) of those that are run for real in this step.
        losses: of this step.
        tapes: the last of each action; of each (action, way of the microbatch's forward), and of
            each (action, way, the action before). A forward's way is the action before it.
        played: how many of each have been recorded or played.
        works: the messages of each of them that may still be waited for.
        outside: the links of messages that are on no tape that is played.
    """

    losses: Losses

    def __init__(
        self,
        rank: VirtualRank,
        gpu: VirtualGPU,
        planned: set[tuple[int, int]],
        final: set[Action],
    ):
        self.rank, self.gpu, self.planned, self.final = rank, gpu, planned, final
        self.real: set[tuple[int, int]] = set()
        self.tapes: dict[tuple, Tape] = {}
        self.before: Key = (0, "")  # the last action
        self.way: Key = (0, "")  # of the microbatch's forward
        self.way_of: dict[tuple[int, int], Key] = {}  # of each microbatch in this step
        self.played: dict[Key, int] = {}
        self.works: dict[tuple[Key, int], list[Any]] = {}
        self.loose: dict[Key, list[Any]] = {}  # posted by played tapes, and not waited for
        self.outside: set[int] = set()
        self.alike: dict[tuple, Tensor] = {}
        self.tape: Tape | None = None  # that is being recorded
        self.waited: list[tuple[Key, int, int]] = []  # for which messages, on it
        self.key: Key = (0, "")

    @contextmanager
    def listening(self, losses: Losses) -> Iterator[None]:
        """Watch this rank's messages in a step, inside the block."""
        self.losses, self.real = losses, set(self.planned)
        self.tapes.clear()
        self.way_of.clear()
        self.before = self.way = (0, "")
        groups = [group for group in self.rank.groups if "send" not in vars(group)]
        for group in groups:
            for name in ("send", "recv"):
                setattr(group, name, partial(self.post, group, getattr(group, name), name))
        try:
            yield
            for key in list(self.loose):
                self.settle(key)
        finally:
            for group in groups:
                for name in ("send", "recv"):
                    vars(group).pop(name, None)

    def is_real(self, action: Action) -> bool:
        """Return whether this action of the step is run for real."""
        microbatch = action[::2]
        if action.kind == "F":
            self.way = self.way_of[microbatch] = self.before
            if self.ways(action[:2])[0] not in self.tapes:
                self.real.add(microbatch)
        self.way = self.way_of[microbatch]
        return microbatch in self.real

    def ways(self, key: Key) -> tuple[tuple, ...]:
        return (key, self.way, self.before), (key, self.way), key

    def tape_of(self, key: Key) -> Tape:
        return next(self.tapes[way] for way in self.ways(key) if way in self.tapes)

    def works_of(self, key: Key, back: int = 0) -> list[Any]:
        """Return the messages of this action's tape, or of one `back` tapes ago."""
        return self.works.setdefault((key, self.played.get(key, 0) - back), [])

    def count(self, key: Key) -> None:
        """Count one more tape: messages of the last two may still be waited for."""
        self.before = key
        self.played[key] = number = self.played.get(key, 0) + 1
        self.works.pop((key, number - 4), None)

    # ── recording ──

    def post(
        self, group: Any, post: Callable[..., Any], name: str, tensors: list[Tensor], *to: int
    ) -> Any:
        """Post a message for the group, to or from the rank at a position, and record it."""
        ends = self.rank.number, group.ranks[to[0]]
        hops = self.rank.world.route(*(ends if name == "send" else ends[::-1])).hops
        links = {link for hop in hops for link in hop}
        if self.tape is None:
            self.outside |= links
            return post(tensors, *to)
        self.tape.links |= links
        x = tensors[0]
        with torch_private.no_function_modes():
            # not the same for both: a receive may write numbers, such as those of experts' rows
            if (like := (name, x.shape, x.dtype, x.device)) not in self.alike:
                self.alike[like] = torch_private.uncounted_like(x)
        again = partial(post, [self.alike[like]], *to)
        self.note(partial(self.post_again, self.key, again, current_collective()))
        works = self.works_of(self.key)
        works.append(post(tensors, *to))
        self.at = self.rank.now()
        return TapedWork(self, works[-1], len(works) - 1)

    def note(self, event: Callable[[], None]) -> None:
        assert self.tape is not None
        self.tape.events.append((self.rank.now() - self.at, event))

    def wait(self, message: TapedWork) -> bool:
        if self.tape is not None:
            back = self.played.get(message.key, 0) - message.count
            self.waited.append((message.key, back, message.number))
            self.note(partial(self.wait_again, *self.waited[-1]))
        if not message.work.waited:  # a played tape may have waited for it
            message.work.wait()
        self.at = self.rank.now()
        return True

    def record(self, action: Action, work: Callable[[], None]) -> Tape:
        """Do the work of an action, and return its tape.

        The tape of a final action isn't played, because gradients leave in it.
        """
        key, gpu, losses = action[:2], self.gpu, self.losses
        self.settle(key)
        tape = self.tape = Tape()
        self.waited, self.key = [], key
        began = self.at = self.rank.now()
        live, peak, gpu.peak = gpu.live, gpu.peak, gpu.live
        counted = gpu.flops, gpu.busy, gpu.kernels
        parts, weights = len(losses.parts), len(losses.weights)
        work()
        self.tape = None
        tape.rest, tape.seconds = self.rank.now() - self.at, self.rank.now() - began
        tape.live, tape.peak = gpu.live - live, gpu.peak - live
        gpu.peak = max(gpu.peak, peak)
        flops, busy, kernels = counted
        tape.counts = gpu.flops - flops, gpu.busy - busy, gpu.kernels - kernels
        if losses.parts[parts:]:
            tape.loss = torch_private.uncounted_like(losses.parts[-1])
        tape.weights = losses.weights[weights:]
        here = {number for of, back, number in self.waited if (of, back) == (key, 0)}
        tape.closed = len(here) == len(self.waited) == len(tape.events) - len(self.waited)
        if action in self.final and key in self.tapes:
            self.outside |= tape.links - self.tapes[key].links
        else:
            for known in self.ways(key):
                self.tapes[known] = tape
        self.count(key)
        return tape

    # ── playing ──

    @contextmanager
    def play(self, key: Key) -> Iterator[Tape]:
        """Play the last tape of this action; after the block, what is alive is corrected."""
        tape, rank, gpu = self.tape_of(key), self.rank, self.gpu
        alive = gpu.live + tape.live
        gpu.peak = max(gpu.peak, gpu.live + tape.peak)
        flops, busy, kernels = tape.counts
        gpu.flops, gpu.busy, gpu.kernels = gpu.flops + flops, gpu.busy + busy, gpu.kernels + kernels
        if tape.closed and not tape.links & self.outside:
            rank.compute(tape.seconds)
        else:
            for after, event in tape.events:
                if after:
                    rank.compute(after)
                event()
            if tape.rest:
                rank.compute(tape.rest)
            works = [work for work in self.works_of(key) if not work.waited]
            self.loose.setdefault(key, []).extend(works)
        self.count(key)
        yield tape
        gpu.live = alive

    def post_again(self, key: Key, post: Callable[[], Any], within: Collective | None) -> None:
        set_current_collective(within)
        self.works_of(key).append(post())
        set_current_collective(None)

    def wait_again(self, key: Key, back: int, number: int) -> None:
        works = self.works.get((key, self.played.get(key, 0) - back), [])
        if number < len(works) and not works[number].waited:
            works[number].wait()

    def settle(self, key: Key) -> None:
        """Wait for the messages that played tapes of this action have left in flight.

        A real action follows, which does not know of them.
        """
        for work in self.loose.pop(key, []):
            if not work.waited:
                work.wait()


# ── a trainer's runner ──


def replay(trainer: HybridTrainer, rank: VirtualRank, gpu: VirtualGPU) -> None:
    """Let the trainer run only some of its microbatches for real from now on."""
    runner: Any = trainer.runner
    first, last = (3, 2) if trainer.data.options.zero_stage >= 2 else (2, 1)
    actions = [Action(*action) for action in runner.actions]
    recorder = TapeRecorder(rank, gpu, *real_microbatches(actions, first, last))
    run, perform = runner.run, runner.perform

    def listen(inputs: Batch, targets: Batch, losses: Losses) -> None:
        with recorder.listening(losses):
            run(inputs, targets, losses)

    def perform_or_play(action: Any, *batch: Any) -> None:
        action = Action(*action)
        sends = Action(action.stage, SENT.get(action.kind, ""), action.microbatch)
        if recorder.is_real(action):
            tape = recorder.record(action, partial(perform, action, *batch))
            made = runner.results.get(sends) if isinstance(runner, Pipeline) else None
            tape.sent = None if made is None else torch_private.uncounted_like(made)
            return
        with recorder.play(action[:2]) as tape:
            made = None if tape.sent is None else torch.empty_like(tape.sent)
            loss = tape.loss_again(recorder.losses)
            if isinstance(runner, Pipeline):
                if made is not None:
                    runner.results[sends] = made
                keep(runner, action, loss if made is None else made)
            elif action.kind == "F":
                runner.loss = loss

    runner.run, runner.perform = listen, perform_or_play


# by kind of an action, what sends its result
SENT = {"F": "SEND_F", "B": "SEND_B", "I": "SEND_B"}


def real_microbatches(
    actions: Sequence[Action], first: int, last: int
) -> tuple[set[tuple[int, int]], set[Action]]:
    """Return (stage, microbatch) of those that are run for real, and the final actions.

    With a final action, the gradients of a stage are complete.
    """
    real, final = set(), set()
    for stage in {action.stage for action in actions}:
        of_kind = {
            kind: [a for a in actions if (a.stage, a.kind) == (stage, kind)] for kind in NAMES
        }
        for of in of_kind.values():
            real |= {action[::2] for action in of[:first]}
        complete = of_kind["W"] or of_kind["B"]
        real |= {action[::2] for action in complete[-last:]}
        final |= {of[-1] for of in of_kind.values() if of}
    return real, final


def keep(runner: Pipeline, action: Action, made: Tensor | None) -> None:
    """Keep what a played action of a pipeline has made as if it were real."""
    stage, kind, i = action[:3]
    if kind == "F":
        x = runner.inputs[i] if runner.arrived is None else runner.arrived
        later = WeightGradients(split=True) if (stage, i) in runner.split else None
        runner.held[stage, i] = Held(x, made, later)  # type: ignore[arg-type]
    elif kind == "W":
        runner.later.pop((stage, i))
    elif weights := runner.held.pop((stage, i)).weights:
        runner.later[stage, i] = weights
    runner.arrived = None
