"""Each mistake on the command line gives one line."""

from pathlib import Path

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError


def complaints(*overrides: str, config_dir: Path | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        compose(overrides, config_dir)
    assert all("\n" not in line for line in caught.value.problems)
    return caught.value.problems


@pytest.mark.parametrize(
    ("override", "message"),
    [
        # names
        ("modle=qwen3b", "no key or group is called modle (did you mean model=qwen3b?)"),
        ("optim.lrr=1", "no key or group is called optim.lrr (did you mean optim.lr=1?)"),
        ("warmup_steps=5", "did you mean optim.warmup_steps=5?"),
        ("lr=5", "did you mean optim.lr=5?"),
        ("sparsity.min_bars=4", "(did you mean sparsity.min_columns=4?)"),  # its former name
        ("foo=1", "no key or group is called foo; `mtrain config list` shows all groups and keys"),
        ("=5", "=5: the key before = is missing; expected key=value, such as seq=4k"),
        ("a=b=c", "no key or group is called a"),
        ("optim.beta1=1.5", "no key or group is called optim.beta1 (did you mean optim.betas?)"),
        ("optim.beta1=[0.9,0.9]", "(did you mean optim.betas=[0.9,0.9]?)"),
        ("model.layers=0", "(did you mean model.num_layers?)"),
        ("topolgy=abc", "(did you mean topology?)"),
        ("path=~/x", "did you mean data.path=~/x?"),
        ("--layout=zigzag", "did you mean topology.layout=zigzag?"),
        # groups
        (
            "model=qwen4b",
            "no such model (did you mean qwen14b?); allowed: auto, llama14b, llama1b, llama3b, "
            "llama7b, llama8b, mistral7b, mixtral_8x7b, qwen0.5b, qwen1.5b,",
        ),
        ("model=~/x", "no such model; allowed: "),
        ("model=", "no such model; allowed: "),
        ("model=null", "no such model; allowed: "),
        ("model=tiny,qwen3b", "one value per run"),
        ("model=glob(*)", "one value per run"),
        ("optim={lr:1}", "to set one value, write optim.lr=..."),
        ("model@other=tiny", "write model=tiny"),
        # values
        ("seq=512q", "expected a number of tokens such as 4096, 512k or 1m (k = 1024, m = 1024 k)"),
        ("seq=0.3k", "is 307.2 tokens; expected a whole number"),
        ("seq=true", "expected a number of tokens"),
        ("seq=[4k]", "expected a number of tokens"),
        ("optim.lr=abc", "expected a number"),
        ("optim.lr=nan", "expected a number"),
        (
            "optim.lr=1e999",
            "optim.lr=1e999: must be at most 100 (",
        ),
        (
            "train.expert_capacity=nan",
            "train.expert_capacity=nan: expected a number",
        ),
        ("optim.lr=true", "expected a number"),
        ("optim.lr={a:1}", "expected a number"),
        ("optim.lr=", "the value is empty; expected a number"),
        ("optim.lr=null", "expected a number"),
        ("train.steps=1.5", "expected a whole number"),
        ("train.steps=1k", "expected a whole number"),
        ("train.steps=nan", "expected a whole number"),
        ("train.steps=inf", "must be at most 1,000,000,000 ("),
        ("seq=inf", "must be at most 64m ("),
        ("train.compile=yes", "expected true, false or auto"),
        ("train.compile=1", "expected true, false or auto"),
        ("topology.workers=four", "expected a whole number or auto"),
        ("model.rope.factor=twice", "expected a number or auto"),
        (
            "topology.layout=zigzg",
            "expected one of auto, contiguous, zigzag, striped, balanced (did you mean zigzag?)",
        ),
        ("topology.layout=zigzag,striped", "expected one of auto, contiguous, zigzag, striped"),
        ("train.kernel=null", "expected one of auto, reference, sdpa, triton, flash4"),
        ("optim.betas=[0.9]", "expected a list of 2 numbers"),
        ("optim.betas=[0.9,a]", "expected a list of 2 numbers"),
        ("optim.betas=0.9", "expected a list of 2 numbers"),
        ("run.name=null", "expected text"),
        # grammar
        ("optim.lr=(1)", "expected a number"),
        ("optim.lr=~1", "expected a number"),
        ("optim.lr=1#2", "expected a number"),
        ("optim.betas=[0.9,", "a value with spaces needs quotes: 'optim.betas=[a, b]'"),
        ("optim.lr=1e-5,2e-5", "one value per run"),
        ("optim.lr=range(1,5)", "one value per run"),
        ("optim.betas=0.9,0.95", "a list needs brackets: optim.betas=[0.9,0.95]"),
        ("optim.lr=${nothing}", "no key is called nothing"),
        ("optim.lr=${hydra:runtime.cwd}", "mtrain uses Hydra only to compose configurations"),
        ("seed=${oc.env:NOPE}", "cannot be resolved: the environment variable NOPE is not set"),
        ("seed=${call:1}", "cannot be resolved: no function is called call"),
        ("seed=${seed}", "cannot be resolved: the value refers to itself through ${...}"),
        ("run.name=${", "cannot be resolved: the ${...} is not complete"),
        ("topology.device=gpu", "expected one of auto, cpu, cuda (did you mean cuda?)"),
        # Hydra settings
        (
            "hydra.run.dir=out",
            "Hydra's own settings have no effect; the folder of a run is run.dir=...",
        ),
        ("hydra/launcher=x", "Hydra's own settings have no effect"),
        ("+new=1", "no key or group is called new"),
        ("++new.key=1", "no key or group is called new.key"),
        ("~seq", "a key cannot be deleted"),
        ("~data.path=x", "a key cannot be deleted; set it instead, such as data.path=null"),
        (
            "model.rope={theta:1}",
            "is a section, not a value; set one of its keys, such as model.rope.theta=...",
        ),
        ("topology.=1", "no key or group is called topology."),
        # no equals sign
        ("tiny", "expected key=value (did you mean model=tiny?)"),
        ("qwen3", "expected key=value (did you mean model=qwen3b?)"),
        ("model", "expected model=OPTION; options: auto, llama14b"),
        ("optim.lr", "expected optim.lr=VALUE; VALUE is a number"),
        ("my.yaml", "--config-dir DIR recipe=mine"),
        ("", "expected key=value"),
        ("0.95]", "a value with spaces needs quotes"),
    ],
)
def test_a_mistake_is_one_line_with_the_override_and_what_is_allowed(override, message):
    (line,) = complaints(override)
    assert line.startswith(f"{override}: " if override else "'': ")
    assert message in line


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("seq=512k", "seq", 524288),
        ("seq=0.5M", "seq", 524288),
        ("seq=1m", "seq", 1 << 20),
        ("seq=524288", "seq", 524288),
        ("seq=524_288", "seq", 524288),
        (" seq = 8k ", "seq", 8192),
        ("+seq=8k", "seq", 8192),
        ("++seq=8k", "seq", 8192),
        ("train.steps=1e3", "train.steps", 1000),
        ("optim.lr=1", "optim.lr", 1.0),
        ("optim.lr=1e-5", "optim.lr", 1e-5),
        ("optim.lr=${optim.min_lr_ratio}", "optim.lr", compose().optim.min_lr_ratio),
        ("optim.betas=[0.8, 0.9]", "optim.betas", (0.8, 0.9)),
        ("optim/lr=0.5", "optim.lr", 0.5),
        ("topology.workers=3", "topology.workers", 3),
        ("topology.workers=auto", "topology.workers", "auto"),
        ("model.rope.factor=4", "model.rope.factor", 4.0),
        ("model.rope.original_max_position=32k", "model.rope.original_max_position", 32768),
        ("train.compile=TRUE", "train.compile", True),
        ("train.init_from=none", "train.init_from", None),
        ("train.init_from=null", "train.init_from", None),
        ("train.activation_checkpoint=none", "train.activation_checkpoint", "none"),
        ("run.name=007", "run.name", "007"),
        ("run.name='x'", "run.name", "x"),
        ("run.name=1_000", "run.name", "1_000"),
    ],
)
def test_a_value_is_converted_to_the_type_of_its_key(override, key, value):
    from mtrain_cli.config import keys

    found = keys.values(compose([override]))[key]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "name", ["it's", "a b", "a#b", "a;b", "a,b", "(1)", "[x", "{y}", "k=v", "10%", "ünï", "q?x=1"]
)
def test_paths_with_special_characters_need_no_extra_quotes(tmp_path, name):
    (tmp_path / name).write_text("text")
    assert compose(["data=text", f"data.path={tmp_path}/{name}"]).data.path == f"{tmp_path}/{name}"


def test_a_home_path_and_an_environment_variable_are_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x").mkdir()
    assert compose(["data=text", "data.path=~/x"]).data.path == f"{tmp_path}/x"
    assert compose(["data=text", "data.path=${oc.env:HOME}/x"]).data.path == f"{tmp_path}/x"


def test_the_last_override_of_a_key_and_of_a_group_wins_in_any_order():
    config = compose(["model.num_layers=3", "seq=4k", "model=tiny", "seq=8k", "model=qwen0.5b"])
    assert (config.model.name, config.model.num_layers, config.seq) == ("qwen0.5b", 3, 8192)


def test_all_mistakes_are_reported_together_without_their_consequences():
    found = complaints(
        "seq=512q",
        "optim.lr=-1",
        "modle=tiny",
        "data=text",
        "data.pth=x",
        "topology.workers=3",
        "topology.context_parallel=2",
    )
    # data=text also lacks data.path, but data.pth is a typo for it.
    assert [line.partition(":")[0] for line in found] == [
        "modle=tiny",
        "data.pth=x",
        "seq=512q",
        "optim.lr=-1",
        "topology.context_parallel=2",
    ]


def test_a_file_with_a_former_name_gets_the_current_one(tmp_path):
    (tmp_path / "sparsity").mkdir()
    file = tmp_path / "sparsity/mine.yaml"
    file.write_text("defaults: [vertical_slash]\nmin_bars: 4\n")
    (found,) = complaints("sparsity=mine", config_dir=tmp_path)
    hint = "(did you mean sparsity.min_columns?)"
    assert found == f"{file}: no key is called sparsity.min_bars {hint}"
