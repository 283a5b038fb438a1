"""A frozen weight in host memory, while what is computed from it is used in its place."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from torch import Tensor, nn


class HostWeight:
    """Takes the ``weight`` of a layer off its device until `restore`.

    The parameter keeps its shape, dtype and device, and has NaN in place of values, in no memory: a use that nobody
    thought of is seen at once. `state_dict` and a deep copy of the layer have the values. What is written to the
    parameter meanwhile stays.

    Args:
        layer: e.g. the base layer of a LoRA layer; nothing else may hold its weight.
    """

    def __init__(self, layer: nn.Module) -> None:
        parameter = layer._parameters["weight"]
        assert parameter is not None
        self._parameter: nn.Parameter = parameter
        self._kept: Tensor | None = parameter.data.cpu()
        nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
        parameter.data = nothing.expand(parameter.shape)
        self._stub = parameter.data_ptr()
        me, own = weakref.ref(self), weakref.ref(layer)

        def give_values(layer: nn.Module, state: dict[str, Tensor], prefix: str, _metadata: Any) -> None:
            host = me()
            # A deep copy of the layer has this hook too.
            if host is not None and layer is own() and f"{prefix}weight" in state and host._waits():
                state[f"{prefix}weight"] = host._values(torch.device("cpu"))

        def bring_back(layer: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
            host = me()
            if host is not None and layer is own() and f"{prefix}weight" in state:  # loading writes into it
                host.restore()

        # Functions: torch marks the first, and takes no methods.
        self._hooks = [
            layer.register_state_dict_post_hook(give_values),
            layer.register_load_state_dict_pre_hook(bring_back),
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return 0 if self._kept is None else self._kept.nbytes

    def restore(self, *, to_device: bool = True) -> None:
        """Bring the values back; a second call does nothing.

        Args:
            to_device: of the parameter; False leaves them in host memory.

        Raises:
            torch.OutOfMemoryError: the device has no room; everything is as it was.
        """
        if self._kept is None:
            return
        if self._waits():
            self._parameter.data = self._values(self._parameter.device if to_device else torch.device("cpu"))
        self._kept = None
        for hook in self._hooks:
            hook.remove()

    def _waits(self) -> bool:
        """Return whether the parameter has no values: NaN as they were put there, or moved or cast since."""
        data = self._parameter.data
        return data.data_ptr() == self._stub or bool(data.isnan().all())

    def _values(self, device: torch.device) -> Tensor:
        assert self._kept is not None
        return self._kept.to(device, self._parameter.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        if self._kept is not None and self._waits():
            copied = copy.deepcopy(self._parameter, memo)
            copied.data = self._kept.to(self._parameter.device, self._parameter.dtype, copy=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a pickled layer has what stands in the parameter
