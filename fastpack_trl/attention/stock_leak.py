"""Read from its source how a model treats packed rows under stock's own attention, where it cannot be run.

The packing proof runs the model; with sharded parameters it cannot. Stock tells documents apart by `position_ids`: by
the mask that is made of them, or by a kernel that gets them.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from torch import nn

from fastpack_trl.model.facts import (
    backbones,
    is_prompt_learning,
    source_tree,
    state_modules,
    text_model,
)
from fastpack_trl.model.stock_attention import stock_implementation


def stock_leak(model: nn.Module) -> str:
    """Return why packed documents of `model` see each other under stock; empty if no reason is known."""
    return next(_leaks(model), "")


def _leaks(model: nn.Module) -> Iterator[str]:
    base = text_model(model)
    config = base.config.get_text_config()
    family, implementation = config.model_type, stock_implementation(config)
    if is_prompt_learning(model):
        yield "prompt learning drops position_ids, by which stock tells documents apart"
    states = state_modules(base)
    if states and not _separates_states(inspect.getmodule(type(base))):
        yield f"{family} carries state from one document into the next ({type(states[-1]).__name__})"
    if "flash" in implementation:
        return  # no mask: the kernel gets the positions
    for cls in map(type, backbones(model)):
        if not _mask_knows_positions(cls):
            yield f"{family} makes its {implementation} mask without position_ids"


@lru_cache(maxsize=256)
def _separates_states(module: Any) -> bool:
    """Return whether the file of a model with state tells its kernels where a document begins."""
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):
        return True
    by_name = any(name in source for name in ("seq_idx", "cu_seq"))
    return by_name or bool(re.search(r"\b\w+_fn\(.*\*\*kwargs\)$", source, re.MULTILINE))


@lru_cache(maxsize=256)
def _mask_knows_positions(cls: Any) -> bool:
    """Return whether `cls.forward` gives `position_ids` to each causal mask that it makes; True if unreadable."""
    tree = source_tree(cls.forward)
    if tree is None:
        return True
    # The arguments of several masks are usually collected in one dict: {"config": ..., "position_ids": ...}.
    collected = [
        {key.value for key in node.keys if isinstance(key, ast.Constant)}
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
    ]
    in_dict = any({"attention_mask", "position_ids"} <= names for names in collected)
    return all(
        any(keyword.arg == "position_ids" or (keyword.arg is None and in_dict) for keyword in node.keywords)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _makes_causal_mask(ast.unparse(node.func))
    )


def _makes_causal_mask(name: str) -> bool:
    return name.startswith("create_") and name.endswith("causal_mask")
