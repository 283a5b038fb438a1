"""``fastpack-trl bench --report``: its tables and plots say what the JSON files say."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fastpack_trl.bench import plots
from fastpack_trl.bench.report import markdown, source_of, write_report
from fastpack_trl.bench.views import headline, no_gain, side_names
from fastpack_trl.cli.main import main


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A record with one row: QLoRA of a 14B model on an H200, two sides of ours, one of them slower than compiled."""
    file = tmp_path_factory.mktemp("results") / "lora_cuda_one-row.json"
    file.write_text((Path(__file__).parent / "one_row.json").read_text())
    return file


@pytest.fixture(scope="module")
def record(lora: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(lora.read_text())
    return found


def test_report_has_the_medians_of_the_file_and_its_plots(lora: Path, record: dict[str, Any], tmp_path: Path) -> None:
    first, *pictures = write_report([lora], tmp_path / "report")
    text = first.read_text()
    (row,) = record["rows"]
    names = side_names(row["sides"])
    for name, side in ((names[key], side) for key, side in row["sides"].items()):
        (line,) = [line for line in text.splitlines() if f"| {name} |" in line]
        assert f"| {side['seconds']['median'] * 1000:,.2f} |" in line
        assert f"| {side['phases']['backward'] * 1000:,.2f} |" in line
        assert f"| {side['tokens_per_second']['median']:,.0f} |" in line
        assert f"| {side['memory']['peak_bytes'] / 2**30:.1f} |" in line
    slower = row["ratios"]["tuned"]
    ratio = f"{slower['median']:.2f} ({slower['low']:.2f} to {slower['high']:.2f}, {slower['coverage']:.1%})"
    assert f"{names['fastpack']} {ratio}" in text
    assert f"{names['fastpack']} over stock compiled {ratio}: slower" in text
    assert " times stock\n" in text
    assert "*Times as fast* is the median over rounds" in text
    assert {picture.name.removeprefix(f"{lora.stem}_") for picture in pictures} == {
        "speed.png", "breakdown.png", "ratios.png", "memory.png",
    }  # fmt: skip
    for picture in pictures:
        assert f"]({picture.name})" in text
        with Image.open(picture) as drawn:
            assert dict(drawn.text).items() >= source_of(lora).items()  # type: ignore[attr-defined]


def test_bars_and_intervals_are_where_the_figures_are(record: dict[str, Any]) -> None:
    (row,) = record["rows"]
    names = side_names(row["sides"])
    figure = plots.breakdown(record)
    (axes,) = figure.axes
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
    for side in row["sides"].values():
        assert 1000 * sum(side["phases"].values()) == pytest.approx(min(ends, key=lambda end: _off(end, side)))
    (axes,) = plots.ratios(record).axes
    points = {line.get_xdata()[0] for line in axes.lines if len(line.get_xdata()) == 1}
    assert row["ratios"]["tuned"]["median"] in points
    assert [tick.get_text() for tick in axes.get_yticklabels()].count(f"{names['fastpack']} over stock compiled") == 1


def _off(end: float, side: Any) -> float:
    return abs(end - 1000 * sum(side["phases"].values()))


@pytest.mark.parametrize("draw", ["speed", "breakdown", "memory"])
def test_every_bar_and_figure_lies_on_its_axis(record: dict[str, Any], draw: str) -> None:
    changed = json.loads(json.dumps(record))
    for side in changed["rows"][0]["sides"].values():
        side["phases"]["overhead"] = -0.5 * side["seconds"]["median"]
        side["memory"]["before_bytes"] = 2 * side["memory"]["peak_bytes"]
    figure = plots.FIGURES[draw](changed, "")
    (axes,) = figure.axes
    figure.canvas.draw()
    low, high = axes.get_xlim()
    assert low == 0
    for bar in axes.patches:
        assert bar.get_width() >= 0
        assert low <= bar.get_x() <= bar.get_x() + bar.get_width() <= high
    for text in axes.texts:
        assert text.get_window_extent().x1 <= figure.get_window_extent().x1


def test_one_side_of_ours_is_fastpack_and_of_two_one_has_the_same_memory() -> None:
    assert side_names(["stock", "tuned", "fastpack"]) == {
        "stock": "stock", "tuned": "stock compiled", "fastpack": "fastpack",
    }  # fmt: skip
    assert side_names(["fastpack", "fastpack_plan"]) == {
        "fastpack": "fastpack (same memory)", "fastpack_plan": "fastpack",
    }  # fmt: skip
    assert side_names(["single_buffer"]) == {"single_buffer": "single_buffer"}


@pytest.mark.parametrize(
    ("config", "work"),
    [
        ({"model_name_or_path": "Qwen/Qwen3-8B", "use_peft": True}, "Qwen3-8B LoRA"),
        ({"model_name_or_path": "Qwen3-14B", "use_peft": True, "load_in_4bit": True}, "Qwen3-14B QLoRA"),
        ({"model_name_or_path": "Qwen3-0.6B"}, "Qwen3-0.6B"),
    ],
)
def test_a_title_says_the_work_and_the_gain(record: dict[str, Any], config: dict[str, Any], work: str) -> None:
    changed = json.loads(json.dumps(record))
    changed["settings"]["config"] = config
    (row,) = changed["rows"]
    row["tokens"] = 4096
    row["sides"] = {name: row["sides"][name] for name in ("stock", "fastpack")}
    row["ratios"] = {"stock": row["ratios"]["stock"]}
    said = f"{work}, 4,096 tokens: {row['ratios']['stock']['median']:.1f} times stock"
    assert headline(changed) == said
    assert markdown(changed, "x.json").startswith(f"## {said}\n")
    assert said in [text.get_text() for text in plots.speed(changed).texts]


def test_a_row_that_does_not_help_is_found_by_its_interval(record: dict[str, Any]) -> None:
    found = {(ratio.by, ratio.over): ratio for _, ratio in no_gain(record)}
    assert found["fastpack", "tuned"].slower
    assert ("fastpack", "stock") not in found
    assert all(ratio.low <= 1 for ratio in found.values())


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--report"], "--report has no file"),
        (["--report", "absent.json"], "no file 'absent.json'"),
        (["--report", "."], "no JSON file in '.'"),
        (["--report", "broken.json"], "cannot be read as JSON"),
        (["--report", "other.json"], "is no record of fastpack-trl bench"),
        (["--out", "x"], "give --report too"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    if arguments[-1].endswith(".json") and arguments[-1] != "absent.json":
        Path(arguments[-1]).write_text("{" if "broken" in arguments[-1] else "{}")
    assert main(["bench", *arguments]) == 2
    assert part in capsys.readouterr().err


def test_without_matplotlib_the_command_that_installs_it_is_named(
    lora: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    original = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError("No module named 'matplotlib'")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["bench", "--report", str(lora), "--out", str(tmp_path)]) == 2
    assert "pip install 'fastpack-trl[plots]'" in capsys.readouterr().err
