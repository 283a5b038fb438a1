"""A streamed data set: its length is unknown, so max_steps ends the run."""

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("json", data_files="data/text.jsonl", split="train", streaming=True)

trainer = SFTTrainer(
    model="model",
    args=SFTConfig(
        output_dir="out",
        packing=True,
        max_length=48,
        max_steps=5,
        per_device_train_batch_size=2,
        logging_steps=1,
        learning_rate=1e-3,
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=dataset,
)
trainer.train()
