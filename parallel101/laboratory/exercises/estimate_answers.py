"""The formulas of homework 9's estimates: a function for each number, by its name.

These answers are open: learners have this file, since their own check needs it. No rank imports it,
so a program can't ask it. estimate_exercises.py imports it in the grader.

Sources: parallel101/cost/model_states.py, "mixed, fp32 gradients"; Korthikanti et al. (arXiv
2205.05198), section 4, without dropout and with fused attention; Narayanan et al. (arXiv
2104.04473), appendix and section 2.2; Young (CACM 17, 1974).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Facts = Mapping[str, Any]  # of the case
Said = Mapping[str, float]  # the numbers that the learner's function returned
WEIGHTS = 12  # of a layer, in units of h²


# ---- 25a: bytes of the first stage ----


def parameters(facts: Facts) -> float:
    """Return the parameters of the embedding and the first stage's layers, on each GPU."""
    h, layers = facts["width"], facts["layers"] / facts["pp"]
    return (facts["vocabulary"] * h + WEIGHTS * h**2 * layers) / facts["tp"]


def weights(facts: Facts, _: Said) -> float:
    return 2 * parameters(facts)


def gradients(facts: Facts, _: Said) -> float:
    return 4 * parameters(facts) / (facts["dp"] if facts["zero_stage"] >= 2 else 1)


def optimizer(facts: Facts, _: Said) -> float:
    return 12 * parameters(facts) / (facts["dp"] if facts["zero_stage"] >= 1 else 1)


def of_layer(facts: Facts) -> float:
    """Return the bytes that a layer keeps of one microbatch."""
    sbh = facts["time"] * facts["microbatch"] * facts["width"]
    return 8 * sbh / outside(facts) + 24 * sbh / facts["tp"]


def outside(facts: Facts) -> int:
    """Return the number of parts of the activations that plain tensor parallelism leaves whole."""
    return facts["tp"] if facts["sequence_parallel"] else 1


def layers_kept(facts: Facts) -> float:
    """Return the number of layers whose activations are kept at once, each for one microbatch."""
    stages, chunks = facts["pp"], facts["chunks"]
    if chunks == 1:
        return facts["layers"] / stages * min(stages, facts["microbatches"])
    return facts["layers"] / stages / chunks * (stages * chunks + stages - 1)


def activations(facts: Facts, _: Said) -> float:
    if facts["recompute"] == "none":
        return layers_kept(facts) * of_layer(facts)
    return layers_kept(facts) * layer_input(facts) + of_layer(facts)


def activations_input_once(facts: Facts, _: Said) -> float:
    """Return `activations`, if the layer that is computed again uses the input that it has kept."""
    twice = layer_input(facts) if facts["recompute"] == "full" else 0.0
    return activations(facts, _) - twice


def layer_input(facts: Facts) -> float:
    return 2 * facts["time"] * facts["microbatch"] * facts["width"] / outside(facts)


# ---- 25b: a step on paper ----


def forward(facts: Facts) -> float:
    """Return the operations of one layer's forward pass, for one microbatch."""
    b, s, h = facts["microbatch"], facts["time"], facts["width"]
    return 2 * WEIGHTS * b * s * h**2 + 4 * b * s**2 * h


def passes(facts: Facts) -> int:
    """Return the passes of a microbatch through a layer, in forward passes.

    Backward counts as two, and recomputation as another forward.
    """
    return 4 if facts["recompute"] == "full" else 3


def layers_here(facts: Facts) -> float:
    """Return how often a GPU takes a microbatch through a layer in one step."""
    return facts["microbatches"] * facts["layers"] / facts["pp"]


def bandwidth(facts: Facts, gpus: int) -> float:
    """Return the bytes per second of a ring over this many neighbouring GPUs."""
    if gpus <= facts["node"]:
        return facts["nvlink"] * 1e9
    return facts["network"] * 1e9 / 8 / facts["node"]


def all_reduce(nbytes: float, n: int, bandwidth: float) -> float:
    return 2 * (n - 1) / n * nbytes / bandwidth


def matmul(facts: Facts, _: Said) -> float:
    reached = facts["flops"] * facts["efficiency"]
    return layers_here(facts) * passes(facts) * forward(facts) / facts["tp"] / reached


def tp(facts: Facts, _: Said) -> float:
    nbytes = 2 * facts["microbatch"] * facts["time"] * facts["width"]
    once = all_reduce(nbytes, facts["tp"], bandwidth(facts, facts["tp"]))
    return layers_here(facts) * 2 * (passes(facts) - 1) * once


def bubble(facts: Facts, said: Said) -> float:
    busy = said.get("matmul", 0.0) + said.get("tp", 0.0)
    return busy * (facts["pp"] - 1) / (facts["chunks"] * facts["microbatches"])


def dp(facts: Facts, _: Said) -> float:
    weights = WEIGHTS * facts["width"] ** 2 * facts["layers"] / (facts["pp"] * facts["tp"])
    return all_reduce(4 * weights, facts["dp"], bandwidth(facts, facts["tp"] * facts["dp"]))


def mfu(facts: Facts, said: Said) -> float:
    seconds = sum(said.get(name, 0.0) for name in ("matmul", "tp", "bubble", "dp"))
    gpus = facts["dp"] * facts["tp"] * facts["pp"]
    model = 3 * forward(facts) * facts["layers"] * facts["microbatches"] * facts["dp"]
    return model / (seconds * gpus * facts["flops"]) if seconds > 0 else 0.0


# ---- 25d: checkpoints ----


def interval(facts: Facts, _: Said) -> float:
    return math.sqrt(2 * facts["write"] * facts["between"])


def lost(facts: Facts, said: Said) -> float:
    """Return the share of time that is lost with the learner's own interval."""
    chosen = said.get("interval", 0.0)
    if chosen <= 0:
        return 0.0
    again = chosen / 2 + facts["restart"]
    return facts["write"] / chosen + again / facts["between"]


# ---- 25e: slow GPUs ----


def slow(facts: Facts, _: Said) -> float:
    return 1 - (1 - facts["q"]) ** facts["gpus"]


def step(facts: Facts, said: Said) -> float:
    return 1 + said.get("slow", 0.0) * (facts["slowdown"] - 1)
