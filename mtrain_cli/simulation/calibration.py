"""Curves of attention kernels, fitted to measurements, and the curves to take for a GPU.

A kernel's efficiency grows with the work w of a call as w / (w + w0); w0 takes the fixed time.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtrain_cli.config.documents import is_number, reason
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.grouping import grouped
from mtrain_cli.parallel.recording import INDEX
from mtrain_cli.simulation.calibration_files import (
    NON_ATTENTION_FILE,
    calibration_files,
    read_calibration,
    shipped_files,
)
from mtrain_cli.simulation.work_counts import BACKWARD, FLOP_PER_PAIR, FORWARD
from mtrain_cli.training.flops import peak_flops

FloatArray = NDArray[np.float64]
# Forms of a kernel call: whole intervals of keys, a list of blocks (a striped layout without an
# index), slashes and columns of an index together, slashes only, columns only.
DENSE, LISTS, SPARSE, DIAGONALS, ALONE_COLUMNS = "dense", "lists", "sparse", "diagonals", "columns"
# Measured parts of a step: FORWARD and BACKWARD of a layer without attention, INDEX (estimating an
# index), and LOSS (LM head, loss and embedding).
LOSS = "loss"
LOW, VALUE, HIGH = "low", "value", "high"
# Bounds, as factors on the expected time: on a GPU that was not measured, and of times that others
# published for this GPU, whose clocks drop in a run.
UNKNOWN, PUBLISHED = (1 / 1.6, 2.0), (0.95, 1.25)
# The largest share of the peak that mtrain measured is 0.81: products on an H100.
MOST_OF_PEAK = 0.85
_LEAST_ERROR = 0.05  # relative; GPUs of one model differ by this much
# The smallest size is launch-bound if its measured / expected time exceeds the lowest such ratio by
# this factor.
_WAITS = 1.5
_NEAR = 0.5  # a size is near the measured ones if it exceeds their range by at most this share


@dataclass(frozen=True)
class Curve:
    """Time of a call: ``fixed_ms + tflop * ms_per_tflop + column_tflop * ms_per_column_tflop``.

    error: mean absolute relative leave-one-out error.
    low, high: factors that turn the time into its lower and upper bound.
    fixed_bounds: fixed_ms in the (lower, upper) bound; None to keep fixed_ms.
    scaled: name of the measured device if the curve is scaled to another one.
    skips: whether the kernel skips the pairs that an index leaves out.
    peak: FLOP/s of the GPU. No lower bound assumes more than `MOST_OF_PEAK` of it.
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
    skips: bool = True
    peak: float = np.inf

    def us(
        self, flop: np.ndarray, column_flop: np.ndarray | float = 0.0, bound: str = VALUE
    ) -> FloatArray:
        """Return the microseconds of each call; 0 for a call without work.

        flop, column_flop: FLOP of each call without, and of, its single columns.
        """
        fixed = self.fixed_ms
        if self.fixed_bounds is not None and bound != VALUE:
            fixed = self.fixed_bounds[bound == HIGH]
        flop, column_flop = np.asarray(flop), np.asarray(column_flop)
        ms = fixed + flop * (self.ms_per_tflop / 1e12)
        ms = ms + column_flop * (self.ms_per_column_tflop / 1e12)
        within = {LOW: self.low, VALUE: 1.0, HIGH: self.high}[bound] * ms
        if bound == LOW:
            least = (flop + column_flop) / (MOST_OF_PEAK * self.peak) * 1e3
            within = np.maximum(within, np.minimum(ms, least))
        return np.where(flop + column_flop > 0, within * 1e3, 0.0)


@dataclass(frozen=True)
class NonAttentionPoint:
    """The measured time of one part of a step.

    part: FORWARD, BACKWARD, INDEX or LOSS.
    size: number of tokens; for a layer (FORWARD, BACKWARD), rows in a tile of its MLP.
    flop, moved: FLOP and bytes, as `simulation.non_attention_cost` counts them.
    """

    part: str
    size: int
    us: float
    flop: float
    moved: float
    heads: int


@dataclass(frozen=True)
class NonAttentionTimes:
    """Measured times of the parts of a step except attention, on one device."""

    points: tuple[NonAttentionPoint, ...]
    dtype: str = "bfloat16"

    @property
    def parts(self) -> set[str]:
        return {point.part for point in self.points}

    def _medians(
        self,
        part: str,
        at: Callable[[NonAttentionPoint], float],
        of: Callable[[NonAttentionPoint], float],
    ) -> dict[float, float]:
        """Return the median of ``of(point)`` for each value of ``at(point)``, ascending."""
        found = grouped((point for point in self.points if point.part == part), at)
        return {place: statistics.median(map(of, found[place])) for place in sorted(found)}

    def share(
        self, part: str, expected: float, of: Callable[[NonAttentionPoint], float]
    ) -> tuple[float, bool]:
        """Return a part's measured / expected time, and whether it lies near measured sizes.

        The ratio is interpolated over the logarithm of the expected microseconds, which ``of``
        returns for a measured point. Sizes below a launch-bound one take the same time.
        """
        ratios = self._medians(part, of, lambda point: point.us / of(point))
        us, shares = list(ratios), list(ratios.values())
        least, most = us[0], us[-1]
        share = float(np.interp(np.log(expected), np.log(us), shares))
        if expected < least and shares[0] > _WAITS * min(shares):
            share *= least / expected
        return share, least * (1 - _NEAR) <= expected <= most * (1 + _NEAR)

    def index(self, tokens: float, heads: int, each: float) -> float | None:
        """Return the microseconds to estimate an index; None if not measured.

        each: microseconds per token beyond the largest measured size, which is launch-bound.
        """
        by_size = self._medians(INDEX, lambda point: point.size, lambda point: point.us)
        if not by_size:
            return None
        sizes, us = list(by_size), list(by_size.values())
        measured = next(point.heads for point in self.points if point.part == INDEX)
        # Every head reads the scores of all keys. Launch overhead does not depend on the heads.
        more = (float(np.interp(tokens, sizes, us)) - min(us)) * max(1.0, heads / measured)
        return min(us) + more + max(0.0, tokens - sizes[-1]) * each


@dataclass(frozen=True)
class Calibration:
    """Everything measured on one device. published: whether others measured and published it."""

    device: str
    curves: tuple[Curve, ...]
    files: tuple[str, ...]
    non_attention: NonAttentionTimes | None = None
    published: bool = False

    def find(self, kernel: str, form: str, direction: str) -> Curve | None:
        sought = kernel, form, direction
        same = (c for c in self.curves if (c.kernel, c.form, c.direction) == sought)
        return next(same, None)

    def times(self, kernel: str) -> bool:
        return any(curve.kernel == kernel for curve in self.curves)


def load_calibration(*paths: Path) -> Calibration:
    """Load files of ``mtrain profile kernels --out`` and ``mtrain profile non-attention --out``.

    Raises:
        ConfigError: a file is missing, damaged or of another kind, or the devices differ.
    """
    points: dict[tuple[str, str, str], list[CalibrationPoint]] = {}
    non_attention: list[NonAttentionPoint] = []
    dtypes: list[str] = []
    dense_only: set[str] = set()  # kernels that also compute the pairs that an index leaves out
    devices: list[str] = []
    published = False
    for path in paths:
        document = read_calibration(path)
        published = published or document.get("published") is True
        _add_same(path, devices, str(document["device"]), "GPU")
        try:
            if document["kind"] == NON_ATTENTION_FILE:
                file_points = [_non_attention_point(time) for time in document["times"]]
                timed = {point.part for point in file_points}
                if absent := [part for part in (FORWARD, BACKWARD, LOSS) if part not in timed]:
                    raise ConfigError(
                        f"--calibration {path}: it lacks times of {' and '.join(absent)}; the "
                        "measurement ended early, measure again"
                    )
                _add_same(path, dtypes, str(document["dtype"]), "dtype")
                non_attention += file_points
                continue
            for time in document["times"]:
                if not time.get("skips", True):
                    dense_only.add(str(time["kernel"]))
                for form, direction, point in _points(time):
                    points.setdefault((str(time["kernel"]), form, direction), []).append(point)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as problem:
            raise ConfigError(
                f"--calibration {path}: is damaged ({reason(problem)}); measure again"
            ) from problem
    curves = []
    # The three forms of calls with an index are fitted together.
    of_index = (SPARSE, DIAGONALS, ALONE_COLUMNS)
    for names in grouped(points, lambda n: (n[0], n[2], "" if n[1] in of_index else n[1])).values():
        measured = [points[name] for name in names]
        for name, form_points, constants, error in zip(
            names, measured, fit_together(measured), held_out_errors(measured), strict=True
        ):
            spread = max(_LEAST_ERROR, 2 * (error if np.isfinite(error) else 0.25))
            low, high, skips = 1 - min(spread, 0.9), 1 + spread, name[0] not in dense_only
            number = len(form_points)
            curves.append(Curve(*name, *constants, error, number, low, high, skips=skips))
    times = NonAttentionTimes(tuple(non_attention), dtypes[0]) if non_attention else None
    return Calibration(devices[0], tuple(curves), tuple(p.name for p in paths), times, published)


def _points(time: dict[str, Any]) -> Iterator[tuple[str, str, CalibrationPoint]]:
    """Yield (form, direction, point) for both passes of a `KernelTime` of mtrain_extras.bench."""
    form = str(time.get("form") or (DENSE if time["case"]["density"] is None else SPARSE))
    pairs, column_pairs = int(time["pairs"]), int(time.get("column_pairs") or 0)
    if not time.get("skips", True) and form in (SPARSE, DIAGONALS):
        pairs, column_pairs = int(time["mask_pairs"]), 0
    for direction in (FORWARD, BACKWARD):
        each = FLOP_PER_PAIR[direction] * int(time["case"]["head_dim"]) / 1e12
        flop, column_flop = (pairs - column_pairs) * each, column_pairs * each
        ms = float(time[f"{direction}_ms"])
        if not (all(map(is_number, (ms, flop, column_flop))) and ms > 0 < flop + column_flop):
            raise ValueError("a time or a number of pairs is not positive")
        yield form, direction, CalibrationPoint(flop, column_flop, ms)


def load_user_calibration(files: str | None) -> Calibration | None:
    """Load the files or shipped names in ``FILE,...``; None if there are none."""
    return None if files is None else load_calibration(*calibration_files(files))


def _add_same(path: Path, values: list[str], value: str, what: str) -> None:
    values.append(value)
    if value != values[0]:
        raise ConfigError(
            f"--calibration {path}: measured with {what} {value}, but the first file was measured "
            f"with {what} {values[0]}; give files of one {what}"
        )


def _non_attention_point(time: dict[str, Any]) -> NonAttentionPoint:
    part = str(time["part"])
    if part not in (FORWARD, BACKWARD, LOSS, INDEX):
        raise ValueError(f"part={part}")
    size = int(time["rows"] if part in (FORWARD, BACKWARD) else time["tokens"])
    us, heads = float(time["ms"]) * 1e3, int(time["heads"])
    flop, moved = float(time["flop"]), float(time["moved"])
    if not all(map(is_number, (us, size, flop, moved, heads))):
        raise ValueError(f"{part}: a value is not a number")
    if min(us, size, heads) <= 0 or (part != INDEX and flop + moved <= 0):
        raise ValueError(f"{part}: ms, tokens, rows, flop and moved must be above 0")
    return NonAttentionPoint(part, size, us, flop, moved, heads)


@lru_cache(maxsize=1)
def shipped() -> tuple[Calibration, ...]:
    """Load the calibrations that ship with mtrain, one per measured device."""
    return tuple(load_calibration(*paths) for paths in shipped_files().values())


@dataclass(frozen=True)
class KernelCurves:
    """Curves of the attention kernels of a cluster's GPU, measured or scaled from another GPU.

    whole: by direction, the curve of calls that compute all pairs of a step.
    alone: by form and direction, the measured curve of calls with only slashes or only columns.
    non_attention: times of the other parts of a step; None if not measured on this GPU model.
    by_stripes: whether a step takes one call per stripe of a striped layout. ``whole`` then holds
        the times of the calls alone, and `costs.stripes_us` gives the rest.
    """

    whole: dict[str, Curve]
    remarks: tuple[str, ...]
    alone: dict[tuple[str, str], Curve] = field(default_factory=dict)
    non_attention: NonAttentionTimes | None = None
    by_stripes: bool = False

    def part(self, direction: str, form: str) -> Curve:
        """Return the curve of calls with only slashes (`DIAGONALS`) or only `ALONE_COLUMNS`.

        If they were not measured, each form gets half of the fixed time of a call with both.
        """
        if (form, direction) in self.alone:
            return self.alone[form, direction]
        curve = self.whole[direction]
        return replace(curve, fixed_ms=curve.fixed_ms / 2, fixed_bounds=(0.0, curve.fixed_ms))

    def slower(self, factor: float) -> KernelCurves:
        """Return the curves of a kernel whose calls with slashes take this factor longer."""

        def times(curve: Curve) -> Curve:
            return replace(curve, ms_per_tflop=factor * curve.ms_per_tflop)

        return replace(self, whole={name: times(curve) for name, curve in self.whole.items()})


def kernels_for(
    gpu: str,
    peak: float,
    kernel: str,
    form: str,
    calibration: Calibration | None = None,
) -> KernelCurves:
    """Return the curves of a kernel on a GPU. peak: FLOP/s of this GPU."""
    source, measured = _source(gpu, calibration, kernel)
    factor, low, high, remarks = _scale(gpu, peak, kernel, source, measured)
    # Stripes, each a call of `attention.sdpa`, were not measured.
    missing = source.find(kernel, LISTS, FORWARD) is None
    by_stripes = kernel == "sdpa" and form == LISTS and missing and source.times(kernel)
    if by_stripes:
        remarks.append(
            f"{kernel} was not measured on striped layouts of {gpu}: a step takes one call per "
            "stripe, and adds the gradients of the keys of each call"
        )
    curves, alone, device = {}, {}, None if measured else source.device
    for direction in (FORWARD, BACKWARD):
        for part in (DIAGONALS, ALONE_COLUMNS):
            exactly = source.find(kernel, part, direction)
            if exactly is not None:
                alone[part, direction] = _scaled(exactly, factor, low, high, device, peak)
        curve, stands = _curve(source, kernel, form, direction)
        if stands is not None and not by_stripes:
            low, high = min(low, UNKNOWN[0]), max(high, UNKNOWN[1])
            remarks.append(
                f"{kernel} was not measured on {form} calls: times are those of {stands}, with "
                f"bounds x {low:.2f} and x {high:.2f}"
            )
        curves[direction] = _scaled(curve, factor, low, high, device, peak)
    non_attention, own = _non_attention_of(gpu, calibration), calibration
    if own is not None and own.non_attention not in (None, non_attention):
        remarks.append(
            f"times other than attention were measured on {own.device}, so they are not used for "
            f"{gpu}"
        )
    return KernelCurves(curves, tuple(dict.fromkeys(remarks)), alone, non_attention, by_stripes)


def _scale(
    gpu: str, peak: float, kernel: str, source: Calibration, measured: bool
) -> tuple[float, float, float, list[str]]:
    """Return the factor on a calibration's times, their bounds, and remarks about the source."""
    if measured and source.published:
        low, high = PUBLISHED
        remark = (
            f"times of {kernel} on {gpu} are published figures of {source.device} "
            f"({', '.join(source.files)}), with bounds x {low:.2f} and x {high:.2f}: mtrain was "
            "not run on that GPU"
        )
        return 1.0, low, high, [remark]
    if not measured:
        factor, (low, high) = (peak_flops(source.device) or peak) / peak, UNKNOWN
        remark = (
            f"not calibrated on {gpu}: kernel times are those of {source.device}, scaled by peak "
            f"FLOP/s (x {factor:.2f}), with bounds x {low:.2f} and x {high:.2f}; run "
            "`mtrain profile kernels --out FILE` on that GPU and give --calibration FILE"
        )
        return factor, low, high, [remark]
    remark = f"kernel times are those of {source.device}, which computes as fast as {gpu}"
    return 1.0, 1.0, 1.0, [remark] if source.device != gpu else []


def _scaled(
    curve: Curve, factor: float, low: float, high: float, device: str | None, peak: float
) -> Curve:
    """Scale a curve's times and widen its bounds. device: the measured device, if another."""
    # The fixed time is mostly launch overhead: a slower GPU need not make it longer.
    fixed_bounds = min(1.0, factor) * curve.fixed_ms, max(1.0, factor) * curve.fixed_ms
    return replace(
        curve,
        fixed_bounds=None if factor == 1 else fixed_bounds,
        ms_per_tflop=curve.ms_per_tflop * factor,
        ms_per_column_tflop=curve.ms_per_column_tflop * factor,
        low=curve.low * low,
        high=curve.high * high,
        scaled=device,
        peak=peak,
    )


def _source(
    gpu: str, calibration: Calibration | None, kernel: str | None = None
) -> tuple[Calibration, bool]:
    """Return the calibration for a GPU and kernel (None: any), and whether it is of this model."""
    if calibration is not None and calibration.curves:
        known: tuple[Calibration, ...] = (calibration,)
    else:
        known = tuple(c for c in shipped() if kernel is None or c.times(kernel)) or shipped()
    same = [c for c in known if c.device == gpu] or [c for c in known if same_device(c.device, gpu)]
    if same:
        return same[0], True
    # Scale times that mtrain measured, if there are any.
    return min(known, key=lambda c: c.published), False


def _non_attention_of(gpu: str, calibration: Calibration | None) -> NonAttentionTimes | None:
    """Return a GPU's times except attention, the user's first; None if not measured."""
    for known in (*([calibration] if calibration is not None else []), *shipped()):
        if known.non_attention is not None and same_device(known.device, gpu):
            return known.non_attention
    return None


def describe_source(
    gpu: str, calibration: Calibration | None, kernel: str | None = None
) -> dict[str, Any]:
    """Describe the calibration in use, for a summary file."""
    source, measured = _source(gpu, calibration, kernel)
    # The user's file may hold other times of this GPU but no kernel times.
    own: tuple[str, ...] = ()
    if calibration is not None and calibration != source and same_device(calibration.device, gpu):
        own = calibration.files
    return {
        "device": source.device,
        "files": [*own, *source.files],
        "own": calibration is not None,
        "scaled": not measured,
    }


def _curve(source: Calibration, kernel: str, form: str, direction: str) -> tuple[Curve, str | None]:
    """Return the curve of a kernel and form, or another one and its kernel and form."""
    curve = source.find(kernel, form, direction)
    if curve is not None:
        return curve, None
    others = [(kernel, LISTS), (kernel, DENSE), (kernel, SPARSE)] if form != SPARSE else []
    others += [(c.kernel, form) for c in source.curves]
    others += [(c.kernel, c.form) for c in source.curves]
    for name, other in others:
        if (curve := source.find(name, other, direction)) is not None:
            return curve, f"{name} ({other})"
    raise ConfigError(f"the calibration of {source.device} holds no {direction} times")


def same_device(device: str, gpu: str) -> bool:
    """Return whether compute-bound kernels take equally long on both devices.

    Chip, form factor (SXM, NVL, PCIe) and peak FLOP/s must be the same; memory may differ.
    """
    device, gpu = (name.replace("A800", "A100") for name in (device, gpu))
    if device == gpu:
        return True
    chip, form = r"\b(?:GB|B|GH|H|A|L|RTX )\d{2,4}S?\b", r"\b(?:NVL|PCIE)"
    chips = [re.findall(chip, name)[:1] for name in (device, gpu)]
    forms = [re.findall(form, name.upper())[:1] for name in (device, gpu)]
    same = chips[0] == chips[1] != [] and forms[0] == forms[1]
    return same and peak_flops(device) == peak_flops(gpu)


@dataclass(frozen=True)
class CalibrationPoint:
    """One measured call. flop, column_flop: 1e12 FLOP without, and of, single columns."""

    flop: float
    column_flop: float
    ms: float


def fit_together(forms: Sequence[Sequence[CalibrationPoint]]) -> list[tuple[float, float, float]]:
    """Fit several forms of calls to one kernel: minimize the sum of squared relative errors.

    Return each form's fixed ms, and the ms per 1e12 FLOP without, and of, single columns; none is
    negative. All share the two rates, because the calls of one form may all have the same ratio of
    slashes to columns, or be small.
    """
    rows = [(number, point) for number, points in enumerate(forms) for point in points]
    table = np.zeros((len(rows), len(forms) + 2))
    for row, (number, point) in zip(table, rows, strict=True):
        row[[number, -2, -1]] = np.array([1.0, point.flop, point.column_flop]) / point.ms
    # Fewer than three points of a form cannot determine a fixed time.
    lengths = [*map(len, forms), 3, 3]
    used = [i for i, length in enumerate(lengths) if table[:, i].any() and length > 2]
    best, least = np.zeros(table.shape[1]), np.inf
    ones = np.ones(len(rows))
    for count in range(1, len(used) + 1):
        for chosen in itertools.combinations(used, count):
            solution = np.zeros(table.shape[1])
            solution[list(chosen)] = np.linalg.lstsq(table[:, chosen], ones, rcond=None)[0]
            error = float(((table @ solution - 1) ** 2).sum())
            if (solution >= 0).all() and error < least * (1 - 1e-9):
                best, least = solution, error
    return [(float(fixed), float(best[-2]), float(best[-1])) for fixed in best[:-2]]


def held_out_errors(forms: Sequence[Sequence[CalibrationPoint]]) -> list[float]:
    """Return the mean absolute relative leave-one-out error of each form."""
    means = []
    for number, points in enumerate(forms):
        errors = []
        for i, left_out in enumerate(points):
            others = [list(p) for p in forms]
            del others[number][i]
            fixed, rate, column_rate = fit_together(others)[number]
            ms = fixed + left_out.flop * rate + left_out.column_flop * column_rate
            errors.append(abs(ms / left_out.ms - 1))
        means.append(float(np.mean(errors)) if len(points) > 2 else float("nan"))
    return means
