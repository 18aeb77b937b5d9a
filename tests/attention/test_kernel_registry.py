"""The choice of a kernel: the best that serves the run, and no silent replacement."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtrain_cli.attention import flash4, kernel_registry
from mtrain_cli.attention.kernel import IndexRequest, KernelRequest
from mtrain_cli.attention.kernel_registry import (
    choose,
    make_kernel,
    survey,
    survey_with_all_packages,
)
from mtrain_cli.config.schema import ConfigError

CPU = KernelRequest("cpu", None, "float32", 32, 4, 2)
HOPPER = KernelRequest("cuda", (9, 0), "bfloat16", 128, 16, 2)
AMPERE = replace(HOPPER, capability=(8, 0))
LINES, LINES_64 = IndexRequest(128, bitmap=False), IndexRequest(64, bitmap=False)


@pytest.fixture
def installed(monkeypatch) -> set[str]:
    """The optional packages of this machine."""
    packages = {"triton", "flash_attn", "flash_attn.cute"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in packages else None)
    monkeypatch.setattr(flash4, "_load_error", lambda: None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return packages


@pytest.mark.parametrize(
    ("needs", "name", "why"),
    [
        (CPU, "sdpa", "flash4: needs a CUDA GPU"),
        (HOPPER, "flash4", "the fastest that serves this run"),
        (AMPERE, "sdpa", "flash4: needs compute capability 9.0"),
        (replace(AMPERE, intervals=2), "triton", "flash4: needs compute capability 9.0"),
        (replace(CPU, intervals=2), "sdpa", "flash4: needs a CUDA GPU"),
        (replace(HOPPER, deterministic=True), "triton", "sdpa: its backward adds with atomics"),
        (replace(HOPPER, index=LINES), "flash4", "the fastest that serves this run"),
        (replace(HOPPER, index=LINES_64), "triton", "flash4: computes blocks of 128"),
        (replace(AMPERE, index=LINES), "triton", "flash4: needs compute capability 9.0"),
        (replace(HOPPER, softcap=50.0), "triton", "flash4: does not cap scores (softcap=50); sdpa"),
        (replace(HOPPER, softcap=50.0, index=LINES), "triton", "flash4: does not cap scores"),
        (replace(CPU, softcap=50.0), "reference", "sdpa: does not cap scores (softcap=50)"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_auto_takes_the_fastest_kernel_and_names_those_that_it_skips(needs, name, why):
    kernel, reason = choose("auto", needs)
    assert (kernel.name, why in reason) == (name, True)
    assert kernel.softcap == needs.softcap


@pytest.mark.parametrize(
    ("name", "needs", "reason"),
    [
        ("flash4", AMPERE, "compute capability 9.0"),
        ("flash4", replace(HOPPER, dtype="float32"), "computes bfloat16, not float32"),
        ("flash4", replace(HOPPER, head_dim=96), "head_dim 96 is not 64 or 128"),
        ("flash4", replace(HOPPER, deterministic=True), "not bitwise repeatable"),
        ("flash4", replace(HOPPER, index=LINES_64), "blocks of 128, not sparsity.block=64"),
        ("flash4", replace(HOPPER, index=IndexRequest(128, bitmap=True, chunk=256)), "gate=query"),
        (
            "flash4",
            replace(HOPPER, index=IndexRequest(128, bitmap=True, starts=True)),
            "seen from one of their queries on",
        ),
        ("triton", replace(AMPERE, capability=(7, 5)), "compute capability 8.0"),
        ("triton", replace(AMPERE, dtype="float16"), "computes bfloat16 or float32, not float16"),
        ("triton", replace(AMPERE, head_dim=96), "head_dim 96 is none of 16, 32, 64, 128"),
        ("triton", replace(AMPERE, index=IndexRequest(256, bitmap=True)), "sparsity.block 256 is"),
        ("triton", CPU, "needs a CUDA GPU"),
        ("sdpa", replace(CPU, softcap=30.0), "does not cap scores (softcap=30)"),
        ("flash4", replace(HOPPER, softcap=30.0), "does not cap scores (softcap=30)"),
        ("sdpa", replace(AMPERE, index=LINES), "computes dense attention only"),
        ("sdpa", replace(AMPERE, head_dim=264), "not a multiple of 8 up to 256"),
        ("sdpa", replace(AMPERE, dtype="float16"), "computes bfloat16, not float16"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_an_unusable_kernel_is_refused_with_the_reason_and_the_usable_ones(name, needs, reason):
    assert reason in (make_kernel(name).unsupported_reason(needs) or "")
    with pytest.raises(ConfigError, match=rf"^train\.kernel={name}: .*; usable here: .*reference$"):
        choose(name, needs)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float16"},
        {"capability": (7, 5)},
        {"head_dim": 264},
        {"head_dim": 256, "softcap": 50.0},
    ],
)
@pytest.mark.usefixtures("installed")
def test_auto_never_picks_the_reference_on_a_gpu(changes):
    with pytest.raises(
        ConfigError, match=r"train\.kernel=auto: no fast kernel .*train\.kernel=reference"
    ):
        choose("auto", replace(HOPPER, **changes))
    assert choose("reference", replace(HOPPER, **changes))[1] == "as configured"


def test_an_unknown_kernel_is_refused():
    allowed = "auto, flash4, triton, sdpa, reference"
    with pytest.raises(ConfigError, match=rf"kernel=flsh: no such kernel; allowed: {allowed}"):
        choose("flsh", CPU)


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_a_kernel_that_only_masks_the_index_says_so(name):
    request = replace(CPU, dtype="float64", index=LINES_64)
    ending = "; computes every pair and masks what the index leaves out"
    assert choose(name, request)[1].endswith(ending)
    assert not choose(name, CPU)[1].endswith(ending)


@pytest.mark.parametrize("absent", [None, "CuPy is not installed"])
@pytest.mark.usefixtures("installed")
def test_without_cupy_the_reason_names_pytorch(monkeypatch, absent):
    monkeypatch.setattr(kernel_registry, "cupy_unsupported_reason", lambda: absent)
    reason = choose("triton", replace(HOPPER, index=LINES_64))[1]
    ending = f"PyTorch packs columns and lists blocks, since {absent}"
    assert reason.endswith(ending if absent else "as configured")


def test_missing_packages_are_named_but_not_for_another_machine(installed, monkeypatch):
    sparse = replace(HOPPER, index=LINES)
    elsewhere = [survey_with_all_packages(request) for request in (HOPPER, sparse)]
    usable = [[name for name, reason in found if reason is None] for found in elsewhere]
    assert usable == [["flash4", "sdpa", "triton", "reference"], ["flash4", "triton", "reference"]]
    installed.remove("triton")
    missing = dict(survey(sparse))
    assert missing["flash4"].startswith("needs triton for the columns of an index")
    assert missing["triton"].startswith("triton is not installed")
    assert dict(survey(HOPPER))["flash4"] is None
    installed.clear()
    assert dict(survey(HOPPER))["flash4"].startswith("flash-attn-4 is not installed")
    monkeypatch.setattr(flash4, "_load_error", lambda: "ImportError: libcudart.so")
    installed |= {"flash_attn", "flash_attn.cute"}
    assert "does not load: ImportError: libcudart.so" in dict(survey(HOPPER))["flash4"]
    assert [survey_with_all_packages(request) for request in (HOPPER, sparse)] == elsewhere


def test_flash4_that_fails_to_load_is_one_line(monkeypatch):
    """Its libraries come as wheels for several CUDA versions, which are easily mixed up."""

    def load():
        raise RuntimeError("No CTK flavor installed\nfor this library")

    monkeypatch.setattr(flash4, "_load_dense", load)
    flash4._load_error.cache_clear()
    assert flash4._load_error() == "RuntimeError: No CTK flavor installed"
    flash4._load_error.cache_clear()
