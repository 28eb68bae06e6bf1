"""torch's distributed version of minGPT on CPUs: its model, data set and trainer, in place of its
main.py, which needs hydra and two GPUs.

    PYTHONPATH=examples/distributed/minGPT-ddp/mingpt … mingpt_ddp.py

Its trainer.py is written for GPUs: README.md has the `sed` that puts it on CPUs.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from char_dataset import CharDataset, DataConfig
from model import GPT, GPTConfig, OptimizerConfig, create_optimizer
from torch.utils.data import random_split
from trainer import Trainer, TrainerConfig


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # DDP sends rank 0's weights; here the split must be the same, too
    text = sys.modules["trainer"].__file__  # any text will do
    data = CharDataset(DataConfig(path=text, block_size=32, train_split=0.9, truncate=0.05))
    count = int(0.9 * len(data))
    train, test = random_split(data, [count, len(data) - count])
    sizes = {"vocab_size": data.vocab_size, "block_size": data.block_size}
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, **sizes))
    optimizer = create_optimizer(model, OptimizerConfig(learning_rate=3e-4, weight_decay=0.1))
    with tempfile.TemporaryDirectory() as folder:
        config = TrainerConfig(
            max_epochs=2,
            batch_size=16,
            data_loader_workers=1,
            grad_norm_clip=1.0,
            snapshot_path=f"{folder}/snapshot.pt",
            save_every=1,
            use_amp=False,
        )
        Trainer(config, model, optimizer, train, test).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
