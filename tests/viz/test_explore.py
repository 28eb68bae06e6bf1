"""The explorer of collectives: every control leads to a new result, the prediction stands beside
it, and what can't be is said in words.
"""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from parallel101 import autograd
from parallel101.laboratory.viz.explore import collective_explorer as module
from parallel101.laboratory.viz.explore import explore_collective
from parallel101.laboratory.viz.explore.explorer import verdict


@pytest.fixture(scope="module")
def collective():
    return explore_collective(world="sim")


def move(explorer, **values) -> None:
    """Move some controls, in this order."""
    for name, value in values.items():
        explorer.controls[name].value = value


def rows(explorer) -> dict[str, list[str]]:
    """What → its values, from the plain text of the result."""
    plain = explorer.output.outputs[0]["data"]["text/plain"]
    pairs = (row.split(": ", 1) for row in plain.split("; "))
    return {what: values.split(", ") for what, values in pairs}


def shown(explorer) -> str:
    return explorer.output.outputs[0]["data"]["text/html"]


# ── Predictions


def predict(explorer, text: str, quantity: str = "") -> None:
    explorer.prediction.value, explorer.quantity.value = text, quantity or explorer.quantity.value
    explorer.run_button.click()


def test_a_prediction_waits_for_the_button_and_then_stands_beside_the_result():
    explorer = explore_collective(world="sim")
    before = explorer.html
    assert "your prediction" not in before
    explorer.prediction.value = "7"
    move(explorer, ranks=3, numbers=6)
    assert explorer.html == before and "Press Run" in explorer.status.value
    explorer.run_button.click()
    assert "<strong>7</strong> ✗ too high" in explorer.html
    assert rows(explorer)["steps"] == ["4", "4"] and explorer.prediction.value == ""
    assert explorer.status.value == "steps: you predicted 7, it is 4: too high."
    explorer.prediction.value = "a <b>ig one"  # in words, which nothing judges
    explorer.prediction._handle_custom_msg({"event": "submit"}, [])
    assert "<strong>a &lt;b&gt;ig one</strong> </td>" in explorer.html
    move(explorer, ranks=2)
    assert "prediction" not in explorer.html and rows(explorer)["steps"][0] == "2"
    # a number without a unit has the one that the empty field names
    assert explorer.prediction.placeholder == "a number, or words"
    predict(explorer, "64", "busiest rank sends")
    assert explorer.prediction.placeholder == "in B, or with a unit"
    assert explorer.status.value == "busiest rank sends: you predicted 64 B, it is 48 B: too high."


def test_what_is_to_be_predicted_is_not_shown_before_but_a_page_without_a_kernel_has_it():
    explorer = explore_collective(world="sim", predict="busiest rank sends")
    for step, said in (
        (lambda: None, "First predict the busiest rank sends"),
        (lambda: move(explorer, ranks=2), "First predict"),
        (explorer.run_button.click, "Write down a prediction first"),  # a second press shows it
    ):
        step()
        assert said in explorer.status.value and "<table>" not in shown(explorer)
    assert explorer.quantity.value == "busiest rank sends"
    assert "96 B" in explorer._repr_mimebundle_()[0]["text/html"]
    predict(explorer, "64 B")
    assert "<strong>64 B</strong> ✓ right" in shown(explorer)
    move(explorer, ranks=4)
    assert rows(explorer)["busiest rank sends"] == ["96 B", "96 B"]


GB = 41.25e9, "41.2 GB"
# the exact number in bytes or seconds or as a count, and what is shown → verdict and predictions
EXACT = {
    (6, "6"): {"right": "6", "too high": "6.4; 7 steps", "too low": "5.5", "": "many"},
    (14, "14"): {"right": "2*7=14", "too low": "1e1"},
    (10, "10"): {"right": "1e1"},
    GB: {
        "right": "41.25; 41,25 GB; 41.2 GB; 41250 MB; 41 250 MB; 15 + 3.75 + 22.5 = 41.25 GB",
        "too high": "41.25 GiB; 41.7",
        "too low": "40 GB",
    },
    (1.875e9, "1.88 GB"): {"right": "1,875 GB"},
    (2.5e9, "2.5 GB"): {"too low": "1,875 GB"},
    (120e9, "120 GB"): {"too high": "122"},
    (1344, "1.3 KiB"): {"right": "1344 B; 1.3 KiB; 1.344 KB", "too high": "1.5 KiB"},
    (1024, "1 KiB"): {"right": "1,024 bytes"},
    (96, "96 B"): {"too high": "97", "": "41 s"},
    (252e-6, "252 µs"): {"right": "0.25 ms; 252"},
    (7.0, "7 s"): {"too high": "7.4 s"},
    (None, "–"): {"": "6"},
}
UNITS = {"B": "B", "KiB": "B", "GB": "GB", "µs": "µs", "s": "µs"}


@pytest.mark.parametrize(("exact", "shown"), EXACT)
def test_a_prediction_is_compared_with_the_exact_result(exact, shown):
    unit = UNITS.get(shown.rpartition(" ")[2], "")
    for expected, typed in EXACT[exact, shown].items():
        said = [verdict(text, unit, shown, exact) for text in typed.split("; ")]
        assert {*said} == {expected}, (typed, said)


def test_every_quantity_has_its_exact_number_in_the_unit_that_is_shown():
    for network in ("switch", "torus"):
        explorer = explore_collective(ranks=4, numbers=8, world="sim", network=network)
        result = explorer.run(**{name: of.value for name, of in explorer.controls.items()})
        values = {what: value for what, value, *_ in result.rows if value != "–"}
        assert {*result.exact} == {*values} & {*explorer.quantities} != set()
        for what, exact in result.exact.items():
            assert verdict(values[what], explorer.quantities[what], values[what], exact) == "right"


def test_a_page_without_a_kernel_gets_the_table_the_picture_and_the_settings(collective):
    data, _ = collective._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data
    assert data["text/html"].endswith(collective.html)
    assert "<table>" in collective.html and "<figure" in collective.html
    assert "operation all_reduce, algorithm ring, world sim, ranks 4" in data["text/html"]
    assert "root" not in data["text/html"].partition("<div")[0]
    controls = (*collective.controls.values(), collective.quantity, collective.run_button)
    assert all(control.description for control in controls)
    assert "data-lm-suppress-shortcuts" in shown(collective)


def test_an_error_is_shown_and_after_an_interrupted_run_the_next_one_works(monkeypatch):
    explorer = explore_collective(world="sim")
    with monkeypatch.context() as patch:
        patch.setattr(explorer, "run", Mock(side_effect=RuntimeError("1 < 0")))
        explorer.run_button.click()
        assert "1 &lt; 0" in explorer.html and "<figure" not in explorer.html
        patch.setattr(explorer, "run", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            explorer.run_button.click()
        assert "Interrupted" in explorer.status.value
    move(explorer, ranks=2)
    assert "Interrupted" not in explorer.status.value and "two ranks" in explorer.html


# ── Collectives


def test_every_operation_runs_and_equals_its_closed_form(collective):
    """All algorithms do in tests/publish/test_recorded_collectives.py."""
    for operation in module.OPERATIONS:
        move(collective, operation=operation)
        algorithm, root = (collective.controls[name] for name in ("algorithm", "root"))
        assert algorithm.options == tuple(autograd.algorithms(operation))
        assert root.disabled == (operation not in module.ROOTS)
        assert root.disabled == (f"{operation} has no root" in collective.hint.value)
        for name in {algorithm.options[0], algorithm.options[-1]}:
            algorithm.value = name
            assert "<figure" in collective.html
            found = rows(collective)
            assert all(run == form for run, form in found.values()), (operation, name, found)


def test_networks_and_speeds_change_the_run(collective):
    move(collective, operation="all_gather", algorithm="bidirectional_ring", ranks=8, numbers=2)
    move(collective, latency="1 s", bandwidth="no limit")
    found = {}
    for network in module.TOPOLOGIES:
        move(collective, network=network)
        found[network] = rows(collective)
        has_form = network in module.FORMS
        assert ("only the bytes that a rank sends" in collective.html) != has_form
    for network, steps in zip(module.FORMS, ("7", "4", "25"), strict=True):
        assert found[network]["steps"] == [steps] * 2
        assert found[network]["time"] == [f"{steps} s"] * 2
    assert found["torus"]["busiest rank sends"] == ["112 B", "112 B"]
    assert found["torus"]["steps"][0] + " s" == found["torus"]["time"][0]
    assert float(found["two nodes"]["time"][0].removesuffix(" s")) > 4
    move(collective, network="switch", latency="20 µs", bandwidth="1 MB/s")
    assert rows(collective)["time"] == ["252 µs", "252 µs"]


RING = {"operation": "all_reduce", "algorithm": "ring", "network": "switch"}
# what the reader moves, one after the other; the steps of the run and of its closed form; and
# what is said
MOVES = [
    ({"operation": "broadcast", "algorithm": "flat", "ranks": 7, "root": 6, "numbers": 7},
     ["6", "6"], "Rank 6 starts"),
    ({"ranks": 3}, ["2", "2"], "Rank 2 starts"),  # so there is no rank 6
    ({"numbers": 7}, ["2"], "3 ranks don&#x27;t divide 7 numbers"),
    ({"network": "one-way ring", "numbers": 6}, ["–"], "for this root"),
    ({"network": "switch", "operation": "all_gather", "ranks": 16, "numbers": 40},
     ["15", "15"], " 5 KiB"),
    ({**RING, "ranks": 16, "numbers": 8, "world": "sim, NCCL's rules"}, ["30"], "<figure"),
    ({"ranks": 3, "numbers": 3, "operation": "all_gather", "algorithm": "direct"},
     ["3", "2"], "waits for those before it in its rank&#x27;s queue"),
    ({"operation": "all_reduce", "ranks": 6, "numbers": 6, "algorithm": "recursive_doubling"},
     ["4", "4"], "two steps more than 4 ranks need"),
    ({"algorithm": "ring", "numbers": 8, "ranks": 4}, ["6", "6"], "<figure"),
    ({"world": "gloo"}, ["6", "6"], "On gloo the time is measured"),
    ({"world": "sim", "operation": "reduce", "algorithm": "pipelined_chain", "numbers": 8,
      "segments": 1}, ["3", "3"], "<figure"),
    *(({"segments": n}, [steps] * 2, "<figure") for n, steps in ((3, "5"), (8, "10"), (16, "10"))),
]  # fmt: skip


def test_every_control_leads_to_a_new_result(collective):
    for moved, steps, said in MOVES:
        move(collective, **moved)
        found = rows(collective)["steps"]
        assert steps == ["–"] or found[: len(steps)] == steps, (moved, found)
        assert said in collective.html, moved
        gloo = collective.controls["world"].value == "gloo"
        assert collective.controls["network"].disabled == gloo
        assert ("latency and bandwidth have no effect" in collective.hint.value) == gloo
        limit = module.MOST_RANKS[collective.controls["world"].value]
        assert collective.controls["ranks"].max == limit
        assert not gloo or rows(collective)["time"][1] == "–"
    assert not collective.controls["segments"].disabled
    move(collective, algorithm="binomial")
    assert collective.controls["segments"].disabled


def test_sizes_up_to_a_gibibyte_on_many_ranks_equal_their_closed_forms():
    speed = {"latency": "5 µs", "bandwidth": "50 GB/s"}
    explorer = explore_collective("all_reduce", ranks=20, size="1 GiB", world="sim", **speed)
    assert rows(explorer)["busiest rank sends"] == ["1.9 GiB", "1.9 GiB"]
    assert explorer.controls["numbers"].disabled and "all_reduce, ring" in explorer.html
    move(explorer, ranks=6)
    for operation, algorithm in (("all_reduce", "ring"), ("broadcast", "pipelined_chain")):
        move(explorer, operation=operation, algorithm=algorithm)
        assert all(run == form for run, form in rows(explorer).values()), rows(explorer)
    move(explorer, network="two nodes", operation="all_gather", algorithm="ring", ranks=4)
    assert rows(explorer)["time"][0] == "64.4 ms", "3 GiB from node to node, at 50 GB/s"
    move(explorer, world="gloo")
    assert explorer.controls["size"].disabled and explorer.controls["size"].value == "the numbers"


def test_a_function_of_your_own_shows_what_would_hang_on_nccl():
    def swap(x):
        peer, got = 1 - dist.get_rank(), torch.empty_like(x)
        work = dist.isend(x, peer)
        dist.recv(got, peer)
        work.wait()
        return x + got

    explorer = explore_collective(swap, ranks=2, world="sim")
    assert not {"operation", "algorithm", "root"} & set(explorer.controls)
    assert [*rows(explorer).values()] == [["1"], ["64 B"], ["64 B"], ["84 µs"]]
    move(explorer, world="sim, NCCL's rules")
    for said in ("This hangs.", "the cycle: rank 0 → rank 1", "<figure"):
        assert said in explorer.html
