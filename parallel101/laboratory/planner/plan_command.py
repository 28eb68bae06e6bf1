"""`parallel101 plan`: lays out a model on a cluster, and says how long a step takes.

parallel101 plan --model llama-3-70b --gpus 1024
parallel101 plan --model 12288,96,96,51200,2048 --gpus 1024 --device A100 --attention unfused
parallel101 plan --model config.json --gpus 64 --layout tp=8,recompute=full --top 3
"""

from __future__ import annotations

import sys
from typing import Any, Literal

from parallel101.laboratory.option_types import Amount, Fields, Memory, OutputFile, PictureFile


def plan(
    *,
    model: str,
    gpus: int,
    device: str = "H100",
    batch_tokens: Amount | None = None,
    time: Amount | None = None,
    memory: Memory | None = None,
    nodes_of: int = 8,
    attention: Literal["fused", "unfused"] = "fused",
    ring: Literal["fused", "own"] = "fused",
    precision: Literal["bf16-mixed", "bf16", "fp16-mixed", "fp32"] = "bf16-mixed",
    layout: Fields | None = None,
    top: Amount = 10,
    all: bool = False,
    simulate: Amount = 3,
    json: OutputFile | None = None,
    picture: PictureFile | None = None,
) -> int:
    """Lay out the training of a model on many GPUs, and predict how long a step takes.

    It prints the quick model's plan, and then what virtual GPUs say of it.

    Args:
        model: llama-3-8b, llama-3-70b, llama-3-405b, gpt3-175b; h,L,a,V,s (width, layers, heads,
            vocabulary, time); or FILE.json: the config.json of a LLaMA on Hugging Face, or the
            fields of ModelShape: width, layers, heads, vocabulary and time, and if they differ from
            a GPT's kv_heads, feed_forward, gated, norm (layer or rms), biases, positions (learned
            or rotary), tied, attention, experts, top_k, dropout and name
        gpus: how many GPUs
        device: A100, H100, H200 or B200
        batch_tokens: tokens of a step, e.g. 4194304 or 4Mi (default: the model's own, or 4Mi)
        time: tokens of a sample (default: the model's own)
        memory: of a GPU, e.g. 72GB (default: the device's)
        nodes_of: GPUs of a node
        attention: unfused keeps matrices of (time, time)
        ring: attention along cp: fused kernels, or HybridTrainer's own, plain products in 32 bits
        precision: as HybridTrainer's
        layout: what is fixed and not searched, e.g. tp=8,pp=4,microbatch=2,recompute=full: any of
            dp, tp, pp, cp, ep, microbatch, microbatches, chunks, schedule, zero_stage, recompute,
            sequence_parallel, gradient_dtype, overlap, context
        top: how many layouts are shown, the fastest of each mesh
        all: show several layouts of one mesh, too
        simulate: how many of them are then run on virtual GPUs
        json: write everything to this file
        picture: write a picture: .svg, .html, or with Chromium .png

    Returns 0, or 1 if no layout fits. Raises ValueError for arguments that can't be.
    """
    from parallel101.laboratory.planner import search
    from parallel101.laboratory.planner.plan_report import quick_text, simulated_text

    options: dict[str, Any] = {"gpus": gpus, "device": device, "memory": memory}
    options |= {"time": time, "attention": attention, "ring": ring, "precision": precision}
    options |= {"batch_tokens": batch_tokens, "layout": layout, "top": top, "every": all}
    try:
        found = search.plan(model, nodes_of=nodes_of, simulate=0, **options)
    except search.NoLayoutError as error:
        print(f"parallel101 plan: {error}", file=sys.stderr)
        return 1
    print(quick_text(found), end="", flush=True)
    found = found.simulate(simulate)
    print(simulated_text(found), end="")
    files = {json: found.save, picture: lambda path: found.picture().save(path)}
    for path, write in files.items():
        if path:
            print(f"\nWrote {write(path)}.")
    return 0
