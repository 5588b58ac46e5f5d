"""Runs Lightning's Trainer on generated data: a small network, the ddp strategy over gloo."""

import argparse
import os
import time
from datetime import timedelta

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--pace-s", type=float, default=0.0)
parser.add_argument("--until", default="", help="a file: the pace is kept until it exists")
parser.add_argument("--nodes", type=int, default=2)
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--out", required=True)
options = parser.parse_args()

torch.set_num_threads(1)
lightning.seed_everything(0)


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = ((self.net(batch) - batch) ** 2).mean()
        print(f"step {index} loss {loss.item():.12f}", flush=True)
        time.sleep(0 if os.path.exists(options.until) else options.pace_s)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


noise = torch.randn(8 * options.steps * options.nodes * options.devices, 32)
trainer = lightning.Trainer(
    accelerator="cpu",
    strategy=DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=120)),
    num_nodes=options.nodes,
    devices=options.devices,
    max_steps=options.steps,
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=options.out,
)
trainer.fit(Net(), torch.utils.data.DataLoader(noise, batch_size=8, num_workers=0))
print("DONE", flush=True)
