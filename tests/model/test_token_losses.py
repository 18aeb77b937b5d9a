"""The loss of every token equals cross entropy, in chunks of any size."""

from __future__ import annotations

import pytest
import torch

from mtrain_cli.model.loss import token_losses

ROWS, HIDDEN, VOCAB = 11, 6, 13


@pytest.mark.parametrize("rows_per_chunk", [0, 1, 4, 100])
def test_losses_equal_cross_entropy_and_ignored_labels_have_none(rows_per_chunk):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, HIDDEN, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    labels = torch.randint(VOCAB, (ROWS,), generator=generator)
    labels[[2, 7]] = -100
    labels[:3] = (x @ weight.t()).argmax(-1)[:3]
    labels[2] = -100
    is_greedy = torch.zeros(ROWS, dtype=torch.bool)
    losses = token_losses(x, weight, labels, 4 * VOCAB * rows_per_chunk, is_greedy)
    log_probabilities = (x @ weight.t()).log_softmax(-1)
    expected = -log_probabilities.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    expected[[2, 7]] = 0
    torch.testing.assert_close(losses, expected)
    assert is_greedy.tolist() == ((x @ weight.t()).argmax(-1) == labels).tolist()
    assert is_greedy[:3].tolist() == [True, True, False]


def test_low_precision_gives_float32_losses_without_gradients():
    x = torch.randn(ROWS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    losses = token_losses(x, weight, torch.zeros(ROWS, dtype=torch.int32), chunk_bytes=100)
    assert losses.dtype == torch.float32
    assert not losses.requires_grad


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
