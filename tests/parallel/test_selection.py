"""`exchange=auto`: gathered where memory allows, in a ring where not, and why."""

from mtrain_cli.parallel.selection import choose_exchange, gathered_bytes

SHAPE = {"kv_heads": 2, "head_dim": 128, "dtype_bytes": 2}


def test_gathered_bytes_are_keys_values_their_gradients_and_float32_sums():
    numbers = 2 * 1000 * 2 * 128  # keys and values
    assert gathered_bytes(1000, **SHAPE) == numbers * (2 + 2 + 4)


def test_the_ring_begins_where_the_gathered_keys_pass_the_share_of_memory():
    limit = int(0.15 * (8 << 30))
    fits = limit // gathered_bytes(1, **SHAPE)
    assert choose_exchange("auto", workers=4, tokens=fits, device_memory=8 << 30, **SHAPE)[0] == "all_gather"
    name, why = choose_exchange("auto", workers=4, tokens=fits + 1, device_memory=8 << 30, **SHAPE)
    assert name == "ring"
    assert "over 15% of 8 GiB" in why


def test_one_worker_and_what_is_configured_are_not_weighed():
    assert choose_exchange("auto", workers=1, tokens=1 << 40, **SHAPE)[0] == "all_gather"
    assert choose_exchange("ring", workers=4, tokens=1, **SHAPE) == ("ring", "as configured")
