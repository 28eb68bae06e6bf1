"""Which layers a plan names and what "auto" finds in models that people bring; and the plans that
are refused, with the name of the layer and the reason.
"""

from __future__ import annotations

import copy
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parallel101 as p101
from parallel101.models.gpt import GPT, GPTConfig, next_token_loss
from parallel101.models.mlp import MLP
from parallel101.models.plans import GPT_PLAN
from tests.trainers.cases import OPTIMIZERS, Case, Task, gpt, rows, seeded, unlike_one_process

CUT_HEAD = p101.vocabulary_cross_entropy


def plans(cases):
    """Of every case, which is a plan, a model and options: the error, or the lines in which
    `describe` tells the plan, and by the shapes of weights which layers are cut, into rows of the
    weight (0) or columns (1).
    """
    found = {}
    for name, (plan, build, options) in cases.items():
        arguments = {"loss_fn": F.mse_loss, "plan": plan, "verify": False, **options}
        model = seeded(build())
        whole = {layer: p.shape for layer, p in model.named_parameters() if p.dim() == 2}
        try:
            trainer = p101.TensorParallelTrainer(model, optimizer=OPTIMIZERS["sgd"], **arguments)
        except ValueError as error:
            found[name] = str(error)
            continue
        style = re.compile(r".*: (column|row|vocabulary)")
        found[name] = (
            list(filter(style.match, trainer.describe().notes)),
            {
                layer.removesuffix(".weight"): int(p.shape[0] == whole[layer][0])
                for layer, p in trainer.model.named_parameters()
                if layer in whole and p.shape != whole[layer]
            },
        )
    return found


def planned(cases, world_size=2):
    first, *others = p101.launch(plans, cases, world_size=world_size, backend="sim").results
    assert all(other == first for other in others), "the same words on every rank"
    return first


def seq(*modules):
    return nn.Sequential(*modules)


def linears(*sizes):
    return seq(*(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])))


# ── names ──

UP = ["blocks.0", "blocks.1"]
TEXT = {"loss_fn": next_token_loss}
PAIR = ("up", "down")
PATTERNS = {  # a star stands for one or more parts of a name
    "blocks.*.mlp.up": UP,
    "*.up": UP,
    "blocks.*.up": UP,
    "blocks.1.mlp.u*": ["blocks.1"],
    "blocks.*.mlp.?p": "matches no",
    "*.mlp": "matches no",
    "up": "matches no",
}


def test_a_star_stands_for_one_or_more_parts_of_a_name():
    plans = {up: {up: "column", re.sub(r"u[p*]", "down", up): "row"} for up in PATTERNS}
    found = planned({up: (plan, gpt, TEXT) for up, plan in plans.items()})
    for up, expected in PATTERNS.items():
        if isinstance(expected, str):
            assert expected in found[up]
        else:
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


PLAIN, IN_TIME = {}, {"sequence_parallel": True}
OUR_PLAN = [
    "embedding.token: vocabulary",
    *(f"blocks.*.attention.{name} (2 modules): column(heads=12)" for name in ("query", "key")),
    "blocks.*.attention.value (2 modules): column(heads=12)",
    "blocks.*.attention.out (2 modules): row",
    "blocks.*.mlp.up (2 modules): column",
    "blocks.*.mlp.down (2 modules): row",
    "head: vocabulary",
]
FOUND = {  # a plan, a model, options, and what is cut
    "mlp of three": ("auto", lambda: MLP([2] * 4), PLAIN, "0 column, 1 row, 2 column_gather"),
    "one layer": ("auto", lambda: linears(2, 2), PLAIN, "0 column_gather"),
    "softmax": ("auto", lambda: seq(nn.Linear(2, 2), nn.Softmax(-1)), PLAIN, "0 column_gather"),
    "norm between": (
        "auto",
        lambda: seq(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2), nn.Linear(2, 2)),
        PLAIN,
        "0 column_gather, 2 column, 3 row",
    ),
    "dropout between": (
        "auto",
        lambda: seq(nn.Linear(2, 2), nn.Tanh(), nn.Dropout(0.5), nn.Linear(2, 2)),
        PLAIN,
        "0 column_gather, 3 column_gather",
    ),
    "nested": (
        "auto",
        lambda: seq(seq(nn.Linear(2, 2), nn.ReLU()), seq(nn.Linear(2, 2))),
        PLAIN,
        "0.0 column, 1.0 row",
    ),
    "an exact name": (
        {"*": "column_gather", "0": "column", "1": "row"},
        lambda: linears(2, 4, 2, 2),
        PLAIN,
        "0 column, 1 row, 2 column_gather",
    ),
    # what the structure does not tell must not be guessed: such a layer stays whole
    "a linear layer with a forward of its own": (
        "auto",
        lambda: seq(Squashed(6, 8), *linears(8, 6, 8, 6)),
        PLAIN,
        "1 column, 2 row, 3 column_gather",
    ),
    "a layer that is used twice": ("auto", twice, PLAIN, "0 column_gather, 4 column_gather"),
    "a hook": ("auto", hooked, PLAIN, "1 column, 2 row, 3 column_gather"),
}


def test_what_auto_finds_in_a_chain():
    found = planned({name: case[:3] for name, case in FOUND.items()})
    for name, (*_, expected) in FOUND.items():
        lines, cut = found[name]
        layers, styles = zip(*(layer.split() for layer in expected.split(", ")))
        assert {layer.removeprefix("layers."): i for layer, i in cut.items()} == {
            layer: int(style == "row") for layer, style in zip(layers, styles)
        }, name
        assert {line.rpartition(": ")[2] for line in lines} == set(styles), name


def test_auto_finds_the_plan_of_our_gpt():
    found = planned(
        {
            "cut": ("auto", gpt, {"loss_fn": CUT_HEAD}),
            "untied": ("auto", partial(gpt, tied=False), {"loss_fn": CUT_HEAD, **IN_TIME}),
            "whole head": ("auto", gpt, TEXT),
            "by hand": (GPT_PLAN, gpt, {"loss_fn": CUT_HEAD}),
            "as many positions as tokens": (
                "auto",
                lambda: GPT(GPTConfig(vocabulary=8, context=8, layers=1, heads=2, width=8)),
                {"loss_fn": CUT_HEAD},
            ),
        }
    )
    assert found["cut"][0] == found["untied"][0] == OUR_PLAN
    assert found["whole head"][0] == OUR_PLAN[1:-1]
    assert found["by hand"][0] == [line.replace("(heads=12)", "") for line in OUR_PLAN]
    positions = found["as many positions as tokens"][1]
    assert [layer for layer in positions if "embedding" in layer] == ["embedding.token"]


# ── models that people bring: nanoGPT's and LLaMA's names, heads that the code counts ──

WIDTH, HEADS = 16, 4


def linear(inputs: int, outputs: int = WIDTH) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def attention(*qkv: Tensor) -> Tensor:
    """Of (batch, time, heads, features), which are joined again."""
    q, k, v = (part.transpose(1, 2) for part in qkv)
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


class GPT2Attention(nn.Module):
    """It takes the width from its input, as nanoGPT does, so it needs all heads.

    With `by_heads`, it takes the heads that there are.
    """

    def __init__(self, by_heads: bool = False) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd, self.by_heads = HEADS, WIDTH, by_heads

    def forward(self, x: Tensor) -> Tensor:
        fused, features = self.c_attn(x), x.shape[-1] // self.n_head
        if self.by_heads:
            parts = (part.unflatten(-1, (-1, features)) for part in fused.chunk(3, -1))
        else:
            q, k, v = fused.split(self.n_embd, dim=2)
            parts = (part.view(*x.shape[:2], self.n_head, features) for part in (q, k, v))
        return self.c_proj(attention(*parts))


class GPT2FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.gelu, self.c_proj = nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))


class LlamaAttention(nn.Module):
    """Fewer heads of keys and values than of queries.

    `counted`: by the module's attributes, else by -1.
    """

    def __init__(self, key_value_heads: int = HEADS, counted: bool = True) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads = HEADS, key_value_heads
        self.head_dim, self.counted = WIDTH // HEADS, counted
        self.q_proj = linear(WIDTH)
        self.k_proj, self.v_proj = (linear(WIDTH, key_value_heads * self.head_dim) for _ in "kv")
        self.o_proj = linear(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        counts = self.num_heads, self.num_key_value_heads, self.num_key_value_heads
        parts = (
            layer(x).view(*x.shape[:2], count if self.counted else -1, self.head_dim)
            for layer, count in zip((self.q_proj, self.k_proj, self.v_proj), counts)
        )
        return self.o_proj(attention(*parts))


class LlamaFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(WIDTH, 24), linear(WIDTH, 24)
        self.down_proj = linear(24)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class CountedHeads(nn.Module):
    """As einops does it with h=self.heads: the features of a head are what is left."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.heads = HEADS
        if fused:
            self.to_qkv = linear(WIDTH, 3 * WIDTH)
            self.to_out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0))
        else:
            self.to_q, self.to_k, self.to_v, self.to_out = (linear(WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "to_qkv"):
            qkv = self.to_qkv(x).chunk(3, -1)
        else:
            qkv = self.to_q(x), self.to_k(x), self.to_v(x)
        return self.to_out(attention(*(part.unflatten(-1, (self.heads, -1)) for part in qkv)))


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
        return self.lm_head(x).flatten(0, 1)


class OnTheModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class InOrder(Model):
    """The same model, which tells the order of its modules."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).unflatten(0, tokens.shape)

    def sequence(self) -> list[nn.Module]:
        return [self.wte, *self.h, self.lm_head]


def text(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(13, (4, 6), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of_text(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets.flatten())


def gpt2(**options) -> nn.Module:
    return seeded(Model(lambda: Block(GPT2Attention(**options), GPT2FeedForward())))


def llama(kind=Model, **options) -> nn.Module:
    return seeded(kind(lambda: Block(LlamaAttention(**options), LlamaFeedForward(), nn.RMSNorm)))


def counted(fused: bool) -> nn.Module:
    return seeded(Model(lambda: Block(CountedHeads(fused), GPT2FeedForward())))


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
    "nanogpt, by heads": (partial(gpt2, by_heads=True), BY_HEADS, None),
    "llama, counted": (llama, "auto", LLAMA),
    "llama": (partial(llama, counted=False), "auto", LLAMA),
    "grouped queries": (partial(llama, key_value_heads=2), "auto", LLAMA),
    "heads counted": (
        partial(counted, False),
        "auto",
        [*(f"attn.to_{x}: column(heads='heads')" for x in "qkv"), "attn.to_out: row", *FEED],
    ),
    "heads counted, fused": (
        partial(counted, True),
        "auto",
        ["attn.to_qkv: column(parts=3, heads='heads')", "attn.to_out.*: row", *FEED],
    ),
    "layers on the model": (lambda: seeded(OnTheModel()), "auto", ["up: column", "down: row"]),
}


def test_what_auto_cuts_in_them():
    cases = {name: (plan, build, {}) for name, (build, plan, _) in BROUGHT.items()}
    for name, (lines, _) in planned(cases).items():
        if (expected := BROUGHT[name][2]) is not None:
            lines = [line.removeprefix("h.*.").replace(" (2 modules)", "") for line in lines]
            assert lines == expected, name
    (said,) = planned({"": ("auto", partial(llama, key_value_heads=2), {})}, 4).values()
    assert "'h.0.attn.k_proj' has 2 heads, which 4 ranks cannot share equally" in said


@pytest.mark.parametrize("world_size", [2, 4])
def test_they_equal_one_process(world_size):
    cases = []
    for name, (build, plan, _) in BROUGHT.items():
        on_text = Task(build, loss_of_text, text)
        task = Task(build, F.mse_loss, rows(4, 3)) if name == "layers on the model" else on_text
        options = {"plan": plan, "verify": False}
        if (name, world_size) != ("grouped queries", 4):
            cases.append(Case(task, p101.TensorParallelTrainer, options=options))
    run = p101.launch(
        partial(unlike_one_process, steps=2), cases, world_size=world_size, backend="sim"
    )
    assert run.results == [[]] * world_size


def in_words(build, plan, sequence_parallel):
    """What a step raises, and its cause."""
    options = {"plan": plan, "sequence_parallel": sequence_parallel}
    loss = lambda y, t: F.cross_entropy(y.flatten(0, -2), t.flatten())  # noqa: E731
    trainer = p101.TensorParallelTrainer(build(), loss, OPTIMIZERS["sgd"], **options)
    with pytest.raises(p101.NotEqualError) as failed:
        trainer.step(*text(0))
    return str(failed.value), type(failed.value.__cause__)


QKV = {f"*.{part}_proj": "column" for part in "qkv"} | {"*.o_proj": "row"}


@pytest.mark.parametrize(
    ("build", "plan", "sequence_parallel", "words"),
    [
        (gpt2, BY_HEADS, False, "ValueError was raised: not enough values to unpack"),
        (llama, QKV, False, r"RuntimeError was raised: shape '\[4, 5, 4, 4\]' is invalid"),
        (partial(llama, InOrder), "auto", True, r"RuntimeError was raised: shape '\["),
    ],
    ids=["the whole width", "all heads", "all times"],
)
def test_code_that_counts_features_of_the_whole_model_is_refused(
    build, plan, sequence_parallel, words
):
    for message, cause in p101.launch(
        in_words, build, plan, sequence_parallel, world_size=2, backend="sim"
    ).results:
        assert re.search("cut over 2 ranks " + words, message)
        assert "write -1" in message
        assert cause in (RuntimeError, ValueError)


# what a cut layer gives or takes doesn't fit the layers around it: the first step refuses it
CUT = {"0": "column", "2": "row"}
LINEAR = nn.Linear(4, 4)
UNFIT = {
    "row first": ({"0": "row"}, linears(4, 4, 4)),
    "row after row": ({"0": "column", "1": "row", "2": "row"}, linears(4, 4, 4, 4)),
    "column at the end": ({"1": "column"}, linears(4, 4, 4)),
    "column after column": ({"0": "column", "1": "column"}, linears(4, 4, 4)),
    "norm between": (CUT, seq(LINEAR, nn.LayerNorm(4), nn.Linear(4, 4))),
    "softmax between": (CUT, seq(LINEAR, nn.Softmax(-1), nn.Linear(4, 4))),
    "row does not fit": ({"0": p101.column(parts=2), "1": "row"}, linears(4, 4, 4)),
}


IN_TIME_CUT = {"0": "column", "1": "row", "3": "column", "4": "row"}


def refused(plan, model, batch, loss_fn=F.mse_loss, **options):
    trainer = p101.TensorParallelTrainer(model, loss_fn, OPTIMIZERS["sgd"], plan=plan, **options)
    with pytest.raises(p101.NotEqualError):
        trainer.step(*batch)


def that_do_not_fit() -> None:
    """The plans above, and modules that need all times and get a rank's."""
    for plan, model in UNFIT.values():
        refused(plan, seeded(copy.deepcopy(model)), rows(4, 4)(0))
    over_time = seeded(seq(*linears(2, 2, 2), nn.LayerNorm((5, 2)), *linears(2, 2, 2)))
    rows_in_time = torch.ones(4, 5, 2).double(), torch.ones(4, 5, 2).double()
    refused(IN_TIME_CUT, over_time, rows_in_time, **IN_TIME)
    refused({"*.up": "column", "*.down": "row"}, gpt(), text(0), next_token_loss, **IN_TIME)


def test_a_plan_that_does_not_fit_the_layers_around_is_refused_in_the_first_step():
    p101.launch(that_do_not_fit, world_size=2, backend="sim")


# ── refused ──


def tied_chain():
    model = linears(4, 4, 4)
    model[1].weight = model[0].weight
    return model


ATTENTION = {"*.query": "column", "*.key": "column", "*.value": "column", "*.out": "row"}
FOUR_HEADS, HEAD = partial(gpt, heads=4), {"head": "vocabulary", "embedding.token": "vocabulary"}
TWO, THREE = lambda: linears(4, 4, 4), lambda: linears(4, 4, 4, 4)
REFUSED = {  # on 3 ranks: a plan, a model, and the words
    "no match": ({"blocks.*.mlp.upp": "column"}, gpt, r"'blocks\.\*\.mlp\.upp' matches no module"),
    "wrong kind": ({"*.mlp_norm": "column"}, gpt, "'column', but it is a LayerNorm: expected"),
    "a container": ({"blocks.0": "column"}, gpt, "'column', but it is a Block"),
    "only containers": ({"blocks.*.mlp": "column"}, gpt, "matches no layer with a weight"),
    "vocabulary of a norm": ({"norm": "vocabulary"}, gpt, "expected an nn.Embedding or the"),
    "unknown style": ({"head": "colum"}, gpt, "the style 'colum': expected one of 'column'"),
    "two styles": ({"*.up": "column", "*.mlp.up": "row"}, gpt, r"'\*\.up' gives .*mlp\.up'"),
    "empty": ({}, gpt, "cuts nothing"),
    "not a plan": ("autos", gpt, "plan='autos'"),
    "heads": (ATTENTION, FOUR_HEADS, r"'blocks\.0\.attention\.query' has 4 heads, which 3"),
    "heads, auto": ("auto", FOUR_HEADS, "has 4 heads, which 3 ranks"),
    "no such attribute": (
        {f"*.{part}_proj": p101.column(heads="training") for part in "qkv"} | {"*.o_proj": "row"},
        llama,
        "LlamaAttention around it has no attribute 'training' that is a whole number",
    ),
    "heads that don't fit": ({"0": p101.column(heads=3), "1": "row"}, TWO, "into 3 equal heads"),
    "parts that don't fit": ({"0": p101.column(parts=3), "1": "row"}, TWO, "into 3 equal parts"),
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
    "tied, embedding only": ({"embedding.token": "vocabulary"}, gpt, "'head.weight' are tied"),
    "cut head, other loss": (HEAD, gpt, "loss_fn must be p101.vocabulary_cross_entropy"),
}
WITH_CUT_HEAD = {
    "whole head": ({"*.up": "column", "*.down": "row"}, gpt, "the plan cuts no head"),
    "auto without a head": ("auto", lambda: seq(nn.Linear(4, 4), nn.ReLU()), "cuts no head"),
    "tied, head only": ({"head": "vocabulary"}, gpt, "'head.weight' are tied"),
}
WITH_TIME_CUT = {
    "unknown order": ({"up": "column", "down": "row"}, OnTheModel, "the modules of OnTheModel"),
}


def test_a_plan_that_does_not_fit_is_refused_with_the_name_and_the_reason():
    for table, options in (
        (REFUSED, {}),
        (WITH_CUT_HEAD, {"loss_fn": CUT_HEAD}),
        (WITH_TIME_CUT, IN_TIME),
    ):
        cases = {name: (plan, build, options) for name, (plan, build, _) in table.items()}
        for name, said in planned(cases, world_size=3).items():
            assert isinstance(said, str), name
            assert re.search(table[name][2], said), said


@pytest.mark.parametrize("options", [{"parts": 0}, {"heads": 2.0}, {"heads": True}], ids=str)
def test_options_of_column_are_whole_numbers(options):
    with pytest.raises(ValueError, match="expected a whole number, 1 or more"):
        p101.column(**options)
