"""Odd but correct solutions of homework 5: they keep full points."""

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call


def train_zero1__whole_parameters(model, loss_fn, make_optimizer, batches, max_norm):
    """Each parameter belongs to one rank: a reduce to it, and a broadcast from it."""
    rank, n = dist.get_rank(), dist.get_world_size()
    held, owner = [0] * n, {}
    for p in sorted(model.parameters(), key=lambda p: -p.numel()):
        owner[p] = held.index(min(held))
        held[owner[p]] += p.numel()
    mine = [p for p in model.parameters() if owner[p] == rank]
    optimizer = make_optimizer(mine)
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_fn(model(inputs), targets).backward()
        for p in model.parameters():
            dist.reduce(p.grad, dst=owner[p])
            p.grad = p.grad / n if owner[p] == rank else None
        norms = [torch.zeros(1, dtype=torch.float64) for _ in range(n)]
        dist.all_gather(norms, sum(p.grad.norm() ** 2 for p in mine).view(1))
        for p in mine:
            p.grad.mul_(min(1.0, max_norm / float(torch.cat(norms).sum()) ** 0.5))
        optimizer.step()
        for p in model.parameters():
            dist.broadcast(p.data, src=owner[p])


def train_zero2__async(model, loss_fn, make_optimizer, batches, max_norm):
    """Reduce-scatters in the background; a whole gradient is freed when the next layer's is
    ready.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    sizes = {p: (p.numel() + n - 1) // n for p in model.parameters()}
    pieces = {}
    for p in sizes:
        flat = torch.zeros(sizes[p] * n, dtype=p.dtype)
        flat[: p.numel()] = p.detach().view(-1)
        pieces[p] = nn.Parameter(flat[rank * sizes[p] :][: sizes[p]].clone())
    optimizers = [make_optimizer([piece]) for piece in pieces.values()]  # one for each parameter
    pending = []

    def finish(keep):
        while len(pending) > keep:
            _, work = pending.pop(0)
            work.wait()

    def ready(p):
        flat = torch.zeros(sizes[p] * n, dtype=p.dtype)
        flat[: p.numel()] = p.grad.view(-1) / n
        pieces[p].grad = torch.empty_like(pieces[p])
        pending.append((p.grad, dist.reduce_scatter_single(pieces[p].grad, flat, async_op=True)))
        p.grad = None
        finish(1)

    for p in sizes:
        p.register_post_accumulate_grad_hook(ready)
    for inputs, targets in batches:
        loss_fn(model(inputs), targets).backward()
        finish(0)
        squares = torch.stack([piece.grad.square().sum() for piece in pieces.values()])
        dist.all_reduce(squares)
        for piece in pieces.values():
            piece.grad.mul_(torch.clamp(max_norm / squares.sum().sqrt(), max=1.0))
        for optimizer in optimizers:
            optimizer.step()
        for p, piece in pieces.items():
            whole = torch.empty(sizes[p] * n, dtype=p.dtype)
            dist.all_gather_single(whole, piece.detach())
            p.data.copy_(whole[: p.numel()].view_as(p))


def train_mixed__torch_adds_in_float32(model, loss_fn, make_optimizer, batches):
    """One flat vector; .grad has float32 (grad_dtype), and the mean is taken before the sum."""
    rank, n = dist.get_rank(), dist.get_world_size()
    parameters = list(model.parameters())
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    size = -(-len(flat) // n)
    flat = torch.cat([flat, flat.new_zeros(size * n - len(flat))])
    mine = nn.Parameter(flat[rank * size :][:size].clone())
    optimizer = make_optimizer([mine])
    model.to(torch.bfloat16)
    for p in parameters:
        p.grad_dtype = torch.float32
    for microbatches in batches:
        model.zero_grad()
        for inputs, targets in microbatches:
            loss_fn(model(inputs), targets).backward()
        total = torch.cat([p.grad.reshape(-1) for p in parameters])
        total = torch.cat([total, total.new_zeros(size * n - len(total))])
        mine.grad = torch.empty_like(mine)
        dist.reduce_scatter_single(mine.grad, total / (n * len(microbatches)))
        optimizer.step()
        whole = torch.empty(size * n, dtype=torch.bfloat16)
        dist.all_gather_single(whole, mine.detach().to(torch.bfloat16))
        start = 0
        for p in parameters:
            p.data.copy_(whole[start : start + p.numel()].view_as(p))
            start += p.numel()


def whole(piece, shape):
    parts = [torch.empty_like(piece) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, piece.detach())
    return torch.cat(parts)[: shape.numel()].view(shape)


def scatter(gradient, piece):
    n = dist.get_world_size()
    flat = torch.zeros(piece.numel() * n, dtype=gradient.dtype)
    flat[: gradient.numel()] = gradient.reshape(-1)
    piece.grad = torch.empty_like(piece)
    dist.reduce_scatter(piece.grad, list((flat / n).chunk(n)))


def train_zero3__by_hand(layers, shards, loss_fn, make_optimizer, batches):
    """No hooks and no checkpoint: forward without a graph, then layer by layer a forward again
    and its backward.
    """
    own = [
        {name: nn.Parameter(piece.clone()) for name, piece in of_layer.items()}
        for of_layer in shards
    ]
    optimizer = make_optimizer([piece for of_layer in own for piece in of_layer.values()])
    for inputs, targets in batches:
        xs = [inputs]
        with torch.no_grad():
            for layer, pieces in zip(layers[:-1], own):
                weights = {
                    name: whole(pieces[name], p.shape) for name, p in layer.named_parameters()
                }
                xs.append(functional_call(layer, weights, (xs[-1],)))
                del weights
        gradient = None
        for layer, pieces, x in reversed(list(zip(layers, own, xs))):
            x = x.detach().requires_grad_()
            weights = {
                name: whole(pieces[name], p.shape).requires_grad_()
                for name, p in layer.named_parameters()
            }
            y = functional_call(layer, weights, (x,))
            if gradient is None:
                loss_fn(y, targets).backward()
            else:
                y.backward(gradient)
            for name in weights:
                scatter(weights[name].grad, pieces[name])
            gradient = x.grad
            del weights, y
        optimizer.step()
    return [{name: piece.data for name, piece in pieces.items()} for pieces in own]


class GradientHook(torch.autograd.Function):
    """The output's gradient arrives at a node that has no other input than x."""

    @staticmethod
    def forward(ctx, x, anchor, block):
        ctx.block, ctx.x, ctx.generator = block, x.detach(), torch.get_rng_state()
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, gradient):
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.generator)
            x = ctx.x.requires_grad_()
            ctx.block(x).backward(gradient)
        return x.grad, None, None


def recompute__backward_adds(block, x):
    return GradientHook.apply(x, torch.zeros(1, requires_grad=True), block)
