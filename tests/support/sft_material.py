"""Material for the tests of ``fastpack-trl sft``: a tiny model with its tokenizer, data files and YAML files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastpack_trl.cli.main import main

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}<eos>{% endfor %}"
SENTENCES = ["the quick brown fox", "jumps over the lazy dog", "pack my box with five dozen jugs", "a b c d e f g"]
TEXT_ROWS: list[Mapping[str, object]] = [{"text": f"{text} {number}"} for number in range(8) for text in SENTENCES]


def make_tokenizer(**tokens: str) -> Any:
    """A byte-level BPE tokenizer of about 300 tokens."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(SENTENCES * 4, 300, show_progress=False, special_tokens=["<pad>", "<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, **tokens)


def save_model(folder: Path, *, tokenizer: Any = None) -> Path:
    """A Qwen3 of 32 hidden units and 2 layers with a tokenizer that has padding, end and a chat template."""
    from fastpack_trl.testing import tiny_model

    sizes = {"head_dim": 16, "max_position_embeddings": 256, "vocab_size": 304}
    tiny_model("qwen3", **sizes, eos_token_id=1, tie_word_embeddings=True).save_pretrained(folder)
    tokenizer = tokenizer or make_tokenizer(pad_token="<pad>", eos_token="<eos>", chat_template=TEMPLATE)
    tokenizer.save_pretrained(folder)
    return folder


def write_jsonl(path: Path, rows: Sequence[Mapping[str, object]] = TEXT_ROWS) -> Path:
    """One JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def settings(model: Path, data: Path | None, output: Path, **more: object) -> dict[str, object]:
    """Three packed steps on the CPU."""
    base = {
        "model_name_or_path": str(model), "output_dir": str(output), "max_steps": 3, "max_length": 64, "packing": True,
        "bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no", "logging_steps": 1,
        "per_device_train_batch_size": 1, "learning_rate": 1.0e-3, "disable_tqdm": True,
        "dataset_name": ... if data is None else str(data), **more,
    }  # fmt: skip
    return {key: value for key, value in base.items() if value is not ...}


def write_yaml(path: Path, values: Mapping[str, object], *, text: str = "") -> Path:
    """`values` as YAML, then `text` as it stands (for spellings that YAML writers do not produce)."""
    path.write_text(yaml.safe_dump(dict(values)) + text, encoding="utf-8")
    return path


@dataclass(frozen=True)
class Material:
    """A saved model and a data file, shared by all tests; `folder` and `out` are of one test alone."""

    model: Path
    data: Path
    folder: Path

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def paths(self) -> tuple[Path, Path, Path]:
        """Model, data and output, as `settings` takes them."""
        return self.model, self.data, self.out

    def yaml(self, *, text: str = "", **more: object) -> Path:
        """A YAML of `settings` for these files; ``...`` as a value leaves the key out."""
        return write_yaml(self.folder / "sft.yaml", settings(self.model, self.data, self.out, **more), text=text)


def refused(material: Material, capsys: pytest.CaptureFixture[str], *argv: object, command: str = "sft") -> str:
    """Run with `argv`; asserts exit code 2, one line, nothing written. Returns the line."""
    existed = material.out.exists()
    assert main([command, *map(str, argv)]) == 2
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if line.startswith(f"fastpack-trl {command}: error: ")]
    assert len(lines) == 1, err
    assert err.splitlines()[-1] == lines[0]
    assert "Traceback" not in err
    assert material.out.exists() == existed
    return lines[0]
