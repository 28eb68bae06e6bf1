"""Wrong solutions of homework 5. EXPECTED: the misconception that the grader must name for each."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

EXPECTED = {
    "train_zero1__whole_optimizer": "whole optimizer on each rank",
    "train_zero1__all_reduced": "gradients all-reduced",
    "train_zero1__local_norm": "clip by the local norm",
    "train_zero1__summed": "sum for mean",
    "train_zero1__never_reduced": None,
    "train_zero1__divided_in_flight": "changed while it is sent",
    "train_zero1__no_padding": None,
    "train_zero2__hooks_free_nothing": "all gradients held at once",
    "train_zero2__all_gradients": "all gradients held at once",
    "train_zero2__whole_optimizer": "whole optimizer on each rank",
    "train_zero2__all_reduced": "gradients all-reduced",
    "train_zero2__local_norm": "clip by the local norm",
    "train_zero2__summed": "sum for mean",
    "train_mixed__from_the_model": "master weights updated from rounded ones",
    "train_mixed__from_the_gathered": "master weights updated from rounded ones",
    "train_mixed__copied_after_rounding": "master weights begin rounded",
    "train_mixed__added_up_by_autograd": "gradients cast before the sum",
    "train_mixed__sent_rounded": "gradients cast before the sum",
    "train_mixed__gathers_masters": "master weights gathered",
    "train_mixed__never_rounded": None,
    "train_mixed__whole_masters": "whole master weights on each rank",
    "train_mixed__summed": "sum for mean",
    "train_mixed__microbatches_summed": "sum for mean",
    "train_zero3__disguised": "disguised data parallel",
    "train_zero3__never_freed": "gathered weights never freed",
    "train_zero3__gathered_first": "all layers gathered at once",
    "train_zero3__all_reduced": "gradients all-reduced",
    "train_zero3__summed": "sum for mean",
    "recompute__plain": "nothing is recomputed",
    "recompute__keeps_the_graph": "nothing is recomputed",
    "recompute__other_numbers": "random state not restored",
    "recompute__seeded": "random state not restored",
    "recompute__not_put_back": "random state not put back",
    "recompute__old_copy": "recomputed with other weights",
    "recompute__only_x": "gradient of the weights lost",
    "recompute__detached": "gradient stops at x",
    "recompute__nothing": None,
    "recompute__no_graph": None,
    "recompute__only_one_rank": None,
}
POINTS = {  # of 5 (ZeRO-3: of 10), for solutions that miss the idea
    "train_zero1__whole_optimizer": 2.5,
    "train_zero2__whole_optimizer": 1.5,
    "train_zero2__all_gradients": 2.2,
    "train_zero2__hooks_free_nothing": 2.2,
    "train_mixed__whole_masters": 0.29,
    "train_mixed__from_the_model": 0.79,
    "train_mixed__copied_after_rounding": 0.79,
    "train_mixed__added_up_by_autograd": 0.79,
    "train_mixed__gathers_masters": 2.5,
    "train_zero3__disguised": 3.5,
    "train_zero3__never_freed": 4.8,
    "train_zero3__gathered_first": 4.8,
    "recompute__plain": 2,
    "recompute__keeps_the_graph": 2,
}


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


def all_reduced_piece(gradient):
    total = gradient.clone()
    dist.all_reduce(total)
    return own_piece(total / dist.get_world_size())


def gather(piece, shape):
    flat = piece.new_empty(len(piece) * dist.get_world_size())
    dist.all_gather_single(flat, piece.detach())
    return flat[: shape.numel()].view(shape)


def clip(parameters, max_norm):
    square = sum(p.grad.square().sum() for p in parameters)
    dist.all_reduce(square)
    for p in parameters:
        p.grad *= min(1.0, max_norm / square.sqrt().item())


def clip_alone(parameters, max_norm):
    nn.utils.clip_grad_norm_(list(parameters), max_norm)


def zero1(
    model, loss_fn, make_optimizer, batches, max_norm, reduced=mean_piece, clip=clip, before=None
):
    """The right loop, with one part of it exchanged."""
    pieces = {p: nn.Parameter(own_piece(p.detach())) for p in model.parameters()}
    optimizer = make_optimizer(list(pieces.values()))
    for inputs, targets in batches:
        model.zero_grad()
        loss_fn(model(inputs), targets).backward()
        if before is not None:
            before(model.parameters(), max_norm)
        for p, piece in pieces.items():
            piece.grad = reduced(p.grad)
        clip(pieces.values(), max_norm)
        optimizer.step()
        for p, piece in pieces.items():
            p.data.copy_(gather(piece, p.shape))


def zero2(model, loss_fn, make_optimizer, batches, max_norm, reduced=mean_piece, clip=clip):
    pieces = {p: nn.Parameter(own_piece(p.detach())) for p in model.parameters()}
    optimizer = make_optimizer(list(pieces.values()))

    def ready(p):
        pieces[p].grad = reduced(p.grad)
        p.grad = None

    for p in pieces:
        p.register_post_accumulate_grad_hook(ready)
    for inputs, targets in batches:
        loss_fn(model(inputs), targets).backward()
        clip(pieces.values(), max_norm)
        optimizer.step()
        for p, piece in pieces.items():
            p.data.copy_(gather(piece, p.shape))


# ---- ZeRO-1 ----


def train_zero1__whole_optimizer(model, loss_fn, make_optimizer, batches, max_norm):
    """Data parallel training."""
    optimizer = make_optimizer(list(model.parameters()))
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_fn(model(inputs), targets).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()


def train_zero1__all_reduced(model, loss_fn, make_optimizer, batches, max_norm):
    zero1(model, loss_fn, make_optimizer, batches, max_norm, reduced=all_reduced_piece)


def train_zero1__local_norm(model, loss_fn, make_optimizer, batches, max_norm):
    zero1(model, loss_fn, make_optimizer, batches, max_norm, clip=clip_alone)


def train_zero1__summed(model, loss_fn, make_optimizer, batches, max_norm):
    zero1(model, loss_fn, make_optimizer, batches, max_norm, reduced=summed_piece)


def train_zero1__never_reduced(model, loss_fn, make_optimizer, batches, max_norm):
    """Its optimizer is whole too, but that is not what makes the weights wrong."""
    optimizer = make_optimizer(list(model.parameters()))
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_fn(model(inputs), targets).backward()
        clip_alone(model.parameters(), max_norm)
        optimizer.step()


def divided_in_flight(gradient):
    flat = padded(gradient)
    piece = flat.new_empty(len(flat) // dist.get_world_size())
    work = dist.reduce_scatter_single(piece, flat, async_op=True)
    piece /= dist.get_world_size()
    work.wait()
    return piece


def train_zero1__divided_in_flight(model, loss_fn, make_optimizer, batches, max_norm):
    zero1(model, loss_fn, make_optimizer, batches, max_norm, reduced=divided_in_flight)


def train_zero1__no_padding(model, loss_fn, make_optimizer, batches, max_norm):
    """What n does not divide is left out, so some pieces are empty."""
    rank, n = dist.get_rank(), dist.get_world_size()
    ends = {p: p.numel() // n * n for p in model.parameters()}
    pieces = {
        p: nn.Parameter(p.detach().flatten()[:end].chunk(n)[rank].clone())
        for p, end in ends.items()
    }
    optimizer = make_optimizer(list(pieces.values()))
    for inputs, targets in batches:
        model.zero_grad()
        loss_fn(model(inputs), targets).backward()
        for p, piece in pieces.items():
            piece.grad = torch.empty_like(piece)
            dist.reduce_scatter_single(piece.grad, p.grad.flatten()[: ends[p]].clone())
            piece.grad /= n
        clip(pieces.values(), max_norm)
        optimizer.step()
        for p, piece in pieces.items():
            flat = piece.new_empty(ends[p])
            dist.all_gather_single(flat, piece.detach())
            p.data.view(-1)[: ends[p]] = flat


# ---- ZeRO-2 ----


def train_zero2__hooks_free_nothing(model, loss_fn, make_optimizer, batches, max_norm):
    """Whole gradients are reduced during backward, and freed before the next step."""
    pieces = {p: nn.Parameter(own_piece(p.detach())) for p in model.parameters()}
    optimizer = make_optimizer(list(pieces.values()))

    def ready(p):
        pieces[p].grad = mean_piece(p.grad)

    for p in pieces:
        p.register_post_accumulate_grad_hook(ready)
    for inputs, targets in batches:
        model.zero_grad()
        loss_fn(model(inputs), targets).backward()
        clip(pieces.values(), max_norm)
        optimizer.step()
        for p, piece in pieces.items():
            p.data.copy_(gather(piece, p.shape))


def train_zero2__all_gradients(model, loss_fn, make_optimizer, batches, max_norm):
    zero1(model, loss_fn, make_optimizer, batches, max_norm)


def train_zero2__whole_optimizer(model, loss_fn, make_optimizer, batches, max_norm):
    parameters = list(model.parameters())
    optimizer = make_optimizer(parameters)
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_fn(model(inputs), targets).backward()
        for p in parameters:
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
            p.grad.div_(dist.get_world_size())
        nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()


def train_zero2__all_reduced(model, loss_fn, make_optimizer, batches, max_norm):
    zero2(model, loss_fn, make_optimizer, batches, max_norm, reduced=all_reduced_piece)


def train_zero2__local_norm(model, loss_fn, make_optimizer, batches, max_norm):
    zero2(model, loss_fn, make_optimizer, batches, max_norm, clip=clip_alone)


def train_zero2__summed(model, loss_fn, make_optimizer, batches, max_norm):
    zero2(model, loss_fn, make_optimizer, batches, max_norm, reduced=summed_piece)


# ---- ZeRO-1 with master weights ----


def add_up(model, loss_fn, microbatches):
    """The mean of the microbatches' gradients, in float32."""
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()]
    for inputs, targets in microbatches:
        (loss_fn(model(inputs), targets) / len(microbatches)).backward()
        for total, p in zip(sums, model.parameters()):
            total += p.grad
            p.grad = None
    return sums


def mixed(
    model,
    loss_fn,
    make_optimizer,
    batches,
    add_up=add_up,
    reduced=mean_piece,
    before=None,
    sent=None,
):
    """The right loop, with one part of it exchanged."""
    masters = [nn.Parameter(own_piece(p.detach())) for p in model.parameters()]
    model.bfloat16()
    optimizer = make_optimizer(masters)
    for microbatches in batches:
        for master, total in zip(masters, add_up(model, loss_fn, microbatches)):
            master.grad = reduced(total).float()
        if before is not None:
            before(model, masters)
        optimizer.step()
        for master, p in zip(masters, model.parameters()):
            piece = master.detach() if sent is None else sent(master)
            p.data.copy_(gather(piece if sent else piece.bfloat16(), p.shape))


def train_mixed__from_the_model(model, loss_fn, make_optimizer, batches):
    def from_the_model(model, masters):
        for master, p in zip(masters, model.parameters()):
            master.data.copy_(own_piece(p.detach().float()))

    mixed(model, loss_fn, make_optimizer, batches, before=from_the_model)


def train_mixed__from_the_gathered(model, loss_fn, make_optimizer, batches):
    """After the step, the master piece is what was sent of it."""

    def rounded(master):
        master.data = master.data.bfloat16().float()
        return master.data.bfloat16()

    mixed(model, loss_fn, make_optimizer, batches, sent=rounded)


def train_mixed__copied_after_rounding(model, loss_fn, make_optimizer, batches):
    mixed(model.bfloat16().float(), loss_fn, make_optimizer, batches)


def train_mixed__added_up_by_autograd(model, loss_fn, make_optimizer, batches):
    """p.grad has the dtype of p."""

    def by_autograd(model, loss_fn, microbatches):
        model.zero_grad()
        for inputs, targets in microbatches:
            (loss_fn(model(inputs), targets) / len(microbatches)).backward()
        return [p.grad.float() for p in model.parameters()]

    mixed(model, loss_fn, make_optimizer, batches, add_up=by_autograd)


def train_mixed__sent_rounded(model, loss_fn, make_optimizer, batches):
    mixed(
        model, loss_fn, make_optimizer, batches, reduced=lambda total: mean_piece(total.bfloat16())
    )


def train_mixed__gathers_masters(model, loss_fn, make_optimizer, batches):
    mixed(model, loss_fn, make_optimizer, batches, sent=lambda master: master.detach())


def train_mixed__summed(model, loss_fn, make_optimizer, batches):
    mixed(model, loss_fn, make_optimizer, batches, reduced=summed_piece)


def train_mixed__microbatches_summed(model, loss_fn, make_optimizer, batches):
    def summed(model, loss_fn, microbatches):
        return [total * len(microbatches) for total in add_up(model, loss_fn, microbatches)]

    mixed(model, loss_fn, make_optimizer, batches, add_up=summed)


def train_mixed__never_rounded(model, loss_fn, make_optimizer, batches):
    """It trains in float32, and rounds at the end."""
    masters = [nn.Parameter(own_piece(p.detach())) for p in model.parameters()]
    optimizer = make_optimizer(masters)
    for microbatches in batches:
        whole = [(inputs.float(), targets) for inputs, targets in microbatches]
        for master, total in zip(masters, add_up(model, loss_fn, whole)):
            master.grad = mean_piece(total)
        optimizer.step()
        for master, p in zip(masters, model.parameters()):
            p.data.copy_(gather(master.detach(), p.shape))
    model.bfloat16()


def train_mixed__whole_masters(model, loss_fn, make_optimizer, batches):
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    model.to(torch.bfloat16)
    optimizer = make_optimizer(masters)
    for microbatches in batches:
        for master, total in zip(masters, add_up(model, loss_fn, microbatches)):
            dist.all_reduce(total)
            master.grad = total / dist.get_world_size()
        optimizer.step()
        for master, p in zip(masters, model.parameters()):
            p.data.copy_(master.detach())


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


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, piece, shape, reduced):
        ctx.reduced = reduced
        return gather(piece, shape)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.reduced(gradient), None, None


def zero3(layers, shards, loss_fn, make_optimizer, batches, run, reduced=mean_piece):
    pieces = [{name: nn.Parameter(piece) for name, piece in own.items()} for own in shards]
    optimizer = make_optimizer([piece for own in pieces for piece in own.values()])

    def layer_of(layer, own, x):
        weights = {
            name: Gather.apply(own[name], p.shape, reduced) for name, p in layer.named_parameters()
        }
        return functional_call(layer, weights, (x,))

    for inputs, targets in batches:
        optimizer.zero_grad()
        x = inputs
        for layer, own in zip(layers, pieces):
            x = run(layer_of, layer, own, x)
        loss_fn(x, targets).backward()
        optimizer.step()
    return [{name: piece.detach() for name, piece in own.items()} for own in pieces]


def checkpointed(function, *arguments):
    return torch.utils.checkpoint.checkpoint(function, *arguments, use_reentrant=False)


def train_zero3__never_freed(layers, shards, loss_fn, make_optimizer, batches):
    """Nothing of its own holds the weights, but autograd does."""
    return zero3(
        layers,
        shards,
        loss_fn,
        make_optimizer,
        batches,
        lambda function, *arguments: function(*arguments),
    )


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


def train_zero3__all_reduced(layers, shards, loss_fn, make_optimizer, batches):
    return zero3(
        layers, shards, loss_fn, make_optimizer, batches, checkpointed, reduced=all_reduced_piece
    )


def train_zero3__summed(layers, shards, loss_fn, make_optimizer, batches):
    return zero3(
        layers, shards, loss_fn, make_optimizer, batches, checkpointed, reduced=summed_piece
    )


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


def recompute__keeps_the_graph(block, x):
    return KeepsTheGraph.apply(x, block, *block.parameters())


def recompute__other_numbers(block, x):
    return again(block, x, restores=None)


def recompute__seeded(block, x):
    """A seed of its own for each second forward, which is not the first one's."""
    return again(block, x, restores=lambda state: torch.manual_seed(0))


def recompute__not_put_back(block, x):
    return again(block, x, puts_back=False)


COPIES = {}


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


def recompute__only_x(block, x):
    return OnlyX.apply(x, block)


def recompute__detached(block, x):
    return again(block, x.detach())


def recompute__nothing(block, x):
    return x


def recompute__no_graph(block, x):
    with torch.no_grad():
        return block(x)


def recompute__only_one_rank(block, x):
    if dist.get_world_size() > 1:
        raise RuntimeError("several ranks are for tomorrow")
    return block(x)
