"""A hook of MkDocs: links to files of the repository outside of `docs/` lead to the repository."""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Replace relative targets above `docs/` by addresses in the repository."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def outside(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        return match[1] if target.startswith("docs/") else f"{config.extra['repository']}/blob/main/{target}"

    return LINK.sub(outside, markdown)
