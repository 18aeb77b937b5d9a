import re

import pytest
from typer.testing import CliRunner

from mtrain_cli.commands.app import app
from mtrain_cli.config.groups import open_groups
from mtrain_cli.config.keys import all_keys
from mtrain_cli.config.pattern_settings import PATTERNS


def run(*words: str):
    return CliRunner().invoke(app, ["config", *words], prog_name="mtrain")


def shown(option: str) -> dict[str, str]:
    """Return the line of each override that `config show` prints, by key."""
    lines = run("show", option).stdout.splitlines()[1:]
    pairs = [(line.split()[0].partition("="), line.rstrip()) for line in lines if "=" in line]
    return {key: line for (key, _, _), line in pairs}


def test_list_names_every_option_and_top_level_key_on_a_line_of_its_own():
    lines = [line.split() for line in run("list").stdout.splitlines()]
    for group, options in open_groups().options.items():
        for option in options:
            (line,) = (words for words in lines if words and words[0] == f"{group}={option}")
            assert ("default" in line[1:2]) == (open_groups().defaults[group] == option)
            assert len(line) > 2, "and says what it is"
    assert {"seq=...", "seed=..."} <= {words[0] for words in lines if words}


# Dense attention, the default, has no keys.
ABSENT = {
    "sparsity": [
        name for name in all_keys() if name.startswith("sparsity.") and name != "sparsity.pattern"
    ],
    "mask": [name for name in all_keys() if name.startswith("mask.") and name != "mask.kind"],
}


@pytest.mark.parametrize("name", PATTERNS)
def test_show_lists_only_the_keys_of_the_pattern_with_their_ranges(name):
    rows = shown(f"sparsity/{name}")
    assert sorted(rows) == sorted(
        f"sparsity.{key}" for key in ("pattern", *PATTERNS[name].own_keys())
    )
    ranges = {
        "sparsity.p_v": "number, above 0 and at most 1",
        "sparsity.block": "tokens, 16, 32, 64 or 128",
        "sparsity.joint": "true or false",
        "sparsity.max_columns": "whole number, 0 or more",
        "sparsity.stride": "whole number, at least 1, at most 128 (no block is larger)",
        "sparsity.index_per": "query_head, kv_group",
    }  # fmt: skip
    for key, text in ranges.items():
        assert key not in rows or rows[key].endswith(f"  {text}"), key


@pytest.mark.parametrize("group", open_groups().options)
def test_show_gives_value_help_and_allowed_words_of_every_key(group):
    option = open_groups().defaults[group]
    rows = shown(f"{group}/{option}")
    keys = [
        key
        for key in all_keys().values()
        if key.name.startswith(f"{group}.") and key.name not in ABSENT.get(group, ())
    ]
    assert list(rows) == [key.name for key in keys]
    for key in keys:
        assert key.help in rows[key.name]
        assert rows[key.name].endswith(key.allowed)


def test_show_gives_the_values_of_that_option():
    rows = shown("model/qwen3b")
    for override in ("model.num_layers=36", "model.rope.theta=1000000", "model.rope.factor=auto"):
        assert rows[override.partition("=")[0]].split()[0] == override


def test_show_accepts_a_group_alone_and_an_equals_sign():
    assert (
        run("show", "model").stdout
        == run("show", "model/tiny").stdout
        == run("show", "model=tiny").stdout
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("modle/tiny", "no such group (did you mean model?); allowed: data, eval, mask, model, "),
        ("model/tinny", "no such model (did you mean tiny?); allowed: auto, llama14b, "),
        ("seq", "seq: is a key, not a group; `mtrain config list` shows it"),
        ("optim.lr", "optim.lr: is a key, not a group; `mtrain config show optim` shows it"),
        ("sparsity.p_v", "`mtrain config show sparsity` shows it"),
        ("sparsity.pattern", "`mtrain config show sparsity` shows it"),
        ("", "is empty; give a value"),
    ],
)
def test_an_unknown_option_is_one_line(name, message):
    result = run("show", name)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_own_groups_are_listed_and_shown(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine.yaml").write_text("# My own.\ndefaults: [tiny]\nname: mine\n")
    assert "My own." in run("list", "--config-dir", str(tmp_path)).stdout
    assert "mine" in run("show", "model/mine", "--config-dir", str(tmp_path)).stdout


def test_list_names_every_key():
    text = run("list").stdout.partition("Keys\n")[2]
    lines = [line.replace(",", " ").split() for line in text.splitlines() if line.strip()]
    names = {line[0]: line[1:] for line in lines}
    for name in all_keys():
        group, dot, rest = name.partition(".")
        assert not dot or rest in names[f"{group}."], name


@pytest.mark.parametrize("columns", [40, 80, 120])
@pytest.mark.parametrize(
    "words",
    [("list",), *(("show", f"{name}") for name in ("train", "recipe/prolong_llama8b_512k"))],
)
def test_output_wraps_at_the_terminal_width_without_truncation(words, columns, monkeypatch):
    whole = run(*words).stdout
    monkeypatch.setenv("COLUMNS", str(columns))
    folded = run(*words).stdout
    long = [line for line in folded.splitlines() if len(line) > columns]
    assert all(len(line.split()) == 1 or line.startswith("`mtrain config") for line in long)
    assert "…" not in folded
    overrides = (word for word in whole.split() if re.match(r"[a-z_.]+=\S+$", word))
    assert all(override in "".join(folded.split()) for override in overrides)
