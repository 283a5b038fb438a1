"""Training of hybrid models: the log is stock's, which pads; LoRA, merged rows, broken packages."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset
from model_material import composite_model, hybrid_model, reached
from peft import LoraConfig
from trainer_material import assert_same_log, both, sentences

LONG = {"max_length": 256, "eval_strategy": "no", "logging_steps": 1, "per_device_train_batch_size": 2}
MERGED = {"gradient_accumulation_steps": 2, "learning_rate": 1e-4}
# PEFT refuses `out_proj` and `conv1d` of some of these families by name.
LORA = {"peft_config": LoraConfig(r=4, target_modules=r".*\.(in_proj\w*|q_proj|v_proj|o_proj)", lora_alpha=4)}

RUNS = ("composite", "qwen3_next", "qwen3_5_text", "falcon_h1", "nemotron_h", "zamba2", "lfm2")


@pytest.mark.parametrize("family", RUNS)
def test_the_log_of_a_run_is_stocks(family: str, tmp_path: Path) -> None:
    """TRL pads its batches; ours are rows without padding, two micro-batches merged to one."""
    if family != "composite" and not reached(family):
        pytest.skip("in padded rows with this transformers")
    model = composite_model() if family == "composite" else hybrid_model(family)
    how = {"gradient_checkpointing_kwargs": {"use_reentrant": family == "falcon_h1"}, **LONG, **MERGED}
    lora = LORA if family in ("qwen3_5_text", "falcon_h1", "zamba2") else {}
    data = Dataset.from_dict({"text": sentences(24, 5, 200)})  # states cross chunks
    ours, stock = both(tmp_path, model=model, data=data, trainer=lora, **how)
    report = {line.feature: (line.status, line.path) for line in ours.fastpack_report}
    assert report["packed_attention"] == ("on", "per_document")
    assert report["verify_packing"] == ("on", "passed")
    assert report["merge_accumulation"][0] == "on"
    assert_same_log(ours, stock, rtol=1e-5, atol=1e-6)
