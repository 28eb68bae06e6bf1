"""A mixture of experts: many feed-forward networks, of which each token uses only a few.

              ┌─▶ expert 0 ──────────┐                  the router chooses top_k of the E experts;
    x ─ router                       + ─▶ y             here 0 and 2, with probabilities .6 and .3:
              └─▶ expert 2 ──────────┘                  y = .6 · expert₀(x) + .3 · expert₂(x)

So the model has E times the parameters of one feed-forward network, and a token's forward costs
top_k times that of one. What a token uses depends on the token alone, and what is dropped and the
balancing loss depend on its sequence alone: neither changes if a batch is cut into microbatches.

Sources: Fedus et al., "Switch Transformers" (arXiv 2101.03961), section 2; Lepikhin et al.,
"GShard" (arXiv 2006.16668), section 2.2.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel101.models.seeding import seed_weights


class Experts(nn.Module):
    """Feed-forward networks of the same shape, side by side. Dim 0 of a parameter is the expert.

    (rows, width) and the expert of each row (rows,) → (rows, width). All parameters have a gradient
    after backward, that of an expert without rows is zeros.

    Args:
        experts: how many.
        width, hidden: features of a row, and between the two linear layers of an expert.
        seed: of the weights; see seeding.py.
    """

    def __init__(self, experts: int, width: int, hidden: int, *, seed: int = 0):
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.up_bias = nn.Parameter(torch.empty(experts, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))
        self.down_bias = nn.Parameter(torch.empty(experts, width))
        seed_weights(self, seed)

    def forward(self, rows: Tensor, choice: Tensor) -> Tensor:
        order = choice.argsort(stable=True)  # rows of the same expert are neighbours …
        counts = rows_of_each(choice, len(self.up))
        weights = zip(*(p.unbind() for p in (self.up, self.up_bias, self.down, self.down_bias)))
        outputs = []
        for mine, (up, up_bias, down, down_bias) in zip(rows[order].split(counts), weights):
            hidden = F.gelu(F.linear(mine, up.t(), up_bias))
            outputs.append(F.linear(hidden, down.t(), down_bias))
        return torch.cat(outputs)[order.argsort()]  # … until they are back in their places


def rows_of_each(choice: Tensor, experts: int) -> list[int]:
    """Return how many rows have chosen each expert; on the meta device, all have equally many."""
    if choice.is_meta:
        even, more = divmod(len(choice), experts)
        return [even + (expert < more) for expert in range(experts)]
    return choice.bincount(minlength=experts).tolist()


class MixtureOfExperts(nn.Module):
    """A router and its experts, in the place of one feed-forward network.

    (batch, time, width) → the same shape, and (batch, time, 1): what each position adds to the
    balancing loss. The mean of the latter is the loss of Switch Transformers, E · Σ fₑ Pₑ, with fₑ
    the part of a sequence's choices that are e, and Pₑ the mean of its probabilities of e. It is 1
    if all experts are used equally, near E / top_k if the same top_k of them get all tokens.

    A chosen expert's output is weighted by its probability among all experts, as in Switch
    Transformers. GShard divides the two weights of a token by their sum.

    Args:
        width, hidden, experts: see `Experts`.
        top_k: the experts that a token uses.
        capacity: None: no token is dropped. c: in each sequence, an expert takes the first
            ceil(c · top_k · time / experts) tokens that choose it. The others get nothing from it;
            a residual connection around this layer still passes them on. (Switch Transformers
            count in a whole batch, GShard in groups of tokens.)
        seed: of the weights; see seeding.py.

    Raises ValueError for numbers that don't fit.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        top_k: int = 2,
        capacity: float | None = None,
        *,
        seed: int = 0,
    ):
        super().__init__()
        check_routing(experts, top_k, capacity)
        self.top_k, self.capacity = top_k, capacity
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width, hidden)
        seed_weights(self, seed)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.router(x).softmax(-1)  # (batch, time, experts)
        weight, choice = probabilities.topk(self.top_k)  # (batch, time, top_k) each
        chosen = F.one_hot(choice, probabilities.shape[-1])  # 1 where it is this expert
        kept = places(within_capacity(chosen, self.capacity), self.capacity)

        copies = x.unsqueeze(2).expand(*choice.shape, -1)  # a copy of a token for each choice
        outputs = weight[kept].unsqueeze(-1) * self.experts(copies[kept], choice[kept])
        y = outputs.new_zeros(copies.shape).index_put(kept, outputs).sum(2)
        return y, balance(probabilities, chosen)


def within_capacity(chosen: Tensor, capacity: float | None) -> Tensor:
    """Return a mask of the choices that are kept: in each sequence, the first ones of each expert.

    The order is that of the positions, and at one position that of the choices. So a token is never
    dropped because of a later one, as it may be in GShard, where all first choices come before all
    second ones. (batch, time, top_k, experts) → (batch, time, top_k).
    """
    _, time, top_k, experts = chosen.shape
    if capacity is None:
        return chosen.any(-1)
    most = math.ceil(capacity * top_k * time / experts)
    count = chosen.flatten(1, 2).cumsum(1).view_as(chosen)  # up to and with this choice
    return ((count <= most) & chosen.bool()).any(-1)


def places(kept: Tensor, capacity: float | None) -> tuple[Tensor, ...]:
    """Return the indices, one tensor for each dim, at which `kept` is true.

    On the meta device there are as many as if all experts were used equally: all choices, or with a
    capacity below 1 that part of them.
    """
    if not kept.is_meta:
        return kept.nonzero(as_tuple=True)
    rows = math.ceil(kept.numel() * min(capacity or 1.0, 1.0))
    return tuple(kept.new_empty(rows, dtype=torch.int64) for _ in kept.shape)


def balance(probabilities: Tensor, chosen: Tensor) -> Tensor:
    """Return the balancing loss E · Σ fₑ pₑ of each position: (batch, time, 1).

    Args:
        probabilities: p, (batch, time, experts).
        chosen: (batch, time, top_k, experts), 1 where a choice is this expert. Its mean f over a
            sequence has no gradient.
    """
    f = chosen.to(probabilities.dtype).mean((1, 2)).unsqueeze(1)
    return probabilities.shape[-1] * (f * probabilities).sum(-1, keepdim=True)


def check_routing(experts: int, top_k: int, capacity: float | None) -> None:
    """Raise ValueError for numbers that no mixture of experts can have."""
    if not isinstance(experts, int) or experts < 1:
        raise ValueError(f"experts={experts!r}: expected a whole number, 1 or more")
    if not isinstance(top_k, int) or not 1 <= top_k <= experts:
        raise ValueError(
            f"top_k={top_k!r}: expected the number of experts that a token uses, 1 to "
            f"experts={experts}"
        )
    if capacity is not None and not (isinstance(capacity, int | float) and capacity > 0):
        raise ValueError(
            f"capacity={capacity!r}: expected None, or a number above 0: how many times the tokens "
            "of an even share an expert takes"
        )
