"""In the style of Megatron-LM's parallel_state: the groups are globals of this module, and
functions give them out.
"""

from __future__ import annotations

import torch.distributed as dist

_TENSOR_MODEL_PARALLEL_GROUP: dist.ProcessGroup | None = None
_DATA_PARALLEL_GROUP: dist.ProcessGroup | None = None
_MPU_TENSOR_MODEL_PARALLEL_RANK: int | None = None


def initialize_model_parallel(tensor_model_parallel_size: int = 1) -> None:
    global _TENSOR_MODEL_PARALLEL_GROUP, _DATA_PARALLEL_GROUP
    assert dist.is_initialized()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert _DATA_PARALLEL_GROUP is None, "data parallel group is already initialized"
    for i in range(tensor_model_parallel_size):
        ranks = list(range(i, world_size, tensor_model_parallel_size))
        group = dist.new_group(ranks)
        if rank in ranks:
            _DATA_PARALLEL_GROUP = group
    assert _TENSOR_MODEL_PARALLEL_GROUP is None, (
        "tensor model parallel group is already initialized"
    )
    for i in range(world_size // tensor_model_parallel_size):
        ranks = list(range(i * tensor_model_parallel_size, (i + 1) * tensor_model_parallel_size))
        group = dist.new_group(ranks)
        if rank in ranks:
            _TENSOR_MODEL_PARALLEL_GROUP = group


def get_tensor_model_parallel_group() -> dist.ProcessGroup:
    assert _TENSOR_MODEL_PARALLEL_GROUP is not None, (
        "tensor model parallel group is not initialized"
    )
    return _TENSOR_MODEL_PARALLEL_GROUP


def get_data_parallel_group() -> dist.ProcessGroup:
    assert _DATA_PARALLEL_GROUP is not None, "data parallel group is not initialized"
    return _DATA_PARALLEL_GROUP


def set_tensor_model_parallel_rank(rank: int) -> None:
    global _MPU_TENSOR_MODEL_PARALLEL_RANK
    _MPU_TENSOR_MODEL_PARALLEL_RANK = rank


def get_tensor_model_parallel_rank() -> int:
    if _MPU_TENSOR_MODEL_PARALLEL_RANK is not None:
        return _MPU_TENSOR_MODEL_PARALLEL_RANK
    return dist.get_rank(group=get_tensor_model_parallel_group())
