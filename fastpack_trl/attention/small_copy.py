"""A small model of the same classes, to check how a model mixes tokens where its own weights cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
from peft import get_peft_model
from torch import nn

from fastpack_trl.model.facts import is_prompt_learning, text_model

_SMALL_VOCABULARY = 256


@contextmanager
def small_copy(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> Iterator[nn.Module]:
    """Make an untrained model of the same classes and adapters, with the first layers up to one of each kind.

    Which tokens a layer mixes does not depend on its weights.
    """
    base = text_model(model)
    config = deepcopy(base.config)
    text = config.get_text_config()
    count = int(text.num_hidden_layers)
    each = {name: value for name, value in vars(text).items() if isinstance(value, list) and len(value) == count}
    kinds = list(zip(*(map(str, value) for value in each.values()), strict=True)) or [()] * count
    layers = max(2, *(kinds.index(kind) + 1 for kind in kinds))
    if not getattr(text, "num_kv_shared_layers", 0):  # the last ones, which read what the layers before made
        for name, value in each.items():
            setattr(text, name, value[:layers])
        text.num_hidden_layers = min(layers, count)
    for part in (config, text):  # which may be the same
        part.pad_token_id = None
        for name in ("vocab_size", "vocab_size_per_layer_input"):
            if getattr(part, name, None):
                setattr(part, name, _SMALL_VOCABULARY)
        vars(part).pop("quantization_config", None)
    with torch.random.fork_rng(devices=[device.index or 0] if device.type == "cuda" else []), device:
        copy = type(base)(config)
        adapter = getattr(model, "active_peft_config", None)
        if adapter is not None and adapter.peft_type != "LORA" and not is_prompt_learning(model):  # LoRA mixes none
            copy = get_peft_model(copy, deepcopy(adapter))
    yield copy.to(device, dtype or base.dtype).train(model.training)
