"""The keys of each pattern, the bounds they set, and the one line that reports each mistake."""

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.pattern_settings import PATTERNS
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.sparsity.pattern import make_pattern


@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_composes_and_can_be_built(name):
    config = compose([f"sparsity={name}"])
    pattern = make_pattern(config.sparsity, 0)
    assert (pattern is None) == (name == "dense")
    if pattern is not None:
        assert pattern.name == name
        assert pattern.synthetic == (name == "fixed")
        assert pattern.request().block == 128
        assert pattern.describe()
    assert isinstance(config.sparsity, PATTERNS[name])
    assert None not in (getattr(config.sparsity, key) for key in PATTERNS[name].own_keys())


@pytest.mark.parametrize(
    ("words", "columns", "slashes", "density"),
    [
        ("sparsity=dense", 0, 0, 1.0),
        ("sparsity=vertical_slash", 4096, 0, None),
        ("sparsity=vertical_slash sparsity.max_columns=0 sparsity.max_slashes=9", None, 9, None),
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
    ("words", "line"),
    [
        ("sparsity=vertical_slash sparsity.p_v=0", "sparsity.p_v=0: must be above 0 and at most 1"),
        (
            "sparsity=vertical_slash sparsity.p_s=1.5",
            "sparsity.p_s=1.5: must be above 0 and at most 1",
        ),
        (
            "sparsity=xattention sparsity.threshold=-1",
            "sparsity.threshold=-1: must be above 0 and at most 1",
        ),
        (
            "sparsity=vertical_slash sparsity.max_columns=10",
            "sparsity.max_columns=10: is below sparsity.min_columns=64; give 0 (no limit) or "
            "at least 64",
        ),
        (
            "sparsity=vertical_slash sparsity.max_columns=10 sparsity.min_columns=2 "
            "sparsity.sink_tokens=20",
            "sparsity.max_columns=10: is below sparsity.sink_tokens=20; give 0 (no limit) or "
            "at least 20",
        ),
        (
            "sparsity=vertical_slash sparsity.max_slashes=1",
            "sparsity.max_slashes=1: is below sparsity.min_slashes=2; give 0 (no limit) or at "
            "least 2",
        ),
        (
            "sparsity=vertical_slash sparsity.last_q=8k seq=4k",
            "sparsity.last_q=8k: expected a whole number",
        ),
        (
            "sparsity=vertical_slash sparsity.last_q=8192 seq=4k",
            "sparsity.last_q=8192: is above seq=4096; give at most 4096",
        ),
        (
            "sparsity=vertical_slash seq=32m",
            "seq=33554432: sparsity.pattern=vertical_slash can choose among at most 16777216 "
            "columns",
        ),
        (
            "sparsity=vertical_slash sparsity.block=100",
            "sparsity.block=100: must be 16, 32, 64 or 128",
        ),
        (
            "sparsity=xattention sparsity.stride=24",
            "sparsity.stride=24: does not divide sparsity.block=128; give a power of two up to it",
        ),
        (
            "sparsity=moba sparsity.chunk=100",
            "sparsity.chunk=100: must be a multiple of sparsity.block=128",
        ),
        (
            "sparsity=moba sparsity.top_k=null",
            "sparsity.top_k=null: sparsity.pattern=moba needs a value; sparsity=moba gives a "
            "default",
        ),
        (
            "sparsity=moba sparsity.p_v=0.5",
            "sparsity.p_v=0.5: is not a key of sparsity.pattern=moba; allowed with "
            "sparsity=vertical_slash",
        ),
        (
            "sparsity.p_v=0.5",
            "sparsity.p_v=0.5: is not a key of sparsity.pattern=dense; allowed with "
            "sparsity=vertical_slash",
        ),
        (
            "sparsity=fixed sparsity.density=0",
            "sparsity.slashes=0: give a number of slashes, or their share of the blocks as "
            "sparsity.density",
        ),
        (
            "sparsity=fixed sparsity.density=0.1 sparsity.slashes=5",
            "sparsity.slashes=5: sparsity.density=0.1 already sets the number of slashes; give "
            "only one of the two, or 0 for the other",
        ),
        (
            "sparsity.pattern=moba",
            "sparsity.pattern=moba: needs sparsity.block, sparsity.dense_steps, "
            "sparsity.dense_layers, sparsity.chunk, sparsity.top_k, sparsity.gate; "
            "give sparsity=moba, which sets them, instead of sparsity.pattern",
        ),
        (
            "sparsity=vertical_slash sparsity.pattern=moba",
            "give sparsity=moba, which sets them, instead of sparsity.pattern",
        ),
        ("sparsity=moba sparsity.pattern=dense", "give sparsity=dense instead of sparsity.pattern"),
        ("sparsity=moba sparsity.chunk=no", "sparsity.chunk=no: expected"),
        (
            "sparsity=vertical_slash sparsity.windows=65 seq=4k",
            "sparsity.windows=65: windows of sparsity.last_q=64 queries would overlap; "
            "seq=4096 has room for at most 64",
        ),
        (
            f"sparsity=vertical_slash sparsity.min_slashes={10**20}",
            f"sparsity.min_slashes={10**20}: must be between 1 and 2^31 - 1",
        ),
        (
            f"sparsity=vertical_slash sparsity.min_columns={2**31} sparsity.max_columns=0",
            "must be between 0 and 2^31 - 1",
        ),
        (
            "sparsity=vertical_slash ~sparsity.p_v",
            "~sparsity.p_v: a key cannot be deleted; leave it out for its default",
        ),
        ("sparsity=vertical_slash sparsity.index_per=head", "expected one of query_head, kv_group"),
    ],
)
def test_a_mistake_is_one_line(words, line):
    with pytest.raises(ConfigError) as caught:
        compose(words.split())
    (problem,) = caught.value.problems
    assert line in problem


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
        compose(["sparsity=vertical_slash", "sparsity.windows=64", "seq=4k"]).sparsity.windows == 64
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


def test_the_largest_of_equal_minimums_is_named_as_columns():
    words = ["sparsity=vertical_slash", "sparsity.min_columns=64", "sparsity.sink_tokens=64"]
    with pytest.raises(ConfigError, match=r"is below sparsity\.min_columns=64"):
        compose([*words, "sparsity.max_columns=63"])


@pytest.mark.parametrize(("windows", "has_remark"), [(1, True), (2, False)])
def test_only_a_single_window_of_packed_documents_has_a_remark(windows, has_remark):
    settings = compose(["sparsity=vertical_slash", f"sparsity.windows={windows}"]).sparsity
    assert (settings.packed_documents_remark is not None) == has_remark
