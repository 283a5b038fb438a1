"""What the step benchmarks train on: arguments of both trainers, packed documents of random tokens, their tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np

SPECIAL_TOKENS = ("<pad>", "<eos>")
SPARE_ROWS = 1  # accelerate's loader fetches one batch ahead


@dataclass(frozen=True, slots=True)
class Setting:
    """Fields of both trainers; everything else is TRL's default."""

    name: str
    bf16: bool
    gradient_checkpointing: bool


TRL_DEFAULTS = Setting("TRL defaults: bf16, checkpointing", bf16=True, gradient_checkpointing=True)


def trainer_arguments(setting: Setting, tokens: int, device: str, seed: int) -> dict[str, Any]:
    """Return the arguments of either trainer's configuration; everything else is TRL's default."""
    return {
        "packing": True, "max_length": tokens, "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1, "bf16": setting.bf16,
        "gradient_checkpointing": setting.gradient_checkpointing, "use_cpu": device == "cpu", "seed": seed,
        "data_seed": seed, "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip


def without_emptiest(rows: datasets.Dataset) -> datasets.Dataset:
    """Drop what was left over at the end of packing, if it was: a row of a few tokens would time something else."""
    if "seq_lengths" not in rows.column_names:
        return rows
    filled = [sum(lengths) for lengths in rows["seq_lengths"]]
    emptiest = int(np.argmin(filled))
    return rows.select([index for index in range(len(rows)) if index != emptiest])


def make_tokenizer(vocabulary: int) -> Any:
    """Make a tokenizer of which only the special tokens are read: the documents are token ids."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL_TOKENS, *(f"t{index}" for index in range(len(SPECIAL_TOKENS), vocabulary))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[-1]))
    pad, eos = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token=eos)


def random_documents(shortest: int, longest: int, vocabulary: int, tokens: int, seed: int) -> datasets.Dataset:
    """Draw at least `tokens` tokens in documents of random ids."""
    random = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths += random.integers(shortest, longest + 1, 64).tolist()
    ids = [random.integers(len(SPECIAL_TOKENS), vocabulary, length).tolist() for length in lengths]
    return datasets.Dataset.from_dict({"input_ids": ids})
