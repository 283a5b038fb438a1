"""OpenAI's cookbook for gpt-oss with TRL: LoRA on all linear layers and on the experts of some layers, not packed."""

from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

model = AutoModelForCausalLM.from_pretrained(
    "models/gpt_oss", attn_implementation="eager", dtype="float32", use_cache=False
)
peft_config = LoraConfig(
    r=8,
    lora_alpha=16,
    target_modules="all-linear",
    target_parameters=["1.mlp.experts.gate_up_proj", "1.mlp.experts.down_proj"],
)
trainer = SFTTrainer(
    model=get_peft_model(model, peft_config),
    args=SFTConfig(
        output_dir="out",
        learning_rate=2e-4,
        gradient_checkpointing=True,
        max_length=2048,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        warmup_steps=0.03,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        max_steps=3,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=load_dataset("json", data_files="data/messages.jsonl", split="train"),
)
trainer.train()
trainer.save_model("out")
