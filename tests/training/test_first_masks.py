"""The masks of the first sequences, which plans and predictions read from the data."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from masked_documents import masked_store, prepared, question_record, write_jsonl

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import Config
from mtrain_cli.data.open_dataset import open_dataset
from mtrain_cli.training.planning import make_plan
from mtrain_cli.training.run_plan import FirstMasks, first_masks

SEQ = 60


def configured(store, *words: str) -> Config:
    return compose(
        ["data=tokens", f"data.path={store}", "data.mask_key=mask", f"seq={SEQ}",
         "model.vocab_size=264", "topology.device=cpu", *words]
    )  # fmt: skip


@pytest.fixture
def store(tmp_path):
    """Questions of different sizes, so that sequences have different numbers of pairs."""
    records = [question_record(5 + n % 7, 2 + n % 3, 4 + n % 5) for n in range(60)]
    prepared(write_jsonl(tmp_path / "documents.jsonl", records), tmp_path / "store")
    return tmp_path / "store"


def pairs_of(config: Config, number: int) -> int:
    """Count the pairs of a sequence cell by cell."""
    seen = np.zeros((SEQ, SEQ), bool)
    for q0, q1, k0, k1, kind in open_dataset(config)[number].slices:
        q, k = np.arange(q0, q1)[:, None], np.arange(k0, k1)
        own = np.ones((q1 - q0, k1 - k0), bool)
        if kind & 1:
            own &= k < k1 - (q1 - 1 - q)
        if kind & 2:
            own &= k >= k0 + (q - q0)
        seen[q0:q1, k0:k1] |= own
    return int(seen.sum())


def test_the_masks_are_those_of_the_first_sequences(store):
    config = configured(store)
    read = first_masks(config)
    pairs = [pairs_of(config, number) for number in range(8)]
    assert len(set(pairs)) > 3
    assert [mask.pairs for mask in read.masks] == pairs
    assert read.pairs == np.mean(pairs)
    assert read.describe().startswith("masks of the first 8 sequences were read; memory and stages")
    assert first_masks(config.changed(data={"mask_key": None})) is None
    mixed = config.changed(data={"path": str(store.parent), "mix": {store.name: 1.0}})
    assert len(first_masks(mixed).masks) == 8


def test_a_plan_prices_the_masks_of_the_data(store):
    config = configured(store)
    plan = make_plan(config)
    causal = make_plan(config.changed(data={"mask_key": None}))
    model, pairs = config.model, np.mean([pairs_of(config, number) for number in range(8)])
    width = 12 * model.num_layers * model.num_heads * model.head_dim
    fewer = width * (SEQ * (SEQ + 1) / 2 - pairs) / SEQ
    assert causal.flops.model - plan.flops.model == pytest.approx(fewer)


def test_whole_micro_batches_are_read_and_the_median_one_is_typical(store):
    config = configured(store, "train.micro_batch=3", "train.global_batch=6")
    read = first_masks(config)
    totals = [sum(mask.pairs for mask in read.masks[n : n + 3]) for n in (0, 3)]
    assert len(read.masks) == 6
    assert sum(mask.pairs for mask in read.typical) == min(totals)
    large = configured(store, "train.micro_batch=50", "train.global_batch=50")
    read = first_masks(large)
    assert len(read.masks) == 50 > len(open_dataset(large)), "the data repeat"
    masks = tuple(SequenceMask.causal(n, 9) for n in (9, 1, 5, 7))
    assert FirstMasks("mask", masks, 1).typical == masks[2:3]


def test_data_that_cannot_be_read_are_one_line(tmp_path):
    store = masked_store(tmp_path)
    short = first_masks(dataclasses.replace(configured(store), seq=10**6))
    assert short.masks == ()
    assert short.describe().startswith("the masks cannot be read (seq=1000000: data.path=")
    assert short.describe().endswith("smaller seq), so causal documents are assumed")
    missing = first_masks(configured(store).changed(data={"path": None}))
    assert "cannot be read (data.path is not set), so" in missing.describe()
    plan = make_plan(configured(store).changed(data={"path": None}))
    causal = make_plan(configured(store).changed(data={"mask_key": None}))
    assert plan.flops == causal.flops
