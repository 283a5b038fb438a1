"""The side ``unsloth`` of `benchmarks.side_by_side`: a training in an environment that need not have this package.

Written from Unsloth's README: `from_pretrained`, `get_peft_model`, then TRL's trainer. Started by
`benchmarks.side_by_side` with the Python of ``--unsloth``, on a folder that `benchmarks.unsloth_folder` has written:
the same weights, documents and arguments as on every other side.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    import unsloth  # before transformers and trl, as its README says
except ImportError:
    unsloth = None


def train(folder: Path, device: str) -> dict[str, Any]:
    """Train what `folder` holds; return the figures of the run."""
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from benchmarks.side_watch import Watch, figures_of

    if unsloth is None:
        raise SystemExit("this environment has no unsloth: give --unsloth the Python of one that has it")
    given = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    language_model: Any = unsloth.FastLanguageModel
    full = given["kind"] == "full"
    model, tokenizer = language_model.from_pretrained(
        model_name=str(folder / "model"), max_seq_length=given["tokens"], dtype=torch.bfloat16,
        load_in_4bit=given["kind"] == "nf4", full_finetuning=full,
    )  # fmt: skip
    if not full:
        model = language_model.get_peft_model(
            model, r=given["rank"], lora_alpha=given["alpha"], lora_dropout=0, bias="none",
            target_modules=given["projections"], use_gradient_checkpointing="unsloth", random_state=given["seed"],
            max_seq_length=given["tokens"],
        )  # fmt: skip
    documents = Dataset.from_dict({"input_ids": json.loads((folder / "documents.json").read_text(encoding="utf-8"))})
    watch = Watch(lambda: True, profile=device == "cuda")
    args = SFTConfig(output_dir=str(folder / "out"), **given["arguments"])
    trainer = SFTTrainer(
        model=model, args=args, train_dataset=documents, processing_class=tokenizer, callbacks=[watch]
    )  # fmt: skip
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    return figures_of(watch, trainer.state.log_history, device)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``python -m benchmarks.unsloth_run FOLDER --json FILE``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unsloth_run", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args(arguments)
    import torch

    found = train(args.folder, "cuda" if torch.cuda.is_available() else "cpu")
    args.json.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
