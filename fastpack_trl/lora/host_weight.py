"""A frozen weight in host memory, while what is computed from it is used in its place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class HostWeight:
    """Takes the ``weight`` of a layer off its device until `restore`.

    The parameter keeps its shape, dtype and device, and has NaN in place of values, in no memory: a use that nobody
    thought of is seen at once. `state_dict` has the values, on the host.

    Args:
        layer: e.g. the base layer of a LoRA layer; nothing else may hold its weight.
    """

    def __init__(self, layer: nn.Module) -> None:
        parameter = layer._parameters["weight"]
        assert parameter is not None
        self._parameter = parameter
        self._device = self._parameter.device
        self._kept = self._parameter.data.cpu()
        nothing = torch.full((), torch.nan, dtype=self._kept.dtype, device=self._device)
        self._parameter.data = nothing.expand(self._kept.shape)
        kept = self._kept

        def give_values(layer: nn.Module, state: dict[str, Tensor], prefix: str, _metadata: Any) -> None:
            if f"{prefix}weight" in state:
                state[f"{prefix}weight"] = kept

        self._hook: Any = layer.register_state_dict_post_hook(give_values)  # marked by torch: it takes no methods

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self._kept.nbytes

    def restore(self) -> None:
        """Bring the values back to the device; a second call does nothing."""
        if self._hook is None:
            return
        self._hook.remove()
        self._hook = None
        self._parameter.data = self._kept.to(self._device)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the model has the stub's NaN, and what was computed from the weight
