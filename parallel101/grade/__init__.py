"""Grades homework: runs a learner's functions on ranks, and judges what the record shows.

    exercise.py    what an exercise is: cases, checks, misconceptions, hints (data)
    checks.py      the checks and misconceptions that many exercises share
    rank.py        a rank that runs the learner's code                  ┐ frames.py: what they send each other
    remote.py      the grader's side: the rank's messages on the sim    ┘
    grading.py     cases run, checks judged, points

The grade is decided in a process that never runs the learner's code.
"""
