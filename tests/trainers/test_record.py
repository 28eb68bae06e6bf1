"""What the record says of a step: the bytes that theory says along each axis, to whom, and messages
that leave while forward and backward still compute.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import parallel101 as p101
from parallel101.models.mlp import MLP
from tests.trainers.cases import (
    DATA,
    TASKS,
    on_mesh,
    randn,
    rows,
    seeded,
    sends_in,
    sgd,
    sizes_of,
    text,
    world_size,
)
from tests.trainers.models import BALANCED, TIME, mixture

SIM = {"backend": "sim"}
DOUBLE = 8  # bytes of a float64


def second_step(mesh, build, loss_fn, batch, options):
    """In the first step, stages also tell each other the shapes of their messages."""
    trainer = on_mesh(mesh)(build(), loss_fn, **{"optimizer": sgd, **options})
    share = trainer.share(batch)
    for name in ("first step", "step"):
        p101.barrier()
        with p101.span(name):
            trainer.step(*share)


def bytes_by_axis(mesh, build, loss_fn, batch, options=None, **where):
    n = world_size(mesh)
    arguments = mesh, build, loss_fn, batch, options or {}
    trace = p101.launch(second_step, *arguments, world_size=n, trace=True, **(where or SIM)).trace
    sent = Counter()
    for of_rank in sends_in(trace, "step"):
        for e in of_rank:
            sent[e.group.axis] += e.nbytes
    return sent


# ── dp: bytes ──

SIZES = [12, 24, 36, 48, 60, 72]  # 2, 3 and 4 divide every layer; no two layers are alike
LAYERS = [4 * (a * b + b) for a, b in zip(SIZES, SIZES[1:])]  # bytes
WAYS = {**DATA, "as it comes": {}}
RING = {"overlap": False, "algorithm": "ring"}
THEORY = {  # options, microbatches → how often (n−1)/n of the weights' bytes are sent
    (name, m): 2 for name in ("naive", "overlapped", "as it comes", "ZeRO-1") for m in (1, 3)
} | {
    ("ZeRO-2", 1): 2,
    ("ZeRO-2", 3): 3 + 1,  # stages 2 and 3 hold nothing to accumulate in
    ("ZeRO-3", 1): 3,
    ("ZeRO-3", 3): 3 * 3,
}
CLOCK = {"network": p101.Network(latency=1.0, bandwidth=1e6)}


def steps(settings, **options):
    """One step with each setting, begun after all ranks have met."""
    for i, (name, accumulate) in enumerate(settings):
        more = {"accumulate": accumulate, **WAYS[name], **options}
        trainer = on_mesh(f"dp {dist.get_world_size()}")(MLP(SIZES), F.mse_loss, sgd, **more)
        share = trainer.share((torch.ones(24, SIZES[0]), torch.ones(24, SIZES[-1])))
        p101.barrier()
        with p101.span(f"step {i}"):
            trainer.step(*share)


def of_weights(events):
    """Weights and gradients are float32; what ranks agree on is not."""
    return [e for e in events if "float32" in e.dtype]


def bytes_by_step(settings, p, backend="sim"):
    where = CLOCK if backend == "sim" else {}
    trace = p101.launch(steps, settings, world_size=p, backend=backend, trace=True, **where).trace
    sends = [sends_in(trace, f"step {i}") for i in range(len(settings))]
    return [[sum(e.nbytes for e in of_weights(of_rank)) for of_rank in step] for step in sends]


@pytest.mark.parametrize(("p", "backend"), [(1, "sim"), (3, "sim"), (4, "sim"), (2, "gloo")])
def test_bytes_are_those_of_theory(p, backend):
    """In every variant, however many microbatches: 2(n−1)/n of the gradients' bytes, and with
    ZeRO-3 3(n−1)/n of the weights'.
    """
    expected = [[times * (p - 1) * sum(LAYERS) // p] * p for times in THEORY.values()]
    assert bytes_by_step(list(THEORY), p, backend) == expected


def test_nothing_else_is_sent():
    """Before the step, a hash of the model and a seed; in it, a count of samples, then a loss,
    its weight and the unused parameters; and the bytes of the barrier.
    """
    p = 4
    trace = p101.launch(steps, [("overlapped", 1)], world_size=p, **SIM).trace
    agreed, met = (8 + 8 + 32) * (p - 1), math.ceil(math.log2(p))
    assert trace.bytes_sent == [2 * (p - 1) * sum(LAYERS) // p + agreed + met] * p


# ── the other axes: bytes ──

SAMPLES, NARROW, WIDE, PAIRS = 8, 4, 8, 4  # pairs of a column and a row layer
PAIRED = partial(MLP, [NARROW, WIDE] * PAIRS + [NARROW], dtype=torch.float64)
BATCH = randn(0, SAMPLES, NARROW), randn(1, SAMPLES, NARROW)


@pytest.mark.parametrize(
    ("backend", "mesh"),
    [("sim", "dp 2, tp 2, pp 2"), ("sim", "pp 4, dp 2"), ("gloo", "pp 2, tp 2")],
)
def test_bytes_along_dp_tp_and_pp(backend, mesh):
    """Counts of samples, losses and errors go among all ranks at once: the axis of those events
    has all names, such as "dp_tp_pp".
    """
    sizes = sizes_of(mesh)
    dp, tp, pp = (sizes.get(name, 1) for name in ("dp", "tp", "pp"))
    options = {"microbatches": 2}
    by_axis = bytes_by_axis(mesh, PAIRED, F.mse_loss, BATCH, options, backend=backend)
    assert by_axis.pop("_".join(sizes)) <= 6 * DOUBLE * world_size(mesh) ** 2
    # the gradients of all ranks along tp and pp
    weights = PAIRS * (2 * NARROW * WIDE + WIDE + NARROW * tp)
    activation = SAMPLES * NARROW  # of the whole batch, between two pairs
    expected = {
        "dp": 2 * (dp - 1) * weights * DOUBLE,
        # forward, and backward but for the first pair's inputs
        "tp": 2 * (tp - 1) * activation * (PAIRS + PAIRS - 1) * DOUBLE,
        # there and back, on every rank along tp
        "pp": 2 * (pp - 1) * activation * tp * DOUBLE,
    }
    assert by_axis == {axis: nbytes for axis, nbytes in expected.items() if nbytes}


ACTIVATIONS, POSITIONS = 5 * 6 * 24, 5 * 6  # of the whole batch, which dp shares out
# query, key and value share one all-reduce; a block has two in each direction, the embedding
# one, the head one, and the loss two
OF_A_GPT = (4 * 2 + 1 + 1) * ACTIVATIONS + (POSITIONS + 2 * 2) + 2 * POSITIONS
# norms, biases of rows, positions: summed by each of two replicas
PARTIAL = 2 * (4 * 24 + 2 * 24) + 2 * 24 + 7 * 24
ALL_REDUCED = [
    ("pairs", {}, 5 * (6 + 3 + 6)),
    ("tied gpt", {}, OF_A_GPT),
    ("tied gpt", TIME, OF_A_GPT + 2 * PARTIAL),
]


@pytest.mark.parametrize(("name", "options", "numbers"), ALL_REDUCED)
def test_bytes_along_tp(name, options, numbers):
    """With sequence parallel the same bytes, and the sums of gradients that are parts."""
    task = TASKS[name]
    options = {"loss_fn": task.loss_fn, **task.on_tp, **options}
    batch, loss_fn = tuple(t[:5] for t in task.batch(0)), options.pop("loss_fn")
    trace = p101.launch(
        *(second_step, "dp 2, tp 2", task.build, loss_fn, batch, options), world_size=4, **SIM
    ).trace
    along = [e for e in sum(sends_in(trace, "step"), []) if e.group.axis == "tp"]
    assert sum(e.nbytes for e in along if "float64" in e.dtype) == 2 * DOUBLE * numbers


@pytest.mark.parametrize("where", [SIM, {"backend": "gloo"}], ids=["sim", "gloo"])
def test_bytes_along_cp(where):
    task, samples, length, width, layers = TASKS["tied gpt"], 4, 6, 24, 2
    tokens = torch.arange(samples * (length + 1)).view(samples, -1) % 13
    batch = tokens[:, :-1], tokens[:, 1:]
    sent = bytes_by_axis("dp 2, cp 2", task.build, task.loss_fn, batch, **where)
    # keys and values of half of the positions, of each rank's 2 samples: forward 1; backward 1, and
    # their gradients 2
    assert sent["cp"] == 4 * layers * 4 * (2 * 2 * 3 * width * DOUBLE)
    # an all-reduce over all four: 2 · 3/4, but for what 4 doesn't divide and what ranks agree on
    gradients = sum(p.nbytes for p in task.build().parameters())
    assert 6 * gradients <= sent["dp_cp"] <= 6 * gradients + 6 * 8 * 4**2


def test_bytes_along_ep():
    """To an expert and back, forward and backward, of each row whose expert is on another rank."""
    tokens, targets = (t[:4] for t in text(0))
    model, width, away = mixture(), 8, 0
    for block in model.blocks:
        block.mlp.experts.register_forward_pre_hook(lambda _, args: rows_to.append(args[1]))
    for rank in range(4):  # rank 0 of ep has experts 0 and 1
        rows_to = []
        model(tokens[rank : rank + 1])
        away += sum(int(((choice < 2) == (rank % 2 == 1)).sum()) for choice in rows_to)
    # a learning rate of zero keeps the weights
    options = {"optimizer": partial(torch.optim.SGD, lr=0.0)}
    sent = bytes_by_axis("dp 2, ep 2", mixture, BALANCED, (tokens, targets), options)
    counts = 4 * 2 * 2 * 8  # each of 4 ranks tells another about 2 experts of each layer
    assert sent["ep"] == 4 * away * width * DOUBLE + counts
    of_experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    dense = sum(p.nbytes for p in model.parameters()) - of_experts
    # an all-reduce over n ranks sends 2(n − 1) times the bytes: dense over four ranks; half of the
    # experts over each pair along dp
    assert sent["dp"] == 2 * of_experts
    assert 6 * dense <= sent["dp_ep"] <= 6 * dense + 64 * len(list(model.parameters()))


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("dp 3", RING),
        ("dp 3", {**RING, "bucket_bytes": 0}),
        ("dp 3", {**RING, "zero_stage": 1}),
        ("tp 3", RING),
        ("tp 3", {}),
    ],
    ids=str,
)
def test_the_messages_are_the_algorithms(mesh, options):
    """A ring's go to the right neighbour only."""
    model = partial(MLP, [6, 30, 6], dtype=torch.float64)
    batch = randn(0, 6, 6), randn(1, 6, 6)
    arguments = mesh, model, F.mse_loss, batch, options
    trace = p101.launch(second_step, *arguments, world_size=3, **SIM).trace
    sends = [e for e in sends_in(trace, "step")[0] if e.nbytes > 64]
    assert {e.peer for e in sends} == ({1} if options else {1, 2})


# ── dp: when ──


def spans_in(trace, step, name, rank):
    """The spans of this name in a step of this rank."""
    (around,) = (e for e in trace.spans(step) if e.rank == rank)
    spans = [e for e in trace.spans(name) if e.rank == rank]
    return [e for e in spans if around.start <= e.start <= around.end]


def test_the_first_gradients_leave_before_the_last_is_ready(backend):
    settings = [(name, 1) for name in ("as it comes", "overlapped", "ZeRO-1", "ZeRO-2")]
    for overlap in (True, False):
        options = {"overlap": overlap, "bucket_bytes": LAYERS[-1]}
        where = {"world_size": 2, "backend": backend, "trace": True}
        trace = p101.launch(steps, settings, **options, **where).trace
        for i, rank in product(range(len(settings)), range(2)):
            first = of_weights(sends_in(trace, f"step {i}")[rank])[0].posted
            (backward,) = spans_in(trace, f"step {i}", "backward", rank)
            ready = spans_in(trace, f"step {i}", "gradient ready", rank)
            if overlap:
                last = {e.args["parameter"] for e in ready[-2:]}
                assert last == {"layers.0.weight", "layers.0.bias"}
                assert backward.start < first < ready[-1].start
            else:
                assert first >= (ready[-1].start if ready else backward.end)


def test_the_next_layer_is_on_its_way_before_this_one_ends(backend):
    ahead, on_demand = [], []
    for overlap, found in ((True, ahead), (False, on_demand)):
        where = {"world_size": 2, "backend": backend, "trace": True}
        trace = p101.launch(steps, [("ZeRO-3", 1)], overlap=overlap, **where).trace
        for rank in range(2):
            names = ("layer forward", "layer backward")
            spans = {
                (e.name, e.args["layer"]): e
                for name in names
                for e in trace.spans(name)
                if e.rank == rank
            }
            assert len(spans) == 2 * len(LAYERS)
            # a layer's block travels three times: gathered, gathered again, and its gradient
            for i, layer in enumerate(LAYERS):
                sends = of_weights(sends_in(trace, "step 0")[rank])
                forward, backward, gradient = (e.start for e in sends if e.nbytes == layer // 2)
                assert forward <= spans["layer forward", f"layers.{i}"].start
                assert backward <= spans["layer backward", f"layers.{i}"].start < gradient
                if i > 0:
                    found.append(forward < spans["layer forward", f"layers.{i - 1}"].end)
                if i < len(LAYERS) - 1:
                    found.append(backward < spans["layer backward", f"layers.{i + 1}"].end)
    assert all(ahead)
    assert not any(on_demand)


class TakesTime(nn.Module):
    """A layer whose forward and backward take a virtual rank so many seconds."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, seconds):
            ctx.seconds = seconds
            p101.compute(seconds[0])
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            p101.compute(ctx.seconds[1])
            return g, None

    def __init__(self, width, forward, backward, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(width, width, bias=False)
        self.seconds = forward, backward

    def forward(self, x):
        return self.Function.apply(self.linear(x), self.seconds)


def deep(overlap):
    model = nn.Sequential(*(TakesTime(10, 0.0, 10.0) for _ in range(6)))
    options = {"overlap": overlap, "bucket_bytes": 400}
    trainer = on_mesh("dp 2")(model, F.mse_loss, sgd, **options)
    x = torch.ones(2, 10)
    with p101.span("step"):
        trainer.step(*trainer.share((x, x)))


def test_time_is_saved_by_sending_while_computing():
    """Six layers of 10 s each; each gradient takes 2 s to be added up and 2 s to be told.

    With overlap, only these 4 s of the last layer and 2 s of the last but one are left when
    backward ends.
    """
    for overlap, left in ((False, 6 * 4.0), (True, 2.0 + 4.0)):
        where = {"network": p101.Network(latency=0.0, bandwidth=100.0), **SIM}
        trace = p101.launch(deep, overlap, world_size=2, **where).trace
        spans = trace.spans("backward")[0], trace.spans("synchronize")[0]
        assert [e.end - e.start for e in spans] == pytest.approx([60.0, left])


# ── tp: when ──


def a_pair(overlap):
    """A column layer whose input has a gradient, and a row layer."""
    layers = nn.Linear(4, 4), nn.Linear(4, 7), nn.GELU(), nn.Linear(7, 5)
    options = {"plan": {"1": "column", "3": "row"}, "overlap": overlap}
    trainer = on_mesh("tp 2")(seeded(nn.Sequential(*layers)), F.mse_loss, sgd, **options)
    trainer.step(randn(1, 5000, 4), randn(2, 5000, 5))


@pytest.mark.parametrize(("overlap", "sent"), [(True, (2, 2)), (False, (4, 0))])
def test_the_all_reduce_is_in_flight_while_the_weight_gradient_is_computed(overlap, sent):
    """Its two halves, each both ways."""
    trace = p101.launch(a_pair, overlap, world_size=2, trace=True).trace
    for rank in range(2):
        (backward,) = (e for e in trace.spans("backward") if e.rank == rank)
        computed = next(e for e in trace.spans("weight gradient") if e.rank == rank)
        posted = [
            e.posted
            for e in trace.events
            if e.rank == rank and e.kind in ("send", "recv") and e.group.axis == "tp"
            if backward.start < e.posted < backward.end
        ]
        assert sent == (
            sum(t < computed.start for t in posted),
            sum(t > computed.end for t in posted),
        )


# ── pp: to whom and when ──

MICROBATCHES = 8
NAMES = ("forward", "backward", "input gradient", "weight gradient")


def pipeline(schedule, chunks=1, steps=1, microbatches=MICROBATCHES):
    """A forward takes a second of a virtual rank's time, a backward two."""
    n = dist.get_world_size()
    model = nn.Sequential(*(TakesTime(6, 1.0, 2.0, s).double() for s in range(n * chunks)))
    options = {"schedule": schedule, "microbatches": microbatches, "chunks": chunks}
    trainer = p101.PipelineTrainer(model, F.mse_loss, sgd, **options, verify=False)
    for number in range(steps):
        p101.barrier()
        with p101.span(f"step {number}"):
            trainer.step(randn(0, 16, 6), randn(1, 16, 6))


def test_activations_go_to_the_next_stage_only_gradients_back_and_shapes_once():
    for schedule in ("zb-h2", "1f1b"):
        trace = p101.launch(pipeline, schedule, steps=2, world_size=3, **SIM).trace
        along = [e for e in trace.events if e.kind == "send" and e.group.axis == "pp"]
        tensors = [e for e in along if e.dtype == "float64"]
        ways = dict.fromkeys([(0, 1), (1, 2), (1, 0), (2, 1)], 2 * MICROBATCHES)
        assert Counter((e.rank, e.peer) for e in tensors) == ways
        assert {e.nbytes for e in tensors} == {16 // MICROBATCHES * 6 * DOUBLE}
        announced = Counter((e.rank, e.peer) for e in along if e.dtype == "int64")
        assert announced == {(0, 1): 1, (1, 2): 1}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"])
def test_a_run_takes_the_time_that_the_schedule_predicts(schedule):
    """On a virtual clock, where a forward takes one second and a backward two, all of it in its
    first half.
    """
    chunks = 2 if schedule == "interleaved" else 1
    where = {"world_size": 4, "network": p101.Network(latency=0.0, bandwidth=math.inf), **SIM}
    trace = p101.launch(pipeline, schedule, chunks=chunks, **where).trace
    spans = [e for name in NAMES for e in trace.spans(name)]
    run = max(e.end for e in spans) - min(e.start for e in spans)
    lists = p101.schedule(schedule, stages=4, microbatches=MICROBATCHES, chunks=chunks)
    assert run == pytest.approx(lists.time(forward=1.0, input_grad=2.0, weight_grad=0.0).makespan)


def messages(trace, rank, kind):
    """Of this rank along pp, in the second step."""
    (begun,) = (e.start for e in trace.spans("step 1") if e.rank == rank)
    of_rank = (e for e in trace.events if e.rank == rank and e.kind == kind and e.posted >= begun)
    return begun, [e for e in of_rank if e.group.axis == "pp"]


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_the_next_receive_is_posted_before_the_present_compute_ends(backend):
    """From the second message of a shape on, since the first one is announced."""
    where = {"world_size": 3, "backend": backend, "trace": True}
    trace = p101.launch(pipeline, "1f1b", steps=2, **where).trace
    for rank in range(3):
        begun, received = messages(trace, rank, "recv")
        spans = [e for name in NAMES for e in trace.spans(name) if e.rank == rank]
        computed = sorted((e for e in spans if e.start >= begun), key=lambda e: e.start)
        assert len(received) == MICROBATCHES * (1 if rank in (0, 2) else 2)
        for e in received:
            # the first that may use it
            user = next(i for i, span in enumerate(computed) if span.end >= e.end)
            assert e.posted <= computed[max(0, user - 1)].end


def test_lists_with_messages_are_carried_out_in_their_order():
    """From the second step on, when shapes are known."""
    rank_0 = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    rank_1 = "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    lists = p101.Schedule([rank_0.split(), rank_1.split()])
    trace = p101.launch(pipeline, lists, microbatches=2, steps=2, world_size=2, **SIM).trace
    for rank, expected in enumerate((["send"] * 2 + ["recv"] * 2, ["recv"] * 2 + ["send"] * 2)):
        of_rank = [e for kind in ("send", "recv") for e in messages(trace, rank, kind)[1]]
        assert [e.kind for e in sorted(of_rank, key=lambda e: e.posted)] == expected


class Counted(torch.autograd.Function):
    """An operation with weights of its own, which counts its backwards."""

    runs = 0

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, g):
        Counted.runs += 1
        x, weight = ctx.saved_tensors
        return g * weight, (g * x).sum(0)


class Scale(nn.Linear):
    def __init__(self):
        super().__init__(4, 4, dtype=torch.float64)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4, dtype=torch.float64))

    def forward(self, x):
        return Counted.apply(super().forward(x), self.scale)


def halves(mesh, build, loss_fn, options):
    Counted.runs = 0
    torch.manual_seed(0)
    trainer = on_mesh(mesh)(build(), loss_fn, sgd, schedule="zb-h1", **options)
    trainer.step(*(rows(4, 4)(0) if options["microbatches"] == 4 else text(0)))
    return Counted.runs


def test_a_split_backward_runs_each_half_once():
    """A custom backward runs once a microbatch, in the first half. With tp, I starts the all-reduce
    of the input's gradient and W computes the weight gradient, each once a microbatch.
    """
    pair = lambda: nn.Sequential(Scale(), Scale())  # noqa: E731
    arguments = "pp 2", pair, F.mse_loss, {"microbatches": 4}
    run = p101.launch(halves, *arguments, world_size=2, trace=True)
    assert run.results == [4, 4]
    for rank, half in ((rank, half) for rank in range(2) for half in NAMES[2:]):
        assert len([e for e in run.trace.spans(half) if e.rank == rank]) == 4
    task = TASKS["untied gpt"]
    arguments = "pp 2, tp 2", task.build, p101.vocabulary_cross_entropy
    trace = p101.launch(halves, *arguments, {"microbatches": 3, **TIME}, world_size=4, **SIM).trace
    for rank in range(4):
        assert len([e for e in trace.spans("weight gradient") if e.rank == rank]) == 3
