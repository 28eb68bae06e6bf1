"""Which layers a plan names and what "auto" finds in models that people bring; and plans that the
first step refuses. (Those that no trainer takes: test_refused.py.)
"""

from __future__ import annotations

import copy
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import parallel101 as p101
from parallel101.models import GPT_PLAN, LLAMA_PLAN
from parallel101.models.gpt import GPT, GPTConfig, next_token_loss
from parallel101.models.mlp import MLP
from tests.trainers.cases import (
    TASKS,
    Task,
    case,
    gpt,
    on_mesh,
    on_ranks,
    rows,
    seeded,
    sgd,
    text,
    unlike_one_process,
)
from tests.trainers.models import llama as our_llama

CUT_HEAD = p101.vocabulary_cross_entropy


def planned(cases, world_size=2):
    """Of every case, which is a plan, a model and a loss: the lines in which `describe` tells the
    plan, and by the shapes of weights which layers are cut, into rows of the weight (0) or columns
    (1).
    """

    def program():
        return {name: plan_of(*case) for name, case in cases.items()}

    return on_ranks(world_size, program)[0]


def plan_of(plan, build, loss_fn=F.mse_loss):
    model = seeded(build())
    whole = {layer: p.shape for layer, p in model.named_parameters() if p.dim() == 2}
    trainer = on_mesh(f"tp {dist.get_world_size()}")(model, loss_fn, sgd, plan=plan)
    parts = {layer: p.shape for layer, p in trainer.model.named_parameters() if layer in whole}
    return list(
        filter(re.compile(r".*: (column|row|vocabulary)").match, trainer.describe().notes)
    ), {
        layer.removesuffix(".weight"): int(shape[0] == whole[layer][0])
        for layer, shape in parts.items()
        if shape != whole[layer]
    }


def seq(*modules):
    return nn.Sequential(*modules)


def linears(*sizes):
    return seq(*(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])))


# ── names ──

UP = ["blocks.0", "blocks.1"]
PAIR = ("up", "down")
PATTERNS = {  # a star stands for one or more parts of a name
    "blocks.*.mlp.up": UP,
    "*.up": UP,
    "blocks.*.up": UP,
    "blocks.1.mlp.u*": ["blocks.1"],
}


def test_a_star_stands_for_one_or_more_parts_of_a_name():
    plans = {up: {up: "column", re.sub(r"u[p*]", "down", up): "row"} for up in PATTERNS}
    found = planned({up: (plan, gpt, next_token_loss) for up, plan in plans.items()})
    for up, expected in PATTERNS.items():
        cut = {f"{block}.mlp.{name}": i for block in expected for i, name in enumerate(PAIR)}
        assert found[up][1] == cut


class Squashed(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x):
        return torch.tanh(super().forward(x))


def twice():
    shared = nn.Linear(6, 6)
    return seq(nn.Linear(6, 6), shared, nn.Tanh(), shared, nn.Linear(6, 6))


def hooked():
    model = linears(6, 8, 6, 8, 6)
    model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


OUR_PLAN = [
    "embedding.token: vocabulary",
    *(f"blocks.*.attention.{name} (2 modules): column(heads=12)" for name in ("query", "key")),
    "blocks.*.attention.value (2 modules): column(heads=12)",
    "blocks.*.attention.out (2 modules): row",
    "blocks.*.mlp.up (2 modules): column",
    "blocks.*.mlp.down (2 modules): row",
    "head: vocabulary",
]
FOUND = {  # a plan, a model, and what is cut
    "mlp of three": ("auto", lambda: MLP([2] * 4), "0 column, 1 row, 2 column_gather"),
    "one layer": ("auto", lambda: linears(2, 2), "0 column_gather"),
    "softmax": ("auto", lambda: seq(nn.Linear(2, 2), nn.Softmax(-1)), "0 column_gather"),
    "norm between": (
        "auto",
        lambda: seq(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2), nn.Linear(2, 2)),
        "0 column_gather, 2 column, 3 row",
    ),
    "dropout between": (
        "auto",
        lambda: seq(nn.Linear(2, 2), nn.Tanh(), nn.Dropout(0.5), nn.Linear(2, 2)),
        "0 column_gather, 3 column_gather",
    ),
    "nested": (
        "auto",
        lambda: seq(seq(nn.Linear(2, 2), nn.ReLU()), seq(nn.Linear(2, 2))),
        "0.0 column, 1.0 row",
    ),
    "an exact name": (
        {"*": "column_gather", "0": "column", "1": "row"},
        lambda: linears(2, 4, 2, 2),
        "0 column, 1 row, 2 column_gather",
    ),
    # what the structure does not tell must not be guessed: such a layer stays whole
    "a linear layer with a forward of its own": (
        "auto",
        lambda: seq(Squashed(6, 8), *linears(8, 6, 8, 6)),
        "1 column, 2 row, 3 column_gather",
    ),
    "a layer that is used twice": ("auto", twice, "0 column_gather, 4 column_gather"),
    "a hook": ("auto", hooked, "1 column, 2 row, 3 column_gather"),
}


def test_what_auto_finds_in_a_chain():
    found = planned({name: case[:2] for name, case in FOUND.items()})
    for name, (*_, expected) in FOUND.items():
        lines, cut = found[name]
        layers, styles = zip(*(layer.split() for layer in expected.split(", ")))
        assert {layer.removeprefix("layers."): i for layer, i in cut.items()} == {
            layer: int(style == "row") for layer, style in zip(layers, styles)
        }, name
        assert {line.rpartition(": ")[2] for line in lines} == set(styles), name


def test_auto_finds_the_plans_of_our_models():
    positions = GPTConfig(vocabulary=8, context=8, layers=1, heads=2, width=8)
    found = planned(
        {
            "cut": ("auto", gpt, CUT_HEAD),
            "untied": ("auto", partial(gpt, tied=False), CUT_HEAD),
            "whole head": ("auto", gpt, next_token_loss),
            "by hand": (GPT_PLAN, gpt, CUT_HEAD),
            "as many positions as tokens": ("auto", lambda: GPT(positions), CUT_HEAD),
            "llama": ("auto", our_llama, CUT_HEAD),
            "llama by hand": (LLAMA_PLAN, our_llama, CUT_HEAD),
        }
    )
    assert found["cut"][0] == found["untied"][0] == OUR_PLAN
    assert found["whole head"][0] == OUR_PLAN[1:-1]
    assert found["by hand"][0] == [line.replace("(heads=12)", "") for line in OUR_PLAN]
    positions = found["as many positions as tokens"][1]
    assert [layer for layer in positions if "embedding" in layer] == ["embedding.token"]
    auto, by_hand = found["llama"][0], found["llama by hand"][0]
    assert [re.sub(r"\(heads=\d\)$", "", line) for line in auto] == by_hand
    assert len(by_hand) == 9 and sum("heads=4" in line for line in auto) == 2  # key and value


# ── models that people bring: nanoGPT's and LLaMA's names, heads that the code counts ──

WIDTH, HEADS, HEAD = 16, 4, 4


def linear(inputs: int, outputs: int = WIDTH) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def attention(*qkv: Tensor) -> Tensor:
    """Of (batch, time, heads, features), which are joined again."""
    q, k, v = (part.transpose(1, 2) for part in qkv)
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


class Attention(nn.Module):
    """Layers of these names: query, key and value, or one that has all three side by side; and the
    one that takes the joined heads. `split` makes heads of the outputs, as the code of some library
    does; `counts` are the attributes with which it counts them.
    """

    def __init__(self, names: str, split, key_value_heads: int = HEADS, **counts: int) -> None:
        super().__init__()
        (*self.qkv, self.out), self.split = names.split(), split
        sizes = [3 * WIDTH] if len(self.qkv) == 1 else [WIDTH, *[key_value_heads * HEAD] * 2]
        for name, size in zip([*self.qkv, self.out], [*sizes, WIDTH]):
            setattr(self, name, linear(WIDTH, size))
        vars(self).update(counts)

    def forward(self, x: Tensor) -> Tensor:
        outputs = [getattr(self, name)(x) for name in self.qkv]
        return getattr(self, self.out)(attention(*self.split(self, x, *outputs)))


def by_width(module, x, fused):
    """As nanoGPT does, which takes the width from its input, and so needs all heads."""
    features = x.shape[-1] // module.n_head
    q, k, v = fused.split(module.n_embd, dim=2)
    return (part.view(*x.shape[:2], module.n_head, features) for part in (q, k, v))


def by_heads(module, x, fused):
    """As many heads as there are."""
    return (part.unflatten(-1, (-1, HEAD)) for part in fused.chunk(3, -1))


def by_counts(module, x, *qkv):
    counts = module.num_heads, module.num_key_value_heads, module.num_key_value_heads
    return (part.view(*x.shape[:2], n, module.head_dim) for part, n in zip(qkv, counts))


def uncounted(module, x, *qkv):
    return (part.view(*x.shape[:2], -1, module.head_dim) for part in qkv)


def by_einops(module, x, *qkv):
    """As einops does it with h=self.heads: the features of a head are what is left."""
    return (part.unflatten(-1, (module.heads, -1)) for part in qkv[0].chunk(3, -1))


class GPT2FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.gelu, self.c_proj = nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))


class LlamaFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(WIDTH, 24), linear(WIDTH, 24)
        self.down_proj = linear(24)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, attention, mlp, norm=nn.LayerNorm) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = norm(WIDTH), attention, norm(WIDTH), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Model(nn.Module):
    """Embedding, two blocks, head. It does not tell the order of its modules."""

    def __init__(self, block) -> None:
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(13, WIDTH), linear(WIDTH, 13)
        self.h = nn.ModuleList(block() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        return self.lm_head(x)


class OnTheModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class InOrder(Model):
    """The same model, which tells the order of its modules."""

    def sequence(self) -> list[nn.Module]:
        return [self.wte, *self.h, self.lm_head]


def gpt2(split=by_width) -> nn.Module:
    counts = {"n_head": HEADS, "n_embd": WIDTH}
    of = partial(Attention, "c_attn c_proj", split, **counts)
    return seeded(Model(lambda: Block(of(), GPT2FeedForward())))


def llama(kind=Model, split=by_counts, key_value_heads=HEADS) -> nn.Module:
    counts = {"num_heads": HEADS, "num_key_value_heads": key_value_heads, "head_dim": HEAD}
    of = partial(Attention, "q_proj k_proj v_proj o_proj", split, key_value_heads, **counts)
    return seeded(kind(lambda: Block(of(), LlamaFeedForward(), nn.RMSNorm)))


def counted(names: str) -> nn.Module:
    of = partial(Attention, names, by_einops, heads=HEADS)
    return seeded(Model(lambda: Block(of(), GPT2FeedForward())))


BY_HEADS = {"*.c_attn": p101.column(parts=3, heads=HEADS), "*.c_fc": "column", "*.c_proj": "row"}
FEED = ["mlp.c_fc: column", "mlp.c_proj: row"]
LLAMA = [
    "attn.q_proj: column(heads='num_heads')",
    "attn.k_proj: column(heads='num_key_value_heads')",
    "attn.v_proj: column(heads='num_key_value_heads')",
    "attn.o_proj: row",
    *(f"mlp.{name}: column" for name in ("gate_proj", "up_proj")),
    "mlp.down_proj: row",
]
BROUGHT = {  # a model, the plan, and what "auto" says
    "nanogpt": (gpt2, "auto", ["attn.c_attn: column_gather", "attn.c_proj: column_gather", *FEED]),
    "nanogpt, by heads": (partial(gpt2, by_heads), BY_HEADS, None),
    "llama, counted": (llama, "auto", LLAMA),
    "llama": (partial(llama, split=uncounted), "auto", LLAMA),
    "grouped queries": (partial(llama, key_value_heads=2), "auto", LLAMA),
    "heads counted, fused": (
        partial(counted, "to_qkv to_out"),
        "auto",
        ["attn.to_qkv: column(parts=3, heads='heads')", "attn.to_out: row", *FEED],
    ),
    "layers on the model": (lambda: seeded(OnTheModel()), "auto", ["up: column", "down: row"]),
}


def test_what_auto_cuts_in_them():
    cases = {name: (plan, build) for name, (build, plan, _) in BROUGHT.items()}
    for name, (lines, _) in planned(cases).items():
        if (expected := BROUGHT[name][2]) is not None:
            lines = [line.removeprefix("h.*.").replace(" (2 modules)", "") for line in lines]
            assert lines == expected, name


TASKS |= {
    name: Task(build, F.mse_loss, rows(4, 3))
    if name == "layers on the model"
    else Task(build, next_token_loss, text)
    for name, (build, _, _) in BROUGHT.items()
}


def test_they_equal_one_process():
    cases = [case("tp 2", name, plan=plan) for name, (_, plan, _) in BROUGHT.items()]
    assert on_ranks(2, unlike_one_process, cases, steps=2) == [[]] * 2


# ── plans that don't fit: the first step refuses them ──

QKV = {f"*.{part}_proj": "column" for part in "qkv"} | {"*.o_proj": "row"}


CUT, LINEAR = {"0": "column", "2": "row"}, nn.Linear(4, 4)
IN_TIME_CUT = {"0": "column", "1": "row", "3": "column", "4": "row"}
X, OVER_TIME = torch.ones(6, 4).double(), torch.ones(4, 5, 2).double()
CODE = r"cut over 2 ranks {} was raised: {}(.|\n)*write -1"  # that counts features of the whole
UNFIT = [  # a plan, a model, a batch, and the words
    (BY_HEADS, gpt2(), text(0), CODE.format("ValueError", "not enough values to unpack")),
    (QKV, llama(), text(0), CODE.format("RuntimeError", r"shape '\[11, 6, 4, 4\]' is invalid")),
    ({"0": "row"}, linears(4, 4, 4), X, ""),
    ({"0": "column", "1": "row", "2": "row"}, linears(4, 4, 4, 4), X, ""),
    ({"1": "column"}, linears(4, 4, 4), X, ""),
    ({"0": "column", "1": "column"}, linears(4, 4, 4), X, ""),
    (CUT, seq(LINEAR, nn.LayerNorm(4), nn.Linear(4, 4)), X, ""),
    (CUT, seq(LINEAR, nn.Softmax(-1), nn.Linear(4, 4)), X, ""),
    ({"0": p101.column(parts=2), "1": "row"}, linears(4, 4, 4), X, ""),
]
UNFIT_IN_TIME = [  # modules that need all times and get a rank's
    ("auto", llama(InOrder), text(0), CODE.format("RuntimeError", r"shape '\[")),
    (IN_TIME_CUT, seq(*linears(2, 2, 2), nn.LayerNorm((5, 2)), *linears(2, 2, 2)), OVER_TIME, ""),
    ({"*.up": "column", "*.down": "row"}, gpt(), text(0), ""),
]


def refused(cases, **options):
    for plan, model, batch, words in cases:
        on_text = isinstance(batch, tuple)
        trainer = on_mesh("tp 2")(
            *(seeded(copy.deepcopy(model)), next_token_loss if on_text else F.mse_loss, sgd),
            **{"plan": plan, "verify": True, **options},
        )
        with pytest.raises(p101.NotEqualError, match=words):
            trainer.step(*(batch if on_text else (batch, batch)))


def test_a_plan_that_does_not_fit_the_code_or_the_layers_around_is_refused():
    p101.launch(refused, UNFIT, world_size=2, backend="sim")
    p101.launch(refused, UNFIT_IN_TIME, sequence_parallel=True, world_size=2, backend="sim")


@pytest.mark.parametrize("options", [{"parts": 0}, {"heads": 2.0}, {"heads": True}], ids=str)
def test_options_of_column_are_whole_numbers(options):
    with pytest.raises(ValueError, match="expected a whole number, 1 or more"):
        p101.column(**options)
