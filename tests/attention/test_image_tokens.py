"""Image-text documents in a row that a loop of the user's gives to the model: exact, or refused by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from trainer_material import build
from transformers import AutoConfig, AutoModelForImageTextToText

from fastpack_trl import FastSFTTrainer, PackedBatch, packed_attention
from fastpack_trl.errors import PackingError
from fastpack_trl.testing import assert_gradients_close, gradients

LENGTHS = (9, 5, 14, 6)
IMAGES = (slice(3, 6), slice(16, 22))
TEXT: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
WINDOW = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
GEMMA4 = {
    **WINDOW, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "global_head_dim": 16,
    "num_kv_shared_layers": 0,
}  # fmt: skip
QWEN = {"rope_parameters": ROPE, "rope_scaling": ROPE}
QWEN_VISION = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 16, "patch_size": 4,
    "spatial_merge_size": 2, "fullatt_block_indexes": [0], "deepstack_visual_indexes": [],
}  # fmt: skip
BY_KIND: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("token_type_ids", WINDOW, {"vision_config": VISION, "mm_tokens_per_image": 4, "image_token_index": 95}),
    "gemma4": ("mm_token_type_ids", GEMMA4, {"vision_config": None, "audio_config": None, "image_token_id": 95}),
    "molmo2": (
        "mm_token_type_ids",
        {},
        {
            "vision_config": {**VISION, "num_key_value_heads": 2, "head_dim": 8, "image_size": [8, 8]},
            "adapter_config": {
                **VISION,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "text_hidden_size": 32,
                "vision_feature_layer": [0],
            },
            "image_token_id": 95,
        },
    ),
    # In both directions by their config: no backend takes them.
    "gemma4 vision": (
        "mm_token_type_ids",
        {**GEMMA4, "use_bidirectional_attention": "vision"},
        {"vision_config": None, "audio_config": None, "image_token_id": 95},
    ),
    "paligemma": (
        "token_type_ids",
        {"model_type": "gemma2", "sliding_window": 64},
        {"vision_config": {**VISION, "model_type": "siglip_vision_model", "projection_dim": 32}, "projection_dim": 32},
    ),
}
"""The keyword with the kinds of tokens, the text config and the rest."""
OTHERS: dict[str, dict[str, Any]] = {"qwen2_5_vl": QWEN, "qwen3_vl": QWEN}


def vision_model(family: str, text: dict[str, Any], **rest: Any) -> Any:
    torch.manual_seed(0)
    try:
        config = AutoConfig.for_model(family.split()[0], text_config={**TEXT, **text}, **rest)
    except ValueError:
        pytest.skip(f"this transformers has no {family}")
    return AutoModelForImageTextToText.from_config(config).float().train()


def of_kind(family: str) -> tuple[str, Any]:
    name, text, rest = BY_KIND[family]
    return name, vision_model(family, text, **rest)


def row() -> tuple[Tensor, Tensor]:
    """Token ids, and 1 where a token is of an image."""
    ids = torch.randint(3, 90, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    kinds = torch.zeros_like(ids)
    for image in IMAGES:
        kinds[:, image] = 1
    return ids, kinds


def assert_packed_is_separate(
    model: Any, implementation: str, kinds: Tensor | None = None, name: str = "", **packed: Any
) -> str:
    """Loss and gradients of the row are those of its documents one by one under stock; returns the path."""
    ids, _ = row()
    batch = PackedBatch.from_lengths(LENGTHS, labels=ids)
    reference, total = copy.deepcopy(model), 0.0
    for index, document in enumerate(ids[0].split(LENGTHS)):
        own = {} if kinds is None else {name: kinds.split(LENGTHS, dim=1)[index]}
        logits = reference(input_ids=document[None], use_cache=False, **own).logits[0, :-1]
        loss = F.cross_entropy(logits, document[1:], reduction="sum") / len(batch.loss_positions)  # type: ignore[arg-type]
        loss.backward()
        total += loss.item()
    with packed_attention(model, implementation) as attention:
        own = {} if kinds is None else {name: kinds}
        positions = {"position_ids": batch.position_ids} | packed
        logits = model(input_ids=ids, packed_batch=batch, use_cache=False, **own, **positions).logits[0]
        found = F.cross_entropy(logits[batch.loss_positions], batch.loss_labels)
        found.backward()
    assert abs(found.item() - total) <= 2e-6
    assert_gradients_close(gradients(model), gradients(reference), rtol=1e-4)
    return attention.path


@pytest.mark.parametrize("implementation", ["per_document", "sdpa"])
@pytest.mark.parametrize("family", BY_KIND)
def test_a_backend_refuses_image_tokens_that_see_each_other(family: str, implementation: str) -> None:
    name, model = of_kind(family)
    ids, kinds = row()
    batch = PackedBatch.from_lengths(LENGTHS)
    kinds = 1 - kinds if family == "paligemma" else kinds
    with (
        pytest.raises(
            (PackingError, ValueError),
            match=rf"{name} of {family}_text .*packed_attention='{implementation}'.*train such data "
            r"|attends in both directions",
        ),
        packed_attention(model, implementation),
    ):
        model(input_ids=ids, packed_batch=batch, position_ids=batch.position_ids, use_cache=False, **{name: kinds})


@pytest.mark.parametrize("implementation", ["per_document", "sdpa"])
@pytest.mark.parametrize("family", ["gemma3", "gemma4", "molmo2"])
def test_rows_of_text_alone_stay_as_they_are(family: str, implementation: str) -> None:
    name, model = of_kind(family)
    assert assert_packed_is_separate(model, implementation, torch.zeros_like(row()[1]), name) == implementation
    if family != "molmo2":  # which asks for them in training
        model.zero_grad()
        assert assert_packed_is_separate(model, implementation) == implementation


@pytest.mark.parametrize("sections", [0, 3, 4])
@pytest.mark.parametrize("family", OTHERS)
def test_positions_of_several_sections_are_exact(family: str, sections: int) -> None:
    model = vision_model(family, OTHERS[family], vision_config=QWEN_VISION, image_token_id=95)
    positions = PackedBatch.from_lengths(LENGTHS).position_ids
    given = {"position_ids": positions[None].expand(sections, 1, -1)} if sections else {}
    # Kinds that no mask reads are no reason to refuse.
    assert assert_packed_is_separate(model, "auto", mm_token_type_ids=row()[1], **given) == "per_document"


def test_tokens_of_positions_with_several_sections_are_counted(tmp_path: Path) -> None:
    class Sections(FastSFTTrainer):
        def _prepare_inputs(self, inputs: Any) -> Any:
            inputs = super()._prepare_inputs(inputs)
            inputs["position_ids"] = inputs["position_ids"].expand(4, 1, -1)
            return inputs

    logs = []
    for cls in (FastSFTTrainer, Sections):
        model = vision_model("qwen3_vl", QWEN, vision_config=QWEN_VISION, image_token_id=95)
        trainer = build(cls, tmp_path, model=model, fast={}, packing=True, max_steps=2, eval_strategy="no")
        trainer.train()
        assert trainer.fastpack_report["batches"].path == "packed"
        logs.append([(row["num_tokens"], row["loss"]) for row in trainer.state.log_history if "loss" in row])
    assert logs[1] == [(tokens, pytest.approx(loss, rel=1e-5)) for tokens, loss in logs[0]]
    assert logs[0][0][0] > 4 * 4
