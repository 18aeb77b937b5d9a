"""RULER's samples equal the bytes of the original, and its scores."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
from evaluation.small_tokenizer import write_small_tokenizer
from ruler.ruler_files import write_essays, write_hotpotqa, write_squad

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.tokenizers import ByteTokenizer, FileTokenizer, open_tokenizer
from mtrain_extras.ruler.ruler import (
    RULER6,
    RULER13,
    TASKS,
    clean_prediction,
    generate,
    score,
    string_match_all,
    string_match_part,
)
from mtrain_extras.ruler.ruler_files import Sources

# First half of the SHA-256 of the files that NVIDIA/RULER, commit c3f5e3b, writes with the small
# tokenizer, seed 42 and wonderwords 3.0.1. Key: (how the tokenizer cuts, task, length, samples).
_ORIGINAL = {
    ("bytes", "niah_single_1", 2048, 5): "611b1ed2f5522e7a44e18bf40c9b88f2",
    ("bytes", "niah_single_1", 8192, 5): "43026ee1300185dc51a1426fab33d581",
    ("bytes", "niah_multikey_2", 2048, 5): "c4e5b4744c0181f064005de6e5448293",
    ("bytes", "niah_multikey_2", 8192, 5): "29c5c18f5d649afd97be33195184f6f7",
    ("bytes", "niah_multikey_3", 2048, 5): "8bddbfd26f7ae8ed4f16263bb51f2f06",
    ("bytes", "niah_multikey_3", 8192, 5): "4b24b8affdb8f430da453d460335a77d",
    ("bytes", "vt", 2048, 5): "d2b7a4652520149a2fb7d38e7627db8d",
    ("bytes", "vt", 8192, 5): "52722d19e399bdf93fe61660eb029873",
    ("bytes", "cwe", 2048, 5): "a1608cc14024910dc9725fe6351782fd",
    ("bytes", "cwe", 8192, 5): "172a3584013b6804e34ba89774ebf8b9",
    ("bytes", "fwe", 2048, 5): "9f2cb3a9564917d44577b0b0da5e3137",
    ("bytes", "fwe", 8192, 5): "0a43ff1bfce8a78afbfb9cfbbf08f2f3",
    ("lines", "niah_multikey_2", 16384, 20): "bcada2a820bafa22864a39ae87123be7",
    ("lines", "cwe", 16384, 20): "631deb28982f241ded0eb9afd69512ad",
    ("lines", "vt", 4096, 20): "bd69aaaa48e0d3fbf8a596cb49074092",
    ("none", "niah_multikey_2", 16384, 20): "740b187f9bd0241de22dfa26e53a9240",
    ("none", "vt", 4096, 20): "f907fdc316e4981d42f8deffb3eca4ff",
    ("none", "cwe", 16384, 20): "68a0d4327c0d58f8e047faac3189997b",
}
# The same for the tasks with the files of `ruler_files`. There the original's sentences came from
# `split_sentences`, not from NLTK.
_WITH_FILES = {
    "niah_single_2": "a92cd8f35e0eb9e4f7745da450fa0dd2",
    "niah_single_3": "6d7450e5faad3bfa010ad25a0a085d9f",
    "niah_multikey_1": "821993ee3d6fed0d6a3373552d4cd987",
    "niah_multivalue": "22c22631e8f1dd9cba33f939cde35f3c",
    "niah_multiquery": "8cfd5bedbed1515f2f1ccb88d96821ee",
    "qa_1": "9f37a8763edde6d1301bcc2abb0c2b4d",
    "qa_2": "876d38da682b443af46198103de34067",
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FileTokenizer]:
    folder = tmp_path_factory.mktemp("tokenizers")
    opened = {}
    for cut in ("bytes", "lines", "none"):
        tokenizer = open_tokenizer(str(write_small_tokenizer(folder / cut, cut)))
        assert isinstance(tokenizer, FileTokenizer)
        opened[cut] = tokenizer
    return opened


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    folder = tmp_path_factory.mktemp("sources")
    return Sources(*(str(write(folder)) for write in (write_essays, write_squad, write_hotpotqa)))


def _sha256(*arguments, **options) -> str:
    digest = hashlib.sha256()
    for sample in generate(*arguments, **options):
        digest.update(sample.line().encode())
    return digest.hexdigest()[:32]


@pytest.mark.parametrize(("cut", "task", "length", "count"), _ORIGINAL)
def test_samples_equal_the_original(tokenizers, cut, task, length, count) -> None:
    expected = _ORIGINAL[cut, task, length, count]
    assert _sha256(task, length, count, tokenizers[cut]) == expected


@pytest.mark.parametrize("task", _WITH_FILES)
def test_samples_with_files_equal_the_original(tokenizers, sources, task) -> None:
    assert _sha256(task, 8192, 5, tokenizers["bytes"], sources=sources) == _WITH_FILES[task]


def test_all_tasks_are_compared() -> None:
    assert {task for _, task, _, _ in _ORIGINAL} == set(RULER6)
    assert set(RULER6) | set(_WITH_FILES) == set(RULER13) == set(TASKS)
    assert (len(RULER6), len(RULER13)) == (6, 13)


def test_the_process_keeps_its_random_numbers(tokenizers) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()
    samples = generate("vt", 2048, 3, tokenizers["bytes"])
    next(samples)
    random.random()  # between two samples
    list(samples)
    random.setstate(before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert _sha256("vt", 2048, 5, tokenizers["bytes"]) == _ORIGINAL["bytes", "vt", 2048, 5]
    assert random.getstate() == before[0]


@pytest.mark.parametrize(
    ("task", "length", "said"),
    [
        ("niah_single_1", 300, "too few tokens for a sample of niah_single_1; the shortest that"),
        ("niah_multikey_2", 300, "--length 300: too few tokens for a sample of niah_multikey_2"),
        ("niah_multikey_3", 600, "--length 600: too few tokens for a sample of niah_multikey_3"),
        ("vt", 500, "too few tokens for a sample of vt; the shortest that was drawn has 83"),
        ("cwe", 1000, "--length 1000: too few tokens for a sample of cwe; the shortest"),
        ("fwe", 290, "--length 290: too few tokens for a sample of fwe"),
        ("fwe", 60, "--length 60: too few tokens for a sample of fwe"),
        ("fwe", 1, "--length 1: too few tokens for a sample of fwe"),
        ("niah_single", 4096, "no such task (did you mean niah_single_1?); allowed: niah_single_1"),
        ("niah_single_1@x", 4096, "only the tasks with essays take @FILE: niah_single_2, niah_s"),
        ("niah_single_2@", 4096, "only the tasks with essays take @FILE"),
        ("niah_single_2@none.txt", 4096, "--tasks niah_single_2@none.txt: no such file."),
        ("niah_single_2", 4096, "give --essays FILE, or name the task niah_single_2@FILE for"),
        ("qa_1", 4096, "--tasks qa_1: give --squad FILE"),
        ("cwe", 600_000, "there are only 8,166; give a smaller length, or RULER's english_words"),
    ],
)
def test_a_wrong_request_ends_with_one_line(tokenizers, task, length, said) -> None:
    with pytest.raises(ConfigError) as error:
        list(generate(task, length, 2, tokenizers["bytes"]))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_bytes_are_too_many_tokens_for_the_example_of_vt() -> None:
    with pytest.raises(ConfigError, match="vt: the solved example has 838 tokens"):
        list(generate("vt", 65536, 2, ByteTokenizer()))


def test_more_samples_than_questions_are_refused(tokenizers, sources) -> None:
    with pytest.raises(ConfigError, match=r"has 30 questions for qa_2, fewer than the 31 samples"):
        list(generate("qa_2", 8192, 31, tokenizers["bytes"], sources=sources))


def test_scores_are_percentages_of_the_metric_of_the_task() -> None:
    outputs = [("one", "two"), ("three", "four")]
    assert score("vt", ["One", "three\x00FOUR"], outputs) == 75.0
    assert score("qa_1", ["One", "none"], outputs) == 50.0
    assert score("niah_single_2@text", ["One", "none"], outputs) == 25.0
    assert score("cwe", ["one"] * 3, [("one", "a", "b")] * 3) == 33.33
    with pytest.raises(ConfigError, match="no predictions"):
        score("vt", [], [])
    with pytest.raises(ConfigError, match="no such task"):
        score("vtt", ["a"], [("a",)])


# 50 predictions and their expected answers.
_ANSWERS = [("1234567",), ("Alpha", "beta"), ("red-fox", "4821", "ZED"), ("né Stone", "x"), ("10",)]
_PREDICTIONS = [
    "1234567",
    "  it is 1234567.",
    "The words are ALPHA and BETA",
    "alpha",
    "red-fox, 4821 and zed",
    "RED-FOX\x00 4821",
    "NÉ STONE\n\n",
    "12345\x1f67 100",
    "",
    "\x07\x08",
]
_CASES = [(prediction, outputs) for outputs in _ANSWERS for prediction in _PREDICTIONS]
# Scores of NVIDIA/RULER, commit c3f5e3b, scripts/eval: of all cases, and of each group of answers.
_ALL = 15.33
_ALL_GROUPS = [20.0, 15.0, 16.67, 15.0, 10.0]
_PART = 20.0
_PART_GROUPS = [20.0, 20.0, 20.0, 30.0, 10.0]


def _score(metric, cases) -> float:
    grades = [metric(clean_prediction(text), outputs) for text, outputs in cases]
    return round(sum(grades) / len(grades) * 100, 2)


@pytest.mark.parametrize(
    ("metric", "whole", "groups"),
    [(string_match_all, _ALL, _ALL_GROUPS), (string_match_part, _PART, _PART_GROUPS)],
)
def test_scores_of_50_predictions_equal_the_original(metric, whole, groups) -> None:
    assert len(_CASES) == 50
    assert _score(metric, _CASES) == whole
    assert [_score(metric, _CASES[i : i + 10]) for i in range(0, 50, 10)] == groups
