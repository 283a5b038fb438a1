"""A backbone over a static batch: hidden states and gradients of the plain row, for whatever is copied into it.

Attention is the varlen kernel's twin, so that rows that flash leaves uninitialized are NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from static_material import rows, to_static
from torch import Tensor

from fastpack_trl import packed_attention
from fastpack_trl.attention.varlen import Varlen
from fastpack_trl.packing.buckets import Bucket
from fastpack_trl.packing.packed_batch import to_transformers_kwargs
from fastpack_trl.testing import assert_gradients_close, count_host_syncs, gradients, tiny_model

FAMILIES = ("llama", "gemma3_text", "qwen3_moe", "gpt_oss")
MOE = ("kernels/grouped.py", "moe/experts.py", "integrations/moe.py")
ROOMY = Bucket(tokens=240, segments=80, max_seqlen=20, keys=600, max_seqlen_k=60)
"""Much larger than the rows here."""


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: Any) -> Iterator[Any]:
    """A model whose packed attention runs the twin of the kernel."""
    made = tiny_model(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Varlen, "refuses", lambda self, features: "")
        with packed_attention(made, "varlen"):
            yield made


def run(model: Any, keywords: Any, tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states of the row, and the gradients of a loss that reads nothing of the tail."""
    model.zero_grad()
    hidden = model.model(**keywords, use_cache=False).last_hidden_state[:, :tokens]
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
    (hidden * weights).sum().backward()
    return hidden.detach().clone(), gradients(model)


def plain(model: Any, inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    batch = inputs["packed_batch"]
    keywords = {"input_ids": inputs["input_ids"], "packed_batch": batch, **to_transformers_kwargs(batch)}
    return run(model, keywords, batch.total_tokens)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows, rows)
def test_whatever_is_copied_in_gives_its_hidden_states_and_gradients(model: Any, first: Any, second: Any) -> None:
    """As a replay: tensors are overwritten, everything else stays as the first row left it."""
    static = to_static(first, ROOMY)
    run(model, static.keywords, 1)
    static.batch.clear_derived()
    static.copy_row(second["packed_batch"], second["input_ids"])
    with count_host_syncs(device="cpu") as syncs:
        hidden, found = run(model, static.keywords, second["packed_batch"].total_tokens)
    # The twins of kernels ask for lengths and for tokens per expert, which on the CPU are at hand.
    asked = [entry for entry in syncs.of("sync", "copy") if not entry.file.endswith(("attention/reference.py", *MOE))]
    assert not asked, asked
    expected, of_plain = plain(model, second)
    torch.testing.assert_close(hidden, expected, rtol=1e-5, atol=1e-5)
    assert_gradients_close(found, of_plain, rtol=1e-4, atol_of_all=1e-5)
    again = to_static(second, ROOMY)
    assert torch.equal(run(model, again.keywords, second["packed_batch"].total_tokens)[0], hidden), "not of the first"
