"""Wrong solutions of homework 8. EXPECTED: the misconception that the grader must name for each."""

import math

import torch
import torch.distributed as dist

EXPECTED = {
    "train_on_mesh__world": "reduces over the world",
    "train_on_mesh__world_flat": "reduces over the world",
    "train_on_mesh__through_rank_zero": "reduces over the world",
    "train_on_mesh__parts_over_tp": "parts summed over tp",
    "train_on_mesh__parts_over_tp_first": "parts summed over tp",
    "train_on_mesh__consecutive": "groups of the wrong ranks",
    "train_on_mesh__swapped": "groups of the wrong ranks",
    "train_on_mesh__unsynchronised": "gradients never synchronised",
    "train_on_mesh__only_partial": "gradients never synchronised",
    "train_on_mesh__without_cp": "cp left out",
    "train_on_mesh__without_cp_flat": "cp left out",
    "train_on_mesh__divided_by_world": "divides by the world size",
    "train_on_mesh__loss_divided_by_world": "divides by the world size",
    "train_on_mesh__summed": "sum for mean",
    "train_on_mesh__summed_flat": "sum for mean",
    "train_on_mesh__partial_left": "partial gradients not summed",
    "train_on_mesh__partial_broadcast": "partial gradients not summed",
    "train_on_mesh__partial_averaged": "partial gradients averaged",
    "train_on_mesh__partial_mean_of_world": "partial gradients averaged",
    "train_on_mesh__not_cleared": "gradients not cleared",
    "train_on_mesh__cleared_once": "gradients not cleared",
    "train_on_mesh__clipped_first": "norm before the sum",
    "train_on_mesh__norm_first": "norm before the sum",
    "train_on_mesh__norm_along_tp": "norm counts replicas twice",
    "train_on_mesh__norm_over_world": "norm counts replicas twice",
    "train_on_mesh__norm_of_norms": "norm counts replicas twice",
    "train_on_mesh__local_norm": "norm of one rank's part",
    "train_on_mesh__clip_grad_norm": "norm of one rank's part",
    "train_on_mesh__share_by_rank": "share cut along tp too",
    "train_on_mesh__strided_share": "share cut along tp too",
    "train_on_mesh__time_along_tp": "share cut along tp too",
    "train_on_mesh__whole_batch": "whole batch on every rank",
    "train_on_mesh__whole_time": "whole batch on every rank",
}


# ---- 23 ----


def lines(sizes, *axes):
    """This rank's group along some axes."""
    grid = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    names, mine = list(sizes), None
    keep = [i for i, name in enumerate(names) if name not in axes]
    moved = [i for i, name in enumerate(names) if name in axes]
    for row in (
        grid.permute(*keep, *moved)
        .flatten(len(keep))
        .reshape(-1, math.prod(sizes[axis] for axis in axes))
    ):
        group = dist.new_group(row.tolist())
        mine = group if dist.get_rank() in row.tolist() else mine
    return mine


def place(sizes):
    rank = dist.get_rank()
    return rank // sizes["tp"] // sizes["cp"], rank // sizes["tp"] % sizes["cp"]


def right_share(batch, sizes):
    d, c = place(sizes)
    return [z.chunk(sizes["dp"])[d].chunk(sizes["cp"], 1)[c] for z in batch]


def right_norm(model, sizes, cut, group):
    own = sum(p.grad.square().sum() for name, p in model.named_parameters() if name in cut)
    dist.all_reduce(own, group=group)
    rest = sum(p.grad.square().sum() for name, p in model.named_parameters() if name not in cut)
    return float((own + rest).sqrt())


def in_steps(
    model, loss_fn, optimizer, batches, sizes, max_norm, synchronise, norm_of, share=right_share,
    weight=1.0, clear=True,
):  # fmt: skip
    norms = []
    for batch in batches:
        x, y = share(batch, sizes)
        if clear:
            optimizer.zero_grad()
        (weight * loss_fn(model(x), y)).backward()
        synchronise()
        norms.append(norm_of())
        for p in model.parameters():
            p.grad *= min(1.0, max_norm / norms[-1])
        optimizer.step()
    return norms


def nearly(
    model, loss_fn, optimizer, batches, sizes, cut, partial, max_norm, *, data=None, divisor=None,
    partial_divisor=1, sums_partial=True, norm_of=None, also=None, **others,
):  # fmt: skip
    """A right solution with one part replaced."""
    tensor = lines(sizes, "tp")
    data = data or lines(sizes, "dp", "cp")
    divisor = divisor or sizes["dp"] * sizes["cp"]

    def synchronise():
        for name, p in model.named_parameters():
            dist.all_reduce(p.grad, group=data)
            p.grad /= divisor
            if name in partial and sums_partial:
                dist.all_reduce(p.grad, group=tensor)
                p.grad /= partial_divisor
            if also:
                also(name, p, tensor)

    norm = (lambda: norm_of(tensor)) if norm_of else lambda: right_norm(model, sizes, cut, tensor)
    return in_steps(
        model, loss_fn, optimizer, batches, sizes, max_norm, synchronise, norm, **others
    )


def train_on_mesh__world(model, loss_fn, optimizer, batches, sizes, cut, partial, max_norm):
    """As in data parallel training."""
    tensor = lines(sizes, "tp")

    def synchronise():
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()

    return in_steps(
        model, loss_fn, optimizer, batches, sizes, max_norm, synchronise,
        lambda: right_norm(model, sizes, cut, tensor),
    )  # fmt: skip


def train_on_mesh__world_flat(model, loss_fn, optimizer, batches, sizes, cut, partial, max_norm):
    """One flat buffer, reduced and broadcast; divided by the number of shares."""
    norms = []
    for batch in batches:
        x, y = right_share(batch, sizes)
        gradients = torch.autograd.grad(loss_fn(model(x), y), list(model.parameters()))
        flat = torch.cat([g.flatten() for g in gradients])
        dist.reduce(flat, 0)
        dist.broadcast(flat, 0)
        flat /= sizes["dp"] * sizes["cp"]
        norms.append(float(flat.norm()))
        flat *= min(1.0, max_norm / norms[-1])
        begin = 0
        for p in model.parameters():
            p.grad = flat[begin : begin + p.numel()].view_as(p).clone()
            begin += p.numel()
        optimizer.step()
    return norms


def train_on_mesh__through_rank_zero(
    model, loss_fn, optimizer, batches, sizes, cut, partial, max_norm
):
    """Every rank's gradients go to rank 0, and their mean comes back."""
    tensor = lines(sizes, "tp")
    rank, world = dist.get_rank(), dist.get_world_size()

    def synchronise():
        for p in model.parameters():
            if rank:
                dist.send(p.grad, 0)
                dist.recv(p.grad, 0)
                continue
            total, other = p.grad.clone(), torch.empty_like(p.grad)
            for source in range(1, world):
                dist.recv(other, source)
                total += other
            p.grad.copy_(total / world)
            for target in range(1, world):
                dist.send(p.grad, target)

    return in_steps(
        model, loss_fn, optimizer, batches, sizes, max_norm, synchronise,
        lambda: right_norm(model, sizes, cut, tensor),
    )  # fmt: skip


def train_on_mesh__parts_over_tp(*given):
    """After the mean along dp and cp, everything is added up along tp."""

    def also(name, p, tensor):
        if name not in given[6]:
            dist.all_reduce(p.grad, group=tensor)

    return nearly(*given, also=also)


def train_on_mesh__parts_over_tp_first(
    model, loss_fn, optimizer, batches, sizes, cut, partial, max_norm
):
    """One flat buffer; along tp first, with a mean, then along dp and cp."""
    tensor, dp, cp = lines(sizes, "tp"), lines(sizes, "dp"), lines(sizes, "cp")

    def synchronise():
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        for group in (tensor, dp, cp):
            dist.all_reduce(flat, group=group)
            flat /= dist.get_world_size(group)
        torch.nn.utils.vector_to_parameters(flat, [p.grad for p in model.parameters()])

    return in_steps(
        model, loss_fn, optimizer, batches, sizes, max_norm, synchronise,
        lambda: right_norm(model, sizes, cut, tensor),
    )  # fmt: skip


def train_on_mesh__consecutive(*given):
    """Ranks in a row are taken for a group of data parallel ranks."""
    sizes = given[4]
    shares = sizes["dp"] * sizes["cp"]
    for first in range(0, dist.get_world_size(), shares):
        ranks = list(range(first, first + shares))
        group = dist.new_group(ranks)
        data = group if dist.get_rank() in ranks else locals().get("data")
    return nearly(*given, data=data)


def train_on_mesh__swapped(model, loss_fn, optimizer, batches, sizes, cut, partial, max_norm):
    """The groups of dp and tp are exchanged."""
    data, tensor = lines(sizes, "tp"), lines(sizes, "dp", "cp")

    def synchronise():
        for name, p in model.named_parameters():
            dist.all_reduce(p.grad, group=data)
            p.grad /= dist.get_world_size(data)
            if name in partial:
                dist.all_reduce(p.grad, group=tensor)

    return in_steps(
        model, loss_fn, optimizer, batches, sizes, max_norm, synchronise,
        lambda: right_norm(model, sizes, cut, tensor),
    )  # fmt: skip


def train_on_mesh__unsynchronised(
    model, loss_fn, optimizer, batches, sizes, cut, partial, max_norm
):
    """Messages for the norm alone."""
    world = torch.zeros(1)
    return in_steps(
        model, loss_fn, optimizer, batches, sizes, max_norm, lambda: dist.all_reduce(world),
        lambda: right_norm(model, sizes, cut, None),
    )  # fmt: skip


def train_on_mesh__only_partial(model, loss_fn, optimizer, batches, sizes, cut, partial, max_norm):
    """Only what is named is synchronised."""
    tensor = lines(sizes, "tp")

    def synchronise():
        for name in partial:
            dist.all_reduce(model.get_parameter(name).grad, group=tensor)

    return in_steps(
        model, loss_fn, optimizer, batches, sizes, max_norm, synchronise,
        lambda: right_norm(model, sizes, cut, tensor),
    )  # fmt: skip


def train_on_mesh__without_cp(*given):
    return nearly(*given, data=lines(given[4], "dp"), divisor=given[4]["dp"])


def train_on_mesh__without_cp_flat(
    model, loss_fn, optimizer, batches, sizes, cut, partial, max_norm
):
    """Divided by cp all the same, gathered in place of reduced."""
    data, tensor = lines(sizes, "dp"), lines(sizes, "tp")

    def synchronise():
        for name, p in model.named_parameters():
            parts = [torch.empty_like(p.grad) for _ in range(sizes["dp"])]
            dist.all_gather(parts, p.grad, group=data)
            p.grad.copy_(sum(parts) / sizes["dp"] / sizes["cp"])
            if name in partial:
                dist.all_reduce(p.grad, group=tensor)

    return in_steps(
        model, loss_fn, optimizer, batches, sizes, max_norm, synchronise,
        lambda: right_norm(model, sizes, cut, tensor),
    )  # fmt: skip


def train_on_mesh__divided_by_world(*given):
    return nearly(*given, divisor=dist.get_world_size())


def train_on_mesh__loss_divided_by_world(*given):
    return nearly(*given, divisor=1, weight=1 / dist.get_world_size())


def train_on_mesh__summed(*given):
    return nearly(*given, divisor=1)


def train_on_mesh__summed_flat(model, loss_fn, optimizer, batches, sizes, cut, partial, max_norm):
    """One buffer, along one axis after the other; the norm is that of the sum."""
    tensor, axes = lines(sizes, "tp"), [lines(sizes, axis) for axis in ("dp", "cp")]

    def synchronise():
        some = [model.get_parameter(name).grad for name in sorted(partial)]
        flat = torch.cat(some)
        dist.all_reduce(flat, group=tensor)
        torch.nn.utils.vector_to_parameters(flat, some)
        every = [p.grad for p in model.parameters()]
        flat = torch.cat([g.flatten() for g in every])
        for group in axes:
            dist.all_reduce(flat, group=group)
        torch.nn.utils.vector_to_parameters(flat, every)

    return in_steps(
        model, loss_fn, optimizer, batches, sizes, max_norm, synchronise,
        lambda: right_norm(model, sizes, cut, tensor),
    )  # fmt: skip


def train_on_mesh__partial_left(*given):
    return nearly(*given, sums_partial=False)


def train_on_mesh__partial_broadcast(*given):
    """They are made equal, as the first rank along tp has them... but only in the weights."""

    def also(name, p, tensor):
        if name in given[6]:
            with torch.no_grad():
                dist.broadcast(p.data, group_src=0, group=tensor)

    return nearly(*given, sums_partial=False, also=also)


def train_on_mesh__partial_averaged(*given):
    return nearly(*given, partial_divisor=given[4]["tp"])


def train_on_mesh__partial_mean_of_world(
    model, loss_fn, optimizer, batches, sizes, cut, partial, max_norm
):
    """What is replicated is averaged over the world."""
    data, tensor = lines(sizes, "dp", "cp"), lines(sizes, "tp")

    def synchronise():
        for name, p in model.named_parameters():
            group = None if name in partial else data
            dist.all_reduce(p.grad, group=group)
            p.grad /= dist.get_world_size(group)

    return in_steps(
        model, loss_fn, optimizer, batches, sizes, max_norm, synchronise,
        lambda: right_norm(model, sizes, cut, tensor),
    )  # fmt: skip


def train_on_mesh__not_cleared(*given):
    return nearly(*given, clear=False)


def train_on_mesh__cleared_once(model, loss_fn, optimizer, batches, sizes, cut, partial, max_norm):
    """The gradients of a step are added to those of the step before, which are sums already."""
    data, tensor = lines(sizes, "dp", "cp"), lines(sizes, "tp")
    optimizer.zero_grad()
    before = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    def synchronise():
        for name, p in model.named_parameters():
            p.grad -= before[name]
            dist.all_reduce(p.grad, group=data)
            p.grad /= sizes["dp"] * sizes["cp"]
            if name in partial:
                dist.all_reduce(p.grad, group=tensor)
            p.grad += before[name]
            before[name] = p.grad.clone()

    return in_steps(
        model, loss_fn, optimizer, batches, sizes, max_norm, synchronise,
        lambda: right_norm(model, sizes, cut, tensor), clear=False,
    )  # fmt: skip


def train_on_mesh__clipped_first(model, loss_fn, optimizer, batches, sizes, cut, partial, max_norm):
    """Every rank clips its own gradients, and then they are averaged."""
    data, tensor = lines(sizes, "dp", "cp"), lines(sizes, "tp")
    norms = []
    for batch in batches:
        x, y = right_share(batch, sizes)
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        for name, p in model.named_parameters():
            dist.all_reduce(p.grad, group=data)
            p.grad /= sizes["dp"] * sizes["cp"]
            if name in partial:
                dist.all_reduce(p.grad, group=tensor)
        optimizer.step()
    return norms


def train_on_mesh__norm_first(model, loss_fn, optimizer, batches, sizes, cut, partial, max_norm):
    """The norm is summed along tp as it should be, but too early."""
    data, tensor = lines(sizes, "dp", "cp"), lines(sizes, "tp")
    early = []

    def synchronise():
        early.append(right_norm(model, sizes, cut, tensor))
        for name, p in model.named_parameters():
            dist.all_reduce(p.grad, group=data)
            p.grad /= sizes["dp"] * sizes["cp"]
            if name in partial:
                dist.all_reduce(p.grad, group=tensor)

    return in_steps(
        model, loss_fn, optimizer, batches, sizes, max_norm, synchronise, lambda: early[-1]
    )


def train_on_mesh__norm_along_tp(*given):
    """The squares of all gradients are added up along tp."""
    model = given[0]

    def norm_of(tensor):
        squares = sum(p.grad.square().sum() for p in model.parameters())
        dist.all_reduce(squares, group=tensor)
        return float(squares.sqrt())

    return nearly(*given, norm_of=norm_of)


def train_on_mesh__norm_over_world(*given):
    """The squares of what is cut are added up over the world, the rest counts once."""
    model, sizes, cut = given[0], given[4], given[5]
    return nearly(*given, norm_of=lambda tensor: right_norm(model, sizes, cut, None))


def train_on_mesh__norm_of_norms(*given):
    """The norm of all ranks' norms."""
    model = given[0]

    def norm_of(tensor):
        own = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()]))
        norms = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(norms, own)
        return float(torch.stack(norms).norm())

    return nearly(*given, norm_of=norm_of)


def train_on_mesh__local_norm(*given):
    model = given[0]
    return nearly(
        *given, norm_of=lambda tensor: math.hypot(*(p.grad.norm() for p in model.parameters()))
    )


def train_on_mesh__clip_grad_norm(
    model, loss_fn, optimizer, batches, sizes, cut, partial, max_norm
):
    """torch's own clipping, which sees this rank's gradients."""
    data, tensor = lines(sizes, "dp", "cp"), lines(sizes, "tp")
    norms = []
    for batch in batches:
        x, y = right_share(batch, sizes)
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        for name, p in model.named_parameters():
            p.grad /= sizes["dp"] * sizes["cp"]
            dist.all_reduce(p.grad, group=data)
            if name in partial:
                dist.all_reduce(p.grad, group=tensor)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
    return norms


def train_on_mesh__share_by_rank(*given):
    """The batch is cut into as many shares as there are ranks along dp and tp."""

    def share(batch, sizes):
        (d, c), t = place(sizes), dist.get_rank() % sizes["tp"]
        each = sizes["dp"] * sizes["tp"]
        return [z.chunk(each)[d * sizes["tp"] + t].chunk(sizes["cp"], 1)[c] for z in batch]

    return nearly(*given, share=share)


def train_on_mesh__strided_share(*given):
    """Every n-th sample, and the sum is divided by n: as in data parallel training."""

    def share(batch, sizes):
        return [z[dist.get_rank() :: dist.get_world_size()] for z in batch]

    return nearly(*given, share=share, divisor=dist.get_world_size())


def train_on_mesh__time_along_tp(*given):
    """The time is cut along tp, as for a layer norm in sequence parallel."""

    def share(batch, sizes):
        t = dist.get_rank() % sizes["tp"]
        return [z.chunk(sizes["tp"], 1)[t] for z in right_share(batch, sizes)]

    return nearly(*given, share=share)


def train_on_mesh__whole_batch(*given):
    return nearly(*given, share=lambda batch, sizes: batch)


def train_on_mesh__whole_time(*given):
    """Samples are shared, but along cp each rank computes the whole time."""
    return nearly(
        *given, share=lambda batch, sizes: [z.chunk(sizes["dp"])[place(sizes)[0]] for z in batch]
    )
