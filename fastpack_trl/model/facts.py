"""Facts of a model: its decoder, attention and windows, and whether the attention interface reaches all token mixing.

Read from the config and from attributes of the modules. A guard at run time and the packing check stand behind them.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from fastpack_trl.errors import first_reason
from fastpack_trl.model.upstream import GradientCheckpointingLayer, missing_reason
from fastpack_trl.model.walk import modules_of

# Causal attention under the names that configs use; "attention" is granitemoehybrid's.
_UNDERSTOOD_LAYERS = {"full_attention", "attention", "sliding_attention"}
# Layers of a model with mixers, "hybrid" ones that also have attention, and pointwise layers.
_MIXER_LAYERS = {"linear_attention", "conv", "mamba", "hybrid", "moe", "mlp"}
# Mixers that carry state from token to token; most have a Conv1d (GPT-2's pointwise `Conv1D` is another class).
_STATE_MODULE = re.compile(r"Mamba|SSM|Rwkv|Recurrent|GatedDelta|LightningAttention|LinearAttention|ShortConv")
# Families whose layers take the keywords of a batch and do not hand them on to attention.
_DROPS_KEYWORDS = ("nemotron", "stablelm")
_DROPOUT_NAMES = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")
UNREADABLE = (AttributeError, LookupError, TypeError, ValueError, RuntimeError)
"""Errors raised when modules or config of a model are not as expected."""
ALORA = "aLoRA adapts what follows the one invocation that it finds in a row"
KINDS = ("token_type_ids", "mm_token_type_ids", "block_sequence_ids")
"""Keywords that give the kind of each token; above 0 it is not text (PaliGemma, whose text is 1, has a gap)."""
OVER = {"eager": "fastpack_over_eager", "sdpa": "fastpack_over_torch", "flex_attention": "fastpack_over_flex"}
OVER |= {f"flash_attention_{version}": f"fastpack_over_fa{version}" for version in (2, 3, 4)}
"""Implementation of transformers -> our name over it, which tells what ordinary batches run.

No name contains "flash", "sdpa" or "flex_attention", on which transformers checks for those kernels.
"""
CONV = "causal_conv1d_fn"
SCANS = {"torch_chunk_gated_delta_rule": "gated delta rule", "mamba2_chunk_scan": "Mamba-2"}
"""Functions that carry a state along the row, with the name of their layers."""
SHORT_CONV = "short convolution"
_OTHER_SCANS = {"mamba_selective_scan", "chunk_kimi_delta_attention"}
"""Functions next to the same convolution that carry a state and cannot be replaced: Mamba 1's, Kimi's delta rule."""
_SIZES = (
    ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim"),
    ("n_groups", "num_heads", "ssm_state_size", "head_dim"),
    ("num_heads", "num_heads", "head_dim", "head_dim"),
)
"""Attributes of transformers' layers for the sizes of their scan, the most telling first."""


class Mixer(NamedTuple):
    """A kind of recurrent layer, e.g. ``"gated delta rule"``, whose functions can be replaced.

    Attributes:
        home: the module of Python that has its functions.
        repeats: the forward repeats the heads of keys before it calls them, as transformers 5.17 does.
    """

    kind: str
    home: ModuleType
    repeats: bool = False


class Scan(NamedTuple):
    """Sizes of the scan of a recurrent layer: ``Scan("gated delta rule", 16, 32, 128, 128)``.

    `key_heads` of queries and keys (Mamba-2's groups), `size` each (Mamba-2's state); `heads` of values, `width` each.
    """

    kind: str
    key_heads: int
    heads: int
    size: int
    width: int

    def flops(self, chunk: int) -> int:
        """Return the operations of the matmuls of a forward pass per token, in chunks of `chunk` tokens.

        A delta rule multiplies keys and queries with keys, both with the inverse, makes the inverse, and multiplies
        three times with a state; Mamba-2 multiplies its two matrices, them with values, and twice with a state.
        """
        if self.kind == SCANS["mamba2_chunk_scan"]:
            inside, with_state = self.key_heads * self.size + self.heads * self.width, 2
        else:
            inside, with_state = 2 * self.key_heads * self.size, 3
            inside += self.heads * (chunk // 3 + self.size + 2 * self.width)
        return 2 * (chunk * inside + with_state * self.heads * self.size * self.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFeatures:
    """The attention of one model, as the choice of a backend needs it.

    Attributes:
        implementation: transformers' implementation of the text config, e.g. ``sdpa``.
        windows: sizes of the sliding windows in tokens, the token itself included.
        head_dim: the widest of query, key and value.
        compute_dtype: of attention: the autocast dtype of the run, else that of the weights.
        capability: compute capability of the CUDA device; None elsewhere.
        gap: the reason why the attention interface cannot keep documents apart; empty if it can.
        kv_heads: heads of key and value; None: as many as of the query.
        mixers: kinds of its recurrent layers, whose functions are replaced for packed rows (`mixers`).
        scans: of these layers.
    """

    model_type: str
    implementation: str
    device_type: str
    windows: frozenset[int] = frozenset()
    sinks: bool = False
    softcap: bool = False
    dropout: float = 0.0
    num_heads: int = 1
    head_dim: int = 1
    compute_dtype: torch.dtype
    capability: tuple[int, int] | None
    gap: str = ""
    kv_heads: int | None = None
    mixers: frozenset[str] = frozenset()
    scans: frozenset[Scan] = frozenset()


def text_model(model: nn.Module) -> Any:
    """Return the transformers model inside a PEFT, DDP or compiled wrapper."""
    model = getattr(model, "_orig_mod", model)
    model = getattr(model, "module", model) if type(model).__name__ == "DistributedDataParallel" else model
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def token_table(model: nn.Module) -> Any:
    """Return the `nn.Embedding` of the tokens, for its sizes; calls go to what PEFT may have put around it."""
    return inside_peft(text_model(model).get_input_embeddings())


def inside_peft(module: Any) -> Any:
    """Return the module inside of PEFT's layers: LoRA, trainable tokens, a trained copy."""
    while (inner := getattr(module, "base_layer", getattr(module, "original_module", None))) is not None:
        module = inner
    return module


def backbones(model: nn.Module) -> list[Any]:
    """Return the inner models that hold the token embedding, outermost first; the first that runs makes the masks.

    Usually one, `base_model`. But composite models make their masks above the decoder, opt's head calls the decoder
    past the backbone, and llama4_text's `base_model` is itself.
    """
    base = text_model(model)
    embedding = base.get_input_embeddings()
    around = modules_of(base, outside=GradientCheckpointingLayer)
    inner = [module for module in around if isinstance(module, PreTrainedModel) and module is not base]
    return [each for each in inner if any(part is embedding for part in modules_of(each, GradientCheckpointingLayer))]


def learned_positions(model: nn.Module) -> int | None:
    """Return the most positions of a document if the model reads them from a table, as GPT-2 and OPT do, else None."""
    base = text_model(model)
    positions = getattr(base.config.get_text_config(), "max_position_embeddings", None)
    tokens = set(modules_of(base.get_input_embeddings()))  # PEFT may keep several
    # A table has a row per position, of which some families skip the first two.
    others = [module for module in modules_of(base) if isinstance(module, nn.Embedding) and module not in tokens]
    return positions if positions and any(0 <= table.num_embeddings - positions <= 2 for table in others) else None


class PositionUse(NamedTuple):
    """What attention reads of positions besides the distance of two tokens, which rows without padding keep."""

    by_longest: bool
    """The longest position of a call selects the rotation of all its tokens (``dynamic``, ``longrope``)."""
    scaled_from: float
    """Position from which positions scale attention (Ministral 3, Llama 4); infinite for none."""


def position_use(*models: nn.Module | None) -> PositionUse:
    """Return what any of `models` reads of positions; each trainer asks before it joins documents of several rows."""
    rotations, scales = set[str](), [math.inf]
    for model in filter(None, models):
        rotations |= {str(getattr(one, "rope_type", "")) for one in modules_of(model)}  # one, or one per layer type
        config = text_model(model).config.get_text_config()
        rope = getattr(config, "rope_parameters", None)
        if isinstance(rope, dict) and rope.get("llama_4_scaling_beta"):
            scales.append(rope["original_max_position_embeddings"])
        if getattr(config, "attn_temperature_tuning", False):
            scales.append(config.floor_scale)
    return PositionUse(any("dynamic" in kind or "longrope" in kind for kind in rotations), min(scales))


def is_prompt_learning(model: nn.Module) -> bool:
    """Return whether PEFT prepends virtual tokens to each *row* and drops `position_ids`: prompt, prefix, p-tuning."""
    return bool(getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False))


def is_invoked_once_per_row(model: nn.Module) -> bool:
    """Return whether PEFT looks for one invocation in each *row* and adapts what follows it: aLoRA, active or not."""
    configs = getattr(model, "peft_config", None)
    configs = configs.values() if isinstance(configs, dict) else ()
    return any(getattr(config, "alora_invocation_tokens", None) for config in configs)


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the text decoder that call transformers' attention interface."""
    config = text_model(model).config.get_text_config()
    of_text = [module for module in modules_of(model) if module.__dict__.get("config") is config]
    return [module for module in of_text if hasattr(module, "layer_idx") and hasattr(module, "scaling")]


def drops_layers(model: nn.Module) -> bool:
    """Return whether forward passes leave out layers by chance (LayerDrop), as the host draws."""
    config = text_model(model).config.get_text_config()
    return any(getattr(config, name, 0) for name in ("layerdrop", "decoder_layerdrop"))


def dropout_of(model: nn.Module) -> str:
    """Return a rate at which a model drops or draws noise, e.g. ``lora_dropout 0.05``; empty if all are 0."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p:
            kind = next((part for part in reversed(name.split(".")) if "dropout" in part), type(module).__name__)
            return f"{kind} {module.p:g}"
        for kind, rate in vars(module).items():  # for a function, as attention is
            if "dropout" in kind and isinstance(rate, float) and rate:
                return f"{kind} {rate:g}"
    config = text_model(model).config.get_text_config()
    noise = {name: getattr(config, name, None) for name in ("router_jitter_noise", "input_jitter_noise")}
    return next((f"{name} {rate:g}" for name, rate in noise.items() if rate), "")


def state_modules(model: nn.Module) -> list[nn.Module]:
    """Return the mixers that carry state from token to token, outside of attention."""
    return [m for m in modules_of(model) if isinstance(m, nn.Conv1d) or _STATE_MODULE.search(type(m).__name__)]


def scan_of(module: Any, mixer: Mixer) -> Scan | None:
    """Return the scan of a layer; None if it has none, or its sizes have other names."""
    names = next((names for names in _SIZES if all(hasattr(module, name) for name in names)), None)
    if names is None or mixer.kind == SHORT_CONV:
        return None
    key_heads, heads, size, width = (int(getattr(module, name)) for name in names)
    return Scan(mixer.kind, heads if mixer.repeats else key_heads, heads, size, width)


def mixers(model: nn.Module) -> dict[nn.Module, Mixer]:
    """Return the recurrent layers of a model whose functions can be replaced, and that take the model's keywords.

    transformers' hybrid models convolve and scan in functions next to the layer. Other layers are not mixers.
    """
    every = modules_of(model)
    convolve = [module for module in every if any(isinstance(c, nn.Conv1d) for c in module._modules.values())]
    return {module: mixer for module in convolve if (mixer := _mixer(type(module))) is not None}


def _mixer(cls: Any) -> Mixer | None:
    forward = inspect.unwrap(cls.forward)
    home = sys.modules[forward.__module__]
    functions = {name for name, value in vars(home).items() if value is not None}
    if CONV not in functions or functions & _OTHER_SCANS or inspect.getfullargspec(forward).varkw is None:
        return None
    kind = next((kind for name, kind in SCANS.items() if name in functions), SHORT_CONV)
    return Mixer(kind, home, "repeat_interleave" in forward.__code__.co_names)


def stock_implementation(config: Any) -> str:
    """Return transformers' implementation of a text config, e.g. ``sdpa``, also while ours is registered over it."""
    name = str(config._attn_implementation)
    return next((stock for stock, ours in OVER.items() if ours == name), name)


def stock_attention(module: Any, implementation: str) -> Callable[..., tuple[Any, Any]]:
    """Return the function that an attention module would call under `implementation` (``eager``, ``sdpa``, ...).

    Families define their own eager function next to the module (softcap, sinks) and may override others locally.
    """
    for home in (sys.modules.get(cls.__module__) for cls in type(module).__mro__):
        functions: dict[str, Any] = {"eager": getattr(home, "eager_attention_forward", None)}
        interface = getattr(home, "ALL_ATTENTION_FUNCTIONS", functions)
        if function := functions.get(implementation) or interface.get(implementation, functions["eager"]):
            return function
    raise LookupError(f"{type(module).__name__} defines no attention function for {implementation!r}")


def asked_for(model: nn.Module, requested: Any = None) -> str | None:
    """Return the attention implementation that the user chose; None if it is transformers' default.

    `requested` is that of `model_init_kwargs`, which may name one per sub-model. TRL ignores it if it gets a model.
    """
    base = text_model(model)
    implementation = stock_implementation(base.config.get_text_config())
    if requested == implementation or isinstance(requested, dict):
        return implementation
    is_default = implementation == "sdpa" or (implementation == "eager" and not getattr(base, "_supports_sdpa", False))
    return None if is_default else implementation


def read_features(
    model: nn.Module, compute_dtype: torch.dtype | None = None, device: torch.device | None = None
) -> ModelFeatures:
    """Read the attention of `model`, which will run in `compute_dtype`; a model that cannot be read has a `gap`.

    Args:
        device: where it will run. Default: that of its parameters, which FSDP and `bf16_full_eval` move later.
    """
    base = text_model(model)
    device = device or next(iter(base.parameters())).device
    config = base.config.get_text_config()
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    unread = ModelFeatures(
        model_type=str(config.model_type), implementation=stock_implementation(config), device_type=device.type,
        compute_dtype=compute_dtype or base.dtype, capability=capability,
    )  # fmt: skip
    try:
        return replace(unread, **_attention_facts(base, config), gap=first_reason(_gaps(model, base, config)))
    except UNREADABLE as error:
        return replace(unread, gap=f"{config.model_type}'s attention cannot be read ({type(error).__name__}: {error})")


def _attention_facts(base: Any, config: Any) -> dict[str, Any]:
    attentions, known = attention_modules(base), mixers(base)
    heads = [int(count or 1) for count in layer_values(config, "num_attention_heads")]
    kv_heads = min(int(count or max(heads)) for count in layer_values(config, "num_key_value_heads"))
    # Multi-head latent attention: queries and keys are wider than the rotary part that `head_dim` may name.
    widths = [size or config.hidden_size // min(heads) for size in layer_values(config, "head_dim")]
    widths += [size or 0 for name in ("qk_head_dim", "v_head_dim") for size in layer_values(config, name)]
    return {
        "windows": frozenset(filter(None, map(window_of, attentions))),
        "sinks": any(hasattr(module, "sinks") for module in attentions),
        "softcap": any(cap is not None for cap in layer_values(config, "attn_logit_softcapping")),
        "dropout": max(float(rate or 0.0) for name in _DROPOUT_NAMES for rate in layer_values(config, name)),
        "num_heads": max(heads),
        "kv_heads": kv_heads if max(heads) % kv_heads == 0 else None,
        "head_dim": max(map(int, widths)),
        "mixers": frozenset(mixer.kind for mixer in known.values()),
        "scans": frozenset(filter(None, (scan_of(layer, mixer) for layer, mixer in known.items()))),
    }


def layer_values(config: Any, name: str) -> list[Any]:
    """Return a field of a text config: one value, None without it, or one per layer if they differ (gemma4)."""
    try:
        return [getattr(config, name, None)]
    except RuntimeError:  # transformers raises it if only the configs of single layers have such a field
        return [getattr(layer, name, None) for layer in config.per_layer_config]


def layer_value(module: Any, name: str) -> Any:
    """Return the field of a module's config that holds for its layer."""
    values = layer_values(module.config, name)
    return values[module.layer_idx] if len(values) > 1 else values[0]


def window_of(module: Any) -> int | None:
    """Return the window that the family's *mask* gives this layer, in tokens; None if it sees the whole document."""
    # Not always the keyword that reaches attention: olmoe passes `config.sliding_window` although its mask has none.
    size, types = layer_value(module, "sliding_window"), layer_values(module.config, "layer_types")[0]
    if types is not None and module.layer_idx is not None:
        has_window = types[module.layer_idx] == "sliding_attention"
    else:
        has_window = hasattr(sys.modules.get(type(module).__module__), "create_sliding_window_causal_mask")
    return int(size) if size is not None and has_window else None


def masks_by_kind(model: nn.Module) -> bool:
    """Return whether the mask depends on the kinds of tokens, if given: those of an image attend to each other."""
    homes = [vars(sys.modules[type(module).__module__]) for module in backbones(model)]
    # Such a family makes its own masks for `generate`: a class in the file of its backbone has the function.
    classes = [value for home in homes for value in home.values() if isinstance(value, type)]
    return any(hasattr(cls, "create_masks_for_generate") for cls in classes)


def _gaps(model: nn.Module, base: Any, config: Any) -> Iterator[object]:
    """Yield the reasons why the attention interface cannot keep documents of this model apart, most basic first."""
    family, attentions, known = config.model_type, attention_modules(base), mixers(base)
    yield missing_reason("packed_attention")
    yield is_prompt_learning(model) and "prompt learning prepends virtual tokens to each row, not to each document"
    reached = attentions and base._can_set_attn_implementation()
    yield not reached and f"{family} does not call transformers' attention interface"
    types = set(getattr(config, "layer_types", None) or ())
    other = sorted(types - _UNDERSTOOD_LAYERS - (_MIXER_LAYERS if known else set()))
    yield other and f"{family} has {', '.join(other)} layers, which the attention interface cannot keep apart"
    inside = {part for mixer in (*attentions, *known) for part in modules_of(mixer)}
    for module in state_modules(base):
        outside = module not in inside and known.keys().isdisjoint(modules_of(module))
        yield outside and f"{family} mixes tokens in {type(module).__name__}, outside of attention"
    hub = known and getattr(base, "use_kernels", False)
    yield hub and f"{family} runs hub kernels in its recurrent layers (use_kernels=True)"
    yield family in _DROPS_KEYWORDS and f"{family} drops keywords on the way to attention"
    for part in (config, *attentions):
        both = getattr(part, "use_bidirectional_attention", False) or not getattr(part, "is_causal", True)
        yield both and f"{family} attends in both directions ({type(part).__name__}.is_causal=False)"
