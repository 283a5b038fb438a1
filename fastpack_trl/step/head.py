"""Loss of the language-model head at chosen positions, without full logits and without computing them twice.

TRL's `ChunkedLogProbFunction` computes each tile of logits twice: for the log-probabilities in forward and for the
gradients in backward. Here a tile holds whole rows of the vocabulary, so its gradients are taken while it exists: two
matmuls of tokens x hidden x vocabulary with a frozen head, three with a trained one, instead of three and four.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fastpack_trl.kernels.head_tiles import TorchTiles, TritonTiles
from fastpack_trl.model.upstream import resolve

ChunkedLogProbFunction = resolve("trl.kernels.ChunkedLogProbFunction")
chunked_logprob = resolve("trl.kernels.chunked_logprob")
LOSS_TYPES = ("nll", "dft")
VOCABULARY_SLICE = 32768
"""Number of rows of the weight converted at a time if its dtype is not the compute dtype; as in TRL."""
TILE_ELEMENTS = 2**27
"""Logits in memory at a time: 256 MiB in bf16, as in TRL's tile of 4096 x 32768."""
PLAIN_TILE_ELEMENTS = 2**22
"""The same without Triton, when each operation on a tile is a pass over memory."""
PLAIN_TILE_ROWS = 64
"""Minimum rows of a tile without Triton, because each tile reads the whole weight."""
TILE_ALIGNMENT = 64
"""The stride of a tile's rows is a multiple of this: with odd strides (128,257 tokens) GPU matmuls read and write a few
bytes at a time."""

_FORWARD = (
    "tile", "tile_stride", "targets", "running_max", "sum_exp", "x_sum_exp", "sq_sum_exp", "z_sum",
    "max_before_target", "target_logit", "vocab_start", "n_cols", "logit_scale", "softcap", "inv_t", "HAS_SOFTCAP",
    "HAS_ENTROPY", "HAS_LOG_SUM_SQ_PROBS", "HAS_MEAN_LOGITS", "HAS_IS_TOP1", "BLOCK_SIZE",
)  # fmt: skip
_BACKWARD = (
    "tile", "tile_stride", "targets", "log_z", "entropy", "grad_logprobs", "grad_entropy", "vocab_start", "n_cols",
    "logit_scale", "softcap", "inv_t", "HAS_SOFTCAP", "HAS_LOGPROB_GRAD", "HAS_ENTROPY_GRAD", "BLOCK_SIZE",
)  # fmt: skip


_Form = tuple[float, float | None, int | None]
"""Scale and softcap of the logits, and logits that exist at a time."""


class HeadLoss(NamedTuple):
    """Results of the head at N positions.

    Attributes:
        total: () fp32, the sum of the losses; the only part with a gradient.
        log_probs: (N,) fp32, log-probability of each target.
        entropy: (N,) fp32, entropy of each distribution in nats.
        is_top1: (N,) bool, whether the target is the first of the most likely tokens.
    """

    total: Tensor
    log_probs: Tensor
    entropy: Tensor
    is_top1: Tensor


def missing_tile_functions() -> str:
    """Return the first tile function that `head_loss` needs and the installed TRL lacks; empty if it has all."""
    # Without Triton a kernel does not show its parameters; its twin in torch has the same ones.
    for name, parameters in (("_forward_tile", _FORWARD), ("_backward_tile", _BACKWARD)):
        function = getattr(chunked_logprob, name, None)
        if function is None or tuple(inspect.signature(function).parameters) != parameters:
            return f"trl.kernels.chunked_logprob.{name}"
    others = ("_forward_kernel", "_backward_kernel", "_use_triton", "_addmm_fp32", "_BLOCK_SIZE")
    return next((f"trl.kernels.chunked_logprob.{name}" for name in others if not hasattr(chunked_logprob, name)), "")


@torch.compiler.disable
def head_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    weights: Tensor | None = None,
    loss_type: str = "nll",
    logit_scale: float = 1.0,
    softcap: float | None = None,
    tile_elements: int | None = None,
) -> HeadLoss:
    """Return the sum of the losses of N positions under ``softcap(logit_scale * (hidden @ weight.T + bias))``.

    Gradients are computed in forward and only scaled in backward, which may therefore run once. Never synchronizes.
    Compiled code calls it as one opaque operation.

    Args:
        hidden: (N, H), N may be 0. Products run in the autocast dtype, else in this tensor's; sums are fp32.
        weight: (V, H).
        bias: (V,).
        targets: (N,) int64 in [0, V): -100 is not allowed.
        weights: (N,) fp32, how often each position counts in the sum, but not in its figures. None: once.
        loss_type: ``nll``, or ``dft`` (arXiv:2508.05629): each loss times its probability, which gets no gradient.
        logit_scale: factor of the logits.
        softcap: the logits become ``softcap * tanh(logits / softcap)``.
        tile_elements: logits in memory at a time; default `TILE_ELEMENTS`, twice that where the weight is trained, and
            `PLAIN_TILE_ELEMENTS` without Triton.

    Raises:
        ValueError: an unknown `loss_type`.
        RuntimeError: in a second backward pass through the same graph.
    """
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"loss_type={loss_type!r} is not available: use one of {', '.join(LOSS_TYPES)}")
    differentiable = torch.is_grad_enabled()
    form = (logit_scale, softcap, tile_elements)
    return HeadLoss(*_HeadFunction.apply(hidden, weight, bias, targets, weights, loss_type, differentiable, form))


class _Pass:
    """One pass over N positions in tiles, which hold whole rows of the vocabulary.

    Attributes:
        log_probs, entropy: (N,) fp32, written during the pass.
        is_top1: (N,) bool.
        dtype: dtype of the matmuls.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, form: _Form, trained: bool) -> None:
        device, count, vocabulary = hidden.device, hidden.shape[0], weight.shape[0]
        logit_scale, softcap, elements = form
        self.kernels: TorchTiles | TritonTiles
        if chunked_logprob._use_triton(device):
            kernels = {"forward": chunked_logprob._forward_kernel, "backward": chunked_logprob._backward_kernel}
            self.kernels = TritonTiles(logit_scale, softcap, **kernels, block_size=chunked_logprob._BLOCK_SIZE)
            # A trained weight gets its gradient added once per tile: fewer, larger tiles.
            default = TILE_ELEMENTS * (2 if trained else 1) // vocabulary
        else:
            self.kernels = TorchTiles(logit_scale, softcap)
            default = max(PLAIN_TILE_ROWS, PLAIN_TILE_ELEMENTS // vocabulary)
        self.height = max(1, default if elements is None else elements // vocabulary)
        autocast = torch.is_autocast_enabled(device.type)
        self.dtype = torch.get_autocast_dtype(device.type) if autocast else hidden.dtype
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.log_probs = torch.empty(count, device=device, dtype=torch.float32)
        self.entropy = torch.empty_like(self.log_probs)
        self.is_top1 = torch.empty(count, device=device, dtype=torch.bool)
        # The columns of a tile per product: all if the weight is used as it is, else those converted at a time.
        fused = weight.dtype == self.dtype and (self.dtype == torch.float32 or chunked_logprob._use_triton(device))
        width = vocabulary if fused else VOCABULARY_SLICE
        self.slices = [slice(start, min(start + width, vocabulary)) for start in range(0, vocabulary, width)]

    def tiles(self, targets: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Any]]:
        """Yield positions, their hidden states in the compute dtype, the tile, and the result of `fold`."""
        (count, _), vocabulary = self.hidden.shape, self.weight.shape[0]
        stride = -(-vocabulary // TILE_ALIGNMENT) * TILE_ALIGNMENT
        buffer = self.hidden.new_empty(min(count, self.height), stride, dtype=self.dtype)[:, :vocabulary]
        for start in range(0, count, self.height):
            rows = slice(start, min(start + self.height, count))
            inputs, tile = self.hidden[rows].to(self.dtype), buffer[: rows.stop - start]
            for columns in self.slices:
                torch.mm(inputs, self.weight[columns].to(self.dtype).t(), out=tile[:, columns])
            if self.bias is not None:
                tile.add_(self.bias.to(self.dtype))
            figures = (self.log_probs[rows], self.entropy[rows], self.is_top1[rows])
            yield rows, inputs, tile, self.kernels.fold(tile, targets[rows], *figures)

    def through_weight(self, tile: Tensor, out: Tensor) -> None:
        """Write the gradients of hidden states, from those of a tile of logits, into `out`."""
        part = torch.zeros_like(out, dtype=torch.float32)
        for columns in self.slices:
            chunked_logprob._addmm_fp32(part, tile[:, columns], self.weight[columns].to(self.dtype))
        out.copy_(part)


class _HeadFunction(torch.autograd.Function):
    """Returns a `HeadLoss`; without a loss type its log-probabilities have the gradient, by hidden states alone."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        weights: Tensor | None,
        loss_type: str | None,
        differentiable: bool,
        form: _Form,
    ) -> tuple[Tensor, ...]:
        # `needs_input_grad` is true for a trained weight even under `no_grad`.
        wants = [differentiable and needed for needed in ctx.needs_input_grad[:3]]
        fp32 = {"device": hidden.device, "dtype": torch.float32}
        grad_hidden = torch.empty_like(hidden) if wants[0] else None
        grad_weight = torch.zeros(weight.shape, **fp32) if wants[1] else None
        grad_bias = torch.zeros(weight.shape[0], **fp32) if wants[2] else None
        total, over = torch.zeros((), **fp32), _Pass(hidden, weight, bias, form, wants[1])
        for rows, inputs, tile, folded in over.tiles(targets):
            # Gradient of the sum of the losses with respect to each log-probability.
            log_probs = over.log_probs[rows]
            factors = -log_probs.exp() if loss_type == "dft" else torch.full_like(log_probs, -1.0 if loss_type else 1.0)
            if weights is not None:
                factors *= weights[rows]
            if loss_type:
                total += (factors * log_probs).sum()
            if not any(wants):
                continue
            over.kernels.differentiate(tile, targets[rows], folded, factors)
            if grad_hidden is not None:
                over.through_weight(tile, grad_hidden[rows])
            if grad_weight is not None:
                for columns in over.slices:
                    chunked_logprob._addmm_fp32(grad_weight[columns], tile[:, columns].t(), inputs)
            if grad_bias is not None:
                grad_bias += tile.sum(dim=0, dtype=torch.float32)
        ctx.save_for_backward(None if loss_type else grad_hidden)  # freed as soon as backward has read it
        ctx.gradients = (grad_hidden, grad_weight, grad_bias) if loss_type else None
        ctx.dtypes = (hidden.dtype, weight.dtype, bias.dtype if bias is not None else None)
        ctx.is_loss = loss_type is not None
        ctx.mark_non_differentiable(over.log_probs if loss_type else total, over.entropy, over.is_top1)
        ctx.set_materialize_grads(False)  # backward is handed no zeros for them
        return total, over.log_probs, over.entropy, over.is_top1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, grad_log_probs: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        if not ctx.is_loss:
            return (ctx.saved_tensors[0] * grad_log_probs[:, None]).to(ctx.dtypes[0]), *[None] * 7
        if ctx.gradients is None:
            raise RuntimeError(
                "backward ran a second time through one loss, whose gradients were scaled in place the first time: "
                "set sync_free='off' to train with retain_graph=True"
            )
        gradients, ctx.gradients = ctx.gradients, None
        scaled = (
            None if gradient is None else gradient.mul_(grad_total).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )  # fmt: skip
        return (*scaled, *[None] * 5)


@torch.compiler.disable
def head_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    tile_elements: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities (N,) and entropies (N,), both fp32, and top-1 flags (N,), of a head without gradients.

    The gradient of a log-probability with respect to its hidden state is independent of the loss: it is computed while
    the tile exists, and backward scales each row. Only log-probabilities have a gradient. Arguments as of `head_loss`.
    """
    frozen = (weight.detach(), None if bias is None else bias.detach())
    form = (logit_scale, softcap, tile_elements)
    figures = HeadLoss(*_HeadFunction.apply(hidden, *frozen, targets, None, None, torch.is_grad_enabled(), form))
    return figures.log_probs, figures.entropy, figures.is_top1
