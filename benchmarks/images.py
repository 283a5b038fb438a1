"""Models of images and text: public shapes with random weights, their processors, and images of noise."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

import datasets
import numpy as np
import torch

from benchmarks.models import EOS, PAD, RANK, word_tokenizer
from fastpack_trl.errors import UserError

WORDS = 8192
"""Size of the vocabulary of texts; the tokens of images come after it."""
MARKS = ("<image>", "<video>", "<boi>", "<eoi>")
EXAMPLES = 300


@dataclass(frozen=True, slots=True)
class ImageModel:
    """One model, by the fields of its public config.

    Attributes:
        pixels: side of the square of pixels that a token stands for, or of a whole image if all have one size.
        sizes: least and most of these squares in an image's height and width; none: all images have one size.
    """

    family: str
    text: dict[str, Any]
    tower: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)
    pixels: int = 28
    sizes: tuple[int, int] | None = (12, 32)


_QWEN = {"spatial_merge_size": 2, "temporal_patch_size": 2, "vocab_size": 151_936, "tie_word_embeddings": True}
_GEMMA = {"mm_tokens_per_image": 256, "boi_token_index": WORDS + 2, "eoi_token_index": WORDS + 3}


def _qwen(family: str, text: dict[str, Any], tower: dict[str, Any], pixels: int = 28, **more: Any) -> ImageModel:
    tower |= {"patch_size": pixels // 2, "out_hidden_size": text["hidden_size"]}
    return ImageModel(family, _QWEN | text, _QWEN | tower, pixels=pixels, **more)


def _rope(theta: float, sections: list[int], **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, "mrope_section": sections, **more}}


def _sizes(layers: int, width: int, inner: int, heads: int, **more: Any) -> dict[str, Any]:
    fields = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": inner}
    return fields | {"num_attention_heads": heads, **more}


def _tower(depth: int, width: int, inner: int, heads: int, **more: Any) -> dict[str, Any]:
    return {"depth": depth, "hidden_size": width, "intermediate_size": inner, "num_heads": heads, **more}


IMAGE_MODELS = {
    "qwen2.5-vl-3b": _qwen(
        "qwen2_5_vl", _sizes(36, 2048, 11_008, 16, num_key_value_heads=2) | _rope(1e6, [16, 24, 24]),
        _tower(32, 1280, 3420, 16, window_size=112, fullatt_block_indexes=[7, 15, 23, 31]),
    ),
    "qwen3-vl-4b": _qwen(
        "qwen3_vl",
        _sizes(36, 2560, 9728, 32, num_key_value_heads=8, head_dim=128)
        | _rope(5e6, [24, 20, 20], mrope_interleaved=True),
        _tower(24, 1024, 4096, 16, num_position_embeddings=2304, deepstack_visual_indexes=[5, 11, 17]), pixels=32,
    ),
    "gemma3-4b": ImageModel(
        "gemma3",
        _sizes(34, 2560, 10_240, 8, num_key_value_heads=4, head_dim=256, sliding_window=1024, vocab_size=262_208),
        _sizes(27, 1152, 4304, 16, image_size=896, patch_size=14, model_type="siglip_vision_model"), _GEMMA,
        pixels=896, sizes=None,
    ),
    "tiny-qwen2.5-vl": _qwen(
        "qwen2_5_vl", _sizes(2, 64, 96, 4, num_key_value_heads=2, vocab_size=9000) | _rope(1e4, [2, 3, 3]),
        _tower(2, 64, 64, 4, window_size=112, fullatt_block_indexes=[1]), sizes=(2, 6),
    ),
}  # fmt: skip


def image_material(name: str, kind: str, longest: int, device: str, seed: int) -> dict[str, Any]:
    """Return model, processor, data and, of the kind ``lora``, adapters of a trainer.

    Documents have 0, 1 and 2 images in turn and texts of 20 to `longest` words, by a log-normal distribution.

    Raises:
        UserError: this version of transformers cannot make the processor without torchvision.
    """
    import transformers
    from peft import LoraConfig

    shape = IMAGE_MODELS[name]
    ids = {f"{part}_token_id": WORDS + k for k, part in enumerate(("image", "video", "vision_start", "vision_end"))}
    config = transformers.AutoConfig.for_model(
        shape.family, text_config=shape.text | {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None},
        vision_config=shape.tower, image_token_index=WORDS, tie_word_embeddings=True, **ids | shape.more,
    )  # fmt: skip
    torch.manual_seed(seed)
    with torch.device(device):
        weights = torch.bfloat16 if device == "cuda" else torch.float32
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=weights)
    if shape.family == "gemma3":  # zeros at first: no image would reach the loss, nor a gradient the tower
        torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.02)
    adapters = LoraConfig(r=RANK, task_type="CAUSAL_LM", target_modules="all-linear") if kind == "lora" else None
    return {
        "model": model, "processing_class": _processor(shape), "train_dataset": _documents(shape, longest, seed),
        "peft_config": adapters,
    }  # fmt: skip


def _processor(shape: ImageModel) -> Any:
    """Return a processor without videos, which need torchvision."""
    import transformers

    tokenizer = word_tokenizer(WORDS)
    tokenizer.add_tokens(list(MARKS), special_tokens=True)
    names = ("image", "video", "vision_start", "vision_end"), ("image", "video", "boi", "eoi")
    for name, mark in (pair for each in names for pair in zip(each, MARKS, strict=True)):
        setattr(tokenizer, f"{name}_token", mark)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(mark))
    try:
        if shape.family == "gemma3":
            from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

            kind, more = transformers.Gemma3Processor, {"image_seq_length": shape.more["mm_tokens_per_image"]}
            images: Any = Gemma3ImageProcessorPil(size={"height": shape.pixels, "width": shape.pixels})
        else:
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

            kind, more, square = transformers.Qwen2_5_VLProcessor, {}, shape.pixels**2
            kind = transformers.Qwen3VLProcessor if shape.family == "qwen3_vl" else kind
            images = Qwen2VLImageProcessorPil(
                patch_size=shape.pixels // 2, merge_size=2, temporal_patch_size=2,
                size={"shortest_edge": 4 * square, "longest_edge": 1024 * square},
            )  # fmt: skip
    except ImportError as error:
        raise UserError(
            f"transformers {transformers.__version__} has no processor for {shape.family}: {error}"
        ) from error
    only = classmethod(lambda cls: ["image_processor", "tokenizer"])
    own = type(kind.__name__, (kind,), {"get_attributes": only})
    return own(image_processor=images, tokenizer=tokenizer, chat_template="none", **more)


def _jpeg(image: Any) -> bytes:
    """Return a photo's format, which is also made in a tenth of the time of a PNG of noise."""
    image.save(file := io.BytesIO(), "JPEG")
    return file.getvalue()


def _documents(shape: ImageModel, longest: int, seed: int) -> datasets.Dataset:
    from PIL import Image

    draw, rows = np.random.default_rng(seed), []
    place = " <boi> " if shape.family == "gemma3" else " <boi> <image> <eoi> "

    def words() -> str:
        count = int(np.clip(draw.lognormal(5.0, 0.8), 20, longest))
        return " ".join(f"t{word}" for word in draw.integers(2, WORDS, count))

    for index in range(EXAMPLES):
        count = index % 3
        sides = np.ones((count, 2), int) if shape.sizes is None else draw.integers(*shape.sizes, (count, 2))
        noise = [draw.integers(0, 255, (*(side * shape.pixels), 3), dtype=np.uint8) for side in sides]
        images = [{"bytes": _jpeg(Image.fromarray(each))} for each in noise]
        rows.append({"images": images, "prompt": words() + place * count, "completion": f" {words()}"})
    return datasets.Dataset.from_list(rows).cast_column("images", datasets.Sequence(datasets.Image()))
