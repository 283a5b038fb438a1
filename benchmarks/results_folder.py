"""The records of this checkout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def load_results(folder: Path = RESULTS) -> dict[str, Mapping[str, Any]]:
    """Return every record in `folder`, by file name."""
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
