"""How many operations a mixer runs, forward and backward: about one launch each on a device, whatever the documents."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from model_material import Inside, hybrid_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING

from fastpack_trl.attention.install import packed_attention
from fastpack_trl.measure.flops import model_flops
from fastpack_trl.model.facts import Scan, mixers
from fastpack_trl.packing.chunks import CHUNK, chunks_of
from fastpack_trl.packing.packed_batch import PackedBatch, to_transformers_kwargs
from fastpack_trl.recurrent import solve
from fastpack_trl.recurrent.delta import delta_rule
from fastpack_trl.recurrent.seams import recurrent_layers
from fastpack_trl.recurrent.ssd import mamba2

# What makes no new numbers, and what torch resolves before a kernel.
NO_KERNEL = frozenset(
    {
        "view", "_unsafe_view", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "split",
        "t", "detach", "alias", "as_strided", "unbind", "reshape", "diagonal", "split_with_sizes", "matmul", "flatten",
        "unflatten", "movedim", "promote_types", "scalar_tensor", "result_type", "empty", "empty_like", "new_empty",
    }
)  # fmt: skip
# Tokens and the longest document. Transformers' loop over a packed row has 1,620 and 5,556 with a delta rule.
ROWS = ((2048, 321), (8192, 382), (8192, 1883))
AT_MOST = {
    # Nine per chunk: three in each pass of the state, which runs forward, again, and backward. One more with 5.17.
    ("qwen3_5_text", "cpu"): (629, 1493, 1493),
    # By doubling, nine for each time that the chunks of the longest document double.
    ("qwen3_5_text", "device"): (436, 436, 454),
    ("granitemoehybrid", "cpu"): (290, 290, 290),
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


@pytest.mark.parametrize(("family", "form"), AT_MOST)
def test_operations_of_a_mixer(family: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not grow with documents, nor with the row but for a delta rule on a CPU."""
    monkeypatch.setattr(solve, "one_by_one", lambda device: form == "cpu")
    model = hybrid_model(family, linear_num_key_heads=1, mamba_n_groups=1)
    mixer = next(iter(mixers(model)))
    for (tokens, longest), most in zip(ROWS, AT_MOST[family, form], strict=True):
        lengths = [longest] * (tokens // longest) + [tokens % longest]
        hidden, chunks = torch.randn(1, tokens, 32, requires_grad=True), chunks_of(PackedBatch.from_lengths(lengths))
        model.zero_grad()
        with recurrent_layers(model), Operations() as seen:
            mixer(hidden, packed_chunks=chunks).sum().backward()
        assert 100 < sum(seen.counts.values()) <= most
        assert seen.counts["_local_scalar_dense"] == 0


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "lfm3"])
def test_needed_operations_are_those_of_the_operators(family: str) -> None:
    """The numerator of MFU vs. torch's count of a packed row, less what operators compute again."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    model, ids, batch = hybrid_model(family), torch.randint(3, 90, (1, 150)), PackedBatch.from_lengths((100, 50))
    if getattr(model.config, "_experts_implementation", None) is not None:
        model.set_experts_implementation("eager")
    with packed_attention(model), FlopCounterMode(display=False) as counter:
        logits = model(input_ids=ids, packed_batch=batch, use_cache=False, **to_transformers_kwargs(batch)).logits
        forward = counted(counter)
        logits.sum().backward()
    whole, flops = counted(counter), model_flops(model)
    # Without pairs of attention, which torch does not count on a CPU.
    mixing = forward.total() - forward["mm"] - forward["addmm"]
    assert mixing > 0
    assert (150 * flops.forward, flops.count(150, {})) == (forward.total(), whole.total() - mixing)


def test_operations_of_a_scan_are_its_matmuls() -> None:
    key, value, step = (torch.rand(CHUNK, *shape) for shape in ((2, 32), (4, 16), (4,)))
    uncounted = 2 * 4 * (CHUNK * (CHUNK // 3) + 32 * 16)  # torch counts no inverse, and no product in place
    for function, row, kind, more in (
        (delta_rule, (key, key, value, -step, step, True), "delta rule", uncounted),
        (mamba2, (value, step, -torch.ones(4), key, key, None), "Mamba-2", 0),
    ):
        with FlopCounterMode(display=False) as counter:
            function(*row, *chunks_of(PackedBatch.from_lengths((CHUNK,))))
        seen = counter.get_total_flops() / CHUNK + more
        assert Scan(kind, 2, 4, 32, 16).flops(CHUNK) == pytest.approx(seen, rel=0.03)  # for the sums of decays


def counted(counter: FlopCounterMode) -> Counter[str]:
    """By operator, less the angles of positions: element by element, which transformers 5.17 spells as a product."""
    found: Counter[str] = Counter()
    for module, flops in counter.get_flop_counts().items():
        sign = 1 if module == "Global" else -module.endswith(".rotary_emb")
        for packet, count in flops.items():
            found[str(packet).partition(".")[2]] += sign * count
    return found
