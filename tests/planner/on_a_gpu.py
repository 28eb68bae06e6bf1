"""Trains GPTs on this machine's GPU, and holds the planner's seconds and bytes of a step to it.

    python -m tests.planner.on_a_gpu --device H100

One GPU shows what the model says of kernels and of memory, and nothing of links.
"""

from __future__ import annotations

import argparse
import gc
import time
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import parallel101 as p101
from parallel101.models import GPT, GPTConfig

# width, layers, heads, vocabulary, tokens of a sample; samples of a step, and of a microbatch
MODELS = {
    "0.4B": ((1024, 24, 16, 50304, 2048), 16, 4),
    "1.3B": ((2048, 24, 16, 50304, 2048), 8, 2),
    "2.7B": ((2560, 32, 32, 50304, 2048), 4, 1),
    "1.8B, wide": ((4096, 8, 32, 50304, 4096), 4, 1),
}


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def compare(name: str, recompute: str, device: str) -> None:
    """Print a line: seconds and bytes of a step, as measured and as planned."""
    sizes, samples, microbatch = MODELS[name]
    width, layers, heads, vocabulary, context = sizes
    layout = {"tp": 1, "pp": 1, "microbatch": microbatch, "recompute": recompute}
    tokens = samples * context
    shape = ",".join(map(str, sizes))
    planned = p101.plan(
        shape, gpus=1, device=device, batch_tokens=tokens, layout=layout, simulate=0
    )[0]
    with torch.device("meta"):  # the model's own weights are drawn on the CPU, which takes minutes
        model = GPT(GPTConfig(vocabulary, context=context, layers=layers, heads=heads, width=width))
    model.to_empty(device="cuda")
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.02)
    optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    trainer = planned.trainer(model, cross_entropy, optimizer, verify=False)
    batch = torch.randint(0, vocabulary, (samples, context + 1))
    seconds = []
    for _ in range(8):
        began = time.perf_counter()
        trainer.step(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    took, peak = median(seconds[2:]), torch.cuda.max_memory_allocated()
    (memory,) = planned.memory
    print(
        f"{name:10} recompute {recompute:9} {took:7.4f} s, planned {planned.seconds:7.4f} "
        f"({planned.seconds / took - 1:+.1%});  {peak / 1e9:6.2f} GB, planned "
        f"{memory.total / 1e9:6.2f} ({memory.total / peak - 1:+.1%})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="H100", help="the planner's name for this GPU")
    device = parser.parse_args().device
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_default_device("cuda")
    for name in MODELS:
        for recompute in ("none", "full"):
            compare(name, recompute, device)
            gc.collect()  # a trainer is part of a reference cycle
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
