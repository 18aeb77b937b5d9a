"""The flash4 kernel's calls, on the CPU with the oracle in place of FlashAttention-4."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from mtrain_cli.attention import flash4
from mtrain_cli.attention.flash4 import ENABLED, FOLDER, Flash4Kernel, persistent_kernel_cache
from mtrain_cli.attention.kernel import Saved
from mtrain_cli.attention.mask import KeySpans, SequenceMask
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.attention.partials import row_delta
from mtrain_cli.attention.reference import ReferenceKernel
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.config.mask_settings import MASKS

SCALE = 0.3


def rectangle(q: torch.Tensor, k: torch.Tensor, causal: bool) -> Tiles:
    queries, keys = q.shape[1], k.shape[1]
    high = np.arange(keys - queries, keys) + 1 if causal else np.full(queries, keys)
    return Tiles.make([KeySpans(np.zeros((1, queries), np.int64), high[None], keys)] * len(q))


def tiles_of(low: torch.Tensor, high: torch.Tensor, keys: int) -> Tiles:
    """Return the tiles of given spans, [batch, intervals, queries]."""
    bounds = zip(low.numpy(), high.numpy(), strict=True)
    return Tiles.make([KeySpans(first, last, keys) for first, last in bounds])


def check_lists(rows: int, lists: dict[str, torch.Tensor], words) -> None:
    assert int(lists["partial_count"].sum() + lists["full_count"].sum()) > 0
    assert lists["partial"].shape[2] == -(-rows // 128)
    assert words[1].any()


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    names: list[str] = []
    oracle = ReferenceKernel()
    fake = ModuleType("dense")

    def forward(q, k, v, causal, scale):
        names.append("causal" if causal else "full")
        return oracle.forward(q, k, v, rectangle(q, k, causal), scale)

    def backward(dout, q, k, v, out, lse, delta, causal, scale):
        names.append("causal" if causal else "full")
        return oracle.backward(
            dout, Saved(q, k, v, out, lse, delta), rectangle(q, k, causal), scale
        )

    def spans_forward(q, k, v, spans, lists, scale, words):
        names.append("lists")
        check_lists(q.shape[1], lists, words)
        return oracle.forward(q, k, v, tiles_of(*spans, k.shape[1]), scale)

    def spans_backward(dout, q, k, v, out, lse, delta, spans, lists, scale, words):
        names.append("lists")
        check_lists(k.shape[1], lists, words)
        saved = Saved(q, k, v, out, lse, delta)
        return oracle.backward(dout, saved, tiles_of(*spans, k.shape[1]), scale)

    for function in (forward, backward, spans_forward, spans_backward):
        setattr(fake, function.__name__, function)
    monkeypatch.setitem(sys.modules, "mtrain_cli.kernels.flash4", ModuleType("flash4"))
    monkeypatch.setattr(sys.modules["mtrain_cli.kernels.flash4"], "dense", fake, raising=False)
    return names


EVERYWHERE, SECOND, ZIGZAG = np.arange(60), np.arange(30, 60), np.r_[0:15, 45:60]
CAUSAL = SequenceMask.causal(60, 60)
DOCUMENTS = SequenceMask.from_documents(np.repeat([0, 1, 2], 20), 60)
MANY = SequenceMask.from_documents(np.repeat(np.arange(12), 5), 60)
STRIPED = np.r_[0:4, 8:12, 16:20, 24:28, 32:36, 40:44]


def of(mask: SequenceMask, queries=EVERYWHERE, keys=EVERYWHERE) -> list[KeySpans]:
    return [mask.spans(queries, keys)] * 2


def named(kind: str, **keys) -> list[KeySpans]:
    return of(MaskRule(False, MASKS[kind](**keys))(None, 60, 60))


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        (of(CAUSAL), ["causal"]),
        (of(SequenceMask.causal(47, 60)), ["causal"]),
        (of(CAUSAL, SECOND), ["causal"]),
        (of(CAUSAL, SECOND, np.arange(30)), ["full"]),
        (of(DOCUMENTS), ["causal"] * 3),
        (of(DOCUMENTS, np.arange(40, 60)), ["causal"]),
        (of(CAUSAL, ZIGZAG), ["causal"] * 2),
        (of(MANY), ["lists"]),
        ([of(CAUSAL)[0], of(DOCUMENTS)[0]], ["lists"]),
        (of(CAUSAL, STRIPED), ["lists"]),
        (named("sliding_window", window=9, global_tokens=0), ["lists"]),
        (named("prefix_lm", prefix=20), ["full", "causal"]),
        (named("block_causal", block=6), ["lists"]),
        (named("full"), ["full"]),
        (named("sliding_window", window=9, global_tokens=5), ["lists"]),
        (named("dilated", block=4, stride=3, count=3), ["lists"]),
        # Few rectangles, but they share queries.
        (named("dilated", block=20, stride=2, count=2), ["lists"]),
        (named("video", frames=3, height=4, width=5, window=(2, 2, 3)), ["lists"]),
    ],
)
def test_calls_give_the_oracle_result(calls, spans, expected):
    torch.manual_seed(0)
    tiles = Tiles.make(spans)
    queries = tiles.num_queries
    q, dout = (torch.randn(2, queries, 4, 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, tiles.num_keys, 2, 8, dtype=torch.float64) for _ in range(2))
    kernel, oracle = Flash4Kernel(), ReferenceKernel()
    out, lse = kernel.forward(q, k, v, tiles, SCALE)
    want_out, want_lse = oracle.forward(q, k, v, tiles, SCALE)
    torch.testing.assert_close(out, want_out, atol=1e-12, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-6, rtol=0)
    assert calls == expected
    final = want_lse + 0.5  # as in a ring, where other workers contribute to the row
    want = oracle.backward(dout, Saved(q, k, v, want_out, final, None), tiles, SCALE)
    # Queries from another worker arrive with delta, without out.
    for whole_out, delta in ((want_out, None), (None, row_delta(want_out, dout))):
        calls.clear()
        got = kernel.backward(dout, Saved(q, k, v, whole_out, final, delta), tiles, SCALE)
        for part, a, b in zip(("dq", "dk", "dv"), got, want, strict=True):
            torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=0, msg=part)
        assert calls == expected


DENSE = "mtrain_cli.kernels.flash4.dense"


@pytest.fixture
def user_folder(monkeypatch, tmp_path):
    """This user's folder in a new temporary folder."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv(ENABLED, raising=False)
    monkeypatch.delenv(FOLDER, raising=False)
    flash4._usable.cache_clear()
    return tmp_path / f"mtrain-{os.getuid()}"


def cache_in_use() -> str | None:
    """Return the cache folder in effect, or None."""
    before = dict(os.environ)
    with persistent_kernel_cache():
        cache = os.environ.get(FOLDER) if os.environ.get(ENABLED) == "1" else None
    assert dict(os.environ) == before
    return cache


def test_the_cache_is_a_private_folder_of_the_user(user_folder):
    first = cache_in_use()
    assert first is not None
    assert Path(first).parent == user_folder
    assert user_folder.stat().st_mode & 0o777 == 0o700
    assert Path(first).stat().st_mode & 0o777 == 0o700
    assert cache_in_use() == first, "the next run finds it again"
    other = os.open(first, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)


@pytest.mark.parametrize("changed", ["masks", *flash4._COMPILERS, "cuda", "gpu"])
def test_every_input_of_compilation_changes_the_folder(user_folder, monkeypatch, changed):
    first = cache_in_use()
    assert first is not None
    version = flash4._version
    if changed == "masks":
        (user_folder / "flash4").mkdir()
        (user_folder / "flash4/dense.py").write_text("masks")
        monkeypatch.setattr(flash4, "resource_dir", lambda name: user_folder)  # noqa: ARG005
    elif changed == "cuda":
        monkeypatch.setattr(torch.version, "cuda", "99")
    elif changed == "gpu":
        monkeypatch.setattr(flash4, "_gpu", lambda: ["NVIDIA B200", "10.0", "148"])
    else:
        monkeypatch.setattr(
            flash4, "_version", lambda package: "99" if package == changed else version(package)
        )
    assert cache_in_use() not in (None, first)


@pytest.mark.usefixtures("user_folder")
def test_the_users_settings_take_precedence(monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER, str(tmp_path / "mine"))
    assert cache_in_use() == str(tmp_path / "mine")
    monkeypatch.setenv(ENABLED, "0")
    assert cache_in_use() is None


@pytest.mark.parametrize("spoiled", ["link", "file", 0o777, 0o770, 0o707, 0o750])
def test_a_folder_open_to_others_is_not_used(user_folder, spoiled):
    if spoiled == "link":
        (user_folder.parent / "theirs").mkdir(mode=0o700)
        user_folder.symlink_to(user_folder.parent / "theirs")
    elif spoiled == "file":
        user_folder.write_text("")
    else:
        user_folder.mkdir()
        user_folder.chmod(spoiled)
    assert cache_in_use() is None


@pytest.mark.usefixtures("user_folder")
@pytest.mark.parametrize("refused", ["locks", "files", "temporary folder"])
def test_no_cache_on_a_file_system_without_locks(monkeypatch, refused):
    def refuse(*args, **words):  # noqa: ARG001
        raise OSError

    if refused == "locks":
        monkeypatch.setattr(fcntl, "flock", refuse)
    elif refused == "files":
        monkeypatch.setattr(os, "open", refuse)
    else:
        monkeypatch.setattr(tempfile, "gettempdir", refuse)
    assert cache_in_use() is None


def test_the_cache_is_enabled_before_flash_attention_is_imported(user_folder, monkeypatch):
    """FlashAttention-4 reads both variables at import."""
    settings_at_import = []

    class Finder:
        def find_spec(self, name, path=None, target=None):  # noqa: ARG002
            return ModuleSpec(name, self) if name == DENSE else None

        def create_module(self, spec):  # noqa: ARG002
            return None

        def exec_module(self, module):  # noqa: ARG002
            settings_at_import.append((os.environ.get(ENABLED), os.environ.get(FOLDER, "")))

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    for name in (DENSE, "mtrain_cli.kernels.flash4"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    try:
        assert flash4._load_dense() is sys.modules[DENSE]
        flash4._load_dense()
    finally:
        for name in (DENSE, "mtrain_cli.kernels.flash4"):
            sys.modules.pop(name, None)
        with contextlib.suppress(AttributeError, KeyError):
            del sys.modules["mtrain_cli.kernels"].flash4
    ((enabled, folder),) = settings_at_import
    assert enabled == "1"
    assert Path(folder).parent == user_folder
