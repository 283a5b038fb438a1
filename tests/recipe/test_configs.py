"""Every file of ``configs/`` goes through the real parser and trains, on a tiny model of its family and tiny data."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import trl.accelerate_configs
import yaml
from safetensors.torch import load_file, save_file
from trainer_material import make_tokenizer, sentences
from transformers import AutoConfig
from vision_material import COMPOSITES, image_data, save_image_model

from benchmarks.images import IMAGE_MODELS
from benchmarks.models import MODELS, ModelShape
from fastpack_trl import FastSFTTrainer
from fastpack_trl.moe.layout import experts_modules
from fastpack_trl.moe.quantized import has_quantized_experts
from fastpack_trl.recipe.arguments import as_flags, parse
from fastpack_trl.recipe.forecast import attention_of, fixed_bytes, model_of
from fastpack_trl.recipe.gpus import GPUS
from fastpack_trl.recipe.methods import METHODS, Method
from fastpack_trl.recipe.train import train
from fastpack_trl.testing import tiny_model

ROOT = Path(__file__).parents[2]
FILES = {str(path.relative_to(ROOT / "configs")): path for path in sorted((ROOT / "configs").rglob("*.yaml"))}
FAMILIES = {
    "quickstart-output/model": ("qwen3", None),
    "Qwen/Qwen3-0.6B": ("qwen3", "qwen3-0.6b"),
    "Qwen/Qwen3-8B": ("qwen3", "qwen3-8b"),
    "Qwen/Qwen3-14B": ("qwen3", "qwen3-14b"),
    "Qwen/Qwen3-32B": ("qwen3", "qwen3-32b"),
    "Qwen/Qwen3-30B-A3B": ("qwen3_moe", "qwen3-30b-a3b"),
    "meta-llama/Llama-3.2-1B": ("llama", "llama-3.2-1b"),
    "openai/gpt-oss-20b": ("gpt_oss", "gpt-oss-20b"),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": ("mixtral", "mixtral-8x7b"),
    "moonshotai/Moonlight-16B-A3B-Instruct": ("deepseek_v3", "moonlight-16b-a3b"),
    "Qwen/Qwen2.5-VL-3B-Instruct": ("qwen2_5_vl", "qwen2.5-vl-3b"),
    "google/gemma-3-4b-it": ("gemma3", "gemma3-4b"),
}
"""Hub name -> transformers' model type, and its shape in `SHAPES`."""

SHAPES = MODELS | {
    name: ModelShape(one.family, {"text_config": one.text, "vision_config": one.tower, "tie_word_embeddings": True})
    for name, one in IMAGE_MODELS.items()
} | {
    "mixtral-8x7b": ModelShape("mixtral", {"num_hidden_layers": 32, "hidden_size": 4096}),  # transformers' defaults
    "moonlight-16b-a3b": ModelShape("deepseek_v3", {
        "num_hidden_layers": 27, "hidden_size": 2048, "intermediate_size": 11264, "moe_intermediate_size": 1408,
        "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 163840, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "q_lora_rank": None,
        "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
    }),
}  # fmt: skip
"""Public shapes of the models, those of the benchmarks and two more."""
IMAGES = "trl-lib/llava-instruct-mix"
OVERRIDES = {
    # bitsandbytes packs blocks of 64 numbers, and on a CPU evaluates with 32 rows of a weight at a time.
    "qwen3": {"head_dim": 16, "intermediate_size": 64},
    "deepseek_v3": {"q_lora_rank": None},  # as Moonlight's config
    "gpt_oss": {"intermediate_size": 64},  # MXFP4 packs blocks of 32 numbers
}


def rows(dataset: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Rows with the columns of the hub's data set."""
    out: list[dict[str, Any]] = []
    for question, answer in zip(sentences(count, seed, 8), sentences(count, seed + 1, 20), strict=True):
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        worse = [turns[0], {**turns[1], "content": "w5"}]
        thinking = [{**turns[0], "thinking": None}, {**turns[1], "thinking": "w1 w2"}]
        columns: dict[str, dict[str, Any]] = {
            "trl-lib/tldr": {"prompt": question, "completion": " " + answer},
            "HuggingFaceH4/ultrachat_200k": {"prompt": question, "prompt_id": str(len(out)), "messages": turns},
            "HuggingFaceH4/Multilingual-Thinking": {"developer": "w3", "user": question, "messages": thinking},
            "open-r1/Mixture-of-Thoughts": {"messages": turns, "num_tokens": len(answer.split()), "source": "w"},
            "trl-lib/ultrafeedback_binarized": {"chosen": turns, "rejected": worse, "score_chosen": 8.5},
            "trl-lib/DeepMath-103K": {"prompt": turns[:1], "solution": "w5"},
        }
        out.append(columns.get(dataset, {"messages": turns, "num_turns": 1}))
    return out


@cache
def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(FILES[name].read_text(encoding="utf-8"))
    return found


def pack_as_mxfp4(folder: Path) -> None:
    """Give a saved gpt-oss the format of the published one: experts as blocks of 32 four-bit numbers and a scale."""
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith((".gate_up_proj", ".down_proj"))]:
        experts, inner, outer = weights.pop(name).shape
        weights[f"{name}_blocks"] = torch.randint(0, 256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
        weights[f"{name}_scales"] = torch.full((experts, outer, inner // 32), 127 - 6, dtype=torch.uint8)  # 2 ** -6
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model per family and local data in the columns and splits of each data set."""
    from datasets import Dataset, DatasetDict

    folder = tmp_path_factory.mktemp("configs")
    families = {family for family, _ in FAMILIES.values()}
    for family in families & COMPOSITES.keys():
        save_image_model(family, folder / family)
    for family in families - COMPOSITES.keys():
        model = tiny_model(family, hidden_size=64, **OVERRIDES.get(family, {}))
        model.save_pretrained(folder / family)
        make_tokenizer().save_pretrained(folder / family)
    pack_as_mxfp4(folder / "gpt_oss")
    for dataset in {read(name).get("dataset_name") or read(name)["datasets"][0]["path"] for name in FILES} - {IMAGES}:
        splits = ("train", "test", "validation", "train_sft", "test_sft")
        data = {split: Dataset.from_list(rows(dataset, 24, seed)) for seed, split in enumerate(splits)}
        DatasetDict(data).save_to_disk(folder / dataset)
    DatasetDict(train=image_data(images=1, kind="turns")).save_to_disk(folder / IMAGES)
    return folder


def method(name: str) -> Method:
    """The one whose command is in the head of the file."""
    return METHODS[commands(FILES[name])[0][0].replace("bench", "sft")]


SMALLER = {"grpo": ["--reward_funcs", "think_format_reward", "--num_generations", "2", "--max_completion_length", "8"]}
"""Flags of a command for a short run; math-verify may not be installed."""


def run(name: str, folder: Path, output: Path) -> FastSFTTrainer:
    """Two optimizer steps of the file, with its model and data replaced and its rows short."""
    config = read(name)
    family, _ = FAMILIES[config["model_name_or_path"]]
    changed = {
        "model_name_or_path": folder / family, "output_dir": output,
        "dataset_name": folder / config.get("dataset_name", ""),
        "max_steps": 2, "logging_steps": 1, "max_length": 48,
        "per_device_train_batch_size": min(2, config["per_device_train_batch_size"]),
        "gradient_accumulation_steps": min(2, config.get("gradient_accumulation_steps", 1)), "use_cpu": True,
        "report_to": "none", "disable_tqdm": True, "warmup_steps": 0,
    }  # fmt: skip
    path = FILES[name]
    if "datasets" in config:  # a list has no flag: the name is replaced in the text
        (entry,) = config["datasets"]
        source = entry["path"]
        del changed["dataset_name"]
        text = path.read_text(encoding="utf-8")
        path = output / path.name
        path.write_text(text.replace(f"path: {source}\n", f"path: {folder / source}\n"), encoding="utf-8")
    if "image_row_tokens" in config:
        changed |= {"image_row_tokens": changed["max_length"] * 2, "dataloader_num_workers": 0}
    if method(name).scores_rewards or "image_row_tokens" in config:
        del changed["max_length"]  # what it generates has a length of its own
    more = SMALLER.get(method(name).command, ())
    return train(["--config", str(path), *as_flags(changed), *more], method(name))


@pytest.mark.parametrize("name", FILES)
def test_a_config_trains_as_said(name: str, stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read(name)
    if config.get("load_in_4bit") or config.get("moe_quantize_experts") == "on":
        pytest.importorskip("bitsandbytes")
    for variable in ("WORLD_SIZE", "LOCAL_RANK", "RANK", "ACCELERATE_DYNAMO_USE_FULLGRAPH"):
        monkeypatch.delenv(variable, raising=False)
    trainer = run(name, stand_ins, tmp_path)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == sum(map(math.isfinite, losses)) == 2
    assert trainer.model.config.model_type == FAMILIES[config["model_name_or_path"]][0]
    check_trained(trainer, config)
    check_report(trainer, config)


def check_trained(trainer: FastSFTTrainer, config: dict[str, Any]) -> None:
    """The parameters that the file names are trained, and no others; the base has the format that the file asks for."""
    trained = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    kinds = {type(module).__name__ for module in trainer.model.modules()}
    assert ("Linear4bit" in kinds) == config.get("load_in_4bit", False)
    assert has_quantized_experts(trainer.model) == (config.get("moe_quantize_experts") == "on")
    if not config.get("use_peft"):
        assert set(trained) == {name for name, _ in trainer.model.named_parameters()}
        return
    assert all("lora_" in name for name in trained)
    assert not any("lm_head" in name or "router" in name or ".gate." in name for name in trained)
    experts = [name for name in trained if ".experts." in name]
    assert bool(experts) == ("lora_target_parameters" in config)
    for module in experts_modules(trainer.model) if experts else ():  # A and B for both stacks of every layer
        assert sum(name.startswith(module.split(".base_layer")[0]) for name in experts) == 4, (module, experts)
    modules = config["lora_target_modules"]
    decoder = [name for name in trained if ".self_attn." in name and "vision" not in name]
    attention = {name.split(".self_attn.")[1].split(".")[0] for name in decoder}
    assert attention == (set(modules) if isinstance(modules, list) else {"q_proj", "k_proj", "v_proj", "o_proj"})
    ranks = {p.shape[0] for name, p in trained.items() if "lora_A" in name and "experts" not in name}
    assert ranks == {config["lora_r"]}
    unused = "vision_tower.head"  # by Gemma 3
    assert all(torch.any(p != 0) for name, p in trained.items() if "lora_B" in name and unused not in name), (
        "the loss reaches every adapter"
    )


def check_report(trainer: FastSFTTrainer, config: dict[str, Any]) -> None:
    """Features that the file asks for are on; what the CPU lacks is off, with its reason."""
    report, peft, experts = trainer.fastpack_report, bool(config.get("use_peft")), "lora_target_parameters" in config
    statuses = {"packed_attention": "on", "lora" if peft else "packed_attention": "on"}
    statuses |= {} if "share_prefixes" in config else {"sync_free": "on"}
    assert {name: report[name].status for name in statuses} == statuses, report
    paths = {"batches": "packed" if config.get("packing") else "padding-free"}
    paths |= {"share_prefixes": "prompts once"} if "share_prefixes" in config else {}
    paths |= {"moe": "fastpack"} if experts else {}
    paths |= {"vision_rows": "rows of up to 96 tokens"} if "image_row_tokens" in config else {}
    paths |= {"vision_tower": "one call per image"} if "vision_tower" in config else {}
    assert {name: report[name].path for name in paths} == paths, report
    assert trainer.fastpack_proof.proven
    assert ("lora" in report, "moe" in report) == (peft, bool([*experts_modules(trainer.model)]))
    assert not experts or "; LoRA on the experts of" in report["moe"].reason
    assert ("quantized experts" in report.facts) == (config.get("moe_quantize_experts") == "on")


def commands(path: Path) -> list[list[str]]:
    """The lines of commands in the comments of a file or the text of a page, as words."""
    text = path.read_text(encoding="utf-8")
    lines = re.findall(r"(?:^#? *|: )fastpack-trl ((?:sft|dpo|grpo|bench) .*)$", text, re.M)
    return [*map(shlex.split, lines)]


@pytest.mark.parametrize("name", FILES)
def test_the_commands_in_a_config_run_this_file_with_accelerate_files_that_trl_ships(name: str) -> None:
    found = commands(FILES[name])
    assert found
    for command, flag, path, *rest in found:
        assert (flag, path) == ("--config", f"configs/{name}")
        if command == "bench":
            continue
        launch = parse([flag, str(ROOT / path), *rest, "--use_cpu"], METHODS[command]).launch
        assert ("--accelerate_config" in rest) == bool(launch)
        if launch:
            shipped = Path(launch[0].removeprefix("--config_file="))
            assert shipped.is_file()
            assert shipped.parent.parts[-2:] == ("trl", "accelerate_configs")
            assert launch[1:] == ["--num_processes", rest[-1]]


def held(name: str, folder: Path, **changed: Any) -> tuple[Any, dict[str, float], dict[str, str]]:
    """Arguments of a config, what it holds before its activations by part, and its attention per GPU."""
    shape = shape_of(name)
    AutoConfig.for_model(shape.model_type, **shape.fields).save_pretrained(folder)
    arguments = parse(["--config", str(FILES[name]), "--use_cpu"], method(name))
    arguments.model.model_name_or_path = str(folder)
    for field, value in changed.items():
        setattr(arguments.training, field, value)
    model = model_of(arguments)
    shards = "fsdp2" in commands(FILES[name])[0]  # over eight GPUs
    on = replace(GPUS["H100"], processes=8 if shards else 1, shards=shards)
    sizes, outside = fixed_bytes(model, arguments, on).items(), ("CUDA context", "NCCL")
    fixed = {part: size / 2**30 for part, size in sizes if part not in outside}
    attention = {gpu: attention_of(model.module, GPUS[gpu], arguments.training)[1].path for gpu in ("H100", "T4")}
    return arguments.training, fixed, attention


def shape_of(name: str) -> ModelShape:
    return SHAPES[str(FAMILIES[read(name)["model_name_or_path"]][1])]


@pytest.mark.parametrize("name", [name for name in FILES if "/" not in name and name != "quickstart.yaml"])
def test_the_memory_in_the_head_of_a_config_is_the_forecast_of_doctor(name: str, tmp_path: Path) -> None:
    head = FILES[name].read_text(encoding="utf-8").split("\n\n", 1)[0]
    training, fixed, attention = held(name, tmp_path)
    frozen, fields = fixed["frozen weights"], shape_of(name).fields
    (stated,) = re.findall(r"Memory before activations: ([\d.]+) GiB \((.*)\)", head)
    figures = [(stated[0], sum(fixed.values()))]
    for weights, trained in re.findall(r"weights ([\d.]+), adapters with gradients and AdamW ([\d.]+)", stated[1]):
        figures += [(weights, frozen), (trained, sum(fixed.values()) - frozen)]
    assert (len(figures) == 3) == bool(read(name).get("use_peft"))
    for dense in re.findall(r"([\d.]+) GiB of free host memory while the model is loaded", head):
        figures += [(dense, held(name, tmp_path, moe_quantize_experts="off")[1]["frozen weights"])]
    for offloaded in re.findall(r"Host memory of the offload: ([\d.]+) GiB", head):
        inputs = fields["num_hidden_layers"] - 1  # the last one's stays on the device
        tokens = training.per_device_train_batch_size * training.max_length
        figures += [(offloaded, inputs * tokens * fields["hidden_size"] * 2 / 2**30)]
    assert [float(text) for text, _ in figures] == pytest.approx([size for _, size in figures], abs=0.06)
    assert attention == {"H100": "varlen", "T4": "per_document"}, "torch's kernel needs sm80"


def test_every_config_is_in_the_table() -> None:
    page = (ROOT / "configs" / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`((?:bench/)?[\w.-]+\.yaml)`", page)) == set(FILES)


def test_the_readme_launches_by_hand_with_a_file_of_trl() -> None:
    from accelerate.commands.launch import launch_command_parser

    text = (ROOT / "configs" / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (command,) = re.findall(r"^accelerate launch (.*)$", text, re.M)
    folder = Path(trl.accelerate_configs.__path__[0])  # as the command has it
    (listed,) = re.findall(r"TRL ships accelerate configs: (.*?)\.", text)
    assert set(re.findall(r"`(\w+)`", listed)) == {shipped.stem for shipped in folder.glob("*.yaml")}
    launch = launch_command_parser().parse_args(shlex.split(re.sub(r"\$\(.*\)", str(folder), command)))
    assert Path(launch.config_file).is_file()
    assert (launch.module, launch.training_script) == (True, "fastpack_trl")
    assert parse([*launch.training_script_args[1:], "--use_cpu"]).training.packing
