"""Draws the picture of a learner's run.

It shows who waits for whom, whose data is where, or what each rank did over time.

a deadlock            ──▶ viz/deadlock.py
picture="collective"  ──▶ viz/collective.py
picture="lanes"       ──▶ viz/lanes.py
picture="pipeline"    ──▶ viz/pipeline_timeline.py
"""

from __future__ import annotations

from typing import NamedTuple

from parallel101.laboratory.grade.exercise import Trial
from parallel101.laboratory.grade.exercise_checks import right
from parallel101.laboratory.grade.grading import ExerciseVerdict
from parallel101.laboratory.record.errors import DeadlockError
from parallel101.laboratory.viz.collective import collective_scene
from parallel101.laboratory.viz.lanes import lanes_scene
from parallel101.laboratory.viz.pipeline_timeline import pipeline_scene
from parallel101.laboratory.viz.scene import Scene


class Picture(NamedTuple):
    """A picture, and the run that it shows.

    `failed` is the run for which the value got no points, if there is one.
    """

    scene: Scene
    trial: Trial
    failed: Trial | None = None

    @property
    def caption(self) -> str:
        """A sentence that says which run it is, and whether its values are right."""
        label = self.trial.case.label
        if isinstance(self.trial.error, DeadlockError):
            return f"The deadlock with {label}:"
        if not right(self.trial):
            return f"Your run with {label}. Its values are wrong:"
        if self.failed is None:
            return f"Your run with {label}. Its values are right:"
        if self.failed is self.trial:
            return f"Your run with {label}. The verdict says why its values don't count:"
        return f"Your run with {label}. Not right yet is the one with {self.failed.case.label}:"


def draw(verdict: ExerciseVerdict, watched: Trial | None) -> Picture | None:
    """Return the picture that shows most, or None if there is nothing to draw.

    Args:
        verdict: of the runs that counted.
        watched: the run of the exercise's `watch` case, if it has one.
    """
    exercise, shown = verdict.exercise, verdict.shown
    failed = shown if verdict.points_lost("value") else None
    for trial in (shown, watched):
        if trial is not None and isinstance(trial.error, DeadlockError):
            return Picture(trial.error.picture(), trial)
    trial = watched or shown
    if trial is None or trial.error is not None or not trial.trace.events:
        return None
    try:
        if exercise.picture == "lanes":
            return Picture(lanes_scene(trial.trace, title=exercise.title), trial, failed)
        if exercise.picture == "pipeline":
            return Picture(pipeline_scene(trial.trace, title=exercise.title), trial, failed)
        scene = collective_scene(trial.trace, trial.results if watched else None, idle=True)
        return Picture(scene, trial, failed)
    except ValueError:
        # more ranks or messages than the picture can show, or a wrong program with nothing to draw
        return None
