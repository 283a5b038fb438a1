"""Every command and code block of the pages: run in small or parsed, or listed here with the reason.

A block is known by what it is, not by its page. A new one that nothing here runs or lists fails.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
import yaml
from datasets import Dataset
from pages import PAGES, ROOT, Block, all_blocks, blocks, commands, sides
from peft import LoraConfig
from sft_material import Material, write_yaml
from trainer_material import make_dataset, make_tokenizer
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from fastpack_trl.cli.main import _parser, main
from fastpack_trl.recipe.arguments import make_parser, parse
from fastpack_trl.recipe.methods import METHODS
from fastpack_trl.testing import tiny_model

KINDS = {"python", "console", "diff", "yaml", "text", ""}
"""``text`` is output, and a block without a kind a drawing: neither is run."""

TINY: dict[str, Any] = {
    "use_cpu": True, "bf16": False, "max_steps": 2, "per_device_train_batch_size": 2, "report_to": "none",
    "save_strategy": "no", "disable_tqdm": True,
}  # fmt: skip
SMALLER = {
    '"Qwen/Qwen3-0.6B"': '"model"',
    '"trl-lib/Capybara", split=': '"json", data_files="data.jsonl", split=',
    "max_length=4096": "max_length=64",
    '"max_length": 4096': '"max_length": 64',
    'output_dir="out"': 'output_dir="out", **tiny',
    'output_dir="out-script"': 'output_dir="out-script", **tiny',
    '"output_dir": "out"': '"output_dir": "out", **tiny',
    "compare(build)": "compare(build, timed=1, warmup=1, rounds=1, progress=False)",
}
"""Text of a Python block -> what runs in its place."""

RUN_ELSEWHERE = ('"""The feature `deterministic`', '"""Packed attention in plain torch')
"""How Python blocks begin that tests/test_guides.py runs."""

ALONE = "# In a process of its own.\n"
"""How a Python block begins that changes its process."""

OURS = r"fastpack-trl( .*)?|python -m benchmarks .*"
"""Commands that are parsed here; tests/cli, tests/recipe, tests/benchmarks and the notebooks run them in small."""

LISTED = (
    r"make [\w-]+( ARGS=.*)?|(\S*/)?(python3? -m )?pip install .*",  # install
    r"(\S*/)?python3? -m (venv|build|twine)( .*)?",  # make an environment, or need the network
    r"(accelerate launch|torchrun) .*",  # several processes
    r"git (tag|push|clone) .*|(cd|rm -rf) .*",
)
"""Commands of others, which do not run."""


def ours(line: str) -> str:
    """Return the line with ``fastpack-trl`` of any environment as the bare name."""
    return re.sub(r"^\S*/bin/fastpack-trl\b", "fastpack-trl", line)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("experts")
    tiny_model("qwen3_moe").save_pretrained(place)
    make_tokenizer().save_pretrained(place)
    return place


@pytest.fixture
def here(material: Material, experts: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of one test, with the models and the data that the pages name."""
    for name, path in {"model": material.model, "data.jsonl": material.data, "experts": experts}.items():
        (material.folder / name).symlink_to(path)
    monkeypatch.chdir(material.folder)
    return material.folder


def _preferences() -> Any:
    texts = make_dataset("prompt_completion", 8)
    return Dataset.from_dict({"prompt": texts["prompt"], "chosen": texts["completion"], "rejected": texts["prompt"]})


ADAPTER = LoraConfig(target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
PRELUDE: dict[str, Callable[[], Any]] = {
    "args": lambda: SFTConfig(output_dir="out", max_length=64, **TINY),
    "dataset": lambda: make_dataset("text"),
    "model": lambda: AutoModelForCausalLM.from_pretrained("experts"),
    "preferences": _preferences,
    "step": lambda: lambda: None,
    "tiny": lambda: TINY,
    "tokenizer": make_tokenizer,
    "trainer": lambda: SFTTrainer(
        PRELUDE["model"](), args=PRELUDE["args"](), train_dataset=make_dataset("text"), peft_config=ADAPTER
    ),
    "torch": lambda: torch,
    "SFTConfig": lambda: SFTConfig,
    "SFTTrainer": lambda: SFTTrainer,
    "LoraConfig": lambda: LoraConfig,
}
"""Names that a page takes for granted; the model is a mixture of experts."""


class Names(dict[str, Any]):
    """Names of a block; what it does not make itself is of `PRELUDE`."""

    def __missing__(self, name: str) -> Any:
        self[name] = made = PRELUDE[name]()
        return made


def run_python(source: str, name: str) -> Names:
    """Run a block; return its names."""
    for large, small in SMALLER.items():
        source = source.replace(large, small)
    namespace = Names(__name__="__main__")
    exec(compile(source, name, "exec"), namespace)
    return namespace


def test_every_block_is_of_a_kind_that_is_run_or_listed() -> None:
    assert {block.kind for page in PAGES for block in blocks(page)} <= KINDS


@pytest.mark.parametrize("block", all_blocks("python"), ids=lambda block: block.name)
def test_a_python_block_runs(block: Block, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compile(block.text, block.name, "exec")
    if "bitsandbytes" in block.text:
        pytest.importorskip("bitsandbytes")
    if block.text.startswith(ALONE):
        subprocess.run([forks.python(), "-c", block.text], check=True, timeout=120)
    elif not block.text.startswith(RUN_ELSEWHERE):
        with torch.compiler.set_stance("force_eager"):  # bitsandbytes compiles its operators for a minute
            run_python(block.text, block.name)


@pytest.mark.parametrize("block", all_blocks("diff"), ids=lambda block: block.name)
def test_both_sides_of_a_diff_run_and_log_the_same(block: Block, here: Path) -> None:
    before, after = (run_python(source, block.name)["trainer"] for source in sides(block.text))
    assert type(before).__name__ != type(after).__name__
    losses = [[row["loss"] for row in trainer.state.log_history if "loss" in row] for trainer in (before, after)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("block", all_blocks("yaml"), ids=lambda block: block.name)
def test_a_yaml_block_is_read_as_the_options_of_sft(block: Block, here: Path) -> None:
    given = yaml.safe_load(block.text)
    needed = {"model_name_or_path": "model", "dataset_name": "data.jsonl", "output_dir": "out"}
    path = write_yaml(here / "block.yaml", {**needed, **given})
    arguments = parse(["--config", str(path), "--use_cpu", "true", "--bf16", "false"])
    assert arguments.training.output_dir == {**needed, **given}["output_dir"]


def test_options_of_the_migration_tables_exist() -> None:
    known = {word.removeprefix("--") for action in make_parser()._actions for word in action.option_strings}
    known |= {"accelerate_config", "datasets"}  # of the launcher; of TRL's mixtures
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*? \| (.*) \|$", page, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+): [^`]+`", row)}
    assert len(named) > 30
    assert named <= known, named - known


def test_every_command_is_parsed_or_listed() -> None:
    unknown = [line for line in map(ours, commands()) if not re.fullmatch(f"{OURS}|{'|'.join(LISTED)}", line)]
    assert not unknown, "add each to LISTED"
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in commands():
        if target := re.fullmatch(r"make ([\w-]+).*", line):
            assert re.search(rf"^{target[1]}:", makefile, re.MULTILINE), line


WORDS = dict.fromkeys(map(ours, commands()))


@pytest.mark.parametrize("line", [line for line in WORDS if re.fullmatch(OURS, line)])
def test_a_command_is_parsed(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    program, *words = shlex.split(line)
    if program == "python":
        assert words[:2] == ["-m", "benchmarks"]
        import_module(f"benchmarks.{words[2]}").parse(words[3:])
        return
    command, *rest = words
    if command in METHODS:
        if "--config" in rest:
            file = rest.index("--config") + 1
            rest[file] = rest[file] if (ROOT / rest[file]).is_file() else "configs/quickstart.yaml"
            launch = parse([*rest, "--use_cpu"]).launch
            assert ("--accelerate_config" in rest) == "".join(launch[:1]).startswith("--config_file=")
        return
    args, unknown = _parser(command)[0].parse_known_args(words)
    assert args.command == command
    if unknown:
        assert command in ("bench", "doctor")
        config = ["--config", args.config] if (ROOT / args.config).is_file() else ["--output_dir", "out"]
        parse([*config, *unknown, "--use_cpu", "--bf16", "False"])


FIRST = ("docs/getting-started.md", "README.md", "docs/index.md", "docs/fused-layers.md")
"""Pages of which every command of ours runs, in their order, once and in small."""
SMALL = {
    "init": "--force", "sft": "--max_steps 1 --eval_on_start false", "generate": "--max_new_tokens 2",
    "bench": "--steps 1 --warmup 1 --rounds 1 --gate-steps 1 --max_steps 4",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_the_commands_of_the_first_pages_run(here: Path, material: Material) -> None:
    (here / "path/to").mkdir(parents=True)
    (here / "path/to/model").symlink_to(material.model)
    material.yaml().rename(here / "my.yaml")
    every = [block for page in FIRST for block in blocks(ROOT / page) if block.kind == "console"]
    lines = "\n".join(block.text.replace("\\\n", " ") for block in every).splitlines()
    for line in filter(None, dict.fromkeys(lines)):
        program, *words = shlex.split(line, comments=True)
        if program == "fastpack-trl" and "--num_processes" not in words:
            assert main([*words, *shlex.split(SMALL.get(words[0], ""))]) == 0, line
