"""Wrong solutions of homework 4. EXPECTED: the misconception that the grader must name for each."""

import torch
import torch.distributed as dist

EXPECTED = {
    "train_naive__sum_for_mean": "sum for mean",
    "train_naive__sum_for_mean_2": "sum for mean",
    "train_naive__sum_for_mean_3": "sum for mean",
    "train_naive__no_first_synchronisation": "no first synchronisation",
    "train_naive__no_first_synchronisation_2": "no first synchronisation",
    "train_naive__no_first_synchronisation_3": "no first synchronisation",
    "train_naive__mean_of_means": "mean of means",
    "train_naive__mean_of_means_2": "mean of means",
    "train_naive__mean_of_means_3": "mean of means",
    "train_naive__tied_twice": "tied weights reduced twice",
    "train_naive__tied_twice_2": "tied weights reduced twice",
    "train_naive__tied_twice_3": "tied weights reduced twice",
    "train_naive__mean_twice": "mean taken twice",
    "train_naive__weights_averaged": "gradients never synchronised",
    "train_naive__no_communication": "gradients never synchronised",
    "train_naive__not_cleared": "gradients not cleared",
    "train_naive__not_cleared_2": "gradients not cleared",
    "train_naive__not_waited": "collective's wait forgotten",
    "average_in_buckets__own_order": "order that differs between ranks",
    "average_in_buckets__own_order_2": "order that differs between ranks",
    "average_in_buckets__own_order_3": "order that differs between ranks",
    "average_in_buckets__never_flushed": "last bucket never flushed",
    "average_in_buckets__never_flushed_2": "last bucket never flushed",
    "average_in_buckets__never_flushed_3": "last bucket never flushed",
    "average_in_buckets__summed": "sum for mean",
    "average_in_buckets__one_by_one": "one all-reduce for each gradient",
    "average_in_buckets__above_the_cap": "bucket above its cap",
    "train_overlapped__waits_at_once": "async, then wait at once",
    "train_overlapped__waits_at_once_2": "async, then wait at once",
    "train_overlapped__waits_at_once_3": "async, then wait at once",
    "train_overlapped__every_microbatch": "synchronises every microbatch",
    "train_overlapped__every_microbatch_2": "synchronises every microbatch",
    "train_overlapped__every_microbatch_3": "synchronises every microbatch",
    "train_overlapped__after_backward": "starts after backward",
    "train_overlapped__after_backward_2": "starts after backward",
    "train_overlapped__hooks_pile_up": "hooks pile up",
    "train_overlapped__summed": "sum for mean",
    "train_overlapped__summed_2": "sum for mean",
    "train_overlapped__microbatches_summed": "microbatches summed",
    "train_overlapped__not_waited": "collective's wait forgotten",
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


def train_naive__sum_for_mean_2(model, loss_fn, optimizer, batches):
    """Knows the counts, and weights the shares by their length against the mean length."""
    n = dist.get_world_size()
    broadcast_weights(model)
    for inputs, targets in batches:
        mean_length = all_samples(inputs) / n
        optimizer.zero_grad()
        (loss_fn(model(inputs), targets) * (len(inputs) / mean_length)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
        optimizer.step()


def train_naive__sum_for_mean_3(model, loss_fn, optimizer, batches):
    """One flat all-gather, and a sum."""
    n = dist.get_world_size()
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    for inputs, targets in batches:
        gradients = torch.autograd.grad(loss_fn(model(inputs), targets), list(model.parameters()))
        for p, gradient in zip(model.parameters(), gradients):
            copies = [torch.empty_like(gradient) for _ in range(n)]
            dist.all_gather(copies, gradient.contiguous())
            p.grad = torch.stack(copies).sum(dim=0)
        optimizer.step()


def train_naive__no_first_synchronisation(model, loss_fn, optimizer, batches):
    for inputs, targets in batches:
        total = all_samples(inputs)
        optimizer.zero_grad()
        (loss_fn(model(inputs), targets) * len(inputs) / total).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()


def train_naive__no_first_synchronisation_2(model, loss_fn, optimizer, batches):
    """Seeds alike, and believes that the weights are then alike."""
    torch.manual_seed(0)
    for inputs, targets in batches:
        n = dist.get_world_size()
        optimizer.zero_grad()
        loss_fn(model(inputs), targets).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= n
        optimizer.step()


def train_naive__no_first_synchronisation_3(model, loss_fn, optimizer, batches):
    """Broadcasts copies, and drops them."""
    for p in model.parameters():
        dist.broadcast(p.detach().clone(), src=0)
    for inputs, targets in batches:
        total = all_samples(inputs)
        optimizer.zero_grad()
        loss_fn(model(inputs), targets).backward()
        for p in model.parameters():
            p.grad.mul_(len(inputs) / total)
            dist.all_reduce(p.grad)
        optimizer.step()


def train_naive__mean_of_means(model, loss_fn, optimizer, batches):
    broadcast_weights(model)
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss_fn(model(inputs), targets).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()


def train_naive__mean_of_means_2(model, loss_fn, optimizer, batches):
    broadcast_weights(model)
    for inputs, targets in batches:
        optimizer.zero_grad()
        (loss_fn(model(inputs), targets) / dist.get_world_size()).backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(flat)
        torch.nn.utils.vector_to_parameters(flat, [p.grad for p in model.parameters()])
        optimizer.step()


def train_naive__mean_of_means_3(model, loss_fn, optimizer, batches):
    """Sums over its samples and divides by the samples of its own share."""
    broadcast_weights(model)
    for inputs, targets in batches:
        optimizer.zero_grad()
        sum(loss_fn(model(x[None]), y[None]) for x, y in zip(inputs, targets)).backward()
        for p in model.parameters():
            p.grad /= len(inputs) * dist.get_world_size()
            dist.all_reduce(p.grad)
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


def train_naive__tied_twice_3(model, loss_fn, optimizer, batches):
    """Flat: the tied gradient has two places, and the sum of both is kept."""
    names = dict(model.named_parameters(remove_duplicate=False))
    broadcast_weights(model)
    for inputs, targets in batches:
        total = all_samples(inputs)
        optimizer.zero_grad()
        (loss_fn(model(inputs), targets) * len(inputs) / total).backward()
        flat = torch.cat([p.grad.flatten() for p in names.values()])
        dist.all_reduce(flat)
        for p in names.values():
            p.grad = torch.zeros_like(p)
        for p, piece in zip(names.values(), flat.split([p.numel() for p in names.values()])):
            p.grad += piece.view_as(p)
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


def train_naive__not_cleared_2(model, loss_fn, optimizer, batches):
    """The sum of the step before is in p.grad when backward adds to it, and is summed over the
    ranks once more.
    """
    broadcast_weights(model)
    for inputs, targets in batches:
        (loss_fn(model(inputs), targets) * len(inputs) / all_samples(inputs)).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
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


def average_in_buckets__own_order_2(gradients, cap):
    """Reverses what each rank has, as if all had the same."""
    names = list(gradients)[::-1]
    while names:
        end = 1
        while end < len(names) and sum(gradients[name].nbytes for name in names[: end + 1]) <= cap:
            end += 1
        flat = torch.cat([gradients[name].flatten() for name in names[:end]])
        dist.all_reduce(flat)
        start = 0
        for name in names[:end]:
            gradients[name].copy_(
                flat[start : start + gradients[name].numel()].view_as(gradients[name])
                / dist.get_world_size()
            )
            start += gradients[name].numel()
        names = names[end:]
    return gradients


def average_in_buckets__own_order_3(gradients, cap):
    """One long flat tensor, cut at the cap wherever that falls."""
    flat = torch.cat([gradient.flatten() for gradient in gradients.values()])
    for piece in flat.split(max(1, cap // flat.element_size())):
        dist.all_reduce(piece)
    flat /= dist.get_world_size()
    found, start = {}, 0
    for name, gradient in gradients.items():
        found[name] = flat[start : start + gradient.numel()].view_as(gradient)
        start += gradient.numel()
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


def average_in_buckets__never_flushed_3(gradients, cap):
    """Divides all of them beforehand, and leaves out the last bucket of its list."""
    n, names = dist.get_world_size(), sorted(gradients, reverse=True)
    buckets = [[]]
    for name in names:
        if (
            buckets[-1]
            and sum(gradients[other].nbytes for other in buckets[-1]) + gradients[name].nbytes > cap
        ):
            buckets.append([])
        buckets[-1].append(name)
    for gradient in gradients.values():
        gradient /= n
    for bucket in buckets[:-1]:
        flat = torch.cat([gradients[name].reshape(-1) for name in bucket])
        dist.all_reduce(flat)
        for name, piece in zip(bucket, flat.split([gradients[name].numel() for name in bucket])):
            gradients[name] = piece.reshape(gradients[name].shape)
    return gradients


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


def train_overlapped__waits_at_once_2(model, loss_fn, optimizer, batches):
    """No async_op at all."""

    def ready(p, last):
        if last:
            p.grad /= dist.get_world_size()
            dist.all_reduce(p.grad)

    train_with_hook(model, loss_fn, optimizer, batches, ready, lambda: None)


def train_overlapped__waits_at_once_3(model, loss_fn, optimizer, batches):
    """Collects works, but asks for each result in the same hook."""
    works = []

    def ready(p, last):
        if last:
            works.append(dist.all_reduce(p.grad, async_op=True))
            while not works[-1].is_completed():
                works[-1].wait()

    def finish():
        for p in model.parameters():
            p.grad /= dist.get_world_size()

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


def train_overlapped__every_microbatch_2(model, loss_fn, optimizer, batches):
    """Sums: what was reduced after one microbatch is multiplied by n after the next."""
    n = dist.get_world_size()
    for microbatches in batches:
        optimizer.zero_grad()
        for inputs, targets in microbatches:
            (loss_fn(model(inputs), targets) / (n * len(microbatches))).backward()
            for work in [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]:
                work.wait()
        optimizer.step()


def train_overlapped__every_microbatch_3(model, loss_fn, optimizer, batches):
    """Reduces each microbatch's own gradient, and adds up the means."""
    n = dist.get_world_size()
    for microbatches in batches:
        sums = {p: torch.zeros_like(p) for p in model.parameters()}
        works = []
        for inputs, targets in microbatches:
            gradients = torch.autograd.grad(
                loss_fn(model(inputs), targets) / len(microbatches), list(sums)
            )
            works += [
                (p, gradient, dist.all_reduce(gradient, async_op=True))
                for p, gradient in zip(sums, gradients)
            ]
        for p, gradient, work in works:
            work.wait()
            sums[p] += gradient / n
        for p, total in sums.items():
            p.grad = total
        optimizer.step()


def train_overlapped__after_backward(model, loss_fn, optimizer, batches):
    def finish():
        works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
        for p, work in zip(model.parameters(), works):
            work.wait()
            p.grad /= dist.get_world_size()

    train_with_hook(model, loss_fn, optimizer, batches, lambda p, last: None, finish)


def train_overlapped__after_backward_2(model, loss_fn, optimizer, batches):
    """One bucket for all: it is full when backward has ended."""
    open_bucket, parameters = [], list(model.parameters())

    def ready(p, last):
        if not last:
            return
        open_bucket.append(p)
        if len(open_bucket) == len(parameters):
            flat = torch.cat([p.grad.flatten() for p in open_bucket])
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
            for p, piece in zip(open_bucket, flat.split([p.numel() for p in open_bucket])):
                p.grad.copy_(piece.view_as(p))
            open_bucket.clear()

    train_with_hook(model, loss_fn, optimizer, batches, ready, lambda: None)


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


def train_overlapped__summed_2(model, loss_fn, optimizer, batches):
    """Sums over the microbatches too."""
    works = []

    def finish():
        while works:
            works.pop().wait()

    def ready(p, last):
        if last:
            works.append(dist.all_reduce(p.grad, async_op=True))

    train_with_hook(model, loss_fn, optimizer, batches, ready, finish, parts=1)


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
