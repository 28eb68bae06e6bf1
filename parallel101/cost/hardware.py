"""Public figures of accelerators: arithmetic, memory and links.

Data only; times.py computes with it.

TPU     each chip has links to its neighbours along 2 or 3 axes. A closed axis is a ring; an open
        one is a line.
GPU     each GPU has one link to the switch of its node, each node one to the leaf switches, each
        group of nodes one to the spine. A node's link is a network card for each GPU: its rails.

All bandwidths are bytes per second. A link carries its `bandwidth` one way and as much the other
way at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

TILES = ((256, 128, 1.0), (128, 128, 0.96), (128, 64, 0.85), (64, 64, 0.7))  # cuBLAS's, roughly

# bytes → part; calibrated on the output layer of vTrain's profile, whose vocabulary of 50,257 words
# is cut into 50257, 25128, 12564 and 6282. NVIDIA, "Matrix Multiplication Background User's Guide",
# section "Tensor Core Requirements", asks for multiples of 16 bytes.
ALIGNMENT = ((16, 1.0), (8, 0.8), (4, 0.6), (2, 0.3))
# the bus bandwidth of an all-reduce of 1 GiB over 8 A100 in vTrain's runs is 229 GB/s of 300
NVLINK_REACHED = 0.765


@dataclass(frozen=True)
class Torus:
    """Links to the neighbours along each axis."""

    axes: int
    bandwidth: float  # of a link, one way
    latency: float  # seconds per hop
    # an axis is closed to a ring if its length is a multiple of this; otherwise it is a line
    ring_multiple: int

    @property
    def both_ways(self) -> float:
        """Bytes per second of a chip along one closed axis, in both directions: the book's W."""
        return 2 * self.bandwidth


@dataclass(frozen=True)
class Level:
    """One level of a tree of switches: `size` children, each with a link into the switch.

    A link of several rails is as many equal links. Each GPU of a child uses one of them, so only
    all GPUs together have the link's bandwidth: see `Network.two_level(…, rails=…)`.
    """

    name: str
    size: int
    bandwidth: float  # of one child's link, one way, with all rails
    latency: float  # seconds per hop
    rails: int = 1

    @property
    def rail_bandwidth(self) -> float:
        """Bytes per second of one rail, one way: what a single GPU can send to another child."""
        return self.bandwidth / self.rails


@dataclass(frozen=True)
class KernelFigures:
    """The speed of a GPU's kernels, and the part of its links that collectives reach.

    kernels.py and cluster.py compute with these. They are the same for every model and
    every table. Defaults are the A100's, for all GPUs.

    Attributes:
        sms: streaming multiprocessors; each computes one tile of a product at a time.
        sustained: the part of `flops` that tensor cores reach on an endless inner loop, at the
            clock that the GPU holds under load.
        hbm: the part of `hbm_bandwidth` that a kernel reaches which reads and writes once.
        attention, attention_backward: the part of `flops` that fused attention reaches.
        runs, runs_words: how many times as long as the quick model says published runs took: the
            range that plans print, and what it is.
        tiles: (rows, columns, part of `sustained`) of the tiles that a product may choose from.
        tile_start: elements along k whose time it takes to begin and to end a tile.
        alignment: (multiple, part of `sustained`): a product whose sizes are multiples of 16 bytes
            runs at full speed, others load their matrices in smaller pieces.
        launch: seconds between the end of a kernel and the start of the next.
        nvlink_reached, network_reached: the part of a link's bandwidth that long messages reach.
        nvlink_step, network_step: seconds of a step of a collective, besides its bytes.
    """

    sms: int
    sustained: float
    hbm: float
    attention: float
    attention_backward: float
    runs: tuple[float, float]
    runs_words: str
    tiles: tuple[tuple[int, int, float], ...] = TILES
    tile_start: int = 128
    alignment: tuple[tuple[int, float], ...] = ALIGNMENT
    launch: float = 2e-6
    nvlink_reached: float = NVLINK_REACHED
    network_reached: float = 0.95
    nvlink_step: float = 5e-6
    network_step: float = 5e-6


@dataclass(frozen=True)
class Chip:
    """The figures of one accelerator."""

    name: str
    flops: float  # bf16, per second, without sparsity
    hbm_bytes: float
    hbm_bandwidth: float
    links: Torus | tuple[Level, ...]  # levels from the inside out
    # bytes per second to the host and to its network card, one way; None: not in this table
    pcie_bandwidth: float | None = None
    kernels: KernelFigures | None = None  # of a GPU that steps are predicted for

    def __hash__(self) -> int:
        return hash((self.name, self.flops))  # not of all figures: caches ask for it often


# Steps and network_reached of all GPUs are read off SimAI's inputs/ratio (fractions of a link's
# bandwidth that NCCL reached, by size and number of nodes), not fitted. SMs: NVIDIA's architecture
# papers, and for the B200 what CUDA reports.
#
# A100: sustained, tile_start and hbm are calibrated on three rows of Megatron-LM's Table 1
# (Narayanan et al., SC 2021) and on the layers in vTrain's profile that keep an A100 busy: see
# BENCHMARKS.md. Memory bandwidth and products are hard to tell apart there: (0.82, 0.60) fits
# almost as well as (0.80, 0.64). Attention: 50 to 73 % of the peak, Dao, FlashAttention-2 (arXiv
# 2307.08691), abstract, the lower half for a causal mask.
#
# H100: sustained, hbm and attention are measured on an H100 80GB HBM3 with torch 2.11, see
# planner/published_tables/h100_kernels.csv. ON_H100: of the published runs that calibrated no
# constant, see BENCHMARKS.md.
#
# B200: a guess. Sustained: the H100's, in the ratio of their best products (0.776 and 0.803 of the
# peak: S. Bekman, Machine Learning Engineering, compute/accelerator); hbm: the H100's; attention:
# an estimate, below FlashAttention-4's best (Zadouri et al., github.com/Dao-AILab/flash-attention,
# assets/fa4_paper.pdf).
ON_H100 = (0.9, 1.6)
A100_RUNS = "nine in ten of the published A100 runs that keep a GPU busy are within it"
H100_RUNS = "published H100 runs, none of which calibrated the model, took "
H100_RUNS += f"{ON_H100[0]} to {ON_H100[1]} times what it says for their programs"
H200_RUNS = "the H100's, which has the same SMs; no run on an H200 was compared"
B200_RUNS = "a guess: the H100's; no run on a B200 was compared"
A100_KERNELS = KernelFigures(
    sms=108, sustained=0.80, hbm=0.64, attention=0.60, attention_backward=0.50,
    runs=(0.9, 1.1), runs_words=A100_RUNS,
)  # fmt: skip
H100_KERNELS = KernelFigures(
    sms=132, sustained=0.71, hbm=0.88, attention=0.55, attention_backward=0.45,
    runs=ON_H100, runs_words=H100_RUNS,
)  # fmt: skip
H200_KERNELS = replace(H100_KERNELS, runs_words=H200_RUNS)
B200_KERNELS = KernelFigures(
    sms=148, sustained=0.69, hbm=0.88, attention=0.50, attention_backward=0.40,
    runs=ON_H100, runs_words=B200_RUNS,
)  # fmt: skip

# Seconds of a hop. TPU: "typically around 1us", Austin et al., How to Scale Your Model (2025), part
# 3, "A note on ICI latency". GPU: NCCL, src/graph/tuning.cc, hwLat of ring with protocol LL.
HOP, NVLINK_HOP, NETWORK_HOP = 1e-6, 0.6e-6, 2.7e-6
# A card of 400 Gbit/s for each GPU, and "each group of 32 nodes is rail-aligned": NVIDIA, DGX
# SuperPOD reference architecture, DGX H100, Network Fabrics, and DGX H100 User Guide, table Network
# Modules. The B200's: the same of DGX B200 (8 cables a node).
LEAF = Level("leaf", 32, 400e9, NETWORK_HOP, rails=8)
SPINE = Level("spine", 4, 12.8e12, NETWORK_HOP, rails=8)
H100_LINKS = Level("node", 8, 450e9, NVLINK_HOP), LEAF, SPINE
A100_LINKS = Level("node", 8, 300e9, NVLINK_HOP), Level("leaf", 20, 200e9, NETWORK_HOP, rails=8)
B200_LINKS = Level("node", 8, 900e9, NVLINK_HOP), LEAF
# nodes per leaf: NVIDIA, DGX SuperPOD reference architecture, DGX GB200
GB200_LEAF = Level("leaf", 8, 3.6e12, NETWORK_HOP, rails=72)
GB200_LINKS = Level("node", 72, 900e9, NVLINK_HOP), GB200_LEAF
V5P_LINKS = Torus(3, 9.0e10, HOP, ring_multiple=4)  # closed in multiples of a cube of 4 × 4 × 4

# name, flops, bytes and bandwidth of the memory, links. Sources: Austin et al., part 2, "TPU Specs"
# and "TPU Networking"; part 12, "Summary of GPU specs", "At the node level" and "Beyond the node
# level". TPU7x: Google Cloud, docs.cloud.google.com/tpu/docs/tpu7x, which gives all links together:
# 1200 GB/s, as for TPU v5p. A100's and GB200's flops: Lockwood, glennklockwood.com/garden/
# processors, from NVIDIA's data sheet. PCIe: NVIDIA, "H100 Tensor Core GPU Architecture" (white
# paper, V1.04), Key Feature Summary. GB200's memory and rails (4 cards for 4 GPUs): MLCommons,
# Inference v6.1, systems/GB200-NVL72_GB200-186GB.
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("TPU v4p", 2.75e14, 32e9, 1.2e12, Torus(3, 4.5e10, HOP, ring_multiple=4)),
        Chip("TPU v5p", 4.59e14, 96e9, 2.8e12, V5P_LINKS),
        Chip("TPU v5e", 1.97e14, 16e9, 8.1e11, Torus(2, 4.5e10, HOP, ring_multiple=16)),
        Chip("TPU v6e", 9.2e14, 32e9, 1.6e12, Torus(2, 9.0e10, HOP, ring_multiple=16)),
        Chip("TPU7x", 2.307e15, 192 * 2**30, 7.38e12, V5P_LINKS),
        Chip("A100", 3.12e14, 80e9, 2.0e12, A100_LINKS, kernels=A100_KERNELS),
        Chip("H100", 9.9e14, 80e9, 3.35e12, H100_LINKS, 64e9, H100_KERNELS),
        Chip("H200", 9.9e14, 141e9, 4.8e12, H100_LINKS, kernels=H200_KERNELS),
        Chip("B200", 2.25e15, 192e9, 8.0e12, B200_LINKS, kernels=B200_KERNELS),
        Chip("GB200", 2.5e15, 186e9, 8.0e12, GB200_LINKS),
    )
}


def chip_of(chip: str | Chip) -> Chip:
    """Return the chip of that name, such as "H100" or "h100", or the chip itself.

    Raises ValueError for a name that the table doesn't have.
    """
    if isinstance(chip, Chip):
        return chip
    by_name = {name.casefold(): known for name, known in CHIPS.items()}
    if (found := by_name.get(str(chip).casefold())) is None:
        raise ValueError(
            f"chip={chip!r} is not in the table: expected one of "
            f"{', '.join(map(repr, CHIPS))}, or a cost.Chip of your own"
        )
    return found
