"""Tiny towers of images, a composite model with its processor, and data with images."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from datasets import Dataset, Sequence
from PIL import Image
from torch import Tensor, nn
from trainer_material import make_tokenizer, sentences
from transformers import ProcessorMixin
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
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
_TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
_DENSE = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_SECTIONS = {"rope_parameters": _ROPE | {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}}
_HYBRID = {
    "head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "rope_parameters": _ROPE | {"mrope_section": [1, 0, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25},
}  # fmt: skip
_WINDOW = {
    "query_pre_attn_scalar": 8, "sliding_window": 10, "layer_types": ["sliding_attention", "full_attention"]
}  # fmt: skip
_BLOCKS = {"mm_tokens_per_image": 4, "boi_token_index": 97, "eoi_token_index": 98}
COMPOSITES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": ({"rope_parameters": _ROPE}, TOWERS["qwen2_5_vl"][1], {}),
    "qwen3_vl": (_SECTIONS, TOWERS["qwen3_vl"][1], {}),
    "qwen3_5": (_HYBRID, TOWERS["qwen3_5"][1], {}),
    "llava": ({"model_type": "llama"}, _DENSE | {"model_type": "clip_vision_model"}, {"vision_feature_layer": -1}),
    "mistral3": ({"model_type": "mistral"}, _DENSE | {"model_type": "pixtral"}, {"vision_feature_layer": -1}),
    "idefics3": ({"model_type": "llama"}, _DENSE, {"scale_factor": 2}),
    "smolvlm": ({"model_type": "llama"}, _DENSE, {"scale_factor": 2}),
    "internvl": (
        {"model_type": "qwen2"},
        _DENSE | {"image_size": [16, 16], "patch_size": [4, 4]},
        {"image_seq_length": 4, "downsample_ratio": 0.5},
    ),
    "gemma3": (_WINDOW, _DENSE | {"model_type": "siglip_vision_model"}, _BLOCKS),
}
"""Fields of the decoder, the tower and the model by family."""


def composite(family: str, dtype: torch.dtype = torch.float32, repeats: int = 1) -> Any:
    """A model with a decoder; no weight is 0 or 1, which would hide errors. Layers are repeated."""
    text, tower, more = COMPOSITES[family]
    layers = 2 * repeats
    text, tower = text | {"num_hidden_layers": layers}, tower | {"num_hidden_layers": layers, "depth": layers}
    text |= {"layer_types": text["layer_types"] * repeats} if "layer_types" in text else {}
    ids = {f"{name}_token_id": 95 + k for k, name in enumerate(TOKENS)}
    config = transformers.AutoConfig.for_model(
        family, text_config=_TEXT | text, vision_config=tower, **ids, image_token_index=95, **more
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


class _Pixtral(ProcessorMixin):  # type: ignore[misc]
    """transformers' own needs torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: Any = None, **_: Any) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.image_token = TOKENS["image"]
        self.image_token_id = 95
        self.image_token_ids = [95, 97, 98]

    def _process_images(self, images: Any, **kwargs: Any) -> Any:
        return super()._process_images(images, **kwargs | {"patch_size": 8})

    def replace_image_token(self, image_inputs: Any, image_idx: int, **kwargs: Any) -> str:
        height, width = (size // 8 for size in image_inputs["image_sizes"][image_idx])
        return ((TOKENS["image"] * width + "<boi>") * height).removesuffix("<boi>") + "<eoi>"


PLACES = {"gemma3": " <boi> ", **dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_5"), " <boi> <image> <eoi> ")}
"""The text of an image by family, if it is not the placeholder alone."""


_SQUARE = {"height": 16, "width": 16}
_EDGE = {"longest_edge": 16}
_PROCESSORS: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "llava": (
        transformers.LlavaProcessor,
        CLIPImageProcessorPil,
        {"size": _SQUARE, "crop_size": _SQUARE},
        {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "mistral3": (
        _Pixtral,
        PixtralImageProcessorPil,
        {"size": {"longest_edge": 32}, "patch_size": 4},
        {},
    ),
    "idefics3": (
        transformers.Idefics3Processor,
        Idefics3ImageProcessorPil,
        {"size": {"longest_edge": 32}, "max_image_size": _EDGE},
        {"image_seq_len": 4},
    ),
    "internvl": (
        transformers.InternVLProcessor,
        GotOcr2ImageProcessorPil,
        {"size": _SQUARE, "min_patches": 1, "max_patches": 2},
        {"image_seq_length": 4},
    ),
    "gemma3": (transformers.Gemma3Processor, Gemma3ImageProcessorPil, {"size": _SQUARE}, {"image_seq_length": 4}),
}  # fmt: skip
_PROCESSORS["smolvlm"] = _PROCESSORS["idefics3"]  # its own needs num2words


_QWEN = transformers.Qwen3VLProcessor, transformers.Qwen2_5_VLProcessor
for _kind in (*_QWEN, *(each[0] for each in _PROCESSORS.values())):  # where workers that are spawned find them
    _only = classmethod(lambda cls: ["image_processor", "tokenizer"])
    globals()[f"Image{_kind.__name__}"] = type(
        f"Image{_kind.__name__}", (_kind,), {"get_attributes": _only, "__module__": __name__}
    )
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ' ' }}{% for part in m.content %}{{ '<shown> ' if part.type == 'image' else "
    "part.text + ' ' }}{% endfor %}{% endfor %}"
)


def processor(family: str = "qwen2_5_vl") -> Any:
    """A processor without videos, which need torchvision; by default that of the Qwen families."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(list(TOKENS.values()), special_tokens=True)
    names = TOKENS | dict.fromkeys(("boi", "start_image"), "<boi>") | dict.fromkeys(("eoi", "end_image"), "<eoi>")
    named = {f"{name}_token": token for name, token in (names | {"context_image": "<image>"}).items()}
    tokenizer._set_model_specific_special_tokens(named)  # which a saved tokenizer has too
    for name, token in named.items():
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    size = {"shortest_edge": 64, "longest_edge": 1024}
    kind = _QWEN[not family.startswith("qwen3")]
    pixels = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "size": size}
    kind, images, sizes, more = _PROCESSORS.get(family, (kind, Qwen2VLImageProcessorPil, pixels, {}))
    place = PLACES.get(family, "<image>").strip()
    own = globals()[f"Image{kind.__name__}"]
    return own(
        image_processor=images(**sizes), tokenizer=tokenizer, chat_template=TEMPLATE.replace("<shown>", place), **more
    )


def save_image_model(family: str, folder: Path, **more: Any) -> Path:
    """Save a composite model with its processor, which the auto classes load."""
    model, made = composite(family, **more), processor(family)
    transformers.AutoProcessor.register(type(model.config), type(made), exist_ok=True)
    for part in (model, made):
        part.save_pretrained(folder)
    return folder


def image_data(
    count: int = 8, *, preferences: bool = False, family: str = "qwen2_5_vl", images: int | None = None, kind: str = ""
) -> Dataset:
    """Prompts with 0, 1 and 2 images (or `images`), and their completions; preferences have an image each.

    Args:
        kind: of the examples: ``messages``, ``turns`` (a prompt and a completion of turns), or texts.
    """
    random, rows = np.random.default_rng(0), []
    place = PLACES.get(family, " <image> ")
    for k, (prompt, right, wrong) in enumerate(zip(*(sentences(count, seed) for seed in range(3)), strict=True)):
        many = k % 3 if images is None else images
        sizes = random.integers(2, 5, (max(many, int(preferences)), 2)) * 8
        shown = [Image.fromarray(random.integers(0, 255, (*size, 3), dtype=np.uint8)) for size in sizes]
        answers = {"chosen": right, "rejected": wrong} if preferences else {"completion": right}
        asked, said = ({"role": role, "content": text} for role, text in (("user", prompt), ("assistant", right)))
        example = {"prompt": prompt + place * len(shown), **answers}
        if kind:
            example = {"messages": [asked, said]} if kind == "messages" else {"prompt": [asked], "completion": [said]}
        rows.append({"images": shown, **example})
    return Dataset.from_list(rows).cast_column("images", Sequence(datasets.Image()))
