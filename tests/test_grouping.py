"""Items and groups keep the order in which they come."""

from mtrain_cli.grouping import grouped


def test_groups_keep_the_order_of_their_items():
    found = grouped(["bb", "a", "cc", "b", "ddd"], len)
    assert list(found.items()) == [(2, ["bb", "cc"]), (1, ["a", "b"]), (3, ["ddd"])]
    assert grouped((), len) == {}
