"""Forecast the memory per step of a YAML on an absent GPU, by kind, from a model without memory.

The parameters are fake tensors, whose operators compute shapes only, and attention runs the fake kernel of the backend
that the GPU would get. Weights, gradients and optimizer are counted by shape, activations by the passes of the plan,
the head by its tiles. The rest, the allocator's overhead, is a constant and a share, fitted on one model's rows.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from copy import copy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from peft import get_peft_model
from torch import nn
from trl import get_peft_config

from fastpack_trl.attention.backends import BACKENDS, choose
from fastpack_trl.attention.install import PackedAttention, backend_installed
from fastpack_trl.checkpointing.budget import HEAD_BYTES, MARGIN, MARGIN_WITHOUT_RETRY, limits, row_tokens, state_bytes
from fastpack_trl.checkpointing.plan import LayerCost, Level, Plan
from fastpack_trl.checkpointing.plan import describe as levels_of
from fastpack_trl.checkpointing.planned import AMPLE
from fastpack_trl.checkpointing.trace import layer_costs, probe_batches
from fastpack_trl.config import Settings
from fastpack_trl.errors import UserError, describe, preparing
from fastpack_trl.features import feature, moe
from fastpack_trl.kernels.gate_form import passes_at_bounds
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.checkpoint_seam import checkpointable_layers
from fastpack_trl.model.facts import UNREADABLE, ModelFeatures, read_features, window_of
from fastpack_trl.model.precision import emulates_bf16
from fastpack_trl.model.sharded import Ranks
from fastpack_trl.model.upstream import FakeTensorMode
from fastpack_trl.packing.documents import PADDED_DOCUMENTS
from fastpack_trl.recipe.arguments import Arguments
from fastpack_trl.recipe.gpus import Gpu, as_if_on
from fastpack_trl.report import FeatureReport
from fastpack_trl.run import Choice, StepServices
from fastpack_trl.step.head import TILE_ELEMENTS

_GIB = 2**30
CONTEXT_GIB = 0.8
"""CUDA's context and kernels, outside torch's allocator: 0.74 to 0.82 on an H200."""
NCCL_GIB = 0.8
"""NCCL's buffers for the collectives of one group: 0.82 on two H200s."""
RESERVE_GIB, RESERVE_SHARE = 0.12, 0.03
"""Memory of the allocator on top of its tensors: a constant, and a share of what a step allocates and frees."""
_ROOM = 0.98  # share of a device that the longest row may take
_ROW = 256  # tokens: rows are multiples
LONGEST = 2**20
"""Tokens of the longest row that is tried."""
_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")


@dataclass(frozen=True)
class Model:
    """A model with its adapters, whose parameters are fake tensors of `mode`.

    Attributes:
        text: config of its language model.
        frozen: bytes of frozen weights.
        numbers, trained: numbers and bytes of those that are trained; `width` of each in matmuls.
        transient: bytes of the largest frozen weight that is made dense for one use.
        whole: bytes of frozen weights that FSDP 2 does not shard: those in four bits, unless stored as floats.
        layers, gathered: bytes of all layers and, with gradients, of what is gathered at a time under FSDP 2.
    """

    module: Any
    mode: Any
    text: Any
    frozen: float
    numbers: int
    trained: float
    transient: int
    width: int
    whole: float
    layers: float
    gathered: float


def model_of(arguments: Arguments, dtype: torch.dtype | None = None) -> Model:
    """Return the model of a run, of which only the config is read; `dtype` replaces that of the run."""
    options, training, mode = arguments.model, arguments.training, FakeTensorMode(allow_non_fake_inputs=True)
    kind = "SequenceClassification" if arguments.method.command == "reward" else "CausalLM"
    with preparing():
        config = transformers.AutoConfig.from_pretrained(
            options.model_name_or_path, revision=options.model_revision, trust_remote_code=training.trust_remote_code
        )
        images = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        kind = "ImageTextToText" if images and kind == "CausalLM" else kind
        dtype = dtype or getattr(torch, str(options.dtype), None) or getattr(config, "dtype", None) or torch.float32
        with torch.device("meta"):
            model: Any = getattr(transformers, f"AutoModelFor{kind}").from_config(config, dtype=dtype)
        head, packed = model.get_output_embeddings(), dict[int, float]()  # bytes of a number
        if options.load_in_4bit or options.load_in_8bit:
            size = _nf4(bool(options.use_bnb_nested_quant)) if options.load_in_4bit else 1.0
            linear = (m for m in model.modules() if isinstance(m, nn.Linear) and m is not head)
            packed = {id(module.weight): size for module in linear}
        if training.moe_quantize_experts == "on":
            packed |= {id(p): _nf4(nested=True) for name, p in model.named_parameters() if name.endswith(_EXPERTS)}
        if (peft := get_peft_config(options)) is not None:
            model = get_peft_model(model, peft, low_cpu_mem_usage=True)  # on meta: drawing numbers takes seconds
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    storage = getattr(torch, str(options.bnb_4bit_quant_storage), torch.uint8)
    stays_whole = {id(p) for p in frozen if options.load_in_4bit and id(p) in packed and not storage.is_floating_point}
    width, layers = 2 if training.bf16 or training.fp16 else 4, checkpointable_layers(model)

    def gathered(module: nn.Module, *, gradients: bool = True) -> float:
        own = [p for p in module.parameters() if id(p) not in stays_whole]
        weights = sum(p.numel() * packed.get(id(p), min(p.element_size(), width)) for p in own)
        return weights + sum(p.numel() * width for p in own if p.requires_grad and gradients)

    result = Model(
        model, mode, config.get_text_config(),
        frozen=sum(p.numel() * packed.get(id(p), float(p.element_size())) for p in frozen),
        numbers=sum(p.numel() for p in trained),
        # TRL makes the adapters of a quantized base bf16.
        trained=sum(p.numel() * (2 if options.load_in_4bit else p.element_size()) for p in trained),
        transient=max((p.numel() * 2 for p in frozen if id(p) in packed), default=0),
        width=width, whole=sum(p.numel() * packed[id(p)] for p in frozen if id(p) in stays_whole),
        layers=sum(gathered(layer, gradients=False) for layer in layers),
        # torch's `FSDPParamGroup`, measured on two H200s: while a layer runs backward, the weights of the layer before
        # are gathered and the gradients of the layer after reduced. Embeddings and head have their own units.
        gathered=gathered(model) - sum(map(gathered, layers)) + 2 * max(map(gathered, layers), default=0.0),
    )  # fmt: skip
    _make_fake(model, mode)
    return result


def _make_fake(model: nn.Module, mode: Any) -> None:
    """Give the modules fake tensors on the CPU for those on ``meta``, which PEFT needs; tied ones stay tied."""
    tensors, made = [*model.parameters(), *model.buffers()], dict[int, Any]()
    with mode:
        for tensor in tensors:
            empty, is_weight = torch.empty_like(tensor, device="cpu"), isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_weight else empty
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: made[id(tensor)] for name, tensor in held.items() if tensor is not None})


def _nf4(nested: bool) -> float:
    """Return the bytes of a number: half of one, and a scale per 64: fp32, or one byte and an fp32 per 256 scales."""
    return 0.5 + (1 + 4 / 256 if nested else 4) / 64


def costs_of_layers(of: Model, run: Any) -> list[LayerCost]:
    """Return what each layer of a model keeps in a run (`stand_in`), with the features that are on there."""
    passes_at_bounds()  # computed from a tensor with values, once
    # Made with values. One document per call would read its length on the host: two run the operator.
    model, dtype = of.module, run.compute_dtype
    batches = probe_batches(model, documents=2 if run.choice.path == "per_document" else 1)
    installed = backend_installed(model, PackedAttention(run.choice, run.features))
    autocast = torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32)
    # torch's fake kernel takes bf16 only; this one saves the same tensors.
    grouped = patch_attribute(nn.functional, "grouped_mm", lambda a, b, **_: a @ b[0])
    with ExitStack() as stack, installed, grouped:
        for name in ("moe", "lora", "fused_layers"):  # outside of the mode: gates are read from values
            if run.on.get(name) == "on":
                feature(name).enter(run, stack)
        stack.enter_context(of.mode)
        stack.enter_context(autocast)
        layers = checkpointable_layers(model)
        last = {_kind_of(layer): index for index, layer in enumerate(layers)}
        return layer_costs(model, layers, batches, stand_ins=[last[_kind_of(layer)] for layer in layers])


def _kind_of(layer: nn.Module) -> Any:
    """Return what makes a layer another kind of layer: its modules, their windows, shapes and types of its tensors."""
    modules = list(layer.modules())
    attentions = [module for module in modules if hasattr(module, "config") and hasattr(module, "layer_idx")]
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    shapes = [(name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors]
    return tuple(map(type, modules)), tuple(map(window_of, attentions)), tuple(shapes)


@dataclass
class Forecast:
    """A model on one kind of GPU."""

    gpu: Gpu
    model: Model
    fixed: dict[str, float]
    """Bytes that no row changes."""
    run: Any
    """Stands in for the `Run` there."""
    costs: list[LayerCost] | None = None
    """Of each layer; None if the activations are `unknown`."""
    unknown: str = ""

    def need(self, tokens: int, longest: int, level: Level | None = None) -> tuple[dict[str, float], Plan]:
        """Return the bytes of a row by what holds them: under this GPU's plan, or with all layers at `level`."""
        assert self.costs is not None
        head = tokens * self.model.text.hidden_size * HEAD_BYTES
        tile = min(TILE_ELEMENTS, tokens * self.model.text.vocab_size) * 2
        free = self.gpu.gib * _GIB - sum(self.fixed.values())
        budget = max(0, int(free * (MARGIN if self.gpu.processes == 1 else MARGIN_WITHOUT_RETRY)) - head)
        plan = Plan.keeping_all(self.costs, tokens, longest, budget, dense=self.model.transient)
        plan = plan.best() if level is None else plan.last_kept(0, level)
        moving = {"activations": float(plan.predicted), "head and loss": float(head + tile)}
        if self.gpu.shards and plan.keeps_all and self.model.layers * AMPLE <= plan.left:
            moving["layers gathered once"] = self.model.layers
        reserve = RESERVE_GIB * _GIB + RESERVE_SHARE * sum(moving.values())
        return self.fixed | moving | {"allocator's reserve": reserve}, plan

    def longest_row(self) -> int:
        """Return the tokens of the longest row that fits with layer inputs in host memory; 0 if none does."""
        room, counts = self.gpu.gib * _GIB * _ROOM, range(1, LONGEST // _ROW + 1 if self.costs is not None else 1)
        return _ROW * bisect(counts, room, key=lambda n: sum(self.need(n * _ROW, n * _ROW, Level.OFFLOAD)[0].values()))


def forecast(arguments: Arguments, gpus: Sequence[Gpu]) -> dict[str, Any]:
    """Return for each GPU the memory of a step by part, the features, the longest row that fits and a suggestion.

    No weights and no data are read: rows are as long as `max_length` or `image_row_tokens` lets them be.
    """
    training, seen, limit = arguments.training, dict[Any, Any](), limits(arguments.training)
    most, images = getattr(training, limit, None), limit != "max_length"
    report: dict[str, Any] = {"row_tokens": 0, "max_length": most, "gpus": {}}
    for gpu in gpus:
        merges = getattr(training, "merge_accumulation", "auto") != "off" and not gpu.shards and not images
        row = None if most is None else row_tokens(training, most, most, merges=merges)
        report["row_tokens"] = row and max(row, report["row_tokens"])
        one = predict(arguments, gpu, seen)
        parts, features = one.fixed, one.run.on
        features |= {"vision_rows": "on; the tower, whose memory grows with images, is not counted"} if images else {}
        facts = {"gib": gpu.gib, "row_tokens": row, "attention": one.run.choice.path, "features": features}
        if one.costs is None or row is None:
            facts["unknown"] = one.unknown or "max_length is not set: rows may have any length"
        else:
            parts, plan = one.need(row, row)
            facts |= {"levels": levels_of(plan.levels), "longest_row": one.longest_row()}
            moving = parts["activations"] + parts["head and loss"]  # a graph holds them a second time
            if features["cuda_graph"].startswith("on"):
                one.run.step.offloads, one.run.step.activation_bytes = Level.OFFLOAD in plan.levels, moving
                one.run.step.activations_left = plan.left if plan.keeps_all else 0
                with as_if_on(gpu.capability):
                    why = feature("cuda_graph").why_off(one.run)
                features |= {"cuda_graph": f"off: {why}"} if why else {}
                facts |= {} if why else {"graphs_gib": moving / _GIB}
        facts["parts_gib"] = {name: size / _GIB for name, size in parts.items()}
        facts["total_gib"] = sum(parts.values()) / _GIB
        facts["fits"] = facts["total_gib"] <= gpu.gib and not _refuses_fsdp2(arguments, gpu)
        if not facts["fits"]:
            facts["change"] = _change(arguments, one, seen)
        report["gpus"][gpu.title] = facts
    return report


def predict(arguments: Arguments, gpu: Gpu, seen: dict[Any, Any] | None = None) -> Forecast:
    """Return the forecast for one kind of GPU; `seen` caches what several kinds share."""
    seen = {} if seen is None else seen
    model = seen["model"] = seen.get("model") or model_of(arguments)
    run = stand_in(arguments, model.module, gpu)
    result = Forecast(gpu, model, fixed_bytes(model, arguments, gpu), run)
    if gpu.shards and model.whole:
        run.on["fsdp2"] = "each GPU has all 4-bit weights; bnb_4bit_quant_storage: bfloat16 shards them"
    result.unknown = _refuses_fsdp2(arguments, gpu)
    if run.choice.path not in BACKENDS:
        result.unknown = f"activations are counted for packed attention only ({run.choice.reason})"
    if result.unknown:
        return result
    if gpu.shards and model.module.dtype != run.compute_dtype:
        # Gathered weights have the dtype of matmuls: layers keep no casts of them.
        model = seen["cast"] = seen.get("cast") or model_of(arguments, run.compute_dtype)
        run = stand_in(arguments, model.module, gpu)
    if (key := (model.module.dtype, run.choice.path, *map(run.on.get, ("lora", "moe", "fused_layers")))) not in seen:
        try:
            with as_if_on(gpu.capability):
                seen[key] = costs_of_layers(model, run), ""
        except (*UNREADABLE, NotImplementedError) as error:
            seen[key] = None, f"activations are not counted: {describe(error).splitlines()[0]}"
    result.costs, result.unknown = seen[key]
    return result


def _refuses_fsdp2(arguments: Arguments, gpu: Gpu) -> str:
    quantized = arguments.model.load_in_8bit or arguments.training.moe_quantize_experts == "on"
    return "FSDP 2 does not shard 8-bit weights and experts in 4 bits: use DDP" if gpu.shards and quantized else ""


def fixed_bytes(model: Model, arguments: Arguments, gpu: Gpu) -> dict[str, float]:
    """Return the memory that does not depend on rows: weights, gradients, the optimizer's state, and what runs them."""
    training, shards = arguments.training, gpu.processes if gpu.shards else 1
    # accelerate's `fsdp2_prepare_model` makes trained weights fp32 under mixed precision, but not beside 4-bit weights.
    upcast = gpu.shards and model.width == 2 and not arguments.model.load_in_4bit
    width = 4 if upcast else int(model.trained / max(1, model.numbers))
    trained, whole = model.numbers * width / shards, model.whole if gpu.shards else 0.0
    # FSDP 2 shards the gradients that several micro-batches accumulate only after the last one.
    options = getattr(training.accelerator_config, "gradient_accumulation_kwargs", None) or {}
    accumulates = gpu.shards and training.gradient_accumulation_steps > 1 and not options.get("sync_each_batch")
    return {
        "frozen weights": whole + (model.frozen - whole) / shards, "trained weights": trained,
        "gradients": model.numbers * model.width if accumulates else trained,
        "optimizer": model.numbers * state_bytes(training.optim, width) / shards,
        "gathered layers": model.gathered * gpu.shards,
        "DDP's buckets": trained * (gpu.processes > shards),  # a second copy of the gradients
        "CUDA context": CONTEXT_GIB * _GIB, "NCCL": NCCL_GIB * _GIB * (gpu.processes > 1),
    }  # fmt: skip


def attention_of(model: Any, gpu: Gpu, args: Any) -> tuple[ModelFeatures, Choice]:
    """Return the features of a model on a GPU, and the attention path that is chosen there, untried."""
    dtype = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else torch.float32
    features = replace(read_features(model, dtype), device_type="cuda", capability=gpu.capability, compute_dtype=dtype)
    try:
        return features, choose(args.packed_attention, features)
    except ValueError as error:  # a path by name
        return features, Choice(PADDED_DOCUMENTS, describe(error))


def stand_in(arguments: Arguments, model: Any, gpu: Gpu) -> Any:
    """Return a stand-in for the `Run` of one process on a GPU, to ask features about it.

    Also ``on``: how each feature would run there, which entering it on the model briefly has shown.
    """
    args, on = arguments.training, dict[str, str]()

    def set_status(name: str, status: str, path: str, reason: str = "", holds: object = None) -> None:
        on[name] = status if status == "on" else f"{status}: {reason}"

    with as_if_on(gpu.capability):
        features, choice = attention_of(model, gpu, args)
        backend, padded = BACKENDS.get(choice.path), "padded rows have another shape for every batch"
        on["packed_attention"] = choice.path
        if args.packed_attention == "auto" and choice.path == "per_document":
            on["packed_attention"] += f": {BACKENDS['varlen'].refuses(features)}"
        accelerator = SimpleNamespace(num_processes=gpu.processes, state=None)
        run: Any = SimpleNamespace(
            settings=Settings.of(args, training=False), args=args, model=model, ranks=Ranks(1), lora=None,
            device=torch.device("cuda", 0), training=True, loss_is_ours=True, report=FeatureReport(),
            compute_dtype=features.compute_dtype, is_sharded=gpu.shards, is_fsdp2=gpu.shards, is_deepspeed=False,
            kind=arguments.method.classes[0]._fastpack_of.kind, packs=backend is not None, set_status=set_status,
            choice=choice, features=features, on=on,
            refuses_static=lambda bucket: backend.refuses_static(bucket, features) if backend else padded,
            trainer=SimpleNamespace(accelerator=accelerator, model_accepts_loss_kwargs=True,
                _is_vision_dataset=limits(args) != "max_length"), step=StepServices(),
        )  # fmt: skip
        moe.choose_experts(run)
        with ExitStack() as stack:
            for name in ("moe", "lora"):
                feature(name).enter(run, stack)
            for name in ("fused_layers", "cuda_graph"):
                why, weighed = feature(name).why_off(run), "" if name == "fused_layers" else ", if it pays off"
                on[name] = f"off: {why}" if why else f"on{weighed}"
        if gpu.shards:
            on["cuda_graph"] = "off: FSDP 2 gathers weights in a step"
        if args.bf16 and emulates_bf16(run.device):
            if "lora" in on and arguments.model.load_in_4bit:  # the layers are not quantized here
                on["lora"] = "stock: bf16 is emulated: fp16=True is fast"
            on["precision"] = "bf16 is emulated: fp16: true, bf16: false is faster"
    return run


def _change(arguments: Arguments, short: Forecast, seen: dict[Any, Any]) -> str:
    """Return what makes it fit: shorter rows, or else another engine, more GPUs, adapters or four bits."""
    if longest := short.longest_row():
        fewer = "per_device_train_batch_size: 1 and " * (arguments.training.per_device_train_batch_size > 1)
        return f"{fewer}{limits(arguments.training)}: {longest} at most"
    for text, changed, gpu in _changes(arguments, short):
        known = seen if changed.model is arguments.model else seen.setdefault(text, {})
        with suppress(UserError):  # PEFT has no default target modules for this family, for example
            if row := predict(changed, gpu, known).longest_row():
                return f"{text}: rows of up to {row:,} tokens fit"
    return "a smaller model, or a larger GPU"


def _changes(arguments: Arguments, short: Forecast) -> Iterator[tuple[str, Arguments, Gpu]]:
    """Yield changes of a run for which not even the shortest row fits: text, arguments and GPU of each."""
    options, gpu = arguments.model, short.gpu
    training = copy(arguments.training)
    if gpu.shards and training.gradient_accumulation_steps > 1:
        training.gradient_accumulation_steps = 1
        yield "gradient_accumulation_steps: 1", replace(arguments, training=training), gpu
    for factor in (2, 4, 8, 16) if gpu.shards else (1,) if gpu.processes > 1 else ():
        several = replace(gpu, processes=factor * gpu.processes, shards=True)
        yield f"--gpus {several.processes}" if gpu.shards else "accelerate_config: fsdp2", arguments, several
    wanted: dict[str, Any] = {"use_peft": True, "load_in_8bit": False} | ({} if gpu.shards else {"load_in_4bit": True})
    wanted |= {"lora_task_type": "SEQ_CLS"} if arguments.method.command == "reward" else {}
    experts = any(name.endswith(_EXPERTS) for name, _ in short.model.module.named_parameters())
    training = copy(arguments.training)
    if packs := experts and not gpu.shards and training.moe_quantize_experts != "on":
        training.moe_quantize_experts = "on"
    for more in ({}, {"lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"] if experts else "all-linear"}):
        changed = {name: value for name, value in (wanted | more).items() if getattr(options, name) != value}
        tried = [f"{name}: {'true' if value is True else value}".replace("'", "") for name, value in changed.items()]
        text = ", ".join(tried + ['moe_quantize_experts: "on"'] * packs)
        yield text, replace(arguments, model=replace(options, **changed), training=training), gpu
