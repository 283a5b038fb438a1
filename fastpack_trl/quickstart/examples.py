"""Models and data of the notebooks: a public model where this machine can train it, else a small random one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fastpack_trl.errors import UserError, did_you_mean
from fastpack_trl.quickstart import corpus
from fastpack_trl.quickstart.small_model import train_tokenizer

GIB = 2**30
EVERY = 8  # of the library's docstrings: enough for the notebooks' steps
SMALL_ROW, PUBLIC_ROW = 1024, 4096  # tokens


@dataclass(frozen=True, slots=True)
class Public:
    """A public model and its stand-in.

    Attributes:
        family: of the stand-in, as `fastpack_trl.testing.tiny_model` names it.
        gib: device memory below which the public model is not tried, in GiB.
        small: fields of the stand-in's config.
        dequantise: the checkpoint is in MXFP4, which is not trained: it is loaded as bf16.
    """

    family: str
    gib: float
    small: dict[str, Any]
    dequantise: bool = False


_WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 150_000.0},
}  # fmt: skip
PUBLIC = {
    # With LoRA, twice: stock and fastpack side by side, as TRL loads it, in fp32.
    "Qwen/Qwen3-0.6B": Public("qwen3", 12, {}),
    # With LoRA, once, in bf16.
    "openai/gpt-oss-20b": Public("gpt_oss", 64, _WINDOWS, dequantise=True),
}


@dataclass(frozen=True, slots=True)
class Example:
    """``print(example)``: what was chosen, and why.

    Attributes:
        model: a name on the hub, or a folder with a random model and its tokenizer.
        data: a folder with ``train.jsonl`` and ``test.jsonl``: questions about the Python standard library with its
            docstrings as answers, one ``{"messages": [...]}`` per line.
        settings: arguments of `SFTConfig` for this model and machine.
    """

    model: str
    data: str
    settings: dict[str, Any] = field(repr=False)
    reason: str

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"model: {self.model} ({self.reason})\ndata: {self.data}\nsettings: {settings}"


def choose_example(name: str, folder: str | Path = "notebook-files") -> Example:
    """Choose `name` if a CUDA device has memory for it and the hub answers, else a small random model of its family.

    The text is made on the spot in both cases, so that only the model is downloaded. Files of an earlier call in
    `folder` are used again.

    Args:
        name: a key of `PUBLIC`.
        folder: for text and stand-in; made if needed, relative to the working directory.

    Raises:
        UserError: another name, or an interpreter without the sources of its standard library.
    """
    if name not in PUBLIC:
        raise UserError(f"there is no example {name!r}{did_you_mean(name, PUBLIC)} (examples: {', '.join(PUBLIC)})")
    public, folder = PUBLIC[name], Path(folder)
    data = folder / "data"
    if not data.is_dir():
        _write_whole(data, _write_text)
    obstacle = _obstacle(name, public)
    if not obstacle:
        settings = _settings(PUBLIC_ROW, learning_rate=2e-4)
        if public.dequantise:
            from transformers import Mxfp4Config

            quantization = Mxfp4Config(dequantize=True)
            settings["model_init_kwargs"] = {"dtype": "bfloat16", "quantization_config": quantization}
        return Example(name, str(data), settings, f"on {torch.cuda.get_device_name(0)}")
    small = folder / f"small-{public.family}"
    if not small.is_dir():
        _write_whole(small, lambda place: _write_small_model(place, data, public))
    settings = _settings(SMALL_ROW, learning_rate=3e-3) | {"gradient_checkpointing": False}
    return Example(str(small), str(data), settings, f"random weights in place of {name}: {obstacle}")


def _obstacle(name: str, public: Public) -> str:
    """Return the reason against the public model, empty if there is none; ask the hub last."""
    from transformers import AutoConfig

    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    memory = torch.cuda.get_device_properties(0).total_memory / GIB
    if memory < public.gib:
        return f"{torch.cuda.get_device_name(0)} has {memory:.0f} GiB of memory, {public.gib:g} are needed"
    try:
        AutoConfig.from_pretrained(name)
    except OSError:  # no network, HF_HUB_OFFLINE, or no access
        return "the hub does not answer, and the model is not in its cache"
    return ""


def _settings(tokens: int, learning_rate: float) -> dict[str, Any]:
    """Return the arguments of `SFTConfig`: bf16 where the device has it, fp16 on an older GPU, fp32 on the CPU."""
    precision: dict[str, Any] = {}
    if not torch.cuda.is_available():
        precision = {"use_cpu": True, "bf16": False}
    elif not torch.cuda.is_bf16_supported(including_emulation=False):
        precision = {"bf16": False, "fp16": True}
    return {
        "packing": True,
        "max_length": tokens,
        "per_device_train_batch_size": 1,
        "learning_rate": learning_rate,
        "seed": 0,
        "save_strategy": "no",
        "report_to": "none",
        **precision,
    }


def _write_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Make `folder` with everything that `write` puts there, or not at all: a later call takes it for complete."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write(partial)
    partial.rename(folder)


def _write_text(folder: Path) -> None:
    documents = corpus.collect(progress=False).documents
    corpus.write_splits(documents[::EVERY], folder)


def _write_small_model(folder: Path, data: Path, public: Public) -> None:
    """Write a tokenizer trained on the text, and a model of its vocabulary."""
    from fastpack_trl.testing import tiny_model

    with (data / "train.jsonl").open(encoding="utf-8") as file:
        texts = [message["content"] for line in file for message in json.loads(line)["messages"]]
    tokenizer = train_tokenizer(texts, progress=False)
    model = tiny_model(
        public.family,
        vocab_size=len(tokenizer),
        num_hidden_layers=4,
        hidden_size=64,
        intermediate_size=128,
        max_position_embeddings=SMALL_ROW,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **public.small,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
