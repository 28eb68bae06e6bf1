"""Wrong solutions of homework 5. A comment above each says what must be named."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call


def padded(x):
    return F.pad(x.flatten(), (0, -x.numel() % dist.get_world_size()))


def own_piece(x):
    return padded(x).chunk(dist.get_world_size())[dist.get_rank()].clone()


def summed_piece(gradient):
    flat = padded(gradient)
    piece = flat.new_empty(len(flat) // dist.get_world_size())
    dist.reduce_scatter_single(piece, flat)
    return piece


def mean_piece(gradient):
    return summed_piece(gradient) / dist.get_world_size()


def gather(piece, shape):
    flat = piece.new_empty(len(piece) * dist.get_world_size())
    dist.all_gather_single(flat, piece.detach())
    return flat[: shape.numel()].view(shape)


# ---- ZeRO-3 ----


def forward_all(layers, weights, x):
    for layer, own in zip(layers, weights):
        x = functional_call(layer, own, (x,))
    return x


def gather_all(layers, shards, parameter=True):
    found = [
        {name: gather(own[name], p.shape) for name, p in layer.named_parameters()}
        for layer, own in zip(layers, shards)
    ]
    return (
        [{name: nn.Parameter(w) for name, w in own.items()} for own in found]
        if parameter
        else found
    )


# named: disguised data parallel (3.5 points)
def train_zero3__disguised(layers, shards, loss_fn, make_optimizer, batches):
    weights = gather_all(layers, shards)
    parameters = [w for own in weights for w in own.values()]
    optimizer = make_optimizer(parameters)
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_fn(forward_all(layers, weights, inputs), targets).backward()
        for p in parameters:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
    return [{name: own_piece(w.detach()) for name, w in own.items()} for own in weights]


# named: all layers gathered at once (4.8 points)
def train_zero3__gathered_first(layers, shards, loss_fn, make_optimizer, batches):
    """In each step it gathers all layers, and reduce-scatters at the end: that is ZeRO-2."""
    pieces = [{name: nn.Parameter(piece) for name, piece in own.items()} for own in shards]
    optimizer = make_optimizer([piece for own in pieces for piece in own.values()])
    for inputs, targets in batches:
        weights = gather_all(layers, pieces)
        loss_fn(forward_all(layers, weights, inputs), targets).backward()
        for own, whole in zip(pieces, weights):
            for name, piece in own.items():
                piece.grad = mean_piece(whole[name].grad)
        optimizer.step()
    return [{name: piece.detach() for name, piece in own.items()} for own in pieces]


# ---- recomputation ----


class Again(torch.autograd.Function):
    """The right one, with one part of it exchanged."""

    @staticmethod
    def forward(ctx, x, block, restores, puts_back, again, *weights):
        ctx.parts = restores, puts_back, again
        ctx.state = torch.get_rng_state()
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, gradient):
        restores, puts_back, again = ctx.parts
        x = ctx.saved_tensors[0].detach().requires_grad_()
        now = torch.get_rng_state()
        if restores is not None:
            restores(ctx.state)
        with torch.enable_grad():
            y = again(x)
        if puts_back:
            torch.set_rng_state(now)
        weights = list(again.parameters())
        found = torch.autograd.grad(y, [x, *weights], gradient)
        return found[0], None, None, None, None, *found[1:]


def again(block, x, restores=torch.set_rng_state, puts_back=True, computes=None):
    return Again.apply(x, block, restores, puts_back, computes or block, *block.parameters())


# named: nothing is recomputed (2 points)
def recompute__plain(block, x):
    return block(x)


class KeepsTheGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block, *weights):
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y, ctx.weights = block(ctx.x), weights
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, gradient):
        found = torch.autograd.grad(ctx.y, [ctx.x, *ctx.weights], gradient)
        return found[0], None, *found[1:]


# named: nothing is recomputed (2 points)
def recompute__keeps_the_graph(block, x):
    return KeepsTheGraph.apply(x, block, *block.parameters())


# named: random state not restored
def recompute__other_numbers(block, x):
    return again(block, x, restores=None)


# named: random state not put back
def recompute__not_put_back(block, x):
    return again(block, x, puts_back=False)


COPIES = {}


# named: recomputed with other weights
def recompute__old_copy(block, x):
    if block not in COPIES:
        COPIES[block] = copy.copy(block)
        COPIES[block]._parameters = {
            name: nn.Parameter(p.detach().clone()) for name, p in block.named_parameters()
        }
    return again(block, x, computes=COPIES[block])


class OnlyX(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block):
        ctx.block, ctx.state = block, torch.get_rng_state()
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            (found,) = torch.autograd.grad(ctx.block(x), x, gradient)
        torch.set_rng_state(now)
        return found, None


# named: gradient of the weights lost
def recompute__only_x(block, x):
    return OnlyX.apply(x, block)


# named: gradient stops at x
def recompute__detached(block, x):
    return again(block, x.detach())


# named: -
def recompute__nothing(block, x):
    return x


# named: -
def recompute__only_one_rank(block, x):
    if dist.get_world_size() > 1:
        raise RuntimeError("several ranks are for tomorrow")
    return block(x)
