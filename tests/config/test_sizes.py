import pytest

from mtrain_cli.config.sizes import count, format_bytes, format_size, parse_size, with_count


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("512k", 524288),
        ("512K", 524288),
        ("1m", 1048576),
        ("0.5M", 524288),
        ("1.5k", 1536),
        ("524288", 524288),
        ("524_288", 524288),
        ("1e6", 1_000_000),
        (" 4k ", 4096),
        (4096, 4096),
        (4096.0, 4096),
        ("-4k", -4096),
    ],
)
def test_sizes_are_parsed_with_k_as_1024(text, tokens):
    assert parse_size(text) == tokens


@pytest.mark.parametrize(
    "text",
    ["512q", "k", "", "4kk", "4 5", "abc", "4g", "1e", ".", "--4", "0x10", "nan", "inf", True],
)
def test_an_invalid_size_is_refused_with_examples(text):
    with pytest.raises(ValueError, match="such as 4096, 512k or 1m"):
        parse_size(text)


def test_a_fraction_of_a_token_is_refused_with_the_number():
    with pytest.raises(ValueError, match=r"307\.2 tokens; expected a whole number"):
        parse_size("0.3k")


@pytest.mark.parametrize(
    "tokens",
    [
        0,
        1,
        2,
        1000,
        1023,
        1024,
        1025,
        4096,
        1536,
        524288,
        1048576,
        3 * 1048576,
        1048576 + 1024,
        -2048,
    ],
)
def test_format_is_the_inverse_of_parse(tokens):
    assert parse_size(format_size(tokens)) == tokens


def test_format_uses_the_largest_exact_unit():
    assert [format_size(n) for n in (524288, 1048576, 1048576 + 1024, 1000)] == [
        "512k",
        "1m",
        "1025k",
        "1000",
    ]


def test_a_noun_has_the_number_of_its_count():
    assert [with_count(n, "document") for n in (0, 1, 2000)] == [
        "0 documents",
        "1 document",
        "2,000 documents",
    ]


def test_counts_have_three_digits():
    numbers = {7: "7", 822_000: "822 K", 8_030_261_248: "8.03 B", 494_032_768: "494 M"}
    assert {number: count(number) for number in numbers} == numbers


def test_a_size_has_at_most_40_digits_and_is_below_1e30():
    assert parse_size("0" * 39 + "7") == 7
    assert parse_size("9e29") == 9 * 10**29
    for text in ("0" * 40 + "7", "1e30", "-1e30"):
        with pytest.raises(ValueError, match="too large or has too many digits"):
            parse_size(text)


def test_units_begin_at_one():
    assert [format_bytes(size) for size in (1023, 1024, 2**20, 2**30)] == [
        "1023 B", "1.0 KiB", "1.0 MiB", "1.0 GiB",
    ]  # fmt: skip
    assert [count(number) for number in (999, 1000, 10**6, 10**9)] == ["999", "1 K", "1 M", "1 B"]
