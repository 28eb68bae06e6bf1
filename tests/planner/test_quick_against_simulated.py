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
MEGATRON = {"tp": 8, "sequence_parallel": True}
CASES = {
    "one GPU": (GPT, {"microbatch": 2, "microbatches": 2}),
    "recomputed": (GPT, {"microbatch": 2, "microbatches": 2, "recompute": "full"}),
    "stages": (GPT, {"pp": 4, "microbatches": 8}),
    "zb-h1": (GPT, {"pp": 4, "microbatches": 8, "schedule": "zb-h1"}),
    "zb-h2": (GPT, {"pp": 4, "microbatches": 4, "schedule": "zb-h2"}),
    "zb-h1, recomputed": (
        SMALL,
        {"pp": 4, "microbatches": 8, "schedule": "zb-h1", "recompute": "full"},
    ),
    "interleaved": (GPT, {"pp": 2, "chunks": 2, "microbatches": 8}),
    "tp": (GPT, {"tp": 8, "microbatches": 2}),
    "tp, sequence parallel": (LLAMA, MEGATRON | {"microbatches": 2}),
    "ring": (SMALL, {"cp": 4}),
    "ring, tp": (SMALL, {"cp": 2, "tp": 4, "sequence_parallel": True}),
    "ulysses": (SMALL, {"cp": 8, "context": "ulysses"}),
    "dp": (GPT, {"dp": 16, "microbatches": 2}),
    "pp, dp": (GPT, {"pp": 4, "dp": 8, "microbatches": 8}),
    "ZeRO 1": (SMALL, {"dp": 16, "microbatches": 2, "zero_stage": 1}),
    "ZeRO 1, tp": (SMALL, MEGATRON | {"dp": 16, "microbatches": 2, "zero_stage": 1}),
    "ZeRO 1, pp": (SMALL, {"pp": 4, "dp": 8, "microbatches": 8, "zero_stage": 1}),
    "ZeRO 2": (SMALL, {"dp": 16, "microbatches": 2, "zero_stage": 2}),
    "ZeRO 3": (SMALL, {"dp": 16, "microbatches": 2, "zero_stage": 3}),
    "ZeRO 3, tp": (SMALL, MEGATRON | {"dp": 64, "tp": 4, "microbatches": 2, "zero_stage": 3}),
    "experts, tp": (MIXTURE, {"tp": 2, "microbatches": 2}),
    "experts, narrow": (NARROW, {"ep": 8, "microbatch": 2, "microbatches": 2}),
    "experts, ep, dp": (MIXTURE, {"dp": 2, "ep": 2, "microbatches": 2}),
    "tp, pp, dp": (LLAMA, MEGATRON | {"pp": 4, "dp": 4, "microbatches": 8}),
}
SLOW = ("tp", "ring, tp", "ZeRO 2", "ZeRO 3, tp", "tp, pp, dp", "recomputed")


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES]
)
def test_they_agree(case):
    shape, options = CASES[case]
    layout = ParallelLayout(**options)
    cluster = Cluster("H100", layout.gpus)
    simulated = simulate_step(shape, layout, cluster).seconds
    quick = step_time(shape, layout, cluster, software=OWN_RING)
    assert quick.seconds == pytest.approx(simulated, rel=0.06)
