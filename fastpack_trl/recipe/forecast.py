"""Forecast the memory per step of a YAML on an absent GPU, by kind, from the model on the meta device.

Weights, gradients and optimizer are counted by shape, activations by the passes of the plan (`probe.py`), the head by
its tiles. The rest, what the allocator holds beside the tensors, is a constant and a share, fitted on one model's rows.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from fastpack_trl.errors import describe, preparing
from fastpack_trl.recipe.arguments import Arguments
from fastpack_trl.recipe.gpus import Gpu, as_if_on
from fastpack_trl.recipe.make_trainer import short_run_arguments

_GIB = 2**30
_NF4_BLOCK, _NESTED_BLOCK = 64, 256  # numbers per scale; scales per scale of scales
CONTEXT_GIB = 0.8
"""CUDA's context and kernels, outside torch's allocator: 0.74 to 0.82 on an H200."""
RESERVE_GIB, RESERVE_SHARE = 0.12, 0.03
"""Memory of the allocator on top of its tensors: a constant, and a share of what a step allocates and frees."""
_ROOM = 0.98  # share of a device that the longest row may take
_ROW = 256  # tokens: rows are multiples
_LONGEST = 2**20


@dataclass(frozen=True)
class Model:
    """Sizes of a model, in bytes.

    Attributes:
        module: on ``meta``.
        frozen: bytes of frozen weights.
        numbers, trained: numbers and bytes of those that are trained.
        transient: bytes of the largest frozen weight that is made dense for one use.
        vocabulary, hidden: sizes of its head.
    """

    module: Any
    frozen: float
    numbers: int
    trained: float
    transient: int
    vocabulary: int
    hidden: int

    @property
    def weights(self) -> float:
        return self.frozen + self.trained


@dataclass(frozen=True)
class Need:
    """Bytes of one row.

    Attributes:
        parts: by what holds them.
        plan: of the activations.
    """

    parts: dict[str, float]
    plan: Any

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def moving(self) -> float:
        """Bytes that a step allocates and frees; a CUDA graph holds them a second time."""
        return self.parts["activations"] + self.parts["head and loss"]


@dataclass
class Forecast:
    """A model on one kind of GPU.

    Attributes:
        fixed: bytes that no row changes.
        run: stands in for the `Run` there.
        costs: `LayerCosts`; None where activations are not known.
    """

    gpu: Gpu
    model: Model
    fixed: dict[str, float]
    attention: str
    features: dict[str, str]
    run: Any
    costs: Any = None
    unknown: str = ""

    def need(self, tokens: int, longest: int, *, deepest: bool = False, level: Any = None) -> Need:
        """Return the memory of a row: under this GPU's plan, the plan of least memory, or all layers at `level`."""
        from fastpack_trl.checkpointing.plan import Level, Planner
        from fastpack_trl.run.budget import HEAD_BYTES, MARGIN
        from fastpack_trl.step.head import TILE_ELEMENTS

        head = tokens * self.model.hidden * HEAD_BYTES
        tile = min(TILE_ELEMENTS, tokens * self.model.vocabulary) * 2
        budget = max(0, int((self.gpu.gib * _GIB - sum(self.fixed.values())) * MARGIN) - head)
        planner = Planner(self.costs, budget, tokens, longest)
        if deepest or level is not None:
            plan = planner.plan([Level.OFFLOAD if level is None else level] * planner.layers)
        else:
            plan = planner.best()
        moving = {"activations": float(plan.predicted), "head and loss": float(head + tile)}
        reserve = RESERVE_GIB * _GIB + RESERVE_SHARE * sum(moving.values())
        return Need(self.fixed | moving | {"allocator's reserve": reserve}, plan)

    def longest_row(self) -> int:
        """Return the tokens of the longest row that fits with layer inputs in host memory; 0 where none does."""

        def exceeds(count: int) -> bool:
            tokens = count * _ROW
            return self.need(tokens, tokens, deepest=True).total > self.gpu.gib * _GIB * _ROOM

        return bisect(range(1, _LONGEST // _ROW + 1), 0, key=exceeds) * _ROW if self.costs is not None else 0

    def graphs_refused(self, need: Need) -> str:
        """Return why CUDA graphs would not be recorded under a plan, by the feature's own rule."""
        from fastpack_trl.capture.feature import why_not
        from fastpack_trl.checkpointing.plan import Level

        step, plan = self.run.step, need.plan
        step.offloads, step.activation_bytes = Level.OFFLOAD in plan.levels, need.moving
        step.activations_left = plan.left if plan.keeps_all else 0
        with as_if_on(self.gpu.capability):
            return why_not(self.run)


def elsewhere(config: str, folder: str, flags: Sequence[str]) -> tuple[Arguments, str]:
    """Return the arguments of a YAML for an absent GPU, and its precision: ``bf16``, ``fp16`` or ``fp32``."""
    # Without it transformers refuses bf16 on a machine that lacks such a GPU.
    arguments = short_run_arguments(config, folder, *flags, "--use_cpu", "True")
    training = arguments.training
    return arguments, "fp16" if training.fp16 else "bf16" if training.bf16 else "fp32"


def forecast(arguments: Arguments, gpus: Sequence[Gpu], precision: str = "bf16") -> dict[str, Any]:
    """Return for each GPU the memory of a step by part, what is on, the longest row that fits and what to change.

    No weights and no data are read: rows are as long as `max_length` lets them be. Full replicas: what is sharded
    across processes is not counted.

    Args:
        precision: ``bf16``, ``fp16`` or ``fp32``, of the run.
    """
    from fastpack_trl.checkpointing.plan import describe as levels_of
    from fastpack_trl.run.budget import row_tokens

    training, seen = arguments.training, dict[Any, Any]()
    most = getattr(training, "max_length", None)
    merges = getattr(training, "merge_accumulation", "auto") != "off"
    row = None if most is None else row_tokens(training, most, most, merges=merges)
    report: dict[str, Any] = {"row_tokens": row, "gpus": {}}
    for one in [predict(arguments, gpu, precision, seen) for gpu in gpus]:
        facts: dict[str, Any] = {"gib": one.gpu.gib, "attention": one.attention, "features": one.features}
        if one.costs is None or row is None:
            parts = one.fixed
            facts["unknown"] = one.unknown or "max_length is not set: rows may have any length"
        else:
            need = one.need(row, row)
            parts = need.parts
            facts |= {"levels": levels_of(need.plan.levels), "longest_row": one.longest_row()}
            if one.features["cuda_graph"].startswith("on"):
                if why := one.graphs_refused(need):
                    one.features["cuda_graph"] = f"off: {why}"
                else:
                    facts["graphs_gib"] = need.moving / _GIB
        facts["parts_gib"] = {name: size / _GIB for name, size in parts.items()}
        facts["total_gib"] = sum(facts["parts_gib"].values())
        facts["fits"] = facts["total_gib"] <= one.gpu.gib
        if not facts["fits"]:
            facts["change"] = _change(arguments, one, facts.get("longest_row", 0), precision)
        report["gpus"][one.gpu.name] = facts
    return report


def predict(arguments: Arguments, gpu: Gpu, precision: str = "bf16", seen: dict[Any, Any] | None = None) -> Forecast:
    """Return the forecast for one kind of GPU; `seen` caches what several kinds share."""
    import torch

    from fastpack_trl.attention.backends import BACKENDS
    from fastpack_trl.packing.documents import PADDED_DOCUMENTS
    from fastpack_trl.recipe import probe

    seen = {} if seen is None else seen
    model = seen["model"] = seen.get("model") or model_of(arguments)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    fixed = fixed_bytes(model, arguments.training) | {"CUDA context": CONTEXT_GIB * _GIB}
    with as_if_on(gpu.capability):
        features, path = attention_of(model.module, gpu, dtype, arguments.training.packed_attention)
        run = stand_in(arguments, model.module, features, path, precision)
        on = paths(arguments, model.module, features, path, precision, run)
        result = Forecast(gpu, model, fixed, path, on, run)
        if arguments.training.packed_attention == "auto" and path in ("per_document", "dense"):
            on["packed_attention"] = f"{path}: {BACKENDS['varlen'].refuses(features)}"
        if path == PADDED_DOCUMENTS:
            result.unknown = f"documents are padded one by one ({features.gap or 'no backend takes them'})"
            return result
        lora, moe = (on.get(name, "").startswith("on") for name in ("lora", "moe"))
        key = (path, lora, moe)
        if key not in seen:
            # The passes leave fake tensors in the module: another backend needs a new one on `meta`.
            module = (model_of(arguments) if "probed" in seen else model).module
            seen["probed"] = True
            try:
                costs = probe.layer_costs(module, features, path, lora=lora, moe=moe, transient=model.transient)
                seen[key] = costs, ""
            except (AttributeError, LookupError, TypeError, ValueError, RuntimeError, NotImplementedError) as error:
                seen[key] = None, f"activations are not counted: {describe(error).splitlines()[0]}"
        result.costs, result.unknown = seen[key]
    return result


def fixed_bytes(model: Model, training: Any) -> dict[str, float]:
    """Return the memory that does not depend on rows: weights, gradients and the optimizer's state."""
    from fastpack_trl.run.budget import state_bytes

    width = int(model.trained / max(1, model.numbers))
    return {
        "frozen weights": model.frozen, "trained weights": model.trained, "gradients": model.trained,
        "optimizer": model.numbers * state_bytes(training.optim, width),
    }  # fmt: skip


def attention_of(module: Any, gpu: Gpu, dtype: Any, asked: str = "auto") -> tuple[Any, str]:
    """Return the features of a model on a GPU, and which of the installed backends is chosen there."""
    from fastpack_trl.attention.backends import AUTO
    from fastpack_trl.model.facts import read_features
    from fastpack_trl.packing.documents import PADDED_DOCUMENTS

    features = replace(read_features(module, dtype), device_type="cuda", capability=gpu.capability, compute_dtype=dtype)
    named = [backend for backend in AUTO if backend.name == asked]
    backends = named or [backend for backend in AUTO if backend.considered(features)]
    right = (backend.name for backend in backends if not features.gap and not backend.refuses(features))
    return features, next(right, PADDED_DOCUMENTS)


def stand_in(arguments: Arguments, model: Any, features: Any, attention: str, precision: str) -> Any:
    """Return a stand-in for the `Run` of one process on such a device, to ask features about it."""
    import torch

    from fastpack_trl.attention.backends import BACKENDS

    backend, args = BACKENDS.get(attention), copy(arguments.training)
    args.bf16, args.fp16 = precision == "bf16", precision == "fp16"
    padded = "padded rows have another shape for every batch"
    return SimpleNamespace(
        settings=args, args=args, model=model, device=torch.device("cuda", 0), compute_dtype=features.compute_dtype,
        training=True, is_sharded=False, is_fsdp2=False, is_deepspeed=False, packs=backend is not None,
        loss_is_ours=True, counts_documents=True, keeping=nullcontext, experts_refuse_capture=str,
        choice=SimpleNamespace(refuses_compile=backend.refuses_compile if backend else padded),
        refuses_static=lambda bucket: backend.refuses_static(bucket, features) if backend else padded,
        step=SimpleNamespace(offloads=False, activation_bytes=0, activations_left=None),
        trainer=SimpleNamespace(
            accelerator=SimpleNamespace(num_processes=1, state=None), model_accepts_loss_kwargs=True
        ),
    )  # fmt: skip


def paths(
    arguments: Arguments, model: Any, features: Any, attention: str, precision: str, run: Any = None
) -> dict[str, str]:
    """Return how each feature would run, by entering it on the model briefly; call it inside `as_if_on`."""
    from fastpack_trl.capture.feature import unavailable
    from fastpack_trl.capture.feature import why_not as why_not_captured
    from fastpack_trl.compile.layer_compile import why_not as why_not_compiled
    from fastpack_trl.lora.feature import lora
    from fastpack_trl.model.precision import emulates_bf16
    from fastpack_trl.moe.feature import moe

    run, on = run or stand_in(arguments, model, features, attention, precision), {"packed_attention": attention}

    def set_status(name: str, status: str, path: str, reason: str = "", holds: object = None) -> None:
        on[name] = status if status == "on" else f"{status}: {reason}"

    run.set_status = set_status
    with moe(run), lora(run):
        refusals = {
            "layer_compile": why_not_compiled(run), "cuda_graph": unavailable(run.device) or why_not_captured(run),
        }  # fmt: skip
    is_emulated = run.args.bf16 and emulates_bf16(run.device)
    if "lora" in on and arguments.model.load_in_4bit and is_emulated:
        on["lora"] = "stock: bf16 is emulated: fp16=True is fast"  # the layers are not quantized here
    on |= {name: f"off: {why}" if why else "on, where it pays back" for name, why in refusals.items()}
    return on | ({"precision": "bf16 is emulated: fp16: true, bf16: false is faster"} if is_emulated else {})


def _change(arguments: Arguments, short: Forecast, longest: int, precision: str) -> str:
    """Return the first of the usual remedies that makes it fit, with its figure."""
    if longest:
        batch = arguments.training.per_device_train_batch_size
        less = "per_device_train_batch_size: 1 and " if batch > 1 else ""
        return f"{less}max_length: {longest} at most"
    options, training, tried = copy(arguments.model), copy(arguments.training), []
    experts = any(name.endswith(".experts.gate_up_proj") for name, _ in short.model.module.named_parameters())
    for name, value in (("dtype", "bfloat16"), ("use_peft", True), ("load_in_4bit", True)):
        if getattr(options, name) == value or (name == "dtype" and not short.gpu.has_bf16):
            continue
        options = replace(options, **{name: value})
        tried.append(f"{name}: {str(value).lower()}")
        if name == "load_in_4bit" and experts and training.moe_quantize_experts != "on":
            training.moe_quantize_experts = "on"
            tried.append('moe_quantize_experts: "on"')
        other = predict(replace(arguments, model=options, training=training), short.gpu, precision)
        if row := other.longest_row():
            return f"{', '.join(tried)}: rows of up to {row:,} tokens fit"
    return "a smaller model, or a larger GPU"


def model_of(arguments: Arguments) -> Model:
    """Return the model on meta with its adapters."""
    import torch
    import transformers
    from peft import get_peft_model
    from trl import get_peft_config

    options, training = arguments.model, arguments.training
    with preparing():
        config = transformers.AutoConfig.from_pretrained(
            options.model_name_or_path, revision=options.model_revision, trust_remote_code=training.trust_remote_code
        )
    dtype = getattr(torch, str(options.dtype), None) or getattr(config, "dtype", None) or torch.float32
    kind = "SequenceClassification" if arguments.method.command == "reward" else "CausalLM"
    with preparing(), torch.device("meta"):
        model: Any = getattr(transformers, f"AutoModelFor{kind}").from_config(config, dtype=dtype)
    head = model.get_output_embeddings()
    packed: dict[int, float] = {}  # bytes of a number
    if options.load_in_4bit or options.load_in_8bit:
        size = _nf4(bool(options.use_bnb_nested_quant)) if options.load_in_4bit else 1.0
        linear = (m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head)
        packed = {id(module.weight): size for module in linear}
    if training.moe_quantize_experts == "on":
        ends = (".experts.gate_up_proj", ".experts.down_proj")
        packed |= {id(p): _nf4(nested=True) for name, p in model.named_parameters() if name.endswith(ends)}
    peft = get_peft_config(options)
    if peft is not None:
        with preparing():
            model = get_peft_model(model, peft)
    frozen, numbers, size, transient = 0.0, 0, 0.0, 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            numbers += parameter.numel()
            # TRL makes the adapters of a quantised base bf16.
            size += parameter.numel() * (2 if options.load_in_4bit else parameter.element_size())
        else:
            frozen += parameter.numel() * packed.get(id(parameter), float(parameter.element_size()))
            transient = max(transient, parameter.numel() * 2 if id(parameter) in packed else 0)
    text = config.get_text_config()
    return Model(model, frozen, numbers, size, transient, int(text.vocab_size), int(text.hidden_size))


def _nf4(nested: bool) -> float:
    """Return the bytes of a number: half of one, and a scale per block: fp32, or one byte and an fp32 per 256."""
    scale = 1 + 4 / _NESTED_BLOCK if nested else 4
    return 0.5 + scale / _NF4_BLOCK
