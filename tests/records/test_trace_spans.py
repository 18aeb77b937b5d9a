"""Who claims which time, compared with a count of every nanosecond."""

from __future__ import annotations

import random

from mtrain_cli.records.trace_spans import Span, claim, innermost, inside


def test_parts_of_random_kernels_match_a_count_of_every_nanosecond():
    draw = random.Random(3)
    for _ in range(200):
        free = [(0, 40), (60, 100)]
        wanted = sorted(
            (b := draw.randrange(110), b + draw.randrange(1, 25), draw.choice("xyz"))
            for _ in range(draw.randrange(12))
        )
        parts = dict.fromkeys("xyz", 0)
        left = claim(free, wanted, parts)
        painted = {t: "" for begin, end in free for t in range(begin, end)}
        for begin, end, word in wanted:
            for t in range(begin, end):
                if painted.get(t) == "":
                    painted[t] = word
        assert parts == {word: list(painted.values()).count(word) for word in "xyz"}
        assert [t for begin, end in left for t in range(begin, end)] == [
            t for t, word in painted.items() if not word
        ]
        assert all(begin < end for begin, end in left)


def span(name: str, begin: int, end: int, thread: int = 0) -> Span:
    return Span("user_annotation", name, (0, thread), begin, end, None, None, None)


def test_the_innermost_range_of_a_thread_counts():
    ranges = [(span("outer", 0, 100), "a"), (span("inner", 20, 40), "b")]
    at = [((0, 0), t) for t in (10, 30, 50, 100)] + [((0, 1), 30)]
    assert innermost(ranges, at) == ["a", "b", "a", None, None]


def test_spans_inside_steps_come_by_their_start():
    spans = [span("late", 12, 13), span("outside", 30, 31), span("early", 2, 3)]
    steps = [span("step", 0, 20)]
    assert [s.name for s in inside(spans, steps)] == ["early", "late"]
