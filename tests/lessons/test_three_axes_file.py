"""The file that students copy: on every mesh it trains as one process does."""

from __future__ import annotations

import functools
import os
import re
import runpy
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import parallel101 as p101
from parallel101.trainers.schedules.gpipe_1f1b_zero_bubble import one_forward_one_backward
from tests.lessons.lesson import LESSONS

FILE = LESSONS / "three_axes.py"
CONFIG = {"vocabulary": 11, "context": 5, "layers": 3, "heads": 4, "width": 8}
CONFIG |= {"microbatches": 3, "lr": 1e-2, "clip": 0.2}
MESHES = [(3, 1, 1), (1, 3, 1), (1, 1, 4), (2, 1, 2), (1, 2, 2), (2, 2, 2)]  # (dp, pp, tp)
SAMPLES, STEPS = 14, 4  # shares and microbatches are uneven


def read():
    return SimpleNamespace(**runpy.run_path(str(FILE)))


def batches():
    shape = (STEPS, SAMPLES, CONFIG["context"] + 1)
    tokens = torch.randint(CONFIG["vocabulary"], shape, generator=torch.Generator().manual_seed(1))
    return [(text[:, :-1], text[:, 1:]) for text in tokens]


def train(mesh, zero_1):
    """Return losses and norms, and this rank's weights and gradients by name."""
    torch.set_default_dtype(torch.float64)
    file = read()
    trainer = file.Trainer(
        SimpleNamespace(**CONFIG), file.make_axes(*mesh), torch.device("cpu"), zero_1
    )
    printed = [trainer.step(*batch) for batch in batches()]
    parameters = dict(trainer.stage.named_parameters())
    return printed, {name: (p.detach(), p.grad) for name, p in parameters.items()}


def both(mesh):
    return [train(mesh, zero_1) for zero_1 in (False, True)]


def plain_gpt(w, tokens):
    """The logits of a GPT in plain torch, from its weights by name."""
    heads, (batch, time) = CONFIG["heads"], tokens.shape

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])

    def linear(x, name):
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    x = w["0.token.weight"][tokens] + w["0.position.weight"][:time]
    for layer in range(1, CONFIG["layers"] + 1):
        qkv = linear(norm(x, f"{layer}.norm1"), f"{layer}.qkv").view(batch, time, heads, 3, -1)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(time, time).triu(1).bool(), -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
        x = x + linear(mixed, f"{layer}.out")
        hidden = F.gelu(linear(norm(x, f"{layer}.norm2"), f"{layer}.up"))
        x = x + linear(hidden, f"{layer}.down")
    last = CONFIG["layers"] + 1
    return linear(norm(x, f"{last}.0"), f"{last}.1")


@pytest.fixture(scope="module")
def one_process():
    """Losses and norms, weights and gradients, of plain torch in one process."""
    torch.set_default_dtype(torch.float64)
    try:
        alone = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
        model = read().gpt(SimpleNamespace(**CONFIG), alone)
        w = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
        optimizer, printed = torch.optim.AdamW(w.values(), CONFIG["lr"]), []
        for inputs, targets in batches():
            optimizer.zero_grad()
            loss = F.cross_entropy(plain_gpt(w, inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            norm = nn.utils.clip_grad_norm_(w.values(), CONFIG["clip"])
            optimizer.step()
            printed.append((loss.item(), norm.item()))
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(norm > 1.1 * CONFIG["clip"] for _, norm in printed), "clipping is tested"
    return printed, {name: (p.detach(), p.grad) for name, p in w.items()}


def block(whole, part, tp, position):
    """Return the block of `whole` that a rank with `part` must have."""
    cut = [dim for dim, size in enumerate(part.shape) if size != whole.shape[dim]]
    return whole.chunk(tp, cut[0])[position] if cut else whole


@pytest.mark.parametrize("rules", ["nccl", "gloo"])
@pytest.mark.parametrize("mesh", MESHES)
def test_losses_gradients_and_weights_equal_one_process(mesh, rules, one_process):
    dp, pp, tp = mesh
    run = p101.launch(both, mesh, world_size=dp * pp * tp, backend="sim", rules=rules)
    expected, whole = one_process
    elements = torch.zeros(2)
    for rank, results in enumerate(run.results):
        for zero_1, (printed, parts) in enumerate(results):
            torch.testing.assert_close(printed, expected, rtol=0, atol=1e-10)
            for name, part in parts.items():
                wanted = [block(x, part[0], tp, rank % tp) for x in whole[name]]
                kinds = 2 - zero_1  # with ZeRO-1, a rank has the sums of its share only
                torch.testing.assert_close(
                    list(part)[:kinds], wanted[:kinds], rtol=0, atol=1e-10, msg=name
                )
                elements[zero_1] += part[0].numel()
    size = sum(p.numel() for p, _ in whole.values())
    cut = sum(p.numel() for name, (p, _) in whole.items() if re.search("qkv|up|out.w|down.w", name))
    assert elements.tolist() == [dp * (cut + tp * (size - cut))] * 2, "tp and pp cut the model"


def actions():
    """Return what this rank's stage does in a step, as 0F0 0F1 0B0 …"""
    file, done = read(), []
    axes = file.make_axes(1, 4, 1)
    trainer = file.Trainer(SimpleNamespace(**CONFIG), axes, torch.device("cpu"), zero_1=False)

    def noted(kind, carry_out, i):
        done.append(f"{axes.pp.rank()}{kind}{i}")
        carry_out(i)

    trainer.pipeline.forward = functools.partial(noted, "F", trainer.pipeline.forward)
    trainer.pipeline.backward = functools.partial(noted, "B", trainer.pipeline.backward)
    trainer.step(*batches()[0])
    return done


def test_the_pipeline_is_1f1b():
    run = p101.launch(actions, world_size=4, backend="sim", rules="nccl")
    for rank, done in enumerate(run.results):
        assert done == one_forward_one_backward(rank, 4, CONFIG["microbatches"], 1)


def test_buckets_leave_during_backward():
    run = p101.launch(train, (2, 1, 2), True, world_size=4, backend="sim", trace=True)
    sends = [event for event in run.trace.events if event.rank == 0 and event.kind == "send"]
    axes = [event.group.axis for event in sorted(sends, key=lambda event: event.posted)]
    first = axes.index("dp")  # the head's gradients; two all-reduces of activations are four sends
    block = ["tp"] * 4 + ["dp"]
    assert axes[first : first + 17] == ["dp", *block * CONFIG["layers"], "dp"]


def printed_by(command):
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=LESSONS.parent,
        env={**environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return [
        [float(number) for number in re.findall(r"[\d.]+", x)] for x in done.stdout.splitlines()
    ]


@pytest.mark.slow
def test_under_torchrun_it_prints_what_one_process_prints():
    rendezvous = "--rdzv-backend c10d --rdzv-endpoint localhost:0"  # a free port
    torchrun = f"-m torch.distributed.run --nproc-per-node 2 {rendezvous}"
    script = "lessons/three_axes.py --steps 3"
    alone = printed_by(script)
    assert [step for step, _, _ in alone] == [0, 2] and alone[1][1] < alone[0][1]
    two = printed_by(f"{torchrun} {script} --dp 2 --zero-1")
    torch.testing.assert_close(two, alone, rtol=0, atol=0.011)  # of printed digits


def test_a_mesh_that_does_not_fit_is_refused():
    command = [sys.executable, FILE, "--dp", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "error: expected dp" in done.stderr


def test_it_fits_on_a_few_slides():
    lines = FILE.read_text().splitlines()
    assert len(lines) <= 300 and max(map(len, lines)) <= 100
