"""Draws the picture of a learner's run.

It shows who waits for whom, whose data is where, or what each rank did over time.

a deadlock            ──▶ viz/deadlock.py
picture="collective"  ──▶ viz/collective.py
picture="lanes"       ──▶ viz/lanes.py
picture="pipeline"    ──▶ viz/pipeline_timeline.py
"""

from __future__ import annotations

from typing import NamedTuple

from parallel101.grade.exercise import Exercise, Trial
from parallel101.grade.exercise_checks import right
from parallel101.record.errors import DeadlockError
from parallel101.viz.collective import collective_scene
from parallel101.viz.lanes import lanes_scene
from parallel101.viz.pipeline_timeline import pipeline_scene
from parallel101.viz.scene import Scene

SHOWN_SECONDS = 20.0  # of wall time, for the runs that are only shown


class Picture(NamedTuple):
    """A picture, and the run that it shows."""

    scene: Scene
    trial: Trial

    @property
    def caption(self) -> str:
        """Which run it is, and whether its values are right."""
        if isinstance(self.trial.error, DeadlockError):
            return f"The deadlock with {self.trial.case.label}:"
        return (
            f"Your run with {self.trial.case.label}. Its values are "
            f"{'right' if right(self.trial) else 'wrong'}:"
        )


def draw(exercise: Exercise, shown: Trial | None, watched: Trial | None) -> Picture | None:
    """The picture that shows most, or None if there is nothing to draw.

    Args:
        exercise: says how its runs are drawn.
        shown: the run on which the verdict rests: the first that failed, or the last.
        watched: the run of the exercise's `watch` case, if it has one.
    """
    for trial in (shown, watched):
        if trial is not None and isinstance(trial.error, DeadlockError):
            return Picture(trial.error.picture(), trial)
    trial = watched or shown
    if trial is None or trial.error is not None or not trial.trace.events:
        return None
    try:
        if exercise.picture == "lanes":
            return Picture(lanes_scene(trial.trace, title=exercise.title), trial)
        if exercise.picture == "pipeline":
            return Picture(pipeline_scene(trial.trace, title=exercise.title), trial)
        return Picture(
            collective_scene(trial.trace, trial.results if watched else None, idle=True), trial
        )
    except ValueError:
        # more ranks or messages than the picture can show, or a wrong program with nothing to draw
        return None
