"""Measures how long pictures and pages take, in a browser and in a notebook.

Each figure is shown with its limit, and with a peer from the same run.

a picture   time and size of the animation of a ring all-reduce on 8 ranks, in 14 steps
                compared with matplotlib's player, a frame for each step
            frames per second while it plays
                compared with a page that counts frames and draws nothing
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from matplotlib.animation import FuncAnimation
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import parallel101 as p101
from parallel101.laboratory.analysis.replay import replay_of
from parallel101.laboratory.bench.benchmark_report import BenchmarkReport
from parallel101.laboratory.bench.kernel import Kernel
from parallel101.laboratory.bench.launch_time import time_spawn
from parallel101.laboratory.publish import find_lessons, publish, select_lessons
from parallel101.laboratory.publish.run_page import run_page
from parallel101.laboratory.ranks.launch import Run
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.viz.chromium import Browser, find_chromium
from parallel101.spans import recorder

TableRow = tuple[str, ...]
HEAD = ["", "measured", "least … most", "limit", "kept", "compared with", "measured there", "ratio"]

IMPORTS = "import torch\nimport torch.distributed as dist\n\nimport parallel101 as p101"
RING = "lambda x: p101.all_reduce(x, algorithm='ring')"
WATCH = f"p101.watch({RING}, world_size=4).animate()"
LAUNCH = f"p101.launch({RING}, torch.ones(8), world_size=4)"
EXPLORE = "from parallel101 import explore_collective\n\nexplorer = explore_collective()\nexplorer"
CHANGE = "explorer.controls['numbers'].value = {}"
READING = 5.0  # seconds that a learner reads between two cells

BLANK = "<!doctype html><title>blank</title>"
PLAYER = "document.querySelector('figure > div').shadowRoot"
FRAMES = """new Promise(done => {
  const times = [], tick = now => {
    times.push(now);
    now - times[0] < %d ? requestAnimationFrame(tick) : done(times);
  };
  requestAnimationFrame(tick); })"""
USABLE = """new Promise(done => {  // milliseconds since the page was asked for
  const figures = [...document.querySelectorAll("figure.p101")], scripts = document.scripts.length;
  const chooser = ".chooser:not([data-ready])";  // of steps, on the page of a long run
  const mounted = () => !scripts || !document.querySelector(chooser) &&
    figures.every(figure => "step" in figure.dataset);
  const ready = () => document.readyState === "complete" && mounted();
  const root = figure => figure.querySelector("div").shadowRoot;
  const shown = () => requestAnimationFrame(() => done(performance.now()));
  const answer = () => {
    const moving = each => root(each).querySelector(".player:not(.still)");
    const figure = scripts && figures.find(moving);
    if (!figure) return shown();
    root(figure).querySelector("[data-do=next]").click();
    const moved = () => +figure.dataset.time > 0 ? shown() : requestAnimationFrame(moved);
    moved(); };
  const look = () => ready() ? answer() : setTimeout(look, 2);
  look(); })"""


def measure(report: BenchmarkReport, *, backend: str, quick: bool) -> None:
    report.heading("Pictures and pages")
    report.table(HEAD, _rows(report, quick))
    report.sentence(
        "Measured: the median. The peer is measured in turn, and the ratio is the median over the "
        "pairs. matplotlib's player has a frame for each step, which shows the chunks of each rank "
        "and nothing else. The ranks of spawn and launch run one all_reduce, without a record or a "
        "picture. In a notebook, the time runs from the start of a cell until its output has "
        "arrived from the kernel."
    )
    if find_chromium() is None:
        report.sentence(
            "What needs a browser was left out: no Chromium was found. Install chromium or Google "
            "Chrome."
        )


def _rows(report: BenchmarkReport, quick: bool) -> Iterator[TableRow]:
    run = p101.watch(lambda x: p101.all_reduce(x, algorithm="ring"), world_size=8)
    yield from animation_rows(run, 2 if quick else 9)
    chromium = find_chromium()
    if chromium is not None:
        with tempfile.TemporaryDirectory() as folder, Browser(chromium) as browser:
            yield from playing_rows(
                browser, run, Path(folder), 1.0 if quick else 5.0, 1 if quick else 5
            )
            yield long_run_row(browser, Path(folder), 100 if quick else 10_000, 1 if quick else 5)
            yield from page_rows(browser, Path(folder), 1 if quick else 3, ["00"] if quick else [])
    yield from notebook_rows(1 if quick else 3)


def row(
    what: str,
    unit: str,
    ours: Sequence[float],
    limit: float,
    peer: str = "",
    theirs: Sequence[float] = (),
) -> TableRow:
    """Return a row of the table.

    Frames per second must be at least `limit`, and everything else at most that.
    """
    measured = statistics.median(ours)
    kept = round(measured) >= limit if unit == "frames/s" else measured <= limit
    spread = f"{number(min(ours))} … {number(max(ours))}" if len(ours) > 1 else ""
    compared = ("", "", "")
    if theirs:
        ratio = statistics.median(a / b for a, b in zip(ours, theirs))
        compared = (peer, f"{number(statistics.median(theirs))} {unit}", f"**{ratio:.2g}**")
    return (
        what,
        f"{number(measured)} {unit}",
        spread,
        f"{limit:g} {unit}",
        "yes" if kept else "**no**",
        *compared,
    )


def number(value: float) -> str:
    """Return a number with three digits, or a large one without a fraction: 0.525, 37.1, 1,190."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


# ---- the animation ----


def animation_rows(run: Run, rounds: int) -> Iterator[TableRow]:
    """Build the animation of a run and, in turn, that of matplotlib."""
    states = contributions(run)
    ours, theirs = [], []
    for turn in range(rounds + 1):
        began = time.perf_counter()
        html = run.animate().html()
        between = time.perf_counter()
        peer = matplotlibs_player(states)
        if turn:  # the first only imports what is needed
            ours.append(1e3 * (between - began))
            theirs.append(1e3 * (time.perf_counter() - between))
    name = f"{len(states) - 1} steps on {run.world_size} ranks"
    yield row(
        f"animation of {name}: time to build it", "ms", ours, 50, "matplotlib's player", theirs
    )
    yield row(
        "its size",
        "kB",
        [len(html.encode()) / 1e3],
        250,
        "matplotlib's player",
        [len(peer.encode()) / 1e3],
    )


def contributions(run: Run) -> list[np.ndarray]:
    """Return, as ranks × chunks, the number of ranks whose data each chunk of a rank contains.

    There is one array for the start, and one after each step.
    """
    assert run.trace is not None
    replay = replay_of(run.trace, run.results, watched=run.watched)
    states = np.zeros((replay.steps + 1, len(replay.ranks), len(replay.chunks)))
    for (rank, chunk), cells in replay.cells.items():
        for moment, counts in cells:  # -1 is before the first step, and s + 0.5 is in step s
            states[int(moment) + 1 :, rank, chunk] = sum(counts)
    return list(states)


def matplotlibs_player(states: Sequence[np.ndarray]) -> str:
    """Return the steps as HTML with matplotlib's controls, one frame for each."""
    figure = Figure(figsize=(5, 5))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="chunk", ylabel="rank")
    image = axes.imshow(states[0], vmin=0, vmax=float(np.max(states)))

    def draw(step: int) -> list[Any]:
        axes.set_title(f"step {step}")
        image.set_data(states[step])
        return [image]

    return FuncAnimation(figure, draw, frames=len(states)).to_jshtml()


# ---- in a browser ----


def playing_rows(
    browser: Browser, run: Run, folder: Path, seconds: float, rounds: int
) -> Iterator[TableRow]:
    """Yield the frames per second while the animation plays and, in turn, while nothing does."""
    page, blank = run.animate().save(folder / "ring.html"), folder / "blank.html"
    blank.write_text(BLANK)
    ours, theirs = [], []
    for _ in range(rounds):
        browser.open(page.as_uri())
        browser.until("'step' in document.querySelector('figure').dataset")
        browser.js(f"{PLAYER}.querySelector('[data-do=play]').click()")
        ours.append(_frames_per_second(browser, seconds))
        if (
            browser.js(f"{PLAYER}.querySelector('[data-do=play]').getAttribute('aria-label')")
            != "Pause"
        ):
            raise RuntimeError(f"the animation did not play for {seconds} s")
        browser.open(blank.as_uri())
        theirs.append(_frames_per_second(browser, seconds))
    yield row("frames while it plays", "frames/s", ours, 60, "a blank page", theirs)


def _frames_per_second(browser: Browser, seconds: float) -> float:
    times = browser.js(FRAMES % (1000 * seconds))
    return 1000 * (len(times) - 1) / (times[-1] - times[0])


def long_run_row(browser: Browser, folder: Path, steps: int, rounds: int) -> TableRow:
    """Write the page of a long run, and measure how long it takes until one can choose steps."""
    page, bare = folder / "run.html", folder / "run bare.html"
    trace = long_record(steps)
    page.write_text(run_page(trace, "train.py"), encoding="utf-8")
    bare.write_text(without_scripts(page), encoding="utf-8")
    pairs = [
        (_seconds_to_use(browser, page), _seconds_to_use(browser, bare)) for _ in range(rounds)
    ]
    ours, theirs = ([pair[k] for pair in pairs] for k in range(2))
    name = f"the page of {steps:,} steps, {len(trace.events):,} events"
    return row(f"{name}, is usable", "s", ours, 1, "the same page without scripts", theirs)


def long_record(steps: int) -> Trace:
    """Return the record of a run of two ranks: 100 steps, again and again.

    It is as large as the one that `parallel101 run` makes of DDP with four buckets.
    """

    def program() -> None:
        recorder().record_waits = True  # type: ignore[union-attr]
        for _ in range(100):
            with p101.span("step"):
                for _ in range(4):
                    p101.compute(1.0 + dist.get_rank())
                    dist.all_reduce(torch.ones(8))

    trace = p101.launch(program, world_size=2, backend="sim").trace
    assert trace is not None
    length = trace.makespan
    rows = [
        e._replace(
            start=e.start + k * length,
            end=e.end + k * length,
            posted=e.posted + k * length,
            seq=e.seq + k * len(trace.events),
        )
        for k in range(steps // 100)
        for e in trace.events
    ]
    return Trace.from_rows(rows, trace.world_size, trace.backend)


def without_scripts(page: Path) -> str:
    html = page.read_text(encoding="utf-8")
    return re.sub(r"<script\b.*?</script>", "", html, flags=re.DOTALL)


def page_rows(
    browser: Browser, folder: Path, rounds: int, names: Sequence[str] = ()
) -> Iterator[TableRow]:
    """Build the site, or only the lessons in `names`, and measure how long each page takes.

    Each page is opened with and without its scripts.
    """
    site, bare = folder / "site", folder / "bare.html"
    if failed := publish(select_lessons(find_lessons(), names), site, report=lambda _: None).failed:
        raise failed[0]
    pages = sorted(site.glob("*.html"))
    slowest, ours, theirs = pages[0], [0.0], [0.0]
    for page in pages:
        bare.write_text(without_scripts(page), encoding="utf-8")
        pairs = [
            (_seconds_to_use(browser, page), _seconds_to_use(browser, bare)) for _ in range(rounds)
        ]
        if statistics.median(a for a, _ in pairs) > statistics.median(ours):
            slowest, (ours, theirs) = page, ([a for a, _ in pairs], [b for _, b in pairs])
    yield row(
        f"the slowest of {len(pages)} pages ({slowest.stem}) is usable",
        "s",
        ours,
        1,
        "the same page without scripts",
        theirs,
    )
    yield row("errors of the pages' scripts", "errors", [len(browser.errors)], 0)
    yield row(
        "the whole site",
        "MB",
        [sum(file.stat().st_size for file in site.rglob("*") if file.is_file()) / 1e6],
        25,
    )


def _seconds_to_use(browser: Browser, page: Path) -> float:
    browser.call("Page.navigate", url=page.as_uri())
    browser.until(f"location.href === '{page.as_uri()}'")
    return browser.js(USABLE) / 1e3


# ---- in a notebook ----


def notebook_rows(kernels: int) -> Iterator[TableRow]:
    """Run the cells of a learner in fresh kernels: in one go, and with time to read in between."""
    imports, first, read, alone, after, next_, launched, changed = ([] for _ in range(8))
    for _ in range(kernels):
        with Kernel() as kernel:
            imports.append(kernel.seconds(IMPORTS))
            first.append(kernel.seconds(WATCH, shows="<figure"))
            for _ in range(5):
                next_.append(kernel.seconds(WATCH, shows="<figure"))
                launched.append(kernel.seconds(LAUNCH))
            kernel.seconds(EXPLORE, shows="<figure")
            changed += [kernel.seconds(CHANGE.format(numbers)) for numbers in (12, 16, 20, 24, 28)]
        with Kernel() as kernel:
            kernel.seconds(IMPORTS)
            time.sleep(READING)
            read.append(kernel.seconds(WATCH, shows="<figure"))
        with Kernel() as kernel:  # the kernel and the fork server import torch at the same time
            alone.append(kernel.seconds(f"import parallel101 as p101\n\n{WATCH}", shows="<figure"))
        after.append(time_spawn("gloo"))
    spawn, launch = "`spawn` of 4 ranks", "`launch` of 4 ranks, without a picture"
    yield row(
        "notebook: the first `watch`, at once after the imports", "s", first, 2.5, spawn, after
    )
    yield row(
        "`import torch`, `import parallel101` and the first `watch`",
        "s",
        [a + b for a, b in zip(imports, first)],
        2.5,
        spawn,
        after,
    )
    yield row(
        "`import parallel101` and the first `watch`, in one cell", "s", alone, 2.5, spawn, after
    )
    yield row(f"the first `watch`, {READING:g} s after the imports", "s", read, 2.5, spawn, after)
    yield row("the next `watch`", "s", next_, 0.2, launch, launched)
    yield row("a change in the explorer: 4 ranks, gloo", "s", changed, 0.3, launch, launched)
