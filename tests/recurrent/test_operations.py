"""How many operations a mixer runs, forward and backward: about one launch each on a device, whatever the documents."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hybrid_material import HYBRIDS, Inside, hybrid_model, reached
from torch.utils.flop_counter import FlopCounterMode
from transformers import GraniteMoeHybridConfig, Qwen3_5TextConfig
from transformers.models.granitemoehybrid import modeling_granitemoehybrid
from transformers.models.qwen3_5 import modeling_qwen3_5

from fastpack_trl.attention.install import packed_attention
from fastpack_trl.measure.flops import attention_pairs, model_flops
from fastpack_trl.packing.chunks import chunks_of
from fastpack_trl.packing.packed_batch import PackedBatch, to_transformers_kwargs
from fastpack_trl.recurrent import solve
from fastpack_trl.recurrent.seams import replaced

# What makes no new numbers, and what torch resolves before a kernel.
NO_KERNEL = frozenset(
    {
        "view", "_unsafe_view", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "split",
        "t", "detach", "alias", "as_strided", "unbind", "reshape", "diagonal", "split_with_sizes", "matmul", "flatten",
        "unflatten", "movedim", "promote_types", "scalar_tensor", "result_type", "empty", "empty_like", "new_empty",
    }
)  # fmt: skip
CONFIGS: dict[str, tuple[Any, Any, Any]] = {
    "delta": (modeling_qwen3_5, modeling_qwen3_5.Qwen3_5GatedDeltaNet, Qwen3_5TextConfig(
        hidden_size=16, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, num_hidden_layers=1, layer_types=["linear_attention"])),
    "mamba2": (modeling_granitemoehybrid, modeling_granitemoehybrid.GraniteMoeHybridMambaLayer, GraniteMoeHybridConfig(
        hidden_size=16, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_expand=2,
        num_hidden_layers=1, layer_types=["mamba"])),
}  # fmt: skip
# Tokens and the longest document. Transformers' loop over a packed row has 1,620 and 5,556 with a delta rule.
ROWS = ((2048, 321), (8192, 382), (8192, 1883))
AT_MOST = {
    # Nine per chunk: three in each pass of the state, which runs forward, again, and backward.
    ("delta", "cpu"): (628, 1492, 1492),
    # By doubling, nine for each time that the chunks of the longest document double.
    ("delta", "device"): (435, 435, 453),
    ("mamba2", "cpu"): (290, 290, 290),
}


class Operations(Inside):
    """Counts what would be launched, also inside of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        short = func._schema.name.partition("::")[2]
        self.counts[short] += short not in NO_KERNEL
        return func(*args, **kwargs)


@pytest.mark.parametrize(("kind", "form"), AT_MOST)
def test_operations_of_a_mixer(kind: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not grow with documents, nor with the row but for a delta rule on a CPU."""
    monkeypatch.setattr(solve, "one_by_one", lambda device: form == "cpu")
    home, layer, config = CONFIGS[kind]
    for (tokens, longest), most in zip(ROWS, AT_MOST[kind, form], strict=True):
        lengths = [longest] * (tokens // longest) + [tokens % longest]
        mixer, hidden = layer(config, 0), torch.randn(1, tokens, 16, requires_grad=True)
        chunks = chunks_of(PackedBatch.from_lengths(lengths))
        with replaced(home), Operations() as seen:
            mixer(hidden, packed_chunks=chunks).sum().backward()
        assert 100 < sum(seen.counts.values()) <= most
        assert seen.counts["_local_scalar_dense"] == 0


@pytest.mark.parametrize("family", HYBRIDS)
def test_needed_operations_are_those_of_the_operators(family: str) -> None:
    """The numerator of MFU vs. torch's count of a packed row, less what operators compute again."""
    if not reached(family):
        pytest.skip("in padded rows with this transformers")
    model, ids, batch = hybrid_model(family), torch.randint(3, 90, (1, 150)), PackedBatch.from_lengths((100, 50))
    if getattr(model.config, "_experts_implementation", None) is not None:
        model.set_experts_implementation("eager")
    with packed_attention(model), FlopCounterMode(display=False) as counter:
        logits = model(input_ids=ids, packed_batch=batch, use_cache=False, **to_transformers_kwargs(batch)).logits
        forward = counted(counter)
        logits.sum().backward()
    whole, flops = counted(counter), model_flops(model)
    assert flops.inexact == ()
    pairs = {window: attention_pairs((100, 50), causal_half=False) for window in flops.windows}
    count = flops.count(150, pairs, 150, twice=0)
    assert count.forward == forward.total()
    mixing = forward.total() - forward["mm"] - forward["addmm"] - forward["per_document_attention"]
    again = mixing + whole["per_document_attention_backward"] - 2 * forward["per_document_attention"]
    assert count.hardware == whole.total() - again
    assert count.recompute == 0
    model.gradient_checkpointing_enable()
    assert model_flops(model).count(150, pairs, 150, twice=0).recompute > mixing > 0


def counted(counter: FlopCounterMode) -> Counter[str]:
    """By operator, less the angles of positions: element by element, which transformers 5.17 spells as a product."""
    found: Counter[str] = Counter()
    for module, flops in counter.get_flop_counts().items():
        sign = 1 if module == "Global" else -module.endswith(".rotary_emb")
        for packet, count in flops.items():
            found[str(packet).partition(".")[2]] += sign * count
    return found
