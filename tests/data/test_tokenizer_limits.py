"""A tokenizer.json can neither end the program nor make a text endlessly long."""

from __future__ import annotations

import base64
import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data import tokenizer_limits
from mtrain_cli.data.tokenizer_limits import MOST_GROWTH, _growth
from mtrain_cli.data.tokenizers import open_tokenizer

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BACKTRACKS = r"(a+)+$|(?:(x+x+)+y)"
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replace(kind: str, pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def chain(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def write(folder: Path, **parts: Any) -> str:
    content = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None,
        "model": {"type": "BPE", "vocab": {"x": 0, "a": 1, " ": 2, "▁": 3, "y": 4}, "merges": []},
    }  # fmt: skip
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**content, **parts}), encoding="utf-8")
    return str(path)


def test_an_expression_that_backtracks_is_refused_without_a_word_of_the_package(tmp_path, capfd):
    path = write(tmp_path, pre_tokenizer=split(BACKTRACKS))
    with pytest.raises(ConfigError) as caught:
        open_tokenizer(path)
    assert str(caught.value).startswith(f"data.tokenizer={path}: its regular expression ")
    assert "backtracks too much" in str(caught.value)
    assert capfd.readouterr().err == ""


def test_an_expression_that_backtracks_on_pairs_of_its_letters_is_refused(tmp_path, capfd):
    with pytest.raises(ConfigError, match=r'too much on 64 repetitions of "pq"; use another'):
        open_tokenizer(write(tmp_path, pre_tokenizer=split("x|((?:pq)+)+r")))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("part", ["normalizer", "decoder"])
def test_an_expression_of_a_replacement_is_probed_too(tmp_path, part):
    with pytest.raises(ConfigError, match="backtracks too much"):
        open_tokenizer(write(tmp_path, **{part: replace("Regex", BACKTRACKS, "z")}))


@pytest.mark.parametrize("step", ["encode", "decode", "decode_batch"])
def test_a_panic_while_encoding_or_decoding_is_one_line(tmp_path, monkeypatch, capfd, step):
    monkeypatch.setattr(tokenizer_limits, "_PROBE", 1)  # as an expression that the probe misses
    # A decoder sees one token at a time, unless they are fused before.
    decoders = [{"type": "Fuse"}, replace("Regex", BACKTRACKS, "z")]
    decoder = {"type": "Sequence", "decoders": decoders}
    parts = {"pre_tokenizer": split(BACKTRACKS)} if step == "encode" else {"decoder": decoder}
    path = write(tmp_path, **parts)
    tokenizer = open_tokenizer(path)
    ids = np.zeros(200, np.int64)
    many = {"encode": ["x" * 200], "decode": ids, "decode_batch": [ids]}[step]
    with pytest.raises(ConfigError, match="retry-limit-in-match over") as caught:
        getattr(tokenizer, step)(many)
    assert str(caught.value).startswith(f"data.tokenizer={path}: the tokenizer failed on a text (")
    assert "\n" not in str(caught.value)
    capfd.readouterr()  # RUST_BACKTRACE says how much of its stack the package prints


def test_an_error_of_the_package_is_one_line_and_an_interrupt_stays_one(tmp_path):
    model = {"type": "WordLevel", "vocab": {"z": 0}, "unk_token": "<unk>"}
    with pytest.raises(ConfigError, match=r"failed on a text \(WordLevel error: Missing"):
        open_tokenizer(write(tmp_path, model=model))

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenizer_limits.call("place", interrupt)


def character_map(key: int, replacement: str, size: int | None = None) -> dict[str, Any]:
    """Return the step that replaces one byte, in the layout of SentencePiece."""
    trie = [0] * 512
    trie[0] = 256 << 10  # the children of the root are at 256 ^ letter
    trie[256 ^ key] = (1 << 10) | 0x100 | key  # a leaf; its value 0 is beside it
    trie[256 ^ key ^ 1] = 1 << 31
    packed = struct.pack(f"<I{len(trie)}I", 4 * len(trie) if size is None else size, *trie)
    content = base64.b64encode(packed + replacement.encode() + b"\0").decode()
    return {"type": "Precompiled", "precompiled_charsmap": content}


DOUBLING = [replace("String", "x", "xx")] * 30
LETTERS = [{"type": "NFKC"}, replace("String", "م", "ﷺ")] * 4
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
HOSTILE = {
    "doubling": {"normalizer": chain(*DOUBLING)},
    "letters": {"normalizer": chain(*LETTERS)},
    "long prefix": {"normalizer": {"type": "Prepend", "prepend": "x" * 3000}},
    "every place": {"normalizer": replace("Regex", "", "x" * 3000)},
    "bytes": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 30}},
    "nested": {"normalizer": chain(chain(*DOUBLING), {"type": "NFC"})},
    "decoder": {"decoder": {"type": "Sequence", "decoders": DOUBLING}},
    "maps": {"normalizer": chain(*[character_map(97, "a" * 1000)] * 2)},
    "small maps": {"normalizer": chain(*[character_map(97, "a" * 9)] * 4)},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_makes_a_text_endlessly_long_is_refused_before_it_sees_one(tmp_path, name):
    path = write(tmp_path, **HOSTILE[name])
    with pytest.raises(ConfigError, match=r"steps to (en|de)code can make a text .* times as long"):
        open_tokenizer(path)


PUBLIC = {
    "llama": {"normalizer": chain({"type": "Prepend", "prepend": "▁"}, replace("String", " ", "▁")),
              "decoder": {"type": "Sequence", "decoders": [replace("String", "▁", " "),
              {"type": "ByteFallback"}, {"type": "Fuse"}]}},
    "llama3": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split(LLAMA3), BYTES]}},
    "t5": {"normalizer": chain({"type": "NFKC"}, replace("Regex", " {2,}", "▁")),
           "pre_tokenizer": METASPACE},
    "albert": {"normalizer": chain(replace("String", "``", '"'), replace("String", "''", '"'),
               {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"},
               {"type": "NFKC"}, replace("Regex", " {2,}", " ")), "pre_tokenizer": METASPACE},
    "map": {"normalizer": chain({"type": "NFKD"}, character_map(98, "ص" * 16),
            replace("Regex", " {2,}", "▁")), "pre_tokenizer": METASPACE},
    "clip": {"normalizer": chain({"type": "NFC"}, replace("Regex", r"\s+", " "),
             {"type": "Lowercase"})},
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_steps_of_public_tokenizers_are_accepted(tmp_path, name):
    parts = PUBLIC[name]
    unknown = {"type": "WordLevel", "vocab": {"<unk>": 0}, "unk_token": "<unk>"}
    open_tokenizer(write(tmp_path, model=unknown, **parts))


def test_a_character_map_grows_a_text_by_its_longest_replacement():
    def longest(step: dict[str, Any]) -> float:
        return tokenizer_limits._longest(step["precompiled_charsmap"])

    step = character_map(97, "b" * 40)
    content = base64.b64decode(step["precompiled_charsmap"])
    normalizer = tokenizers.normalizers.Precompiled(content)
    assert normalizer.normalize_str("aa") == "b" * 80, "the map is one that the package reads"
    assert longest(step) == 40
    assert longest(character_map(97, "b\0" + "é" * 50 + "\0c")) == 100
    for size in (0, 1 << 31):
        assert longest(character_map(97, "b", size)) == math.inf
    assert longest({"precompiled_charsmap": "?"}) == math.inf


def test_growth_bounds_what_the_package_makes():
    letters = ["a", " ", "é", "ﷺ", "中", "x y", "𝅘𝅥𝅮"]
    for normalizer in (
        tokenizers.normalizers.NFKC(), tokenizers.normalizers.NFD(),
        tokenizers.normalizers.Lowercase(),
        tokenizers.normalizers.Sequence([tokenizers.normalizers.Replace(" ", "▁"),
                                         tokenizers.normalizers.Prepend("▁")]),
        tokenizers.normalizers.Replace(tokenizers.Regex(""), "ab"),
    ):  # fmt: skip
        bound = _growth([normalizer])
        for text in (*letters, *(one * 9 for one in letters)):
            made = len(normalizer.normalize_str(text).encode())
            assert made <= bound * len(text.encode()), (normalizer, text)
    assert _growth([None]) == 1 < MOST_GROWTH
