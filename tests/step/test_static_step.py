"""A step over a static batch: the loss, the figures and the gradients of the plain one, for whatever is copied into it.

Attention is the varlen kernel's twin, so that rows that flash leaves uninitialised are NaN.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from static_material import bucket_for, make_inputs, make_rows, rows, shared_rows, surplus, to_static
from torch import Tensor
from trainer_material import build, make_dataset
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from fastpack_trl import FastSFTTrainer
from fastpack_trl.attention.varlen import Varlen
from fastpack_trl.errors import PackingError
from fastpack_trl.packing.buckets import Bucket
from fastpack_trl.packing.collator import unshared
from fastpack_trl.packing.static_batch import StaticInputs, copy_into
from fastpack_trl.step.step_loss import StepLoss, step_loss
from fastpack_trl.step.sync_free import SyncFreeStep
from fastpack_trl.testing import assert_gradients_close, count_host_syncs, gradients

FAMILIES = ("llama", "qwen3", "gemma3_text", "qwen3_moe", "gpt_oss")
EXPERTS = ("qwen3_moe", "gpt_oss")
MOE = ("kernels/grouped.py", "moe/experts.py", "integrations/moe.py")
STEPS = 3
"""Micro-batches of the optimizer step to which a row belongs; not those of the arguments."""
ROOMY = Bucket(tokens=96, segments=40, max_seqlen=20, loss_tokens=100, parts=4)
"""Much larger than the rows here."""


# A step takes a tenth of a second: what fails is shown as it is found.
few = settings(
    max_examples=5, deadline=None, phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip


class Figures(NamedTuple):
    loss: Tensor
    table: Tensor
    gradients: dict[str, Tensor]


def make_trainer(folder: Path, family: str, lora: bool = False, **more: Any) -> FastSFTTrainer:
    torch.manual_seed(0)
    peft_config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
    made: Any = build(
        FastSFTTrainer, folder, family=family, data=make_dataset("tokens", 12), packing=True,
        fast={"packed_attention": "varlen", "verify_packing": "off", "layer_compile": "off"},
        trainer={"peft_config": peft_config if lora else None}, **{"gradient_accumulation_steps": 2} | more,
    )  # fmt: skip
    return made


@contextlib.contextmanager
def running(trainer: FastSFTTrainer) -> Iterator[SyncFreeStep]:
    """Install the features as in `train`."""
    with trainer._fastpack_features(announce=True):
        step = trainer.fastpack_run.get_state(SyncFreeStep)
        assert step is not None
        assert step.loss, trainer.fastpack_report["sync_free"]
        assert trainer.fastpack_run.attention_path == "varlen"
        yield step


@pytest.fixture(scope="module")
def patched() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Varlen, "refuses", lambda self, features: "")  # its twin runs on the CPU
        yield


@pytest.fixture(
    scope="module",
    params=[
        ("llama", False), ("qwen3", True), ("gemma3_text", True), ("qwen3_moe", False), ("qwen3_moe", True),
        ("gpt_oss", False),
    ],
    ids=str,
)  # fmt: skip
def trainer(request: Any, patched: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastSFTTrainer]:
    family, lora = request.param
    made = make_trainer(tmp_path_factory.mktemp("static"), family, lora)
    with running(made):
        yield made


def stepped(trainer: FastSFTTrainer, inputs: Any, items: Any = 50, steps: Any = STEPS) -> Figures:
    """Forward, loss and backward of a plain micro-batch, or of a static one."""
    keywords = inputs.keywords if isinstance(inputs, StaticInputs) else dict(inputs)
    trainer.model.zero_grad()
    found: StepLoss = step_loss(trainer, trainer.model, keywords, items, steps, keywords["packed_batch"])
    found.loss.backward()
    assert not found.table.requires_grad
    return Figures(found.loss.detach().clone(), found.table.clone(), gradients(trainer.model))


def in_dtype(trainer: FastSFTTrainer, dtype: torch.dtype) -> Any:
    """A copy of the model with stock's attention and experts, outside of any feature."""
    model = copy.deepcopy(trainer.model).to(dtype)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    inner.__dict__.pop("forward", None)  # TRL's holds the model that it was laid around
    inner.set_attn_implementation("eager")
    if getattr(inner.config, "_experts_implementation", None) not in (None, "eager"):
        inner.set_experts_implementation("eager")
    return model


def document_by_document(trainer: FastSFTTrainer, model: Any, inputs: Any, items: int, loss_type: str) -> Figures:
    """The same in plain torch, every document by itself, the full logits, transformers' own balancing loss."""
    batch, config = inputs["packed_batch"], model.config
    parts = batch.documents.parts if batch.documents else [part.tokens for part in batch.parts]
    inputs = unshared(inputs)
    batch, labels = inputs["packed_batch"], inputs["labels"][0]
    ends = torch.tensor(list(parts) or [sum(batch.seq_lengths)]).cumsum(0).tolist()
    counts_experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    model.zero_grad()
    table, loss, start, router = [], 0.0, 0, []
    entropy = correct = total = torch.zeros((), dtype=model.dtype)
    for length in batch.seq_lengths:
        extra = {"output_router_logits": True} if counts_experts else {}
        outputs = model(input_ids=inputs["input_ids"][:, start : start + length], use_cache=False, **extra)
        logits = outputs.logits[0, :-1].log_softmax(-1)
        targets = labels[start + 1 : start + length]
        kept = targets != -100
        logits, targets = logits[kept], targets[kept]
        chosen = logits.gather(-1, targets[:, None])[:, 0]
        losses = -chosen * chosen.exp().detach() if loss_type == "dft" else -chosen
        total = total + losses.sum()
        entropy = entropy - (logits.exp() * logits).sum().detach()
        correct = correct + (logits.argmax(-1) == targets).sum()
        if counts_experts:
            router.append(outputs.router_logits)
        start += length
        if start in ends:
            one, aux = total / items, None
            if counts_experts:
                layers = tuple(torch.cat(documents) for documents in zip(*router, strict=True))
                aux = load_balancing_loss_func(layers, counts_experts, config.num_experts_per_tok)
                one = one + trainer.router_aux_loss_coef * aux / STEPS
            loss = loss + one
            table.append([entropy, correct, aux.detach() if aux is not None else correct])
            entropy = correct = total = torch.zeros((), dtype=model.dtype)
            router = []
    loss.backward()
    return Figures(loss.detach(), torch.tensor(table, dtype=torch.float64), gradients(model))


def vector(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for _, tensor in sorted(tensors.items())])


def assert_within_twice_of_stock(found: Figures, stock: Figures, exact: Figures) -> None:
    eps = torch.finfo(torch.float32).eps
    parts = len(exact.table)
    pairs = [(found.loss, stock.loss, exact.loss), (found.table[:parts], stock.table, exact.table)]
    pairs += [tuple(vector(figures.gradients) for figures in (found, stock, exact))]
    for ours, theirs, right in pairs:
        budget = 2 * (theirs.double() - right.double()).norm() + 32 * eps * right.double().norm()
        assert (ours.double() - right.double()).norm() <= budget
    assert not found.table[parts:, :2].any(), "surplus parts count nothing"


@few
@given(rows | shared_rows, surplus, st.sampled_from(["nll", "dft"]))
def test_loss_figures_and_gradients_within_twice_the_error_of_stock(
    trainer: FastSFTTrainer, inputs: Any, more: dict[str, int], loss_type: str
) -> None:
    trainer.args.loss_type = loss_type
    try:
        found = stepped(trainer, to_static(inputs, bucket_for(inputs, **more)))
        plain = stepped(trainer, inputs)
        stock, exact = (
            document_by_document(trainer, in_dtype(trainer, dtype), inputs, 50, loss_type)
            for dtype in (torch.float32, torch.float64)
        )
    finally:
        trainer.args.loss_type = "nll"
    assert_within_twice_of_stock(found, stock, exact)
    assert_gradients_close(found.gradients, plain.gradients, rtol=1e-5, atol_of_all=1e-6)
    # Which tokens are correct is a count.
    assert torch.equal(found.table[: len(plain.table), 1], plain.table[:, 1])


def put_in_tail(static: StaticInputs, tokens: int, seed: int) -> None:
    """Put other tokens into the tail."""
    tail = static.keywords["input_ids"].data[:, tokens:]
    tail.copy_(torch.randint(3, 96, tail.shape, generator=torch.Generator().manual_seed(seed)))


@contextlib.contextmanager
def nan_in_new_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what `torch.empty` returns with NaN
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
def test_what_stands_in_the_tail_and_in_unread_memory_changes_no_bit(trainer: FastSFTTrainer, shared: bool) -> None:
    inputs = make_rows([[5, 9, 9], [3, 1]] if shared else [[5, 9], [3, 1]], ignored=0.3, shared=shared)
    assert (inputs["packed_batch"].documents is not None) == shared
    tokens = sum(inputs["packed_batch"].seq_lengths)
    static = to_static(inputs, ROOMY._replace(keys=150, max_seqlen_k=40) if shared else ROOMY)
    first = stepped(trainer, static)
    for seed in (1, 2):
        put_in_tail(static, tokens, seed)
        with nan_in_new_memory():
            again = stepped(trainer, static)
        if trainer.model.config.model_type in EXPERTS:
            # The products of an expert have as many rows as tokens that go to it: on the CPU another order of sums.
            torch.testing.assert_close(again.table, first.table, rtol=1e-6, atol=1e-7)
            assert_gradients_close(again.gradients, first.gradients, rtol=1e-6, atol_of_all=1e-7)
            continue
        assert torch.equal(again.loss, first.loss)
        assert torch.equal(again.table, first.table)
        assert again.gradients.keys() == first.gradients.keys()
        assert all(torch.equal(again.gradients[name], gradient) for name, gradient in first.gradients.items())


@few
@given(rows | shared_rows, shared_rows)
def test_the_same_objects_with_another_row_copied_in_give_the_other_result(
    trainer: FastSFTTrainer, first: Any, second: Any
) -> None:
    """As a replay: tensors are overwritten, everything else stays as the first row left it."""
    roomy = Bucket(tokens=240, segments=80, max_seqlen=20, loss_tokens=220, parts=4, keys=600, max_seqlen_k=60)
    static = to_static(first, roomy)
    items, steps = torch.tensor(50.0), torch.tensor(float(STEPS))
    before = stepped(trainer, static, items, steps)
    held = dict(static.keywords)
    copy_into(static, second)
    items.fill_(31.0)
    steps.fill_(2.0)
    with count_host_syncs(device="cpu") as syncs:
        after = stepped(trainer, static, items, steps)
    for name, value in held.items():
        assert static.keywords[name] is value
    # The twins of kernels ask for lengths and for tokens per expert, which on the CPU are at hand.
    asked = [entry for entry in syncs.of("sync", "copy") if not entry.file.endswith(("attention/reference.py", *MOE))]
    assert not asked, asked
    fresh = stepped(trainer, to_static(second, roomy), 31, 2)
    assert torch.equal(after.table, fresh.table), "not a bit depends on the row before"
    assert after.gradients.keys() == fresh.gradients.keys()
    assert all(torch.equal(after.gradients[name], gradient) for name, gradient in fresh.gradients.items())
    plain = stepped(trainer, second, 31, 2)
    parts = len(plain.table)
    torch.testing.assert_close(after.table[:parts], plain.table, rtol=1e-5, atol=1e-6)
    assert_gradients_close(after.gradients, plain.gradients, rtol=1e-5, atol_of_all=1e-6)
    assert before.table.shape == after.table.shape


@pytest.mark.parametrize("lengths", [[7], [20], [1]], ids=str)
@pytest.mark.parametrize("more", [{}, {"tail": 60, "segments": 9, "loss": 70, "parts": 3}], ids=["full", "roomy"])
def test_rows_of_one_document_with_and_without_a_tail(
    trainer: FastSFTTrainer, lengths: list[int], more: dict[str, int]
) -> None:
    inputs = make_inputs(lengths)
    found, plain = stepped(trainer, to_static(inputs, bucket_for(inputs, **more))), stepped(trainer, inputs)
    torch.testing.assert_close(found.table[:1], plain.table, rtol=1e-5, atol=1e-6)
    assert_gradients_close(found.gradients, plain.gradients, rtol=1e-5, atol_of_all=1e-6)


def test_a_tail_longer_than_max_seqlen_would_be_seen(trainer: FastSFTTrainer) -> None:
    """The twin is strict: rows of a segment beyond `max_seqlen` are NaN, and 0 x NaN reaches the weights."""
    inputs = make_inputs([5, 4])
    static = to_static(inputs, Bucket(tokens=21, segments=5, max_seqlen=5, loss_tokens=9))
    assert stepped(trainer, static).loss.isfinite()
    static.batch.cu_seqlens.data.copy_(torch.tensor([0, 5, 9, 21, 21, 21]))
    assert any(not gradient.isfinite().all() for gradient in stepped(trainer, static).gradients.values())


def test_without_a_count_the_loss_is_the_mean_over_the_row(trainer: FastSFTTrainer) -> None:
    inputs = make_rows([[5, 9], [3, 1]], ignored=0.4)
    found, plain = stepped(trainer, to_static(inputs, ROOMY), None), stepped(trainer, inputs, None)
    torch.testing.assert_close(found.loss, plain.loss, rtol=1e-5, atol=1e-6)


def test_edited_labels_of_a_static_batch_are_refused(trainer: FastSFTTrainer) -> None:
    static = to_static(make_inputs([5, 4]), ROOMY)
    static.keywords["labels"][0, 2] = 7
    with pytest.raises(PackingError, match="give the model the plain batch"):
        stepped(trainer, static)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_kept_figures_are_logged_as_those_of_the_plain_batch(family: str, patched: None, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, family)
    trainer.current_gradient_accumulation_steps = 2
    several = [make_rows([[5, 9], [3, 1]], ignored=0.3, pad_to=16), make_inputs([7, 2]), make_rows([[4]] * 4)]
    logs = []
    with running(trainer) as step:
        for static in (False, True):
            trainer._metrics["train"].clear()
            trainer._total_train_tokens = 0
            for inputs in several * 38:  # over several blocks, with rows across their edges
                if not static:
                    step.batch_loss(trainer.fastpack_run, trainer.model, dict(inputs), 50)
                    continue
                batch = to_static(inputs, ROOMY)
                table = step_loss(trainer, trainer.model, batch.keywords, 50, 2, batch.batch).table
                step.keep(trainer, table, inputs["packed_batch"])
                table.fill_(torch.nan)  # a replay writes it again
            step.metrics.flush(trainer)
            logs.append(dict(trainer._metrics["train"]))
    plain, found = logs
    assert found.keys() == plain.keys() >= {"entropy", "mean_token_accuracy", "num_tokens"}
    assert len(found["entropy"]) == 266
    assert ("aux_loss" in found) == (family == "qwen3_moe")
    for name, values in plain.items():
        assert found[name] == pytest.approx(values, rel=1e-5, abs=1e-6), name


@pytest.mark.cuda
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_on_cuda_neither_the_copy_nor_the_step_waits(family: str, lora: bool, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, family, lora, use_cpu=False, bf16=True)
    if family in EXPERTS:
        trainer.model.to(torch.bfloat16)  # torch's grouped products in fp32 wait for the sizes of the groups
    rows = [make_rows(parts, device="cuda") for parts in ([[5, 9], [3, 1]], [[4], [7, 2], [6]])]
    static = StaticInputs(ROOMY, "cuda")
    items, steps = torch.tensor(50.0, device="cuda"), torch.tensor(2.0, device="cuda")
    with running(trainer), torch.autocast("cuda", torch.bfloat16):
        for row, mode in zip(rows, ("default", "error"), strict=True):  # the first pass compiles and warms up
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode(mode)
            try:
                copy_into(static, row)
                found = step_loss(trainer, trainer.model, static.keywords, items, steps, static.batch)
                found.loss.backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            plain = step_loss(trainer, trainer.model, dict(row), 50, 2, row["packed_batch"])
            torch.testing.assert_close(found.table[: len(plain.table)], plain.table, rtol=2**-6, atol=2**-6)
