"""Models and text of the training benchmarks: public shapes, random weights, LoRA on every projection, real text."""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import nn

from benchmarks.model_shapes import build_model, shape_of
from fastpack_trl.quickstart.corpus import source_files, stdlib_folder
from fastpack_trl.quickstart.small_model import train_tokenizer

RANK, ALPHA = 16, 32
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_TOKENIZER_CHARACTERS = 2_000_000


@dataclass(frozen=True, slots=True)
class LoraModel:
    """One row's model: ``LoraModel("qwen3-14b", "nf4", 40)``."""

    shape: str
    base: str
    """``bf16``, ``fp32`` or ``nf4`` (bitsandbytes, double quantisation)."""
    layers: int | None = None

    @property
    def name(self) -> str:
        return f"{self.shape} {'NF4 QLoRA' if self.base == 'nf4' else f'{self.base} LoRA'}"

    @property
    def dtype(self) -> torch.dtype:
        """Of what is not in four bits; 4-bit products are computed in it too."""
        return torch.float32 if self.base == "fp32" else torch.bfloat16


def build(model: LoraModel, *, layers: int | None, positions: int, seed: int, device: str) -> Any:
    """Return a PEFT model with random weights: LoRA r=16, alpha 32, no dropout, on all seven projections.

    Adapters are as TRL trains them: fp32 beside a dense base, bf16 beside a 4-bit one. B starts at small random values
    instead of zero, so that every product has something to compute.
    """
    from peft import LoraConfig, get_peft_model

    shape = shape_of(model.shape).cut_to(layers)
    base = build_model(replace(shape, weights=model.dtype), positions=positions, seed=seed, device=device)
    if model.base == "nf4":
        quantise(base, device)
    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=list(PROJECTIONS), task_type="CAUSAL_LM"
    )
    peft = get_peft_model(base, config)
    torch.manual_seed(seed)
    for name, parameter in peft.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=1e-3)
    return peft


def shared_copy(model: Any, *, trained: bool = True) -> Any:
    """Copy modules, hooks and config around the *same* parameters, and around the scales of those in four bits.

    Args:
        trained: whether parameters that are trained are shared too; else the copy has its own.
    """
    shared = [parameter for parameter in model.parameters() if trained or not parameter.requires_grad]
    shared += [state for module in model.modules() if (state := getattr(module, "quant_state", None)) is not None]
    return copy.deepcopy(model, {id(one): one for one in shared})


def quantise(model: Any, device: str) -> None:
    """Replace the projections of the decoder by bitsandbytes' NF4 layers with double quantisation, in place."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if type(child) is not nn.Linear:
                continue
            layer = Linear4bit(
                child.in_features, child.out_features, bias=child.bias is not None, compute_dtype=torch.bfloat16,
                quant_type="nf4", compress_statistics=True, device="meta",
            )  # fmt: skip
            layer.weight = Params4bit(
                child.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True, module=layer
            )
            layer.bias = child.bias
            setattr(module, name, layer.to(device))
    model.is_loaded_in_4bit = True
    model.hf_device_map = {"": 0 if device == "cuda" else "cpu"}


@cache
def definitions(tokens: int, vocabulary: int, longest: int) -> tuple[Any, datasets.Dataset]:
    """Return a tokenizer and at least `tokens` tokens of the standard library's top-level functions and classes.

    Real source text, so that document lengths and repetitions are those of a data set of code; repeated from the start
    where it is too short, and cut to `longest` tokens, as packing would.
    """
    return _documents(_texts, tokens, vocabulary, longest)


@cache
def files(tokens: int, vocabulary: int, longest: int) -> tuple[Any, datasets.Dataset]:
    """Return the same of whole source files, half of which are longer than 2,800 tokens."""
    return _documents(
        lambda: (path.read_text(encoding="utf-8", errors="replace") for path in _source_files()),
        tokens,
        vocabulary,
        longest,
    )


def _documents(
    texts: Callable[[], Iterable[str]], tokens: int, vocabulary: int, longest: int
) -> tuple[Any, datasets.Dataset]:
    tokenizer = _tokenizer(min(vocabulary, 8000))
    rows: list[list[int]] = []
    total = 0
    for text in itertools.cycle(texts()):
        ids = (tokenizer(text)["input_ids"] + [tokenizer.eos_token_id])[:longest]
        rows.append(ids)
        total += len(ids)
        if total >= tokens:
            return tokenizer, datasets.Dataset.from_dict({"input_ids": rows})
    raise AssertionError("cycle ends only by return")


@cache
def _tokenizer(vocabulary: int) -> Any:
    return train_tokenizer(_up_to(_TOKENIZER_CHARACTERS), vocabulary=vocabulary, progress=False)


def _up_to(characters: int) -> Iterator[str]:
    for text in _texts():
        yield text
        characters -= len(text)
        if characters <= 0:
            return


@cache
def _source_files() -> list[Path]:
    return source_files(stdlib_folder())


def _texts() -> Iterator[str]:
    for path in _source_files():
        yield from _texts_of(path)


@cache
def _texts_of(path: Path) -> list[str]:
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError):
        return []
    lines = source.splitlines()
    nodes = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return ["\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in nodes]
