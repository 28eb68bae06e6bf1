"""Odd but correct solutions of homework 4: they keep full points."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


def ring_all_reduce(x):
    """The learner's own, from homework 2: n chunks of a flat tensor, round the ring twice."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = list(x.view(-1).tensor_split(n))
    for step in range(2 * (n - 1)):
        outgoing, incoming = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        received = torch.empty_like(incoming)
        ops = [dist.P2POp(dist.isend, outgoing, (rank + 1) % n), dist.P2POp(dist.irecv, received, (rank - 1) % n)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        if step < n - 1:
            incoming += received
        else:
            incoming.copy_(received)


def train_naive__own_ring(model, loss_fn, optimizer, batches):
    """Its own rings over one flat tensor; the weights start round a ring too: all but rank 0's are zero."""
    parameters = list(model.parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters]) * (dist.get_rank() == 0)
    dist.broadcast(flat, src=0)
    torch.nn.utils.vector_to_parameters(flat, parameters)
    for inputs, targets in batches:
        count = torch.tensor([len(inputs)], dtype=torch.float64)
        counts = [torch.empty_like(count) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, count)
        gradients = torch.autograd.grad(loss_fn(model(inputs), targets), parameters)
        flat = torch.cat([gradient.flatten() for gradient in gradients]) * (len(inputs) / torch.cat(counts).sum())
        ring_all_reduce(flat)
        for p, piece in zip(parameters, flat.split([p.numel() for p in parameters])):
            p.grad = piece.view_as(p)
        optimizer.step()


def train_naive__scatter_gather(model, loss_fn, optimizer, batches):
    """Reduce-scatter and all-gather of each padded gradient; the loss summed; all counts exchanged beforehand; gradients cleared late."""
    n = dist.get_world_size()
    for p in reversed(list(model.parameters())):
        with torch.no_grad():
            dist.broadcast(p, 0)
    sizes = torch.tensor([len(inputs) for inputs, _ in batches])
    dist.all_reduce(sizes)
    for (inputs, targets), total in zip(batches, sizes.tolist()):
        (loss_fn(model(inputs), targets) * len(inputs)).backward()
        for p in model.parameters():
            padded = F.pad(p.grad.flatten(), (0, -p.numel() % n))
            piece = padded.new_empty(len(padded) // n)
            dist.reduce_scatter_tensor(piece, padded)
            dist.all_gather_into_tensor(padded, piece / total)
            p.grad.copy_(padded[: p.numel()].view_as(p))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
