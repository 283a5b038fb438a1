"""The packing check sees each kind of leak, in plain and in shared rows, and its outcome decides how a run goes on."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_material import vision_model
from odd_models import Bigrams, Noise, OneRow, Shift, Strict, Unigrams, capped_sdpa, model_with
from side_by_side import assert_equal
from torch import nn
from trainer_material import assert_line, assert_same_log, build, figures, train
from trl import SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling as Collator

from fastpack_trl import FastSFTTrainer
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.attention.per_document import PerDocument, PerDocumentLayer
from fastpack_trl.attention.probe import SHARED_LENGTHS
from fastpack_trl.attention.proof import PackingProof, verify_packing, verify_shared
from fastpack_trl.attention.small_copy import small_copy
from fastpack_trl.errors import PackingError
from fastpack_trl.model import facts
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.testing import tiny_model

OFF = {"packed_attention": "off"}
LEAKING: dict[str, Any] = {"family": "gpt_oss", "packing": True, "max_steps": 1, "eval_strategy": "no"}
COPIED = ("qwen3", "gpt_oss", "gemma3_text", "bloom", "opt", "deepseek_v3", "granitemoehybrid", "qwen3_next", "afmoe")
Custom = type("Custom", (Collator,), {})
SHARING = ("llama", "qwen3", "gemma2", "gemma3_text", "mistral", "gpt_oss", "qwen3_moe", "deepseek_v3", "opt")


@pytest.mark.parametrize(
    ("device", "dtype", "family", "window"),
    [
        *(("cpu", torch.float32, *case) for case in (("mistral", 5), ("gpt_oss", 40))),
        ("cpu", torch.bfloat16, "mistral", 5),
        *(
            pytest.param("cuda", torch.bfloat16, *case, marks=pytest.mark.cuda)
            for case in (("gpt_oss", 128), ("gemma3_text", 512), ("mistral", 1024))
        ),
    ],
)
def test_window_that_is_one_off_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, family: str, window: int
) -> None:
    sizes = {"max_position_embeddings": 2048, "hidden_size": 64, "head_dim": 16} if device == "cuda" else {}
    model, window_of = tiny_model(family, sliding_window=window, **sizes).to(device, dtype), facts.window_of
    for implementation in ("auto", "per_document", "sdpa") if device == "cuda" else ("auto",):
        proof = verify_packing(model, implementation=implementation)
        assert proof.proven, (implementation, str(proof))
        assert not proof.not_exercised
    for by in (-1, 1):

        def wrong(module: nn.Module, by: int = by) -> int | None:
            size = window_of(module)
            return None if size is None else size + by

        with monkeypatch.context() as patch:  # for our path; stock makes its masks as before
            patch.setattr(facts, "window_of", wrong)
            # 1,025 is past what is exercised; asked for by its lengths, it is all the same.
            proof = verify_packing(model, lengths=(9, window + 16, 6) if device == "cuda" else None)
        assert not proof.proven
        assert {(seen, right) for _, seen, right in proof.windows} == {(window + by, window)}
        assert f"sees {window + by}, not {window}" in str(proof)


def test_windows_up_to_512_tokens_are_exercised_on_the_cpu() -> None:
    for family, window in (("gpt_oss", 128), ("gemma3_text", 512)):
        proof = verify_packing(tiny_model(family, sliding_window=window, max_position_embeddings=1024))
        assert (proof.proven, proof.not_exercised) == (True, ())
    proof = verify_packing(tiny_model("mistral", sliding_window=513, max_position_embeddings=1024))
    assert (proof.proven, proof.not_exercised) == (True, ("window 513",))
    # A document of the model's own positions never exceeds this one.
    assert verify_packing(tiny_model("mistral", sliding_window=120)).not_exercised == ("window 120",)
    # The last token of 6 predicts nothing: none of those that do sees less than all before it.
    for lengths, skipped in (((6, 3), ("window 5",)), ((7, 3), ())):
        assert verify_packing(tiny_model("mistral"), lengths=lengths).not_exercised == skipped


def test_check_leaves_no_graph_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep the nodes that add to gradients, on a stream that is not a capture's."""
    model = tiny_model("gemma3_text")

    def node_of(parameter: nn.Parameter) -> Any:
        (node, _), *_ = parameter.view_as(parameter).grad_fn.next_functions  # type: ignore[union-attr]
        return node

    for layer in model.model.layers:
        stock = layer.self_attn.forward

        def forward(*args: Any, stock: Any = stock, **kwargs: Any) -> Any:
            out = stock(*args, **kwargs)
            for parameter in model.parameters():
                node_of(parameter).metadata["checked"] = True
            return out

        monkeypatch.setattr(layer.self_attn, "forward", forward)
    gc.disable()
    try:
        assert not verify_packing(model).not_exercised
        assert not any("checked" in node_of(parameter).metadata for parameter in model.parameters())
    finally:
        gc.enable()


def test_check_makes_no_logits_and_runs_no_hook_of_the_user() -> None:
    model, rows, seen = tiny_model("gpt_oss", sliding_window=40), [], []
    head = model.lm_head.forward

    def counted(hidden: torch.Tensor) -> Any:
        rows.append(hidden.shape[1])
        return head(hidden)

    model.lm_head.forward = counted
    model.model.layers[0].register_forward_hook(lambda *_: seen.append("forward"))
    model.model.layers[1].mlp.register_full_backward_hook(lambda *_: seen.append("backward"))
    handle = nn.modules.module.register_module_forward_pre_hook(lambda *_: seen.append("global"))
    try:
        assert verify_packing(model).proven
        assert (rows, seen) == ([], [])
        model(input_ids=torch.ones(1, 3, dtype=torch.long)).logits.sum().backward()
        assert set(seen) == {"forward", "backward", "global"}
    finally:
        handle.remove()


def test_packed_results_that_are_not_finite_are_never_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    model, attend = tiny_model("qwen3"), PerDocumentLayer.attend
    with packed_attention(model, "per_document") as attention, monkeypatch.context() as patch:
        patch.setattr(PerDocumentLayer, "attend", lambda *args: attend(*args) * torch.nan)
        proof = verify_packing(model, attention=attention)
    assert proof.difference == torch.inf
    assert len(proof.leaks) == 4 * 3, "a gradient that is NaN may hide one"


def test_leak_through_token_ids_alone_shows_in_the_hidden_states() -> None:
    proof = verify_packing(model_with(backbone=Bigrams))
    assert (proof.proven, proof.leaks) == (False, ()), "embeddings say nothing of it"
    assert verify_packing(model_with(backbone=Unigrams)).proven, "ids that stay in their document"


def shared_proof(model: Any, path: str = "per_document", dtype: Any = None) -> PackingProof:
    with packed_attention(model, path, compute_dtype=dtype) as attention:
        return verify_shared(model, attention)


@pytest.mark.parametrize(
    ("family", "path", "device"),
    [
        *((family, "per_document", "cpu") for family in SHARING),
        *((family, "sdpa", "cpu") for family in ("llama", "gpt_oss", "opt")),
        *(
            pytest.param(family, path, "cuda", marks=pytest.mark.cuda)
            for family in ("llama", "qwen3", "mistral", "gemma3_text", "gpt_oss", "deepseek_v3")
            for path in ("varlen", "per_document")
        ),
    ],
)
def test_families_share_prefixes_right(family: str, path: str, device: str) -> None:
    model, on_cuda = tiny_model(family).to(device), device == "cuda"
    if on_cuda and getattr(model.config, "_experts_implementation", None) not in (None, "eager"):
        model.set_experts_implementation("eager")  # grouped matrix products are made for bf16 weights
    dtype = torch.bfloat16 if on_cuda else None
    with torch.autocast(device, torch.bfloat16, enabled=on_cuda):
        proof = shared_proof(model, path, dtype)
    assert (proof.proven, proof.leaks, proof.budget is None) == (True, (), on_cuda), proof


@pytest.mark.parametrize(
    ("prefixes", "leaks", "unseen", "message"),
    [
        # One token of the first branch.
        ([[], range(7), range(8), range(7), range(7), []], {(1, 2)}, set(), "LEAK"),
        ([[]] * 6, set(), {(0, 1), (0, 2)}, "UNSEEN: segment 1 does not depend on segment 0"),
    ],
)
def test_branch_that_sees_another_or_not_its_prefix_is_named(
    monkeypatch: pytest.MonkeyPatch, prefixes: list[Any], leaks: Any, unseen: Any, message: str
) -> None:
    ends, stock = np.cumsum(SHARED_LENGTHS), PerDocument.prepare
    index = [[*prefix, *range(end - own, end)] for prefix, end, own in zip(prefixes, ends, SHARED_LENGTHS, strict=True)]
    keys = np.array([*map(len, prefixes)]), np.concatenate(index)
    wrong = PackedBatch.from_lengths(SHARED_LENGTHS, prefixes=keys).shared

    def prepare(self: PerDocument, batch: PackedBatch, *args: Any) -> Any:
        return stock(self, replace(batch, shared=wrong if batch.shared is not None else None), *args)

    monkeypatch.setattr(PerDocument, "prepare", prepare)
    proof = shared_proof(tiny_model("llama"))
    assert not proof.proven
    assert {pair[:2] for pair in proof.leaks} == leaks
    assert unseen <= set(proof.unseen)
    assert message in str(proof)
    assert not replace(proof, difference=0.0).proven, "also where rounding would hide it"


def trainer_of(cls: Any, folder: Path, model: Any = None, fast: Any = None, **more: Any) -> Any:
    return build(cls, folder, model=model or model_with(), fast=fast, eval_strategy="no", max_steps=1, **more)


def evaluated(trainer: Any) -> float:
    return float(trainer.evaluate()["eval_loss"])


def test_packing_under_stock_is_checked_and_a_leak_stops(tmp_path: Path) -> None:
    line = train(FastSFTTrainer, tmp_path, packing=True, fast=OFF, bf16=True).fastpack_report["verify_packing"]
    assert (line.path, line.reason[:6]) == ("passed, TRL's rows", "docume")
    assert ", no limit)" in line.reason, "in the dtype of a step"
    with pytest.raises(PackingError, match=r"with stock: LEAK.*set packed_attention='auto'; verify_packing='off'"):
        train(FastSFTTrainer, tmp_path, fast=OFF, **LEAKING)
    with pytest.raises(PackingError, match=r"LEAK.*torch_compile=True compiles.*leave that out, or set packing=False"):
        train(FastSFTTrainer, tmp_path, torch_compile=True, torch_compile_backend="eager", **LEAKING)
    strict = train(FastSFTTrainer, tmp_path / "ours", fast={**OFF, "verify_packing": "off"}, **LEAKING)
    assert_equal(figures(strict), figures(train(SFTTrainer, tmp_path / "stock", **LEAKING)))
    assert strict.fastpack_report["verify_packing"].reason == "switched off"


def test_weights_not_finite_are_named_and_nothing_falls_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def spoilt() -> Any:
        model = tiny_model("qwen3")
        model.get_parameter(name).data.view(-1)[3] = torch.inf
        return model

    name, options = "model.layers.1.mlp.up_proj.weight", {"packing": True, "max_steps": 1, "eval_strategy": "no"}
    ours = train(FastSFTTrainer, tmp_path, model=spoilt(), **options)
    assert_line(ours, "verify_packing", name, status="off", path="not run")
    assert ours.fastpack_report["packed_attention"].path == "per_document"
    assert name in caplog.text
    with pytest.raises(ValueError, match=f"verify_packing='on': parameter {name} has non-finite values: 1 of 1,536"):
        train(FastSFTTrainer, tmp_path, model=spoilt(), fast={"verify_packing": "on"}, **options)


@pytest.mark.parametrize("family", [*COPIED, "qwen3 4-bit"])
def test_small_copy_leaks_under_stock_where_the_model_does(family: str) -> None:
    """It stands for a model whose parameters are in other processes."""
    two = tiny_model(family.split()[0]).config
    # The second kind of layer comes late.
    each = {name: [*value[:1] * 3, *value[1:] * 3] for name, value in vars(two).items()
            if isinstance(value, list) and len(value) == 2}  # fmt: skip
    model = tiny_model(family.split()[0], num_hidden_layers=6, **each)

    def leaks(one: Any) -> Any:
        try:
            return {pair[:2] for pair in verify_packing(one, implementation="off").leaks}
        except ValueError as error:
            return str(error)

    if family.endswith("4-bit"):
        model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    state = torch.get_rng_state()
    device = torch.device("cpu")
    with small_copy(model, device, None) as copy, small_copy(model, device, torch.half) as half:
        assert (half.dtype, leaks(copy)) == (torch.half, leaks(model))
        assert copy.config.get_text_config().num_hidden_layers < 6
        kinds = set(getattr(model.config, "layer_types", None) or ())
        assert set(getattr(copy.config, "layer_types", None) or ()) == kinds
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("fast", "expected"), [({}, ("passed", "per_document")), (OFF, ("passed, TRL's rows", "stock"))]
)
def test_where_stock_lacks_a_kernel_a_small_copy_is_checked(tmp_path: Path, fast: Any, expected: Any) -> None:
    model = tiny_model("qwen3")
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda x, stock=mlp.forward: stock(x) if mlp.training else import_module("a_kernel_of_fp8_weights")
    ours = trainer_of(FastSFTTrainer, tmp_path, model, fast, packing=True)
    ours.train()
    assert (ours.fastpack_report["verify_packing"].path, ours.fastpack_proof.path) == expected


def test_leak_under_a_collator_of_the_user_is_reported_and_under_a_kind_of_stocks_stops(tmp_path: Path) -> None:
    def trained(cls: Any, collator: Any, **more: Any) -> Any:
        trainer = build(cls, tmp_path / cls.__name__, **more)
        trainer.data_collator = collator  # TRL takes none at construction where rows are packed
        trainer.train()
        return trainer

    # Neither stock's collator nor a kind of it: what it tells the model is not known.
    own = partial(Collator.__call__, Collator(pad_token_id=0, padding_free=True))
    assert "LEAK" in trained(FastSFTTrainer, own, **LEAKING).fastpack_report["verify_packing"].path
    with pytest.raises(PackingError, match="custom data collator Custom"):
        trained(FastSFTTrainer, Custom(pad_token_id=0, padding_free=True), **LEAKING)
    joining: dict[str, Any] = {"collator": Collator(pad_token_id=0), "packing": True}
    with pytest.raises(PackingError, match=r"packed rows leak: .* each row as one document; .* padding_free=False"):
        trained(FastSFTTrainer, **joining)
    ours = trained(FastSFTTrainer, **joining, fast={"verify_packing": "off"})
    assert_same_log(ours, trained(SFTTrainer, **joining))


@pytest.mark.parametrize("kind", [{"wrapper": Shift}, {"wrapper": Strict}, {"wrapper": Noise}, {"backbone": Bigrams}])
def test_rows_that_nobody_asked_to_pack_stay_padded_where_the_check_fails(tmp_path: Path, kind: Any) -> None:
    ours = train(FastSFTTrainer, tmp_path / "ours", model=model_with(**kind))
    assert_same_log(ours, train(SFTTrainer, tmp_path / "stock", model=model_with(**kind)))
    line, runs = ours.fastpack_report["batches"], kind.get("wrapper") is not Strict
    assert line.status == "stock"
    unproven = "per_document failed its packing check: " if runs else "rows without padding are not checked: "
    assert line.reason.startswith(unproven)
    ours.args.verify_packing = "off"
    if runs:
        ours.train()
        assert ours.fastpack_run.plan.kind == "padding_free", "verify_packing='off' insists"


def test_documents_are_padded_if_the_check_cannot_run_which_an_explicit_one_does_not_allow(tmp_path: Path) -> None:
    ours = trainer_of(FastSFTTrainer, tmp_path, model_with(backbone=OneRow), packing=True)
    ours.train()
    assert ours.fastpack_report["batches"].path == "documents"
    assert_line(ours, "packed_attention", "the packing check cannot run on this model: ValueError: one row at a time")
    with pytest.raises(ValueError, match=r"verify_packing='on': .*set verify_packing='auto' or 'off'"):
        trainer_of(FastSFTTrainer, tmp_path, model_with(backbone=OneRow), {"verify_packing": "on"}).train()


def test_rows_that_are_evaluated_before_training_are_checked_once(tmp_path: Path) -> None:
    ours = trainer_of(FastSFTTrainer, tmp_path)
    evaluated(ours)
    proof = ours.fastpack_proof
    assert proof.proven
    assert ours.fastpack_run.plan.kind == "padding_free"
    ours.predict(ours.eval_dataset)
    assert ours.fastpack_proof is proof
    ours.train()
    trained = ours.fastpack_proof
    assert trained is not proof
    evaluated(ours)
    assert ours.fastpack_proof is trained
    off = trainer_of(FastSFTTrainer, tmp_path, fast={"verify_packing": "off"})
    evaluated(off)
    assert (off.fastpack_proof, off.fastpack_run.plan.kind) == (None, "padding_free")


@pytest.mark.parametrize("attention", ["auto", "per_document"])
def test_evaluation_before_training_takes_stocks_batches_where_documents_leak(tmp_path: Path, attention: str) -> None:
    ours = trainer_of(FastSFTTrainer, tmp_path, model_with(Shift), {"packed_attention": attention})
    stock = trainer_of(SFTTrainer, tmp_path, model_with(Shift))
    assert evaluated(ours) == pytest.approx(evaluated(stock), rel=1e-6)
    assert "per_document failed its packing check: " in ours.fastpack_report["batches"].reason
    assert ours.predict(ours.eval_dataset).metrics["test_loss"] == pytest.approx(evaluated(stock), rel=1e-6)


def stock_loss_in(folder: Path, **options: Any) -> str:
    trained = train(FastSFTTrainer, folder, **{"fast": {}, "max_steps": 1, "eval_strategy": "no"} | options)
    line = trained.fastpack_report.to_dict()["facts"].get("stock loss", "")
    assert f"stock loss: {line}" in " ".join(trained.fastpack_report.banner().split()) or not line
    return str(line)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gpt_oss"])
def test_documents_that_leak_in_packed_rows_of_stock_are_in_the_banner(family: str, tmp_path: Path) -> None:
    def leaking() -> Any:
        return vision_model(family) if family == "qwen2_5_vl" else tiny_model(family)

    assert "6 of 12 pairs" in stock_loss_in(tmp_path, model=leaking(), packing=True)
    assert verify_packing(leaking()).proven
    assert not stock_loss_in(tmp_path, model=leaking()), "stock pads: nothing to leak"
    assert not stock_loss_in(tmp_path, packing=True), "stock keeps apart"
    assert not stock_loss_in(tmp_path, model=leaking(), packing=True, fast={"verify_packing": "off"})


def test_softcap_that_stock_leaves_out_is_in_the_banner_and_compared_with_eager(tmp_path: Path) -> None:
    for packing in (False, True):
        assert "leaves out the softcap" in stock_loss_in(tmp_path, model=capped_sdpa(), packing=packing)
    model = capped_sdpa()
    assert verify_packing(model).proven
    eager = tiny_model("gemma2", attn_implementation="eager")
    eager.load_state_dict(model.state_dict())
    ours = train(FastSFTTrainer, tmp_path, model=model, packing=True, optim="sgd")
    assert ours.fastpack_report["packed_attention"].path == "per_document"
    assert_same_log(ours, train(SFTTrainer, tmp_path, model=eager, packing=True, optim="sgd"), rtol=1e-4)


def test_a_check_of_rows_under_stock_says_nothing_about_ours(tmp_path: Path) -> None:
    """A collator of the user's trains under TRL's attention; an evaluation without it runs ours for the first time."""
    trainer = build(FastSFTTrainer, tmp_path, packing=True, max_steps=1, eval_strategy="no")
    own, trainer.data_collator = trainer.data_collator, Custom(pad_token_id=0, padding_free=True)
    trainer.train()
    assert trainer.fastpack_report["verify_packing"].path == "passed, TRL's rows"
    trainer.data_collator = own
    trainer.evaluate()
    assert trainer.fastpack_report["verify_packing"].path == "passed"
