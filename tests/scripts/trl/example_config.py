"""examples/cli_configs/example_config.yaml: text, not packed, TRL's defaults for all the rest."""

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

trainer = SFTTrainer(
    model="models/qwen2",
    args=SFTConfig(
        output_dir="out",
        model_init_kwargs={"dtype": "float32"},
        report_to="none",
        learning_rate=1e-4,
        lr_scheduler_type="cosine",
        max_steps=3,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=load_dataset("json", data_files="data/text.jsonl", split="train"),
)
trainer.train()
trainer.save_model("out")
