"""Runs a notebook from top to bottom, in a fresh kernel of this very Python.

Whatever kernels are installed in a user's home, the lesson runs with the packages that `parallel101 lessons` itself
runs with. A failure names the lesson, the cell and the error, as a reader would look for them.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from tqdm import tqdm
from traitlets import default

ANSI = re.compile(r"\x1b\[[0-9;]*m")


class LessonFailed(Exception):
    """A lesson that did not become a page. `.lesson` is its name; the message says where it failed and why."""

    def __init__(self, lesson: str, why: str):
        self.lesson = lesson
        super().__init__(f"lesson {lesson}: {why}")


class _KernelOfThisPython(AsyncKernelManager):
    """Starts `sys.executable -m ipykernel_launcher`, past any kernel named python3 that is installed somewhere."""

    @default("kernel_spec_manager")
    def _only_the_native_kernel(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[], parent=self)

    @default("transport_encryption")
    def _where_it_can_be_had(self) -> str:
        return "auto"  #  a kernel that could be listened to warns at each start; older ones know no encryption


class _Stoppable(NotebookClient):
    """Knows that it was stopped: nbclient's handler of Ctrl-C and SIGTERM ends the kernel, and what waits for that breaks somehow."""

    _ending: asyncio.Lock

    @property
    def stopped(self) -> bool:
        return hasattr(self, "_async_cleanup_kernel_future")  #  which the handler makes

    def run(self) -> None:
        """Run the notebook. Raises KeyboardInterrupt when it was stopped, whatever broke because of that."""
        try:
            self.execute()
        except (Exception, asyncio.CancelledError):
            if not self.stopped:
                raise
        if self.stopped:
            raise KeyboardInterrupt

    async def async_start_new_kernel(self, **kwargs: Any) -> None:
        await super().async_start_new_kernel(**kwargs)
        if self.stopped:  #  before there was a kernel to end
            await self._async_cleanup_kernel()
            raise KeyboardInterrupt

    async def _async_cleanup_kernel(self) -> None:
        """Once: the handler and the one whose kernel it took both come here, the second to wait until the kernel is gone."""
        if not hasattr(self, "_ending"):
            self._ending = asyncio.Lock()
        if self.stopped:
            self.shutdown_kernel = "immediate"  #  asked to leave, it would interrupt its cell and show a traceback
        async with self._ending:
            if self.km is not None:
                await super()._async_cleanup_kernel()


def read_notebook(path: Path) -> NotebookNode:
    """The notebook at `path` as it is. Raises LessonFailed when the file is none."""
    try:
        return nbformat.read(path, as_version=4)
    except (nbformat.reader.NotJSONError, nbformat.ValidationError, UnicodeDecodeError, AttributeError, KeyError) as error:
        raise LessonFailed(path.stem, f"{path} cannot be read as a notebook: {error!r}") from error


def run_notebook(path: Path, *, timeout: float = 600.0) -> NotebookNode:
    """Run the notebook at `path` in its own folder and return it with its outputs; the file stays as it is.

    Args:
        path: an .ipynb file. A cell tagged `raises-exception` may fail, and shows its error as part of the lesson.
        timeout: seconds for one cell.

    Raises:
        LessonFailed: the file is no notebook, a cell raised, took longer than `timeout`, or ended the kernel.
        KeyboardInterrupt: Ctrl-C or SIGTERM came; the kernel has ended.
    """
    notebook = read_notebook(path)
    code_cells = [i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    running = None

    def began(cell: NotebookNode, cell_index: int) -> None:
        nonlocal running
        running = cell_index

    with tqdm(total=len(code_cells), desc=path.stem, unit="cell", leave=False, disable=None) as bar:
        client = _Stoppable(
            notebook,
            kernel_name="python3",
            kernel_manager_class=_KernelOfThisPython,
            timeout=timeout,
            resources={"metadata": {"path": str(path.parent)}},
            coalesce_streams=True,
            store_widget_state=False,
            record_timing=False,
            on_cell_execute=began,
            on_cell_executed=lambda **_: bar.update(),
        )
        try:
            client.run()
        except (CellControlSignal, DeadKernelError, RuntimeError) as error:
            if running is None:
                raise LessonFailed(path.stem, f"its kernel did not start: {error}") from error
            code = "\n".join(f"    {line}" for line in notebook.cells[running].source.strip().splitlines())
            where = f"code cell {code_cells.index(running) + 1} of {len(code_cells)} failed"
            raise LessonFailed(path.stem, f"{where}:\n\n{code}\n\n{_told(error, notebook.cells[running], timeout)}") from error
    return notebook


def _told(error: Exception, cell: NotebookNode, timeout: float) -> str:
    """The error as its reader needs it: the cell's own traceback, or what became of the kernel."""
    if isinstance(error, CellTimeoutError):
        return f"It did not finish within {timeout:g} s. Does it wait for a message that nobody sends?"
    if isinstance(error, CellExecutionError):
        raised = [output for output in cell.outputs if output.output_type == "error"]
        return ANSI.sub("", "\n".join(raised[-1].traceback)) if raised else f"{error.ename}: {error.evalue}"
    return f"Its kernel died ({error}). Was there enough memory? Did compiled code crash?"
