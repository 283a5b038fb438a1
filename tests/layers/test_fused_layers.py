"""Fused layers: which classes are accepted, that the others run their own code, and that results stay."""

from __future__ import annotations

import copy
import pickle
import re
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from fastpack_trl.kernels import gated as gated_module
from fastpack_trl.kernels import norm as norm_module
from fastpack_trl.kernels import rotary as rotary_module
from fastpack_trl.kernels.fused_form import NormForm
from fastpack_trl.layers.find import kinds_of
from fastpack_trl.layers.forms import NormCall
from fastpack_trl.layers.replace import FusedLayers, fused_layers
from fastpack_trl.testing import FAMILIES, assert_gradients_close, gradients, tiny_model

MORE = (
    "arcee", "bitnet", "ctrl", "ernie4_5", "gemma", "glm", "gpt2", "gpt_neox", "helium", "hunyuan_v1_dense",
    "lfm2", "minimax", "ministral", "mpt", "nanochat", "olmo", "persimmon", "phi", "smollm3", "vaultgemma", "xglm",
)  # fmt: skip
OWN = {
    "llama4_text": "Llama4TextAttention: apply_rotary_emb: its forward raises TypeError",
    "nanochat": "NanoChatAttention: apply_rotary_pos_emb: no fused form equals its forward",
    "qwen3_next": "Qwen3NextRMSNormGated: its forward raises TypeError",
}
"""What runs its own code: rotations with other arguments or direction, norms with a gate."""


def fused(model: nn.Module, dtype: torch.dtype = torch.float32, *, autocast: bool = False) -> Any:
    return fused_layers(model, dtype=dtype, autocast=autocast)


def report_of(model: nn.Module, dtype: torch.dtype = torch.float32, *, autocast: bool = False) -> FusedLayers:
    with fused(model, dtype, autocast=autocast) as report:
        return report


def family(name: str) -> Any:
    if name in FAMILIES:
        return tiny_model(name)
    fields = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(name, **fields, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).float().eval()


def step(model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    ids = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(0))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


@pytest.mark.parametrize("name", FAMILIES + MORE)
def test_families_are_fused_or_named_and_their_gradients_stay(name: str) -> None:
    model = family(name)
    expected = step(model)
    with fused(model) as report:
        assert_gradients_close(step(model), expected, rtol=1e-4, atol_of_all=1e-6)
    own = OWN.get(name, "")
    assert own in str(report)
    assert bool(own) == bool(report.reasons) == (report.fused != report.found)
    low = model.to(torch.bfloat16)
    assert report_of(low, torch.bfloat16).fused == report.fused


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_dtypes_of_a_run(dtype: torch.dtype, autocast: bool) -> None:
    if autocast and dtype == torch.float64:
        pytest.skip("autocast has no float64")
    model = tiny_model("qwen3") if autocast else tiny_model("qwen3").to(dtype)
    assert str(report_of(model, dtype, autocast=autocast)) == "norm 9 of 9, rotary 2 of 2, gate 2 of 2"


class OtherFormula(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) * 1.001


class NoFormulaInHalf(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        out = super().forward(hidden_states)
        return out if hidden_states.dtype == torch.float32 else out * 1.012


class Biased(LlamaRMSNorm):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__(width, eps)
        self.bias = nn.Parameter(torch.ones(width))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + self.bias.exp()


def hook(model: Any) -> None:
    model.model.norm.register_forward_hook(lambda _module, _inputs, out: out * 2)


def own_forward(model: Any) -> None:
    norm = model.model.norm
    norm.forward = lambda x: LlamaRMSNorm.forward(norm, x) * 3


def becomes(cls: type) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.model.norm.__class__ = cls
        if cls is Biased:
            model.model.norm.bias = nn.Parameter(torch.randn(32))

    return change


def compiled(model: Any) -> None:
    model.model.norm.compile()


BAD = {
    "subclass": (becomes(OtherFormula), "OtherFormula: no fused form equals"),
    "bias": (becomes(Biased), "Biased: no fused form"),
    "half": (becomes(NoFormulaInHalf), "NoFormulaInHalf: the nearest fused form is .* in bfloat16"),
    "hook": (hook, "LlamaRMSNorm: it has hooks or a replaced forward"),
    "forward": (own_forward, "LlamaRMSNorm: it has hooks or a replaced forward"),
    "compiled": (compiled, "LlamaRMSNorm: it is compiled"),
    "activation": (lambda m: m.model.layers[0].mlp.act_fn.register_forward_hook(lambda *_: None), "LlamaMLP: .* hooks"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_differs_runs_its_own_code_and_is_named(name: str) -> None:
    change, reason = BAD[name]
    model = tiny_model("llama")
    change(model)
    if name != "compiled":
        expected = step(model)
    with fused(model, torch.bfloat16, autocast=True) as report:
        assert sum(report.found.values()) == sum(report.fused.values()) + 1
        assert re.search(rf"\((?:{reason})", str(report)), report
        if name != "compiled":
            assert_gradients_close(step(model), expected, rtol=1e-4, atol_of_all=1e-6)


def test_a_triton_that_cannot_compile_is_named_and_the_library_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gated_module, norm_module, rotary_module):
        monkeypatch.setattr(module, "runs_triton", lambda *_: True)  # no driver takes tensors of the CPU
    model = tiny_model("llama")
    expected = step(model)
    with fused(model) as report:
        assert not report.fused
        assert len(report.reasons) == 3
        assert all("the fused form raises" in why for why in report.reasons.values())
        assert_gradients_close(step(model), expected, rtol=0)


def test_peft_layers_and_weights_that_change_in_mid_run() -> None:
    config = LoraConfig(target_modules=["q_proj", "gate_proj", "down_proj"], modules_to_save=["model.norm"], r=4)
    model = get_peft_model(tiny_model("llama"), config)
    expected = step(model)
    with fused(model) as report:
        assert str(report) == "norm 4 of 5, rotary 2 of 2, gate 2 of 2 (LlamaRMSNorm: PEFT wraps it)"
        assert_gradients_close(step(model), expected, rtol=1e-4, atol_of_all=1e-6)
        norm = model.base_model.model.model.layers[0].input_layernorm
        assert norm.weight.grad is None
        norm.weight.requires_grad_(True)
        step(model)
        assert norm.weight.grad is not None
        norm.weight.data[3] = torch.nan
        assert step(model)["loss"].isnan()


def test_exit_restores_and_copies_run_the_librarys_code(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    run = norm_module.norm_forward
    monkeypatch.setattr(norm_module, "norm_forward", lambda *args: calls.append(1) or run(*args))
    before = LlamaRMSNorm.forward, LlamaMLP.forward, modeling_llama.apply_rotary_pos_emb
    model, other = tiny_model("llama"), tiny_model("llama", seed=1)
    state = set(model.state_dict())
    with pytest.raises(ZeroDivisionError), fused(model), fused(other):
        assert set(model.state_dict()) == state
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), tiny_model("llama", seed=2)
        calls.clear()
        for each in copies:
            step(each)
        assert not calls
        thread = threading.Thread(target=step, args=(other,))
        thread.start()
        thread.join()
        assert len(calls) == 5
        raise ZeroDivisionError
    assert before == (LlamaRMSNorm.forward, LlamaMLP.forward, modeling_llama.apply_rotary_pos_emb)
    calls.clear()
    step(model)
    assert not calls
    assert not [name for m in model.modules() for name in vars(m) if name.startswith("_fastpack")]


def test_a_recompute_runs_what_the_forward_ran_and_double_backward_raises() -> None:
    model = tiny_model("qwen3")
    expected = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with fused(model):
        assert_gradients_close(step(model), expected, rtol=1e-4, atol_of_all=1e-6)
        x = torch.randn(1, 4, 32, requires_grad=True)
        out = checkpoint(model.model.layers[0].mlp, x, use_reentrant=False)
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


class Numbered(LlamaRMSNorm):
    def __init__(self, width: int, layer_idx: int) -> None:
        super().__init__(width)
        self.layer_idx = layer_idx

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) / (self.layer_idx + 1)


class Scaled(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) * self.scale


class Stateful(LlamaRMSNorm):
    def __init__(self, width: int, state: Any) -> None:
        super().__init__(width)
        self.state = state

    def forward(self, hidden_states: Tensor) -> Tensor:
        state = self.state
        return super().forward(hidden_states) * (state.scale if isinstance(state, SimpleNamespace) else state[0])


HOLDERS: dict[str, Callable[[float], Any]] = {
    "list": lambda scale: [scale], "dict": lambda scale: {0: scale}, "tensor": lambda scale: torch.tensor([scale]),
    "object": lambda scale: SimpleNamespace(scale=scale), "tuple": lambda scale: (scale, []),
}  # fmt: skip


class Noisy(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        out = super().forward(hidden_states)
        return out + torch.randn_like(out) if self.training else out


def with_norms(make: Callable[[int], nn.Module]) -> Any:
    model = tiny_model("llama")
    for index, layer in enumerate(model.model.layers):
        layer.input_layernorm = make(index)
    return model.eval()


def scaled(index: int) -> nn.Module:
    norm = Scaled(32)
    norm.register_buffer("scale", torch.tensor(1.0 + index))
    return norm


@pytest.mark.parametrize(
    ("make", "norms"), [(lambda index: Numbered(32, index), 4), (scaled, 3), (lambda _: Noisy(32), 3),
    *((lambda index, hold=hold: Stateful(32, hold(index + 1.0)), 4) for hold in HOLDERS.values())],
    ids=["layer_idx", "buffer", "mode", *HOLDERS],
)  # fmt: skip
def test_a_norm_that_differs_by_module_or_mode_is_not_proven_by_another(make: Any, norms: int) -> None:
    """The first layer of the numbered ones divides by 1: it is a plain norm."""
    model = with_norms(make)
    expected = step(model)
    with fused(model) as report:
        assert (report.fused["norm"], report.found["norm"]) == (norms, 5)
        assert_gradients_close(step(model), expected, rtol=1e-4, atol_of_all=1e-6)


class Louder(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.options = {"scale": scale}

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(x) * self.options["scale"]


def test_activations_that_differ_by_module_are_not_proven_by_another() -> None:
    model = tiny_model("llama").eval()
    for index, layer in enumerate(model.model.layers):
        layer.mlp.act_fn = Louder(1.0 + index)
    expected = step(model)
    with fused(model) as report:
        assert (report.fused["gate"], report.found["gate"]) == (1, 2)
        assert_gradients_close(step(model), expected, rtol=1e-4, atol_of_all=1e-6)


def test_an_attention_that_inherits_its_forward_is_fused() -> None:
    class Inherited(modeling_llama.LlamaAttention):
        pass

    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = Inherited
    expected = step(model)
    with fused(model) as report:
        assert report.fused["rotary"] == 2
        assert_gradients_close(step(model), expected, rtol=1e-4, atol_of_all=1e-6)


def test_a_gate_with_dropout_is_its_own_also_if_the_model_was_loaded_for_inference() -> None:
    class Dropping(LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(nn.functional.dropout(self.act_fn(self.gate_proj(x)), 0.5, self.training)
                                  * self.up_proj(x))  # fmt: skip

    model = tiny_model("llama").eval()
    for layer in model.model.layers:
        layer.mlp.__class__ = Dropping
    assert report_of(model).fused["gate"] == 0


def test_two_models_of_a_class_and_dtypes_that_were_not_proven() -> None:
    one, other = tiny_model("olmo2"), tiny_model("olmo2", seed=1)
    expected = [step(copy.deepcopy(each).double()) for each in (one, other)]
    with fused(one), fused(other):
        for model, right in zip((one.double(), other.double()), expected, strict=True):
            assert_gradients_close(step(model), right, rtol=1e-4, atol_of_all=1e-6)


def test_cos_and_sin_in_fp32_beside_heads_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    rotations, rotate = list[int](), rotary_module.rotary_forward
    with fused(model := tiny_model("olmo2").bfloat16(), torch.bfloat16):
        monkeypatch.setattr(rotary_module, "rotary_forward", lambda *given: rotations.append(1) or rotate(*given))
        step(model)
    assert len(rotations) == 2


@pytest.mark.parametrize("family_name", ["qwen3", "exaone4"])
def test_inference_mode_and_an_attention_that_is_an_autograd_function(family_name: str) -> None:
    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            ctx.save_for_backward(query, key, value)
            return query * key * value

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
            query, key, value = ctx.saved_tensors
            return grad * key * value, grad * query * value, grad * query * key

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        keys, values = (each.repeat_interleave(groups, 1) for each in (key, value))
        return Attend.apply(query.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)), None

    AttentionInterface.register("test_function", attend)
    model = family(family_name)
    model.config._attn_implementation = "test_function"
    expected = step(model)
    with fused(model):
        assert_gradients_close(step(model), expected, rtol=1e-4, atol_of_all=1e-6)
    model.config._attn_implementation = "sdpa"
    with fused(model), torch.inference_mode():
        model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, pad_token_id=0)


def test_a_norm_that_is_fp32_under_autocast_keeps_its_dtype_outside() -> None:
    """As in a callback that generates: the next projection has 16-bit weights."""
    layer, x = nn.LayerNorm(8).bfloat16(), torch.randn(2, 8).bfloat16()
    call = NormCall(NormForm(1e-5, centers=True, widens=True), ("weight", "bias"), frozenset({(x.dtype,) * 3}))
    assert torch.equal(call(layer, nn.LayerNorm.forward, x), layer(x))
    with torch.autocast("cpu", torch.bfloat16):
        inside = call(layer, nn.LayerNorm.forward, x)
    assert inside.dtype == torch.float32
    torch.testing.assert_close(inside, layer.float()(x.float()))


@pytest.mark.parametrize("adapter", ["lora", "dora", "none"])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "phi3"])
def test_one_proof_stands_for_the_gates_of_all_layers(name: str, adapter: str) -> None:
    model: Any = tiny_model(name, num_hidden_layers=3)
    if adapter != "none":
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", use_dora=adapter == "dora"))
    gates = [kind.modules for kind in kinds_of(model)[0].values() if kind.part == "gate"]
    assert [len(modules) for modules in gates] == [3]
