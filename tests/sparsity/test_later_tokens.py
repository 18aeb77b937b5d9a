"""What later tokens tell earlier ones through the index of a trained model with `block_topk`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from mtrain_cli.composition.compose import compose
from mtrain_cli.profiling.pattern_quality import worker_alone
from mtrain_cli.sparsity import block_topk
from mtrain_cli.training.trainer import Trainer

BLOCK, SEQ = 16, 256
WITHIN, WHOLE = 229, 224  # lengths of a prefix that ends inside a block of queries, and with one
CONFIG = [
    f"seq={SEQ}", "topology.block_size=16", "model.hidden_size=32", "model.num_layers=2",
    "model.head_dim=8", "model.intermediate_size=48", "train.kernel=reference", "optim.lr=1e-2",
    "topology.device=cpu", "data.document_mask=false", "train.dtype=float32",
    "sparsity=block_topk", f"sparsity.block={BLOCK}", "sparsity.rank=4",
    "model.init_std=0.3",  # attention that looks at few keys
]  # fmt: skip


@pytest.fixture(scope="module", params=["exact", "learned"])
def trainer(request) -> Iterator[Trainer]:
    config = compose([*CONFIG, f"sparsity.score={request.param}", "sparsity.density=0.5"])
    with worker_alone(config) as trained:
        for _ in range(10):
            trained.train_step(False)
        yield trained


def losses(trainer: Trainer, prefix: int, **settings: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses of the tokens of a prefix, with two futures."""
    pattern = trainer.choices.pattern
    sample, other = (trainer.dataset[trainer.sampler.sequence(n)] for n in (70, 80))
    results = []
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        for name, value in settings.items():
            patch.setitem(vars(pattern), name, value)
        for future in (sample, other):
            tokens = np.append(sample.tokens[:prefix], future.tokens[prefix:])
            labels = np.append(sample.tokens[1:prefix], future.tokens[prefix - 1 :])
            batch = trainer.batch_maker([replace(sample, tokens=tokens, labels=labels)])
            inputs = batch.tokens, batch.positions, batch.labels, batch.attention
            results.append(trainer.decoder.token_losses(*inputs)[0, : prefix - 1])
    assert torch.isfinite(results[0]).all()
    return results[0], results[1]


def test_with_a_threshold_later_tokens_change_nothing(trainer):
    dense, _ = losses(trainer, WITHIN, density=0.0, threshold=1e-9)
    for level in (0.1, 0.2, 0.4):
        one, other = losses(trainer, WITHIN, density=0.0, threshold=level)
        assert torch.equal(one, other)
        assert not torch.equal(one, dense), "the index leaves something out"


def test_with_a_density_later_tokens_change_only_level_and_cap(trainer, monkeypatch):
    free = [losses(trainer, WITHIN, row_cap=cap) for cap in (1.0, 1.5, 2.0)]
    assert not all(torch.equal(one, other) for one, other in free)
    levels, find = [], block_topk._level

    def first_future(*args):
        levels.append(find(*args))
        return levels[-1]

    # Within the last block of queries, the cap also lets the later ones push blocks out.
    for prefix, row_cap in ((WITHIN, 1e6), (WHOLE, 1.0)):
        levels.clear()
        layers = itertools.count()

        def level(*args, layers=layers):
            number = next(layers)
            return first_future(*args) if number < 2 else levels[number - 2]

        monkeypatch.setattr(block_topk, "_level", level)
        one, other = losses(trainer, prefix, row_cap=row_cap)
        assert next(layers) == 4, "two layers, two futures"
        assert torch.equal(one, other)
