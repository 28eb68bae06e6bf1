"""Draws the picture of a learner's run.

It shows who waits for whom, whose data is where, or what each rank did over time.

a deadlock            ──▶ viz/deadlock.py
picture="collective"  ──▶ viz/collective.py
picture="lanes"       ──▶ viz/timeline.py
picture="pipeline"    ──▶ viz/pipeline_timeline.py
"""

from __future__ import annotations

from parallel101.laboratory.grade.exercise import Trial
from parallel101.laboratory.grade.exercise_report import ExerciseVerdict
from parallel101.laboratory.record.errors import DeadlockError
from parallel101.laboratory.viz.collective import collective_scene
from parallel101.laboratory.viz.pipeline_timeline import pipeline_scene
from parallel101.laboratory.viz.scene import Scene
from parallel101.laboratory.viz.timeline import lanes_scene


def draw(verdict: ExerciseVerdict, watched: Trial | None) -> tuple[Scene | None, str]:
    """Return the picture that shows most, or None if there is nothing to draw, and its caption.

    Args:
        verdict: of the runs that counted.
        watched: the run of the exercise's `watch` case, if it has one.
    """
    exercise, shown = verdict.exercise, verdict.shown
    for trial in (shown, watched):
        if trial is not None and isinstance(trial.error, DeadlockError):
            return trial.error.picture(), f"The deadlock with {trial.case.label}:"
    trial = watched or shown
    if trial is None or trial.error is not None or not trial.trace.events:
        return None, ""
    try:
        if exercise.picture == "collective":
            scene = collective_scene(trial.trace, trial.results if watched else None, idle=True)
        else:
            over_time = {"lanes": lanes_scene, "pipeline": pipeline_scene}[exercise.picture]
            scene = over_time(trial.trace, title=exercise.title)
        return scene, f"Your run with {trial.case.label}:"
    except ValueError:
        # more ranks or messages than the picture can show, or a wrong program with nothing to draw
        return None, ""
