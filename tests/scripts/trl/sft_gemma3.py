"""examples/scripts/sft_gemma3.py: a model with a vision tower on conversations without images, one at a time."""

from datasets import load_dataset
from transformers import AutoModelForImageTextToText
from trl import SFTConfig, SFTTrainer

trainer = SFTTrainer(
    model=AutoModelForImageTextToText.from_pretrained("models/gemma3", attn_implementation="eager"),
    args=SFTConfig(
        output_dir="out",
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        max_length=8192,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        max_steps=3,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=load_dataset("json", data_files="data/messages.jsonl", split="train"),
)
trainer.train()
