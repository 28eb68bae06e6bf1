"""The quick model against published runs. The pins leave room above the errors in BENCHMARKS.md."""

import csv
from statistics import mean

import pytest

from parallel101.cli import main
from parallel101.cost import CHIPS
from parallel101.cost.kernels import attention_seconds, memory_seconds, product_seconds
from parallel101.cost.software import (
    LLM_FOUNDRY_2023,
    MEGATRON_2021,
    MEGATRON_2022,
    VTRAIN_PROFILE,
)
from parallel101.laboratory.planner.published import (
    H100_ROWS,
    MEGATRON_ROWS,
    TABLES,
    VTRAIN_ROWS,
    published_errors,
    read_runs,
    summary,
)

HEADER = "layers,hidden,heads,tp,pp,dp,gpus,global_batch,micro_batch,v_chunks,step_s"
ROW = "80,12288,96,8,8,24,1536,2304,2,2,24.82"


def table(tmp_path, text):
    path = tmp_path / "runs.csv"
    path.write_bytes(text.encode())
    return path


def test_the_tables_of_the_a100():
    rows = published_errors(MEGATRON_ROWS)
    assert len(rows) == 3 and summary(rows).worst < 0.03
    assert {row.run.software for row in rows} == {MEGATRON_2021}
    assert [row.run.layout.overlap for row in rows] == [True, True, False]
    rows = published_errors(VTRAIN_ROWS)
    of = summary(rows)
    assert of.rows == 1440 and of.median < 0.06 and of.mean < 0.08
    assert {row.run.software for row in rows} == {VTRAIN_PROFILE}
    busy = [row for row in rows if row.run.shape.width == 2048 and row.run.layout.microbatch == 8]
    assert summary(busy).median < 0.07


def test_runs_on_h100_are_within_the_range_that_plans_print():
    """Kernels were measured on an H100; two constants of one program chosen on half of its rows."""
    rows = published_errors(H100_ROWS)
    of_half = {use: [r for r in rows if r.run.used == use] for use in ("calibration", "test")}
    same = [r for r in of_half["test"] if r.run.software is LLM_FOUNDRY_2023]
    for half in (of_half["calibration"], same):
        assert len(half) == 26 and summary(half).mean < 0.065
    low, high = CHIPS["H100"].kernels.runs
    ratios = [r.measured / r.predicted for r in of_half["test"]]
    assert low < min(ratios) < low + 0.1 and high - 0.1 < max(ratios) < high + 0.05


def test_h100_kernels_are_as_measured():
    with open(TABLES / "h100_kernels.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    h100, errors = CHIPS["H100"], {}
    for row in rows:
        kind, (m, n, k) = row["kernel"], (int(row[name] or 0) for name in "mnk")
        if kind == "product":
            seconds = product_seconds(h100, m, n, k)
        elif kind.startswith("attention"):
            back = kind.endswith("backward")
            flops = 2 * m * n * n * k * (2.5 if back else 1)
            seconds = attention_seconds(h100, flops, 0, backward=back)
        else:
            seconds = memory_seconds(h100, (6 if kind == "add" else 4) * m * n)
        kind = kind if kind in ("product", "attention", "attention backward") else "memory"
        errors.setdefault(kind, []).append(seconds * 1e3 / float(row["ms"]) - 1)
    assert max(map(abs, errors["product"])) < 0.06 and abs(mean(errors["product"])) < 0.01
    assert max(map(abs, errors["memory"])) < 0.08
    long = {kind: of[-1] for kind, of in errors.items() if kind.startswith("attention")}
    assert all(abs(error) < 0.25 for error in long.values())


def test_columns_by_other_names_and_columns_that_say_how_it_was_trained(tmp_path):
    head = "\ufeff# GPUs,global batch,micro batch,hidden size,attention heads,# layers,"
    head += "sequence length,tensor parallelism,data parallelism,pipeline parallelism,"
    head += "iteration time (ms)"
    (run,) = read_runs(table(tmp_path, f"{head}\r\n64,512,4,3072,32,30,2048,2,32,1,5000\r\n\r\n"))
    assert run.software is MEGATRON_2021 and run.layout.recompute == "full"
    assert (run.measured, run.cluster.network) == (5.0, 100e9)
    assert (run.layout.dp, run.layout.tp, run.layout.microbatches) == (32, 2, 4)
    more = "recompute,sequence_parallel,attention,device,note"
    (run,) = read_runs(table(tmp_path, f"{HEADER},{more}\n{ROW},selective,yes,flash,H100,x\n"))
    assert run.software is MEGATRON_2022 and run.layout.sequence_parallel
    assert run.layout.recompute == "selective" and run.shape.attention == "fused"
    assert run.cluster.chip.name == "H100"
    (run,) = read_runs(table(tmp_path, f"{HEADER}\n{ROW}\n"), device="B200")
    assert run.cluster.chip.name == "B200"
    # TFLOP/s, which count what is computed again, give the same seconds
    text = MEGATRON_ROWS.read_text().replace("step_s_from_flops", "unused")
    again = [run.measured for run in read_runs(table(tmp_path, text))]
    assert again == pytest.approx([run.measured for run in read_runs(MEGATRON_ROWS)], rel=0.01)


def test_two_times_in_a_row_are_two_runs(tmp_path):
    head = HEADER.replace("step_s", "full_recompute_s,present_work_s")
    full, present = published_errors(table(tmp_path, f"{head}\n{ROW},19\n"))
    assert (full.run.layout.recompute, present.run.layout.recompute) == ("full", "selective")
    assert (full.measured, present.measured) == (24.82, 19)
    assert 1.2 < full.predicted / present.predicted < 1.45


WRONG = {
    r"line 2.*batch=2305 isn't a multiple": f"{HEADER}\n{ROW.replace('2304', '2305')}\n",
    "layers='many': expected a number": f"{HEADER}\n{ROW.replace('80', 'many')}\n",
    "no column for tp": f"{HEADER.replace('tp,', 'x,')}\n{ROW}\n",
    "no time": f"{HEADER.replace('step_s', 'x')}\n{ROW}\n",
    "no rows": f"{HEADER}\n",
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_wrong_is_said(tmp_path, message):
    with pytest.raises(ValueError, match=message):
        published_errors(table(tmp_path, WRONG[message]))


def test_the_command_prints_rows_or_groups_and_draws(tmp_path, capsys):
    picture = tmp_path / "picture.svg"
    assert (
        main(
            ["bench", "published", str(MEGATRON_ROWS), str(VTRAIN_ROWS), "--picture", str(picture)]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "| 18.4 | 256 GPUs · dp 32 · tp 8 · microbatch 8 × " in printed
    assert "1440 rows: mean" in printed and "| width 2048 | 720 |" in printed
    assert picture.read_text().startswith("<?xml")
