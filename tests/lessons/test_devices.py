"""On NCCL, a rank's default device is its GPU, and batches from the notebook are on the CPU.

The meta device stands for a GPU here: an
operation on tensors of two devices is an error there too."""

from __future__ import annotations

import torch

import parallel101 as p101
from tests.lessons.lesson import definitions

ADJOINTS = definitions("03_adjoints")
DATA_PARALLEL = definitions("04_data_parallel", "LAYER", "VARIANTS")
SHARDING = definitions("05_sharding", "WIDTH", "SMALL")
X = torch.randn(12, 8, dtype=torch.float64)
BATCH = X, X.sum(dim=1, keepdim=True)


def test_what_lessons_write_by_hand_moves_its_batch_to_the_default_device():
    accumulate = DATA_PARALLEL["accumulate_by_hand"]

    def devices():
        with torch.device("meta"):
            weights = torch.zeros(8, dtype=torch.float64)
            made = {
                "03 block": ADJOINTS["block"](X, dim=0),
                "03 loss_of": ADJOINTS["loss_of"](weights, 0),
                "03 cut_by_columns": ADJOINTS["cut_by_columns"](X, X.T, p101.copy_to_group),
                "04 by_hand": DATA_PARALLEL["by_hand"](BATCH, DATA_PARALLEL["mean"]),
                "04 accumulate_by_hand": accumulate(BATCH, 3, every=True)[0],
                "05 zero_by_hand": SHARDING["zero_by_hand"](BATCH, SHARDING["adamw"]),
            }
        return {name: tensor.device.type for name, tensor in made.items()}

    (found,) = p101.launch(devices, world_size=1, backend="sim").results
    assert set(found.values()) == {"meta"}, found
