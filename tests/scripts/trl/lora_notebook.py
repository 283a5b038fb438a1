"""examples/notebooks/sft_trl_lora_qlora.ipynb without its quantisation: LoRA, one conversation at a time."""

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("json", data_files="data/messages.jsonl", split="train")
model = AutoModelForCausalLM.from_pretrained("models/qwen3", attn_implementation="sdpa", dtype=torch.float32)
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir="out",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        warmup_steps=5,
        learning_rate=2e-4,
        optim="paged_adamw_8bit",
        max_length=1024,
        gradient_checkpointing=True,
        max_steps=3,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=dataset,
    peft_config=LoraConfig(
        r=32,
        lora_alpha=32,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    ),
)
trainer.train()
trainer.save_model("out")
