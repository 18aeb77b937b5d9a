"""The keys of each pattern, the bounds they set, and the one line that reports each mistake."""

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.pattern_settings import PATTERNS
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.sparsity.pattern import make_pattern

BY_TOKEN = "sparsity=vertical_slash sparsity.slash_unit=token"


@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_composes_and_can_be_built(name):
    config = compose([f"sparsity={name}", "seq=8k", "model.head_dim=32"])
    pattern = make_pattern(config.sparsity, 0)
    assert (pattern is None) == (name == "dense")
    if pattern is not None:
        assert pattern.name == name
        assert pattern.synthetic == (name == "fixed")
        assert pattern.request().block == (64 if name == "block_topk" else 128)
        assert pattern.describe()
    assert isinstance(config.sparsity, PATTERNS[name])
    assert None not in (getattr(config.sparsity, key) for key in PATTERNS[name].own_keys())


@pytest.mark.parametrize(
    ("words", "columns", "slashes", "density"),
    [
        ("sparsity=dense", 0, 0, 1.0),
        ("sparsity=vertical_slash", 4096, 0, None),
        ("sparsity=vertical_slash sparsity.max_columns=0 sparsity.max_slashes=9", None, 9, None),
        (f"{BY_TOKEN} sparsity.max_slashes=0", 4096, 0, None),
        (f"{BY_TOKEN} sparsity.max_slashes=9", 4096, 20, None),
        (f"{BY_TOKEN} sparsity.max_slashes=16", 4096, 32, None),
        ("sparsity=xattention", 0, 0, None),
        ("sparsity=moba", 0, 0, None),
        ("sparsity=fixed sparsity.columns=128 sparsity.density=0.25", 128, 10, 0.25 + 1 / 16),
        ("sparsity=fixed sparsity.columns=0 sparsity.slashes=7", 0, 7, None),
    ],
)
def test_settings_give_the_bounds_of_the_index(words, columns, slashes, density):
    """Memory, the choice of an exchange and the simulator rely on them."""
    sparsity = compose([*words.split(), "seq=4k"]).sparsity
    assert sparsity.column_bound == columns
    assert sparsity.slash_bound(blocks=32) == slashes
    assert sparsity.known_density(4096) == density


@pytest.mark.parametrize(("word", "shared"), [("query_head", False), ("kv_group", True)])
def test_heads_share_an_index_only_with_kv_group(word, shared):
    config = compose(["sparsity=vertical_slash", f"sparsity.index_per={word}"])
    assert make_pattern(config.sparsity, 0).per_group is shared


@pytest.mark.parametrize(
    ("words", "slashes", "density"),
    [
        ("", 0, 0.05),
        ("sparsity.slashes=5", 5, 0),
        ("sparsity.density=0.1", 0, 0.1),
        ("sparsity.slashes=5 sparsity.density=0", 5, 0),
        ("sparsity.slashes=0", 0, 0.05),
    ],
)
def test_fixed_takes_either_slashes_or_a_density(words, slashes, density):
    sparsity = compose(["sparsity=fixed", *words.split()]).sparsity
    assert (sparsity.slashes, sparsity.density) == (slashes, density)


def test_windows_may_fill_the_whole_sequence():
    assert (
        compose(["sparsity=vertical_slash", "sparsity.windows=32", "seq=4k"]).sparsity.windows == 32
    )


@pytest.mark.parametrize(
    ("words", "allowed", "refused"),
    [
        ("sparsity=vertical_slash sparsity.sink_tokens=4", "max_columns=64", "max_columns=63"),
        ("sparsity=vertical_slash sparsity.sink_tokens=4", "max_columns=0", "max_columns=1"),
        ("sparsity=vertical_slash sparsity.min_columns=4", "sink_tokens=4096", "sink_tokens=4097"),
        ("sparsity=vertical_slash sparsity.min_slashes=3", "max_slashes=3", "max_slashes=2"),
        ("sparsity=vertical_slash sparsity.min_slashes=3", "max_slashes=0", "max_slashes=1"),
        ("sparsity=vertical_slash seq=4k", "last_q=4096", "last_q=4097"),
        ("sparsity=vertical_slash seq=4k sparsity.last_q=1", "windows=4096", "windows=4097"),
        ("sparsity=xattention sparsity.block=16", "stride=16", "stride=32"),
        ("sparsity=moba sparsity.block=16", "chunk=16", "chunk=17"),
    ],
)
def test_a_rule_ends_at_its_last_allowed_value(words, allowed, refused):
    compose([*words.split(), f"sparsity.{allowed}"])
    with pytest.raises(ConfigError) as caught:
        compose([*words.split(), f"sparsity.{refused}"])
    (line,) = caught.value.problems
    assert "sparsity." in line


def test_sequences_of_vertical_slash_end_at_2_to_the_24():
    settings = compose(["sparsity=vertical_slash"]).sparsity
    assert list(settings.problems(2**24)) == []
    (line,) = settings.problems(2**24 + 1)
    assert line.startswith("seq=16777217: ")
