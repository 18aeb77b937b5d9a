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


@pytest.mark.parametrize(
    ("name", "allowed", "refused"),
    [
        ("seq", [2, 2**26], [1, 2**26 + 1]),
        ("seed", [0, 2**63 - 1], [-1, 2**63]),
        ("model.vocab_size", [2, 2**31 - 1], [1, 2**31]),
        ("model.num_layers", [1, 10_000], [0, 10_001]),
        ("model.num_heads", [1, 65_535], [0, 65_536]),
        ("model.head_dim", [1, 4096], [0, 4097]),
        ("model.rms_norm_eps", [1e-30, 1], [0, 1.001]),
        ("model.rope.theta", [1.001, 1e12], [1, 1.001e12]),
        ("model.rope.factor", [1], [0.999]),
        ("model.rope.beta_fast", [1e-30, 1e6], [0, 1.001e6]),
        ("model.moe.experts", [0, 65_536], [-1, 65_537]),
        ("model.moe.scale", [1e-30, 1e6], [0, 1.001e6]),
        ("topology.workers", [1, 2**14], [0, 2**14 + 1]),
        ("topology.virtual_stages", [1, 10_000], [0, 10_001]),
        ("topology.stages", [0, 1, 16], [17, -1]),
        ("topology.block_size", [16, 32, 2**26], [0, 8, 15, 17, 48, 2**27]),
        ("topology.balanced_chunk", [16, 48, 2**26], [0, 8, 15, 17, 2**26 + 16]),
        ("topology.timeout_s", [1, 2e6], [0.999, 2.001e6]),
        ("topology.gpu_memory_gib", [1e-30, 2**20], [0, 2**20 + 1]),
        ("sparsity.block", [16, 32, 64, 128], [8, 48, 256]),
        ("sparsity.last_q", [1, 2**26], [0, 2**26 + 1]),
        ("sparsity.min_columns", [0, 2**31 - 1], [-1, 2**31]),
        ("sparsity.max_columns", [0, 2**31 - 1], [-1, 2**31]),
        ("sparsity.min_slashes", [1, 2**31 - 1], [0, 2**31]),
        ("sparsity.p_v", [1e-30, 1], [0, 1.001]),
        ("sparsity.density", [0, 1], [-1e-30, 1.001]),
        ("sparsity.stride", [1, 128], [0, 129]),
        ("mask.full_every", [0, 2], [-1, 1]),
        ("optim.lr", [1e-30, 100], [0, 100.1]),
        ("optim.clip_norm", [0, 1e12], [-1e-30, 1.001e12]),
        ("train.steps", [1, 10**9], [0, 10**9 + 1]),
        ("train.keep_mlp", [0], [-1]),
        ("train.tile_mib", [0, 2**20], [-1, 2**20 + 1]),
        ("train.balance_loss", [0, 100], [-1e-30, 100.1]),
        ("train.rollback.limit", [0], [-1]),
        ("train.rollback.sigma", [3], [0, 2.999]),
        ("run.spike_sigma", [0, 3], [-1, 1e-30, 2.999]),
    ],
)
def test_a_range_ends_at_its_last_allowed_value(name, allowed, refused):
    assert [value for value in allowed if KEYS[name].out_of_range(value) is not None] == []
    assert [value for value in refused if KEYS[name].out_of_range(value) is None] == []


def test_a_path_may_have_as_many_bytes_as_linux_allows():
    name, folder = "x" * 255, "x" * 254
    path = "/".join([folder] * 16)  # 16 names of 254 bytes and 15 slashes: 4,079 bytes
    key = KEYS["data.path"]
    assert key.convert(name) == name
    assert key.convert(f"{path}/{'y' * 15}") == f"{path}/{'y' * 15}"
    for wrong in (f"{name}x", f"{path}/{'y' * 16}"):
        with pytest.raises(ValueError, match="is too long"):
            key.convert(wrong)
    assert key.convert("a b") == "a b"
    with pytest.raises(ValueError, match="control character"):
        key.convert("a\x1fb")


def test_numbers_without_fraction_have_no_point():
    assert [keys.show(value) for value in (1e14, 1e15)] == ["100000000000000", str(1e15)]
    assert KEYS["train.steps"].allowed == "whole number, at least 1"  # 10^9 is not shown
