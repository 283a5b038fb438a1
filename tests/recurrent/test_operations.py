"""How many operations a mixer runs, forward and backward: about one launch each on a device, whatever the documents."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hybrid_material import INSIDE
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GraniteMoeHybridConfig, Qwen3_5TextConfig
from transformers.models.granitemoehybrid import modeling_granitemoehybrid
from transformers.models.qwen3_5 import modeling_qwen3_5

from fastpack_trl.kernels.inverse import merged_inverse
from fastpack_trl.packing.chunks import chunks_of
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.recurrent import products
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
    "delta": (
        modeling_qwen3_5,
        modeling_qwen3_5.Qwen3_5GatedDeltaNet,
        Qwen3_5TextConfig(
            hidden_size=16, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8,
            linear_value_head_dim=8, num_hidden_layers=1, layer_types=["linear_attention"],
        ),
    ),
    "mamba2": (
        modeling_granitemoehybrid,
        modeling_granitemoehybrid.GraniteMoeHybridMambaLayer,
        GraniteMoeHybridConfig(
            hidden_size=16, mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_expand=2,
            num_hidden_layers=1, layer_types=["mamba"],
        ),
    ),
}  # fmt: skip


class Operations(TorchDispatchMode):
    """Counts what would be launched, also inside of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in INSIDE:
            with self:
                return INSIDE[name](*args, **(kwargs or {}))
        with self:  # in an operator, what torch makes of several kernels arrives as it is
            if (found := func.decompose(*args, **(kwargs or {}))) is not NotImplemented:
                return found
        short = name.partition("::")[2]
        self.counts[short] += short not in NO_KERNEL
        return func(*args, **(kwargs or {}))


def operations(kind: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch, *, device: bool) -> Counter[str]:
    """Count the operations of one mixer, forward and backward; `device`: with what runs on a GPU instead of a CPU."""
    home, layer, config = CONFIGS[kind]
    torch.manual_seed(0)
    mixer = layer(config, 0)
    chunks = chunks_of(PackedBatch.from_lengths(lengths))
    hidden = torch.randn(1, sum(lengths), 16, requires_grad=True)
    with replaced(home), Operations() as found:
        if device:
            monkeypatch.setattr(products, "chunk_inverse", merged_inverse)
        mixer(hidden, packed_chunks=chunks).sum().backward()
    return found.counts


def documents(tokens: int, longest: int) -> list[int]:
    count, rest = divmod(tokens, longest)
    return [longest] * count + [rest] * (rest > 0)


@pytest.mark.parametrize("kind", CONFIGS)
def test_operations_of_a_mixer_on_a_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's loop over a packed row has 1,620 and 5,556 with a delta rule.

    They do not grow with documents; with a delta rule by three per chunk and pass of its state (forward, forward again,
    backward), and one for what enters backward from outside.
    """
    rows = ((2048, 321), (8192, 382), (8192, 1883))
    found = [operations(kind, documents(*row), monkeypatch, device=True) for row in rows]
    short, long, longest = (sum(counts.values()) for counts in found)
    assert long == longest
    assert long - short == (96 * 10 if kind == "delta" else 0)
    assert 100 < short <= {"delta": 800, "mamba2": 300}[kind]
    assert all(counts["_local_scalar_dense"] == 0 for counts in found)
