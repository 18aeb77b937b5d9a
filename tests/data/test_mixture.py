"""Mix several corpora by weight: shares, no repeats within an epoch, an order independent of
workers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.loader import Loader
from mtrain_cli.data.mixture import MixedDataset, MixtureSampler, parse_mix
from mtrain_cli.data.open_dataset import open_dataset
from mtrain_cli.data.sampler import Permutation, mix64

_SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=5)


@settings(deadline=None, max_examples=60)
@given(sizes=_SIZES, seed=st.integers(0, 2**40), data=st.data())
def test_shares_hold_in_every_block_and_no_sequence_repeats_in_an_epoch(
    sizes: list[int], seed: int, data: st.DataObject
) -> None:
    weights = data.draw(st.lists(st.floats(0.01, 1), min_size=len(sizes), max_size=len(sizes)))
    sampler = MixtureSampler(sizes, weights, seed)
    total, starts = sum(weights), np.cumsum([0, *sizes])
    order = [sampler.sequence(number) for number in range(3 * sampler.block)]
    assert all(0 <= index < sum(sizes) for index in order)
    for end in range(sampler.block, len(order) + 1, sampler.block):
        for corpus, weight in enumerate(weights):
            here = [index for index in order[:end] if starts[corpus] <= index < starts[corpus + 1]]
            assert abs(len(here) - end * weight / total) < 1 + 1e-6
            times = Counter(here)
            counts = [times[index] for index in range(starts[corpus], starts[corpus + 1])]
            assert max(counts) - min(counts) <= 1, (
                "all sequences of a pass come before any of the next"
            )
    # The place depends on the number only, not on earlier calls.
    other = MixtureSampler(sizes, weights, seed)
    other.advance(99)
    assert [other.sequence(number) for number in reversed(range(len(order)))] == order[::-1]


def _repeats(order: list[int], sizes: list[int]) -> list[int]:
    """Return the numbers whose sequence already came in the same epoch of its corpus."""
    starts, drawn, found = np.cumsum([0, *sizes]), [0] * len(sizes), []
    passes: list[set[int]] = [set() for _ in sizes]
    for number, index in enumerate(order):
        corpus = int(np.searchsorted(starts, index, side="right")) - 1
        if drawn[corpus] % sizes[corpus] == 0:
            passes[corpus] = set()
        found += [number] if index in passes[corpus] else []
        passes[corpus].add(index)
        drawn[corpus] += 1
    return found


@settings(deadline=None, max_examples=60)
@given(sizes=_SIZES, seed=st.integers(0, 2**40), data=st.data())
def test_no_sequence_repeats_before_its_corpus_is_used_up(
    sizes: list[int], seed: int, data: st.DataObject
) -> None:
    weights = data.draw(st.lists(st.floats(0.01, 1), min_size=len(sizes), max_size=len(sizes)))
    sampler = MixtureSampler(sizes, weights, seed)
    assert (
        _repeats([sampler.sequence(number) for number in range(2 * sampler.block + 30)], sizes)
        == []
    )


def _earlier(sampler: MixtureSampler, number: int) -> int:
    """Return sequence `number` in the order of earlier versions.

    There the slot in a block was the count in the corpus.
    """
    block, slot = divmod(number, sampler.block)
    slot = Permutation(sampler.block, mix64(sampler.seed, -1, block))(slot)
    for corpus, (first, end) in enumerate(
        zip(*(sampler._counts_before(b * sampler.block) for b in (block, block + 1)), strict=True)
    ):
        if slot < end - first:
            epoch, position = divmod(first + slot, sampler.sizes[corpus])
            inside = Permutation(sampler.sizes[corpus], mix64(sampler.seed, corpus, epoch))(
                position
            )
            return sampler._starts[corpus] + inside
        slot -= end - first
    raise AssertionError


@pytest.mark.parametrize("consumed", [0, 100, 128])
def test_a_checkpoint_of_an_earlier_version_finishes_its_block_in_the_old_order(
    consumed: int,
) -> None:
    sampler = MixtureSampler([260, 140, 220], [0.5, 0.2, 0.3], 7)
    sampler.sequence(consumed)  # as in a run that started before this version
    sampler.load_state({"seed": 7, "consumed": consumed})
    border = -(-consumed // sampler.block) * sampler.block
    assert border in (0, 128)
    order = [_earlier(sampler, number) for number in range(consumed)] + [
        sampler.sequence(number) for number in range(consumed, 400)
    ]
    assert order[consumed:border] == [
        _earlier(sampler, number) for number in range(consumed, border)
    ]
    assert order[border : border + 64] != [
        _earlier(sampler, number) for number in range(border, border + 64)
    ]
    assert len(set(order[:300])) == 300, "nothing is lost or repeated where the order changes"
    # A run that continues from there and is resumed later keeps both parts.
    sampler.consumed = consumed + 10
    again = MixtureSampler([260, 140, 220], [0.5, 0.2, 0.3], 1)
    again.load_state(sampler.state())
    assert [again.sequence(number) for number in range(consumed + 10, 400)] == order[
        consumed + 10 :
    ]


def _folders(jsonl: Callable[..., Path], tmp_path: Path) -> Path:
    for name, letter, count in (("code", "c", 40), ("book", "b", 25)):
        jsonl([f"{letter}{number:03}" * 15 for number in range(count)], f"{name}/a.jsonl")
    return tmp_path


def test_resume_continues_a_mixture_exactly_on_any_number_of_workers(
    make_config: Callable[..., Any], jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    config = make_config(
        kind="text",
        path=str(_folders(jsonl, tmp_path)),
        mix={"code": 1.0, "book": 3.0},
        seq=32,
        seed=5,
    )
    dataset = open_dataset(config)
    assert isinstance(dataset, MixedDataset)

    def loader(rank: int, dp: int) -> Loader:
        return Loader(
            dataset,
            dataset.sampler(config.seed),
            rank,
            dp,
            4,
            1,
            lambda samples: [s.tokens.tobytes() for s in samples],
        )

    with loader(0, 1) as whole:
        expected = [[tokens for micro in next(whole) for tokens in micro] for _ in range(20)]
    letters = [
        bytes(np.frombuffer(tokens, np.int32).astype(np.uint8))
        for step in expected[:16]
        for tokens in step
    ]
    assert sum(b"b" in text for text in letters) in (47, 48, 49), "three of four in the first block"
    first = [loader(rank, 2) for rank in range(2)]
    for _ in range(7):
        for one in first:
            next(one)
    state = first[0].state()
    second = [loader(rank, 4) for rank in range(4)]
    for one in second:
        one.load_state(state)
    for step in range(7, 20):
        assert [tokens for one in second for micro in next(one) for tokens in micro] == expected[
            step
        ]
    other = open_dataset(
        make_config(kind="text", path=str(tmp_path), mix={"code": 1.0, "book": 2.0}, seq=32, seed=5)
    )
    with (
        Loader(other, other.sampler(5), 0, 1, 4, 1, lambda samples: samples) as changed,
        pytest.raises(ConfigError, match="data changed"),
    ):
        changed.load_state(state)
    for one in (*first, *second):
        one.close()


def test_held_out_sequences_are_of_every_corpus_and_are_never_trained_on(
    make_config: Callable[..., Any], jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    config = make_config(
        kind="text",
        path=str(_folders(jsonl, tmp_path)),
        mix={"code": 9.0, "book": 1.0},
        seq=64,
        eval_sequences=4,
        document_mask=False,
    )
    dataset = open_dataset(config)
    held = [sample.tokens.tobytes() for sample in dataset.held_out]
    assert len(held) == 5
    trained = {dataset[number].tokens.tobytes() for number in range(len(dataset))}
    assert not trained & set(held)
    alone = open_dataset(
        make_config(kind="text", path=str(tmp_path / "book"), seq=64, eval_sequences=3)
    )
    plain = open_dataset(make_config(kind="text", path=str(tmp_path / "book"), seq=64))
    assert len(alone) == len(plain) - 3
    assert [s.tokens.tolist() for s in alone.held_out] == [
        plain[len(plain) - 3 + k].tokens.tolist() for k in range(3)
    ]
    with pytest.raises(
        ConfigError, match=r"^data.eval_sequences=50: .* so none would be left to train on"
    ):
        open_dataset(
            make_config(kind="text", path=str(tmp_path / "book"), seq=64, eval_sequences=50)
        )


def test_weights_come_from_the_command_line_a_group_or_a_file(tmp_path: Path) -> None:
    for name in ("code", "book"):
        (tmp_path / name).mkdir()
    (tmp_path / "mix.yaml").write_text("code: 3\nbook: 7\n")
    words = ["data=mds", f"data.path={tmp_path}"]
    assert compose([*words, "data.mix={code: 0.3, book: 0.7}"]).data.mix == {
        "code": 0.3,
        "book": 0.7,
    }
    named = compose([*words, f"data.mix={tmp_path / 'mix.yaml'}"]).data.mix
    assert parse_mix(named) == parse_mix({"code": 0.3, "book": 0.7})  # type: ignore[arg-type]
    replaced = compose(["data=prolong512k", f"data.path={tmp_path}", "data.mix={book: 1}"]).data.mix
    assert replaced == {"book": 1.0}, "not merged with the twelve weights of the group"
    assert math.isclose(sum(parse_mix({"a": 2, "b": 5}).values()), 1.0)


@pytest.mark.parametrize(
    ("mix", "expected"),
    [
        (
            "{code: -1, book: 2}",
            "data.mix={code:-1,book:2}: the weight of code must be above 0",
        ),
        ("{code: 0, book: 2}", "the weight of code must be above 0"),
        ("{code: much}", "expected numbers by name such as {code: 0.3, book: 0.7}"),
        ("{}", "names no corpus"),
        ("{code: 1, novels: 1}", "data.mix: novels: no such folder or file in data.path="),
        ("nowhere.yaml", "no such file; give weights such as {code: 0.3, book: 0.7}"),
        ("{code: 1", "expected numbers by name"),
    ],
)
def test_wrong_weights_are_refused_in_one_line(tmp_path: Path, mix: str, expected: str) -> None:
    for name in ("code", "book"):
        (tmp_path / name).mkdir()
    with pytest.raises(ConfigError) as caught:
        compose(["data=mds", f"data.path={tmp_path}", f"data.mix={mix}"])
    (line,) = caught.value.problems
    assert line.startswith("data.mix")
    assert expected in line
