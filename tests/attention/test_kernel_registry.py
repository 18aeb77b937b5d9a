"""The choice of a kernel: the best that serves the run, and no silent replacement."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from mtrain_cli.attention import flash4, kernel_registry
from mtrain_cli.attention.kernel import IndexRequest, KernelRequest
from mtrain_cli.attention.kernel_registry import choose, survey, survey_with_all_packages
from mtrain_cli.config.schema import ConfigError

CPU = KernelRequest("cpu", None, "float32", 32, 4, 2)
INSTALLED = importlib.util.find_spec("flash_attn") is not None


def cuda(**changes) -> KernelRequest:
    values = {
        "capability": (9, 0),
        "dtype": "bfloat16",
        "head_dim": 128,
        "deterministic": False,
    } | changes
    return KernelRequest("cuda", **values, num_heads=16, num_kv_heads=2)


def test_auto_picks_sdpa_on_a_cpu_and_names_the_skipped_kernels():
    kernel, reason = choose("auto", CPU)
    assert kernel.name == "sdpa"
    assert "flash4: needs a CUDA GPU" in reason


def test_the_reason_of_the_first_kernel_names_no_other(monkeypatch):
    monkeypatch.setattr(kernel_registry, "survey", lambda _: [("sdpa", None), ("triton", "no")])
    assert choose("auto", CPU)[1] == "the fastest that serves this run"


def test_auto_picks_flash4_on_hopper_if_installed():
    assert choose("auto", cuda())[0].name == ("flash4" if INSTALLED else "sdpa")
    assert choose("auto", cuda(capability=(8, 0)))[0].name == "sdpa"


@pytest.mark.parametrize(("intervals", "expected"), [(1, "sdpa"), (2, "triton")])
def test_auto_prefers_triton_to_a_call_per_slice(intervals, expected, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    request = cuda(capability=(8, 0), intervals=intervals)
    assert choose("auto", request)[0].name == expected
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose("auto", replace(CPU, intervals=intervals))[0].name == "sdpa"


def test_auto_picks_triton_for_dense_attention_that_must_be_repeatable(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    kernel, reason = choose("auto", cuda(deterministic=True))
    assert kernel.name == "triton"
    assert "sdpa: its backward adds with atomics" in reason


@pytest.mark.parametrize(
    "changes", [{"dtype": "float16"}, {"capability": (7, 5)}, {"head_dim": 264}]
)
def test_auto_never_picks_the_reference(changes):
    with pytest.raises(
        ConfigError, match=r"train\.kernel=auto: no fast kernel .*train\.kernel=reference"
    ):
        choose("auto", cuda(**changes))
    assert choose("reference", cuda(**changes))[1] == "as configured"


def test_an_unusable_kernel_is_refused_and_usable_ones_are_named(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        ConfigError, match=r"train\.kernel=flash4: needs a CUDA GPU; usable here: sdpa, reference"
    ):
        choose("flash4", CPU)
    with pytest.raises(
        ConfigError,
        match=r"train\.kernel=flsh: no such kernel; allowed: auto, flash4, triton, sdpa, reference",
    ):
        choose("flsh", CPU)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"capability": (8, 0)}, "compute capability 9.0"),
        ({"dtype": "float32"}, "computes bfloat16, not float32"),
        ({"head_dim": 96}, "head_dim 96 is not 64 or 128"),
        ({"deterministic": True}, "not bitwise repeatable"),
        (
            {"index": IndexRequest(64, bitmap=False)},
            "computes blocks of 128, not sparsity.block=64",
        ),
        ({"index": IndexRequest(64, bitmap=True)}, "computes blocks of 128, not sparsity.block=64"),
    ],
)
def test_flash4_gives_the_reason_why_it_is_unusable(changes, reason):
    assert reason in (dict(survey(cuda(**changes)))["flash4"] or "")


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_a_kernel_that_only_masks_the_index_says_so(name):
    request = KernelRequest(
        "cpu", None, "float64", 128, 16, 2, index=IndexRequest(64, bitmap=False)
    )
    assert choose(name, request)[1].endswith(
        "; computes every pair and masks what the index leaves out"
    )
    assert "hides" not in choose(name, replace(request, index=None))[1]


def test_without_cupy_the_reason_names_pytorch(monkeypatch):
    request = KernelRequest(
        "cuda", (9, 0), "bfloat16", 128, 16, 2, index=IndexRequest(64, bitmap=False)
    )
    for absent, ending in (
        (None, "as configured"),
        (
            "CuPy is not installed",
            "PyTorch packs columns and lists blocks, since CuPy is not installed",
        ),
    ):
        monkeypatch.setattr(
            kernel_registry, "cupy_unsupported_reason", lambda absent=absent: absent
        )
        assert choose("triton", request)[1].endswith(ending)


def test_flash4_serves_an_index_if_triton_can_compute_the_columns(monkeypatch):
    installed = {"triton", "flash_attn", "flash_attn.cute"}
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: name if name in installed else None
    )
    monkeypatch.setattr(flash4, "_load_error", lambda: None)
    request = cuda(index=IndexRequest(128, bitmap=False))
    assert choose("auto", request)[0].name == "flash4"
    with pytest.raises(
        ConfigError,
        match=r"train\.kernel=flash4: computes blocks of 128, not .*; "
        r"usable here: triton, reference",
    ):
        choose("flash4", cuda(index=IndexRequest(64, bitmap=False)))
    installed.remove("triton")
    assert dict(survey(request))["flash4"].startswith("needs triton for the columns of an index")
    assert dict(survey(cuda()))["flash4"] is None


@pytest.mark.parametrize("index", [None, IndexRequest(128, bitmap=False)])
def test_a_survey_for_another_machine_ignores_the_packages_of_this_one(index, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    request = cuda(index=index)
    elsewhere = dict(survey_with_all_packages(request))
    assert [name for name, reason in elsewhere.items() if reason is None] == (
        ["flash4", "sdpa", "triton", "reference"]
        if index is None
        else ["flash4", "triton", "reference"]
    )
    assert dict(survey(request))["flash4"] is not None

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(flash4, "_load_error", lambda: "ImportError: libcudart.so")
    assert "does not load" in dict(survey(request))["flash4"]
    assert dict(survey_with_all_packages(request)) == elsewhere


def test_flash4_that_fails_to_load_is_skipped_with_the_reason(monkeypatch):
    """Its libraries come as wheels for several CUDA versions, which are easily mixed up."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)

    def load():
        raise RuntimeError("No CTK flavor installed\nfor this library")

    monkeypatch.setattr(flash4, "_load_dense", load)
    flash4._load_error.cache_clear()
    try:
        reason = (
            "flash-attn-4 is installed, but does not load: RuntimeError: No CTK flavor installed"
        )
        assert dict(survey(cuda()))["flash4"] == reason
        kernel, why = choose("auto", cuda())
        assert kernel.name != "flash4"
        assert reason in why
    finally:
        flash4._load_error.cache_clear()
