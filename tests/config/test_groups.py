"""The groups and options in the configuration folders."""

from mtrain_cli.config.groups import default_options, open_groups, summary


def test_the_users_folder_comes_before_the_shipped_one(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/tiny.yaml").write_text("name: mine\n")
    (tmp_path / "model/.hidden").mkdir()
    (tmp_path / "model/.hidden/x.yaml").write_text("name: x\n")
    groups = open_groups(tmp_path)
    assert groups.options["model"]["tiny"] == tmp_path / "model/tiny.yaml"
    assert groups.options["model"]["qwen3b"] == open_groups().options["model"]["qwen3b"]
    assert not any("hidden" in group or group == "cluster" for group in groups.options)
    assert groups.groups_of("tiny") == ["model"]


def test_defaults_are_read_from_entries_with_and_without_override():
    entries = ["_self_", {"override /model": "qwen3b"}, {"data": "text"}]
    assert default_options({"defaults": entries}) == {"model": "qwen3b", "data": "text"}
    assert default_options({}) == {}


def test_the_summary_is_the_first_comment_above_the_keys(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("# @package _global_\n# What it is.\n# More.\nseq: 4k\n")
    assert summary(file) == "What it is."
    file.write_text("seq: 4k\n# Too late.\n")
    assert summary(file) == ""
