"""The quick model of a step: parts add up, closed forms, and what must hold for every layout."""

from dataclasses import replace

import pytest

import parallel101 as p101
from parallel101.cost import (
    MEGATRON_2021,
    TRAINERS,
    Cluster,
    ModelShape,
    ParallelLayout,
    hardware_flops,
    model_flops,
    step_time,
)
from parallel101.cost.kernels import product_seconds
from parallel101.cost.layer_seconds import RankWork, Seconds, linear_products, memory_kernels
from parallel101.cost.step_time import bubble_seconds
from parallel101.laboratory.planner.known_models import LLAMA as AS_LLAMA
from parallel101.models import GPT, GPTConfig, Llama, LlamaConfig

GPT3 = ModelShape(12288, 96, 96, 51200, 2048)
SMALL = ModelShape(4096, 16, 32, 51200, 2048)
LLAMA = ModelShape(4096, 16, 32, 128256, 4096, 8, 14336, **AS_LLAMA)
H100 = Cluster("H100", 4096)
LAYOUTS = [
    ParallelLayout(microbatch=2, microbatches=3),
    ParallelLayout(dp=8, tp=4, microbatch=2, zero_stage=1),
    ParallelLayout(dp=8, zero_stage=3, recompute="full"),
    ParallelLayout(dp=2, tp=8, pp=4, microbatches=8, sequence_parallel=True),
    ParallelLayout(tp=2, pp=4, microbatches=8, chunks=2, recompute="selective"),
    ParallelLayout(cp=4, tp=2, pp=2, microbatches=4),
    ParallelLayout(cp=4, tp=2, context="ulysses", overlap=False),
]


@pytest.mark.parametrize("shape", [SMALL, LLAMA, replace(SMALL, attention="unfused")], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_parts_add_up_and_are_not_negative(shape, layout):
    step = step_time(shape, layout, H100)
    assert step.seconds == pytest.approx(sum(step.parts.values()))
    assert all(part >= 0 for part in step.parts.values())
    assert step.low < step.seconds < step.high
    assert 0 < step.mfu <= step.hfu < 0.9
    assert step.tokens_per_second == pytest.approx(layout.batch * shape.time / step.seconds)
    assert step.limit


def test_flops_are_those_of_the_papers():
    """72 B s L h² (1 + s/(6h) + V/(12 L h)), and formula (3) of Narayanan et al."""
    B, s, L, h, V = 1536, 2048, 96, 12288, 51200
    model = 72 * B * s * L * h**2 * (1 + s / (6 * h) + V / (12 * L * h))
    hardware = 96 * B * s * L * h**2 * (1 + s / (6 * h) + V / (16 * L * h))
    assert model_flops(GPT3, B) == pytest.approx(model)
    assert hardware_flops(GPT3, B, "full") == pytest.approx(hardware)
    assert hardware_flops(GPT3, B, "none") == model_flops(GPT3, B)


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_models(tied):
    gpt = GPT(GPTConfig(vocabulary=100, context=24, layers=3, heads=4, width=32, tied=tied))
    shape = ModelShape(32, 3, 4, 100, 24, tied=tied)
    assert shape.parameters == sum(p.numel() for p in gpt.parameters())
    sizes = {"vocabulary": 100, "context": 24, "layers": 3, "heads": 4, "width": 32}
    llama = Llama(LlamaConfig(**sizes, kv_heads=2, hidden=88, tied=tied))
    shape = replace(
        shape, kv_heads=2, feed_forward=88, gated=True, norm="rms", biases=False, positions="rotary"
    )
    assert shape.parameters == sum(p.numel() for p in llama.parameters())


def test_one_gpu_is_the_sum_of_its_kernels():
    """Products of one layer, by hand."""
    shape, layout = replace(SMALL, layers=1), ParallelLayout(microbatch=2)
    chip, T, h = H100.chip, 2 * 2048, 4096
    sizes = [(T, h, h)] * 4 + [(T, 4 * h, h), (T, h, 4 * h)]
    products = [p for m, n, k in sizes for p in ((m, n, k), (m, k, n), (k, n, m))]
    products += [(T, 51200, h), (T, h, 51200), (h, 51200, T)]
    seconds = sum(product_seconds(chip, *p) for p in products)
    step = step_time(shape, layout, H100)
    assert step.parts["matmul"] > seconds  # and attention
    assert step.parts["matmul"] == pytest.approx(seconds, rel=0.1)
    for name in ("tp", "cp", "pp", "dp", "bubble"):
        assert step.parts[name] == 0


def test_the_bubble_is_that_of_the_paper():
    """(P − 1)/(v M) of the work of a rank, but for the embedding and the head."""
    plain = replace(SMALL, layers=32, vocabulary=64)
    for chunks in (1, 2, 4):
        layout = ParallelLayout(pp=4, microbatches=16, chunks=chunks)
        step = step_time(plain, layout, H100)
        busy = step.parts["matmul"] + step.parts["memory-bound"]
        assert step.parts["bubble"] == pytest.approx(3 / (16 * chunks) * busy, rel=0.15)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-h2"])
def test_a_rank_waits_as_long_as_in_the_schedule(name, recompute):
    chunks, again = 2 if name == "interleaved" else 1, 3.0 * (recompute == "full")
    layout = ParallelLayout(
        pp=4, microbatches=12, schedule=name, chunks=chunks, recompute=recompute
    )
    one = Seconds(memory=1.0, matmul=2.0), Seconds(matmul=2.0 + again)  # B and W of one second
    times = p101.schedule(name, stages=4, microbatches=12, chunks=chunks).time(
        forward=3 / chunks, input_grad=(1 + again) / chunks, weight_grad=1 / chunks
    )
    waits = times.makespan - 12 * (5.0 + again)  # all ranks' steps start and end together
    assert bubble_seconds(layout, 3 * (5.0 + again), one) == pytest.approx(waits)


@pytest.mark.parametrize("axis", ["dp", "tp", "pp"])
def test_more_gpus_do_not_take_longer_per_token(axis):
    seconds = []
    for n in (1, 2, 4, 8):
        sizes = {"microbatches": 64 // n if axis == "dp" else 64, axis: n}
        seconds.append(step_time(SMALL, ParallelLayout(**sizes), H100).seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] > seconds[0] / 8


def test_what_costs_time():
    def of(**options):
        return step_time(SMALL, ParallelLayout(**{"microbatches": 8, **options}), H100)

    assert of(recompute="full").seconds > of(recompute="selective").seconds > of().seconds
    assert of(recompute="full").mfu < of().mfu and of(recompute="full").hfu > of().hfu * 0.9
    assert of(tp=8, overlap=False).parts["tp"] > of(tp=8).parts["tp"]
    assert of(dp=8, overlap=False).parts["dp"] > of(dp=8).parts["dp"]
    zero = [of(dp=8, zero_stage=stage, overlap=False).parts["dp"] for stage in (1, 2, 3)]
    assert zero == sorted(zero)
    assert of(tp=16).parts["tp"] > 3 * of(tp=8).parts["tp"]  # beyond the node
    assert of(precision="fp32").seconds > 1.5 * of().seconds
    assert (
        of(dp=8, gradient_dtype="fp32", overlap=False).parts["dp"]
        > of(dp=8, overlap=False).parts["dp"]
    )
    unfused = step_time(replace(SMALL, attention="unfused"), ParallelLayout(microbatches=8), H100)
    assert unfused.parts["memory-bound"] > 1.5 * of().parts["memory-bound"]


def test_limits_are_named():
    assert "tensor cores" in step_time(GPT3, ParallelLayout(microbatch=8), H100).limit
    few = ParallelLayout(pp=16, microbatches=2)
    assert "bubble" in step_time(replace(SMALL, vocabulary=512), few, H100).limit
    assert "replicas" in step_time(SMALL, ParallelLayout(dp=1024), H100).limit
    assert "tensor parallel" in step_time(SMALL, ParallelLayout(tp=32), H100).limit


def test_programs_differ():
    layout = ParallelLayout(tp=8, pp=4, microbatches=16, recompute="full", overlap=False)
    shape = replace(SMALL, attention="unfused", dropout=True)
    ours, theirs = (step_time(shape, layout, H100, software=s) for s in (TRAINERS, MEGATRON_2021))
    assert theirs.parts["memory-bound"] < ours.parts["memory-bound"]  # it fuses
    assert theirs.parts["pp"] > ours.parts["pp"]  # and waits for messages
    assert "host" in theirs.parts and "host" not in ours.parts
    works = [RankWork(shape, ParallelLayout(tp=8), software=s) for s in (TRAINERS, MEGATRON_2021)]
    assert [len(linear_products(of)) for of in works] == [6, 4]
    ours, theirs = (sum(in_core) for _, (in_core, _) in map(memory_kernels, works))
    assert ours > theirs


WRONG = [
    ({}, {"tp": 3}, "heads=32 can't be cut over tp=3"),
    ({}, {"cp": 3}, "time=2048 can't be cut over cp=3"),
    ({}, {"ep": 2}, "experts=0 can't be cut over ep=2"),
    ({"experts": 6}, {"ep": 4}, "experts=6 can't be cut over ep=4"),
    ({}, {"dp": 8192}, "8192 GPUs, the cluster 4096"),
    ({}, {"dp": 0}, "dp=0"),
    ({}, {"chunks": 2}, "without a pipeline"),
    ({}, {"pp": 4, "chunks": 2, "microbatches": 6}, "a multiple of pp=4"),
    ({}, {"recompute": "some"}, "recompute='some'"),
    ({}, {"schedule": "2f2b"}, "schedule='2f2b': expected 'gpipe'"),
    ({}, {"zero_stage": 4}, "zero_stage=4"),
    ({"kv_heads": 8}, {"tp": 16}, "kv_heads=8 can't be cut over tp=16"),
    ({"width": 10, "heads": 4}, {}, "width=10 isn't a multiple of heads=4"),
    ({"kv_heads": 5}, {}, "heads=32 isn't a multiple of kv_heads=5"),
    ({"layers": 0}, {}, "layers=0"),
    ({"norm": "batch"}, {}, "norm='batch'"),
    ({"experts": 2, "top_k": 3}, {}, "top_k=3"),
]


def price(shape, layout):
    return step_time(replace(SMALL, **shape), ParallelLayout(**layout), H100)


@pytest.mark.parametrize(("shape", "layout", "message"), WRONG, ids=str)
def test_bad_sizes_are_refused_in_words(shape, layout, message):
    with pytest.raises(ValueError, match=message):
        price(shape, layout)
