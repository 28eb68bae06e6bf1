"""Does an optimizer update each element on its own? Asked by trying: a matrix at once, and the same matrix in two flat pieces.

SGD, Adam, AdamW, Adagrad, …    the same numbers: their parameters can be cut anywhere
Muon, Adafactor, LAMB, …        other numbers, for they look at rows, columns or the norm of a whole matrix
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

ROWS, COLUMNS, STEPS = 4, 6, 3


def check_elementwise(optimizer: Optimizer) -> None:
    """Raises ValueError where it does not, or where its `step()` can't be called without arguments.

    One that can't be built again from `type(optimizer)(param_groups)` can't be tried, and is taken at its word.
    """
    name = type(optimizer).__name__
    for group in (group for group in optimizer.param_groups if group["params"]):
        like: Tensor = group["params"][0]
        generator = torch.Generator().manual_seed(0)
        scale = torch.logspace(-1, 1, ROWS)[:, None]  #  rows of unlike size: the norm of some is not that of all
        start, *gradients = ((torch.randn(ROWS, COLUMNS, generator=generator) * scale).to(like) for _ in range(1 + STEPS))
        try:
            at_once = built_like(optimizer, group, [start])
        except Exception:
            return
        try:
            whole = updated(at_once, [[g] for g in gradients])
        except Exception as error:
            raise ValueError(f"{name}.step() failed on a {ROWS} × {COLUMNS} matrix; trainers call it without arguments: {error}") from error
        if not whole.isfinite().all():
            continue  #  as Adam's in float16: nothing to compare
        problem: Exception | None = None
        try:
            pieces = updated(built_like(optimizer, group, halves(start)), [halves(g) for g in gradients])
            alike = torch.allclose(whole, pieces, rtol=0, atol=1e-3 * float((whole - start.flatten()).abs().max()))
        except Exception as error:
            alike, problem = False, error
        if not alike:
            why = f" ({problem})" if problem else ""
            raise ValueError(
                f"{name} is not elementwise: it makes something else of a matrix than of its pieces{why}, and sharded, "
                "each rank has pieces only. Expected SGD, Adam, AdamW or another that updates every element on its own; "
                f"DataParallelTrainer, where each rank has whole matrices, takes {name} too"
            )


def built_like(optimizer: Optimizer, group: dict[str, Any], values: Sequence[Tensor]) -> Optimizer:
    options = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
    again: Any = type(optimizer)
    return again([{**options, "params": [nn.Parameter(value.clone()) for value in values]}])


def updated(optimizer: Optimizer, gradients: Sequence[Sequence[Tensor]]) -> Tensor:
    """All values, in one row, after a step with each of these gradients."""
    (parameters,) = (group["params"] for group in optimizer.param_groups)
    for of_step in gradients:
        for p, gradient in zip(parameters, of_step):
            p.grad = gradient.clone()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in parameters])


def halves(matrix: Tensor) -> list[Tensor]:
    return list(matrix.flatten().split(ROWS * COLUMNS // 2))
