"""Tiny towers of images, a composite model with its processor, and data with images."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from datasets import Dataset, Sequence
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from fastpack_trl.testing import gradients

_SIZES = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 32,
}  # fmt: skip
_TABLE = _SIZES | {"num_position_embeddings": 16}
TOWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VisionTransformerPretrainedModel", _SIZES | {"embed_dim": 32, "mlp_ratio": 2}),
    "qwen2_5_vl": (
        "Qwen2_5_VisionTransformerPretrainedModel",
        _SIZES | {"window_size": 16, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": ("Qwen3VLVisionModel", _TABLE | {"deepstack_visual_indexes": [0]}),
    "qwen3_5": ("Qwen3_5VisionModel", _TABLE),
    "glm4v": ("Glm4vVisionModel", _SIZES | {"image_size": 16}),
    "exaone4_5": ("Exaone4_5_VisionModel", _SIZES | {"num_key_value_heads": 1, "fullatt_block_indexes": [1]}),
}
"""Class and sizes by family."""


class Composite(nn.Module):
    """A model with a tower and no decoder."""

    def __init__(self, family: str, dtype: torch.dtype = torch.float32, **more: Any) -> None:
        super().__init__()
        self.config = transformers.AutoConfig.for_model(family)
        home, (name, sizes) = import_module(f"transformers.models.{family}.modeling_{family}"), TOWERS[family]
        sizes = type(self.config.vision_config)(**sizes | more, attn_implementation="sdpa")
        torch.manual_seed(0)
        self.visual = getattr(home, name)(sizes).to(dtype).train()

    def forward(self, grids: Tensor) -> Tensor:
        """Return what the tower makes of random images."""
        weight = self.visual.patch_embed.proj.weight
        pixels = torch.randn(int(grids.prod(-1).sum()), weight[0].numel(), generator=torch.Generator().manual_seed(1))
        out = self.visual(pixels.to(weight), grids.to(weight.device))
        found: Tensor = out.pooler_output
        return found


def step(model: Any, *batches: Tensor) -> dict[str, Tensor]:
    """Return outputs and gradients of forwards before one backward pass each."""
    model.zero_grad()
    outs = [model(grids) for grids in batches]
    for out in outs:
        (out * torch.arange(out.shape[-1], device=out.device)).mean().backward()
    return {**{f"out {k}": out.detach() for k, out in enumerate(outs)}, **gradients(model)}


def composite(family: str) -> Any:
    """A model with a decoder, Qwen2.5-VL or Qwen3-VL, in fp32."""
    text = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 80,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    }  # fmt: skip
    ids = {"image_token_id": 60, "video_token_id": 59, "vision_start_token_id": 61, "vision_end_token_id": 62}
    config = transformers.AutoConfig.for_model(family, text_config=text, vision_config=TOWERS[family][1], **ids)
    torch.manual_seed(0)
    return transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)


def processor() -> Any:
    """Return one for both: words ``w3`` to ``w55``, ``<boi> <image> <eoi>`` for an image."""
    words = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(3, 56)), "<unk>", "user", "assistant"]
    words += ["<video>", "<image>", "<boi>", "<eoi>"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "bos", "unk")}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, additional_special_tokens=words[-4:], **named
    )
    for name, token in {"image": "<image>", "video": "<video>", "vision_start": "<boi>", "vision_end": "<eoi>"}.items():
        setattr(tokenizer, f"{name}_token", token)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))

    class WithoutVideos(transformers.Qwen2_5_VLProcessor):  # type: ignore[misc]  # videos need torchvision
        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer"]

    size = {"shortest_edge": 64, "longest_edge": 1024}
    pixels = Qwen2VLImageProcessorPil(patch_size=4, temporal_patch_size=2, merge_size=2, size=size)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return WithoutVideos(image_processor=pixels, tokenizer=tokenizer, chat_template=template)


def image_data(count: int = 8, *, preferences: bool = False) -> Dataset:
    """Prompts with 0, 1 and 2 images, and their completions."""
    random, rows = np.random.default_rng(0), []
    for k in range(count):
        sizes = random.integers(2, 5, (max(k % 3, int(preferences)), 2)) * 8
        shown = [Image.fromarray(random.integers(0, 255, (*size, 3), dtype=np.uint8)) for size in sizes]
        texts = [" ".join(f"w{i}" for i in random.integers(3, 55, random.integers(2, 20))) for _ in range(3)]
        row = {"images": shown, "prompt": texts[0] + " <boi> <image> <eoi> " * len(shown)}
        rows.append(row | ({"chosen": texts[1], "rejected": texts[2]} if preferences else {"completion": texts[1]}))
    return Dataset.from_list(rows).cast_column("images", Sequence(datasets.Image()))
