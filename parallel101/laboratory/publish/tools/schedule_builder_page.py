"""The page on which the reader builds a pipeline schedule by hand.

    schedule_rules.js    what is possible, and how long it takes: the rules of Schedule.check
    schedule_builder.js  the schedule as it grows: placing, moving, removing, the address
    schedule_board.js    how it is drawn, the score and the code to copy; mouse, touch and keys

The published schedules that it compares with come from `schedule(…)`. What can be read without
a script, with the score of three ranks and six microbatches, is written here.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache

from parallel101.laboratory.publish.offline_page import Page, file_text, offline_html
from parallel101.laboratory.publish.templates import render
from parallel101.trainers.schedules.actions import ScheduleError
from parallel101.trainers.schedules.schedule import Schedule, schedule

PAGE = Page(
    "build_a_schedule.html",
    "Build a schedule",
    "Order the work of a pipeline by hand, and compare your schedule with published ones.",
    "pipeline schedules zero bubble editor",
)
RANKS, MICROBATCHES = range(2, 5), range(1, 9)
START = 3, 6  # ranks and microbatches when the page opens
CHUNKS = {"interleaved": 2}  # stages on a rank; the others have one
NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved, 2 stages a rank",
    "zb-h1": "ZB-H1",
    "zb-h2": "ZB-H2",
}
RULES = file_text("tools/schedule_rules.js")


def published(ranks: int, microbatches: int) -> dict[str, Schedule]:
    """Return the published schedules that exist for these numbers, by name."""
    found = {}
    for name in NAMES:
        with suppress(ScheduleError):  # interleaved needs a multiple of the ranks
            chunks = CHUNKS.get(name, 1)
            made = schedule(name, stages=ranks, microbatches=microbatches, chunks=chunks)
            made.check("nccl")
            found[name] = made
    return found


def score(made: Schedule, chunks: int) -> dict[str, float]:
    """Return the figures that the page compares, of a schedule whose ranks have so many stages.

    A rank's share of a microbatch takes 1 for each of F, I and W.
    """
    times = made.time(1 / chunks, 1 / chunks, 1 / chunks)
    work = sum(slot.end - slot.start for slot in times.slots) / len(made.ranks)
    rate = times.bubble_rate
    return {
        "step": times.makespan,  # from the first start to the last end
        "idle": work * rate / (1 - rate),  # of a rank, on average
        "bubble_rate": rate,
        "held": max(times.peak_activations) / chunks,  # microbatches, on the fullest rank
    }


def files() -> dict[str, str]:
    """Return the page, by its path."""
    return {PAGE.address: offline_html(PAGE.title, schedule_builder_page())}


@cache
def schedule_builder_page() -> str:
    """Return the body of the page."""
    lists = {
        f"{ranks},{microbatches}": {
            name: [" ".join(of_rank) for of_rank in made.actions]
            for name, made in published(ranks, microbatches).items()
        }
        for ranks in RANKS
        for microbatches in MICROBATCHES
    }
    return render(
        "schedule_builder",
        title=PAGE.title,
        ranks=RANKS,
        microbatches=MICROBATCHES,
        start=START,
        names=NAMES,
        scores={name: score(of, CHUNKS.get(name, 1)) for name, of in published(*START).items()},
        given={"names": NAMES, "chunks": CHUNKS, "lists": lists},
    )
