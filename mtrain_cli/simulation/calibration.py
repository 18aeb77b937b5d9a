"""How long attention kernels take, from times that were measured: a fixed time a call, and a rate for the work of block diagonals and for
that of single columns, forward and backward apart.

A kernel's efficiency grows with the work of a call, w / (w + w0): the fixed time is w0 at full speed. Errors are those of points that were
left out of the fit, one after the other.
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

# What a call is given: whole intervals, a list of blocks under plain masks, or the block diagonals and columns of an index, together or
# one of them alone.
DENSE, LISTS, SPARSE, DIAGONALS, ALONE_COLUMNS = "dense", "lists", "sparse", "diagonals", "columns"
# What else of a step is measured (`profiling.non_attention_benchmark`), beside the passes of a layer and INDEX: the loss, with the
# embedding.
LOSS = "loss"
NON_ATTENTION_FILE = "non_attention"
KINDS_OF_FILES = ("kernels", "worker_calls", NON_ATTENTION_FILE)
LOW, VALUE, HIGH = "low", "value", "high"
# A GPU of which nothing is known: another's share of the peak, and how far time may be off it.
UNKNOWN = (1 / 1.6, 2.0)
_LEAST_ERROR = 0.05  # one GPU to another of the same kind
_WAITS = 1.5  # so many times the share of large work, and it is the host that takes the time
_NEAR = 0.5  # beyond what was measured, as a share of it, bounds stay as they are


@dataclass(frozen=True)
class CalibrationPoint:
    """One measured call. flop: of block diagonals or of everything that is dense, and of single columns; 1e12."""

    flop: float
    of_columns: float
    ms: float


@dataclass(frozen=True)
class Curve:
    """Time of a call in ms: ``fixed_ms + tflop * ms_per_tflop + column_tflop * ms_per_column_tflop``.

    fixed_bounds: what fixed_ms may be, where it is not as certain as the rest.
    error: mean absolute error of points left out, a share. points: how many were measured. low, high: factors for bounds. scaled: the
    device that was measured, where this is for another one; stands_for: the kernel or form, where it was another one. skips: whether work
    is what an index leaves; otherwise it is all that the mask leaves.
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
        self, flop: np.ndarray, of_columns: np.ndarray | float = 0.0, bound: str = VALUE
    ) -> FloatArray:
        """flop: of calls, of everything but single columns. 0 where there is no work."""
        fixed = self.fixed_ms
        if self.fixed_bounds is not None and bound != VALUE:
            fixed = self.fixed_bounds[bound == HIGH]
        ms = (
            fixed
            + np.asarray(flop) * (self.ms_per_tflop / 1e12)
            + np.asarray(of_columns) * (self.ms_per_column_tflop / 1e12)
        )
        factor = {LOW: self.low, VALUE: 1.0, HIGH: self.high}[bound]
        return np.where(np.asarray(flop) + of_columns > 0, ms * 1e3 * factor, 0.0)

    def efficiency(self, flop: float, peak: float) -> float:
        """Share of the peak FLOP/s that a call of so much work reaches."""
        return flop / (float(self.us(np.array(flop))) / 1e6) / peak


def fit(points: Sequence[CalibrationPoint]) -> tuple[float, float, float]:
    """-> fixed ms, ms of 1e12 FLOP, and of 1e12 FLOP of columns: none negative, with the least sum of squared relative errors."""
    return fit_together([points])[0]


def fit_together(forms: Sequence[Sequence[CalibrationPoint]]) -> list[tuple[float, float, float]]:
    """`fit` of each form of calls to the same kernels: the time of a unit of work is theirs in common, the fixed time each form's own.

    Calls with diagonals and columns in about one proportion cannot tell what each of them takes, and small calls of one form alone do not
    tell what large ones take; together they do.
    """
    rows = [(of_form, p) for of_form, points in enumerate(forms) for p in points]
    table = np.zeros((len(rows), len(forms) + 2))
    for row, (of_form, p) in zip(table, rows, strict=True):
        row[[of_form, -2, -1]] = np.array([1.0, p.flop, p.of_columns]) / p.ms
    # One or two points say nothing of a fixed time.
    used = [
        i
        for i in range(table.shape[1])
        if table[:, i].any() and (i >= len(forms) or len(forms[i]) > 2)
    ]
    best, least = np.zeros(table.shape[1]), np.inf
    for number in range(1, len(used) + 1):
        for chosen in itertools.combinations(used, number):
            found = np.zeros(table.shape[1])
            found[list(chosen)] = np.linalg.lstsq(table[:, chosen], np.ones(len(rows)), rcond=None)[
                0
            ]
            error = float(((table @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = found, error
    return [(float(fixed), float(best[-2]), float(best[-1])) for fixed in best[:-2]]


def held_out_errors(forms: Sequence[Sequence[CalibrationPoint]]) -> list[float]:
    """Of each form the mean absolute error, a share, of every point as all others predict it."""
    means = []
    for of_form, points in enumerate(forms):
        errors = []
        for i, left_out in enumerate(points):
            others = [list(p) for p in forms]
            del others[of_form][i]
            fixed, rate, of_columns = fit_together(others)[of_form]
            errors.append(
                abs(
                    (fixed + left_out.flop * rate + left_out.of_columns * of_columns) / left_out.ms
                    - 1
                )
            )
        means.append(float(np.mean(errors)) if len(points) > 2 else float("nan"))
    return means


@dataclass(frozen=True)
class NonAttentionPoint:
    """One part of a step beside attention, as measured. size: tokens; of a layer, rows of a tile of its MLP. flop, moved: what is counted
    for it (`simulation.non_attention_cost`). heads: of queries.
    """

    part: str
    size: int
    us: float
    flop: float
    moved: float
    heads: int


@dataclass(frozen=True)
class NonAttentionTimes:
    """What a step computes beside attention, as it was measured on such a GPU. dtype: of its products."""

    points: tuple[NonAttentionPoint, ...]
    dtype: str = "bfloat16"

    @property
    def parts(self) -> set[str]:
        return {point.part for point in self.points}

    def share(
        self, part: str, expected: float, of: Callable[[NonAttentionPoint], float]
    ) -> tuple[float, bool]:
        """How many times as long as expected a part takes, in between by the logarithm of what is expected, and whether as much was
        measured. expected: us, of: the same of a point. Where the least that was measured waited for the host, less takes as long.
        """
        found: dict[float, list[float]] = {}
        for point in self.points:
            if point.part == part:
                found.setdefault(of(point), []).append(point.us / of(point))
        us = sorted(found)
        shares = [statistics.median(found[e]) for e in us]
        least, most = us[0], us[-1]
        share = float(np.interp(np.log(expected), np.log(us), shares))
        if expected < least and shares[0] > _WAITS * min(shares):
            share *= least / expected
        return share, least * (1 - _NEAR) <= expected <= most * (1 + _NEAR)

    def index(self, tokens: float, heads: int, each: float) -> float | None:
        """us of an estimate; None: not measured. each: us of a token beyond the most that were measured, since short ones are launches."""
        found: dict[int, list[float]] = {}
        for point in self.points:
            if point.part == INDEX:
                found.setdefault(point.size, []).append(point.us)
        if not found:
            return None
        sizes = sorted(found)
        us = [statistics.median(found[size]) for size in sizes]
        measured = next(point.heads for point in self.points if point.part == INDEX)
        # Every head reads the scores of all keys; launches are those of any number of heads.
        more = (float(np.interp(tokens, sizes, us)) - min(us)) * max(1.0, heads / measured)
        return min(us) + more + max(0.0, tokens - sizes[-1]) * each


@dataclass(frozen=True)
class Calibration:
    """The curves of one device. files: where they come from. non_attention: what else was measured."""

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
    """What files of ``mtrain profile kernels --out FILE`` and ``mtrain profile non-attention --out FILE`` hold; all of the same device.

    Raises:
        ConfigError: a file is missing, damaged or of something else.
    """
    points: dict[tuple[str, str, str], list[CalibrationPoint]] = {}
    non_attention: list[NonAttentionPoint] = []
    dtypes: list[str] = []
    hiding: set[str] = set()  # kernels that compute what an index leaves out
    devices = []
    for path in paths:
        document = _document(path)
        devices.append(str(document["device"]))
        if devices[0] != devices[-1]:
            raise ConfigError(
                f"--calibration {path}: is of {devices[-1]}, and the other file of {devices[0]}; "
                "give files of one GPU"
            )
        try:
            if document["kind"] == NON_ATTENTION_FILE:
                of_file = [_non_attention_point(time) for time in document["times"]]
                _check_non_attention(path, of_file, str(document["dtype"]), dtypes)
                non_attention += of_file
                continue
            for time in document["times"]:
                form = time.get("form") or (DENSE if time["case"]["density"] is None else SPARSE)
                pairs, of_columns = int(time["pairs"]), int(time.get("column_pairs") or 0)
                if not time.get("skips", True):
                    hiding.add(str(time["kernel"]))
                    if form in (SPARSE, DIAGONALS):
                        pairs, of_columns = int(time["mask_pairs"]), 0
                for direction in (FORWARD, BACKWARD):
                    flop = FLOP_PER_PAIR[direction] * int(time["case"]["head_dim"]) / 1e12
                    point = CalibrationPoint(
                        (pairs - of_columns) * flop,
                        of_columns * flop,
                        float(time[f"{direction}_ms"]),
                    )
                    if not all(map(is_number, (point.ms, point.flop, point.of_columns))) or not (
                        point.ms > 0 and point.flop + point.of_columns > 0
                    ):
                        raise ValueError("a time or a number of pairs is none")
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
    for (kernel, direction), forms in _same_kernels(points):
        measured = [points[kernel, form, direction] for form in forms]
        for form, of_form, found, error in zip(
            forms, measured, fit_together(measured), held_out_errors(measured), strict=True
        ):
            spread = max(_LEAST_ERROR, 2 * (error if np.isfinite(error) else 0.25))
            low, high, skips = 1 - min(spread, 0.9), 1 + spread, kernel not in hiding
            curves.append(
                Curve(kernel, form, direction, *found, error, len(of_form), low, high, skips=skips)
            )
    return Calibration(
        devices[0],
        tuple(curves),
        tuple(path.name for path in paths),
        NonAttentionTimes(tuple(non_attention), dtypes[0]) if non_attention else None,
    )


def own_calibration(files: str | None) -> Calibration | None:
    """files: as typed, ``FILE,...``; None: none were.

    Raises:
        ConfigError: as `load_calibration`.
    """
    if files is None:
        return None
    paths = [file.strip() for file in files.split(",")]
    if not all(paths):
        raise ConfigError(f"--calibration {files!r}: an item is empty; give FILE or FILE,FILE")
    return load_calibration(*map(Path, paths))


def _check_non_attention(
    path: Path, found: Sequence[NonAttentionPoint], dtype: str, dtypes: list[str]
) -> None:
    """dtypes: of the files before, to which this one's is added."""
    absent = [
        part for part in (FORWARD, BACKWARD, LOSS) if part not in {point.part for point in found}
    ]
    if absent:
        raise ConfigError(
            f"--calibration {path}: holds no times of {' and '.join(absent)}; it was ended too "
            "early: measure again"
        )
    dtypes.append(dtype)
    if dtype != dtypes[0]:
        raise ConfigError(
            f"--calibration {path}: is of {dtype}, and the other file of {dtypes[0]}; give files "
            "of one dtype"
        )


def _non_attention_point(time: dict[str, Any]) -> NonAttentionPoint:
    part = str(time["part"])
    if part not in (FORWARD, BACKWARD, LOSS, INDEX):
        raise ValueError(f"part={part}")
    size = int(time["rows"] if part in (FORWARD, BACKWARD) else time["tokens"])
    found = NonAttentionPoint(
        part,
        size,
        float(time["ms"]) * 1e3,
        float(time["flop"]),
        float(time["moved"]),
        int(time["heads"]),
    )
    if not all(map(is_number, (found.us, size, found.flop, found.moved, found.heads))):
        raise ValueError(f"{part}: a value is no number")
    if not (
        found.us > 0
        and size > 0
        and found.heads > 0
        and (part == INDEX or found.flop + found.moved > 0)
    ):
        raise ValueError(f"{part}: ms, tokens, rows, flop and moved must be above 0")
    return found


def _same_kernels(
    measured: Iterable[tuple[str, str, str]],
) -> list[tuple[tuple[str, str], list[str]]]:
    """-> (kernel, direction), and forms of calls that the same kernels serve: those under an index together, the others each by itself."""
    together: dict[tuple[str, str, str], list[str]] = {}
    for kernel, form, direction in measured:
        together.setdefault(
            (kernel, direction, SPARSE if form in (DIAGONALS, ALONE_COLUMNS) else form), []
        ).append(form)
    return [((kernel, direction), forms) for (kernel, direction, _), forms in together.items()]


def _document(path: Path) -> dict[str, Any]:
    try:
        document = read_json(path)
    except FileNotFoundError:
        raise ConfigError(
            f"--calibration {path}: there is no such file; `mtrain profile kernels --out FILE` "
            "writes one"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--calibration {path}: is no readable JSON ({reason(error)})") from error
    if (
        not isinstance(document, dict)
        or document.get("kind") not in KINDS_OF_FILES
        or not document.get("times")
        or "device" not in document
    ):
        raise ConfigError(
            f"--calibration {path}: holds no times; `mtrain profile kernels` and `profile "
            "non-attention` write such files with --out FILE"
        )
    return document


@lru_cache(maxsize=1)
def shipped() -> tuple[Calibration, ...]:
    """One for each device of which times ship."""
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
    """What the kernels of a cluster's GPU take, by direction: measured, or scaled from another GPU. whole: of calls with everything that
    was measured together. remarks: what a reader has to know. alone: of calls with block diagonals or single columns alone, by form and
    direction, where those were measured. non_attention: what a step computes beside attention, where that was measured on such a GPU.
    """

    whole: dict[str, Curve]
    remarks: tuple[str, ...]
    alone: dict[tuple[str, str], Curve] = field(default_factory=dict)
    non_attention: NonAttentionTimes | None = None

    @property
    def calibrated(self) -> bool:
        return all(curve.scaled is None for curve in self.whole.values())

    def part(self, direction: str, form: str) -> Curve:
        """Of calls with block diagonals or with single columns alone (`DIAGONALS`, `ALONE_COLUMNS`). Where these were not measured, the
        fixed time is known of both together: a half is given to each, and it may be none or all of it.
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
    """gpu: name of the cluster's GPU; peak: its FLOP/s. peaks: those of devices that were measured. calibration: the user's own."""
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
            f"kernel times are those of {source.device}: {gpu} computes as fast, and its memory "
            "may be of another speed"
        )

    def here(found: Curve, stands: str | None, low: float, high: float) -> Curve:
        return replace(
            found,
            # Launches and the like: a slower GPU does not make them longer.
            fixed_bounds=None
            if factor == 1
            else (min(1.0, factor) * found.fixed_ms, max(1.0, factor) * found.fixed_ms),
            ms_per_tflop=found.ms_per_tflop * factor,
            ms_per_column_tflop=found.ms_per_column_tflop * factor,
            low=found.low * low,
            high=found.high * high,
            scaled=None if measured else source.device,
            stands_for=stands,
        )

    curves, alone = {}, {}
    for direction in (FORWARD, BACKWARD):
        for part in (DIAGONALS, ALONE_COLUMNS):
            exactly = source.find(kernel, part, direction)
            if exactly is not None:
                alone[part, direction] = here(exactly, None, low, high)
        found, stands = _curve(source, kernel, form, direction)
        if stands is not None:
            low, high = min(low, UNKNOWN[0]), max(high, UNKNOWN[1])
            said = (
                f"{kernel} was not measured on {form} calls: {stands} stands for it, within x "
                f"{low:.2f} and x {high:.2f}"
            )
            remarks += [said] if said not in remarks else []
        curves[direction] = here(found, stands, low, high)
    non_attention = _non_attention_of(gpu, calibration)
    if (
        calibration is not None
        and calibration.non_attention is not None
        and non_attention is not calibration.non_attention
    ):
        remarks.append(
            f"the rest of a step was measured on {calibration.device}, which says nothing of "
            f"{gpu}: those times are not used"
        )
    return KernelCurves(curves, tuple(remarks), alone, non_attention)


def _source(gpu: str, calibration: Calibration | None) -> tuple[Calibration, bool]:
    """-> the calibration that a GPU's kernels are priced by, and whether it is of that GPU."""
    known = (calibration,) if calibration is not None and calibration.curves else shipped()
    measured = next((c for c in known if c.device == gpu), None) or next(
        (c for c in known if same_device(c.device, gpu)), None
    )
    return measured or known[0], measured is not None


def _non_attention_of(gpu: str, calibration: Calibration | None) -> NonAttentionTimes | None:
    """What was measured of the rest of a step: the user's own, else what ships, of such a GPU."""
    known = [*([calibration] if calibration is not None else []), *shipped()]
    return next(
        (
            c.non_attention
            for c in known
            if c.non_attention is not None and same_device(c.device, gpu)
        ),
        None,
    )


def used(gpu: str, calibration: Calibration | None) -> dict[str, Any]:
    """What files say of it. calibration: the user's own. scaled: its times are those of another device."""
    source, measured = _source(gpu, calibration)
    # Of the rest of a step alone, and of such a GPU.
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
    """-> a curve, and what it stands in for: None where exactly that was measured."""
    found = source.find(kernel, form, direction)
    if found is not None:
        return found, None
    others = [(kernel, LISTS), (kernel, DENSE), (kernel, SPARSE)] if form != SPARSE else []
    others += [(c.kernel, form) for c in source.curves] + [
        (c.kernel, c.form) for c in source.curves
    ]
    for name, other in others:
        if (found := source.find(name, other, direction)) is not None:
            return found, f"{name} ({other})"
    raise ConfigError(f"the calibration of {source.device} holds no {direction} times")


def same_device(device: str, gpu: str) -> bool:
    """Whether kernels that compute take as long on both: the same chip (H200, A100 and so on) in the same form (SXM, NVL, PCIe) with the
    same peak. They may have other memory (A100 of 40 and 80 GB).
    """
    if device == gpu:
        return True
    chips = [re.search(r"\b(?:GB|B|GH|H|A|L|RTX )\d{2,4}S?\b", name) for name in (device, gpu)]
    forms = [re.search(r"\b(?:NVL|PCIE)", name.upper()) for name in (device, gpu)]
    same = _text(chips[0]) == _text(chips[1]) is not None and _text(forms[0]) == _text(forms[1])
    return same and peak_flops(device) == peak_flops(gpu)


def _text(found: re.Match[str] | None) -> str | None:
    return None if found is None else found[0]
