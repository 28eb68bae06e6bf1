"""What makes no sense, or can't be trained, is an error at once, on every rank in the same words: a
table of what is given, and what the error says of it.
"""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import parallel101 as p101
from parallel101.models import GPT_PLAN
from parallel101.models.gpt import next_token_loss
from parallel101.models.mlp import MLP
from tests.trainers.cases import (
    CUT_HEAD,
    gpt,
    mesh_of,
    on_ranks,
    raised,
    randn,
    seeded,
    sgd,
    text,
    world_size,
)
from tests.trainers.models import (
    BALANCED,
    FUSED,
    PLAN,
    TIME,
    Norms,
    activated,
    fused,
    llama,
    mixture,
)

X, Y = torch.ones(6, 4), torch.ones(6, 3)


def mlp():
    return MLP([4, 8, 8, 3])


def given(model=mlp, loss_fn=F.mse_loss, optimizer=sgd, batch=None, call=None, **options):
    """What a trainer is built of; the batch of a step, or what else is done with it."""
    build = model if callable(model) else lambda: model
    return SimpleNamespace(**locals())


def loss(function):
    return given(loss_fn=function, batch=(X, Y))


def fit(*args, **options):
    return given(call=lambda trainer: trainer.fit(*args, progress=False, **options))


def seq(*layers):
    return lambda: nn.Sequential(
        *(layer if isinstance(layer, nn.Module) else layer() for layer in layers)
    )


# ── one trainer: arguments, losses, batches ──

ALONE = {
    "TypeError: .*MLP'>: expected an nn.Module that has been built": given(lambda: MLP),
    "TypeError: model=None: expected an nn.Module": given(lambda: None),
    "ValueError: .*is on meta: expected": given(lambda: MLP([4, 4], device="meta")),
    r"'0\.weight' has no shape yet": given(lambda: nn.Sequential(nn.LazyLinear(4))),
    "ValueError: .*nothing to train": given(lambda: mlp().requires_grad_(False)),
    r"TypeError: loss_fn='mse': expected a function of \(outputs, targets\)": loss("mse"),
    r"ValueError: .*loss_fn is None, .*: expected step\(inputs\)": loss(None),
    r"TypeError: .*expected a function .* nn\.MSELoss\(\)": loss(nn.MSELoss),
    r"the loss is -1\.0: expected": loss(lambda y, t: (F.mse_loss(y, t), -1.0)),
    "the weights of the loss add up to 0": loss(lambda y, t: (F.mse_loss(y, t), 0)),
    r"of shape \(\d,\): expected the mean": loss(lambda y, t: (y - t).square().mean(1)),
    r"returned \d\.\d+: expected the mean": loss(lambda y, t: F.mse_loss(y, t).item()),
    "depend on any trained weight": loss(lambda y, t: F.mse_loss(y, t).detach()),
    "made of whole numbers": loss(lambda y, t: (y.argmax(1) == 1).sum()),
    "TypeError: .*optimizer is a SGD: expected a function": given(
        optimizer=sgd(mlp().parameters())
    ),
    "TypeError: optimizer is a str: expected a function": given(optimizer="adam"),
    "optimizer returned a NoneType": given(optimizer=lambda p: None),
    "Invalid learning rate: -1.0": given(optimizer=lambda p: torch.optim.SGD(p, lr=-1.0)),
    r"LBFGS\.step\(\) without arguments, .*'closure'": given(optimizer=torch.optim.LBFGS),
    "has 6 others, and lacks layers.0.weight, ": given(optimizer=lambda p: sgd(mlp().parameters())),
    "has 6 others, and lacks none": given(optimizer=lambda p: sgd([*p, *mlp().parameters()])),
    "has 0 others, and lacks layers.0.weight. ": given(optimizer=lambda p: sgd(p[1:])),
    "TypeError: HybridTrainer has no option 'stage': expected some of": given(stage=3),
    "accumulate=0: expected": given(accumulate=0),
    "accumulate=True: expected the number of microbatches": given(accumulate=True),
    "bucket_bytes=-1: expected a number of bytes": given(bucket_bytes=-1),
    "clip_norm=0.0: expected": given(clip_norm=0.0),
    "clip_norm='1': expected the largest norm": given(clip_norm="1"),
    "clip_norm=nan": given(clip_norm=float("nan")),
    "autocast=True: expected a floating-point dtype": given(autocast=True),
    r"autocast=torch\.int8": given(autocast=torch.int8),
    "'bf16-true'.*'bf16-mixed'": given(precision="bf16-true"),
    "autocast.*None with precision": given(precision="bf16", autocast=torch.bfloat16),
    "gradient_dtype.*None": given(precision="bf16", gradient_dtype=torch.float32),
    r"gradient_dtype=.*torch\.float32": given(precision="bf16-mixed", gradient_dtype=torch.float16),
    "precision=None.*gradient_dtype|gradient_dtype.*precision=None": given(
        gradient_dtype=torch.float32
    ),
    "TypeError: a batch is None": fit(lambda step: None, until=3),
    r"TypeError: a batch is a tensor of shape \(6, 4\): expected \(inputs, targets\)": fit((X, Y)),
    "TypeError: a batch is a dict": fit([{"x": X, "y": Y}]),
    "a batch is a tuple of a tensor .*, a tensor .*, a tensor": fit([(X, Y, Y)]),
    "TypeError: a batch is a list of list, .*: expected tensors": fit([([[1.0] * 4] * 6, Y)]),
    r"\(6, 4\), \(5, 4\): expected the same number": fit([({"x": X, "m": X[:5]}, Y)]),
    "TypeError: a batch is a dict of 'x', 'flags'": fit([({"x": X, "flags": 3}, Y)]),
    r"TypeError: .*a tensor of shape \(\): expected": fit([(X, torch.tensor(1.0))]),
    r"shapes \(6, 4\), \(5, 3\): expected the same number": fit([(X, Y[:5])]),
    "TypeError: batches=None: expected batches": fit(None),
    "until=None: .*would never end: pass until=": fit(lambda step: (X, Y)),
    "until=-1: expected the total number of steps": fit(lambda step: (X, Y), until=-1),
    "until='3'": fit(lambda step: (X, Y), until="3"),
    "save_to=None: expected a file, for save_every": fit([(X, Y)], save_every=5),
    r"save_every=0\.5": fit([(X, Y)], save_every=0.5, save_to="run.pt"),
    "Error: .*there is no folder no such folder": fit([(X, Y)], save_to="no such folder/run.pt"),
    r"\. is a folder: expected the name of a file": fit([(X, Y)], save_to="."),
    "TypeError: on_step=3: expected a function of a step": fit([(X, Y)], on_step=3),
    "no batches": given(call=lambda trainer: trainer.evaluate([])),
    r"torch\.no_grad\(\)": given(call=lambda trainer: torch.no_grad()(trainer.step)(X, Y)),
}


def said_of(mesh, table, options):
    said = {}
    for words, case in table.items():

        def call(case=case):
            shape = {**options, **case.options}.pop("mesh", mesh)
            axes = init_device_mesh("cpu", (2, 2)) if shape is None else mesh_of(shape)
            torch.manual_seed(0)
            more = {"verify": "plan" in case.options, **options, **case.options, "mesh": axes}
            trainer = p101.HybridTrainer(case.build(), case.loss_fn, case.optimizer, **more)
            if case.call is not None:
                case.call(trainer)
            elif case.batch is not None:
                trainer.step(*trainer.share(case.batch))

        said[words] = raised(call)
    return said


@pytest.mark.parametrize(("n", "options"), [(1, {}), (2, {}), (2, {"zero_stage": 3})], ids=str)
def test_an_argument_a_loss_or_a_batch_that_makes_no_sense(n, options):
    for said in on_ranks(n, said_of, f"dp {n}", ALONE, options):
        assert [
            (words, error) for words, error in said.items() if not re.search(words, error)
        ] == []


# ── what a mesh can't do with a model ──


class Closed(nn.Module):
    """It does not tell its modules in order, though one of them is called `sequence`."""

    def __init__(self):
        super().__init__()
        self.sequence, self.last = mlp(), nn.Linear(3, 3)

    def forward(self, x):
        return self.last(self.sequence(x))


class WithFunction(Closed):
    def sequence(self):
        return [self.last, F.relu]

    def __init__(self):
        nn.Module.__init__(self)
        self.last = nn.Linear(4, 4)


class Doubled(nn.Sequential):
    def forward(self, x):
        return super().forward(2 * x)


class WithoutPositions(nn.Module):
    """It counts positions itself, from 0 on each rank."""

    def __init__(self):
        super().__init__()
        self.gpt = small()

    def forward(self, tokens):
        return self.gpt(tokens)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = seeded(nn.MultiheadAttention(8, 2, batch_first=True))

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class WithExperts(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x):
        return self.experts(x)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += 1
        return self.layer(x).tanh()


class RunningSum(nn.Module):
    """A buffer that depends on the samples."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(1))

    def forward(self, x):
        with torch.no_grad():
            self.last.copy_(x.sum())
        return x


def small(**options):
    return gpt(heads=4, layers=1, **options)


def of_this_rank():
    return MLP([4, 8, 3], seed=dist.get_rank())


def tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


ATTENTION = {"*.query": "column", "*.key": "column", "*.value": "column", "*.out": "row"}
WHOLE_VOCABULARY = {"head": "vocabulary", "embedding.token": "vocabulary"}
WAITING = p101.Schedule([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1B1", "1F0", "1B0"]])
V_SHAPED = p101.Schedule([["0F0", "3F0", "3B0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]])
HEADLESS = {"plan": {"*.up": "column", "*.down": "row"}}
TEXT = {"loss_fn": next_token_loss, "batch": text(0)}
IN_ORDER = [nn.GELU(), *mlp().layers[:2]]
NORMED = seq(seq(mlp), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
BY_NAME = {"recompute": lambda name: name == "1"}
OVER_TIME = randn(1, 6, 8), randn(2, 6, 8)
LABELS = text(0)[0], text(0)[1][:, 0]
REFUSED = {
    "dp 1": {
        '\'everything\' matches no .* expected "none", "sel': given(recompute="everything"),
        "'full' matches no module of MLP: expected blocks": given(recompute="full"),
        "'selective' matches no module of MLP": given(recompute="selective"),
        "matches no module of GPT: .* embedding, ": given(
            gpt, recompute=lambda name: name == "blocks.7"
        ),
        "'1.1' is a BatchNorm1d: its forward changes its buffers.*twice.*LayerNorm": given(
            NORMED, **BY_NAME
        ),
        "RuntimeError: .*the forward of '0' changes its buffers.*twice": given(
            seq(Counts, lambda: nn.Linear(4, 3)), batch=(X, Y), recompute="full"
        ),
        r"'image\.1' is a BatchNorm2d, .* runs it on 2 microbatches.*accumulate=1": given(
            Norms, accumulate=2
        ),
    },
    "dp 2": {
        "'ring': expected overlap=False too": given(algorithm="ring"),
        "a name out of .*, ring": given(overlap=False, algorithm="rings"),
        "context='ulysses' is for the axis 'cp'": given(gpt, context="ulysses"),
        r"each rank has only its share.*sync_batch_norm=True.*get_submodule\('image\.1'\)\.eval": (
            given(Norms)
        ),
        "the models differ at the start": given(of_this_rank),
        "'weight' is sparse: expected dense": given(
            lambda: nn.Embedding(5, 3, sparse=True),
            lambda y, _: y.square().mean(),
            batch=(torch.ones(6, 1).long(), Y),
        ),
        r"shapes \(6, 4\), \(5, 3\).*|could not take its batch": fit([(X, Y[:5])]),
    },
    "tp 2": {
        r"regather=True.*expected sequence_parallel=True": given(regather=True),
        "is for the axis 'ep'": given(mixture, BALANCED, **PLAN),
        r"expected \(batch, time, features\)": given(
            *(fused, F.mse_loss), batch=OVER_TIME, plan=FUSED, verify=False, **TIME
        ),
        "IndexError: .*tokens range from 0 to 13, but the embedding has 13": given(
            gpt, **CUT_HEAD, batch=(torch.tensor([[0, 13]]), torch.tensor([[0, 1]]))
        ),
    },
    "tp 3": {
        r"'blocks\.\*\.mlp\.upp' matches no module": given(
            gpt, plan={"blocks.*.mlp.upp": "column"}
        ),
        "'up' matches no module": given(gpt, plan={"up": "column"}),
        "'column', but it is of type LayerNorm: expected": given(
            gpt, plan={"*.mlp_norm": "column"}
        ),
        "'column', but it is of type Block": given(gpt, plan={"blocks.0": "column"}),
        "gives 'blocks.0.mlp' the style 'column', but": given(gpt, plan={"blocks.*.mlp": "column"}),
        "expected an nn.Embedding or the": given(gpt, plan={"norm": "vocabulary"}),
        r"plan\['head'\]='colum': expected one of 'column'": given(gpt, plan={"head": "colum"}),
        "plan={}: expected .* cuts nothing": given(gpt, plan={}),
        "plan='autos'": given(gpt, plan="autos"),
        r"'blocks\.0\.attention\.query' has 4 heads, which 3": given(small, plan=ATTENTION),
        "has 4 heads, which 3 ranks": given(small),
        "GPTAttention|Attention around it has no attribute 'training' that is a whole": given(
            gpt, plan=dict.fromkeys(ATTENTION, p101.column(heads="training"))
        ),
        "into 1 equal parts of 3 equal heads": given(
            plan={"layers.0": p101.column(heads=3), "layers.1": "row"}
        ),
        "into 3 equal parts": given(plan={"layers.0": p101.column(parts=3), "layers.1": "row"}),
        "'0.weight' and '1.weight' are tied": given(tied, plan={"0": "column", "1": "row"}),
        "found nothing to cut in Conv1d": given(lambda: nn.Conv1d(1, 1, 1)),
        "embedding.*head.weight' are tied": given(gpt, plan={"embedding.token": "vocabulary"}),
        "and 'head.weight' are tied": given(gpt, **CUT_HEAD, plan={"head": "vocabulary"}),
        "loss_fn must be p101.vocabulary_cross_entropy": given(gpt, plan=WHOLE_VOCABULARY),
        "the plan cuts no head": given(gpt, **CUT_HEAD, **HEADLESS),
        "cuts no head": given(seq(lambda: nn.Linear(4, 4), nn.ReLU()), **CUT_HEAD),
        "the modules of Closed": given(
            Closed, plan={"sequence.layers.0": "column", "sequence.layers.1": "row"}, **TIME
        ),
    },
    "cp 3": {
        r"shapes \(11, 1\), \(11, 1\): expected": given(
            small, next_token_loss, batch=[t[:, :1] for t in text(0)]
        ),
        r"shapes \(11, 6\), \(11,\): expected": given(small, next_token_loss, batch=LABELS),
        "4 heads of q and 4 of k and v over 3 ranks": given(small, context="ulysses", **TEXT),
        "expected one of 'zigzag', 'contiguous'": given(small, context="ring", **TEXT),
        "called with dropout_p=0.1": given(partial(small, dropout=0.1), **TEXT, verify=True),
        "other positions must call torch's scaled_dot_product_attention": given(
            partial(small, attention="unfused"), **TEXT, verify=True
        ),
        "forward must take `positions`": given(WithoutPositions, **TEXT, verify=True),
        "the calls of nn.MultiheadAttention aren't seen": given(
            Encoder, verify=True, batch=(randn(0, 11, 7, 8), randn(0, 11, 7, 8))
        ),
        "a router's balance or capacity": given(
            partial(small, experts=4),
            lambda outputs, y: next_token_loss(outputs[0], y) + outputs[1].mean(),
            batch=text(0),
            verify=True,
        ),
    },
    "ep 3": {
        r"over 3 ranks along ep: .* have \[2\] entries": given(partial(mixture, 2)),
        'no module named "experts"': given(lambda: nn.Linear(2, 2)),
        "'.*mlps' matches no module": given(mixture, plan={"*.mlps": "experts"}),
        r"have \[3, 4\] entries": given(
            lambda: WithExperts(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4)))
        ),
        "a pipeline with experts needs one for each of 4 microbatches": given(
            mixture, BALANCED, mesh="pp 1, ep 3", microbatches=4, batch=text(0)
        ),
    },
    "dp 2, tp 2": {
        r"axes \('data', 'tp'\): expected names from dp, cp, tp, pp, ep": given(
            mesh="data 2, tp 2"
        ),
        "axes have no names: expected names from dp, cp, tp, pp, ep": given(mesh=None),
        "bigger than default world size 4": given(mesh="dp 2, tp 2, pp 2"),
        "microbatches=2 is for the axis 'pp', but the mesh has only": given(microbatches=2),
        "schedule='gpipe' is for the axis 'pp'": given(schedule="gpipe"),
        "zero_stage=4: expected": given(zero_stage=4),
        "were given 4 and 3 samples": given(
            call=lambda trainer: trainer.step(*(t[: 4 - dist.get_rank() % 2] for t in (X, Y)))
        ),
    },
    "dp 2, pp 2": {
        "say microbatches=2": given(accumulate=2),
        r"plan=.*is for the axis 'tp', but the mesh": given(plan={"layers.0": "column"}),
        "expected 2 numbers": given(layers_per_stage=[5]),
        "add up to the 5 modules": given(layers_per_stage=[2, 2]),
        "and on each stage a module with parameters": given(
            lambda: nn.Sequential(*IN_ORDER), layers_per_stage=[1, 2]
        ),
        "a Closed can't be cut into pipeline stages": given(Closed),
        r"a function in position 1 \(relu\)": given(WithFunction),
        "a Doubled can't be cut .*nn.Sequential without a forward": given(
            lambda: Doubled(nn.Linear(2, 2), nn.Linear(2, 2))
        ),
        r"'embedding\.token\.weight' is tied between two stages on one rank": given(
            gpt, schedule=V_SHAPED, zero_stage=3
        ),
        "schedule='2f2b': expected one of 'gpipe'": given(schedule="2f2b"),
        "wait for each other forever": given(schedule=WAITING),
        "rank 0 and rank 1 were given different samples.*DistributedSampler": given(
            call=lambda trainer: trainer.step(X + dist.get_rank() % 2, Y)
        ),
        r"NotEqualError(.|\n)*buffer of '9\.last' differs": given(
            lambda: nn.Sequential(*activated(), RunningSum()),
            verify=True,
            microbatches=2,
            batch=(randn(0, 8, 4), randn(1, 8, 4)),
        ),
    },
    "pp 4": {
        "3 modules with parameters, too few for 4 pipeline stages": given(),
        "expected one for the 4 ranks": given(
            lambda: nn.Sequential(*activated()), schedule=WAITING
        ),
    },
    "tp 4": {
        r"'blocks\.0\.attention\.key' has 2 heads, which 4 ranks cannot share equally: expected a "
        "tensor axis that divides 2, or a plan without": given(
            partial(llama, kv_heads=2), **CUT_HEAD
        ),
        "cut over 4 ranks RuntimeError was raised: The size of tensor a": given(
            llama, **CUT_HEAD, plan=GPT_PLAN, batch=text(0)
        ),
    },
}


@pytest.mark.parametrize("mesh", REFUSED)
def test_what_a_mesh_can_not_do_with_a_model(mesh):
    n = world_size(mesh)
    first, *others = on_ranks(n, said_of, mesh, REFUSED[mesh], {})
    assert others == [first] * (n - 1), "every rank is told the same"
    assert [(words, error) for words, error in first.items() if not re.search(words, error)] == []


def test_options_that_only_one_axis_has():
    build = partial(p101.ShardedTrainer, mlp(), F.mse_loss, sgd)
    assert "zero_stage='3'" in raised(build, zero_stage="3")
    assert "zero_stage=0: expected 1" in raised(build, zero_stage=0)
    said = raised(p101.DataParallelTrainer, mlp(), F.mse_loss, sgd, stage=3)
    assert "DataParallelTrainer has no option 'stage': expected some of" in said
