"""Trainers: one interface, `step` and `fit`, and a strategy behind it: who holds which weights, who sees which samples, and what is sent.

Every one of them minimises the mean loss of the whole batch and is equal to one process; see trainer.py for what they share.
"""
