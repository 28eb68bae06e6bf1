"""The lecture's own data-parallel program runs as it is under launch, and the trainer gives the same numbers.

Stanford CS336, lecture on parallelism, part 2: `data_parallelism`. Retold here line by line in its own terms: each rank has a slice of
the batch, all the square weight matrices, its own AdamW, and averages every gradient over the ranks.
"""

from __future__ import annotations

import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import parallel101 as p101
from parallel101.trainers.data_parallel import DataParallelTrainer

BATCH, WIDTH, LAYERS = 16, 24, 4


def setup(rank: int, world_size: int):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "15623"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


def get_init_params(num_inputs: int, num_outputs: int, rank: int) -> nn.Parameter:
    torch.random.manual_seed(0)
    return nn.Parameter(torch.randn(num_inputs, num_outputs) / math.sqrt(num_outputs))


def data_parallelism_main(rank: int, world_size: int, data: torch.Tensor, num_layers: int, num_steps: int):
    setup(rank, world_size)

    # Each rank takes its slice of the batch
    batch_size, num_dim = data.size(0), data.size(1)
    local_batch_size = batch_size // world_size
    start_index = rank * local_batch_size
    end_index = start_index + local_batch_size
    data = data[start_index:end_index]

    params = [get_init_params(num_dim, num_dim, rank) for layer in range(num_layers)]
    optimizer = torch.optim.AdamW(params, lr=1e-3)

    losses = []
    for _step in range(num_steps):
        x = data
        for param in params:
            x = x @ param
            x = F.gelu(x)
        loss = x.square().mean()

        loss.backward()
        for param in params:
            dist.all_reduce(tensor=param.grad, op=dist.ReduceOp.AVG, async_op=False)
        optimizer.step()
        losses.append(loss.item())

    results = losses, [param.detach().clone() for param in params], [param.grad.clone() for param in params]
    cleanup()
    return results


class Lecture(nn.Module):
    """The same layers as a model."""

    def __init__(self):
        super().__init__()
        self.params = nn.ParameterList(get_init_params(WIDTH, WIDTH, 0) for _ in range(LAYERS))

    def forward(self, x):
        for param in self.params:
            x = F.gelu(x @ param)
        return x


def ours(data, num_steps, keep_gradients):
    class AsTheLecture(torch.optim.AdamW):
        """The lecture never clears its gradients: step after step they add up."""

        def step(self, closure=None):
            for param, before in zip(trainer.model.parameters(), kept):
                param.grad = before.add_(param.grad).clone()
            super().step(closure)

    kept = [torch.zeros(WIDTH, WIDTH) for _ in range(LAYERS)]
    optimizer = AsTheLecture if keep_gradients else torch.optim.AdamW
    trainer = DataParallelTrainer(Lecture(), lambda out, _: out.square().mean(), lambda p: optimizer(p, lr=1e-3))
    mine, _ = trainer.share((data, data))
    losses = [trainer.step(mine, mine) for _ in range(num_steps)]
    return losses, list(trainer.state_dict().values()), list(trainer.gradients().values())


def both(data):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mine = [ours(data, num_steps, keep_gradients=num_steps > 1) for num_steps in (1, 3)]
    return mine, [data_parallelism_main(rank, world_size, data, LAYERS, num_steps) for num_steps in (1, 3)]


def test_the_lectures_program_and_the_trainer_give_the_same_numbers():
    data = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(7))
    world_size = 4
    results = p101.launch(both, data, world_size=world_size).results
    for run, num_steps in enumerate((1, 3)):
        theirs = [lecture[run] for _, lecture in results]
        of_the_batch = [sum(losses[step] for losses, _, _ in theirs) / world_size for step in range(num_steps)]
        for (ours_of_rank, _), (_, their_weights, their_gradients) in zip(results, theirs):
            losses, weights, gradients = ours_of_rank[run]
            torch.testing.assert_close(losses, of_the_batch, rtol=1e-6, atol=0)
            for a, b in zip([*weights, *gradients], [*their_weights, *their_gradients]):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)
