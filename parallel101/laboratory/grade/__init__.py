"""Grades homework: runs a learner's functions on ranks, and judges what the record shows.

    exercise.py    what an exercise is: cases, checks, misconceptions, hints (data)
    exercise_checks.py, compared_values.py
                   the checks and misconceptions that many exercises share, and how values differ
    rank.py, isolation.py
                   a rank that runs the learner's code, and what that code can't reach
    remote.py      the grader's side: the rank's messages on the sim
    frames.py      what rank.py and remote.py send each other
    grading.py     runs the cases, judges the checks and counts the points
    exercise_report.py
                   the verdict that the learner sees, and how a run may end early, in words
    learner.py     p101.check, p101.hint and p101.predict: adds a picture, the predictions and the
                   progress (homework.py)
    handed_in.py, submissions.py
                   reads what was handed in, and grades one submission or a class
    grades.py      results as JSON, CSV and Gradescope's, the tables of a learner and a class, and a
                   page of feedback
    release.py     what a teacher hands out, if it gives no solution away

The rules that exercises of one kind share are in exercises/, beside this folder. The grade is
decided in a process that never runs the learner's code.
"""
