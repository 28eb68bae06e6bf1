"""The collective view shows what the record proves: every cell, every step and every error, on
runs of real algorithms.
"""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from functools import partial
from html import unescape

import pytest
import torch
import torch.distributed as dist

import parallel101 as p101
from parallel101.laboratory.analysis.provenance import decode, origin_tensor
from parallel101.laboratory.analysis.replay import replay_of
from parallel101.laboratory.record.trace import Trace
from parallel101.laboratory.viz.collective import TOP, collective_scene
from parallel101.laboratory.viz.many_ranks import sending_over_time, step_facts
from parallel101.laboratory.viz.matrix import LEGEND, grid_of
from tests.viz import programs as p
from tests.viz.drawn import elements, event, text_boxes, texts, title_of, titled
from tests.viz.programs import exchange, me, recorded

# program, elements per rank on n ranks, steps, topology; the last word is the operation
CASES = {
    "ring all-reduce": (p.ring_all_reduce, lambda n: 2 * n, lambda n: 2 * (n - 1), "ring"),
    "uneven all-reduce": (p.ring_all_reduce, lambda n: 2 * n + 1, lambda n: 2 * (n - 1), "ring"),
    "ring reduce-scatter": (p.ring_reduce_scatter, lambda n: n, lambda n: n - 1, "ring"),
    "ring all-gather": (p.ring_all_gather, lambda n: 2, lambda n: n - 1, "ring"),
    "binomial broadcast": (p.binomial_broadcast, lambda n: 3, lambda n: (n - 1).bit_length(), None),
    "binomial reduce": (p.binomial_reduce, lambda n: 3, lambda n: (n - 1).bit_length(), None),
    "flat scatter": (p.flat_scatter, lambda n: 2 * n - 1, lambda n: n - 1, "star"),
    "eager scatter": (p.eager_scatter, lambda n: n, lambda n: n - 1, "star"),
    "flat gather": (p.flat_gather, lambda n: 2, lambda n: n - 1, "star"),
    "pairwise all-to-all": (p.pairwise_all_to_all, lambda n: n, lambda n: n - 1, None),
}


def drawn(program, n, numel, **options):
    return collective_scene(*recorded(program, n, numel, **options))


def stripes_at_the_end(scene, trace, results):
    """{(rank, chunk): ranks} as drawn: for each stripe, whether its middle lies inside a
    visible path of the last moment.
    """
    replay, drawn = replay_of(trace, results), {}
    grid = grid_of(replay.ranks, len(replay.chunks))
    shape = re.compile(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)")
    paths = " ".join(path.get("d") for path in elements(scene, "path", r"f\d"))
    boxes = [tuple(map(float, box)) for box in shape.findall(paths)]
    for rank, chunk in replay.cells:
        stripes, row = replay.chunks[chunk].stripes, replay.ranks.index(rank)
        for k, origin in enumerate(stripes):
            x, y, width, height = grid.stripe(row, chunk, k, len(stripes))
            x, y = x + width / 2, y + height / 2
            if any(bx <= x <= bx + w and by <= y <= by + h for bx, by, w, h in boxes):
                drawn[rank, chunk] = (*drawn.get((rank, chunk), ()), origin)
    return replay, drawn


@pytest.mark.parametrize(("clock", "n"), [("virtual", 2), ("virtual", 5), ("uneven", 4)])
@pytest.mark.parametrize("case", CASES)
def test_steps_names_and_cells(case, n, clock):
    (program, numel, steps, kind), operation = CASES[case], case.split()[-1]
    trace, results = recorded(program, n, numel(n), uneven=clock == "uneven")
    scene = collective_scene(trace, results)
    assert len(scene.stops) == steps(n)
    title = scene.title.lower()
    assert title.endswith(operation) or (n == 2 and title == f"{operation} on two ranks")
    replay, drawn = stripes_at_the_end(scene, trace, results)
    if n > 3 and kind:
        assert replay.topology.kind == kind
    adds = [*map(replay.adds, range(replay.steps))]
    arcs = [arc.get("style") for arc in elements(scene, "path", "arc")][1::2]
    assert arcs == [f"stroke:var(--{'ink' if add else 'accent'})" for add in adds]
    bars = {bar.get("class") for bar in elements(scene, "path", "sum|copy")}
    assert bars == {"sum" if add else "copy" for add in adds}
    if operation == "all-to-all":  # a chunk holds the parts of several ranks side by side
        assert drawn == {(rank, rank): tuple(range(n)) for rank in range(n)}
        return
    truth = {}  # decoded from what the ranks returned
    for rank, result in enumerate(results):
        counts = [term.counts for term in decode(result.tolist(), n) if any(term.counts)]
        for chunk, held in replay.returned[rank].items():
            if held in counts:
                stripes = replay.chunks[chunk].stripes
                truth[rank, chunk] = tuple(r for r in stripes if held[r])
    assert drawn == truth


@pytest.mark.parametrize("n", [3, 8])
def test_data_that_is_added_twice_and_data_that_is_missing_are_flagged(n):
    scene = drawn(TWICE, n, 2 * n)
    assert "On rank 1, chunk a now contains rank 0's data more than once." in scene.stops[0].label
    assert scene.stops[-1].label.endswith("On every rank, chunk a has rank 0's data twice.")
    assert "all-reduce" not in scene.title.lower()
    assert texts(scene).count("×2") == n and "×2" not in scene.svg(scene.stops[0].start)
    trace, results = recorded(partial(p.broken_ring_all_reduce, lost=(2, 0)), n, 2 * n)
    scene = collective_scene(trace, results)
    assert scene.stops[-1].label.endswith("On every rank, chunk b lacks rank 2's data.")
    assert len(elements(scene, "rect", "gone")) == n
    _, shown = stripes_at_the_end(scene, trace, results)
    others = tuple(r for r in range(n) if r != 2)
    assert {rank: shown[rank, 1] for rank in range(n)} == dict.fromkeys(range(n), others)


def shifted(x):
    rank, n = me()
    return x + exchange([((rank + 1) % n, x)], [((rank - 1) % n, x)])[0].roll(-1)


def in_pairs(x):
    partner = me()[0] ^ 1
    return x + exchange([(partner, x)], [(partner, x)])[0]


def two_of_four(x):
    pair, rank = dist.new_group([1, 3]), me()[0]
    if rank in (1, 3):
        return p101.all_reduce(x, group=pair, algorithm="recursive_doubling")
    return x[:0]


def ordinary(x):
    rank, n = me()
    values = torch.tensor([1.5, 2.5])
    return exchange([((rank + 1) % n, values)], [((rank - 1) % n, values)])[0].round()


def empty(x):
    peer = 1 - me()[0]
    return exchange([(peer, x[:0])], [(peer, x[:0])])[0]


TWICE = partial(p.broken_ring_all_reduce, twice=(1, 0))
RING = (p.ring_all_reduce, 4, 8, "Ring all-reduce")
LETTERS = (p.pairwise_all_to_all, 4, 8, "Pairwise all-to-all")
BARRIER = (lambda x: p101.barrier(), 6, 2, "Barrier")
# words in the picture, its sentences or its last step → program, ranks and numbers; title
PICTURES = {
    "One rank has no other rank to send to.": (p.ring_all_reduce, 1, 4, "One rank"),
    "Elements from different positions were added together, on every rank.": (
        *(shifted, 3, 6, "Messages on a ring of 3 ranks"),
    ),
    "This is what each rank ends with.": (in_pairs, 4, 2, "Messages on a grid of 4 ranks"),
    "2 of 4 ranks": (two_of_four, 4, 2, "All-reduce on two ranks"),
    "These values do not show which rank they came from.": (
        *(ordinary, 4, 2, "Messages on a ring of 4 ranks"),
    ),
    "0 B sent so far": (empty, 2, 1, "Barrier on two ranks"),
    "Step 4 of 4": (p.both_ways_all_gather, 9, 2, "Bidirectional ring all-gather"),
    "Step 3 of 3": (p.doubling_all_reduce, 8, 4, "Recursive-doubling all-reduce"),
    "Step 2 of 2": (p.doubling_all_gather, 4, 2, "Recursive-doubling all-gather"),
    "Step 6 of 6": (p.chain_broadcast, 4, 4, "Chain broadcast"),
    "before it has heard from every other rank": BARRIER,
    "carry no data of x, only zeros.": BARRIER,
    "a to rank 0, b to rank 1, c to rank 2 and d to rank 3.": LETTERS,
    "Chunks go by letter: a to rank 0, b to rank 1, and so on.": LETTERS,
    "Step 2 of 6, reduce-scatter: Each rank sends a partial sum to its right neighbour, which adds "
    "it to its own.": RING,
    "Step 5 of 6, all-gather: Each rank sends a finished chunk to its right neighbour, which copies"
    " it.": RING,
    "96 B sent by each rank so far": RING,
    "4 ranks · sim · 64 B in 4 chunks": RING,
    "There are too many ranks or chunks to draw them all.": (
        *(p.chain_broadcast, 4, 24, "Chain broadcast"),
    ),
}


@pytest.mark.parametrize("said", PICTURES)
def test_title_and_words(said):
    program, n, numel, title = PICTURES[said]
    scene = drawn(program, n, numel, uneven=n == 9)
    everything = [scene.description, scene.intro, *(stop.label for stop in scene.stops)]
    shown = " ".join([*everything, unescape(scene.svg())])
    assert scene.title == title and said in shown, (scene.title, shown)
    assert ("product" in shown) == (program is ordinary)
    assert program is not in_pairs or "lacks" not in shown
    if program is shifted:  # the chunk's name, and a flag for each rank
        assert texts(scene).count("?") == 1 + 3


def test_inputs_set_what_each_rank_starts_with():
    trace, results = recorded(p.binomial_broadcast, 4, 2)
    begun = [torch.tensor([]) if rank else results[0] for rank in range(4)]
    replay = replay_of(trace, results, begun)
    assert [any(replay.cells[rank, 0][0][1]) for rank in range(4)] == [True, False, False, False]


def test_without_contents_the_waits_are_drawn():
    """Rank 1 posts its receive at once; rank 0 sends after two seconds, for half a second."""

    def late(x):
        if me()[0] == 0:
            p101.compute(2.0)
            dist.send(x, 1)
        else:
            dist.recv(x, 0)

    links = p101.Network(latency=0.5, bandwidth=math.inf)
    run = p101.launch(lambda: late(torch.ones(4)), world_size=2, backend="sim", network=links)
    scene = run.animate()
    assert all(line in unescape(scene.svg()) for line in LEGEND)
    assert "not recorded" not in scene.svg()
    bars = {bar.get("class"): bar for bar in titled(scene, "rank 1, recv from")}
    wide = {class_: float(bar.get("width")) for class_, bar in bars.items() if class_ != "ground"}
    assert {*wide} == {"idle", "recv"} and wide["idle"] / wide["recv"] == pytest.approx(4, rel=0.02)
    assert [bar.get("class") for bar in titled(scene, "rank 0, send to")] == ["send"]
    assert scene.description.endswith("The longest wait: rank 1, recv from rank 0, 2 s.")
    assert "waits 2 s" in title_of(bars["idle"])
    trace, results = recorded(p.ring_all_reduce, 4, 8, payload=False)
    scene = collective_scene(trace, results)
    assert len(titled(scene, "send to")) >= 4 * 6
    crowded = collective_scene(*recorded(p.ring_all_reduce, 16, 16, payload=False))
    low = [bottom for text, *_, bottom in text_boxes(crowded, 0.0) if text in LEGEND]
    assert len(low) == 2 and max(low) < TOP - 5, "above the bars of the sends"
    assert scene.stops[2].label == "Step 3 of 6: Each rank sends 16 B to its right neighbour."


def test_torchs_own_collectives_are_named():
    data = [torch.ones(4)] * 2
    calls = [event("all_reduce", rank, 0.0, 1.0, nbytes=32) for rank in range(2)]
    scene = collective_scene(Trace(calls, 2, "gloo"), data)
    assert scene.stops == [] and "torch's own all_reduce moved the data" in scene.svg()
    summed = sum(origin_tensor(rank, 2, 4) for rank in range(2))
    scene = collective_scene(Trace(calls, 2, "gloo"), [summed, summed])
    assert scene.title == "All-reduce"
    _, drawn = stripes_at_the_end(scene, Trace(calls, 2, "gloo"), [summed, summed])
    assert drawn == {(0, 0): (0, 1), (1, 0): (0, 1)}


def back_and_forth(x):
    rank, _ = me()
    for step in range(62):
        exchange([(1 - rank, x)], []) if step % 2 == rank else exchange([], [(1 - rank, x)])
    return x


@pytest.mark.parametrize("steps", [0, 1, 5, 7, 11, 17, *range(18, 33, 2), 40, 62])
def test_the_player_and_the_loop_have_the_same_duration(steps):
    """After the `dur` of its animations an SVG starts again, so a longer player would end with
    the first moment.
    """
    trace, results = recorded(back_and_forth, 2, 1)  # each message takes a second
    beginning = Trace([event for event in trace.events if event.end <= steps], 2, "sim")
    scene = collective_scene(beginning, results)
    assert len(scene.stops) == steps and len(scene.html()) < 80_000 + 4_000 * steps
    for svg in (scene.svg(scene.duration * k / 10) for k in range(11)):
        ET.fromstring(svg)
    assert all(a.end <= b.start for a, b in zip(scene.stops, scene.stops[1:]))
    assert not steps or (scene.stops[0].start > 0 and scene.stops[-1].end == scene.duration)
    written = set(re.findall(r'dur="(.*?)s"', scene.svg(smil=True)))
    duration = json.loads(re.search(r'"duration": ([\d.]+)', scene.html())[1])
    assert {float(dur) for dur in written} == ({duration} if steps else set())


# ── More ranks than are drawn one by one


def without_origin(n, program=p.binomial_broadcast):
    """More ranks than an int64 can tell apart: plain numbers."""
    return recorded(program, n, 0, payload=False)


@pytest.mark.parametrize("n", [17, 64, 128])
def test_many_ranks_are_summed_up(n):
    trace, results = recorded(p.binomial_broadcast, n, 1) if n < 20 else without_origin(n)
    scene = collective_scene(trace, results)
    ET.fromstring(scene.svg())
    assert len(scene.stops) == math.ceil(math.log2(n))
    replay = replay_of(trace)
    assert step_facts(replay, 0)[::2] == ["1 message of 8 B", f"1 of {n} ranks sends"]
    share = sending_over_time(replay, 0.0, trace.makespan)
    assert share[0] == pytest.approx(1 / n)
    assert sum(share) / len(share) == pytest.approx((n - 1) / n / len(scene.stops), abs=0.01)


def each_to(*ranks: str) -> list[str]:
    return [f"each to the rank {rank}" for rank in ranks]


WAYS = {  # the messages of the first steps
    "ring": (p.ring_all_gather, each_to("1 higher, modulo 20") * 19),
    "barrier": (
        lambda x: p101.barrier() and None,
        each_to(*(f"{k} higher, modulo 20" for k in (1, 2, 4, 8)), "4 lower, modulo 20"),
    ),
    "gather": (p.flat_gather, each_to("1 lower", "2 lower", "3 lower")),
    "doubling": (p.doubling_all_reduce, ["between ranks that are 2 apart"]),
}


@pytest.mark.parametrize("name", WAYS)
def test_the_messages_of_a_step_are_said_in_words(name):
    program, said = WAYS[name]
    replay = replay_of(without_origin(20, program)[0])
    steps = [step_facts(replay, step)[1] for step in range(replay.steps)]
    assert steps[: len(said)] == said or (name == "doubling" and said[0] in steps)


MANY = {  # the end of the last sentence → the program and the title
    "with the data of all 17 ranks in it once.": (p.ring_all_reduce, "Ring all-reduce"),
    "has rank 0's data twice.": (TWICE, "Messages on a ring of 17 ranks"),
    "so the result is not judged.": (
        *(lambda x: p101.all_reduce(p101.all_reduce(x)), "Messages on 17 ranks"),
    ),
}


@pytest.mark.parametrize("ending", MANY)
def test_the_result_of_more_ranks_than_are_drawn_is_judged(ending):
    program, title = MANY[ending]
    scene = p101.watch(program, 17, backend="sim").animate()
    assert scene.stops[-1].label.endswith(ending) and scene.title == title, scene.stops[-1].label
    assert ending.split()[-1] in scene.svg()


# ── watch


@pytest.mark.parametrize("backend", ["gloo", "sim"])
def test_a_function_of_ones_own_is_watched(backend):
    run = p101.watch(p.broken_ring_all_reduce, 3, backend=backend)
    scene = run.animate()
    assert scene.title == "Ring all-reduce" and len(scene.stops) == 4
    assert scene.stops[-1].label.endswith("with the data of all 3 ranks in it once.")
    assert run.animate("My ring").title == "My ring" and "receive" in run.timeline().svg()


@pytest.mark.parametrize(("n", "numel"), [(2, 1), (3, 2), (5, 11), (1, 4), (18, 1)])
def test_any_size_is_watched(n, numel):
    run = p101.watch(p.broken_ring_all_reduce, n, numel=numel, backend="sim")
    assert all(result.numel() == numel for result in run.results)
    run.animate().svg()


def test_shape_and_dtype_of_what_is_watched_and_a_function_that_returns_nothing():
    size = {"shape": (2, 3), "dtype": torch.float64, "backend": "sim"}
    run = p101.watch(lambda x: x.sum() * 0 + torch.tensor(x.shape), 2, **size)
    for result in run.results:
        assert (result.tolist(), result.dtype) == ([2, 3], torch.float64)
    nothing = p101.watch(lambda x: p.broken_ring_all_reduce(x) and None, 2, numel=1, backend="sim")
    assert nothing.animate().title == "All-reduce on two ranks"
    tables = nothing.before_after()
    assert tables.stops[-1].label.endswith("The function returned nothing.")
    assert ">nothing<" in tables.svg()
