"""Cells that the tables of the README share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SURE = 0.95


def ratio_cell(ratio: Mapping[str, float]) -> str:
    sure = "" if ratio["coverage"] >= SURE else f", {ratio['coverage']:.0%}"
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f}{sure})"


def made_by(name: str, record: Mapping[str, Any], command: str) -> str:
    machine, versions = record["machine"], record["versions"]
    packages = ", ".join(f"{package} {versions[package]}" for package in ("torch", "transformers", "trl"))
    threads = f"{machine['threads']} thread{'s' * (machine['threads'] != 1)}"
    return f"`{command}`: {machine['processor']}, {threads}, {packages}; `benchmarks/results/{name}`."
