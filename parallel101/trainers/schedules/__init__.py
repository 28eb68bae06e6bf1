"""Pipeline schedules as data: generated (schedule.py), proved to run and timed (simulation.py).

Nothing is computed here.
"""
