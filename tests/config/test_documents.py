import math
from dataclasses import dataclass
from pathlib import Path

import pytest

import mtrain_cli
from mtrain_cli.config import documents
from mtrain_cli.config.documents import (
    UnreadableError,
    checked,
    is_number,
    json_object,
    json_text,
    read_json,
    read_yaml,
)


@dataclass(frozen=True)
class Inner:
    name: str


@dataclass(frozen=True)
class Thing:
    step: int
    loss: float = 0.0
    seconds: float | None = None
    pairs: tuple[tuple[float, str], ...] = ()
    inner: Inner | None = None


def test_aliases_do_not_make_a_small_file_endless(tmp_path):
    file = tmp_path / "bomb.yaml"
    lists = [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 9)]
    file.write_text("\n".join(["l0: &l0 [1]", *lists]))
    with pytest.raises(UnreadableError, match="nested too deeply, or holds too many"):
        read_yaml(file)
    file.write_text("a: &x {b: [*x]}")
    with pytest.raises(UnreadableError, match="nested too deeply"):
        read_yaml(file)
    file.write_text("\n".join(["l0: &l0 [1]", *lists[:3]]))
    assert len(read_yaml(file)["l3"]) == 10


def test_written_json_has_null_for_numbers_that_json_lacks():
    nan, inf = float("nan"), float("inf")
    text = json_text({"a": nan, "b": [1, (-inf, 2.5)], "c": {"d": inf, "e": "NaN"}, "f": None})
    assert text == '{"a": null, "b": [1, [null, 2.5]], "c": {"d": null, "e": "NaN"}, "f": null}'
    assert json_text([1], indent=1) == "[\n 1\n]"


def test_a_json_object_becomes_a_dataclass_without_unknown_keys():
    thing = checked(
        Thing, {"step": 3, "loss": 2, "pairs": [[1.5, "a"]], "inner": {"name": "x"}, "later": 1}
    )
    assert thing == Thing(3, 2.0, None, ((1.5, "a"),), Inner("x"))
    assert checked(Thing, {"step": 3, "loss": float("inf")}).loss == float("inf"), (
        "a loss may be infinite"
    )
    assert checked(Thing, {"step": 3}, nulls=True).loss is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "step is missing"),
        ({"step": "3"}, 'step="3" has the wrong type'),
        ({"step": True}, "step=true"),
        ({"step": 10**400}, "step="),
        ({"step": 1, "seconds": float("nan")}, "seconds=NaN"),
        ({"step": 1, "pairs": [[1, 2]]}, "pairs=2"),
        ({"step": 1, "pairs": 3}, "pairs=3"),
        ({"step": 1, "inner": []}, "inner=[]"),
        ([], "it is not a JSON object"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(values, message):
    with pytest.raises(UnreadableError) as caught:
        checked(Thing, values)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "line 1, column 1: expecting value"),
        (b'{"a": 1,\n "b" 2}', "line 2, column 6: expecting ':' delimiter"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b"\xff\xfe", "it is not text: byte 1 is not UTF-8"),
        (b"9" * 5000, "a number has too many digits"),
    ],
)
def test_broken_json_is_reported_with_its_position(tmp_path, data, message):
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(UnreadableError) as caught:
        read_json(tmp_path / "a.json")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a: 1\nb: [2\nc: 3\n", "line 3, column 2: "),
        (b"[" * 5000, "it is nested too deeply"),
        (b"a: 2020-99-99", "month must be in 1..12"),
        (b"\xff\xfe\xfa", "it is not text: byte 1 is not UTF-8"),
    ],
)
def test_broken_yaml_is_reported_with_its_position(tmp_path, data, message):
    (tmp_path / "a.yaml").write_bytes(data)
    with pytest.raises(UnreadableError) as caught:
        read_yaml(tmp_path / "a.yaml")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("text", ["[]", "3", "null", '{"a": ', "[" * 100_000, b'{"\xff": 1}', ""])
def test_other_texts_are_no_json_objects(text):
    assert json_object(text) is None
    assert json_object('{"a": 1}') == {"a": 1}


def test_every_command_prints_strict_json():
    commands = Path(mtrain_cli.__file__).parent / "commands"
    loose = [file.name for file in commands.glob("*.py") if "echo(json.dumps(" in file.read_text()]
    assert loose == []


def test_numbers_fit_in_int64_or_are_below_1e18():
    assert [is_number(value) for value in (2**63 - 1, 2**63, -(2**63) + 1, -(2**63))] == [
        True, False, True, False,
    ]  # fmt: skip
    assert [is_number(value) for value in (math.nextafter(1e18, 0), 1e18)] == [True, False]


def test_yaml_may_be_nested_100_times(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("[" * 101 + "]" * 101)  # 100 lists inside the first one
    assert len(read_yaml(file)) == 1
    file.write_text("[" * 102 + "]" * 102)
    with pytest.raises(UnreadableError, match="nested too deeply"):
        read_yaml(file)


@pytest.mark.parametrize(("most", "is_refused"), [(4, False), (3, True)])
def test_yaml_may_hold_as_many_values_as_the_limit(tmp_path, monkeypatch, most, is_refused):
    monkeypatch.setattr(documents, "_MOST_VALUES", most)
    file = tmp_path / "a.yaml"
    file.write_text("[1, 2, 3]")  # a list and three numbers
    if is_refused:
        with pytest.raises(UnreadableError, match="too many values"):
            read_yaml(file)
    else:
        assert read_yaml(file) == [1, 2, 3]
