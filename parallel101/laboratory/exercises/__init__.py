"""The rules that several exercises of the homework share.

    sums, adjoint_exercises             collectives, and their backward passes
    training_exercises, mesh_exercises  a step of training on one axis and on several
    tensor_parallel_exercises, pipeline_exercises, attention_exercises
    estimate_exercises, estimate_answers, layout_choice   numbers worked out before a run
    bug_hunt                            programs with a fault that the seed draws
    harness                             the steps of training in which a learner's function runs
    wrong_values                        what a usual mistake gives: named if a run has it

Each builds cases, checks and usual mistakes out of grade/exercise.py and grade/exercise_checks.py.
The engine in grade/ knows none of them.
"""
