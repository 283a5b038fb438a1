"""A formatting function over columns of one's own, a loaded model and tokenizer, a callback and a metric."""

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer


class Losses(TrainerCallback):
    def __init__(self):
        self.losses = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.losses.append(logs.get("loss"))


def formatting_func(example):
    return f"user {example['instruction']} assistant {example['output']}"


callback = Losses()
trainer = SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained("model"),
    processing_class=AutoTokenizer.from_pretrained("model"),
    args=SFTConfig(
        output_dir="out",
        packing=True,
        packing_strategy="bfd_split",
        max_length=16,
        max_steps=5,
        logging_steps=1,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=load_dataset("json", data_files="data/instructions.jsonl", split="train"),
    formatting_func=formatting_func,
    callbacks=[callback],
)
trainer.train()
assert [loss for loss in callback.losses if loss is not None] == [
    row["loss"] for row in trainer.state.log_history if "loss" in row
]
