"""In the style of nanoGPT: one script that trains alone or, if RANK is set, in a data-parallel job.

It runs when it is imported.
"""

from __future__ import annotations

import os
from contextlib import nullcontext

import torch
from torch.distributed import destroy_process_group, get_rank, get_world_size, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

gradient_accumulation_steps = 4
max_iters = 2
backend = "gloo"
ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend=backend)
    ddp_rank = int(os.environ["RANK"])
    ddp_local_rank = int(os.environ["LOCAL_RANK"])
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    assert (ddp_rank, ddp_world_size) == (get_rank(), get_world_size())
    master_process = ddp_rank == 0
    seed_offset = ddp_rank
    assert gradient_accumulation_steps % ddp_world_size == 0
    gradient_accumulation_steps //= ddp_world_size
else:
    master_process = True
    seed_offset = 0
    ddp_world_size = 1

torch.manual_seed(1337)
model = torch.nn.Sequential(
    torch.nn.Embedding(11, 8), torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 11)
).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
wrapped = DDP(model) if ddp else model
data = torch.randint(11, (64,), generator=torch.Generator().manual_seed(0)).view(4, 16)
losses = []
for _ in range(max_iters):
    for micro_step in range(gradient_accumulation_steps):
        last = micro_step == gradient_accumulation_steps - 1
        tokens = data[micro_step * ddp_world_size + seed_offset]
        with nullcontext() if last or not ddp else wrapped.no_sync():  # type: ignore[operator]
            logits = wrapped(tokens[:-1])
            loss = (
                torch.nn.functional.cross_entropy(logits, tokens[1:]) / gradient_accumulation_steps
            )
            loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item())
weights = [p.detach().sum().item() for p in model.parameters()]
if ddp:
    destroy_process_group()
