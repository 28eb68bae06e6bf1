"""Text that comes from a learner, as it can be shown anywhere: in a terminal, a file, a table.

"\\x1b[2J"              ──▶  "\\\\x1b[2J"        no escape sequence reaches the teacher's terminal
3.9 million characters  ──▶  the first and the last ones, and how many there were
a file name in Latin-1  ──▶  "j\\\\xf6rg"         it can be printed, and written as UTF-8
"=1+1" in a CSV cell    ──▶  "'=1+1"           a spreadsheet shows it, and computes nothing
"""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path

MOST = 2000  # characters of one text
MOST_NAME = 100  # of a file's name
# control characters, halves of surrogate pairs, line separators; and marks that turn the direction
# of what is printed
HIDDEN = ("Cc", "Cs", "Zl", "Zp")
TURNING = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def plain(text: str, most: int = MOST) -> str:
    """Return a text of about `most` characters, without control characters.

    Line ends and tabs stay.
    """
    if len(text) > most:
        last = most // 4
        left_out = len(text) - most
        text = f"{text[: most - last]} … ({left_out:,} characters left out) … {text[-last:]}"
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(_visible(character) for character in text)


def plain_name(path: Path | str) -> str:
    """Return the name of a file or folder, in one line."""
    name = os.path.basename(os.fsdecode(path))
    return plain(name, MOST_NAME).replace("\n", "\\n").replace("\t", "\\t")


def cell(value: object) -> object:
    """Return a value for a CSV file, with text that begins like a formula marked as text."""
    begins = ("=", "+", "-", "@", "\t", "\r")
    return f"'{value}" if isinstance(value, str) and value.startswith(begins) else value


def write_whole(path: Path, text: str) -> None:
    """Write a file whole: a reader sees the old content or the new one."""
    partial = path.with_name(f".{os.getpid()}.part")
    # a name may have characters that UTF-8 lacks
    partial.write_text(text, encoding="utf-8", errors="replace")
    partial.replace(path)


def _visible(character: str) -> str:
    if character in "\n\t" or not (
        unicodedata.category(character) in HIDDEN or character in TURNING
    ):
        return character
    if "\udc80" <= character <= "\udcff":  # a byte of a file name that isn't UTF-8
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()
