"""With layer inputs in host memory, training is bit for bit what it is without."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_material import quantized
from model_material import vision_model
from offload_material import LAYERS, StopsError, assert_same, enable, loss_of, make, offloaded, step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from trainer_material import assert_line, build, figures, train
from trl import SFTTrainer

from fastpack_trl import AsyncCheckpointCallback, FastSFTTrainer
from fastpack_trl.checkpointing.offload import Offload, why_not_offloadable
from fastpack_trl.model.checkpoint_seam import checkpointed_layers
from fastpack_trl.model.recompute import offload_conflict
from fastpack_trl.testing import gradients, tiny_model

pytestmark = pytest.mark.usefixtures("varlen_on_the_cpu")

BYTES = 2 * 12 * 32 * 4
"""Of the input of a layer in fp32."""

Result = tuple[list[Tensor], dict[str, Tensor]]


def compare(model: nn.Module, run: Callable[..., Result] = step, *args: Any, **options: Any) -> Offload:
    """What `run` computes is bit for bit what it is without the offload, which holds nothing afterwards."""
    stock = run(model, *args)
    with offloaded(model, **options) as offload:
        assert_same(run(model, *args), stock)
        assert offload.use.held == 0
        assert offload.fallbacks == []
    assert_same(run(model, *args), stock)
    return offload


def selective() -> Any:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts
    from trl.models.selective_activation_checkpointing import _aten_attention_ops, _build_policy_fn

    return functools.partial(create_selective_checkpoint_contexts, _build_policy_fn(_aten_attention_ops()))


def four_bit() -> Any:
    model = quantized("nf4", num_hidden_layers=LAYERS)
    model.enable_input_require_grads()
    return enable(model)


KINDS: dict[str, Callable[[], Any]] = {
    "llama": lambda: make("llama"),
    "bfloat16": lambda: make("llama").to(torch.bfloat16),
    "four bits": four_bit,
    "every second layer": lambda: make("llama", every_n_layers=2),
    "selective": lambda: make("llama", context_fn=selective()),
    "adapters, no random state": lambda: make("llama", lora=True, preserve_rng_state=False),
    "vision tower": lambda: enable(vision_model("qwen3_vl")),
    "audio tower": lambda: enable(vision_model("qwen2_audio")),
    "no early stop": lambda: make("llama", early_stop=False),
}


@pytest.mark.parametrize("mode", ["double_buffer", "single_buffer"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_bit_equal(kind: str, mode: str) -> None:
    """Of any dtype and non-reentrant checkpointing; smaller inputs than the least stay on the device."""
    model = KINDS[kind]()
    for keep in (0, 1):
        use = compare(model, mode=mode, keep_last=keep).use
        assert use.most_held
        if kind in ("llama", "selective", "adapters, no random state"):
            assert use.most_held == (LAYERS - keep) * BYTES
            assert compare(model, mode=mode, min_bytes=BYTES + 1).use.most_held == 0


def retained(model: nn.Module) -> Result:
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss.detach()], gradients(model)


def nested(model: nn.Module) -> Result:
    """A checkpoint around the model, whose recompute is a second graph."""
    loss = checkpoint(loss_of, model, 0, use_reentrant=False)
    loss.backward()
    return [loss.detach()], gradients(model)


@pytest.mark.parametrize("run", [retained, nested])
def test_a_retained_graph_and_checkpoints_around_and_inside_of_a_layer(run: Callable[..., Result]) -> None:
    model = make("llama")
    original = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: checkpoint(original, x, use_reentrant=False)

    def from_zero(model: nn.Module) -> Result:
        model.zero_grad()
        return run(model)

    stock = from_zero(model)
    with offloaded(model) as offload:
        assert_same(from_zero(model), stock)
        assert offload.use[:2] == (0, (LAYERS - 1) * BYTES)


def test_an_older_graph_may_be_differentiated_later_and_one_not_at_all() -> None:
    model = make("llama")
    stock = step(model, 0, 1)
    with offloaded(model) as offload:
        model.zero_grad()
        unused, first, second = (loss_of(model, seed) for seed in (2, 0, 1))
        second.backward()
        first.backward()
        assert offload.use.held == (LAYERS - 1) * BYTES
        (why,) = offload.fallbacks
        assert why == "layer inputs stay on the device: another graph that is not used yet has their buffer"
        del unused
        assert offload.use.held == 0
        torch.testing.assert_close(gradients(model), stock[1], rtol=1e-5, atol=1e-7)  # another order of the sum


def test_a_layer_that_the_user_compiles_inside_of_its_checkpoint_stays_compiled_and_one_around_runs_eagerly() -> None:
    calls: list[int] = []

    def counting(graph: Any, inputs: Any) -> Callable[..., Any]:
        calls.append(len(inputs))
        return graph.forward

    model, around = make("llama"), make("llama")
    stock = step(model)
    for layer, other in zip(model.model.layers, around.model.layers, strict=True):
        layer.mlp.compile(backend=counting)
        other.compile(backend="eager")
    with offloaded(model) as offload:
        torch.testing.assert_close(step(model)[0], stock[0])
        assert calls
        assert offload.fallbacks == []
    with offloaded(around) as offload:
        assert_same(step(around), stock)
        assert offload.use.most_held
    torch._dynamo.reset()


def test_evaluation_and_generation_are_not_touched() -> None:
    model = make("llama")
    with offloaded(model) as offload:
        with torch.no_grad():
            loss_of(model)
        model.eval()
        loss_of(model).backward()
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, do_sample=False)
        assert offload.use == (0, 0, 0)


def run(folder: Path, *callbacks: Any, **more: Any) -> SFTTrainer:
    model, own = tiny_model("llama", num_hidden_layers=LAYERS), {"callbacks": list(callbacks)}
    return train(SFTTrainer, folder, model=model, gradient_accumulation_steps=2, trainer=own, **more)


@pytest.mark.usefixtures("offloads")
@pytest.mark.parametrize("selective", [False, True])
def test_the_stock_trainer_with_the_callback_trains_bit_for_bit_the_same(tmp_path: Path, selective: bool) -> None:
    """Accumulation, evaluation between steps, a second `train`, and TRL's selective checkpointing."""
    keywords = {"gradient_checkpointing_kwargs": {"selective": True}} if selective else {}
    stock = run(tmp_path / "stock", **copy.deepcopy(keywords))
    mine = AsyncCheckpointCallback()
    ours = run(tmp_path / "ours", mine, **copy.deepcopy(keywords))
    assert mine.use.most_held >= (LAYERS - 1) * BYTES
    assert mine.use.held == 0
    assert figures(ours) == figures(stock)
    for theirs, own in zip(stock.model.parameters(), ours.model.parameters(), strict=True):
        assert torch.equal(theirs, own)
    ours.train()
    assert isinstance(ours.model.model.layers[0]._gradient_checkpointing_func, functools.partial)
    assert mine.offload is None


def stop(trainer: SFTTrainer) -> None:
    """Let training stop by an exception in the second layer."""

    def fail(layer: Any, *args: Any) -> None:
        if hasattr(layer, "_gradient_checkpointing_func"):  # training, not the proof before it
            raise StopsError

    handle = trainer.model.model.layers[1].register_forward_hook(fail)
    with pytest.raises(StopsError):
        trainer.train()
    handle.remove()


@pytest.mark.usefixtures("offloads")
def test_after_an_exception_nothing_holds_memory_and_the_model_is_as_it_was(tmp_path: Path) -> None:
    mine, model = AsyncCheckpointCallback(), tiny_model("llama", num_hidden_layers=LAYERS)
    trainer = build(SFTTrainer, tmp_path, model=model, eval_strategy="no", trainer={"callbacks": [mine]})
    stop(trainer)  # transformers sends no event: the callback is still there
    assert mine.offload.use.held == 0
    trainer.train()  # and is installed anew
    with mine:
        stop(trainer)
    assert mine.offload is None
    fast = {"checkpoint_offload": "double_buffer"}
    trainer = build(FastSFTTrainer, tmp_path, model=model, eval_strategy="no", fast=fast)
    callbacks = list(trainer.callback_handler.callbacks)
    stop(trainer)
    assert trainer.callback_handler.callbacks == callbacks
    assert isinstance(model.model.layers[1]._gradient_checkpointing_func, functools.partial)
    assert_line(trainer, "checkpoint_offload", status="on", path="double_buffer")
    assert "GiB used" in trainer.fastpack_report.facts["offload, host memory"]


CONFLICTS = {
    "activation_offloading=True": {"activation_offloading": True},
    "'offload': True": {"gradient_checkpointing_kwargs": {"offload": True}},
    "use_reentrant=True": {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "no layer is checkpointed": {"gradient_checkpointing": False},
}


@pytest.mark.usefixtures("offloads")
@pytest.mark.parametrize("message", CONFLICTS)
def test_what_excludes_the_offload_raises_one_line_with_the_remedy(tmp_path: Path, message: str) -> None:
    options: dict[str, Any] = {"eval_strategy": "no", "trainer": {"callbacks": [AsyncCheckpointCallback()]}}
    trainer = build(SFTTrainer, tmp_path, family="llama", **options)
    args = trainer.args
    for name, value in CONFLICTS[message].items():  # after construction: the CPU refuses some of them earlier
        for field in (name, name.replace("gradient_", "activation_")):
            if hasattr(args, field):
                setattr(args, field, value)
    with pytest.raises(ValueError, match=message) as error:
        trainer.train()
    assert "\n" not in str(error.value)


def test_transformers_own_offload_is_recognized_by_its_function() -> None:
    model = tiny_model("llama")
    name = "activation_checkpointing" if hasattr(model, "activation_checkpointing_enable") else "gradient_checkpointing"
    getattr(model, f"{name}_enable")(**{f"{name}_kwargs": {"use_reentrant": False}, "offload": True})
    assert "leave out 'offload'" in why_not_offloadable(checkpointed_layers(model))


def test_on_the_cpu_the_callback_is_off_with_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = AsyncCheckpointCallback()
    trainer = run(tmp_path, mine, max_steps=1)
    assert "no device memory to spare" in mine.reason
    assert sum("checkpoint_offload: off" in text for text in caplog.messages) == 1
    trainer.is_fsdp_enabled = True
    assert offload_conflict(trainer.args, trainer).startswith("FSDP version 1 is not tested with the offload")
