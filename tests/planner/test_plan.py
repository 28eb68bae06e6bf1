"""p101.plan: the best of all layouts that fit, each of which HybridTrainer accepts; and errors."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace

import pytest
import torch

import parallel101 as p101
from parallel101 import cli
from parallel101.cost.cluster import Cluster
from parallel101.cost.model_shape import ModelShape
from parallel101.cost.parallel_layout import ParallelLayout, stage_layers
from parallel101.cost.step_memory import step_memory
from parallel101.cost.step_time import step_time
from parallel101.laboratory.planner.known_models import LLAMA as AS_LLAMA
from parallel101.laboratory.planner.layout_rules import why_not
from parallel101.laboratory.planner.planned_layout import most_of
from parallel101.laboratory.planner.search import NoLayoutError, samples
from parallel101.laboratory.planner.trainer_call import model_of, trainer_options

GPT = ModelShape(width=512, layers=8, heads=8, vocabulary=1000, time=128, name="small")
SMALL = ModelShape(width=64, layers=2, heads=4, vocabulary=100, time=32)
LLAMA = ModelShape(64, 6, 4, 101, 32, 2, 96, **AS_LLAMA)


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
    for dp, tp, pp, cp, one, many, zero, again, cut in itertools.product(
        *[sizes] * 4, (1, 2, 4, 8, 16), chunks, *kinds
    ):
        count, rest = divmod(batch, dp * one)
        if dp * tp * pp * cp != gpus or rest or (many > 1 and (pp == 1 or count % pp)):
            continue  # ParallelLayout refuses chunks that don't fit
        if (dp * cp > 1 or not zero) and (tp > 1 or not cut):
            of = ParallelLayout(dp, tp, pp, cp, 1, one, count, many)
            yield replace(of, zero_stage=zero, recompute=again, sequence_parallel=cut)


def test_the_best_is_the_best_of_all_and_the_others_follow():
    accepted = [of for of in all_layouts(GPT, 8, 32) if why_not(GPT, of) is None]
    most = {of: most_of(step_memory(GPT, of, fused_ring=True)) for of in accepted}
    memory = sorted(most.values())[len(most) // 3]
    cluster = Cluster("H100", 8, memory=memory)
    took = {of: step_time(GPT, of, cluster).seconds for of in accepted}
    fitting = [of for of in accepted if most[of] <= memory]
    assert 20 < len(fitting) < len(accepted)
    plan = planned(memory=memory, top=20, every=True)
    expected = sorted(took[of] for of in fitting)[:20]
    assert [of.seconds for of in plan] == pytest.approx(expected, rel=1e-12)
    assert plan.tried == len(accepted)
    (too_large,) = (why for why in plan.why_not if "don't fit" in why.reason)
    larger = [most[of] for of in accepted if took[of] <= plan[-1].seconds and most[of] > memory]
    assert (too_large.count, most[too_large.example]) == (len(larger), min(larger))
    fastest = {}
    for of in sorted(fitting, key=took.__getitem__, reverse=True):
        fastest[of.mesh] = took[of]
    one_each = planned(memory=memory, top=5)
    assert [of.seconds for of in one_each] == sorted(fastest.values())[:5]
    assert all(of.seconds == fastest[of.layout.mesh] for of in one_each)
    # with one microbatch ZeRO 1 is as fast, and needs more memory
    assert planned(layout={"dp": 8, "microbatch": 4}).best.layout.zero_stage == 2


def test_what_the_layout_fixes_stays():
    fixed = {"tp": 4, "pp": 2, "recompute": "full", "schedule": "zb-h1"}
    plan = planned(layout=fixed, every=True)
    assert len({(of.layout.microbatch, of.layout.zero_stage) for of in plan}) > 1
    assert all({key: getattr(of.layout, key) for key in fixed} == fixed for of in plan)
    assert plan.fixed == fixed
    # beyond a node, if it is said
    assert planned(gpus=16, nodes_of=4, layout={"tp": 8}).best.layout.tp == 8
    assert all(of.layout.tp <= 4 for of in planned(gpus=16, nodes_of=4, top=500))
    assert planned(device="h200").cluster.memory_bytes == 141e9
    whole = ParallelLayout(
        dp=2, tp=2, pp=2, microbatch=2, microbatches=8, chunks=2, zero_stage=1, precision="bf16"
    )
    for given in (whole, asdict(whole)):
        plan = p101.plan(GPT, gpus=8, layout=given, simulate=0)
        assert (len(plan), plan.tried, plan.best.layout, plan.batch) == (1, 1, whole, 32)
        assert plan.best.seconds == step_time(GPT, whole, Cluster("H100", 8)).seconds


def test_the_call_has_the_options_of_the_layout():
    layout = ParallelLayout(
        dp=2, tp=2, pp=2, cp=2, microbatches=4, chunks=3, zero_stage=2, gradient_dtype="fp32",
        sequence_parallel=True, recompute="full", context="ulysses", overlap=False,
    )  # fmt: skip
    assert trainer_options(LLAMA, layout) == {
        "precision": "bf16-mixed", "gradient_dtype": torch.float32, "zero_stage": 2,
        "sequence_parallel": True, "recompute": "full", "overlap": False, "context": "ulysses",
        "schedule": "interleaved", "microbatches": 4, "chunks": 3,
        "layers_per_stage": [2, 1, 1, 1, 1, 3],
    }  # fmt: skip
    alone = {"precision": "bf16-mixed", "accumulate": 3}
    assert trainer_options(GPT, ParallelLayout(microbatches=3)) == alone


LAYOUTS = {
    "llama": (LLAMA, {"tp": 2, "pp": 2, "chunks": 3, "recompute": "full", "microbatch": 2}),
    "sequence": (LLAMA, {"tp": 2, "cp": 2, "sequence_parallel": True, "microbatch": 4}),
    "gpt": (SMALL, {"dp": 2, "pp": 2, "zero_stage": 3, "microbatch": 1}),
    "experts": (replace(SMALL, experts=4), {"ep": 2, "tp": 2, "microbatch": 2}),
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
    assert [{axis: n for axis, n in of.items() if n > 1} for of in both] == [expected] * 2
    assert clip_norm == 1.0
    with pytest.raises(ValueError, match="for 4 GPUs, and there are 1 ranks"):
        best.trainer(None, None, None)


def test_long_sequences_are_cut_along_cp_with_a_fused_ring_or_the_trainers_own():
    """128K tokens: the own ring keeps squares of scores in 32 bits."""
    long = {"memory": 200e9, "time": 131072, "batch_tokens": 2**20}
    fused, own = (
        planned("llama-3-8b", ring=ring, layout={"cp": 8}, **long).best for ring in ("fused", "own")
    )
    assert 8 * fused.seconds < fused.own_seconds and own.own_seconds == own.seconds
    plan = planned("llama-3-8b", layout={"tp": 1, "pp": 1}, **long)
    assert plan.best.layout.cp == 8
    assert "HybridTrainer's own isn't fused, and layout 1 takes" in str(plan)


# ── errors ──


WRONG = {
    "device='H1000': expected one of 'A100', 'H100'": {"device": "H1000"},
    "ring='flash': expected 'fused' or 'own'": {"ring": "flash"},
    "unknown key 'zero'": {"layout": {"zero": 1}},
    "layout tp=True": {"layout": {"tp": True}},
    "recompute='all'": {"layout": {"recompute": "all"}},
    "sequence_parallel=1": {"layout": {"sequence_parallel": 1}},
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
    "ep is of experts, and this model has none": {"layout": {"ep": 2}},
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


# ── text, JSON, the command ──


def test_a_shape_that_no_model_has_is_planned_and_not_built():
    plan = planned(replace(GPT, norm="rms"), simulate=2)
    assert plan.best.simulated is None and "No model can be built" in str(plan)
    with pytest.raises(ValueError, match="norm='rms'"):
        _ = plan.best.call


def test_layers_are_shared_evenly_and_the_embedding_and_the_head_may_count_as_one():
    assert stage_layers(80, 16) == (5,) * 16
    assert stage_layers(126, 16) == (7, *[8] * 14, 7)
    assert stage_layers(126, 128) == (0, *[1] * 126, 0)
    for layers, stages in ((80, 3), (5, 2), (1, 2)):
        with pytest.raises(ValueError, match="divides"):
            stage_layers(layers, stages)
    # 16 ranks with 8 chunks, as section 3.3.2 of arXiv 2407.21783 has it
    fixed = {"tp": 8, "pp": 16, "dp": 128, "chunks": 8, "zero_stage": 2, "microbatch": 1}
    best = planned("llama-3-405b", gpus=16384, batch_tokens=2**24, layout=fixed).best
    assert best.layout.gpus == 16384 and "=[*[1] * 127, 2]" in best.call
    assert '(16, 128, 8),\n    mesh_dim_names=("pp", "dp", "tp")' in best.call


def test_the_command_says_what_was_found_and_writes_its_files(capsys, tmp_path):
    model, picture, found = (tmp_path / name for name in ("m.json", "plan.svg", "plan.json"))
    model.write_text('{"width": 256, "layers": 4, "heads": 4, "vocabulary": 512, "time": 64}')
    arguments = "--gpus 4 --batch-tokens 1Ki --memory 16GB --simulate 1 --top 2 --layout "
    arguments += f"tp=2,recompute=full,sequence_parallel=True --json {found} --picture {picture}"
    assert cli.main(["plan", "--model", str(model), *arguments.split()]) == 0
    text, plan = capsys.readouterr().out, json.loads(found.read_text())
    first, second = plan["layouts"]
    assert plan["fixed"] == {"tp": 2, "recompute": "full", "sequence_parallel": True}
    assert second["simulated"] is None
    assert len(first["simulated"]["peak_bytes"]) == first["layout"]["pp"]
    again = p101.plan(
        str(model), gpus=4, batch_tokens=1024, memory=16e9, top=2, layout=plan["fixed"], simulate=0
    )
    for of, row in zip(again, plan["layouts"], strict=True):
        assert (row["layout"], row["seconds"]) == (asdict(of.layout), of.seconds)
        assert (row["call"], row["memory"]) == (of.call, [asdict(stage) for stage in of.memory])
        assert f"{of.mfu:.1%}" in text and f"{of.time.hfu:.1%}" in text
    for words in (
        "4 H100s in a node, 16 GB each; 16 samples or 1,024 tokens a step",
        "m: 3,305,984 parameters",
        f"({first['simulated']['difference']:+.1%})",
        *("allocator fragmentation", "uneven routing", "headroom of 16 GB", first["limit"]),
        *(first["call"].splitlines()[-2].strip(), *(why["reason"] for why in plan["why_not"])),
    ):
        assert words in text
    assert picture.read_text().startswith("<svg")
    assert cli.main(["plan", "--model", "llama-3-405b", "--gpus", "8", "--simulate", "0"]) == 1
    assert "The smallest number of GPUs that would do is" in capsys.readouterr().err


WRONG_ARGUMENTS = {
    "unknown: expected one of llama-3-8b": ["--model", "llama"],
    "not KEY=VALUE": ["--layout", "tp8"],
    "given twice": ["--layout", "tp=8,tp=4"],
    "not an amount": ["--simulate", "-1"],
    "less than a megabyte": ["--memory", "80"],
    "is a folder": ["--json", "."],
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
        assert samples(replace(GPT, time=time), GPT, None, {}) == expected
