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

The hooks go around the runner of a trainer (trainers/pipeline_parallel.py, step.py), which
does everything else itself: it posts, waits and sends as always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parallel101.laboratory.record import torch_private
from parallel101.laboratory.sim.clock import VirtualRank
from parallel101.laboratory.sim.virtual_gpu import VirtualGPU
from parallel101.spans import Collective, current_collective, set_current_collective, span
from parallel101.trainers.gradient_sync import GradientSync
from parallel101.trainers.pipeline_parallel import NAMES, Held, Pipeline
from parallel101.trainers.schedules.actions import Action
from parallel101.trainers.step import Accumulation, Trainer
from parallel101.trainers.support.batches import Batch, count_samples
from parallel101.trainers.support.losses import Losses
from parallel101.trainers.weight_gradients import WeightGradients

Key = tuple[int, str]  # stage and kind of an action


@dataclass
class TapedPost:
    """A message, posted `after` seconds of computing."""

    after: float
    post: Callable[..., Any]
    peer: int
    tag: int
    like: Tensor
    collective: Collective | None


@dataclass
class TapedWait:
    """A wait for a message of this tape, or of one of `key` that was played or recorded before."""

    after: float
    key: Key
    back: int  # that many tapes ago
    number: int  # of the message on its tape


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

    events: list[TapedPost | TapedWait] = field(default_factory=list)
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

    def keep_loss(self, losses: Losses, parts: int, weights: int) -> None:
        """Keep what was added to the losses, after `parts` parts and `weights` weights."""
        if losses.parts[parts:]:
            self.loss = torch_private.uncounted_like(losses.parts[-1])
        self.weights = losses.weights[weights:]

    def loss_again(self, losses: Losses) -> Tensor | None:
        """Add what `keep_loss` has kept once more, and return it."""
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
        tapes: the last of each action; of each (action, way of the microbatch's forward), and of
            each (action, way, the action before). A forward's way is the action before it.
        played: how many of each have been recorded or played.
        works: the messages of each of them that may still be waited for.
        outside: the links of messages that are on no tape that is played.
    """

    def __init__(self, rank: VirtualRank, gpu: VirtualGPU):
        self.rank, self.gpu = rank, gpu
        self.tapes: dict[tuple, Tape] = {}
        self.before: Key = (0, "")  # the last action
        self.way: Key = (0, "")  # of the microbatch's forward
        self.played: dict[Key, int] = {}
        self.works: dict[tuple[Key, int], list[Any]] = {}
        self.loose: dict[Key, list[Any]] = {}  # posted by played tapes, and not waited for
        self.outside: set[int] = set()
        self.alike: dict[tuple, Tensor] = {}
        self.tape: Tape | None = None  # that is being recorded
        self.key: Key = (0, "")

    # ── recording ──

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Watch this rank's messages inside the block."""
        self.tapes.clear()
        self.before = self.way = (0, "")
        groups = [group for group in self.rank.groups if "send" not in vars(group)]
        for group in groups:
            for name in ("send", "recv"):
                setattr(group, name, self.hook(group, getattr(group, name), name == "send"))
        try:
            yield
        finally:
            for group in groups:
                for name in ("send", "recv"):
                    vars(group).pop(name, None)

    def hook(self, group: Any, post: Callable[..., Any], sends: bool) -> Callable[..., Any]:
        route, me = self.rank.world.route, self.rank.number

        def posted(tensors: list[Tensor], position: int, tag: int) -> Any:
            peer, tape = group.ranks[position], self.tape
            hops = (route(me, peer) if sends else route(peer, me)).hops
            links = {link for hop in hops for link in hop}
            if tape is None:
                self.outside |= links
                return post(tensors, position, tag)
            tape.links |= links
            after = self.passed()
            with torch_private.no_function_modes():
                like = self.like(tensors[0])
            tape.events.append(TapedPost(after, post, position, tag, like, current_collective()))
            works = self.works.setdefault((self.key, self.played.get(self.key, 0)), [])
            work = post(tensors, position, tag)
            works.append(work)
            self.at = self.rank.now()
            return TapedWork(self, work, len(works) - 1)

        return posted

    def like(self, x: Tensor) -> Tensor:
        """Return a tensor to send in place of x, which doesn't count as memory."""
        key = x.shape, x.dtype, x.device
        if key not in self.alike:
            self.alike[key] = torch_private.uncounted_like(x)
        return self.alike[key]

    def passed(self) -> float:
        """Return the seconds since the last event of the tape."""
        return self.rank.now() - self.at

    def wait(self, message: TapedWork) -> bool:
        if self.tape is not None:
            back = self.played.get(message.key, 0) - message.count
            wait = TapedWait(self.passed(), message.key, back, message.number)
            self.tape.events.append(wait)
        if not message.work.waited:  # a played tape may have waited for it
            message.work.wait()
        self.at = self.rank.now()
        return True

    def begin(self, key: Key) -> None:
        self.settle(key)
        self.tape, self.key, self.at = Tape(), key, self.rank.now()
        self.began, self.live, self.peak = self.at, self.gpu.live, self.gpu.peak
        self.gpu.peak = self.gpu.live
        self.counted = self.gpu.flops, self.gpu.busy, self.gpu.kernels

    def end(self, final: bool) -> Tape:
        """End an action and return its tape.

        After a `final` action the tape is not played, because gradients left in it.
        """
        tape, gpu, key = self.tape, self.gpu, self.key
        assert tape is not None
        self.tape = None
        tape.rest, tape.seconds = self.passed(), self.rank.now() - self.began
        tape.live, tape.peak = gpu.live - self.live, gpu.peak - self.live
        gpu.peak = max(gpu.peak, self.peak)
        now = gpu.flops, gpu.busy, gpu.kernels
        tape.counts = tuple(a - b for a, b in zip(now, self.counted))  # type: ignore[assignment]
        waits = [event for event in tape.events if isinstance(event, TapedWait)]
        here = {event.number for event in waits if (event.key, event.back) == (key, 0)}
        tape.closed = len(here) == len(waits) == len(tape.events) - len(waits)
        if final and key in self.tapes:
            self.outside |= tape.links - self.tapes[key].links
        else:
            for known in self.ways(key):
                self.tapes[known] = tape
        self.count(key)
        return tape

    def ways(self, key: Key) -> tuple[tuple, ...]:
        return (key, self.way, self.before), (key, self.way), key

    def tape_of(self, key: Key) -> Tape:
        return next(self.tapes[way] for way in self.ways(key) if way in self.tapes)

    def count(self, key: Key) -> None:
        """Count one more tape: messages of the last two may still be waited for."""
        self.before = key
        self.played[key] = number = self.played.get(key, 0) + 1
        self.works.pop((key, number - 4), None)

    # ── playing ──

    def play(self, key: Key) -> Tape:
        """Play the last tape of this action. `correct` corrects what is alive."""
        tape, rank, gpu = self.tape_of(key), self.rank, self.gpu
        gpu.peak = max(gpu.peak, gpu.live + tape.peak)
        flops, busy, kernels = tape.counts
        gpu.flops, gpu.busy, gpu.kernels = gpu.flops + flops, gpu.busy + busy, gpu.kernels + kernels
        if tape.closed and not tape.links & self.outside:
            rank.compute(tape.seconds)
        else:
            self.send_again(key, tape)
        self.count(key)
        return tape

    def send_again(self, key: Key, tape: Tape) -> None:
        number = self.played.get(key, 0)
        works = self.works[key, number] = []
        for event in tape.events:
            if event.after:
                self.rank.compute(event.after)
            if isinstance(event, TapedPost):
                set_current_collective(event.collective)
                works.append(event.post([event.like], event.peer, event.tag))
                set_current_collective(None)
            else:
                of = self.works.get((event.key, self.played.get(event.key, 0) - event.back), [])
                if event.number < len(of) and not of[event.number].waited:
                    of[event.number].wait()
        if tape.rest:
            self.rank.compute(tape.rest)
        self.loose.setdefault(key, []).extend(work for work in works if not work.waited)

    def settle(self, key: Key) -> None:
        """Wait for the messages that played tapes of this action have left in flight.

        A real action follows, which does not know of them.
        """
        for work in self.loose.pop(key, []):
            if not work.waited:
                work.wait()

    def settle_all(self) -> None:
        for key in list(self.loose):
            self.settle(key)

    @contextmanager
    def correct(self, live: int) -> Iterator[None]:
        """Correct the bytes alive after the block, which plays an action that adds `live` bytes."""
        wanted = self.gpu.live + live
        yield
        self.gpu.live = wanted


# ── the hooks on a trainer's runner ──


def replay(trainer: Trainer, rank: VirtualRank, gpu: VirtualGPU) -> None:
    """Let the trainer run only some of its microbatches for real from now on."""
    runner, recorder = trainer.runner, TapeRecorder(rank, gpu)
    first, last = (3, 2) if runner.sync.zero_stage >= 2 else (2, 1)
    if isinstance(runner, Pipeline):
        PlayedPipeline(runner, recorder, first, last)
    else:
        PlayedAccumulation(runner, recorder, first, last)


class PlayedPipeline:
    """Hooks on a Pipeline: `compute` and what it calls first, `receive`."""

    def __init__(self, runner: Pipeline, recorder: TapeRecorder, first: int, last: int):
        self.runner, self.recorder = runner, recorder
        self.run, self.compute, self.receive = runner.run, runner.compute, runner.receive
        self.planned, self.final = real_microbatches(runner.actions, first, last)
        runner.run = self.listen  # type: ignore[assignment,method-assign]
        runner.compute = self.compute_or_play  # type: ignore[method-assign]
        runner.receive = self.receive_and_begin  # type: ignore[method-assign]

    def listen(self, *batch: Any) -> None:
        self.real = set(self.planned)
        self.ways: dict[tuple[int, int], Key] = {}  # of each microbatch: see TapeRecorder
        with self.recorder.listening():
            self.run(*batch)
            self.recorder.settle_all()

    def receive_and_begin(self, action: Action) -> Tensor | None:
        arrived = self.receive(action)
        if self.even:
            self.recorder.begin(action[:2])
        return arrived

    def compute_or_play(self, action: Action) -> None:
        runner = self.runner
        self.even = len(set(runner.sizes)) == 1
        if not self.even:
            self.compute(action)
            return
        recorder, microbatch = self.recorder, action[::2]
        if action.kind == "F":
            recorder.way = self.ways[microbatch] = recorder.before
            if recorder.ways(action[:2])[0] not in recorder.tapes:
                self.real.add(microbatch)
        recorder.way = self.ways[microbatch]
        if action[::2] in self.real:
            losses, weights = len(runner.losses.parts), len(runner.losses.weights)
            self.compute(action)
            tape = self.recorder.end(action in self.final)
            made = runner.results.get(Action(action.stage, SENT.get(action.kind, ""), action[2]))
            tape.sent = None if made is None else torch_private.uncounted_like(made)
            tape.keep_loss(runner.losses, losses, weights)
            return
        arrived = self.receive(action)
        with self.recorder.correct(self.recorder.tape_of(action[:2]).live):
            self.play(action, arrived)
            del arrived

    def play(self, action: Action, arrived: Tensor | None) -> None:
        stage, kind, i = action[:3]
        runner = self.runner
        with span(NAMES[kind], microbatch=i, stage=stage):
            tape = self.recorder.play((stage, kind))
        made = None if tape.sent is None else torch.empty_like(tape.sent)
        if made is not None:
            runner.results[Action(stage, SENT[kind], i)] = made
        if kind == "F":
            made = tape.loss_again(runner.losses) if made is None else made
            x = runner.inputs[i] if arrived is None else arrived
            split = WeightGradients(split=(stage, i) in runner.split)
            runner.held[stage, i] = Held(x, made, split)  # type: ignore[arg-type]
        elif kind == "W":
            runner.later.pop((stage, i))
        else:
            held = runner.held.pop((stage, i))
            if held.weights.split:
                runner.later[stage, i] = held.weights


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


class PlayedAccumulation:
    """Hooks on an Accumulation: `forward`, and the `backward` of its sync."""

    def __init__(self, runner: Accumulation, recorder: TapeRecorder, first: int, last: int):
        self.runner, self.recorder, self.first, self.last = runner, recorder, first, last
        self.run, self.forward = runner.run, runner.forward
        self.i = 0
        runner.run = self.listen  # type: ignore[method-assign]
        runner.forward = self.forward_or_play  # type: ignore[method-assign]
        runner.sync = PlayedSync(self, runner.sync)  # type: ignore[assignment]

    def listen(self, inputs: Batch, targets: Batch, losses: Losses) -> None:
        self.i = 0
        self.even = not count_samples(inputs) % self.runner.microbatches
        with self.recorder.listening():
            self.run(inputs, targets, losses)
            self.recorder.settle_all()

    @property
    def real(self) -> bool:
        left = self.runner.microbatches - self.i
        return not self.even or self.i < self.first or left <= self.last

    def forward_or_play(self, inputs: Batch, targets: Batch, losses: Losses) -> Any:
        if self.real:
            count, weights = len(losses.parts), len(losses.weights)
            self.recorder.begin((0, "F"))
            loss = self.forward(inputs, targets, losses)
            tape = self.recorder.end(final=False)
            tape.keep_loss(losses, count, weights)
            return loss
        with self.recorder.correct(self.recorder.tape_of((0, "F")).live):
            tape = self.recorder.play((0, "F"))
            return PlayedLoss(tape.loss_again(losses))


class PlayedSync:
    """Stands before the synchronization of gradients, in an Accumulation."""

    def __init__(self, played: PlayedAccumulation, sync: GradientSync):
        self.played, self.sync = played, sync

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sync, name)

    @contextmanager
    def backward(self, kind: str = "B", last: bool = True) -> Iterator[None]:
        played, recorder = self.played, self.played.recorder
        if played.real:
            recorder.begin((0, "B"))
            with self.sync.backward(kind, last):
                yield
            recorder.end(final=last)
        else:
            with recorder.correct(recorder.tape_of((0, "B")).live):
                recorder.play((0, "B"))
                yield
        played.i += 1


class PlayedLoss:
    """The loss of a forward that was played."""

    def __init__(self, loss: Tensor | None):
        self.loss = loss

    def backward(self) -> None:
        """Do nothing: PlayedSync has played the backward."""
