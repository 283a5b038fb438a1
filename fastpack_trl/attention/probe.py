"""The tokens on which a packing check runs a model: the documents of a packed row, and each of them alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fastpack_trl.attention.backends import BACKENDS
from fastpack_trl.attention.dense import stock_error
from fastpack_trl.attention.install import PackedAttention
from fastpack_trl.model import facts
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.sharded import embeddings_put_in
from fastpack_trl.packing.chunks import CHUNK
from fastpack_trl.packing.documents import PADDED_DOCUMENTS
from fastpack_trl.packing.packed_batch import PackedBatch, to_transformers_kwargs

DEFAULT_LENGTHS = (9, 1, 14, 6)
"""Tokens per document: unequal, one of a single token, one longer than both of its neighbours."""
SHARED_LENGTHS = (7, 6, 1, 5, 4, 9)
SHARED_PARENTS = (-1, 0, 0, 0, 3, -1)
"""A prefix with three branches, one of them a single token and one that branches again, and an unrelated document."""
LARGEST_WINDOW = {"cuda": 1024}
"""Per device: the largest window, in tokens, that a document of the probe exceeds; 512 on others."""
PAST = 16
"""Tokens of that document past the window."""


class Probe:
    """One packed row of random tokens, whose segments may continue each other.

    The backbone runs without a head and gets token ids too, which some families read in addition to embeddings. If the
    path of `attention` is `PADDED_DOCUMENTS`, segments are the padded rows of one batch instead.

    Args:
        attention: the handle from `packed_attention` for the model.
        lengths: tokens of each segment.
        parents: the segment that each one continues, -1 for none; None: segments are whole documents.
    """

    def __init__(
        self, model: nn.Module, attention: PackedAttention, lengths: Sequence[int], seed: int,
        parents: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.model, self.attention, self.lengths = model, attention, tuple(lengths)
        device = next(iter(model.parameters())).device
        sizes = (getattr(text_config(model), name, None) for name in ("vocab_size", "vocab_size_per_layer_input"))
        vocabulary = min(int(size) for size in sizes if size)
        ids = torch.randint(vocabulary, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed))
        # Padding may be a vector of zeros, where some norms (gemma3n) have no gradient.
        padding = getattr(facts.token_table(model), "padding_idx", None)
        if padding is not None:
            ids[ids == padding] = (padding + 1) % vocabulary
        self.ids, own = ids.to(device), torch.arange(sum(lengths)).split(self.lengths)
        self.parents = tuple(parents or (-1,) * len(own))
        self.paths: list[Tensor] = []  # of each segment: the tokens from the beginning of its document to its own end
        for tokens, parent in zip(own, self.parents, strict=True):
            self.paths.append(tokens if parent < 0 else torch.cat([self.paths[parent], tokens]))
        before = np.array([len(path) for path in self.paths]) - np.array(self.lengths)
        prefixes = before, torch.cat(self.paths).numpy()
        self.batch = PackedBatch.from_lengths(self.lengths, prefixes=prefixes).to(device)
        self.packed_keywords = to_transformers_kwargs(self.batch)
        if attention.path != "off":
            self.packed_keywords["packed_batch"] = self.batch
        self.rows, self.mask = self.ids, torch.ones_like(self.ids)
        if attention.path == PADDED_DOCUMENTS:
            both = (row[0].split(self.lengths) for row in (self.rows, self.mask))
            self.rows, self.mask = (nn.utils.rnn.pad_sequence(documents, batch_first=True) for documents in both)
            self.packed_keywords = {"attention_mask": self.mask}

    def of_tokens(self, values: Tensor) -> Tensor:
        """Return the values of tokens, (tokens, ...), of those of rows, in which virtual tokens may be before."""
        return values[:, -self.mask.shape[1] :][self.mask.bool()]

    def packed(self) -> tuple[Tensor, Tensor]:
        """Run the row; return its embeddings, (rows, tokens, hidden), a leaf, and hidden states, (tokens, hidden).

        Hidden states are the logits of a model without a backbone inside.
        """
        try:
            embeddings, hidden = self._run(self.rows, **self.packed_keywords)
        finally:
            self.batch.clear_derived()
        return embeddings, self.of_tokens(hidden)

    def separate(self, segment: int) -> Tensor:
        """Return the hidden states of one document by itself, (tokens, hidden): without `packed_batch`, TRL's way."""
        ids = self.ids[:, self.paths[segment].to(self.ids.device)]
        is_wrong = self.attention.path in BACKENDS and stock_error(self.attention.features)
        config, name = text_config(self.model), "_attn_implementation_internal"
        with patch_attribute(config, name, "eager") if is_wrong else nullcontext():
            return self._run(ids)[1][0, -ids.shape[1] :].detach()

    def _run(self, ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        base, hidden = facts.text_model(self.model), list[Tensor]()
        backbone = (facts.backbones(base) or [base])[0]
        # PEFT puts virtual tokens before a row outside of the backbone, and drops its positions.
        model = self.model if facts.is_prompt_learning(self.model) else backbone
        # The input takes a gradient in every comparison: on the CPU bitsandbytes re-packs 4-bit weights for good in a
        # forward without one, and training then runs a kernel without a backward (0.50, `Linear4bit.forward`).
        leaf = base.get_input_embeddings()(ids).detach().requires_grad_()
        keep = backbone.register_forward_hook(lambda _module, _args, output: hidden.append(output[0]))
        with torch.enable_grad(), embeddings_put_in(base, leaf), keep:
            model(input_ids=ids, use_cache=False, **kwargs)
        return leaf, hidden[-1]

    def wrong_windows(self) -> tuple[tuple[str, int, int], ...]:
        """Return layer, reach in the packed row, and by itself, where the last token of a document sees otherwise."""
        ends = torch.tensor(self.lengths).cumsum(0) - sum(self.lengths) - 1
        with measured_reach(self.model, ends.tolist()) as packed:
            self.packed()
        wrong = []
        for document, end in enumerate(ends.tolist()):
            with measured_reach(self.model, [-1]) as separate:
                self.separate(document)
            pairs = ((layer, packed.get((layer, end)), reach) for (layer, _), reach in separate.items())
            wrong += [(layer, seen, right) for layer, seen, right in pairs if seen is not None and seen != right]
        return tuple(wrong)


@contextmanager
def measured_reach(model: nn.Module, queries: Sequence[int]) -> Iterator[dict[tuple[str, int], int]]:
    """Measure how far back each attention layer that runs inside looks: exact in every dtype, unlike a loss.

    The first position with a nonzero gradient gives the number of tokens that a layer sees, whatever computes it. A
    layer keeps its activations only until it is measured, so nothing that runs inside can be differentiated afterwards.
    Layers that do not map hidden states to hidden states are left out.

    Args:
        queries: positions of tokens, counted from the end of the row of embeddings with a gradient: -1 is the last.

    Yields:
        Tokens that a query sees, itself included, by the name of the layer and the position of the query.
    """
    found: dict[tuple[str, int], int] = {}
    base = facts.text_model(model)
    names = {module: name for name, module in base.named_modules()}
    kept = ExitStack()

    def keep(*_: Any) -> None:
        # Without its graph: a result would keep the graph that keeps it, for good, as no backward frees this one.
        kept.enter_context(saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor))

    def measure(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        kept.close()
        hidden: Any = kwargs.get("hidden_states", args[0] if args else None)
        out = output[0] if isinstance(output, tuple) else output
        if not all(isinstance(t, Tensor) and t.dim() == 3 and t.requires_grad for t in (hidden, out)):
            return
        for position in queries:
            (gradient,) = torch.autograd.grad(out[0, position].sum(), hidden, retain_graph=True, allow_unused=True)
            seen = [] if gradient is None else gradient[0].abs().amax(-1).nonzero()
            if len(seen):
                found[names[module], position] = hidden.shape[1] + position - int(seen[0]) + 1

    with ExitStack() as stack, saved_tensors_hooks(lambda _tensor: None, _never), kept:
        for module in facts.attention_modules(base):
            stack.callback(module.register_forward_pre_hook(keep).remove)
            stack.callback(module.register_forward_hook(measure, with_kwargs=True).remove)
        yield found


def _never(_packed: None) -> Tensor:
    raise RuntimeError("activations are not kept while the reach of layers is measured: no backward pass is possible")


def text_config(model: nn.Module) -> Any:
    """Return the config of the language model in `model`."""
    return facts.text_model(model).config.get_text_config()


def default_lengths(model: nn.Module) -> tuple[int, ...]:
    """Return the tokens per document of a probe; one is long enough for a state, if there is any, to cross a chunk."""
    if not facts.state_modules(facts.text_model(model)):
        return DEFAULT_LENGTHS
    over_chunks = 2 * CHUNK + PAST
    longest = min(over_chunks, getattr(text_config(model), "max_position_embeddings", None) or over_chunks)
    return tuple(longest if length == max(DEFAULT_LENGTHS) else length for length in DEFAULT_LENGTHS)


def lengths_past(model: nn.Module, windows: frozenset[int]) -> tuple[int, ...]:
    """Return tokens per document of a probe that exceeds the largest of `windows` that it can; empty if it can none."""
    positions = getattr(text_config(model), "max_position_embeddings", None) or 2**62
    most = min(LARGEST_WINDOW.get(next(iter(model.parameters())).device.type, 512), positions - PAST)
    size = max((size for size in windows if size <= most), default=0)
    return (DEFAULT_LENGTHS[0], size + PAST, DEFAULT_LENGTHS[-1]) if size else ()
