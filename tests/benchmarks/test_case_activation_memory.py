"""``python -m benchmarks --case activation_memory``: sides that compute the same, and a miniature."""

from __future__ import annotations

import json
import subprocess

import forks
import torch

from benchmarks.activation_memory import CHECKPOINT, OURS, SIDES, SINGLE, Batch, different, measure, side
from benchmarks.case_tables import table
from benchmarks.cases import Run
from benchmarks.lora_models import LoraModel, build
from fastpack_trl.checkpointing.activation_memory import checkpointable_layers


def test_sides_share_their_weights_compute_the_same_and_leave_the_layers_as_they_were() -> None:
    weights = build(LoraModel("small", "fp32"), layers=3, positions=64, seed=0, device="cpu")
    batch = Batch.of(64, 24, 4000, "cpu", 0)
    assert batch.packed.seq_lengths == (24, 24, 16)
    found = {}
    for name in (CHECKPOINT, SINGLE, OURS):
        with side(name, weights, "cpu") as made:
            assert next(made.model.parameters()) is next(weights.parameters())
            loss, _ = made.step(batch)
            found[name] = (float(loss), made.gradient_norm())
            assert (made.offload is None) == (name == CHECKPOINT)
            assert made.offload is None or made.offload.use.most_held >= 2 * 64 * 256 * 4
        assert not checkpointable_layers(made.model)[0].gradient_checkpointing
    assert len(set(found.values())) == 1
    assert different(found) == {}
    assert OURS in different(found | {OURS: (found[OURS][0] + 1e-6, found[OURS][1])})
    assert SINGLE in different(found | {SINGLE: (found[SINGLE][0], found[SINGLE][1] * 1.01)})


def test_a_miniature_run_times_every_side_or_names_why_not() -> None:
    record = measure(Run(rounds=2, threads=torch.get_num_threads()), rows=["small"], tokens=[64], layers=2)
    (decoder,) = record["rows"]
    assert decoder["sides"].keys() == set(SIDES)
    for name in (CHECKPOINT, SINGLE, OURS):
        assert len(decoder["sides"][name]["seconds"]["values"]) == 2
        assert decoder["sides"][name]["losses"] == decoder["sides"][CHECKPOINT]["losses"]
    assert all("failed" in figures or figures["losses"] for figures in decoder["sides"].values())
    assert SINGLE in decoder["ratios"]
    assert "double_buffer" in table(json.loads(json.dumps(record)))


def test_trls_offload_is_a_side_without_any_trainer_before() -> None:
    """TRL logs through accelerate, whose state a trainer makes; on the CPU it may stop for another reason."""
    code = (
        "from benchmarks.activation_memory import TRL, side\n"
        "from benchmarks.lora_models import LoraModel, build\n"
        "weights = build(LoraModel('small', 'fp32'), layers=2, positions=64, seed=0, device='cpu')\n"
        "try:\n"
        "    with side(TRL, weights, 'cpu'): print('made')\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([forks.python(), "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.strip()
    assert "PartialState" not in done.stdout
