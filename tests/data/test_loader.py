"""Micro-batches of each data-parallel rank."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.corpora import Corpus
from mtrain_cli.data.dataset import PackedDataset, Sample
from mtrain_cli.data.loader import Loader
from mtrain_cli.data.sampler import Sampler
from mtrain_cli.data.store import StoreWriter
from mtrain_cli.data.tokenizers import ByteTokenizer


def _dataset(sequences: int = 13, seq: int = 6) -> PackedDataset:
    """Sequence i begins with token i, so that a sample tells which one it is."""
    writer = StoreWriter.in_memory(ByteTokenizer())
    for number in range(sequences):
        writer.append(np.full(seq - 1, number))
        writer.end_document()
    return PackedDataset(
        writer.memory_store(Corpus("", "", "", ())),
        seq,
        shuffle=False,
    )


def _loader(
    dataset: PackedDataset,
    dp_rank: int = 0,
    dp: int = 1,
    global_batch: int = 4,
    micro_batch: int = 1,
    seed: int = 0,
) -> Loader:
    return Loader(
        dataset,
        Sampler(len(dataset), seed),
        dp_rank,
        dp,
        global_batch,
        micro_batch,
        lambda samples: samples,
    )


def _names(step: list[list[Sample]]) -> list[int]:
    return [int(sample.tokens[0]) for micro_batch in step for sample in micro_batch]


@settings(deadline=None, max_examples=30)
@given(
    dp=st.integers(1, 4),
    micro_batches=st.integers(1, 3),
    micro_batch=st.integers(1, 3),
    sequences=st.integers(1, 15),
    seed=st.integers(0, 9),
)
def test_all_ranks_together_get_the_next_sequences_for_any_dp(
    dp: int, micro_batches: int, micro_batch: int, sequences: int, seed: int
) -> None:
    dataset = _dataset(sequences)
    global_batch = dp * micro_batches * micro_batch
    loaders = [_loader(dataset, rank, dp, global_batch, micro_batch, seed) for rank in range(dp)]
    reference = Sampler(sequences, seed)
    for step in range(5):
        parts = [next(loader) for loader in loaders]
        for part in parts:
            assert [len(samples) for samples in part] == [micro_batch] * micro_batches
        expected = [
            reference.sequence(number)
            for number in range(step * global_batch, (step + 1) * global_batch)
        ]
        assert [name for part in parts for name in _names(part)] == expected
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize(("dp", "new_dp"), [(1, 1), (2, 1), (1, 4), (4, 2)])
def test_resume_continues_the_data_order_on_any_number_of_ranks(dp: int, new_dp: int) -> None:
    dataset = _dataset()
    with _loader(dataset, seed=5) as whole:
        expected = [_names(next(whole)) for _ in range(9)]
    loaders = [_loader(dataset, rank, dp, seed=5) for rank in range(dp)]
    for _ in range(4):
        for loader in loaders:
            next(loader)
    states = [loader.state() for loader in loaders]
    assert all(
        state
        == {
            "seed": 5,
            "consumed": 16,
            "sequences": 13,
            "fingerprint": dataset.fingerprint,
            "samples": {},
        }
        for state in states
    )
    restored = [_loader(dataset, rank, new_dp, seed=1) for rank in range(new_dp)]
    for loader in restored:
        next(loader)  # what was read ahead must not come back
        loader.load_state(states[0])
    for step in range(4, 9):
        assert [name for loader in restored for name in _names(next(loader))] == expected[step]
    for loader in (*loaders, *restored):
        loader.close()


def test_state_of_another_corpus_is_refused() -> None:
    with (
        _loader(_dataset(13)) as loader,
        _loader(_dataset(14)) as other,
        pytest.raises(ConfigError, match="The data changed since the checkpoint"),
    ):
        other.load_state(loader.state())


def test_the_next_step_is_read_once_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    read, threads, real = threading.Semaphore(0), [], PackedDataset.__getitem__

    def noting(self: PackedDataset, index: int) -> Sample:
        threads.append(threading.current_thread())
        read.release()
        return real(self, index)

    monkeypatch.setattr(PackedDataset, "__getitem__", noting)
    with _loader(_dataset()) as loader:
        for _ in range(3):
            next(loader)
        for _ in range(4 * 4):
            assert read.acquire(timeout=5), "the fourth step is read only on demand"
    assert len(threads) == 4 * 4
    assert threading.main_thread() not in threads


def test_loading_a_state_waits_for_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both use the sampler."""
    real, reads = PackedDataset.__getitem__, 0
    reading, release, finished = threading.Event(), threading.Event(), threading.Event()

    def slow_second(self: PackedDataset, index: int) -> Sample:
        nonlocal reads
        reads += 1
        if reads == 2:
            reading.set()
            release.wait(5)
            finished.set()
        return real(self, index)

    monkeypatch.setattr(PackedDataset, "__getitem__", slow_second)
    with _loader(_dataset(), global_batch=1) as loader:
        state = loader.state()
        next(loader)
        assert reading.wait(5)
        threading.Timer(0.2, release.set).start()
        loader.load_state(state)
        assert finished.is_set()


def test_next_raises_reading_errors_and_loses_no_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(_self: PackedDataset, _index: int) -> Sample:
        raise ConfigError("the store is corrupt")

    with _loader(_dataset()) as whole:
        expected = _names(next(whole))
    with _loader(_dataset()) as loader:
        with monkeypatch.context() as patched:
            patched.setattr(PackedDataset, "__getitem__", broken)
            with pytest.raises(ConfigError, match="the store is corrupt"):
                next(loader)
        assert loader.state()["consumed"] == 0
        assert _names(next(loader)) == expected


@pytest.mark.parametrize(
    ("dp", "global_batch", "micro_batch", "key"),
    [(2, 3, 1, "global_batch=3"), (2, 8, 3, "global_batch=8"), (1, 0, 1, "global_batch=0")],
)
def test_batch_sizes_that_do_not_divide_are_refused(
    dp: int, global_batch: int, micro_batch: int, key: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^train\.{key}: must"):
        _loader(_dataset(), 0, dp, global_batch, micro_batch)


def test_close_waits_for_one_sequence_only_and_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a slow disk, waiting for a step of 64 sequences would delay Ctrl-C by minutes."""
    read, real = threading.Semaphore(0), PackedDataset.__getitem__
    closing = threading.Event()
    count = 0

    def slow(self: PackedDataset, index: int) -> Sample:
        nonlocal count
        count += 1
        read.release()
        if count > 12:
            closing.wait(5)
        return real(self, index)

    monkeypatch.setattr(PackedDataset, "__getitem__", slow)
    others = set(threading.enumerate())  # for example of loaders that earlier tests left open
    loader = _loader(_dataset(), global_batch=12)
    next(loader)
    for _ in range(13):
        assert read.acquire(timeout=5)
    threading.Timer(0.1, closing.set).start()
    loader.close()
    assert count < 24, "the reader stops in the middle of the step"
    assert not [
        thread
        for thread in set(threading.enumerate()) - others
        if thread.name.startswith("mtrain-data")
    ]


def test_a_file_with_other_bytes_than_at_the_checkpoint_is_named() -> None:
    dataset = _dataset()
    dataset.samples = {"a/tokens.bin": "1", "b": "2"}
    with _loader(dataset) as loader:
        state = loader.state()
        loader.load_state(state)
        loader.load_state({**state, "samples": {"gone": "3"}})
        del state["samples"]["b"]
        loader.load_state(state)
        dataset.samples = {"a/tokens.bin": "0", "b": "2"}
        with pytest.raises(ConfigError, match=r"checkpoint: a/tokens\.bin has other bytes"):
            loader.load_state(state)
        del state["samples"]  # a checkpoint of an earlier version
        loader.load_state(state)
