"""A training step of a layout, run by the trainer itself on virtual GPUs.

    simulate_step(shape, layout, cluster)   the step that follows the first one

Most ranks do the same at the same time, so one stands for them: the first of each stage of the
pipeline and of each position along ep has a thread, and the others along dp, cp and tp are
mirrored (sim/mirrored.py). Ranks along ep tell each other how many rows they send.

And a few microbatches stand for all: the others are played from what these did.

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

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from parallel101 import models
from parallel101.cost.cluster import Cluster
from parallel101.cost.model_shape import ModelShape
from parallel101.cost.parallel_layout import ParallelLayout
from parallel101.cost.step_time import step_time
from parallel101.laboratory.planner.trainer_call import (
    mesh_of,
    model_of,
    trainer_options,
)
from parallel101.laboratory.ranks.launch import Run, launch
from parallel101.laboratory.record import torch_private
from parallel101.laboratory.sim.clock import VirtualRank
from parallel101.laboratory.sim.mirrored import MirroredAxes
from parallel101.laboratory.sim.network import Network
from parallel101.laboratory.sim.virtual_gpu import VirtualGPU
from parallel101.spans import current_collective, recorder, set_current_collective
from parallel101.trainers.batches import Batch
from parallel101.trainers.hybrid import HybridTrainer
from parallel101.trainers.layout import Axes
from parallel101.trainers.losses import Losses
from parallel101.trainers.pipeline_parallel import NAMES, Pipeline
from parallel101.trainers.schedules.actions import Action
from parallel101.trainers.tensor.loss import vocabulary_cross_entropy
from parallel101.trainers.weight_gradients import WeightGradients

Key = tuple[int, str]  # stage and kind of an action
START: Key = (0, "")  # before the first action
COUNTS = "flops", "busy", "kernels"  # of a virtual GPU
SENT = {"F": "SEND_F", "B": "SEND_B", "I": "SEND_B"}  # what sends the result of an action

STEPS = 2  # the first announces shapes and makes the optimizer's state; the second is timed


@dataclass(frozen=True)
class SimulatedStep:
    """The measurements of a step on virtual GPUs.

    Attributes:
        seconds: from the end of the step before, on the slowest rank, to its own end.
        peak_bytes: on a rank of each stage of the pipeline.
        mfu, hfu: model and hardware FLOPs utilization, see cost/step_time.py.
        run: the run, with its record.
        wall_seconds: that the simulation took.
    """

    seconds: float
    peak_bytes: tuple[int, ...]
    mfu: float
    hfu: float
    run: Run = field(repr=False)
    wall_seconds: float


def simulate_step(
    shape: ModelShape,
    layout: ParallelLayout,
    cluster: Cluster,
    *,
    full: bool = False,
    trace: bool = False,
    network: Network | None = None,
    played: bool | None = None,
    **options: Any,
) -> SimulatedStep:
    """Run a step of this model and layout on virtual GPUs.

    Args:
        full: run every rank, and every microbatch.
        trace: record the run, for pictures. A full one is always recorded.
        network: instead of the cluster's.
        played: whether most microbatches are played from the first ones
            (see Player); None: unless `full`.
        options: of HybridTrainer, in addition to the layout's: clip_norm.
    """
    began = time.perf_counter()
    sizes = mesh_of(layout)
    mirrors = None if full else MirroredAxes(sizes, tuple({*sizes} - {"pp", "ep"}))
    run = launch(
        program,
        shape,
        layout,
        options,
        not full if played is None else played,
        world_size=layout.gpus,
        backend="sim",
        device=cluster.chip.name,
        network=network or Network.two_level(**cluster.network_arguments()),
        mirrors=mirrors,
        trace=trace,
        timeout=3600.0,
    )
    ends = [max(of_ranks) for of_ranks in zip(*(ends for ends, _ in run.results), strict=True)]
    seconds = ends[-1] - ends[-2]
    each = len(run.results) // layout.pp
    peaks = [peak for _, peak in run.results]
    quick = step_time(shape, layout, cluster)
    return SimulatedStep(
        seconds=seconds,
        peak_bytes=tuple(max(peaks[i * each : (i + 1) * each]) for i in range(layout.pp)),
        mfu=quick.mfu * quick.seconds / seconds,
        hfu=quick.hfu * quick.seconds / seconds,
        run=run,
        wall_seconds=time.perf_counter() - began,
    )


def program(
    shape: ModelShape, layout: ParallelLayout, options: dict[str, Any], played: bool
) -> tuple[list[float], int]:
    """Run one rank's steps, and return when they ended and the peak bytes since the first began."""
    rank: Any = recorder()
    gpu = next(mode for mode in torch_private.dispatch_modes() if isinstance(mode, VirtualGPU))
    trainer = HybridTrainer(
        model_of(shape),
        models.balanced_next_token_loss if shape.experts else vocabulary_cross_entropy,
        lambda parameters: torch.optim.AdamW(parameters, fused=True),
        mesh=Axes(None, mesh_of(layout)),
        verify=False,
        **trainer_options(shape, layout) | options,
    )
    if played:
        player = Player(trainer, rank, gpu)
        trainer.runner.run, trainer.runner.perform = player.step, player.carry_out
    gpu.peak = gpu.live  # building the whole model doesn't count
    tokens = torch.zeros(
        layout.microbatch * layout.microbatches, shape.time, dtype=torch.long, device="meta"
    )
    ends = []
    for _ in range(STEPS):
        trainer.step(tokens, tokens)
        ends.append(rank.now())
    return ends, gpu.peak


# ── playing most microbatches ──


@dataclass
class Tape:
    """The record of one action.

    Attributes:
        events: messages and waits, each after so many seconds of computing.
        rest, seconds: after the last event, and altogether.
        links: which its messages held.
        open: how many messages it did not wait for, and how often it waited for other actions'.
        live, peak: bytes by which it changed what is alive, and the most that it had besides.
        counts: what it added to the GPU's COUNTS.
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

    def __init__(self, player: Player, work: Any):
        self.player, self.work, self.key = player, work, player.key
        self.tape, self.number = player.tape, player.posted[self.key] - 1

    def wait(self) -> bool:
        return self.player.wait(self)


class Player:
    """Carries out the actions of a trainer's runner on one rank: for real, or from their tapes.

    Attributes:
        planned: (stage, microbatch) of those that are run for real in every step; real: in this.
        final: the actions with which the gradients of a stage are complete.
        losses: of this step.
        tapes: the last of each action, and of each (action, way of the microbatch's forward, the
            action before). A forward's way is the action before it.
        works: the last messages of each action's tapes, recorded or played, in order; posted: how
            many there have been.
        loose: those that played tapes have posted and not waited for: no real action knows of them.
        outside: the links of messages that are on no tape that is played.
        tape, key: that is being recorded, and its action; at: when its last event was.
    """

    def __init__(self, trainer: HybridTrainer, rank: VirtualRank, gpu: VirtualGPU):
        self.rank, self.gpu = rank, gpu
        self.runner: Any = trainer.runner
        self.run, self.perform = self.runner.run, self.runner.perform
        self.outside: set[int] = set()
        self.tape: Tape | None = None
        self.key = START
        first, last = (3, 2) if trainer.data.options.zero_stage >= 2 else (2, 1)
        actions = [Action(*action) for action in self.runner.actions]
        self.planned: set[tuple[int, int]] = set()
        self.final: set[Action] = set()
        for stage in {action.stage for action in actions}:
            of_kind = {k: [a for a in actions if (a.stage, a.kind) == (stage, k)] for k in NAMES}
            complete = of_kind["W"] or of_kind["B"]
            of_ends = [complete[-last:], *(of[:first] for of in of_kind.values())]
            self.planned |= {action[::2] for of in of_ends for action in of}
            self.final |= {of[-1] for of in of_kind.values() if of}

    def step(self, inputs: Batch, targets: Batch, losses: Losses) -> None:
        """Run a step, and watch the messages of this rank meanwhile."""
        self.losses, self.real = losses, set(self.planned)
        self.tapes: dict[tuple, Tape] = {}
        self.before = START
        self.way_of: dict[tuple[int, int], Key] = {}  # of each microbatch in this step
        self.works: defaultdict[Key, deque[Any]] = defaultdict(deque)
        self.posted: Counter[Key] = Counter()
        self.loose: defaultdict[Key, list[Any]] = defaultdict(list)
        groups = [group for group in self.rank.groups if "send" not in vars(group)]
        for group, name in product(groups, ("send", "recv")):
            setattr(group, name, partial(self.post, group, getattr(group, name), name))
        try:
            self.run(inputs, targets, losses)
            for key in list(self.loose):
                self.settle(key)
        finally:
            for group, name in product(groups, ("send", "recv")):
                delattr(group, name)

    def carry_out(self, action: Action, *batch: Any) -> None:
        """Carry out an action of the runner whose input has arrived."""
        action = Action(*action)
        key, microbatch = action[:2], action[::2]
        way = self.way_of.setdefault(microbatch, self.before)
        ways = (key, way, self.before), key
        if action.kind == "F" and ways[0] not in self.tapes:
            self.real.add(microbatch)
        if microbatch in self.real:
            tape = self.record(action, partial(self.perform, action, *batch))
            if action in self.final and key in self.tapes:  # not played: gradients leave in it
                self.outside |= tape.links - self.tapes[key].links
            else:
                self.tapes |= dict.fromkeys(ways, tape)
        else:
            self.play(action, next(self.tapes[way] for way in ways if way in self.tapes))
        self.before = key

    # ── recording ──

    def record(self, action: Action, work: Callable[[], None]) -> Tape:
        """Do the work of an action, and return its tape."""
        key, gpu, losses = action[:2], self.gpu, self.losses
        self.settle(key)
        tape, self.key = Tape(), key
        began = self.at = self.rank.now()
        live, peak, gpu.peak = gpu.live, gpu.peak, gpu.live
        counts = [getattr(gpu, name) for name in COUNTS]
        parts, weights = len(losses.parts), len(losses.weights)
        self.tape = tape
        work()
        self.tape = None
        tape.rest, tape.seconds = self.rank.now() - self.at, self.rank.now() - began
        tape.live, tape.peak = gpu.live - live, gpu.peak - live
        gpu.peak = max(gpu.peak, peak)
        tape.counts = [getattr(gpu, name) - before for name, before in zip(COUNTS, counts)]
        if losses.parts[parts:]:
            tape.loss = torch_private.uncounted_like(losses.parts[-1])
        tape.weights = losses.weights[weights:]
        # what a pipeline sends to other stages
        made = getattr(self.runner, "results", {}).get(sends(action))
        tape.sent = None if made is None else torch_private.uncounted_like(made)
        return tape

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

        self.tape.events.append((self.rank.now() - self.at, post_again))
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

    def wait(self, message: TapedWork) -> bool:
        if self.tape is not None:
            key, back = message.key, message.number - self.posted[message.key]
            if not message.work.waited:  # a played tape may have waited for it
                after = self.rank.now() - self.at
                self.tape.events.append((after, lambda: wait_once(self.works[key][back])))
            self.tape.open += -1 if message.tape is self.tape else 1
            message.tape = None
        wait_once(message.work)
        self.at = self.rank.now()
        return True

    # ── playing ──

    def play(self, action: Action, tape: Tape) -> None:
        """Let the time of a tape pass, and keep what its action would have made."""
        rank, gpu, losses, runner = self.rank, self.gpu, self.losses, self.runner
        alive = gpu.live + tape.live
        gpu.peak = max(gpu.peak, gpu.live + tape.peak)
        for name, more in zip(COUNTS, tape.counts):
            setattr(gpu, name, getattr(gpu, name) + more)
        if tape.open or tape.links & self.outside:
            for after, event in tape.events:
                rank.compute(after)
                event()
            rank.compute(tape.rest)
            loose = self.loose[action[:2]]
            loose[:] = [work for work in loose if not work.waited]
        else:
            rank.compute(tape.seconds)
        made = None if tape.loss is None else torch.empty_like(tape.loss)
        if made is not None:
            losses.parts.append(made)
            losses.weights.extend(tape.weights)
        if tape.sent is not None:
            made = runner.results[sends(action)] = torch.empty_like(tape.sent)
        if isinstance(runner, Pipeline):
            keep(runner, action, made)
        elif action.kind == "F":
            runner.loss = made
        gpu.live = alive

    def settle(self, key: Key) -> None:
        """Wait for the messages that played tapes of this action have left in flight."""
        for work in self.loose.pop(key, []):
            wait_once(work)


def wait_once(work: Any) -> None:
    if not work.waited:
        work.wait()


def sends(action: Action) -> Action:
    return Action(action.stage, SENT.get(action.kind, ""), action.microbatch)


def keep(runner: Pipeline, action: Action, made: Tensor | None) -> None:
    """Keep what a played action of a pipeline has made as if it were real."""
    stage, kind, i = action[:3]
    if kind == "F":
        x = runner.inputs[i] if runner.arrived is None else runner.arrived
        later = WeightGradients(split=True) if (stage, i) in runner.split else None
        runner.held[stage, i] = x, made, later
    elif kind == "W":
        runner.later.pop((stage, i))
    elif weights := runner.held.pop((stage, i))[2]:
        runner.later[stage, i] = weights
    runner.arrived = None
