"""A fresh kernel, as a learner's notebook has it: runs cells and measures when they are done."""

from __future__ import annotations

import time
from typing import Any

from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager


class Kernel:
    """A kernel of this Python, which ends with the with block."""

    def __enter__(self) -> Kernel:
        self.manager = KernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
        # without encryption a new ipykernel warns at each start; an old one does not support it
        self.manager.transport_encryption = "auto"
        self.manager.start_kernel()
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel()

    def seconds(self, cell: str, *, shows: str = "") -> float:
        """Run a cell.

        Returns the seconds until its output with `shows` in the HTML is here; without `shows`,
        until it has ended.

        Raises RuntimeError if the cell fails or does not show that.
        """
        seen: list[float] = []
        began = time.perf_counter()

        def look(message: dict[str, Any]) -> None:
            if shows and shows in message["content"].get("data", {}).get("text/html", ""):
                seen.append(time.perf_counter() - began)

        reply = self.client.execute_interactive(cell, timeout=120, output_hook=look)
        ended = time.perf_counter() - began
        if reply["content"]["status"] != "ok":
            lines = ["a cell of the benchmark failed:", cell]
            raise RuntimeError("\n".join(lines + reply["content"].get("traceback", [])))
        if shows and not seen:
            raise RuntimeError(f"a cell of the benchmark did not show {shows}:\n{cell}")
        return seen[-1] if shows else ended
