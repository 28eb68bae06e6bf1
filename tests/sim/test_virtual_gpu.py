"""Virtual GPUs: what an operation on meta tensors costs, and what is counted."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

import parallel101 as p101
from parallel101.cost import kernels
from parallel101.cost.hardware import CHIPS
from parallel101.laboratory.sim import virtual_gpu as module
from parallel101.laboratory.sim.virtual_gpu import known_of, virtual_gpu
from parallel101.models import GPT, GPTConfig
from parallel101.models.gpt import next_token_loss

H100 = CHIPS["H100"]


def meta(*shape, dtype=torch.bfloat16, grad=False):
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=grad)


@contextlib.contextmanager
def kernels_of(seconds, flops=0, count=1):
    """Checks what the operations inside cost."""
    with virtual_gpu("H100") as gpu:
        before = gpu.busy, gpu.flops, gpu.kernels
        yield gpu
        assert gpu.busy - before[0] == pytest.approx(seconds, rel=1e-12)
        assert (gpu.flops - before[1], gpu.kernels - before[2]) == (flops, count)


def test_products():
    a, b, c = meta(256, 512), meta(512, 1024), meta(1024)
    seconds = kernels.product_seconds(H100, 256, 1024, 512)
    with kernels_of(seconds, 2 * 256 * 512 * 1024):
        a @ b
    with kernels_of(seconds, 2 * 256 * 512 * 1024):  # with its bias
        F.linear(a, b.t(), c)
    several = kernels.product_seconds(H100, 64, 64, 32, batch=12)
    with kernels_of(several, 2 * 12 * 64 * 64 * 32):
        torch.bmm(meta(12, 64, 32), meta(12, 32, 64))
    wide = kernels.product_seconds(H100, 64, 64, 32, itemsize=4)
    with kernels_of(wide, 2 * 64 * 64 * 32):
        meta(64, 32, dtype=torch.float32) @ meta(32, 64, dtype=torch.float32)


def test_convolutions_are_products():
    x, weight = meta(8, 6, 10, 10, grad=True), meta(4, 3, 3, 3, grad=True)  # of two groups
    flops = 2 * 8 * 8 * 8 * weight.numel()
    seconds = kernels.product_seconds(H100, 8 * 8 * 8, 2, 27, batch=2)
    with kernels_of(seconds, flops):
        y = F.conv2d(x, weight, groups=2)
    with kernels_of(2 * seconds, 2 * flops):
        y.backward(torch.empty_like(y))
    with kernels_of(seconds, flops):
        F.conv_transpose2d(y.detach(), weight.detach(), groups=2)


def test_products_of_groups():
    """Each expert multiplies its share of the rows, and the gradients have as many operations."""
    x, weights = meta(64, 32, grad=True), meta(4, 32, 16, grad=True)
    flops = 2 * 64 * 32 * 16
    with kernels_of(kernels.product_seconds(H100, 16, 16, 32, batch=4), flops):
        y = F.grouped_mm(x, weights, offs=torch.empty(4, dtype=torch.int32, device="meta"))
    with virtual_gpu("H100") as gpu:
        y.backward(torch.empty_like(y))
        assert gpu.flops == 2 * flops


def test_inference_mode_costs_what_no_grad_costs():
    """There torch doesn't take linear, attention and others apart."""
    counts = []
    for mode in (torch.no_grad(), torch.inference_mode()):
        with virtual_gpu("H100") as gpu, torch.device("meta"), mode:
            model = GPT(GPTConfig(width=64, heads=4, layers=2, vocabulary=128, dropout=0.1))
            model(torch.zeros(2, 64, dtype=torch.long))
            F.rms_norm(torch.ones(4, 4), (4,))
            counts.append((gpu.count(), gpu.kernels))
    assert counts[0] == counts[1]
    assert counts[0][0].flops > 0


@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention_is_one_kernel_each_way(causal):
    q, k, v = (meta(2, heads, 512, 64, grad=True) for heads in (8, 2, 2))
    flops = 4 * 2 * 8 * 512 * 512 * 64 // (2 if causal else 1)
    with virtual_gpu("H100") as gpu:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        assert (gpu.kernels, gpu.flops) == (1, flops)
        assert gpu.live < 1.1 * y.nbytes  # no (time, time) matrix
        y.backward(torch.empty_like(y))
        assert (gpu.kernels, gpu.flops) == (2, 3.5 * flops)
    assert k.grad.shape == k.shape


def test_attention_with_a_mask_computes_all_of_it():
    q = meta(2, 8, 64, 32, grad=True)
    flops = 4 * 2 * 8 * 64 * 64 * 32
    with virtual_gpu("H100") as gpu:
        y = F.scaled_dot_product_attention(q, q, q, attn_mask=meta(64, 64))
        assert gpu.flops == flops
        y.backward(torch.empty_like(y))
        assert gpu.flops == 3.5 * flops


@pytest.mark.parametrize("shape", [(8, 64, 32), (64, 32), (2, 3, 8, 64, 32)])
def test_attention_of_other_shapes(shape):
    q, v = meta(*shape), meta(*shape[:-1], 16)
    with virtual_gpu("H100"):
        assert F.scaled_dot_product_attention(q, q, v, is_causal=True).shape == v.shape


MOVED = {  # an operation on two tensors: how many times the bytes of one it moves
    "add": (lambda x, y: x + y, 3),
    "add_": (lambda x, y: x.add_(y), 3),
    "gelu": (lambda x, y: F.gelu(x), 2),
    "copy_": (lambda x, y: x.copy_(y), 2),
    "zero_": (lambda x, y: x.zero_(), 1),
    "zeros": (lambda x, y: torch.zeros_like(x), 1),
    "softmax": (lambda x, y: x.softmax(-1), 2),
    "views": (lambda x, y: x.view(-1).unflatten(0, (64, -1)).t(), 0),
    "empty": (lambda x, y: torch.empty_like(x), 0),
    "expanded": (lambda x, y: x + y[:1].expand(64, -1), 2 + 1 / 64),
    "foreach": (lambda x, y: torch._foreach_add_([x, x], [y, y]), 6),
    "foreach_copy_": (lambda x, y: torch._foreach_copy_([x, x], [y, y]), 4),
    "foreach_zero_": (lambda x, y: torch._foreach_zero_([x, x]), 2),
    "out": (lambda x, y: torch.add(x, y, out=x), 3),
}


@pytest.mark.parametrize(("operation", "moved"), MOVED.values(), ids=MOVED)
def test_everything_else_by_the_bytes_that_it_moves(operation, moved):
    x, y = meta(64, 4096), meta(64, 4096)
    with kernels_of(kernels.memory_seconds(H100, moved * x.nbytes), count=bool(moved)):
        operation(x, y)


def test_a_lookup_reads_rows_and_not_the_table():
    table, numbers = meta(5_000_000, 64), torch.empty(100, dtype=torch.long, device="meta")
    with kernels_of(kernels.memory_seconds(H100, 2 * 100 * 64 * 2 + 100 * 8)):
        F.embedding(numbers, table)
    with virtual_gpu("H100") as gpu:
        F.embedding_bag(numbers.view(10, 10), table)
        table.index_copy_(0, numbers, meta(100, 64))
        table.take(numbers)
        assert gpu.busy < kernels.memory_seconds(H100, table.nbytes)


def test_norms_and_dropout_are_one_kernel_and_keep_their_input():
    x, weight = meta(8, 128, 256, grad=True), meta(256, grad=True)
    with virtual_gpu("H100") as gpu:
        y = F.rms_norm(x, (256,), weight)
        assert (gpu.kernels, gpu.live) == (1, y.nbytes + 2 * 8 * 128 * 4)
        z = F.dropout(x, 0.1, True)
        assert (gpu.kernels, gpu.live) == (2, y.nbytes + 2 * 8 * 128 * 4 + z.nbytes + x.numel())


def test_an_optimizer_may_be_fused():
    weights = [meta(64, 64, dtype=torch.float32).requires_grad_() for _ in range(5)]
    for w in weights:
        w.grad = torch.empty_like(w)
    with virtual_gpu("H100") as gpu:
        optimizer = torch.optim.AdamW(weights, fused=True)
        optimizer.step()
        before, busy = gpu.kernels, gpu.busy
        optimizer.step()
        moved = 5 * 64 * 64 * 4 * 7  # weights, m and v are read and written, gradients read
        steps = 5 * 4  # a number for each weight
        assert gpu.kernels - before == 2  # one adds 1 to the steps
        assert gpu.busy - busy == pytest.approx(
            kernels.memory_seconds(H100, moved + steps) + kernels.memory_seconds(H100, 2 * steps)
        )
    with pytest.raises(RuntimeError, match="supported devices"):  # only there
        torch.optim.AdamW(weights, fused=True).step()


NUMBERS = {
    "item": lambda x: x.sum().item(),
    "cpu": lambda x: x.cpu(),
    "if": lambda x: bool(x[0] > 0),
    "tolist": lambda x: x.tolist(),
    "mask": lambda x: x[x > 0],
    "format": lambda x: f"{x.sum():.3f}",
}


@pytest.mark.parametrize("program", NUMBERS.values(), ids=NUMBERS)
def test_numbers_are_refused_in_words(program):
    refused = pytest.raises((RuntimeError, TypeError), match="A virtual GPU has no numbers")
    with refused, virtual_gpu("H100"):
        program(meta(2))


def test_ddp_is_refused_in_words():
    def program():
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))

    with pytest.raises(p101.RankFailed, match=r"DistributedDataParallel and FSDP \(use a trainer"):
        p101.launch(program, world_size=1, backend="sim", device="H100")


@pytest.mark.parametrize("message", ["can't convert meta device", "not compiled with CUDA enabled"])
def test_errors_of_torch_say_what_a_virtual_gpu_is(message):
    with pytest.raises(TypeError, match="launch without device="), virtual_gpu("H100"):
        raise TypeError(message)
    with pytest.raises(TypeError, match=r"^a program's own$"), virtual_gpu("H100"):
        raise TypeError("a program's own")


def test_what_the_meta_device_does_not_have_is_refused_in_words():
    with pytest.raises(RuntimeError, match=r"(?s)cpu.*A virtual GPU has no"), virtual_gpu("H100"):
        torch.add(torch.ones(2, 2), meta(2, 2))
    with virtual_gpu("H100"):
        with pytest.raises(RuntimeError, match="has tensors on the CPU and tensors on the meta"):
            torch.mm(torch.ones(2, 2), meta(2, 2))  # torch itself accepts it
        with pytest.raises(RuntimeError, match="must have same reduction dim"):  # torch's words
            meta(2, 2) @ meta(3, 3)
        for device in ("cpu", "cuda"):
            with pytest.raises(RuntimeError, match=r"torch\.autocast does nothing"):
                torch.autocast(device, torch.bfloat16)
    weight = meta(2).requires_grad_()
    weight.grad = meta(2)
    with pytest.raises(NotImplementedError, match="launch without device="), virtual_gpu("H100"):
        torch.optim.SGD([weight], fused=True).step()


def test_numbers_on_the_cpu_that_decide_a_shape_are_not_remembered():
    x = meta(4)
    with virtual_gpu("H100"):
        for kept in (4, 1):
            mask = torch.arange(4) < kept
            assert x[mask].shape == (kept,)


def train(model, steps):
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.zeros(2, 64, dtype=torch.long, device="meta")
    for _ in range(steps):
        optimizer.zero_grad()
        next_token_loss(model(batch), batch).backward()
        optimizer.step()


def forgetful(*args):
    return known_of(*args)._replace(outputs=None)


def test_what_is_remembered_is_what_torch_would_do(monkeypatch):
    """The same counts, when every operation asks torch for its shapes."""
    config = GPTConfig(width=64, heads=4, layers=2, vocabulary=128)
    counts = []
    for remember in (True, False):
        if not remember:
            monkeypatch.setattr(module, "KNOWN", {})
            monkeypatch.setattr(module, "known_of", forgetful)
        with virtual_gpu("H100") as gpu, torch.device("meta"):
            train(GPT(config), 3)
            counts.append((gpu.count(), gpu.live))
    assert counts[0] == counts[1]


def test_live_and_peak_bytes():
    with virtual_gpu("A100") as gpu:
        x = torch.empty(1000, device="meta")
        y = x[:10]
        del x
        assert gpu.live == 4000  # its view holds it
        z = torch.empty(500, device="meta")
        assert gpu.peak == 6000
        del y, z
    assert (gpu.live, gpu.peak) == (0, 6000)


def test_time_passes_in_spans_and_in_one_span_between_them():
    def program():
        x = torch.empty(1 << 20)
        with p101.span("forward"):
            y = x + 1
        y += 1
        y += 1
        with p101.span("backward"):
            pass
        return str(y.device)

    run = p101.launch(program, world_size=2, backend="sim", device="H100")
    assert run.results == ["meta"] * 2
    once = kernels.memory_seconds(H100, 8 << 20)
    spans = [(e.name, e.start, e.end) for e in run.trace.events if e.rank == 1]
    assert [name for name, _, _ in spans] == ["forward", "compute", "backward"]
    ends = [end for _, _, end in spans]
    assert ends[:2] == pytest.approx([once, 3 * once], rel=1e-6)
    assert run.trace.makespan == pytest.approx(run.gpus[0].busy)


def test_gpus_of_a_run():
    def program(rank_dependent):
        n = 64 << torch.distributed.get_rank() if rank_dependent else 64
        torch.ones(n, n) @ torch.ones(n, n)

    run = p101.launch(program, True, world_size=2, backend="sim", device="B200")
    assert [gpu.flops for gpu in run.gpus] == [2 * 64**3, 2 * 128**3]
    assert run.gpus[1].peak_bytes == 3 * 4 * 128**2
    assert p101.launch(lambda: None, world_size=1, backend="sim").gpus is None


def test_the_peak_does_not_count_what_was_there_before_training():
    with virtual_gpu("H100") as gpu, torch.device("meta"):
        whole = torch.empty(1000)
        part = whole[:10].clone()
        del whole
        with p101.span("forward"):
            torch.empty(20)
        assert gpu.count().peak_bytes == part.nbytes + 4 * 20


def test_outside_torch_is_as_before():
    q = meta(1, 1, 8, 8, grad=True)
    with virtual_gpu("H100"), virtual_gpu("A100"):
        pass
    y = F.scaled_dot_product_attention(q, q, q)
    assert "Flash" not in str(y.grad_fn)
