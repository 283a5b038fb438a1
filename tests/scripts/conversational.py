"""Conversations through the chat template, TRL's defaults: bf16 autocast, checkpointing, no packing."""

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

trainer = SFTTrainer(
    model="model",
    args=SFTConfig(output_dir="out", max_steps=5, logging_steps=1, learning_rate=1e-3, use_cpu=True),
    train_dataset=load_dataset("json", data_files="data/messages.jsonl", split="train"),
)
trainer.train()
