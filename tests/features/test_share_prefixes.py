"""`share_prefixes`: loss, gradients, logs and weights are those of whole documents, of fewer tokens; or it is named."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from attention_material import one_by_one, packed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from shared_material import groups, prefixed
from trainer_material import assert_same_log, both, train

from fastpack_trl import FastSFTTrainer
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.attention.proof import PackingProof
from fastpack_trl.features import share_prefixes
from fastpack_trl.packing.collator import PackingCollator
from fastpack_trl.packing.packed_batch import IGNORE_INDEX
from fastpack_trl.testing import gradients, tiny_model

SGD = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_steps": 10, "max_grad_norm": 0.0}
PACKED = {"packing": True, "max_length": 120, "per_device_train_batch_size": 1, "eval_strategy": "no"}
MERGED = {"gradient_accumulation_steps": 3, "fast": {"merge_accumulation": "on"}}


def without_dropout(family: str) -> Any:
    model = tiny_model(family)
    for module in model.modules():
        if hasattr(module, "dropout"):
            module.dropout = 0.0
    return model


@cache
def float64(family: str) -> Any:
    model = without_dropout(family).double()
    if getattr(model.config, "_experts_implementation", None) not in (None, "eager"):
        model.set_experts_implementation("eager")  # grouped matrix products take no float64
    return model


@pytest.mark.parametrize("path", ["per_document", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss", "qwen3_moe", "opt"])
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(documents=groups(), data=st.data())
def test_loss_and_gradients_equal_separate_documents(family: str, path: str, documents: Any, data: Any) -> None:
    model = float64(family)
    labels = [[token if data.draw(st.booleans()) else IGNORE_INDEX for token in document] for document in documents]
    expected_loss, expected = one_by_one(model, documents, labels)
    rows = [{"input_ids": document, "labels": label} for document, label in zip(documents, labels, strict=True)]
    inputs = PackingCollator(pad_token_id=0, share_prefixes=True)(rows)
    batch = inputs["packed_batch"]
    with packed_attention(model, path):
        loss = packed(model, inputs["input_ids"], batch) * (1 if batch.documents else max(1, len(batch.loss_positions)))
        loss.backward()
    # Weights are float64; norms and rotary embeddings of transformers compute in fp32 all the same.
    assert abs(loss.item() - expected_loss) <= 1e-6 * max(1.0, expected_loss)
    actual = gradients(model)
    model.zero_grad(set_to_none=True)
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6, name


@pytest.mark.parametrize(
    "options",
    [
        *({"family": family} for family in ("qwen3", "gemma2")),
        {"model": tiny_model("qwen3_moe", output_router_logits=True), "router_aux_loss_coef": 0.1, **MERGED},
        {"data": prefixed(labels=True)},
        {"data": prefixed().to_iterable_dataset(), "fast": {"share_prefixes": "on"}},
        {"loss_type": "dft"},
        {"gradient_accumulation_steps": 3},
        MERGED,
        {"packing": False, "padding_free": True, "max_length": None, "per_device_train_batch_size": 6},
        {"packing": False, "per_device_train_batch_size": 6},
        {"packing_strategy": "bfd_split", "max_length": 45, "per_device_train_batch_size": 4},
        {"pad_to_multiple_of": 32},
        {"eval_strategy": "steps", "eval_steps": 5},
        {"gradient_checkpointing": True},
        {"dataloader_num_workers": 1, "max_steps": 4},
        {"fast": {"packed_attention": "sdpa"}},
    ],
    ids=lambda options: "-".join((*options, options.get("family", ""))),
)
def test_log_and_weights_are_those_of_stock(options: dict[str, Any], tmp_path: Path) -> None:
    options = {"model": tiny_model(options.get("family", "qwen3")), "data": prefixed(), "fast": {}, **options}
    before = {name: p.detach().clone() for name, p in options["model"].named_parameters()}
    ours, stock = both(tmp_path, **{**SGD, **PACKED, **options})
    assert_same_log(ours, stock, rtol=1e-5, atol=1e-5)
    losses = [row["loss"] for row in stock.state.log_history if "loss" in row]
    assert abs(losses[-1] - losses[0]) > 0.01 * losses[0], "the rate moves the loss"
    theirs = dict(stock.model.named_parameters())
    for name, weight in ours.model.named_parameters():
        change = theirs[name] - before[name]
        assert (weight - theirs[name]).norm() <= 1e-4 * change.norm() + 1e-7, name
    line = ours.fastpack_report["share_prefixes"]
    is_stream = options["fast"] == {"share_prefixes": "on"}
    assert line.status == "on"
    assert ("unknown for a streamed" if is_stream else "fewer tokens to compute") in line.reason


def hooked() -> Any:
    """A model of which a hook looks at the positions."""
    model = tiny_model("qwen3")
    model.get_decoder().register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
    return model


def dropping(rate: float) -> dict[str, Any]:
    return {"trainer": {"peft_config": LoraConfig(r=4, lora_dropout=rate, target_modules="all-linear")}}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"fast": {"share_prefixes": "off"}}, "switched off"),
        ({"fast": {"sync_free": "off"}}, "needs sync_free"),
        ({"family": "bloom"}, "each document of a packed row is padded"),
        ({"neftune_noise_alpha": 5.0}, "NEFTune"),
        ({"include_num_input_tokens_seen": "all"}, "include_num_input_tokens_seen"),
        ({"data": prefixed().to_iterable_dataset()}, "the saving is unknown for a streamed data set"),
        ({"trainer": {"compute_loss_func": lambda outputs, labels, **_: outputs.logits.mean()}}, "compute_loss_func"),
        ({"model": hooked()}, "may expect the rows that TRL makes"),
        ({"family": "granitemoehybrid"}, ""),
        ({"data": "ids"}, "little to share: 100% of the tokens would still be computed"),
        (dropping(0.05), "lora_dropout 0.05 would be the same on a prefix"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_share_is_named(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    ours = train(FastSFTTrainer, tmp_path, **{"data": prefixed(), "fast": {}, **PACKED, "max_steps": 1, **options})
    line = ours.fastpack_report["share_prefixes"]
    assert (line.status, line.path) == ("off", "not shared")
    assert reason in line.reason
    in_banner = ours.fastpack_report.facts.get(share_prefixes.FACT, "")
    assert ("fewer tokens to compute" in in_banner) == ("without that" in line.reason)
    assert in_banner or "dropout" not in reason, "what no dropout would save"


def test_rows_that_fail_their_check_keep_each_document_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leak = PackingProof("per_document", (3, 2), ((0, 1, 0.5),), 0.0, None)
    monkeypatch.setattr(share_prefixes, "verify_shared", lambda *_: leak)
    ours, stock = both(tmp_path, data=prefixed(), fast={}, **SGD, **PACKED)
    reason = ours.fastpack_report["share_prefixes"].reason
    assert reason.startswith("per_document failed its check of shared prefixes: LEAK")
    assert_same_log(ours, stock)
