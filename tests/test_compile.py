"""Compiled decoder layers: the same step, few graphs whatever the rows, and nothing left behind."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainer_material import figures, train

from fastpack_trl import FastSFTTrainer
from fastpack_trl.attention.backends import Varlen
from fastpack_trl.attention.model_features import read_features
from fastpack_trl.attention.per_document import PerDocumentLayer
from fastpack_trl.attention.seam import packed_attention
from fastpack_trl.attention.varlen import VarlenLayer
from fastpack_trl.compile.layers import CompiledLayers, compiled_layers, decoder_layers
from fastpack_trl.packing.packed_batch import PackedBatch, to_transformers_kwargs
from fastpack_trl.testing import gradients, tiny_model

FAMILIES = ("llama", "qwen3", "gemma3_text", "phi3", "qwen3_moe", "gpt_oss")
# With all experts chosen no token changes its experts for a rounding.
OVERRIDES: dict[str, dict[str, Any]] = {"qwen3_moe": {"num_experts_per_tok": 4}, "gpt_oss": {"num_experts_per_tok": 4}}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"]
# Traces, differentiates and partitions as Inductor does, without generating code.
PARTITIONED = "aot_eager_decomp_partition"


class Counting:
    """A backend that counts the graphs and runs what was traced, or differentiated with `differentiate`."""

    def __init__(self, *, differentiate: bool = False) -> None:
        self.graphs = 0
        self.differentiate = differentiate

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs += 1
        return aot_eager(graph, inputs) if self.differentiate else graph.forward


def make(family: str, *, lora: bool = False, checkpointing: bool = False, **overrides: Any) -> Any:
    model = tiny_model(family, **OVERRIDES.get(family, {}), **overrides)
    if lora:
        from peft import LoraConfig, get_peft_model

        names = ATTENTION + ([] if family in OVERRIDES else ["gate_proj", "up_proj", "down_proj", "gate_up_proj"])
        targets = [name for name in names if any(key.endswith(name) for key, _ in model.named_modules())]
        model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    if checkpointing:
        checkpoint(model)
    return model.train()


def checkpoint(model: Any) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.enable_input_require_grads()


@pytest.fixture(scope="module")
def inductor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Inductor's caches in a folder of this run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


def row(seed: int, documents: int | None = None, longest: int = 20) -> tuple[Tensor, PackedBatch]:
    draw = random.Random(seed)
    lengths = [draw.randrange(2, longest) for _ in range(documents or draw.randrange(1, 7))]
    ids = torch.randint(3, 96, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed))
    return ids, PackedBatch.from_lengths(lengths, labels=ids)


def loss_of(model: Any, ids: Tensor, batch: PackedBatch) -> Tensor:
    out = model(input_ids=ids, packed_batch=batch, use_cache=False, **to_transformers_kwargs(batch))
    logits = out.logits[0, batch.loss_positions]
    return nn.functional.cross_entropy(logits.float() if logits.dtype != torch.float64 else logits, batch.loss_labels)


def one_step(model: Any, ids: Tensor, batch: PackedBatch) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = loss_of(model, ids, batch)
    loss.backward()
    batch.clear_derived()
    return loss.item(), gradients(model)


def errors(actual: tuple[float, dict[str, Tensor]], exact: tuple[float, dict[str, Tensor]]) -> Tensor:
    """Of the loss, and of all gradients together in the 2-norm; relative."""
    assert actual[1].keys() == exact[1].keys()
    distance = sum(float((actual[1][name].double().cpu() - g.cpu()).square().sum()) for name, g in exact[1].items())
    size = sum(float(g.square().sum()) for g in exact[1].values())
    return torch.tensor([abs(actual[0] - exact[0]) / abs(exact[0]), (distance / size) ** 0.5])


def compare(
    model: Any, backend: Any, *, device: str = "cpu", autocast: torch.dtype | None = None, rows: int = 3
) -> CompiledLayers:
    """Asserts: compiled is within twice eager's own error against float64, over a few rows."""
    reference = copy.deepcopy(model).cpu().double()
    if isinstance(getattr(reference.config, "_experts_implementation", None), str):
        reference.set_experts_implementation("eager")  # grouped matrix products know no float64
    data = [row(seed) for seed in range(rows)]
    with packed_attention(reference, "per_document"):
        exact = [one_step(reference, *one) for one in data]

    def run() -> Tensor:
        steps = (one_step(model, ids.to(device), batch.to(device)) for ids, batch in data)
        return torch.stack([errors(step, known) for step, known in zip(steps, exact, strict=True)])

    computes = torch.autocast(device, autocast) if autocast is not None else contextlib.nullcontext()
    with packed_attention(model, compute_dtype=autocast), computes:
        eager = run()
        with compiled_layers(model, verbose=False, _backend=backend) as layers:
            compiled = run()
    assert all(kind.path != "eager" for kind in layers.kinds), layers.reason
    mean_error, mean_budget = (values.square().mean(0).sqrt() for values in (compiled, eager))
    rounding = torch.finfo(autocast or torch.float32).eps / 2
    assert (mean_error <= 2 * mean_budget + rounding).all(), (mean_error, mean_budget)
    return layers


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("llama", False),
        ("qwen3", True),
        ("gemma3_text", True),
        ("phi3", False),
        ("qwen3_moe", False),
        ("gpt_oss", True),
    ],
)
def test_traced_and_partitioned_within_twice_the_error_of_eager(family: str, lora: bool) -> None:
    compare(make(family, lora=lora, checkpointing=lora), PARTITIONED)


@pytest.mark.slow
def test_inductor_within_twice_the_error_of_eager(inductor: None) -> None:
    layers = compare(make("llama", lora=True, checkpointing=True), "inductor")
    assert layers.path == "inductor"


@pytest.mark.parametrize(
    ("lora", "checkpointing", "implementation"),
    [(False, False, "per_document"), (True, False, "sdpa"), (True, True, "per_document"), (False, True, "sdpa")],
)
def test_one_graph_for_fifty_rows(lora: bool, checkpointing: bool, implementation: str) -> None:
    """Rows of other lengths, documents of other lengths and numbers, the first layer over frozen embeddings."""
    backend = Counting(differentiate=True)
    model = make("llama", lora=lora, checkpointing=checkpointing)
    with packed_attention(model, implementation), compiled_layers(model, verbose=False, _backend=backend) as layers:
        for seed in range(50):
            one_step(model, *row(seed))
    assert (backend.graphs, layers.path) == (1, "compiled"), layers.reason


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_one_graph_per_window(family: str) -> None:
    """Also where no document of a row is longer than the window, and the other way round."""
    backend = Counting()
    model = make(family, lora=family == "gemma3_text")
    with packed_attention(model), compiled_layers(model, verbose=False, _backend=backend) as layers:
        for seed in range(50):
            one_step(model, *row(seed, longest=4 if seed % 2 else 30))
    assert (backend.graphs, layers.path, len(layers.kinds)) == (2, "compiled", 2), layers.reason


def four_bit(device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """A LoRA model over NF4 weights, and the same in float64 over what those weights stand for."""
    import bitsandbytes as bnb
    from peft import LoraConfig, get_peft_model

    model = tiny_model("llama", hidden_size=64, intermediate_size=128, head_dim=16)
    exact = copy.deepcopy(model).double()
    for name, module in list(model.model.layers.named_modules()):
        if isinstance(module, nn.Linear):
            quantised = bnb.nn.Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=dtype, quant_type="nf4"
            )
            quantised.weight = bnb.nn.Params4bit(module.weight.data, requires_grad=False, quant_type="nf4")
            quantised = quantised.to(device)
            weight = bnb.functional.dequantize_4bit(quantised.weight.data, quantised.weight.quant_state)
            exact.model.layers.get_submodule(name).weight.data = weight.double().cpu()
            parent, _, leaf = name.rpartition(".")
            setattr(model.model.layers.get_submodule(parent), leaf, quantised)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model.is_loaded_in_4bit = True
    config = {"r": 4, "target_modules": targets, "init_lora_weights": False}
    model, exact = (get_peft_model(each, LoraConfig(**config)) for each in (model.to(device), exact))
    exact.load_state_dict({k: v for k, v in model.state_dict().items() if "lora_" in k}, strict=False)
    return model.train(), exact.train()


def test_a_row_of_long_documents_has_a_form_for_compiled_layers() -> None:
    """On Hopper eager attention calls one kernel per long document, which is no part of a graph."""
    features = dataclasses.replace(read_features(make("llama"), torch.bfloat16), capability=(9, 0))
    batch = PackedBatch.from_lengths([5000, 4200])
    layer = Varlen().prepare(batch, features, torch.device("cpu"))
    assert isinstance(layer, PerDocumentLayer)
    assert isinstance(layer.compiled, VarlenLayer)
    assert torch.equal(layer.compiled.parts[0][0], batch.cu_seqlens)
    too_long = dataclasses.replace(features, num_heads=2**20)
    assert Varlen().prepare(PackedBatch.from_lengths([5000]), too_long, torch.device("cpu")).compiled is None


def cast_adapters(model: Any, autocast: torch.dtype | None) -> Any:
    from fastpack_trl.lora.linear import apply_lora

    report = apply_lora(model, compute_dtype=autocast)
    assert report.fast, str(report)
    return report


def test_layers_of_apply_lora_keep_one_graph_while_their_adapters_change() -> None:
    """The adapters are cast outside of the layer, anew in each step: a trial must leave that graph to the run."""
    backend, data = Counting(differentiate=True), [row(seed) for seed in range(4)]
    results = []
    for compiled in (False, True):
        model = make("llama", lora=True, checkpointing=True)
        with contextlib.ExitStack() as stack:
            stack.callback(cast_adapters(model, torch.bfloat16).revert)
            stack.enter_context(packed_attention(model, compute_dtype=torch.bfloat16))
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
            if compiled:
                layers = stack.enter_context(compiled_layers(model, verbose=False, _backend=backend))
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
            losses = []
            for one in data:
                losses.append(one_step(model, *one)[0])
                optimizer.step()
            results.append(losses)
    assert (backend.graphs, layers.path) == (1, "compiled"), layers.reason
    assert results[1] == pytest.approx(results[0], rel=1e-2)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_router_logits_reach_the_auxiliary_loss(family: str, checkpointing: bool) -> None:
    model, backend = make(family, checkpointing=checkpointing), Counting()
    ids, batch = row(0)

    def run() -> tuple[float, dict[str, Tensor], list[Tensor]]:
        model.zero_grad()
        keywords = to_transformers_kwargs(batch)
        out = model(input_ids=ids, packed_batch=batch, use_cache=False, output_router_logits=True, **keywords)
        (out.aux_loss + out.logits.logsumexp(-1).sum()).backward()
        return out.aux_loss.item(), gradients(model), [logits.detach() for logits in out.router_logits]

    with packed_attention(model):
        expected = run()
        with compiled_layers(model, verbose=False, _backend=backend) as layers:
            actual = run()
    assert layers.path == "compiled", layers.reason
    assert len(actual[2]) == 2
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def attributes(model: nn.Module) -> list[dict[str, Any]]:
    return [dict(module.__dict__) for module in model.modules()]


def test_layers_are_as_before_afterwards_also_after_an_exception() -> None:
    model = make("llama", checkpointing=True)
    before = attributes(model)
    with pytest.raises(KeyboardInterrupt):
        with packed_attention(model), compiled_layers(model, verbose=False, _backend=Counting()) as layers:
            keys = list(model.state_dict())
            one_step(model, *row(0))
            assert layers.path == "compiled"
            assert list(model.state_dict()) == keys
            raise KeyboardInterrupt
    model.zero_grad()
    assert attributes(model) == before


def test_checkpointing_switched_on_or_off_inside_is_kept() -> None:
    model, backend = make("llama"), Counting()
    with packed_attention(model), compiled_layers(model, verbose=False, _backend=backend) as layers:
        expected = one_step(model, *row(0))
        checkpoint(model)
        actual = one_step(model, *row(0))
        assert backend.graphs == 2
    torch.testing.assert_close(actual, expected)
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
            loss, logits = loss_of(model.eval(), ids, batch), model(**padded).logits
        tokens = model.generate(**padded, max_new_tokens=4, do_sample=False)
        model.train()
        with compiled_layers(model, verbose=False, _backend=backend):
            one_step(model, ids, batch)
            graphs = backend.graphs
            with torch.no_grad():
                assert torch.equal(loss_of(model.eval(), ids, batch), loss)
                assert torch.equal(model(**padded).logits, logits)
            assert torch.equal(model.generate(**padded, max_new_tokens=4, do_sample=False), tokens)
            model.train()
            model(**padded).logits.sum().backward()
            with torch.no_grad():
                loss_of(model, ids, batch)
            assert backend.graphs == graphs == 1
            torch.testing.assert_close(one_step(model, ids, batch), expected)


def test_a_copy_and_a_pickle_taken_during_training_are_plain_models() -> None:
    model = make("llama", checkpointing=True)
    ids, batch = row(0)
    with packed_attention(model):
        expected = one_step(model, ids, batch)
        with compiled_layers(model, verbose=False, _backend=Counting()):
            one_step(model, ids, batch)
            model.zero_grad()
            layer = decoder_layers(model)[0]
            loaded = pickle.loads(pickle.dumps(layer))
            copied = copy.deepcopy(model)
        for found in (loaded, decoder_layers(copied)[0]):
            assert found._compiled_call_impl is None
            assert found._gradient_checkpointing_func.func is torch.utils.checkpoint.checkpoint
            assert list(found.state_dict()) == list(layer.state_dict())
        torch.testing.assert_close(one_step(copied, ids, batch), expected, rtol=0, atol=0)


def stop(*_args: Any) -> Any:
    raise RuntimeError("no compiler here")


def data_dependent(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 2 if output.sum() > 0 else output


@pytest.mark.parametrize("what", ["compiler", "control flow", "reentrant"])
def test_a_layer_that_cannot_be_compiled_runs_eager_and_is_named_once(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make("llama")
    if what == "control flow":
        decoder_layers(model)[0].mlp.register_forward_hook(data_dependent)
        decoder_layers(model)[1].mlp.register_forward_hook(data_dependent)
    if what == "reentrant":
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": True})
        model.enable_input_require_grads()
    data = [row(seed) for seed in range(3)]
    with packed_attention(model):
        expected = [one_step(model, *one) for one in data]
        with compiled_layers(model, verbose=False, _backend=stop if what == "compiler" else Counting()) as layers:
            actual = [one_step(model, *one) for one in data]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    (kind,) = layers.kinds
    said = {"compiler": "no compiler here", "control flow": "Unsupported", "reentrant": "reentrant checkpointing"}
    assert kind.path == "eager"
    assert said[what] in kind.reason
    assert [record.message for record in caplog.records if "layer_compile" in record.message] == [
        f"layer_compile: {kind.reason}"
    ]


def test_more_graphs_than_the_limit_run_eager(caplog: pytest.LogCaptureFixture) -> None:
    model = make("llama")
    data = [row(seed) for seed in range(4)]

    def scaled(module: Any, args: Any, output: Tensor) -> Tensor:
        return output * module.factor  # an int of a module is a constant of the graph

    for layer in decoder_layers(model):
        layer.mlp.register_forward_hook(scaled)
    with packed_attention(model):
        with torch._dynamo.config.patch(recompile_limit=2):
            with compiled_layers(model, verbose=False, _backend=Counting()) as layers:
                for count, one in enumerate(data):
                    for layer in decoder_layers(model):
                        layer.mlp.factor = count + 2
                    actual = one_step(model, *one)
        torch.testing.assert_close(actual, one_step(model, *data[-1]))
    assert layers.path == "eager"
    assert "ecompile" in layers.reason
    assert sum("layer_compile" in record.message for record in caplog.records) == 1


def test_the_random_state_is_not_moved_by_a_trial() -> None:
    model = make("llama", attention_dropout=0.0)
    state = torch.get_rng_state()
    with packed_attention(model), compiled_layers(model, measure=True, verbose=False, _backend=Counting()) as layers:
        one_step(model, *row(0))
    assert torch.equal(torch.get_rng_state(), state)
    assert "eager" in layers.reason
    assert "ms" in layers.reason


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_saved_tensor_hooks_see_the_layers_of_the_step_only(checkpointing: bool) -> None:
    """Activation offloading: compiled inside of the checkpoint, which still saves one input per layer."""
    model, backend = make("llama", checkpointing=checkpointing), Counting()
    packed_tensors: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed_tensors.append(tensor.numel())
        return tensor

    counts = []
    with packed_attention(model), compiled_layers(model, verbose=False, _backend=backend) as layers:
        for seed in range(3):
            packed_tensors.clear()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                actual = one_step(model, *row(seed))
            counts.append(len(packed_tensors))
    with packed_attention(model):
        torch.testing.assert_close(actual, one_step(model, *row(2)))
    assert (layers.path, backend.graphs) == ("compiled", 1), layers.reason
    assert len(set(counts)) == 1


@pytest.mark.slow
def test_the_trainer_compiles_on_request_and_trains_the_same(
    tmp_path: Path, inductor: None, capsys: pytest.CaptureFixture
) -> None:
    options: dict[str, Any] = {"packing": True, "gradient_checkpointing": False}
    off = train(FastSFTTrainer, tmp_path / "off", fast={"layer_compile": "auto"}, **options)
    assert off.fastpack_report["layer_compile"].status == "off"
    assert "cpu" in off.fastpack_report["layer_compile"].reason
    on = train(FastSFTTrainer, tmp_path / "on", fast={"layer_compile": "on"}, **options)
    line = on.fastpack_report["layer_compile"]
    assert (line.status, line.path) == ("on", "inductor"), line
    assert "Qwen3DecoderLayer x 2 compiled in" in line.reason
    assert capsys.readouterr().err.count("layer_compile: compiling Qwen3DecoderLayer ...") == 1
    for mine, plain in zip(figures(on), figures(off), strict=True):
        assert mine == pytest.approx(plain, rel=1e-5, abs=2e-6)
    assert all(layer._compiled_call_impl is None for layer in decoder_layers(on.model))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"fast": {"layer_compile": "off"}}, "switched off"),
        ({"torch_compile": True, "torch_compile_backend": "eager"}, "torch_compile=True"),
        ({"fast": {"layer_compile": "on", "packed_attention": "padded_rows"}}, "padded_rows"),
        ({"fast": {"layer_compile": "on", "packed_attention": "off"}}, "no packed metadata"),
    ],
)
def test_the_report_says_why_nothing_is_compiled(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    trainer = train(FastSFTTrainer, tmp_path, packing=True, max_steps=1, eval_strategy="no", **options)
    line = trainer.fastpack_report["layer_compile"]
    assert line.status == "off"
    assert why in line.reason


# The kernels themselves: bf16 under autocast over float32 weights, varlen attention.


def cuda_row(seed: int, longest: int = 700) -> tuple[Tensor, PackedBatch]:
    ids, batch = row(seed, longest=longest)
    return ids.cuda(), batch.to("cuda")


def cuda_model(family: str = "llama", **options: Any) -> Any:
    options = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "max_position_embeddings": 8192} | options
    return make(family, **options).cuda()


@pytest.mark.cuda
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_cuda_bf16_within_twice_the_error_of_eager(family: str, lora: bool, inductor: None) -> None:
    model = make(family, lora=lora, checkpointing=lora, head_dim=16).cuda()
    compare(model, "inductor", device="cuda", autocast=torch.bfloat16, rows=6)


@pytest.mark.cuda
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("fast", [False, True], ids=["peft", "apply_lora"])
def test_cuda_one_graph_for_fifty_rows_and_no_sync(fast: bool, checkpointing: bool, inductor: None) -> None:
    model = cuda_model(lora=True, checkpointing=checkpointing)
    data = [cuda_row(seed) for seed in range(50)]
    counters = torch._dynamo.utils.counters["stats"]
    with contextlib.ExitStack() as stack:
        if fast:
            stack.callback(cast_adapters(model, torch.bfloat16).revert)
        attention = stack.enter_context(packed_attention(model, compute_dtype=torch.bfloat16))
        assert attention.path == "varlen"
        layers = stack.enter_context(compiled_layers(model, verbose=False))
        stack.enter_context(torch.autocast("cuda", torch.bfloat16))
        before = counters["unique_graphs"]
        for ids, batch in data[:2]:
            loss_of(model, ids, batch).backward()
        stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
        torch.cuda.set_sync_debug_mode("error")
        for ids, batch in data:
            loss_of(model, ids, batch).backward()
            batch.clear_derived()
    assert layers.path == "inductor", layers.reason
    assert counters["unique_graphs"] - before == 1


@pytest.mark.cuda
def test_cuda_rows_of_long_documents_keep_the_graph_of_the_others(inductor: None) -> None:
    """Where eager attention goes document by document, a compiled layer stays with one call over the row."""
    model = cuda_model()
    long = torch.randint(3, 96, (1, 5000), device="cuda")
    batch = PackedBatch.from_lengths([5000], labels=long.cpu()).to("cuda")
    counters = torch._dynamo.utils.counters["stats"]
    with packed_attention(model, compute_dtype=torch.bfloat16), torch.autocast("cuda", torch.bfloat16):
        expected = loss_of(model, long, batch).item()
        before = counters["unique_graphs"]
        with compiled_layers(model, verbose=False) as layers:
            loss_of(model, *cuda_row(0)).backward()
            actual = loss_of(model, long, batch)
            actual.backward()
    assert layers.path == "inductor", layers.reason
    assert counters["unique_graphs"] - before == 1
    assert actual.item() == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("fast", [False, True], ids=["peft", "apply_lora"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_four_bit_base_is_as_near_to_float64_as_eager(device: str, fast: bool, inductor: None) -> None:
    pytest.importorskip("bitsandbytes")
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model, exact_model = four_bit(device, dtype)
    checkpoint(model)
    data = [row(seed) for seed in range(3 if device == "cpu" else 6)]
    with packed_attention(exact_model, "per_document"):
        exact = [one_step(exact_model, *one) for one in data]

    def run() -> Tensor:
        steps = (one_step(model, ids.to(device), batch.to(device)) for ids, batch in data)
        return torch.stack([errors(step, known) for step, known in zip(steps, exact, strict=True)])

    with contextlib.ExitStack() as stack:
        if fast:
            stack.callback(cast_adapters(model, None if device == "cpu" else dtype).revert)
        stack.enter_context(packed_attention(model, compute_dtype=dtype))
        stack.enter_context(torch.autocast(device, dtype, enabled=device == "cuda"))
        eager = run()
        backend = "inductor" if device == "cuda" else "aot_eager"
        layers = stack.enter_context(compiled_layers(model, verbose=False, _backend=backend))
        compiled = run()
    assert layers.path == backend, layers.reason
    mean_error, mean_budget = (values.square().mean(0).sqrt() for values in (compiled, eager))
    assert (mean_error <= 2 * mean_budget + torch.finfo(dtype).eps / 2).all(), (mean_error, mean_budget)


@pytest.mark.cuda
def test_cuda_auto_measures_and_says_what_it_saw(inductor: None) -> None:
    model = cuda_model(lora=True, checkpointing=True)
    with packed_attention(model, compute_dtype=torch.bfloat16), torch.autocast("cuda", torch.bfloat16):
        with compiled_layers(model, measure=True, verbose=False) as layers:
            loss_of(model, *cuda_row(0)).backward()
    assert "compiled" in layers.reason
    assert "eager" in layers.reason
    assert "ms per layer" in layers.reason
