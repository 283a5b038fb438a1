"""Tables and pictures of README and docs/benchmarks.md from the records: ``python -m benchmarks.readme``.

Run in a checkout. Rewrites what stands between the marks; a test fails when text and files disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import cuda_tests, fp8_accuracy_tables, fp8_steps, fp8_table, profile_table, side_table
from benchmarks.by_itself_table import step_gain
from benchmarks.open_list import open_list
from benchmarks.pages import PAGES, with_optimisation
from benchmarks.pictures import FOLDER, picture_names, write_pictures
from benchmarks.published import GUIDE, PUBLISHED, ROWS
from benchmarks.readme_cells import between, made_by, ratio_cell
from benchmarks.readme_runs import equal_memory_table, first_step_table, glance, memory_caps_table, of_case
from benchmarks.readme_training import activation_table, lora_table
from benchmarks.results_folder import RESULTS, load_results
from fastpack_trl.bench.views import device_of, no_gain
from fastpack_trl.measure.tables import NOISE_CORES

BEGIN, END = "<!-- numbers -->", "<!-- /numbers -->"
GLANCE = ("<!-- glance -->", "<!-- /glance -->")
GLOSSARY = (
    "A ratio is the median of stock's time over ours, pair by pair, so it is not the quotient of two columns; behind "
    "it its interval, with the probability that it covers the median where that is under 95 %. *stock*: "
    "`trl.SFTTrainer` as installed (sdpa), unless a table says otherwise."
)
ROOT = Path(__file__).parents[1]
PAGE = "docs/benchmarks.md"


def numbers(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the Markdown between the marks: tables and pictures per case, the published table, what does not help."""
    parts = [GLOSSARY]
    for case, table in _TABLES.items():
        for name, record in results.items():
            if record["case"] == case:
                parts += [table(name, record) + _left_out(record), *_picture(name, record)]
    parts += memory_caps_table(results)
    if len(parts) == 1:
        parts = ["Nothing is measured."]
    return "\n\n".join([*parts, _published(results), *without_gain(results), *open_list(results)])


def _left_out(record: Mapping[str, Any]) -> str:
    """Return which sides of the table of a record did not run, and why."""
    failed: dict[str, str] = {}
    for row in record["rows"]:
        sides = row.get("sides")
        for name, side in sides.items() if isinstance(sides, dict) else ():
            if isinstance(side, dict) and side.get("failed"):
                failed.setdefault(name, str(side["failed"]).partition(": ")[0])
    listed = ", ".join(f"*{name}* ({reason})" for name, reason in failed.items())
    return f" Did not run: {listed}." if failed else ""


def _published(results: Mapping[str, Mapping[str, Any]]) -> str:
    here = [row for _, record in of_case(results, "by_itself") for row in record["rows"] if "gains" in row]
    quoted = [
        f"| {ROWS[name]} | {one.quoted} | {one.setting} | "
        f"{'; '.join(step_gain(row) for row in here if row['row'].startswith(name)) or 'open'} |"
        for name, one in PUBLISHED.items()
    ]
    said = (
        f"**What others have published** about three optimisations, quoted from {GUIDE}, on other hardware and against "
        "other code: none of it is a figure of this package. *here*: by how much a step is faster with that "
        "optimisation alone, and its interval; of routing at 2,048 and 8,192 tokens. With more figures and the "
        "arithmetic: [packing metadata](packed-metadata.md), [reload of offloaded inputs](offload-reload.md), "
        "[routing](routing.md)."
    )
    return "\n".join([said, "", "| row | published | setting | here |", "| --- | --- | --- | --- |", *quoted])


def _picture(name: str, record: Mapping[str, Any]) -> list[str]:
    picture = picture_names({name: record}).get(name)
    return [] if picture is None else [f"![{record['case']}, {device_of(record)}]({Path(FOLDER).name}/{picture})"]


def without_gain(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a table of the rows in which fastpack is slower than another side, or the interval leaves it open."""
    lines = [
        f"| {row.label}, {device_of(record)} | {ratio.over} | {ratio.by} | {ratio} | "
        f"{'slower' if ratio.slower else 'not told apart'} |"
        for name, record in results.items()
        if record["case"] in _TABLES
        for row, ratio in no_gain(record)
    ]
    lines += [line for record in results.values() for line in side_table.slower(record)]
    if not lines:
        return []
    head = "**Where it does not help.** Every row above whose interval does not lie above 1."
    return [
        "\n".join(
            [head, "", "| row | beside | side of ours | ratio | so it is |", "| --- | --- | --- | ---: | --- |", *lines]
        )
    ]


def with_numbers(page: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of `PAGE` with its numbers replaced.

    Raises:
        ValueError: it lacks a mark.
    """
    return between(page, BEGIN, END, numbers(results))


def with_glance(readme: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of the README with the rows at its top replaced.

    Raises:
        ValueError: it lacks a mark.
    """
    return between(readme, *GLANCE, glance(results))


def _packed_attention(name: str, record: Mapping[str, Any]) -> str:
    if "models" in record["settings"]:
        return _models(name, record)
    work, documents = record["settings"], record["settings"]["documents"]
    lengths = f"{documents['shortest']} to {documents['longest']} tokens ({documents['distribution']})"
    coverage = min(row["ratio"]["coverage"] for row in record["rows"])
    head = (
        f"**Whole training step, `FastSFTTrainer` beside stock `SFTTrainer` (sdpa).** {work['layers']} layers, hidden "
        f"{work['hidden']}, {work['heads']} heads, documents of {lengths}, one row per step, {work['pairs']} "
        f"alternating pairs; ratio with its {coverage:.0%} interval."
    )
    lines = [
        "| row, tokens | setting | stock, tokens/s | fastpack, tokens/s | ratio |",
        "| ---: | --- | ---: | ---: | ---: |",
    ]
    for row in record["rows"]:
        rates = [f"{row[side]['tokens_per_second']['median']:,.0f}" for side in ("stock", "fastpack")]
        lines.append(f"| {row['tokens']:,} | {row['setting']} | {' | '.join(rates)} | {ratio_cell(row['ratio'])} |")
    made = made_by(name, record)
    return "\n".join([head, "", *lines, "", made])


def _models(name: str, record: Mapping[str, Any]) -> str:
    machine = record["machine"]
    coverage = min(ratio["coverage"] for row in record["rows"] for ratio in row["ratios"].values())
    head = (
        f"**Whole training step of public shapes (random weights) on one {machine['gpu']}.** One packed row per step; "
        f"*stock*: as installed; *rebuild*: dense mask and metadata made again in each layer; ratio of step times with "
        f"its interval of at least {coverage:.0%}; peak memory of both."
    )
    lines = [
        head,
        "",
        "| model and setting | row, tokens | stock, tok/s | fastpack, tok/s | over stock | over rebuild | peak GiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in record["rows"]:
        sides, ratios = row["sides"], row["ratios"]
        rates = [f"{sides[side]['tokens_per_second']['median']:,.0f}" for side in ("stock", "fastpack")]
        peaks = " / ".join(f"{sides[side]['memory']['peak_bytes'] / 2**30:.1f}" for side in ("stock", "fastpack"))
        cells = [*rates, *(ratio_cell(ratios[side]) for side in ("stock", "rebuild")), peaks]
        lines.append(f"| {row['setting']} | {row['tokens']:,} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", made_by(name, record)])


def _collator(name: str, record: Mapping[str, Any]) -> str:
    head = "**Fetching and collating packed rows, one core, `PackingCollator` beside TRL's collator.**"
    lines = [
        "| row, tokens | TRL, tokens/s | fastpack, tokens/s | ratio |",
        "| ---: | ---: | ---: | ---: |",
    ]
    for row in record["rows"]:
        rates = [f"{row[side]['tokens_per_second']['median'] / 1e6:,.1f} M" for side in ("stock", "fastpack")]
        lines.append(f"| {row['tokens']:,} | {' | '.join(rates)} | {ratio_cell(row['ratio'])} |")
    return "\n".join([head, "", *lines, "", made_by(name, record)])


def _host_overhead(name: str, record: Mapping[str, Any]) -> str:
    coverage = min(row[part]["coverage"] for row in record["rows"] for part in ("ratio", "overhead"))
    head = (
        "**Host work of a training step outside of forward, backward, clipping and optimizer.** Both trainers' own "
        f"loops, micro-batches of one row; ratios with their intervals of at least {coverage:.0%}."
    )
    lines = [
        "| setting | row, tokens | stock, ms | fastpack, ms | of stock's | whole step, ratio |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in record["rows"]:
        work = [f"{1000 * row[side]['overhead_seconds']['median']:,.1f}" for side in ("stock", "fastpack")]
        cells = [row["setting"], f"{row['tokens']:,}", *work, ratio_cell(row["overhead"]), ratio_cell(row["ratio"])]
        lines.append(f"| {' | '.join(cells)} |")
    made = made_by(name, record)
    return "\n".join([head, "", *lines, "", made])


def _moe(name: str, record: Mapping[str, Any]) -> str:
    machine = record["machine"]
    timed = [row for row in record["rows"] if "stock" in row["ratios"]]
    coverage = min(row["ratios"]["stock"]["seconds"]["coverage"] for row in timed)
    head = (
        f"**Mixture-of-experts, forward and backward: `grouped_mm` and PEFT (*stock*) beside fastpack, on "
        f"{machine.get('gpu') or machine['processor']}.** Ratio of times with its interval of at least {coverage:.0%}; "
        "memory that a forward keeps for backward."
    )
    lines = [
        head,
        "",
        "| configuration | tokens | stock, tok/s | fastpack, tok/s | ratio | forward | backward | kept, MiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in timed:
        sides, ratio = row["sides"], row["ratios"]["stock"]
        rates = [f"{sides[side]['tokens_per_second']['median']:,.0f}" for side in ("stock", "fastpack")]
        parts = [f"{ratio[part]['median']:.2f}" for part in ("forward", "backward")]
        kept = " / ".join(f"{sides[side]['saved_bytes'] / 2**20:,.0f}" for side in ("stock", "fastpack"))
        cells = [row["setting"], f"{row['tokens']:,}", *rates, ratio_cell(ratio["seconds"]), *parts, kept]
        lines.append(f"| {' | '.join(cells)} |")
    load = max(row.get("other_load") or 0.0 for row in timed)
    beside = f" Other processes kept up to {load:.1f} cores busy meanwhile." if load > NOISE_CORES else ""
    for row in timed:
        for side, found in row["ratios"].items():
            if side != "stock":
                beside += f" Over *{side}*, {row['setting']}, {row['tokens']:,} tokens: {ratio_cell(found['seconds'])}."
    return "\n".join([*lines, "", made_by(name, record) + beside])


def _made(table: Callable[[Mapping[str, Any]], str]) -> Callable[[str, Mapping[str, Any]], str]:
    """Return a table of a case of its own with the line of its record."""
    return lambda name, record: f"{table(record)}\n\n{made_by(name, record)}"


_TABLES: dict[str, Callable[[str, Mapping[str, Any]], str]] = {
    "side_by_side": _made(side_table.table),
    "row_profile": _made(profile_table.table),
    "packed_attention": _packed_attention,
    "lora": lora_table,
    "activation_memory": activation_table,
    "first_step": first_step_table,
    "equal_memory": equal_memory_table,
    "fp8_products": _made(fp8_table.layers_table),
    "fp8_steps": _made(fp8_steps.table),
    "fp8_accuracy": _made(fp8_accuracy_tables.table),
    "moe": _moe,
    "host_overhead": _host_overhead,
    "collator": _collator,
    "cuda_tests": cuda_tests.said,
}


def main() -> None:
    """Rewrite the numbers of this checkout's pages, and draw their pictures."""
    results = load_results()
    write_pictures(results, RESULTS, ROOT / FOLDER)
    for page, fill in ((PAGE, with_numbers), ("README.md", with_glance)):
        path = ROOT / page
        path.write_text(fill(path.read_text(encoding="utf-8"), results), encoding="utf-8")
    for page in PAGES:
        path = ROOT / page
        path.write_text(with_optimisation(page, path.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
