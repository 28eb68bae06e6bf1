"""Callbacks that differ between one process and several ranks."""

from __future__ import annotations

from typing import Any

from parallel101.keras.installed import keras
from parallel101.keras.randomness import draw_alike
from parallel101.trainers.agreement import Agreement


class SameOrder(keras.callbacks.Callback):
    """Gives all ranks, before each epoch, the state of position 0's random numbers.

    On torch's backend, Keras shuffles with these numbers.
    """

    def __init__(self, agree: Agreement):
        super().__init__()
        self.agree = agree

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        draw_alike(self.agree)


class BackupElsewhere(keras.callbacks.BackupAndRestore):
    """A BackupAndRestore on the ranks that write no files.

    They read files, and they take part in gathering the weights that position 0 writes.
    """

    def __init__(self, callback: Any):
        self.__dict__ = callback.__dict__

    def _save_model(self) -> None:
        self.model.save_weights(self._weights_path)

    def on_train_end(self, logs: Any = None) -> None:
        """Do nothing: position 0 deletes the files."""
