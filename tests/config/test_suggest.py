import pytest

from mtrain_cli.config.keys import all_keys
from mtrain_cli.config.suggest import did_you_mean, nearest, no_such


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("warmup_steps", "optim.warmup_steps"),
        ("train.warmup_steps", "optim.warmup_steps"),
        ("lr", "optim.lr"),
        ("train.lr", "optim.lr"),
        ("optim.lrr", "optim.lr"),
        ("topolgy.layout", "topology.layout"),
        ("layuot", "topology.layout"),
        ("workers", "topology.workers"),
        ("Seq", "seq"),
        ("sed", "seed"),
        ("rope.theta", "model.rope.theta"),
        ("sequence", "seq"),
        ("sequence_length", "seq"),
        ("checkpoint.every", "train.checkpoint_every"),
    ],
)
def test_the_nearest_key_is_found_across_sections(word, name):
    assert nearest(word, all_keys()) == name


def test_nothing_is_suggested_when_no_name_is_close():
    assert nearest("zzzzzz", all_keys()) is None
    assert nearest("word", []) is None
    assert did_you_mean("zzzzzz", all_keys()) == ""


@pytest.mark.parametrize(("word", "name"), [("h200_4x8", "h200_1x8"), ("h300_4x8", "h100_4x8")])
def test_the_nearest_cluster_has_gpus_of_the_same_kind(word, name):
    assert nearest(word, ["b200_4x8", "h200_1x8", "h100_4x8", "local"]) == name


def test_every_key_is_nearest_to_itself():
    assert [name for name in all_keys() if nearest(name, all_keys()) != name] == []


def test_an_unknown_name_is_answered_with_the_names_that_exist():
    names = ["tiny", "qwen3b", "llama8b"]
    assert no_such("model", "tinny", names) == (
        "no such model (did you mean tiny?); allowed: tiny, qwen3b, llama8b"
    )
    assert no_such("model", "x", names, "a file", most=2) == (
        "no such model; allowed: tiny, qwen3b and 1 more, or a file"
    )
    assert no_such("run", "x", [], "a folder") == "no such run; allowed: a folder"
