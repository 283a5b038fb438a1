"""How many operations a mixer runs, forward and backward: about one launch each on a device, whatever the documents."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from fastpack_trl.packing.chunks import chunks_of
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.recurrent import delta
from fastpack_trl.recurrent.seams import replaced
from fastpack_trl.recurrent.state_scan import merged_inverse, state_scan

# What makes no new numbers, and what torch resolves before a kernel.
NO_KERNEL = frozenset(
    {
        "view", "_unsafe_view", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "split",
        "t", "detach", "alias", "as_strided", "unbind", "reshape", "diagonal", "split_with_sizes", "matmul", "flatten",
        "unflatten", "movedim", "promote_types", "scalar_tensor", "result_type",
    }
)  # fmt: skip
DEVICE_CODE = {"fastpack::state_scan": state_scan, "fastpack::chunk_inverse": merged_inverse}
"""The operators, by what runs in them on a device."""


class Operations(TorchDispatchMode):
    """Counts what would be launched, also inside of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in DEVICE_CODE:
            with self:
                return DEVICE_CODE[name](*args, **(kwargs or {}))
        short = name.partition("::")[2]
        self.counts[short] += short not in NO_KERNEL
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("tokens", "longest", "loop", "most"),
    [(2048, 321, False, 340), (8192, 382, False, 340), (8192, 1883, False, 365), (2048, 321, True, 370),
     (8192, 382, True, 570)],
)  # fmt: skip
def test_operations_of_a_gated_delta_mixer(
    tokens: int, longest: int, loop: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prototype's were 396, 396, 412, 430 and 622; stock's loop over a packed row has 1,620 and 5,556."""
    monkeypatch.setattr(delta, "goes_one_by_one", lambda _states: loop)
    config = Qwen3_5TextConfig(
        hidden_size=16, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    mixer = modeling_qwen3_5.Qwen3_5GatedDeltaNet(config, 0)
    count, rest = divmod(tokens, longest)
    chunks = chunks_of(PackedBatch.from_lengths([longest] * count + [rest] * (rest > 0)))
    hidden = torch.randn(1, tokens, 16, requires_grad=True)
    with replaced(modeling_qwen3_5), Operations() as operations:
        mixer(hidden, packed_chunks=chunks).sum().backward()
    total = sum(operations.counts.values())
    assert total <= most
    assert total > 200, "it counts what runs"
    assert operations.counts["_local_scalar_dense"] == 0
