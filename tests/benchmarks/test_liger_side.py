"""The benchmark side with Liger's kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from compile_material import make


def test_one_trainer_has_ligers_kernels_and_the_files_of_transformers_keep_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("liger_kernel")
    from trainer_material import make_dataset, make_tokenizer, settings
    from transformers.models.qwen3 import modeling_qwen3
    from trl import SFTConfig, SFTTrainer

    from benchmarks.liger_side import liger_kernels

    args = SFTConfig(**settings(tmp_path, packing=True, max_steps=1, eval_strategy="no"))
    model = make("qwen3", lora=True)
    trainer = SFTTrainer(model, args=args, train_dataset=make_dataset("text"), processing_class=make_tokenizer())
    before, seen = dict(vars(modeling_qwen3)), []

    def step(self: Any, fails: bool) -> None:
        seen.append({name for name, value in vars(modeling_qwen3).items() if before.get(name) is not value})
        if fails:
            raise KeyError

    monkeypatch.setattr(SFTTrainer, "training_step", step)
    with liger_kernels(trainer) as replaced:
        assert replaced == ["Qwen3MLP", "Qwen3RMSNorm", "apply_rotary_pos_emb"]
        assert trainer.model.get_base_model().model.norm.forward.__qualname__ == "LigerRMSNorm.forward"
        assert vars(modeling_qwen3) == before
        trainer.training_step(False)
        with pytest.raises(KeyError):
            trainer.training_step(True)
        assert vars(modeling_qwen3) == before
    trainer.training_step(False)
    assert seen == [set(replaced), set(replaced), set()]
