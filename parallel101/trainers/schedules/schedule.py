"""Pipeline schedules as data: for each rank the list of what it does, in
torch.distributed.pipelining's text form.

    1F1B on three stages, four microbatches          F forward   B backward   I, W backward, split into input and weight gradients

    rank 0   F0 F1 F2 B0 F3 B1 B2 B3                 a microbatch goes down the stages and its gradient comes back up; after a
    rank 1      F0 F1 B0 F2 B1 F3 B2 B3              warm-up of P − rank forwards, a rank that has done a backward can drop the
    rank 2         F0 B0 F1 B1 F2 B2 F3 B3           activations of one microbatch for those of another

The same lists are run by the trainers, checked (check.py) and timed (time.py). Sources: Huang et
al., "GPipe" (2019); Narayanan et al. (arXiv 2104.04473), section 2.2; Qi et al., "Zero Bubble
Pipeline Parallelism" (arXiv 2401.10241), sections 2 and 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parallel101.trainers.schedules.actions import FSDP, Action, ScheduleError
from parallel101.trainers.schedules.check import check
from parallel101.trainers.schedules.time import Cost, ScheduleTime, simulate


class Schedule:
    """For each rank the actions of a step, in order.

    Attributes:
        actions: by rank, as texts.
        ranks: the same, parsed.
        placement: by global stage, the rank that has it.
        microbatches: how many a step has.
    """

    def __init__(self, actions: Sequence[Sequence[str]]):
        if not isinstance(actions, (list, tuple)) or not all(
            isinstance(of_rank, (list, tuple)) for of_rank in actions
        ):
            raise ScheduleError(
                f"Schedule({actions!r}): expected a list for each rank, such as [['0F0', "
                "'0B0'], ['1F0', '1B0']]"
            )
        self.ranks = [[Action.parse(text) for text in of_rank] for of_rank in actions]
        self.actions = [[str(action) for action in of_rank] for of_rank in self.ranks]
        self.placement = dict(
            sorted({part.stage: rank for rank, part in reversed(list(self.parts()))}.items())
        )
        self.microbatches = 1 + max((part.microbatch for _, part in self.parts()), default=-1)

    def parts(self) -> Iterator[tuple[int, Action]]:
        """(rank, action) of everything that is computed or sent, overlaps taken apart."""
        for rank, of_rank in enumerate(self.ranks):
            for action in of_rank:
                yield from ((rank, part) for part in action.computed())

    def check(self, rules: str = "gloo") -> None:
        """Raises ScheduleError if the schedule cannot be run, and names the action: missing, twice,
        too early, or waiting in a cycle.

        Args: rules: "gloo" or "nccl", for sends and receives that stand in the lists. On gloo each
            is under way by itself. On NCCL those of a
                rank go one by one, in the order of its list, as torch's pipelining posts them.
                Lists of compute only have no such
                cycle: our executor has a group for each direction between two stages.
        """
        check(self.ranks, self.placement, self.microbatches, rules)

    def time(
        self,
        forward: Cost = 1.0,
        input_grad: Cost = 1.0,
        weight_grad: Cost = 1.0,
        communication: float = 0.0,
    ) -> ScheduleTime:
        """How long a step would take; nothing is computed.

        Raises ScheduleError for a schedule that cannot be run.

        Args: forward, input_grad, weight_grad: seconds of F, I and W, each a number, or one for
            each global stage. B takes I + W, and
                its gradient leaves at its end.
            communication: seconds until a result arrives at another rank, one number. It occupies
                neither rank.
        """
        self.check()
        return simulate(self.ranks, self.placement, forward, input_grad, weight_grad, communication)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.actions == other.actions

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"<Schedule: {len(self.ranks)} ranks, {len(self.placement)} stages, "
            f"{self.microbatches} microbatches>"
        )

    def to_csv(self) -> str:
        """A line a rank, as torch.distributed.pipelining writes and reads its schedules."""
        return "".join(",".join(of_rank) + "\n" for of_rank in self.actions)

    @classmethod
    def from_csv(cls, text: str) -> Schedule:
        """Read torch's CSV: compute only or with its sends and receives, whose order is kept.

        Empty cells (idle slots) and FSDP's actions (UNSHARD, RESHARD, REDUCE_GRAD) are left out.
        """
        rows = [[cell.strip() for cell in line.split(",")] for line in text.strip().splitlines()]
        return cls([[cell for cell in row if cell and not cell.endswith(FSDP)] for row in rows])


def schedule(name: str, *, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """A published schedule.

    Args:
        name: "gpipe", "1f1b", "interleaved", "zb-h1" or "zb-h2".
        stages: number of ranks P. microbatches: M in a step.
        chunks: stages on each rank, for "interleaved"; global stage s is on rank s mod P.

    Idle time of a step, for forward F, input gradient B, weight gradient W, free communication and
    M ≥ P (zb-h2: M ≥ 2P − 1): GPipe and 1F1B (P−1)(F+B+W), interleaved that over chunks, ZB-H1
    (P−1)(F+B−W), ZB-H2 (P−1)(F+B−2W). (arXiv 2401.10241, Table 2.) Raises ScheduleError for what
    cannot be.
    """
    for what, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ScheduleError(f"{what}={value!r}: expected a whole number, 1 or more")
    if not isinstance(name, str) or name not in SCHEDULES:
        raise ScheduleError(
            f"schedule {name!r} is unknown: expected one of {', '.join(map(repr, SCHEDULES))}"
        )
    if name != "interleaved" and chunks > 1:
        raise ScheduleError(
            f"chunks={chunks}: {name!r} has one stage a rank; expected chunks=1, or the "
            "schedule 'interleaved'"
        )
    if name == "interleaved" and microbatches % stages:
        raise ScheduleError(
            f"microbatches={microbatches}: 'interleaved' runs them in groups of one per rank; "
            f"expected a multiple of stages={stages}"
        )
    return Schedule([SCHEDULES[name](rank, stages, microbatches, chunks) for rank in range(stages)])


def schedule_for(
    given: str | Schedule, stages: int, microbatches: int | None, chunks: int
) -> Schedule:
    """The schedule that a trainer on so many ranks was given.

    Raises ScheduleError if it is for other numbers.
    """
    if not isinstance(given, Schedule):
        return schedule(
            given,
            stages=stages,
            microbatches=stages if microbatches is None else microbatches,
            chunks=chunks,
        )
    if len(given.ranks) != stages:
        raise ScheduleError(
            f"a schedule for {len(given.ranks)} ranks: expected one for the {stages} ranks of "
            "this pipeline"
        )
    if microbatches not in (None, given.microbatches):
        raise ScheduleError(
            f"microbatches={microbatches}, and the schedule has {given.microbatches}: leave it "
            "out, or say the same"
        )
    if chunks * stages not in (stages, len(given.placement)):
        raise ScheduleError(
            f"chunks={chunks}, and the schedule has {len(given.placement)} stages: expected "
            "the same, or leave it out"
        )
    return given


def gpipe(rank: int, p: int, m: int, chunks: int) -> list[str]:
    """All forwards, then all backwards."""
    return [f"{rank}F{i}" for i in range(m)] + [f"{rank}B{i}" for i in range(m)]


def one_forward_one_backward(rank: int, p: int, m: int, chunks: int) -> list[str]:
    """A warm-up of P − rank forwards, then in turn: at most P − rank microbatches are held."""
    warm_up = min(m, p - rank)
    actions = [f"{rank}F{i}" for i in range(warm_up)]
    for i in range(m):
        actions.append(f"{rank}B{i}")
        if i + warm_up < m:
            actions.append(f"{rank}F{i + warm_up}")
    return actions


def interleaved(rank: int, p: int, m: int, chunks: int) -> list[str]:
    """1F1B with several stages a rank.

    P microbatches pass the first stage of each rank, then the same P the second, and so on.
    """
    total = m * chunks

    def at(k: int, backward: bool) -> str:
        """The k-th forward (backward) of this rank."""
        group, inside = divmod(k, p * chunks)
        chunk, i = divmod(inside, p)
        chunk = chunks - 1 - chunk if backward else chunk
        return f"{chunk * p + rank}{'B' if backward else 'F'}{group * p + i}"

    warm_up = (
        min(total, (chunks - 1) * p + 2 * (p - rank - 1) + 1)
        if chunks > 1
        else min(total, p - rank)
    )
    actions = [at(k, backward=False) for k in range(warm_up)]
    for k in range(total):
        actions.append(at(k, backward=True))
        if k + warm_up < total:
            actions.append(at(k + warm_up, backward=False))
    return actions


def zero_bubble(rank: int, p: int, m: int, warm_up: int, delay: int) -> list[str]:
    """1F1B whose backward is split: I at once, since the stage before waits for it, and W
    `delay` microbatches later, in the bubble.
    """
    warm_up = min(m, warm_up)
    actions = [f"{rank}F{i}" for i in range(warm_up)]
    for i in range(m):
        actions.append(f"{rank}I{i}")
        if i >= delay:
            actions.append(f"{rank}W{i - delay}")
        if i + warm_up < m:
            actions.append(f"{rank}F{i + warm_up}")
    return actions + [f"{rank}W{i}" for i in range(max(0, m - delay), m)]


SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    # holds P microbatches
    "zb-h1": lambda rank, p, m, chunks: zero_bubble(rank, p, m, warm_up=p - rank, delay=rank),
    # holds 2P − 1
    "zb-h2": lambda rank, p, m, chunks: zero_bubble(
        rank, p, m, warm_up=2 * (p - rank) - 1, delay=2 * rank
    ),
}
