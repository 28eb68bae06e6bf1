"""Sharded products equal whole ones, their gradients too, and they send the bytes and take the
steps that the plan says.
"""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import parallel101 as p101
from parallel101 import cost
from parallel101.cost import Cost
from parallel101.sharding import Sharding, plan
from parallel101.sharding.notation import array_in
from tests.collectives.test_costs import by_span

LATENCY_ONLY = p101.Network(latency=1.0, bandwidth=math.inf)
SIZES = {"I": 5, "J": 7, "K": 6}  # none is a multiple of 4
FOUR_CASES = [
    "A[I_X, J] · B[J, K] → C[I_X, K]",
    "A[I, J_X] · B[J, K] → C[I, K]",
    "A[I, J_X] · B[J_X, K] → C[I, K]",
    "A[I, J_X] · B[J_X, K] → C[I, K_X]",
    "A[I, J_X] · B[J_X, K] → C[I, K] {U_X}",
    "A[I_X, J] · B[J, K_X] → C[I_X, K]",
    "A[I_X, J] · B[J, K_X] → C[I, K]",
]


def placements(name, dims, axes, unreduced=False):
    """An array with each axis on each of its dims, or on none, or unreduced."""
    places = [*range(len(dims)), None, *(["U"] if unreduced else [])]
    for chosen in product(places, repeat=len(axes)):
        cut = tuple(
            tuple(axis for axis, place in zip(axes, chosen) if place == d) for d in range(len(dims))
        )
        yield Sharding(
            name, tuple(dims), cut, tuple(axis for axis, place in zip(axes, chosen) if place == "U")
        )


def all_products(axes):
    for a, b, c in product(
        placements("A", "IJ", axes),
        placements("B", "JK", axes),
        placements("C", "IK", axes, unreduced=True),
    ):
        yield f"{a} · {b} → {c}"


def all_reshards(axes):
    for before, after in product(
        placements("A", "IJ", axes, unreduced=True), placements("A", "IJ", axes)
    ):
        yield f"{before} → {after}"


def run_plans(plans, blocks, mesh=None):
    """Each plan in a span of its own.

    Returns by plan (result, cotangent, gradients of the operands).
    """
    rank, made = dist.get_rank(), torch.Generator().manual_seed(dist.get_rank())
    found = []
    for number, (chosen, by_rank) in enumerate(zip(plans, blocks)):
        mine = [block.requires_grad_() for block in by_rank[rank]]
        dist.barrier()
        with p101.span(f"plan {number}"):
            result = chosen.run(*mine, mesh=mesh)
        y = torch.randn(result.shape, generator=made, dtype=result.dtype)
        (result * y).sum().backward()
        found.append((result.detach(), y, [block.grad for block in mine]))
    return found


def check(texts, mesh, sizes=SIZES, **launched):
    made = torch.Generator().manual_seed(0)
    plans, wholes = [], []
    for text in texts:
        dims = {dim: n for dim, n in sizes.items() if dim in text}
        plans.append(plan(text, mesh, dtype=torch.float64, **dims))
        wholes.append(
            [
                torch.randn([dims[d] for d in array.dims], generator=made, dtype=torch.float64)
                for array in plans[-1].operands
            ]
        )
    blocks = [chosen.shard(*whole) for chosen, whole in zip(plans, wholes)]
    run = p101.launch(run_plans, plans, blocks, world_size=math.prod(mesh.values()), **launched)
    counted = by_span(run.trace, "plan")
    for number, (text, chosen, whole) in enumerate(zip(texts, plans, wholes)):
        results, ys, gradients = zip(*(found[number] for found in run.results))
        expected = whole[0] @ whole[1] if len(whole) == 2 else whole[0]
        assert torch.allclose(chosen.unshard(results), expected, rtol=1e-10, atol=1e-12), text
        forward = sum((result * y).sum() for result, y in zip(results, ys))
        # the result is linear in each operand, and its backward is the adjoint
        for operand in range(len(whole)):
            back = sum(
                (by_rank[operand] * grads[operand]).sum()
                for by_rank, grads in zip(blocks[number], gradients)
            )
            assert torch.allclose(forward, back, rtol=1e-10), text
        replicas_agree(chosen, results, text)
        seconds, sent = counted[f"plan {number}"]
        assert sent == chosen.bytes_sent, text
        if launched["backend"] == "sim" and all(
            n >= chosen.world_size for n in chosen.sizes.values()
        ):
            assert seconds == chosen.rounds, text


def replicas_agree(chosen, results, text):
    """Ranks that differ only along axes of which the result knows nothing hold the same block."""
    held = {}
    for at, block in zip(chosen.coordinates(), results):
        key = tuple(i for axis, i in at.items() if axis in chosen.result.used)
        assert torch.allclose(held.setdefault(key, block), block, rtol=1e-12), text


def test_every_placement_on_one_axis():
    texts = [*all_products("X"), *all_reshards("X")]
    texts = [text for text in texts if possible(text, {"X": 4})]
    check(texts, {"X": 4}, backend="sim", network=LATENCY_ONLY)


def possible(text, mesh):
    """Whether the result can be reached: it can't be unreduced along an axis that sums nothing."""
    try:
        return plan(text, mesh, **{dim: n for dim, n in SIZES.items() if dim in text})
    except ValueError as error:
        if "there is no way" not in str(error):
            raise
        return False


def test_placements_on_several_axes():
    mesh, sizes = {"X": 2, "Y": 2, "Z": 2}, {"I": 9, "J": 11, "K": 10}
    texts = [*list(all_products("XYZ"))[::1499], *list(all_reshards("XYZ"))[::170]]
    texts = [text for text in texts if possible(text, mesh)]
    check(texts, mesh, sizes, backend="sim", network=LATENCY_ONLY)


def test_fewer_elements_than_ranks():
    check(FOUR_CASES, {"X": 4}, {"I": 2, "J": 3, "K": 1}, backend="sim")


def all_reduce_each(plans):
    for number, chosen in enumerate(plans):
        dist.barrier()
        with p101.span(f"plan {number}"):
            chosen.run(torch.ones([chosen.sizes[dim] for dim in chosen.result.dims]))


@pytest.mark.parametrize(
    "mesh", [{"X": 2, "Y": 3}, {"X": 1, "Y": 3}, {"X": 2, "Y": 2, "Z": 2}], ids=str
)
def test_an_all_reduce_over_several_axes_sends_the_bytes_of_the_plan(mesh):
    """Also of sizes that the axes do not divide, and of fewer elements than ranks."""
    axes, backwards = "".join(mesh), "".join(reversed(mesh))
    plans = [
        plan(f"A[I] {{U_{axes}}} → A[I]", mesh, I=n)
        for n in (1, 2, 3, 5, 7, 8, 12, 13, 24, 25, 36, 101)
    ]
    plans += [plan(f"A[I, J] {{U_{backwards}}} → A[I, J]", mesh, I=n, J=3) for n in (1, 4, 7)]
    run = p101.launch(all_reduce_each, plans, world_size=math.prod(mesh.values()), backend="sim")
    sent = [sent for _, sent in by_span(run.trace, "plan").values()]
    assert sent == [chosen.bytes_sent for chosen in plans]


def test_on_gloo_and_under_nccl_rules():
    check(FOUR_CASES, {"X": 3}, backend="gloo", trace=True)
    check(
        [*FOUR_CASES, "A[I_X, J] → A[I, J_X]"],
        {"X": 3},
        backend="sim",
        rules="nccl",
        network=LATENCY_ONLY,
    )


def on_a_device_mesh(chosen, blocks):
    """Four ranks: two meshes along X, and then one mesh of ranks 0 and 1 only."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("Y", "X"))
    x = [block.requires_grad_() for block in blocks[mesh.get_local_rank("X")]]
    along_x = chosen.run(*x, mesh=mesh["X"])
    with pytest.raises(
        ValueError, match=r"is for the mesh \{'X': 2\}, but this DeviceMesh has \{'Y': 2\}"
    ):
        chosen.run(*x, mesh=mesh["Y"])
    rank = dist.get_rank()
    mine = blocks[rank] if rank < 2 else [torch.empty(0, dtype=torch.float64)] * 2
    first = chosen.run(*[block.detach().requires_grad_() for block in mine])
    first.sum().backward()
    return along_x.detach(), first.detach()


def test_on_a_device_mesh_and_with_idle_ranks():
    chosen = plan(FOUR_CASES[1], {"X": 2}, dtype=torch.float64, **SIZES)
    a, b = torch.randn(5, 7, dtype=torch.float64), torch.randn(7, 6, dtype=torch.float64)
    run = p101.launch(on_a_device_mesh, chosen, chosen.shard(a, b), world_size=4, backend="sim")
    for along_x, _ in run.results:
        assert torch.allclose(along_x, a @ b)
    assert [first.shape for _, first in run.results] == [(5, 6), (5, 6), (0,), (0,)]


def test_the_books_plans():
    """The rule of each case, as the book states it, for square matrices."""
    expected = {
        FOUR_CASES[0]: ["A[I_X, J] · B[J, K] → C[I_X, K]"],
        FOUR_CASES[1]: ["AllGather_X A[I, J_X] → A[I, J]", "A[I, J] · B[J, K] → C[I, K]"],
        FOUR_CASES[2]: [
            "A[I, J_X] · B[J_X, K] → C[I, K] {U_X}",
            "AllReduce_X C[I, K] {U_X} → C[I, K]",
        ],
        FOUR_CASES[3]: [
            "A[I, J_X] · B[J_X, K] → C[I, K] {U_X}",
            "ReduceScatter_{X,K} C[I, K] {U_X} → C[I, K_X]",
        ],
        FOUR_CASES[4]: ["A[I, J_X] · B[J_X, K] → C[I, K] {U_X}"],
        FOUR_CASES[5]: ["AllGather_X B[J, K_X] → B[J, K]", "A[I_X, J] · B[J, K] → C[I_X, K]"],
    }
    for text, steps in expected.items():
        assert [str(step) for step in plan(text, {"X": 4}, I=8, J=8, K=8).steps] == steps
    assert [str(step) for step in plan("A[I_X, J] → A[I, J_X]", {"X": 4}, I=8, J=8).steps] == [
        "AllToAll_{X,J} A[I_X, J] → A[I, J_X]"
    ]
    two_axes = plan("A[I_XY, J] → A[I, J]", {"X": 2, "Y": 2}, I=8, J=8)
    assert [str(step) for step in two_axes.steps] == ["AllGather_XY A[I_XY, J] → A[I, J]"]


def test_no_alternative_gathers_an_axis_and_then_cuts_along_it():
    for text in all_products("X"):
        try:
            others = plan(text, {"X": 2}, **SIZES).alternatives
        except ValueError:  # a sum that no way gives
            continue
        for other in others:
            moves = {getattr(step, "operation", "a product") for step in other.steps}
            assert not {"AllGather", "Slice"} <= moves, (text, other.short)


def test_question_4_the_cheaper_strategy_depends_on_the_shape():
    """Gathering B sends its DF, reducing C sends twice its BF: so the second is cheaper if D >
    2B.
    """
    text = "A[B, D] · W[D_X, F] → C[B, F]"
    assert plan(text, {"X": 4}, B=16, D=16, F=8).short.startswith("AllGather_X W, multiply")
    assert plan(text, {"X": 4}, B=16, D=64, F=8).short.startswith(
        "Slice_{X,D} A, multiply, AllReduce_X C"
    )
    assert (
        plan(text, {"X": 4}, B=16, D=64, F=8)
        .alternatives[0]
        .short.startswith("AllGather_X W, multiply")
    )


@pytest.mark.parametrize(
    "text",
    [*FOUR_CASES, "A[I_X, J] → A[I, J_X]", "A[I_XY, J] → A[I, J]", "A[I, J] {U_XY} → A[I, J]"],
)
def test_bytes_and_steps_are_those_of_the_closed_forms(text):
    chosen = plan(text, {"X": 4, "Y": 2}, **{dim: 8 for dim in "IJK" if dim in text})
    forms = {
        "AllGather": "all_gather",
        "ReduceScatter": "reduce_scatter",
        "AllReduce": "all_reduce",
        "AllToAll": "all_to_all",
    }
    costs = []
    for step in chosen.steps:
        if step.title != "multiply" and len(step.axes) == 1:
            whole = step.after if step.operation == "AllGather" else step.before
            nbytes = 4 * math.prod(
                part.stop - part.start
                for part in whole.block(chosen.sizes, chosen.mesh, {"X": 0, "Y": 0})
            )
            algorithm = "pairwise" if step.operation == "AllToAll" else "ring"
            costs.append(cost.closed_form(forms[step.operation], algorithm, 4, nbytes))
        elif (
            step.title != "multiply"
        ):  # both axes: one ring after the other, on an array of 256 bytes
            costs.append(
                Cost(
                    (3 + 1) * (1 + (step.operation == "AllReduce")),
                    224 * (1 + (step.operation == "AllReduce")),
                    0,
                )
            )
    assert chosen.rounds == sum(c.steps for c in costs)
    assert set(chosen.bytes_sent) == {sum(c.sent for c in costs)}


def test_seconds_are_the_books():
    """Pop quiz 2 (TPU v5e has no rings of 4), question 2.1, and question 4's comparison with D
    > 5100 on TPU v5p.
    """
    bf16 = torch.bfloat16
    (quiz,) = plan("A[E_Y, F] → A[E, F]", {"X": 8, "Y": 4}, E=2048, F=8192, dtype=bf16).times(
        "TPU v5e"
    )
    assert quiz.seconds == pytest.approx(560e-6, rel=0.01)
    cube = {"X": 4, "Y": 4, "Z": 4}
    (question,) = plan("A[B_X, D_Y] → A[B, D_Y]", cube, B=1024, D=4096, dtype=bf16).times("TPU v4p")
    assert question.seconds == pytest.approx(2 * 1024 * 4096 / (9e10 * 4), rel=0.01)
    chosen = plan("A[B, D] · W[D_X, F] → C[B, F]", {"X": 16}, B=1024, D=8192, F=4096, dtype=bf16)
    cut, multiply, reduce = chosen.times("TPU v5p")
    _, math_of_strategy_1 = chosen.alternatives[0].times("TPU v5p")
    assert cut is None and multiply.seconds < reduce.seconds < math_of_strategy_1.seconds


def test_a_batch_and_named_axes():
    chosen = plan(
        "x[B_dp, T, D] @ w[D, F_tp] -> y[B_dp, T, F_tp]", {"dp": 2, "tp": 2}, B=4, T=3, D=5, F=6
    )
    assert chosen.bytes_sent == [0] * 4
    assert str(array_in("A[I_{dp,tp}, J_XY] {U_Z}")) == "A[I_{dp,tp}, J_XY] {U_Z}"
    batched = plan("Q[B_X, T, D] · K[B_X, S, D] → P[B_X, T, S]", {"X": 2}, B=4, T=3, D=5, S=6)
    assert batched.bytes_sent == [0] * 2


def test_what_is_printed():
    printed = str(plan(FOUR_CASES[1], {"X": 4}, I=8, J=8, K=8)).splitlines()
    assert printed[1].split("   ")[0].strip() == "AllGather_X A[I, J_X] → A[I, J]" and printed[
        1
    ].endswith("192 B in 3 steps")
    assert printed[-2:] == [
        "A rank sends 192 B in 3 steps.",
        "Or: Slice_{X,J} B, multiply, AllReduce_X C: 384 B in 6 steps, 256 flops",
    ]


WRONG = {
    "A[I_X, J_X] · B[J, K] → C[I, K]": r"A\[I_X, J_X\] uses the axis X twice",
    "A[I, J] · B[J, K_Z] → C[I, K]": "uses the axis Z, but the mesh has X, Y",
    "A[I, J] · B[J, K] → C[I_X, K_X]": "uses the axis X twice",
    "A[I, J] · B[J, K]": "expected one arrow",
    "A[I, J] · B[J, K → C[I, K]": "can't read 'B",
    "A[I J] · B[J, K] → C[I, K]": "can't read 'A",
    "A[I, J] · B[K, L] → C[I, K]": "only A has the dim J",
    "A[I, J] · B[J, K] → C[I, L]": "neither A nor B has it",
    "A[I, J] · A[J, K] → C[I, K]": "uses a name twice",
    "A[I_X, J] → C[I, J_X]": "the same array with the same dims",
    "A[I, J] → A[I, J] {U_X}": "there is no way to",
}


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_errors_of_a_text(text):
    with pytest.raises(ValueError, match=WRONG[text]):
        plan(text, {"X": 2, "Y": 2}, **{dim: 4 for dim in "IJKL" if dim in text})


def test_other_errors():
    with pytest.raises(ValueError, match="the size of K is missing"):
        plan(FOUR_CASES[0], {"X": 2}, I=4, J=4)
    with pytest.raises(ValueError, match="no array has a dim M"):
        plan(FOUR_CASES[0], {"X": 2}, I=4, J=4, K=4, M=4)
    chosen = plan(FOUR_CASES[0], {"X": 2}, I=4, J=4, K=4)
    with pytest.raises(ValueError, match=r"A has shape \(4, 5\): expected \(4, 4\)"):
        chosen.shard(torch.ones(4, 5), torch.ones(4, 4))
    with pytest.raises(ValueError, match="has 2 ranks, but this run has 1"):
        chosen.run(torch.ones(2, 4), torch.ones(4, 4))
    one = plan(FOUR_CASES[0], {"X": 1}, I=4, J=4, K=4)
    with pytest.raises(ValueError, match=r"has shape \(2, 4\), but expected \(4, 4\)"):
        one.run(torch.ones(2, 4), torch.ones(4, 4))
    with pytest.raises(ValueError, match=r"has dtype torch\.float64"):
        one.run(torch.ones(4, 4), torch.ones(4, 4, dtype=torch.float64))
    for call in (one.run, one.shard):
        with pytest.raises(TypeError, match="A is a list: expected a tensor"):
            call([1.0], torch.ones(4, 4))
    with pytest.raises(
        ValueError, match=r"unshard\(\) got 0 blocks: expected one of each of 1 ranks"
    ):
        one.unshard([])
    assert torch.equal(one.run(torch.ones(4, 4), torch.ones(4, 4)), torch.full((4, 4), 4.0))


def test_complex_numbers_infinities_and_nan_are_compared_as_numbers():
    a, b = torch.randn(5, 7), torch.randn(7, 6)
    product = p101.sharding.run(FOUR_CASES[2], a.cfloat() * 1j, b.cfloat(), mesh={"X": 3})
    assert product.wrong == []
    for number in (math.inf, math.nan):
        x = torch.tensor([1.0, 2.0, number])
        assert p101.sharding.run("A[I_X] → A[I]", x, mesh={"X": 2}).wrong == []
        other = p101.sharding.run("A[I_X] → A[I]", x, mesh={"X": 2}, program=lambda _, x=x: x + 1)
        assert other.wrong == [0, 1]


def test_run_checks_the_whole_product():
    a, b = torch.randn(5, 7), torch.randn(7, 6)
    ran = p101.sharding.run(FOUR_CASES[1], a, b, mesh={"X": 3})
    assert str(ran).endswith("C[I, K] on 3 ranks equals the whole A · B.") and ran.wrong == []
    assert ran.run.trace.bytes_sent == ran.plan.bytes_sent
    assert [list(state) for state in ran.held[0]] == [["A", "B"], ["A", "B"], ["A", "B", "C"]]
    unreduced = p101.sharding.run(FOUR_CASES[4], a, b, mesh={"X": 3})
    assert not unreduced.wrong and unreduced.found == array_in("C[I, K] {U_X}")
    partly = p101.sharding.run(
        FOUR_CASES[2],
        a,
        b,
        mesh={"X": 2},
        program=lambda x, y: p101.all_reduce(x @ y) + dist.get_rank(),
    )
    assert partly.wrong == [1] and "wrong on rank 1" in partly.verdict
    with pytest.raises(ValueError, match="expected J = 7, as in A"):
        p101.sharding.run(FOUR_CASES[1], a, a, mesh={"X": 3})
    with pytest.raises(ValueError, match="expected A and B, whole"):
        p101.sharding.run(FOUR_CASES[1], a, mesh={"X": 3})
    with pytest.raises(TypeError, match="B is a list: expected a tensor"):
        p101.sharding.run(FOUR_CASES[1], a, b.tolist(), mesh={"X": 3})
