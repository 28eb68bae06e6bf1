"""Packs this library as a wheel, which pip installs from a file and not from an index.

    parallel101/**                              the package as it runs here
    parallel101-0.1.0.dist-info/METADATA, …     as it was installed here

The format is that of the Python packaging specifications, "Binary distribution format". A wheel of
pure Python is the package's files, their hashes and a few lines of text. So nothing is built, and
no network is needed. That also works where only the installed package is there, without its source.
"""

from __future__ import annotations

import base64
import hashlib
import io
import stat
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from parallel101.laboratory import PACKAGE

LEFT_OUT = ("__pycache__", ".ipynb_checkpoints", "notebooks")  # graders need no notebooks
TIME = (2026, 1, 1, 0, 0, 0)  # of all entries, so that the same files give the same wheel
KIND = "Wheel-Version: 1.0\nGenerator: parallel101\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def library_wheel() -> tuple[str, bytes]:
    """Return the file name and the content of a wheel of this library.

    Raises ValueError if the library was never installed here, and so has no metadata.
    """
    try:
        installed = distribution("parallel101")
    except PackageNotFoundError:
        raise ValueError(
            "parallel101 is not installed here, so there is no metadata for its wheel: run "
            "pip install -e . in its folder, or give its address with --library"
        ) from None
    about = installed.read_text("METADATA") or installed.read_text("PKG-INFO") or ""
    named = f"parallel101-{installed.version}"
    files = {
        f"parallel101/{file.relative_to(PACKAGE).as_posix()}": file.read_bytes()
        for file in sorted(Path(PACKAGE).rglob("*"))
        if file.is_file() and not set(LEFT_OUT) & set(file.parts) and file.name[0] != "."
    }
    texts = {
        "METADATA": about,
        "WHEEL": KIND,
        "entry_points.txt": installed.read_text("entry_points.txt") or "",
        "licenses/LICENSE": installed.read_text("licenses/LICENSE") or "",
    }
    files |= {f"{named}.dist-info/{name}": text.encode() for name, text in texts.items()}
    record = f"{named}.dist-info/RECORD"
    lines = [f"{name},{_hash(data)},{len(data)}\n" for name, data in files.items()]
    files[record] = "".join([*lines, f"{record},,\n"]).encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            add_file(wheel, name, data, 0o644)
    return f"{named}-py3-none-any.whl", packed.getvalue()


def add_file(archive: zipfile.ZipFile, name: str, content: bytes, mode: int) -> None:
    """Add a file, with a time that is always the same."""
    entry = zipfile.ZipInfo(name, TIME)
    entry.external_attr = (stat.S_IFREG | mode) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    archive.writestr(entry, content)


def _hash(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"
