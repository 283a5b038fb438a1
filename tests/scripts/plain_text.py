"""Language modeling on a column of text, packed."""

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("json", data_files="data/text.jsonl", split="train")

training_args = SFTConfig(
    output_dir="out",
    packing=True,
    max_length=48,
    max_steps=5,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    logging_steps=1,
    use_cpu=True,
    bf16=False,
)
trainer = SFTTrainer(model="model", args=training_args, train_dataset=dataset)
trainer.train()
trainer.save_model()
