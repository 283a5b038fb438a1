"""Evaluation on two named sets while training, without packing them, and once more by hand."""

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("json", data_files="data/messages.jsonl", split="train").train_test_split(0.3, seed=0)
half = len(dataset["test"]) // 2

training_args = SFTConfig(
    output_dir="out",
    packing=True,
    eval_packing=False,
    max_length=48,
    max_steps=4,
    per_device_train_batch_size=2,
    per_device_eval_batch_size=3,
    eval_strategy="steps",
    eval_steps=2,
    eval_on_start=True,
    logging_steps=1,
    learning_rate=1e-3,
    use_cpu=True,
    bf16=False,
)
trainer = SFTTrainer(
    model="model",
    args=training_args,
    train_dataset=dataset["train"],
    eval_dataset={
        "first": dataset["test"].select(range(half)),
        "second": dataset["test"].select(range(half, 2 * half)),
    },
)
trainer.train()
trainer.evaluate()
