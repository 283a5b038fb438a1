"""examples/notebooks/sft_trl_lora_qlora.ipynb as it stands: QLoRA, one conversation at a time."""

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("json", data_files="data/messages.jsonl", split="train")
model = AutoModelForCausalLM.from_pretrained(
    "models/qwen3",
    attn_implementation="sdpa",
    dtype=torch.bfloat16,
    quantization_config=BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=torch.float16,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_type="nf4",
    ),
)
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
