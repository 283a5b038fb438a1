"""`ThroughputCallback` reads the log and asks the device nothing; its operations are those that torch counts."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from functools import partial
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from trainer_material import build, callback, make_dataset, train
from transformers import TrainerCallback
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer, ThroughputCallback
from fastpack_trl.measure.flops import attention_pairs, model_flops
from fastpack_trl.testing import count_host_syncs, tiny_model

BOTH = pytest.mark.parametrize("cls", [SFTTrainer, FastSFTTrainer], ids=["stock", "ours"])
PEAK = 1e9
TIMED = {"tokens_per_second", "mfu", "step_time_ms"}


class Reporter(TrainerCallback):
    """Stands where a target of `report_to` stands: before the user's callbacks."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [row for row in self.logs if "loss" in row]


def run(cls: type[SFTTrainer], folder: Path, *callbacks: TrainerCallback, **more: Any) -> tuple[Any, Reporter]:
    reporter = Reporter()
    return train(cls, folder, trainer={"callbacks": [reporter, *callbacks]}, **more), reporter


@BOTH
def test_reporters_get_every_figure_nothing_of_trl_changes_nor_waits(cls: type[SFTTrainer], tmp_path: Path) -> None:
    logs = []
    for callbacks in ([], [ThroughputCallback(PEAK)]):
        with count_host_syncs(device="cpu") as syncs:
            trainer, reporter = run(cls, tmp_path, *callbacks, packing=True, gradient_accumulation_steps=2)
        logs.append(reporter.logs)
    assert not [entry for entry in syncs.entries if "/callbacks/" in entry.file]
    ours = {"packing/fill", "packing/truncated_tokens"} if cls is FastSFTTrainer else set()
    for stock, row in zip(*logs, strict=True):
        kept = {key for key in stock if "runtime" not in key and "per_second" not in key}
        assert {key: stock[key] for key in kept} == {key: row.get(key) for key in kept}
        if "loss" in row:
            assert row.keys() - stock.keys() == TIMED | ours
            assert all(math.isfinite(row[key]) and row[key] > 0 for key in TIMED)
    assert sum("loss" in row for row in logs[1]) == sum("mfu" in row for row in trainer.state.log_history) == 4
    if ours:
        assert logs[1][0]["packing/truncated_tokens"] == trainer.fastpack_run.facts.truncated_tokens
        assert 0 < logs[1][0]["packing/fill"] <= 1


@BOTH
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_rates_and_mfu_follow_what_trl_counts(cls: type[SFTTrainer], packing: bool, tmp_path: Path) -> None:
    rate, late = ThroughputCallback(PEAK), torch.zeros(2)
    trainer, reporter = run(cls, tmp_path, rate, packing=packing, logging_steps=2, max_steps=6)
    flops, before = model_flops(trainer.model), 0.0
    column = trainer.train_dataset["seq_lengths" if packing else "input_ids"]
    lengths = [length for row in column for length in row] if packing else list(map(len, column))
    mean = {None: attention_pairs(lengths) / sum(lengths)}
    for row in reporter.steps:
        seconds, tokens = row["step_time_ms"] * 2 / 1e3, row["num_tokens"] - before
        assert row["tokens_per_second"] == pytest.approx(tokens / seconds)
        needed = flops.count(tokens, {window: tokens * pairs for window, pairs in mean.items()})
        assert row["mfu"] == pytest.approx(100 * needed / seconds / PEAK)
        late += torch.tensor([tokens, seconds]) * (before > 0)
        before = row["num_tokens"]
    assert rate.per_second == pytest.approx(float(late[0] / late[1])), "after the first log"


def test_lengths_in_tensors_give_numbers_that_a_checkpoint_can_hold(tmp_path: Path) -> None:
    data = make_dataset("ids").with_format("torch")
    trainer, reporter = run(SFTTrainer, tmp_path, ThroughputCallback(PEAK), data=data, packing=True, logging_steps=2)
    assert all(isinstance(row["mfu"], float) for row in reporter.steps)
    assert json.loads(json.dumps(trainer.state.log_history))


def test_a_second_run_counts_no_token_of_the_first(tmp_path: Path) -> None:
    """TRL counts on, while the steps begin again."""
    trainer, reporter = run(FastSFTTrainer, tmp_path, ThroughputCallback(PEAK), logging_steps=2, max_steps=4)
    first = reporter.steps[-1]["num_tokens"]
    trainer.train()
    again, last = reporter.steps[-2:]
    assert first < again["num_tokens"]
    assert "tokens_per_second" not in again, "unknown where the count began"
    tokens = last["tokens_per_second"] * last["step_time_ms"] * 2 / 1e3
    assert tokens == pytest.approx(last["num_tokens"] - again["num_tokens"])


def test_evaluation_takes_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that a batch of the evaluation moves on by 100 s, and a look at it by 1 ms."""
    clock = count(step=0.001)

    slow = callback("on_prediction_step", lambda *_: list(islice(clock, 100_000)))()
    monkeypatch.setattr("fastpack_trl.callbacks.throughput.time", SimpleNamespace(perf_counter=clock.__next__))
    _, reporter = run(SFTTrainer, tmp_path, ThroughputCallback(PEAK), slow, eval_steps=1, logging_steps=2)
    assert next(clock) > 4 * 3 * 100.0  # three batches in each evaluation
    assert [row["step_time_ms"] < 100.0 for row in reporter.steps] == [True, True]


def test_a_callback_added_while_training_runs_starts_with_the_next_step(tmp_path: Path) -> None:
    def add(state: Any, _model: Any) -> None:
        if state.global_step == 1:
            trainer.add_callback(ThroughputCallback(PEAK))
        for _ in range(2 * (state.global_step == 4)):
            trainer.log({"loss": 1.0})  # the second time after no step

    trainer = build(SFTTrainer, tmp_path, trainer={"callbacks": [callback("on_step_end", add)()]}, eval_strategy="no")
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert ["step_time_ms" in row for row in rows] == [False, True, True, True, False]
    assert ["mfu" in row for row in rows[:3]] == [False, False, True]  # tokens before it are not known


def test_an_unknown_peak_is_said_once_and_memory_is_what_a_card_must_have(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device: a step that allocates 42 GiB beside graphs of 20."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 42 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda *_: 63 * 2**30)
    rate = ThroughputCallback()
    on_device = callback("on_step_end", lambda *_: setattr(rate, "_cuda", torch.device("cuda")))()
    with caplog.at_level(logging.WARNING, "fastpack_trl.callbacks.throughput"):
        for _ in range(2):
            _, reporter = run(SFTTrainer, tmp_path, rate, on_device, max_steps=1, eval_strategy="no")
    assert sum("no peak is known for cpu" in record.message for record in caplog.records) == 1
    (row,) = reporter.steps
    assert "mfu" not in row
    assert row["step_time_ms"] > 0
    assert (row["memory/peak_gib"], row["memory/reserved_gib"]) == (42, 63)
    with pytest.raises(ValueError, match="peak_flops=0 is not positive"):
        ThroughputCallback(peak_flops=0)


def _model(family: str = "qwen3", lora: Any = (), saved: Any = None, **more: Any) -> Any:
    model = tiny_model(family, attn_implementation="eager", **more)
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # torch's counter does not know grouped products
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=lora, modules_to_save=saved))
        model.enable_input_require_grads()  # all inputs of products have gradients then
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "grouped_keys": _model,
    "tied": partial(_model, "llama", tie_word_embeddings=True),
    "moe": partial(_model, "qwen3_moe"),
    "latent_attention_shared_experts": partial(_model, "deepseek_v3"),
    "transposed_experts": partial(_model, "gpt_oss"),
    "norms_after_products": partial(_model, "olmo2"),
    "fused_projections": partial(_model, "phi3"),
    "products_in_the_layer": partial(_model, "opt"),
    "lora_all": partial(_model, lora="all-linear"),
    "lora_query_value": partial(_model, lora=["q_proj", "v_proj"]),
    "lora_and_saved_head": partial(_model, lora=["q_proj", "down_proj"], saved=["lm_head"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_flops_equal_the_counter_of_torch(name: str) -> None:
    model = MODELS[name]()
    ids = torch.randint(3, 90, (2, 9))
    with FlopCounterMode(display=False) as counter:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        # Older transformers multiply positions and frequencies as matrices.
        angles = sum(sum(ops.values()) for name, ops in counter.get_flop_counts().items() if "rotary_emb" in name)
        forward = counter.get_total_flops() - angles
        loss.backward()
    flops = model_flops(model)
    # torch counts a causal mask as the full square, and eager attention computes it, windows too.
    pairs = dict.fromkeys(flops.pairs, 2.0 * 9 * 9)
    assert 18 * flops.forward + sum(flops.pairs[window] * pairs[window] for window in pairs) == forward
    assert flops.count(18, pairs) == counter.get_total_flops() - angles


def test_half_of_each_square_counts_and_a_window_cuts_it() -> None:
    assert [attention_pairs([4]), attention_pairs([4], 2)] == [8.0, 4 * 2 - 2]
    assert attention_pairs([4, 2], 3) == (4 * 3 - 4.5) + 2
    with pytest.raises(ValueError, match="Linear is not a transformers model"):
        model_flops(torch.nn.Linear(2, 2))


def test_four_bit_weights_count_by_their_features() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    base = tiny_model("qwen3", attn_implementation="eager")
    for module in list(base.model.layers.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear:
                packed = bitsandbytes.nn.Linear4bit(child.in_features, child.out_features, bias=False)
                packed.weight = bitsandbytes.nn.Params4bit(child.weight.data, requires_grad=False)
                setattr(module, name, packed.to("cpu"))
    quantized = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    assert quantized.get_base_model().model.layers[0].mlp.up_proj.weight.dtype == torch.uint8
    # torch's counter does not see bitsandbytes' own product; the products are those of the plain model.
    assert model_flops(quantized) == model_flops(_model(lora=["q_proj", "v_proj"]))
