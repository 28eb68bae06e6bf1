"""The reference solutions of homework 4."""

import torch
import torch.distributed as dist


def train_naive(model, loss_fn, optimizer, batches):
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    for inputs, targets in batches:
        total = torch.tensor(len(inputs), device=inputs.device)
        dist.all_reduce(total)
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets) * len(inputs) / total  # this rank's part of the mean over all samples
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
