"""examples/scripts/sft_gpt_oss.py: all weights, packed; eager in place of the kernel from the hub."""

from datasets import load_dataset
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

trainer = SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained(
        "models/gpt_oss", attn_implementation="eager", dtype="float32", use_cache=False
    ),
    args=SFTConfig(
        output_dir="out",
        packing=True,
        max_length=160,
        per_device_train_batch_size=2,
        warmup_steps=0.03,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        max_steps=3,
        logging_steps=1,
        seed=42,
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=load_dataset("json", data_files="data/messages.jsonl", split="train"),
)
trainer.train()
trainer.save_model("out")
