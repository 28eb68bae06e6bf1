"""What autograd keeps for the backward pass is counted exactly, by module, by microbatch and over
time, on every trainer; and counting changes nothing.
"""

from __future__ import annotations

import gc
import threading
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import parallel101 as p101
from parallel101.models.gpt import GPT, GPTConfig, next_token_loss
from parallel101.models.mlp import MLP
from tests.trainers.cases import differing, on_mesh, on_ranks

B, H = 6, 8  # samples, features
ROW = 4 * B * H  # bytes of an activation


def step(model, x):
    model(x).square().mean().backward()


def counted(model, x, run=step):
    with p101.count_activations(model) as activations:
        run(model, x)
    return activations


def held(activations):
    return [change.held for change in activations.changes]


def test_an_mlp_keeps_each_gelus_input_and_output_until_its_backward():
    found = counted(MLP([H] * 4), torch.ones(B, H))  # the batch itself isn't counted
    assert [kept.nbytes for kept in found.kept] == [ROW] * 5  # two GELUs, and the square
    assert held(found) == [*range(ROW, 6 * ROW, ROW), *reversed(range(0, 5 * ROW, ROW))]
    assert found.peak == 5 * ROW == sum(found.by_module().values())
    assert {kept.dtype: kept.shape for kept in found.kept} == {"float32": (B, H)}
    assert list(found.by_module()) == ["", "layers.1", "layers.2", "(outside of the model)"]


def test_a_module_has_what_its_own_code_saves_and_a_shared_storage_counts_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(H, H), nn.Linear(H, H)

        def forward(self, x):
            y = x.sin()  # saves x, which is the batch
            # one storage for the layers and their views
            return (self.a(y) + self.b(y[:3]).sum(0)).tanh()

    found = counted(Twice(), torch.ones(B, H, requires_grad=True))
    assert found.by_module() == {"a": ROW, "": ROW}  # tanh's result, which the square saves, too
    assert "(the model)" in str(found)


def test_what_is_in_memory_anyway_is_not_counted():
    norm = nn.BatchNorm1d(H, affine=False)
    x = torch.ones(B, H)
    found = counted(nn.Sequential(nn.Linear(H, H), norm), x)
    # the norm's input, mean and rstd, and the square's; not its buffers
    assert sorted(kept.nbytes for kept in found.kept) == [4 * H, 4 * H, ROW, ROW]
    with torch.no_grad():
        assert counted(norm, x, lambda model, x: model(x)).peak == 0
    assert str(p101.count_activations(norm).__enter__()).startswith("no activations")


def test_nothing_is_kept_alive_and_torch_is_as_it_was():
    before = saved_tensors_hooks.__enter__
    model, x = MLP([H] * 4), torch.ones(B, H)

    def without_backward(model, x):
        y = model(x)  # saved, and freed with its graph
        assert saved_tensors_hooks.__enter__ is not before
        del y

    gc.disable()  # no cycle holds the graph
    try:
        assert held(counted(model, x, without_backward))[-1] == 0
    finally:
        gc.enable()
    with pytest.raises(ValueError, match="its own"):
        counted(model, x, lambda model, x: (_ for _ in ()).throw(ValueError("its own")))
    assert saved_tensors_hooks.__enter__ is before
    assert not any(module._forward_hooks for module in model.modules())


def test_what_a_checkpoint_recomputes_counts_while_it_is_there():
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(H, H), nn.Tanh()) for _ in range(3)))

    def recomputing(model, x):
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=False)
        x.square().mean().backward()

    plain, found = counted(layers, torch.ones(B, H)), counted(layers, torch.ones(B, H), recomputing)
    assert plain.peak == 3 * ROW
    # forward keeps two inputs, and what is squared; backward adds one result of tanh at a time
    assert [n // ROW for n in held(found)] == [1, 2, 3, 4, 3, 2, 3, 2, 1, 2, 1, 0]


def test_what_another_thread_recomputes_counts_as_on_a_gpu():
    layer, x = nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.Tanh()), torch.ones(B, H)

    def elsewhere(model, x):
        y = checkpoint(model, x, use_reentrant=False).square().mean()
        thread = threading.Thread(target=y.backward)
        thread.start()
        thread.join()

    found = counted(layer, x, elsewhere)
    # what is squared, and then two results of tanh
    assert [n // ROW for n in held(found)] == [1, 0, 1, 2, 1, 0]


# ── trainers ──


def gpt_step(build, **options):
    model = GPT(GPTConfig(13, context=8, layers=4, heads=2, width=16))
    trainer = build(model, next_token_loss, torch.optim.SGD, **{"verify": False, **options})
    tokens = torch.randint(13, (8, 9), generator=torch.Generator().manual_seed(0))
    x, y = trainer.share((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    with p101.count_activations(trainer) as activations:
        trainer.step(x, y)
    return activations, trainer.describe()


def every_trainer():
    """Of data parallel, also with two microbatches; of the peaks of all others."""
    sharded = [partial(p101.ShardedTrainer, zero_stage=stage) for stage in (1, 2, 3)]
    whole, *zero = (gpt_step(build)[0].peak for build in (p101.DataParallelTrainer, *sharded))
    tensor = [
        gpt_step(p101.TensorParallelTrainer, sequence_parallel=cut)[0].peak for cut in (False, True)
    ]
    return gpt_step(p101.DataParallelTrainer, accumulate=2), whole, zero, tensor


def test_a_rank_holds_what_its_share_or_its_part_needs_and_the_table_says_so():
    for (halves, table), data, zero, (tensor, sequence) in on_ranks(2, every_trainer):
        assert zero == [data] * 3
        assert data < sequence < tensor < 2 * data  # tensor parallel has the whole batch
        # an int64 target a token more in all microbatches, and the scalars of the loss
        assert halves.peak == pytest.approx(data / 2, rel=1e-3)
        assert halves.by_microbatch() == {0: halves.peak}
        assert held(halves)[-1] == 0
        assert table.bytes["activations (peak)"] == [halves.peak] * 2
        assert [phase.name for phase in halves.phases[1:]] == ["forward", "backward"] * 2


def pipelines():
    schedules = ("gpipe", "1f1b", "zb-h1")
    return [gpt_step(p101.PipelineTrainer, schedule=name, microbatches=4)[0] for name in schedules]


def test_a_pipelines_first_stage_holds_as_many_microbatches_as_its_schedule_says():
    (gpipe, one_f_one_b, zero_bubble), last = on_ranks(2, pipelines)
    assert list(gpipe.by_microbatch()) == [0, 1, 2, 3]
    assert list(one_f_one_b.by_microbatch()) == [0, 1] == list(zero_bubble.by_microbatch())
    assert gpipe.peak == 2 * one_f_one_b.peak == 2 * zero_bubble.peak
    assert {kept.phase.stage for kept in gpipe.kept} == {0}
    assert list(last[1].by_microbatch()) == [0]
    # what a linear layer needs for its weight gradient stays until W
    kinds = [zero_bubble.phases[change.phase].name for change in zero_bubble.changes]
    freed = {kind for kind, change in zip(kinds, zero_bubble.changes) if not change.saved}
    assert freed == {"input gradient", "weight gradient"}


def on_meshes():
    """What is held at the end of a step, and the most."""
    found = [
        gpt_step(on_mesh("dp 2, tp 2"), zero_stage=3, sequence_parallel=True)[0],
        gpt_step(on_mesh("tp 2, pp 2"), sequence_parallel=True)[0],
        gpt_step(on_mesh("dp 2, pp 2"), zero_stage=3)[0],
    ]
    return [(held(activations)[-1], activations.peak) for activations in found]


def test_on_a_mesh_all_is_freed_at_the_end_of_the_step():
    for found in on_ranks(4, on_meshes):
        assert all(last == 0 < peak for last, peak in found)


def two_steps(count):
    """The weights after them, and the peaks: the first one is verified, which isn't counted."""
    trainer = p101.ShardedTrainer(MLP([H] * 4), F.mse_loss, torch.optim.SGD)
    x, peaks = torch.linspace(-1, 1, B * H).view(B, H), []
    batch = trainer.share((x, x.sin()))
    for _ in range(2):
        with p101.count_activations(trainer) if count else nullcontext() as activations:
            trainer.step(*batch)
        peaks += [activations.peak] if count else []
    return trainer.state_dict(), peaks


def test_counting_changes_no_number_and_leaves_out_what_is_compared():
    (plain, _), (with_count, (first, second)) = (
        on_ranks(2, two_steps, count)[0] for count in (False, True)
    )
    assert first == second > 0
    assert differing(plain, with_count, 0) == []
