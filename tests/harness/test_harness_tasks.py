"""Tasks of lm-eval are loaded quietly, give the same requests each time, and fail with a line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from harness.harness_fakes import write_tasks

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.tokenizers import ByteTokenizer
from mtrain_cli.inference.text import TextCodec
from mtrain_extras.lm_eval.requests import Plan
from mtrain_extras.lm_eval.tasks import HarnessTasks

BYTES = TextCodec(ByteTokenizer(), frozenset([257]), first=257)


def test_without_the_package_one_line_says_how_to_install_it(monkeypatch):
    for name in ("lm_eval", "lm_eval.tasks"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"needs the package lm-eval: pip install .*lm-eval"):
        HarnessTasks.load(["arc_easy"], None, None, None)


@pytest.fixture
def folder(tmp_path) -> Path:
    pytest.importorskip("lm_eval")
    return write_tasks(tmp_path / "tasks")


class Recorder(Plan):
    """Keeps all requests."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.asked: list[object] = []

    def scores(self, pairs):
        self.asked += pairs
        return super().scores(pairs)


def test_examples_are_the_same_each_time_and_nothing_is_printed(folder, capfd):
    tasks = HarnessTasks.load(["local_sums"], str(folder), 2, 4)
    asked = []
    for _ in range(2):
        recorder = Recorder(4096, 264)
        tasks.evaluate(BYTES, 4096, recorder)
        asked.append(recorder.asked)
    assert asked[0] == asked[1]
    assert len(asked[0]) == 8
    context = bytes(asked[0][0][0]).decode()
    assert context.count("Answer:") == 3
    assert tasks.plan(BYTES, Plan(4096, 264)).lengths == [len(a) + len(b) for a, b in asked[0]]
    assert capfd.readouterr().err == ""


def test_a_group_brings_its_tasks(folder):
    tasks = HarnessTasks.load(["local_group"], str(folder), None, None)
    found = tasks.evaluate(BYTES, 4096, Plan(4096, 264))
    assert list(found["samples"]) == ["local_sums", "local_write"]
    assert len(found["samples"]["local_sums"]) == 6


def test_mistakes_get_a_line(folder, monkeypatch):
    def plan(name: str) -> None:
        HarnessTasks.load([name], str(folder), None, None).plan(BYTES, Plan(32, 264))

    def refused(name: str, message: str) -> None:
        with pytest.raises(ConfigError) as error:
            plan(name)
        (line,) = error.value.problems
        assert message in line, line[:500]
        assert "\n" not in line

    refused("local_sum", "no such task of lm-eval (did you mean local_sums?)")
    refused("local_sums", "--tasks local_sums: a request has")
    write = folder / "local_write.yaml"
    write.write_text(write.read_text().replace('"max_gen_toks"', '"num_beams"'))
    refused("local_write", "generation_kwargs num_beams=6: mtrain does not support this setting")
    write.write_text(write.read_text().replace('"task"', '"unsafe_code": true, "task"'))
    refused("local_write", "--tasks local_write: runs code that the model writes")
    (folder / "sums.json").unlink()
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "cache"))
    refused("local_rolling", "--tasks local_rolling: lm-eval cannot load this (")
