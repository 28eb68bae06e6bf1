"""The programs of CS336's lecture 8 (spring 2025): collectives, data, tensor and pipeline parallel.

    PYTHONPATH=spring2025-lectures … cs336_lecture.py

The lecture starts its own processes. Here each rank that the starter made runs the same functions,
and the lecture's `setup`, which sets an address and a port, is replaced.
"""

import os
import sys
from types import ModuleType

import torch
import torch.distributed as dist

for name, words in {  # what the lecture needs only to be shown as slides
    "execute_util": "text image link system_text",
    "lecture_util": "article_link",
}.items():
    module = sys.modules[name] = ModuleType(name)
    vars(module).update({word: lambda *args, **kwargs: None for word in words.split()})

import lecture_08  # noqa: E402


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    lecture_08.setup = lambda rank, world_size: None
    lecture_08.cleanup = dist.barrier
    torch.manual_seed(0)
    data = torch.randn(32, 64)
    lecture_08.collective_operations_main(rank, size)
    lecture_08.data_parallelism_main(rank, size, data, 4, 3)
    lecture_08.tensor_parallelism_main(rank, size, data, 4)
    lecture_08.pipeline_parallelism_main(rank, size, data, 4, 4)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
