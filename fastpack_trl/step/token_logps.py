"""Per-token log-probabilities of padded batches from rows without padding: a forward laid around TRL's.

TRL's trainers for preferences and online learning call ``model(..., labels=labels, fused_lm_head=True)`` and read
fields of shape (rows, width - 1), zero where nothing is scored. Here the backbone runs on the row of the batch's
`PromptGroups` and the head at its scored positions; the fields are what TRL's forward returns. A reward model is called
for (rows, num_labels) scores in the same way.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.upstream import missing_reason, resolve
from fastpack_trl.packing.packed_batch import IGNORE_INDEX, TensorVersion, to_transformers_kwargs
from fastpack_trl.packing.prompt_groups import PromptGroups
from fastpack_trl.step.head import VOCABULARY_SLICE, ChunkedLogProbFunction, head_log_probs, missing_tile_functions
from fastpack_trl.step.load_balancing import experts_named
from fastpack_trl.step.loss import BackboneCall, OwnForward, head_of, read_constants, whole_head

OUTPUT = "trl.trainer.utils.FusedCausalLMOutput"
CLASSIFIER = "transformers.modeling_layers.GenericForSequenceClassification"
_PADDED = ("input_ids", "attention_mask", "use_cache")
"""Keywords of a padded batch, which the row has others for."""


class Rows:
    """The rows that are known while a trainer computes a loss, by the padded token ids that they were found in.

    Attributes:
        entropy_has_gradient: a loss reads the entropy, not only a metric.
        head_trains: the policy's head does. A reference is scored as the policy is: equal models have equal figures.
        call_backbone: calls the decoder.
        forwards: the forward that was laid around each model.
        form: of the rows of completions, for `packing.prompt_groups`.
        ran: forwards that ran on a row.
        missed: forwards over other tokens than those of a known row.
    """

    def __init__(self) -> None:
        self._known: list[tuple[TensorVersion, PromptGroups]] = []
        self.entropy_has_gradient = self.head_trains = False
        self.call_backbone = BackboneCall()
        self.forwards: dict[nn.Module, RowForward] = {}
        self.form: dict[str, bool] = {}
        self.ran = self.missed = 0

    def lay(self, model: nn.Module) -> None:
        """Lay a `RowForward` around TRL's forward of a model, before accelerate wraps it."""
        self.forwards[model] = RowForward(model, self)

    @contextmanager
    def of(self, known: Iterable[tuple[Tensor, PromptGroups]]) -> Iterator[None]:
        """Know the rows of padded token ids until the context ends."""
        before = self._known
        self._known = before + [
            (TensorVersion.of(ids), groups.to(ids.device)) for ids, groups in known if groups.shape == tuple(ids.shape)
        ]
        try:
            yield
        finally:
            self._known = before

    def find(self, ids: Any) -> PromptGroups | None:
        """Return the row of padded token ids, or of a view of all of them, unedited since; None where none is known.

        On the CPU a copy is known too: ``.to("cpu:0")``, the device of a process of several, always makes one.
        """
        alike = [
            (made, groups) for made, groups in reversed(self._known)
            if isinstance(ids, Tensor) and ids.shape == made.tensor.shape and ids.dtype == made.tensor.dtype
        ]  # fmt: skip
        for made, groups in alike:
            if ids.data_ptr() == made.tensor.data_ptr() and TensorVersion.of(ids).edits == made.edits:
                return groups
        for made, groups in alike:
            if ids.device.type == "cpu" and made.matches(made.tensor) and torch.equal(ids, made.tensor):
                return groups
        self.missed += bool(self._known)
        return None


class RowForward(OwnForward):
    """A forward over rows, laid around the one that `model` has; takes effect inside of `running`.

    The model has TRL's fused head, or is a classifier. A call about none of `rows` goes to the forward inside.
    """

    def __init__(self, model: nn.Module, rows: Rows) -> None:
        self._state = types.SimpleNamespace(active=False)
        if getattr(type(model), "forward", None) is getattr(resolve(CLASSIFIER), "forward", self):
            prefix: Any = model.base_model_prefix
            super().__init__(model, functools.partial(_around_classifier, rows, self._state, prefix), "")
            return
        lacks = "" if resolve(OUTPUT) else f"trl has no {OUTPUT}"
        missing = missing_reason("sync_free") or lacks or read_constants(model.forward)[1]
        super().__init__(model, functools.partial(_around, rows, self._state), missing)

    def running(self) -> AbstractContextManager[None]:
        """Run the batches that were registered as packed rows, until the context ends."""
        return patch_attribute(self._state, "active", not self.missing)

    @property
    def head(self) -> tuple[Tensor | None, ...] | str:
        """Return weight and bias of the head, none of a classifier; a text is why the model cannot run on rows."""
        return self.missing or (() if hasattr(self.model, "score") else head_of(self.model))


def _run_backbone(rows: Rows, backbone: Callable[..., Any], groups: PromptGroups, ids: Tensor, given: Any) -> Any:
    """Return the outputs of a backbone over the row of a padded batch."""
    batch, tokens = groups.batch, groups.row(ids)
    own = {name: value for name, value in given.items() if name not in _PADDED}
    keywords = to_transformers_kwargs(batch) | {"packed_batch": batch, "use_cache": False}
    return rows.call_backbone(backbone, batch, input_ids=tokens, **keywords, **own)


def _around_classifier(rows: Rows, state: Any, prefix: str, bound: Any) -> Callable[..., Any]:
    stock = bound.__func__

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        ids: Any = kwargs.get("input_ids")
        groups = rows.find(ids) if state.active and not args and kwargs.get("labels") is None else None
        if groups is None:
            return stock(self, *args, **kwargs)
        rows.ran += 1
        outputs = _run_backbone(rows, getattr(self, prefix), groups, ids, kwargs)
        logits = self.score(outputs.last_hidden_state[0].index_select(0, groups.positions))
        return resolve("transformers.modeling_outputs.SequenceClassifierOutputWithPast")(
            logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )

    return forward


def _around(rows: Rows, state: Any, bound: Any) -> Callable[..., Any]:
    """Return the forward itself. It holds no model: a deep copy of the model runs its own layers."""
    stock, (constants, _) = bound.__func__, read_constants(bound)
    text_config, backbone_attr, in_fp32 = (
        constants[name] for name in ("text_config", "backbone_attr", "cast_lm_head_to_fp32")
    )
    knowing_experts = experts_named(text_config)

    @functools.wraps(stock)  # `generate` checks its keywords against the signature of the class
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        ids: Any = kwargs.get("input_ids")
        labels: Any = kwargs.get("labels")
        asked = state.active and fused_lm_head and labels is not None and not args
        groups = rows.find(ids) if asked and kwargs.get("shift_labels") is None else None
        if groups is None:
            with knowing_experts():
                return stock(self, *args, fused_lm_head=fused_lm_head, **kwargs)
        rows.ran += 1
        del kwargs["labels"]
        num_items = kwargs.pop("num_items_in_batch", None)
        if getattr(text_config, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        # Looked up on each call, as in TRL: PEFT and accelerate replace modules later.
        outputs = _run_backbone(rows, getattr(self, backbone_attr), groups, ids, kwargs)
        weight, bias = whole_head(self)
        hidden = outputs.last_hidden_state[0].index_select(0, groups.positions).to(weight.device)
        labels = labels.to(weight.device)
        targets = labels[:, 1:].flatten().index_select(0, groups.places)
        counts = targets.ne(IGNORE_INDEX)  # by TRL's labels, which the collator's may differ from
        without_autocast = torch.autocast(hidden.device.type, enabled=False) if in_fp32 else nullcontext()
        with without_autocast:
            fields = _figures(
                hidden.float() if in_fp32 else hidden, weight, bias, targets.clamp(min=0), constants,
                whole_gradients=rows.entropy_has_gradient or rows.head_trains,
            )  # fmt: skip
        log_probs, *others = (_placed(field, groups, counts) for field in fields)
        assert log_probs is not None
        mask = labels[:, 1:] != IGNORE_INDEX
        loss = -log_probs.sum() / (mask.sum().clamp(min=1) if num_items is None else num_items)
        aux_loss = None
        if kwargs.get("output_router_logits"):
            with knowing_experts():
                aux_loss = _balancing(outputs.router_logits, text_config, groups)
            loss = loss + getattr(text_config, "router_aux_loss_coef", 0.0) * aux_loss
        return resolve(OUTPUT)(loss, log_probs, *others, label_mask=mask, aux_loss=aux_loss)

    return forward


def _figures(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, constants: dict[str, Any],
    *, whole_gradients: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Return (N,) log-probabilities, entropy, ``log(sum(p^2))``, mean logits and top-1 flags, as TRL's function does.

    Where only log-probabilities have a gradient, and by hidden states alone, two products do; else TRL's three or four.
    """
    temperature, scale, softcap, outputs = (
        constants[name] for name in ("temperature", "logit_scale", "final_logit_softcapping", "outputs")
    )
    trains = torch.is_grad_enabled() and (weight.requires_grad or (bias is not None and bias.requires_grad))
    own = not (trains or whole_gradients or "log_sum_sq_probs" in outputs or missing_tile_functions())
    if not own or (softcap is not None and "mean_logits" in outputs):
        figures: tuple[Tensor | None, ...] = ChunkedLogProbFunction.apply(
            hidden, weight, bias, targets, temperature, VOCABULARY_SLICE, softcap, scale, outputs
        )
        return figures
    # softcap * tanh(x / softcap) / T, of scaled x, is a head with both divided by T.
    capped = None if softcap is None else softcap / temperature
    log_probs, entropy, is_top1 = head_log_probs(
        hidden, weight, bias, targets, logit_scale=scale / temperature, softcap=capped
    )
    mean_logits = None
    if "mean_logits" in outputs:
        with torch.no_grad():
            mean = weight.mean(0, dtype=torch.float32)
            mean_logits = hidden.float() @ mean + (0.0 if bias is None else bias.float().mean())
            mean_logits = mean_logits * (scale / temperature)
    return (
        log_probs, entropy if "entropy" in outputs else None, None, mean_logits,
        is_top1 if "is_top1" in outputs else None,
    )  # fmt: skip


def _placed(figures: Tensor | None, groups: PromptGroups, counts: Tensor) -> Tensor | None:
    """Return the figures of scored tokens at their places in (rows, width - 1), 0 elsewhere."""
    if figures is None:
        return None
    rows, width = groups.shape
    empty = figures.new_zeros(rows * (width - 1))
    return empty.index_copy(0, groups.places, figures.masked_fill(~counts, 0)).view(rows, width - 1)


def _balancing(router_logits: Any, text_config: Any, groups: PromptGroups) -> Any:
    """Return the load-balancing loss of a row, in which a shared token counts as often as the padded batch has it."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func  # where TRL looks it up

    return load_balancing_loss_func(
        router_logits, text_config.num_experts, text_config.num_experts_per_tok, groups.copies
    )
