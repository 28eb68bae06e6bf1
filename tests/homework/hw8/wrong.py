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
    "bus_bandwidth__never_waits": "clock read before the work is done",
    "bus_bandwidth__waits_later": "clock read before the work is done",
    "bus_bandwidth__each_read_early": "clock read before the work is done",
    "bus_bandwidth__cold": "first call counted",
    "bus_bandwidth__one_more": "first call counted",
    "bus_bandwidth__input": "factor n too small",
    "bus_bandwidth__output": "factor n too small",
    "bus_bandwidth__smaller": "factor n too small",
    "bus_bandwidth__count_per_rank": "factor n too large",
    "bus_bandwidth__times_n": "factor n too large",
    "bus_bandwidth__no_factor": "algorithm bandwidth",
    "bus_bandwidth__bytes_over_mean": "algorithm bandwidth",
    "bus_bandwidth__as_all_reduce": "one factor for all collectives",
    "bus_bandwidth__twice_what_is_sent": "one factor for all collectives",
    "bus_bandwidth__not_divided": "repeats not divided",
    "bus_bandwidth__sum_of_times": "repeats not divided",
    "find_hang__constant": "same answer for every run",
    "find_hang__example": "same answer for every run",
    "find_hang__stuck_in_a_receive": "victim named",
    "find_hang__first_that_waits": "victim named",
    "find_hang__where_it_is_now": "line of the wait",
    "find_hang__where_most_wait": "line of the wait",
    "find_hang__always_missing": "one cause for every run",
    "find_hang__always_peer": "one cause for every run",
    "find_slow__constant": "same answer for every run",
    "find_slow__example": "same answer for every run",
    "find_slow__slowest_step": "slow once",
    "find_slow__any_step": "slow once",
    "find_slow__waits_most": "victim named",
    "find_slow__longest_all_reduce": "victim named",
    "find_slow__longest_call": "waiting taken for work",
    "find_slow__longest_receive": "waiting taken for work",
    "find_slow__always_compute": "one cause for every run",
    "find_slow__always_late": "one cause for every run",
    "find_wrong__constant": "same answer for every run",
    "find_wrong__example": "same answer for every run",
    "find_wrong__with_rank_zero": "rank 0 taken for right",
    "find_wrong__with_the_one_before": "rank 0 taken for right",
    "find_wrong__first_difference": "compares what may differ",
    "find_wrong__most_differences": "compares what may differ",
    "find_wrong__last": "later difference",
    "find_wrong__weights_only": "later difference",
    "find_wrong__always_own": "one cause for every run",
    "find_wrong__always_stale": "one cause for every run",
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


# ---- 24a ----

FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "broadcast": lambda n: 1,
    "reduce": lambda n: 1,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}


def seconds_of_a_call(start, clock, repeats, warm=True):
    if warm:
        start().wait()
    began = clock()
    for _ in range(repeats):
        start().wait()
    return (clock() - began) / repeats


def bus_bandwidth__never_waits(kind, start, given, result, clock, repeats):
    start().wait()
    began = clock()
    for _ in range(repeats):
        start()
    seconds = (clock() - began) / repeats
    return FACTORS[kind](dist.get_world_size()) * max(given.nbytes, result.nbytes) / seconds


def bus_bandwidth__waits_later(kind, start, given, result, clock, repeats):
    """All works are waited for, after the clock was read."""
    start().wait()
    dist.barrier()
    began = clock()
    works = [start() for _ in range(repeats)]
    seconds = (clock() - began) / repeats
    for work in works:
        work.wait()
    return FACTORS[kind](dist.get_world_size()) * max(given.nbytes, result.nbytes) / seconds


def bus_bandwidth__each_read_early(kind, start, given, result, clock, repeats):
    """Each call is timed alone, and waited for after its clock has stopped."""
    total = 0.0
    start().wait()
    for _ in range(repeats):
        began = clock()
        work = start()
        total += clock() - began
        work.wait()
    return FACTORS[kind](dist.get_world_size()) * max(given.nbytes, result.nbytes) * repeats / total


def bus_bandwidth__cold(kind, start, given, result, clock, repeats):
    seconds = seconds_of_a_call(start, clock, repeats, warm=False)
    return FACTORS[kind](dist.get_world_size()) * max(given.nbytes, result.nbytes) / seconds


def bus_bandwidth__one_more(kind, start, given, result, clock, repeats):
    """A first call is made, but the clock runs already."""
    dist.barrier()
    began = clock()
    start().wait()
    for _ in range(repeats):
        start().wait()
    seconds = (clock() - began) / (repeats + 1)
    return FACTORS[kind](dist.get_world_size()) * max(given.nbytes, result.nbytes) / seconds


def bus_bandwidth__input(kind, start, given, result, clock, repeats):
    """S is the size of the input: a shard for an all-gather."""
    seconds = seconds_of_a_call(start, clock, repeats)
    return FACTORS[kind](dist.get_world_size()) * given.nbytes / seconds


def bus_bandwidth__output(kind, start, given, result, clock, repeats):
    seconds = seconds_of_a_call(start, clock, repeats)
    return FACTORS[kind](dist.get_world_size()) * result.nbytes / seconds


def bus_bandwidth__smaller(kind, start, given, result, clock, repeats):
    n, each = dist.get_world_size(), min(given.numel(), result.numel())
    bytes_ = FACTORS[kind](n) * each * given.element_size()
    return bytes_ / seconds_of_a_call(start, clock, repeats)


def bus_bandwidth__count_per_rank(kind, start, given, result, clock, repeats):
    """The output is taken for a count per rank wherever there are shards."""
    n, whole = dist.get_world_size(), max(given.nbytes, result.nbytes)
    size = whole * n if kind in ("all_gather", "reduce_scatter", "all_to_all") else whole
    return FACTORS[kind](n) * size / seconds_of_a_call(start, clock, repeats)


def bus_bandwidth__times_n(kind, start, given, result, clock, repeats):
    n = dist.get_world_size()
    return (
        FACTORS[kind](n) * n * max(given.nbytes, result.nbytes)
        / seconds_of_a_call(start, clock, repeats)
    )  # fmt: skip


def bus_bandwidth__no_factor(kind, start, given, result, clock, repeats):
    return max(given.nbytes, result.nbytes) / seconds_of_a_call(start, clock, repeats)


def bus_bandwidth__bytes_over_mean(kind, start, given, result, clock, repeats):
    """The bytes of all calls over the time of all calls."""
    start().wait()
    began = clock()
    works = [start() for _ in range(repeats)]
    for work in works:
        work.wait()
    return repeats * max(given.nbytes, result.nbytes) / (clock() - began)


def bus_bandwidth__as_all_reduce(kind, start, given, result, clock, repeats):
    factor = FACTORS["all_reduce"](dist.get_world_size())
    return factor * max(given.nbytes, result.nbytes) / seconds_of_a_call(start, clock, repeats)


def bus_bandwidth__twice_what_is_sent(kind, start, given, result, clock, repeats):
    n, whole = dist.get_world_size(), max(given.nbytes, result.nbytes)
    return 2 * (whole - whole / n) / seconds_of_a_call(start, clock, repeats)


def bus_bandwidth__not_divided(kind, start, given, result, clock, repeats):
    seconds = repeats * seconds_of_a_call(start, clock, repeats)
    return FACTORS[kind](dist.get_world_size()) * max(given.nbytes, result.nbytes) / seconds


def bus_bandwidth__sum_of_times(kind, start, given, result, clock, repeats):
    start().wait()
    seconds = 0.0
    for _ in range(repeats):
        began = clock()
        start().wait()
        seconds += clock() - began
    return FACTORS[kind](dist.get_world_size()) * max(given.nbytes, result.nbytes) / seconds


# ---- 24b to 24d ----


def find_hang__constant(record):
    return 1, 24, "missing call"


def find_hang__example(record):
    """The answer to the example, whatever the record is."""
    causes = ["missing call", "different order", "wrong peer"]
    return 3, 40, causes[len(record) % 3]


def odd_one(record):
    """The right rank, the k-th calls of all ranks, and k."""
    n = len(record)

    def what(rank, k):
        row = record[rank][k]
        return row["line"], row["group"], row["peer"] is None or (row["peer"] - rank) % n

    for k in range(max(map(len, record))):
        found = {rank: what(rank, k) for rank in range(n) if k < len(record[rank])}
        usual = max(found.values(), key=list(found.values()).count)
        for rank in range(n):
            if rank not in found and record[rank][-1]["end"] is not None:
                return rank, None, usual, k
            if rank in found and found[rank] != usual:
                return rank, found[rank], usual, k
    raise AssertionError("no fault found")


def right_hang(record):
    rank, found, usual, _ = odd_one(record)
    if found is None or found[0] != usual[0]:
        return rank, usual[0], "missing call"
    return rank, found[0], "wrong peer" if found[1] == usual[1] else "different order"


def find_hang__stuck_in_a_receive(record):
    """The rank that has got least far, and where it waits."""
    _, _, cause = right_hang(record)
    least = min(range(len(record)), key=lambda rank: len(record[rank]))
    rank = next(
        (r for r, own in enumerate(record) if own[-1]["end"] is None and own[-1]["call"] == "recv"),
        least,
    )
    return rank, record[rank][-1]["line"], cause


def find_hang__first_that_waits(record):
    """The first rank that has not ended a call, with the line of that call."""
    culprit = right_hang(record)
    for rank, own in enumerate(record):
        if own[-1]["end"] is None and rank != culprit[0]:
            return rank, own[-1]["line"], culprit[2]


def find_hang__where_it_is_now(record):
    """The culprit's last call."""
    rank, _, cause = right_hang(record)
    return rank, record[rank][-1]["line"], cause


def find_hang__where_most_wait(record):
    """The line at which most ranks wait."""
    rank, _, cause = right_hang(record)
    waiting = [own[-1]["line"] for own in record if own[-1]["end"] is None]
    return rank, max(waiting, key=waiting.count), cause


def find_hang__always_missing(record):
    return *right_hang(record)[:2], "missing call"


def find_hang__always_peer(record):
    rank, line, _ = right_hang(record)
    return rank, line, "wrong peer"


def find_slow__constant(record):
    return 2, 40, "slow compute"


def find_slow__example(record):
    return 0, 31, ["late send", "large message"][len(record) % 2]


def seconds(row):
    return row["end"] - row["posted"]


def right_slow(record):
    for name, value, cause in (
        ("load", seconds, "slow compute"),
        ("forward", seconds, "slow compute"),
        ("send", lambda row: row["nbytes"], "large message"),
    ):
        totals = [sum(value(row) for row in own if row["call"] == name) for own in record]
        rank = totals.index(max(totals))
        if totals[rank] > 1.5 * sorted(totals)[len(totals) // 2]:
            return rank, line_of(record[rank], name), cause
    for rank, own in enumerate(record):
        if line_number(own, "recv") < line_number(own, "send"):
            return rank, line_of(own, "send"), "late send"
    raise AssertionError("no fault found")


def line_number(own, name):
    return [row["call"] for row in own].index(name)


def line_of(own, name):
    return own[line_number(own, name)]["line"]


def find_slow__slowest_step(record):
    """The longest single span of all."""
    _, _, cause = right_slow(record)
    _, rank, line = max(
        (seconds(row) / (2 if row["call"] == "forward" else 1), rank, row["line"])
        for rank, own in enumerate(record)
        for row in own
        if row["call"] in ("load", "forward")
    )
    return rank, line, cause


def find_slow__any_step(record):
    """The first rank that takes 1.5 times as long as usual, once."""
    right = right_slow(record)
    for name in ("load", "forward"):
        times = [[seconds(row) for row in own if row["call"] == name] for own in record]
        usual = sorted(t for own in times for t in own)[len(times) * len(times[0]) // 2]
        for rank, own in enumerate(times):
            if max(own) > 1.5 * usual and rank != right[0]:
                return rank, line_of(record[rank], name), right[2]
    return right


def find_slow__waits_most(record):
    """The rank with the most time in calls."""
    _, line, cause = right_slow(record)
    times = [sum(seconds(row) for row in own if is_call(row)) for own in record]
    return times.index(max(times)), line, cause


def find_slow__longest_all_reduce(record):
    """The rank whose all-reduces take longest."""
    _, line, cause = right_slow(record)
    times = [sum(seconds(row) for row in own if row["call"] == "all_reduce") for own in record]
    return times.index(max(times)), line, cause


def is_call(row):
    return row["call"] not in ("load", "forward")


def find_slow__longest_call(record):
    """Of the right rank, the longest call."""
    rank, _, cause = right_slow(record)
    return rank, max((row for row in record[rank] if is_call(row)), key=seconds)["line"], cause


def find_slow__longest_receive(record):
    rank, _, cause = right_slow(record)
    return rank, line_of(record[rank], "recv"), cause


def find_slow__always_compute(record):
    return *right_slow(record)[:2], "slow compute"


def find_slow__always_late(record):
    rank, line, _ = right_slow(record)
    return rank, line, "late send"


def find_wrong__constant(record):
    return 0, 48, "not summed"


def find_wrong__example(record):
    return 1, 50, ["not summed", "divided twice"][len(record) % 2]


def right_wrong(record):
    for k, rows in enumerate(zip(*record)):
        values = [tuple(row["value"]) for row in rows]
        usual = max(values, key=values.count)
        if values.count(usual) == 1:
            continue
        for rank, value in enumerate(values):
            if value != usual:
                return rank, rows[rank]["line"], cause_of(record, rank, k, usual)
    raise AssertionError("no fault found")


def cause_of(record, rank, k, usual):
    row = record[rank][k]
    if row["name"] == "weights":
        return "skipped update"
    if row["value"] == record[rank][k - 1]["value"]:
        return "not summed"
    return "stale gradient" if row["value"] == record[rank][k - 3]["value"] else "divided twice"


def find_wrong__with_rank_zero(record):
    """The first rank that differs from rank 0."""
    _, _, cause = right_wrong(record)
    for rows in zip(*record):
        for rank, row in enumerate(rows):
            if row["name"] != "local gradient" and row["value"] != rows[0]["value"]:
                return rank, row["line"], cause


def find_wrong__with_the_one_before(record):
    """The first rank that differs from the rank before it."""
    _, line, cause = right_wrong(record)
    for rows in zip(*record):
        for rank in range(1, len(rows)):
            if rows[rank]["name"] == "local gradient":
                continue
            if rows[rank]["value"] != rows[rank - 1]["value"]:
                return rank, line, cause


def find_wrong__first_difference(record):
    """The first value that differs at all."""
    _, _, cause = right_wrong(record)
    for rows in zip(*record):
        for rank, row in enumerate(rows):
            if row["value"] != rows[0]["value"]:
                return rank, row["line"], cause


def find_wrong__most_differences(record):
    """The line where the ranks differ most often."""
    rank, _, cause = right_wrong(record)
    lines = [
        rows[0]["line"]
        for rows in zip(*record)
        if any(r["value"] != rows[0]["value"] for r in rows)
    ]
    return rank, max(lines, key=lines.count), cause


def find_wrong__last(record):
    """The last difference that the culprit shows."""
    rank, _, cause = right_wrong(record)
    other = (rank + 1) % len(record)
    for mine, theirs in reversed(list(zip(record[rank], record[other]))):
        if mine["name"] != "local gradient" and mine["value"] != theirs["value"]:
            return rank, mine["line"], cause


def find_wrong__weights_only(record):
    """Looks at the weights, where everything ends up."""
    rank, _, cause = right_wrong(record)
    return rank, next(row["line"] for row in record[rank] if row["name"] == "weights"), cause


def find_wrong__always_own(record):
    return *right_wrong(record)[:2], "not summed"


def find_wrong__always_stale(record):
    rank, line, _ = right_wrong(record)
    return rank, line, "stale gradient"
