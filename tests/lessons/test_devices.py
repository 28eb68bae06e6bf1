"""On NCCL, a rank's default device is its GPU, and batches from the notebook are on the CPU.

The meta device stands for a GPU here: an
operation on tensors of two devices is an error there too."""

from __future__ import annotations

import torch

import parallel101 as p101
from tests.lessons.lesson import definitions

ADJOINTS = definitions("03_adjoints")
DATA_PARALLEL, SHARDING = (
    definitions("04_data_parallel", "LAYER", "VARIANTS"),
    definitions("05_sharding", "WIDTH", "SMALL"),
)
X = torch.randn(12, 8, dtype=torch.float64)
BATCH = X, X.sum(dim=1, keepdim=True)


def test_what_lessons_write_by_hand_moves_its_batch_to_the_default_device():
    def devices():
        with torch.device("meta"):
            return {
                "03 block": ADJOINTS["block"](X, dim=0).device.type,
                "03 loss_of": ADJOINTS["loss_of"](
                    torch.zeros(8, dtype=torch.float64), 0
                ).device.type,
                "03 cut_by_columns": ADJOINTS["cut_by_columns"](
                    X, X.T, p101.copy_to_group
                ).device.type,
                "04 by_hand": DATA_PARALLEL["by_hand"](BATCH, DATA_PARALLEL["mean"]).device.type,
                "04 accumulate_by_hand": DATA_PARALLEL["accumulate_by_hand"](BATCH, 3, every=True)[
                    0
                ].device.type,
                "05 zero_by_hand": SHARDING["zero_by_hand"](BATCH, SHARDING["adamw"]).device.type,
            }

    (found,) = p101.launch(devices, world_size=1, backend="sim").results
    assert set(found.values()) == {"meta"}, found
