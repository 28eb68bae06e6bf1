"""Comparison with others' measurements: reads published training runs, and predicts each.

    layers,hidden,heads,tp,pp,dp,gpus,global_batch,micro_batch,v_chunks,step_s
    80,12288,96,8,8,24,1536,2304,2,2,24.82          ─▶ predicted 24.9 s, +0.5 %

Columns are known by several names (COLUMNS); others are ignored. What a table doesn't say is taken
from its kind:

    Megatron-LM's Table 1 (SC 2021)    full recomputation, unfused attention with dropout, 16 bits,
                                       2048 tokens, vocabulary 51,200, eight cards of 200 Gb/s a
                                       node; with pp = 1 its job script has DDP=torch, which
                                       overlaps the sum of gradients, else DDP=local, which doesn't
    vTrain's tables                    a column "iteration time (ms)". In one node: its simulator's
                                       profile, without recomputation. On more nodes: Megatron-LM
                                       with full recomputation, 800 Gb/s a node, as its files
                                       config/validation/multi say (use_checkpoint,
                                       inter_node_bandwidth)
    recompute "selective", or          Megatron-LM of 2022, whose messages along tp overlap with
    sequence parallel                  weight gradients

    a column "kind", gpt or llama      current programs on H100: bf16, 32-bit gradients, fused
                                       attention, no dropout

A column says otherwise where there is one: recompute (full, selective, none), sequence_parallel,
attention (fused, unfused), device, precision, gradient_dtype, vocabulary, sequence_length, dropout,
overlap, nodes_of, node_gbps, cp, zero_stage, software. Two columns full_recompute_s and
present_work_s are two rows: without and with sequence parallel and selective recomputation
(Korthikanti et al., Table 5).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from parallel101.cost.cluster import Cluster
from parallel101.cost.hardware import chip_of
from parallel101.cost.model_shape import ModelShape, hardware_flops
from parallel101.cost.parallel_layout import ParallelLayout
from parallel101.cost.software import (
    LLAMA_3,
    LLM_FOUNDRY_2023,
    MEGATRON_2021,
    MEGATRON_2022,
    TORCHTITAN,
    TORCHTITAN_COMPILED,
    TRAINERS,
    VTRAIN_PROFILE,
    Software,
)
from parallel101.cost.step_time import StepTime, step_time
from parallel101.laboratory.planner.known_models import LLAMA
from parallel101.laboratory.planner.planned_layout import layout_text

# our name of a column → how tables call it
COLUMNS = {
    ours: names.split()
    for ours, names in {
        "name": "name model params_b parameters_b params",
        "gpus": "gpus num_gpus ngpus n_gpus gpu_count n",
        "batch": "global_batch global_batch_size batch_size batch gbs",
        "microbatch": "micro_batch micro_batch_size microbatch microbatch_size mbs b",
        "hidden": "hidden hidden_size width h",
        "heads": "heads attention_heads num_heads num_attention_heads a",
        "layers": "layers num_layers l",
        "time": "sequence_length seq_length seq_len sequence seq time s",
        "vocabulary": "vocabulary vocab vocab_size vocabulary_size",
        "tp": "tp tensor_parallelism tensor_parallel tensor_parallel_size t",
        "pp": "pp pipeline_parallelism pipeline_parallel pipeline_parallel_size p",
        "dp": "dp data_parallelism data_parallel data_parallel_size d",
        "chunks": "v_chunks chunks num_chunks interleave interleaving interleaving_size "
        "virtual_stages virtual_pipeline v",
        "seconds": "step_s_from_flops step_s seconds step_seconds iteration_s iteration_seconds "
        "iteration_time_s iteration_time_seconds iteration_time time_s measured_s",
        "tokens": "tokens_s_gpu tokens_per_second_per_gpu tps_gpu",
        "milliseconds": "iteration_time_ms iteration_ms step_ms time_ms milliseconds",
        "tflops": "tflops_gpu tflops_per_gpu tflops",
        "full_seconds": "full_recompute_s full_recomputation_s full_s",
        "selective_seconds": "present_work_s present_work selective_sp_s selective_s",
        "cp": "cp context_parallel",
        "zero_stage": "zero_stage zero",
        "recompute": "recompute recomputation activation_recomputation full_recompute checkpoint",
        "sequence_parallel": "sequence_parallel sequence_parallelism sp",
        "device": "device gpu chip gpu_name",
        "nodes_of": "nodes_of gpus_per_node node_size",
        "node_gbps": "node_gbps network_gbps inter_node_bandwidth",
    }.items()
}
ONE_NAME = "attention dropout feed_forward gradient_dtype kind kv_heads overlap precision "
ONE_NAME += "software used"
COLUMNS |= {name: [name] for name in ONE_NAME.split()}
SOFTWARE = {
    "megatron 2021": MEGATRON_2021,
    "megatron 2022": MEGATRON_2022,
    "vtrain profile": VTRAIN_PROFILE,
    "trainers": TRAINERS,
    "llm foundry 2023": LLM_FOUNDRY_2023,
    "torchtitan": TORCHTITAN,
    "torchtitan compiled": TORCHTITAN_COMPILED,
    "llama 3": LLAMA_3,
}
TABLES = Path(__file__).parent / "published_tables"  # see its README.md
MEGATRON_ROWS = TABLES / "megatron_table1_three_rows.csv"
VTRAIN_ROWS = TABLES / "vtrain_single_node_a100.csv"
H100_ROWS = TABLES / "h100_runs.csv"
VTRAIN_MARK = {"milliseconds", "dp"}  # columns by which its tables are known
# the columns that a table of this kind lacks
MEGATRON = {"chunks": "1", "cp": "1", "nodes_of": "8", "time": "2048", "vocabulary": "51200"}
MEGATRON |= {"kv_heads": "0", "feed_forward": "0", "zero_stage": "0", "device": "A100"}
MEGATRON |= {"precision": "fp16-mixed", "recompute": "full", "dropout": "yes"}
VTRAIN = MEGATRON | {"vocabulary": "50257", "node_gbps": "800", "overlap": "no"}
PROFILE = VTRAIN | {"recompute": "none", "software": "vtrain profile"}  # of one node
ON_H100 = MEGATRON | {"device": "H100", "attention": "fused", "dropout": "no", "overlap": "yes"}
ON_H100 |= {"precision": "bf16-mixed", "gradient_dtype": "fp32"}

# column of a row with two times → how these steps were trained
MODERN = {"software": "megatron 2022"}
WAYS = {
    "full_seconds": {"recompute": "full", "sequence_parallel": "no", **MODERN},
    "selective_seconds": {"recompute": "selective", "sequence_parallel": "yes", **MODERN},
}


@dataclass(frozen=True)
class PublishedRun:
    """A row of a table: what ran, and how long a step took. `used`: "calibration" if a constant was
    chosen with it, "test" if none was, and "" if the table doesn't say.
    """

    name: str
    shape: ModelShape
    layout: ParallelLayout
    cluster: Cluster
    software: Software
    measured: float  # seconds of a step
    used: str = ""

    @property
    def words(self) -> str:
        """The GPUs and the layout in one line."""
        samples = f" of {self.shape.time} tokens" * (self.shape.time != 2048)
        return f"{self.layout.gpus} GPUs · {layout_text(self.layout)}{samples}"


class PublishedError(NamedTuple):
    """A run with its prediction, in seconds of a step."""

    run: PublishedRun
    step: StepTime
    predicted: float
    measured: float
    error: float  # relative: (predicted − measured) / measured


class ErrorSummary(NamedTuple):
    """Errors without their sign."""

    rows: int
    mean: float
    median: float
    worst: float

    def __str__(self) -> str:
        errors = f"mean {self.mean:.1%}, median {self.median:.1%}, worst {self.worst:.1%}"
        return f"{self.rows} rows: {errors}"


def summary(errors: Iterable[PublishedError]) -> ErrorSummary:
    sizes = [abs(row.error) for row in errors]
    return ErrorSummary(len(sizes), mean(sizes), median(sizes), max(sizes))


def published_errors(path: str | Path | None = None, **given: str) -> list[PublishedError]:
    """Predict every row of a CSV table of published runs, and return each with its error.

    Args:
        path: of the table. None: three rows of Megatron-LM's (Narayanan et al. 2021, Table 1).
        given: columns that the table lacks, with one value for all rows, such as device="H100".

    Raises ValueError, with the row's number, for rows that can't be understood or laid out.
    """
    errors = []
    for run in read_runs(path or MEGATRON_ROWS, **given):
        step = step_time(run.shape, run.layout, run.cluster, software=run.software)
        error = step.seconds / run.measured - 1
        errors.append(PublishedError(run, step, step.seconds, run.measured, error))
    return errors


def read_runs(path: str | Path, **given: str) -> list[PublishedRun]:
    """Read a table. See `published_errors`."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        names = known_columns(reader.fieldnames or [])
        vtrain = set(names.values()) >= VTRAIN_MARK
        runs: list[PublishedRun] = []
        for row in reader:
            values = {names[key]: (row[key] or "").strip() for key in names}
            if not any(values.values()):
                continue
            values = {key: value for key, value in {**values, **given}.items() if value}
            # a row with the times of two ways to train is two runs
            ways = [{**way, "seconds": values[key]} for key, way in WAYS.items() if key in values]
            try:
                runs += [run_of({**values, **way}, vtrain) for way in ways or [{}]]
            except ValueError as error:
                raise ValueError(f"{path}, line {reader.line_num}: {error}") from None
    if not runs:
        raise ValueError(f"{path} has no rows")
    return runs


def known_columns(header: Iterable[str]) -> dict[str, str]:
    """Return the table's name of a column → ours.

    "# GPUs" and "tensor parallelism" are known, too.
    """
    by_name = {name: ours for ours, names in COLUMNS.items() for name in names}
    plain = {column: re.sub(r"[^a-z0-9]+", "_", column.lower()).strip("_") for column in header}
    found = {column: by_name[name] for column, name in plain.items() if name in by_name}
    needed = {"hidden", "heads", "layers", "tp", "pp", "batch", "microbatch"}
    if missing := needed - set(found.values()):
        raise ValueError(
            f"the table has no column for {', '.join(sorted(missing))}: expected one of "
            f"{', '.join(COLUMNS[min(missing)])}"
        )
    return found


def run_of(row: Mapping[str, str], vtrain: bool) -> PublishedRun:
    """Return the run of a row, with the defaults of its kind of table."""
    # the table of runs on H100 names its programs
    values = {**(ON_H100 if "kind" in row else VTRAIN if vtrain else MEGATRON), **row}

    def number(name: str) -> Any:
        try:
            return int(float(values[name]))
        except (KeyError, ValueError):
            raise ValueError(f"{name}={values.get(name)!r}: expected a number") from None

    def yes(name: str) -> bool:
        return values.get(name, "").lower() in ("yes", "true", "1", "on")

    axes = {axis: number(axis) for axis in ("tp", "pp", "cp")}
    replica, nodes_of = prod(axes.values()), number("nodes_of")
    gpus = number("gpus") if "gpus" in row else replica * (number("dp") if "dp" in row else 1)
    axes["dp"] = number("dp") if "dp" in row else gpus // replica
    if vtrain and gpus <= nodes_of:
        values = {**PROFILE, **row}
    recompute = values["recompute"].lower()
    if recompute not in ("full", "selective", "none"):
        recompute = "full" if yes("recompute") else "none"
    modern = recompute == "selective" or yes("sequence_parallel")
    program = values.get("software", "megatron 2022" if modern else "megatron 2021").lower()
    if program not in SOFTWARE:
        raise ValueError(f"software={program!r}: expected {' or '.join(map(repr, SOFTWARE))}")
    at_once = number("microbatch") * axes["dp"]
    share, rest = divmod(number("batch"), at_once)
    if rest:
        raise ValueError(f"batch={values['batch']} isn't a multiple of microbatch · dp = {at_once}")
    layout = ParallelLayout(
        **axes,
        **{name: number(name) for name in ("microbatch", "chunks", "zero_stage")},
        microbatches=share,
        recompute=recompute,
        sequence_parallel=yes("sequence_parallel"),
        precision=values["precision"],
        gradient_dtype=values.get("gradient_dtype"),
        overlap=yes("overlap") if "overlap" in values else axes["pp"] == 1,
    )
    sizes = {name: number(name) for name in ("layers", "heads", "vocabulary", "time")}
    fused = values.get("attention", "").lower() in ("fused", "flash")
    shape = ModelShape(
        number("hidden"),
        **sizes,
        kv_heads=number("kv_heads") or None,
        feed_forward=number("feed_forward") or None,
        attention="fused" if fused else "unfused",
        dropout=yes("dropout"),
        **(LLAMA if values.get("kind", "").lower() == "llama" else {}),
    )
    network = number("node_gbps") / 8 * 1e9 if "node_gbps" in values else None
    cluster = Cluster(chip_of(values["device"]), gpus, nodes_of, network=network)
    flops = hardware_flops(shape, layout.batch, recompute) / layout.gpus
    tokens = layout.batch * shape.time / layout.gpus
    known = [name for name in ("seconds", "milliseconds", "tokens", "tflops") if name in values]
    if not known:
        raise ValueError(
            "the row has no time: expected a column such as step_s, iteration time (ms), "
            "tokens_s_gpu or tflops_gpu"
        )
    value = float(values[known[0]])
    if value <= 0:
        raise ValueError(f"{known[0]}={value:g}: expected a number above 0")
    # TFLOP/s count what is computed again
    seconds = {"seconds": value, "milliseconds": value / 1000, "tokens": tokens / value}
    measured = (seconds | {"tflops": flops / (value * 1e12)})[known[0]]
    name, used = values.get("name", f"{shape.parameters / 1e9:.1f}B"), values.get("used", "")
    return PublishedRun(name, shape, layout, cluster, SOFTWARE[program], measured, used)
