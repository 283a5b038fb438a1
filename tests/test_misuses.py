"""What goes wrong at first contact: each misuse is one line with the value and the remedy, no two alike."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sft_material import Material
from trainer_material import TEMPLATE, callback

from fastpack_trl import (
    AsyncCheckpointCallback,
    FastDPOTrainer,
    FastSFTConfig,
    FastSFTTrainer,
    ThroughputCallback,
    apply_lora,
    packed_attention,
)
from fastpack_trl.cli.main import main
from fastpack_trl.errors import UserError, describe
from fastpack_trl.recipe import train
from fastpack_trl.testing import tiny_model


@dataclass(frozen=True)
class Misuse:
    """``Misuse("sft --confg {yaml}", "--config")``: the words (``{yaml}`` is a right file), what the line must say."""

    words: str
    says: str
    yaml: str = ""
    """Lines for the YAML, in place of the right ones."""
    code: int = 2
    missing: str = ""
    """A package that is not there."""


EXPERTS = "use_peft: true\nlora_target_parameters: [mlp.experts.down_proj]\nlora_dropout: "
COMMANDS = [
    Misuse("stf", "did you mean 'sft'?"),
    Misuse("--colour", "fastpack-trl --help"),
    # init
    Misuse("init quickstrat", "did you mean 'quickstart'?"),
    Misuse("init quickstart --output .", "--output '.' is a folder: name a file"),
    Misuse("init qwen3-8b-lora-8k --output sft.yaml", "sft.yaml exists: --force replaces it, --output"),
    Misuse("init qwen3-8b-lora-8k --output no/such/sft.yaml", "--output 'no/such/sft.yaml' cannot be written"),
    # sft: flags
    Misuse("sft", "no settings: give --config FILE"),
    Misuse("sft --config {yaml}", "init quickstart' makes it", "model_name_or_path: quickstart-output/model"),
    Misuse("sft --config {yaml} --model_name_or_path here/modle", "did you mean 'here/model'?"),
    Misuse("sft --config {yaml} --model_name_or_path here", "has no config.json: did you mean 'here/model'?"),
    Misuse("sft --config {yaml} --model_name_or_path here/noweights", "it holds no weights, such as model.safetensors"),
    Misuse("sft --config {yaml} --dataset_name here/dta", "did you mean 'here/data'?"),
    Misuse("sft --config {yaml} --dataset_name here/data", "/here/data doesn't contain any data files"),
    Misuse("sft sft.yaml", "unexpected argument 'sft.yaml': did you mean --config sft.yaml?"),
    Misuse("sft --config here", "config file 'here' cannot be read as UTF-8 text: [Errno 21] Is a directory"),
    Misuse("sft --config sftt.yaml", "did you mean 'sft.yaml'?"),
    Misuse("sft --config {yaml} --num_processes 0", "--num_processes=0 must be >= 1"),
    Misuse("sft --config {yaml} --load_in_4bit true", "pip install 'fastpack-trl[qlora]'", missing="bitsandbytes"),
    Misuse("sft --config {yaml}", "`r` should be a positive integer", "use_peft: true\nlora_r: 0"),
    Misuse("sft --config {yaml}", "Target modules q_prj not found", "use_peft: true\nlora_target_modules: q_prj"),
    Misuse("sft --config {yaml}", "'lora_r' is given a second time, after line", "lora_r: 8\nlora_r: 16"),
    Misuse("sft --confg {yaml}", "did you mean '--config'?"),
    Misuse("sft --config", "--config must name one YAML file, e.g."),
    Misuse("sft --config absent.yaml", "'absent.yaml' does not exist (looked for"),
    Misuse("sft --config there/qwen3-8b-lora-8k.yaml", "lora-8k` writes qwen3-8b-lora-8k.yaml"),
    Misuse("sft --config {yaml} --lr 1", "'--lr'; did you mean '--learning_rate'?"),
    Misuse("sft --config {yaml} --max_steps x", "--max_steps='x' must be a whole number"),
    Misuse("sft --config {yaml} --max_length", "--max_length: expected one argument"),
    Misuse("sft --config {yaml} data.jsonl", "unexpected argument 'data.jsonl': options start with --"),
    Misuse("sft --config {yaml} --num_processes", "--num_processes: expected one argument"),
    # sft: keys, types, files
    Misuse(
        "sft --config {yaml} --assistant_only_loss true",
        "has nothing of the assistant",
        "dataset_name: a.jsonl\nchat_template_path: marked.jinja",
    ),
    Misuse("sft --config {yaml}", "did you mean 'packed_attention'?", "packed_atention: auto"),
    Misuse("sft --config {yaml}", "'sequence_len'; did you mean 'max_length'?", "sequence_len: 64"),
    Misuse("sft --config {yaml}", ", column 1 is not valid YAML: expected ',' or ']'", "packing: [true"),
    Misuse("sft --config {yaml}", "moe_quantize_experts='on' needs moe", "moe_quantize_experts: true\nmoe: off"),
    Misuse("sft --config {yaml}", "data 'absent.jsonl' does not exist", "dataset_name: absent.jsonl"),
    Misuse("sft --config {yaml}", "no model: set model_name_or_path", "model_name_or_path:"),
    Misuse("sft --config {yaml}", "has no checkpoint-N folder", "resume_from_checkpoint: true"),
    Misuse("sft --config {yaml}", "in '/proc' (the system says: No such file", "output_dir: /proc/absent/out"),
    Misuse("sft --config {yaml}", "dataset_text_field (now 'body')", "dataset_text_field: body"),
    Misuse("sft --config {yaml}", "set it to one of train", "dataset_train_split: training"),
    Misuse("sft --config {yaml}", "Accelerate config zero9 is neither a file nor", "accelerate_config: zero9"),
    # sft: values of the YAML
    Misuse("sft --config {yaml}", "unknown key 'qqq'; `fastpack-trl sft --help-all` lists", "qqq: 1"),
    Misuse("sft --config {yaml}", "unknown key 'config'", "config: other.yaml"),
    Misuse("sft --config {yaml}", "packing: Truthy value expected: got maybe", "packing: maybe"),
    Misuse("sft --config {yaml}", "month must be in 1..12", "run_name: 2024-13-45"),
    Misuse("sft --config {yaml}", "run_name={'a': 1} must be a single value", "run_name: {a: 1}"),
    Misuse("sft --config {yaml}", "invalid choice: 'bdf'; did you mean 'bfd'?", "packing_strategy: bdf"),
    Misuse("sft --config {yaml}", "accelerator_config: '{a: 1}' is not JSON", "accelerator_config: '{a: 1}'"),
    Misuse("sft --config {yaml}", "model_init_kwargs: '5' is not a mapping", "model_init_kwargs: 5"),
    Misuse("sft --config {yaml}", "lr_scheduler_kwargs: unknown key 'cycles'", "lr_scheduler_kwargs: {cycles: 2}"),
    Misuse("sft --config {yaml}", "eval_on_start=True evaluates nothing: set", "eval_on_start: true"),
    Misuse("sft --config {yaml}", "pip install neptune", "report_to: neptune"),
    Misuse("sft --config {yaml}", "num_processes=[2] must be a single value", "num_processes: [2]"),
    Misuse("sft --config {yaml}", "multi_gpu='perhaps' must be true or false", "multi_gpu: perhaps"),
    Misuse("sft --config {yaml}", "sft.yaml: num_processes=0 must be", "num_processes: 0"),
    Misuse("sft --config {yaml}", "sft.yaml: env must be a mapping of variables", "env: 3"),
    Misuse("sft --config {yaml}", "env must be a mapping of variables", "env: {A: [hf_abc]}", missing="hf_abc"),
    Misuse("sft --config {yaml}", "hub_token=... must be a single value", "hub_token: [hf_abc]", missing="hf_abc"),
    Misuse("sft --config {yaml} --module x", "unknown option '--module'"),
    Misuse("init gpt", "did you mean 'gpt-oss-20b-lora' or 'gpt-oss-20b-qlora-24gb'?"),
    Misuse("sft --config {yaml} --fused_layers onn", "'onn' is not available: use one of auto, on, off"),
    Misuse("sft --config {yaml}", "did you mean 'per_document'?", "packed_attention: per_documents"),
    Misuse("sft --config {yaml}", "'./absent' is not a folder", "model_name_or_path: ./absent"),
    Misuse("sft --config {yaml}", "max_steps='True' must be a whole number", "max_steps: true"),
    Misuse("sft --config {yaml}", "got mxfp5", "model_init_kwargs: {quantization_config: {quant_method: mxfp5}}"),
    Misuse("sft --config {yaml}", "column 19 is not valid YAML: 'A' is given a second", "env: {A: 1, B: 2, A: 1}"),
    Misuse("bench --config {yaml} --rouds 6", "did you mean '--rounds'?"),
    Misuse("dpo --bta 0.1", "unknown option '--bta'; did you mean '--beta'?"),
    Misuse("rloo --config {yaml}", "unknown key 'max_length'", "packing:"),
    Misuse("sft --config {yaml}", "unknown key 'reward_funcs'", "reward_funcs: [a.b]"),
    Misuse(
        "sft --config {yaml}",
        "each as `- path: data.jsonl`: DatasetConfig.__init__() got an unexpected keyword argument 'splt'",
        "datasets: [{path: a.csv, splt: x}]",
    ),
    Misuse("sft --config {yaml}", "must be a list of single values", "lora_target_modules: [[q_proj]]"),
    Misuse("sft --config {yaml} --multi_gpu=False", "--multi_gpu: ignored explicit argument 'False'"),
    # sft: data and model
    Misuse("sft --config {yaml}", "no data: set dataset_name", "dataset_name:"),
    Misuse("sft --config {yaml}", "data 'a-*.jsonl' does not exist", "dataset_name: a-*.jsonl"),
    Misuse("sft --config {yaml}", "'owner/absent' cannot be loaded: no such folder (", "dataset_name: owner/absent"),
    Misuse("sft --config {yaml}", "datasets='a.jsonl' must be a list of entries", "datasets: a.jsonl"),
    Misuse("sft --config {yaml}", "missing 1 required positional argument: 'path'", "datasets: [{split: train}]"),
    Misuse("sft --config {yaml}", "needs streaming: false", "streaming: true\ntest_split_size: 0.1"),
    Misuse("sft --config {yaml}", "of train, or eval_strategy: no (evaluation needs rows", "eval_strategy: epoch"),
    Misuse("sft --config {yaml}", "'owner/none' cannot be used: no such folder (", "model_name_or_path: owner/none"),
    Misuse("sft --config {yaml}", "max_length=1 leaves the train data set no token that the loss", "max_length: 1"),
    Misuse("sft --config {yaml} --packing no", "max_length=1 leaves the train data set no token", "max_length: 1"),
    Misuse("sft --config {yaml}", "lora_dropout=0.1 does not work with target_parameters (LoRA on", f"{EXPERTS}0.1"),
    Misuse("sft --config {yaml} --use_dora true", "(LoRA on experts): set use_dora: False", f"{EXPERTS}0.0"),
    Misuse("dpo --config {yaml}", "unknown key 'packing'; it is an option of sft: leave it out"),
    Misuse("sft --config {yaml}", "`pad_token` ('<nowhere>') is not found", "pad_token: <nowhere>"),
    Misuse("sft --config {yaml}", "./gone' is not a folder: pass a checkpoint", "resume_from_checkpoint: ./gone"),
    Misuse("sft --config {yaml}", "'here' is not a complete checkpoint (trainer_s", "resume_from_checkpoint: here"),
    Misuse("sft --config {yaml}", "chat_template_path 'no.jinja' does not exist", "chat_template_path: no.jinja"),
    Misuse("sft --config {yaml}", "flash_attention_4", "attn_implementation: flash_atention_2"),
    # doctor, verify
    Misuse("doctor --jason x", "did you mean '--json'?"),
    Misuse("verify", "give --model a folder or a hub name"),
    Misuse("verify --model here/noweights", "--model 'here/noweights' cannot be loaded: it holds no weights"),
    Misuse("verify --model {model} --attn flash", "--attn 'flash' does not exist; did you mean 'flash_attention_4'"),
    Misuse("verify --config {yaml} --attn flash", "--attn 'flash' does not exist"),
    Misuse("verify --model {model} --attn xformers", "pip install 'fastpack-trl[xformers]'", missing="xformers"),
    Misuse("verify --model {model} --adapter {model}", "has no adapter_config.json"),
    # bench, quickstart
    Misuse("bench", "nothing to measure: give --config FILE"),
    Misuse("bench --config {yaml} --baseline stok", "did you mean 'stock'?"),
    Misuse("bench --config {yaml} --plot a.png", "pip install 'fastpack-trl[plots]'", missing="matplotlib"),
    # the other methods, and what comes before and after training
    Misuse("dpo", "'fastpack-trl init' writes one), or --model_name_or_path"),
    Misuse("sft --config {yaml}", "is a config of Axolotl: `fastpack-trl convert", "base_model: a\nsequence_len: 9"),
    Misuse("sft --config {yaml}", "is a config of LLaMA-Factory: `fastpack-trl", "stage: sft\ncutoff_len: 9"),
    Misuse("sft --config {yaml} --dataset_format alpca", "--dataset_format: invalid choice: 'alpca'"),
    Misuse("sft --config {yaml}", "needs conversations, but the train data set has", "dataset_format: sharegpt"),
    Misuse("convert", "no file: name a YAML of Axolotl"),
    Misuse("convert {yaml}", "not a config of Axolotl, LLaMA-Factory, Unsloth: its keys are"),
    Misuse("convert {yaml}", "'ppo' training is not supported: use one of sft, dpo", "stage: ppo\ncutoff_len: 64"),
    Misuse("convert {yaml} --output sft.yaml", "--output names another file", "stage: sft\ncutoff_len: 64"),
    Misuse("merge", "no model: give the folder that a run has written"),
    Misuse("merge adapters", "'adapters' has no adapter or model; did you mean 'adapters/checkpoint-10'?"),
    Misuse("merge --config {yaml}", "no trained model in", "output_dir: untrained"),
    Misuse("merge {model}", "is a full model: use it as it is"),
    Misuse("generate {model}", "give --prompt TEXT, once per prompt"),
    Misuse("generate {model} --prompt a --load_in_4bit", "is for the base of an adapter, and"),
    Misuse("generate {yaml} --prompt a", "sft.yaml is a YAML; did you mean --config"),
    Misuse("generate left --prompt a", "the adapter's model (--base names another) './moved' is not a folder"),
    Misuse("generate cut --prompt a", "the adapter 'cut' cannot be loaded: adapter_config.json is damaged"),
    Misuse("merge left --base {model}", "the adapter 'left' cannot be loaded: it holds no weights"),
    Misuse("doctor --config {yaml} --trainer dop", "--trainer 'dop' does not exist"),
    Misuse("merge adapters/checkpoint-9", "does not name its base model: give --base DIR"),
    Misuse("generate mute --prompt a", "the prompt 'a' has no tokens: write some text"),
    Misuse("sft --config {yaml} --model_name_or_path left", "or the folder that `fastpack-trl merge left` writes"),
    Misuse("generate {model} --prompt a --max_new_tokens 0", "--max_new_tokens 0 must be >= 1"),
    Misuse("generate two --prompt a", "contains both an adapter and a full model, from two runs: move one out"),
    Misuse("generate scores --prompt a", "is a reward model: it scores text and cannot generate"),
    Misuse("merge scores --base ./absent", "--base './absent' is not a folder"),
    Misuse("doctor --gpu H100", "--gpu needs a config: give"),
    Misuse("doctor --trainer dpo", "--trainer needs a config: give"),
    Misuse("doctor --config {yaml} --gpu H10", "did you mean 'H100'?"),
    Misuse("bench --config {yaml} --trainer grpo", "'max_length'; it is an option of sft, dpo, reward, kto: leave it"),
    Misuse("sft --config {yaml}", "interrupted at step 1, before any checkpoint", "logging_steps: 2", code=130),
]


def attention() -> None:
    with packed_attention(tiny_model("qwen3"), "varlne"):
        pass


PYTHON: dict[str, tuple[Callable[[], Any], str]] = {
    "a choice of the config": (lambda: FastSFTConfig(use_cpu=True, moe="of"), "moe='of' is not available"),
    "a mode": (lambda: AsyncCheckpointCallback("triple"), "mode='triple' is not available: use one of"),
    "a peak": (lambda: ThroughputCallback(-1), "peak_flops=-1 is not positive"),
    "no model": (lambda: apply_lora("model"), "give the model that get_peft_model returned"),
    "an attention": (attention, "packed_attention='varlne' does not exist: use one of"),
    "a family": (lambda: tiny_model("qwen9"), "family='qwen9' has no tiny model"),
    "a tokenizer": (lambda: FastSFTTrainer("model", tokenizer="model"), "give it as processing_class="),
    "a tokenizer of DPO": (lambda: FastDPOTrainer("model", tokenizer="model"), "DPOTrainer has no argument 'token"),
    "a field": (
        lambda: FastSFTTrainer("model", args=FastSFTConfig(use_cpu=True, bf16=False), packing=True),
        "has no argument 'packing': give it as args=, a field of its config",
    ),
}


CONFIG = '{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}'
FILES = {
    **dict.fromkeys(("here/model/config.json", "here/noweights/config.json"), CONFIG),
    **dict.fromkeys(("adapters/checkpoint-9/adapter_config.json", "adapters/checkpoint-10/adapter_config.json"), "{}"),
    "here/data/.keep": "",
    "a.jsonl": '{"messages": [{"role": "user", "content": "hi"}]}',
    "marked.jinja": TEMPLATE,
    "scores/adapter_config.json": '{"base_model_name_or_path": "here/model", "task_type": "SEQ_CLS"}',
    **dict.fromkeys(("scores/weights.bin", "two/adapter_config.json", "two/model.safetensors"), ""),
    "left/adapter_config.json": '{"base_model_name_or_path": "./moved"}',
    "cut/adapter_config.json": "{",
    **dict.fromkeys(("left/training_args.bin", "cut/training_args.bin"), ""),
}
"""What users have around them, and what runs have left that were ended."""


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def line_of(material: Material, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function from a misuse of the command line to its last line on stderr."""
    monkeypatch.chdir(material.folder)

    def run(misuse: Misuse) -> str:
        for age, (name, text) in enumerate(FILES.items()):
            (file := Path(name)).parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            os.utime(file, (age, age))
        shutil.copytree(material.model, "mute", ignore=shutil.ignore_patterns("token*", "chat*"), dirs_exist_ok=True)
        keys = {line.partition(":")[0]: ... for line in misuse.yaml.splitlines()}
        places = {"yaml": material.yaml(text=misuse.yaml + "\n", **keys), "model": material.model}
        if misuse.missing:
            monkeypatch.setitem(sys.modules, misuse.missing, None)
        if misuse.code == 130:
            make, stops = train.make_trainer, callback("on_step_end", interrupt)
            monkeypatch.setattr(train, "make_trainer", lambda arguments, _: make(arguments, [stops()]))
        assert main(misuse.words.format(**places).split()) == misuse.code
        assert not material.out.exists()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err + captured.out
        said = [line for line in captured.err.splitlines() if line.startswith("fastpack-trl")]
        assert said == captured.err.splitlines()[-1:], "one line, which stands last, where it is seen"
        return said[0]

    return run


def test_there_are_enough_of_them_and_no_two_expect_the_same() -> None:
    said = [misuse.says for misuse in COMMANDS] + [says for _, says in PYTHON.values()]
    assert len(set(said)) == len(said) >= 45


@pytest.mark.parametrize("misuse", COMMANDS, ids=lambda misuse: f"{misuse.words} {misuse.yaml}".strip())
def test_a_misuse_of_a_command_is_one_line_with_the_remedy(line_of: Callable[[Misuse], str], misuse: Misuse) -> None:
    line = line_of(misuse)
    assert misuse.says in line
    assert re.match(r"fastpack-trl( \w+)?: (error: |interrupted )", line)


@pytest.mark.parametrize("name", PYTHON)
def test_a_misuse_from_python_is_one_line_with_the_remedy(name: str) -> None:
    call, says = PYTHON[name]
    with pytest.raises((ValueError, TypeError, UserError)) as raised:
        call()
    assert says in describe(raised.value)
    assert "\n" not in str(raised.value)
