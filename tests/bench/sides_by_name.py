"""A side that `test_process` starts by name, in a process of its own."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from fastpack_trl.errors import UserError


def answering(row: dict[str, Any], side: str, *, says: str = "") -> Any:
    """Called in the process of a run, by name."""
    match side:
        case "breaks":
            raise RuntimeError("no kernel")
        case "misses":
            raise UserError("no such model")
        case "dies":
            print("killed by hand")
            sys.exit(3)
        case "fails beside" if os.environ["RANK"] == "1":
            sys.exit(4)
        case "hangs":
            time.sleep(60)
    return {"said": says, "tokens_seen": row["tokens"], "ranks": os.environ.get("WORLD_SIZE", "1")}
