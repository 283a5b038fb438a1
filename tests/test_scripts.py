"""Scripts in the style of TRL's documentation, each run twice: as it is, and with its import of the trainer changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from script_material import BF16, FP32, assert_same_figures, files, run, with_ours
from sft_material import write_jsonl
from trainer_material import TEMPLATE, figures, make_tokenizer, sentences
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.testing import tiny_model

SCRIPTS = Path(__file__).parent / "scripts"

BATCHES = {
    "assistant_only": "packed",
    "completion_only": "packed",
    "conversational": "padding-free",
    "evaluation": "packed",
    "formatting": "packed",
    "resume": "packed",
    "streaming": "packed",
}
"""Script -> the batches that ours runs it with."""

TOLERANCES = {
    "conversational": BF16  # TRL's default, autocast to bf16
}
"""Script -> relative tolerance of its figures, where it is not that of fp32."""


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``model``, ``template.jinja`` and ``data`` as the scripts name them."""
    folder = tmp_path_factory.mktemp("scripts")
    tiny_model("qwen3").save_pretrained(folder / "model")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    tokenizer.save_pretrained(folder / "model")
    (folder / "template.jinja").write_text(TEMPLATE, encoding="utf-8")
    pairs = list(zip(sentences(40, 0, 12), sentences(40, 1, 24), strict=True))
    turns = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}] for question, answer in pairs
    ]
    kinds: dict[str, list[dict[str, Any]]] = {
        "text": [{"text": answer} for _, answer in pairs],
        "messages": [{"messages": both} for both in turns],
        "prompt_completion_messages": [{"prompt": both[:1], "completion": both[1:]} for both in turns],
        "instructions": [{"instruction": question, "output": answer} for question, answer in pairs],
    }
    for kind, rows in kinds.items():
        write_jsonl(folder / "data" / f"{kind}.jsonl", rows)
    return folder


@pytest.mark.parametrize("name", BATCHES)
def test_a_script_with_one_line_changed_logs_the_same(
    name: str, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    stock = run(source, tmp_path / "stock", material, monkeypatch)
    ours = run(with_ours(source), tmp_path / "ours", material, monkeypatch)
    assert type(stock) is SFTTrainer
    assert type(ours) is FastSFTTrainer
    assert_same_figures(figures(ours), figures(stock), TOLERANCES.get(name, FP32))
    assert files(tmp_path / "ours") == sorted([*files(tmp_path / "stock"), "out/fastpack_report.json"])
    assert ours.fastpack_report["batches"].path == BATCHES[name], ours.fastpack_report
    assert ours.fastpack_report["packed_attention"].status == "on"


def test_all_scripts_are_run() -> None:
    assert {path.stem for path in SCRIPTS.glob("*.py")} == set(BATCHES)
