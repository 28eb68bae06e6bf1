"""Trainers: one Trainer, put together from parts, and equal to one process whatever the parts.

trainer.py       the step, readable as the textbook's loop          layout.py       where every parameter lies
executor.py      the actions of a step, carried out                 agreement.py    what the ranks agree on, errors included
prepare.py       from the whole model to this rank's part of it     support/        arguments, optimizers, fit, checkpoints, memory

shares.py        do the ranks' shares of a batch fit together?     verify/         before the first step: equal to one process?

data_parallel.py, sharded.py, hybrid.py    the public trainers: ways to put a Trainer together
gradients.py     naive, bucketed, overlapped all-reduce             zero/           ZeRO stages 1, 2 and 3
tensor_parallel.py    column, row, vocabulary: both directions      tensor/         which layers a plan cuts, and the rest of it
pipeline/        stages, and the messages between them              schedules/      pipeline schedules as data, checked and timed
weight_gradients.py    ∂W, computed later than ∂x
"""
