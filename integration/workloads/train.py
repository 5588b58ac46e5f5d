"""Runs a small torch training job, deterministic on one thread. Prints step and loss with all digits."""

import argparse
import os

import torch
from steps import steps

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=256)
options, _ = parser.parse_known_args()

torch.set_num_threads(1)
torch.manual_seed(int(os.environ.get("RANK", "0")))
model = torch.nn.Sequential(
    torch.nn.Linear(64, options.width), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(options.width, 64)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in steps(default_steps=200, default_pace_s=0.02):
    batch = torch.randn(32, 64)
    loss = ((model(batch) - batch) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.12f}", flush=True)
