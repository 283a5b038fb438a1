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
from torch import Tensor, nn
from trainer_material import make_tokenizer, sentences
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


TOKENS = {"image": "<image>", "video": "<video>", "vision_start": "<boi>", "vision_end": "<eoi>"}


def composite(family: str) -> Any:
    """A model with a decoder, Qwen2.5-VL or Qwen3-VL, in fp32."""
    text = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    }  # fmt: skip
    ids = {f"{name}_token_id": 95 + k for k, name in enumerate(TOKENS)}
    config = transformers.AutoConfig.for_model(family, text_config=text, vision_config=TOWERS[family][1], **ids)
    torch.manual_seed(0)
    return transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)


class ImageProcessor(transformers.Qwen2_5_VLProcessor):  # type: ignore[misc]
    """One for both, without videos, which need torchvision."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]


def processor() -> ImageProcessor:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(list(TOKENS.values()), special_tokens=True)
    for k, (name, token) in enumerate(TOKENS.items()):
        setattr(tokenizer, f"{name}_token", token)
        setattr(tokenizer, f"{name}_token_id", 95 + k)
    size = {"shortest_edge": 64, "longest_edge": 1024}
    pixels = Qwen2VLImageProcessorPil(patch_size=4, temporal_patch_size=2, merge_size=2, size=size)
    return ImageProcessor(image_processor=pixels, tokenizer=tokenizer, chat_template=tokenizer.chat_template)


def image_data(count: int = 8, *, preferences: bool = False) -> Dataset:
    """Prompts with 0, 1 and 2 images, and their completions; preferences have an image each."""
    random, rows = np.random.default_rng(0), []
    for k, (prompt, right, wrong) in enumerate(zip(*(sentences(count, seed) for seed in range(3)), strict=True)):
        sizes = random.integers(2, 5, (max(k % 3, int(preferences)), 2)) * 8
        shown = [Image.fromarray(random.integers(0, 255, (*size, 3), dtype=np.uint8)) for size in sizes]
        answers = {"chosen": right, "rejected": wrong} if preferences else {"completion": right}
        rows.append({"images": shown, "prompt": prompt + " <boi> <image> <eoi> " * len(shown), **answers})
    return Dataset.from_list(rows).cast_column("images", Sequence(datasets.Image()))
