"""Fit times of attention kernels to measurements.

A call takes a fixed time plus its work over a rate. Block diagonals and single columns have
separate rates, as do forward and backward. A kernel's efficiency thus grows with the work w of a
call as w / (w + w0), where w0 is the work of the fixed time at full speed. Errors are leave-one-out
errors.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from mtrain_cli import resource_dir
from mtrain_cli.config.documents import is_number, read_json, reason
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.parallel.recording import INDEX
from mtrain_cli.simulation.program import FloatArray
from mtrain_cli.simulation.work_counts import BACKWARD, FLOP_PER_PAIR, FORWARD
from mtrain_cli.training.flops import peak_flops

# Forms of a call: whole intervals; a list of blocks under plain masks; the block diagonals and the
# columns of an index, together or only one of them.
DENSE, LISTS, SPARSE, DIAGONALS, ALONE_COLUMNS = "dense", "lists", "sparse", "diagonals", "columns"
# Other measured parts of a step (`profiling.non_attention_benchmark`): the passes of a layer,
# INDEX, and the loss with the embedding.
LOSS = "loss"
NON_ATTENTION_FILE = "non_attention"
KINDS_OF_FILES = ("kernels", "worker_calls", NON_ATTENTION_FILE)
LOW, VALUE, HIGH = "low", "value", "high"
# Bounds of a GPU that was not measured: its time may be off the estimate by these factors.
UNKNOWN = (1 / 1.6, 2.0)
_LEAST_ERROR = 0.05  # from one GPU to another of the same kind
_WAITS = 1.5  # above this many times the share of large work, the host sets the time
_NEAR = 0.5  # bounds also hold up to this share beyond the measured range


@dataclass(frozen=True)
class CalibrationPoint:
    """One measured call.

    flop: 1e12 FLOP of block diagonals, or of all dense work.
    column_flop: 1e12 FLOP of single columns.
    ms: its time.
    """

    flop: float
    column_flop: float
    ms: float


@dataclass(frozen=True)
class Curve:
    """Time of a call: ``fixed_ms + tflop * ms_per_tflop + column_tflop * ms_per_column_tflop``.

    error: mean absolute relative leave-one-out error.
    points: number of measured points.
    low, high: factors for the bounds.
    fixed_bounds: bounds of fixed_ms, if it is less certain than the rest.
    scaled: the measured device, if this curve is scaled to another one.
    stands_for: the measured kernel or form, if it was another one.
    skips: whether the kernel skips what an index leaves out; if not, work is all that the mask
        leaves.
    """

    kernel: str
    form: str
    direction: str
    fixed_ms: float
    ms_per_tflop: float
    ms_per_column_tflop: float
    error: float
    points: int
    low: float = 1.0
    high: float = 1.0
    fixed_bounds: tuple[float, float] | None = None
    scaled: str | None = None
    stands_for: str | None = None
    skips: bool = True

    def us(
        self, flop: np.ndarray, column_flop: np.ndarray | float = 0.0, bound: str = VALUE
    ) -> FloatArray:
        """Return the us of calls; 0 where there is no work. flop: of all but single columns."""
        fixed = self.fixed_ms
        if self.fixed_bounds is not None and bound != VALUE:
            fixed = self.fixed_bounds[bound == HIGH]
        ms = (
            fixed
            + np.asarray(flop) * (self.ms_per_tflop / 1e12)
            + np.asarray(column_flop) * (self.ms_per_column_tflop / 1e12)
        )
        factor = {LOW: self.low, VALUE: 1.0, HIGH: self.high}[bound]
        return np.where(np.asarray(flop) + column_flop > 0, ms * 1e3 * factor, 0.0)


def fit(points: Sequence[CalibrationPoint]) -> tuple[float, float, float]:
    """Fit fixed ms, ms per 1e12 FLOP, and ms per 1e12 FLOP of columns.

    None is negative; the sum of squared relative errors is the least.
    """
    return fit_together([points])[0]


def fit_together(forms: Sequence[Sequence[CalibrationPoint]]) -> list[tuple[float, float, float]]:
    """`fit` several forms of calls to the same kernels: shared rates, a fixed time for each form.

    Calls that mix diagonals and columns in one proportion cannot separate the two rates, and small
    calls of one form cannot tell what large ones take. Together they can.
    """
    rows = [(form_number, p) for form_number, points in enumerate(forms) for p in points]
    table = np.zeros((len(rows), len(forms) + 2))
    for row, (form_number, p) in zip(table, rows, strict=True):
        row[[form_number, -2, -1]] = np.array([1.0, p.flop, p.column_flop]) / p.ms
    # Fewer than three points of a form cannot determine a fixed time.
    used = [
        i
        for i in range(table.shape[1])
        if table[:, i].any() and (i >= len(forms) or len(forms[i]) > 2)
    ]
    best, least = np.zeros(table.shape[1]), np.inf
    for number in range(1, len(used) + 1):
        for chosen in itertools.combinations(used, number):
            solution = np.zeros(table.shape[1])
            solution[list(chosen)] = np.linalg.lstsq(
                table[:, chosen], np.ones(len(rows)), rcond=None
            )[0]
            error = float(((table @ solution - 1) ** 2).sum())
            if (solution >= 0).all() and error < least * (1 - 1e-9):
                best, least = solution, error
    return [(float(fixed), float(best[-2]), float(best[-1])) for fixed in best[:-2]]


def held_out_errors(forms: Sequence[Sequence[CalibrationPoint]]) -> list[float]:
    """Return the mean absolute relative leave-one-out error of each form."""
    means = []
    for form_number, points in enumerate(forms):
        errors = []
        for i, left_out in enumerate(points):
            others = [list(p) for p in forms]
            del others[form_number][i]
            fixed, rate, column_flop = fit_together(others)[form_number]
            errors.append(
                abs(
                    (fixed + left_out.flop * rate + left_out.column_flop * column_flop)
                    / left_out.ms
                    - 1
                )
            )
        means.append(float(np.mean(errors)) if len(points) > 2 else float("nan"))
    return means


@dataclass(frozen=True)
class NonAttentionPoint:
    """One measured part of a step other than attention.

    size: tokens; for a layer, rows of a tile of its MLP.
    flop, moved: FLOP and bytes that `simulation.non_attention_cost` counts for it.
    heads: query heads.
    """

    part: str
    size: int
    us: float
    flop: float
    moved: float
    heads: int


@dataclass(frozen=True)
class NonAttentionTimes:
    """Measured parts of a step other than attention, on one device. dtype: of matrix products."""

    points: tuple[NonAttentionPoint, ...]
    dtype: str = "bfloat16"

    @property
    def parts(self) -> set[str]:
        return {point.part for point in self.points}

    def share(
        self, part: str, expected: float, of: Callable[[NonAttentionPoint], float]
    ) -> tuple[float, bool]:
        """Return a part's measured over its expected time, and whether such a size was measured.

        Interpolates by the logarithm of the expected time. If the smallest measured size was bound
        by the host, smaller sizes take the same time.

        expected: us. of: expected us of a measured point.
        """
        ratios: dict[float, list[float]] = {}
        for point in self.points:
            if point.part == part:
                ratios.setdefault(of(point), []).append(point.us / of(point))
        us = sorted(ratios)
        shares = [statistics.median(ratios[e]) for e in us]
        least, most = us[0], us[-1]
        share = float(np.interp(np.log(expected), np.log(us), shares))
        if expected < least and shares[0] > _WAITS * min(shares):
            share *= least / expected
        return share, least * (1 - _NEAR) <= expected <= most * (1 + _NEAR)

    def index(self, tokens: float, heads: int, each: float) -> float | None:
        """Return the us of an index estimate; None if not measured.

        each: us per token above the largest measured size, since short estimates are launch-bound.
        """
        by_size: dict[int, list[float]] = {}
        for point in self.points:
            if point.part == INDEX:
                by_size.setdefault(point.size, []).append(point.us)
        if not by_size:
            return None
        sizes = sorted(by_size)
        us = [statistics.median(by_size[size]) for size in sizes]
        measured = next(point.heads for point in self.points if point.part == INDEX)
        # Every head reads the scores of all keys. Launches do not depend on the number of heads.
        more = (float(np.interp(tokens, sizes, us)) - min(us)) * max(1.0, heads / measured)
        return min(us) + more + max(0.0, tokens - sizes[-1]) * each


@dataclass(frozen=True)
class Calibration:
    """The curves of one device, the files they come from, and other measured parts of a step."""

    device: str
    curves: tuple[Curve, ...]
    files: tuple[str, ...]
    non_attention: NonAttentionTimes | None = None

    def find(self, kernel: str, form: str, direction: str) -> Curve | None:
        return next(
            (
                c
                for c in self.curves
                if (c.kernel, c.form, c.direction) == (kernel, form, direction)
            ),
            None,
        )


def load_calibration(*paths: Path) -> Calibration:
    """Load files of ``mtrain profile kernels --out`` and ``mtrain profile non-attention --out``.

    Raises:
        ConfigError: a file is missing, damaged or of another kind, or the devices differ.
    """
    points: dict[tuple[str, str, str], list[CalibrationPoint]] = {}
    non_attention: list[NonAttentionPoint] = []
    dtypes: list[str] = []
    dense_only: set[str] = set()  # kernels that compute what an index leaves out
    devices = []
    for path in paths:
        document = _document(path)
        devices.append(str(document["device"]))
        if devices[0] != devices[-1]:
            raise ConfigError(
                f"--calibration {path}: is of {devices[-1]}, the other file of {devices[0]}; "
                "give files of one GPU"
            )
        try:
            if document["kind"] == NON_ATTENTION_FILE:
                file_points = [_non_attention_point(time) for time in document["times"]]
                _check_non_attention(path, file_points, str(document["dtype"]), dtypes)
                non_attention += file_points
                continue
            for time in document["times"]:
                form = time.get("form") or (DENSE if time["case"]["density"] is None else SPARSE)
                pairs, column_pairs = int(time["pairs"]), int(time.get("column_pairs") or 0)
                if not time.get("skips", True):
                    dense_only.add(str(time["kernel"]))
                    if form in (SPARSE, DIAGONALS):
                        pairs, column_pairs = int(time["mask_pairs"]), 0
                for direction in (FORWARD, BACKWARD):
                    flop = FLOP_PER_PAIR[direction] * int(time["case"]["head_dim"]) / 1e12
                    point = CalibrationPoint(
                        (pairs - column_pairs) * flop,
                        column_pairs * flop,
                        float(time[f"{direction}_ms"]),
                    )
                    if not all(map(is_number, (point.ms, point.flop, point.column_flop))) or not (
                        point.ms > 0 and point.flop + point.column_flop > 0
                    ):
                        raise ValueError("a time or a number of pairs is not positive")
                    points.setdefault((str(time["kernel"]), str(form), direction), []).append(point)
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            OverflowError,
            IndexError,
        ) as problem:
            raise ConfigError(
                f"--calibration {path}: is damaged ({reason(problem)}); measure again"
            ) from problem
    curves = []
    for (kernel, direction), forms in _group_by_kernels(points):
        measured = [points[kernel, form, direction] for form in forms]
        for form, form_points, constants, error in zip(
            forms, measured, fit_together(measured), held_out_errors(measured), strict=True
        ):
            spread = max(_LEAST_ERROR, 2 * (error if np.isfinite(error) else 0.25))
            low, high, skips = 1 - min(spread, 0.9), 1 + spread, kernel not in dense_only
            name, number = (kernel, form, direction), len(form_points)
            curves.append(Curve(*name, *constants, error, number, low, high, skips=skips))
    return Calibration(
        devices[0],
        tuple(curves),
        tuple(path.name for path in paths),
        NonAttentionTimes(tuple(non_attention), dtypes[0]) if non_attention else None,
    )


def load_user_calibration(files: str | None) -> Calibration | None:
    """Load the user's files, ``FILE,...`` as typed; None if there are none.

    Raises:
        ConfigError: see `load_calibration`.
    """
    if files is None:
        return None
    paths = [file.strip() for file in files.split(",")]
    if not all(paths):
        raise ConfigError(f"--calibration {files!r}: empty item; give FILE or FILE,FILE")
    return load_calibration(*map(Path, paths))


def _check_non_attention(
    path: Path, points: Sequence[NonAttentionPoint], dtype: str, dtypes: list[str]
) -> None:
    """Check the parts and the dtype of a file. dtypes: of earlier files; this one's is added."""
    absent = [
        part for part in (FORWARD, BACKWARD, LOSS) if part not in {point.part for point in points}
    ]
    if absent:
        raise ConfigError(
            f"--calibration {path}: no times of {' and '.join(absent)}; the measurement ended "
            "early, "
            "measure again"
        )
    dtypes.append(dtype)
    if dtype != dtypes[0]:
        raise ConfigError(
            f"--calibration {path}: is of {dtype}, the other file of {dtypes[0]}; give files of "
            "one "
            "dtype"
        )


def _non_attention_point(time: dict[str, Any]) -> NonAttentionPoint:
    part = str(time["part"])
    if part not in (FORWARD, BACKWARD, LOSS, INDEX):
        raise ValueError(f"part={part}")
    size = int(time["rows"] if part in (FORWARD, BACKWARD) else time["tokens"])
    point = NonAttentionPoint(
        part,
        size,
        float(time["ms"]) * 1e3,
        float(time["flop"]),
        float(time["moved"]),
        int(time["heads"]),
    )
    if not all(map(is_number, (point.us, size, point.flop, point.moved, point.heads))):
        raise ValueError(f"{part}: a value is not a number")
    if not (
        point.us > 0
        and size > 0
        and point.heads > 0
        and (part == INDEX or point.flop + point.moved > 0)
    ):
        raise ValueError(f"{part}: ms, tokens, rows, flop and moved must be above 0")
    return point


def _group_by_kernels(
    measured: Iterable[tuple[str, str, str]],
) -> list[tuple[tuple[str, str], list[str]]]:
    """Group the forms of each (kernel, direction) that the same kernels serve.

    Forms under an index are one group; every other form is its own.
    """
    groups: dict[tuple[str, str, str], list[str]] = {}
    for kernel, form, direction in measured:
        family = SPARSE if form in (DIAGONALS, ALONE_COLUMNS) else form
        groups.setdefault((kernel, direction, family), []).append(form)
    return [((kernel, direction), forms) for (kernel, direction, _), forms in groups.items()]


def _document(path: Path) -> dict[str, Any]:
    try:
        document = read_json(path)
    except FileNotFoundError:
        raise ConfigError(
            f"--calibration {path}: no such file; `mtrain profile kernels --out FILE` writes one"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--calibration {path}: not readable as JSON ({reason(error)})"
        ) from error
    if (
        not isinstance(document, dict)
        or document.get("kind") not in KINDS_OF_FILES
        or not document.get("times")
        or "device" not in document
    ):
        raise ConfigError(
            f"--calibration {path}: holds no times; `mtrain profile kernels` and `mtrain profile "
            "non-attention` write such files with --out FILE"
        )
    return document


@lru_cache(maxsize=1)
def shipped() -> tuple[Calibration, ...]:
    """Return the calibrations that ship, one per measured device."""
    by_device: dict[str, list[Path]] = {}
    for path in sorted(resource_dir("profiles").glob("*.json")):
        try:
            document = _document(path)
        except ConfigError:
            continue
        by_device.setdefault(str(document["device"]), []).append(path)
    return tuple(load_calibration(*paths) for paths in by_device.values())


@dataclass(frozen=True)
class KernelCurves:
    """Curves of the attention kernels of a cluster's GPU, measured or scaled from another GPU.

    whole: by direction, of calls that compute everything at once.
    remarks: for the user.
    alone: by form and direction, of calls with diagonals or columns only, where measured.
    non_attention: measured parts of a step other than attention, if measured on such a GPU.
    """

    whole: dict[str, Curve]
    remarks: tuple[str, ...]
    alone: dict[tuple[str, str], Curve] = field(default_factory=dict)
    non_attention: NonAttentionTimes | None = None

    def part(self, direction: str, form: str) -> Curve:
        """Return the curve of calls with diagonals or columns only (`DIAGONALS`, `ALONE_COLUMNS`).

        If these were not measured, only their joint fixed time is known: each gets half of it, with
        bounds from none to all of it.
        """
        if (form, direction) in self.alone:
            return self.alone[form, direction]
        curve = self.whole[direction]
        return replace(curve, fixed_ms=curve.fixed_ms / 2, fixed_bounds=(0.0, curve.fixed_ms))


def kernels_for(
    gpu: str,
    peak: float,
    kernel: str,
    form: str,
    peaks: dict[str, float],
    calibration: Calibration | None = None,
) -> KernelCurves:
    """Return the curves of a kernel on a GPU.

    Args:
        gpu: name of the cluster's GPU.
        peak: its FLOP/s.
        peaks: FLOP/s of the measured devices, by name.
        calibration: the user's own.
    """
    source, measured = _source(gpu, calibration)
    remarks: list[str] = []
    factor, low, high = 1.0, 1.0, 1.0
    if not measured:
        factor, (low, high) = peaks[source.device] / peak, UNKNOWN
        remarks.append(
            f"not calibrated on {gpu}: kernel times are those of {source.device} by peak FLOP/s (x "
            f"{factor:.2f}), within "
            f"x {low:.2f} and x {high:.2f}; `mtrain profile kernels --out FILE` on that GPU, then "
            "--calibration FILE"
        )
    elif source.device != gpu:
        remarks.append(
            f"kernel times are those of {source.device}: {gpu} computes as fast, but its memory "
            "may "
            "be faster or slower"
        )

    def scale(curve: Curve, stands: str | None, low: float, high: float) -> Curve:
        fixed = curve.fixed_ms
        # The fixed time is launches and the like: a slower GPU need not make it longer.
        fixed_bounds = min(1.0, factor) * fixed, max(1.0, factor) * fixed
        return replace(
            curve,
            fixed_bounds=None if factor == 1 else fixed_bounds,
            ms_per_tflop=curve.ms_per_tflop * factor,
            ms_per_column_tflop=curve.ms_per_column_tflop * factor,
            low=curve.low * low,
            high=curve.high * high,
            scaled=None if measured else source.device,
            stands_for=stands,
        )

    curves, alone = {}, {}
    for direction in (FORWARD, BACKWARD):
        for part in (DIAGONALS, ALONE_COLUMNS):
            exactly = source.find(kernel, part, direction)
            if exactly is not None:
                alone[part, direction] = scale(exactly, None, low, high)
        curve, stands = _curve(source, kernel, form, direction)
        if stands is not None:
            low, high = min(low, UNKNOWN[0]), max(high, UNKNOWN[1])
            remark = (
                f"{kernel} was not measured on {form} calls: {stands} stands for it, within "
                f"x {low:.2f} and x {high:.2f}"
            )
            remarks += [remark] if remark not in remarks else []
        curves[direction] = scale(curve, stands, low, high)
    non_attention = _non_attention_of(gpu, calibration)
    if (
        calibration is not None
        and calibration.non_attention is not None
        and non_attention is not calibration.non_attention
    ):
        remarks.append(
            f"times other than attention are of {calibration.device}, which says nothing about "
            f"{gpu}: "
            "they are not used"
        )
    return KernelCurves(curves, tuple(remarks), alone, non_attention)


def _source(gpu: str, calibration: Calibration | None) -> tuple[Calibration, bool]:
    """Return the calibration that prices a GPU's kernels, and whether it is of that GPU."""
    known = (calibration,) if calibration is not None and calibration.curves else shipped()
    measured = next((c for c in known if c.device == gpu), None) or next(
        (c for c in known if same_device(c.device, gpu)), None
    )
    return measured or known[0], measured is not None


def _non_attention_of(gpu: str, calibration: Calibration | None) -> NonAttentionTimes | None:
    """Return the times other than attention of such a GPU: the user's own, else those that ship."""
    known = [*([calibration] if calibration is not None else []), *shipped()]
    return next(
        (
            c.non_attention
            for c in known
            if c.non_attention is not None and same_device(c.device, gpu)
        ),
        None,
    )


def describe_source(gpu: str, calibration: Calibration | None) -> dict[str, Any]:
    """Describe the calibration in use, for files. scaled: its times are of another device."""
    source, measured = _source(gpu, calibration)
    # The user's file may hold times other than attention only, of such a GPU.
    own = (
        calibration.files
        if calibration not in (None, source) and same_device(calibration.device, gpu)
        else ()
    )
    return {
        "device": source.device,
        "files": [*own, *source.files],
        "own": calibration is not None,
        "scaled": not measured,
    }


def _curve(source: Calibration, kernel: str, form: str, direction: str) -> tuple[Curve, str | None]:
    """Return a curve, and the kernel and form that it stands in with (None if exactly measured)."""
    curve = source.find(kernel, form, direction)
    if curve is not None:
        return curve, None
    others = [(kernel, LISTS), (kernel, DENSE), (kernel, SPARSE)] if form != SPARSE else []
    others += [(c.kernel, form) for c in source.curves] + [
        (c.kernel, c.form) for c in source.curves
    ]
    for name, other in others:
        if (curve := source.find(name, other, direction)) is not None:
            return curve, f"{name} ({other})"
    raise ConfigError(f"the calibration of {source.device} holds no {direction} times")


def same_device(device: str, gpu: str) -> bool:
    """Return whether compute-bound kernels take as long on both.

    That is the same chip (H200, A100, ...) in the same form (SXM, NVL, PCIe) with the same peak.
    The memory may differ (A100 of 40 and 80 GB).
    """
    if device == gpu:
        return True
    chips = [re.search(r"\b(?:GB|B|GH|H|A|L|RTX )\d{2,4}S?\b", name) for name in (device, gpu)]
    forms = [re.search(r"\b(?:NVL|PCIE)", name.upper()) for name in (device, gpu)]
    same = _text(chips[0]) == _text(chips[1]) is not None and _text(forms[0]) == _text(forms[1])
    return same and peak_flops(device) == peak_flops(gpu)


def _text(match: re.Match[str] | None) -> str | None:
    return None if match is None else match[0]
