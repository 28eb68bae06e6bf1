"""Hugging Face's Trainer, data parallel on CPUs: a small GPT-2 with random weights learns to count.

It prints the losses that the Trainer logs, and the loss of its evaluation.
"""

import tempfile
import warnings

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Counting(Dataset):
    """Sequences k, k + 1, k + 2, … of 16 tokens."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + k) % 50
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    warnings.simplefilter("ignore")
    set_seed(0)
    sizes = GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2)
    with tempfile.TemporaryDirectory() as folder:
        asked = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=8,
            learning_rate=1e-2,
            logging_steps=1,
            use_cpu=True,
            ddp_backend="gloo",
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        model = GPT2LMHeadModel(sizes)
        trainer = Trainer(model, asked, train_dataset=Counting(), eval_dataset=Counting())
        trainer.train()
        trainer.evaluate()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
