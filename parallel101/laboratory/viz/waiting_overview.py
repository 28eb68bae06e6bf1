"""An overview of a long run: for each rank, which share of each moment it computed.

The rest of the row is the share in which it waited.

    rank 0  ▇▇▇▇▇▇▅▅▅▅▅▅▅▅▅▅▅▅
    rank 1  ▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇▇      the others wait for it

A timeline of so many calls would show single bars that are narrower than a pixel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from parallel101.laboratory.analysis.run_window import run_times
from parallel101.laboratory.analysis.waiting import Wait, waiting_shares
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.record.units import human_seconds
from parallel101.laboratory.viz.rows import LEFT, RIGHT, TimeRows, trace_facts
from parallel101.laboratory.viz.scene import Scene, box

TOP, BINS = 96.0, 280


def waiting_overview_scene(trace: Trace, waited: Sequence[Wait]) -> Scene:
    """Draw the share of computing and waiting over time, a row for each rank.

    Args:
        trace, waited: a record with waits, and what `analysis.waiting.waits` says about it.
    """
    n = trace.world_size
    row, tall = (40.0, 32.0) if n <= 16 else (16.0, 14.0) if n <= 40 else (6.0, 5.0)
    begin, end = run_times(trace)
    scene = Scene(
        960,
        math.ceil(TOP + n * row + 40),
        "Overview",
        f"Computing and waiting of {n} ranks in {human_seconds(end - begin)}.",
    )
    rows = TimeRows(scene, begin, end - begin)
    facts = f"{trace_facts(trace, whole_run=True)} · {human_seconds(end - begin)}"
    rows.head(facts, "How much of each moment a rank computed and waited.")
    for x, label, class_ in ((28, "computing", "f4"), (128, "waiting", "idle")):
        scene.rect(x, 76, 14, 10, class_, rx=2, style="stroke:var(--line)")
        scene.write(label, x + 20, 85, 12.5, "m")
    width = (RIGHT - LEFT) / BINS
    for rank, shares in enumerate(waiting_shares(trace, waited, BINS)):
        y = TOP + rank * row
        if rank % math.ceil(15 / row) == 0:
            rows.rank(rank, y + tall / 2 + 4, 12)
        alive = [(place, share) for place, share in enumerate(shares) if share is not None]
        waiting = "".join(
            box(LEFT + place * width, y, width, tall) for place, share in alive if share > 0
        )
        computing = "".join(
            box(LEFT + k * width, y + tall * share, width, tall * (1 - share))
            for k, share in alive
            if share < 1
        )
        for path, class_ in ((waiting, "idle"), (computing, "f4")):
            if path:
                scene.path(path, class_)
        scene.add("path", d=f"M{LEFT} {y + tall:.1f}H{RIGHT}", style="stroke:var(--line)")
    rows.axis(TOP + n * row)
    return scene
