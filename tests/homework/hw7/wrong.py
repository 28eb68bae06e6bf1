"""Wrong solutions of homework 7. A comment above each says what must be named."""

import torch
import torch.distributed as dist


class Run:
    """A stage with its messages. Each wrong solution changes one thing."""

    def __init__(self, stage, inputs, targets, loss_fn, shape, microbatches, scale=None):
        self.stage, self.inputs, self.targets, self.loss_fn, self.shape = (
            stage,
            inputs,
            targets,
            loss_fn,
            shape,
        )
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        self.scale = 1 / microbatches if scale is None else scale
        self.held, self.sends, self.losses = {}, [], []

    def receive(self, peer):
        tensor = torch.zeros(self.shape, dtype=torch.float64)
        dist.recv(tensor, peer)
        return tensor

    def send(self, tensor, peer):
        self.sends.append((dist.isend(tensor, peer), tensor))

    def forward(self, i):
        x = self.inputs[i] if self.rank == 0 else self.receive(self.rank - 1).requires_grad_()
        y = self.stage(x)
        if self.rank == self.last:
            y = self.loss_fn(y, self.targets[i]) * self.scale
            self.losses.append(y.detach())
        else:
            self.send(y.detach(), self.rank + 1)
        self.held[i] = x, y

    def backward(self, i):
        x, y = self.held.pop(i)
        y.backward(None if self.rank == self.last else self.receive(self.rank + 1))
        if self.rank:
            self.send(x.grad, self.rank - 1)

    def end(self):
        for work, _ in self.sends:
            work.wait()
        return sum(self.losses) if self.losses else None


def all_then_all(run, microbatches):
    for i in range(microbatches):
        run.forward(i)
    for i in range(microbatches):
        run.backward(i)
    return run.end()


def one_at_a_time(run, microbatches):
    for i in range(microbatches):
        run.forward(i)
        run.backward(i)
    return run.end()


def forwards_only(run, microbatches):
    for i in range(microbatches):
        run.forward(i)
    return run.end()


def alternating(run, microbatches, warm_up):
    warm_up = min(microbatches, max(1, warm_up))
    for i in range(warm_up):
        run.forward(i)
    for i in range(microbatches):
        run.backward(i)
        if i + warm_up < microbatches:
            run.forward(i + warm_up)
    return run.end()


# named: no 1/M
def gpipe_step__no_average(*arguments):
    return all_then_all(Run(*arguments, scale=1.0), arguments[-1])


# named: no pipelining (4 points)
def gpipe_step__one_at_a_time(*arguments):
    return one_at_a_time(Run(*arguments), arguments[-1])


# named: - (0 points)
def gpipe_step__nothing(*arguments):
    return None


# named: -
def gpipe_step__no_backward(*arguments):
    return forwards_only(Run(*arguments), arguments[-1])


# named: only the last microbatch's gradient
def gpipe_step__last_only(stage, *rest):
    run, microbatches = Run(stage, *rest), rest[-1]
    for i in range(microbatches):
        run.forward(i)
    for i in range(microbatches):
        stage.zero_grad()
        run.backward(i)
    return run.end()


# named: graph detached
def gpipe_step__detached(*arguments):
    """Every rank calls backward only if it has a loss."""
    run, microbatches = Run(*arguments), arguments[-1]
    for i in range(microbatches):
        run.forward(i)
    for i in range(microbatches):
        _, y = run.held[i]
        if run.rank == run.last:
            y.backward()
    return run.end()


# named: graph detached
def gpipe_step__detached_2(*arguments):
    """The received activation doesn't require grad, so its .grad is None, and sending that
    raises.
    """

    class Detached(Run):
        def forward(self, i):
            super().forward(i)
            x, y = self.held[i]
            self.held[i] = x.detach(), y

    return all_then_all(Detached(*arguments), arguments[-1])


# named: receive's wait forgotten
def gpipe_step__wait_forgotten(*arguments):
    class Hasty(Run):
        def receive(self, peer):
            tensor = torch.zeros(self.shape, dtype=torch.float64)
            dist.irecv(tensor, peer)
            return tensor

    return all_then_all(Hasty(*arguments), arguments[-1])


# named: GPipe with a new name (5 points)
def one_f_one_b_step__gpipe(*arguments):
    return all_then_all(Run(*arguments), arguments[-1])


# named: no pipelining (3 points)
def one_f_one_b_step__one_at_a_time(*arguments):
    return one_at_a_time(Run(*arguments), arguments[-1])


# named: -
def one_f_one_b_step__no_backward(*arguments):
    return forwards_only(Run(*arguments), arguments[-1])


# named: - (0 points)
def one_f_one_b_step__more_ranks_than_microbatches(*arguments):
    """The warm-up has P − rank − 1 forwards, however few microbatches there are."""
    run, microbatches = Run(*arguments), arguments[-1]
    warm_up = run.last - run.rank
    for i in range(warm_up):
        run.forward(i)
    for i in range(microbatches):
        if i + warm_up < microbatches:
            run.forward(i + warm_up)
        run.backward(i)
    return run.end()


# named: warm-up off by one
def one_f_one_b_step__one_less(*arguments):
    run = Run(*arguments)
    return alternating(run, arguments[-1], run.last - run.rank)


def interleaved(
    rank, ranks, microbatches, chunks, stage=None, warm_up=None, more=0, back=lambda c, v: v - 1 - c
):
    stage = stage or (lambda chunk: chunk * ranks + rank)
    total = microbatches * chunks

    def action(k, kind):
        group, inside = divmod(k, ranks * chunks)
        chunk, i = divmod(inside, ranks)
        chunk = chunk if kind == "F" else back(chunk, chunks)
        return f"{stage(chunk)}{kind}{group * ranks + i}"

    usual = (chunks - 1) * ranks + 2 * (ranks - rank - 1) + 1 if chunks > 1 else ranks - rank
    warm_up = min(total, max(1, usual + more) if warm_up is None else warm_up)
    order = [action(k, "F") for k in range(warm_up)]
    for k in range(total):
        order += [action(k, "B")] + ([action(k + warm_up, "F")] if k + warm_up < total else [])
    return order


# named: wrong chunk map
def interleaved_schedule__neighbouring_stages(rank, ranks, microbatches, chunks):
    return interleaved(rank, ranks, microbatches, chunks, lambda chunk: rank * chunks + chunk)


# named: GPipe with a new name (3 points)
def interleaved_schedule__all_forwards(rank, ranks, microbatches, chunks):
    mine = range(rank, ranks * chunks, ranks)
    forwards = [f"{stage}F{i}" for stage in mine for i in range(microbatches)]
    return forwards + [f"{stage}B{i}" for stage in reversed(mine) for i in range(microbatches)]


# named: warm-up of one chunk
def interleaved_schedule__short_warm_up(rank, ranks, microbatches, chunks):
    return interleaved(
        rank, ranks, microbatches, chunks, lambda chunk: chunk * ranks + rank, warm_up=ranks - rank
    )


# named: no pipelining (1 point)
def interleaved_schedule__one_at_a_time(rank, ranks, microbatches, chunks):
    mine = range(rank, ranks * chunks, ranks)
    order = []
    for i in range(microbatches):
        order += [f"{stage}F{i}" for stage in mine] + [f"{stage}B{i}" for stage in reversed(mine)]
    return order


# named: chunks in the wrong order
def interleaved_schedule__backward_from_the_first_chunk(*sizes):
    return interleaved(*sizes, back=lambda chunk, chunks: chunk)


# named: warm-up off by one
def interleaved_schedule__one_less(*sizes):
    return interleaved(*sizes, more=-1)


# named: -
def interleaved_schedule__twice(*sizes):
    order = interleaved(*sizes)
    return [*order, order[0]]


def split_step(
    stage, inputs, targets, loss_fn, shape, microbatches, delay, before_the_last_weights=None
):
    run = Run(stage, inputs, targets, loss_fn, shape, microbatches)
    outputs = {}

    def forward(i):
        outputs[i] = stage.forward(i, inputs[i] if run.rank == 0 else run.receive(run.rank - 1))
        if run.rank < run.last:
            run.send(outputs[i], run.rank + 1)

    def input_gradient(i):
        if run.rank == run.last:
            y = outputs[i].clone().requires_grad_()
            loss = loss_fn(y, targets[i]) / microbatches
            run.losses.append(loss.detach())
            (dy,) = torch.autograd.grad(loss, y)
        else:
            dy = run.receive(run.rank + 1)
        dx = stage.input_gradient(i, dy)
        if run.rank:
            run.send(dx, run.rank - 1)

    warm_up = min(microbatches, run.last + 1 - run.rank)
    for i in range(warm_up):
        forward(i)
    for i in range(microbatches):
        input_gradient(i)
        if i >= delay:
            stage.weight_gradient(i - delay)
        if i + warm_up < microbatches:
            forward(i + warm_up)
    if before_the_last_weights is not None:
        before_the_last_weights()
    for i in range(max(0, microbatches - delay), microbatches):
        stage.weight_gradient(i)
    return run.end()


# named: optimizer steps before W is done
def zero_bubble_step__step_before_w(
    stage, inputs, targets, loss_fn, shape, microbatches, optimizer
):
    return split_step(
        stage, inputs, targets, loss_fn, shape, microbatches, dist.get_rank(), optimizer.step
    )


# named: W right after B (1.5 points)
def zero_bubble_step__w_right_after_b(
    stage, inputs, targets, loss_fn, shape, microbatches, optimizer
):
    loss = split_step(stage, inputs, targets, loss_fn, shape, microbatches, 0)
    optimizer.step()
    return loss


# named: no pipelining (1.5 points)
def zero_bubble_step__one_at_a_time(
    stage, inputs, targets, loss_fn, shape, microbatches, optimizer
):
    run = Run(stage, inputs, targets, loss_fn, shape, microbatches)
    for i in range(microbatches):
        y = stage.forward(i, inputs[i] if run.rank == 0 else run.receive(run.rank - 1))
        if run.rank < run.last:
            run.send(y, run.rank + 1)
            dy = run.receive(run.rank + 1)
        else:
            y.requires_grad_()
            run.losses.append(loss_fn(y, targets[i]) / microbatches)
            (dy,) = torch.autograd.grad(run.losses[-1], y)
        dx = stage.input_gradient(i, dy)
        if run.rank:
            run.send(dx, run.rank - 1)
        stage.weight_gradient(i)
    optimizer.step()
    loss = run.end()
    return loss if loss is None else loss.detach()


# named: - (0 points)
def zero_bubble_step__nothing(*arguments):
    return None


# named: - (0 points)
def zero_bubble_step__more_ranks_than_microbatches(
    stage, inputs, targets, loss_fn, shape, microbatches, optimizer
):
    """It takes `rank` weight gradients to be left at the end, though there may be fewer."""
    rank = dist.get_rank()
    loss = split_step(stage, inputs, targets, loss_fn, shape, microbatches, rank)
    for i in range(microbatches - rank, 0):
        stage.weight_gradient(i)
    optimizer.step()
    return loss
