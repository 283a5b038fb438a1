"""Conversational prompts and completions, the loss on the completions, documents of a row by padding_free."""

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

trainer = SFTTrainer(
    model="model",
    args=SFTConfig(
        output_dir="out",
        completion_only_loss=True,
        padding_free=True,
        max_length=None,
        max_steps=5,
        per_device_train_batch_size=4,
        logging_steps=1,
        learning_rate=1e-3,
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=load_dataset("json", data_files="data/prompt_completion_messages.jsonl", split="train"),
)
trainer.train()
