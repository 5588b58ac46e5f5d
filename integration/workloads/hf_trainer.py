"""Runs Hugging Face's Trainer on generated data: a small random GPT-2 over gloo, without downloads."""

import argparse
import os
import time
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--pace-s", type=float, default=0.0)
parser.add_argument("--until", default="", help="a file: the pace is kept until it exists")
parser.add_argument("--out", required=True)
options = parser.parse_args()

torch.set_num_threads(1)
set_seed(0)


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


class Say(TrainerCallback):
    def on_step_begin(self, *_: object, **__: object) -> None:
        time.sleep(0 if os.path.exists(options.until) else options.pace_s)


class Spoken(Trainer):
    """Prints every loss of its own rank; the Trainer itself only logs the mean."""

    def training_step(self, *arguments: Any, **more: Any) -> torch.Tensor:
        loss = super().training_step(*arguments, **more)
        print(f"step {self.state.global_step} loss {loss.item():.12f}", flush=True)
        return loss


trainer = Spoken(
    model=GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)),
    args=TrainingArguments(
        output_dir=f"{options.out}/{os.environ.get('RANK', '0')}",
        max_steps=options.steps,
        per_device_train_batch_size=4,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    ),
    train_dataset=Sentences(),
    callbacks=[Say()],
)
trainer.train()
print("DONE", flush=True)
torch.distributed.destroy_process_group()
