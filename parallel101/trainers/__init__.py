"""Trainers: one Trainer, put together from parts, and equal to one process whatever the parts.

trainer.py        the step, readable as the textbook's loop        layout.py      where every parameter lies
stage.py          the actions of a step: forward, backward         agreement.py   what ranks agree on, errors included
gradients.py      naive, bucketed, overlapped all-reduce           optimizers.py, checkpoint.py, fit.py, memory.py   support
zero.py, unshard.py, flat.py    ZeRO 1 and 2, ZeRO 3, and the flat arrays that they share
schedules.py      the actions of every rank, as data               schedule_check.py, schedule_time.py   can it be run, and how long
data_parallel.py, sharded.py    the public trainers: two ways to put a Trainer together
"""
