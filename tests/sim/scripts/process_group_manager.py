"""In the style of picotron's process_group_manager: one object, in a global of this module,
holds a rank's place in the grid.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


class ProcessGroupManager:
    def __init__(self, tp_size: int, pp_size: int, dp_size: int):
        self.global_rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.global_rank % self.world_size))
        assert self.world_size == tp_size * pp_size * dp_size
        self.grid = torch.arange(self.world_size).view(dp_size, pp_size, tp_size)
        self.dp_rank, self.pp_rank, self.tp_rank = (
            (self.grid == self.global_rank).nonzero().flatten().tolist()
        )
        grids = {"tp": self.grid, "pp": self.grid.transpose(1, 2), "dp": self.grid.permute(1, 2, 0)}
        self.groups = {}
        for name, grid in grids.items():
            self.groups[name], _ = dist.new_subgroups_by_enumeration(
                grid.reshape(-1, grid.shape[-1]).tolist()
            )
        self.pp_group_ids = self.grid[self.dp_rank, :, self.tp_rank].tolist()
        self.pp_next_rank = (
            None
            if self.pp_rank == pp_size - 1
            else int(self.grid[self.dp_rank, self.pp_rank + 1, self.tp_rank])
        )
        self.pp_prev_rank = (
            None
            if self.pp_rank == 0
            else int(self.grid[self.dp_rank, self.pp_rank - 1, self.tp_rank])
        )


process_group_manager: ProcessGroupManager = None  # type: ignore[assignment]


def setup_process_group_manager(tp_size: int, pp_size: int, dp_size: int) -> None:
    global process_group_manager
    process_group_manager = ProcessGroupManager(tp_size, pp_size, dp_size)
