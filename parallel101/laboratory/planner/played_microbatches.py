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

from collections import Counter, defaultdict, deque
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
from parallel101.spans import current_collective, set_current_collective
from parallel101.trainers.batches import Batch
from parallel101.trainers.hybrid import HybridTrainer
from parallel101.trainers.losses import Losses
from parallel101.trainers.pipeline_parallel import NAMES, Held, Pipeline
from parallel101.trainers.schedules.actions import Action
from parallel101.trainers.weight_gradients import WeightGradients

Key = tuple[int, str]  # stage and kind of an action
START: Key = (0, "")  # before the first action


@dataclass
class Tape:
    """The record of one action.

    Attributes:
        events: messages and waits, each after so many seconds of computing.
        rest, seconds: after the last event, and altogether.
        links: which its messages held.
        open: how many messages it did not wait for, and how often it waited for other actions'.
        live, peak: bytes by which it changed what is alive, and the most that it had besides.
        counts: what it added to the GPU's flops, busy and kernels.
        sent: what it made for another stage: shape and dtype; None: nothing.
        loss: the same of what it added to the losses. weights: of losses with a weight.
    """

    events: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    rest: float = 0.0
    seconds: float = 0.0
    links: set[int] = field(default_factory=set)
    open: int = 0
    live: int = 0
    peak: int = 0
    counts: Sequence[float] = ()
    sent: Tensor | None = None
    loss: Tensor | None = None
    weights: Sequence[float] = ()


class TapedWork:
    """A message of a tape that is being recorded: a wait for it is recorded, too.

    Attributes:
        work: the message.
        key, number: of its action, and among all messages of such actions.
        tape: it is on this one; None: it was waited for.
    """

    def __init__(self, recorder: TapeRecorder, work: Any):
        self.recorder, self.work, self.key = recorder, work, recorder.key
        self.tape, self.number = recorder.tape, recorder.posted[self.key] - 1

    def wait(self) -> bool:
        return self.recorder.wait(self)


class TapeRecorder:
    """Records one rank's tapes, and plays them.

    Attributes:
        planned, final: see `real_microbatches`.
        real: (stage, microbatch) of those that are run for real in this step.
        losses: of this step.
        tapes: the last of each action, and of each (action, way of the microbatch's forward, the
            action before). A forward's way is the action before it.
        works: the last messages of each action's tapes, recorded or played, in order; posted: how
            many there have been.
        loose: those that played tapes have posted and not waited for: no real action knows of them.
        outside: the links of messages that are on no tape that is played.
        tape, key: that is being recorded, and its action.
    """

    def __init__(
        self,
        rank: VirtualRank,
        gpu: VirtualGPU,
        planned: set[tuple[int, int]],
        final: set[Action],
    ):
        self.rank, self.gpu, self.planned, self.final = rank, gpu, planned, final
        self.outside: set[int] = set()
        self.tape: Tape | None = None
        self.key = START

    @contextmanager
    def listening(self, losses: Losses) -> Iterator[None]:
        """Watch this rank's messages in a step, inside the block."""
        self.losses, self.real = losses, set(self.planned)
        self.tapes: dict[tuple, Tape] = {}
        self.before = self.way = START
        self.way_of: dict[tuple[int, int], Key] = {}  # of each microbatch in this step
        self.works: defaultdict[Key, deque[Any]] = defaultdict(deque)
        self.posted: Counter[Key] = Counter()
        self.loose: defaultdict[Key, list[Any]] = defaultdict(list)
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
        return (key, self.way, self.before), key

    def counts(self) -> tuple[float, ...]:
        return self.gpu.flops, self.gpu.busy, self.gpu.kernels

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
        with torch_private.no_function_modes():
            like = torch_private.uncounted_like(tensors[0])
        key, within, again = self.key, current_collective(), partial(post, [like], *to)

        def post_again() -> None:
            set_current_collective(within)
            self.loose[key].append(self.keep(key, again()))
            set_current_collective(None)

        self.note(post_again)
        self.tape.links |= links
        self.tape.open += 1
        work = TapedWork(self, self.keep(key, post(tensors, *to)))
        self.at = self.rank.now()
        return work

    def keep(self, key: Key, work: Any) -> Any:
        """Keep a message that may be waited for, and return it."""
        self.works[key].append(work)
        self.posted[key] += 1
        while self.works[key][0].waited:
            self.works[key].popleft()
        return work

    def note(self, event: Callable[[], None]) -> None:
        assert self.tape is not None
        self.tape.events.append((self.rank.now() - self.at, event))

    def wait(self, message: TapedWork) -> bool:
        if self.tape is not None:
            key, back = message.key, message.number - self.posted[message.key]
            if not message.work.waited:  # a played tape may have waited for it
                self.note(lambda: wait_once(self.works[key][back]))
            self.tape.open += -1 if message.tape is self.tape else 1
            message.tape = None
        wait_once(message.work)
        self.at = self.rank.now()
        return True

    def record(self, action: Action, work: Callable[[], None]) -> Tape:
        """Do the work of an action, and return its tape.

        The tape of a final action isn't played, because gradients leave in it.
        """
        key, gpu, losses = action[:2], self.gpu, self.losses
        self.settle(key)
        tape, self.key = Tape(), key
        began = self.at = self.rank.now()
        live, peak, gpu.peak = gpu.live, gpu.peak, gpu.live
        counts, parts, weights = self.counts(), len(losses.parts), len(losses.weights)
        self.tape = tape
        work()
        self.tape = None
        tape.rest, tape.seconds = self.rank.now() - self.at, self.rank.now() - began
        tape.live, tape.peak = gpu.live - live, gpu.peak - live
        gpu.peak = max(gpu.peak, peak)
        tape.counts = [after - before for after, before in zip(self.counts(), counts)]
        if losses.parts[parts:]:
            tape.loss = torch_private.uncounted_like(losses.parts[-1])
        tape.weights = losses.weights[weights:]
        if action in self.final and key in self.tapes:
            self.outside |= tape.links - self.tapes[key].links
        else:
            self.tapes |= dict.fromkeys(self.ways(key), tape)
        self.before = key
        return tape

    # ── playing ──

    @contextmanager
    def play(self, key: Key) -> Iterator[tuple[Tape, Tensor | None]]:
        """Play the last tape of this action, which may add a loss again; after the block, what is
        alive is corrected.
        """
        tape = next(self.tapes[way] for way in self.ways(key) if way in self.tapes)
        rank, gpu, losses = self.rank, self.gpu, self.losses
        alive = gpu.live + tape.live
        gpu.peak = max(gpu.peak, gpu.live + tape.peak)
        counts: Any = map(sum, zip(self.counts(), tape.counts))
        gpu.flops, gpu.busy, gpu.kernels = counts
        if tape.open or tape.links & self.outside:
            for after, event in tape.events:
                rank.compute(after)
                event()
            rank.compute(tape.rest)
            self.loose[key] = [work for work in self.loose[key] if not work.waited]
        else:
            rank.compute(tape.seconds)
        self.before = key
        loss = None if tape.loss is None else torch.empty_like(tape.loss)
        if loss is not None:
            losses.parts.append(loss)
            losses.weights.extend(tape.weights)
        yield tape, loss
        gpu.live = alive

    def settle(self, key: Key) -> None:
        """Wait for the messages that played tapes of this action have left in flight."""
        for work in self.loose.pop(key, []):
            wait_once(work)


def wait_once(work: Any) -> None:
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
        with recorder.play(action[:2]) as (tape, loss):
            if isinstance(runner, Pipeline):
                made = loss
                if tape.sent is not None:
                    made = runner.results[sends] = torch.empty_like(tape.sent)
                keep(runner, action, made)
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
