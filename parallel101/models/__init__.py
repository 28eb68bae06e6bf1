"""Models that know nothing of parallelism, and the text they learn: what the trainers are tried on.

The same seed gives the same weights on every rank and however a model is split; the same step gives
the same batch.
"""
