"""Recurrent layers that call functions of their own file, which can be replaced by ones that know of documents.

transformers' hybrid models compute their convolutions and scans in functions beside the layer, and hand on the keywords
that the model was called with. A layer of another form is no mixer.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

CONV = "causal_conv1d_fn"
SCANS = {"torch_chunk_gated_delta_rule": "gated delta rule", "mamba2_chunk_scan": "Mamba-2"}
"""Functions that carry a state along the row, with the name of their layers."""
FUSED = "mamba2_split_conv1d_scan_combined"
"""Convolution, scan and output projection in one kernel of mamba_ssm, in training; None if it is not installed."""
FUNCTIONS = (CONV, *SCANS, FUSED)
SHORT_CONV = "short convolution"
_OTHER_SCANS = {"mamba_selective_scan", "chunk_kimi_delta_attention"}
"""Functions beside the same convolution that carry a state and cannot be replaced: Mamba 1's, Kimi's delta rule."""
_SIZES = (
    ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim"),
    ("n_groups", "num_heads", "ssm_state_size", "head_dim"),
    ("num_heads", "num_heads", "head_dim", "head_dim"),
)
"""Attributes of transformers' layers for the sizes of their scan, the most telling first."""


class Mixer(NamedTuple):
    """A kind of recurrent layer.

    Attributes:
        kind: e.g. ``"gated delta rule"``.
        home: the module of Python that has its `FUNCTIONS`.
        repeats: the forward repeats the heads of keys before it calls them, as transformers 5.17 does.
    """

    kind: str
    home: ModuleType
    repeats: bool = False


class Scan(NamedTuple):
    """Sizes of the scan of a recurrent layer: ``Scan("gated delta rule", 16, 32, 128, 128)``.

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
        """Return the operations of a forward pass per token, in chunks of `chunk` tokens: matmuls alone.

        A delta rule multiplies keys and queries with keys, both with the inverse, makes the inverse, and multiplies
        three times with a state; Mamba-2 multiplies its two matrices, them with values, and twice with a state.
        """
        if self.kind == SCANS["mamba2_chunk_scan"]:
            inside, with_state = self.key_heads * self.size + self.heads * self.width, 2
        else:
            inside, with_state = 2 * self.key_heads * self.size, 3
            inside += self.heads * (chunk // 3 + self.size + 2 * self.width)
        return 2 * (chunk * inside + with_state * self.heads * self.size * self.width)


def scan_of(module: Any, mixer: Mixer) -> Scan | None:
    """Return the scan of a layer; None if it has none, or its sizes have other names."""
    names = next((names for names in _SIZES if all(hasattr(module, name) for name in names)), None)
    if names is None or mixer.kind == SHORT_CONV:
        return None
    key_heads, heads, size, width = (int(getattr(module, name)) for name in names)
    return Scan(mixer.kind, heads if mixer.repeats else key_heads, heads, size, width)


def mixers(model: nn.Module) -> dict[nn.Module, Mixer]:
    """Return the recurrent layers of a model whose functions can be replaced, and that take the model's keywords."""
    convolve = [module for module in model.modules() if any(isinstance(c, nn.Conv1d) for c in module.children())]
    kinds = {cls: _mixer(cls) for cls in set(map(type, convolve))}
    return {module: mixer for module in convolve if (mixer := kinds[type(module)]) is not None}


def _mixer(cls: Any) -> Mixer | None:
    forward = inspect.unwrap(cls.forward)
    home = sys.modules[forward.__module__]
    functions = {name for name, value in vars(home).items() if value is not None}
    if CONV not in functions or functions & _OTHER_SCANS or inspect.getfullargspec(forward).varkw is None:
        return None
    kind = next((kind for name, kind in SCANS.items() if name in functions), SHORT_CONV)
    return Mixer(kind, home, "repeat_interleave" in forward.__code__.co_names)
