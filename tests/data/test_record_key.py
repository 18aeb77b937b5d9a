"""Messages about the key of a record."""

from mtrain_cli.data.record_key import RecordKey

KEY = RecordKey("body", "--text-key")


def test_a_missing_key_names_the_first_keys_that_exist() -> None:
    assert str(KEY.missing_error("a.jsonl line 3", ["id", "text"])) == (
        "--text-key body: a.jsonl line 3 has no such key. Its keys: id, text"
    )
    assert str(KEY.missing_error("a.jsonl", [])).endswith("Its keys: none")
    assert str(KEY.missing_error("a.jsonl", map(str, range(99)))).endswith("9, 10, 11")


def test_a_wrong_value_names_its_place() -> None:
    assert str(KEY.value_error("a.jsonl line 3", "holds 4, not text")) == (
        "--text-key body: a.jsonl line 3 holds 4, not text"
    )
