"""How many operations a mixer runs, forward and backward: about one launch each on a device, whatever the documents."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hybrid_material import INSIDE
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GraniteMoeHybridConfig, Qwen3_5TextConfig
from transformers.models.granitemoehybrid import modeling_granitemoehybrid
from transformers.models.qwen3_5 import modeling_qwen3_5

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
    """Counts what would be launched, also inside of operators, and for a device what is a kernel there as one."""

    def __init__(self, device: bool) -> None:
        super().__init__()
        self.kernels = {"fastpack::short_conv": 1, "fastpack::short_conv_backward": 5} if device else {}
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in self.kernels:
            self.counts[name] += self.kernels[name]
        elif name in INSIDE:
            with self:
                return INSIDE[name](*args, **(kwargs or {}))
        if name in self.kernels:
            return func(*args, **(kwargs or {}))
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
    with replaced(home), Operations(device) as found:
        if device:
            monkeypatch.setattr(products, "chunk_inverse", lambda lower: inverse_of_a_device(found, lower))
            monkeypatch.setattr(products, "state_pass", lambda *args, **keywords: pass_of_a_device(found, *args))
        mixer(hidden, packed_chunks=chunks).sum().backward()
    return found.counts


def inverse_of_a_device(found: Operations, lower: Tensor) -> Tensor:
    found.counts["chunk_inverse"] += 1
    return torch.empty_like(lower).copy_(lower)  # counted too


def pass_of_a_device(found: Operations, base: Tensor, left: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    found.counts["state_pass"] += 1
    return base.new_zeros(*left.shape[:2], left.shape[-1], base.shape[-1]), base.clone()


def documents(tokens: int, longest: int) -> list[int]:
    count, rest = divmod(tokens, longest)
    return [longest] * count + [rest] * (rest > 0)


@pytest.mark.parametrize("kind", CONFIGS)
def test_operations_of_a_mixer_on_a_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prototype's delta rule had 396 and 412; stock's loop over a packed row has 1,620 and 5,556.

    They grow neither with the row nor with its documents.
    """
    rows = ((2048, 321), (8192, 382), (8192, 1883))
    found = [operations(kind, documents(*row), monkeypatch, device=True) for row in rows]
    totals = [sum(counts.values()) for counts in found]
    assert len(set(totals)) == 1
    assert 100 < totals[0] <= {"delta": 275, "mamba2": 230}[kind]
    assert all(counts["_local_scalar_dense"] == 0 for counts in found)
    assert found[0]["state_pass"] == (3 if kind == "delta" else 0), "forward, forward again, backward"


def test_a_cpu_runs_three_operations_per_chunk_and_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two products and a decay, and in backward what enters from outside: there, work counts for more than calls."""
    few, more = (
        sum(operations("delta", documents(tokens, 321), monkeypatch, device=False).values()) for tokens in (1024, 2048)
    )
    assert more - few == 16 * (3 * 3 + 1)
