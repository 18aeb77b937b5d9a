"""Files with a step per line: damaged lines are named, kept and never in the way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mtrain_cli.records import step_lines
from mtrain_cli.records.step_lines import drop_later_steps, read_steps

ROWS = [b'{"step": 1}\n', b"\xffoops\n", b"\n", b'{"step": 2}\n', b'{"step": 3}\n']


def steps(file: Path) -> tuple[list[int], list[int]]:
    return read_steps(file, lambda row: row["step"])


def test_a_damaged_line_hides_no_other(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"".join(ROWS) + b'{"step": true}\n{}\n[1]\n{"step": -1}\n{"step": 4, "lo')
    # true is no number, although Python says so.
    assert steps(file) == ([1, 2, 3], [2, 6, 7, 8, 9])


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


def test_the_new_content_is_on_the_disk_before_it_replaces_the_file(tmp_path, monkeypatch):
    file = tmp_path / "steps.jsonl"
    old = b"".join(ROWS)
    file.write_bytes(old)
    synced = []

    def fsync(descriptor):
        assert file.read_bytes() == old
        synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(step_lines.os, "fsync", fsync)
    drop_later_steps(file, 2)
    assert synced == [file.stat().st_size] != [len(old)]


@pytest.mark.parametrize("cut", [b'{"step": 2, "lo', b"{", b"\xff"])
def test_a_cut_line_is_not_damaged_and_goes_with_a_rewrite(tmp_path, cut):
    file = tmp_path / "steps.jsonl"
    file.write_bytes(ROWS[0] + cut)
    assert steps(file) == ([1], [])
    drop_later_steps(file, 9)
    assert file.read_bytes() == ROWS[0]
    file.write_bytes(ROWS[0] + cut + b"\n")
    assert steps(file) == ([1], [2])
    drop_later_steps(file, 9)
    assert file.read_bytes() == ROWS[0] + cut + b"\n"


def test_a_whole_last_line_gets_its_newline(tmp_path):
    file = tmp_path / "steps.jsonl"
    file.write_bytes(b'{"step": 1}\r\n{"step": 2}')
    drop_later_steps(file, 2)
    assert file.read_bytes() == ROWS[0] + ROWS[3]


def test_a_step_is_a_whole_number(tmp_path):
    file = tmp_path / "steps.jsonl"
    file.write_bytes(b'{"step": 1}\n{"step": 2.0}\n{"step": "2"}\n')
    assert steps(file) == ([1], [2, 3])


def test_only_a_newline_ends_a_line(tmp_path):
    file = tmp_path / "steps.jsonl"
    line = '{"step": 1,\r"note": "a\u2028b\x85c"}\n'.encode()
    file.write_bytes(line + ROWS[3])
    assert steps(file) == ([1, 2], [])
    drop_later_steps(file, 1)
    assert file.read_bytes() == line
