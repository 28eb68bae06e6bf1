"""Exercise 25a: what a GPU of the first stage holds at the peak of a step.

Model states are those of parallel101/cost/model_states.py, "mixed, fp32 gradients". Activations are
counted as in Korthikanti et al. (arXiv 2205.05198), section 4, without dropout and with fused
attention, and those in flight as in section 4.3.
"""

from __future__ import annotations

from collections.abc import Callable

from parallel101.laboratory.exercises.estimate_exercises import (
    EstimatePart,
    Facts,
    answers,
    estimate_case,
    named,
    off_by,
)
from parallel101.laboratory.grade.exercise import Case, Draw, Exercise, Misconception, Question

SHAPE = ("width", "layers", "heads", "vocabulary", "time")
LAYOUT = (
    "dp",
    "tp",
    "pp",
    "microbatch",
    "microbatches",
    "chunks",
    "recompute",
    "zero_stage",
    "sequence_parallel",
)


def memory_case(draw: Draw, *, dp: int, tp: int, pp: int, microbatches: int, **others) -> Case:
    """A layout of a model whose sizes are drawn."""
    heads = 8 * draw.integer(2, 4) * (1 if tp == 1 else tp)
    facts = {
        "width": 128 * heads,
        "layers": pp * others.get("chunks", 1) * draw.integer(2, 4),
        "heads": heads,
        "vocabulary": 1024 * draw.integer(32, 128),
        "time": 1024 * draw.integer(1, 4),
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "microbatch": draw.integer(1, 2),
        "microbatches": microbatches,
        "chunks": 1,
        "recompute": "none",
        "zero_stage": 0,
        "sequence_parallel": False,
    } | others
    return given_case(facts)


def given_case(facts: Facts) -> Case:
    arguments = [{name: facts[name] for name in names} for names in (SHAPE, LAYOUT)]
    note = (
        f"dp {facts['dp']} × tp {facts['tp']} × pp {facts['pp']}, {facts['microbatches']} "
        f"microbatches, ZeRO {facts['zero_stage']}"
    )
    note += ", recomputation" * (facts["recompute"] == "full")
    note += f", {facts['chunks']} chunks" * (facts["chunks"] > 1)
    note += ", sequence parallel" * facts["sequence_parallel"]
    return estimate_case(arguments, note, **facts)


def cases(draw: Draw) -> list[Case]:
    """Each option alone, and several together."""
    return [
        memory_case(draw, dp=4, tp=1, pp=4, microbatches=draw.integer(10, 40)),
        memory_case(draw, dp=8, tp=4, pp=8, microbatches=64, zero_stage=1),
        memory_case(draw, dp=16, tp=8, pp=6, microbatches=30, zero_stage=2, sequence_parallel=True),
        memory_case(draw, dp=3, tp=8, pp=8, microbatches=draw.integer(2, 5)),
        memory_case(draw, dp=8, tp=2, pp=5, microbatches=35, recompute="full", zero_stage=1),
        memory_case(
            draw, dp=2, tp=8, pp=4, microbatches=16, recompute="full", sequence_parallel=True
        ),
        memory_case(
            draw, dp=6, tp=4, pp=4, microbatches=24, chunks=draw.integer(2, 4), zero_stage=2
        ),
    ]


WEIGHTS = EstimatePart("weights", "bytes of the weights")
GRADIENTS = EstimatePart("gradients", "bytes of the gradients")
OPTIMIZER = EstimatePart("optimizer", "bytes of the optimizer's state")
ACTIVATIONS = EstimatePart(
    "activations", "bytes of the activations", weight=2, also="activations_input_once"
)
STATES = (WEIGHTS, GRADIENTS, OPTIMIZER)

# ---- mistakes ----


def all_states(*factors: Callable[[Facts], float]):
    """The same mistake in weights, gradients and optimizer state, or in one of them."""
    rules = [off_by(part, *factors) for part in STATES]
    return lambda trials: any(rule(trials) for rule in rules)


def kept(**changes):
    """The factor of activations that are right for other facts."""

    def factor(facts: Facts) -> float:
        other = {
            name: change(facts) if callable(change) else change for name, change in changes.items()
        }
        return answers().activations({**facts, **other}, {}) / answers().activations(facts, {})

    return factor


def embedding(facts: Facts) -> float:
    """The embedding's part of the parameters."""
    return facts["vocabulary"] * facts["width"] / facts["tp"] / answers().parameters(facts)


def microbatches_kept(count: Callable[[Facts], float]):
    """Another number of microbatches in flight, each with all layers of the stage."""

    def factor(facts: Facts) -> float:
        whole = answers().activations(facts, {})
        extra = answers().of_layer(facts) if facts["recompute"] == "full" else 0.0
        layers = count(facts) * facts["layers"] / facts["pp"]
        return ((whole - extra) * layers / answers().layers_kept(facts) + extra) / whole

    return factor


def without_recomputed(facts: Facts) -> float:
    extra = answers().of_layer(facts) if facts["recompute"] == "full" else 0.0
    return 1 - extra / answers().activations(facts, {})


MISTAKES = (
    Misconception(
        "numbers taken for bytes",
        "A weight has two bytes, a gradient four, and the optimizer's state of a weight twelve.",
        lambda trials: (
            off_by(WEIGHTS, lambda f: 1 / 2)(trials) and off_by(GRADIENTS, lambda f: 1 / 4)(trials)
        ),
    ),
    Misconception(
        "model not cut by tp",
        "Tensor parallel cuts the matrices of all layers and the embedding over t GPUs.",
        all_states(lambda f: f["tp"]),
    ),
    Misconception(
        "all layers on one stage",
        "A stage holds L/P layers.",
        all_states(lambda f: embedding(f) + (1 - embedding(f)) * f["pp"]),
    ),
    Misconception(
        "embedding forgotten",
        "The first stage also has the embedding. With a large vocabulary, it is as large as "
        "several layers.",
        all_states(lambda f: 1 - embedding(f)),
    ),
    Misconception(
        "embedding cut over the stages",
        "The embedding is on the first stage only. There it is cut over tp, and not over pp.",
        all_states(lambda f: 1 - embedding(f) + embedding(f) / f["pp"]),
    ),
    Misconception(
        "gradients in 16 bit",
        "The gradients are in fp32 here, although the weights are in bf16.",
        off_by(GRADIENTS, lambda f: 1 / 2),
    ),
    Misconception(
        "master weights forgotten",
        "Besides Adam's two averages, the optimizer keeps the weights in fp32: the model's own "
        "are only rounded copies of them.",
        off_by(OPTIMIZER, lambda f: 8 / 12),
    ),
    Misconception(
        "ZeRO forgotten",
        ("ZeRO-1 cuts the optimizer's state over dp, and ZeRO-2 cuts the gradients, too."),
        lambda trials: (
            off_by(OPTIMIZER, lambda f: f["dp"] if f["zero_stage"] else 1)(trials)
            or off_by(GRADIENTS, lambda f: f["dp"] if f["zero_stage"] == 2 else 1)(trials)
        ),
    ),
    Misconception(
        "ZeRO cuts too much",
        "ZeRO-1 cuts only the optimizer's state, and ZeRO-2 the gradients as well. Weights are "
        "cut from ZeRO-3 on.",
        lambda trials: (
            off_by(GRADIENTS, lambda f: 1 / f["dp"] if f["zero_stage"] == 1 else 1)(trials)
            or off_by(
                WEIGHTS,
                lambda f: 1 / f["dp"] if f["zero_stage"] else 1,
                lambda f: 1 / f["dp"] if f["zero_stage"] == 2 else 1,
            )(trials)
        ),
    ),
    Misconception(
        "one microbatch in flight",
        "1F1B starts more microbatches before the first one comes back. On the first stage, "
        "the activations of several are kept.",
        off_by(ACTIVATIONS, microbatches_kept(lambda f: 1)),
    ),
    Misconception(
        "all microbatches in flight",
        "That is GPipe. In 1F1B a stage starts no more microbatches than it has stages from "
        "itself to the last, before the first one comes back.",
        off_by(ACTIVATIONS, microbatches_kept(lambda f: f["microbatches"])),
    ),
    Misconception(
        "more in flight than there are",
        "With fewer microbatches than stages, not more than all of them are in flight.",
        off_by(ACTIVATIONS, kept(microbatches=lambda f: max(f["microbatches"], f["pp"]))),
    ),
    Misconception(
        "interleaving keeps as much as 1F1B",
        "The interleaved schedule starts P − 1 more chunks on the first GPU: it keeps "
        "1 + (P − 1)/(Pv) times as much.",
        off_by(ACTIVATIONS, kept(chunks=1)),
    ),
    Misconception(
        "tensor parallel cuts everything",
        "Tensor parallel cuts what is between a column and a row layer. What is outside, such "
        "as the norms' inputs, is whole on every GPU without sequence parallel.",
        off_by(ACTIVATIONS, kept(sequence_parallel=True)),
    ),
    Misconception(
        "sequence parallel forgotten",
        "Sequence parallel cuts along time what tensor parallel leaves whole.",
        off_by(ACTIVATIONS, kept(sequence_parallel=False)),
    ),
    Misconception(
        "activations not cut",
        "Queries, keys, values and the MLP's hidden features are cut over tp.",
        off_by(ACTIVATIONS, kept(tp=1)),
    ),
    Misconception(
        "recomputed layer forgotten",
        "With full recomputation, only the layers' inputs are kept. But while backward "
        "computes a layer again, all of its activations exist.",
        off_by(ACTIVATIONS, without_recomputed),
    ),
    Misconception(
        "recomputation forgotten",
        "With full recomputation, a layer keeps nothing but its input.",
        off_by(ACTIVATIONS, kept(recompute="none")),
    ),
    Misconception(
        "activations in fp32",
        "The activations are in bf16, with two bytes each.",
        off_by(ACTIVATIONS, lambda f: 2),
    ),
)

GPT3 = {"width": 12288, "layers": 96, "heads": 96, "vocabulary": 51200, "time": 2048}
EXAMPLE = {
    "dp": 16,
    "tp": 8,
    "pp": 12,
    "microbatch": 1,
    "microbatches": 96,
    "chunks": 1,
    "recompute": "full",
    "zero_stage": 0,
    "sequence_parallel": False,
}

MEMORY = Exercise(
    number="25a",
    function="memory",
    title="Bytes of the first stage",
    points=10,
    cases=cases,
    program=named,
    checks=tuple(part.check() for part in (*STATES, ACTIVATIONS)),
    least_received=lambda case: [0],
    misconceptions=MISTAKES,
    hints=(
        "First count the parameters of this GPU: whose matrices are on the first stage, and what "
        "cuts them? Then multiply by the bytes of each kind of state.",
        "A layer keeps 32sbh bytes for one microbatch: 8sbh outside of column … row, and 24sbh "
        "inside. Which of them does tp cut, and which only sequence parallel? Draw 1F1B's first "
        "row to see how many microbatches are in flight when the first backward begins.",
        "In flight are min(P, M) microbatches of L/P layers. With v chunks, the first GPU starts "
        "vP + P − 1 forwards of L/(Pv) layers. With full recomputation, each of them keeps "
        "2sbh, and one layer more has everything.",
    ),
    questions=(
        Question(
            "states",
            "GPT-3 on 1,536 GPUs, tp 8 and pp 12, without ZeRO: how many GB do weights, gradients "
            "and optimizer take on the first stage? (A whole number.)",
            lambda: given_case(GPT3 | EXAMPLE),
            lambda trial: round(
                sum(trial.results[0][name] for name in ("weights", "gradients", "optimizer")) / 1e9
            ),
            "GB",
        ),
    ),
)
EXERCISES = [MEMORY]
