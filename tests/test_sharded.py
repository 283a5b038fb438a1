"""A packed row through FSDP's hooks: they rebuild every argument of a forward."""

from __future__ import annotations

from pathlib import Path

from ranks import fork_ranks

SHARDED = """
import torch, torch.distributed as dist
from ranks import leave
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from fastpack_trl import PackedBatch, packed_attention
from fastpack_trl.testing import tiny_model

dist.init_process_group("gloo")
lengths = (7, 1, 12)
ids = torch.randint(3, 90, (1, sum(lengths)), generator=torch.Generator().manual_seed(dist.get_rank()))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
mesh = init_device_mesh("cpu", (2,))

def compare(family, path, layers_too):
    model = tiny_model(family)
    for module in (*(model.model.layers if layers_too else ()), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    batch = PackedBatch.from_lengths(lengths)
    with packed_attention(model, path, compute_dtype=torch.bfloat16):
        packed = model(input_ids=ids, position_ids=batch.position_ids, packed_batch=batch, use_cache=False).logits
        packed.float().square().mean().backward()
    norms = [parameter.grad.to_local().norm() for parameter in model.parameters()]
    assert all(torch.isfinite(norm) for norm in norms) and sum(norms) > 0
    assert batch.build_counts and set(batch.build_counts.values()) == {1}, batch.build_counts
    batch.clear_derived()
    assert not batch.derived.values
    alone = [model(input_ids=part, use_cache=False).logits for part in ids.split(lengths, dim=1)]
    alone = torch.cat(alone, dim=1)
    assert packed.dtype == torch.bfloat16
    budget = 4 * torch.finfo(torch.bfloat16).eps * float(alone.abs().max())
    torch.testing.assert_close(packed, alone, rtol=0, atol=budget)

for family, path, layers_too in (
    ("llama", "per_document", True), ("llama", "per_document", False), ("llama", "sdpa", True),
    ("gpt_oss", "per_document", True),
):
    compare(family, path, layers_too)
leave()
"""


def test_fully_shard_with_cast_inputs_keeps_documents_apart_and_builds_masks_once(tmp_path: Path) -> None:
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED, encoding="utf-8")
    fork_ranks(script, imports="torch.distributed.fsdp,fastpack_trl:packed_attention")
