"""A module that logs in a format of its own: it adds a handler when it is imported."""

import logging

lines: list[str] = []


class Collected(logging.Handler):
    """A handler that keeps what it gets."""

    def emit(self, record: logging.LogRecord) -> None:
        lines.append(self.format(record))


log = logging.getLogger("own_logger")
log.addHandler(Collected())
log.setLevel(logging.INFO)
