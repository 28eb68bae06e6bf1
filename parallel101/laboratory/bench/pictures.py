"""Measures how long pictures and pages take, in a browser and in a notebook; each has a limit.

a picture   time and size of the animation of a ring all-reduce on 8 ranks, in 14 steps
a page      time until its players are there and one has answered a click; of a run of 10,000
            steps, time until one can choose steps
                compared with the same page without scripts
a notebook  time until the first and the next picture of `watch`, and of an explorer
                compared with torch.multiprocessing.spawn, and launch
"""

from __future__ import annotations

import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager

import parallel101 as p101
from parallel101.laboratory.bench.comparison import BenchmarkReport
from parallel101.laboratory.bench.launch_time import time_spawn
from parallel101.laboratory.publish.find import find_lessons, select_lessons
from parallel101.laboratory.publish.run_page import run_page
from parallel101.laboratory.publish.write_site import publish
from parallel101.laboratory.ranks.launch import Run
from parallel101.laboratory.viz.chromium import Browser, find_chromium
from parallel101.spans import recorder

Row = tuple[str, ...]
Values = Sequence[float]
HEAD = ["", "measured", "limit", "kept", "compared with", "measured there", "ratio"]
BARE = "the same page without scripts"

IMPORTS = "import torch\nimport torch.distributed as dist\n\nimport parallel101 as p101"
RING = "lambda x: p101.all_reduce(x, algorithm='ring')"
WATCH = f"p101.watch({RING}, world_size=4).animate()"
LAUNCH = f"p101.launch({RING}, torch.ones(8), world_size=4)"
EXPLORE = "from parallel101 import explore_collective\n\nexplorer = explore_collective()\nexplorer"
CHANGE = "explorer.controls['numbers'].value = {}"
READING = 5.0  # seconds that a learner reads between two cells
SPAWN, NEW = "`spawn` of 4 ranks", "`launch` of 4 ranks, without a picture"
# what is measured in a notebook; the limit in seconds; the peer
NOTEBOOK = {
    "first": ("notebook: the first `watch`, at once after the imports", 2.5, SPAWN),
    "imports": ("`import torch`, `import parallel101` and the first `watch`", 2.5, SPAWN),
    "alone": ("`import parallel101` and the first `watch`, in one cell", 2.5, SPAWN),
    "read": (f"the first `watch`, {READING:g} s after the imports", 2.5, SPAWN),
    "next": ("the next `watch`", 0.2, NEW),
    "changed": ("a change in the explorer: 4 ranks, gloo", 0.3, NEW),
}

USABLE = Path(__file__).with_name("usable.js").read_text(encoding="utf-8")


def measure(report: BenchmarkReport, *, backend: str, quick: bool) -> None:
    report.heading("Pictures and pages")
    report.table(HEAD, _rows(quick))
    report.sentence(
        "Measured: the median. The peer is measured in turn, and the ratio is the median over the "
        "pairs. The ranks of spawn and launch run one all_reduce, without a record or a picture. "
        "In a notebook, the time runs from the start of a cell until its output has arrived from "
        "the kernel. What needs a browser is left out where there is no Chromium or Google Chrome."
    )


def _rows(quick: bool) -> Iterator[Row]:
    run = p101.watch(lambda x: p101.all_reduce(x, algorithm="ring"), world_size=8)
    yield from animation_rows(run, 2 if quick else 9)
    if (chromium := find_chromium()) is not None:
        with tempfile.TemporaryDirectory() as folder, Browser(chromium) as browser:
            yield long_run_row(browser, Path(folder), 100 if quick else 10_000, 1 if quick else 5)
            yield from page_rows(browser, Path(folder), 1 if quick else 3, ["00"] if quick else [])
    yield from notebook_rows(1 if quick else 3)


def row(what: str, unit: str, ours: Values, limit: float, peer: str = "", *theirs: float) -> Row:
    """Return a row of the table: the median of `ours` must be at most `limit`.

    Args: theirs: what was measured of the peer, in turn with ours.
    """
    measured, compared = statistics.median(ours), ("", "", "")
    if theirs:
        ratio = statistics.median(a / b for a, b in zip(ours, theirs))
        compared = (peer, f"{statistics.median(theirs):.3g} {unit}", f"**{ratio:.2g}**")
    kept = "yes" if measured <= limit else "**no**"
    return (what, f"{measured:.3g} {unit}", f"{limit:g} {unit}", kept, *compared)


def animation_rows(run: Run, rounds: int) -> Iterator[Row]:
    """Build the animation of a run."""
    seconds = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        html = run.animate().html()
        seconds.append(time.perf_counter() - began)
    name = f"animation of 14 steps on {run.world_size} ranks"
    yield row(f"{name}: time to build it", "ms", [1e3 * each for each in seconds[1:]], 50)
    yield row("its size", "kB", [len(html.encode()) / 1e3], 250)


# ---- in a browser ----


def long_run_row(browser: Browser, folder: Path, steps: int, rounds: int) -> Row:
    """Write the page of a long run, and measure how long it takes until one can choose steps.

    The run is as large as the one that `parallel101 run` records of DDP with four buckets.
    """

    def program() -> None:
        recorder().record_waits = True  # type: ignore[union-attr]
        for _ in range(steps):
            with p101.span("step"):
                for _ in range(4):
                    p101.compute(1.0 + dist.get_rank())
                    dist.all_reduce(torch.ones(8))

    trace: Any = p101.launch(program, world_size=2, backend="sim", timeout=600).trace
    page = folder / "run.html"
    page.write_text(run_page(trace, "train.py"), encoding="utf-8")
    name = f"the page of {steps:,} steps, {len(trace.events):,} events"
    return row(f"{name}, is usable", "s", *usable(browser, page, rounds))


def page_rows(browser: Browser, folder: Path, rounds: int, names: list[str]) -> Iterator[Row]:
    """Build the site, or only the lessons in `names`, and measure how long each page takes."""
    site = folder / "site"
    if failed := publish(select_lessons(find_lessons(), names), site, report=lambda _: None).failed:
        raise failed[0]
    pages = {page.stem: usable(browser, page, rounds) for page in sorted(site.glob("*.html"))}
    slowest = max(pages, key=lambda name: statistics.median(pages[name][0]))
    name = f"the slowest of {len(pages)} pages ({slowest}) is usable"
    yield row(name, "s", *pages[slowest])
    yield row("errors of the pages' scripts", "errors", [len(browser.errors)], 0)
    sizes = [file.stat().st_size for file in site.rglob("*") if file.is_file()]
    yield row("the whole site", "MB", [sum(sizes) / 1e6], 25)


def usable(browser: Browser, page: Path, rounds: int) -> tuple[Any, ...]:
    """Return the seconds until a page is usable, their limit, and those without its scripts."""
    bare = page.with_name(f"{page.stem} bare.html")
    html = re.sub(r"<script\b.*?</script>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    bare.write_text(html, encoding="utf-8")
    took: dict[Path, list[float]] = {page: [], bare: []}
    for _ in range(rounds):
        for file, seconds in took.items():
            browser.call("Page.navigate", url=file.as_uri())
            browser.until(f"location.href === '{file.as_uri()}'")
            seconds.append(browser.js(USABLE) / 1e3)
    bare.unlink()
    return took[page], 1.0, BARE, *took[bare]


# ---- in a notebook ----


@contextmanager
def fresh_kernel() -> Iterator[Callable[..., float]]:
    """Start a kernel, as a learner's notebook has it, inside the with block.

    Yields a function that runs a cell and returns the seconds until its output with `shows` in the
    HTML is here; without `shows`, until it has ended. It raises RuntimeError if the cell fails or
    does not show that.
    """
    manager = KernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
    # without encryption a new ipykernel warns at each start; an old one does not support it
    manager.transport_encryption = "auto"
    manager.start_kernel()
    client = manager.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=60)

    def seconds(cell: str, shows: str = "") -> float:
        seen: list[float] = []
        began = time.perf_counter()

        def look(message: dict[str, Any]) -> None:
            if shows and shows in message["content"].get("data", {}).get("text/html", ""):
                seen.append(time.perf_counter() - began)

        reply = client.execute_interactive(cell, timeout=120, output_hook=look)["content"]
        ended = time.perf_counter() - began
        if reply["status"] != "ok" or (shows and not seen):
            lines = reply.get("traceback", [f"it did not show {shows}"])
            raise RuntimeError("\n".join(["a cell of the benchmark failed:", cell, *lines]))
        return seen[-1] if shows else ended

    try:
        yield seconds
    finally:
        client.stop_channels()
        manager.shutdown_kernel()


def notebook_rows(kernels: int) -> Iterator[Row]:
    """Run the cells of a learner in fresh kernels: in one go, and with time to read in between."""
    took: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(kernels):
        with fresh_kernel() as seconds_of:
            imports, first = seconds_of(IMPORTS), seconds_of(WATCH, "<figure")
            took["first"].append(first)
            took["imports"].append(imports + first)
            for _ in range(5):
                took["next"].append(seconds_of(WATCH, "<figure"))
                took[NEW].append(seconds_of(LAUNCH))
            seconds_of(EXPLORE, "<figure")
            took["changed"] += [seconds_of(CHANGE.format(n)) for n in (12, 16, 20, 24, 28)]
        with fresh_kernel() as seconds_of:
            seconds_of(IMPORTS)
            time.sleep(READING)
            took["read"].append(seconds_of(WATCH, "<figure"))
        with fresh_kernel() as seconds_of:  # it and the fork server import torch at the same time
            took["alone"].append(seconds_of(f"import parallel101 as p101\n\n{WATCH}", "<figure"))
        took[SPAWN].append(time_spawn("gloo"))
    for key, (what, limit, peer) in NOTEBOOK.items():
        yield row(what, "s", took[key], limit, peer, *took[peer])
