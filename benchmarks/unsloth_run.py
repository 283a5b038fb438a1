"""The side ``unsloth`` of `benchmarks.side_by_side`: a training in an environment that need not have this package.

Written from Unsloth's README: `from_pretrained`, `get_peft_model`, then TRL's trainer. This environment writes a folder
with the weights, documents and arguments of every other side; the Python of ``--unsloth`` trains it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastpack_trl.bench.training_run import OwnProcess

KINDS = ("lora", "nf4", "full")
"""What its README trains; experts with adapters on their stacks are no part of it."""


def run(row: Mapping[str, Any], seed: int, watched: Mapping[str, Any], python: str, timeout: float) -> dict[str, Any]:
    """Write the folder of a row in one process and train it in another one, under another Python."""
    from benchmarks.training_rows import ROWS

    kind = ROWS[row["row"]].kind
    if kind not in KINDS:
        return {"failed": f"no {kind} here: it trains {', '.join(KINDS)}"}
    with tempfile.TemporaryDirectory(prefix="fastpack-bench-") as folder:
        options = {"folder": folder, "seed": seed, "logged": watched["multiple"]}
        written = OwnProcess("benchmarks.unsloth_run:write_folder", options, timeout=timeout)(row, "unsloth")
        if "failed" in written:
            return written
        options = {"folder": folder, "watched": watched}
        return OwnProcess("benchmarks.unsloth_run:train", options, timeout=timeout, python=python)(row, "unsloth")


def write_folder(row: Mapping[str, Any], side: str, *, folder: str, seed: int, logged: int) -> dict[str, Any]:
    """Write the base model of a row with the weights of every other side, its documents and arguments."""
    from benchmarks.lora_models import ALPHA, PROJECTIONS, RANK
    from benchmarks.training_rows import ROWS, base_of, documents_of
    from benchmarks.training_side import COMMON, device_here

    one, device, path = ROWS[row["row"]], device_here(), Path(folder)
    model = base_of(one, one.tokens, device, seed)
    tokenizer, documents = documents_of(one, int(model.config.get_text_config().vocab_size))
    model.save_pretrained(path / "model")
    tokenizer.save_pretrained(path / "model")
    (path / "documents.json").write_text(json.dumps(list(documents["input_ids"])), encoding="utf-8")
    arguments = {
        **COMMON, **one.arguments, **one.precision(device), "logging_steps": logged, "seed": seed,
        "use_cpu": device != "cuda",
    }  # fmt: skip
    given = {
        "kind": one.kind, "tokens": one.tokens, "rank": RANK, "alpha": ALPHA, "projections": list(PROJECTIONS),
        "seed": seed, "arguments": arguments,
    }  # fmt: skip
    (path / "run.json").write_text(json.dumps(given), encoding="utf-8")
    return {}


def train(row: Mapping[str, Any], side: str, *, folder: str, watched: Mapping[str, Any]) -> dict[str, Any]:
    """Train what `folder` holds; return the figures of the run.

    Raises:
        UserError: there is no Unsloth in this environment.
    """
    from fastpack_trl.errors import UserError

    try:
        import unsloth  # before transformers and trl, as its README says
    except ImportError as error:
        raise UserError("this environment has no unsloth: give --unsloth the Python of one that has it") from error
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from fastpack_trl.bench.run_watch import RunWatch

    path = Path(folder)
    given = json.loads((path / "run.json").read_text(encoding="utf-8"))
    language_model: Any = unsloth.FastLanguageModel
    full = given["kind"] == "full"
    model, tokenizer = language_model.from_pretrained(
        model_name=str(path / "model"), max_seq_length=given["tokens"], dtype=torch.bfloat16,
        load_in_4bit=given["kind"] == "nf4", full_finetuning=full,
    )  # fmt: skip
    if not full:
        model = language_model.get_peft_model(
            model, r=given["rank"], lora_alpha=given["alpha"], lora_dropout=0, bias="none",
            target_modules=given["projections"], use_gradient_checkpointing="unsloth", random_state=given["seed"],
            max_seq_length=given["tokens"],
        )  # fmt: skip
    documents = Dataset.from_dict({"input_ids": json.loads((path / "documents.json").read_text(encoding="utf-8"))})
    watch = RunWatch(**watched)
    trainer = SFTTrainer(
        model=model, args=SFTConfig(output_dir=str(path / "out"), **given["arguments"]), train_dataset=documents,
        processing_class=tokenizer, callbacks=[watch],
    )  # fmt: skip
    watch.begin()
    trainer.train()
    return watch.figures(trainer)
