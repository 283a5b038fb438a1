"""`count_host_syncs` sees what would make the host wait for a GPU, where it is, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fastpack_trl.testing import count_host_syncs

X = torch.arange(6.0)
MASK = X > 2
LENGTHS = torch.tensor([1, 2, 3])

WAITS = """
X.sum().item() ; float(X.sum()) ; bool(MASK.any()) ; MASK.nonzero() ; torch.where(MASK) ; X[MASK]
X.clone().__setitem__(MASK, torch.ones(3)) ; X.masked_select(MASK) ; X.unique() ; X.unique_consecutive()
LENGTHS.bincount() ; torch.equal(X, X) ; torch.allclose(X, X) ; torch.repeat_interleave(LENGTHS) ; X.histc(4)
X.tolist() ; X.cpu() ; X.to("cpu") ; torch.tensor(3, device=X.device) ; str(X) ; repr(X) ; f"{X}" ; str({"weight": X})
"""
DOES_NOT = """
X.sum() ; X[2:4] ; X[LENGTHS] ; X.clone().__setitem__(MASK, 0.0) ; torch.where(MASK, X, 0.0) ; X.histc(4, 0, 5)
torch.repeat_interleave(LENGTHS, output_size=6) ; X.size(0) + X.numel() ; X.to(torch.float64) ; X.to(LENGTHS.device)
torch.tensor(3)
"""


def _each(expressions: str) -> list[str]:
    return [one.strip() for line in expressions.strip().splitlines() for one in line.split(" ; ")]


@pytest.mark.parametrize("expression", _each(WAITS))
@pytest.mark.parametrize("inference", [False, True])
def test_an_operation_that_waits_is_counted_once_at_its_line(expression: str, inference: bool) -> None:
    with torch.inference_mode(inference), count_host_syncs(device="cpu") as syncs:
        eval(expression)
    (entry,) = syncs.entries
    assert syncs.total == entry.count == 1
    assert Path(entry.file) == Path(__file__)
    assert entry.code == "eval(expression)"


@pytest.mark.parametrize("expression", _each(DOES_NOT))
def test_an_operation_that_does_not_wait_is_not_counted(expression: str) -> None:
    with count_host_syncs(device="cpu") as syncs:
        eval(expression)
    assert not syncs.entries
    assert str(syncs) == "no host sync"


class _ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * float(grad.sum())


def test_counts_add_up_per_call_site_can_be_read_inside_and_include_the_backward_pass() -> None:
    loss = _ReadsInBackward.apply(X.clone().requires_grad_()).sum()
    with count_host_syncs(device="cpu") as syncs:
        for expected in range(1, 4):
            X.sum().item()
            assert syncs.total == expected
        loss.backward()
    assert [(entry.code, entry.count) for entry in syncs.entries] == [
        ("X.sum().item()", 3),
        ("return grad * float(grad.sum())", 1),
    ]
    figures = syncs.to_dict()
    assert (figures["total"], figures["entries"][0]["count"], figures["entries"][0]["kind"]) == (4, 3, "sync")


def _collate(rows: list[Tensor]) -> Tensor:
    return torch.stack(rows)[:, : int(torch.stack(rows).max())]


def test_tensors_of_the_host_are_told_apart() -> None:
    weight = torch.nn.Parameter(X.clone())
    weight.grad = X.clone()
    # The plain loop reads its step counter, a CPU tensor also where the weights are on a GPU.
    optimizer = torch.optim.AdamW([weight], foreach=False, fused=False)
    with count_host_syncs(device="cpu") as syncs:
        optimizer.step()
        next(iter(DataLoader([X, X], batch_size=2, shuffle=True, collate_fn=_collate)))
    assert syncs.total == 0, syncs
    assert not syncs.of("sync", "copy")
    assert {Path(entry.file) for entry in syncs.of("host")} == {Path(__file__)}
    assert any("torch.stack(rows)" in entry.code for entry in syncs.entries)
    with count_host_syncs(device="cpu", host=["tests/measure/test_host_syncs"]) as named:
        X.sum().item()
    assert (named.total, len(named.of("host"))) == (0, 1)


def test_an_error_is_raised_by_the_operation_and_nothing_stays_installed() -> None:
    with (
        pytest.raises(RuntimeError, match=r"_local_scalar_dense at .*test_host_syncs.py:\d+ would make the host wait"),
        count_host_syncs(device="cpu", error=True) as syncs,
    ):
        X.sum().item()
    X.sum().item()
    assert syncs.total == 0


@pytest.mark.cuda
def test_cuda_reports_read_backs_and_blocking_copies_at_their_line() -> None:
    x, pinned = X.cuda(), X.pin_memory()
    torch.cuda.synchronize()
    with count_host_syncs() as syncs:
        x.sum().item()
        x[x > 2].sum()
        pinned.to("cuda", non_blocking=True)
        (x * 2).sum()
        X.to("cuda")
    assert syncs.backend == "cuda"
    assert [entry.code for entry in sorted(syncs.entries, key=lambda entry: entry.line)] == [
        "x.sum().item()", "x[x > 2].sum()", 'X.to("cuda")',
    ]  # fmt: skip
    assert {Path(entry.file) for entry in syncs.entries} == {Path(__file__)}
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.cuda
def test_cuda_attributes_a_wait_in_backward_and_raises_at_the_operation() -> None:
    x = X.cuda()
    loss = _ReadsInBackward.apply(x.clone().requires_grad_()).sum()
    with count_host_syncs() as syncs:
        loss.backward()
    assert syncs.total >= 1
    assert {entry.code for entry in syncs.entries} <= {"loss.backward()", "return grad * float(grad.sum())"}
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"), count_host_syncs(error=True):
        x.sum().item()
    assert torch.cuda.get_sync_debug_mode() == 0
