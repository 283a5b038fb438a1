"""Recurrent layers that call functions of their own file, which can be replaced by ones that know of documents.

transformers' hybrid models compute their convolutions and scans in functions beside the layer, and hand on the keywords
that the model was called with. Read from the source of the forward; a layer that has another form is no mixer, and the
model runs in padded rows.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

from fastpack_trl.model.source import hands_on_kwargs, source_tree

CONV = "causal_conv1d_fn"
SCANS = {
    "torch_chunk_gated_delta_rule": "gated delta rule",
    "mamba2_chunk_scan": "Mamba-2",
}
"""Functions that carry a state along the row, with the name of their layers."""
FUSED = "mamba2_split_conv1d_scan_combined"
"""Convolution, scan and output projection in one kernel of mamba_ssm, in training; None where it is not installed."""
FUNCTIONS = (CONV, *SCANS, FUSED)
# Of a layer that has a cache, and of padding on the left.
_APART = frozenset(
    {
        "apply_mask_to_padding_states", "causal_conv1d_update", "mamba2_selective_state_update",
        "torch_recurrent_gated_delta_rule",
    }
)  # fmt: skip
SHORT_CONV = "short convolution"


class Mixer(NamedTuple):
    """A kind of recurrent layer: ``Mixer("gated delta rule", ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"))``.

    Attributes:
        kind: for people.
        functions: that its forward calls, of `FUNCTIONS`.
        home: the module of Python whose names these are.
        repeats: the forward repeats the heads of keys before it calls them, as transformers 5.17 does.
    """

    kind: str
    functions: tuple[str, ...]
    home: ModuleType
    repeats: bool = False


class Scan(NamedTuple):
    """What the scan of a recurrent layer is given: ``Scan("gated delta rule", 16, 32, 128, 128)``.

    Attributes:
        kind: as of `Mixer`.
        key_heads: of a query and a key; the groups of Mamba-2.
        heads: of a value.
        size: of a key; of a state of Mamba-2.
        width: of a value.
    """

    kind: str
    key_heads: int
    heads: int
    size: int
    width: int

    def flops(self, chunk: int) -> int:
        """Return the operations of a forward pass per token, in chunks of `chunk` tokens: products of matrices alone.

        A delta rule's are those of keys and queries with keys, those with the inverse, the inverse, and three with a
        state; Mamba-2's of its two matrices with each other, with values, and two with a state.
        """
        if self.kind == SCANS["mamba2_chunk_scan"]:
            inside, with_state = self.key_heads * self.size + self.heads * self.width, 2
        else:
            inside, with_state = 2 * self.key_heads * self.size, 3
            inside += self.heads * (chunk // 3 + self.size + 2 * self.width)
        return 2 * (chunk * inside + with_state * self.heads * self.size * self.width)


_SIZES = (
    ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim"),
    ("n_groups", "num_heads", "ssm_state_size", "head_dim"),
    ("num_heads", "num_heads", "head_dim", "head_dim"),
)
"""What transformers' layers call the sizes of their scan, the most telling first."""


def scan_of(module: Any, mixer: Mixer) -> Scan | None:
    """Return the scan of a layer; None if it has none, or its sizes have other names."""
    found = next((names for names in _SIZES if all(hasattr(module, name) for name in names)), None)
    if found is None or mixer.kind == SHORT_CONV:
        return None
    key_heads, heads, size, width = (int(getattr(module, name)) for name in found)
    return Scan(mixer.kind, heads if mixer.repeats else key_heads, heads, size, width)


def mixers(model: nn.Module) -> dict[nn.Module, Mixer]:
    """Return the recurrent layers of a model whose functions can be replaced, and that are given the keywords."""
    found: dict[nn.Module, Mixer] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            own: Any = type(child)
            above: Any = type(parent)
            mixer = _mixer(own)
            if mixer is not None and hands_on_kwargs(above, name):
                found[child] = mixer
    return found


@lru_cache(maxsize=256)
def _mixer(cls: Any) -> Mixer | None:
    """Return what the forward of `cls` calls; None if it mixes tokens in another way too, or hands no keywords on."""
    forward = inspect.unwrap(cls.forward)
    home = sys.modules.get(getattr(forward, "__module__", ""))
    tree = source_tree(forward) if home is not None else None
    if home is None or tree is None:
        return None
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    calls = [(ast.unparse(node.func), any(keyword.arg is None for keyword in node.keywords)) for node in nodes]
    own = [(name, passes) for name, passes in calls if _is_of(home, name) and name not in _APART]
    names = {name for name, _ in own}
    scans = names & SCANS.keys()
    if CONV not in names or not names <= set(FUNCTIONS) or len(scans) > 1 or not all(passes for _, passes in own):
        return None
    repeats = any(isinstance(node, ast.Attribute) and node.attr == "repeat_interleave" for node in ast.walk(tree))
    return Mixer(SCANS[scans.pop()] if scans else SHORT_CONV, tuple(sorted(names)), home, repeats)


def _is_of(home: ModuleType, name: str) -> bool:
    """Return whether a module of Python defines a function of this name; the package `kernels` makes a module of it."""
    function: Any = inspect.unwrap(vars(home).get(name, home))  # ours are around stock's
    own = inspect.isroutine(function) and getattr(function, "__module__", None) == home.__name__
    return own or isinstance(function, nn.Module)
