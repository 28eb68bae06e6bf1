"""The same cases on ranks that `launch` starts: gloo, sim or NCCL.

It shows that a solution is a real program, and grades nothing.

What counts is graded on ranks whose messages pass through the grader: see remote.py.
"""

from __future__ import annotations

from typing import Any

import torch

from parallel101.laboratory.grade.exercise import (
    Case,
    Exercise,
    Trial,
    exercises_in,
    find,
    module_of,
)
from parallel101.laboratory.grade.remote import Submission
from parallel101.laboratory.ranks.launch import launch
from parallel101.laboratory.record.errors import DeadlockError, LaunchTimeout, RankFailed


def run_launched(
    exercise: Exercise, submission: Submission, case: Case, backend: str, rules: str = "gloo"
) -> Trial:
    """Run one case on "gloo", "sim" or "nccl". A run that fails is a trial with that error."""
    sim = backend == "sim"
    try:
        run = launch(
            run_case,
            exercise,
            submission.source,
            str(submission.path),
            list(case.arguments),
            case.seed,
            world_size=case.world_size,
            backend=backend,
            trace=True,
            network=case.network if sim else None,
            rules=rules,
            timeout=60.0,
        )
    except (DeadlockError, RankFailed, LaunchTimeout) as error:
        trace = error.trace  # type: ignore[union-attr]
        return Trial(case, [None] * case.world_size, trace, error, world=backend)
    assert run.trace is not None
    return Trial(case, run.results, run.trace, world=backend)


def run_case(exercise: Exercise, source: str, path: str, arguments: list[tuple], seed: int) -> Any:
    """What each rank does."""
    import torch.distributed as dist

    declared = find(
        exercises_in(module_of(exercise.path, exercise.source, "parallel101_exercises")),
        exercise.function,
    )
    learner = module_of(path, source, "homework", register=True)
    torch.manual_seed(seed)
    device = torch.get_default_device()
    mine = [
        part.clone().to(device) if isinstance(part, torch.Tensor) else part
        for part in arguments[dist.get_rank()]
    ]
    return declared.program(getattr(learner, exercise.function), *mine)
