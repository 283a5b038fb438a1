"""The pictures of docs/: drawn from the same JSON files as its tables, each with the hash of its file inside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import first_screen

FOLDER = "docs/figures"
"""In the repository."""
KINDS = {
    "first_step": "wall_times",
    "fp8_accuracy": "held_out",
    "moe": "ratios",
    "side_by_side": "sides",
}
"""By case: which of `plots.FIGURES` is shown, or of those that are drawn here."""


def picture_names(results: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return, by file name of the record, that of its picture."""
    return {
        name: f"{Path(name).stem}_{KINDS[record['case']]}.png"
        for name, record in results.items()
        if record["case"] in KINDS
    }


def write_pictures(results: Mapping[str, Mapping[str, Any]], source: Path, folder: Path) -> list[Path]:
    """Draw every picture of `results`, whose files lie in `source`, and remove those of files that are gone.

    Raises:
        UserError: matplotlib is missing.
    """
    from benchmarks.first_step import figure as wall_times
    from benchmarks.fp8_accuracy import plot
    from benchmarks.side_table import figure as sides
    from fastpack_trl.bench.canvas import save
    from fastpack_trl.bench.plots import FIGURES
    from fastpack_trl.bench.report import source_of

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, picture in picture_names(results).items():
        record = results[name]
        kind = KINDS[record["case"]]
        drawn = {**FIGURES, "wall_times": wall_times, "sides": sides, "held_out": plot}
        figure = drawn[kind](record, name)
        assert figure is not None, name
        save(figure, folder / picture, source_of(source / name))
        written.append(folder / picture)
    if (screen := first_screen.figure(results)) is not None:
        save(screen, folder / first_screen.PICTURE, _sources(results, source))
        written.append(folder / first_screen.PICTURE)
    for file in set(folder.glob("*.png")) - set(written):
        file.unlink()
    return written


def stale_pictures(results: Mapping[str, Mapping[str, Any]], source: Path, folder: Path) -> list[str]:
    """Return which pictures are missing, drawn from other figures, or of no file. Needs no matplotlib."""
    from fastpack_trl.bench.report import source_of

    found = []
    names = picture_names(results)
    for name, picture in names.items():
        file = folder / picture
        if file.is_file() and source_of(source / name).items() - text_of(file).items():
            found.append(f"{picture} was drawn from another version of {name}")
    screen = folder / first_screen.PICTURE
    if screen.is_file() and _sources(results, source).items() - text_of(screen).items():
        found.append(f"{screen.name} was drawn from other records")
    drawn = {*names.values(), *([screen.name] if first_screen.lines(results) else [])}
    found += [f"{name} is missing" for name in sorted(drawn) if not (folder / name).is_file()]
    found += [f"{file.name} has no file" for file in sorted(folder.glob("*.png")) if file.name not in drawn]
    return found


def _sources(results: Mapping[str, Mapping[str, Any]], source: Path) -> dict[str, str]:
    """Return the hash of each record that the picture of the README shows."""
    from fastpack_trl.bench.report import HASH_KEY, source_of

    return {line.file: source_of(source / line.file)[HASH_KEY] for line in first_screen.lines(results)}


def text_of(png: Path) -> dict[str, str]:
    """Return the text chunks of a PNG."""
    from PIL import Image

    with Image.open(png) as picture:
        return dict(picture.text)
