"""Lengths of documents, rows as TRL packs them, and what a row costs: the material of `benchmarks.balance`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import datasets
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from trl import pack_dataset

from benchmarks.lora_models import LoraModel, build, definitions
from benchmarks.model_shapes import build_model, shape_of
from fastpack_trl.measure.flops import attention_pairs, model_flops
from fastpack_trl.quickstart.corpus import source_files, stdlib_folder

Lengths: TypeAlias = NDArray[np.int64]
Costs: TypeAlias = NDArray[np.float64]

CHAT = (
    (0.5266, 974.0), (0.1489, 753.3), (0.0301, 520.5), (0.0814, 297.8), (0.2119, 661.6), (0.0011, 38135.6),
)  # fmt: skip
"""Share of the examples and mean tokens of each kind in the SFT mix of Llama 3 (arXiv:2407.21783, table 7): general
English, code, multilingual, exam-like, reasoning and tools, long context. The shape within a kind is not published."""
CHAT_SIGMA = 0.8
"""Of the log-normal distribution that a kind of `CHAT` is taken to have."""
LONG_SHARE = 0.5
"""Of the tokens of `long_mix`: documents of `LONG_FROM` to `LONG_TO` tokens, all lengths alike."""
LONG_FROM, LONG_TO = 4_096, 131_072
TOKEN_RATES = {"qwen3-0.6b": 0.42, "qwen3-8b": 0.64}
"""Operations per second of all but attention over those of large products, which norms, activations, LoRA and the loss
slow down. From times of rows with short documents on one H200, compiled layers and nothing recomputed: 9.3 us a token
(0.6B, 8,192 tokens, ``captured_cuda_2026-11-22_small.json``) and 70.7 us (8B, ``lora_cuda_2026-11-20_qwen3-8b.json``),
with products taken to run at 700 TFLOPS and attention at 0.6 of that."""
_DEFINITION_TOKENS = 1_000_000
_VOCABULARY = 8_000
_DRAWN = 100_000


@cache
def definition_lengths() -> Lengths:
    """Return the tokens of the standard library's functions and classes, the documents of `benchmarks.lora_models`."""
    _, rows = definitions(_DEFINITION_TOKENS, _VOCABULARY, LONG_TO)
    return np.array([len(ids) for ids in rows["input_ids"]], dtype=np.int64)


@cache
def file_lengths() -> Lengths:
    """Return the tokens of each whole source file of the standard library, under the same tokenizer."""
    tokenizer, _ = definitions(_DEFINITION_TOKENS, _VOCABULARY, LONG_TO)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in source_files(stdlib_folder())]
    return np.array([len(ids) + 1 for ids in tokenizer(texts)["input_ids"]], dtype=np.int64)


def chat_lengths() -> Lengths:
    """Return lengths drawn from `CHAT`: published shares and means, synthetic (log-normal) within a kind."""
    random = np.random.default_rng(0)
    shares, means = np.array(CHAT).T
    kinds = random.choice(len(means), size=_DRAWN, p=shares / shares.sum())
    # A log-normal distribution has the mean exp(mu + sigma^2 / 2).
    drawn = random.lognormal(np.log(means[kinds]) - CHAT_SIGMA**2 / 2, CHAT_SIGMA)
    return np.maximum(drawn, 8).astype(np.int64)


def long_mix_lengths() -> Lengths:
    """Return a synthetic mix for long contexts: `chat_lengths` and, for `LONG_SHARE` of the tokens, long documents."""
    chat = chat_lengths()
    random = np.random.default_rng(1)
    wanted = chat.sum() * LONG_SHARE / (1 - LONG_SHARE)
    count = round(float(wanted) / ((LONG_FROM + LONG_TO) / 2))
    return np.concatenate([chat, random.integers(LONG_FROM, LONG_TO, size=count, endpoint=True)])


HISTOGRAMS: dict[str, Callable[[], Lengths]] = {
    "definitions": definition_lengths,
    "files": file_lengths,
    "chat": chat_lengths,
    "long_mix": long_mix_lengths,
}


def pack(lengths: Lengths, row_tokens: int) -> list[Lengths]:
    """Return the document lengths of each row that ``trl.pack_dataset`` makes of these documents, in its order.

    TRL packs best fit decreasing within each 1,000 documents, the batch of ``Dataset.map``: the last row of each batch
    is what was left over. Longer documents are cut to a row.
    """
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    # Lists of nulls: only lengths count here, and tokens that are not there need no memory.
    column = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.nulls(int(offsets[-1])))
    datasets.disable_progress_bars()
    try:
        packed = pack_dataset(datasets.Dataset(pa.table({"input_ids": column})), row_tokens)
    finally:
        datasets.enable_progress_bars()
    rows = packed.data.column("seq_lengths").combine_chunks()
    return np.split(rows.flatten().to_numpy().astype(np.int64), rows.offsets.to_numpy()[1:-1])


@dataclass(frozen=True, slots=True)
class CostModel:
    """What a row costs on one device: forward, backward and recomputed layers, in operations at the rate of products.

    ``CostModel("qwen3-8b", lora=True)``. Every layer is checkpointed, TRL's default.
    """

    shape: str
    lora: bool

    @property
    def name(self) -> str:
        return f"{self.shape} {'LoRA' if self.lora else 'full'}"

    @property
    def token_rate(self) -> float:
        """Return that of `TOKEN_RATES`; 1 where none was measured."""
        return TOKEN_RATES.get(self.shape, 1.0)

    def per_token_and_pair(self) -> tuple[float, float]:
        """Return operations per token, and per causal query-key pair of attention.

        To what `model_flops` counts the kernels' own recompute of the scores is added, half of attention's forward.
        """
        return _operations(self.shape, self.lora)

    def costs(self, rows: list[Lengths], attention_rate: float) -> Costs:
        """Return the cost of each row.

        Args:
            rows: tokens of the documents of each row.
            attention_rate: operations per second of attention's kernels over those of large products.
        """
        per_token, per_pair = self.per_token_and_pair()
        tokens = np.array([int(row.sum()) for row in rows], dtype=np.float64)
        pairs = np.array([attention_pairs(row.tolist()) for row in rows])
        return per_token / self.token_rate * tokens + per_pair / attention_rate * pairs


@cache
def _operations(shape: str, lora: bool) -> tuple[float, float]:
    if lora:
        model = build(LoraModel(shape, "bf16"), layers=None, positions=LONG_TO, seed=0, device="meta")
        model.enable_input_require_grads()  # as TRL does for adapters under checkpointing
    else:
        model = build_model(shape_of(shape), positions=LONG_TO, seed=0, device="meta")
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    counted = model_flops(model.train())
    (window,) = counted.windows  # full attention in every layer
    token = counted.count(1, {window: 0}, 1)
    pair = counted.count(0, {window: 1}, 0)
    return token.hardware, pair.hardware + pair.forward / 2
