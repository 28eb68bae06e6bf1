"""Shows what ranks print, line by line as it arrives, with the rank before each line.

rank's stdout, stderr ──▶ RankOutput: whole lines, "[rank 2] …"
                              ├▶ Screen: this process's stdout, stderr (a notebook's cell)
                              └▶ LongOutput: what is too long for a cell, folded
"""

from __future__ import annotations

import codecs
import io
import re
import socket
import sys
import time
from html import escape
from typing import Any

# What gloo's C++ prints when it aborts a rank. The error that the launch raises explains it. A rank
# that is ended while it prints leaves the beginning of a line.
GLOO_ABORT = re.compile(
    r"terminate called (after throwing an instance of 'gloo::|without an active exception)"
    r"|  what\(\): +(\[enforce fail|.*/gloo/|$)"
    r"|\[E\S* \S+ ProcessGroupGloo\.cpp:\d+\] Gloo connectFullMesh failed"
)


class Screen:
    """The line to which a launch writes next.

    It is empty, or holds a progress bar, which is redrawn in place.
    """

    def __init__(self) -> None:
        # of the bar on the terminal, or on each stream that isn't a terminal
        self.widths: dict[str, int] = {}
        self.closed = False  # nobody reads the output any more (`| head`): this raises once
        self.room = LongOutput.AFTER  # lines that a notebook's cell still shows as they come
        self.long: LongOutput | None = None

    def lines(self, stream: str, lines: list[str]) -> None:
        """Write whole lines. The first one overwrites a bar."""
        rest: list[str] = []
        if writes_to_a_cell():
            lines, rest = lines[: self.room], lines[self.room :]
            self.room -= len(lines)
        if lines:
            out, line, width = self._at(stream)
            self.widths[line] = 0
            text = "\n".join([lines[0].ljust(width), *lines[1:]])
            self._write(out, f"\r{text}\n" if width else f"{text}\n")
        if rest:
            self.long = self.long or LongOutput()
            self.long.add(rest)

    def bar(self, stream: str, text: str) -> None:
        """Draw a bar. It overwrites the one that is there, whichever rank drew that."""
        out, line, width = self._at(stream)
        self.widths[line] = len(text)
        self._write(out, "\r" + text.ljust(width))

    def close(self) -> None:
        """Show the last lines, at the end of a launch."""
        if self.long:
            self.long.show()

    def _at(self, stream: str):
        out = getattr(sys, stream)
        line = "terminal" if getattr(out, "isatty", bool)() else stream
        return out, line, self.widths.get(line, 0)

    def _write(self, out, text: str) -> None:
        # None: this process has no such stream (a daemon, pythonw). print() writes nothing there
        # either
        if self.closed or out is None:
            return
        try:
            try:
                out.write(text)
            except UnicodeEncodeError:  # the terminal lacks a character: show its code
                out.write(text.encode(out.encoding, "backslashreplace").decode(out.encoding))
            out.flush()
        except (OSError, ValueError):
            self.closed = True
            raise


class LongOutput:
    """The lines of a launch after the first 400, in a notebook.

    The last 20 are shown, and the reader can open the rest. A cell with 80,000 lines would make
    JupyterLab and the lesson's page slow.
    """

    AFTER, LAST = 400, 20  # lines
    KEPT = 20 << 20  # characters of folded lines
    EVERY = 0.25  # seconds between two updates

    def __init__(self) -> None:
        self.count = self.size = 0
        self.folded: list[str] = []
        self.last: list[str] = []
        self.display: Any = None
        self.updated = 0.0

    def add(self, lines: list[str]) -> None:
        self.count += len(lines)
        self.last += lines
        older, self.last = self.last[: -self.LAST], self.last[-self.LAST :]
        if self.size < self.KEPT:
            self.folded += older
            self.size += sum(map(len, older))
        if time.monotonic() - self.updated > self.EVERY:
            self.show(folded=False)

    def show(self, folded: bool = True) -> None:
        """Show all of it, with the folded lines. Until then the cell shows how many there are."""
        from IPython.display import HTML, display  # there is IPython, since this is a notebook

        older, html = self.count - len(self.last), ""
        if folded and self.folded:
            kept = len(self.folded)
            left_out = f" (the first {kept:,} of them)" if kept < older else ""
            html = (
                f"<details><summary>{older:,} more lines{left_out}</summary>"
                f"<pre>{escape(chr(10).join(self.folded))}</pre></details>"
            )
        elif older:
            html = f"<p>… {older:,} more lines</p>"
        shown = HTML(f"{html}<pre>{escape(chr(10).join(self.last))}</pre>")
        self.updated = time.monotonic()
        if self.display is None:
            self.display = display(shown, display_id=True)
        else:
            self.display.update(shown)


def writes_to_a_cell() -> bool:
    """Return whether this process's output goes to a notebook's cell, and is not redirected."""
    return type(sys.stdout).__module__.startswith("ipykernel")


class RankOutput:
    """Writes the raw bytes of a rank's stdout or stderr to this process's, line by line."""

    KEPT = 8192  # characters at the end, for the error about a rank that died

    def __init__(self, prefix: str, stream: str, screen: Screen | None = None):
        self.prefix, self.stream = prefix, stream
        self.screen = screen or Screen()
        self.decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self.rest = ""  # of a line whose end has not come yet
        self.tail = ""
        self.gloo_abort: list[str] = []

    def feed(self, data: bytes, final: bool = False) -> None:
        text = self.decode(data, final)
        self.tail = (self.tail + text)[-self.KEPT :]
        *lines, self.rest = (self.rest + text).split("\n")
        self._write([line.rstrip("\r").rpartition("\r")[2] for line in lines])
        if "\r" in self.rest:  # a progress bar, which redraws its line
            self.rest = self.rest.rstrip("\r").rpartition("\r")[2]
            self.screen.bar(self.stream, self.prefix + self.rest)

    def close(self, explained: bool = False) -> None:
        """Write the last line, which may lack its end.

        Write gloo's abort messages too, unless an error is about to explain them.
        """
        self.feed(b"", final=True)
        self._write([self.rest] if self.rest else [])
        self.rest = ""
        if self.gloo_abort and not explained:
            self.screen.lines(self.stream, [self.prefix + line for line in self.gloo_abort])
        self.gloo_abort = []

    def _write(self, lines: list[str]) -> None:
        self.gloo_abort += [line for line in lines if GLOO_ABORT.match(line)]
        if others := [self.prefix + line for line in lines if not GLOO_ABORT.match(line)]:
            self.screen.lines(self.stream, others)


def read_available(channel: io.FileIO | socket.socket) -> bytes:
    """Return the bytes that can be read now; nothing when the other end is closed."""
    read = channel.recv if isinstance(channel, socket.socket) else channel.read
    try:
        return read(1 << 16) or b""
    except OSError:
        return b""
