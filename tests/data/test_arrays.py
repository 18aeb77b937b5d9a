"""Plain arrays of token ids: .npy and .bin, with documents or without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.labels import IGNORED
from mtrain_cli.data.open_dataset import open_dataset

IDS = (np.arange(200) * 7 + 3) % 250


@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<i4", "<i8", "u1"])
@pytest.mark.parametrize("kind", ["npy", "bin"])
def test_ids_do_not_depend_on_the_file_format(
    make_config: Callable[..., Any], tmp_path: Path, dtype: str, kind: str
) -> None:
    if kind == "bin" and dtype not in ("<u2", "<u4"):
        pytest.skip("a .bin is uint16 or uint32")
    path = tmp_path / f"corpus.{kind}"
    ids = IDS.astype(dtype)
    np.save(path, ids) if kind == "npy" else ids.tofile(path)
    token_dtype = {"<u2": "auto", "<u4": "uint32"}.get(dtype, "auto")
    dataset = open_dataset(
        make_config(kind="tokens", path=str(path), seq=50, shuffle=False, token_dtype=token_dtype)
    )
    assert len(dataset) == 4
    assert np.array_equal(np.concatenate([dataset[number].tokens for number in range(4)]), IDS)
    assert np.array_equal(dataset[0].labels, IDS[1:51])
    assert "one document" in dataset.describe()


def test_a_bin_is_uint32_for_a_large_vocabulary(
    make_config: Callable[..., Any], tmp_path: Path
) -> None:
    ids = (IDS * 500).astype("<u4")
    ids.tofile(tmp_path / "a.bin")
    dataset = open_dataset(
        make_config(
            kind="tokens", path=str(tmp_path / "a.bin"), seq=50, shuffle=False, vocab_size=151936
        )
    )
    assert np.array_equal(dataset[0].tokens, ids[:50])


@pytest.mark.parametrize("offsets_from", ["npy", "bin", "rows"])
def test_documents_are_rows_or_come_from_an_offsets_file(
    make_config: Callable[..., Any], tmp_path: Path, offsets_from: str
) -> None:
    offsets = np.array([0, 20, 40, 200], "<i8")
    if offsets_from == "rows":
        np.save(tmp_path / "a.npy", IDS.astype("<u2").reshape(10, 20))
        offsets = np.arange(0, 201, 20)
    else:
        np.save(tmp_path / "a.npy", IDS.astype("<u2"))
        np.save(tmp_path / "a.documents.npy", offsets) if offsets_from == "npy" else offsets.tofile(
            tmp_path / "a.documents.bin"
        )
    sample = open_dataset(
        make_config(kind="tokens", path=str(tmp_path / "a.npy"), seq=100, shuffle=False)
    )[0]
    ends = [end for end in offsets if 0 < end <= 100]
    assert np.flatnonzero(sample.labels == IGNORED).tolist() == [end - 1 for end in ends]
    assert sample.documents[-1] == (4 if offsets_from == "rows" else 2)


def _line(config: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        open_dataset(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_mistake_is_one_line(make_config: Callable[..., Any], tmp_path: Path) -> None:
    def line(name: str, **data: Any) -> str:
        return _line(make_config(kind="tokens", path=str(tmp_path / name), seq=50, **data))

    np.save(tmp_path / "floats.npy", np.zeros(60))
    assert "holds float64 of shape (60,). Give integers in one dimension" in line("floats.npy")
    (tmp_path / "text.npy").write_text("not an array")
    assert "not a readable .npy file" in line("text.npy")
    (tmp_path / "odd.bin").write_bytes(b"\0" * 403)
    assert "has 403 bytes, which is not a whole number of uint16 tokens" in line("odd.bin")
    (tmp_path / "empty.bin").write_bytes(b"")
    assert "holds no tokens" in line("empty.bin")
    assert "no such file" in line("none.bin")
    np.save(tmp_path / "large.npy", np.full(60, 5000, "<u2"))
    assert (
        "token 5000 does not fit model.vocab_size=264: these tokens are from another tokenizer"
        in line("large.npy")
    )
    np.save(tmp_path / "negative.npy", np.full(60, -1, "<i4"))
    assert "token -1 does not fit model.vocab_size=264" in line("negative.npy")
    IDS.astype("<u2").tofile(tmp_path / "bad.bin")
    for kind in (np.int64, np.uint64):  # differences of unsigned integers are never negative
        np.save(tmp_path / "bad.documents.npy", np.array([0, 50, 40, 200], kind))
        assert "the offsets in bad.documents.npy must rise from 0 to 200, the" in line("bad.bin")
