"""Curves of kernels: forms that are fitted together, and GPUs that were not measured."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from mtrain_cli import resource_dir
from mtrain_cli.config import cluster
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.simulation.calibration import (
    ALONE_COLUMNS,
    DENSE,
    DIAGONALS,
    LISTS,
    LOW,
    SPARSE,
    kernels_for,
    load_calibration,
    same_device,
    shipped,
)


def test_files_have_the_forms_of_one_kernel_fitted_together(tmp_path):
    def time(form: str, pairs: int, of_columns: int) -> dict:
        work, columns = ((n * 4 * 128 / 1e12) for n in (pairs - of_columns, of_columns))
        ms = (
            {SPARSE: 0.2, DIAGONALS: 0.3, ALONE_COLUMNS: 0.1, DENSE: 0.0}[form]
            + (1.3 if form == DENSE else 1.7) * work
            + 3.4 * columns
        )
        case = {"head_dim": 128, "density": None if form == DENSE else 0.05}
        return {
            "kernel": "flash4",
            "form": form,
            "case": case,
            "pairs": pairs,
            "column_pairs": of_columns,
            "forward_ms": ms,
            "backward_ms": 2 * ms,
        }

    unit = 1 << 30
    times = [time(SPARSE, n * unit, n * unit // 5) for n in (1, 2, 4)]
    times += [time(DIAGONALS, n * unit // 16, 0) for n in (1, 2, 4)] + [
        time(ALONE_COLUMNS, n * unit // 8, n * unit // 8) for n in (1, 2, 4)
    ]
    times += [time(DENSE, n * unit, 0) for n in (8, 16, 32)]
    file = tmp_path / "kernels.json"
    file.write_text(json.dumps({"kind": "kernels", "device": "NVIDIA H200", "times": times}))
    found = {c.form: c for c in load_calibration(file).curves if c.direction == "forward"}
    assert [found[form].fixed_ms for form in (SPARSE, DIAGONALS, ALONE_COLUMNS)] == pytest.approx(
        [0.2, 0.3, 0.1], rel=1e-3
    )
    assert found[SPARSE].ms_per_tflop == found[DIAGONALS].ms_per_tflop == pytest.approx(1.7)
    assert found[DIAGONALS].ms_per_column_tflop == pytest.approx(3.4), (
        "which diagonals alone say nothing of"
    )
    assert found[DENSE].ms_per_tflop == pytest.approx(1.3)


def test_a_kernel_that_skips_nothing_is_fitted_to_the_pairs_of_the_mask(tmp_path):
    """2 ms and 3 ms per 1e12 FLOP of the mask in forward, whatever the index leaves out."""
    entries = []
    for mask_pairs, share in ((1 << 28, 0.1), (1 << 29, 0.7), (1 << 30, 0.2), (1 << 31, 0.05)):
        ms = {
            d: 2 + 3 * flop * 64 * mask_pairs / 1e12
            for d, flop in (("forward", 4), ("backward", 10))
        }
        case = {"seq": 1, "density": share, "head_dim": 64}
        entries.append(
            {
                "kernel": "sdpa",
                "form": "diagonals",
                "case": case,
                "pairs": int(share * mask_pairs),
                "column_pairs": 7,
                "skips": False,
            }
            | {"mask_pairs": mask_pairs, "forward_ms": ms["forward"], "backward_ms": ms["backward"]}
        )
    path = tmp_path / "mine.json"
    path.write_text(
        json.dumps({"schema": 1, "kind": "kernels", "device": "mine", "times": entries})
    )
    for direction in ("forward", "backward"):
        curve = load_calibration(path).find("sdpa", DIAGONALS, direction)
        assert curve is not None
        assert not curve.skips
        assert (curve.fixed_ms, curve.ms_per_tflop) == (pytest.approx(2), pytest.approx(3))


def test_held_out_errors_of_the_shipped_calibration():
    calibration = next(c for c in shipped() if c.device == "NVIDIA H200")
    assert calibration.device == "NVIDIA H200"
    errors = {(c.kernel, c.form, c.direction): c.error for c in calibration.curves if c.points > 2}
    assert errors["triton", SPARSE, "forward"] < 0.02
    assert errors["triton", SPARSE, "backward"] < 0.02
    # Whole sequences and the shares of workers in one fit; at 32K the host is slower than the GPU.
    assert errors["flash4", SPARSE, "backward"] < 0.07
    assert errors["flash4", SPARSE, "forward"] < 0.09
    assert max(errors.values()) < 0.1
    for curve in calibration.curves:
        assert curve.low < 1 < curve.high
        assert curve.high - 1 >= curve.error or not np.isfinite(curve.error)


@pytest.mark.parametrize("name", cluster.shipped())
def test_no_bound_of_a_kernel_or_product_is_above_the_peak(name):
    gpu = cluster.load_cluster(name).gpu
    assert gpu.gemm_tflops.high <= gpu.peak_tflops.high
    peak, flop = gpu.peak_tflops.value * 1e12, np.array([0.0, 1e9, 1e12, 1e18])
    at_peak = flop / peak * 1e6
    known = {(curve.kernel, curve.form) for each in shipped() for curve in each.curves}
    for kernel, form in known:
        found = kernels_for(gpu.name, peak, kernel, form)
        for direction in ("forward", "backward"):
            parts = [found.part(direction, part) for part in (DIAGONALS, ALONE_COLUMNS)]
            for curve in [found.whole[direction], *parts]:
                works = [(flop, 0 * flop)]
                works += [(0 * flop, flop)] if curve.ms_per_column_tflop else []  # dense has none
                for work in works:
                    low, value = curve.us(*work, LOW), curve.us(*work)
                    assert (low >= at_peak * (1 - 1e-9)).all()
                    assert (low <= value).all()


def test_a_measured_time_may_be_faster_than_the_stated_peak():
    """The peak of a cluster file may be wrong. It limits what bounds add to a measurement."""
    curve = kernels_for("NVIDIA H200", 100e12, "flash4", DENSE).whole["forward"]
    work = np.array(1e15)
    assert curve.us(work, 0.0, LOW) == curve.us(work) < 1e15 / 100e12 * 1e6


def test_an_unmeasured_gpu_is_scaled_with_a_remark():
    here = kernels_for("NVIDIA H200", 989e12, "flash4", SPARSE)
    there = kernels_for("NVIDIA A100-SXM4-40GB", 312e12, "triton", SPARSE)
    assert all(curve.scaled is None for curve in here.whole.values())
    assert not here.remarks
    assert all(curve.scaled is not None for curve in there.whole.values())
    assert "not calibrated on NVIDIA A100-SXM4-40GB" in there.remarks[0]
    measured = kernels_for("NVIDIA H200", 989e12, "triton", SPARSE).whole["forward"]
    scaled = there.whole["forward"]
    assert scaled.ms_per_tflop == pytest.approx(measured.ms_per_tflop * 989 / 312)
    # Launches do not take longer there.
    assert scaled.fixed_ms == measured.fixed_ms
    assert scaled.high / scaled.low > 2.5 > measured.high / measured.low


def test_an_unmeasured_kernel_is_replaced_with_a_remark():
    found = kernels_for("NVIDIA H200", 989e12, "triton", LISTS)
    assert "triton was not measured on lists calls" in found.remarks[0]
    assert found.whole["forward"].high >= 2


def test_a_file_of_the_user_replaces_the_shipped_one(tmp_path):
    def times(device: str, scale: float = 1.0) -> str:
        rows = [
            {
                "kernel": "flash4",
                "case": {"density": None, "head_dim": 128},
                "pairs": n * 10**9,
                "column_pairs": 0,
                "forward_ms": n * scale,
                "backward_ms": 3 * n * scale,
            }
            for n in (1, 2, 4)
        ]
        return json.dumps({"schema": 1, "kind": "kernels", "device": device, "times": rows})

    mine = tmp_path / "mine.json"
    mine.write_text(times("NVIDIA B200"))
    own = load_calibration(mine)
    found = kernels_for("NVIDIA B200", 2250e12, "flash4", DENSE, own)
    assert all(curve.scaled is None for curve in found.whole.values())
    assert float(found.whole["forward"].us(np.array(2e9 * 512.0))) == pytest.approx(2000)
    other = tmp_path / "other.json"
    other.write_text(times("NVIDIA H100"))
    with pytest.raises(
        ConfigError, match="GPU NVIDIA H100, but the first file was measured with GPU NVIDIA B200"
    ):
        load_calibration(mine, other)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such calibration; allowed: kernels-a100, kernels-h200, "),
        ("{", "not readable as JSON"),
        ("[]", "holds no times"),
        ('{"kind": "layer", "times": [1], "device": "x"}', "holds no times"),
        ('{"kind": "kernels", "times": [{"kernel": "triton"}], "device": "x"}', "is damaged"),
        (
            '{"kind": "kernels", "device": "x", "times": ['
            '{"kernel": "k", "case": {"density": 0.1, "head_dim": 8}, "pairs": 9, '
            '"column_pairs": 1, "forward_ms": -1, "backward_ms": 1}]}',
            "is damaged",
        ),
    ],
)
def test_invalid_files_are_refused(tmp_path, content, said):
    path = tmp_path / "file.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=f"--calibration {path}: {said}"):
        load_calibration(path)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def shipped_file():
    return resource_dir("profiles") / "kernels-h200.json"


@pytest.mark.parametrize(
    ("device", "gpu", "same"),
    [
        ("NVIDIA H200", "NVIDIA H200", True),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", True),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A800-SXM4-80GB", True),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-80GB", False),
        ("NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe", True),
        ("NVIDIA H200", "NVIDIA H200 NVL", False),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", False),
        ("NVIDIA H100 NVL", "NVIDIA H100 PCIe", False),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H200", False),
        ("a laptop", "another", False),
        ("a laptop", "a laptop", True),
    ],
)
def test_equivalent_device_names_count_as_the_same(device, gpu, same):
    assert same_device(device, gpu) == same_device(gpu, device) == same


def test_times_of_another_device_are_never_used_silently():
    measured = load_calibration(shipped_file())
    of_h100 = replace(measured, device="NVIDIA H100 80GB HBM3")
    pcie = kernels_for("NVIDIA H100 PCIe", 756e12, "triton", "sparse", of_h100)
    assert all(curve.scaled is not None for curve in pcie.whole.values())
    assert "not calibrated on NVIDIA H100 PCIe" in pcie.remarks[0]
    alike = kernels_for("NVIDIA H100 SXM5", 989e12, "triton", "sparse", of_h100)
    assert all(curve.scaled is None for curve in alike.whole.values())
    assert alike.remarks[0].startswith("kernel times are those of NVIDIA H100 80GB HBM3")


def test_published_times_of_a100s_reproduce_their_source():
    """FlashAttention-2's figure gives both passes together, another source forward alone."""
    document = json.loads((resource_dir("profiles") / "kernels-a100.json").read_text())
    assert document["published"] is True
    assert len(document["sources"]) == 3
    tflops = {}
    for time in document["times"]:
        case, both = time["case"], time["forward_ms"] + time["backward_ms"]
        flop = 4 * time["pairs"] * case["head_dim"]
        assert 3.5 * flop / both / 1e9 == pytest.approx(time["published_tflops"], rel=1e-3)
        assert both / time["forward_ms"] == pytest.approx(373.4 / 94.7, rel=1e-3)
        tflops[case["mask"], case["seq"]] = flop / time["forward_ms"] / 1e9
    assert tflops["causal", 8192] == pytest.approx(205, abs=0.5)  # of the other source
    assert max(tflops.values()) < 230  # the paper's text


def test_a100s_take_published_times_and_not_those_of_another_generation():
    for gpu in ("NVIDIA A100-SXM4-40GB", "NVIDIA A800-SXM4-80GB"):
        found = kernels_for(gpu, 312e12, "sdpa", DENSE)
        assert "are published figures of NVIDIA A100-SXM4-80GB" in found.remarks[0]
        curve = found.whole["backward"]
        assert curve.scaled is None
        assert 0.55 * 312 < 1e3 / curve.ms_per_tflop < 0.7 * 312
        assert (curve.low, curve.high) != (1, 1)
    # No other kernel was published: the H200's times stay, scaled.
    other = kernels_for("NVIDIA A100-SXM4-40GB", 312e12, "triton", SPARSE)
    assert "those of NVIDIA H200, scaled" in other.remarks[0]
    # Published times are never scaled to a GPU if mtrain measured another GPU.
    h100 = kernels_for("NVIDIA H100 80GB HBM3", 989e12, "sdpa", DENSE)
    assert "those of NVIDIA H200, scaled" in h100.remarks[0]


def test_only_a_kernel_without_striped_times_is_priced_by_stripes():
    a100 = kernels_for("NVIDIA A100-SXM4-40GB", 312e12, "sdpa", LISTS)
    assert a100.by_stripes
    assert "one call per stripe" in a100.remarks[1]
    assert not kernels_for("NVIDIA A100-SXM4-40GB", 312e12, "sdpa", DENSE).by_stripes
    assert not kernels_for("NVIDIA H200", 989e12, "sdpa", LISTS).by_stripes
    assert not kernels_for("NVIDIA H200", 989e12, "triton", LISTS).by_stripes
