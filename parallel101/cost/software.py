"""Training programs beyond their layout: the kernels they fuse, the messages they overlap.

The same layout on the same GPUs takes longer with an older program. The published tables were
measured with Megatron-LM. `TRAINERS` is this package's HybridTrainer, as virtual GPUs run it, but
with a fused ring attention; `OWN_RING` has its own ring attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Software:
    """The choices of a training program that decide its speed besides the layout.

    Attributes:
        fused: kernels as Megatron-LM fuses them: the causal mask, the scale and softmax are one,
            and so are bias, dropout and addition, and bias and GELU; query, key and value are one
            product. False: one kernel for each operation of torch.
        fused_ring: ring attention computes each block with a fused kernel. False: with plain
            products in 32 bits, as `p101.ring_attention` does.
        attention: the part of the chip's fused attention that its kernel reaches.
        again: the part of a layer's products that backward computes once more.
        tp_overlap: what is in flight in backward while weight gradients are computed: "none";
            "column": the sums of column layers (and what they gather again with sequence parallel);
            "halves": as this package's, the first half of each of these sums, its reduce-scatter.
        dp_overlap: whether a layout's `overlap` is heeded for gradients.
        pp_overlap: messages between stages are in flight while microbatches are computed.
        scatter_gather: each tp rank sends 1/tp of the activations to the next stage, where they are
            gathered over NVLink.
        accumulation: gradients are added to a buffer "each" microbatch, by the product itself
            ("fused"), or only from the second microbatch on ("later").
        collectives: "ring": NCCL's rings, which enter each node once and use all of its cards;
            "direct": each rank sends its block to each other rank, over its own card.
        buckets: gradients travel in buckets, whose collectives have a latency each.
        contention: how much slower kernels run while messages are in flight that they hide, as a
            part of their time.
        loss_bytes: read and written for each logit, forward and backward.
        optimizer_bytes: read and written for each parameter by clipping and the update, with master
            weights.
        optimizer_launches: kernels of each array of parameters for that, besides the update.
        host: seconds of the CPU to launch a kernel. 0: not modelled.
        padding: the vocabulary is padded to a multiple of this on each tp rank; 1: it isn't.
    """

    name: str
    fused: bool = True
    fused_ring: bool = True
    attention: float = 1.0
    again: float = 0.0
    tp_overlap: str = "none"
    dp_overlap: bool = True
    pp_overlap: bool = False
    scatter_gather: bool = False
    accumulation: str = "each"
    collectives: str = "ring"
    buckets: bool = False
    contention: float = 0.0
    loss_bytes: int = 52
    optimizer_bytes: int = 62
    optimizer_launches: int = 0
    host: float = 0.0
    padding: int = 128

    def __hash__(self) -> int:
        return hash(self.name)  # caches ask for it often


# Effects that can't be predicted are left out here, as on virtual GPUs: a CPU that launches kernels
# too slowly, and kernels that run slower beside messages.
# loss_bytes: trainers/tensor/loss.py, kernel by kernel: to fp32 (6), max (4), subtract (8), exp
# (8), sum (4), divide (8), and in backward times what counts (8), times the gradient (8), to 16
# bits (6).
# optimizer_bytes: gradients to fp32 and moved (12), AdamW (28), rounded (6).
TRAINERS = Software(
    "parallel101's HybridTrainer",
    fused=False,
    tp_overlap="halves",
    pp_overlap=True,
    accumulation="later",
    collectives="direct",
    buckets=True,
    loss_bytes=60,
    optimizer_bytes=46,
    optimizer_launches=3,
    padding=1,
)

OWN_RING = replace(TRAINERS, name="parallel101's HybridTrainer, its own ring", fused_ring=False)

# "overlap slowed computation down by 19 % on average": arXiv 2507.03114, abstract
CONTENTION = 0.19

# 10 µs to launch an operation of eager torch: the order of magnitude; no table given here shows it.
# loss_bytes: megatron/mpu/cross_entropy.py, kernel by kernel: to fp32 (6), max (4), subtract (8),
# exp (8), sum (4), divide (8), and in backward times the gradient (8), to 16 bits (6).
# optimizer_bytes: megatron/optimizer: fp16 gradients to fp32 (6), unscaled and checked (8), norm
# (4), clipped (8), Adam (28), rounded (6), gradients set to zero (2).
MEGATRON_2021 = Software(
    "Megatron-LM of 2021 (SC21, commit 6985e58)",
    scatter_gather=True,
    contention=CONTENTION,
    host=10e-6,
)
# the class LinearWithGradAccumulationAndAsyncCommunication in megatron/model/ or core/
MEGATRON_2022 = replace(
    MEGATRON_2021,
    name="Megatron-LM of 2022, with sequence parallel",
    tp_overlap="column",
    dp_overlap=False,
    accumulation="fused",
)
# https://github.com/VIA-Research/vTrain, src/: kernels of one layer with torch's profiler around
# them, a vocabulary of 50257 that isn't padded, Adam without clipping on 16-bit weights
VTRAIN_PROFILE = Software(
    "vTrain's simulator",
    accumulation="fused",
    loss_bytes=12,
    optimizer_bytes=22,
    host=66e-6,
    padding=1,
)

# trainers/: HybridTrainer's stages wait for each other's sums of gradients; this one's don't
LLAMA_3 = replace(
    TRAINERS, name="Meta's program for Llama 3 (arXiv 2407.21783), as far as known", buckets=False
)
# scripts/train/benchmarking/sweep.sh: torch 2.0.1, Triton's FlashAttention. Its part, and that FSDP
# hid no messages, are chosen on half of the published rows: see BENCHMARKS.md.
LLM_FOUNDRY_2023 = Software(
    "LLM Foundry v0.0.4, FSDP of torch 2.0",
    fused=False,
    attention=0.36,
    dp_overlap=False,
    accumulation="fused",
    buckets=True,
    loss_bytes=60,
    optimizer_bytes=46,
    host=10e-6,
    padding=1,
)
# torchtitan's selective checkpointing, by operation, keeps every second product. ("Selective" in
# ParallelLayout is Korthikanti's: the core of attention is computed again, and no product.)
TORCHTITAN = replace(
    LLM_FOUNDRY_2023,
    name="torchtitan of 2024, FSDP2, selective checkpointing by operation",
    attention=1.0,
    again=0.5,
    dp_overlap=True,
    contention=CONTENTION,
)
TORCHTITAN_COMPILED = replace(TORCHTITAN, name=f"{TORCHTITAN.name}, compiled", fused=True)
