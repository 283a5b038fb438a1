"""Tiny mixture-of-experts models of every family that the fused path covers, their LoRA, and gates on their own."""

from __future__ import annotations

from typing import Any

import torch
from model_material import COMMON, FIELDS, away_from_zero, random_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from fastpack_trl.kernels.gate_form import Gate
from fastpack_trl.moe.layout import experts_modules
from fastpack_trl.moe.routing import routing_plan
from fastpack_trl.testing import assert_gradients_close, gradients

_DENSE = {"head_dim": 4, "first_k_dense_replace": 0}
_FAMILIES: dict[str, dict[str, Any]] = {
    **{family: FIELDS[family] for family in ("gpt_oss", "qwen3_next", "mixtral")},
    "qwen3_moe": {**FIELDS["qwen3_moe"], "norm_topk_prob": True},
    "deepseek_v2": {**FIELDS["deepseek_v3"], **_DENSE, "topk_method": "greedy"},
    "deepseek_v3": {**FIELDS["deepseek_v3"], **_DENSE},
    "glm4_moe": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
    "granitemoe": {"num_local_experts": 4},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0},
}
_FIELDS = {"head_dim": 8, "attention_dropout": 0.0, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = tuple(_FAMILIES)
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
"""The expert stacks, as PEFT's `target_parameters` names them."""

GATES = [
    Gate("silu"),
    Gate("silu", interleaved=True),
    Gate("clamped", interleaved=True, alpha=1.702, limit=1.0),
    Gate("clamped", alpha=1.0, limit=0.5),
    Gate("model", function=lambda h: torch.nn.functional.gelu(h[:, :16]) * h[:, 16:]),
]
KERNEL_GATES = [gate for gate in GATES if gate.kind != "model"]
"""Those with a kernel."""


def gate_name(gate: Gate) -> str:
    """Return the id of a test over `GATES`."""
    return gate.kind + "-interleaved" * gate.interleaved


def moe_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A random model of `family` in training mode; biases, norms and sinks away from 0 and 1."""
    config = AutoConfig.for_model(family, **{**COMMON, **_FIELDS, **_FAMILIES[family], **overrides})
    return random_model(AutoModelForCausalLM, config, seed=seed, noise=0.1).to(dtype)


def experts_of(model: nn.Module) -> Any:
    """The first experts module."""
    return next(iter(experts_modules(model).values()))


def routed(tokens: int, top_k: int, num_experts: int, *, seed: int = 0, skew: str = "uniform") -> tuple[Tensor, Tensor]:
    """(T, k) distinct expert ids and routing weights; `skew`: ``uniform``, ``hot`` (expert 0 always first), ``empty``
    (the last expert never)."""
    torch.manual_seed(seed)
    scores = torch.rand(tokens, num_experts)
    if skew == "hot":
        scores[:, 0] = 2
    elif skew == "empty":
        scores[:, -1] = -1
    weights, ids = scores.topk(top_k, dim=-1)
    return ids, weights.softmax(-1)


def input_ids(tokens: int = 24, vocabulary: int = 96, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return torch.randint(3, vocabulary, (1, tokens))


def distance(actual: Tensor, expected: Tensor) -> float:
    """Relative L2 difference, in fp64."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def adapted(family: str = "qwen3_moe", *, r: int = 4, stacks: list[str] | None = None, **overrides: Any) -> Any:
    """A model with LoRA on its stacks and on attention; B away from zero and from any symmetry."""
    from peft import LoraConfig, get_peft_model

    targets = stacks or [name.replace("mlp", "block_sparse_moe") if family == "granitemoe" else name for name in STACKS]
    config = LoraConfig(r=r, lora_alpha=3 * r, target_parameters=targets, target_modules=["q_proj", "q_b_proj"])
    return randomised(get_peft_model(moe_model(family, **overrides), config))


def randomised(model: Any) -> Any:
    return away_from_zero(model, seed=3, scale=0.1)


def step(model: Any, ids: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits and gradients of one forward and backward."""
    ids = input_ids() if ids is None else ids
    model.zero_grad()
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    return out.logits.detach(), gradients(model)


def assert_as_stock(model: Any, expected: tuple[Tensor, dict[str, Tensor]], *, rtol: float = 1e-5) -> None:
    """One `step` gives the logits and gradients that another gave."""
    logits, grads = step(model)
    assert distance(logits, expected[0]) <= 1e-5
    assert_gradients_close(grads, expected[1], rtol=rtol)


def reference_gate(h: Tensor, bias: Tensor | None, expert: Tensor, gate: Gate) -> Tensor:
    """The gate in plain operations, for autograd."""
    h = h if bias is None else h + bias[expert.long()]
    if gate.function is not None:
        return gate.function(h)
    first, up = gate.halves(h)
    if gate.kind == "silu":
        return first * first.sigmoid() * up
    first, up = first.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    return (up + 1) * first * (gate.alpha * first).sigmoid()


def gate_case(dtype: torch.dtype, *, bias: bool = True, rows: int = 37) -> Any:
    torch.manual_seed(0)
    h, table, grad = torch.randn(rows, 32), torch.randn(3, 32) if bias else None, torch.randn(rows, 16)
    h[0, :] = 1.0  # on the bounds of the clamp, where the gradient passes
    if table is not None:
        table[0] = 0
    expert = torch.arange(rows, dtype=torch.int32) * 3 // rows
    weight = torch.rand(rows)
    return h.to(dtype), None if table is None else table.to(dtype), expert, grad.to(dtype), weight.to(dtype)


def autograd_gate(case: Any, gate: Gate, dtype: torch.dtype) -> list[Tensor]:
    """Activation, gradient of `h`, weighted activation and gradient of the weight of a `gate_case`, by autograd."""
    h, table, expert, grad, weight = case
    h, weight = (leaf.detach().to(dtype, copy=True).requires_grad_() for leaf in (h, weight))
    activation = reference_gate(h, None if table is None else table.to(dtype), expert, gate)
    weighted = activation * weight[:, None]
    of_h, of_weight = torch.autograd.grad(weighted, (h, weight), grad.to(dtype))
    return [activation.detach(), of_h, weighted.detach(), of_weight]


def combine_case(
    dtype: torch.dtype, bias: bool, weights_dtype: torch.dtype | None, *, tokens: int = 19
) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
    """Arguments and keywords of `combine` for three slots per token, and the sum over slots in float64."""
    ids, weights = routed(tokens, 3, 5)
    rows, table = torch.randn(3 * tokens, 40).to(dtype), torch.randn(5, 40).to(dtype) if bias else None
    inverse, scale = routing_plan(ids, 5).inverse, None if weights_dtype is None else weights.to(weights_dtype)
    slots = rows.double()[inverse.long()] + (0 if table is None else table.double()[ids])
    exact = (slots if scale is None else slots * scale.double()[..., None]).sum(1)
    return (rows, inverse, scale), {"bias_eh": table, "ids_tk": ids}, exact


def assert_as_near(actual: Any, others: Any, exact: Any, floor: float) -> None:
    """Each result has at most 1.1 times the error of the other's."""
    for mine, other, value in zip(actual, others, exact, strict=True):
        assert distance(mine, value) <= max(1.1 * distance(other, value), floor)
