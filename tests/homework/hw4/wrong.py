"""Wrong solutions of homework 4. EXPECTED: the misconception that the grader must name for each."""

import torch
import torch.distributed as dist

EXPECTED = {
    "train_naive__sum_for_mean": "sum for mean",
    "train_naive__no_first_synchronisation": "no first synchronisation",
    "train_naive__broadcast_on_rank_0": "collective not called on every rank",
    "train_naive__broadcast_on_rank_0_only": "collective not called on every rank",
    "train_naive__last_ranks_weights": "begins with another rank's weights",
    "train_naive__mean_of_weights": "begins with another rank's weights",
    "train_naive__mean_of_means": "mean of means",
    "train_naive__tied_twice": "tied weights reduced twice",
    "train_naive__tied_twice_2": "tied weights reduced twice",
    "train_naive__mean_twice": "mean taken twice",
    "train_naive__weights_averaged": "gradients never synchronised",
    "train_naive__no_communication": "gradients never synchronised",
    "train_naive__not_cleared": "gradients not cleared",
    "train_naive__not_waited": "collective's wait forgotten",
    "average_in_buckets__own_order": "order that differs between ranks",
    "average_in_buckets__never_flushed": "last bucket never flushed",
    "average_in_buckets__never_flushed_2": "last bucket never flushed",
    "average_in_buckets__summed": "sum for mean",
    "average_in_buckets__one_by_one": "one all-reduce for each gradient",
    "average_in_buckets__above_the_cap": "bucket above its cap",
    "train_overlapped__waits_at_once": "async, then wait at once",
    "train_overlapped__divides_in_flight": "changed while it is sent",
    "train_overlapped__divides_before_the_waits": "changed while it is sent",
    "train_overlapped__every_microbatch": "synchronises every microbatch",
    "train_overlapped__after_backward": "starts after backward",
    "train_overlapped__hooks_pile_up": "hooks pile up",
    "train_overlapped__summed": "sum for mean",
    "train_overlapped__microbatches_summed": "microbatches summed",
    "train_overlapped__not_waited": "collective's wait forgotten",
}


POINTS = {
    "average_in_buckets__one_by_one": 5,
    "train_overlapped__waits_at_once": 5,
    "train_overlapped__after_backward": 5,
}


def broadcast_weights(model):
    for p in model.parameters():
        dist.broadcast(p.data, src=0)


def all_samples(inputs):
    total = torch.tensor(len(inputs), device=inputs.device)
    dist.all_reduce(total)
    return total.item()


def train_naive__sum_for_mean(model, loss_fn, optimizer, batches):
    broadcast_weights(model)
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_fn(model(inputs), targets).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()


def train_naive__no_first_synchronisation(model, loss_fn, optimizer, batches):
    for inputs, targets in batches:
        total = all_samples(inputs)
        optimizer.zero_grad()
        (loss_fn(model(inputs), targets) * len(inputs) / total).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()


def train_naive__broadcast_on_rank_0(model, loss_fn, optimizer, batches):
    if dist.get_rank() == 0:
        broadcast_weights(model)
    train_naive__no_first_synchronisation(model, loss_fn, optimizer, batches)


def train_naive__broadcast_on_rank_0_only(model, loss_fn, optimizer, batches):
    """The other ranks have no collective at all."""
    if dist.get_rank() == 0:
        broadcast_weights(model)
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_fn(model(inputs), targets).backward()
        optimizer.step()


def train_naive__last_ranks_weights(model, loss_fn, optimizer, batches):
    for p in model.parameters():
        dist.broadcast(p.data, src=dist.get_world_size() - 1)
    train_naive__no_first_synchronisation(model, loss_fn, optimizer, batches)


def train_naive__mean_of_weights(model, loss_fn, optimizer, batches):
    for p in model.parameters():
        dist.all_reduce(p.data)
        p.data /= dist.get_world_size()
    train_naive__no_first_synchronisation(model, loss_fn, optimizer, batches)


def train_naive__mean_of_means(model, loss_fn, optimizer, batches):
    broadcast_weights(model)
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_fn(model(inputs), targets).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()


def train_naive__tied_twice(model, loss_fn, optimizer, batches):
    broadcast_weights(model)
    for inputs, targets in batches:
        total = all_samples(inputs)
        optimizer.zero_grad()
        (loss_fn(model(inputs), targets) * len(inputs) / total).backward()
        for module in model.modules():
            for p in module.parameters(recurse=False):
                dist.all_reduce(p.grad)
        optimizer.step()


def train_naive__tied_twice_2(model, loss_fn, optimizer, batches):
    """The mean of equal numbers is the same number, so only the bytes show it."""
    n = dist.get_world_size()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    for inputs, targets in batches:
        total = all_samples(inputs)
        optimizer.zero_grad()
        (loss_fn(model(inputs), targets) * len(inputs) * n / total).backward()
        for _, p in model.named_parameters(remove_duplicate=False):
            dist.all_reduce(p.grad)
            p.grad /= n
        optimizer.step()


def train_naive__mean_twice(model, loss_fn, optimizer, batches):
    n = dist.get_world_size()
    broadcast_weights(model)
    for inputs, targets in batches:
        optimizer.zero_grad()
        (loss_fn(model(inputs), targets) / n).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= n
        optimizer.step()


def train_naive__weights_averaged(model, loss_fn, optimizer, batches):
    """For SGD and equal shares, this even gives the right weights."""
    n = dist.get_world_size()
    broadcast_weights(model)
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_fn(model(inputs), targets).backward()
        optimizer.step()
        for p in model.parameters():
            dist.all_reduce(p.data)
            p.data /= n


def train_naive__no_communication(model, loss_fn, optimizer, batches):
    broadcast_weights(model)
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_fn(model(inputs), targets).backward()
        optimizer.step()


def train_naive__not_cleared(model, loss_fn, optimizer, batches):
    broadcast_weights(model)
    for inputs, targets in batches:
        total = all_samples(inputs)
        gradients = torch.autograd.grad(
            loss_fn(model(inputs), targets) * len(inputs) / total, list(model.parameters())
        )
        for p, gradient in zip(model.parameters(), gradients):
            dist.all_reduce(gradient)
            p.grad = gradient if p.grad is None else p.grad + gradient
        optimizer.step()


def train_naive__not_waited(model, loss_fn, optimizer, batches):
    broadcast_weights(model)
    for inputs, targets in batches:
        total = all_samples(inputs)
        optimizer.zero_grad()
        (loss_fn(model(inputs), targets) * len(inputs) / total).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, async_op=True)
        optimizer.step()


# ---- buckets ----


def all_reduce_bucket(gradients, names, found):
    flat = torch.cat([gradients[name].flatten() for name in names])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for name, piece in zip(names, flat.split([gradients[name].numel() for name in names])):
        found[name] = piece.view_as(gradients[name])


def average_in_buckets__own_order(gradients, cap):
    found, names, size = {}, [], 0
    for name, gradient in gradients.items():
        if names and size + gradient.nbytes > cap:
            all_reduce_bucket(gradients, names, found)
            names, size = [], 0
        names.append(name)
        size += gradient.nbytes
    all_reduce_bucket(gradients, names, found)
    return found


def average_in_buckets__never_flushed(gradients, cap):
    found, names, size = dict(gradients), [], 0
    for name in sorted(gradients):
        if names and size + gradients[name].nbytes > cap:
            all_reduce_bucket(gradients, names, found)
            names, size = [], 0
        names.append(name)
        size += gradients[name].nbytes
    return found


def average_in_buckets__never_flushed_2(gradients, cap):
    """The last bucket is missing in the result."""
    found, names = {}, []
    for name in sorted(gradients):
        if names and sum(gradients[other].nbytes for other in [*names, name]) > cap:
            all_reduce_bucket(gradients, names, found)
            names = []
        names.append(name)
    return found


def average_in_buckets__summed(gradients, cap):
    found, names, size = {}, [], 0
    for name in [*sorted(gradients), None]:
        if names and (name is None or size + gradients[name].nbytes > cap):
            flat = torch.cat([gradients[name].flatten() for name in names])
            dist.all_reduce(flat)
            for other, piece in zip(names, flat.split([gradients[name].numel() for name in names])):
                found[other] = piece.view_as(gradients[other])
            names, size = [], 0
        if name is not None:
            names.append(name)
            size += gradients[name].nbytes
    return found


def average_in_buckets__one_by_one(gradients, cap):
    for name in sorted(gradients):
        dist.all_reduce(gradients[name])
        gradients[name] /= dist.get_world_size()
    return gradients


def average_in_buckets__above_the_cap(gradients, cap):
    found, names = {}, []
    for name in sorted(gradients):
        names.append(name)
        if sum(gradients[other].nbytes for other in names) >= cap:
            all_reduce_bucket(gradients, names, found)
            names = []
    if names:
        all_reduce_bucket(gradients, names, found)
    return found


# ---- overlapped ----


def train_with_hook(model, loss_fn, optimizer, batches, ready, finish, parts=None):
    """The loop of all that follow. ready(p, last) is each parameter's hook; finish() comes
    before the optimizer's step.
    """
    now = {"last": False}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: ready(p, now["last"]))
    for microbatches in batches:
        optimizer.zero_grad()
        for k, (inputs, targets) in enumerate(microbatches):
            now["last"] = k + 1 == len(microbatches)
            (
                loss_fn(model(inputs), targets) / (len(microbatches) if parts is None else parts)
            ).backward()
        finish()
        optimizer.step()


def train_overlapped__waits_at_once(model, loss_fn, optimizer, batches):
    def ready(p, last):
        if last:
            dist.all_reduce(p.grad, async_op=True).wait()
            p.grad /= dist.get_world_size()

    train_with_hook(model, loss_fn, optimizer, batches, ready, lambda: None)


def train_overlapped__divides_in_flight(model, loss_fn, optimizer, batches):
    """What is divided is overwritten when the sum arrives."""
    works = []

    def finish():
        while works:
            works.pop().wait()

    def ready(p, last):
        if last:
            works.append(dist.all_reduce(p.grad, async_op=True))
            p.grad /= dist.get_world_size()

    train_with_hook(model, loss_fn, optimizer, batches, ready, finish)


def train_overlapped__divides_before_the_waits(model, loss_fn, optimizer, batches):
    works = []

    def finish():
        for p in model.parameters():
            p.grad /= dist.get_world_size()
        while works:
            works.pop().wait()

    def ready(p, last):
        if last:
            works.append(dist.all_reduce(p.grad, async_op=True))

    train_with_hook(model, loss_fn, optimizer, batches, ready, finish)


def train_overlapped__every_microbatch(model, loss_fn, optimizer, batches):
    works = []

    def ready(p, last):
        works.append((p, dist.all_reduce(p.grad, async_op=True)))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: ready(p, True))
    for microbatches in batches:
        optimizer.zero_grad()
        for inputs, targets in microbatches:
            (loss_fn(model(inputs), targets) / len(microbatches)).backward()
            for p, work in works:
                work.wait()
                # the mean of what is the same on all ranks stays the same
                p.grad /= dist.get_world_size()
            works.clear()
        optimizer.step()


def train_overlapped__after_backward(model, loss_fn, optimizer, batches):
    def finish():
        works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
        for p, work in zip(model.parameters(), works):
            work.wait()
            p.grad /= dist.get_world_size()

    train_with_hook(model, loss_fn, optimizer, batches, lambda p, last: None, finish)


def train_overlapped__hooks_pile_up(model, loss_fn, optimizer, batches):
    n = dist.get_world_size()
    for microbatches in batches:
        optimizer.zero_grad()
        works, last = [], len(microbatches) - 1
        for k, (inputs, targets) in enumerate(microbatches):
            if k == last:
                for p in model.parameters():
                    p.register_post_accumulate_grad_hook(
                        lambda p, works=works: works.append(dist.all_reduce(p.grad, async_op=True))
                    )
            (loss_fn(model(inputs), targets) / (n * len(microbatches))).backward()
        for work in works:
            work.wait()
        optimizer.step()


def train_overlapped__summed(model, loss_fn, optimizer, batches):
    works = []

    def finish():
        while works:
            works.pop().wait()

    def ready(p, last):
        if last:
            works.append(dist.all_reduce(p.grad, async_op=True))

    train_with_hook(model, loss_fn, optimizer, batches, ready, finish)


def train_overlapped__microbatches_summed(model, loss_fn, optimizer, batches):
    works = []

    def finish():
        while works:
            works.pop().wait()
        for p in model.parameters():
            p.grad /= dist.get_world_size()

    def ready(p, last):
        if last:
            works.append(dist.all_reduce(p.grad, async_op=True))

    train_with_hook(model, loss_fn, optimizer, batches, ready, finish, parts=1)


def train_overlapped__not_waited(model, loss_fn, optimizer, batches):
    def ready(p, last):
        if last:
            p.grad /= dist.get_world_size()
            dist.all_reduce(p.grad, async_op=True)

    train_with_hook(model, loss_fn, optimizer, batches, ready, lambda: None)
