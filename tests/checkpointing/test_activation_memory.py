"""A plan of levels: bytes as predicted, products as it says, bit-equal at every level, a step too large undone."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_material import Counting
from decoder_material import decoder, installed
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from offload_material import LAYERS, assert_same, loss_of, make, step
from out_of_memory import too_large
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_material import assert_same_log, build, figures, settings, train
from trl import SFTTrainer

from fastpack_trl import FastSFTConfig, FastSFTTrainer
from fastpack_trl.checkpointing import activation_memory as memory
from fastpack_trl.checkpointing.plan import Growth, LayerCosts, Level, Planner, checkpointable_layers, layer_levels
from fastpack_trl.checkpointing.streams import HostStreams
from fastpack_trl.checkpointing.trace import WORKING_TOKENS, DecoderRun, Passes, trace_levels
from fastpack_trl.compile import layer_compile
from fastpack_trl.compile.layers import compiled_layers
from fastpack_trl.model.changes import isolated_run
from fastpack_trl.model.facts import learned_positions
from fastpack_trl.run.budget import largest_row
from fastpack_trl.testing import tiny_model

MODELS = [("llama", False), ("qwen3", True), ("gpt_oss", False), ("qwen3_moe", False)]
HOST = {"streams": HostStreams, "min_bytes": 1}


@pytest.mark.parametrize(
    ("family", "lora", "ours"), [(*model, True) for model in MODELS] + [(*MODELS[0], False), (*MODELS[2], False)]
)
def test_predicted_bytes_are_within_a_tenth_of_the_counted_ones(family: str, lora: bool, ours: bool) -> None:
    model = make(family, lora=lora, layers=2)
    layers = checkpointable_layers(model)
    with installed(model, ours=ours):
        costs, failed = trace_levels(model, layers, decoder(model, 1, packed=ours))
        assert (set(costs.growth), failed) == ({Level.KEEP, Level.CHECKPOINT}, "")
        with isolated_run(model, training=True):
            for level, growth in costs.growth.items():
                for documents, tokens in ((1, 250), (1, 31)) + (((5, 50),) if ours else ()):
                    counted = Passes(model, layers, decoder(model, documents, packed=ours)).kept(level, tokens)
                    predicted = [each.at(documents * tokens, tokens) for each in growth]
                    for mine, real in zip(predicted, counted, strict=True):
                        assert abs(mine - real) <= 0.1 * real, (level, documents, tokens)
    inputs = costs.growth[Level.CHECKPOINT][1]
    assert inputs.at(100, 100) == 100 * 32 * 4


def recorded(model: Any) -> tuple[DecoderRun, list[int], list[Any]]:
    """A run of the decoder, the tokens that it ran on, and weak references to what it returned."""
    tokens_of: list[int] = []
    made: list[Any] = []

    def run(tokens: int) -> tuple[Tensor, Tensor]:
        leaf, hidden = decoder(model, 1)(tokens)
        tokens_of.append(tokens)
        made.extend((weakref.ref(leaf), weakref.ref(hidden)))
        return leaf, hidden

    return run, tokens_of, made


def test_if_memory_is_ample_no_backward_is_traced_and_the_plan_can_still_go_deeper() -> None:
    model = make("llama", lora=True, layers=2)
    layers = checkpointable_layers(model)
    run, ran, made = recorded(model)
    with installed(model):
        costs, _ = trace_levels(model, layers, run)
        everything = len(ran)
        few, failed = trace_levels(model, layers, run, ample=lambda kept: len(kept) == 2)
    assert len(ran) - everything == everything - len(WORKING_TOKENS)
    assert (set(few.growth), failed) == ({Level.KEEP, Level.CHECKPOINT}, "")
    assert all(few.growth[level] == costs.growth[level] for level in few.growth)
    # Graphs would keep their activations, and the nodes of parameters to a stream that is not a capture's.
    assert {run() for run in made} == {None}
    planner = Planner(few, budget=2**40, tokens=4096, longest=512)
    plan = planner.best()
    assert plan.levels == (Level.KEEP, Level.KEEP)
    less = planner.deeper(plan)
    assert less is not None
    assert less.levels == (Level.CHECKPOINT, Level.KEEP)
    assert less.predicted < plan.predicted


class Products(TorchDispatchMode):
    """Counts matrix products and attention calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        if name in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm"):
            self.calls["products"] += 1
        elif name.startswith("_scaled_dot_product") and not name.endswith("backward"):
            self.calls["attention"] += 1
        return func(*args, **(kwargs or {}))


def products(model: Any, levels: list[Level]) -> tuple[Counter[str], Counter[str]]:
    """Of the forward pass and of the backward pass."""
    with layer_levels(checkpointable_layers(model), levels, **HOST):
        with Products() as forward:
            loss = loss_of(model)
        with Products() as backward:
            loss.backward()
    model.zero_grad()
    return forward.calls, backward.calls


@pytest.mark.parametrize(("family", "lora"), [MODELS[0], MODELS[1], MODELS[3]])
def test_backward_computes_as_many_products_again_as_the_level_says(family: str, lora: bool) -> None:
    model = make(family, lora=lora)
    with installed(model, ours="moe" in family):
        found = {level: products(model, [level] * LAYERS) for level in Level}
        _, mixed = products(model, [Level.CHECKPOINT] * (LAYERS - 1) + [Level.KEEP])
    forward, keep = found[Level.KEEP]
    per_layer = (forward["products"] - 1) // LAYERS  # but the head
    # Autograd needs no result of the last product of a layer, so the recompute ends before it.
    last = 1 + lora
    assert keep["attention"] == 0
    for level in (Level.CHECKPOINT, Level.OFFLOAD):
        _, backward = found[level]
        assert keep["products"] + LAYERS * (per_layer - last) <= backward["products"]
        assert backward["products"] <= keep["products"] + LAYERS * per_layer
        assert backward["attention"] == LAYERS
    full = found[Level.CHECKPOINT][1]["products"]
    assert (full - keep["products"]) * (LAYERS - 1) == (mixed["products"] - keep["products"]) * LAYERS


@pytest.mark.parametrize(
    ("family", "lora", "ours"), [(*model, True) for model in MODELS] + [(*MODELS[1], False), (*MODELS[2], False)]
)
def test_loss_and_gradients_are_bit_equal_at_every_level_and_in_any_mix(family: str, lora: bool, ours: bool) -> None:
    model = make(family, lora=lora)
    layers = checkpointable_layers(model)
    mixes = [[level] * LAYERS for level in Level]
    mixes += [
        [Level.OFFLOAD, Level.OFFLOAD, Level.CHECKPOINT, Level.KEEP],
        [Level.CHECKPOINT, Level.KEEP, Level.OFFLOAD, Level.KEEP],
    ]
    with installed(model, ours=ours):
        stock = step(model, 0, 1)  # every layer as `make` has it: checkpointed by transformers
        for levels in mixes:
            with layer_levels(layers, levels, **HOST) as offload:
                assert_same(step(model, 0, 1), stock)
                assert (offload is not None) == (Level.OFFLOAD in levels)
                assert offload is None or offload.use.held == 0
    assert all(layer.gradient_checkpointing for layer in layers)


def costs_of(layers: int, keep: int, inputs: int) -> LayerCosts:
    growth = {level: [Growth(0, size, 0)] * layers for level, size in zip(Level, (keep, inputs, 0), strict=True)}
    return LayerCosts(growth)


@examples(max_examples=200, deadline=None)
@example(layers=3, sizes=[0, 193], budget=675)
@given(
    layers=st.integers(1, 6), sizes=st.lists(st.integers(0, 1000), min_size=2, max_size=2), budget=st.integers(0, 8000)
)
def test_the_plan_keeps_the_most_last_layers_that_fit_and_offloads_only_if_checkpointing_does_not(
    layers: int, sizes: list[int], budget: int
) -> None:
    inputs, keep = sorted(sizes)
    planner = Planner(costs_of(layers, keep, inputs), budget, 1, 1)
    plan = planner.best()

    def fits(below: Level, kept: int) -> bool:
        return planner.peak_bytes([below] * (layers - kept) + [Level.KEEP] * kept) <= budget

    assert plan.fits == fits(Level.OFFLOAD, 0)
    assert list(plan.levels) == sorted(plan.levels, reverse=True)
    kept = plan.levels.count(Level.KEEP)
    if plan.fits and kept < layers:
        below = plan.levels[0]
        assert not fits(below, kept + 1)
        assert below is Level.CHECKPOINT or not fits(Level.CHECKPOINT, 0)
    more: Any = Planner(planner.costs, budget + 500, 1, 1).best()
    assert max(more.levels) <= max(plan.levels)
    tried = [plan.levels]
    while (plan := planner.deeper(plan)) is not None:  # type: ignore[assignment]
        assert sum(map(int, plan.levels)) > sum(map(int, tried[-1]))
        tried.append(plan.levels)
    assert tried[-1] == (Level.OFFLOAD,) * layers
    assert len(tried) <= layers.bit_length() + 3


def test_what_the_last_layers_keep_is_gone_when_the_first_are_computed_again() -> None:
    planner = Planner(costs_of(4, 100, 10), 0, 1, 1)
    keep, checkpoint, offload = Level.KEEP, Level.CHECKPOINT, Level.OFFLOAD
    assert planner.peak_bytes([keep] * 4) == 400 + 50
    assert planner.peak_bytes([checkpoint] * 4) == 40 + 150
    assert planner.peak_bytes([offload] * 3 + [keep]) == 150  # either of both, not their sum
    assert planner.peak_bytes([offload] * 2 + [keep] * 2) == 200 + 50
    assert planner.peak_bytes([checkpoint] * 3 + [keep]) == 30 + 150
    # What one layer works with is more where it was found to be, e.g. a stack of experts that is made dense.
    much = Planner(replace(planner.costs, working=Growth(1000)), 0, 1, 1)
    assert (much.peak_bytes([keep] * 4), much.peak_bytes([checkpoint] * 4)) == (1400, 40 + 100 + 1000)


def test_without_offload_the_last_plan_checkpoints_every_layer() -> None:
    growth = costs_of(6, 100, 10).growth
    planner = Planner(LayerCosts({level: growth[level] for level in (Level.KEEP, Level.CHECKPOINT)}), 0, 1, 1)
    assert planner.best().levels == (Level.CHECKPOINT,) * 6
    kept = []
    plan: Any = planner.plan([Level.KEEP] * 6)
    while plan is not None:
        kept.append(plan.levels.count(Level.KEEP))
        plan = planner.deeper(plan)
    assert kept == [6, 3, 1, 0]


OURS = ("activation_memory", "activation_memory_gib", "checkpoint_offload", "merge_accumulation", "layer_compile")


def fast(folder: Path, **more: Any) -> Any:
    own = {name: more.pop(name) for name in OURS if name in more}
    options = {"gradient_accumulation_steps": 2, "max_steps": 3, "model": llama(), **more}
    return build(FastSFTTrainer, folder, fast=own, **options)


def llama(**more: Any) -> Any:
    return tiny_model("llama", num_hidden_layers=LAYERS, **more)


def test_an_unchanged_sft_config_is_planned_as_ours_with_its_defaults(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 4, "packing": True, "max_length": 48, "eval_strategy": "no"}
    plans = []
    for fast in (None, {"save_report": "on"}):  # an `SFTConfig`; ours
        trainer = build(FastSFTTrainer, tmp_path, model=llama(), fast=fast, **options)
        planned = memory.plan_memory(trainer.fastpack_run)
        plans.append((largest_row(trainer.fastpack_run)[0], planned.plan.levels, planned.plan.predicted))
    assert plans[0][0] == 4 * 4 * 48  # the row that `merge_accumulation` may make of four micro-batches of four
    assert plans[0] == plans[1]


def trained(trainer: FastSFTTrainer) -> tuple[Any, list[Tensor]]:
    trainer.train()
    return figures(trainer), [p.detach().clone() for p in trainer.model.parameters()]


def same(ours: tuple[Any, list[Tensor]], stock: tuple[Any, list[Tensor]]) -> bool:
    return ours[0] == stock[0] and all(torch.equal(a, b) for a, b in zip(ours[1], stock[1], strict=True))


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Tensor]]:
    """The default run without a plan."""
    return trained(fast(tmp_path_factory.mktemp("stock"), activation_memory="off"))


def test_on_the_cpu_auto_leaves_the_settings_alone_unless_there_is_a_budget(tmp_path: Path, stock: Any) -> None:
    trainer = fast(tmp_path / "auto")
    assert same(trained(trainer), stock)
    line = trainer.fastpack_report["activation_memory"]
    assert (line.status, line.path) == ("off", "stock")
    assert "activation_memory_gib=... plans for a budget" in line.reason
    for gib, level, said in (
        (1.0, "keep", "GiB of 1.00 GiB"),
        (1e-4, "checkpoint", "over the"),
        (1e9, "keep", "is more"),
    ):
        trainer = fast(tmp_path / str(gib), activation_memory_gib=gib)
        assert same(trained(trainer), stock)
        line = trainer.fastpack_report["activation_memory"]
        assert (line.status, line.path) == ("on", level), line
        assert re.search(r"predicted [\d.]+ GiB (of|over the) ", line.reason)
        assert said in line.reason
        assert all(layer.gradient_checkpointing for layer in checkpointable_layers(trainer.model))


@pytest.mark.parametrize("setting", ["keep", "checkpoint"])
def test_a_level_that_is_asked_for_is_installed_without_a_budget_and_changes_no_bit(
    tmp_path: Path, stock: Any, setting: str
) -> None:
    trainer = fast(tmp_path, activation_memory=setting)
    assert same(trained(trainer), stock)
    line = trainer.fastpack_report["activation_memory"]
    assert line.path == setting
    assert line.reason.startswith(f"{line.path} 0-{LAYERS - 1}; predicted")


def test_a_model_with_a_table_of_positions_is_planned_within_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {"gradient_checkpointing": True, "eval_strategy": "no"}
    runs = [
        train(
            kind, tmp_path / kind.__name__, model=tiny_model("opt", max_position_embeddings=256), fast=fast, **options
        )
        for kind, fast in ((FastSFTTrainer, {"activation_memory": "keep"}), (SFTTrainer, None))
    ]
    assert learned_positions(runs[0].model) == 256 < WORKING_TOKENS[-1]
    assert learned_positions(tiny_model("qwen3")) is None
    assert runs[0].fastpack_report["activation_memory"].path == "keep"
    assert_same_log(*runs)


EXCLUDED: dict[str, dict[str, Any]] = {
    "gradient_checkpointing=False": {"gradient_checkpointing": False},
    "gradient_checkpointing_kwargs": {"gradient_checkpointing_kwargs": {"every_n_layers": 2}},
    "checkpoint_offload='double_buffer'": {"checkpoint_offload": "double_buffer"},
}


@pytest.mark.parametrize("message", EXCLUDED)
def test_what_the_user_says_is_respected_by_auto(tmp_path: Path, message: str) -> None:
    trainer = fast(tmp_path, activation_memory_gib=1.0, max_steps=1, eval_strategy="no", **EXCLUDED[message])
    trainer.train()
    assert message in trainer.fastpack_report["activation_memory"].reason


@pytest.mark.parametrize(
    ("gib", "said"),
    [(-2, "must be above 0"), ("many", "is not a number, GiB"), (True, "is not a number, GiB"),
     (float("inf"), "must be above 0 and finite")],
)  # fmt: skip
def test_a_budget_that_is_none_is_an_error_with_the_value(tmp_path: Path, gib: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"activation_memory_gib=.*{gib}.* {said}"):
        FastSFTConfig(**settings(tmp_path), activation_memory_gib=gib)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_that_does_not_support_checkpointing_trains_or_stops_as_under_stock(
    tmp_path: Path, checkpointing: bool
) -> None:
    refused = pytest.raises(ValueError, match=r"does not support (activation|gradient) checkpointing")
    for cls, more in ((SFTTrainer, {}), (FastSFTTrainer, {"fast": {"activation_memory_gib": 0.001}})):
        model = tiny_model("qwen3")
        model.supports_gradient_checkpointing = False
        options = {"model": model, "gradient_checkpointing": checkpointing, "eval_strategy": "no", "max_steps": 1}
        with refused if checkpointing else contextlib.nullcontext():
            assert train(cls, tmp_path, **options, **more).state.global_step == 1


def test_rows_of_any_length_cannot_be_planned_and_training_goes_on(tmp_path: Path) -> None:
    trainer = fast(tmp_path, activation_memory_gib=1.0, max_length=None, max_steps=1, eval_strategy="no")
    trainer.fastpack_run.facts = None
    trainer.train()
    assert "max_length=None" in trainer.fastpack_report["activation_memory"].reason


def with_dropout(folder: Path) -> FastSFTTrainer:
    model = llama(attention_dropout=0.1, attn_implementation="eager")
    return fast(folder, model=model, activation_memory="keep", eval_strategy="no", merge_accumulation="off")


@pytest.fixture(scope="module")
def stock_with_dropout(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Tensor]]:
    return trained(with_dropout(tmp_path_factory.mktemp("stock")))


@pytest.mark.parametrize(("place", "times"), [("forward", 1), ("backward", 1), ("backward", 2)])
def test_a_step_out_of_memory_is_run_again_with_less_and_changes_no_bit(
    tmp_path: Path, stock_with_dropout: Any, place: str, times: int, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(memory, "offload_options", lambda run: dict(HOST))
    monkeypatch.setattr(memory, "offload_unavailable", lambda device: "")
    trainer = with_dropout(tmp_path)
    with too_large(trainer, place, times) as calls:
        ours = trained(trainer)
    assert len(calls) == times
    assert same(ours, stock_with_dropout)
    line = trainer.fastpack_report["activation_memory"]
    assert "it was run again with less" in line.reason
    assert line.path != "keep"
    assert sum("ran out of memory" in text for text in caplog.messages) == 1
    assert all("offload" not in layer.__dict__ for layer in checkpointable_layers(trainer.model))


def test_a_step_that_fits_at_no_level_raises_the_devices_error(tmp_path: Path) -> None:
    trainer = fast(tmp_path, activation_memory="checkpoint", eval_strategy="no")
    with too_large(trainer, "forward", 100), pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        trainer.train()
    assert trainer.fastpack_run.get_state(memory.ActivationMemory) is None
    assert trainer.args.gradient_checkpointing


@pytest.mark.usefixtures("varlen_on_the_cpu")
@pytest.mark.parametrize("own", [{"activation_memory": "offload"}, {"checkpoint_offload": "double_buffer"}])
def test_with_compiled_layers_the_model_is_left_as_it_was(
    tmp_path: Path, own: dict[str, Any], monkeypatch: Any
) -> None:
    """`layer_compile` wraps what stands around a layer's checkpoint, and is taken away before it or after it."""
    from fastpack_trl.checkpointing import checkpoint_offload as feature

    graphs = Counting()
    monkeypatch.setattr(layer_compile, "compiled_layers", partial(compiled_layers, _backend=graphs))
    monkeypatch.setattr(memory, "offload_options", lambda run: dict(HOST))
    for place in (memory, feature):
        monkeypatch.setattr(place, "offload_unavailable", lambda device: "")
    monkeypatch.setattr(feature, "CudaStreams", HostStreams)
    trainer = fast(
        tmp_path,
        activation_memory_gib=1.0,
        max_steps=2,
        eval_strategy="no",
        layer_compile="on",
        **own,
    )
    trainer.train()
    assert graphs.graphs
    for layer in checkpointable_layers(trainer.model):
        assert type(layer._gradient_checkpointing_func).__name__ == "partial"
        assert layer._compiled_call_impl is None
    assert trainer.fastpack_report[next(iter(own))].status == "on"
