"""Models of public shape with random weights, and real text for them: nothing is downloaded."""

from __future__ import annotations

import ast
import itertools
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import nn

from fastpack_trl.errors import UserError, did_you_mean

PAD, EOS = 0, 1
SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>"}
TEXTS = "BENCHMARKS_TEXTS"
"""Variable that names a folder for texts that the runs of a command share: making them takes many seconds."""
RANK, ALPHA = 16, 32
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
PROJECTIONS = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One model, by the fields of its public transformers config.

    Attributes:
        weights: dtype of the weights that TRL trains: fp32, or bf16 for a mixture of experts.
        layers: decoder layers that a row has by default; fewer than the config's if all would not fit.
        published_layers: number of layers of the public model; set by `cut_to`.
    """

    model_type: str
    fields: dict[str, Any]
    weights: torch.dtype = torch.float32
    layers: int | None = None
    published_layers: int = 0

    def cut_to(self, layers: int | None) -> ModelShape:
        """Return the same model with its first `layers` layers (None: the default of this shape).

        Raises:
            UserError: below 1 or more than the model has.
        """
        published = self.published_layers or int(self.fields["num_hidden_layers"])
        chosen = layers if layers is not None else self.layers or published
        if not 1 <= chosen <= published:
            raise UserError(f"layers={chosen}: this model has 1 to {published}")
        fields = dict(self.fields, num_hidden_layers=chosen)
        if "layer_types" in fields:
            fields["layer_types"] = fields["layer_types"][:chosen]
        return replace(self, fields=fields, layers=chosen, published_layers=published)


def decoder_shape(
    model_type: str, sizes: tuple[int, int, int], heads: tuple[int, int, int], vocabulary: int, **more: Any
) -> ModelShape:
    """Return a shape from ``(layers, width, inner width)`` and ``(heads, key-value heads, head width)``."""
    count, hidden, inner = sizes
    query, key_value, width = heads
    theta, options = more.pop("theta", 1e6), {name: more.pop(name) for name in ("weights", "layers") if name in more}
    fields = {
        "num_hidden_layers": count, "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": query,
        "num_key_value_heads": key_value, "head_dim": width, "vocab_size": vocabulary, "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": theta}, **more,
    }  # fmt: skip
    return ModelShape(model_type, fields, **options)


def gpt_oss(experts: int, top: int, window: int, layers: int) -> dict[str, Any]:
    """Return the fields that gpt-oss adds to those of a decoder: every second layer has full attention."""
    kinds = [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)]
    fields = {"num_local_experts": experts, "num_experts_per_tok": top, "sliding_window": window, "layer_types": kinds}
    return fields | {"rms_norm_eps": 1e-5}


def qwen3_moe(experts: int, top: int, inner: int) -> dict[str, Any]:
    """Return the fields that Qwen3's mixture of experts adds to those of a decoder."""
    return {"moe_intermediate_size": inner, "num_experts": experts, "num_experts_per_tok": top, "norm_topk_prob": True}


_QWEN3, _BF16 = 151_936, torch.bfloat16
_LLAMA: dict[str, Any] = {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}
_DELTA: dict[str, Any] = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
_DELTA |= {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "max_position_embeddings": 16_384}
_TIED: dict[str, Any] = {"tie_word_embeddings": True, "theta": 1e4}
MODELS = {
    "qwen3-0.6b": decoder_shape("qwen3", (28, 1024, 3072), (16, 8, 128), _QWEN3, tie_word_embeddings=True),
    "qwen3-8b": decoder_shape("qwen3", (36, 4096, 12_288), (32, 8, 128), _QWEN3),
    "qwen3-14b": decoder_shape("qwen3", (40, 5120, 17_408), (40, 8, 128), _QWEN3),
    "qwen3-32b": decoder_shape("qwen3", (64, 5120, 25_600), (64, 8, 128), _QWEN3),
    "llama-3.2-1b": decoder_shape("llama", (16, 2048, 8192), (32, 8, 64), 128_256, theta=5e5, **_LLAMA),
    "gpt-oss-20b": decoder_shape(
        "gpt_oss", (24, 2880, 2880), (64, 8, 64), 201_088, theta=1.5e5, weights=_BF16, layers=4,
        **gpt_oss(32, 4, 128, 24),
    ),
    "qwen3-30b-a3b": decoder_shape(
        "qwen3_moe", (48, 2048, 6144), (32, 4, 128), _QWEN3, weights=_BF16, layers=4, **qwen3_moe(128, 8, 768)
    ),
    "qwen3.5-4b": decoder_shape(
        "qwen3_5_text", (4, 2560, 9216), (16, 4, 256), 512, **_DELTA, linear_num_key_heads=16, linear_num_value_heads=32
    ),
    "qwen3.5-9b": decoder_shape(
        "qwen3_5_text", (32, 4096, 12_288), (16, 4, 256), 248_320, theta=1e7, weights=_BF16,
        **_DELTA | {"layer_types": _DELTA["layer_types"] * 8}, linear_num_key_heads=16, linear_num_value_heads=32,
    ),
    "small": decoder_shape("qwen3", (8, 256, 768), (8, 4, 32), 4000, **_TIED),
    "small, large vocabulary": decoder_shape("qwen3", (8, 256, 768), (8, 4, 32), 8192, **_TIED),
    "narrow": decoder_shape("qwen3", (28, 32, 96), (4, 2, 8), 512, **_TIED),
    "small-qwen3-moe": decoder_shape("qwen3_moe", (3, 256, 512), (4, 2, 64), 512, theta=1e4, **qwen3_moe(32, 8, 128)),
    "small-gpt-oss": decoder_shape("gpt_oss", (3, 320, 320), (5, 1, 64), 512, theta=1.5e5, **gpt_oss(16, 4, 128, 3)),
    "small-delta": decoder_shape(
        "qwen3_5_text", (4, 256, 768), (4, 2, 64), 512, **_DELTA, linear_num_key_heads=2, linear_num_value_heads=4
    ),
    "tiny-qwen3": decoder_shape("qwen3", (3, 64, 128), (4, 2, 16), 512, **_TIED),
    "tiny-delta": decoder_shape(
        "qwen3_5_text", (4, 64, 128), (4, 2, 16), 512, **_DELTA, linear_num_key_heads=1, linear_num_value_heads=2
    ),
    "tiny-gpt-oss": decoder_shape("gpt_oss", (2, 64, 64), (4, 1, 16), 512, theta=1e4, **gpt_oss(8, 2, 64, 2)),
}  # fmt: skip
"""By name. Rotary scaling for long contexts is left out: it costs nothing at run time."""


def shape_of(name: str) -> ModelShape:
    """Return the shape behind a name.

    Raises:
        UserError: there is no such model.
    """
    if name not in MODELS:
        raise UserError(f"model {name!r} is unknown{did_you_mean(name, MODELS)}; known: {', '.join(MODELS)}")
    return MODELS[name]


def build_model(shape: ModelShape, *, positions: int, seed: int, device: str, reward: bool = False) -> Any:
    """Make a model with random weights on `device`, in the dtype of the shape, without dropout.

    Args:
        positions: tokens of the longest row.
        device: ``cpu``, ``cuda`` or ``meta`` (shapes only).
        reward: whether it has a head of one value in place of the language model's.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    given = {"max_position_embeddings": positions, "attention_dropout": 0.0, **shape.fields}
    config = AutoConfig.for_model(shape.model_type, **given, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None)
    torch.manual_seed(seed)
    with torch.device(device):
        if not reward:
            return AutoModelForCausalLM.from_config(config, dtype=shape.weights)
        config.num_labels = 1
        return AutoModelForSequenceClassification.from_config(config, dtype=shape.weights)


def quantize(model: Any, device: str) -> None:
    """Replace the projections of the decoder by bitsandbytes' NF4 layers with double quantization, in place."""
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


def limit_memory(cap: float) -> None:
    """Limit torch's allocator to what a device of `cap` GiB leaves beside CUDA's context; 0: no limit."""
    if cap and torch.cuda.is_available():
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        context = total - free - torch.cuda.memory_reserved()
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, (cap * 2**30 - context) / total)))


def word_tokenizer(vocabulary: int) -> Any:
    """Return a tokenizer whose words are ``t2 t3 ...``, for documents of random tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [*SPECIAL.values(), *(f"t{index}" for index in range(2, vocabulary))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _fast_tokenizer(tokenizer)


def random_ids(lengths: list[int], vocabulary: int, seed: int) -> list[list[int]]:
    """Return documents of random tokens."""
    draw = np.random.default_rng(seed)
    return [draw.integers(2, vocabulary, length).tolist() for length in lengths]


@cache
def source_text(tokens: int, vocabulary: int, longest: int) -> tuple[Any, datasets.Dataset]:
    """Return a tokenizer, and `tokens` tokens or all of the standard library's top-level functions and classes.

    Real source code, so document lengths and repetitions are those of a data set of code: two million tokens, which
    training repeats if that is too short. Documents are cut to `longest` tokens, as packing would.
    """
    from tokenizers import Tokenizer

    shared = os.environ.get(TEXTS)
    file = Path(shared or "", f"{tokens}-{vocabulary}-{longest}.json")
    if shared and file.exists():
        made, rows = json.loads(file.read_text(encoding="utf-8"))
        tokenizer = _fast_tokenizer(Tokenizer.from_str(made))
    else:
        tokenizer = _code_tokenizer(min(vocabulary, 8000))
        rows = _encoded(tokenizer, tokens, longest)
        if shared:
            unfinished = file.with_suffix(f".{os.getpid()}")  # of several ranks
            unfinished.write_text(json.dumps([tokenizer.backend_tokenizer.to_str(), rows]), encoding="utf-8")
            unfinished.replace(file)
    return tokenizer, datasets.Dataset.from_dict({"input_ids": rows})


def _encoded(tokenizer: Any, tokens: int, longest: int) -> list[list[int]]:
    rows: list[list[int]] = []
    texts = definitions()
    while tokens > 0 and (some := list(itertools.islice(texts, 256))):
        for ids in tokenizer(some)["input_ids"]:
            if tokens > 0:
                rows.append([*ids, tokenizer.eos_token_id][:longest])
                tokens -= len(rows[-1])
    return rows


@cache
def _code_tokenizer(vocabulary: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[*SPECIAL.values()], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(itertools.islice(definitions(), 2000), trainer=trainer)
    return _fast_tokenizer(tokenizer)


def _fast_tokenizer(tokenizer: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def _files() -> Iterator[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    for path in sorted(library.rglob("*.py")):
        if not left_out & {*path.relative_to(library).parts}:
            yield path.read_text(encoding="utf-8", errors="replace")


def definitions() -> Iterator[str]:
    for source in _files():
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        lines = source.splitlines()
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield "\n".join(lines[node.lineno - 1 : node.end_lineno])
