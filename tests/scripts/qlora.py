"""QLoRA: a base in NF4, evaluated at the end."""

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("json", data_files="data/text.jsonl", split="train").train_test_split(0.2, seed=0)

trainer = SFTTrainer(
    model="model",
    args=SFTConfig(
        output_dir="out",
        packing=True,
        max_length=48,
        num_train_epochs=1,
        per_device_train_batch_size=2,
        eval_strategy="epoch",
        logging_steps=1,
        learning_rate=1e-2,
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"],
    quantization_config=BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    ),
    peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.0),
)
trainer.train()
trainer.save_model()
