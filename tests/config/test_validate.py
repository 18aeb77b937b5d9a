import dataclasses
import re

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config import data_checks, keys
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


MASKED = {"data__mask_key": "mask", "data__kind": "tokens", "data__path": "/"}


@pytest.mark.parametrize(("kind", "name"), [("mds", "index.json"), ("tokens", "meta.json")])
def test_a_data_folder_without_its_manifest_is_refused_before_it_is_opened(
    defaults, tmp_path, kind, name
):
    data = changed(defaults, data__kind=kind, data__path=str(tmp_path)).data

    def problem() -> str:
        with pytest.raises(ConfigError) as caught:
            data_checks.require_manifest(data)
        (line,) = caught.value.problems
        return line

    assert problem().startswith(f"data.path={tmp_path}: no {name} in it; give ")
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / name).write_text("{}")
    assert problem().endswith("; these folders in it have one: books (name them in data.mix)")
    data_checks.require_manifest(dataclasses.replace(data, mix={"books": 1.0}))
    (tmp_path / name).write_text("{}")
    data_checks.require_manifest(data)


def test_the_defaults_are_valid(defaults):
    assert problems(defaults) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seq": 1}, "seq=1: must be at least 2"),
        ({"seed": -1}, "seed=-1: must be between 0"),
        (
            {"model__num_heads": 4, "model__num_kv_heads": 3},
            "model.num_kv_heads=3: does not divide model.num_heads=4; allowed: 1, 2, 4",
        ),
        ({"model__head_dim": 33}, "model.head_dim=33: must be even"),
        ({"model__num_layers": 0}, "model.num_layers=0: must be at least 1"),
        (
            {"model__vocab_size": 200},
            "model.vocab_size=200: data.tokenizer=bytes needs at least 264",
        ),
        ({"model__rope__theta": 1.0}, "model.rope.theta=1: must be above 1"),
        (
            {"model__rope__factor": 0.5},
            "model.rope.factor=0.5: must be auto or a number of at least 1",
        ),
        (
            {"model__rope__scaling": "llama3", "model__rope__factor": "auto"},
            "model.rope.factor=auto: is derived for scaling=yarn only",
        ),
        (
            {"model__rope__scaling": "llama3", "model__rope__low_freq_factor": 9.0},
            "must be above model.rope.low_freq_factor=9",
        ),
        (
            {"model__rope__scaling": "yarn", "model__rope__beta_slow": 64.0},
            "must be above model.rope.beta_slow=64",
        ),
        (
            {"model__rope__original_max_position": 0},
            "model.rope.original_max_position=0: must be at least 1",
        ),
        (
            {"topology__block_size": 100},
            "topology.block_size=100: must be a power of two, at least 16",
        ),
        ({"topology__block_size": 8}, "topology.block_size=8: must be a power of two, at least 16"),
        (
            {"topology__layout": "balanced", "topology__balanced_chunk": 100},
            "topology.balanced_chunk=100: must be a multiple of 16, at least 16",
        ),
        (
            {"topology__layout": "zigzag", "topology__balanced_chunk": 512},
            "topology.balanced_chunk=512: only topology.layout=balanced has chunks, not "
            "topology.layout=zigzag; give topology.layout=balanced, or "
            "topology.balanced_chunk=auto",
        ),
        ({"topology__workers": 0}, "topology.workers=0: must be at least 1"),
        (
            {"topology__workers": 4, "topology__context_parallel": 3},
            "topology.context_parallel=3: does not divide topology.workers=4",
        ),
        (
            {"topology__workers": 4, "topology__gpus_per_node": 3},
            "topology.gpus_per_node=3: does not divide topology.workers=4",
        ),
        ({"topology__timeout_s": 0.001}, "topology.timeout_s=0.001: must be at least 1 second"),
        ({"train__steps": 0}, "train.steps=0: must be at least 1"),
        (
            {"train__global_batch": 3, "train__micro_batch": 2},
            "train.global_batch=3: must be a multiple of train.micro_batch=2",
        ),
        (
            {"topology__workers": 4, "topology__context_parallel": 2, "train__global_batch": 3},
            "train.global_batch=3: must be a multiple of 2",
        ),
        ({"train__keep_checkpoints": 0}, "train.keep_checkpoints=0: must be at least 1"),
        ({"train__checkpoint_every": -1}, "train.checkpoint_every=-1: must be 0 or more"),
        (
            {"train__kernel": "flash4", "topology__device": "cpu"},
            "train.kernel=flash4: runs on GPUs only",
        ),
        (
            {"train__kernel": "flash4", "train__dtype": "float32"},
            "train.kernel=flash4: computes in bfloat16",
        ),
        (
            {"train__init_from": "/nowhere/at/all"},
            "train.init_from=/nowhere/at/all: no such folder",
        ),
        ({"optim__lr": 0.0}, "optim.lr=0: must be above 0"),
        ({"optim__betas": (0.9, 1.0)}, "optim.betas=[0.9,1]: each must be at least 0 and below 1"),
        ({"optim__min_lr_ratio": 1.5}, "optim.min_lr_ratio=1.5: must be between 0 and 1"),
        ({"optim__clip_norm": -1.0}, "optim.clip_norm=-1: must be 0 or more"),
        ({"optim__warmup_steps": -1}, "optim.warmup_steps=-1: must be 0 or more"),
        ({"data__kind": "text"}, "data.path is not set: data=text needs it"),
        (
            {"data__kind": "tokens"},
            "data.path is not set: data=tokens needs it, or data.mix; give the output of `mtrain "
            "data prepare`",
        ),
        (
            {"data__kind": "text", "data__path": "/no/corpus.txt"},
            "data.path=/no/corpus.txt: no such file or folder; give a .txt, .md, .py, .jsonl",
        ),
        ({"data__path": "/etc"}, "data.path=/etc: data=stdlib has no path; add data=text"),
        (
            {"data__tokenizer": "/no/tokenizer.json"},
            "data.tokenizer=/no/tokenizer.json: no such file; give the path",
        ),
        ({"data__tokenizer": "/etc"}, "data.tokenizer=/etc: is a folder; give its tokenizer.json"),
        ({"train__checkpoint_keep": 1.5}, "train.checkpoint_keep=1.5: must be between 0 and 1"),
        ({"train__checkpoint_keep": -0.1}, "train.checkpoint_keep=-0.1: must be between 0 and 1"),
        ({"train__tile_mib": -1}, "train.tile_mib=-1: must be 0 or more"),
        ({"train__z_loss": -1e-4}, "train.z_loss=-0.0001: must be 0 or more"),
        (
            {"train__offload_activations": True, "train__activation_checkpoint": "none"},
            "train.offload_activations=true: train.activation_checkpoint=none keeps too much to "
            "move; "
            "allowed values of that key: selective, sequence_selective, full",
        ),
        (
            {"train__offload_activations": 2, "train__activation_checkpoint": "none"},
            "train.offload_activations=2: train.activation_checkpoint=none keeps too much to move; "
            "allowed",
        ),
        (
            {"train__offload_activations": 37, "model__num_layers": 36},
            "=37: exceeds model.num_layers=36; allowed: true, false or 0 to 36",
        ),
        (
            {"train__keep_mlp": 37, "model__num_layers": 36},
            "train.keep_mlp=37: exceeds model.num_layers=36; allowed: true, false or 0 to 36",
        ),
        (
            {"train__keep_mlp": -1},
            "train.keep_mlp=-1: must be true, false or a number of layers, 0 or more",
        ),
        (
            {"optim__offload_gradients": True},
            "optim.offload_gradients=true: needs optim.offload=true, which runs the optimizer in "
            "host memory",
        ),
        (
            {"train__offload_activations": -1},
            "train.offload_activations=-1: must be true, false or a number of layers, 0 or more",
        ),
        (
            {"data__mask_key": "mask"},
            "data.mask_key=mask: data=stdlib has no masks for its documents; give data=tokens and "
            "what `mtrain data prepare --tokens-key --mask-key` wrote",
        ),
        (
            {"data__positions_key": "at", "data__kind": "text", "data__path": "/"},
            "data.positions_key=at: data=text has no positions for its documents",
        ),
        (
            {"data__mask_key": "mask", "data__kind": "mds", "data__path": "/"},
            "data.mask_key=mask: data=mds has no masks for its documents",
        ),
        (
            {**MASKED, "data__document_mask": False},
            "data.document_mask=false: data.mask_key=mask gives each document masks of its own",
        ),
        (
            {**MASKED, "mask__kind": "full"},
            "mask.kind=full: data.mask_key=mask takes the mask from the data; give mask=causal",
        ),
        (
            {
                **MASKED,
                "data__mask_key": None,
                "data__positions_key": "at",
                "mask__kind": "full",
                "data__document_mask": False,
            },
            "data.document_mask=false: data.positions_key=at gives each document positions of",
        ),
        (
            {**MASKED, "data__positions_key": "at", "data__document_mask": False},
            "data.document_mask=false: data.mask_key=mask and data.positions_key=at give each "
            "document masks and positions of its own",
        ),
        (
            {"data__mask_key": "mask", "data__positions_key": "at"},
            "data.mask_key=mask, data.positions_key=at: data=stdlib has no masks and positions for",
        ),
        ({"run__log_every": 0}, "run.log_every=0: must be at least 1"),
        (
            {"run__name": "a/b"},
            "run.name=a/b: may only contain letters, digits and . _ - + =, since it names a "
            "folder; run.dir takes any path",
        ),
        ({"run__name": ".."}, "run.name=..: may only contain letters"),
    ],
)
def test_each_mistake_is_one_line_that_names_key_and_value(defaults, values, message):
    found = problems(changed(defaults, **values))
    assert len(found) == 1, found
    assert message in found[0]
    assert "\n" not in found[0]


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
        {
            "seq": 1000,
            "topology__layout": "zigzag",
            "topology__workers": 3,
        },  # padded, not refused
        {
            "seq": 1 << 22
        },  # far beyond original_max_position without scaling: bad quality, but allowed
        {"train__steps": 2},  # shorter than the warm-up
        {
            "topology__workers": 8,
            "topology__context_parallel": 8,
            "topology__gpus_per_node": 2,
        },  # virtual nodes
        {
            "topology__workers": 8,
            "topology__context_parallel": 2,
            "topology__gpus_per_node": 4,
            "train__global_batch": 4,
        },
        {
            "optim__clip_norm": 0.0,
            "train__checkpoint_every": 0,
            "optim__warmup_steps": 0,
            "optim__weight_decay": 0.0,
        },
        {"model__rope__scaling": "yarn", "model__rope__factor": "auto"},
        {"train__offload_activations": 36, "model__num_layers": 36},
        {
            "data__kind": "tokens",
            "data__path": "/",
            "model__vocab_size": 100,
        },  # the store knows its own vocabulary
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
    assert folder == [
        f"data.tokenizer={tmp_path}: is a folder; give its tokenizer.json, "
        f"{tmp_path}/tokenizer.json"
    ]
    (tmp_path / "config.json").unlink()
    assert "has no config.json" in problems(good)[0]


def test_the_byte_vocabulary_matches_the_byte_tokenizer():
    assert ByteTokenizer.vocab_size == data_checks.BYTE_VOCABULARY


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "seq=512 topology.workers=64",
            "give at most 4 workers, or at most 32 and topology.block_size=16, or a longer seq",
        ),
        (
            "seq=32 topology.workers=64 topology.block_size=16",
            "give at most 2 workers, or a longer seq",
        ),
        ("seq=512 topology.workers=32", "give fewer workers, a longer seq or blocks of at most 16"),
    ],
)
def test_the_advice_for_too_few_blocks_works(words, message):
    with pytest.raises(ConfigError, match=f" workers; {message}$"):
        compose(words.split())
    if " or at most 32" in message:
        compose(["seq=512", "topology.workers=32", "topology.block_size=16"])


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
        ("run.dir=runs/x ", "run.dir='.*runs/x ': begins or ends with a space"),
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
    ],
)
def test_a_rule_ends_at_its_last_allowed_value(words, allowed, refused):
    compose([*words, *allowed])
    with pytest.raises(ConfigError) as caught:
        compose([*words, *refused])
    (line,) = caught.value.problems
    assert "\n" not in line


@pytest.mark.parametrize(
    ("warm_up", "advice"), [(98, "allowed: 1 to 1"), (99, "give fewer optim.warmup_steps")]
)
def test_the_advice_for_a_decay_says_how_many_steps_are_left(warm_up, advice):
    words = ["optim.schedule=wsd", "train.steps=100", "optim.decay_steps=2"]
    with pytest.raises(ConfigError, match=f"{advice}$"):
        compose([*words, f"optim.warmup_steps={warm_up}"])


def test_weights_of_a_mix_are_above_0(defaults, tmp_path):
    (tmp_path / "books").mkdir()
    mixed = {"data__kind": "text", "data__path": str(tmp_path)}
    assert problems(changed(defaults, **mixed, data__mix={"books": 1e-30})) == []
    (line,) = problems(changed(defaults, **mixed, data__mix={"books": 0.0}))
    assert "the weight of books must be above 0" in line


def test_allowed_degrees_are_listed_beside_an_impossible_one():
    words = ["topology.workers=4", "topology.context_parallel=0", "topology.tensor_parallel=x"]
    with pytest.raises(ConfigError, match="tensor_parallel=x: expected a whole number; allowed: 1"):
        compose(words)


def test_the_advice_for_blocks_names_the_largest_that_fits():
    words = ["seq=512", "topology.workers=16"]
    with pytest.raises(ConfigError, match=r"or blocks of at most 32$"):
        compose(words)
    compose([*words, "topology.block_size=32"])


def test_masks_from_the_data_need_dense_attention():
    masked = ["data=tokens", "data.path=/", "data.mask_key=mask"]
    with pytest.raises(ConfigError) as caught:
        compose([*masked, "sparsity=vertical_slash"])
    assert caught.value.problems == (
        "sparsity.pattern=vertical_slash: needs a mask in which each query sees one interval of "
        "keys up to itself, which data.mask_key=mask does not promise; give sparsity=dense",
    )
    assert compose(masked).data.mask_key == "mask"
    positions = compose(["data=tokens", "data.path=/", "data.positions_key=at", "sparsity=moba"])
    assert positions.data.positions_key == "at"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "seq=8k topology.workers=4 topology.balanced_chunk=4k",
            "topology.balanced_chunk=4096: seq=8192 has 2 such chunks for 4 workers; give chunks "
            "of at most 2048",
        ),
        (
            "seq=100 data.document_mask=false topology.workers=8 topology.balanced_chunk=16",
            "topology.balanced_chunk=16: seq=100 has 7 such chunks for 8 workers; give fewer "
            "workers or a longer seq",
        ),
        (
            "seq=512k topology.balanced_chunk=16",
            "topology.balanced_chunk=16: seq=524288 has 32,768 such chunks, and a batch could take "
            "minutes to plan; at most 4,096 are allowed. Give chunks of at least 128",
        ),
        (
            "seq=64k topology.balanced_chunk=192 sparsity=vertical_slash",
            "topology.balanced_chunk=192: must be a multiple of sparsity.block=128, since workers "
            "hold whole pattern blocks",
        ),
    ],
)
@pytest.mark.parametrize("layout", ["balanced", "auto"])
def test_a_chunk_of_a_wrong_size_is_refused(words, message, layout):
    with pytest.raises(ConfigError) as caught:
        compose([*words.split(), f"topology.layout={layout}"], plan=True)
    assert caught.value.problems == (message,)


def test_the_advice_for_a_chunk_works():
    words = ["seq=8k", "topology.workers=4", "topology.layout=balanced"]
    compose([*words, "topology.balanced_chunk=2k"])
    compose(["seq=512k", "topology.layout=balanced", "topology.balanced_chunk=128"])
    # Each of many workers has as many chunks as with auto.
    many = ["topology.workers=256", "topology.balanced_chunk=64", "topology.layout=balanced"]
    compose(["seq=512k", *many, "train.global_batch=256"], plan=True)
