"""Files with a step per line: damaged lines are named, kept and never in the way."""

from __future__ import annotations

from pathlib import Path

from mtrain_cli.records.step_lines import drop_later_steps, read_steps

ROWS = [b'{"step": 1}\n', b"\xffoops\n", b"\n", b'{"step": 2}\n', b'{"step": 3}\n']


def steps(file: Path) -> tuple[list[int], list[int]]:
    return read_steps(file, lambda row: row["step"])


def test_a_damaged_line_hides_no_other(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"".join(ROWS) + b'{"step": true}\n{}\n[1]\n{"step": 4, "lo')
    # true is no number, although Python says so.
    assert steps(file) == ([1, 2, 3], [2, 6, 7, 8])


def test_later_steps_go_and_damaged_lines_before_them_stay(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"".join(ROWS) + b"oops\n")
    assert drop_later_steps(file, 2) == [{"step": 1}, {"step": 2}]
    assert file.read_bytes() == ROWS[0] + ROWS[1] + ROWS[3]
    file.write_bytes(ROWS[0] + ROWS[1] + b'{"step": 2, "lo')
    assert drop_later_steps(file, 1) == [{"step": 1}]
    assert file.read_bytes() == ROWS[0] + ROWS[1]


def test_the_last_line_counts_if_it_is_whole(tmp_path):
    file = tmp_path / "steps.jsonl"
    for last, steps in ((b'{"step": 2}', [1, 2]), (b'{"step": 2', [1]), (b"12", [1])):
        file.write_bytes(b'{"step": 1}\n' + last)
        assert read_steps(file, lambda row: row["step"]) == (steps, [])
