"""The head's loss is TRL's, within twice TRL's own error against float64, with one product less."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counted_operators import Counted
from torch import Tensor

from fastpack_trl.step import head
from fastpack_trl.step.head import ChunkedLogProbFunction, HeadLoss, head_log_probs, head_loss

POSITIONS, HIDDEN, VOCABULARY = 37, 24, 101
SHAPES = {"plain": {}, "scaled": {"logit_scale": 0.25}, "softcapped": {"softcap": 3.0, "logit_scale": 2.0}}

KINDS = pytest.mark.parametrize(
    ("trained", "loss_type", "shape"),
    [(t, kind, shape) for t in (False, True) for kind in ("nll", "dft") for shape in SHAPES],
)


def of_trl(*given: Any, loss_type: str = "nll", logit_scale: float = 1.0, softcap: float | None = None) -> HeadLoss:
    """The loss by TRL's own function, of hidden states, weight, bias and targets."""
    log_probs, entropy, _, _, is_top1 = ChunkedLogProbFunction.apply(
        *given, 1.0, 40, softcap, logit_scale, ("log_probs", "entropy", "is_top1")
    )
    losses = -log_probs * log_probs.exp().detach() if loss_type == "dft" else -log_probs
    return HeadLoss(losses.sum(), log_probs.detach(), entropy.detach(), is_top1)


def operations(name: str, args: Any) -> int:
    """Of a matrix product; torch's own counter leaves `addmm_` out."""
    if name not in ("mm", "addmm", "addmm_"):
        return 0
    left, right = args[-2:]
    return int(2 * left.shape[0] * left.shape[1] * right.shape[1])


def material(
    trained: bool, bias: bool = False, positions: int = POSITIONS, dtype: Any = torch.float32, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(positions, HIDDEN, generator=draw).to(device, dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=draw).to(device, dtype).requires_grad_(trained)
    offset = torch.randn(VOCABULARY, generator=draw).to(device, dtype).requires_grad_(trained) if bias else None
    return hidden, weight, offset, torch.randint(VOCABULARY, (positions,), generator=draw).to(device)


def truth(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, **options: Any) -> HeadLoss:
    """In float64, with the full logits."""
    logits = hidden @ weight.T
    logits = (logits if bias is None else logits + bias) * options.get("logit_scale", 1.0)
    if options.get("softcap"):
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    log_softmax = logits.log_softmax(-1)
    log_probs = log_softmax.gather(-1, targets[:, None])[:, 0]
    losses = -log_probs
    if options.get("loss_type") == "dft":
        losses = losses * log_probs.exp().detach()
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return HeadLoss(losses.sum(), log_probs, entropy, logits.argmax(-1) == targets)


def run(compute: Any, inputs: tuple[Any, ...], dtype: torch.dtype | None = None, **options: Any) -> list[Tensor]:
    """Total, log-probabilities, entropy and gradients; the total is scaled as by `num_items_in_batch`."""
    for tensor in inputs[:3]:
        if tensor is not None:
            tensor.grad = None
    out = compute(*inputs, **options)
    (out.total / 7).backward()
    gradients = [tensor.grad for tensor in inputs[:3] if tensor is not None and tensor.grad is not None]
    return [out.total.detach(), out.log_probs.detach(), out.entropy.detach(), *gradients]


def doubled(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    def double(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.detach().double().requires_grad_(tensor.requires_grad)

    return (*map(double, inputs[:3]), inputs[3])


def assert_within_twice_of_stock(inputs: tuple[Any, ...], autocast: bool = False, **options: Any) -> None:
    exact = run(truth, doubled(inputs), **options)
    with torch.autocast(inputs[0].device.type, torch.bfloat16, enabled=autocast):
        stock = run(of_trl, inputs, **options)
        for tile_elements in (None, 5 * VOCABULARY):
            assert_within_twice(run(head_loss, inputs, **options, tile_elements=tile_elements), stock, exact)


def assert_within_twice(ours: list[Tensor], stock: list[Tensor], exact: list[Tensor]) -> None:
    assert len(ours) == len(stock) == len(exact)
    for mine, theirs, right in zip(ours, stock, exact, strict=True):
        assert mine.dtype == theirs.dtype
        # The floor is a few roundings of the result (scaling, softmax, product): an error may be zero by chance.
        floor = 4 * torch.finfo(mine.dtype).eps * right.norm()
        assert (mine - right).norm() <= 2 * (theirs - right).norm() + floor


@KINDS
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_loss_and_gradients_are_within_twice_trls_error(trained: bool, bias: bool, loss_type: str, shape: str) -> None:
    assert_within_twice_of_stock(material(trained, bias), loss_type=loss_type, **SHAPES[shape])


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32 weights", "bf16 weights"])
def test_bf16_is_within_twice_trls_error(trained: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "VOCABULARY_SLICE", 40)  # both sides convert the weight slice by slice
    assert_within_twice_of_stock(material(trained, bias=True, dtype=dtype), autocast=dtype == torch.float32)


@pytest.mark.parametrize(("trained", "products", "stock"), [(False, 2, 3), (True, 3, 4)], ids=["frozen", "trained"])
def test_products_of_the_head(trained: bool, products: int, stock: int) -> None:
    inputs = material(trained)
    for compute, expected in ((head_loss, products), (of_trl, stock)):
        with Counted(operations) as seen:
            run(compute, inputs)
        assert seen.count == expected * 2 * POSITIONS * HIDDEN * VOCABULARY
    with torch.no_grad(), Counted(operations) as seen:
        head_loss(*inputs)
    assert seen.count == 2 * POSITIONS * HIDDEN * VOCABULARY


def test_ties_count_for_the_first_token_as_argmax_does() -> None:
    weight = torch.zeros(5, HIDDEN)
    weight[1] = weight[3] = 1.0
    hidden = torch.ones(5, HIDDEN)
    is_top1 = head_loss(hidden, weight, None, torch.arange(5)).is_top1
    assert is_top1.tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("shape", SHAPES)
def test_nan_rows_and_tokens_that_cannot_be_are_as_in_trl(shape: str) -> None:
    hidden, weight, bias, targets = material(False, bias=True)
    hidden = hidden.detach().clone()
    hidden[3] = torch.nan
    excluded = int(targets[5])
    if "softcap" not in SHAPES[shape]:
        bias[excluded] = -torch.inf
    inputs = (hidden.requires_grad_(), weight, bias, targets)
    ours, theirs = (run(compute, inputs, **SHAPES[shape]) for compute in (head_loss, of_trl))
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, equal_nan=True, rtol=1e-4, atol=1e-5)
    figures, expected_figures = (compute(*inputs, **SHAPES[shape]) for compute in (head_loss, of_trl))
    assert torch.equal(figures.is_top1, expected_figures.is_top1)
    assert not figures.is_top1[3]


@pytest.mark.parametrize("positions", [0, POSITIONS], ids=["none", "none counts"])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_no_position_is_a_zero_with_a_gradient(trained: bool, positions: int) -> None:
    inputs = material(trained, positions=positions)
    total, log_probs, entropy, *gradients = run(head_loss, inputs, weights=torch.zeros(positions))
    assert total == 0
    assert log_probs.shape == entropy.shape == (positions,)
    assert len(gradients) == 1 + trained
    assert all(not gradient.any() for gradient in gradients)


def test_a_second_backward_is_refused_by_name() -> None:
    loss = head_loss(*material(True)).total
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="sync_free='off'"):
        loss.backward()


def test_an_unknown_loss_type_is_named() -> None:
    with pytest.raises(ValueError, match="loss_type='mse' is not available: use one of nll, dft"):
        head_loss(*material(False), loss_type="mse")


def test_compiled_code_takes_it_as_one_operation() -> None:
    inputs = material(False)

    def step(hidden: Tensor) -> Tensor:
        return head_loss(hidden * 2, *inputs[1:]).total * 0.5

    expected = torch.autograd.grad(step(inputs[0]), inputs[0])[0]
    compiled = torch.compile(step, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(inputs[0]), inputs[0])[0], expected)


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_on_cuda_twice_trls_error_and_no_sync(trained: bool, loss_type: str, shape: str, dtype: torch.dtype) -> None:
    inputs = material(trained, bias=True, dtype=dtype, device="cuda")
    options = {"loss_type": loss_type, **SHAPES[shape]}
    assert_within_twice_of_stock(inputs, **options)
    for tile_elements in (None, 5 * VOCABULARY):
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(head_loss, inputs, tile_elements=tile_elements, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("shape", SHAPES)
def test_log_probs_and_gradients_by_row_have_at_most_twice_the_error_of_trl(bias: bool, shape: str) -> None:
    """Any loss of the log-probabilities: each row has a gradient of its own."""
    inputs = material(False, bias)
    weights = torch.randn(POSITIONS, generator=torch.Generator().manual_seed(1))

    def figures(found: tuple[Tensor, Tensor], hidden: Tensor) -> list[Tensor]:
        (gradient,) = torch.autograd.grad((found[0] * weights).sum(), hidden)
        return [found[0].detach(), found[1].detach(), gradient]

    options = SHAPES[shape]
    doubles = doubled(inputs)
    exact = figures(truth(*doubles, **options)[1:3], doubles[0])
    trl = head.ChunkedLogProbFunction.apply(
        *inputs, 1.0, 64, options.get("softcap"), options.get("logit_scale", 1.0), ("log_probs", "entropy")
    )
    stock = figures(trl[:2], inputs[0])
    for tile_elements in (None, 5 * VOCABULARY):
        found = head_log_probs(*inputs, **options, tile_elements=tile_elements)
        assert_within_twice(figures(found[:2], inputs[0]), stock, exact)
