"""`ThroughputCallback` counts what runs, asks the device nothing between two logs, and changes nothing of stock."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from trainer_material import build, make_dataset, make_tokenizer, settings, train
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from fastpack_trl import FastSFTTrainer, PackedBatch, ThroughputCallback
from fastpack_trl.measure.flops import attention_pairs, model_flops
from fastpack_trl.measure.tokens import TokenCounter
from fastpack_trl.testing import HostSyncs, count_host_syncs, tiny_model

BOTH = pytest.mark.parametrize("cls", [SFTTrainer, FastSFTTrainer], ids=["stock", "ours"])
PEAK = 1e9
IN_PLACE = {torch.ops.aten.addmm_: lambda out, a, b, **_: 2 * a[0] * a[1] * b[1]}
"""What torch's counter of operations leaves out."""
TIMED = {
    "tokens/capacity_per_s", "tokens/nonpad_per_s", "tokens/loss_per_s", "mfu", "hfu", "step_time_ms", "data_wait_ms",
}  # fmt: skip


class Reporter(TrainerCallback):
    """Stands where a target of `report_to` stands: before the user's callbacks."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def run(cls: type[SFTTrainer], folder: Path, callback: TrainerCallback | None, **more: Any) -> tuple[Any, Reporter]:
    reporter = Reporter()
    callbacks = [reporter] if callback is None else [reporter, callback]
    trainer = train(cls, folder, trainer={"callbacks": callbacks, **more.pop("trainer", {})}, **more)
    return trainer, reporter


@BOTH
def test_every_reporter_gets_every_figure_and_nothing_of_stock_changes(cls: type[SFTTrainer], tmp_path: Path) -> None:
    options = {"packing": True, "gradient_accumulation_steps": 2}
    trainer, reporter = run(cls, tmp_path / "watched", ThroughputCallback(PEAK), **options)
    _, plain = run(cls, tmp_path / "plain", None, **options)
    for stock, with_figures in zip(plain.logs, reporter.logs, strict=True):
        kept = {key for key in stock if "runtime" not in key and "per_second" not in key}
        assert {key: stock[key] for key in kept} == {key: with_figures.get(key) for key in kept}
    rows = [row for row in reporter.logs if "loss" in row]
    assert len(rows) == 4
    ours = {"packing/fill", "packing/truncated_tokens"} if cls is FastSFTTrainer else set()
    for row in rows:
        added = {key for key in row if "/" in key or key in TIMED}
        assert added == TIMED | {f"session/{key}" for key in TIMED} | ours
        assert all(math.isfinite(row[key]) and row[key] >= 0 for key in added)
        assert row["mfu"] <= row["hfu"]
    last = next(row for row in reporter.logs if "train_runtime" in row)
    assert {f"session/{key}" for key in TIMED} <= last.keys()
    assert not any("/" in key for row in reporter.logs if "eval_loss" in row for key in row)
    assert [row for row in trainer.state.log_history if "mfu" in row]
    if ours:
        assert rows[0]["packing/truncated_tokens"] == trainer.fastpack_run.facts.truncated_tokens
        assert 0 < rows[0]["packing/fill"] <= 1


@BOTH
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_tokens_equal_a_hand_count_over_accumulation_epochs_and_evaluation(
    cls: type[SFTTrainer], packing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[Any] = []
    take = TokenCounter.take
    monkeypatch.setattr(TokenCounter, "take", lambda self: counted.append(take(self)) or counted[-1])
    batches: list[dict[str, Any]] = []
    step = cls.training_step

    @functools.wraps(step)  # a foreign `training_step` would keep the padding
    def kept(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        batches.append({name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)})
        return step(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(cls, "training_step", kept)
    # 5 micro-batches per epoch: its last step has one, of 2 rows.
    trainer = cls(
        tiny_model("qwen3"),
        args=SFTConfig(**settings(
            tmp_path, packing=packing, max_steps=6, gradient_accumulation_steps=2, logging_steps=2, eval_steps=1
        )),
        train_dataset=make_dataset("prompt_completion", 18), eval_dataset=make_dataset("prompt_completion", 8, seed=7),
        processing_class=make_tokenizer(), callbacks=[ThroughputCallback(PEAK)],
    )  # fmt: skip
    trainer.train()
    assert trainer.state.epoch >= 2
    assert len(counted) == 4  # three logs, and the last of the run
    assert sum(part.capacity for part in counted) == sum(batch["input_ids"].numel() for batch in batches)
    labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    assert sum(part.loss for part in counted) == labels
    nonpad = sum(int(batch.get("attention_mask", torch.ones_like(batch["input_ids"])).sum()) for batch in batches)
    assert sum(part.nonpad for part in counted) == nonpad
    assert (nonpad < sum(part.capacity for part in counted)) == (cls is SFTTrainer and not packing)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_sums_and_needed_operations_are_the_same_under_both_trainers(
    lora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[Any] = []
    take = TokenCounter.take
    monkeypatch.setattr(TokenCounter, "take", lambda self: counted.append(take(self)) or counted[-1])
    needed = []
    for cls in (SFTTrainer, FastSFTTrainer):
        method = {"peft_config": LoraConfig(r=4, target_modules="all-linear")} if lora else {}
        counted.clear()
        callback = ThroughputCallback(PEAK)
        spent: list[float] = []
        figures = callback._figures
        monkeypatch.setattr(callback, "_figures", lambda totals, f=figures, s=spent: _operations(f(totals), totals, s))
        run(
            cls, tmp_path / cls.__name__, callback, logging_steps=2, trainer=method, packing=True,
            data="prompt_completion", gradient_accumulation_steps=2, eval_strategy="no",
        )  # fmt: skip
        needed.append((spent, [(sums.capacity, sums.nonpad, sums.loss, sums.pairs) for sums in counted]))
    (stock, of_stock), (ours, of_ours) = needed
    assert of_ours == of_stock
    assert len(of_ours) == 3
    assert ours == pytest.approx(stock, rel=1e-9)
    assert min(ours) > 0


def _operations(figures: dict[str, float], totals: Any, spent: list[float]) -> dict[str, float]:
    """Needed operations behind `mfu`."""
    if "mfu" in figures:
        spent.append(figures["mfu"] / 100 * totals.seconds * PEAK)
    return figures


@pytest.mark.parametrize("window", [None, 3])
def test_pairs_are_the_same_from_lengths_positions_and_masks(window: int | None) -> None:
    lengths = (5, 1, 8)
    expected = attention_pairs(lengths, window)
    batch = PackedBatch.from_lengths(lengths, labels=torch.arange(14))
    ids = torch.zeros(1, 14, dtype=torch.long)
    mask = torch.tensor([[1] * length + [0] * (8 - length) for length in lengths])
    labels = torch.where(mask.bool(), mask, -100)
    for inputs in (
        {"input_ids": ids, "packed_batch": batch},
        {"input_ids": ids, "position_ids": batch.position_ids, "labels": ids},
        {"input_ids": mask, "attention_mask": mask, "labels": labels},
        {"input_ids": mask.flip(1), "attention_mask": mask.flip(1), "labels": labels.flip(1)},
    ):
        counter = TokenCounter((window,))
        counter.count(inputs)
        sums = counter.take()
        assert sums.pairs == {window: expected}
        assert sums.nonpad == 14
    assert attention_pairs([4], None) == 8.0
    assert attention_pairs([4], 2) == 4 * 2 - 2
    assert attention_pairs([4, 2], 3, causal_half=False) == 4 * 3 + 2 * 2


class SyncsPerStep(TrainerCallback):
    def __init__(self, syncs: HostSyncs) -> None:
        self.syncs = syncs
        self.steps: list[int] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.steps.append(self.syncs.total)


@BOTH
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_no_host_sync_is_added_between_two_logs(cls: type[SFTTrainer], packing: bool, tmp_path: Path) -> None:
    counts = []
    for callbacks in ([], [ThroughputCallback(PEAK)]):
        with count_host_syncs(device="cpu") as syncs:
            watcher = SyncsPerStep(syncs)
            train(
                cls, tmp_path, packing=packing, max_steps=6, logging_steps=6, eval_strategy="no",
                gradient_accumulation_steps=2, trainer={"callbacks": [*callbacks, watcher]},
            )  # fmt: skip
        counts.append([after - before for before, after in zip(watcher.steps, watcher.steps[1:], strict=False)])
    assert counts[0] == counts[1]
    assert len(counts[0]) == 5


def hooks(model: torch.nn.Module) -> int:
    """Stock leaves one of its own behind, under gradient checkpointing."""
    every = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    return sum("ThroughputCallback" in getattr(hook, "__qualname__", "") for hook in every)


class Failing(TrainerCallback):
    """Raises in the third step, at an event or in the backward pass of the loss."""

    def __init__(self, where: str) -> None:
        self.where = where

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step != 2 or self.where == "on_step_end":
            return

        def fail(*_: Any) -> None:
            raise RuntimeError("broken")

        if self.where == "forward":
            self.handle = model.get_input_embeddings().register_forward_hook(fail)
        else:
            self.handle = model.get_input_embeddings().weight.register_hook(fail)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise RuntimeError("broken")


class Watching(TrainerCallback):
    """Number of our hooks on the model when a step begins."""

    most = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.most = max(self.most, hooks(model))


@pytest.mark.parametrize("where", ["forward", "backward", "on_step_end"])
def test_the_model_is_clean_after_an_exception(where: str, tmp_path: Path) -> None:
    failing, callback = Failing(where), ThroughputCallback(PEAK)
    trainer = build(SFTTrainer, tmp_path, trainer={"callbacks": [callback, failing]})
    order = list(trainer.callback_handler.callbacks)
    seen = Watching()
    trainer.add_callback(seen)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train()
    if where != "on_step_end":
        failing.handle.remove()
    assert hooks(trainer.model) == 0
    assert seen.most == 1
    trainer.remove_callback(failing)
    trainer.remove_callback(seen)
    order.remove(failing)
    trainer.train()
    assert hooks(trainer.model) == 0
    assert trainer.callback_handler.callbacks == order


def test_evaluation_takes_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that a batch of the evaluation moves on by 100 s, and a look at it by 1 ms."""
    now = [0.0]

    def perf_counter() -> float:
        now[0] += 0.001
        return now[0]

    class SlowEvaluation(TrainerCallback):
        def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
            now[0] += 100.0

    monkeypatch.setattr("fastpack_trl.callbacks.time", SimpleNamespace(perf_counter=perf_counter))
    reporter = Reporter()
    callbacks = [ThroughputCallback(PEAK), SlowEvaluation(), reporter]
    train(SFTTrainer, tmp_path, trainer={"callbacks": callbacks}, eval_steps=1)
    steps = [row["step_time_ms"] for row in reporter.logs if "step_time_ms" in row]
    assert len(steps) == 4
    assert now[0] > 4 * 3 * 100.0  # three batches in each evaluation
    assert max(steps) < 100.0


def test_hfu_counts_the_recompute_that_the_plan_has(tmp_path: Path) -> None:
    """The plan is installed after this callback has begun: layers that it keeps are not recomputed."""
    found = []
    for name, fast in (("planned", {"activation_memory_gib": 1.0}), ("stock", {"activation_memory": "off"})):
        options: dict[str, Any] = {"packing": True, "gradient_checkpointing": True, "fast": fast}
        trainer, _ = run(FastSFTTrainer, tmp_path / name, ThroughputCallback(PEAK), **options)
        rows = [row["hfu"] / row["mfu"] for row in trainer.state.log_history if "mfu" in row]
        found.append(rows[-1])
    planned, stock = found
    assert planned < 1.02 < 1.2 < stock


def test_resume_starts_a_session(tmp_path: Path) -> None:
    run(SFTTrainer, tmp_path, ThroughputCallback(PEAK), save_strategy="steps", save_steps=2, max_steps=2)
    reporter = Reporter()
    trainer = build(SFTTrainer, tmp_path, trainer={"callbacks": [reporter, ThroughputCallback(PEAK)]})
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    rows = [row for row in reporter.logs if "mfu" in row]
    assert len(rows) == 2
    assert rows[0]["session/tokens/loss_per_s"] == pytest.approx(rows[0]["tokens/loss_per_s"])


def test_a_callback_added_while_training_runs_starts_with_the_next_step(tmp_path: Path) -> None:
    class Adding(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                trainer.add_callback(ThroughputCallback(PEAK))

    trainer = build(SFTTrainer, tmp_path, trainer={"callbacks": [Adding()]}, eval_strategy="no")
    trainer.train()
    assert ["mfu" in row for row in trainer.state.log_history if "loss" in row] == [False, True, True, True]


def test_an_unknown_peak_is_said_once_and_leaves_two_figures_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = ThroughputCallback()
    with caplog.at_level(logging.WARNING, "fastpack_trl.callbacks"):
        for _ in range(2):
            _, reporter = run(SFTTrainer, tmp_path, callback, max_steps=2)
    assert sum("no peak is known for cpu" in record.message for record in caplog.records) == 1
    rows = [row for row in reporter.logs if "loss" in row]
    assert all("step_time_ms" in row and "mfu" not in row and "hfu" not in row for row in rows)
    with pytest.raises(ValueError, match="peak_flops=0 is not positive"):
        ThroughputCallback(peak_flops=0)


def _frozen_layers() -> Any:
    model = tiny_model("qwen3", num_hidden_layers=3, attn_implementation="eager")
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[:2].requires_grad_(False)
    return model


def _lora(targets: Any, family: str = "qwen3", **more: Any) -> Any:
    model = tiny_model(family, attn_implementation="eager")
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, **more))


def _family(name: str, **more: Any) -> Any:
    model = tiny_model(name, attn_implementation="eager", **more)
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # torch's counter does not know grouped products
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "grouped_keys": lambda: _family("qwen3"),
    "tied": lambda: _family("llama", tie_word_embeddings=True),
    "frozen_layers": _frozen_layers,
    "moe": lambda: _family("qwen3_moe"),
    "latent_attention_shared_experts": lambda: _family("deepseek_v3"),
    "transposed_experts": lambda: _family("gpt_oss"),
    "norms_after_products": lambda: _family("olmo2"),
    "fused_projections": lambda: _family("phi3"),
    "products_in_the_layer": lambda: _family("opt"),
    "lora_all": lambda: _lora("all-linear"),
    "lora_query_value": lambda: _lora(["q_proj", "v_proj"]),
    "lora_and_saved_head": lambda: _lora(["q_proj", "down_proj"], modules_to_save=["lm_head"]),
}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("name", MODELS)
def test_flops_equal_the_counter_of_torch(name: str, checkpointing: bool) -> None:
    model = MODELS[name]()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if name.startswith("lora"):
            model.enable_input_require_grads()
    ids = torch.randint(3, 90, (2, 9))
    counter = FlopCounterMode(display=False)
    with counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    flops = model_flops(model)
    # torch counts a causal mask as the full square, and eager attention computes it, windows too.
    pairs = {window: 2 * attention_pairs([9], causal_half=False) for window in flops.windows}
    count = flops.count(18, pairs, 18, twice=0)
    assert count.hardware == counter.get_total_flops()
    assert (count.recompute > 0) == checkpointing
    assert flops.inexact == ()


def test_four_bit_weights_count_by_their_features() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    plain = _lora(["q_proj", "v_proj"])
    base = tiny_model("qwen3", attn_implementation="eager")
    for module in list(base.model.layers.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear:
                packed = bitsandbytes.nn.Linear4bit(child.in_features, child.out_features, bias=False)
                packed.weight = bitsandbytes.nn.Params4bit(child.weight.data, requires_grad=False)
                setattr(module, name, packed.to("cpu"))
    quantised = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    assert quantised.get_base_model().model.layers[0].mlp.up_proj.weight.dtype == torch.uint8
    # torch's counter does not see bitsandbytes' own product; the products are those of the plain model.
    assert model_flops(quantised).tokens == model_flops(plain).tokens


@pytest.mark.parametrize("frozen_head", [False, True])
def test_the_head_of_the_chunked_loss_is_three_products_and_a_recompute(frozen_head: bool, tmp_path: Path) -> None:
    model = tiny_model("llama", attn_implementation="eager")
    model.lm_head.requires_grad_(not frozen_head)
    trainer = train(SFTTrainer, tmp_path, model=model, max_steps=1, eval_strategy="no")
    ids = torch.randint(3, 90, (2, 9))
    counter = FlopCounterMode(display=False, custom_mapping=IN_PLACE)
    with counter:
        trainer.model(input_ids=ids, labels=ids, use_cache=False, fused_lm_head=True).loss.backward()
    flops = model_flops(trainer.model)
    pairs = {window: 2 * attention_pairs([9], causal_half=False) for window in flops.windows}
    # On the CPU all positions but the last of each row are scored.
    assert flops.count(18, pairs, 16).hardware == counter.get_total_flops()


@pytest.mark.parametrize("frozen_head", [False, True])
def test_the_head_at_chosen_positions_has_no_recompute(frozen_head: bool, tmp_path: Path) -> None:
    model = tiny_model("llama", attn_implementation="eager")
    model.lm_head.requires_grad_(not frozen_head)
    trainer = train(FastSFTTrainer, tmp_path, model=model, max_steps=1, eval_strategy="no", packing=True)
    ids, labels = torch.randint(3, 90, (1, 18)), torch.arange(18)[None]
    batch = PackedBatch.from_lengths([9, 9], labels=labels)
    inputs = {"input_ids": ids, "labels": labels, "loss_batch": batch}
    operations = FlopCounterMode(display=False, custom_mapping=IN_PLACE)
    with operations:
        trainer.model(**inputs).total.backward()
    flops, counter = model_flops(trainer.model), TokenCounter((None,))
    counter.count(inputs | {"packed_batch": batch})
    sums = counter.take()
    assert sums.scored == sums.scored_once == sums.loss == 16
    # The eager attention of stock over the row as one document.
    pairs = {window: attention_pairs([18], causal_half=False) for window in flops.windows}
    twice = sums.scored - sums.scored_once
    assert flops.count(18, pairs, sums.scored, twice=twice).hardware == operations.get_total_flops()


def test_what_is_not_counted_is_named() -> None:
    assert "attention of bloom" in model_flops(tiny_model("bloom")).inexact[0]
    with pytest.raises(ValueError, match="Linear is no transformers model"):
        model_flops(torch.nn.Linear(2, 2))
