"""The few tokens on which a packing check runs a model: the documents of a packed row, and each of them by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fastpack_trl.attention.backends import BACKENDS
from fastpack_trl.attention.dense import stock_error
from fastpack_trl.attention.install import PackedAttention
from fastpack_trl.model import facts
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.packing.chunks import CHUNK
from fastpack_trl.packing.packed_batch import PackedBatch, to_transformers_kwargs
from fastpack_trl.packing.prefixes import SharedRow, packed_batch

DEFAULT_LENGTHS = (9, 1, 14, 6)
"""Tokens per document: unequal, one of a single token, one longer than both of its neighbours."""
SHARED_LENGTHS = (7, 6, 1, 5, 4, 9)
SHARED_PARENTS = (-1, 0, 0, 0, 3, -1)
"""A prefix with three branches, one of them a single token and one that goes on, and a document beside them."""
LARGEST_WINDOW = {"cpu": 512, "cuda": 1024}
"""Per device: the largest window or chunk, in tokens, that a document of the probe exceeds."""
PAST = 16
"""Tokens of that document past the window."""

_OVER_CHUNKS = 2 * CHUNK + PAST  # tokens of a document whose state goes through a chunk
_NEIGHBOURS = (9, 6)  # documents before and after it
_LAST_PREDICTS_NOTHING = 1
_MOST_OPERATIONS = {"cpu": 5e12, "cuda": 5e14}
"""Cost of a probe past a window above which the window stays unexercised."""

Reach = dict[tuple[str, int], int]
"""Tokens that a query sees, itself included, by the name of the layer and the index of the query."""


class Passed(NamedTuple):
    """A forward pass of a model: the embeddings that it began with, and the hidden states of its backbone."""

    embeddings: Tensor
    """(1, tokens, hidden), a leaf with a gradient."""
    hidden: Tensor
    """(tokens, hidden), or the logits of a model without a backbone inside."""


class Probe:
    """One packed row of random tokens, whose segments may go on from each other.

    The backbone runs, without a head, and is given token ids: some families read them beside the embeddings.

    Args:
        attention: what `packed_attention` yielded for the model.
        lengths: tokens of each segment.
        parents: the segment that each one goes on from, -1 for none; None: segments are whole documents.
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
        self.ids = ids.to(device)
        own = torch.arange(sum(lengths)).split(self.lengths)
        self.parents = tuple(parents or (-1,) * len(own))
        self.paths: list[Tensor] = []
        """For each segment the tokens of the row from the beginning of its document to its own end."""
        for tokens, parent in zip(own, self.parents, strict=True):
            self.paths.append(tokens if parent < 0 else torch.cat([self.paths[parent], tokens]))
        self.batch = (self._shared_batch() if parents else PackedBatch.from_lengths(self.lengths)).to(device)
        self.packed_keywords = to_transformers_kwargs(self.batch)
        if attention.path != "off":
            self.packed_keywords["packed_batch"] = self.batch

    def _shared_batch(self) -> PackedBatch:
        lengths, tokens = np.array(self.lengths), np.arange(sum(self.lengths))
        before = np.array([len(path) for path in self.paths]) - lengths
        return packed_batch(SharedRow(lengths, before, torch.cat(self.paths).numpy(), tokens, tokens))

    def packed(self) -> Passed:
        """Run the packed row."""
        try:
            return self._run(self.ids, **self.packed_keywords)
        finally:
            self.batch.clear_derived()

    def separate(self, segment: int) -> Tensor:
        """Return the hidden states of one document by itself, (tokens, hidden): without `packed_batch`, TRL's way."""
        with self._right_stock():
            return self._run(self.ids[:, self.paths[segment].to(self.ids.device)]).hidden.detach()

    def _right_stock(self) -> AbstractContextManager[None]:
        """Compare with the model's own function if stock's attention computes another one."""
        if self.attention.path not in BACKENDS or not stock_error(self.attention.features):
            return nullcontext()
        return patch_attribute(text_config(self.model), "_attn_implementation_internal", "eager")

    def _run(self, ids: Tensor, **kwargs: Any) -> Passed:
        found: dict[str, Tensor] = {}

        def begin(_module: Any, _args: Any, output: Tensor) -> Tensor:
            # The input takes a gradient in every comparison: on the CPU bitsandbytes re-packs 4-bit weights for good in
            # a forward without one, and training then runs a kernel without a backward (0.50, `Linear4bit.forward`).
            found["embeddings"] = output.detach().requires_grad_()
            return found["embeddings"].clone()  # some families scale their embeddings in place

        def end(_module: Any, _args: Any, output: Any) -> None:
            found["hidden"] = output[0]

        base = facts.text_model(self.model)
        backbone = (facts.backbones(base) or [base])[0]
        # PEFT puts virtual tokens before a row outside of the backbone, and drops its positions.
        model = self.model if facts.is_prompt_learning(self.model) else backbone
        with torch.enable_grad(), ExitStack() as stack:
            for module, hook in ((base.get_input_embeddings(), begin), (backbone, end)):
                stack.callback(module.register_forward_hook(hook).remove)
            model(input_ids=ids, use_cache=False, **kwargs)
        return Passed(found["embeddings"], found["hidden"][0, -ids.shape[1] :])

    def reach(self) -> tuple[Reach, Reach, float]:
        """Return what the last token of each document sees, packed and separate, by layer and document.

        And the largest relative difference of a document's hidden states.
        """
        ends = torch.tensor(self.lengths).cumsum(0).tolist()

        def packed_queries(hidden: Tensor) -> list[tuple[int, int]]:
            return [(0, hidden.shape[1] - ends[-1] + end - 1) for end in ends]

        with measured_reach(self.model, packed_queries) as packed:
            hidden = self.packed().hidden.detach()
        separate: Reach = {}
        differences = []
        for document, path in enumerate(self.paths):
            with measured_reach(self.model, lambda hidden: [(0, hidden.shape[1] - 1)]) as found:
                alone = self.separate(document)
            separate |= {(layer, document): tokens for (layer, _), tokens in found.items()}
            differences.append(relative(hidden[path.to(hidden.device)], alone))
        return packed, separate, max(differences)


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over that of `expected`."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@contextmanager
def measured_reach(model: nn.Module, queries: Callable[[Tensor], Sequence[tuple[int, int]]]) -> Iterator[Reach]:
    """Measure how far back each attention layer that runs inside looks: exact in every dtype, unlike a loss.

    A key that a query does not see has a gradient of exactly zero, one that it sees has not. So the first position with
    a gradient says how many tokens a layer sees, whatever computes it. A layer keeps its activations only until it is
    measured: what runs inside cannot be differentiated afterwards. Layers of another form are left out.

    Args:
        model: a transformers causal language model, to be run on embeddings that take a gradient.
        queries: given the input of a layer, (rows, tokens, hidden), the row and the position of each query.
    """
    found: Reach = {}
    base = facts.text_model(model)
    names = {module: name for name, module in base.named_modules()}
    kept = ExitStack()

    def keep(*_: Any) -> None:
        kept.enter_context(saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))

    def measure(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        kept.close()
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        out = output[0] if isinstance(output, tuple) else output
        if not all(isinstance(t, Tensor) and t.dim() == 3 and t.requires_grad for t in (hidden, out)):
            return
        asked = queries(hidden)
        for index, (row, position) in enumerate(asked):
            more = index + 1 < len(asked)
            (gradient,) = torch.autograd.grad(out[row, position].sum(), hidden, retain_graph=more, allow_unused=True)
            seen = [] if gradient is None else gradient[row].abs().amax(-1).nonzero()
            if len(seen):
                found[names[module], index] = position - int(seen[0]) + 1

    with ExitStack() as stack, saved_tensors_hooks(lambda _tensor: None, _never), kept:
        for module in facts.attention_modules(base):
            stack.callback(module.register_forward_pre_hook(keep).remove)
            stack.callback(module.register_forward_hook(measure, with_kwargs=True).remove)
        yield found


def _never(_packed: None) -> Tensor:
    raise RuntimeError("what runs while its reach is measured keeps nothing for a backward pass")


def default_lengths(model: nn.Module) -> tuple[int, ...]:
    """Return the tokens per document of a probe: `DEFAULT_LENGTHS`, one of them longer where layers carry a state.

    A state crosses no chunk of a short document. Where positions are a table, it has no more of them.
    """
    if not facts.state_modules(facts.text_model(model)):
        return DEFAULT_LENGTHS
    longest = min(_OVER_CHUNKS, getattr(text_config(model), "max_position_embeddings", None) or _OVER_CHUNKS)
    return tuple(longest if length == max(DEFAULT_LENGTHS) else length for length in DEFAULT_LENGTHS)


def text_config(model: nn.Module) -> Any:
    """Return the config of the language model in `model`."""
    return facts.text_model(model).config.get_text_config()


def spans(attention: PackedAttention, model: nn.Module) -> dict[str, int]:
    """Return the windows and chunks of a model in tokens, by their name in the report."""
    chunk = getattr(text_config(model), "attention_chunk_size", None)
    found = {f"window {size}": size for size in sorted(attention.features.windows)}
    return found | ({f"chunk {chunk}": int(chunk)} if chunk is not None else {})


def exceeds(length: int, span: int) -> bool:
    """Return whether a document has a prediction that sees less than all before it."""
    return length > span + _LAST_PREDICTS_NOTHING


def lengths_past(model: nn.Module, sizes: list[int]) -> tuple[int, ...]:
    """Return tokens per document of a probe that exceeds the largest affordable one of `sizes`; empty if none is.

    A window may be too large for the model's positions, for `LARGEST_WINDOW`, or for the start of a run.
    """
    device = next(iter(model.parameters())).device.type
    device = device if device in LARGEST_WINDOW else "cpu"
    positions = getattr(text_config(model), "max_position_embeddings", None) or 2**62
    most = min(LARGEST_WINDOW[device], positions - PAST)
    size = max((size for size in sizes if size <= most), default=0)
    lengths = (_NEIGHBOURS[0], size + PAST, _NEIGHBOURS[1])
    operations = 2 * sum(p.numel() for p in model.parameters()) * 2 * sum(lengths)  # packed and separate
    return lengths if size and operations <= _MOST_OPERATIONS[device] else ()
