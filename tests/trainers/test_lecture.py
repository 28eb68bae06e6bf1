"""The lecture's own programs run as they are under launch, and the trainers give the same numbers.

Stanford CS336, lecture on parallelism, part 2, retold here line by line in its own terms:

data_parallelism       each rank has a slice of the batch, all the square weight matrices and its
                       own AdamW, and averages every gradient
tensor_parallelism     each rank has some columns of each matrix; the activations are gathered and
                       concatenated
pipeline_parallelism   each rank has some of the layers; it receives microbatches, computes them
                       and sends them on

The lecture shows the last two forward only and leaves backward as homework, so their gradients are
compared with one process.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import parallel101 as p101

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


def data_parallelism_main(
    rank: int, world_size: int, data: torch.Tensor, num_layers: int, num_steps: int
):
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

    cleanup()
    return losses, [param.detach() for param in params], [param.grad for param in params]


class Lecture(nn.Module):
    """The same layers as a model."""

    def __init__(self):
        super().__init__()
        self.params = nn.ParameterList(get_init_params(WIDTH, WIDTH, 0) for _ in range(LAYERS))

    def forward(self, x):
        for param in self.params:
            x = F.gelu(x @ param)
        return x


def both(data):
    """One step: the lecture never clears its gradients, and step after step they add up."""
    trainer = p101.DataParallelTrainer(
        Lecture(), lambda out, _: out.square().mean(), lambda p: torch.optim.AdamW(p, lr=1e-3)
    )
    loss = trainer.step(*trainer.share((data, data)))
    weights, gradients = trainer.state_dict().values(), trainer.gradients().values()
    theirs = data_parallelism_main(dist.get_rank(), dist.get_world_size(), data, LAYERS, 1)
    return loss, [*weights, *gradients], theirs


def test_the_lectures_program_and_the_trainer_give_the_same_numbers():
    results = p101.launch(both, data_of_the_lecture(), world_size=2).results
    of_the_batch = sum(losses[0] for _, _, (losses, _, _) in results) / 2
    for loss, found, (_, weights, gradients) in results:
        assert loss == pytest.approx(of_the_batch, rel=1e-6)
        for a, b in zip(found, [*weights, *gradients]):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


# ── tensor parallel and pipeline ──


def tensor_parallelism_main(rank: int, world_size: int, data: torch.Tensor, num_layers: int):
    setup(rank, world_size)

    batch_size, num_dim = data.size(0), data.size(1)
    local_num_dim = num_dim // world_size  # Shard `num_dim`

    # Create model (each rank gets 1/world_size of the parameters)
    params = [get_init_params(num_dim, local_num_dim, rank) for i in range(num_layers)]

    # Forward pass
    x = data
    for i in range(num_layers):
        # Compute activations (batch_size x local_num_dim)
        x = x @ params[i]  # Note: this is only on a slice of the parameters
        x = F.gelu(x)

        # Allocate memory for activations (world_size x batch_size x local_num_dim)
        activations = [torch.empty(batch_size, local_num_dim) for _ in range(world_size)]

        # Send activations via all gather
        dist.all_gather(tensor_list=activations, tensor=x, async_op=False)

        # Concatenate them to get batch_size x num_dim
        x = torch.cat(activations, dim=1)

    cleanup()
    return x.detach(), [param.detach() for param in params]


def pipeline_parallelism_main(
    rank: int, world_size: int, data: torch.Tensor, num_layers: int, num_micro_batches: int
):
    setup(rank, world_size)

    batch_size, num_dim = data.size(0), data.size(1)

    # Split up layers
    local_num_layers = num_layers // world_size

    # Each rank gets a subset of layers
    local_params = [get_init_params(num_dim, num_dim, rank) for i in range(local_num_layers)]

    # Break up into micro batches to minimize the bubble
    micro_batch_size = batch_size // num_micro_batches
    if rank == 0:
        # The data
        micro_batches = data.chunk(chunks=num_micro_batches, dim=0)
    else:
        # Allocate memory for activations
        micro_batches = [torch.empty(micro_batch_size, num_dim) for _ in range(num_micro_batches)]

    outputs = []
    for x in micro_batches:
        # Get activations from previous rank
        if rank - 1 >= 0:
            dist.recv(tensor=x, src=rank - 1)

        # Compute layers assigned to this rank
        for param in local_params:
            x = x @ param
            x = F.gelu(x)

        # Send to the next rank
        if rank + 1 < world_size:
            dist.send(tensor=x, dst=rank + 1)
        outputs.append(x.detach())

    cleanup()
    return torch.cat(outputs), [param.detach() for param in local_params]


def model_of(weights: list[torch.Tensor]) -> nn.Sequential:
    """The lecture's x @ param is a Linear layer without bias, whose weight is transposed."""
    linears = [nn.Linear(*w.shape, bias=False) for w in weights]
    for linear, w in zip(linears, weights):
        linear.weight.data.copy_(w.T)
    return nn.Sequential(*(layer for linear in linears for layer in (linear, nn.GELU())))


def square_mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean()


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def data_of_the_lecture() -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(7))


def trained_one_step(build, weights: list[torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """By a trainer that `build` makes of a model: the loss, and the gradients of the whole
    model.
    """
    data, trainer = data_of_the_lecture(), build(model_of(weights))
    return trainer.step(data, data), trainer.gradients()


def same_numbers(
    outputs: torch.Tensor,
    weights: list[torch.Tensor],
    steps: list[tuple[float, dict[str, torch.Tensor]]],
) -> None:
    """The lecture's outputs, one process with the same weights, and the trainer on every rank."""
    model = model_of(weights)
    expected = model(data_of_the_lecture())
    torch.testing.assert_close(outputs, expected.detach(), rtol=1e-5, atol=1e-6)
    square_mean(expected, expected).backward()
    for loss, gradients in steps:
        assert loss == pytest.approx(outputs.square().mean().item(), rel=1e-6)
        for name, parameter in model.named_parameters():
            atol = 1e-6 * parameter.grad.abs().max().item()
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=atol)


def test_the_tensor_parallel_program_and_the_trainer_give_the_same_numbers():
    data, ranks = data_of_the_lecture(), 2

    def lecture():
        return tensor_parallelism_main(dist.get_rank(), ranks, data, LAYERS)

    results = p101.launch(lecture, world_size=ranks).results
    weights = [torch.cat([params[i] for _, params in results], dim=1) for i in range(LAYERS)]

    def build(model):
        plan = {str(2 * layer): "column_gather" for layer in range(LAYERS)}
        return p101.TensorParallelTrainer(model, square_mean, adamw, plan=plan)

    where = {"world_size": ranks, "backend": "sim"}
    steps = p101.launch(trained_one_step, build, weights, **where).results
    for outputs, _ in results:
        same_numbers(outputs, weights, steps)


def test_the_pipeline_program_and_the_trainer_give_the_same_numbers():
    data, ranks, microbatches = data_of_the_lecture(), 2, 4

    def lecture():
        return pipeline_parallelism_main(dist.get_rank(), ranks, data, LAYERS, microbatches)

    results = p101.launch(lecture, world_size=ranks).results
    weights = [w for _, params in results for w in params]

    def build(model):
        return p101.PipelineTrainer(model, square_mean, adamw, microbatches=microbatches)

    where = {"world_size": ranks, "backend": "sim"}
    steps = p101.launch(trained_one_step, build, weights, **where).results
    same_numbers(results[-1][0], weights, steps)
