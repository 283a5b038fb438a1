"""`fastpack_trl.bench.compare`: both trainers' own loops in turn, on one run of the user's own."""

from __future__ import annotations

import itertools
import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_material import prefixed
from torch import nn
from trainer_material import make_dataset, make_tokenizer, settings
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from fastpack_trl.bench.compare import compare, table
from fastpack_trl.bench.parity import GRADIENT_NORM, LossParityError, check_step, tolerance, without_dropout
from fastpack_trl.bench.profiles import covered
from fastpack_trl.bench.step_watch import PHASES
from fastpack_trl.bench.turns import Training
from fastpack_trl.errors import UserError
from fastpack_trl.measure.rounds import turn_order
from fastpack_trl.testing import tiny_model

Build = Callable[..., Any]


def _build(
    folder: Path, change: Callable[[Any], None] = lambda trainer: None, data: Any = "text", **more: Any
) -> Build:  # fmt: skip
    """Packed rows, two micro-batches of one row per step."""
    own = settings(folder, packing=True, gradient_accumulation_steps=2, per_device_train_batch_size=1) | more
    del own["eval_steps"]

    def build(trainer_class: Any, config_class: Any, **changes: Any) -> Any:
        trainer = trainer_class(
            tiny_model("qwen3"),
            args=config_class(**(own | changes)),
            train_dataset=make_dataset(data) if isinstance(data, str) else data,
            processing_class=make_tokenizer(),
        )
        change(trainer)
        return trainer

    return build


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("compare")
    sides = ("stock", "rebuild", "fastpack")
    return compare(_build(folder), pairs=3, warmup=1, sides=sides, profile=folder, peak_flops=1e12, progress=False)


def test_a_row_names_what_the_sides_share_and_every_figure(record: dict[str, Any]) -> None:
    assert record["complete"]
    (row,) = record["rows"]
    assert row["dtype"] == "float32"
    assert row["checkpointing"] == "every layer"
    assert (row["tokens"], row["micro_batches"], row["batch_size"], row["gradient_accumulation_steps"]) == (48, 2, 1, 2)
    documents = row["documents"]
    assert 1 < documents["shortest"] <= documents["median"] <= documents["longest"] < 40
    assert list(row["sides"]) == ["stock", "rebuild", "fastpack"]
    for side in row["sides"].values():
        assert list(side["phases"]) == [name for name in PHASES if name != "captured"]
        seconds = side["seconds"]["values"]
        assert len(seconds) == 3
        spent = [values["values"] for values in side["phase_seconds"].values()]
        assert [sum(parts) for parts in zip(*spent, strict=True)] == pytest.approx(seconds)
        assert all(phase["median"] > 0 for phase in side["phase_seconds"].values())
        rates = side["token_rates"]
        assert rates["loss"]["median"] < rates["nonpad"]["median"] <= rates["capacity"]["median"]
        assert 0 < side["mfu"] < side["hfu"] < 1  # checkpointing computes layers again
        assert side["memory"] is side["idle_share"] is side["launches"] is None  # on the CPU
    assert set(row["ratios"]) == {"stock", "rebuild"}
    stock, ours = (row["sides"][name]["seconds"]["values"] for name in ("stock", "fastpack"))
    assert row["ratios"]["stock"]["values"] == [a / b for a, b in zip(stock, ours, strict=True)]
    syncs = {name: side["host_syncs"]["per_micro_step"] for name, side in row["sides"].items()}
    assert 0 == syncs["fastpack"] < syncs["stock"] < syncs["rebuild"]  # every step is logged but the counted one


def test_the_record_is_json_and_a_table(record: dict[str, Any]) -> None:
    assert json.loads(json.dumps(record)) == record
    text = table(record)
    assert "2 micro-batches of 48 tokens per step" in text
    assert "fastpack is" in text
    assert "capacity: every position, padding included" in text
    assert max(len(line) for line in text.partition("the timeline of one step")[0].splitlines() if "   " in line) <= 100
    assert "the timeline of one step is in fastpack.json" in text


def test_a_trace_of_each_side_is_written_with_its_operators(record: dict[str, Any]) -> None:
    for name, side in record["rows"][0]["sides"].items():
        profile = side["profile"]
        assert profile["trace"] == f"{name}.json"
        assert profile["operators"][0]["microseconds"] > 0


def test_the_order_alternates_and_each_side_runs_once_per_round(record: dict[str, Any]) -> None:
    order = record["rows"][0]["order"]
    rounds = [order[start : start + 3] for start in range(0, 9, 3)]
    assert [sorted(turn) for turn in rounds] == [["fastpack", "rebuild", "stock"]] * 3
    assert all(one != two for one, two in itertools.pairwise(rounds))
    assert [turn_order(["a", "b"], index) for index in range(4)] == [["a", "b"], ["b", "a"]] * 2


def test_both_sides_see_the_same_tokens_and_train_for_real(tmp_path: Path) -> None:
    """From the batches themselves, not from the digests that the comparison checks."""
    seen: dict[type, list[torch.Tensor]] = {}
    trainers = []

    def note(trainer: Any) -> None:
        trainers.append(trainer)
        batches, rows = trainer.get_batch_samples, seen.setdefault(type(trainer), [])

        def noted(*args: Any, **kwargs: Any) -> Any:
            found, items = batches(*args, **kwargs)
            rows.extend(inputs["input_ids"].clone() for inputs in found)
            return found, items

        trainer.get_batch_samples = noted

    start = tiny_model("qwen3").state_dict()
    compare(_build(tmp_path, note), pairs=1, warmup=0, progress=False)
    stock, ours = seen.values()
    assert len(stock) == len(ours) == 2 * 4  # two steps of the gate, one timed, one in which syncs are counted
    assert all(torch.equal(a, b) for a, b in zip(stock, ours, strict=True))
    assert len({tuple(row.flatten().tolist()) for row in stock}) == len(stock)
    for trainer in trainers:
        changed = [name for name, value in trainer.model.state_dict().items() if not torch.equal(value, start[name])]
        assert "model.layers.0.mlp.up_proj.weight" in changed


def _other_model(trainer: Any) -> None:
    trainer.model.model.norm.register_forward_hook(lambda _module, _inputs, hidden: hidden * 1.01)


def _other_optimizer(trainer: Any) -> None:
    trainer.args.learning_rate *= 3


def _other_batches(trainer: Any) -> None:
    rows = trainer.train_dataset
    trainer.train_dataset = rows.select(range(len(rows) - 1, -1, -1))


@pytest.mark.parametrize(
    ("change", "warmup", "message"),
    [
        (_other_model, 0, r"the loss of step 1 is [\d.]+ with fastpack and [\d.]+ with stock"),
        (_other_optimizer, 1, "the loss of step 2 is"),
        (_other_batches, 0, "different micro-batches in step 1"),
    ],
)
def test_the_gate_stops_a_side_that_does_something_else(
    tmp_path: Path, change: Callable[[Any], None], warmup: int, message: str
) -> None:
    build = _build(tmp_path, lambda trainer: None if type(trainer) is SFTTrainer else change(trainer))
    with pytest.raises(LossParityError, match=message):
        compare(build, pairs=1, warmup=warmup, gate_steps=2 - warmup, progress=False)
    assert not [thread for thread in threading.enumerate() if "_train" in thread.name]


@pytest.mark.parametrize(
    ("dtype", "apart", "passes"),
    [
        (torch.float32, 0.9e-5, True), (torch.float32, 2e-5, False), (torch.bfloat16, 0.007, True),
        (torch.bfloat16, 0.009, False), (torch.float16, 0.002, False), (torch.float32, float("nan"), False),
    ],
)  # fmt: skip
def test_the_tolerance_is_that_of_the_dtype(dtype: torch.dtype, apart: float, passes: bool) -> None:
    losses = {"stock": ("tokens", 4.0), "fastpack": ("tokens", 4.0 * (1 + apart))}
    if passes:
        check_step(1, losses, dtype)
    else:
        with pytest.raises(LossParityError, match=f"allowed are {tolerance(dtype):.0e}"):
            check_step(1, losses, dtype)
    norms = {"stock": ("tokens", 4.0), "fastpack": ("tokens", 4.0 * (1 + 10 * apart))}
    if passes:
        check_step(1, norms, dtype, GRADIENT_NORM)
    else:
        with pytest.raises(LossParityError, match=r"the gradient norm of step 1 is"):
            check_step(1, norms, dtype, GRADIENT_NORM)


def test_dropout_is_off_inside_and_back_outside() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.3), nn.Dropout(0.0))
    model[0].attention_dropout = 0.1
    with without_dropout([model]) as any_dropout:
        assert any_dropout
        assert (model[1].p, model[0].attention_dropout) == (0.0, 0.0)
    assert (model[1].p, model[2].p, model[0].attention_dropout) == (0.3, 0.0, 0.1)
    with without_dropout([nn.Linear(2, 2)]) as any_dropout:
        assert not any_dropout


def test_a_build_that_shares_its_model_or_ignores_its_arguments_is_named(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    own = settings(tmp_path, packing=True, eval_strategy="no")
    rows, words = make_dataset("text"), make_tokenizer()

    def shared(trainer_class: Any, config_class: Any, **changes: Any) -> Any:
        return trainer_class(model, args=config_class(**(own | changes)), train_dataset=rows, processing_class=words)

    with pytest.raises(UserError, match="build gave stock and fastpack the same model"):
        compare(shared, pairs=1, progress=False)

    def deaf(trainer_class: Any, config_class: Any, **changes: Any) -> Any:
        return trainer_class(tiny_model("qwen3"), args=config_class(**own), train_dataset=rows, processing_class=words)

    with pytest.raises(UserError, match=r"build ignored max_steps=10000 .*config_class"):
        compare(deaf, pairs=1, progress=False)
    with pytest.raises(UserError, match="build returned a SFTTrainer for fastpack"):
        compare(lambda _, config_class, **changes: shared(SFTTrainer, config_class, **changes), pairs=1, progress=False)
    with pytest.raises(UserError, match=r"no side 'fastpak'; did you mean 'fastpack'"):
        compare(shared, sides=("stock", "fastpak"), progress=False)


def test_an_interrupt_ends_both_trainings_and_keeps_what_was_timed(tmp_path: Path) -> None:
    class Interrupt(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                signal.raise_signal(signal.SIGINT)  # arrives in the main thread, which waits

    def add(trainer: Any) -> None:
        if type(trainer) is not SFTTrainer:
            trainer.add_callback(Interrupt())

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process of pytest-xdist ignores it
    try:
        found = compare(_build(tmp_path, add), pairs=50, warmup=0, progress=False)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert not found["complete"]
    (row,) = found["rows"]
    assert len(row["sides"]["stock"]["seconds"]["values"]) in (1, 2)
    assert set(row["ratios"]) == {"stock"}
    assert "INCOMPLETE" in table(found)
    assert not [thread for thread in threading.enumerate() if "_train" in thread.name]


def test_a_side_that_runs_out_of_memory_is_named_and_the_other_goes_on(tmp_path: Path) -> None:
    def fail(trainer: Any) -> None:
        if type(trainer) is SFTTrainer:

            def forward(*_: Any, **__: Any) -> None:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

            trainer.model.model.forward = forward

    found = compare(_build(tmp_path, fail), pairs=1, warmup=0, progress=False)
    (row,) = found["rows"]
    assert row["sides"]["stock"] == {"failed": "OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB"}
    assert len(row["sides"]["fastpack"]["seconds"]["values"]) == 1
    assert row["ratios"] == {}
    assert "stock: OutOfMemoryError" in table(found)


def test_a_training_leaves_its_trainer_as_it_was(tmp_path: Path) -> None:
    trainer = _build(tmp_path)(SFTTrainer, SFTConfig, eval_strategy="no", max_steps=2)
    callbacks, step = list(trainer.callback_handler.callbacks), vars(trainer).get("training_step")
    training = Training(trainer)
    training.begin()
    training.advance()
    training.close()
    training.close()
    assert trainer.state.global_step == 1
    assert trainer.callback_handler.callbacks == callbacks
    assert vars(trainer).get("training_step") is step


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_memory_kernels_and_idle_time_are_there(tmp_path: Path) -> None:
    build = _build(tmp_path, use_cpu=False, bf16=True)
    found = compare(build, pairs=3, profile=tmp_path, sides=("stock", "fastpack", "fastpack_plan"), progress=False)
    (row,) = found["rows"]
    assert (row["dtype"], row["device"]) == ("bfloat16", "cuda")
    for name, side in row["sides"].items():
        assert "failed" not in side, (name, side)
        memory = side["memory"]
        assert 0 < memory["before_bytes"] < memory["peak_bytes"] < 1 << 30
        assert side["launches"]["kernels"] > 50
        assert 0 <= side["idle_share"] < 1
        assert side["host_syncs"]["backend"] == "cuda"
        assert side["profile"]["operators"]
        assert (tmp_path / f"{name}.json").stat().st_size > 1000
    assert row["sides"]["fastpack"]["host_syncs"]["per_step"] < row["sides"]["stock"]["host_syncs"]["per_step"]


def test_rows_with_shared_prefixes_have_the_tokens_of_stock_and_say_how_many_ran(tmp_path: Path) -> None:
    build = _build(tmp_path, data=prefixed(), max_length=120)
    found = compare(build, pairs=2, warmup=0, progress=False, peak_flops=1e12)
    sides = found["rows"][0]["sides"]
    assert sides["stock"]["computed"] == 1.0
    assert 0.4 < sides["fastpack"]["computed"] < 0.8
    share = f"{sides['fastpack']['computed']:.0%}"
    assert f"fastpack: tokens computed: {share} of the documents' tokens" in table(found)
    done = {name: side["mfu"] * side["seconds"]["median"] for name, side in sides.items()}
    assert done["fastpack"] < 0.9 * done["stock"], "what is shared is needed once"


def test_a_moment_in_which_several_kernels_run_counts_once() -> None:
    assert covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    assert covered([]) == 0
