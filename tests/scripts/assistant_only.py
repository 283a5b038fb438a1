"""Only what the assistant says is learnt: a chat template with generation markers, from a file."""

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

trainer = SFTTrainer(
    model="model",
    args=SFTConfig(
        output_dir="out",
        assistant_only_loss=True,
        chat_template_path="template.jinja",
        packing=True,
        max_length=64,
        max_steps=5,
        per_device_train_batch_size=2,
        logging_steps=1,
        learning_rate=1e-3,
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=load_dataset("json", data_files="data/messages.jsonl", split="train"),
)
trainer.train()
