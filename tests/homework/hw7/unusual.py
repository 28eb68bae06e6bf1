"""Odd but correct solutions of homework 7: they keep full points."""

import torch
import torch.distributed as dist


def neighbours():
    rank, n = dist.get_rank(), dist.get_world_size()
    return rank, rank - 1 if rank else None, rank + 1 if rank < n - 1 else None


def gpipe_step__receives_posted_ahead(stage, inputs, targets, loss_fn, shape, microbatches):
    """All receives are posted before the first forward, and backwards go from the last
    microbatch to the first.
    """
    _, before, after = neighbours()
    xs = [torch.empty(shape, dtype=torch.float64) for _ in range(microbatches)]
    gradients = [torch.empty(shape, dtype=torch.float64) for _ in range(microbatches)]
    arriving = (
        [dist.irecv(x, before, tag=i) for i, x in enumerate(xs)] if before is not None else []
    )
    returning = (
        [dist.irecv(g, after, tag=100 + i) for i, g in enumerate(gradients)]
        if after is not None
        else []
    )
    works, ys = [], []
    for i in range(microbatches):
        if arriving:
            arriving[i].wait()
        else:
            xs[i] = inputs[i].clone()
        ys.append(stage(xs[i].requires_grad_()))
        if after is not None:
            works.append(dist.isend(ys[-1].detach(), after, tag=i))
    losses = (
        [loss_fn(y, target) for y, target in zip(ys, targets, strict=True)] if after is None else []
    )
    for i in reversed(range(microbatches)):
        if after is None:
            (losses[i] / microbatches).backward()
        else:
            returning[i].wait()
            torch.autograd.backward([ys[i]], [gradients[i]])
        if before is not None:
            works.append(dist.isend(xs[i].grad, before, tag=100 + i))
    for work in works:
        work.wait()
    return torch.stack(losses).mean().detach() if losses else None


def one_f_one_b_step__batches(stage, inputs, targets, loss_fn, shape, microbatches):
    """In the steady state a gradient and an activation are exchanged with a neighbour in one
    batch, as Megatron does.
    """
    rank, before, after = neighbours()
    n = dist.get_world_size()
    warm_up = min(microbatches, n - rank)
    held, works, losses = [], [], []

    def receive(peer):
        tensor = torch.empty(shape, dtype=torch.float64)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensor, peer)]):
            work.wait()
        return tensor

    def send(tensor, peer):
        works.extend(dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, peer)]))

    done = 0
    for i in range(microbatches + warm_up):
        if i >= warm_up:
            x, y = held.pop(0)
            y.backward(receive(after) if after is not None else None)
            if before is not None:
                send(x.grad, before)
        if done < microbatches:
            x = inputs[done] if before is None else receive(before).requires_grad_()
            y = stage(x)
            if after is None:
                y = loss_fn(y, targets[done]) / microbatches
                losses.append(y.item())
            else:
                send(y.detach(), after)
            held.append((x, y))
            done += 1
    for work in works:
        work.wait()
    return torch.tensor(sum(losses), dtype=torch.float64) if losses else None


def interleaved_schedule__simulated(rank, ranks, microbatches, chunks):
    """The order comes from a simulation: a backward as soon as there is one, otherwise the next
    forward of the usual sequence.
    """
    last = ranks * chunks - 1
    sequence = [
        (group * ranks + i, chunk * ranks)
        for group in range(microbatches // ranks)
        for chunk in range(chunks)
        for i in range(ranks)
    ]
    limit = [
        (chunks - 1) * ranks + 2 * (ranks - r - 1) + 1 if chunks > 1 else ranks - r
        for r in range(ranks)
    ]
    back = [(i, (chunks - 1) * ranks - first) for i, first in sequence]
    forwards, backwards = [0] * ranks, [0] * ranks
    done, orders, slot = {}, [[] for _ in range(ranks)], 0
    while any(b < len(back) for b in backwards):
        new = {}
        for r in range(ranks):
            if backwards[r] < len(back):
                i, first = back[backwards[r]]
                stage = first + r
                ready = ("F", stage, i) in done and (stage == last or ("B", stage + 1, i) in done)
                if ready and (
                    forwards[r] - backwards[r] >= limit[r] or forwards[r] == len(sequence)
                ):
                    new["B", stage, i] = slot
                    orders[r].append(f"{stage}B{i}")
                    backwards[r] += 1
                    continue
            if forwards[r] < len(sequence) and forwards[r] - backwards[r] < limit[r]:
                i, first = sequence[forwards[r]]
                stage = first + r
                if stage == 0 or ("F", stage - 1, i) in done:
                    new["F", stage, i] = slot
                    orders[r].append(f"{stage}F{i}")
                    forwards[r] += 1
        done |= new
        slot += 1
    return orders[rank]


def zero_bubble_step__weights_when_idle(
    stage, inputs, targets, loss_fn, shape, microbatches, optimizer
):
    """Weight gradients run whenever the next gradient has not arrived, and P − 1 of them may be
    left for the end.
    """
    rank, before, after = neighbours()
    n = dist.get_world_size()
    losses, works, ys = [], [], {}
    warm_up = min(microbatches, n - rank)
    left = []

    def forward(i):
        if before is None:
            x = inputs[i]
        else:
            x = torch.empty(shape, dtype=torch.float64)
            dist.recv(x, before)
        ys[i] = stage.forward(i, x)
        if after is not None:
            works.append(dist.isend(ys[i], after))

    for i in range(warm_up):
        forward(i)
    for i in range(microbatches):
        if after is None:
            y = ys[i].requires_grad_()
            loss_fn(y, targets[i]).div(microbatches).backward()
            losses.append(loss_fn(y, targets[i]).detach())
            dy = y.grad
        else:
            dy = torch.empty(shape, dtype=torch.float64)
            arriving = dist.irecv(dy, after)
            arriving.wait()
        dx = stage.input_gradient(i, dy)
        if before is not None:
            works.append(dist.isend(dx, before))
        left.append(i)
        while len(left) > rank:
            stage.weight_gradient(left.pop(0))
        if i + warm_up < microbatches:
            forward(i + warm_up)
    for i in left:
        stage.weight_gradient(i)
    optimizer.step()
    for work in works:
        work.wait()
    return torch.stack(losses).mean() if losses else None
