"""LoRA on every linear layer."""

from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

training_args = SFTConfig(
    output_dir="out",
    packing=True,
    max_length=48,
    max_steps=5,
    per_device_train_batch_size=2,
    logging_steps=1,
    learning_rate=1e-2,
    use_cpu=True,
    bf16=False,
)
trainer = SFTTrainer(
    "model",
    args=training_args,
    train_dataset=load_dataset("json", data_files="data/messages.jsonl", split="train"),
    peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.0),
)
trainer.train()
trainer.save_model()
