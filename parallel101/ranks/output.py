"""What ranks print, as it comes, each line with its rank before it."""

from __future__ import annotations

import codecs
import os
import socket
import sys


class Lines:
    """Takes a rank's raw output and writes whole lines of it to this process's stdout or stderr (a notebook's cell, there)."""

    KEPT = 8192  #  characters of the end, for messages about a rank that died

    def __init__(self, prefix: str, stream: str):
        self.prefix, self.stream = prefix, stream
        self.decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self.rest = ""
        self.tail = ""
        self.drawn = False  #  whether a bar stands on the line

    def feed(self, data: bytes) -> None:
        text = self.decode(data)
        self.tail = (self.tail + text)[-self.KEPT :]
        *lines, self.rest = (self.rest + text).split("\n")
        self._write([line.rpartition("\r")[2] for line in lines])
        if "\r" in self.rest:  #  a progress bar draws itself anew over the same line
            self.rest = self.rest.rstrip("\r").rpartition("\r")[2]
            self._out(f"\r{self.prefix}{self.rest}")
            self.drawn = True

    def close(self) -> None:
        """Write what was printed without a line's end."""
        if self.rest:
            self._write([self.rest])
            self.rest = ""

    def _write(self, lines: list[str]) -> None:
        if lines:
            self._out(("\r" if self.drawn else "") + "".join(f"{self.prefix}{line}\n" for line in lines))
            self.drawn = False

    def _out(self, text: str) -> None:
        stream = getattr(sys, self.stream)
        stream.write(text)
        stream.flush()


def read_some(end: int | socket.socket) -> bytes:
    """What can be read now; nothing when the other end is closed."""
    try:
        return os.read(end, 1 << 16) if isinstance(end, int) else end.recv(1 << 16)
    except OSError:
        return b""
