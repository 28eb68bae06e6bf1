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
from traitlets import default

ANSI = re.compile(r"\x1b\[[0-9;]*m")


class LessonFailed(Exception):
    """A lesson failed, so it has no page.

    `.lesson` is its name; the message says where it failed and why.
    """

    def __init__(self, lesson: str, why: str):
        self.lesson = lesson
        super().__init__(f"lesson {lesson}: {why}")


class _KernelOfThisPython(AsyncKernelManager):
    """Starts `sys.executable -m ipykernel_launcher`.

    It ignores installed kernels that are also named python3.
    """

    @default("kernel_spec_manager")
    def _native_kernel_only(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[], parent=self)

    @default("transport_encryption")
    def _encrypt_if_possible(self) -> str:
        # without encryption a new ipykernel warns at each start; an old one does not support it
        return "auto"


class _InterruptibleClient(NotebookClient):
    """Raises KeyboardInterrupt after Ctrl-C or SIGTERM.

    NotebookClient only ends the kernel, and its methods then fail in various ways.
    """

    _cleanup_lock: asyncio.Lock

    @property
    def stopped(self) -> bool:
        # NotebookClient's signal handler sets it
        return hasattr(self, "_async_cleanup_kernel_future")

    def run(self) -> None:
        """Run the notebook.

        Raises KeyboardInterrupt if it was stopped, whichever exception followed from that.
        """
        try:
            self.execute()
        except (Exception, asyncio.CancelledError):
            if not self.stopped:
                raise
        if self.stopped:
            raise KeyboardInterrupt

    async def async_start_new_kernel(self, **kwargs: Any) -> None:
        await super().async_start_new_kernel(**kwargs)
        if self.stopped:  # the signal came before there was a kernel to end
            await self._async_cleanup_kernel()
            raise KeyboardInterrupt

    async def _async_cleanup_kernel(self) -> None:
        """End the kernel once.

        Both the signal handler and `execute` call this; the second call waits until the kernel has
        ended.
        """
        if not hasattr(self, "_cleanup_lock"):
            self._cleanup_lock = asyncio.Lock()
        if self.stopped:
            # a graceful shutdown would interrupt the cell and show a traceback
            self.shutdown_kernel = "immediate"
        async with self._cleanup_lock:
            if self.km is not None:
                await super()._async_cleanup_kernel()


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

    with tqdm(total=len(code_cells), desc=path.stem, unit="cell", leave=False, disable=None) as bar:
        client = _InterruptibleClient(
            notebook,
            kernel_name="python3",
            kernel_manager_class=_KernelOfThisPython,
            timeout=timeout,
            resources={"metadata": {"path": str(path.parent)}},
            coalesce_streams=True,
            store_widget_state=False,
            record_timing=False,
            on_cell_execute=lambda cell_index, **_: running.append(cell_index),
            on_cell_executed=lambda **_: bar.update(),
        )
        try:
            client.run()
        except (CellControlSignal, DeadKernelError, RuntimeError) as error:
            if not running:
                raise LessonFailed(path.stem, f"the kernel did not start: {error}") from error
            cell = notebook.cells[running[-1]]
            code = indent(cell.source.strip(), "    ")
            where = f"code cell {code_cells.index(running[-1]) + 1} of {len(code_cells)} failed"
            why = f"{where}:\n\n{code}\n\n{_explain(error, cell, timeout)}"
            raise LessonFailed(path.stem, why) from error
    return notebook


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
