"""trl/scripts/sft.py with its flags for LoRA: PEFT's default targets of the family."""

from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("json", data_files="data/messages.jsonl", split="train").train_test_split(0.2, seed=0)
trainer = SFTTrainer(
    model="models/qwen2",
    args=SFTConfig(
        output_dir="out",
        model_init_kwargs={"dtype": "float32"},
        learning_rate=2e-4,
        packing=True,
        max_length=32,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=8,
        eos_token="<eos>",
        eval_strategy="steps",
        eval_steps=2,
        max_steps=3,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"],
    peft_config=LoraConfig(r=32, lora_alpha=16, lora_dropout=0.05),
)
trainer.train()
trainer.save_model("out")
