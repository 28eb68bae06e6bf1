"""Bytes of model states are the figures of ZeRO's Table 1.

Those of a trainer are counted in trainers/test_sharded_memory.py.
"""

from __future__ import annotations

import pytest

from parallel101.cost import PRECISIONS, model_states

# ranks → GB with 7.5, 128 and 1000 · 10⁹ parameters, each with ZeRO-1, 2 and 3 (arXiv 1910.02054,
# Table 1)
TABLE = {
    1: [(120, 120, 120), (2048, 2048, 2048), (16000, 16000, 16000)],
    4: [(52.5, 41.3, 30), (896, 704, 512), (7000, 5500, 4000)],
    16: [(35.6, 21.6, 7.5), (608, 368, 128), (4750, 2875, 1000)],
    64: [(31.4, 16.6, 1.88), (536, 284, 32), (4187, 2218, 250)],
    256: [(30.4, 15.4, 0.47), (518, 263, 8), (4046, 2054, 62.5)],
    1024: [(30.1, 15.1, 0.12), (513, 257, 2), (4011, 2013, 15.6)],
}


@pytest.mark.parametrize("ranks", TABLE)
def test_zeros_table(ranks):
    for billions, row in zip((7.5, 128, 1000), TABLE[ranks]):
        for stage, printed in enumerate(row, 1):
            total = model_states(round(billions * 1e9), ranks, zero_stage=stage).total
            # the paper rounds, or cuts
            assert total / 1e9 == pytest.approx(printed, rel=4e-3, abs=5e-3), (billions, stage)


def test_every_precision_on_one_rank_and_on_four():
    for name, of in PRECISIONS.items():
        assert model_states(1000, precision=name).total == 1000 * of.total
        assert model_states(1000, 4, zero_stage=3, precision=name).total == 250 * of.total


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"precision": "fp8"}, "precision='fp8': expected one of 'mixed'"),
        ({"zero_stage": 4}, "zero_stage=4: expected 0, 1, 2 or 3"),
        ({"ranks": 0}, "ranks=0: expected whole numbers, 1 or more"),
        ({"parameters": 7.5e9}, r"parameters=7500000000\.0, ranks=1: expected whole numbers"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_wrong_arguments(wrong, message):
    with pytest.raises(ValueError, match=message):
        model_states(**{"parameters": 10} | wrong)
