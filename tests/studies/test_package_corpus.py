"""Whole packages are held out, without files that share a block with the training text."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mtrain_cli.config.schema import ConfigError
from mtrain_extras.studies import package_corpus
from mtrain_extras.studies.package_corpus import BLOCK, block_hashes, rolling_hashes, shares_block
from mtrain_extras.studies.tiers import TIERS

TINY = replace(TIERS["tiny"], long_seq=512, base_steps=4, long_pairs=2)


def letters(seed: int, count: int) -> bytes:
    return np.random.default_rng(seed).integers(97, 123, count, dtype=np.uint8).tobytes()


def test_equal_blocks_have_equal_hashes_at_any_offset():
    block = letters(0, BLOCK)
    found = [rolling_hashes(b"y" * n + block + b"z")[n] for n in (0, 1, 999)]
    assert len(set(found)) == 1
    changed = bytearray(block)
    changed[100] ^= 1
    assert rolling_hashes(bytes(changed))[0] != found[0]
    assert len(rolling_hashes(letters(1, BLOCK - 1))) == 0


def test_a_shared_block_is_found_at_any_offset():
    text = letters(0, 5 * BLOCK + 17)
    blocks = block_hashes([text, letters(1, 40)])
    assert len(blocks) == 5
    copied = text[2 * BLOCK : 3 * BLOCK]
    assert shares_block(letters(2, 333) + copied + b"#", blocks)
    assert not shares_block(letters(2, 333) + copied[:-1] + b"#", blocks)
    assert not shares_block(text, block_hashes([]))


def packages(root, names, common=b""):
    for number, name in enumerate(names):
        (root / name / "tests").mkdir(parents=True)
        lines = "\n".join(f"name_{n} = {n * (number + 2)}" for n in range(200))
        (root / name / "a.py").write_text(f"# {name}\n{lines}\n")
        (root / name / "tests" / "b.py").write_text("left_out = 1\n")
        if common:
            (root / name / "common.py").write_bytes(common)


def test_whole_packages_are_held_out_without_copies(tmp_path):
    root, out = tmp_path / "packages", tmp_path / "out"
    packages(root, [f"package{n}" for n in range(24)], common=letters(9, 3 * BLOCK))
    states: list[bool] = []
    facts = package_corpus.build(out, TINY, root, lambda: states.append(out.exists()))
    assert states == [False], "called before anything is written"
    code = [json.loads(line) for line in (out / "code" / "code.jsonl").open()]
    held_out = [json.loads(line) for line in (out / "held_out.jsonl").open()]
    trained, kept = ({row["package"] for row in rows} for rows in (code, held_out))
    assert trained
    assert kept == set(facts.held_out)
    assert not trained & kept
    assert facts.packages == len(trained)
    assert facts.dropped == len(kept)  # common.py of each
    assert all("common.py" in row["text"] for row in code)
    assert not any("common.py" in row["text"] for row in held_out)
    assert not any("left_out" in row["text"] for row in code)
    needles = (out / "needles_long" / "needles.jsonl").read_text().splitlines()
    assert {json.loads(line)["length"] for line in needles} == {512}
    (root / "package0" / "a.py").write_text("changed = 1")
    assert package_corpus.build(out, TINY, root) == facts  # kept, not built again


def test_texts_that_changed_are_refused(tmp_path):
    root, out = tmp_path / "packages", tmp_path / "out"
    packages(root, [f"package{n}" for n in range(24)])
    package_corpus.build(out, TINY, root)
    text = out / "held_out.jsonl"
    whole = text.read_bytes()
    for changed in (whole.replace(b"name_7 ", b"name_8 ", 1), None):
        text.write_bytes(changed) if changed else text.unlink()
        with pytest.raises(ConfigError) as refused:
            package_corpus.build(out, TINY, root)
        (line,) = refused.value.problems
        assert line == (
            f"--out {tmp_path}: the texts in {out} have changed since the study began. Put them "
            f"back, or delete {out} and run the same command again, which writes the same texts, "
            "if the packages are the same"
        )
    text.write_bytes(whole)
    package_corpus.build(out, TINY, root)


@pytest.mark.parametrize("name", ["code/code.jsonl", "needles_long/needles.jsonl"])
def test_changed_texts_to_train_on_are_refused(tmp_path, name):
    root, out = tmp_path / "packages", tmp_path / "out"
    packages(root, [f"package{n}" for n in range(24)])
    package_corpus.build(out, TINY, root)
    with (out / name).open("a") as file:
        file.write("{}\n")
    with pytest.raises(ConfigError, match="have changed since the study began"):
        package_corpus.read(out)


def test_the_digest_does_not_depend_on_the_order_of_a_disk(tmp_path, monkeypatch):
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text(name)
    for names in ("abc", "cba"):
        monkeypatch.setattr(
            Path, "rglob", lambda folder, _, names=names: (folder / f"{n}.jsonl" for n in names)
        )
        assert package_corpus._digest(tmp_path) == hashlib.sha256(b"abc").hexdigest()


def test_texts_that_cannot_be_read_are_one_line(tmp_path):
    root, out = tmp_path / "packages", tmp_path / "out"
    packages(root, [f"package{n}" for n in range(24)])
    package_corpus.build(out, TINY, root)
    (out / "held_out.jsonl").unlink()
    (out / "held_out.jsonl").mkdir()
    with pytest.raises(ConfigError) as refused:
        package_corpus.read(out)
    assert refused.value.problems == (f"--out {tmp_path}: cannot be read (Is a directory)",)


@pytest.mark.parametrize("content", ["{", "[]", '{"packages": "many"}'])
def test_a_damaged_description_of_the_texts_is_one_line(tmp_path, content):
    file = tmp_path / "corpus.json"
    file.write_text(content)
    with pytest.raises(ConfigError) as refused:
        package_corpus.build(tmp_path, TINY)
    (line,) = refused.value.problems
    assert line.startswith(f"{file}: damaged (")
    assert f"). Mend it, or delete {tmp_path} and run the same command again" in line


def test_too_little_text_is_one_line(tmp_path):
    (tmp_path / "packages").mkdir()
    with pytest.raises(ConfigError, match="too little Python text"):
        package_corpus.build(tmp_path / "out", TINY, tmp_path / "packages")
    assert not (tmp_path / "out").exists()
