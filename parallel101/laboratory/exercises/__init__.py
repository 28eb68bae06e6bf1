"""The rules that several exercises of the homework share.

    wrong_values, adjoint_exercises     what usual mistakes give, in sums and elsewhere; functions
                                        with a backward
    training_exercises                  the steps of training in which a learner's function runs
    tensor_parallel_exercises, pipeline_exercises, attention_exercises
    estimate_exercises, estimate_answers, layout_choice   numbers worked out before a run
    bug_hunt                            programs with a fault that the seed draws

Each builds cases, checks and usual mistakes out of grade/exercise.py and grade/exercise_checks.py.
The engine in grade/ knows none of them.
"""
