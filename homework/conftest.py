"""`pytest homework/hw1_moving` grades homework 1: each exercise is a test, and a table of
points stands at the end.
"""

from parallel101.grade.pytest_plugin import pytest_pycollect_makeitem, pytest_terminal_summary  # noqa: F401
