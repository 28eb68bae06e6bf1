"""Pipeline schedules as data: published ones, and how any is checked and timed (schedule.py).

Nothing is computed here.
"""
