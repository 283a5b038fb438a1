"""Training that stops after three steps, and goes on from its checkpoint in a new trainer."""

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("json", data_files="data/text.jsonl", split="train")


def make_trainer(max_steps):
    training_args = SFTConfig(
        output_dir="out",
        packing=True,
        max_length=48,
        max_steps=max_steps,
        save_strategy="steps",
        save_steps=3,
        per_device_train_batch_size=1,
        lr_scheduler_type="constant",
        logging_steps=1,
        learning_rate=1e-3,
        use_cpu=True,
        bf16=False,
    )
    return SFTTrainer(model="model", args=training_args, train_dataset=dataset)


make_trainer(3).train()
trainer = make_trainer(6)
trainer.train(resume_from_checkpoint=True)
