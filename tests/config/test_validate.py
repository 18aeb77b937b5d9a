import dataclasses
import re

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config import keys, validate
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.validate import problems
from mtrain_cli.data.tokenizers import ByteTokenizer


@pytest.fixture(scope="module")
def defaults():
    return compose()


def changed(config, **values):
    """Return ``config`` with some leaves replaced; two underscores stand for a dot in a key."""
    return keys.build(
        {
            **keys.values(config),
            **{name.replace("__", "."): value for name, value in values.items()},
        }
    )


@pytest.mark.parametrize(("kind", "name"), [("mds", "index.json"), ("tokens", "meta.json")])
def test_a_data_folder_without_its_manifest_is_refused_before_it_is_opened(
    defaults, tmp_path, kind, name
):
    data = changed(defaults, data__kind=kind, data__path=str(tmp_path)).data

    def problem() -> str:
        with pytest.raises(ConfigError) as caught:
            validate.require_manifest(data)
        (line,) = caught.value.problems
        return line

    assert problem().startswith(f"data.path={tmp_path}: no {name} in it; give ")
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / name).write_text("{}")
    assert "but in its folders books (name them in data.mix); give " in problem()
    validate.require_manifest(dataclasses.replace(data, mix={"books": 1.0}))
    (tmp_path / name).write_text("{}")
    validate.require_manifest(data)


def test_the_defaults_are_valid(defaults):
    assert problems(defaults) == []


EIGHT = {"topology__workers": 8, "topology__gpus_per_node": 4}


def test_several_mistakes_are_reported_together(defaults):
    found = problems(changed(defaults, seq=0, optim__lr=-1.0, model__head_dim=3, data__kind="text"))
    assert [re.split("[= ]", line)[0] for line in found] == [
        "seq",
        "optim.lr",
        "model.head_dim",
        "data.path",
    ]


@pytest.mark.parametrize(
    "values",
    [
        {"seq": 1000, "topology__layout": "zigzag", "topology__workers": 3},  # padded
        {"seq": 1 << 22},  # far beyond original_max_position without scaling: bad, but allowed
        {"train__steps": 2},  # shorter than the warm-up
        EIGHT | {"topology__context_parallel": 8, "topology__gpus_per_node": 2},  # virtual nodes
        EIGHT | {"topology__context_parallel": 2, "train__global_batch": 4},
        {"optim__clip_norm": 0.0, "optim__warmup_steps": 0, "optim__weight_decay": 0.0},
        {"train__checkpoint_every": 0},
        {"model__rope__scaling": "yarn", "model__rope__factor": "auto"},
        {"train__offload_activations": 36, "model__num_layers": 36},
        # The store knows its own vocabulary.
        {"data__kind": "tokens", "data__path": "/", "model__vocab_size": 100},
    ],
)
def test_valid_configurations_are_accepted(defaults, values):
    assert problems(changed(defaults, **values)) == []


def test_a_hugging_face_folder_and_a_tokenizer_file_are_accepted(defaults, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    good = changed(
        defaults, train__init_from=str(tmp_path), data__tokenizer=str(tmp_path / "tokenizer.json")
    )
    assert problems(good) == []
    folder = problems(changed(defaults, data__tokenizer=str(tmp_path)))
    assert folder[0].startswith(f"data.tokenizer={tmp_path}: is a folder; give a Hugg")
    (tmp_path / "config.json").unlink()
    assert "has no config.json" in problems(good)[0]


def test_the_byte_vocabulary_matches_the_byte_tokenizer():
    assert ByteTokenizer.vocab_size == validate.BYTE_VOCABULARY


@pytest.mark.parametrize(
    "word",
    [
        "seq=999999999999999999999",
        "seq=1e15",
        "seq=1e999999999",
        "seq=64.5m",
        "model.hidden_size=1e20",
        "topology.timeout_s=1e30",
        "train.steps=1e24",
    ],
)
def test_a_huge_number_is_refused_at_once_in_one_line(word):
    with pytest.raises(ConfigError) as caught:
        compose([word])
    (line,) = caught.value.problems
    assert line.startswith(word.partition("=")[0] + "=")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("run.dir=runs/x ", "give a folder without spaces around it"),
        ("run.dir=runs/\udcff", "is not UTF-8; rename the file or folder"),
        ("run.dir=" + "x" * 300, "is too long; a name has at most 255 bytes"),
        ("data.mix=" + "9" * 300, "is too long; a name has at most 255 bytes"),
        ("data.mix={" + "x" * 300 + ": 1}", "a name in it is too long; a name has at most 255"),
        (
            "data.path=~nobodyhere/x",
            "begins with the name of a user unknown on this machine",
        ),
    ],
)
def test_unusable_paths_are_refused(word, message):
    with pytest.raises(ConfigError, match=message):
        compose([word])


WSD = ["optim.schedule=wsd", "train.steps=100", "optim.warmup_steps=10"]
ONE_LAYER = ["model.num_layers=1"]
WINDOW = ["mask=sliding_window", "mask.window=8"]
NIAH = "train.eval_tasks=[niah]"
GROUPS = ["topology.workers=4", "train.micro_batch=1"]


@pytest.mark.parametrize(
    ("words", "allowed", "refused"),
    [
        (["model.num_heads=1"], ["model.num_kv_heads=1"], ["model.num_kv_heads=2"]),
        (
            ["model.rope.scaling=yarn", "model.rope.beta_slow=2"],
            ["model.rope.beta_fast=2.01"],
            ["model.rope.beta_fast=2"],
        ),
        (
            ["model.rope.scaling=llama3", "model.rope.factor=8", "model.rope.low_freq_factor=2"],
            ["model.rope.high_freq_factor=2.01"],
            ["model.rope.high_freq_factor=2"],
        ),
        ([], ["model.vocab_size=264"], ["model.vocab_size=263"]),
        ([], ["model.vocab_size=264"], ["model.vocab_size=2"]),
        (WSD, ["optim.decay_steps=89"], ["optim.decay_steps=90"]),
        ([*WSD, "optim.schedule_steps=60"], ["optim.decay_steps=49"], ["optim.decay_steps=50"]),
        (WSD, ["optim.schedule_steps=11"], ["optim.schedule_steps=10"]),
        (["model.num_layers=4"], ["train.keep_mlp=4"], ["train.keep_mlp=5"]),
        (ONE_LAYER, ["train.keep_mlp=1"], ["train.keep_mlp=2"]),
        (ONE_LAYER, ["train.offload_activations=1"], ["train.offload_activations=2"]),
        ([*ONE_LAYER, *WINDOW], ["mask.full_first=0"], ["mask.full_first=1"]),
        (["model.num_layers=4", *WINDOW], ["mask.full_every=4"], ["mask.full_every=5"]),
        (["seq=2", "topology.workers=2"], ["topology.layout=zigzag"], ["topology.block_size=16"]),
        (
            ["seq=512", "topology.workers=4"],
            ["topology.block_size=128"],
            ["topology.block_size=256"],
        ),
        (
            ["topology.workers=2", "topology.layout=balanced", "topology.balanced_chunk=16"],
            ["seq=17"],
            ["seq=2"],
        ),
        (
            ["topology.workers=2", "topology.layout=balanced", "topology.balanced_chunk=16"],
            ["seq=64k"],
            ["seq=65537"],
        ),
        (
            [*GROUPS, "topology.context_parallel=1"],
            ["train.global_batch=4"],
            ["train.global_batch=1"],
        ),
        (
            [*GROUPS, "topology.context_parallel=2"],
            ["train.global_batch=2"],
            ["train.global_batch=1"],
        ),
        (
            ["topology.workers=1", "topology.context_parallel=1", "train.micro_batch=3"],
            ["train.global_batch=3"],
            ["train.global_batch=1"],
        ),
        ([], ["optim.betas=[0,0.99]"], ["optim.betas=[0,1]"]),
        ([], ["optim.betas=[0,0.99]"], ["optim.betas=[-0.001,0.9]"]),
        ([], ["train.eval_every=0"], ["train.eval_every=1"]),
        ([], ["train.eval_every=1", NIAH], ["train.eval_every=1"]),
        ([NIAH], ["eval.length=2"], ["eval.length=1"]),
        ([NIAH], ["eval.length=64m"], ["eval.length=67108865"]),
    ],
)
def test_a_rule_ends_at_its_last_allowed_value(words, allowed, refused):
    compose([*words, *allowed])
    with pytest.raises(ConfigError) as caught:
        compose([*words, *refused])
    (line,) = caught.value.problems
    assert "\n" not in line


def test_weights_of_a_mix_are_above_0(defaults, tmp_path):
    (tmp_path / "books").mkdir()
    mixed = {"data__kind": "text", "data__path": str(tmp_path)}
    assert problems(changed(defaults, **mixed, data__mix={"books": 1e-30})) == []
    (line,) = problems(changed(defaults, **mixed, data__mix={"books": 0.0}))
    assert "the weight of books must be above 0" in line


def test_a_length_is_one_several_or_that_of_training():
    lengths = [
        compose([NIAH, "seq=2k", *words]).eval.lengths(2048)
        for words in ([], ["eval.length=1k"], ["eval.length=[512,1k,512]"])
    ]
    assert lengths == [(2048,), (1024,), (512, 1024)]
