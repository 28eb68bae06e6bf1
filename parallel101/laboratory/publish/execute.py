"""Runs a notebook from top to bottom in a fresh kernel.

The kernel uses the same Python and packages as `parallel101 lessons`, whatever other kernels the
user has installed. If a cell fails, the error names the lesson and the cell, and shows the
traceback.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from textwrap import indent
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import (
    CellControlSignal,
    CellExecutionError,
    CellTimeoutError,
    DeadKernelError,
)
from nbformat import NotebookNode
from tqdm import tqdm

ANSI = re.compile(r"\x1b\[[0-9;]*m")


class LessonFailed(Exception):
    """A lesson failed, so it has no page.

    `.lesson` is its name; the message says where it failed and why.
    """

    def __init__(self, lesson: str, why: str):
        self.lesson = lesson
        super().__init__(f"lesson {lesson}: {why}")


def read_notebook(path: Path) -> NotebookNode:
    """Read the notebook at `path`. Raises LessonFailed if the file is not a notebook."""
    unreadable = (nbformat.reader.NotJSONError, nbformat.ValidationError, UnicodeDecodeError)
    try:
        return nbformat.read(path, as_version=4)
    except (*unreadable, AttributeError, KeyError) as error:
        raise LessonFailed(path.stem, f"{path} cannot be read as a notebook: {error!r}") from error


def run_notebook(path: Path, *, timeout: float = 600.0) -> NotebookNode:
    """Run the notebook at `path` in its own folder, and return it with its outputs.

    The file itself does not change.

    Args:
        path: an .ipynb file. A cell with the tag `raises-exception` may fail; its error is shown as
            part of the lesson.
        timeout: time limit for each cell, in seconds.

    Raises:
        LessonFailed: the file is not a notebook, or a cell raised an exception, took too long or
            ended the kernel.
        KeyboardInterrupt: the run was stopped by Ctrl-C or SIGTERM. The kernel has ended.
    """
    notebook = read_notebook(path)
    code_cells = [i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    running: list[int] = []

    def begin(cell_index: int, **_: Any) -> None:
        if _was_stopped(client):  # the signal came before there was a kernel to end
            raise asyncio.CancelledError
        running.append(cell_index)

    with tqdm(total=len(code_cells), desc=path.stem, unit="cell", leave=False, disable=None) as bar:
        client = NotebookClient(
            notebook,
            # not an installed kernel that is also named python3; without encryption a new
            # ipykernel warns at each start, and an old one does not support it
            AsyncKernelManager(
                kernel_spec_manager=KernelSpecManager(kernel_dirs=[]), transport_encryption="auto"
            ),
            shutdown_kernel="immediate",  # a graceful one would interrupt the cell: a traceback
            timeout=timeout,
            resources={"metadata": {"path": str(path.parent)}},
            coalesce_streams=True,
            store_widget_state=False,
            record_timing=False,
            on_cell_execute=begin,
            on_cell_executed=lambda **_: bar.update(),
        )
        try:
            asyncio.run(_execute(client))
        except (Exception, asyncio.CancelledError) as error:
            if _was_stopped(client):
                raise KeyboardInterrupt from error
            if not isinstance(error, (CellControlSignal, DeadKernelError, RuntimeError)):
                raise
            if not running:
                raise LessonFailed(path.stem, f"the kernel did not start: {error}") from error
            cell = notebook.cells[running[-1]]
            code = indent(cell.source.strip(), "    ")
            where = f"code cell {code_cells.index(running[-1]) + 1} of {len(code_cells)} failed"
            why = f"{where}:\n\n{code}\n\n{_explain(error, cell, timeout)}"
            raise LessonFailed(path.stem, why) from error
    if _was_stopped(client):
        raise KeyboardInterrupt
    return notebook


def _was_stopped(client: NotebookClient) -> bool:
    """Return whether Ctrl-C or SIGTERM came: NotebookClient's signal handler makes a future."""
    return hasattr(client, "_async_cleanup_kernel_future")


async def _execute(client: NotebookClient) -> None:
    """Run the notebook, and end its kernel, once: after a signal, NotebookClient ends it itself."""
    try:
        await client.async_execute()
    finally:
        if _was_stopped(client):
            await client._async_cleanup_kernel_future  # type: ignore[attr-defined]
        if client.km is not None:
            await client._async_cleanup_kernel()


def _explain(error: Exception, cell: NotebookNode, timeout: float) -> str:
    """Return the cell's own traceback, or what happened to the kernel."""
    if isinstance(error, CellTimeoutError):
        return (
            f"The cell did not finish within {timeout:g} s. Does a rank wait for a message that no "
            "rank sends?"
        )
    if isinstance(error, CellExecutionError):
        raised = [output for output in cell.outputs if output.output_type == "error"]
        if not raised:
            return f"{error.ename}: {error.evalue}"
        return ANSI.sub("", "\n".join(raised[-1].traceback))
    return (
        f"The kernel died ({error}). The machine may have run out of memory, or compiled code may "
        "have crashed."
    )
