"""Much of what TRL's own tests of the five trainers try, on local data and tiny models: logs and weights as TRL's.

Not here: remote code, vLLM, Liger's kernels, what asks the hub, weights in 4 bits, data that only TRL's preparation
sees, rewards, and tools of GRPO. What both refuse is in `test_what_stock_refuses_is_refused_alike`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from model_material import gemma3, gemma3_processor
from peft import LoraConfig, get_peft_model
from preference_material import DATA, assert_changed_alike, assert_same, both, build, even_words, name_on_disk, pairs
from trainer_material import make_tokenizer, sentences

from fastpack_trl.testing import tiny_model

STEPS = {"max_steps": 2, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "learning_rate": 0.3}
RATES = {"RLOO": 0.03}
"""Ratios of whole sequences: beyond, steps are chaotic."""
CLOSE = {name: {"rtol": 2e-5, "atol": 2e-5} for name in ("GRPO", "RLOO")}
Options = dict[str, Any]
Case = Options | Callable[[], Options]

SEEN = (
    "{% for m in messages %}{{ m.role + ' ' }}{% if m.content is string %}{{ m.content + ' ' }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}{{ '<boi> ' }}{% else %}{{ part.text + ' ' }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
"""A chat template for pictures."""
SIDES = ("chosen", "rejected")


def talk(data: Dataset, *, implicit: bool = False) -> Dataset:
    """Turn texts into conversations; without a column for prompts where they are `implicit`."""

    def turns(row: dict[str, Any]) -> dict[str, Any]:
        said = [{"role": "user", "content": row["prompt"]}]
        answers = {name: row[name] for name in ("chosen", "rejected", "completion") if name in row}
        spoken = {name: [{"role": "assistant", "content": text}] for name, text in answers.items()}
        if implicit:
            return {name: said + one for name, one in spoken.items()}
        return {"prompt": said, **spoken}

    return data.map(turns, remove_columns=[name for name in data.column_names if name != "label"])


def implied(data: Dataset) -> Dataset:
    """Put the prompt in front of each answer."""
    return data.map(lambda row: {name: row["prompt"] + row[name] for name in SIDES}, remove_columns=["prompt"])


def padding_at_the_end() -> Any:
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def adapted() -> Options:
    """A model with adapters on it before the trainer has it."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return {"model": get_peft_model(tiny_model("qwen3"), config), "trainer": {"peft_config": None}}


def on_experts(name: str) -> Options:
    task = "SEQ_CLS" if name == "Reward" else "CAUSAL_LM"
    config = LoraConfig(
        r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"], task_type=task, lora_dropout=0.0
    )
    return {"family": "qwen3_moe", "trainer": {"peft_config": config}}


def streamed(name: str) -> Options:
    return {"data": DATA[name]().to_iterable_dataset(), "eval_strategy": "no"}


def several(name: str) -> Options:
    data = DATA[name]
    return {"evaluated": {"first": data(8, seed=7), "second": data(4, seed=8)}, "eval_steps": 2}


def every(name: str) -> dict[str, Case]:
    """Cases that TRL tries with each trainer."""
    data = DATA[name]
    return {
        "conversational": {"data": talk(data()), "evaluated": talk(data(8, seed=7))},
        "streamed": lambda: streamed(name),
        "several evaluations": lambda: several(name),
        "adapters on experts": lambda: on_experts(name),
        "padding that ends a text": lambda: {"trainer": {"processing_class": padding_at_the_end()}},
    }  # fmt: skip


def by_length(completions: list[Any], **kwargs: Any) -> list[float]:
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [float(len(text)) for text in texts]


def rewarded(function: Any) -> Options:
    return {"trainer": {"reward_funcs": [function]}}


def online(name: str) -> dict[str, Case]:
    """Cases of both trainers that generate."""
    cases: dict[str, Case] = {
        "iterations": {"num_iterations": 2},
        "more generations than rows": {"per_device_train_batch_size": 2, "num_generations": 4},
        "truncated": {"mask_truncated_completions": True, "max_completion_length": 3, "_unmoved": True},
        "reference": {"beta": 0.1},
        "synced reference": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "lora": False},
    }
    talking = every(name)["conversational"]
    assert isinstance(talking, dict)
    cases = {**every(name), **cases, "conversational": {**talking, **rewarded(by_length)}}
    return {key: _two_micro_batches(case) for key, case in cases.items()}


def _two_micro_batches(case: Case) -> Case:
    return lambda: {"gradient_accumulation_steps": 2, **(case() if callable(case) else case)}


def grpo(**options: Any) -> Case:
    return _two_micro_batches(options)


def paired(name: str) -> dict[str, Case]:
    return {
        "implicit prompts": {"data": implied(pairs()), "evaluated": implied(pairs(8, seed=7))},
        "implicit prompts, conversational": {"data": talk(pairs(), implicit=True), "eval_strategy": "no"},
    }


def answers(rejected: list[str]) -> Options:
    """Pairs of which the rejected answers are given; gradients may cancel."""
    asked = [f"{text} " for text in sentences(20, 0, 40)]
    data = Dataset.from_dict({"prompt": asked, "chosen": sentences(20, 1, 9), "rejected": rejected})
    return {"data": data, "eval_strategy": "no", "_unmoved": True}


def width(prediction: Any) -> dict[str, float]:
    return {"width": float(prediction.predictions.shape[1])}


METRICS: Options = {"eval_steps": 2, "trainer": {"compute_metrics": width}}
BY_NAME: Case = lambda: {"lora": False, "trainer": {"ref_model": None}, "model": on_disk()}  # noqa: E731
FULL: Options = {"lora": False}

CASES: dict[str, dict[str, Case]] = {
    "DPO": {
        **every("DPO"),
        "adapters before": adapted,
        "checkpoints, reentrant": {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
        "padded to a multiple": {"pad_to_multiple_of": 8},
        "gpt_oss": {"family": "gpt_oss"},
        **paired("DPO"),
        "two losses": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
        "length": {"ld_alpha": 0.5},
        "weighting": {"use_weighting": True},
        "synced reference": {"sync_ref_model": True, "ref_model_sync_steps": 1, **FULL},
        "cut at the end": {"max_length": 24},
        "cut at the beginning": {"max_length": 24, "truncation_mode": "keep_end"},
        "softcap": {"family": "gemma2"},
        "equal completions": lambda: answers(sentences(20, 1, 9)),
        "a beginning": lambda: answers([f"{text} w1 w2" for text in sentences(20, 1, 9)]),
        "empty completions": lambda: answers([""] * 20),
        "metrics": METRICS,
        "reference by name": BY_NAME,
        "completions cut off whole": {"max_length": 20},
        "precomputed, evaluated": {"precompute_ref_log_probs": True, "eval_steps": 2},
        "accumulation": {"gradient_accumulation_steps": 2},
        "auxiliary loss": {"family": "qwen3_moe", "router_aux_loss_coef": 0.1},
        "padding_free": {"padding_free": True},
    },
    "KTO": {
        **every("KTO"),
        "completions cut off whole": {"max_length": 20},
        "precomputed, evaluated": {"precompute_ref_log_probs": True, "eval_steps": 2},
        "synced reference": {"sync_ref_model": True, "ref_model_sync_steps": 1, "lora": False},
        "reference by name": BY_NAME,
        "metrics": METRICS,
        "auxiliary loss": {"family": "qwen3_moe", "router_aux_loss_coef": 0.1},
        "two steps": {"gradient_accumulation_steps": 2},
    },
    "Reward": {
        **every("Reward"),
        **paired("Reward"),
        "tokens": {
            "data": implied(pairs()).map(
                lambda row: {f"{side}_ids": make_tokenizer()(row[side])["input_ids"] for side in SIDES},
                remove_columns=[*SIDES],
            ),
            "eval_strategy": "no",
        },
        "margins": {"data": pairs().add_column("margin", [0.1 * n for n in range(20)]), "eval_strategy": "no"},
        "metrics": {
            "eval_steps": 2,
            "trainer": {"compute_metrics": lambda seen: {"mean": float(seen.predictions[0].mean())}},
        },
    },
    "GRPO": {
        **online("GRPO"),
        "loss grpo": grpo(loss_type="grpo", num_iterations=2),
        "temperature": grpo(temperature=0.7),
        "entropy, static": grpo(entropy_coef=0.01),
        "head in fp32": grpo(cast_lm_head_to_fp32=True, lora=False),
        "auxiliary loss": grpo(family="qwen3_moe", router_aux_loss_coef=0.1),
    },
    "RLOO": {key: online("RLOO")[key] for key in ("conversational", "iterations", "reference", "synced reference")},
}


def on_disk() -> Any:
    import tempfile

    model = tiny_model("qwen3")
    name_on_disk(model, Path(tempfile.mkdtemp()))
    return model


CHOSEN = [pytest.param(name, key, id=f"{name}-{key}") for name, cases in CASES.items() for key in cases]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "key"), CHOSEN)
def test_what_trl_tries_logs_and_learns_what_stock_does(name: str, key: str, tmp_path: Path) -> None:
    case = CASES[name][key]
    make: Callable[[], Options] = case if callable(case) else (lambda: case)
    given = {**STEPS, "learning_rate": RATES.get(name, 0.3)}
    unmoved = make().pop("_unmoved", False)
    ours, stock = both(name, tmp_path, lambda: {k: v for k, v in make().items() if k != "_unmoved"}, **given)
    assert ours.fastpack_report["batches"].status == "on", ours.fastpack_report
    assert ours._fastpack_rows.ran > 0
    if name in CLOSE:
        merges = "off" if getattr(ours, "aux_loss_enabled", False) else "on"
        assert ours.fastpack_report["merge_accumulation"].status == merges, ours.fastpack_report
    assert_same(ours, stock, **CLOSE.get(name, {}))
    if not unmoved:
        assert_changed_alike(ours, stock)
    assert (ours.model.model_tags or []) == (stock.model.model_tags or [])


def pictures(name: str) -> Options:
    from PIL import Image

    draw = random.Random(0)
    images = [[Image.new("RGB", (28, 28), (draw.randrange(256), 40, 80))] for _ in range(8)]
    data = talk(DATA[name](8))
    data = Dataset.from_list([{**row, "images": shown} for row, shown in zip(data, images, strict=True)])
    processor = gemma3_processor()
    processor.chat_template = SEEN
    adapters = LoraConfig(r=4, target_modules=r".*language_model.*\.(q_proj|v_proj)", lora_dropout=0.0)
    return {
        "model": gemma3(), "data": data, "eval_strategy": "no", "max_length": None,
        "trainer": {"processing_class": processor, "peft_config": adapters, "eval_dataset": None}
        | ({"reward_funcs": [by_length]} if name in CLOSE else {}),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DPO", "KTO", "GRPO", "RLOO"])
def test_pictures_are_stocks_and_named(name: str, tmp_path: Path) -> None:
    """Two micro-batches: those of a step are not run together either."""
    more = {"gradient_accumulation_steps": 2} if name in CLOSE else {}
    ours, stock = both(name, tmp_path, lambda: pictures(name), **{**STEPS, "learning_rate": 0.01, **more})
    assert ours._fastpack_rows.ran == 0
    why = "if there are images" if name in CLOSE else "vision data"
    assert why in ours.fastpack_report["batches"].reason, ours.fastpack_report
    assert_same(ours, stock)


REFUSED: dict[str, tuple[str, Case]] = {
    "Liger": ("GRPO", {"use_liger_kernel": True}),
    "adapters on the head": ("DPO", {"trainer": {"peft_config": LoraConfig(target_modules=["lm_head"])}}),
    "no data": ("KTO", {"trainer": {"train_dataset": None}}),
    "streamed, precomputed": ("DPO", lambda: {**streamed("DPO"), "precompute_ref_log_probs": True}),
    "pictures without a processor": ("DPO", lambda: {"data": DATA["KTO"]().add_column("image", [None] * 20)}),
    "rewards and their tokenizers": (
        "RLOO", {"trainer": {"reward_funcs": [even_words], "reward_processing_classes": [None, None]}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("key", REFUSED)
def test_what_stock_refuses_is_refused_alike(key: str, tmp_path: Path) -> None:
    name, case = REFUSED[key]
    said = []
    for fast in (True, False):
        with pytest.raises((ValueError, ImportError, TypeError, RuntimeError)) as error:
            build(name, tmp_path / str(fast), fast=fast, **case() if callable(case) else case).train()
        said.append(str(error.value))
    assert said[0] == said[1]


def test_a_reference_that_was_not_kept_is_refused_alike_after_training(tmp_path: Path) -> None:
    ours, stock = both("DPO", tmp_path, lora=False, precompute_ref_log_probs=True, max_steps=1)
    assert ours._fastpack_rows.ran == 5 + 3 + 1 + 3, "the reference before the run, a step and an evaluation"
    said = []
    for trainer in (ours, stock):
        with pytest.raises(ValueError, match="after training has started") as error:
            trainer.evaluate(pairs(8, seed=9))
        said.append(str(error.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("precomputed", [False, True])
@pytest.mark.parametrize("name", ["DPO", "KTO"])
def test_evaluation_of_data_that_is_passed_is_stocks(name: str, precomputed: bool, tmp_path: Path) -> None:
    ours, stock = both(name, tmp_path, precompute_ref_log_probs=precomputed, max_steps=1)
    data = DATA[name]
    for given in (data(8, seed=9), {"first": data(8, seed=9), "second": data(4, seed=10)}):
        mine, theirs = ours.evaluate(given), stock.evaluate(given)
        assert mine.keys() == theirs.keys()
    assert_same(ours, stock)
