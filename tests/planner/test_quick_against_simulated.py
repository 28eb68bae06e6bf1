"""The quick model and the trainer on virtual GPUs agree within 6 %, on layouts of every kind."""

import pytest

from parallel101.cost import Cluster, ModelShape, ParallelLayout, step_time
from parallel101.cost.software import OWN_RING
from parallel101.laboratory.planner.known_models import LLAMA as AS_LLAMA
from parallel101.laboratory.planner.simulated_step import simulate_step

GPT = ModelShape(4096, 4, 32, 51200, 2048, tied=False)
LLAMA = ModelShape(8192, 8, 64, 128256, 8192, 8, 28672, **AS_LLAMA)
SMALL = ModelShape(4096, 4, 32, 32000, 4096, 8, 14336, **AS_LLAMA)
MIXTURE = ModelShape(4096, 2, 32, 32000, 2048, experts=8, tied=False)
NARROW = ModelShape(1024, 2, 16, 32000, 1024, experts=8, tied=False)  # small messages and kernels
CASES = {
    "one GPU": (GPT, ParallelLayout(microbatch=2, microbatches=2)),
    "recomputed": (GPT, ParallelLayout(microbatch=2, microbatches=2, recompute="full")),
    "stages": (GPT, ParallelLayout(pp=4, microbatches=8)),
    "zb-h1": (GPT, ParallelLayout(pp=4, microbatches=8, schedule="zb-h1")),
    "zb-h2": (GPT, ParallelLayout(pp=4, microbatches=4, schedule="zb-h2")),
    "interleaved": (GPT, ParallelLayout(pp=2, chunks=2, microbatches=8)),
    "tp": (GPT, ParallelLayout(tp=8, microbatches=2)),
    "tp, sequence parallel": (LLAMA, ParallelLayout(tp=8, microbatches=2, sequence_parallel=True)),
    "ring": (SMALL, ParallelLayout(cp=4)),
    "ring, tp": (SMALL, ParallelLayout(cp=2, tp=4, sequence_parallel=True)),
    "ulysses": (SMALL, ParallelLayout(cp=8, context="ulysses")),
    "dp": (GPT, ParallelLayout(dp=16, microbatches=2)),
    "pp, dp": (GPT, ParallelLayout(pp=4, dp=8, microbatches=8)),
    "ZeRO 1": (SMALL, ParallelLayout(dp=16, microbatches=2, zero_stage=1)),
    "ZeRO 1, tp": (
        SMALL,
        ParallelLayout(dp=16, tp=8, microbatches=2, zero_stage=1, sequence_parallel=True),
    ),
    "ZeRO 1, pp": (SMALL, ParallelLayout(pp=4, dp=8, microbatches=8, zero_stage=1)),
    "ZeRO 2": (SMALL, ParallelLayout(dp=16, microbatches=2, zero_stage=2)),
    "ZeRO 3": (SMALL, ParallelLayout(dp=16, microbatches=2, zero_stage=3)),
    "ZeRO 3, tp": (
        SMALL,
        ParallelLayout(dp=64, tp=4, microbatches=2, zero_stage=3, sequence_parallel=True),
    ),
    "experts, tp": (MIXTURE, ParallelLayout(tp=2, microbatches=2)),
    "experts, narrow": (NARROW, ParallelLayout(ep=8, microbatch=2, microbatches=2)),
    "experts, ep, dp": (MIXTURE, ParallelLayout(dp=2, ep=2, microbatches=2)),
    "tp, pp, dp": (LLAMA, ParallelLayout(tp=8, pp=4, dp=4, microbatches=8, sequence_parallel=True)),
}


SLOW = ("tp", "ring, tp", "ZeRO 2", "ZeRO 3, tp", "tp, pp, dp", "recomputed")


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]
)
def test_they_agree(case):
    shape, layout = CASES[case]
    cluster = Cluster("H100", layout.gpus)
    simulated = simulate_step(shape, layout, cluster).seconds
    quick = step_time(shape, layout, cluster, software=OWN_RING)
    assert quick.seconds == pytest.approx(simulated, rel=0.06)
