"""The collective view shows what the record proves: every cell, every step and every error, on
runs of real algorithms.
"""

from __future__ import annotations

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
from parallel101.laboratory.viz.matrix import grid_of
from parallel101.laboratory.viz.waiting_calls import LEGEND
from tests.viz import programs as p
from tests.viz.drawn import SVG, event, text_boxes, titled
from tests.viz.programs import exchange, me, recorded

# program, elements per rank on n ranks, steps, topology; the last word is the operation
CASES = {
    "ring all-reduce": (p.ring_all_reduce, lambda n: 2 * n, lambda n: 2 * (n - 1), "ring"),
    "uneven ring all-reduce": (
        *(p.ring_all_reduce, lambda n: 2 * n + 1),
        *(lambda n: 2 * (n - 1), "ring"),
    ),
    "ring reduce-scatter": (p.ring_reduce_scatter, lambda n: n, lambda n: n - 1, "ring"),
    "ring all-gather": (p.ring_all_gather, lambda n: 2, lambda n: n - 1, "ring"),
    "binomial broadcast": (p.binomial_broadcast, lambda n: 3, lambda n: (n - 1).bit_length(), None),
    "binomial reduce": (p.binomial_reduce, lambda n: 3, lambda n: (n - 1).bit_length(), None),
    "flat scatter": (p.flat_scatter, lambda n: 2 * n - 1, lambda n: n - 1, "star"),
    "eager scatter": (p.eager_scatter, lambda n: n, lambda n: n - 1, "star"),
    "flat gather": (p.flat_gather, lambda n: 2, lambda n: n - 1, "star"),
    "pairwise all-to-all": (p.pairwise_all_to_all, lambda n: n, lambda n: n - 1, None),
}


def stripes_at_the_end(scene, trace, results):
    """{(rank, chunk): ranks} as drawn: for each stripe, whether its middle lies inside a
    visible path of the last moment.
    """
    replay = replay_of(trace, results)
    grid = grid_of(replay.ranks, len(replay.chunks))
    box = re.compile(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)")
    paths = cells_panel(scene).iter(f"{SVG}path")
    shapes = [
        box.findall(e.get("d", "")) for e in paths if re.fullmatch(r"f\d", e.get("class", ""))
    ]
    boxes = [tuple(map(float, shape)) for path in shapes for shape in path]
    drawn = {}
    for rank, chunk in replay.cells:
        stripes, row, found = replay.chunks[chunk].stripes, replay.ranks.index(rank), []
        for k, origin in enumerate(stripes):
            x, y, width, height = grid.stripe(row, chunk, k, len(stripes))
            x, y = x + width / 2, y + height / 2
            if any(bx <= x <= bx + w and by <= y <= by + h for bx, by, w, h in boxes):
                found.append(origin)
        if found:
            drawn[rank, chunk] = tuple(found)
    return replay, drawn


def cells_panel(scene):
    return next(
        panel
        for panel in ET.fromstring(scene.svg())
        if "chunk" in [text.text for text in panel.iter(f"{SVG}text")]
    )


@pytest.mark.parametrize(("clock", "n"), [("virtual", 2), ("virtual", 5), ("uneven", 4)])
@pytest.mark.parametrize("case", CASES)
def test_steps_names_and_cells(case, n, clock):
    (program, numel, steps, kind), operation = CASES[case], case.split()[-1]
    trace, results = recorded(program, n, numel(n), uneven=clock == "uneven")
    scene = collective_scene(trace, results)
    assert len(scene.stops) == steps(n)
    assert (
        scene.title.lower().endswith(operation)
        or scene.title == f"{operation.capitalize()} on two ranks"
    )
    replay, drawn = stripes_at_the_end(scene, trace, results)
    if n > 3 and kind:
        assert replay.topology.kind == kind
    truth = {}  # decoded from what the ranks returned
    for rank, result in enumerate(results):
        for term in decode(result.tolist(), n):
            for chunk in replay.returned[rank]:
                if any(term.counts) and replay.returned[rank][chunk] == term.counts:
                    truth[rank, chunk] = tuple(
                        r for r in replay.chunks[chunk].stripes if term.counts[r]
                    )
    if operation != "all-to-all":  # there a chunk holds the parts of several ranks side by side
        assert drawn == truth
    else:
        assert drawn == {(rank, rank): tuple(range(n)) for rank in range(n)}


@pytest.mark.parametrize("n", [2, 5])
def test_in_each_step_of_a_ring_every_rank_gains_one_stripe(n):
    trace, results = recorded(p.ring_reduce_scatter, n, n, uneven=True)
    replay = replay_of(trace, results)
    for step in range(n - 1):
        landings = [
            (replay.messages[i].dst, landing)
            for i in replay.in_step(step)
            for landing in replay.landings[i]
        ]
        assert sorted(rank for rank, _ in landings) == list(range(n))
        assert all(landing.added and sum(landing.carried) == step + 1 for _, landing in landings)


def test_one_rank():
    trace, results = recorded(p.ring_all_reduce, 1, 4)
    scene = collective_scene(trace, results)
    assert scene.title == "One rank" and scene.stops == []
    ET.fromstring(scene.svg())
    assert "One rank has no other rank to send to." in scene.html()


@pytest.mark.parametrize("n", [3, 8])
def test_data_that_is_added_twice_is_flagged(n):
    trace, results = recorded(partial(p.broken_ring_all_reduce, twice=(1, 0)), n, 2 * n)
    scene = collective_scene(trace, results)
    assert "On rank 1, chunk a now contains rank 0's data more than once." in scene.stops[0].label
    assert scene.stops[-1].label.endswith("On every rank, chunk a has rank 0's data twice.")
    assert "all-reduce" not in scene.title.lower()
    texts = [text.text for text in cells_panel(scene).iter(f"{SVG}text")]
    assert texts.count("×2") == n
    assert "×2" not in scene.svg(scene.stops[0].start)


@pytest.mark.parametrize("n", [3, 8])
def test_missing_data_is_flagged(n):
    trace, results = recorded(partial(p.broken_ring_all_reduce, lost=(2, 0)), n, 2 * n)
    scene = collective_scene(trace, results)
    assert scene.stops[-1].label.endswith("On every rank, chunk b lacks rank 2's data.")
    gone = [e for e in cells_panel(scene).iter(f"{SVG}rect") if e.get("class") == "gone"]
    assert len(gone) == n
    _, drawn = stripes_at_the_end(scene, trace, results)
    assert {rank: drawn[rank, 1] for rank in range(n)} == dict.fromkeys(
        range(n), tuple(r for r in range(n) if r != 2)
    )


def test_sums_of_elements_from_different_positions_are_flagged():
    def shifted(x):
        rank, n = me()
        (got,) = exchange([((rank + 1) % n, x)], [((rank - 1) % n, x)])
        return x + got.roll(-1)

    trace, results = recorded(shifted, 3, 6)
    scene = collective_scene(trace, results)
    assert scene.stops[-1].label.endswith(
        "Elements from different positions were added together, on every rank."
    )
    # the chunk's name, and a flag for each rank
    assert [text.text for text in cells_panel(scene).iter(f"{SVG}text")].count("?") == 1 + 3


def test_data_of_another_group_is_not_missing():
    def in_pairs(x):
        partner = me()[0] ^ 1
        return x + exchange([(partner, x)], [(partner, x)])[0]

    trace, results = recorded(in_pairs, 4, 2)
    assert "lacks" not in collective_scene(trace, results).stops[-1].label


def test_ranks_outside_the_group_are_left_out():
    def two_of_four(x):
        pair, rank = dist.new_group([1, 3]), me()[0]
        return (
            p101.all_reduce(x, group=pair, algorithm="recursive_doubling")
            if rank in (1, 3)
            else x[:0]
        )

    trace, results = recorded(two_of_four, 4, 2)
    scene = collective_scene(trace, results)
    assert scene.title == "All-reduce on two ranks" and "2 of 4 ranks" in scene.description


def test_without_results_the_last_state_is_final():
    trace, _ = recorded(p.ring_all_reduce, 4, 8)
    assert collective_scene(trace).title == "Ring all-reduce"
    trace, _ = recorded(partial(p.broken_ring_all_reduce, twice=(1, 0)), 4, 8)
    assert "twice" in collective_scene(trace).stops[-1].label


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
    (wait,) = (bar for bar in titled(scene, "rank 1, recv from") if bar.get("class") == "idle")
    (moves,) = (bar for bar in titled(scene, "rank 1, recv from") if bar.get("class") == "recv")
    assert float(wait.get("width")) / float(moves.get("width")) == pytest.approx(4, rel=0.02)
    assert [bar.get("class") for bar in titled(scene, "rank 0, send to")] == ["send"]
    assert scene.description.endswith("The longest wait: rank 1, recv from rank 0, 2 s.")
    assert "waits 2 s" in wait.find(f"{SVG}title").text
    trace, results = recorded(p.ring_all_reduce, 4, 8, payload=False)
    scene = collective_scene(trace, results)
    assert len(titled(scene, "send to")) >= 4 * 6
    crowded = collective_scene(*recorded(p.ring_all_reduce, 16, 16, payload=False))
    low = [bottom for text, *_, bottom in text_boxes(crowded, 0.0) if text in LEGEND]
    assert len(low) == 2 and max(low) < TOP - 5, "above the bars of the sends"
    assert scene.stops[2].label == "Step 3 of 6: Each rank sends 16 B to its right neighbour."


def test_ordinary_values_are_drawn_as_bytes():
    def ordinary(x):
        rank, n = me()
        values = torch.tensor([1.5, 2.5])
        return exchange([((rank + 1) % n, values)], [((rank - 1) % n, values)])[0].round()

    assert (
        "These values do not show which rank they came from."
        in collective_scene(*recorded(ordinary, 4, 2)).svg()
    )


def test_facts_of_empty_messages_and_of_results_without_messages():
    def empty(x):
        peer = 1 - me()[0]
        return exchange([(peer, x[:0])], [(peer, x[:0])])[0]

    facts = [
        t.text
        for t in ET.fromstring(collective_scene(*recorded(empty, 2, 1, payload=False)).svg()).iter(
            f"{SVG}text"
        )
    ]
    assert "0 B sent so far" in facts
    scene = collective_scene(Trace([], 4, "gloo"), [origin_tensor(rank, 4, 8) for rank in range(4)])
    assert scene.description.startswith("4 ranks · gloo · 4 chunks.")


@pytest.mark.parametrize("n", [3, 5, 8])
def test_sentences_do_not_run_into_the_facts_at_their_right(n):
    """In DejaVu Sans, the widest of the usual fonts, a letter is up to 0.52 of the font size
    wide, or 0.6 in bold.
    """

    def miscounted(x):
        rank, n = me()
        others = [r for r in range(n) if r != rank]
        total = x
        for r, got in zip(
            others, exchange([(r, x) for r in others], [(r, x) for r in others]), strict=True
        ):
            total = total + got * (
                0 if (rank, r % 2) == (0, 1) else 2 if (rank, r % 2) == (1, 0) else 1
            )
        return total

    for program in (
        miscounted,
        p.ring_all_reduce,
        p.binomial_reduce,
        partial(p.broken_ring_all_reduce, twice=(1, 0)),
    ):
        scene = collective_scene(*recorded(program, n, 2 * n))
        lines = [t for t in ET.fromstring(scene.svg()).iter(f"{SVG}text") if t.get("y") == "64"]
        facts = max(0.52 * 13 * len(t.text) for t in lines if t.get("x") == "932")
        for text in (t for t in lines if t.get("x") == "28"):
            wide = (
                float(text.get("font-size"))
                * len(text.text)
                * (0.6 if text.get("class") == "w b" else 0.52)
            )
            assert 28 + wide + 12 < 932 - facts, text.text


@pytest.mark.parametrize(
    "program",
    [p.ring_all_reduce, p.ring_all_gather, p.binomial_reduce],
    ids=["all-reduce", "all-gather", "reduce"],
)
def test_the_step_ring_has_the_colours_of_the_sends(program):
    trace, results = recorded(program, 4, 8)
    replay, root = replay_of(trace, results), ET.fromstring(collective_scene(trace, results).svg())
    arcs = [
        e.get("style").removeprefix("stroke:")
        for e in root.iter(f"{SVG}path")
        if e.get("class") == "arc"
    ][1::2]
    assert arcs == [
        "var(--ink)" if replay.adds(step) else "var(--accent)" for step in range(replay.steps)
    ]
    bars = {e.get("class") for e in root.iter(f"{SVG}path")} & {"sum", "copy"}
    assert bars == {"sum" if arc == "var(--ink)" else "copy" for arc in arcs}


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


def test_the_captions_of_a_ring():
    scene = collective_scene(*recorded(p.ring_all_reduce, 4, 8))
    assert scene.intro == "Each rank starts with its own data."
    second = (
        "Step 2 of 6, reduce-scatter: Each rank sends a partial sum to its right neighbour, "
        "which adds it to its own."
    )
    assert scene.stops[1].label == second
    assert scene.stops[4].label == (
        "Step 5 of 6, all-gather: Each rank sends a finished chunk to its right neighbour, "
        "which copies it."
    )
    assert "96 B sent by each rank so far" in scene.svg()
    assert "4 ranks · sim · 64 B in 4 chunks" in scene.svg()


def test_a_bidirectional_ring_sends_both_ways_in_one_step():
    scene = collective_scene(*recorded(p.halves_all_gather, 5, 4, uneven=True))
    assert scene.title == "Bidirectional ring all-gather" and len(scene.stops) == 4


def test_recursive_doubling_and_the_chain_are_recognised():
    assert (
        collective_scene(*recorded(p.doubling_all_reduce, 8, 4)).title
        == "Recursive-doubling all-reduce"
    )
    assert (
        collective_scene(*recorded(p.doubling_all_gather, 4, 2)).title
        == "Recursive-doubling all-gather"
    )
    chain = collective_scene(*recorded(p.segmented_chain_broadcast, 4, 4))
    assert chain.title == "Chain broadcast" and len(chain.stops) == 4 + 4 - 2


@pytest.mark.parametrize("n", [2, 5])
def test_every_moment_of_a_picture_is_well_formed_and_small(n):
    scene = collective_scene(*recorded(p.ring_all_reduce, n, 2 * n))
    for k in range(11):
        ET.fromstring(scene.svg(scene.duration * k / 10))
    ET.fromstring(scene.svg(smil=True))
    assert scene.stops[0].start > 0 and scene.stops[-1].end == scene.duration
    assert all(x.end <= y.start for x, y in zip(scene.stops, scene.stops[1:], strict=False))
    if n <= 5:
        assert len(scene.html()) < 120_000


def test_a_barrier_is_described_as_one():
    trace, results = recorded(lambda x: p101.barrier(), 6, 2)
    scene = collective_scene(trace, results)
    assert scene.title == "Barrier" and "before it has heard from every other rank" in scene.intro
    texts = [text.text for text in ET.fromstring(scene.svg()).iter(f"{SVG}text")]
    assert "The messages carry no data of x, only zeros." in texts
    assert not any("product" in (text or "") for text in texts)


def test_in_an_all_to_all_a_letter_is_a_destination():
    scene = collective_scene(*recorded(p.pairwise_all_to_all, 4, 8))
    assert "a to rank 0, b to rank 1, c to rank 2 and d to rank 3." in scene.intro
    assert "Chunks go by letter: a to rank 0, b to rank 1, and so on." in scene.svg()
