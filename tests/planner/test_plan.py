"""p101.plan: the best of all layouts that fit, each of which HybridTrainer accepts; and errors."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
import torch

import parallel101 as p101
from parallel101 import cli
from parallel101.cost.cluster import Cluster
from parallel101.cost.model_shape import ModelShape
from parallel101.cost.parallel_layout import ParallelLayout, entries_of_stages, stage_layers
from parallel101.cost.step_memory import step_memory
from parallel101.cost.step_time import step_time
from parallel101.laboratory.planner.known_models import LLAMA as AS_LLAMA
from parallel101.laboratory.planner.layout_rules import why_not
from parallel101.laboratory.planner.planned_layout import most_of
from parallel101.laboratory.planner.search import NoLayoutError
from parallel101.laboratory.planner.trainer_call import (
    as_text,
    call_text,
    model_of,
    trainer_options,
)
from parallel101.laboratory.planner.training_plan import samples

GPT = ModelShape(width=512, layers=8, heads=8, vocabulary=1000, time=128, name="small")
SMALL = ModelShape(width=64, layers=2, heads=4, vocabulary=100, time=32)
LLAMA = ModelShape(64, 6, 4, 101, 32, 2, 96, **AS_LLAMA)


MICRO = (1, 2, 4, 8, 16)


def planned(shape=GPT, **options):
    defaults = {"gpus": 8, "simulate": 0, "progress": False}
    if isinstance(shape, ModelShape):
        defaults["batch_tokens"] = 32 * shape.time
    return p101.plan(shape, **{**defaults, **options})


def all_layouts(shape, gpus, batch):
    """Every layout of this many GPUs, wherever the sizes divide each other, right or wrong."""
    sizes = [n for n in (1, 2, 4, 8, 16) if n <= gpus]
    kinds = range(4), ("none", "full"), (False, True)
    chunks = range(1, shape.layers + 1)
    for *mesh, one, many, zero, again, cut in itertools.product(
        *[sizes] * 4, MICRO, chunks, *kinds
    ):
        dp, tp, pp, cp = mesh
        count, rest = divmod(batch, dp * one)
        if dp * tp * pp * cp != gpus or rest or (many > 1 and (pp == 1 or count % pp)):
            continue  # ParallelLayout refuses chunks that don't fit
        if (dp * cp > 1 or not zero) and (tp > 1 or not cut):
            of = ParallelLayout(*mesh, 1, one, count, many)
            yield dataclasses.replace(of, zero_stage=zero, recompute=again, sequence_parallel=cut)


def test_the_best_is_the_best_of_all_and_the_others_follow():
    accepted = [of for of in all_layouts(GPT, 8, 32) if why_not(GPT, of) is None]
    most = {of: most_of(step_memory(GPT, of, fused_ring=True)) for of in accepted}
    memory = sorted(most.values())[len(most) // 3]
    cluster = Cluster("H100", 8, memory=memory)
    fitting = [of for of in accepted if most[of] <= memory]
    assert 20 < len(fitting) < len(accepted)
    seconds = sorted(step_time(GPT, of, cluster).seconds for of in fitting)
    plan = planned(memory=memory, top=20, every=True)
    assert [of.seconds for of in plan] == pytest.approx(seconds[:20], rel=1e-12)
    assert plan.tried == len(accepted)
    (too_large,) = (why for why in plan.why_not if "don't fit" in why.reason)
    faster = [of for of in accepted if step_time(GPT, of, cluster).seconds <= plan[-1].seconds]
    larger = [most[of] for of in faster if most[of] > memory]
    assert (too_large.count, most[too_large.example]) == (len(larger), min(larger))
    of_mesh = {}
    for of in fitting:
        of_mesh.setdefault(of.mesh, []).append(step_time(GPT, of, cluster).seconds)
    one_each = planned(memory=memory, top=5)
    assert [of.seconds for of in one_each] == sorted(map(min, of_mesh.values()))[:5]
    assert all(of.seconds == min(of_mesh[of.layout.mesh]) for of in one_each)


def test_what_the_layout_fixes_stays():
    fixed = {"tp": 4, "pp": 2, "recompute": "full", "schedule": "zb-h1"}
    plan = planned(layout=fixed, every=True)
    assert len({(of.layout.microbatch, of.layout.zero_stage) for of in plan}) > 1
    for of in plan:
        assert {key: getattr(of.layout, key) for key in fixed} == fixed
    assert plan.fixed == fixed
    # beyond a node, if it is said
    assert planned(gpus=16, nodes_of=4, layout={"tp": 8}).best.layout.tp == 8
    assert all(of.layout.tp <= 4 for of in planned(gpus=16, nodes_of=4, top=500))
    assert planned(device="h200").cluster.memory_bytes == 141e9


def test_a_whole_layout_is_evaluated_alone():
    layout = ParallelLayout(
        dp=2, tp=2, pp=2, microbatch=2, microbatches=8, chunks=2, zero_stage=1, precision="bf16"
    )
    for given in (layout, dataclasses.asdict(layout)):
        plan = p101.plan(GPT, gpus=8, layout=given, simulate=0)
        assert (len(plan), plan.tried, plan.best.layout) == (1, 1, layout)
        assert plan.batch == layout.batch == 32
        assert plan.best.seconds == step_time(GPT, layout, Cluster("H100", 8)).seconds


def test_the_call_is_that_of_the_layout():
    layout = ParallelLayout(
        dp=2, tp=2, pp=2, cp=2, microbatches=4, chunks=3, zero_stage=2, gradient_dtype="fp32",
        sequence_parallel=True, recompute="full", context="ulysses", overlap=False,
    )  # fmt: skip
    options = trainer_options(LLAMA, layout)
    assert options == {
        "precision": "bf16-mixed", "gradient_dtype": torch.float32, "zero_stage": 2,
        "sequence_parallel": True, "recompute": "full", "overlap": False, "context": "ulysses",
        "schedule": "interleaved", "microbatches": 4, "chunks": 3,
        "layers_per_stage": [2, 1, 1, 1, 1, 3],
    }  # fmt: skip
    text = call_text(LLAMA, layout)
    for name, value in (options | {"kv_heads": 2}).items():
        assert f"    {name}={as_text(value)},\n" in text
    assert '(2, 2, 2, 2),\n    mesh_dim_names=("pp", "dp", "cp", "tp")' in text
    assert 'context="ulysses"' in text and "layers_per_stage=[2, *[1] * 4, 3]" in text
    alone = ParallelLayout(microbatches=3)
    assert trainer_options(GPT, alone) == {"precision": "bf16-mixed", "accumulate": 3}
    assert "pp" not in call_text(GPT, alone)


LAYOUTS = {
    "llama": (LLAMA, {"tp": 2, "pp": 2, "chunks": 3, "recompute": "full", "microbatch": 2}),
    "sequence": (LLAMA, {"tp": 2, "cp": 2, "sequence_parallel": True, "microbatch": 4}),
    "gpt": (SMALL, {"dp": 2, "pp": 2, "zero_stage": 3, "microbatch": 1}),
    "experts": (dataclasses.replace(SMALL, experts=4), {"ep": 2, "tp": 2, "microbatch": 2}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_call_builds_the_trainer_and_it_trains(name):
    shape, fixed = LAYOUTS[name]
    best = planned(shape, gpus=4, batch_tokens=4 * shape.time, layout=fixed).best

    def program():
        names = {}
        exec(best.call, names)
        trainer, tokens = names["trainer"], torch.zeros(best.layout.batch, shape.time).long()
        trainer.step(*trainer.share((tokens, tokens)))
        same = best.trainer(model_of(shape), trainer.loss_fn, torch.optim.AdamW, clip_norm=1.0)
        return [*(dict(one.axes.sizes) for one in (trainer, same)), same.clip_norm]

    run = p101.launch(program, world_size=4, backend="sim", device="H100")
    *both, clip_norm = run.results[0]
    expected = {axis: n for axis, n in fixed.items() if axis in ("dp", "tp", "pp", "cp", "ep")}
    for sizes in both:
        assert {axis: size for axis, size in sizes.items() if size > 1} == expected
    assert clip_norm == 1.0
    with pytest.raises(ValueError, match="for 4 GPUs, and there are 1 ranks"):
        best.trainer(None, None, None)


def test_long_sequences_are_cut_along_cp_with_a_fused_ring_or_the_trainers_own():
    """128K tokens: the own ring keeps squares of scores in 32 bits."""
    long = {"gpus": 8, "time": 131072, "batch_tokens": 2**20, "layout": {"tp": 1, "pp": 1}}
    fused, own = (
        planned("llama-3-8b", ring=ring, memory=200e9, **long | {"layout": {"cp": 8}}).best
        for ring in ("fused", "own")
    )
    assert 8 * fused.seconds < fused.own_seconds and own.own_seconds == own.seconds
    assert planned("llama-3-8b", memory=200e9, **long).best.layout.cp == 8
    text = str(planned("llama-3-8b", memory=200e9, **long))
    assert "HybridTrainer's own isn't fused, and layout 1 takes" in text
    with pytest.raises(ValueError, match="ring='flash': expected 'fused' or 'own'"):
        planned(ring="flash")


# ── errors ──


WRONG = {
    "'H1000' is not in the table: expected one of": {"device": "H1000"},
    "'TPU v5p'): expected a GPU with figures of its kernels": {"device": "TPU v5p"},
    "ep is of experts, and this model has none": {"layout": {"ep": 2}},
    "unknown key 'zero'": {"layout": {"zero": 1}},
    "layout tp=0": {"layout": {"tp": 0}},
    "layout tp=True": {"layout": {"tp": True}},
    "recompute='all'": {"layout": {"recompute": "all"}},
    "sequence_parallel=1": {"layout": {"sequence_parallel": 1}},
    "zero_stage=4": {"layout": {"zero_stage": 4}},
    "precision='int8'": {"precision": "int8"},
    "layout='tp=8'": {"layout": "tp=8"},
    "128 tokens: expected a multiple, such as 896 or 1,024": {"batch_tokens": 1000},
    "batch_tokens=0": {"batch_tokens": 0},
    "aren't whole nodes of 8: expected a multiple, such as 8": {"gpus": 12},
    "gpus=0": {"gpus": 0},
    "simulate=-1": {"simulate": -1},
    "top=0": {"top": 0},
    "expected numbers that divide": {"layout": {"tp": 3}},
    "tp doesn't divide 8 heads": {"gpus": 3},
    "doesn't divide the batch of 32 samples": {"gpus": 5, "layout": {"dp": 5}},
    "pp is 1": {"layout": {"pp": 1, "chunks": 2}},
    "isn't the share of the batch": {"layout": {"microbatch": 3}},
    "chunks need a multiple of pp": {"layout": {"pp": 4, "dp": 2, "chunks": 2, "microbatch": 8}},
}


@pytest.mark.parametrize("words", WRONG)
def test_what_cannot_be_is_an_error_in_words(words):
    with pytest.raises(ValueError) as error:
        planned(**WRONG[words])
    assert words.lower() in str(error.value).lower()


def test_a_model_that_fits_nowhere_says_what_is_missing_and_how_many_gpus_would_do():
    options = {"memory": 100e6, "nodes_of": 2, "precision": "bf16"}
    with pytest.raises(NoLayoutError, match="MB more than there is") as error:
        planned(gpus=1, **options)
    least = error.value.smallest_gpus
    assert least and least > 2 and f"that would do is {least}" in str(error.value)
    assert planned(gpus=least, **options).best.headroom >= 0
    with pytest.raises(NoLayoutError):
        planned(gpus=least - 2, **options)
    with pytest.raises(NoLayoutError, match="More GPUs wouldn't help") as error:
        planned(memory=1e6)
    assert error.value.smallest_gpus is None


# ── text, JSON, picture ──


def test_the_text_and_the_json_say_what_was_found(tmp_path):
    plan = planned(top=3, memory=150e6)
    text = str(plan)
    said = [f"{of.mfu:.1%}" for of in plan] + [why.reason for why in plan.why_not]
    said += ["allocator fragmentation", "uneven routing", "headroom", plan.best.time.limit]
    assert all(words in text for words in [*said, plan.best.call.splitlines()[-2].strip()])
    found = json.loads(plan.save(tmp_path / "plan.json").read_text())
    assert found["model"]["parameters"] == GPT.parameters and found["tried"] == plan.tried
    for of, row in zip(plan, found["layouts"], strict=True):
        assert row["layout"] == dataclasses.asdict(of.layout)
        assert (row["seconds"], row["call"]) == (of.seconds, of.call)
        assert row["memory"] == [dataclasses.asdict(stage) for stage in of.memory]


def test_a_shape_that_no_model_has_is_planned_and_not_built():
    odd = dataclasses.replace(GPT, norm="rms")
    plan = planned(odd, simulate=2)
    assert plan.best.simulated is None and "No model can be built" in str(plan)
    with pytest.raises(ValueError, match="norm='rms'"):
        _ = plan.best.call


def test_layers_are_shared_evenly_and_the_embedding_and_the_head_may_count_as_one():
    assert stage_layers(80, 16) == (5,) * 16
    assert stage_layers(126, 16) == (7, *[8] * 14, 7)
    assert stage_layers(126, 128) == (0, *[1] * 126, 0)
    assert entries_of_stages(126, 128) == (1, *[1] * 126, 2)
    assert entries_of_stages(4, 1) == (7,)
    for layers, stages in ((80, 3), (5, 2), (1, 2)):
        with pytest.raises(ValueError, match="divides"):
            stage_layers(layers, stages)
    # 16 ranks with 8 chunks, as section 3.3.2 of arXiv 2407.21783 has it
    fixed = {"tp": 8, "pp": 16, "dp": 128, "chunks": 8, "zero_stage": 2, "microbatch": 1}
    best = planned("llama-3-405b", gpus=16384, batch_tokens=2**24, layout=fixed).best
    assert best.layout.gpus == 16384 and "*[1] * 127, 2]" in best.call


# ── parallel101 plan ──


def test_the_command_plans_and_writes_its_files(capsys, tmp_path):
    model, picture, found = (tmp_path / name for name in ("m.json", "plan.svg", "plan.json"))
    model.write_text('{"width": 256, "layers": 4, "heads": 4, "vocabulary": 512, "time": 64}')
    arguments = "--gpus 4 --batch-tokens 1Ki --memory 16GB --simulate 1 --top 2 --layout "
    arguments += f"tp=2,recompute=full,sequence_parallel=True --json {found} --picture {picture}"
    assert cli.main(["plan", "--model", str(model), *arguments.split()]) == 0
    text = capsys.readouterr().out
    assert "4 H100s in a node, 16 GB each; 16 samples or 1,024 tokens a step" in text
    plan = json.loads(found.read_text())
    first, second = plan["layouts"]
    assert plan["fixed"] == {"tp": 2, "recompute": "full", "sequence_parallel": True}
    assert second["simulated"] is None and "m: 3,305,984 parameters" in text
    assert f"({first['simulated']['difference']:+.1%})" in text
    assert len(first["simulated"]["peak_bytes"]) == first["layout"]["pp"]
    assert picture.read_text().startswith("<svg")
    assert cli.main(["plan", "--model", "llama-3-405b", "--gpus", "8", "--simulate", "0"]) == 1
    assert "The smallest number of GPUs that would do is" in capsys.readouterr().err


WRONG_ARGUMENTS = {
    "unknown: expected one of llama-3-8b": ["--model", "llama"],
    "not KEY=VALUE": ["--layout", "tp8"],
    "given twice": ["--layout", "tp=8,tp=4"],
    "not an amount": ["--batch-tokens", "many"],
    "less than a megabyte": ["--memory", "80"],
    "does not exist": ["--json", "no/such/folder/plan.json"],
    "ends in .svg": ["--picture", "plan.txt"],
}


@pytest.mark.parametrize("words", WRONG_ARGUMENTS)
def test_wrong_arguments_get_a_message(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", "--gpus", "8", "--model", "llama-3-8b", *WRONG_ARGUMENTS[words]])
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_a_run_that_fails_is_said_and_the_plan_stays(monkeypatch):
    def fails(*_):
        raise p101.RankFailed("rank 0 failed\nat line 3", 0)

    monkeypatch.setattr("parallel101.laboratory.planner.simulated_step.simulate_step", fails)
    plan = planned(simulate=1, top=2)
    assert plan.best.simulated is None and plan[1].not_simulated == ""
    assert f"Layout 1 couldn't be run on virtual GPUs: {plan.best.not_simulated}" in str(plan)


def test_the_default_batch_is_a_power_of_two_of_samples():
    """Few layouts share 41,943 samples (4 Mi tokens of 100 each) evenly."""
    for time, expected in ((100, 32_768), (8192, 512), (1 << 30, 1)):
        shape = dataclasses.replace(GPT, time=time)
        assert samples(shape, shape, None, {}) == expected
