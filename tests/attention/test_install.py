"""The seam: what is built, how often, what is restored, what is refused."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_material import HOPPER, LENGTHS, PLAIN, snapshot
from torch import Tensor

from fastpack_trl.attention.backends import BACKENDS, choose
from fastpack_trl.attention.batch_check import BatchCheck
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.attention.interface import AttentionCall
from fastpack_trl.attention.proof import verify_packing
from fastpack_trl.errors import PackingError
from fastpack_trl.model.facts import ModelFeatures, asked_for, read_features
from fastpack_trl.packing.documents import PADDED_DOCUMENTS
from fastpack_trl.packing.packed_batch import PackedBatch, to_transformers_kwargs
from fastpack_trl.testing import FAMILIES, tiny_model

IDS = torch.randint(3, 96, (1, 30), generator=torch.Generator().manual_seed(1))


def forward(model: Any, batch: PackedBatch, **kwargs: Any) -> Tensor:
    logits: Tensor = model(
        input_ids=IDS, packed_batch=batch, use_cache=False, **to_transformers_kwargs(batch), **kwargs
    ).logits
    return logits


@pytest.mark.parametrize("implementation", ["auto", "sdpa"])
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "falcon"])
def test_model_is_as_stock_made_it_after_success_and_after_an_exception(family: str, implementation: str) -> None:
    model = tiny_model(family)
    before = snapshot(model)
    if family == "falcon":
        with pytest.raises(ValueError, match="falcon does not call"), packed_attention(model, implementation):
            pass
        assert snapshot(model) == before
        return
    with packed_attention(model, implementation):
        forward(model, PackedBatch.from_lengths(LENGTHS)).sum().backward()
    assert snapshot(model) == before
    with pytest.raises(RuntimeError, match="in the step"), packed_attention(model, implementation):
        forward(model, PackedBatch.from_lengths(LENGTHS))
        raise RuntimeError("in the step")
    assert snapshot(model) == before


def test_two_models_share_the_registered_name() -> None:
    first, second = tiny_model("qwen3"), tiny_model("llama")

    def documents(model: Any) -> Tensor:
        logits = [model(input_ids=ids, use_cache=False).logits for ids in IDS.split(LENGTHS, dim=1)]
        return torch.cat(logits, dim=1)

    expected = [documents(model) for model in (first, second)]
    with packed_attention(first):
        with packed_attention(second):
            torch.testing.assert_close(forward(second, PackedBatch.from_lengths(LENGTHS)), expected[1])
        torch.testing.assert_close(forward(first, PackedBatch.from_lengths(LENGTHS)), expected[0])
        leaking = second(input_ids=IDS, use_cache=False).logits  # without the metadata: the row is one document
        assert not torch.allclose(leaking, expected[1], atol=1e-3)


def test_a_copy_taken_inside_works_as_stock_outside() -> None:
    """A callback that averages weights copies the model in the middle of training."""
    model = tiny_model("mistral").eval()
    expected = model(input_ids=IDS, use_cache=False).logits
    with packed_attention(model):
        duplicate = copy.deepcopy(model)
    assert torch.equal(duplicate(input_ids=IDS, use_cache=False).logits, expected)


def test_a_model_is_pickled_while_its_attention_is_installed_and_after_a_batch() -> None:
    model = tiny_model("mistral").eval()
    expected = model(input_ids=IDS, use_cache=False).logits
    batch = PackedBatch.from_lengths(LENGTHS)
    with packed_attention(model):
        packed = forward(model, batch)
        duplicate = pickle.loads(pickle.dumps(model))
        assert torch.equal(forward(duplicate, batch), packed)
    assert torch.equal(duplicate(input_ids=IDS, use_cache=False).logits, expected)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("layers", [2, 8])
@pytest.mark.parametrize("implementation", ["per_document", "sdpa"])
def test_metadata_is_built_once_per_batch_whatever_the_depth(
    implementation: str, layers: int, checkpointing: bool
) -> None:
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    model = tiny_model("gemma3_text", num_hidden_layers=layers, layer_types=kinds)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batches = [PackedBatch.from_lengths(LENGTHS) for _ in range(3)]  # an accumulation of three micro-batches
    with packed_attention(model, implementation):
        for batch in batches:
            forward(model, batch).sum().backward()
    for batch in batches:
        assert batch.build_counts, "nothing was built: the packed path did not run"
        assert set(batch.build_counts.values()) == {1}


@pytest.mark.parametrize("implementation", ["per_document", "sdpa"])
def test_nothing_outlives_the_next_batch_under_the_stock_trainer(implementation: str) -> None:
    model = tiny_model("mistral")
    first, second = PackedBatch.from_lengths(LENGTHS), PackedBatch.from_lengths((15, 15))
    with packed_attention(model, implementation):
        forward(model, first).sum().backward()
        alive = [weakref.ref(value) for value in _tensors(first.derived.values)]
        assert alive
        forward(model, second).sum().backward()
        gc.collect()
        assert not [reference for reference in alive if reference() is not None]
    assert not second.derived.values


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if hasattr(value, "__dataclass_fields__"):
        value = [getattr(value, name) for name in value.__dataclass_fields__]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else []
    return [tensor for item in items for tensor in _tensors(item)]


def test_autocast_decides_the_dtype_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL trains fp32 weights in bf16 autocast: queries and keys arrive in fp32, values in bf16."""
    from fastpack_trl.attention import per_document

    seen = []
    model = tiny_model("qwen3")
    with packed_attention(model):
        pass  # it is tried
    attend = per_document.PerDocumentLayer.attend

    def record(self: Any, call: AttentionCall) -> Tensor:
        seen.append((call.query.dtype, call.key.dtype, call.value.dtype))
        return attend(self, call)

    monkeypatch.setattr(per_document.PerDocumentLayer, "attend", record)
    with packed_attention(model), torch.autocast("cpu", torch.bfloat16):
        forward(model, PackedBatch.from_lengths(LENGTHS)).float().sum().backward()
    assert set(seen) == {(torch.bfloat16,) * 3}


def test_lengths_must_add_up_to_the_row() -> None:
    model = tiny_model("qwen3")
    with packed_attention(model), pytest.raises(ValueError, match=r"documents of 20 tokens .* a row of 30"):
        model(input_ids=IDS, packed_batch=PackedBatch.from_lengths((9, 11)), use_cache=False)


def test_a_family_that_drops_keywords_after_all_is_named() -> None:
    """The guard behind the reading of the source: metadata that does not arrive must not be silently ignored."""
    from fastpack_trl.attention.install import _fed, switched

    model = tiny_model("stablelm")
    features = replace(read_features(model), gap="")
    with switched(model, features), _fed(model, BACKENDS["per_document"], features, BatchCheck()):
        with pytest.raises(PackingError, match="drop keywords; set packing=False"):
            forward(model, PackedBatch.from_lengths(LENGTHS))


def test_removed_arguments_and_values_name_their_remedy() -> None:
    model: Any = tiny_model("qwen3")
    with pytest.raises(ValueError, match=r"packed_attention\(padded_rows_limit=\) was removed in 0.2.0: leave it out"):
        packed_attention(model, padded_rows_limit=4)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"verify_packing\(padded_rows_limit=\) was removed in 0.2.0"):
        verify_packing(model, padded_rows_limit=4)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"packed_attention='padded_rows' was removed in 0.2.0: set packed_attention="):
        with packed_attention(model, "padded_rows"):
            pass


@pytest.mark.parametrize(
    ("features", "stock_requested", "path", "reason"),
    [
        (PLAIN, None, "per_document", "cpu; plain causal"),
        (replace(PLAIN, windows=frozenset({5}), sinks=True), None, "per_document", "window 5, sinks"),
        (replace(PLAIN, dropout=0.1), None, "sdpa", "attention dropout is 0.1"),
        (replace(PLAIN, gap="lfm2 has conv layers"), None, PADDED_DOCUMENTS, "conv layers"),
        (HOPPER, None, "varlen", "torch's flash kernel, bfloat16, sm90; plain causal"),
        (replace(HOPPER, windows=frozenset({128}), sinks=True), None, "varlen", "window 128, sinks"),
        (replace(HOPPER, capability=(8, 0), compute_dtype=torch.float16), None, "varlen", "float16, sm80"),
        (
            replace(HOPPER, capability=(7, 5)),
            None,
            "per_document",
            "varlen needs compute capability 8.0, this device has",
        ),
        (replace(HOPPER, compute_dtype=torch.float32), None, "per_document", "varlen needs bf16 or fp16, this run"),
        (replace(HOPPER, head_dim=288), None, "per_document", "head_dim 288 is over its limit of 256"),
        (replace(HOPPER, softcap=True), None, "per_document", "varlen has no softcap"),
        (replace(HOPPER, dropout=0.1), None, "sdpa", "varlen has no dropout, the model's is 0.1"),
        (replace(HOPPER, gap="lfm2 has conv layers"), None, PADDED_DOCUMENTS, "conv layers"),
        (PLAIN, "sdpa", "per_document", "batches that are not packed run attn_implementation='sdpa'"),
        (PLAIN, "eager", "per_document", "batches that are not packed run attn_implementation='eager'"),
        (replace(PLAIN, dropout=0.1), "eager", "sdpa", "batches that are not packed run attn_implementation='eager'"),
        (replace(PLAIN, gap="falcon ignores it"), "sdpa", PADDED_DOCUMENTS, "batches that are not packed run"),
        (PLAIN, "flash_attention_2", "off", "was asked for"),
    ],
)
def test_auto_takes_the_first_backend_that_is_right(
    features: ModelFeatures, stock_requested: str | None, path: str, reason: str
) -> None:
    choice = choose("auto", features, stock_requested=stock_requested)
    assert choice.path == path
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("requested", "features", "message"),
    [
        ("per_document", replace(PLAIN, dropout=0.1), r"attention dropout is 0\.1"),
        ("varlen", PLAIN, "varlen needs CUDA, the model is on cpu"),
        ("per_document", replace(PLAIN, gap="falcon ignores it"), "falcon ignores it"),
        ("sdpa", replace(PLAIN, gap="falcon ignores it"), "falcon ignores it"),
        ("sdpa", replace(PLAIN, softcap=True), "the softcap: load the model with attn_implementation='eager'"),
        ("flash_attention_4", HOPPER, r"not installed: pip install --pre 'fastpack-trl\[fa4\]'"),
        ("flash_attention_4", replace(HOPPER, capability=(8, 0)), r"needs compute capability 9\.0 or higher"),
        ("warp", PLAIN, "packed_attention='warp' does not exist: use one of auto, flash_attention_4, varlen"),
    ],
)
def test_refusals_name_the_remedy(requested: str, features: ModelFeatures, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        choose(requested, features)
    assert "use" in str(error.value)


def test_a_choice_says_what_other_rooms_need_of_its_backend() -> None:
    cpu, cuda = PLAIN, replace(PLAIN, device_type="cuda")
    assert {name for name, backend in BACKENDS.items() if backend.flattens} == {
        "flash_attention_4",
        "varlen",
        "per_document",
    }
    choices = {path: choose(path, cpu) for path in ("per_document", "sdpa", "off")}
    assert [path for path, choice in choices.items() if choice.flattens] == ["per_document"]
    refused = "per_document calls a kernel per document, which is no part of a graph"
    assert [choice.refuses_compile for choice in choices.values()] == [refused, "", ""]
    for named in ("per_document", "auto"):  # varlen has no fp32
        choice = choose(named, cuda)
        assert (choice.path, choice.flattens, choice.refuses_compile) == ("per_document", True, refused)
    assert choose("auto", HOPPER).refuses_compile == ""


@pytest.mark.parametrize("family", FAMILIES)
def test_reading_the_features_of_a_family_gives_a_reason_for_every_detour(family: str) -> None:
    features = read_features(tiny_model(family))
    assert features.model_type == family
    assert features.dropout == 0
    choice = choose("auto", features)
    assert choice.reason
    assert (choice.path == PADDED_DOCUMENTS) == bool(features.gap)
    if family in ("mistral", "gemma2", "gpt_oss", "cohere2"):
        assert features.windows == {5}
    assert features.sinks == (family == "gpt_oss")
    assert features.softcap == (family == "gemma2")


def test_only_a_choice_of_the_user_counts_as_asked_for() -> None:
    assert asked_for(tiny_model("qwen3")) is None
    assert asked_for(tiny_model("qwen3", attn_implementation="eager")) == "eager"
    assert asked_for(tiny_model("gpt_oss")) is None, "gpt_oss has no sdpa: eager is its default"
    assert asked_for(tiny_model("qwen3"), "sdpa") == "sdpa"
    assert asked_for(tiny_model("qwen3", attn_implementation="eager"), {"": "eager"}) == "eager"


def test_olmoe_gives_its_window_to_attention_but_not_to_its_mask() -> None:
    model = tiny_model("olmoe")
    model.config.sliding_window = 4
    assert read_features(model).windows == frozenset()


def test_attention_dropout_falls_back_to_stock_with_dense_masks() -> None:
    model = tiny_model("qwen3", attention_dropout=0.2)
    with packed_attention(model) as attention:
        assert attention.path == "sdpa"
        torch.manual_seed(0)
        first = forward(model, PackedBatch.from_lengths(LENGTHS))
        second = forward(model, PackedBatch.from_lengths(LENGTHS))
    assert not torch.equal(first, second), "dropout did not act"


def test_switching_is_silent() -> None:
    model = tiny_model("qwen3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with packed_attention(model):
            forward(model, PackedBatch.from_lengths(LENGTHS))
