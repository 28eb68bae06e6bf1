"""An explorer of the collectives: each change runs the collective again and shows the record.

         this run    closed form    your prediction
steps    6           6              6 ✓ right
bytes    96 B        96 B

The reader chooses an operation, an algorithm, and ranks that are processes (gloo) or virtual (sim).
Virtual ranks have links of some topology and speed. Up to 16 ranks hold values that show whose data
is where. With more ranks, or a size of up to 1 GiB, only the clock runs: each number that is sent
counts as many bytes as the size needs, so no memory is filled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from parallel101 import autograd
from parallel101.cost.closed_forms import closed_form
from parallel101.laboratory.analysis.critical_path import critical_path
from parallel101.laboratory.analysis.provenance import most_elements
from parallel101.laboratory.analysis.steps import steps_of
from parallel101.laboratory.ranks.launch import launch
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.record.units import human_bytes, human_seconds
from parallel101.laboratory.sim.simulate import simulate
from parallel101.laboratory.viz.collective_run import (
    BLOCKS,
    ROOTS,
    TOPOLOGIES,
    enlarged,
    links,
    program,
)
from parallel101.laboratory.viz.explore.explorer import Explorer, ExplorerResult, menu, slider
from parallel101.laboratory.viz.watch import watch

OPERATIONS = ("broadcast", "scatter", "gather", "reduce", "all_gather", "reduce_scatter",
              "all_reduce", "all_to_all", "barrier")  # fmt: skip
# and the unit of a bare prediction
QUANTITIES = {
    "steps": "",
    "busiest rank sends": "B",
    "bytes on the critical path": "B",
    "time": "µs",
}
TEXT: dict[str, Callable[[float], str]] = {"": "{:.0f}".format}
TEXT |= {"B": human_bytes, "µs": human_seconds}
# for other numbers of ranks than powers of two, with two more steps
IN_PAIRS = ("recursive_doubling", "recursive_halving", "rabenseifner")
MOST_NUMBERS, MOST_SEGMENTS = 48, 16
BLOCK = 16  # numbers in a rank's block, where each stands for several
NUMBERS = "the numbers"
ON_GLOO = (
    "On gloo, messages go through this machine: size, network, latency and bandwidth have no "
    "effect. Choose sim to set them."
)
SIZES = {human_bytes(4**k): 4**k for k in range(5, 16)}  # 1 KiB, 4 KiB, … 1 GiB
WORLDS: dict[str, dict[str, Any]] = {
    "gloo": {"backend": "gloo"},
    "sim": {"backend": "sim"},
    "sim, NCCL's rules": {"backend": "sim", "rules": "nccl"},
}
# gloo: processes on a laptop; up to MOST_WATCHED, stripes can still be told apart
MOST_RANKS = {"gloo": 8, "sim": 64, "sim, NCCL's rules": 64}
MOST_WATCHED = 16
LATENCIES = {"0 s": 0.0, "1 µs": 1e-6, "5 µs": 5e-6, "20 µs": 2e-5, "100 µs": 1e-4, "1 s": 1.0}
BANDWIDTHS = {
    "1 B/s": 1.0,
    "1 MB/s": 1e6,
    "10 MB/s": 1e7,
    "1.25 GB/s": 1.25e9,
    "50 GB/s": 5e10,
    "no limit": math.inf,
}
# of a function of the reader's own
WITHOUT_OPERATION = {"operation": "", "algorithm": "", "size": NUMBERS, "root": 0, "segments": 1}
# topology → closed_form's links
FORMS = {"switch": "switch", "ring": "ring", "one-way ring": "one_way_ring"}


def most_numbers(ranks: int) -> int:
    """Return the most elements per rank that fit the slider and can carry their origin."""
    if ranks > MOST_WATCHED:
        return 2 * MOST_RANKS["sim"]
    return min(MOST_NUMBERS, most_elements(ranks, torch.int64))


def explore_collective(
    operation: str | Callable[[torch.Tensor], Any] = "all_reduce",
    algorithm: str = "ring",
    *,
    ranks: int = 4,
    numbers: int = 8,
    size: str = NUMBERS,
    root: int = 0,
    segments: int = 4,
    world: str = "gloo",
    network: str = "switch",
    latency: str = "20 µs",
    bandwidth: str = "1 MB/s",
    predict: str | None = None,
) -> Explorer:
    """Run a collective, animate it, and compare its steps, bytes and time with the closed form.

    Args:
        operation: one of OPERATIONS, or a function of your own, which takes a tensor. It has no
            algorithm, size, root and closed form.
        numbers: elements of each rank's tensor, of 8 bytes each.
        size: on sim, the bytes of each rank's tensor instead, one of SIZES. It is rounded to equal
            blocks. Then the picture has no contents.
        segments: into how many a pipelined chain cuts the array, if it has as many elements.
        world: "gloo", "sim" or "sim, NCCL's rules". The last one shows what would hang on NCCL. The
            others are for sim only:
        network: "switch", "ring", "one-way ring", "line", "torus" or "two nodes".
        latency, bandwidth: of a link; one of LATENCIES and of BANDWIDTHS.
        predict: one of QUANTITIES, for which the reader is asked before the first run is shown.

    Raises:
        ValueError: an unknown setting, or a number outside its slider's range.
    """
    own = operation if callable(operation) else None
    controls: dict[str, Any] = {
        "world": menu("world", WORLDS, world),
        "ranks": slider("ranks", 1, MOST_RANKS[world], ranks),
        "numbers": slider("numbers", 1, most_numbers(ranks), numbers),
        "network": menu("network", TOPOLOGIES, network),
        "latency": menu("latency", LATENCIES, latency),
        "bandwidth": menu("bandwidth", BANDWIDTHS, bandwidth),
    }
    if own is None:
        chosen = menu("operation", OPERATIONS, operation)
        known = menu("algorithm", autograd.algorithms(str(operation)), algorithm)
        controls = {"operation": chosen, "algorithm": known} | controls
        controls["size"] = menu("size", (NUMBERS, *SIZES), size)
        controls["root"] = slider("root", 0, ranks - 1, root)
        controls["segments"] = slider("segments", 1, MOST_SEGMENTS, segments)
    return Explorer(controls, partial(run, own), adjust, quantities=QUANTITIES, predict=predict)


def adjust(controls: Mapping[str, Any], changed: str) -> str:
    """Offer what the operation, the world and the ranks have, and say why the rest is off."""
    world, ranks, numbers = (controls[name] for name in ("world", "ranks", "numbers"))
    off = dict.fromkeys(("network", "latency", "bandwidth"), gloo := world.value == "gloo")
    ranks.max, why = MOST_RANKS[world.value], [ON_GLOO] * gloo
    numbers.max = most_numbers(ranks.value)
    if "operation" in controls:
        operation, algorithm = controls["operation"].value, controls["algorithm"]
        if algorithm.options != (names := tuple(autograd.algorithms(operation))):
            kept = algorithm.value if algorithm.value in names else names[0]
            algorithm.options, algorithm.value = names, kept
        if changed == "ranks" and operation not in (*BLOCKS, "barrier"):  # equal blocks again
            blocks = min(round(numbers.value / ranks.value), numbers.max // ranks.value)
            numbers.value = max(1, blocks) * ranks.value
        controls["root"].max = ranks.value - 1
        off["size"] = gloo or operation == "barrier"
        if off["size"]:
            controls["size"].value = NUMBERS
        off["numbers"] = operation == "barrier" or controls["size"].value != NUMBERS
        off["root"] = operation not in ROOTS
        off["segments"] = algorithm.value != "pipelined_chain"
        why = ["A barrier sends no numbers."] * (operation == "barrier") + why
        why = [f"{operation} has no root."] * off["root"] + why
    for name, is_off in off.items():
        controls[name].disabled = is_off
    return " ".join(why)


def run(own: Callable[[torch.Tensor], Any] | None, **settings: Any) -> ExplorerResult:
    """Run a collective, or a function of the reader's own, and count.

    `settings`: the values of the controls, by name.
    """
    of = SimpleNamespace(**WITHOUT_OPERATION | settings)
    numbers, each = of.numbers, 1  # each number that is sent stands for so many
    if of.size != NUMBERS:
        blocks = 1 if of.operation in BLOCKS else of.ranks  # equal ones
        in_block = max(1, round(SIZES[of.size] / 8 / blocks))
        if in_block > 4 * BLOCK:  # not smaller, so that algorithms can cut it
            in_block, each = BLOCK, round(in_block / BLOCK)
        numbers = in_block * blocks
    segment = 8 * -(-numbers // of.segments) if of.algorithm == "pipelined_chain" else None
    cut = {"root": of.root, "segment_bytes": segment}
    function = own or program(of.operation, of.algorithm, module=autograd, **cut)
    speed = LATENCIES[of.latency], BANDWIDTHS[of.bandwidth]
    network = of.network if of.world != "gloo" else ""
    between = links(network, of.ranks, *speed, each=each) if network else None
    on = {"network": between, **WORLDS[of.world]}
    # with values that show their origin; otherwise no contents are recorded
    if watched := of.ranks <= MOST_WATCHED and of.size == NUMBERS:
        ran = watch(function, of.ranks, numel=numbers, **on)
    else:
        start = partial(_call_on_ones, function, numbers)
        ran = launch(start, world_size=of.ranks, trace=True, **on)
    assert ran.trace is not None  # both record
    counted = counts(ran.trace, network, function, numbers, own is not None)
    counted = {what: n * (each if "byte" in what else 1) for what, n in counted.items()}
    ran.trace = enlarged(ran.trace, each) if each > 1 else ran.trace
    counted["busiest rank sends"] = max(ran.trace.bytes_sent)
    counted["time"] = round(ran.trace.makespan, 12)
    picture = ran.animate(None if watched or own else f"{of.operation}, {of.algorithm}")
    if own is not None:
        rows = [(what, shown(counted, what)) for what in QUANTITIES]
        return ExplorerResult(picture, rows, exact=counted)
    of.numbers, of.segment_bytes = numbers * each, segment and segment * each
    expected, note = predicted(of, speed if network else None)
    if of.ranks & (of.ranks - 1) and of.algorithm in IN_PAIRS:
        more = f"which takes two steps more than {1 << of.ranks.bit_length() - 1} ranks need"
        pairs = f"{of.ranks} isn't a power of two: {of.algorithm} first lets ranks work in pairs"
        note = f"{pairs}, {more}. {note}"
    compared = [(what, shown(counted, what), shown(expected, what)) for what in QUANTITIES]
    if "NCCL" in of.world and any(this != form != "–" for _, this, form in compared):
        queue = "Under NCCL's rules, a message also waits for those before it in its rank's queue."
        note = f"{queue} The closed form has none. {note}"
    return ExplorerResult(picture, compared, ("this run", "closed form"), note.strip(), counted)


def shown(numbers: Mapping[str, float], what: str) -> str:
    """Return a number of bytes, seconds or steps as text, or "–" if it is missing."""
    return TEXT[QUANTITIES[what]](numbers[what]) if what in numbers else "–"


def _call_on_ones(function: Callable[[torch.Tensor], Any], numbers: int) -> None:
    function(torch.ones(numbers, dtype=torch.int64))


def counts(
    trace: Trace, network: str, function: Callable[[torch.Tensor], Any], numbers: int, own: bool
) -> dict[str, float]:
    """Return the steps, and the bytes on the critical path.

    Where messages wait for links, as on a ring, two more runs count them, unless the function is
    the reader's `own`. On gloo (no network), which chain took longest is chance.
    """
    if not network:
        return {"steps": 1 + max(steps_of(trace.messages()), default=-1)}
    if network == "switch":
        path = critical_path(trace)
        return {"steps": path.messages, "bytes on the critical path": path.nbytes}
    if own or network == "two nodes":  # has links of two speeds
        return {}
    found = {}
    clocks = {"steps": (1.0, math.inf), "bytes on the critical path": (0.0, 1.0)}
    for what, speed in clocks.items():
        # in this process, which needs no fork: 5 ms, not 50
        between = links(network, trace.world_size, *speed)
        ran = simulate(lambda _: _call_on_ones(function, numbers), trace.world_size, between)
        found[what] = Trace.from_rows(ran.events, trace.world_size, "sim").makespan
    return found


def predicted(
    of: SimpleNamespace, speed: tuple[float, float] | None
) -> tuple[dict[str, float], str]:
    """Return the rows of the closed form, and a sentence that says why some are missing.

    `speed`: latency and bandwidth of the links; None on gloo.
    """
    blocks, network = of.operation in BLOCKS, of.network if speed else "switch"
    if not blocks and of.numbers % of.ranks:
        why = f"{of.ranks} ranks don't divide {of.numbers} numbers."
        return {}, f"The closed forms are for equal blocks: {why}"
    nbytes = 8 * of.numbers * (of.ranks if blocks else 1)
    nbytes = of.ranks if of.operation == "barrier" else nbytes
    what = of.operation, of.algorithm, of.ranks, nbytes
    form = partial(closed_form, *what, segment_bytes=of.segment_bytes)
    sent: dict[str, float] = {"busiest rank sends": form().sent}  # the same on every network
    off_root = network == "one-way ring" and of.operation in ROOTS and of.root > 0
    try:
        cost = form(FORMS[network]) if network in FORMS and not off_root else None
    except ValueError:  # this algorithm has none on these links
        cost = None
    if cost is None:
        on = f"On this network{' and for this root' * off_root}"
        return sent, f"{on}, only the bytes that a rank sends have a simple closed form."
    rows = sent | {"steps": cost.steps, "bytes on the critical path": cost.path}
    if speed is None:
        return rows, "On gloo the time is measured, and includes what the record costs."
    return rows | {"time": round(cost.seconds(*speed), 12)}, ""
