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
        gradients = torch.autograd.grad(loss_fn(model(inputs), targets) * len(inputs) / total, list(model.parameters()))
        for p, gradient in zip(model.parameters(), gradients):
            dist.all_reduce(gradient)
            p.grad = gradient if p.grad is None else p.grad + gradient
        optimizer.step()
