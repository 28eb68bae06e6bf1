"""Lightning's Trainer with its own DDP strategy: a small model for ten steps, on CPUs.

It prints each rank's loss in every step and the mean that Lightning reduces for its log.
"""

import logging
import os
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch, index):
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        print(f"rank {self.global_rank} step {index} loss {loss.item():.9f}", flush=True)
        self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=False)
        return loss

    def on_train_epoch_end(self):
        mean = self.trainer.callback_metrics["loss"].item()
        print(f"epoch {self.current_epoch} mean loss {mean:.9f}", flush=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    L.seed_everything(0, verbose=False)
    x = torch.randn(80, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), DataLoader(data, batch_size=8, shuffle=True))


if __name__ == "__main__":
    main()
