"""Python's logging: each virtual rank has its own root logger, and its own loggers.

    rank 0: logging.basicConfig(level=INFO) ──▶ rank 0's handlers ─┐
    rank 1: logging.basicConfig(level=WARN) ──▶ rank 1's handlers ─┘
        logging.root has the attributes of the rank that runs; a switch exchanges them

There is one root logger object, since the loggers of libraries hold it as their parent. Loggers
that were made before the run are shared: those of torch, for example.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

LOGGING: Any = logging  # with the names that the type checker does not know


class LoggingStates:
    """The logging of each rank; rank 0's is in use first."""

    def __init__(self, size: int):
        self.before_run = _in_use()
        self.own = [_copy(*self.before_run[:2]) for _ in range(size)]
        _use(self.own[0])

    def switch(self, new: int) -> None:
        """Rank `new` runs."""
        _use(self.own[new])

    def restore(self) -> None:
        _use(self.before_run)


# of the root logger; of the table of loggers; handlers, for dictConfig
State = tuple[dict[str, Any], dict[str, Any], Any, list[Any]]


def _in_use() -> State:
    return vars(logging.root), vars(logging.root.manager), LOGGING._handlers, LOGGING._handlerList


def _use(state: State) -> None:
    (
        logging.root.__dict__,
        logging.root.manager.__dict__,
        LOGGING._handlers,
        LOGGING._handlerList,
    ) = state


def _copy(root: dict[str, Any], manager: dict[str, Any]) -> State:
    """A rank's own state: as it was before the run, and what the rank changes is its own."""
    own_root = {
        **root,
        "handlers": list(root["handlers"]),
        "filters": list(root["filters"]),
        "_cache": {},
    }
    return (
        own_root,
        {**manager, "loggerDict": dict(manager["loggerDict"])},
        weakref.WeakValueDictionary(),
        [],
    )
