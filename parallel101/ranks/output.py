"""What ranks print, as it comes, each line with its rank before it."""

from __future__ import annotations

import codecs
import io
import re
import socket
import sys

#  gloo's own last words: what they mean stands in the error that the launch raises
LAST_WORDS = re.compile(
    r"terminate called (after throwing an instance of 'gloo::|without an active exception)"
    r"|  what\(\): .*/gloo/|\[E\S* \S+ ProcessGroupGloo\.cpp:\d+\] Gloo connectFullMesh failed"
)


class Screen:
    """What stands on the line on which a launch writes: nothing, or a progress bar that draws itself anew."""

    def __init__(self) -> None:
        self.widths: dict[str, int] = {}
        self.gone = False  #  nobody reads what is written any more (`| head`): that is an error, once

    def lines(self, stream: str, lines: list[str]) -> None:
        """Write whole lines, the first one over a bar that stands there."""
        out, place, width = self._at(stream)
        self.widths[place] = 0
        self._write(out, ("\r" if width else "") + "".join(f"{line}\n" for line in [lines[0].ljust(width), *lines[1:]]))

    def bar(self, stream: str, text: str) -> None:
        """Draw a bar over the one that stands there, whichever rank's it is."""
        out, place, width = self._at(stream)
        self.widths[place] = len(text)
        self._write(out, "\r" + text.ljust(width))

    def _at(self, stream: str):
        out = getattr(sys, stream)
        place = "terminal" if getattr(out, "isatty", bool)() else stream
        return out, place, self.widths.get(place, 0)

    def _write(self, out, text: str) -> None:
        if self.gone:
            return
        try:
            _write(out, text)
        except (OSError, ValueError):
            self.gone = True
            raise


class Lines:
    """Takes a rank's raw output and writes whole lines of it to this process's stdout or stderr (a notebook's cell, there)."""

    KEPT = 8192  #  characters of the end, for messages about a rank that died

    def __init__(self, prefix: str, stream: str, screen: Screen | None = None):
        self.prefix, self.stream = prefix, stream
        self.screen = screen or Screen()
        self.decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self.rest = ""
        self.tail = ""
        self.held: list[str] = []  #  gloo's last words

    def feed(self, data: bytes, final: bool = False) -> None:
        text = self.decode(data, final)
        self.tail = (self.tail + text)[-self.KEPT :]
        *lines, self.rest = (self.rest + text).split("\n")
        self._write([line.rstrip("\r").rpartition("\r")[2] for line in lines])
        if "\r" in self.rest:  #  a progress bar draws itself anew over the same line
            self.rest = self.rest.rstrip("\r").rpartition("\r")[2]
            self.screen.bar(self.stream, self.prefix + self.rest)

    def close(self, explained: bool = False) -> None:
        """Write what was printed without a line's end, and gloo's last words, unless an error that is about to be raised explains them."""
        self.feed(b"", final=True)
        self._write([self.rest] if self.rest else [])
        self.rest = ""
        if self.held and not explained:
            self.screen.lines(self.stream, [self.prefix + line for line in self.held])
        self.held = []

    def _write(self, lines: list[str]) -> None:
        self.held += [line for line in lines if LAST_WORDS.match(line)]
        if told := [self.prefix + line for line in lines if not LAST_WORDS.match(line)]:
            self.screen.lines(self.stream, told)


def _write(out, text: str) -> None:
    if out is None:  #  this process has no such stream (a daemon, pythonw): print() too writes nothing there
        return
    try:
        out.write(text)
    except UnicodeEncodeError:  #  a terminal of few characters is no reason to end a run
        out.write(text.encode(out.encoding, "backslashreplace").decode(out.encoding))
    out.flush()


def read_some(end: io.FileIO | socket.socket) -> bytes:
    """What can be read now; nothing when the other end is closed."""
    try:
        return (end.recv(1 << 16) if isinstance(end, socket.socket) else end.read(1 << 16)) or b""
    except OSError:
        return b""
