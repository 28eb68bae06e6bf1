"""picotron's parallel modules on CPUs, put together as in its train.py: a small Llama, random
weights, random tokens (its train.py downloads a model, a tokenizer and a data set).

    PYTHONPATH=picotron … picotron_steps.py --dp 2 --tp 2 --engine 1f1b

On CPUs, picotron needs two things removed first: the imports of flash_attn in picotron/model.py
and the calls of torch.cuda.synchronize().
"""

import argparse
import os
from types import SimpleNamespace

os.environ.update(FLASH_ATTEN="0", DEVICE="cpu", DTYPE="float32")

import picotron.process_group_manager as pgm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from picotron.context_parallel.context_parallel import apply_context_parallel
from picotron.data_parallel.data_parallel import DataParallelBucket
from picotron.model import Llama
from picotron.pipeline_parallel import pipeline_parallel
from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel
from picotron.utils import average_loss_across_dp_cp_ranks, set_all_seed

VOCABULARY, LENGTH, BATCH, MICROBATCHES, STEPS = 64, 32, 2, 4, 5


class Tokens:
    """Microbatches as picotron's MicroBatchDataLoader yields them, of random tokens."""

    grad_acc_steps = MICROBATCHES

    def __init__(self) -> None:
        here = pgm.process_group_manager
        self.random = torch.Generator().manual_seed(here.dp_rank)
        part = LENGTH // here.cp_world_size
        self.first, self.end = here.cp_rank * part, (here.cp_rank + 1) * part

    def __next__(self) -> dict:
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=self.random)
        positions = torch.arange(self.first, self.end).expand(BATCH, -1).contiguous()
        return {
            "input_ids": tokens[:, self.first : self.end].contiguous(),
            "target_ids": tokens[:, self.first + 1 : self.end + 1].contiguous(),
            "position_ids": positions,
            "hidden_states": None,
        }


def plain_step(model, data, synchronizes: bool) -> float:
    total = 0.0
    for micro in range(MICROBATCHES):
        if synchronizes:
            model.require_backward_grad_sync = micro == MICROBATCHES - 1
        batch = next(data)
        scores = model(input_ids=batch["input_ids"])
        loss = F.cross_entropy(scores.flatten(0, 1), batch["target_ids"].flatten()) / MICROBATCHES
        loss.backward()
        total += loss.item()
    return total


def main() -> None:
    parser = argparse.ArgumentParser()
    for axis in ("tp", "cp", "pp", "dp"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--engine", choices=("1f1b", "afab"), default="1f1b")
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    pgm.setup_process_group_manager(asked.tp, asked.cp, asked.pp, asked.dp)
    here = pgm.process_group_manager
    set_all_seed(42)
    sizes = SimpleNamespace(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_hidden_layers=4,
        max_position_embeddings=LENGTH,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
    )
    apply_context_parallel(None)  # sets a variable that the layers read
    model = Llama(config=sizes)
    if asked.tp > 1:
        model = apply_tensor_parallel(model)
    if asked.pp > 1:
        model = pipeline_parallel.PipelineParallel(model, sizes)
    if asked.dp > 1:
        model = DataParallelBucket(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Tokens()
    shapes = (BATCH, LENGTH // asked.cp, sizes.hidden_size)
    for step in range(STEPS):
        optimizer.zero_grad()
        if asked.pp > 1:
            train = getattr(pipeline_parallel, f"train_step_pipeline_{asked.engine}")
            loss = train(model, data, shapes, torch.device("cpu"), torch.float32)
        else:
            loss = plain_step(model, data, synchronizes=asked.dp > 1)
        loss = average_loss_across_dp_cp_ranks(loss, "cpu")
        optimizer.step()
        if hasattr(model, "reset"):
            model.reset()
        if here.pp_is_last_stage and here.tp_rank == 0:
            print(f"step {step} loss {loss:.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
