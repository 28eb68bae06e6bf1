"""The number of a model's layers on each pipeline stage.

    80 layers, 16 stages    5 5 5 … 5
    126 layers, 16 stages   7 8 8 … 8 7     the embedding and the head count as a layer each
    126 layers, 128 stages  0 1 1 … 1 0     16 ranks with 8 chunks: two stages without layers

The embedding is on the first stage, the final norm and the head on the last. The last rows are
those of Llama 3 405B, one layer fewer on the first and on the last stage: "The Llama 3 Herd of
Models" (arXiv 2407.21783), section 3.3.2.
"""

from __future__ import annotations


def stage_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Return the number of layers on each of `stages` global stages (pp · chunks of them).

    Raises ValueError if stages divides neither layers nor layers + 2.
    """
    if layers % stages == 0:
        return (layers // stages,) * stages
    each, rest = divmod(layers + 2, stages)
    if rest or stages < 3:
        raise ValueError(
            f"{layers} layers can't be shared by {stages} pipeline stages: expected a number of "
            f"stages that divides {layers}, or {layers + 2} with the embedding and the head as a "
            "layer each"
        )
    return (each - 1, *(each,) * (stages - 2), each - 1)


def entries_of_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Return HybridTrainer's `layers_per_stage` for a decoder.

    The model's sequence is its embedding, the layers, a norm and the head. Raises ValueError: see
    `stage_layers`.
    """
    entries = list(stage_layers(layers, stages))
    entries[0] += 1
    entries[-1] += 2
    return tuple(entries)
