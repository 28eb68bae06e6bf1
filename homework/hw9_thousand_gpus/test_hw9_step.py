"""Exercise 25b: the time of a training step, estimated by hand.

The formulas are Megatron's (Narayanan et al., arXiv 2104.04473): operations of a layer in its
appendix, the bubble in section 2.2. All products run at one efficiency, and nothing overlaps.
"""

from __future__ import annotations

from parallel101.laboratory.exercises.estimate_exercises import (
    EstimatePart,
    Facts,
    answers,
    estimate_case,
    named,
    off_by,
)
from parallel101.laboratory.grade.exercise import Case, Draw, Exercise, Misconception, Question

# peak, and GB/s of NVLink: A100, H100, B200, as in parallel101/cost/hardware.py
GPUS = ((312e12, 300.0), (990e12, 450.0), (2250e12, 900.0))


def step_case(draw: Draw, *, node: int, dp: int, tp: int, pp: int, **others) -> Case:
    """A layout of a model whose sizes are drawn."""
    flops, nvlink = draw.choice(GPUS)
    chunks, heads = others.get("chunks", 1), 16 * draw.integer(2, 8)
    facts = {
        "width": 128 * heads,
        "layers": pp * chunks * draw.integer(2, 6),
        "heads": heads,
        "vocabulary": 128 * draw.integer(250, 1000),
        "time": 1024 * draw.integer(1, 8),
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "microbatch": draw.integer(1, 4),
        "microbatches": pp * draw.integer(2, 9),
        "chunks": chunks,
        "recompute": others.get("recompute", "none"),
        "flops": flops,
        "efficiency": draw.integer(45, 75) / 100,
        "node": node,
        "nvlink": nvlink,
        "network": 200.0 * node * draw.integer(1, 4),
    } | others
    return given_case(facts)


SHAPE = ("width", "layers", "heads", "vocabulary", "time")
LAYOUT = ("dp", "tp", "pp", "microbatch", "microbatches", "chunks", "recompute")
CLUSTER = ("flops", "efficiency", "node", "nvlink", "network")


def given_case(facts: Facts) -> Case:
    arguments = [{name: facts[name] for name in names} for names in (SHAPE, LAYOUT, CLUSTER)]
    note = f"dp {facts['dp']} × tp {facts['tp']} × pp {facts['pp']}, nodes of {facts['node']}"
    if facts["recompute"] == "full":
        note += ", recomputation"
    return estimate_case(arguments, note, **facts)


def cases(draw: Draw) -> list[Case]:
    """Groups inside of nodes and across them, with nodes of several sizes."""
    return [
        step_case(draw, node=8, dp=1, tp=8, pp=1, microbatches=draw.integer(4, 9)),
        step_case(draw, node=8, dp=16, tp=8, pp=4),
        step_case(draw, node=4, dp=8, tp=4, pp=8, recompute="full"),
        step_case(draw, node=4, dp=4, tp=8, pp=4),
        step_case(draw, node=16, dp=4, tp=4, pp=6, chunks=draw.integer(2, 4)),
        step_case(draw, node=4, dp=64, tp=1, pp=3),
        step_case(draw, node=16, dp=12, tp=2, pp=5, recompute="full", chunks=2),
    ]


MATMUL = EstimatePart("matmul", "matrix products")
TP = EstimatePart("tp", "all-reduces along tp")
BUBBLE = EstimatePart("bubble", "the bubble, given your first two", uses=("matmul", "tp"))
DP = EstimatePart("dp", "the all-reduce along dp")
MFU = EstimatePart("mfu", "MFU, given your four times", uses=("matmul", "tp", "bubble", "dp"))
PARTS = (MATMUL, TP, BUBBLE, DP, MFU)

# ---- mistakes: the factor by which a part is wrong ----


def full(facts: Facts) -> bool:
    return facts["recompute"] == "full"


def passes(facts: Facts) -> int:
    """Forward, and backward for two; recomputation is another forward."""
    return 4 if full(facts) else 3


def scores(facts: Facts) -> float:
    """The part of the operations that the weights don't explain."""
    return 4 * facts["microbatch"] * facts["time"] ** 2 * facts["width"] / answers().forward(facts)


def in_node(facts: Facts, part: EstimatePart) -> bool:
    return facts["tp"] * (facts["dp"] if part is DP else 1) <= facts["node"]


def per_node(part: EstimatePart):
    """The bandwidth of a whole node for each GPU."""
    return lambda facts: 1.0 if in_node(facts, part) else 1 / facts["node"]


def bits(part: EstimatePart):
    """Gbit/s taken for GB/s."""
    return lambda facts: 1.0 if in_node(facts, part) else 1 / 8


def both(part: EstimatePart):
    return lambda facts: per_node(part)(facts) * bits(part)(facts)


def nvlink_everywhere(part: EstimatePart):
    def factor(facts: Facts) -> float:
        return (
            answers().bandwidth(facts, 10**9) / (facts["nvlink"] * 1e9)
            if not in_node(facts, part)
            else 1
        )

    return factor


def network_everywhere(part: EstimatePart):
    def factor(facts: Facts) -> float:
        return (
            facts["nvlink"] * 1e9 / answers().bandwidth(facts, 10**9) if in_node(facts, part) else 1
        )

    return factor


def dp_counted_alone(facts: Facts) -> float:
    """NVLink if dp ranks are as few as a node has GPUs, although tp lies between them."""
    if facts["dp"] <= facts["node"] < facts["dp"] * facts["tp"]:
        return nvlink_everywhere(DP)(facts)
    return 1.0


def ring(n: str, factor):
    """Another factor in place of 2(n − 1)/n."""
    return lambda facts: factor(facts[n]) / (2 * (facts[n] - 1) / facts[n])


def either(*rules):
    return lambda trials: any(rule(trials) for rule in rules)


MISTAKES = (
    Misconception(
        "backward counted like forward",
        "The matrix products of backward are counted once. For each product of forward, "
        "backward has two: the gradient of the input, and that of the weights.",
        off_by(MATMUL, lambda f: (passes(f) - 1) / passes(f), lambda f: 2 / passes(f)),
    ),
    Misconception(
        "backward forgotten",
        "The matrix products are those of forward alone.",
        off_by(MATMUL, lambda f: 1 / passes(f), lambda f: (passes(f) - 2) / passes(f)),
    ),
    Misconception(
        "recomputation not counted in time",
        "With full recomputation, every forward pass runs twice. The step takes that time, "
        "although MFU doesn't count the work.",
        off_by(MATMUL, lambda f: 3 / passes(f)),
    ),
    Misconception(
        "attention's scores forgotten",
        "Only products with weights are counted. Queries times keys and weights times values "
        "have no weights, and their operations grow with the square of the time.",
        off_by(MATMUL, lambda f: 1 - scores(f), lambda f: 1 - scores(f) / 2),
    ),
    Misconception(
        "operations of a product halved",
        "A product of (m, k) and (k, n) takes 2mnk floating-point operations: a "
        "multiplication and an addition for each of the mnk pairs.",
        off_by(MATMUL, lambda f: 0.5, lambda f: 0.5 + scores(f) / 2, lambda f: 1 - scores(f) / 2),
    ),
    Misconception(
        "one microbatch",
        "The time is that of one microbatch. A step has M of them.",
        off_by(MATMUL, lambda f: 1 / f["microbatches"]),
    ),
    Misconception(
        "all layers on one GPU",
        "A GPU computes the layers of its own stages only: L/P of them.",
        off_by(MATMUL, lambda f: f["pp"]),
    ),
    Misconception(
        "ring's factor",
        "In a ring all-reduce of S bytes over n ranks, each rank sends 2(n − 1)/n · S bytes: "
        "a reduce-scatter and an all-gather.",
        either(
            lambda trials: all(off_by(part, lambda f: 0.5)(trials) for part in (TP, DP)),
            *(
                off_by(
                    part,
                    ring(name, lambda n: 1),
                    ring(name, lambda n: 2),
                    ring(name, lambda n: 2 * (n - 1)),
                )
                for part, name in ((DP, "dp"), (TP, "tp"))
            ),
        ),
    ),
    Misconception(
        "all-reduces counted once",
        "A layer has two all-reduces along tp in forward, one after the attention and one "
        "after the MLP, and two in backward.",
        off_by(
            TP,
            lambda f: 0.5,
            lambda f: 1 / (passes(f) - 1),
            lambda f: (passes(f) - 2) / (passes(f) - 1),
        ),
    ),
    Misconception(
        "recomputation's all-reduces forgotten",
        "A second forward pass has forward's all-reduces, too.",
        off_by(TP, lambda f: 2 / (passes(f) - 1)),
    ),
    Misconception(
        "node's bandwidth for each GPU",
        "The network's bandwidth is that of a whole node. All GPUs of the node use it at the "
        "same time, so each has its share.",
        either(off_by(DP, per_node(DP), both(DP)), off_by(TP, per_node(TP), both(TP))),
    ),
    Misconception(
        "bits taken for bytes",
        "Networks are sold in bits per second. A byte has eight bits.",
        either(off_by(DP, bits(DP)), off_by(TP, bits(TP))),
    ),
    Misconception(
        "NVLink beyond the node",
        "A group that reaches beyond one node has network links in its ring, and the ring is "
        "as fast as its slowest link. Along dp, neighbours are tp GPUs apart.",
        either(
            off_by(DP, nvlink_everywhere(DP), dp_counted_alone), off_by(TP, nvlink_everywhere(TP))
        ),
    ),
    Misconception(
        "network inside the node",
        "All GPUs of the group are in one node, where NVLink connects them.",
        either(off_by(DP, network_everywhere(DP)), off_by(TP, network_everywhere(TP))),
    ),
    Misconception(
        "gradients of the whole model",
        "The gradients that a GPU reduces along dp are those of its own weights: its stages' "
        "layers, cut over tp.",
        off_by(DP, lambda f: f["tp"] * f["pp"], lambda f: f["tp"], lambda f: f["pp"]),
    ),
    Misconception(
        "half of the gradients' bytes",
        "Along dp, gradients are in fp32, with 4 bytes each. An all-reduce sends them twice: "
        "in its reduce-scatter and in its all-gather.",
        off_by(DP, lambda f: 0.5),
    ),
    Misconception(
        "bubble as a share of the step",
        "(P − 1)/(M + P − 1) is the bubble's share of the whole step, the bubble included. "
        "Relative to the time in which a GPU works, it is (P − 1)/M.",
        off_by(
            BUBBLE,
            lambda f: (
                f["chunks"] * f["microbatches"] / (f["chunks"] * f["microbatches"] + f["pp"] - 1)
            ),
            lambda f: f["microbatches"] / (f["microbatches"] + f["pp"] - 1),
            lambda f: f["chunks"] * f["microbatches"] / (f["microbatches"] + f["pp"] - 1),
        ),
    ),
    Misconception(
        "bubble not divided by the chunks",
        "With v stages on each GPU, each of the P − 1 waits is for a stage 1/v as long.",
        off_by(BUBBLE, lambda f: f["chunks"]),
    ),
    Misconception(
        "bubble of P stages",
        "The last stage waits for P − 1 others, not for P.",
        off_by(BUBBLE, lambda f: f["pp"] / (f["pp"] - 1)),
    ),
    Misconception(
        "recomputation counted in MFU",
        "That is HFU, the hardware's utilization. MFU counts what the model needs once, so "
        "recomputation lowers it.",
        off_by(MFU, lambda f: passes(f) / 3),
    ),
    Misconception(
        "one replica's work over all GPUs",
        "All GPUs together compute the batch of all replicas: b · M · d samples.",
        off_by(MFU, lambda f: 1 / f["dp"]),
    ),
    Misconception(
        "relative to what products reach",
        "MFU is relative to the peak, not to what matrix products reach of it.",
        off_by(MFU, lambda f: 1 / f["efficiency"]),
    ),
)

# GPT-3's sizes, with a vocabulary that 8 divides, in a layout of our own
GPT3 = {"width": 12288, "layers": 96, "heads": 96, "vocabulary": 51200, "time": 2048}
A100 = {"flops": 312e12, "efficiency": 0.6, "node": 8, "nvlink": 300.0, "network": 1600.0}
EXAMPLE = {"dp": 16, "tp": 8, "pp": 12, "microbatch": 1, "microbatches": 96, "chunks": 1}

STEP = Exercise(
    number="25b",
    function="step_seconds",
    title="A step on paper",
    points=10,
    cases=cases,
    program=named,
    checks=tuple(part.check() for part in PARTS),
    least_received=lambda case: [0],
    misconceptions=MISTAKES,
    hints=(
        "Follow one microbatch through one layer: which products does it meet, and how many "
        "all-reduces? Then count how many layers and microbatches a GPU has in a step.",
        "Of one layer, forward takes 2 · 12h² operations for each token, and 4sh for its scores. "
        "Add them up for b · s tokens. For each all-reduce, first ask whether its group fits into "
        "a node: tp GPUs are neighbours, and a dp group reaches over t · d GPUs.",
        "Passes: 3 times forward, or 4 with recomputation. All-reduces of a layer: 4, or 6. The "
        "bubble is (P − 1)/(vM) of the first two. MFU's numerator has 3 times forward, always, for "
        "all layers and the samples of all replicas. Its denominator has all GPUs at their peak.",
    ),
    questions=(
        Question(
            "bubble",
            "GPT-3, 12 stages, 96 microbatches: by what percentage does the bubble lengthen a step "
            "that consists of products and all-reduces? (One decimal.)",
            lambda: given_case(GPT3 | A100 | EXAMPLE | {"recompute": "full"}),
            lambda trial: round(
                100
                * trial.results[0]["bubble"]
                / (trial.results[0]["matmul"] + trial.results[0]["tp"]),
                1,
            ),
            "%",
        ),
    ),
)
EXERCISES = [STEP]
