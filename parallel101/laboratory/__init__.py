"""What runs the subject, records it, draws it and grades it.

    ranks      brings ranks to life; hands back their results, output and failures
    sim        torch's collectives on a virtual clock
    record     every message of a run, and who waits for whom
    analysis   what a record says; no drawing
    viz        pictures of it
    grade      grades homework: a graded run, checks, points, reports, classes
    exercises  the rules that several exercises share
    planner    compares the layouts of a model on many GPUs
    publish    lessons, runs and references as pages
    bench      measures all of it beside its peers

The folders beside this one are what is taught. They import nothing from here, except through the
functions that tests/project/test_arrows.py lists.
"""

import sys

PACKAGE = sys.modules["parallel101"].__path__[0]  # the folder of all of it
