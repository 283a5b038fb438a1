"""Embeddings and head of an adapter's base: resized to the adapter, untied before a merge that changes one of them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any


def resize_to_adapter(model: Any, folder: Path, tokenizer: Callable[[], Any]) -> str:
    """Resize embeddings and head of a base to the rows that its adapter was saved with; return a line if it did.

    An adapter that holds no row of them needs a row for each token that it trains and, as in PEFT's `AutoPeftModel`,
    for each token of the tokenizer beside it.
    """
    rows, saved = model.get_input_embeddings().weight.shape[0], _saved_rows(model, folder)
    needed = saved
    if not saved:
        about = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        indices = about.get("trainable_token_indices") or []
        trained = chain.from_iterable(indices.values()) if isinstance(indices, dict) else indices
        beside = len(tokenizer()) if (folder / "tokenizer_config.json").is_file() else 0
        needed = max(rows, beside, *(int(index) + 1 for index in trained), 0)
    if needed == rows:
        return ""
    model.resize_token_embeddings(needed, mean_resizing=not saved)
    lost = "" if saved else f"; the adapter was saved without them: rows from {rows} on are drawn anew"
    return f"embeddings: {rows} rows -> {needed}, as many as the adapter was trained with{lost}"


def _saved_rows(model: Any, folder: Path) -> int:
    """Return the rows of the embeddings or the head in the file of an adapter; 0 if it holds neither."""
    ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
    names = {f".{name.rpartition('.')[2]}." for name, module in model.named_modules() if module in ends}
    for key, shape in _shapes(folder).items():
        if any(name in f".{key}" for name in names):
            kind = key.rpartition("embedding_A")[1] or key.removesuffix(".weight").rpartition(".")[2]
            if kind == "embedding_A":
                return shape[1]
            if key.endswith(".weight") and kind != "lora_A":
                return shape[0]
    return 0


def _shapes(folder: Path) -> dict[str, Any]:
    file = folder / "adapter_model.safetensors"
    if file.is_file():
        from safetensors import safe_open

        with safe_open(file, "pt") as tensors:
            return {key: tensors.get_slice(key).get_shape() for key in tensors.keys()}  # noqa: SIM118  # no mapping
    import torch

    state = torch.load(folder / "adapter_model.bin", map_location="meta", weights_only=True)
    return {key: tensor.shape for key, tensor in state.items()}


def merge_adapter(model: Any) -> tuple[Any, str]:
    """Merge an adapter into its base; return the model, and a line if its embeddings and head are no longer tied.

    Tied, they are one tensor: with what an adapter of one of them adds, the other one would compute too.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from torch import equal, nn

    base = model.get_base_model()
    ends = [base.get_input_embeddings(), base.get_output_embeddings()]
    configs = [each for each in (base.config, base.config.get_text_config()) if each.tie_word_embeddings]
    plain = [end.get_base_layer() if isinstance(end, BaseTunerLayer) else end for end in ends]
    if plain != ends and plain[1] is not None and plain[0].weight is plain[1].weight:
        plain[1].weight = nn.Parameter(plain[1].weight.detach().clone(), requires_grad=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Input and output embeddings are no longer tied")  # our line says so
        merged = model.merge_and_unload(safe_merge=True)
    embeddings, head = merged.get_input_embeddings(), merged.get_output_embeddings()
    if head is None or not configs:
        return merged, ""
    tied = equal(embeddings.weight, head.weight)  # an adapter with `ensure_weight_tying` changes both alike
    if tied:
        head.weight = embeddings.weight
    for config in configs:
        config.tie_word_embeddings = tied
    return (
        merged,
        "" if tied else "lm_head: its own weight (tie_word_embeddings is false now), for the adapter changed one",
    )
