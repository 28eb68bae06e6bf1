"""Keras 3 models on torch's backend, trained by several ranks: `ParallelKeras`.

Needs `pip install "parallel101[keras]"`.
"""

from parallel101.keras.installed import keras  # first: if Keras is missing, the error says so
from parallel101.keras.model import ParallelKeras

__all__ = ["ParallelKeras"]
