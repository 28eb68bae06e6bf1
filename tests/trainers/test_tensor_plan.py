"""Which modules a plan names, what becomes of their parameters, and the plans that are refused:
without a process group or a message.
"""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import nn

import parallel101 as p101
from parallel101.models.gpt import GPT, GPTConfig, next_token_loss
from parallel101.models.mlp import MLP
from parallel101.models.plans import GPT_PLAN
from parallel101.trainers.layout import Shard
from parallel101.trainers.tensor.plan import resolve
from tests.trainers.tensor_cases import FusedAttention, gpt

CUT_HEAD = p101.vocabulary_cross_entropy


def styles(plan, model, loss_fn=F.mse_loss, size=2, **options):
    return {
        name: str(style)
        for name, style in resolve(plan, model, loss_fn, size, **options).styles.items()
    }


# ── patterns ──

PATTERNS = {
    "blocks.*.mlp.up": ["blocks.0.mlp.up", "blocks.1.mlp.up"],
    "*.up": ["blocks.0.mlp.up", "blocks.1.mlp.up"],
    "blocks.*.up": ["blocks.0.mlp.up", "blocks.1.mlp.up"],
    "blocks.1.mlp.u*": ["blocks.1.mlp.up"],
    "blocks.*.mlp.?p": None,
    "*.mlp": None,
    "up": None,
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_star_stands_for_one_or_more_parts_of_a_name(pattern):
    plan = {pattern: "column", pattern.replace("u*", "up").replace("up", "down"): "row"}
    if PATTERNS[pattern] is None:
        with pytest.raises(ValueError, match="matches no"):
            styles({pattern: "column"}, gpt(), next_token_loss)
    else:
        assert [
            name
            for name, style in styles(plan, gpt(), next_token_loss).items()
            if style == "column"
        ] == PATTERNS[pattern]


def test_an_exact_name_counts_for_more_than_a_pattern():
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2), nn.Linear(2, 2))
    assert styles({"*": "column_gather", "0": "column", "2": "row"}, model) == {
        "0": "column",
        "2": "row",
        "3": "column_gather",
    }


# ── what becomes of the parameters ──


def test_placements_name_every_cut_parameter():
    found = resolve(GPT_PLAN, gpt(tied=False), CUT_HEAD, 3).placements
    assert found["embedding.token.weight"] == found["head.weight"] == Shard(0, (5, 4, 4))
    assert (
        found["blocks.0.attention.query.weight"]
        == found["blocks.0.attention.query.bias"]
        == Shard(0, (8, 8, 8))
    )
    assert found["blocks.1.attention.out.weight"] == Shard(1, (8, 8, 8))
    assert found["blocks.1.mlp.up.bias"] == Shard(0, (32, 32, 32))
    assert not [
        name
        for name in found
        if "norm" in name or "position" in name or name.endswith(("out.bias", "down.bias"))
    ]


def test_a_fused_layer_is_cut_in_each_of_its_parts():
    found = resolve(
        {"qkv": p101.column(parts=3, heads=12), "out": "row"}, FusedAttention(), F.mse_loss, 4
    ).placements
    assert found["qkv.weight"] == found["qkv.bias"] == Shard(0, (18, 18, 18, 18), 3)
    assert found["out.weight"] == Shard(1, (6, 6, 6, 6))


def test_resolving_changes_nothing():
    model = gpt()
    before = (
        [(name, type(module)) for name, module in model.named_modules()],
        {n: p.clone() for n, p in model.named_parameters()},
    )
    resolve(GPT_PLAN, model, CUT_HEAD, 2, sequence_parallel=True)
    assert before[0] == [(name, type(module)) for name, module in model.named_modules()]
    assert all(p.equal(before[1][name]) for name, p in model.named_parameters())


def test_applied_to_one_rank_it_is_the_same_model_and_tied_weights_stay_tied():
    model = gpt()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    resolve(GPT_PLAN, model, CUT_HEAD, 1).apply(model, None)
    assert model.head.weight is model.embedding.token.weight
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        name: tuple(p.shape) for name, p in before.items()
    }
    assert all(p.equal(before[name]) for name, p in model.named_parameters())
    assert not model.head.deferred and model.blocks[0].mlp.up.deferred, (
        "the gradient of a tied weight is completed by autograd, once"
    )


def test_frozen_weights_stay_frozen_and_evaluation_stays_evaluation():
    model = MLP([4, 6, 3]).eval()
    model.layers[0].weight.requires_grad_(False)
    resolve("auto", model, F.mse_loss, 1).apply(model, None)
    assert [p.requires_grad for p in model.parameters()] == [False, True, True, True]
    assert not any(module.training for module in model.modules())


def test_gradients_are_partial_where_time_is_cut():
    found = resolve(GPT_PLAN, gpt(), CUT_HEAD, 2, sequence_parallel=True).partial
    parts = (
        "attention_norm.weight",
        "attention_norm.bias",
        "mlp_norm.weight",
        "mlp_norm.bias",
        "attention.out.bias",
        "mlp.down.bias",
    )
    assert found == {f"blocks.{i}.{part}" for i in (0, 1) for part in parts} | {
        "norm.weight",
        "norm.bias",
        "embedding.position.weight",
    }
    without_head = {name: style for name, style in GPT_PLAN.items() if style != "vocabulary"}
    assert found - resolve(without_head, gpt(), next_token_loss, 2, True).partial == {
        "norm.weight",
        "norm.bias",
        "embedding.position.weight",
    }
    assert resolve(GPT_PLAN, gpt(), CUT_HEAD, 2).partial == frozenset()


# ── auto ──

AUTO = {
    "mlp of four": (lambda: MLP([2] * 5), ["column", "row", "column", "row"]),
    "mlp of three": (lambda: MLP([2] * 4), ["column", "row", "column_gather"]),
    "one layer": (lambda: nn.Sequential(nn.Linear(2, 2)), ["column_gather"]),
    "softmax at the end": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1)),
        ["column_gather"],
    ),
    "norm between": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2), nn.Linear(2, 2)),
        ["column_gather", "column", "row"],
    ),
    "nested": (
        lambda: nn.Sequential(
            nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2))
        ),
        ["column", "row"],
    ),
}


@pytest.mark.parametrize("case", AUTO)
def test_auto_pairs_the_layers_of_a_chain(case):
    build, expected = AUTO[case]
    assert list(styles("auto", build()).values()) == expected


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_auto_finds_the_plan_of_our_gpt(tied):
    with_heads = {
        name: style.replace("column", "column(heads=12)") if "attention" in name else style
        for name, style in styles(GPT_PLAN, gpt(tied), CUT_HEAD).items()
    }
    assert styles("auto", gpt(tied), CUT_HEAD) == with_heads
    assert styles("auto", gpt(tied), next_token_loss) == {
        name: style for name, style in with_heads.items() if style != "vocabulary"
    }


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_auto_does_not_take_positions_for_tokens(tied):
    model = GPT(GPTConfig(vocabulary=8, context=8, layers=1, heads=2, width=8, tied=tied))
    for sequence_parallel in (False, True):
        cut = styles("auto", model, CUT_HEAD, sequence_parallel=sequence_parallel)
        assert [name for name in cut if "embedding" in name] == ["embedding.token"]


def test_describe_says_which_modules_have_which_style():
    assert list(resolve("auto", gpt(), CUT_HEAD, 2).describe()) == [
        "embedding.token: vocabulary",
        "blocks.*.attention.query (2 modules): column(heads=12)",
        "blocks.*.attention.key (2 modules): column(heads=12)",
        "blocks.*.attention.value (2 modules): column(heads=12)",
        "blocks.*.attention.out (2 modules): row",
        "blocks.*.mlp.up (2 modules): column",
        "blocks.*.mlp.down (2 modules): row",
        "head: vocabulary",
    ]


# ── refused ──


def seq(*modules):
    return nn.Sequential(*modules)


def linears(*sizes):
    return seq(*(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])))


def tied_chain():
    model = linears(4, 4, 4)
    model[1].weight = model[0].weight
    return model


ATTENTION = {"*.query": "column", "*.key": "column", "*.value": "column", "*.out": "row"}
REFUSED = {
    "no match": ({"blocks.*.mlp.upp": "column"}, gpt, r"'blocks\.\*\.mlp\.upp' matches no module"),
    "wrong kind": (
        {"blocks.*.mlp_norm": "column"},
        gpt,
        r"'blocks\.0\.mlp_norm' the style 'column', but it is a LayerNorm: expected an nn.Linear",
    ),
    "a container": (
        {"blocks.0": "column"},
        gpt,
        "'blocks.0' the style 'column', but it is a Block",
    ),
    "only containers": ({"blocks.*.mlp": "column"}, gpt, "matches no layer with a weight"),
    "vocabulary of a norm": (
        {"norm": "vocabulary"},
        gpt,
        "expected an nn.Embedding or the nn.Linear of the head",
    ),
    "unknown style": (
        {"head": "colum"},
        gpt,
        "'head' has the style 'colum': expected one of 'column'",
    ),
    "two styles": (
        {"*.up": "column", "*.mlp.up": "row"},
        gpt,
        r"'\*\.up' gives 'blocks\.0\.mlp\.up' the style 'column'",
    ),
    "empty": ({}, gpt, "cuts nothing"),
    "not a plan": ("autos", gpt, "plan='autos'"),
    "heads": (
        ATTENTION,
        lambda: gpt(heads=4),
        r"'blocks\.0\.attention\.query' has 4 heads, which 3 ranks cannot share equally",
    ),
    "heads, auto": ("auto", lambda: gpt(heads=4), "has 4 heads, which 3 ranks"),
    "heads that don't fit": (
        {"0": p101.column(heads=5), "1": "row"},
        lambda: linears(4, 6, 4),
        "6 outputs, which are no 5 equal heads",
    ),
    "parts that don't fit": (
        {"0": p101.column(parts=4), "1": "row"},
        lambda: linears(4, 6, 4),
        "6 outputs, which are no 4 equal parts",
    ),
    "row first": (
        {"0": "row"},
        lambda: linears(4, 4, 4),
        "row layer '0' needs inputs that are cut",
    ),
    "row after row": (
        {"0": "column", "1": "row", "2": "row"},
        lambda: linears(4, 4, 4, 4),
        "row layer '2' needs inputs that are cut",
    ),
    "row without column": (
        {"*.down": "row"},
        gpt,
        "row layer 'blocks.0.mlp.down' needs inputs that are cut",
    ),
    "column without row": (
        {"*.up": "column"},
        gpt,
        "no row layer takes the cut outputs of column layer 'blocks.0.mlp.up'",
    ),
    "column at the end": (
        {"1": "column"},
        lambda: linears(4, 4, 4),
        "no row layer takes the cut outputs of column layer '1'",
    ),
    "column after column": (
        {"0": "column", "1": "column"},
        lambda: linears(4, 4, 4),
        "'1' gets the cut outputs of column layer '0'",
    ),
    "uncut after column": (
        {"0": "column"},
        lambda: linears(4, 4, 4),
        r"'1' \(Linear\) gets the cut outputs of column layer '0'",
    ),
    "norm between": (
        {"0": "column", "2": "row"},
        lambda: seq(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)),
        r"'1' \(LayerNorm\) gets",
    ),
    "softmax between": (
        {"0": "column", "2": "row"},
        lambda: seq(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4)),
        r"'1' \(Softmax\) gets",
    ),
    "row does not fit": (
        {"0": p101.column(parts=2), "1": "row"},
        lambda: linears(4, 8, 4),
        "row layer '1' takes 8 inputs",
    ),
    "tied, one cut": (
        {"0": "column", "1": "row"},
        tied_chain,
        "'0.weight' and '1.weight' are tied",
    ),
    "multi-head attention": (
        {"*.out_proj": "row"},
        lambda: nn.TransformerEncoderLayer(4, 2),
        "reads the weights of this layer itself",
    ),
    "nothing found": ("auto", lambda: nn.Conv1d(1, 1, 1), "found nothing to cut in Conv1d"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_plan_that_does_not_fit_is_refused_with_the_name_and_the_reason(case):
    plan, build, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        resolve(plan, build(), F.mse_loss, 3)


HEAD = {"head": "vocabulary", "embedding.token": "vocabulary"}
LOSSES = {
    "cut head, other loss": (
        HEAD,
        gpt,
        next_token_loss,
        "loss_fn must be p101.vocabulary_cross_entropy",
    ),
    "whole head": ({"*.up": "column", "*.down": "row"}, gpt, CUT_HEAD, "the plan cuts no head"),
    "auto without a head": (
        "auto",
        lambda: seq(nn.Linear(4, 4), nn.ReLU()),
        CUT_HEAD,
        "the plan cuts no head",
    ),
    "tied, head only": (
        {"head": "vocabulary"},
        gpt,
        CUT_HEAD,
        "'embedding.token.weight' and 'head.weight' are tied",
    ),
    "tied, embedding only": (
        {"embedding.token": "vocabulary"},
        gpt,
        next_token_loss,
        "'embedding.token.weight' and 'head.weight' are tied",
    ),
    "not the last": (
        {"0": "vocabulary"},
        lambda: linears(4, 4, 4),
        CUT_HEAD,
        "is not the last module",
    ),
    "two heads": (
        {"*": "vocabulary"},
        lambda: linears(4, 4, 4),
        CUT_HEAD,
        "expected one, the head",
    ),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_cut_head_and_its_loss_belong_together(case):
    plan, build, loss_fn, message = LOSSES[case]
    with pytest.raises(ValueError, match=message):
        resolve(plan, build(), loss_fn, 2)


MLP_ONLY = {"*.mlp.up": "column", "*.mlp.down": "row"}
IN_TIME = {
    "attention whole": (MLP_ONLY, gpt, r"'blocks\.0\.attention\.query' \(Linear\) has no style"),
    "unknown order": (
        {"up": "column", "down": "row"},
        lambda: nn.ModuleDict({"up": nn.Linear(2, 2), "down": nn.Linear(2, 2)}),
        "order of the modules of ModuleDict",
    ),
    "mixes times": (
        {"0": "column", "1": "row", "3": "column", "4": "row"},
        lambda: seq(
            nn.Linear(2, 2), nn.Linear(2, 2), nn.Conv1d(2, 2, 1), nn.Linear(2, 2), nn.Linear(2, 2)
        ),
        r"'2' \(Conv1d\) gets activations cut along time",
    ),
    "norm over time": (
        {"0": "column", "1": "row", "3": "column", "4": "row"},
        lambda: seq(
            nn.Linear(2, 2), nn.Linear(2, 2), nn.LayerNorm((5, 2)), nn.Linear(2, 2), nn.Linear(2, 2)
        ),
        r"'2' \(LayerNorm\)",
    ),
}


@pytest.mark.parametrize("case", IN_TIME)
def test_sequence_parallel_refuses_what_may_need_every_position(case):
    plan, build, message = IN_TIME[case]
    with pytest.raises(ValueError, match=message):
        resolve(plan, build(), next_token_loss, 2, sequence_parallel=True)


@pytest.mark.parametrize("options", [{"parts": 0}, {"heads": 2.0}, {"heads": True}], ids=str)
def test_options_of_column_are_whole_numbers(options):
    with pytest.raises(ValueError, match="expected a whole number, 1 or more"):
        p101.column(**options)


def test_a_gpt_whose_heads_are_fewer_than_the_ranks():
    with pytest.raises(ValueError, match="has 2 heads, which 4 ranks"):
        resolve("auto", GPT(GPTConfig(vocabulary=7, heads=2, width=8, layers=1)), CUT_HEAD, 4)
