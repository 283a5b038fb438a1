"""Models for which a packing check cannot run, or must fail: tokens are mixed outside of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Model

from fastpack_trl.testing import tiny_model


class Around(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


class Shift(Around):
    """Mixes neighbouring tokens outside of attention: no path keeps documents apart in it."""

    def forward(self, hidden: Tensor) -> Any:
        return self.layer(hidden) + nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]


class Mean(Around):
    """Adds the mean over a row, of padding too, or, with `sums`, sums over earlier tokens, behind a zero gate."""

    def __init__(self, layer: nn.Module, *, sums: bool = False) -> None:
        super().__init__(layer)
        self.sums, self.gate = sums, nn.Parameter(torch.zeros(32, 32) if sums else torch.zeros(()))

    def forward(self, hidden: Tensor) -> Any:
        mixed = hidden.cumsum(1) @ self.gate if self.sums else torch.relu(self.gate) * hidden.mean(1, keepdim=True)
        return self.layer(hidden) + mixed


class Noise(Around):
    """Drops in evaluation mode too, as Monte Carlo dropout does."""

    def forward(self, hidden: Tensor) -> Any:
        return nn.functional.dropout(self.layer(hidden), 0.1, training=True)


class OneRow(Qwen3Model):
    """Takes only one row at a time: no positions of several documents."""

    def forward(self, position_ids: Any = None, **kwargs: Any) -> Any:
        if position_ids is not None and not bool((position_ids.diff() == 1).all()):
            raise ValueError("one row at a time")
        return super().forward(position_ids=position_ids, **kwargs)


class Bigrams(Qwen3Model):
    """Adds embeddings of pairs of tokens (`reach` 1) or of tokens (0), which `inputs_embeds` says nothing of."""

    reach = 1

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
        if inputs_embeds is None:
            before = nn.functional.pad(input_ids, (self.reach, 0))[:, : input_ids.shape[1]]
            inputs_embeds = self.embed_tokens(input_ids) + self.pairs((input_ids * 31 + before * 17) % 64)
        return super().forward(inputs_embeds=inputs_embeds, **kwargs)


class Unigrams(Bigrams):
    reach = 0


class Strict(Around):
    """A layer that takes no keyword of its caller's but those that transformers' own layers name."""

    def forward(
        self, hidden_states: Any, attention_mask: Any = None, position_ids: Any = None, past_key_values: Any = None,
        use_cache: Any = None, position_embeddings: Any = None, cache: Any = None,
    ) -> Any:  # fmt: skip
        caches = {"cache": cache, "past_key_values": past_key_values}  # transformers 5.24 renamed it
        given = {name: value for name, value in caches.items() if value is not None}
        return self.layer(
            hidden_states, attention_mask=attention_mask, position_ids=position_ids, use_cache=use_cache,
            position_embeddings=position_embeddings, **given,
        )  # fmt: skip


def model_with(wrapper: Any = None, backbone: Any = None) -> Any:
    model = tiny_model("qwen3")
    if wrapper is Strict:
        model.model.layers[0] = Strict(model.model.layers[0])
    elif wrapper is not None:
        model.model.layers[0].mlp = wrapper(model.model.layers[0].mlp)
    if backbone is not None:
        model.model.__class__ = backbone
        generator = torch.Generator().manual_seed(0)
        model.model.pairs = nn.Embedding.from_pretrained(torch.randn(64, 32, generator=generator), freeze=False)
    return model


def capped_sdpa() -> Any:
    """Gemma 2 under sdpa, as transformers 5.17 loads it; later versions refuse that, so its name is set afterwards."""
    model = tiny_model("gemma2", attn_implementation="eager")
    model.config._attn_implementation_internal = "sdpa"
    with torch.no_grad():  # scores that the softcap bends
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter *= 40
    return model
