"""The reference solutions of homework 5."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint


def padded(x):
    """Flat, with zeros up to a multiple of n."""
    return F.pad(x.flatten(), (0, -x.numel() % dist.get_world_size()))


def own_piece(x):
    return padded(x).chunk(dist.get_world_size())[dist.get_rank()].clone()


def mean_piece(gradient):
    """This rank's piece of the mean over all ranks: a reduce-scatter."""
    whole = padded(gradient)
    piece = whole.new_empty(len(whole) // dist.get_world_size())
    dist.reduce_scatter_single(piece, whole)
    return piece / dist.get_world_size()


def gather(piece, shape):
    """The whole tensor, from all ranks' pieces."""
    whole = piece.new_empty(len(piece) * dist.get_world_size())
    dist.all_gather_single(whole, piece)
    return whole[: shape.numel()].view(shape)


def clip(pieces, max_norm):
    """The whole gradient's norm: all ranks' squares are added."""
    square = sum(piece.grad.square().sum() for piece in pieces)
    dist.all_reduce(square)
    for piece in pieces:
        piece.grad *= min(1.0, max_norm / square.sqrt().item())


def train_zero1(model, loss_fn, make_optimizer, batches, max_norm):
    parameters = list(model.parameters())
    pieces = [nn.Parameter(own_piece(p.detach())) for p in parameters]
    optimizer = make_optimizer(pieces)
    for inputs, targets in batches:
        model.zero_grad()
        loss_fn(model(inputs), targets).backward()
        for p, piece in zip(parameters, pieces):
            piece.grad = mean_piece(p.grad)
        clip(pieces, max_norm)
        optimizer.step()
        for p, piece in zip(parameters, pieces):
            p.data.copy_(gather(piece.detach(), p.shape))


def train_zero2(model, loss_fn, make_optimizer, batches, max_norm):
    pieces = {p: nn.Parameter(own_piece(p.detach())) for p in model.parameters()}
    optimizer = make_optimizer(list(pieces.values()))

    def ready(p):
        pieces[p].grad = mean_piece(p.grad)
        p.grad = None

    for p in pieces:
        p.register_post_accumulate_grad_hook(ready)
    for inputs, targets in batches:
        loss_fn(model(inputs), targets).backward()
        clip(pieces.values(), max_norm)
        optimizer.step()
        for p, piece in pieces.items():
            p.data.copy_(gather(piece.detach(), p.shape))


def train_mixed(model, loss_fn, make_optimizer, batches):
    masters = [nn.Parameter(own_piece(p.detach())) for p in model.parameters()]
    model.bfloat16()
    optimizer = make_optimizer(masters)
    for microbatches in batches:
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()]
        for inputs, targets in microbatches:
            (loss_fn(model(inputs), targets) / len(microbatches)).backward()
            for total, p in zip(sums, model.parameters()):
                total += p.grad
                p.grad = None
        for master, total in zip(masters, sums):
            master.grad = mean_piece(total)
        optimizer.step()
        for master, p in zip(masters, model.parameters()):
            p.data.copy_(gather(master.detach().bfloat16(), p.shape))


class Gather(torch.autograd.Function):
    """An all-gather forward; backward, the reduce-scatter of the gradient."""

    @staticmethod
    def forward(ctx, piece, shape):
        return gather(piece, shape)

    @staticmethod
    def backward(ctx, gradient):
        return mean_piece(gradient), None


def train_zero3(layers, shards, loss_fn, make_optimizer, batches):
    pieces = [{name: nn.Parameter(piece) for name, piece in own.items()} for own in shards]
    optimizer = make_optimizer([piece for own in pieces for piece in own.values()])

    def run(layer, own, x):
        return functional_call(
            layer,
            {name: Gather.apply(own[name], p.shape) for name, p in layer.named_parameters()},
            (x,),
        )

    for inputs, targets in batches:
        optimizer.zero_grad()
        x = inputs
        for layer, own in zip(layers, pieces):
            x = checkpoint(run, layer, own, x, use_reentrant=False)  # keeps x, and not the weights
        loss_fn(x, targets).backward()
        optimizer.step()
    return [{name: piece.detach() for name, piece in own.items()} for own in pieces]


class Recomputed(torch.autograd.Function):
    """block(x), of which only x is kept. The weights are arguments so that autograd asks for the
    backward; it adds their gradients itself.
    """

    @staticmethod
    def forward(ctx, block, x, *weights):
        ctx.block, ctx.state = block, torch.get_rng_state()
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            y = ctx.block(x)
        torch.set_rng_state(now)
        torch.autograd.backward(y, gradient)
        return None, x.grad, *(None for _ in ctx.block.parameters())


def recompute(block, x):
    return Recomputed.apply(block, x, *block.parameters())
