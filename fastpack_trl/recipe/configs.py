"""The YAML files that come with the package."""

from __future__ import annotations

from pathlib import Path


def configs_folder() -> Path:
    """Return the folder of the shipped YAML files: ``configs/`` of a checkout, ``fastpack_trl/configs`` of a wheel."""
    package = Path(__file__).parents[1]
    folders = [package / "configs", package.parent / "configs"]
    found = [folder for folder in folders if (folder / "quickstart.yaml").is_file()]
    assert found, f"no configs in {' or '.join(map(str, folders))}"
    return found[0]
