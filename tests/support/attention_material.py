"""Material of the attention tests: inputs, the dense oracle, that of static batches, features of two devices."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fastpack_trl.attention.backends import BACKENDS
from fastpack_trl.attention.dense import dense_mask
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.attention.interface import AttentionCall
from fastpack_trl.attention.reference import additive
from fastpack_trl.model.facts import ModelFeatures
from fastpack_trl.packing.packed_batch import IGNORE_INDEX, PackedBatch, to_transformers_kwargs
from fastpack_trl.testing import assert_gradients_close, gradients

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
SCALE = 0.3
LENGTHS = (9, 1, 14, 6)
STATIC_KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"window": 4}, "sinks": {"sinks": True}, "both": {"window": 4, "sinks": True},
}  # fmt: skip
PER_DOCUMENT = (
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "granite", "olmo2", "olmo3", "cohere2",
    "glm4", "exaone4", "starcoder2", "qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss", "opt", "afmoe",
    "granitemoehybrid", "qwen3_next",
)  # fmt: skip

PLAIN = ModelFeatures(
    model_type="qwen3", implementation="sdpa", device_type="cpu", windows=frozenset(), sinks=False, softcap=False,
    dropout=0.0, num_heads=4, head_dim=64, compute_dtype=torch.float32, capability=None, gap="",
)  # fmt: skip

HOPPER = replace(PLAIN, device_type="cuda", capability=(9, 0), compute_dtype=torch.bfloat16)


def prepared(name: str, batch: PackedBatch, *windows: int, device: Any = CPU, features: ModelFeatures = PLAIN) -> Any:
    """What a backend makes of a batch for its layers."""
    return BACKENDS[name].prepare(batch, replace(features, windows=frozenset(windows)), torch.device(device))


def make_row(lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor, PackedBatch]:
    ids = torch.randint(3, 96, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    batch = PackedBatch.from_lengths(lengths, labels=ids)
    return ids, ids.masked_fill(batch.position_ids == 0, IGNORE_INDEX), batch


def separate(
    model: Any, ids: Tensor, batch: PackedBatch, implementation: str = "eager", **of_tokens: Tensor
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the documents one by one under stock attention; `of_tokens`: keywords, (1, tokens)."""
    documents = [document.tolist() for document in ids[0].split(batch.seq_lengths)]
    parts = {name: tensor.split(batch.seq_lengths, dim=1) for name, tensor in of_tokens.items()}
    keywords = [{name: part[index] for name, part in parts.items()} for index in range(len(documents))]
    total, grads = one_by_one(model, documents, documents, implementation, keywords)
    count = sum(length - 1 for length in batch.seq_lengths)
    return total / count, {name: gradient / count for name, gradient in grads.items()}


def one_by_one(
    model: Any, documents: list[list[int]], labels: list[list[int]], implementation: str = "eager", keywords: Any = None
) -> tuple[float, dict[str, Tensor]]:
    """The sum of the losses of documents one by one under stock attention, and its gradients."""
    reference, total = copy.deepcopy(model), 0.0
    reference.set_attn_implementation(implementation)
    device = next(iter(model.parameters())).device
    for index, (document, label) in enumerate(zip(documents, labels, strict=True)):
        if len(document) > 1:
            row, target = (torch.tensor([tokens], device=device) for tokens in (document, label))
            own = keywords[index] if keywords else {}
            logits = reference(input_ids=row, use_cache=False, **own).logits[0, :-1]
            loss = F.cross_entropy(logits, target[0, 1:], reduction="sum", ignore_index=IGNORE_INDEX)
            loss.backward()
            total += loss.item()
    return total, gradients(reference)


def assert_packed_equals_separate(
    model: Any, implementation: str = "auto", *, checkpointing: bool = False, stock: str = "eager", rtol: float = 1e-5,
    row: tuple[Tensor, PackedBatch] | None = None, of_tokens: dict[str, Tensor] | None = None, **keywords: Any,
) -> str:  # fmt: skip
    """Loss and gradients of a packed row are those of its documents one by one; returns the path.

    `of_tokens`: keywords that documents are given their part of; `keywords`: those of the packed row alone.
    """
    ids, batch = row or make_row()[::2]
    parts = of_tokens or {}
    expected_loss, expected = separate(model, ids, batch, stock, **parts)
    vision = getattr(model.config, "vision_config", None)
    before = getattr(vision, "_attn_implementation", None)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with packed_attention(model, implementation) as attention:
        assert getattr(vision, "_attn_implementation", None) == before, "only the text model is switched"
        loss = packed(model, ids, batch, **parts, **keywords)
        loss.backward()
    assert abs(loss.item() - expected_loss) <= 1e-5
    assert_gradients_close(gradients(model), expected, rtol=rtol)
    return attention.path


def packed(model: Any, ids: Tensor, batch: PackedBatch, **keywords: Any) -> Tensor:
    """The loss of a packed row: a mean over tokens, of rows with shared prefixes the sum over the documents."""
    given = {"use_cache": False, **to_transformers_kwargs(batch), **keywords}
    logits = model(input_ids=ids, packed_batch=batch, **given).logits[0]
    losses = F.cross_entropy(logits[batch.loss_positions], batch.loss_labels, reduction="none")
    if batch.documents is not None:
        return (losses * batch.documents.loss_weights).sum()
    return losses.sum() / max(1, len(losses))


def random_row(seed: int, documents: int | None = None, longest: int = 20) -> tuple[Tensor, PackedBatch]:
    draw = random.Random(seed)
    lengths = [draw.randrange(2, longest) for _ in range(documents or draw.randrange(1, 7))]
    ids = torch.randint(3, 90, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed))
    return ids, PackedBatch.from_lengths(lengths, labels=ids)


def one_step(model: Any, ids: Tensor, batch: PackedBatch) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a packed row."""
    model.zero_grad()
    loss = packed(model, ids, batch)
    loss.backward()
    batch.clear_derived()
    return loss.item(), gradients(model)


def make_inputs(
    row: PackedBatch | int, dtype: torch.dtype, *, sinks: bool = False, head_dim: int = HEAD_DIM,
    value_dim: int | None = None, seed: int = 0, device: Any = CPU,
) -> list[Tensor]:  # fmt: skip
    """Query, key, value and perhaps sinks of a row, or of a number of tokens."""
    draw, total = torch.Generator().manual_seed(seed), row if isinstance(row, int) else row.total_tokens
    heads = ((HEADS, head_dim), (KV_HEADS, head_dim), (KV_HEADS, value_dim or head_dim))
    shapes: list[tuple[int, ...]] = [(1, count, total, size) for count, size in heads]
    shapes += [(HEADS,)] if sinks else []
    return [torch.randn(shape, generator=draw).to(device, dtype).requires_grad_() for shape in shapes]


def dense_attention(batch: PackedBatch, inputs: list[Tensor], window: int | None, softcap: float | None) -> Tensor:
    """Attention under a T x T mask in plain torch: the oracle in float64, stock's arithmetic in lower dtypes."""
    query, key, value, *sinks = inputs
    key, value = (tensor.repeat_interleave(HEADS // KV_HEADS, dim=1) for tensor in (key, value))
    scores = (query @ key.transpose(-1, -2)) * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + additive(dense_mask(batch, window, CPU), scores.dtype)
    if sinks:
        column = sinks[0].view(1, -1, 1, 1).expand(1, HEADS, batch.total_tokens, 1)
        scores = torch.cat([scores, column], dim=-1)
    probabilities = scores.softmax(-1)[..., : batch.total_tokens]
    return (probabilities @ value).transpose(1, 2)


def run(function: Any, inputs: list[Tensor]) -> list[Tensor]:
    out = function(inputs)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out, *torch.autograd.grad(out, inputs, upstream)]


def errors(actual: list[Tensor], exact: list[Tensor]) -> Tensor:
    return torch.stack([(a.double() - e).norm() / e.norm() for a, e in zip(actual, exact, strict=True)])


def relative_errors(actual: tuple[float, dict[str, Tensor]], exact: tuple[float, dict[str, Tensor]]) -> Tensor:
    """Of the loss, and of all gradients together in the 2-norm."""
    assert actual[1].keys() == exact[1].keys()
    pairs = [(actual[1][name].cpu().double(), gradient.cpu().double()) for name, gradient in exact[1].items()]
    distance = torch.stack([(ours - gradient).norm() for ours, gradient in pairs]).norm()
    size = torch.stack([gradient.norm() for _, gradient in pairs]).norm()
    return torch.tensor([abs(actual[0] - exact[0]) / abs(exact[0]), distance / size])


def attend(layer: Any, window: int | None = None, softcap: float | None = None, device: Any = CPU) -> Any:
    """The attention of a layer as a function of query, key, value and perhaps sinks, all on the host."""

    def call(tensors: list[Tensor]) -> Tensor:
        query, key, value, *sinks = (tensor.to(device) for tensor in tensors)
        asked = AttentionCall(query, key, value, SCALE, window, sinks[0] if sinks else None, softcap)
        out: Tensor = layer.attend(asked).cpu()
        return out

    return call


def assert_as_near_as_dense(
    batch: PackedBatch, ours: Any, window: int | None, softcap: float | None = None, *, dtype: torch.dtype,
    floor: float, **drawn: Any,
) -> None:  # fmt: skip
    """Output and gradients are within twice the error that dense attention in the same dtype has against float64."""

    def dense(tensors: list[Tensor]) -> Tensor:
        return dense_attention(batch, tensors, window, softcap)

    actual, budget = [], []
    for seed in range(4):  # the gradient of the sinks has four numbers: one draw says little about its error
        inputs = make_inputs(batch, dtype, seed=seed, **drawn)
        exact = run(dense, [tensor.detach().double().requires_grad_() for tensor in inputs])
        actual.append(errors(run(ours, inputs), exact))
        budget.append(errors(run(dense, inputs), exact))
    mean_error, mean_budget = (torch.stack(rows).square().mean(0).sqrt() for rows in (actual, budget))
    assert (mean_error <= 2 * mean_budget + floor).all(), (mean_error, mean_budget)


def assert_as_plain(static: Any, inputs: Any, kind: str, name: str, *, device: str = "cpu", dtype: Any = None) -> None:
    """Output and gradients of a row in its static form, whose tail has no loss, are those of the plain row."""
    plain, how, tokens = inputs["packed_batch"], STATIC_KINDS[kind], sum(inputs["packed_batch"].seq_lengths)
    row, window = max(static.bucket.tokens, plain.total_tokens), how.get("window")
    layer, alone = (prepared(name, b, *([window] if window else []), device=device) for b in (static.batch, plain))
    tensors = make_inputs(row, dtype or torch.float64, sinks="sinks" in how, device=device)
    upstream = torch.zeros(1, row, HEADS, HEAD_DIM, dtype=tensors[0].dtype, device=device)
    draw = torch.Generator().manual_seed(1)
    upstream[:, :tokens] = torch.randn(1, tokens, HEADS, HEAD_DIM, generator=draw).to(upstream)
    results = []
    for one, row in ((layer, static.bucket.tokens), *[(alone, plain.total_tokens)] * 2):
        cut = [t.detach()[:, :, :row].requires_grad_() if t.dim() == 4 else t for t in tensors]
        out = one.attend(AttentionCall(*cut[:3], SCALE, window, sinks=cut[3] if len(cut) > 3 else None))
        grads = torch.autograd.grad(out, cut, upstream[:, :row].contiguous())
        assert all(grad.isfinite().all() for grad in grads)
        assert all(not grad[:, :, tokens:].any() for grad in grads[:3])
        results.append([out[:, :tokens], *(grad[:, :, :tokens] if grad.dim() == 4 else grad for grad in grads)])
    for ours, once, again in zip(*results, strict=True):
        # Where two plain calls differ, by the order of atomic additions, so may this one.
        budget = 2 * (again - once).norm() + 4 * torch.finfo(once.dtype).eps * (1 + once.norm())
        assert (ours - once).norm() <= budget


def check_operators(name: str, arguments: tuple[Any, ...]) -> None:
    operators = torch.ops.fastpack
    torch.library.opcheck(getattr(operators, f"{name}_with_gradient").default, arguments)
    inner = [value.detach() if isinstance(value, Tensor) else value for value in arguments]
    torch.library.opcheck(getattr(operators, name).default, inner)
    out, lse = getattr(operators, name)(*inner)
    torch.library.opcheck(getattr(operators, f"{name}_backward").default, (torch.ones_like(out), out, lse, *inner))


def snapshot(model: Any) -> dict[str, Any]:
    """Everything that a switch could leave behind on a model."""
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")
    return {
        "classes": [type(module) for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "hooks": [len(getattr(module, name)) for module in model.modules() for name in hooks],
        "forwards": [module.__dict__.get("forward") for module in model.modules()],
        "implementation": model.config._attn_implementation,
        "text": model.config.get_text_config()._attn_implementation,
    }
