"""Curves of kernels: forms that are fitted together, and GPUs that were not measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

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
    MOST_OF_PEAK,
    SPARSE,
    CalibrationPoint,
    fit_together,
    held_out_errors,
    kernels_for,
    load_calibration,
    same_device,
    shipped,
)
from mtrain_cli.simulation.calibration_files import (
    KINDS_OF_FILES,
    calibration_files,
    read_calibration,
    shipped_files,
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
                    fastest = np.minimum(value, at_peak / MOST_OF_PEAK)
                    assert (low >= fastest * (1 - 1e-9)).all()
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


def fit(points):
    return fit_together([points])[0]


def made(fixed: float, rate: float, columns: float, noise: float = 0.0) -> list[CalibrationPoint]:
    rng = np.random.default_rng(0)
    works = [(f, c) for f in (0.5, 2.0, 8.0, 30.0) for c in (0.1, 0.5, 2.0)]
    return [
        CalibrationPoint(
            f, c, (fixed + rate * f + columns * c) * float(np.exp(rng.normal(0, noise)))
        )
        for f, c in works
    ]


def test_a_fit_recovers_the_constants_of_its_points():
    assert fit(made(0.3, 1.7, 3.4)) == pytest.approx((0.3, 1.7, 3.4))
    assert held_out_errors([made(0.3, 1.7, 3.4)])[0] == pytest.approx(0, abs=1e-9)
    assert 0.02 < held_out_errors([made(0.3, 1.7, 3.4, noise=0.05)])[0] < 0.08
    # No time is negative, and a single point does not determine a fixed time.
    assert (
        min(
            fit(
                [
                    CalibrationPoint(1, 0, 1.0),
                    CalibrationPoint(2, 0, 2.2),
                    CalibrationPoint(4, 0, 4.9),
                ]
            )
        )
        >= 0
    )
    assert fit([CalibrationPoint(2, 0, 3.0)]) == (0, pytest.approx(1.5), 0)


def test_calls_to_the_same_kernels_are_fitted_together():
    """Joint calls have a fifth of their work in columns; diagonals have only small, noisy calls."""
    rng = np.random.default_rng(1)
    both = [CalibrationPoint(f, f / 4, 0.2 + 1.7 * f + 3.4 * f / 4) for f in (0.5, 1.0, 2.0, 4.0)]
    diagonals = [
        CalibrationPoint(f, 0, (0.3 + 1.7 * f) * float(np.exp(rng.normal(0, 0.1))))
        for f in (0.05, 0.1, 0.2, 0.4)
    ]
    columns = [CalibrationPoint(0, f, 0.1 + 3.4 * f) for f in (0.1, 0.3, 0.5)]
    of_both, of_diagonals, of_columns = fit_together([both, diagonals, columns])
    assert of_both[1:] == of_diagonals[1:] == of_columns[1:] == pytest.approx((1.7, 3.4), rel=0.12)
    # A large call with other proportions. A fit to the joint calls only would be off.
    expected = 0.2 + 30 * 1.7 + 3.4
    assert of_both[0] + 30 * of_both[1] + of_both[2] == pytest.approx(expected, rel=0.12)
    apart = fit(both)
    assert abs(apart[0] + 30 * apart[1] + apart[2] - expected) > 0.25 * expected
    # A point that takes twice as long is predicted without itself, but with the other forms.
    strange = [*both[:3], CalibrationPoint(4.0, 1.0, 2 * both[3].ms)]
    apart = [fit([p for p in strange if p is not left_out]) for left_out in strange]
    errors = [
        abs((f + r * p.flop + c * p.column_flop) / p.ms - 1)
        for (f, r, c), p in zip(apart, strange, strict=True)
    ]
    assert errors[-1] == pytest.approx(0.5, abs=1e-6)
    assert held_out_errors([strange]) == pytest.approx([sum(errors) / 4])
    assert held_out_errors([both, diagonals, columns])[1] != pytest.approx(
        held_out_errors([diagonals])[0], rel=1e-3
    )


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def written(name: str, content: object) -> Path:
    path = Path(name)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def calibration(kind: str) -> dict[str, object]:
    return {"kind": kind, "device": "GPU", "times": [1]}


@pytest.mark.parametrize("kind", KINDS_OF_FILES)
def test_a_calibration_is_read(kind):
    assert read_calibration(written("a.json", calibration(kind))) == calibration(kind)


def test_several_files_are_given_by_path_and_by_name():
    own = written("own.json", calibration("kernels"))
    shipped = resource_dir("profiles") / "kernels-h200.json"
    assert calibration_files("own.json, kernels-h200") == [own, shipped]
    with pytest.raises(ConfigError, match=r"^--calibration 'own.json,': empty item"):
        calibration_files("own.json,")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such calibration"),
        ("{", "not readable as JSON"),
        ("[1]", "holds no times"),
        ({**calibration("kernels"), "times": []}, "holds no times"),
        ({"kind": "kernels", "times": [1]}, "holds no times"),
        (calibration("masks"), "holds no times"),
    ],
)
def test_another_file_is_refused_in_one_line(content, message):
    path = Path("a.json") if content is None else written("a.json", content)
    with pytest.raises(ConfigError, match=rf"^--calibration a\.json: {message}") as caught:
        read_calibration(path)
    assert len(caught.value.problems) == 1
    if content is None:
        assert "kernels-h200" in str(caught.value), "the shipped files are named"


def test_shipped_files_are_grouped_by_device():
    found = shipped_files()
    assert {path.stem for files in found.values() for path in files} >= {
        "kernels-h200",
        "non-attention-h200",
        "worker-calls-h200",
    }
    for device, files in found.items():
        assert {read_calibration(path)["device"] for path in files} == {device}
