"""plan="auto" on models that people bring: nanoGPT's and LLaMA's names, heads that the code
counts, layers on the model itself.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parallel101 as p101
from parallel101.trainers.tensor.plan import resolve
from tests.trainers.cases import OPTIMIZERS, Task, differences, one_process, randn, trained
from tests.trainers.tensor_cases import seeded

WIDTH, HEADS = 16, 4


class GPT2Attention(nn.Module):
    """It takes the width from its input, as nanoGPT does, so it needs all heads.

    With `by_heads`, it takes the heads that there are.
    """

    def __init__(self, by_heads: bool = False) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd, self.by_heads = HEADS, WIDTH, by_heads

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (
            self.c_attn(x).chunk(3, -1)
            if self.by_heads
            else self.c_attn(x).split(self.n_embd, dim=2)
        )
        shape = (batch, time, -1 if self.by_heads else self.n_head, width // self.n_head)
        q, k, v = (part.view(shape).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()
        return self.c_proj(y.view(batch, time, -1 if self.by_heads else width))


class GPT2FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.gelu, self.c_proj = (
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))


class LlamaAttention(nn.Module):
    """Fewer heads of keys and values than of queries.

    `counted`: by the module's attributes, else by -1.
    """

    def __init__(self, key_value_heads: int = HEADS, counted: bool = True) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = (
            HEADS,
            key_value_heads,
            WIDTH // HEADS,
        )
        self.counted = counted
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj, self.v_proj = (
            nn.Linear(WIDTH, key_value_heads * self.head_dim, bias=False) for _ in range(2)
        )
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        of_queries, of_keys = (
            (self.num_heads, self.num_key_value_heads) if self.counted else (-1, -1)
        )
        q = self.q_proj(x).view(batch, time, of_queries, self.head_dim).transpose(1, 2)
        k, v = (
            layer(x).view(batch, time, of_keys, self.head_dim).transpose(1, 2)
            for layer in (self.k_proj, self.v_proj)
        )
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        return self.o_proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        )


class LlamaFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 24, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(24, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class CountedHeads(nn.Module):
    """As einops does it with h=self.heads: the features of a head are what is left."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.heads = HEADS
        if fused:
            self.to_qkv, self.to_out = (
                nn.Linear(WIDTH, 3 * WIDTH, bias=False),
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)),
            )
        else:
            self.to_q, self.to_k, self.to_v, self.to_out = (
                nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
            )

    def forward(self, x: Tensor) -> Tensor:
        qkv = (
            self.to_qkv(x).chunk(3, -1)
            if hasattr(self, "to_qkv")
            else (self.to_q(x), self.to_k(x), self.to_v(x))
        )
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv)
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(
        self, attention: nn.Module, mlp: nn.Module, norm: type[nn.Module] = nn.LayerNorm
    ) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = norm(WIDTH), attention, norm(WIDTH), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Model(nn.Module):
    """Embedding, two blocks, head. It does not tell the order of its modules."""

    def __init__(self, block) -> None:
        super().__init__()
        self.wte, self.h, self.lm_head = (
            nn.Embedding(13, WIDTH),
            nn.ModuleList(block() for _ in range(2)),
            nn.Linear(WIDTH, 13, bias=False),
        )

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


def text(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(13, (4, 6), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def loss_of_text(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets.flatten())


def gpt2(**options) -> nn.Module:
    return seeded(Model(lambda: Block(GPT2Attention(**options), GPT2FeedForward())))


def llama(**options) -> nn.Module:
    return seeded(Model(lambda: Block(LlamaAttention(**options), LlamaFeedForward(), nn.RMSNorm)))


def counted(**options) -> nn.Module:
    return seeded(Model(lambda: Block(CountedHeads(**options), GPT2FeedForward())))


def rows(step: int) -> tuple[Tensor, Tensor]:
    return randn(step, 5, 4), randn(100 + step, 5, 3)


BY_HEADS = {"*.c_attn": p101.column(parts=3, heads=HEADS), "*.c_fc": "column", "*.c_proj": "row"}
MODELS = {  # the task, the plan, and what "auto" says
    "nanogpt": (
        Task(gpt2, loss_of_text, text),
        "auto",
        [
            "attn.c_attn: column_gather",
            "attn.c_proj: column_gather",
            "mlp.c_fc: column",
            "mlp.c_proj: row",
        ],
    ),
    "nanogpt, by heads": (
        Task(functools.partial(gpt2, by_heads=True), loss_of_text, text),
        BY_HEADS,
        None,
    ),
    **{
        f"llama, counted {way}": (
            Task(functools.partial(llama, counted=way), loss_of_text, text),
            "auto",
            [
                "attn.q_proj: column(heads='num_heads')",
                "attn.k_proj: column(heads='num_key_value_heads')",
                "attn.v_proj: column(heads='num_key_value_heads')",
                "attn.o_proj: row",
                "mlp.gate_proj: column",
                "mlp.up_proj: column",
                "mlp.down_proj: row",
            ],
        )
        for way in (True, False)
    },
    "heads counted": (
        Task(functools.partial(counted, fused=False), loss_of_text, text),
        "auto",
        [f"attn.to_{part}: column(heads='heads')" for part in "qkv"]
        + ["attn.to_out: row", "mlp.c_fc: column", "mlp.c_proj: row"],
    ),
    "heads counted, fused": (
        Task(functools.partial(counted, fused=True), loss_of_text, text),
        "auto",
        [
            "attn.to_qkv: column(parts=3, heads='heads')",
            "attn.to_out.0: row",
            "mlp.c_fc: column",
            "mlp.c_proj: row",
        ],
    ),
    "layers on the model": (
        Task(lambda: seeded(OnTheModel()), F.mse_loss, rows),
        "auto",
        ["up: column", "down: row"],
    ),
}


@pytest.mark.parametrize("name", [name for name, (_, plan, _) in MODELS.items() if plan == "auto"])
def test_what_auto_cuts(name):
    task, plan, expected = MODELS[name]
    found = [
        f"{name.removeprefix('h.0.')}: {style}"
        for name, style in resolve(plan, task.build(), task.loss_fn, 2).styles.items()
    ]
    assert [line for line in found if not line.startswith("h.1.")] == expected


def unlike_one_process() -> list[tuple[str, list[str]]]:
    wrong = []
    for name, (task, plan, _) in MODELS.items():
        trainer = p101.TensorParallelTrainer(
            task.build(), task.loss_fn, OPTIMIZERS["adamw"], plan=plan
        )
        wrong.append(
            (
                name,
                differences(trained(trainer, task, steps=2), one_process(task, "adamw", None, 2)),
            )
        )
    return [(name, found) for name, found in wrong if found]


@pytest.mark.parametrize("world_size", [2, 4])
def test_equal_to_one_process(world_size):
    assert (
        p101.launch(unlike_one_process, world_size=world_size, backend="sim").results
        == [[]] * world_size
    )


def grouped() -> list[str]:
    task = Task(functools.partial(llama, key_value_heads=2), loss_of_text, text)
    trainer = p101.TensorParallelTrainer(task.build(), task.loss_fn, OPTIMIZERS["adamw"])
    return differences(trained(trainer, task, steps=2), one_process(task, "adamw", None, 2))


def test_grouped_queries():
    assert p101.launch(grouped, world_size=2, backend="sim").results == [[]] * 2


def test_heads_of_keys_that_the_ranks_cannot_share_are_refused():
    with pytest.raises(
        ValueError, match=r"'h\.0\.attn\.k_proj' has 2 heads, which 4 ranks cannot share equally"
    ):
        resolve("auto", llama(key_value_heads=2), loss_of_text, 4)


# ── what cannot work is said ──


def in_words(build, plan, sequence_parallel: bool = False) -> tuple[str, str]:
    """What a step raises, and its cause."""
    trainer = p101.TensorParallelTrainer(
        build(), loss_of_text, OPTIMIZERS["sgd"], plan=plan, sequence_parallel=sequence_parallel
    )
    with pytest.raises(ValueError) as failed:
        trainer.step(*text(0))
    return str(failed.value), type(failed.value.__cause__).__name__


class InOrder(Model):
    """The same model, which tells the order of its modules, so that its activations can be cut
    along time.
    """

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).unflatten(0, tokens.shape)

    def sequence(self) -> list[nn.Module]:
        return [self.wte, *self.h, self.lm_head]


def in_order() -> nn.Module:
    return seeded(InOrder(lambda: Block(LlamaAttention(), LlamaFeedForward(), nn.RMSNorm)))


WORDS = {  # the model, the plan, whether time is cut, and how the message begins
    "the whole width": (
        gpt2,
        BY_HEADS,
        False,
        "'h.0.attn' (GPT2Attention) raised 'not enough values to unpack",
    ),
    "all heads": (
        llama,
        {f"*.{part}_proj": "column" for part in "qkv"} | {"*.o_proj": "row"},
        False,
        (
            "'h.0.attn' (LlamaAttention) raised \"shape '[2, 5, 4, 4]' is invalid for input of "
            'size 80"'
        ),
    ),
    "all times": (in_order, "auto", True, "'h.0.attn' (LlamaAttention) raised \"shape '["),
}


@pytest.mark.parametrize("case", WORDS)
def test_code_that_counts_features_of_the_whole_model_is_named(case):
    build, plan, sequence_parallel, words = WORDS[case]
    results = p101.launch(
        in_words, build, plan, sequence_parallel, world_size=2, backend="sim"
    ).results
    for message, cause in results:
        assert message.startswith(words)
        assert "cut over 2 ranks" in message and "write -1" in message
        assert ("sequence_parallel cuts the input along time" in message) == sequence_parallel
        assert cause in ("RuntimeError", "ValueError")


def test_other_errors_of_the_model_stay_as_they_are():
    model = OnTheModel()
    resolve("auto", model, F.mse_loss, 1).apply(model, None)
    with pytest.raises(RuntimeError, match="dtype"):
        model(torch.ones(2, 4, dtype=torch.float64))


@pytest.mark.parametrize("heads", ["n_heads", "q_proj", "training"])
def test_an_attribute_that_counts_no_heads(heads):
    plan = {f"*.{part}_proj": p101.column(heads=heads) for part in "qkv"} | {"*.o_proj": "row"}
    with pytest.raises(
        ValueError,
        match=f"the LlamaAttention around it has no attribute '{heads}' that is a whole number",
    ):
        resolve(plan, llama(), loss_of_text, 2)
