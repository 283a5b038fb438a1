"""Stores notebooks that were run: with what their cells print and draw, without metadata, progress bars and paths.

``python tests/support/stored_notebooks.py RUN STORED`` writes each notebook of the folder RUN into STORED; ``make
notebooks`` does both steps.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

METADATA = {
    "accelerator": "GPU",  # Colab: start with one
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
PATH = re.compile(r"""(?:^|[\s"'`(=\[,]|file://)(?:/\w|~/|[A-Za-z]:\\)""", re.MULTILINE)
"""Begins an absolute path in a source or an output."""


def source(cell: dict[str, Any]) -> str:
    """Return the text of a cell."""
    return "".join(cell["source"])


def code(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells of a notebook that are run."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def sources(notebook: dict[str, Any]) -> str:
    """Return a hash of what is run: outputs that carry it were made by these cells."""
    return hashlib.sha256("\0".join(map(source, code(notebook))).encode()).hexdigest()[:16]


def text(output: dict[str, Any]) -> str:
    """Return what an output shows as text, however it is stored."""
    data = output.get("data", {}).items()
    return "".join(output.get("text") or [line for kind, lines in data if kind.startswith("text/") for line in lines])


def stored(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return a notebook that was run, as it is stored: without stderr, which has progress bars and paths."""
    cells = [cell | {"metadata": {}} for cell in notebook["cells"]]
    for cell in code({"cells": cells}):
        shown = [output for output in cell["outputs"] if output.get("name") != "stderr"]
        outputs: list[dict[str, Any]] = []
        for is_data, pieces in groupby(shown, key=lambda output: "data" in output):
            if is_data:
                outputs += [output | {"metadata": {}} for output in pieces]
            else:  # a stream is stored in one piece, however it arrived
                lines = "".join(map(text, pieces)).splitlines(keepends=True)
                outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
        cell["outputs"] = outputs
    metadata = METADATA | {"fastpack_trl": {"sources": sources(notebook)}}
    return {"cells": cells, "metadata": metadata, "nbformat": notebook["nbformat"], "nbformat_minor": 5}


if __name__ == "__main__":
    for file in sorted(Path(sys.argv[1]).glob("*.ipynb")):
        written = json.dumps(stored(json.loads(file.read_text("utf-8"))), indent=1, sort_keys=True, ensure_ascii=False)
        Path(sys.argv[2], file.name).write_text(f"{written}\n", encoding="utf-8")
