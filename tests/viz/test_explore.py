"""The explorers: every control leads to a new result, the prediction stands beside it, and what
can't be is said in words.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from parallel101 import autograd
from parallel101.laboratory.viz.explore import explore_collective, explore_memory, explore_schedule
from parallel101.laboratory.viz.explore.collective_explorer import (
    FORMS,
    MOST_RANKS,
    OPERATIONS,
    ROOT,
    TOPOLOGIES,
)
from parallel101.laboratory.viz.explore.prediction import verdict


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
    return {
        what: values.split(", ")
        for what, values in (row.split(": ", 1) for row in plain.split("; "))
    }


# ── What all explorers have


def predict(explorer, text: str, quantity: str | None = None) -> None:
    explorer.prediction.value = text
    if quantity is not None:
        explorer.quantity.value = quantity


def test_a_prediction_waits_for_the_button_and_then_stands_beside_the_result():
    explorer = explore_schedule("1f1b")
    before = explorer.html
    assert "your prediction" not in before
    predict(explorer, "30 %")
    move(explorer, stages=2, microbatches=4)
    assert explorer.html == before and "Press Run" in explorer.status.value
    explorer.run_button.click()
    assert "<strong>30 %</strong> ✗ too high" in explorer.html and rows(explorer)[
        "bubble rate"
    ] == ["20.0 %", "20.0 %"]
    assert (
        explorer.status.value == "bubble rate: you predicted 30 %, it is 20.0 %: too high."
        and explorer.prediction.value == ""
    )
    predict(explorer, "a <b>ig one", "in words")
    explorer.prediction._handle_custom_msg({"event": "submit"}, [])  # the Enter key
    assert "Your prediction: <strong>a &lt;b&gt;ig one</strong>" in explorer.html
    move(explorer, microbatches=2)
    assert "prediction" not in explorer.html and rows(explorer)["bubble rate"][0] == "33.3 %"


def test_what_is_to_be_predicted_is_not_shown_before_but_a_page_without_a_kernel_has_it():
    explorer = explore_memory(7.5, ranks=4, zero_stage=2, predict="total")
    assert explorer.quantity.value == "total" and "First predict the total" in explorer.status.value
    assert "41.2 GB" not in explorer.output.outputs[0]["data"]["text/html"]
    move(explorer, zero_stage=3)  # still to be predicted
    assert (
        "First predict" in explorer.status.value
        and "<table>" not in explorer.output.outputs[0]["data"]["text/html"]
    )
    assert "41.2 GB" in explorer._repr_mimebundle_()[0]["text/html"]
    predict(explorer, "30 GB")
    explorer.run_button.click()
    assert "<strong>30 GB</strong> ✓ right" in explorer.output.outputs[0]["data"]["text/html"]
    move(explorer, zero_stage=1)
    assert rows(explorer)["total"] == ["52.5 GB", "120 GB"]


def test_without_a_prediction_that_was_asked_for_run_asks_once():
    explorer = explore_schedule(predict="bubble rate")
    explorer.run_button.click()
    assert "Write down a prediction first" in explorer.status.value
    move(explorer, stages=2)
    assert "<table>" not in explorer.output.outputs[0]["data"]["text/html"]
    explorer.run_button.click()
    assert "<table>" in explorer.output.outputs[0]["data"]["text/html"]


def test_a_prediction_that_is_no_number_stays_in_the_field_and_the_result_is_not_shown():
    explorer = explore_memory(predict="total")
    predict(explorer, "a lot")
    explorer.run_button.click()
    assert (
        explorer.status.value == 'Type a number, such as 12 GB, or choose "in words".'
        and explorer.prediction.value == "a lot"
    )
    assert "<table>" not in explorer.output.outputs[0]["data"]["text/html"]
    predict(explorer, "a lot", "in words")
    explorer.run_button.click()
    assert (
        "Your prediction: <strong>a lot</strong>" in explorer.output.outputs[0]["data"]["text/html"]
    )


def test_a_number_without_a_unit_has_the_one_that_the_empty_field_names(collective):
    assert collective.prediction.placeholder == "a number"
    predict(collective, "96", "busiest rank sends")
    assert collective.prediction.placeholder == "in B, or with a unit"
    collective.run_button.click()
    assert collective.status.value == "busiest rank sends: you predicted 96 B, it is 96 B: right."


# the exact numbers in percent, bytes or seconds or as counts, what is shown, what is typed, the
# verdict
EXACT = [
    ([6], "6", "6", "right"),
    ([6], "6", "6.4", "too high"),
    ([6], "6", "5.5", "too low"),
    ([6], "6", "7 steps", "too high"),
    ([14], "14", "2*7=14", "right"),
    ([10], "10", "1e1", "right"),
    ([14], "14", "1e1", "too low"),
    ([41.25e9], "41.2 GB", "41.25", "right"),
    ([41.25e9], "41.2 GB", "41.25 GB", "right"),
    ([41.25e9], "41.2 GB", "41,25 GB", "right"),
    ([41.25e9], "41.2 GB", "41.2 GB", "right"),
    ([41.25e9], "41.2 GB", "41.3 GB", "right"),
    ([41.25e9], "41.2 GB", "41 GB", "right"),
    ([41.25e9], "41.2 GB", "41250 MB", "right"),
    ([41.25e9], "41.2 GB", "41,250 MB", "right"),
    ([41.25e9], "41.2 GB", "41 250 MB", "right"),
    ([41.25e9], "41.2 GB", "15 + 3.75 + 22.5 = 41.25 GB", "right"),
    ([41.25e9], "41.2 GB", "41.25 GiB", "too high"),
    ([41.25e9], "41.2 GB", "41.4", "too high"),
    ([41.25e9], "41.2 GB", "40 GB", "too low"),
    ([1.875e9], "1.88 GB", "1.875", "right"),
    ([1.875e9], "1.88 GB", "1,875 GB", "right"),
    ([2.5e9], "2.5 GB", "1,875 GB", "too low"),
    ([31.40625e9], "31.4 GB", "31.40625", "right"),
    ([120e9], "120 GB", "120.4", "too high"),
    ([1344], "1.3 KiB", "1344", "right"),
    ([1344], "1.3 KiB", "1344 B", "right"),
    ([1344], "1.3 KiB", "1.3 KiB", "right"),
    ([1344], "1.3 KiB", "1.344 KB", "right"),
    ([1344], "1.3 KiB", "1.5 KiB", "too high"),
    ([1024], "1 KiB", "1,024 bytes", "right"),
    ([96], "96 B", "97", "too high"),
    ([100 * 3 / 35], "8.6 %", "8.57 %", "right"),
    ([100 * 3 / 35], "8.6 %", "8,6 %", "right"),
    ([100 * 3 / 35], "8.6 %", "9", "right"),
    ([100 * 3 / 35], "8.6 %", "-8.6", "too low"),
    ([100 * 3 / 35], "8.6 %", "−8.6 %", "too low"),
    ([100 * 3 / 35], "8.6 %", "0 %", "too low"),
    ([300 / 11], "27.3 %", "27.0", "too low"),
    ([252e-6], "252 µs", "0.25 ms", "right"),
    ([252e-6], "252 µs", "252", "right"),
    ([7.0], "7 s", "7.4 s", "too high"),
    ([3, 2, 1], "3, 2, 1", "3,2,1", "right"),
    ([3, 2, 1], "3, 2, 1", "[3, 2, 1]", "right"),
    ([3, 2, 1], "3, 2, 1", "3", "right"),
    ([3, 2, 1], "3, 2, 1", "3, 2", "different"),
    ([3, 2, 1], "3, 2, 1", "3, 2, 2", "different"),
    ([2, 1], "2, 1", "2,1", "right"),
    ([6], "6", "many", ""),
    ([300 / 19], "15.8 %", "0.16 %", "too low"),
    ([100 * 3 / 35], "8.6 %", "8-9 %", ""),
    ([100 * 3 / 35], "8.6 %", "8.6 GB", ""),
    ([], "–", "6", ""),
]


@pytest.mark.parametrize(
    ("exact", "shown", "typed", "expected"),
    EXACT,
    ids=[f"{typed} for {shown}" for _, shown, typed, _ in EXACT],
)
def test_a_prediction_is_compared_with_the_exact_result(exact, shown, typed, expected):
    unit = {"%": "%", "B": "B", "KiB": "B", "GB": "GB", "µs": "µs", "s": "µs"}.get(
        shown.rpartition(" ")[2], ""
    )
    assert verdict(typed, unit, shown, exact) == expected


@pytest.mark.parametrize(
    ("typed", "shown", "said"),
    [("0.16", "16 %", "right"), (".158", "15.8 %", "right"), ("0,5", "50 %", "too high")]
    + [("0.16 %", "0.16 %", "too low"), ("16", "16 %", "right"), ("0", "0 %", "too low")],
)
def test_a_rate_written_as_a_part_of_one_is_shown_in_percent(typed, shown, said):
    explorer = explore_schedule("1f1b", stages=4, microbatches=16)
    predict(explorer, typed, "bubble rate")
    explorer.run_button.click()
    assert f"<strong>{shown}</strong>" in explorer.html and f" {said}</td>" in explorer.html


@pytest.mark.parametrize(
    "explorer",
    [
        lambda: explore_memory(7.5, ranks=4),
        lambda: explore_memory(7.5, ranks=64, zero_stage=3),
        lambda: explore_schedule("zb-h1", weight_grad=2),
        lambda: explore_collective(ranks=3, numbers=42, world="sim"),
        lambda: explore_collective(ranks=4, numbers=8, world="sim", network="torus"),
    ],
    ids=["memory-4", "memory-64", "schedule", "collective", "torus"],
)
def test_every_quantity_has_its_exact_number_in_the_unit_that_is_shown(explorer):
    explorer = explorer()
    result = explorer.run(**{name: control.value for name, control in explorer.controls.items()})
    shown = {what: value for what, value, *_ in result.rows if value != "–"}
    assert set(result.exact) == set(shown) & set(explorer.quantities) != set()
    assert all(
        verdict(shown[what], explorer.quantities[what], shown[what], exact) == "right"
        for what, exact in result.exact.items()
    )


def test_a_page_without_a_kernel_gets_the_table_the_picture_and_the_settings(collective):
    data, _ = collective._repr_mimebundle_()
    assert (
        data["text/html"].endswith(collective.html)
        and "<table>" in collective.html
        and "<figure" in collective.html
    )
    assert (
        "operation all_reduce, algorithm ring, world sim, ranks 4" in data["text/html"]
        and "root" not in data["text/html"].partition("<div")[0]
    )
    assert "application/vnd.jupyter.widget-view+json" in data


def test_an_interrupted_run_says_so_and_the_next_one_works(monkeypatch):
    explorer = explore_schedule()

    def interrupted(**_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(explorer, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            explorer.run_button.click()
    assert "Interrupted" in explorer.status.value
    move(explorer, stages=2)
    assert "Interrupted" not in explorer.status.value and "2 ranks" in explorer.html


@pytest.mark.parametrize("explorer", [explore_schedule, explore_memory], ids=["schedule", "memory"])
def test_every_control_has_a_label_and_keeps_its_keys(explorer):
    explorer = explorer()
    assert all(
        control.description
        for control in (*explorer.controls.values(), explorer.quantity, explorer.run_button)
    )
    assert "data-lm-suppress-shortcuts" in explorer.output.outputs[0]["data"]["text/html"]


# ── Collectives


def test_every_operation_and_algorithm_runs_and_equals_its_closed_form(collective):
    for operation in OPERATIONS:
        move(collective, operation=operation)
        algorithm = collective.controls["algorithm"]
        assert algorithm.options == tuple(autograd.algorithms(operation))
        assert (
            collective.controls["root"].disabled
            == (operation not in ROOT)
            == (f"{operation} has no root" in collective.hint.value)
        )
        for name in algorithm.options:
            algorithm.value = name
            assert "<figure" in collective.html
            assert all(run == form for run, form in rows(collective).values()), (
                operation,
                name,
                rows(collective),
            )


def test_a_pipelined_chain_has_a_number_of_segments():
    """p − 2 + m steps; other algorithms have none."""
    explorer = explore_collective("reduce", "pipelined_chain", numbers=8, world="sim")
    assert not explorer.controls["segments"].disabled and rows(explorer)["steps"] == ["6", "6"]
    steps = []
    for segments in (1, 3, 8, 16):  # three segments of 3, 3 and 2; no more than there are numbers
        move(explorer, segments=segments)
        steps.append(rows(explorer)["steps"])
    assert steps == [["3", "3"], ["5", "5"], ["10", "10"], ["10", "10"]]
    move(explorer, algorithm="binomial")
    assert explorer.controls["segments"].disabled


def test_networks_and_speeds_change_the_run(collective):
    move(
        collective,
        operation="all_gather",
        algorithm="bidirectional_ring",
        ranks=8,
        numbers=2,
        latency="1 s",
        bandwidth="no limit",
    )
    found = {}
    for network in TOPOLOGIES:
        move(collective, network=network)
        found[network] = rows(collective)
        assert ("only the bytes that a rank sends" in collective.html) == (network not in FORMS)
    assert [found[name]["time"] for name in FORMS] == [
        ["7 s", "7 s"],
        ["4 s", "4 s"],
        ["25 s", "25 s"],
    ]
    assert [found[name]["steps"] for name in FORMS] == [["7", "7"], ["4", "4"], ["25", "25"]]
    assert (
        found["torus"]["busiest rank sends"] == ["112 B", "112 B"]
        and found["torus"]["steps"][0] + " s" == found["torus"]["time"][0]
    )
    assert float(found["two nodes"]["time"][0].removesuffix(" s")) > 4
    move(collective, network="switch", latency="20 µs", bandwidth="1 MB/s")
    assert rows(collective)["time"] == ["252 µs", "252 µs"]


def test_ranks_root_and_numbers(collective):
    move(collective, operation="broadcast", algorithm="flat", ranks=7, root=6, numbers=7)
    assert "rank 6 starts" in collective.html.lower() and rows(collective)["steps"] == ["6", "6"]
    move(collective, ranks=3)  # so there is no rank 6, and equal blocks have 6 numbers
    assert (
        collective.controls["root"].value == 2
        and rows(collective)["steps"] == ["2", "2"]
        and collective.controls["numbers"].value == 6
    )
    move(collective, numbers=7)
    assert "3 ranks don&#x27;t divide 7 numbers" in collective.html
    move(collective, network="one-way ring")
    move(collective, numbers=6)
    assert "for this root" in collective.html
    # with room for 40 numbers each
    move(collective, network="switch", operation="all_gather", ranks=16, numbers=40)
    assert (
        collective.controls["numbers"].max == 40
        and " 5 KiB" in collective.html
        and 16 * 40 * 8 == 5 * 1024
    )
    move(collective, ranks=2)
    assert collective.controls["numbers"].max == 48


def test_worlds(collective):
    move(
        collective,
        operation="all_reduce",
        algorithm="ring",
        ranks=16,
        numbers=8,
        world="sim, NCCL's rules",
    )
    assert rows(collective)["steps"][0] == "30"
    move(collective, ranks=3, numbers=3, operation="all_gather", algorithm="direct")
    assert (
        rows(collective)["steps"] == ["3", "2"]
        and "waits for those before it in its rank&#x27;s queue" in collective.html
    )
    move(collective, operation="all_reduce", ranks=6, numbers=6, algorithm="recursive_doubling")
    assert "two steps more than 4 ranks need" in collective.html and rows(collective)["steps"] == [
        "4",
        "4",
    ]
    move(collective, algorithm="ring", numbers=8)
    move(collective, ranks=4)
    assert all(run == form for run, form in rows(collective).values())
    move(collective, world="gloo")
    assert (
        collective.controls["ranks"].max == MOST_RANKS["gloo"]
        and collective.controls["network"].disabled
    )
    assert "latency and bandwidth have no effect" in collective.hint.value
    found = rows(collective)
    assert (
        found["steps"] == ["6", "6"]
        and found["busiest rank sends"] == ["96 B", "96 B"]
        and found["time"][1] == "–"
    )
    move(collective, world="sim")


def test_sizes_up_to_a_gibibyte_on_up_to_64_ranks_equal_their_closed_forms():
    explorer = explore_collective(
        "all_reduce", ranks=64, size="1 GiB", world="sim", latency="5 µs", bandwidth="50 GB/s"
    )
    assert rows(explorer)["busiest rank sends"] == ["2.0 GiB", "2.0 GiB"]
    assert explorer.controls["numbers"].disabled and "all_reduce, ring" in explorer.html
    move(explorer, ranks=6)
    for operation, algorithm in (("all_reduce", "ring"), ("broadcast", "pipelined_chain")):
        move(explorer, operation=operation, algorithm=algorithm)
        assert all(run == form for run, form in rows(explorer).values()), rows(explorer)
    move(explorer, network="two nodes", operation="all_gather", algorithm="ring", ranks=4)
    assert rows(explorer)["time"][0] == "64.4 ms", "3 GiB from node to node, at 50 GB/s"
    move(explorer, world="gloo")
    assert explorer.controls["size"].disabled and explorer.controls["size"].value == "the numbers"


def test_the_crossing_of_lesson_02_is_found():
    links = {"latency": "20 µs", "bandwidth": "1.25 GB/s"}
    explorer = explore_collective("all_reduce", ranks=8, size="64 KiB", world="sim", **links)
    found = {}
    for size in ("64 KiB", "1 MiB"):
        for algorithm in ("recursive_doubling", "ring"):
            move(explorer, size=size, algorithm=algorithm)
            time, form = rows(explorer)["time"]
            assert time == form
            found[size, algorithm] = explorer.run(
                **{name: control.value for name, control in explorer.controls.items()}
            ).exact["time"]
    assert found["64 KiB", "recursive_doubling"] < found["64 KiB", "ring"]
    assert found["1 MiB", "ring"] < found["1 MiB", "recursive_doubling"]


def test_a_function_of_your_own_shows_what_would_hang_on_nccl():
    def swap(x):
        peer, got = 1 - dist.get_rank(), torch.empty_like(x)
        work = dist.isend(x, peer)
        dist.recv(got, peer)
        work.wait()
        return x + got

    explorer = explore_collective(swap, ranks=2, world="sim")
    assert not {"operation", "algorithm", "root"} & set(explorer.controls)
    assert rows(explorer) == {
        "steps": ["1"],
        "busiest rank sends": ["64 B"],
        "bytes on the critical path": ["64 B"],
        "time": ["84 µs"],
    }
    move(explorer, world="sim, NCCL's rules")
    assert (
        "This hangs." in explorer.html
        and "the cycle: rank 0 → rank 1" in explorer.html
        and "<figure" in explorer.html
    )


def test_an_error_is_shown_in_place_of_the_picture(collective, monkeypatch):
    monkeypatch.setattr(collective, "run", lambda **_: (_ for _ in ()).throw(RuntimeError("1 < 0")))
    collective.run_button.click()
    assert "1 &lt; 0" in collective.html and "<figure" not in collective.html


# ── Schedules and memory


def test_schedules_equal_their_closed_forms_and_the_numbers_that_are_known():
    explorer = explore_schedule()
    for name, idle in {
        "gpipe": "9",
        "1f1b": "9",
        "interleaved": "4.5",
        "zb-h1": "3",
        "zb-h2": "0",
    }.items():
        move(explorer, name=name)
        found = rows(explorer)
        assert found["it is idle"][0] == idle and found["it is idle"][1].endswith(f" = {idle}"), (
            name
        )
        assert (
            explorer.controls["chunks"].disabled == (name != "interleaved")
            and "<figure" in explorer.html
        )
    assert found["activations held, by rank"][:4] == ["7"] * 4
    move(explorer, name="1f1b", communication=0.5)
    assert rows(explorer)["it is idle"][1] == "–" and "needs free communication" in explorer.html


def test_a_schedule_that_cannot_be_is_explained_and_others_go_on():
    explorer = explore_schedule("interleaved", microbatches=8)
    move(explorer, microbatches=6)
    assert (
        "expected a multiple of stages=4" in explorer.html
        and "<figure" not in explorer.html
        and "Traceback" not in explorer.html
    )
    move(explorer, stages=3)
    assert "<figure" in explorer.html


def test_memory_has_the_figures_of_zeros_table():
    explorer = explore_memory(7.5, ranks=64)
    totals = []
    for stage in range(4):
        move(explorer, zero_stage=stage)
        totals.append(rows(explorer)["total"])
        assert "<figure" in explorer.html and "Rank 0 is drawn" in explorer.html
    assert totals == [[total, "120 GB"] for total in ("120 GB", "31.4 GB", "16.6 GB", "1.88 GB")]
    move(explorer, ranks=4, precision="fp32", billions=1.0)
    assert rows(explorer)["weights"] == ["1 GB", "4 GB"] and "Rank 0 is drawn" not in explorer.html


@pytest.mark.parametrize(
    ("explore", "wrong", "message"),
    [
        (
            explore_collective,
            {"operation": "allreduce"},
            "operation='allreduce' is unknown: expected one of 'broadcast'",
        ),
        (
            explore_collective,
            {"algorithm": "star"},
            "algorithm='star' is unknown: expected one of 'reduce_broadcast'",
        ),
        (
            explore_collective,
            {"world": "mpi"},
            "world='mpi' is unknown: expected one of 'gloo', 'sim'",
        ),
        (
            explore_collective,
            {"network": "mesh"},
            "network='mesh' is unknown: expected one of 'switch'",
        ),
        (explore_collective, {"ranks": 99}, "ranks=99: expected a whole number from 1 to 8"),
        (explore_collective, {"ranks": 2.5}, r"ranks=2\.5: expected a whole number"),
        (
            explore_collective,
            {"numbers": 48, "ranks": 16, "world": "sim"},
            "numbers=48: expected a whole number from 1 to 40",
        ),
        (explore_collective, {"root": 4}, "root=4: expected a whole number from 0 to 3"),
        (explore_schedule, {"name": "2f2b"}, "schedule='2f2b' is unknown: expected one of 'gpipe'"),
        (explore_schedule, {"forward": 9}, r"F \(forward\)=9: expected a number from 0.5 to 4"),
        (
            explore_memory,
            {"predict": "gigabytes"},
            "predict='gigabytes' is unknown: expected one of 'total', 'weights'",
        ),
        (explore_memory, {"ranks": 0}, "ranks=0: expected a number from 1 to 65536"),
        (explore_memory, {"zero_stage": 5}, "ZeRO stage=5 is unknown: expected one of 0, 1, 2, 3"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_wrong_settings_are_refused(explore, wrong, message):
    with pytest.raises(ValueError, match=message):
        explore(**wrong)
