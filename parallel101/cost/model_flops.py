"""Operations of a step: of the model, and of the hardware, which computes some of them again.

    a token       6 · weights of the products + 12 · layers · time · width
    of a GPT      72 B s L h² (1 + s/(6h) + V/(12 L h))              without recomputation
                  96 B s L h² (1 + s/(6h) + V/(16 L h))              with full recomputation

Attention counts over the whole square of (time, time), though half of it is masked, as in the
papers. Norms, softmax and other elementwise operations don't count. MFU divides the model's
operations by what the GPUs could have computed in the same time, HFU the hardware's. Sources:
Chowdhery et al., PaLM (arXiv 2204.02311), appendix B; Narayanan et al. (arXiv 2104.04473), formula
(3), which counts the recomputation; Korthikanti et al. (arXiv 2205.05198), section 6.3.
"""

from __future__ import annotations

from functools import lru_cache

from parallel101.cost.model_shape import ModelShape


@lru_cache(maxsize=1 << 10)
def weights_in_use(shape: ModelShape) -> float:
    """Return the number of weights in a layer's products that one token is multiplied by."""
    h = shape.width
    mlp = (3 if shape.gated else 2) * h * shape.inside
    if shape.experts:
        mlp = mlp * shape.top_k + h * shape.experts
    return 2 * h * h + 2 * h * shape.kv_width + mlp


@lru_cache(maxsize=1 << 10)
def flops_per_token(shape: ModelShape) -> float:
    """Return the operations of forward and backward for one token."""
    weights = shape.layers * weights_in_use(shape) + shape.vocabulary * shape.width
    return 6 * weights + 12 * shape.layers * shape.time * shape.width


def model_flops(shape: ModelShape, batch: int) -> float:
    """Return the operations of a step of `batch` samples, without recomputed ones."""
    return batch * shape.time * flops_per_token(shape)


@lru_cache(maxsize=1 << 10)
def again_per_token(shape: ModelShape, recompute: str) -> float:
    core = 4 * shape.time * shape.width
    if recompute == "full":
        return shape.layers * (2 * weights_in_use(shape) + core)
    return shape.layers * core if recompute == "selective" else 0.0


def hardware_flops(shape: ModelShape, batch: int, recompute: str) -> float:
    """Return the operations of a step of `batch` samples, with recomputed ones."""
    again = batch * shape.time * again_per_token(shape, recompute)
    return model_flops(shape, batch) + again
