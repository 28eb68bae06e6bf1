"""The quick model and the trainer on virtual GPUs agree."""

import pytest

from parallel101.cost import Cluster, ModelShape, ParallelLayout, step_time
from parallel101.planner.simulated_step import simulate_step

GPT = ModelShape(4096, 4, 32, 51200, 2048, tied=False)
LLAMA = ModelShape(
    8192, 8, 64, 128256, 8192, kv_heads=8, feed_forward=28672, gated=True, norm="rms",
    biases=False, positions="rotary", tied=False,
)  # fmt: skip
CASES = {
    "one GPU": (GPT, ParallelLayout(microbatch=2, microbatches=2)),
    "recomputed": (GPT, ParallelLayout(microbatch=2, microbatches=2, recompute="full")),
    "stages": (GPT, ParallelLayout(pp=4, microbatches=8)),
    "tp, sequence parallel": (LLAMA, ParallelLayout(tp=8, microbatches=2, sequence_parallel=True)),
    "tp, pp, dp": (LLAMA, ParallelLayout(tp=8, pp=4, dp=4, microbatches=8, sequence_parallel=True)),
}


@pytest.mark.parametrize("case", CASES)
def test_they_agree(case):
    shape, layout = CASES[case]
    cluster = Cluster("H100", layout.gpus)
    simulated = simulate_step(shape, layout, cluster).seconds
    assert step_time(shape, layout, cluster).seconds == pytest.approx(simulated, rel=0.06)
