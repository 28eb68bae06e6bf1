"""The types of the command line's options.

Each is an `Annotated` type: the function that reads an option's text, and raises ValueError if it
can't, and the word for the value in the help. Nothing heavy is imported until a text is read.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

UNITS = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
AMOUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([kMG]i?|Ki|)")


def reader(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return the function with which argparse reads a text, and whose errors it shows."""

    def read(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def seconds(text: str) -> float:
    value = float(text) if text.replace(".", "", 1).isdecimal() else 0.0
    if not value:
        raise ValueError(
            f"{text} is not a valid time limit; expected a finite number of seconds greater than 0"
        )
    return value


def output_file(text: str) -> Path:
    """Make the folder of a file now, so that a run isn't lost when the file is written."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"can't write {text}: {error.strerror}") from None
    if path.is_dir():
        raise ValueError(f"{text} is a folder; expected the name of a file")
    return path


def first_and_last(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise ValueError(f"{text} is not a range of steps; expected FIRST:LAST, such as 100:120")
    return int(first), int(last)


def whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text} is not a whole number, 1 or more")
    return int(text)


def picture_file(text: str) -> Path:
    if Path(text).suffix not in (kinds := (".svg", ".html", ".png")):
        raise ValueError(f"{text}: expected a name that ends in {' or '.join(kinds)}")
    return output_file(text)


def amount(text: str) -> int:
    """Return a whole amount: "4Mi" → 4194304, "80G" → 80000000000."""
    matched = AMOUNT.fullmatch(text.replace(",", "").replace("_", ""))
    value = float(matched[1]) * UNITS[matched[2]] if matched else None
    if value is None or value % 1:
        raise ValueError(
            f"{text} is not an amount; expected a whole number, with k, M, G, Ki, Mi or Gi if you "
            "like"
        )
    return int(value)


def memory(text: str) -> int:
    value = amount(text.removesuffix("B"))
    if value < 1e6:
        raise ValueError(f"{text} is less than a megabyte; expected the memory of a GPU, e.g. 80GB")
    return value


def fields(text: str) -> dict[str, Any]:
    """Return "tp=8,recompute=full" as {"tp": 8, "recompute": "full"}. Keys are checked later."""
    found: dict[str, Any] = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        key, equals, value = part.partition("=")
        if not equals or not value or key in found:
            why = "given twice" if key in found else "not KEY=VALUE"
            raise ValueError(f"{part!r} is {why}; expected e.g. tp=8,pp=4,recompute=full")
        words = {"true": True, "True": True, "false": False, "False": False, "None": None}
        found[key] = int(value) if value.isdecimal() else words.get(value, value)
    return found


Seconds = Annotated[float, seconds, "SECONDS"]
OutputFile = Annotated[Path, output_file, "FILE"]
Steps = Annotated[tuple[int, int], first_and_last, "FIRST:LAST"]
Whole = Annotated[int, whole, "N"]
Folder = Annotated[Path, Path, "DIR"]
PictureFile = Annotated[Path, picture_file, "FILE"]
Amount = Annotated[int, amount, "N"]
Memory = Annotated[int, memory, "SIZE"]
Fields = Annotated[dict[str, Any], fields, "KEY=VALUE,…"]
