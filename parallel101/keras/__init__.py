"""Keras 3 models on torch's backend, trained by several ranks: `ParallelKeras`.

Needs `pip install "parallel101[keras]"`, and Keras with torch as its backend: whatever is imported
from here fails with a clear error otherwise.
"""

from __future__ import annotations

import os

from parallel101.extras import MissingExtra, needs_extra

SET_BACKEND = (
    "Set the environment variable KERAS_BACKEND=torch before keras is imported: "
    'os.environ["KERAS_BACKEND"] = "torch"'
)

try:
    with needs_extra("p101.keras"):
        import keras
except MissingExtra:
    raise
except ModuleNotFoundError as error:
    raise ImportError(
        f"keras cannot import its backend {os.environ.get('KERAS_BACKEND', 'tensorflow')!r}: "
        f"{error}. {SET_BACKEND}"
    ) from error
if keras.config.backend() != "torch":
    raise ImportError(
        f"keras uses the backend {keras.config.backend()!r}, and p101.keras needs torch's. "
        f"{SET_BACKEND}"
    )

from parallel101.keras.model import ParallelKeras  # noqa: E402  after the check

__all__ = ["ParallelKeras"]
