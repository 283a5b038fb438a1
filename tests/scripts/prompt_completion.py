"""Prompts and completions as text; the loss counts the completions, as by default."""

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("json", data_files="data/prompt_completion.jsonl", split="train").train_test_split(0.2, seed=0)

training_args = SFTConfig(
    output_dir="out",
    packing=True,
    max_length=48,
    num_train_epochs=1,
    per_device_train_batch_size=2,
    eval_strategy="epoch",
    logging_steps=1,
    learning_rate=1e-3,
    use_cpu=True,
    bf16=False,
)
trainer = SFTTrainer("model", args=training_args, train_dataset=dataset["train"], eval_dataset=dataset["test"])
trainer.train()
