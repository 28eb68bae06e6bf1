"""`pytest homework/hw1_moving` grades homework 1: each exercise is a test.

A table of points is at the end.
"""

from parallel101.grade.pytest_plugin import pytest_pycollect_makeitem, pytest_terminal_summary  # noqa: F401
