"""What a run keeps of a layer is Table 2 of Korthikanti et al. (arXiv 2205.05198) and the listed
differences, to the byte.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import parallel101 as p101
from parallel101.cost import (
    LayerShape,
    kept_by_our_gpt,
    layer_activations,
)
from parallel101.models.gpt import GPT, GPTConfig, next_token_loss

SIZES = [(32, 4, 8, 2), (64, 4, 16, 1), (24, 12, 4, 3)]  # h, a, s, b
SIZES_ON = {1: SIZES, 2: SIZES[1:2], 4: SIZES[2:]}
# recompute, dropout: each way of recomputation once, and dropout where most of its masks are kept
WAYS = [("none", False), ("none", True), ("selective", True), ("full", False)]
LAYER = "blocks.1"  # its input is another block's output


def shapes(ranks):
    for sizes, (recompute, dropout) in itertools.product(SIZES_ON[ranks], WAYS):
        yield LayerShape(*sizes, recompute=recompute, dropout=dropout, ranks=ranks, regather=False)
        if ranks > 1:
            for regather in (False, True):
                yield LayerShape(*sizes, ranks, True, regather, recompute, dropout)


def counted(of: LayerShape) -> int:
    """The bytes of the layer's activations that are held when the forward ends."""
    sizes = {"context": of.time, "layers": 3, "heads": of.heads, "width": of.width}
    config = GPTConfig(16, **sizes, dropout=0.1 * of.dropout, attention="unfused")
    trainer = p101.TensorParallelTrainer(
        GPT(config, dtype=torch.bfloat16),
        next_token_loss,
        lambda p: torch.optim.SGD(p, lr=0.1),
        sequence_parallel=of.sequence_parallel,
        regather=of.regather and of.sequence_parallel,
        recompute=of.recompute,
        verify=False,
    )
    tokens = torch.randint(16, (of.batch, of.time + 1))
    with p101.count_activations(trainer) as activations:
        trainer.step(tokens[:, :-1], tokens[:, 1:])
    names = [phase.name for phase in activations.phases]
    held = set[int]()
    for change in activations.changes:
        if names[change.phase] == "forward":
            held.symmetric_difference_update([change.kept])
    kept = [activations.kept[i] for i in held]
    return sum(one.nbytes for one in kept if one.module.startswith(LAYER))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_counted_bytes_are_the_formula_and_the_listed_differences(ranks):
    for by_shape in p101.launch(
        lambda: [(of, counted(of)) for of in shapes(ranks)], world_size=ranks, backend="sim"
    ).results:
        assert len(by_shape) == len(SIZES_ON[ranks]) * len(WAYS) * (1 if ranks == 1 else 3)
        for of, nbytes in by_shape:
            formula, ours = layer_activations(of), kept_by_our_gpt(of)
            assert nbytes == sum(formula.values()) + sum(ours.values()), (of, formula, ours)


def test_the_terms_add_up_to_the_papers_table_2():
    h, a, s, b, t = 12288, 96, 2048, 1, 8  # GPT-3
    sbh, core = s * b * h, 5 * a * s / h
    for of, expected in {
        LayerShape(h, a, s, b): 34 + core,
        LayerShape(h, a, s, b, t): 10 + 24 / t + core / t,
        LayerShape(h, a, s, b, t, sequence_parallel=True): (34 + core) / t,
        LayerShape(h, a, s, b, t, recompute="selective"): 10 + 24 / t,
        LayerShape(h, a, s, b, t, sequence_parallel=True, recompute="selective"): 34 / t,
        LayerShape(h, a, s, b, t, recompute="full"): 2,
    }.items():
        assert sum(layer_activations(of).values()) == pytest.approx(expected * sbh, rel=1e-12), of
    assert core == 80  # section 5: for GPT-3, the attention's core has 80 of 114
    gathered = LayerShape(h, a, s, b, t, True, regather=False, recompute="selective")
    # what sequence parallel keeps here without regather=True, besides masks and statistics
    ours = kept_by_our_gpt(gathered)
    inputs = ours["input of query, key and value"] + ours["input of the MLP"]
    assert inputs + 34 / t * sbh == (4 + 30 / t) * sbh


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ranks": 3}, "heads=4 can't be cut over tp=3: expected a multiple"),
        ({"ranks": 4, "time": 6, "sequence_parallel": True}, "time=6 can't be cut over tp=4"),
        ({"recompute": "some"}, "recompute='some': expected 'none' or 'selective' or 'full'"),
        ({"batch": 0}, "batch=0: expected a whole number, 1 or more"),
    ],
    ids=["heads", "time", "recompute", "batch"],
)
def test_wrong_sizes(wrong, message):
    with pytest.raises(ValueError, match=message):
        layer_activations(LayerShape(32, 4, 8, 2)._replace(**wrong))
