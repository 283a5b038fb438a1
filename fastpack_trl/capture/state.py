"""What a recorded micro-step reads on the host, compared from step to step, and the gradients that it adds to."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from fastpack_trl.model.upstream import BaseTunerLayer
from fastpack_trl.step.hostwork import ModelContents

_training = itemgetter("training")


class ModelState:
    """The host's side of a model, compared from one micro-step to the next.

    Addresses of parameters and buffers (a swap of ``.data``, an average of weights, a move), which of them train
    (frozen layers), edits of those with a dense copy, modes, dropout, replaced forwards, adapters (active, merged,
    disabled, scaled), and, through `ModelContents`, modules and parameters that were put in. Values of what trains are
    not compared: a graph reads them anew.

    Args:
        contents: lists the model again when it has changed.
    """

    def __init__(self, contents: ModelContents) -> None:
        self._contents = contents
        self._version: int | None = None

    def now(self, model: nn.Module) -> tuple[Any, ...]:
        """Return a value that equals an earlier one as long as nothing of the above has changed.

        Costs a tenth of a microsecond per module and parameter.
        """
        if self._version != self._contents.refresh(model):
            self._version = self._contents.version
            modules = self._contents.modules
            self._buffers = [module._buffers for module in modules if module._buffers]
            self._modes = [vars(module) for module in modules if "training" in vars(module)]
            self._adapters = [module for module in modules if isinstance(module, BaseTunerLayer)]
            self._dropouts = [module for module in modules if isinstance(module, nn.Dropout)]
            self._own = [vars(module) for module in modules]
        return (
            self._version,
            [(parameter.data_ptr(), parameter.requires_grad) for parameter in self._contents.parameters],
            # A weight that was edited since its dense copy was made is read itself from then on.
            [copied[0]._version for own in self._own if (copied := own.get("fastpack_copied_from")) is not None],
            [0 if one is None else one.data_ptr() for buffers in self._buffers for one in buffers.values()],
            bytes(map(_training, self._modes)),
            [_adapter_state(layer) for layer in self._adapters],
            [module.p for module in self._dropouts],
            [own.get("forward") for own in self._own],
            torch.is_anomaly_enabled(),
            torch.get_default_dtype(),
        )

    @property
    def is_adapted(self) -> bool:
        """Whether adapters take part in a forward, as of the last `now`."""
        return any(not layer.disable_adapters and layer.active_adapters for layer in self._adapters)


def _adapter_state(layer: BaseTunerLayer) -> tuple[Any, ...]:
    scaling = getattr(layer, "scaling", None)  # tuners other than LoRA have none
    active = layer.active_adapters
    return (
        tuple(active), tuple(layer.merged_adapters), layer.disable_adapters,
        tuple(scaling.values()) if isinstance(scaling, dict) else None,
    )  # fmt: skip


class GradientBuffers:
    """One tensor per parameter, which is its ``.grad`` from the first micro-batch of a step on.

    A parameter without a gradient has none here either: to an optimizer zeros are not None, AdamW would decay the
    parameter.

    Args:
        parameters: with the gradients of an eager micro-batch, which become the buffers; the others are left out.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.grad is not None]
        self._buffers = [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def attach(self) -> None:
        """Make each buffer the gradient of its parameter, with its present value, or zeros if it has none."""
        fresh: list[Tensor] = []
        for parameter, buffer in zip(self.parameters, self._buffers, strict=True):
            gradient = parameter.grad
            if gradient is buffer or not parameter.requires_grad:  # frozen since: zeros are not None to an optimizer
                continue
            if gradient is None:
                fresh.append(buffer)
            else:  # set by an eager micro-batch, or by a callback
                buffer.copy_(gradient)
            parameter.grad = buffer
        if fresh:
            torch._foreach_zero_(fresh)

    def were_written(self) -> None:
        """Count a replay as an edit of each gradient, as a backward pass does (autograd checks it)."""
        torch.autograd.graph.increment_version(self._buffers)
