"""The checks of replicas: copies must still be equal on all ranks.

    along dp     a buffer that depends on the samples differs
    along tp     so does the gradient of a replicated parameter, if a module computes differently

    rank 0   x ─▶ noise of NumPy, seed 0 ─▶ norm ─▶ column ─▶ row     the norm's gradient: 0.31
    rank 1   x ─▶ noise of NumPy, seed 1 ─▶ norm ─▶ column ─▶ row                          0.35

Without an error each rank would train a model of its own, and the loss would not show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from parallel101.collectives.meta_device import number_in
from parallel101.trainers.agreement import Agreement, tensors_of
from parallel101.trainers.step import Trainer

CLOSE = 1e-3  # how much two norms may differ, relative to the larger one
SMALL = 1e-6  # a norm below this part of the largest is rounding noise


def compare_replicas(trainer: Trainer) -> None:
    """Raise ValueError, on every rank, if ranks with equal parameters and buffers have unequal
    gradients or buffers. Called once, when every gradient is that of the whole batch.
    """
    trainer.agree.check_on_all(partial(check_alike, trainer))


def compare_copies(trainer: Trainer) -> None:
    """Raise ValueError, on every rank, if ranks that hold the same weights and buffers no longer
    hold the same bits.
    """
    axes = trainer.axes
    agree = Agreement(
        axes.along([axis for axis in ("dp", "cp") if axis in axes.sizes]), trainer.device
    )
    trainer.agree.check_on_all(
        partial(
            agree.check_same,
            tensors_of(trainer.model),
            f"before step {trainer.steps + 1} the copies of the model are no longer equal",
            "something changes it on some ranks only, such as an nn.Embedding with max_norm, which "
            "shortens the rows that a rank's own samples use, or code between the steps",
        )
    )


def check_alike(trainer: Trainer) -> None:
    """Check the ranks of one stage, all of which raise the same ValueError. Collective."""
    axes = trainer.axes
    stage = [axis for axis in axes.sizes if axis != "pp"]
    # not counted as what an axis sends
    agree = Agreement(axes.along(stage)._replace(axes=()), trainer.device)
    if axes.sizes.get("tp", 1) > 1:
        tp = [axes.coordinates(position)["tp"] for position in axes.line(stage)]
        check_gradients(trainer, agree, tp)
    if next(trainer.model.buffers(), None) is not None:
        advice = (
            "expected buffers that do not depend on the samples, of which each rank sees its "
            "share only; .eval() freezes most"
        )
        agree.check_same(
            trainer.model.named_buffers(),
            "the first step changed buffers differently on different ranks",
            advice,
        )


def check_gradients(trainer: Trainer, agree: Agreement, tp: Sequence[int]) -> None:
    """Raise ValueError if the gradient of a parameter that tp does not cut has different norms
    along it. `tp`: each rank's place along tp.
    """
    entries, owned = trainer.layout.entries, trainer.owned
    here = [name for name in trainer.trained if name in trainer.local]
    names = [name for name in here if "tp" not in entries[name].placements]
    mine = [owned[name].grad if name in owned else None for name in names]
    squares = [
        0.0 if g is None else number_in(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2
        for g in mine
    ]
    found = {}
    for name, of_ranks in zip(names, agree.numbers(*squares) if names else ()):
        # over dp: pieces, or copies
        add_up = sum if "dp" in entries[name].placements else max
        found[name] = [
            add_up(square for square, i in zip(of_ranks, tp) if i == place) ** 0.5
            for place in range(max(tp) + 1)
        ]
    largest = max((max(norms) for norms in found.values()), default=0.0)
    for name, norms in found.items():
        if max(norms) - min(norms) > CLOSE * max(norms) and max(norms) > SMALL * largest:
            values = ", ".join(f"{norm:.3g}" for norm in norms)
            raise ValueError(
                f"the gradient of {name!r} is not the same on all ranks along tp: its norms "
                f"are {values}. "
                "The plan does not cut this parameter, so each of these ranks must compute the "
                "same gradient. If a module draws random "
                "numbers from Python, NumPy or a torch.Generator of its own, use torch's "
                "global ones, as nn.Dropout does; if not, a module "
                "gets only a part of its inputs: change the plan. No weight was changed"
            )
