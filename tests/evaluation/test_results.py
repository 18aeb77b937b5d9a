"""Results on disk: what a crash cut short is dropped, and other models are refused."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.evaluation.results import (
    IN_TRAINING,
    PERCENT,
    Part,
    Result,
    ResultsFolder,
    format_score,
    mean_and_error,
    model_name,
    read_results,
    read_sample_rows,
    read_whole_results,
    require_own,
    weighted_mean_and_error,
)

RESULT = Result("k1", "niah", 512, "dense", "", 3, 2, 50.0, 50.0, "%", 1.5, (Part(0, 10, 4, 50.0),))


def test_standard_error_is_that_of_the_mean():
    assert mean_and_error([1.0, 3.0]) == (2.0, math.sqrt(2) / math.sqrt(2))
    assert mean_and_error([5.0]) == (5.0, None)
    assert mean_and_error([]) == (None, None)
    assert mean_and_error([1.0, math.nan]) == (None, None)


def test_a_weighted_mean_is_that_of_all_tokens():
    values, weights = [1.0, 3.0, 8.0], [4, 2, 0]
    mean, error = weighted_mean_and_error(values, weights)
    assert mean == pytest.approx((4 * 1.0 + 2 * 3.0) / 6)
    assert error == pytest.approx(math.sqrt(2 * ((4 * 2 / 3) ** 2 + (2 * 4 / 3) ** 2)) / 6)
    alike = weighted_mean_and_error(values, [7, 7, 7])
    assert alike == pytest.approx(mean_and_error(values))
    assert weighted_mean_and_error([5.0, math.nan], [3, 0]) == (5.0, None)
    assert weighted_mean_and_error([5.0, math.nan], [3, 1]) == (None, None)
    assert weighted_mean_and_error([5.0], [0]) == (None, None)


def test_results_survive_reading(tmp_path):
    folder = ResultsFolder.open(tmp_path / "out", "m")
    folder.add_sample({"key": "k1", "index": 0, "score": 100.0})
    folder.add_result(RESULT)
    assert read_results(tmp_path / "out") == [RESULT]
    assert read_sample_rows(tmp_path / "out") == [{"key": "k1", "index": 0, "score": 100.0}]


def test_a_number_that_is_not_finite_is_null_in_the_files(tmp_path):
    folder = ResultsFolder.open(tmp_path, "m")
    folder.add_sample({"key": "k1", "index": 0, "score": math.nan})
    folder.add_result(RESULT)
    folder.add_result(dataclasses.replace(RESULT, score=math.inf))
    for name in ("samples.jsonl", "results.jsonl"):
        assert (
            json.loads((tmp_path / name).read_text(), parse_constant=pytest.fail)["score"] is None
        )
    assert [result.score for result in read_results(tmp_path)] == [None]


@pytest.mark.parametrize("damage", ["{", "[1]", '{"key": "k2", "task": "niah"}'])
def test_a_damaged_line_is_named_until_the_folder_is_written_again(tmp_path, damage):
    folder = ResultsFolder.open(tmp_path, "m")
    folder.add_result(dataclasses.replace(RESULT, key="k0"))
    folder.add_result(RESULT)
    file = tmp_path / "results.jsonl"
    first, second = file.read_text().splitlines()
    file.write_text(f"{first}\n\n{damage}\n{second}\n")
    results, line = read_whole_results(tmp_path)
    assert [result.key for result in results] == ["k0", "k1"]
    assert line == (
        f"{file}: line 3 is damaged; this result is not shown. Give the same `mtrain eval` again"
    )
    again = ResultsFolder.open(tmp_path, "m")
    assert list(again.results) == ["k0", "k1"]
    assert again.damage[0].startswith(f"{file}: line 3 is damaged; removed, and the `mtrain eval`")
    assert read_whole_results(tmp_path) == (results, "")


@pytest.mark.parametrize("row", [{"index": -1}, {"index": "0"}, {"index": 0.0}, {"key": 1}])
def test_rows_without_key_and_number_are_no_samples(tmp_path, row):
    folder = ResultsFolder.open(tmp_path, "m")
    folder.add_sample({"key": "k1", "index": 0, "score": 1.0})
    folder.add_sample({"key": "k1", "index": 1, "score": 1.0, **row})
    again = ResultsFolder.open(tmp_path, "m")
    assert again.samples["k1"].keys() == {0}
    (line,) = again.damage
    assert line == (
        f"{tmp_path}/samples.jsonl: line 2 is damaged; removed, and the `mtrain eval` that wrote "
        "it measures again"
    )
    assert ResultsFolder.open(tmp_path, "m").damage == ()


def test_damaged_samples_are_named_but_not_a_line_cut_short(tmp_path):
    folder = ResultsFolder.open(tmp_path, "m")
    folder.add_sample({"key": "k1", "index": 0, "score": 1.0})
    file = tmp_path / "samples.jsonl"
    whole = file.read_text()
    file.write_text(f"oops\n{whole}\n[]\n" + '{"key": "k1", "ind')
    (line,) = ResultsFolder.open(tmp_path, "m").damage
    assert line.startswith(f"{file}: lines 1, 4 are damaged; removed, and ")
    assert file.read_text() == whole
    file.write_text(whole + '{"key": "k1", "ind')
    assert ResultsFolder.open(tmp_path, "m").damage == ()
    assert file.read_text() == whole


def test_a_last_line_without_newline_gets_one_and_a_whole_file_stays(tmp_path):
    folder = ResultsFolder.open(tmp_path, "m")
    folder.add_sample({"key": "k1", "index": 0, "score": 1.0})
    folder.add_result(RESULT)
    files = [tmp_path / "samples.jsonl", tmp_path / "results.jsonl"]
    whole = [(file.read_text(), file.stat().st_ino) for file in files]
    assert ResultsFolder.open(tmp_path, "m").damage == ()
    assert [(file.read_text(), file.stat().st_ino) for file in files] == whole
    for file in files:
        file.write_text(file.read_text().rstrip("\n"))
    assert ResultsFolder.open(tmp_path, "m").damage == ()
    assert [file.read_text() for file in files] == [text for text, _ in whole]


def test_a_damaged_line_with_a_carriage_return_is_named(tmp_path):
    folder = ResultsFolder.open(tmp_path, "m")
    folder.add_sample({"key": "k1", "index": 0, "score": 1.0})
    file = tmp_path / "samples.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + whole.rstrip() + b"\rgarbage\n")
    (line,) = ResultsFolder.open(tmp_path, "m").damage
    assert line.startswith(f"{file}: line 2 is damaged; removed")
    assert file.read_bytes() == whole


def test_results_of_another_model_are_refused(tmp_path):
    ResultsFolder.open(tmp_path, "one")
    with pytest.raises(ConfigError, match="results of another model, one"):
        require_own(tmp_path, "two")


@pytest.mark.parametrize("content", ["{", "[]", None])
@pytest.mark.parametrize("kept", ["samples.jsonl", "results.jsonl"])
def test_a_lost_name_of_the_model_is_refused_and_its_results_are_shown(tmp_path, kept, content):
    folder = ResultsFolder.open(tmp_path / "evaluation", "..")
    folder.add_result(RESULT)
    folder.add_sample({"key": RESULT.key, "index": 0, "score": 1.0})
    for name in {"samples.jsonl", "results.jsonl", "evaluation.json"} - {kept}:
        (folder.path / name).unlink()
    about = folder.path / "evaluation.json"
    if content is not None:
        about.write_text(content)
    assert read_whole_results(tmp_path) == ([RESULT] * (kept == "results.jsonl"), "")
    with pytest.raises(
        ConfigError, match=r'does not name the model \(.* Write \{"model": "\.\."\}'
    ):
        require_own(folder.path, "..")
    about.write_text('{"model": ".."}')
    require_own(folder.path, "..")
    about.unlink()
    (folder.path / kept).write_text('{"text": "of another program"}\n')
    assert read_whole_results(tmp_path) == ([], "")
    with pytest.raises(ConfigError, match="not empty"):
        require_own(folder.path, "..")


def test_other_folders_and_files_are_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        require_own(tmp_path, "m")
    with pytest.raises(ConfigError, match="is a file"):
        require_own(tmp_path / "thesis.txt", "m")
    with pytest.raises(ConfigError, match=r"holds no samples\.jsonl"):
        read_sample_rows(tmp_path)


def test_a_run_can_move_with_its_results(tmp_path):
    assert model_name(tmp_path / "run", tmp_path / "run" / "evaluation") == ".."
    assert model_name(tmp_path / "run", tmp_path / "other") == str(tmp_path / "run")


def test_what_a_run_trains_again_is_dropped(tmp_path):
    folder = ResultsFolder.open(tmp_path / "out", "..")
    for key, step, marked in (
        ("a", 2, True), ("b", 4, True), ("c", 4, False), ("d", None, True),
    ):  # fmt: skip
        mark = {IN_TRAINING: True} if marked else {}
        folder.add_sample({"key": key, "index": 0, "score": 1.0, "step": step, **mark})
        folder.add_result(Result(key, "niah", 512, "dense", "", step, 1, 1.0, None, PERCENT))
    folder.drop_training(2)
    for left in (folder, ResultsFolder.open(tmp_path / "out", "..")):
        assert sorted(left.samples) == sorted(left.results) == ["a", "c"]


def test_a_huge_perplexity_is_kept_and_shown(tmp_path):
    own = dataclasses.replace(RESULT, score=2.3e21, error=1.5e300, unit="")
    ResultsFolder.open(tmp_path / "out", "m").add_result(own)
    (read,) = read_results(tmp_path / "out")
    assert read == own
    assert format_score(read.score, read.error, read.unit) == "2.3e+21 ± 1.5e+300"
    assert format_score(None, None, "") == "-"
    assert format_score(123456.7, 1.25, "") == "123456.7000 ± 1.2500"
    damaged = (tmp_path / "out" / "results.jsonl").read_text().replace("2.3e+21", "Infinity")
    (tmp_path / "out" / "results.jsonl").write_text(damaged)
    assert read_results(tmp_path / "out") == []
