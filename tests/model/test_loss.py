"""The loss and its gradients, and the loss of every token, equal cross entropy."""

from __future__ import annotations

import weakref

import pytest
import torch
from slow_cases import mostly_slow
from torch import Tensor
from torch.nn import functional

from mtrain_cli.model import loss as loss_module
from mtrain_cli.model.loss import LossOptions, chunked_losses, token_losses

VOCAB, HIDDEN, ROWS = 50, 16, 37


def problem(dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, HIDDEN, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(device, dtype).requires_grad_()
    labels = torch.randint(VOCAB, (ROWS,), generator=generator)
    labels[[0, 8, 9, ROWS - 1]] = -100
    return x, weight, labels.to(device)


def loss_of(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk_bytes: int,
    scale: float | Tensor,
    **options: bool,
) -> Tensor:
    """Return the loss without z-loss."""
    return chunked_losses(x, weight, labels, scale, LossOptions(chunk_bytes, **options))[0]


def plain(x: Tensor, weight: Tensor, labels: Tensor, scale: float) -> Tensor:
    return functional.cross_entropy(x.float() @ weight.float().t(), labels, reduction="sum") * scale


def check_bfloat16_gradients(loss: Tensor, expected: Tensor, *inputs: Tensor) -> None:
    found, wanted = (torch.autograd.grad(each, inputs) for each in (loss, expected))
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=2**-7 * theirs.abs().max().item())


@pytest.mark.parametrize("chunk_rows", [1, 5, 36, 37, 1000])
def test_loss_and_both_gradients_equal_plain_cross_entropy_for_any_chunk(chunk_rows):
    x, weight, labels = problem(torch.float32)
    loss = loss_of(x, weight, labels, 4 * VOCAB * chunk_rows, 0.25)
    expected = plain(x, weight, labels, 0.25)
    torch.testing.assert_close(loss, expected)
    # The loss may be multiplied later, here by 3: the factor must reach both gradients.
    for ours, theirs in zip(
        torch.autograd.grad(loss * 3, (x, weight)),
        torch.autograd.grad(expected * 3, (x, weight)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@mostly_slow("recompute", [False, True], keep=(0,))
@pytest.mark.parametrize("z_loss", [pytest.param(0.0, marks=pytest.mark.slow), 0.07])
def test_gradcheck_in_float64(recompute, z_loss):
    x, weight, labels = problem(torch.float64)

    def total(x, weight):
        options = LossOptions(8 * VOCAB * 10, z_loss, recompute=recompute)
        return chunked_losses(x, weight, labels, 0.3, options)[0]

    assert torch.autograd.gradcheck(total, (x, weight))


def test_only_a_gradient_in_the_logits_dtype_is_formed_in_place(monkeypatch):
    compiled = []
    monkeypatch.setattr(
        torch, "compile", lambda function, **_: compiled.append(function) or function
    )
    loss_module._compiled.cache_clear()
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, labels = problem(dtype)
        loss_of(x, weight, labels, 4 * VOCAB * 5, 1.0, compile=True)
    loss_module._compiled.cache_clear()
    assert compiled == [loss_module._row_losses, loss_module._row_losses_out_of_place]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("chunk_rows", [1, 5, 1000])
def test_z_loss_is_the_squared_logsumexp_of_counted_rows(recompute, chunk_rows):
    x, weight, labels = problem(torch.float64)
    scale = torch.tensor(0.25, dtype=torch.float64)
    options = LossOptions(8 * VOCAB * chunk_rows, z_loss=1e-2, recompute=recompute)
    total, loss = chunked_losses(x, weight, labels, scale, options)
    logits = x @ weight.t()
    plain_loss = functional.cross_entropy(logits, labels, reduction="sum") * 0.25
    squares = logits.logsumexp(-1)[labels != -100].square().sum() * 0.25
    torch.testing.assert_close(loss, plain_loss.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(total, plain_loss + 1e-2 * squares, rtol=1e-12, atol=0)
    assert not loss.requires_grad
    expected = torch.autograd.grad((plain_loss + 1e-2 * squares) * 3, (x, weight))
    for ours, theirs in zip(torch.autograd.grad(total * 3, (x, weight)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("z_loss", [0.0, 0.07])
def test_the_out_of_place_version_equals_the_in_place_one(dtype, z_loss, monkeypatch):
    monkeypatch.setattr(loss_module, "_compiled", lambda _: loss_module._row_losses_out_of_place)
    x, weight, labels = problem(dtype)
    results = []
    for compile in (False, True):
        options = LossOptions(4 * VOCAB * 5, z_loss, compile=compile)
        total, loss = chunked_losses(x, weight, labels, 0.25, options)
        results.append((total, loss, *torch.autograd.grad(total, (x, weight))))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5 if dtype == torch.float32 else 2**-7
    for compiled, plain_one in zip(*results, strict=True):
        torch.testing.assert_close(compiled, plain_one, rtol=tolerance, atol=tolerance)
    with torch.no_grad():
        torch.testing.assert_close(
            chunked_losses(x, weight, labels, 0.25, options)[0], results[0][0].detach()
        )


def test_recomputed_gradients_equal_those_formed_in_forward():
    for dtype in (torch.float32, torch.bfloat16):
        x, weight, labels = problem(dtype)
        results = [
            torch.autograd.grad(
                loss_of(x, weight, labels, 4 * VOCAB * 5, 0.25, recompute=again), (x, weight)
            )
            for again in (False, True)
        ]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_bfloat16_error_is_that_of_rounding_inputs_and_results():
    x, weight, labels = problem(torch.bfloat16)
    loss = loss_of(x, weight, labels, 4 * VOCAB * 5, 1.0)
    expected = plain(x, weight, labels, 1.0)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    check_bfloat16_gradients(loss, expected, x, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_rows", [1, 5, 1000])
def test_losses_of_rows_have_gradients_of_their_own(chunk_rows, dtype):
    x, weight, labels = problem(dtype)
    options = LossOptions(4 * VOCAB * chunk_rows, recompute=True, by_row=True)
    losses = chunked_losses(x, weight, labels, 1.0, options)[0]
    expected = functional.cross_entropy(
        x.float() @ weight.float().t(), labels, ignore_index=-100, reduction="none"
    )
    torch.testing.assert_close(losses, expected)
    factors = torch.randn(ROWS, generator=torch.Generator().manual_seed(4))
    ours = torch.autograd.grad(losses @ factors, (x, weight))
    theirs = torch.autograd.grad(expected @ factors, (x, weight))
    for found, wanted in zip(ours, theirs, strict=True):
        error = 2**-7 if dtype == torch.bfloat16 else 1e-6
        assert (found - wanted).abs().max() <= error * wanted.abs().max()


def test_weight_gradient_is_summed_over_chunks_in_float32():
    # 512 equal contributions: a bfloat16 sum stops growing after 2^8 of them.
    rows = 512
    x = torch.ones(rows, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    loss = loss_of(x, weight, torch.zeros(rows, dtype=torch.long), 4 * 2, 1.0)
    (gradient,) = torch.autograd.grad(loss, weight)
    assert gradient.flatten().tolist() == [-rows / 2, rows / 2]


@pytest.mark.parametrize("compile", [False, True])
def test_a_nearly_certain_prediction_keeps_its_small_gradient_in_bfloat16(compile, monkeypatch):
    monkeypatch.setattr(loss_module, "_compiled", lambda _: loss_module._row_losses_out_of_place)
    weight = torch.tensor([[8.0], [0.0]], dtype=torch.bfloat16)
    x = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    (gradient,) = torch.autograd.grad(
        loss_of(x, weight, torch.tensor([0]), 1 << 20, 1.0, compile=compile), x
    )
    wrong = 1 / (
        1 + torch.tensor(8.0).exp()
    )  # of the probability; 1 - wrong rounds to 1 in bfloat16
    torch.testing.assert_close(gradient.item(), -8 * wrong.item(), rtol=2**-7, atol=0.0)


def test_no_valid_label_gives_exactly_zero():
    x, weight, labels = problem(torch.float32)
    loss = loss_of(x, weight, torch.full_like(labels, -100), 4 * VOCAB * 5, 1.0)
    dx, dweight = torch.autograd.grad(loss, (x, weight))
    assert loss.item() == 0.0
    assert not dx.any()
    assert not dweight.any()


@pytest.mark.parametrize("wanted", [0, 1])
def test_only_the_requested_gradients_are_formed(wanted):
    x, weight, labels = problem(torch.float32)
    inputs = [
        tensor if index == wanted else tensor.detach() for index, tensor in enumerate((x, weight))
    ]
    (ours,) = torch.autograd.grad(loss_of(*inputs, labels, 4 * VOCAB * 5, 1.0), inputs[wanted])
    (theirs,) = torch.autograd.grad(plain(*inputs, labels, 1.0), inputs[wanted])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("label", [VOCAB, -1, -101])
def test_label_outside_the_vocabulary_is_refused(label):
    x, weight, labels = problem(torch.float32)
    labels[11] = label
    with pytest.raises(
        ValueError, match=f"Label {label} of row 11 is outside the vocabulary of {VOCAB} tokens"
    ):
        loss_of(x, weight, labels, 4 * VOCAB * 5, 1.0)


def test_logits_never_exceed_the_budget():
    most = 0
    logit_tensors: list[weakref.ref[Tensor]] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal most
            result = function(*args, **(kwargs or {}))
            is_logits = (
                isinstance(result, Tensor)
                and result.is_floating_point()
                and result.ndim == 2
                and result.shape[1] == VOCAB
            )
            if is_logits and result.shape[0] != HIDDEN:  # not the transposed weight
                logit_tensors.append(weakref.ref(result))
                alive = [
                    tensor.untyped_storage()
                    for reference in logit_tensors
                    if (tensor := reference()) is not None
                ]
                most = max(
                    most, sum({storage.data_ptr(): storage.nbytes() for storage in alive}.values())
                )
            return result

    x, weight, labels = problem(torch.float32)
    with Watch():
        loss_of(x, weight, labels, 4 * VOCAB * 6 + 3, 1.0)
    assert most == 4 * VOCAB * 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("compile", [False, True])
def test_cuda_bfloat16_equals_float32_arithmetic_on_the_same_numbers(compile):
    x, weight, labels = problem(torch.bfloat16, "cuda")
    loss = loss_of(x, weight, labels, 4 * VOCAB * 5, 0.5, compile=compile)
    expected = plain(x, weight, labels, 0.5)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    check_bfloat16_gradients(loss, expected, x, weight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_compiled_code_allocates_only_the_logits_gradient():
    rows, vocab_size = 512, 50_000
    x = torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab_size, 64, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(vocab_size, (rows,), device="cuda")
    logits = 4 * rows * vocab_size
    for measured in (False, True):  # the first call compiles
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss_of(x, weight, labels, logits, 1.0, compile=True)
        if measured:
            assert 1.5 * logits <= torch.cuda.max_memory_allocated() - before < 1.6 * logits


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_label_outside_the_vocabulary_gives_nan_and_no_synchronisation():
    x, weight, labels = problem(torch.bfloat16, "cuda")
    labels[11] = VOCAB
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = loss_of(x, weight, labels, 4 * VOCAB * 5, 0.5)
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loss.isnan().item()
    assert x.grad is not None
    assert x.grad.isnan().any(dim=1).nonzero().flatten().tolist() == [11]


FEW_ROWS, NARROW, FEW_IDS = 11, 6, 13


@pytest.mark.parametrize("rows_per_chunk", [0, 1, 4, 100])
def test_losses_equal_cross_entropy_and_ignored_labels_have_none(rows_per_chunk):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(FEW_ROWS, NARROW, generator=generator)
    weight = torch.randn(FEW_IDS, NARROW, generator=generator)
    labels = torch.randint(FEW_IDS, (FEW_ROWS,), generator=generator)
    labels[[2, 7]] = -100
    labels[:3] = (x @ weight.t()).argmax(-1)[:3]
    labels[2] = -100
    is_greedy = torch.zeros(FEW_ROWS, dtype=torch.bool)
    losses = token_losses(x, weight, labels, 4 * FEW_IDS * rows_per_chunk, is_greedy)
    log_probabilities = (x @ weight.t()).log_softmax(-1)
    expected = -log_probabilities.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    expected[[2, 7]] = 0
    torch.testing.assert_close(losses, expected)
    assert is_greedy.tolist() == ((x @ weight.t()).argmax(-1) == labels).tolist()
    assert is_greedy[:3].tolist() == [True, True, False]


def test_chunks_without_labels_are_left_out():
    torch.manual_seed(0)
    x, weight = torch.randn(12, 8), torch.randn(5, 8)
    labels = torch.full((12,), -100)
    labels[7] = 3
    greedy = torch.ones(12, dtype=torch.bool)
    losses = token_losses(x, weight, labels, 4 * 5 * 2, greedy)  # two rows a chunk
    logits = x[7] @ weight.t()
    assert losses[7] == pytest.approx(float(logits.logsumexp(-1) - logits[3]), rel=1e-6)
    assert losses.count_nonzero() == 1
    assert greedy.nonzero().flatten().tolist() == ([7] if int(logits.argmax()) == 3 else [])
