"""The call of a backbone for one packed row, eager or from a recording."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fastpack_trl.packing.packed_batch import PackedBatch, to_transformers_kwargs

ROUTER_LOGITS = "output_router_logits"
"""Keyword of a call that returns router logits too."""


class RowOutputs(NamedTuple):
    """The outputs of a replayed backbone, with the names that transformers' outputs have."""

    last_hidden_state: Tensor
    """(1, total_tokens, hidden)."""
    router_logits: tuple[Tensor, ...] | None = None
    """(total_tokens, num_experts) of each layer."""
    hidden_states: None = None
    attentions: None = None


class BackboneCall:
    """Calls backbones on packed rows.

    Attributes:
        replay: returns the outputs of a row from a recording, or None if the backbone has to be called; set by the
            feature ``cuda_graph``.
    """

    def __init__(self) -> None:
        self.replay: Callable[[Any, PackedBatch, Tensor, Mapping[str, Any]], RowOutputs | None] | None = None

    def __call__(self, backbone: Callable[..., Any], batch: PackedBatch, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of ``backbone(*args, **kwargs)``.

        Args:
            backbone: the decoder without its head.
            batch: of the row that the keywords are about, unless they were edited.
        """
        ids: Any = kwargs.get("input_ids")
        if self.replay is not None and not args and isinstance(ids, Tensor) and "packed_batch" in kwargs:
            own = to_transformers_kwargs(batch)
            if batch.describes(ids, kwargs.get("position_ids")) and own.keys() <= kwargs.keys():
                known = {*own, "input_ids", "packed_batch", "use_cache"}
                others = {name: value for name, value in kwargs.items() if name not in known}
                if (outputs := self.replay(backbone, batch, ids, others)) is not None:
                    return outputs
        return backbone(*args, **kwargs)
