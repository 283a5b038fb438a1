"""The reasons that the code can give for a fallback, read from its source: what the troubleshooting page lists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "fastpack_trl"

FUNCTIONS = {
    "attention/backends.py": ["choose", "_failure"],
    "attention/xformers.py": ["refuses"],
    "attention/dense.py": ["refuses"],
    "attention/varlen.py": ["_lacks"],
    "attention/per_document.py": ["refuses", "refuses_compile"],
    "attention/feature.py": ["plan_rows", "install_attention", "_install"],
    "attention/start_proof.py": ["prove", "prove_stock", "_proof"],
    "attention/share_prefixes.py": ["_reasons", "_failed_check"],
    "model/preflight.py": ["against_plan"],
    "model/facts.py": ["_gaps", "read_features"],
    "packing/batching.py": ["_only_stock", "_in_any_trainer", "_padded", "_padded_in_sft"],
    "model/hooks.py": ["callback_between", "hook_on_a_gradient", "needs_logits"],
    "trainer.py": ["_fastpack_collates"],
    "lora/feature.py": ["lora"],
    "kernels/fp8.py": ["failure_of_products"],
    "lora/linear.py": ["_not_covered", "_fastpack_adapter"],
    "lora/frozen_base.py": ["_lack_of_memory", "_remark_on_lost", "_refusal", "_refused_by_device", "_reason_against"],
    "lora/report.py": ["keep_copies"],
    "moe/feature.py": ["moe", "_reading_sizes", "_reason_for_stock"],
    "moe/layout.py": ["not_covered"],
    "moe/lora.py": ["_reason_for_peft"],
    "checkpointing/activation_memory.py": ["_plan", "_conflicts", "_why_not", "go_deeper"],
    "run/budget.py": ["largest_row", "budget_bytes"],
    "checkpointing/offloader.py": ["_fetch_ahead", "_why_kept", "_grow"],
    "checkpointing/checkpoint_offload.py": ["_why_off"],
    "checkpointing/offload.py": ["offload_unavailable"],
    "compile/layer_compile.py": ["_reasons"],
    "compile/kind.py": ["_decide", "_pays"],
    "compile/layers.py": ["is_hooked"],
    "step/sync_free.py": ["_only_stock_batch", "_only_stock_loss", "_remarks"],
    "step/merge_accumulation.py": ["_reasons"],
    "step/accumulation.py": ["plan", "_look_for_watchers", "split"],
    "capture/graphs.py": ["_look_for_watchers", "_record", "finish", "_model_changed", "reclaim"],
    "capture/decision.py": ["_weigh"],
    "capture/feature.py": ["unavailable", "_switch", "_reasons_of_trainer", "_reasons_of_layers"],
    "capture/device.py": ["lacks_room"],
    "step/loss.py": ["head_of", "read_constants"],
    "trainers/featured.py": ["_fastpack_why_disabled"],
}
"""Module -> its functions that return or say a reason."""


CONSTANTS = {
    "run/run.py": ["SHARDED"],
    "attention/batch_check.py": ["_READ_AGAIN", "_STOCK"],
    "model/facts.py": ["ALORA"],
    "step/sync_free.py": ["_EVALUATION", "_REENTRANT"],
}
"""Module -> its constants that are a reason."""


def template(node: ast.AST) -> str | None:
    """Return a string of the source with ``...`` for what is filled in; None for what is no string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) or "..." for part in node.values)
    return None


def templates(node: ast.AST) -> Iterator[str]:
    """Yield the strings below `node`, outermost only; not those of an exception that is raised."""
    text = template(node)
    if text is not None:
        yield text
        return
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.Raise | ast.arguments):
            yield from templates(child)


def _functions(tree: ast.AST) -> dict[str, list[ast.FunctionDef]]:
    found: dict[str, list[ast.FunctionDef]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, []).append(node)
    return found


def given() -> dict[str, str]:
    """Return the sentences in `FUNCTIONS` and `CONSTANTS` -> their module."""
    found: dict[str, str] = {}
    for module, names in FUNCTIONS.items():
        functions = _functions(_parsed(PACKAGE / module))
        for function in (function for name in names for function in functions[name]):
            body = function.body[ast.get_docstring(function) is not None :]
            texts = (text for node in body for text in templates(node))
            found |= {text: module for text in texts if re.search(r"\w \w", text)}
    for module, names in CONSTANTS.items():
        made = {ast.unparse(node.targets[0]): node.value for node in _parsed(PACKAGE / module).body
                if isinstance(node, ast.Assign)}  # fmt: skip
        found |= {text: module for name in names for text in templates(made[name])}
    return found


def everywhere() -> set[str]:
    """Return every string of the package."""
    return {text for file in PACKAGE.rglob("*.py") for text in templates(_parsed(file))}


def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))
