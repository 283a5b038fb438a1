"""``python -m benchmarks micro``: kernels and work of the host alone, the sides of a row in turn in one process.

    python -m benchmarks micro --rows collate "experts small-gpt-oss" --json mine.jsonl
    python -m benchmarks micro --rows "experts gpt-oss-20b lora 8192 uniform" --rounds 7

A row is a function that returns a callable per side. On a GPU a round is the median of `triton.testing.do_bench`, on a
CPU that of `torch.utils.benchmark`. Sides must compute the same before they are timed.
"""

from __future__ import annotations

import contextlib
import math
import random
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import Parser, known_names
from benchmarks.models import ALPHA, RANK, STACKS, build_model, random_ids, shape_of
from benchmarks.records import append, facts_of
from benchmarks.results_page import shown
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.attention.reference import band_mask
from fastpack_trl.errors import UserError
from fastpack_trl.model.facts import attention_modules, text_model, window_of
from fastpack_trl.moe.apply import apply_moe
from fastpack_trl.moe.layout import experts_modules
from fastpack_trl.packing.collator import PackingCollator
from fastpack_trl.packing.packed_batch import PackedBatch

TRL, OURS = "trl", "fastpack"
ONE_SORT = "one_sort"
MODES = "lora", "frozen", "full"
BUDGETS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Largest relative difference of a result from that of the first side, by dtype."""
Sides = Mapping[str, Callable[[], Tensor]]


@dataclass(frozen=True, slots=True)
class Case:
    """What `make` returns for a device and a seed: a callable per side, whose tensor must be the same.

    Attributes:
        tokens: of a call.
        gpu: whether it is for a GPU only: it would take minutes on a CPU.
    """

    case: str
    make: Callable[[str, int], Sides]
    tokens: int
    gpu: bool = False


def collate(device: str, seed: int, *, tokens: int = 8192, rows: int = 64) -> Sides:
    """Fetch and collate packed rows as TRL does, and as our trainer does from Arrow's memory."""
    import datasets
    from trl.data_utils import pack_dataset
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    draw = random.Random(seed)
    lengths = [draw.randint(64, 1024) for _ in range(math.ceil(1.2 * rows * tokens / 544) + 8)]
    documents = random_ids(lengths, 32_000, seed)
    labels = [[-100] * (len(ids) // 4) + ids[len(ids) // 4 :] for ids in documents]
    whole = datasets.Dataset.from_dict({"input_ids": documents, "labels": labels})
    packed = pack_dataset(whole, tokens, "bfd").select(range(rows))
    theirs, ours = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True), PackingCollator(pad_token_id=0)

    def every(fetch: Callable[[list[int]], Any], collator: Callable[[Any], Any]) -> Tensor:
        sums = [collator(fetch([index])) for index in range(rows)]
        return torch.stack([(batch["labels"] * batch["position_ids"]).sum() for batch in sums]).double()

    arrays = packed.with_format("numpy")
    return {TRL: partial(every, packed.__getitems__, theirs), OURS: partial(every, arrays.__getitems__, ours)}


def metadata(device: str, seed: int, *, tokens: int, layers: int) -> Sides:
    """Make metadata and mask of a packed row in each layer, or once: what a step saves at least."""
    batch = PackedBatch.from_lengths(lengths_of(tokens, seed)).to(torch.device(device))

    def rebuild(times: int) -> Tensor:
        masks = [rebuilt_mask(batch.position_ids, None) for _ in range(times)]
        return masks[-1].double()

    return {"metadata per layer": partial(rebuild, layers), "metadata once": partial(rebuild, 1)}


def rebuilt_mask(position_ids: Tensor, window: int | None) -> Tensor:
    """Return (1, 1, total_tokens, total_tokens) bool from lengths of documents that are read back from the device."""
    starts = (position_ids[0] == 0).nonzero().squeeze(1)
    lengths = torch.cat([starts, starts.new_full((1,), position_ids.shape[1])]).diff().tolist()
    blocks = [band_mask(length, window or length, position_ids.device) for length in lengths]
    return torch.block_diag(*blocks).bool()[None, None]


@contextlib.contextmanager
def metadata_per_layer(trainer: Any) -> Iterator[None]:
    """Make metadata and mask of packed rows anew in each attention layer of TRL's trainer, under sdpa."""

    def skip_own_mask(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        positions = kwargs["position_ids"]  # a 4-D mask is returned by transformers as it is
        return args, kwargs | {"attention_mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=positions.device)}

    def rebuild(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"attention_mask": rebuilt_mask(kwargs["position_ids"], window_of(module))}

    hooks = {text_model(trainer.model): skip_own_mask} | dict.fromkeys(attention_modules(trainer.model), rebuild)
    with contextlib.ExitStack() as stack:
        for module, hook in hooks.items():
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def lengths_of(tokens: int, seed: int) -> tuple[int, ...]:
    """Return lengths of documents of 128 to 384 tokens that fill a row."""
    draw, lengths = random.Random(seed), list[int]()
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, draw.randint(128, 384)))
    return tuple(lengths)


def experts(device: str, seed: int, *, model: str, mode: str, tokens: int, skewed: bool) -> Sides:
    """Run one block of experts, forward and backward: transformers' ``grouped_mm`` with PEFT, or ours."""
    shape = _shape(model, device).cut_to(1)
    width, top = int(shape.fields["hidden_size"]), int(shape.fields["num_experts_per_tok"])
    generator = torch.Generator(device).manual_seed(seed)
    hidden, upstream = (
        torch.randn(tokens, width, generator=generator, device=device).to(shape.weights) for _ in range(2)
    )

    def side(ours: bool) -> Callable[[], Tensor]:
        made = _with_adapters(build_model(shape, positions=tokens, seed=seed, device=device), mode)
        block: Any = text_model(made).base_model.layers[0].mlp.experts
        inner: Any = next(iter(experts_modules(made).values()))
        ids, weights = routing(tokens, top, int(inner.num_experts), skewed, seed, device)
        if ours:
            apply_moe(made)
        inputs = hidden.clone().requires_grad_(), weights.to(shape.weights).requires_grad_()
        return partial(_pass, made, inputs, lambda: block(inputs[0], ids, inputs[1]), upstream)

    return {TRL: side(False), OURS: side(True)}


def decoder(device: str, seed: int, *, model: str, tokens: int) -> Sides:
    """Run all decoder layers on a packed row with LoRA on the experts, forward and backward; attention is ours."""
    shape = _shape(model, device).cut_to(None)
    batch = PackedBatch.from_lengths(lengths_of(tokens, seed)).to(torch.device(device))
    generator = torch.Generator(device).manual_seed(seed)
    width = int(shape.fields["hidden_size"])
    rows, upstream = (
        torch.randn(1, tokens, width, generator=generator, device=device).to(shape.weights) for _ in range(2)
    )

    def side(ours: bool) -> Callable[[], Tensor]:
        made = _with_adapters(build_model(shape, positions=tokens, seed=seed, device=device), "lora")
        packed_attention(made).__enter__()  # for the rest of the process
        if ours:
            apply_moe(made)
        inputs = rows.clone().requires_grad_()
        options = {"position_ids": batch.position_ids, "packed_batch": batch, "use_cache": False}
        backbone = text_model(made).base_model
        return partial(
            _pass, made, (inputs,), lambda: backbone(inputs_embeds=inputs, **options).last_hidden_state, upstream
        )

    return {TRL: side(False), OURS: side(True)}


def _pass(model: Any, inputs: Sequence[Tensor], forward: Callable[[], Tensor], upstream: Tensor) -> Tensor:
    """Run forward and backward; return the output and the gradient of the first input."""
    model.zero_grad(set_to_none=True)
    for tensor in inputs:
        tensor.grad = None
    out = forward()
    out.backward(upstream)
    assert inputs[0].grad is not None
    return torch.cat([out.detach(), inputs[0].grad])


def dispatch(device: str, seed: int, *, model: str, tokens: int) -> Sides:
    """Find the tokens of each expert and add up their outputs, forward and backward, by experts that do nothing."""
    shape = _shape(model, device)
    count = int(shape.fields["num_local_experts"])
    ids, weights = routing(tokens, int(shape.fields["num_experts_per_tok"]), count, False, seed, device)
    generator = torch.Generator(device).manual_seed(seed)
    hidden = torch.randn(tokens, int(shape.fields["hidden_size"]), generator=generator, device=device)
    hidden = hidden.to(shape.weights).requires_grad_()

    def run(call: Callable[..., Tensor]) -> Tensor:
        hidden.grad = None
        out = call(hidden, ids, weights.to(hidden.dtype), count, lambda number, rows: rows)
        out.backward(out.detach())
        return out.detach()

    return {"expert by expert": partial(run, by_loop), "one sort": partial(run, by_one_sort)}


def _shape(model: str, device: str) -> Any:
    return replace(shape_of(model), weights=torch.bfloat16 if device == "cuda" else torch.float32)


def _with_adapters(model: Any, mode: str) -> Any:
    """Return the model with LoRA on its expert stacks (``lora``), frozen, or with stacks that train (``full``)."""
    from peft import LoraConfig, get_peft_model

    model.requires_grad_(False)
    if mode == "full":
        for module in experts_modules(model).values():
            module.requires_grad_(True)
    if mode == "lora":
        model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_parameters=list(STACKS)))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at first: the gradient of A would be zero too
                nn.init.normal_(parameter, std=0.02)
    return model.train()


def routing(tokens: int, top: int, count: int, skewed: bool, seed: int, device: str) -> tuple[Tensor, Tensor]:
    """Draw (T, k) distinct experts and their fp32 weights: uniform, or a few experts with most of the tokens."""
    generator = torch.Generator(device).manual_seed(seed)
    scores = torch.randn(tokens, count, generator=generator, device=device)
    if skewed:
        scores += torch.linspace(3, 0, count, device=device)
    weights, ids = scores.topk(top, dim=-1)
    return ids, weights.softmax(-1)


def by_one_sort(hidden: Tensor, ids: Tensor, weights: Tensor, count: int, expert: Callable[..., Tensor]) -> Tensor:
    """Return the weighted sum of the experts of each token, found by one sort and one read of the device.

    Args:
        hidden: (T, H).
        ids: (T, k) experts.
        weights: (T, k).
        expert: given the number of an expert and its rows, returns their outputs.
    """
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    tokens = order // ids.shape[1]
    parts = hidden[tokens].split(torch.bincount(flat, minlength=count).tolist())
    out = torch.cat([expert(number, rows) for number, rows in enumerate(parts) if len(rows)])
    weighted = out * weights.flatten()[order, None]
    return torch.zeros_like(hidden).index_add(0, tokens, weighted.to(hidden.dtype))


def by_loop(hidden: Tensor, ids: Tensor, weights: Tensor, count: int, expert: Callable[..., Tensor]) -> Tensor:
    """Return the same as transformers' loop finds it: a mask per expert, two reads of the device for each."""
    out = torch.zeros_like(hidden)
    with torch.no_grad():
        mask = nn.functional.one_hot(ids, num_classes=count).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for (number,) in hit:
        slot, tokens = torch.where(mask[number])
        weighted = expert(number, hidden[tokens]) * weights[tokens, slot, None]
        out = out.index_add(0, tokens, weighted.to(hidden.dtype))
    return out


def register_sorted_loop() -> None:
    """Register gpt-oss's experts, one after the other on rows that were sorted once, under the name `ONE_SORT`."""
    from transformers.integrations.moe import ExpertsInterface

    def run(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        def expert(number: int, rows: Tensor) -> Tensor:
            inner = self._apply_gate(rows @ self.gate_up_proj[number] + self.gate_up_proj_bias[number])
            out: Tensor = inner @ self.down_proj[number] + self.down_proj_bias[number]
            return out

        return by_one_sort(hidden_states, top_k_index, top_k_weights, self.num_experts, expert)

    ExpertsInterface.register(ONE_SORT, run)


def _cases() -> Iterator[tuple[str, Case]]:
    yield "collate 8192", Case("collate", collate, 8192 * 64)
    yield "metadata 2048", Case("micro", partial(metadata, tokens=2048, layers=16), 2048)
    yield "metadata 4096", Case("micro", partial(metadata, tokens=4096, layers=40), 4096, gpu=True)
    for model, tokens, gpu in (("small-gpt-oss", 512, False), ("gpt-oss-20b", 2048, True), ("gpt-oss-20b", 8192, True)):
        yield f"dispatch {model} {tokens}", Case("micro", partial(dispatch, model=model, tokens=tokens), tokens, gpu)
    for model, sizes in {
        "small-qwen3-moe": (512, 2048), "small-gpt-oss": (512, 2048), "gpt-oss-20b": (2048, 8192, 32_768),
        "qwen3-30b-a3b": (2048, 8192, 32_768),
    }.items():  # fmt: skip
        gpu = not model.startswith("small")
        for tokens in sizes:
            make = partial(decoder, model=model, tokens=tokens)
            yield f"experts {model} decoder lora {tokens}", Case("experts", make, tokens, gpu)
            for mode in MODES:
                for skewed in (False, True):
                    block = partial(experts, model=model, mode=mode, tokens=tokens, skewed=skewed)
                    spread = "skewed" if skewed else "uniform"
                    yield f"experts {model} block {mode} {tokens} {spread}", Case("experts", block, tokens, gpu)


CASES = dict(_cases())


def seconds_of(call: Callable[[], Any], device: str) -> float:
    """Return the seconds of a call: the median of some."""
    if device == "cuda":
        from triton.testing import do_bench

        return float(do_bench(call, return_mode="median")) / 1e3
    from torch.utils.benchmark import Timer

    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=0.2).median)


def measure(name: str, rounds: int, device: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield a record per side of a row, without what all records of a command share.

    Raises:
        UserError: a side computes something else than the first one.
    """
    case = CASES[name]
    sides = case.make(device, seed)
    (_, first), *others = results = [(side, call()) for side, call in sides.items()]
    for side, result in others:
        apart = float((result.double() - first.double()).norm() / first.double().norm())
        if not apart <= BUDGETS.get(first.dtype, 1e-4):
            raise UserError(f"{name}: the result of {side!r} differs from that of {results[0][0]!r} by {apart:.1e}")
    del results, first, others
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in [*sides][:: -1 if number % 2 else 1]:
            seconds[side].append(seconds_of(sides[side], device))
    for side, found in seconds.items():
        run = {"case": case.case, "row": name, "side": side, "round": 0, "steps": rounds, "seconds": found}
        yield run | {"tokens": case.tokens * rounds, "peak_gib": None, "report": None}


def parse(words: Sequence[str]) -> Namespace:
    """Return the options.

    Raises:
        UserError: an unknown row, a file that cannot be written.
    """
    parser = Parser("micro", __doc__, "rows: " + ", ".join(CASES))
    add = parser.add_argument
    add("--rows", nargs="+", metavar="ROW", default=[], help="names, or how they begin (default: all of this device)")
    add("--rounds", type=int, default=7, help="of each side (default: %(default)s)")
    args = parser.measurement(words, threads=1)
    cuda = torch.cuda.is_available()
    args.rows = known_names("row", args.rows or [name for name, case in CASES.items() if case.gpu == cuda], CASES)
    return args


def main(words: Sequence[str]) -> int:
    """Measure rows, print their tables, and append their records to a file."""
    args = parse(words)
    torch.set_num_threads(args.threads)
    about, records = facts_of(args, ()), list[dict[str, Any]]()
    for name in args.rows:
        for run in measure(name, args.rounds, about["machine"]["device"], args.seed):
            records.append(run | about)
            append(args.json, records[-1])
    print(shown(records))
    return 0
