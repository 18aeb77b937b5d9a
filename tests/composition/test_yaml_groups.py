"""Groups of YAML files compose: a user's own come first, and Hydra's global state survives."""

import re
import shutil
from pathlib import Path

import pytest
from composition.test_compose import complaints, write

from mtrain_cli import resource_dir
from mtrain_cli.composition import yaml_groups
from mtrain_cli.composition.compose import compose, resume
from mtrain_cli.config.groups import TOP, Groups, open_groups, summary
from mtrain_cli.config.resolved_file import load, save
from mtrain_cli.config.schema import ConfigError


@pytest.fixture
def mine(tmp_path) -> Path:
    """A folder of the user's own groups."""
    folder = tmp_path / "conf"
    (folder / "model").mkdir(parents=True)
    (folder / "model/small.yaml").write_text(
        "# Two layers.\ndefaults: [tiny]\nname: small\nnum_layers: 2\nrope: "
        "{original_max_position: 8k}\n"
    )
    return folder


def test_own_options_inherit_from_shipped_ones(mine):
    config = compose(["model=small"], mine)
    assert (config.model.name, config.model.num_layers, config.model.hidden_size) == (
        "small",
        2,
        compose().model.hidden_size,
    )
    assert config.model.rope.original_max_position == 8192
    assert config.model.rope.theta == compose().model.rope.theta


def test_own_options_are_searched_first(mine):
    shipped = (resource_dir("conf") / "sparsity/dense.yaml").read_text()
    write(mine, "sparsity/dense.yaml", "# Mine.\n" + shipped)
    shipped = (resource_dir("conf") / "optim/adamw.yaml").read_text()
    write(
        mine, "optim/adamw.yaml", re.sub(r"(?m)^warmup_steps: .*$", "warmup_steps: 7777", shipped)
    )
    assert compose([], mine).optim.warmup_steps == 7777
    assert compose([]).optim.warmup_steps != 7777, "the folder must not affect later calls"


@pytest.mark.parametrize("word", ["exp=long", "+exp=long"])
def test_an_own_group_may_set_keys_anywhere(mine, word):
    write(
        mine,
        "exp/long.yaml",
        "# @package _global_\n# Long.\ndefaults:\n  - override /model: small\nseq: 32k\noptim: "
        "{lr: 0.5}\n",
    )
    config = compose([word, "optim.lr=0.25"], mine)
    assert (config.seq, config.model.name, config.optim.lr) == (32768, "small", 0.25)
    assert summary(open_groups(mine).options["exp"]["long"]) == "Long."


def test_an_own_top_file_changes_the_defaults(mine):
    top = (resource_dir("conf") / "config.yaml").read_text()
    (mine / "config.yaml").write_text(
        top.replace("model: tiny", "model: small").replace("seq: 4k", "seq: 2k")
    )
    config = compose(["seed=3"], mine)
    assert (config.model.name, config.seq, config.seed) == ("small", 2048, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "defaults: [tiny]\nhiden_size: 3\n",
            "no key is called model.hiden_size (did you mean model.hidden_size?)",
        ),
        ("defaults: [tiny]\nnum_layers: two\n", "model.num_layers=two: expected a whole number"),
        ("defaults: [tiny]\nhead_dim: 3\n", "model.head_dim=3: must be even"),
        (
            "defaults: [nosuch]\n",
            "model=bad: cannot be composed: In 'model/bad': Could not load 'model/nosuch'.",
        ),
        (
            "name: [1\nb: {",
            "model=bad: cannot be composed: expected ',' or ']', but got ':' (bad.yaml, line 2)",
        ),
        (
            "name: ${nothing}\ndefaults: [tiny]\n",
            "model.name: cannot be resolved: Interpolation key 'nothing' not found",
        ),
        ("name: bad\nrope: 3\n", "model.rope=3: holds keys, not a value"),
    ],
)
def test_a_mistake_in_an_own_file_is_one_line(mine, text, message):
    write(mine, "model/bad.yaml", text)
    assert message in complaints(compose, ["model=bad"], mine)[0]


def test_an_own_file_with_missing_keys_is_reported_once(mine):
    write(mine, "optim/mine.yaml", "lr: 0.1\n")
    (line,) = complaints(compose, ["optim=mine"], mine)
    assert line.startswith(
        f"{mine}/optim/mine.yaml: does not give optim.betas, optim.eps, optim.weight_decay and 10 "
        "more"
    )
    assert complaints(compose, ["optim=mine", "seq=512q"], mine)[0].startswith("seq=512q")


def test_a_binary_own_file_is_one_line(mine):
    (mine / "model/bad.yaml").write_bytes(b"\xff\xfe\x00")
    assert complaints(compose, ["model=bad"], mine)[0].startswith("model=bad: cannot be composed: ")
    assert summary(mine / "model/bad.yaml") == ""


def test_composing_works_inside_another_hydra_application(mine):
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    with initialize_config_dir(str(mine), version_base=None):
        outer = GlobalHydra.instance().hydra
        assert compose(["model=small"], mine).model.name == "small"
        assert complaints(compose, ["model=nosuch"])
        assert GlobalHydra.instance().hydra is outer
    assert not GlobalHydra.instance().is_initialized()


def test_composing_leaves_the_working_folder_and_logging_alone():
    import logging

    before = (Path.cwd(), logging.root.level, list(logging.root.handlers))
    compose(["model=qwen3b"])
    assert (Path.cwd(), logging.root.level, list(logging.root.handlers)) == before


def test_time_interpolation_is_resolved_once(tmp_path):
    config = compose(["run.name=run-${now:%H%M%S%f}"])
    save(config, tmp_path / "resolved.yaml")
    assert "$" not in config.run.name
    assert load(tmp_path / "resolved.yaml").run.name == config.run.name


def test_equal_choices_share_the_work_but_not_the_values():
    yaml_groups._composed_before.cache_clear()
    first = compose(["model=tiny", "seed=3"])
    again = compose(["model=tiny", "train.steps=7"])
    assert (first.seed, again.seed, again.train.steps) == (3, compose([]).seed, 7)
    assert yaml_groups._composed_before.cache_info().misses == 2  # with and without model=tiny


def test_changed_files_are_composed_again(tmp_path):
    shutil.copytree(resource_dir("conf"), tmp_path, dirs_exist_ok=True)
    assert yaml_groups._compose(Groups((tmp_path,)), [])["seed"] == 0
    top = tmp_path / TOP
    top.write_text(top.read_text().replace("seed: 0", "seed: 41"))
    assert yaml_groups._compose(Groups((tmp_path,)), [])["seed"] == 41


GLOBAL = "# @package _global_\n# A stranger's.\n"


@pytest.mark.parametrize(
    ("key", "file"),
    [
        ("run.name", 'run: {name: "${oc.env:SECRET}"}\n'),
        ("run.name", 'run: {name: "run-${oc.env:SECRET,x}"}\n'),
        ("run.name", 'run: {name: "${${seed}:SECRET}"}\n'),
        ("run.dir", 'run: {dir: "${oc.select:run.name}"}\n'),
        ("data.path", 'data: {path: "/x/${now:%Y}"}\n'),
        ("train.eval_tasks", 'train: {eval_tasks: ["${oc.env:SECRET}"]}\n'),
    ],
)
def test_a_file_may_not_read_the_environment_or_call_a_function(mine, monkeypatch, key, file):
    monkeypatch.setenv("SECRET", "hidden")
    write(mine, "recipe/a.yaml", GLOBAL + file)
    for make in (
        lambda: compose(["recipe=a"], mine),
        lambda: compose(["recipe=a"], mine, plan=True),
        lambda: resume(compose(), ["recipe=a"], mine),
    ):
        with pytest.raises(ConfigError) as error:
            make()
        line = next(line for line in error.value.problems if f"{key}=" in line)
        assert line.startswith((f"{mine}/recipe/a.yaml: {key}=", f"{mine}: {key}="))
        assert line.endswith(f"call functions; set {key}=... on the command line")
        assert "hidden" not in str(error.value)


@pytest.mark.parametrize(
    "file",
    [
        'run: {name: "${oc.env:SECRET}"}\n',
        'run: {name: "${oc.env:SECRET}", dir: "x/${run.name}"}\n',
        'run: {dir: "${oc.env:SECRET}", name: "${run.dir}"}\n',
        'run: "${oc.env:SECRET}"\n',
    ],
)
@pytest.mark.parametrize("recipe", ["a", "m"])
def test_a_refusal_is_one_line_that_names_the_chosen_file(mine, file, recipe):
    for name in ("a", "m"):
        write(mine, f"recipe/{name}.yaml", GLOBAL + file)
    (line,) = complaints(compose, [f"recipe={recipe}"], mine)
    assert line.startswith(f"{mine}/recipe/{recipe}.yaml: run")


@pytest.mark.parametrize(
    "file",
    [
        "defaults:\n  - override /model: ${oc.env:SECRET}\n",
        'defaults:\n  - override /model: "${oc.env:SECRET}"\n  - _self_\nseq: 1k\n',
    ],
)
def test_a_list_of_defaults_may_not_read_the_environment(mine, monkeypatch, file):
    monkeypatch.setenv("SECRET", "small")
    write(mine, "recipe/a.yaml", GLOBAL + file)
    (line,) = complaints(compose, ["recipe=a"], mine)
    assert line.startswith("recipe=a: cannot be composed: Error resolving interpolation")


def test_the_command_line_reads_the_environment_also_in_place_of_a_file(mine, monkeypatch):
    monkeypatch.setenv("MINE", "own")
    write(mine, "recipe/a.yaml", GLOBAL + 'run: {name: "${oc.env:SECRET}"}\nseed: ${optim.betas}\n')
    word = "run.name=${oc.env:MINE}-${seed}"
    assert compose([word, "recipe=a", "seed=3"], mine).run.name == "own-3"
    assert compose(["run.name=${oc.env:MINE}"]).run.name == "own", "resolvers are back"


def test_a_saved_configuration_is_text_and_reads_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "hidden")
    file = tmp_path / "resolved.yaml"
    save(compose(["run.dir=/x"]), file)
    file.write_text(file.read_text().replace("dir: /x", "dir: /x/${oc.env:SECRET}"))
    assert load(file).run.dir == "/x/${oc.env:SECRET}"
    assert resume(load(file), ["train.steps=7"]).run.dir == "/x/${oc.env:SECRET}"
