"""Pipeline schedules as data: generated (schedule.py), proved to run (check.py) and timed
(time.py). Nothing is computed here.
"""
