"""The table in `docs/upstream.md`; run as a script, it is written again."""

from __future__ import annotations

from pathlib import Path

from fastpack_trl.model.upstream import TABLE

FILE = Path(__file__).parents[2] / "docs" / "upstream.md"
HEADING = "| names | looked up | used in | without them |\n| --- | --- | --- | --- |\n"


def table() -> str:
    """Return a row per group of names, in Markdown."""
    rows = []
    for group in TABLE:
        names = ", ".join(f"`{name}`" for name in group.names)
        when = f"before {group.part}" if group.part else "where used"
        rooms = ", ".join(f"`{room}`" for room in group.rooms)
        rows.append(f"| {names} | {when} | {rooms} | {group.without} |\n")
    return HEADING + "".join(rows)


if __name__ == "__main__":
    text = FILE.read_text(encoding="utf-8")
    start = text.index(HEADING)
    end = text.find("\n\n", start) + 1 or len(text)
    FILE.write_text(text[:start] + table() + text[end:], encoding="utf-8")
