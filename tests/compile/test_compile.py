"""Compiled decoder layers: few graphs whatever the rows, named fallbacks, nothing left behind."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from attention_material import packed
from captured_material import STEPS, build, capturing
from compile_material import Counting, cast_adapters, checkpoint, compile_with, compiled, make, one_step, row, stop
from offload_material import offloaded
from torch import Tensor, nn
from trainer_material import assert_line, train

from fastpack_trl import FastSFTTrainer
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.compile.layers import compiled_layers, decoder_layers
from fastpack_trl.model.checkpoint_seam import checkpointed_layers
from fastpack_trl.moe.apply import apply_moe
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.testing import gradients


@pytest.mark.parametrize(
    ("family", "lora", "checkpointing", "attention", "graphs"),
    [
        ("llama", False, False, "sdpa", 1), ("llama", True, False, "varlen", 1),
        ("llama", True, True, "varlen", 1), ("gemma3_text", True, False, None, 2),
        ("gpt_oss", False, False, None, 2), ("qwen3_moe", True, False, "varlen", 1),
    ],
)  # fmt: skip
def test_one_graph_per_window(family: str, lora: bool, checkpointing: bool, attention: str | None, graphs: int) -> None:
    """Rows of other lengths, documents of other lengths and numbers, the first layer over frozen embeddings.

    Also where no document of a row is longer than the window, and the other way round.
    """
    backend = Counting(differentiate=checkpointing)  # also then no size becomes a constant
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2} if graphs > 1 else {}
    model = make(family, lora=lora, checkpointing=checkpointing, num_hidden_layers=4, **kinds)
    with compiled(model, backend, attention=attention) as layers:
        for seed in range(10):
            one_step(model, *row(seed, longest=4 if graphs > 1 and seed % 2 else 30))
        one_step(model, torch.tensor([[5]]), PackedBatch.from_lengths((1,), labels=torch.tensor([[5]])))  # runs eagerly
    assert (backend.graphs, layers.path, len(layers.kinds)) == (graphs, "compiled", graphs), layers.reason
    assert sum(len(kind.members) for kind in layers.kinds) == 4


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_rows_of_a_capture_take_its_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpointing: bool) -> None:
    """A recording switches off autocast's cache, and torch guards on that; here rows warm up, and none is recorded."""
    backend = Counting(differentiate=True)
    compile_with(backend, monkeypatch)
    monkeypatch.setattr("fastpack_trl.capture.graphs.WARM_ROWS", STEPS)
    with capturing() as devices:
        fast = {"layer_compile": "on"} | ({"activation_memory": "checkpoint"} if checkpointing else {})
        more: dict[str, Any] = {"fast": fast, "gradient_checkpointing": checkpointing}
        trainer = build(FastSFTTrainer, tmp_path, devices, lora={"task_type": "CAUSAL_LM"}, **more)
        trainer.train()
    assert "no row was recorded" in trainer.fastpack_report["cuda_graph"].reason
    assert (trainer.fastpack_report["layer_compile"].path, backend.graphs) == ("compiled", 1)


def test_copies_are_plain_and_layers_are_as_before_afterwards_also_after_an_exception() -> None:
    model = make("llama", checkpointing=True)
    before, keys = [dict(module.__dict__) for module in model.modules()], list(model.state_dict())
    with pytest.raises(KeyboardInterrupt):
        with compiled(model) as layers:
            expected = one_step(model, *row(0))
            assert layers.path == "compiled"
            assert list(model.state_dict()) == keys
            model.zero_grad()
            layer = decoder_layers(model)[0]
            loaded, copied = pickle.loads(pickle.dumps(layer)), copy.deepcopy(model)
            for found in (loaded, decoder_layers(copied)[0]):
                assert found._compiled_call_impl is None
                assert found._gradient_checkpointing_func.func is torch.utils.checkpoint.checkpoint
                assert list(found.state_dict()) == list(layer.state_dict())
            raise KeyboardInterrupt
    assert [dict(module.__dict__) for module in model.modules()] == before
    with packed_attention(copied):
        torch.testing.assert_close(one_step(copied, *row(0)), expected)


def test_checkpointing_switched_on_or_off_inside_is_kept() -> None:
    model, backend = make("llama"), Counting()
    with compiled(model, backend) as layers:
        expected = one_step(model, *row(0))
        checkpoint(model)
        # Where the checkpoint is above the call of a layer (transformers 5.17) it is seen in the first step after.
        for actual in (one_step(model, *row(0)), one_step(model, *row(0))):
            torch.testing.assert_close(actual, expected)
        assert backend.graphs == 2
    for layer in decoder_layers(model):
        assert layer._gradient_checkpointing_func.func is torch.utils.checkpoint.checkpoint
    assert layers.path == "compiled"


def test_everything_but_packed_training_rows_runs_the_layers_as_they_are() -> None:
    model, backend = make("llama"), Counting()
    ids, batch = row(0)
    padded = {"input_ids": ids[:, :6].repeat(2, 1), "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])}
    with packed_attention(model):
        expected = one_step(model, ids, batch)
        with torch.no_grad():
            loss, logits = packed(model.eval(), ids, batch), model(**padded).logits
        tokens = model.generate(**padded, max_new_tokens=4, do_sample=False)
        model.train()
        model.model.no_layers = nn.ModuleList([nn.Linear(2, 2)])
        assert decoder_layers(model) == list(model.model.layers)
        with compiled_layers(model, _backend=backend):
            one_step(model, ids, batch)
            graphs = backend.graphs
            with torch.no_grad():
                assert torch.equal(packed(model.eval(), ids, batch), loss)
                assert torch.equal(model(**padded).logits, logits)
            assert torch.equal(model.generate(**padded, max_new_tokens=4, do_sample=False), tokens)
            model.train()
            model(**padded).logits.sum().backward()
            with torch.no_grad():
                packed(model, ids, batch)
            assert backend.graphs == graphs == 1
            torch.testing.assert_close(one_step(model, ids, batch), expected)
    with compiled(model, backend, attention="per_document") as layers:
        one_step(model, ids, batch)
    assert (layers.path, backend.graphs) == ("pending", graphs)


def data_dependent(module: nn.Module, hidden: Tensor) -> Tensor:
    output: Tensor = type(module).forward(module, hidden)
    return output * 2 if output.sum() > 0 else output


def scaled(module: Any, hidden: Tensor) -> Any:
    return type(module).forward(module, hidden) * module.factor  # an int of a module is a constant of the graph


@pytest.mark.parametrize(
    ("what", "said"),
    [("compiler", "no compiler here"), ("control flow", "Unsupported"), ("reentrant", "reentrant checkpointing"),
     ("limit", "ecompile")],
)  # fmt: skip
def test_uncompilable_layers_run_eager_named_once(what: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also from a graph on that is one too many: its row is run eagerly."""
    model, data = make("llama"), [row(seed) for seed in range(4)]
    if forward := {"control flow": data_dependent, "limit": scaled}.get(what):
        for layer in decoder_layers(model):
            layer.mlp.forward = MethodType(forward, layer.mlp)
    if what == "reentrant":
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": True})
        model.enable_input_require_grads()

    def run() -> Any:
        for count, one in enumerate(data):
            for layer in decoder_layers(model):
                layer.mlp.factor = count + 2
            yield one_step(model, *one)

    with packed_attention(model):
        expected = list(run())
    with torch._dynamo.config.patch(recompile_limit=2), compiled(model, stop if what == "compiler" else None) as layers:
        actual = list(run())
    torch.testing.assert_close(actual, expected, **{} if what == "limit" else {"rtol": 0, "atol": 0})
    torch.testing.assert_close(actual[-1], expected[-1], rtol=0, atol=0)
    (kind,) = layers.kinds
    assert (kind.path, said in kind.reason) == ("eager", True), kind.reason
    assert [record.message for record in caplog.records if "layer_compile" in record.message] == [
        f"layer_compile: {kind.reason}; layer_compile='off' spares the attempt"
    ]


class Called(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Any:
        self.calls.add_(1)
        return self.layer(hidden)


def test_a_trial_moves_neither_random_state_nor_buffers_nor_gradients() -> None:
    model = make("llama", lora=True)
    for layer in decoder_layers(model):
        layer.mlp = Called(layer.mlp)
    with packed_attention(model):
        expected = one_step(model, *row(0))
    calls = [2 * layer.mlp.calls for layer in decoder_layers(model)]
    embedded: list[Tensor] = []
    model.get_input_embeddings().register_forward_hook(lambda _module, _args, out: embedded.append(out))
    state = torch.get_rng_state()
    with compiled(model):
        actual = one_step(model, *row(0))
    assert [tensor.requires_grad for tensor in embedded] == [False]
    assert torch.equal(torch.get_rng_state(), state)
    assert [layer.mlp.calls for layer in decoder_layers(model)] == calls
    torch.testing.assert_close(actual, expected)


def test_a_recompute_takes_the_graph_of_its_forward() -> None:
    """Of two graphs, torch tries the one first that ran last (pytorch #166926)."""
    model, backend = make("llama", checkpointing=True), Counting(differentiate=True)
    layers, computes = checkpointed_layers(model), partial(torch.autocast, "cpu", torch.bfloat16)

    def both() -> list[Tensor]:
        model.zero_grad()
        first = packed(model, *row(0))
        with computes():
            second = packed(model, *row(1))
        first.backward()
        second.backward()
        return [first.detach(), second.detach(), *gradients(model).values()]

    with packed_attention(model), offloaded(layers):
        expected = both()
        with compiled_layers(model, _backend=backend) as handle:
            actual = both()
    assert (handle.path, backend.graphs) == ("compiled", 2), handle.reason
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_saved_tensor_hooks_see_the_layers_of_the_step_only(checkpointing: bool) -> None:
    """Activation offloading: compiled inside of the checkpoint, which still saves one input per layer."""
    model, backend = make("llama", checkpointing=checkpointing), Counting()
    packed_tensors: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed_tensors.append(tensor.numel())
        return tensor

    counts = []
    with compiled(model, backend) as layers:
        for seed in range(3):
            packed_tensors.clear()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                actual = one_step(model, *row(seed))
            counts.append(len(packed_tensors))
    with packed_attention(model):
        torch.testing.assert_close(actual, one_step(model, *row(2)))
    assert (layers.path, backend.graphs) == ("compiled", 1), layers.reason
    assert len(set(counts)) == 1


@pytest.mark.parametrize(
    ("family", "order"),
    [
        ("llama", "offload compile"), ("llama", "compile offload"), ("qwen3_moe", "moe compile"),
        ("qwen3_moe", "compile moe offload"),
    ],
)  # fmt: skip
def test_checkpointed_layers_are_compiled_whoever_wraps_them_first(family: str, order: str) -> None:
    model = make(family, lora=family == "llama", checkpointing=True)
    backend = Counting(differentiate=order.endswith("offload"))
    before, data = [dict(module.__dict__) for module in model.modules()], [row(seed) for seed in range(3)]
    wrappers: dict[str, Callable[[], Any]] = {
        "offload": lambda: offloaded(model),
        "compile": lambda: compiled_layers(model, _backend=backend),
        "moe": lambda: apply_moe(model),
    }
    with packed_attention(model):
        expected = [one_step(model, *one) for one in data]
        with contextlib.ExitStack() as stack:
            entered = {name: stack.enter_context(wrappers[name]()) for name in order.split()}
            actual = [one_step(model, *one) for one in data]
        assert (entered["compile"].path, backend.graphs) == ("compiled", 1), entered["compile"].reason
        assert "offload" not in entered or entered["offload"].use.most_held
    torch.testing.assert_close(actual, expected, **{"rtol": 1e-4, "atol": 1e-6} if family == "qwen3_moe" else {})
    model.zero_grad()
    assert [dict(module.__dict__) for module in model.modules()] == before


def test_without_packed_attention_nothing_is_compiled(tmp_path: Path) -> None:
    trainer = train(FastSFTTrainer, tmp_path, packing=True, max_steps=1, fast={"packed_attention": "off"})
    assert_line(trainer, "layer_compile", "no packed metadata", status="off")


@pytest.mark.cuda
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("fast", [False, True], ids=["peft", "apply_lora"])
def test_cuda_one_graph_for_fifty_rows_and_no_sync(fast: bool, checkpointing: bool, inductor: None) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "max_position_embeddings": 8192}
    model = make("llama", lora=True, checkpointing=checkpointing, **sizes).cuda()
    rows = (row(seed, longest=700) for seed in range(50))
    data = [(ids.cuda(), batch.to("cuda")) for ids, batch in rows]
    counters = torch._dynamo.utils.counters["stats"]
    with contextlib.ExitStack() as stack:
        if fast:
            stack.callback(cast_adapters(model, torch.bfloat16).revert)
        attention = stack.enter_context(packed_attention(model, compute_dtype=torch.bfloat16))
        assert attention.path in ("varlen", "flash_attention_4")
        layers = stack.enter_context(compiled_layers(model))
        stack.enter_context(torch.autocast("cuda", torch.bfloat16))
        before = counters["unique_graphs"]
        for ids, batch in data[:40]:  # compiling asks the device
            packed(model, ids, batch).backward()
            batch.clear_derived()
        stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
        torch.cuda.set_sync_debug_mode("error")
        for ids, batch in data:
            packed(model, ids, batch).backward()
            batch.clear_derived()
    assert layers.path == "inductor", layers.reason
    assert counters["unique_graphs"] - before == 1
