"""Pages and README's figure from the records: ``python -m benchmarks tables``.

A record is one JSON object per run, a line of ``results/CASE.jsonl``. What was not measured is not shown. A test fails
if a page and its records disagree.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from benchmarks import Parser
from benchmarks.figure import draw
from benchmarks.first_pages import FIGURE_NAME, images, pitch, readme
from benchmarks.records import Run, add, key_of, read, tree_now
from benchmarks.results_page import page

ROOT = Path(__file__).parents[1]
FIGURE = ROOT / "docs/figures" / FIGURE_NAME
MARKS = "<!-- results -->", "<!-- /results -->"
PITCH, TABLES = ("<!-- pitch -->", "<!-- /pitch -->"), ("<!-- tables -->", "<!-- /tables -->")
IMAGES = "<!-- images -->", "<!-- /images -->"


def between(text: str, marks: tuple[str, str], new: str) -> str:
    """Return a page with what stands between two marks replaced.

    Raises:
        ValueError: it lacks a mark.
    """
    before, opened, rest = text.partition(marks[0])
    _, closed, after = rest.partition(marks[1])
    if not (opened and closed):
        raise ValueError(f"the page has no {marks[0]} ... {marks[1]}")
    return f"{before}{marks[0]}\n{new}\n{marks[1]}{after}"


def pages(records: Sequence[Run]) -> dict[Path, str]:
    """Return the pages that hold figures of records, as they should be."""
    made = {MARKS: readme(records), PITCH: pitch(records), TABLES: page(records), IMAGES: images(records)}
    found = {}
    for name, parts in {
        "README.md": (PITCH, MARKS),
        "docs/index.md": (PITCH,),
        "docs/images.md": (IMAGES,),
        "benchmarks/RESULTS.md": (TABLES,),
    }.items():
        found[ROOT / name] = (ROOT / name).read_text(encoding="utf-8")
        for marks in parts:
            found[ROOT / name] = between(found[ROOT / name], marks, made[marks])
    return found


def parse(words: Sequence[str]) -> Namespace:
    """Return the options."""
    parser = Parser("tables", __doc__)
    parser.add_argument("--add", metavar="FILE", nargs="+", default=[], type=Path, help="take over records of `run`")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    """Write all pages and the figure; say how many rows are of other code."""
    args = parse(words)
    if args.add:
        add(read(*args.add))
    records = read()
    for file, text in pages(records).items():
        file.write_text(text, encoding="utf-8")
    draw(records, FIGURE)
    rows, now = {key_of(run) for run in records}, tree_now()
    old = {key_of(run) for run in records if run["tree"] != now}
    print(f"{len(old)} of {len(rows)} rows were measured on other code of the package")
    return 0
