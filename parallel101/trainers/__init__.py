"""Trainers: one Trainer, put together from parts, and equal to one process whatever the parts.

trainer.py       the step, readable as the textbook's loop          layout.py       where every parameter lies
stage.py         the actions of a step: forward, backward           agreement.py    what the ranks agree on, errors included
gradients.py     naive, bucketed, overlapped all-reduce
data_parallel.py, sharded.py    the public trainers: two ways to put a Trainer together
zero/            ZeRO stages 1, 2 and 3                             schedules/      pipeline schedules as data, checked and timed
support/         arguments, optimizers, fit, checkpoints, memory
"""
