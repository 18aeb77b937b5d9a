"""Settings of runs: files that cannot be read."""

from __future__ import annotations

from mtrain_cli.reporting.run_settings import read_settings


def test_unreadable_settings_count_as_none(tmp_path):
    for content in (b"a: " + b"[" * 5000, b"\xff\xfe", b"a: [", b"- 1"):
        (tmp_path / "resolved.yaml").write_bytes(content)
        assert read_settings(tmp_path) == {}
