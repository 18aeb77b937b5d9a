"""Items and groups keep the order in which they come."""

from mtrain_cli.grouping import grouped, show_spans, spans


def test_groups_keep_the_order_of_their_items():
    found = grouped(["bb", "a", "cc", "b", "ddd"], len)
    assert list(found.items()) == [(2, ["bb", "cc"]), (1, ["a", "b"]), (3, ["ddd"])]
    assert grouped((), len) == {}


def test_consecutive_numbers_are_shown_as_spans():
    assert spans([1, 4, 5, 6, 9]) == [range(1, 2), range(4, 7), range(9, 10)]
    assert show_spans(spans([1, 4, 5, 6, 9])) == "1, 4-6, 9"
    assert show_spans(spans(range(0, 24, 2))).endswith("20, 22")
    assert show_spans(spans(range(0, 26, 2))).endswith("20, 22 and more")
    assert show_spans(spans([])) == ""
