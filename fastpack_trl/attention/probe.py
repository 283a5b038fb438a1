"""The few tokens on which a proof runs a model: documents of a packed row, and each of them by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fastpack_trl.attention.backends import BACKENDS
from fastpack_trl.attention.dense import stock_error
from fastpack_trl.attention.install import PackedAttention
from fastpack_trl.model import facts
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.sharded import embed, embeddings_put_in, embeddings_take_gradients, fsdp_modules, head_sees_last
from fastpack_trl.packing.chunks import CHUNK
from fastpack_trl.packing.packed_batch import PackedBatch, to_transformers_kwargs

DEFAULT_LENGTHS = (9, 1, 14, 6)
"""Tokens per document: unequal, one of a single token, one longer than both of its neighbours."""
LARGEST_WINDOW = {"cpu": 512, "cuda": 1024}
"""Per device: the largest window or chunk, in tokens, that a document of the probe exceeds."""
PAST = 16
"""Tokens of that document past the window; of its logits only theirs are made."""

_OVER_CHUNKS = 2 * CHUNK + PAST  # tokens of a document whose state goes through a chunk
_NEIGHBOURS = (9, 6)  # documents before and after it
_LAST_PREDICTS_NOTHING = 1
# What a probe past a window may cost, above which the window stays unexercised: operations, and bytes of logits.
_MOST_OPERATIONS = {"cpu": 5e12, "cuda": 5e14}
_MOST_LOGITS = 2**30

Reach = dict[tuple[str, int], int]
"""Tokens that a query sees, itself included, by the name of the layer and the index of the query."""


class Probe:
    """One packed row of random tokens.

    A model that FSDP 2 has sharded is run as a whole, in every process; its embeddings are put in by a hook.

    Args:
        attention: what `packed_attention` yielded for it.
    """

    def __init__(self, model: nn.Module, attention: PackedAttention, lengths: tuple[int, ...], seed: int) -> None:
        self.model, self.attention, self.lengths = model, attention, lengths
        device = next(iter(model.parameters())).device
        sizes = (getattr(text_config(model), name, None) for name in ("vocab_size", "vocab_size_per_layer_input"))
        vocabulary = min(int(size) for size in sizes if size)
        ids = torch.randint(vocabulary, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed))
        # Padding may be a vector of zeros, where some norms (gemma3n) have no gradient.
        padding = getattr(facts.token_table(model), "padding_idx", None)
        if padding is not None:
            ids[ids == padding] = (padding + 1) % vocabulary
        self.ids = ids.to(device)
        self.documents = self.ids[0].split(lengths)
        self.batch = PackedBatch.from_lengths(lengths).to(device)
        self.packed_keywords = to_transformers_kwargs(self.batch)
        if attention.path != "off":
            self.packed_keywords["packed_batch"] = self.batch

    def embed(self, ids: Tensor) -> Tensor:
        """Return embeddings as a leaf that takes a gradient, for every comparison.

        On the CPU bitsandbytes re-packs 4-bit weights for good in an evaluation forward whose input takes none, and
        training then runs a kernel without a backward (bitsandbytes 0.50, `Linear4bit.forward`).
        """
        if fsdp_modules(self.model):
            return embed(self.model, ids).requires_grad_()
        embedding: Any = facts.text_model(self.model).get_input_embeddings()
        embeddings: Tensor = embedding(ids).detach().requires_grad_()
        return embeddings

    def packed(self, leaf: Tensor, last: int) -> Tensor:
        """Return logits of the `last` tokens of the packed row, (last, vocabulary)."""
        return self._logits(self.ids, leaf, last, **self.packed_keywords)

    def separate(self, document: int, last: int) -> Tensor:
        """Return those of one document by itself, detached: without `packed_batch` the model runs stock's attention."""
        ids = self.documents[document][None]
        with self._right_stock():
            return self._logits(ids, self.embed(ids), last).detach()

    def _right_stock(self) -> AbstractContextManager[None]:
        """Compare a path of ours with the model's own function if stock's attention computes another one."""
        if self.attention.path not in BACKENDS or not stock_error(self.attention.features):
            return nullcontext()
        return patch_attribute(text_config(self.model), "_attn_implementation_internal", "eager")

    def by_ids(self, ids: Tensor, *, packed: bool) -> Tensor:
        """Return logits of `ids`, given as a batch gives them: of the packed row, or of one document; detached."""
        kwargs = self.packed_keywords if packed else {}
        stock = nullcontext() if packed else self._right_stock()
        with stock, torch.enable_grad(), embeddings_take_gradients(self.model):  # see `embed`
            return self._run(ids.shape[1], input_ids=ids, **kwargs).detach()

    def _logits(self, ids: Tensor, leaf: Tensor, last: int, **kwargs: Any) -> Tensor:
        with torch.enable_grad(), ExitStack() as stack:
            if fsdp_modules(self.model):
                stack.enter_context(embeddings_put_in(self.model, leaf))
                kwargs["input_ids"] = torch.zeros_like(ids)
            else:
                # Some families scale their embeddings in place.
                kwargs |= {"inputs_embeds": leaf.clone(), **facts.beside_embeddings(self.model, ids)}
            return self._run(last, **kwargs)

    def _run(self, last: int, **kwargs: Any) -> Tensor:
        """Return logits of the last tokens; of a classifier, which has none, the products with its embedding."""
        if facts.text_model(self.model).can_generate():
            # Prompt learning puts its virtual tokens before each row, whose outputs PEFT returns too.
            few = ExitStack() if facts.is_prompt_learning(self.model) else head_sees_last(self.model, last)
            with few:
                logits: Tensor = self.model(use_cache=False, **kwargs).logits[0]
            return logits[-last:]
        hidden: Tensor
        if fsdp_modules(self.model):
            hidden = self.model(use_cache=False, output_hidden_states=True, **kwargs).hidden_states[-1][0]
        else:
            hidden = facts.backbones(self.model)[0](use_cache=False, **kwargs).last_hidden_state[0]
        weight: Any = facts.token_table(self.model).weight
        weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        return hidden[-last:] @ weight.detach().to(hidden.dtype).T

    def packed_losses(self, logits: Tensor) -> float:
        """Sum the losses of all documents, whose packed logits are given."""
        return sum(self.loss(index, part) for index, part in enumerate(logits.split(self.lengths)))

    def separate_losses(self, *, by_ids: bool = False) -> float:
        """Sum the losses of the documents, each by itself; by their embeddings, or by their ids."""
        total = 0.0
        for index, length in enumerate(self.lengths):
            if length > 1:
                ids = self.documents[index][None]
                total += self.loss(index, self.by_ids(ids, packed=False) if by_ids else self.separate(index, length))
        return total

    def loss(self, document: int, logits: Tensor) -> float:
        """Sum the losses that `logits`, of the last tokens of a document, give to the tokens after them."""
        labels = self.documents[document][len(self.documents[document]) - len(logits) + 1 :].to(logits.device)
        return float(nn.functional.cross_entropy(logits.detach()[:-1].double(), labels, reduction="sum"))

    def reach(self, last: int) -> tuple[Reach, Reach, list[tuple[float, float]]]:
        """Return what the last token of each document sees, packed and separate, by layer and document.

        And, for each document among the `last` tokens of the row, the sums of their losses, packed and separate.
        """
        ends = torch.tensor(self.lengths).cumsum(0).tolist()

        def packed_queries(hidden: Tensor) -> list[tuple[int, int]]:
            rows, tokens = hidden.shape[:2]
            if rows > 1:  # padded on the right
                return [(row, tokens - max(self.lengths) + length - 1) for row, length in enumerate(self.lengths)]
            return [(0, tokens - ends[-1] + end - 1) for end in ends]

        with measured_reach(self.model, packed_queries) as packed:
            logits = self.packed(self.embed(self.ids), last).detach()
        separate: Reach = {}
        losses = []
        for document, length in enumerate(self.lengths):
            after = sum(self.lengths[document + 1 :])
            compared = min(length, last - after)
            with measured_reach(self.model, lambda hidden: [(0, hidden.shape[1] - 1)]) as found:
                alone = self.separate(document, max(1, compared))
            separate |= {(layer, document): tokens for (layer, _), tokens in found.items()}
            if compared > 1:
                end = len(logits) - after
                losses.append((self.loss(document, logits[end - compared : end]), self.loss(document, alone)))
        return packed, separate, losses


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
    config, device = text_config(model), next(iter(model.parameters())).device.type
    device = device if device in LARGEST_WINDOW else "cpu"
    positions = getattr(config, "max_position_embeddings", None) or 2**62
    most = min(LARGEST_WINDOW[device], positions - PAST)
    size = max((size for size in sizes if size <= most), default=0)
    lengths = (_NEIGHBOURS[0], size + PAST, _NEIGHBOURS[1])
    logits = sum(lengths) if facts.is_prompt_learning(model) else last_past(lengths)
    operations = 2 * sum(p.numel() for p in model.parameters()) * 2 * sum(lengths)  # packed and separate
    affordable = operations <= _MOST_OPERATIONS[device] and logits * int(config.vocab_size) * 4 <= _MOST_LOGITS
    return lengths if size and affordable else ()


def last_past(lengths: tuple[int, ...]) -> int:
    """Return the tokens at the end of such a row whose logits are compared: past the window, and the next document."""
    return PAST + lengths[-1]
