"""`pytest homework/hw1_moving` grades homework 1: each exercise is a test.

A table of points is at the end.
"""

from parallel101.laboratory.grade.pytest_plugin import (  # noqa: F401
    pytest_pycollect_makeitem,
    pytest_terminal_summary,
)
