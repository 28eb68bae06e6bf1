"""Pipeline schedules as data: for each rank the list of what it does, in
torch.distributed.pipelining's text form.

The same lists are run by the trainers, checked and timed (simulation.py). Those that were published
are in gpipe_1f1b_zero_bubble.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parallel101.trainers.schedules.actions import FSDP, Action, ScheduleError
from parallel101.trainers.schedules.gpipe_1f1b_zero_bubble import SCHEDULES
from parallel101.trainers.schedules.simulation import Cost, ScheduleTime, simulate, summary


class Schedule:
    """For each rank the actions of a step, in order.

    Attributes:
        ranks: by rank, the parsed actions.
        placement: by global stage, the rank that has it.
        microbatches: how many a step has.

    Example:
        >>> schedule = p101.Schedule([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])
        >>> schedule.check("nccl")
        >>> times = schedule.time(1, 1, 1)
        >>> times.makespan, times.peak_activations
        (9.0, [2, 1])
    """

    def __init__(self, actions: Sequence[Sequence[str]]):
        if not isinstance(actions, (list, tuple)) or not all(
            isinstance(of_rank, (list, tuple)) for of_rank in actions
        ):
            raise ScheduleError(
                f"Schedule({actions!r}): expected a list for each rank, such as [['0F0', "
                "'0B0'], ['1F0', '1B0']]"
            )
        self.ranks = tuple(tuple(Action.parse(text) for text in of_rank) for of_rank in actions)
        self.placement = dict(
            sorted({part.stage: rank for rank, part in reversed(list(self.parts()))}.items())
        )
        self.microbatches = 1 + max((part.microbatch for _, part in self.parts()), default=-1)

    @property
    def actions(self) -> list[list[str]]:
        """The actions by rank, as texts: a copy, so that nothing changes what `check` has seen."""
        return [[str(action) for action in of_rank] for of_rank in self.ranks]

    def parts(self) -> Iterator[tuple[int, Action]]:
        """Yield (rank, action) of everything that is computed or sent, with overlaps split up."""
        for rank, of_rank in enumerate(self.ranks):
            for action in of_rank:
                yield from ((rank, part) for part in action.computed())

    def check(self, rules: str = "gloo") -> None:
        """Raise ScheduleError if the schedule cannot be run, and name the action: missing, twice,
        too early, or waiting in a cycle.

        Args:
            rules: "gloo" or "nccl", for sends and receives that are in the lists. On gloo each is
                under way by itself. On NCCL those of a rank go one by one, in the order of its
                list, as torch's pipelining posts them. Lists of compute only have no such cycle:
                our executor has a group for each direction.
        """
        simulate(self, rules, (0.0, 0.0, 0.0), 0.0)

    def time(
        self,
        forward: Cost = 1.0,
        input_grad: Cost = 1.0,
        weight_grad: Cost = 1.0,
        communication: float = 0.0,
    ) -> ScheduleTime:
        """Return the time that a step would take; nothing is computed.

        Raises ScheduleError for a schedule that cannot be run.

        Args:
            forward, input_grad, weight_grad: seconds of F, I and W, each a number, or one for each
                global stage. B takes I + W, and its gradient leaves at its end. What a backward
                computes again belongs to I.
            communication: seconds until a result arrives at another rank, one number. It occupies
                neither rank.
        """
        slots = simulate(self, "gloo", (forward, input_grad, weight_grad), communication)
        return summary(len(self.ranks), slots)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.actions == other.actions

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"<Schedule: {len(self.ranks)} ranks, {len(self.placement)} stages, "
            f"{self.microbatches} microbatches>"
        )

    def to_csv(self) -> str:
        """Return one line per rank, as torch.distributed.pipelining writes and reads schedules."""
        return "".join(",".join(of_rank) + "\n" for of_rank in self.actions)

    @classmethod
    def from_csv(cls, text: str) -> Schedule:
        """Read torch's CSV: compute only or with its sends and receives, whose order is kept.

        Empty cells (idle slots) and FSDP's actions (UNSHARD, RESHARD, REDUCE_GRAD) are left out.
        """
        rows = [[cell.strip() for cell in line.split(",")] for line in text.strip().splitlines()]
        return cls([[cell for cell in row if cell and not cell.endswith(FSDP)] for row in rows])


def schedule(name: str, *, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return a published schedule.

    Args:
        name: "gpipe", "1f1b", "interleaved", "zb-h1" or "zb-h2".
        stages: number of ranks P. microbatches: M in a step.
        chunks: stages on each rank, for "interleaved"; global stage s is on rank s mod P.

    Idle time of a step, for forward F, input gradient B, weight gradient W, free communication and
    M ≥ P (zb-h2: M ≥ 2P − 1): GPipe and 1F1B (P−1)(F+B+W), interleaved that over chunks, ZB-H1
    (P−1)(F+B−W), ZB-H2 (P−1)(F+B−2W). (arXiv 2401.10241, Table 2.) Raises ScheduleError for what
    cannot be.

    Example:
        >>> p101.schedule("1f1b", stages=2, microbatches=3).actions
        [['0F0', '0F1', '0B0', '0F2', '0B1', '0B2'], ['1F0', '1B0', '1F1', '1B1', '1F2', '1B2']]
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
            f"chunks={chunks}: {name!r} has one stage per rank; expected chunks=1, or the "
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
    """Return the schedule that a trainer on this many ranks was given.

    Raises ScheduleError if it is for other numbers.
    """
    if not isinstance(given, Schedule):
        return schedule(
            given,
            stages=stages,
            microbatches=stages if microbatches is None else microbatches,
            chunks=chunks,
        )
    has = len(given.ranks), given.microbatches, len(given.placement)
    if (stages, microbatches or has[1]) != has[:2] or chunks * stages not in (stages, has[2]):
        raise ScheduleError(
            f"the schedule is for {has[0]} ranks, {has[1]} microbatches and {has[2]} stages: "
            f"expected one for the {stages} ranks of this pipeline, and microbatches and chunks "
            f"(here {microbatches} and {chunks}) left out, or the same"
        )
    return given
