"""Documents of token ids: what their records may hold."""

from typing import Any

import numpy as np
import pytest

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.token_documents import KINDS, RecordKey, TokenDocument, TokenFields

TOKENS, MASK = RecordKey("ids", "--tokens-key"), RecordKey("mask", "--mask-key")
FIELDS = TokenFields(TOKENS, MASK, RecordKey("at", "--positions-key"))
STRIDED = [[0, 17, 0, 17, "causal"], *([17, 40, 2 * k, 2 * k + 1, 0] for k in range(17))]


def read(**record: Any) -> TokenDocument | None:
    return FIELDS.read({"mask": None, "at": None, **record}, "a.jsonl line 3")


def test_values_are_read() -> None:
    mask = [[0, 2, 0, 2, "causal"], [2, 3, 0, 1, "full"], (2, 3, 2, 3, 3)]
    document = read(ids=[5, 6, 7], mask=mask, at=[0, 1, 1])
    assert document.ids.tolist() == [5, 6, 7]
    assert document.slices.tolist() == [[0, 2, 0, 2, 1], [2, 3, 0, 1, 0], [2, 3, 2, 3, 3]]
    assert document.positions.tolist() == [0, 1, 1]
    assert document.intervals == 2
    plain = read(ids=np.array([5, 6], np.uint16))
    assert (plain.ids.dtype, plain.slices, plain.positions, plain.intervals) == (
        np.int64,
        None,
        None,
        1,
    )


def test_the_kinds_are_those_of_slices() -> None:
    assert KINDS == {"full": 0, "causal": 1, "inverse": 2, "bicausal": 3}


@pytest.mark.parametrize("ids", [None, []])
def test_a_record_without_tokens_is_no_document(ids: list[int] | None) -> None:
    assert read(ids=ids) is None


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"ids": "text"}, "--tokens-key ids: a.jsonl line 3 holds 'text', not a list of integers"),
        ({"ids": [1, 2.5]}, "holds [1, 2.5], not a list of integers"),
        ({"ids": [1, [2]]}, "holds [1, [2]], not a list of integers"),
        ({"ids": [2**64]}, "not a list of integers"),
        ({"ids": [True, False]}, "not a list of integers"),
        ({"ids": np.array([1, np.nan])}, "holds [1.0, nan], not a list of integers"),
        ({"mask": []}, "--mask-key mask: a.jsonl line 3 holds []. Give a list of slices"),
        ({"mask": "causal"}, "holds 'causal'. Give a list of slices"),
        ({"mask": [[0, 4, 0, 4]]}, "holds [0, 4, 0, 4]. Give a list of slices [query start"),
        ({"mask": [[0, 4, 0, 4.0, 1]]}, "holds [0, 4, 0, 4.0, 1]. Give a list of slices"),
        ({"mask": [0, 4, 0, 4, 1]}, "holds 0. Give a list of slices"),
        ({"mask": [[0, 4, 0, 4, True]]}, "Give a list of slices"),
        ({"mask": [[0, 4, 0, 2**70, 1]]}, "Give a list of slices"),
        ({"mask": [np.array([0, 4, -(2**63), 4, 1])]}, "Give a list of slices"),
        (
            {"mask": [[0, 4, 0, 4, "casual"]]},
            "holds [0, 4, 0, 4, 'casual']. Give a list of slices",
        ),
        ({"mask": [[0, 4, 0, 4, 4]]}, "is wrong: The slice [0, 4, 0, 4, 4] of"),
        (
            {"mask": [[0, 5, 0, 4, 0]]},
            "is wrong: The slice [0, 5, 0, 4, 0] of (query start, query stop, key start, key stop, "
            "kind) does not lie in a sequence of 4 tokens",
        ),
        ({"mask": [[3, 1, 0, 4, 0]]}, "does not lie in a sequence of 4 tokens"),
        ({"mask": [[0, 4, -1, 4, 0]]}, "does not lie in a sequence of 4 tokens"),
        (
            {"ids": [1] * 40, "mask": STRIDED},
            "is wrong: The query at position 17 sees 17 separate intervals of keys; allowed: at "
            "most 16. Merge slices into wider ones",
        ),
        (
            {"mask": [[0, 4, 0, 4, 0]] * 65},
            "names each query in 65 slices on average; at most 64 are allowed",
        ),
        ({"at": [0, 1, 2]}, "--positions-key at: a.jsonl line 3 holds 3 positions for 4 tokens"),
        ({"at": [0, 1, 2, -1]}, "holds the position -1. Give positions from 0 to 67,108,863."),
        ({"at": [0, 1, 2, 2**26]}, "holds the position 67108864."),
        ({"at": [0, 1, 2, None]}, "holds [0, 1, 2, None], not a list of integers"),
    ],
)
def test_a_wrong_value_is_one_clear_line(record: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**{"ids": [1, 2, 3, 4], **record})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("--")


def test_sixteen_intervals_are_allowed() -> None:
    assert read(ids=[1] * 40, mask=STRIDED[:-1]).intervals == 16


def test_long_values_are_shown_in_short() -> None:
    with pytest.raises(ConfigError) as caught:
        read(ids="x" * 10_000)
    assert len(str(caught.value)) < 200


def test_only_wanted_keys_are_read() -> None:
    fields = TokenFields(TOKENS)
    assert [key.name for key in fields.keys] == ["ids"]
    assert fields.read({"ids": [1], "mask": "broken"}, "").slices is None
    identities = [fields.identity, FIELDS.identity, TokenFields(TOKENS, MASK).identity]
    identities.append(TokenFields(TOKENS, None, RecordKey("mask", "--positions-key")).identity)
    assert len(set(identities)) == 4
