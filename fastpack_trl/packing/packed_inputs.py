"""`PackedInputs`: the keywords of one packed row, which move to a device together with their `PackedBatch`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor

from fastpack_trl.packing.packed_batch import PackedBatch, TensorVersion


class PackedInputs(dict[str, Any]):
    """The keywords of ``model.forward`` for one packed row.

    `to` and `pin_memory` copy each tensor once, also one that the `PackedBatch` holds too, and keep track of edits:
    an edit in place before the copy counts after it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        batch, positions = self.get("packed_batch"), self.get("position_ids")
        if isinstance(batch, PackedBatch) and isinstance(positions, Tensor) and positions.device != batch.device:
            # `Trainer._prepare_input` builds `type(data)({...})` and moves tensors only: where accelerate has not
            # placed the batch before (XLA), the metadata has to follow here.
            self["packed_batch"] = batch.to(positions.device)

    def copy(self) -> PackedInputs:
        """Return a shallow copy that moves to a device as this one does."""
        return type(self)(self)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> PackedInputs:
        """Copy to `device`; tensors that are there already are kept.

        From the host to CUDA the host does not wait for the copies, whatever `non_blocking` says: nobody writes to the
        tensors again, torch keeps pinned memory from reuse until the copy is done, and CUDA stages pageable memory
        before it returns.
        """
        staged = torch.device(device).type in ("cpu", "cuda")

        def copy(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=non_blocking or (staged and tensor.device.type == "cpu"))

        return self._map(copy, lambda value: send_to_device(value, device, non_blocking=non_blocking))

    def pin_memory(self) -> PackedInputs:
        """Copy to page-locked host memory; called by `torch.utils.data.DataLoader`."""
        return self._map(Tensor.pin_memory, lambda one: one.pin_memory() if hasattr(one, "pin_memory") else one)

    def _map(self, convert: Callable[[Tensor], Tensor], convert_other: Callable[[Any], Any]) -> PackedInputs:
        converted: dict[int, Tensor] = {}

        def once(tensor: Tensor) -> Tensor:
            if id(tensor) not in converted:
                converted[id(tensor)] = convert(tensor)
            return converted[id(tensor)]

        def version(before: TensorVersion | None) -> TensorVersion | None:
            if before is None:
                return None
            return TensorVersion.of(once(before.tensor), edited=not before.matches(before.tensor))

        def entry(value: Any) -> Any:
            if isinstance(value, PackedBatch):
                return replace(value.map(once), labels=version(value.labels), positions=version(value.positions))
            return once(value) if isinstance(value, Tensor) else convert_other(value)

        return type(self)({key: entry(value) for key, value in self.items()})


class PaddedInputs(dict[str, Any]):
    """A padded batch of TRL's collator in a run of rows: TRL's loss, its figures gathered as those of rows."""
