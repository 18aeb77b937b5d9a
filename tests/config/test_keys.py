"""The table of all keys, and the conversion of values to the type of a key."""

import pytest

from mtrain_cli.config import keys

KEYS = keys.all_keys()


@pytest.mark.parametrize(
    ("name", "value", "converted"),
    [
        ("seq", "4k", 4096),
        ("optim.lr", 1, 1.0),
        ("optim.lr", "auto", "auto"),
        ("optim.betas", [0, 0.5], (0.0, 0.5)),
        ("train.steps", 1000.0, 1000),
        ("train.keep_mlp", 3, 3),
        ("data.path", None, None),
        ("data.mix", {"a": 1}, {"a": 1.0}),
        ("run.name", 7, "7"),
        ("mask.window", ["2", 3, 4], (2, 3, 4)),
        ("mask.window", "4k", 4096),
        ("topology.balanced_chunk", "4k", 4096),
        ("topology.balanced_chunk", "auto", "auto"),
    ],
)
def test_a_value_gets_the_type_of_its_key(name, value, converted):
    result = KEYS[name].convert(value)
    assert (result, type(result)) == (converted, type(converted))


WINDOW = (
    r"expected a number of tokens .* with mask=sliding_window, or a list of .* with mask=video$"
)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("train.steps", 1.5, "expected a whole number"),
        ("train.steps", True, "expected a whole number"),
        ("train.keep_mlp", "some", "expected true, false or a whole number"),
        ("sparsity.last_q", "8k", "expected a whole number"),
        ("data.path", 1.5j, "expected text or null"),
        ("optim.betas", [0.9], r"expected a list of 2 numbers such as \[0.9,0.9\]"),
        ("mask.window", [2, 3], WINDOW),
        ("mask.window", [2, 3, "x"], WINDOW),
        ("mask.window", 4.5, WINDOW),
        ("mask.window", True, WINDOW),
        ("topology.balanced_chunk", "many", r"expected a number of tokens .* 1024 k\), or auto$"),
        ("seq", "auto", r"expected a number of tokens .* 1024 k\)$"),
        ("train.kernel", "flash5", r"expected one of .* \(did you mean flash4\?\)"),
        ("data.path", "a\nb", "holds a control character"),
    ],
)
def test_a_wrong_value_says_what_is_expected(name, value, expected):
    with pytest.raises(ValueError, match=f"^{expected}"):
        KEYS[name].convert(value)


def test_a_nested_mapping_flattens_to_dotted_names_except_a_mapping_value():
    nested = {"data": {"mix": {"a": 1}, "path": "x"}, "seq": 4}
    assert keys.flatten(nested) == {"data.mix": {"a": 1}, "data.path": "x", "seq": 4}
    assert "model.rope" in keys.sections()
    assert "seq" not in keys.sections()


def test_values_are_shown_as_a_user_types_them():
    shown = [keys.show(value) for value in (None, True, (0.5, 1.0), {"a": 2.0}, 1e20, "text")]
    assert shown == ["null", "true", "[0.5,1]", "{a:2}", "1e+20", "text"]
    assert keys.first_few(list("abcde")) == "a, b, c and 2 more"


def test_a_limit_that_nobody_reaches_is_left_out_of_tables():
    assert KEYS["optim.rewarm"].allowed == "true or false"
    assert KEYS["topology.balanced_chunk"].allowed.startswith("tokens or auto, a multiple of 16")
    assert KEYS["train.tile_mib"].allowed.endswith("at most 1,048,576 (1 TiB)")


def test_every_key_has_help():
    assert [key.name for key in keys.all_keys().values() if not key.help] == []
