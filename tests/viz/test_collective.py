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
from tests.viz.drawn import SVG, event, text_boxes, titled
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


def words(element):
    return [text.text for text in element.iter(f"{SVG}text")]


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


@pytest.mark.parametrize("n", [3, 8])
def test_data_that_is_added_twice_is_flagged(n):
    scene = drawn(partial(p.broken_ring_all_reduce, twice=(1, 0)), n, 2 * n)
    assert "On rank 1, chunk a now contains rank 0's data more than once." in scene.stops[0].label
    assert scene.stops[-1].label.endswith("On every rank, chunk a has rank 0's data twice.")
    assert "all-reduce" not in scene.title.lower()
    assert words(cells_panel(scene)).count("×2") == n
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
# program, ranks and numbers; title; words in the picture, its sentences or its last step
PICTURES = {
    "one rank": (p.ring_all_reduce, 1, 4, "One rank", "One rank has no other rank to send to."),
    "mixed": (
        *(shifted, 3, 6, "Messages on a ring of 3 ranks"),
        "Elements from different positions were added together, on every rank.",
    ),
    "another group": (
        *(in_pairs, 4, 2, "Messages on a grid of 4 ranks"),
        "This is what each rank ends with.",
    ),
    "left out": (two_of_four, 4, 2, "All-reduce on two ranks", "2 of 4 ranks"),
    "ordinary values": (
        *(ordinary, 4, 2, "Messages on a ring of 4 ranks"),
        "These values do not show which rank they came from.",
    ),
    "empty messages": (empty, 2, 1, "Barrier on two ranks", "0 B sent so far"),
    "both ways": (
        *(p.halves_all_gather, 5, 4, "Bidirectional ring all-gather"),
        "Step 4 of 4",
    ),
    "doubling": (
        *(p.doubling_all_reduce, 8, 4, "Recursive-doubling all-reduce"),
        "Step 3 of 3",
    ),
    "gather by doubling": (
        *(p.doubling_all_gather, 4, 2, "Recursive-doubling all-gather"),
        "Step 2 of 2",
    ),
    "chain": (p.segmented_chain_broadcast, 4, 4, "Chain broadcast", "Step 6 of 6"),
    "barrier": (
        *(lambda x: p101.barrier(), 6, 2, "Barrier"),
        "before it has heard from every other rank",
    ),
    "zeros": (lambda x: p101.barrier(), 6, 2, "Barrier", "carry no data of x, only zeros."),
    "letters": (
        *(p.pairwise_all_to_all, 4, 8, "Pairwise all-to-all"),
        "a to rank 0, b to rank 1, c to rank 2 and d to rank 3.",
    ),
    "letters below": (
        *(p.pairwise_all_to_all, 4, 8, "Pairwise all-to-all"),
        "Chunks go by letter: a to rank 0, b to rank 1, and so on.",
    ),
    "ring": (
        *(p.ring_all_reduce, 4, 8, "Ring all-reduce"),
        "Step 2 of 6, reduce-scatter: Each rank sends a partial sum to its right neighbour, which "
        "adds it to its own.",
    ),
    "ring, later": (
        *(p.ring_all_reduce, 4, 8, "Ring all-reduce"),
        "Step 5 of 6, all-gather: Each rank sends a finished chunk to its right neighbour, which "
        "copies it.",
    ),
    "facts": (p.ring_all_reduce, 4, 8, "Ring all-reduce", "96 B sent by each rank so far"),
    "size": (p.ring_all_reduce, 4, 8, "Ring all-reduce", "4 ranks · sim · 64 B in 4 chunks"),
    "many chunks": (
        *(p.halves_all_gather, 9, 2, "Bidirectional ring all-gather"),
        "There are too many ranks or chunks to draw them all.",
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_title_and_words(name):
    program, n, numel, title, said = PICTURES[name]
    scene = drawn(program, n, numel, uneven=name == "both ways")
    everything = [scene.description, scene.intro, *(stop.label for stop in scene.stops)]
    shown = " ".join([*everything, unescape(scene.svg())])
    assert scene.title == title and said in shown, (scene.title, shown)
    for word, where in (("lacks", "another group"), ("product", "barrier")):
        assert where != name or word not in shown
    if name == "mixed":  # the chunk's name, and a flag for each rank
        assert words(cells_panel(scene)).count("?") == 1 + 3


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


def miscounted(x):
    rank, n = me()
    others = [r for r in range(n) if r != rank]
    total = x
    for r, got in zip(others, exchange([(r, x) for r in others], [(r, x) for r in others])):
        total = total + got * {(0, 1): 0, (1, 0): 2}.get((rank, r % 2), 1)
    return total


@pytest.mark.parametrize("n", [3, 5, 8])
def test_sentences_do_not_run_into_the_facts_at_their_right(n):
    """In DejaVu Sans, the widest of the usual fonts, a letter is up to 0.52 of the font size
    wide, or 0.6 in bold.
    """
    for program in (miscounted, p.ring_all_reduce, p.binomial_reduce, TWICE):
        scene = drawn(program, n, 2 * n)
        lines = [t for t in ET.fromstring(scene.svg()).iter(f"{SVG}text") if t.get("y") == "64"]
        facts = max(0.52 * 13 * len(t.text) for t in lines if t.get("x") == "932")
        for text in (t for t in lines if t.get("x") == "28"):
            letter = 0.6 if text.get("class") == "w b" else 0.52
            wide = letter * float(text.get("font-size")) * len(text.text)
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
    assert len(scene.stops) == steps
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


WAYS = {
    "ring": (p.ring_all_gather, ["each to the rank 1 higher, modulo 20"]),
    "barrier": (
        lambda x: p101.barrier() and None,
        [f"each to the rank {k} higher, modulo 20" for k in (1, 2, 4, 8)]
        + ["each to the rank 4 lower, modulo 20"],
    ),
    "gather": (p.flat_gather, [f"each to the rank {k} lower" for k in (1, 2, 3)]),
    "doubling": (p.doubling_all_reduce, ["between ranks that are 2 apart"]),
}


@pytest.mark.parametrize("name", WAYS)
def test_the_messages_of_a_step_are_said_in_words(name):
    program, said = WAYS[name]
    replay = replay_of(without_origin(20, program)[0])
    steps = [step_facts(replay, step)[1] for step in range(replay.steps)]
    assert steps[: len(said)] == said or (name == "doubling" and said[0] in steps)
    assert name != "ring" or {*steps} == {*said}


MANY = {
    "right": (
        *(p.ring_all_reduce, "Ring all-reduce"),
        "with the data of all 17 ranks in it once.",
    ),
    "added twice": (TWICE, "Messages on a ring of 17 ranks", "has rank 0's data twice."),
    "not known": (
        *(lambda x: p101.all_reduce(p101.all_reduce(x)), "Messages on 17 ranks"),
        "so the result is not judged.",
    ),
}


@pytest.mark.parametrize("name", MANY)
def test_the_result_of_more_ranks_than_are_drawn_is_judged(name):
    program, title, ending = MANY[name]
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
    assert [(result.tolist(), result.dtype) for result in run.results] == [
        ([2, 3], torch.float64)
    ] * 2
    nothing = p101.watch(lambda x: p.broken_ring_all_reduce(x) and None, 2, numel=1, backend="sim")
    assert nothing.animate().title == "All-reduce on two ranks"
