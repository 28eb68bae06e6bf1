"""The published pipeline schedules, as lists of compute actions for each rank.

    1F1B on three stages, four microbatches          F forward   B backward

    rank 0   F0 F1 F2 B0 F3 B1 B2 B3                 a microbatch goes down the stages and its
    rank 1      F0 F1 B0 F2 B1 F3 B2 B3              gradient comes back up; after a warm-up of
    rank 2         F0 B0 F1 B1 F2 B2 F3 B3           P − rank forwards, each backward drops the
                                                     activations of one microbatch for the next

In ZB-H1 and ZB-H2 a backward has two halves: I, the input gradients, for which the stage before
waits, and W, the weight gradients, which fill the bubble. Sources: Huang et al., "GPipe" (2019);
Narayanan et al. (arXiv 2104.04473), section 2.2; Qi et al., "Zero Bubble Pipeline Parallelism"
(arXiv 2401.10241), sections 2 and 3.

Each function returns the list of one rank. p: ranks. m: microbatches. chunks: stages on a rank.
"""

from __future__ import annotations


def gpipe(rank: int, p: int, m: int, chunks: int) -> list[str]:
    """List all forwards, then all backwards."""
    return [f"{rank}F{i}" for i in range(m)] + [f"{rank}B{i}" for i in range(m)]


def one_forward_one_backward(rank: int, p: int, m: int, chunks: int) -> list[str]:
    """List P − rank forwards, then B and F in turn: at most P − rank microbatches are held."""
    warm_up = min(m, p - rank)
    actions = [f"{rank}F{i}" for i in range(warm_up)]
    for i in range(m):
        actions.append(f"{rank}B{i}")
        if i + warm_up < m:
            actions.append(f"{rank}F{i + warm_up}")
    return actions


def interleaved(rank: int, p: int, m: int, chunks: int) -> list[str]:
    """List 1F1B with several stages a rank.

    P microbatches pass the first stage of each rank, then the same P the second, and so on.
    """
    total = m * chunks

    def action(k: int, backward: bool) -> str:
        """Return the k-th forward (backward) of this rank."""
        group, inside = divmod(k, p * chunks)
        chunk, i = divmod(inside, p)
        chunk = chunks - 1 - chunk if backward else chunk
        return f"{chunk * p + rank}{'B' if backward else 'F'}{group * p + i}"

    most = (chunks - 1) * p + 2 * (p - rank - 1) + 1 if chunks > 1 else p - rank
    warm_up = min(total, most)
    actions = [action(k, backward=False) for k in range(warm_up)]
    for k in range(total):
        actions.append(action(k, backward=True))
        if k + warm_up < total:
            actions.append(action(k + warm_up, backward=False))
    return actions


def zero_bubble(rank: int, p: int, m: int, warm_up: int, delay: int) -> list[str]:
    """List 1F1B with split backwards: I at once, since the stage before waits for it, and W
    `delay` microbatches later, in the bubble.
    """
    warm_up = min(m, warm_up)
    actions = [f"{rank}F{i}" for i in range(warm_up)]
    for i in range(m):
        actions.append(f"{rank}I{i}")
        if i >= delay:
            actions.append(f"{rank}W{i - delay}")
        if i + warm_up < m:
            actions.append(f"{rank}F{i + warm_up}")
    return actions + [f"{rank}W{i}" for i in range(max(0, m - delay), m)]


SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    # holds P microbatches
    "zb-h1": lambda rank, p, m, chunks: zero_bubble(rank, p, m, warm_up=p - rank, delay=rank),
    # holds 2P − 1
    "zb-h2": lambda rank, p, m, chunks: zero_bubble(
        rank, p, m, warm_up=2 * (p - rank) - 1, delay=2 * rank
    ),
}
