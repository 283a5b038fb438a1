"""Facts of a model: its decoder, attention and windows, and whether the attention interface reaches all token mixing.

Read from the config, the modules and the source of their forwards; transformers finds out in the same way whether a
model can switch its implementation. A guard at run time and the packing proof stand behind this reading.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastpack_trl.model.mixers import Scan, mixers, scan_of
from fastpack_trl.model.source import hands_on_kwargs, source_tree
from fastpack_trl.model.upstream import lacks

# Keywords of an attention call that do not change which key a query sees, or that the backends implement.
_UNDERSTOOD_KEYWORDS = frozenset(
    {
        "attention_mask", "cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "dropout", "is_causal", "key",
        "max_length_k", "max_length_q", "module", "output_attentions", "position_ids", "query", "s_aux", "scaling",
        "sliding_window", "softcap", "value",
    }
)  # fmt: skip
# Causal attention under the names that configs use; "attention" is granitemoehybrid's.
_UNDERSTOOD_LAYERS = frozenset({"full_attention", "attention", "sliding_attention"})
# Of a model whose recurrent layers are all mixers; "hybrid" layers have attention beside one.
_MIXER_LAYERS = frozenset({"linear_attention", "conv", "mamba", "hybrid"})
# Layers of experts, or an MLP, that are in the list of the decoder's layers as others are.
_POINTWISE_LAYERS = frozenset({"moe", "mlp"})
# Mixers that carry state from token to token; a Conv1d (not GPT-2's pointwise `Conv1D`) is their usual sign.
_STATE_MODULE = re.compile(r"Mamba|SSM|Rwkv|Recurrent|GatedDelta|LightningAttention|LinearAttention|ShortConv")
UNREADABLE = (AttributeError, LookupError, TypeError, ValueError, RuntimeError)
"""Errors of reading a model whose modules or config have another form than expected."""
_DROPOUT_NAMES = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")

KINDS = ("token_type_ids", "mm_token_type_ids", "block_sequence_ids")
"""Keywords that give the kind of each token; above 0 it is not text (PaliGemma, whose text is 1, has a gap)."""

# Our name over each of stock's: what we hand over to must be known without looking it up per model. Names with
# "flash", "sdpa" or "flex_attention" in them would trigger transformers' checks for those kernels.
OVER = {
    "eager": "fastpack_over_eager",
    "sdpa": "fastpack_over_torch",
    "flash_attention_2": "fastpack_over_fa2",
    "flash_attention_3": "fastpack_over_fa3",
    "flash_attention_4": "fastpack_over_fa4",
    "flex_attention": "fastpack_over_flex",
}
_UNDER = {ours: stock for stock, ours in OVER.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFeatures:
    """The attention of one model, as a chooser needs it."""

    model_type: str
    implementation: str
    """Stock's implementation of the text config, e.g. ``sdpa``."""
    device_type: str
    windows: frozenset[int] = frozenset()
    """Sizes of the sliding windows, in tokens, the token itself included."""
    sinks: bool = False
    softcap: bool = False
    dropout: float = 0.0
    num_heads: int = 1
    head_dim: int = 1
    """The widest of query, key and value."""
    compute_dtype: torch.dtype
    """The dtype of attention: the autocast dtype of the run, else the weights'."""
    capability: tuple[int, int] | None
    """Compute capability of the CUDA device; None elsewhere."""
    gap: str = ""
    """The reason why the attention interface cannot keep documents apart; empty if it can."""
    kv_heads: int | None = None
    """Heads of key and value; None: as many as of the query."""
    mixers: frozenset[str] = frozenset()
    """Kinds of its recurrent layers, whose functions are replaced for packed rows (`model/mixers.py`)."""
    scans: frozenset[Scan] = frozenset()
    """Of these layers."""


class _AttentionCall(NamedTuple):
    keywords: frozenset[str]
    passes_kwargs: bool


def text_model(model: nn.Module) -> Any:
    """Return the transformers model inside a PEFT, DDP or compiled wrapper."""
    model = getattr(model, "_orig_mod", model)
    model = getattr(model, "module", model) if type(model).__name__ == "DistributedDataParallel" else model
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def token_table(model: nn.Module) -> Any:
    """Return the `nn.Embedding` of the tokens, for its sizes: what is called is what PEFT may have put around it."""
    return inside_peft(text_model(model).get_input_embeddings())


def inside_peft(module: Any) -> Any:
    """Return the module inside of what PEFT puts around one: LoRA, trainable tokens, a trained copy."""
    while (inner := getattr(module, "base_layer", getattr(module, "original_module", None))) is not None:
        module = inner
    return module


def backbones(model: nn.Module) -> list[Any]:
    """Return the modules that turn tokens into hidden states, outermost first; the first that runs makes the masks.

    Found as the inner models that hold the token embedding: usually one, `base_model`. Composite models make their
    masks above the decoder; opt's head calls the decoder past the backbone; llama4_text's `base_model` is itself.
    """
    base = text_model(model)
    embedding = base.get_input_embeddings()
    return [
        module
        for module in base.modules()
        if module is not base
        and isinstance(module, PreTrainedModel)
        and any(inner is embedding for inner in module.modules())
    ]


def learned_positions(model: nn.Module) -> int | None:
    """Return how many positions a document may have where the model reads them from a table, as GPT-2 and OPT do.

    Found as an embedding beside that of the tokens with a row per position, of which some families leave the first two
    unused. None where positions are computed.
    """
    base = text_model(model)
    positions = getattr(base.config.get_text_config(), "max_position_embeddings", None)
    tokens = set(base.get_input_embeddings().modules())  # PEFT may keep several
    others = [module for module in base.modules() if isinstance(module, nn.Embedding) and module not in tokens]
    return positions if positions and any(0 <= table.num_embeddings - positions <= 2 for table in others) else None


def is_prompt_learning(model: nn.Module) -> bool:
    """Return whether PEFT prepends virtual tokens to each *row* and drops `position_ids`: prompt, prefix, p-tuning."""
    return bool(getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False))


ALORA = "aLoRA adapts what follows the one invocation that it finds in a row"


def is_invoked_once_per_row(model: nn.Module) -> bool:
    """Return whether PEFT looks for one invocation in each *row* and adapts what follows it: aLoRA, active or not."""
    configs = getattr(model, "peft_config", None)
    configs = configs.values() if isinstance(configs, dict) else ()
    return any(getattr(config, "alora_invocation_tokens", None) for config in configs)


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the text decoder that call transformers' attention interface."""
    config = text_model(model).config.get_text_config()
    return [
        module
        for module in model.modules()
        if getattr(module, "config", None) is config and _attention_call(module.__class__) is not None
    ]


def state_modules(model: nn.Module) -> list[nn.Module]:
    """Return the mixers that carry state from token to token, outside of attention."""
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.Conv1d) or _STATE_MODULE.search(type(module).__name__)
    ]


def stock_implementation(config: Any) -> str:
    """Return stock's implementation of a text config, e.g. ``sdpa``, also while ours is registered over it."""
    name = str(config._attn_implementation)
    return _UNDER.get(name, name)


def stock_attention(module: Any, implementation: str) -> Callable[..., tuple[Any, Any]]:
    """Return the function that an attention module would call under `implementation` (``eager``, ``sdpa``, ...).

    Families define their own eager function beside the module (softcap, sinks) and may override others locally.

    Raises:
        LookupError: the file of the module defines neither; such a model never called the interface.
    """
    for cls in type(module).__mro__:
        home = sys.modules.get(cls.__module__)
        eager = getattr(home, "eager_attention_forward", None)
        interface = getattr(home, "ALL_ATTENTION_FUNCTIONS", None)
        if interface is not None:
            function: Callable[..., tuple[Any, Any]] | None
            function = eager if implementation == "eager" else interface.get(implementation, eager)
            if function is not None:
                return function
    raise LookupError(f"{type(module).__name__} defines no attention function for {implementation!r}")


def asked_for(model: nn.Module, by_name: Any = None) -> str | None:
    """Return the attention implementation that the user chose; None where it is transformers' own default.

    Args:
        by_name: `attn_implementation` of `model_init_kwargs`, when the model was given by its name; it may name one
            per sub-model.
    """
    base = text_model(model)
    implementation = stock_implementation(base.config.get_text_config())
    default = ("sdpa", "eager") if not getattr(base, "_supports_sdpa", False) else ("sdpa",)
    if by_name is not None:
        return by_name if isinstance(by_name, str) else implementation
    return None if implementation in default else implementation


def read_features(model: nn.Module, compute_dtype: torch.dtype | None = None) -> ModelFeatures:
    """Read what `model` (PEFT or plain) needs of a packed attention; what cannot be read is a `gap`.

    Args:
        compute_dtype: the autocast dtype that it will run in; default: that of its weights.
    """
    base = text_model(model)
    device = next(iter(base.parameters())).device
    config = base.config.get_text_config()
    unread = ModelFeatures(
        model_type=str(config.model_type),
        implementation=stock_implementation(config),
        device_type=device.type,
        compute_dtype=compute_dtype or base.dtype,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
    )
    try:
        return replace(unread, **_attention_facts(model, base, config))
    except UNREADABLE as error:
        return replace(unread, gap=f"{config.model_type}'s attention cannot be read ({type(error).__name__}: {error})")


def _attention_facts(model: nn.Module, base: Any, config: Any) -> dict[str, Any]:
    attentions, known = attention_modules(base), mixers(base)
    calls = [call for module in attentions if (call := _attention_call(module.__class__)) is not None]
    heads = [int(count or 1) for count in layer_values(config, "num_attention_heads")]
    kv_heads = min(int(count or max(heads)) for count in layer_values(config, "num_key_value_heads"))
    return {
        "windows": frozenset(filter(None, (window_of(module) for module in attentions))),
        "sinks": any("s_aux" in call.keywords for call in calls),
        "softcap": any("softcap" in call.keywords for call in calls)
        and any(cap is not None for cap in layer_values(config, "attn_logit_softcapping")),
        "dropout": max(float(rate or 0.0) for name in _DROPOUT_NAMES for rate in layer_values(config, name)),
        "num_heads": max(heads),
        "kv_heads": kv_heads if max(heads) % kv_heads == 0 else None,
        "head_dim": _head_dim(config, min(heads)),
        "mixers": frozenset(mixer.kind for mixer in known.values()),
        "scans": frozenset(scan for layer, mixer in known.items() if (scan := scan_of(layer, mixer)) is not None),
        "gap": next(_gaps(model, base, config, attentions), ""),
    }


def _head_dim(config: Any, heads: int) -> int:
    # Multi-head latent attention: queries and keys are wider than the rotary part that `head_dim` may name.
    plain = [int(size or config.hidden_size // heads) for size in layer_values(config, "head_dim")]
    latent = [layer_values(config, name) for name in ("qk_head_dim", "v_head_dim")]
    return max(*plain, *(int(size or 0) for sizes in latent for size in sizes))


def layer_values(config: Any, name: str) -> list[Any]:
    """Return a field of a text config: one value, None without it, or one per layer where they differ (gemma4)."""
    try:
        return [getattr(config, name, None)]
    except RuntimeError:  # what transformers raises where the config as a whole has no such field
        return [getattr(layer, name, None) for layer in config.per_layer_config]


def layer_value(module: Any, name: str) -> Any:
    """Return the field of a module's config that holds for its layer."""
    values = layer_values(module.config, name)
    return values[module.layer_idx] if len(values) > 1 else values[0]


def window_of(module: nn.Module) -> int | None:
    """Return the window that stock's *mask* gives this layer, in tokens; None where it sees the whole document.

    Not always the keyword that reaches attention: olmoe passes `config.sliding_window` although its mask has none.
    """
    config: Any = module.config
    size = layer_value(module, "sliding_window")
    layer_types = getattr(config, "layer_types", None)
    layer = getattr(module, "layer_idx", None)
    if size is None:
        return None
    if layer_types is not None and layer is not None:
        return int(size) if layer_types[layer] == "sliding_attention" else None
    return int(size) if _mentions(inspect.getmodule(type(module)), "create_sliding_window_causal_mask") else None


def masks_by_kind(model: nn.Module) -> bool:
    """Return whether the mask depends on the kinds of tokens, if they are given: those of an image see each other."""
    names = ("block_sequence_ids", "or_mask_function")
    return any(_mentions(inspect.getmodule(type(module)), *names) for module in backbones(model))


def _gaps(model: nn.Module, base: Any, config: Any, attentions: list[nn.Module]) -> Iterator[str]:
    """Yield the reasons why the attention interface cannot keep documents of this model apart, most basic first."""
    family = config.model_type
    if missing := lacks("packed_attention"):
        yield missing
    if is_prompt_learning(model):
        yield "prompt learning prepends virtual tokens to each row, not to each document"
    if not attentions or not base._can_set_attn_implementation():
        yield f"{family} does not call transformers' attention interface"
    known = mixers(base)
    understood = _UNDERSTOOD_LAYERS | (_MIXER_LAYERS | _POINTWISE_LAYERS if known else frozenset())
    types = getattr(config, "layer_types", None) or ()
    other = sorted(set(types) - understood)
    if other:
        yield f"{family} has {', '.join(other)} layers, which the attention interface cannot keep apart"
    inside = {part for mixer in [*attentions, *known] for part in mixer.modules()}
    for module in state_modules(base):
        if module not in inside and known.keys().isdisjoint(module.modules()):
            yield f"{family} mixes tokens in {type(module).__name__}, outside of attention"
    if known and getattr(base, "use_kernels", False):
        yield f"{family} runs hub kernels in its recurrent layers (use_kernels=True)"
    if _layers_without([*attentions, *known], base, types):
        yield f"{family} has layers that mix tokens without the attention interface"
    if getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True):
        yield f"{family} attends in both directions (is_causal=False)"
    parents = {child: (parent, name) for parent in base.modules() for name, child in parent.named_children()}
    for module in attentions:
        yield from _call_gaps(family, module, *parents[module])


def _call_gaps(family: str, module: nn.Module, parent: nn.Module, name: str) -> Iterator[str]:
    call = _attention_call(module.__class__)
    if call is None or not call.passes_kwargs or not hands_on_kwargs(parent.__class__, name):
        yield f"{family} drops keywords on the way to attention"
        return
    unknown = sorted(call.keywords - _UNDERSTOOD_KEYWORDS)
    if unknown:
        yield f"{family} calls attention with {', '.join(unknown)}"
    if window_of(module) is not None and "sliding_window" not in call.keywords:
        yield f"{family} has a sliding window only in its mask"
    if not getattr(module, "is_causal", True):
        yield f"{family} attends in both directions ({type(module).__name__}.is_causal=False)"


def _layers_without(mixing: list[nn.Module], base: nn.Module, types: Sequence[str]) -> bool:
    """Return whether a list of decoder layers has one without interface attention or a mixer (state space, ...)."""
    known = set(mixing)
    for stack in (stack for stack in base.modules() if isinstance(stack, nn.ModuleList)):
        kinds = types if len(types) == len(stack) else ("",) * len(stack)
        layers = [layer for layer, kind in zip(stack, kinds, strict=True) if kind not in _POINTWISE_LAYERS]
        has = [not known.isdisjoint(layer.modules()) for layer in layers]
        if any(has) and not all(has):
            return True
    return False


@lru_cache(maxsize=256)
def _attention_call(cls: Any) -> _AttentionCall | None:
    """Return how the forward of `cls` calls the function of the attention interface; None if it does not."""
    tree = source_tree(cls.forward) if hasattr(cls, "forward") and issubclass(cls, nn.Module) else None
    if tree is None:
        return None
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            function = node.value.func
            if isinstance(function, ast.Attribute) and ast.unparse(function.value) == "ALL_ATTENTION_FUNCTIONS":
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
    found: set[str] = set()
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in names]
    for node in calls:
        found |= {keyword.arg for keyword in node.keywords if keyword.arg is not None}
    passes = all(any(keyword.arg is None for keyword in node.keywords) for node in calls)
    return _AttentionCall(frozenset(found), passes) if calls else None


@lru_cache(maxsize=256)
def _mentions(module: Any, *names: str) -> bool:
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):
        return True
    return any(name in source for name in names)


def beside_embeddings(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Return what `model` reads of token ids beside their embeddings (Gemma 4's per-layer inputs), as its keywords.

    Without them it would look for each embedding in its whole table, where it finds none that was rounded elsewhere.
    """
    inner = backbones(model)
    read = getattr(inner[-1], "get_per_layer_inputs", None) if inner else None
    taken = all("per_layer_inputs" in inspect.signature(type(module).forward).parameters for module in inner)
    if read is None or not taken or not inner[-1].hidden_size_per_layer_input:
        return {}
    no_embeddings = [None] * (len(inspect.signature(read).parameters) - 1)
    return {"per_layer_inputs": read(ids, *no_embeddings).detach()}
