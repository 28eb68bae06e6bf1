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
        ops = [
            dist.P2POp(dist.isend, outgoing, (rank + 1) % n),
            dist.P2POp(dist.irecv, received, (rank - 1) % n),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        if step < n - 1:
            incoming += received
        else:
            incoming.copy_(received)


def train_naive__own_ring(model, loss_fn, optimizer, batches):
    """Its own rings over one flat tensor; the weights start round a ring too: all but rank 0's
    are zero.
    """
    parameters = list(model.parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters]) * (dist.get_rank() == 0)
    dist.broadcast(flat, src=0)
    torch.nn.utils.vector_to_parameters(flat, parameters)
    for inputs, targets in batches:
        count = torch.tensor([len(inputs)], dtype=torch.float64)
        counts = [torch.empty_like(count) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, count)
        gradients = torch.autograd.grad(loss_fn(model(inputs), targets), parameters)
        flat = torch.cat([gradient.flatten() for gradient in gradients]) * (
            len(inputs) / torch.cat(counts).sum()
        )
        ring_all_reduce(flat)
        for p, piece in zip(parameters, flat.split([p.numel() for p in parameters])):
            p.grad = piece.view_as(p)
        optimizer.step()


def average_in_buckets__halves(gradients, cap):
    """Rank 0's order, which it broadcasts; a reduce-scatter and an all-gather for each padded
    bucket; asynchronous.
    """
    n, names = dist.get_world_size(), sorted(gradients)
    order = torch.tensor([names.index(name) for name in gradients])
    dist.broadcast(order, src=0)
    buckets, current = [], []
    for name in (names[i] for i in order):
        if current and sum(gradients[other].nbytes for other in [*current, name]) > cap:
            buckets.append(current)
            current = []
        current.append(name)
    buckets.append(current)
    found, works = {}, []
    for bucket in buckets:
        whole = torch.cat([gradients[name].flatten() for name in bucket])
        whole = F.pad(whole, (0, -len(whole) % n)) / n
        piece = whole.new_empty(len(whole) // n)
        dist.reduce_scatter_single(piece, whole)
        works.append((bucket, whole, piece, dist.all_gather_single(whole, piece, async_op=True)))
    for bucket, whole, _, work in reversed(works):
        work.wait()
        for name in reversed(bucket):
            before = sum(gradients[other].numel() for other in bucket[: bucket.index(name)])
            found[name] = whole[before:][: gradients[name].numel()].reshape(gradients[name].shape)
    return found


def average_in_buckets__own_ring(gradients, cap):
    """Largest first, into the first bucket with room; its own ring; in place."""
    buckets = []
    for name in sorted(gradients, key=lambda name: (-gradients[name].numel(), name)):
        size = gradients[name].nbytes
        bucket = next(
            (b for b in buckets if sum(gradients[other].nbytes for other in b) + size <= cap), None
        )
        if bucket is None:
            buckets.append([name])
        else:
            bucket.append(name)
    for bucket in buckets:
        whole = torch.cat([gradients[name].flatten() for name in bucket]) / dist.get_world_size()
        ring_all_reduce(whole)
        torch.nn.utils.vector_to_parameters(whole, [gradients[name].data for name in bucket])
        for name, piece in zip(bucket, whole.split([gradients[name].numel() for name in bucket])):
            gradients[name].copy_(piece.view_as(gradients[name]))
    return gradients


def train_overlapped__messages(model, loss_fn, optimizer, batches):
    """Each rank sends its gradient to all others itself, in pieces: a reduce-scatter in the
    hook, an all-gather later.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    others = [peer for peer in range(n) if peer != rank]
    state = {"last": False, "first": [], "second": []}

    def sum_up():
        """The pieces of the layer before have come meanwhile: add them, and send the sum on."""
        chunks, got, works = state["first"].pop(0)
        for work in works:
            work.wait()
        for piece in got:
            chunks[rank] += piece
        works = [dist.irecv(chunks[peer], peer) for peer in others] + [
            dist.isend(chunks[rank], peer) for peer in others
        ]
        state["second"] += works

    def ready(p):
        if not state["last"]:
            return
        chunks = list(p.grad.view(-1).tensor_split(n))
        got = [torch.empty_like(chunks[rank]) for _ in others]
        works = [dist.isend(chunks[peer], peer) for peer in others] + [
            dist.irecv(piece, peer) for piece, peer in zip(got, others)
        ]
        state["first"].append((chunks, got, works))
        if len(state["first"]) > 2:
            sum_up()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(ready)
    for microbatches in batches:
        optimizer.zero_grad()
        for k, (inputs, targets) in enumerate(microbatches):
            state["last"] = k == len(microbatches) - 1
            (loss_fn(model(inputs), targets) / n / len(microbatches)).backward()
        while state["first"]:
            sum_up()
        for work in state["second"]:
            work.wait()
        state["second"].clear()
        optimizer.step()
