"""examples/scripts/sft_nemotron_3.py: LoRA on a hybrid of Mamba, attention and experts, one document at a time."""

from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
trainer = SFTTrainer(
    model="models/nemotron_h",
    args=SFTConfig(
        output_dir="out",
        model_init_kwargs={"attn_implementation": "eager", "dtype": "float32"},
        max_length=128,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        learning_rate=2e-4,
        optim="paged_adamw_8bit",
        max_steps=3,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=load_dataset("json", data_files="data/messages.jsonl", split="train"),
    peft_config=LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules=targets),
)
trainer.train()
trainer.save_model("out")
