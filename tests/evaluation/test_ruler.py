"""RULER's samples equal the bytes of the original, and its scores."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from command import python_path
from evaluation.ruler_files import write_essays, write_hotpotqa, write_squad
from evaluation.small_tokenizer import write_small_tokenizer

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.tokenizers import ByteTokenizer, FileTokenizer, open_tokenizer
from mtrain_cli.evaluation.ruler import (
    RULER6,
    RULER13,
    TASKS,
    find_task,
    generate,
    grades,
    score,
)
from mtrain_cli.evaluation.sources import Sources

# SHA-256 of the files that NVIDIA/RULER, commit c3f5e3b, writes with the small tokenizer, seed 42
# and wonderwords 3.0.1. Key: (how the tokenizer cuts, task, length, samples).
_ORIGINAL = {
    (
        "bytes",
        "niah_single_1",
        2048,
        5,
    ): "611b1ed2f5522e7a44e18bf40c9b88f25b284fa92e1f4c1b86695d7a095b8e2b",
    (
        "bytes",
        "niah_single_1",
        8192,
        5,
    ): "43026ee1300185dc51a1426fab33d5819557e99a08fb2ac6383af8e8d907c57d",
    (
        "bytes",
        "niah_multikey_2",
        2048,
        5,
    ): "c4e5b4744c0181f064005de6e5448293703ac2d4ed908c909dabe3a56e123361",
    (
        "bytes",
        "niah_multikey_2",
        8192,
        5,
    ): "29c5c18f5d649afd97be33195184f6f7d7386bb9ddb79b98f4922cbbd97a5733",
    (
        "bytes",
        "niah_multikey_3",
        2048,
        5,
    ): "8bddbfd26f7ae8ed4f16263bb51f2f066de9ef96fa06d901c33f737068e39255",
    (
        "bytes",
        "niah_multikey_3",
        8192,
        5,
    ): "4b24b8affdb8f430da453d460335a77d4e13d39ec0162b5cac91111efd99bb01",
    ("bytes", "vt", 2048, 5): "d2b7a4652520149a2fb7d38e7627db8d750f24136ff91fae27dc3ffbc0d4c8a8",
    ("bytes", "vt", 8192, 5): "52722d19e399bdf93fe61660eb029873753c62fc59e4101cefee106fcdb72f09",
    ("bytes", "cwe", 2048, 5): "a1608cc14024910dc9725fe6351782fd62fd462732e95befd1d3a913a000182e",
    ("bytes", "cwe", 8192, 5): "172a3584013b6804e34ba89774ebf8b9476b8725f04a13bc4b3af4269a6e2d42",
    ("bytes", "fwe", 2048, 5): "9f2cb3a9564917d44577b0b0da5e31373ab4bb860d217723d185198243a51f93",
    ("bytes", "fwe", 8192, 5): "0a43ff1bfce8a78afbfb9cfbbf08f2f3dab6d417dbda069825ef79e96fb83879",
    (
        "lines",
        "niah_multikey_2",
        16384,
        20,
    ): "bcada2a820bafa22864a39ae87123be7398917d3ac014b0c1cc345e641d7aaf2",
    ("lines", "cwe", 16384, 20): "631deb28982f241ded0eb9afd69512adb5276bb9720f7074c0323580be302a06",
    ("lines", "vt", 4096, 20): "bd69aaaa48e0d3fbf8a596cb49074092430ea4fe58885c17086ad7eb4b3826c2",
    (
        "none",
        "niah_multikey_2",
        16384,
        20,
    ): "740b187f9bd0241de22dfa26e53a92401b01fb1bbfd6e647933c12fd13b7bd3e",
    ("none", "vt", 4096, 20): "f907fdc316e4981d42f8deffb3eca4ff02946a28e4d9d267820c62602a80cdcf",
    ("none", "cwe", 16384, 20): "68a0d4327c0d58f8e047faac3189997b9fd99ed6c920a4fc536e635881c4a84c",
}
# The same for the tasks with the files of `ruler_files`. There the original's sentences came from
# `split_sentences`, not from NLTK.
_WITH_FILES = {
    "niah_single_2": "a92cd8f35e0eb9e4f7745da450fa0dd2701b4a5ad97ea2b59f9742228d1e5f7f",
    "niah_single_3": "6d7450e5faad3bfa010ad25a0a085d9f267ffde5e7ce93553979d6a82b8b76ba",
    "niah_multikey_1": "821993ee3d6fed0d6a3373552d4cd987ab969714c93920f46632e9d73cdd8d5e",
    "niah_multivalue": "22c22631e8f1dd9cba33f939cde35f3c9813e9da3fbed56c725e3fbc900e086a",
    "niah_multiquery": "8cfd5bedbed1515f2f1ccb88d96821eed4f83469e05a4d0c2bb84ceabb5eb420",
    "qa_1": "9f37a8763edde6d1301bcc2abb0c2b4d207af376e239156967dcecd80f006555",
    "qa_2": "876d38da682b443af46198103de34067995d6fd378607d4b30613f041976dd05",
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
    return Sources(write_essays(folder), write_squad(folder), write_hotpotqa(folder))


def _sha256(*arguments, **options) -> str:
    digest = hashlib.sha256()
    for sample in generate(*arguments, **options):
        digest.update(sample.line().encode())
    return digest.hexdigest()


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


@pytest.mark.parametrize("task", RULER6)
def test_samples_ask_for_what_stands_in_their_text(tokenizers, task) -> None:
    for sample in generate(task, 8192, 3, tokenizers["bytes"]):
        assert all(output in sample.input for output in sample.outputs)
        reserved = find_task(task).template.tokens
        (tokens,) = map(len, tokenizers["bytes"].encode([sample.prompt]))
        assert tokens + reserved == sample.length <= 8192
        if sample.answer_token is not None:
            before = sample.input[: sample.index]
            assert sample.input.startswith(sample.outputs[0], sample.index)
            assert len(tokenizers["bytes"].encode([before])[0]) == sample.answer_token


def test_another_seed_gives_other_samples(tokenizers) -> None:
    for task in RULER6:
        first, second = (
            next(generate(task, 2048, 1, tokenizers["bytes"], seed=s)) for s in (42, 43)
        )
        assert first.input != second.input


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


_PRINT = """
import hashlib, sys
from mtrain_cli.data.tokenizers import open_tokenizer
from mtrain_cli.evaluation.ruler import generate
samples = generate("niah_multikey_2", 2048, 5, open_tokenizer(sys.argv[1]))
print(hashlib.sha256("".join(sample.line() for sample in samples).encode()).hexdigest())
"""


@pytest.mark.usefixtures("tokenizers")
@pytest.mark.parametrize("threads", ["1", "3"])
def test_samples_do_not_depend_on_the_number_of_threads(tmp_path: Path, threads: str) -> None:
    path = write_small_tokenizer(tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", _PRINT, str(path)],
        env={**os.environ, "PYTHONPATH": python_path(), "RAYON_NUM_THREADS": threads},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == _ORIGINAL["bytes", "niah_multikey_2", 2048, 5]


def test_samples_come_one_by_one(tokenizers) -> None:
    assert len(list(islice(generate("niah_single_1", 1024, 10**9, tokenizers["bytes"]), 70))) == 70


def test_another_haystack_goes_by_its_name(tokenizers, tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("My own text. It is short! Is it? " * 40)
    (sample,) = generate(f"niah_single_2@{path}", 4096, 1, tokenizers["bytes"])
    assert "My own text. It is short! Is it?" in sample.input


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
        ("niah_single_2@none.txt", 4096, "--tasks niah_single_2@none.txt: no such file. Give a"),
        (
            "niah_single_2",
            4096,
            "needs a file of essays; give one, or name the task niah_single_2@",
        ),
        ("qa_1", 4096, "needs a file of squad; give one"),
        ("qa_2", 4096, "needs a file of hotpotqa; give one"),
        ("cwe", 600_000, "there are only 8,166; give a smaller length, or RULER's english_words"),
    ],
)
def test_a_wrong_request_ends_with_one_line(tokenizers, task, length, said) -> None:
    with pytest.raises(ConfigError) as error:
        list(generate(task, length, 2, tokenizers["bytes"]))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_bytes_are_too_many_tokens_for_the_example_of_vt() -> None:
    with pytest.raises(ConfigError, match="vt: the solved example has 838 tokens of bytes and may"):
        list(generate("vt", 65536, 2, ByteTokenizer()))


def test_more_samples_than_questions_are_refused(tokenizers, sources) -> None:
    with pytest.raises(ConfigError, match=r"has 30 questions for qa_2, fewer than the 31 samples"):
        list(generate("qa_2", 8192, 31, tokenizers["bytes"], sources=sources))


def test_scores_are_percentages_of_the_metric_of_the_task() -> None:
    outputs = [("one", "two"), ("three", "four")]
    assert score("vt", ["One", "three\x00FOUR"], outputs) == 75.0
    assert score("qa_1", ["One", "none"], outputs) == 50.0
    assert grades("niah_single_2@text", ["One", "none"], outputs) == [0.5, 0.0]
    assert score("cwe", ["one"] * 3, [("one", "a", "b")] * 3) == 33.33
    with pytest.raises(ConfigError, match="no predictions"):
        score("vt", [], [])
    with pytest.raises(ConfigError, match="no such task"):
        score("vtt", ["a"], [("a",)])
