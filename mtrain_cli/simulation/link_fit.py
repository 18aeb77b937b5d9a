"""What measured messages say of links: latency and bandwidth by a robust fit, with bounds that hold all that was measured, as a cluster.

The inverse of `simulation.costs`: a message takes ``latency + bytes / bandwidth``, a collective the same by what a rank has to receive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mtrain_cli.simulation.cluster import CUDA

INNER, OUTER = "inner", "outer"
# What is measured: a hop of a ring, alone; hops of all rings between nodes at once; two rings at once; collectives.
HOP, HOPS_AT_ONCE, TWO_HOPS = "hop", "hops at once", "two hops"
GATHER, SCATTER, ALL_TO_ALL = "all-gather", "reduce-scatter", "all-to-all"
ONE_BY_ONE = (HOP,)
COLLECTIVES = (GATHER, SCATTER)  # what the constants of collectives are fitted to
_ROUNDS = 50
_NEGLIGIBLE = 0.01  # relative residuals below this count alike: noise
_LARGE = 1 << 20  # bytes from which on bandwidth decides


@dataclass(frozen=True)
class LinkTime:
    """One operation at one size on one class of links. size: bytes that a rank sends, and receives. us: median over repeats of the slowest
    rank; low, high: 10th and 90th percentile. loaded_us: the same while computing, with slowdown, how many times as long the
    computation took; None where it was not measured. ranks: that took part in one operation.
    """

    link: str
    what: str
    size: int
    ranks: int
    us: float
    low: float
    high: float
    loaded_us: float | None = None
    slowdown: float | None = None

    @property
    def gbps(self) -> float:
        return self.size / self.us / 1e3


@dataclass(frozen=True)
class LinkFit:
    """``us = latency_us + size / bandwidth``. error, worst: mean and largest relative error of the points. latency, gbps: what the two may
    be, by everything that was measured: repeats, and messages during computation. Small messages bound the latency, large ones the
    bandwidth.
    """

    latency_us: float
    gbps: float
    error: float
    worst: float
    latency: tuple[float, float]
    bandwidth: tuple[float, float]
    points: int

    def us(self, size: float) -> float:
        return self.latency_us + size / (self.gbps * 1e3)


def fit_link(times: Sequence[LinkTime]) -> LinkFit:
    """Least absolute relative errors, by least squares that are weighted again and again; neither part is negative.

    Raises:
        ValueError: fewer than two sizes.
    """
    if len({t.size for t in times}) < 2:
        raise ValueError("A latency and a bandwidth need messages of at least two sizes.")
    us, size = np.array([t.us for t in times]), np.array([t.size for t in times], np.float64)
    table = np.stack([1 / us, size / us], 1)
    weights = np.ones(len(us))
    found = np.zeros(2)
    for _ in range(_ROUNDS):
        found = _not_negative(table, weights)
        weights = 1 / np.maximum(np.abs(table @ found - 1), _NEGLIGIBLE)
    latency, per_byte = (float(v) for v in found)
    moving = [per_byte * t.size for t in times]
    errors = np.abs((latency + np.array(moving)) / us - 1)
    large = [us >= min(latency, max(moving)) for us in moving]
    small = (
        [not one for one in large]
        if not all(large)
        else [t.size == min(u.size for u in times) for t in times]
    )
    samples = [
        (at, t)
        for at, entry in enumerate(times)
        for t in (entry.low, entry.high, entry.loaded_us)
        if t is not None
    ]
    latencies = [max(t - moving[at], 0.0) for at, t in samples if small[at]]
    rates = [
        1e-3 / per_byte * moving[at] / max(t - latency, 0.5 * moving[at])
        for at, t in samples
        if large[at]
    ]
    return LinkFit(
        latency_us=latency,
        gbps=1e-3 / per_byte,
        error=float(errors.mean()),
        worst=float(errors.max()),
        latency=(min(latency, *latencies), max(latency, *latencies)),
        bandwidth=(min(1e-3 / per_byte, *rates), max(1e-3 / per_byte, *rates)),
        points=len(times),
    )


def _not_negative(table: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """[2]: weighted least squares of table @ found = 1, latency and us of a byte. Without a latency where that would be negative; where
    large messages were not slower than small ones, the largest took its time for its bytes.
    """
    root = np.sqrt(weights)
    found = np.linalg.lstsq(table * root[:, None], root, rcond=None)[0]
    if found[0] < 0:
        only = table[:, 1]
        found = np.array([0.0, float((weights * only).sum() / (weights * only**2).sum())])
    if found[1] <= 0:
        found = np.array([0.0, float(1 / table[:, 1].max())])
    return found


@dataclass(frozen=True)
class MeasuredMachine:
    """What was measured beside links. gpu: the device's name; device: ``cuda`` or ``cpu``. peak_tflops, peak_source: dense; matmul_tflops:
    of a large product. copy_gbps, added_gbps: of a copy and of an addition, reads and writes together. launch_us: host time of one small
    operation, 10th, 50th and 90th percentile.
    """

    gpu: str
    peak_tflops: float
    peak_source: str
    matmul_tflops: float
    memory_gib: float
    copy_gbps: float
    added_gbps: float
    launch_us: tuple[float, float, float]
    device: str = CUDA


def fits(times: Sequence[LinkTime]) -> dict[str, dict[str, LinkFit]]:
    """By class and what was measured; and ``collectives`` of both that the constants are fitted to."""
    found: dict[str, dict[str, LinkFit]] = {}
    for link in dict.fromkeys(t.link for t in times):
        mine = [t for t in times if t.link == link]
        for what in dict.fromkeys(t.what for t in mine):
            found.setdefault(link, {})[what] = fit_link([t for t in mine if t.what == what])
        found[link]["collectives"] = fit_link([t for t in mine if t.what in COLLECTIVES])
    return found


def slowdowns(times: Sequence[LinkTime], link: str) -> tuple[float, float, float]:
    """Share of the computing power that messages take: smallest, median, largest over what was measured of one class."""
    shares = [
        min(max(1 - 1 / t.slowdown, 0.0), 0.95)
        for t in times
        if t.link == link and t.slowdown is not None and t.what == HOP and t.size >= _LARGE
    ] or [
        min(max(1 - 1 / t.slowdown, 0.0), 0.95)
        for t in times
        if t.link == link and t.slowdown is not None
    ]
    if not shares:
        return 0.0, 0.0, 0.0
    return float(min(shares)), float(np.median(shares)), float(max(shares))


def sharing(per_node: int, alone: LinkFit, at_once: LinkFit) -> tuple[int, float]:
    """How many GPUs stand behind one network card, of those that divide a node; and how many times as long all of them took at once."""
    slower = alone.gbps / at_once.gbps
    divisors = [n for n in range(1, per_node + 1) if per_node % n == 0]
    return min(divisors, key=lambda n: abs(np.log(slower / n))), float(slower)


def cluster_document(
    name: str,
    nodes: int,
    per_node: int,
    machine: MeasuredMachine,
    times: Sequence[LinkTime],
    *,
    measured_ranks: int,
    virtual: bool,
) -> dict[str, Any]:
    """A cluster file (`cluster.load_cluster`) of what was measured. nodes, per_node: of the cluster, which may have more GPUs than took
    part. virtual: nodes are parts of one host.
    """
    fitted = fits(times)
    classes = [link for link in (INNER, OUTER) if link in fitted]
    links = {link: _link(link, fitted[link], times, measured_ranks, virtual) for link in classes}
    if INNER not in links:  # one GPU a node
        links[INNER] = {**links[OUTER]}
        links[INNER].pop("shared_by", None)
    if OUTER in links and per_node > 1 and HOPS_AT_ONCE in fitted[OUTER]:
        count, slower = sharing(per_node, fitted[OUTER][HOP], fitted[OUTER][HOPS_AT_ONCE])
        links[OUTER]["shared_by"] = _constant(
            count,
            count,
            count,
            f"all rings between nodes at once took {slower:.2f}x as long as one",
        )
    elif OUTER in links:
        links[OUTER]["shared_by"] = {
            "value": 1,
            "source": "measured",
            "note": "one GPU a node took part",
        }
    low, likely, high = machine.launch_us
    copy, added = machine.copy_gbps, machine.added_gbps
    peak = _constant(
        machine.peak_tflops,
        machine.peak_tflops * 0.75,
        machine.peak_tflops,
        "largest matrix product",
    )
    return {
        "name": name,
        "nodes": nodes,
        "gpus_per_node": per_node,
        "gpu": {
            "name": machine.gpu,
            **({"device": machine.device} if machine.device != CUDA else {}),
            "peak_tflops": peak
            | {"source": machine.peak_source}
            | ({"note": "dense bf16"} if machine.peak_source != "measured" else {}),
            "gemm_tflops": _constant(
                machine.matmul_tflops,
                0.75 * machine.matmul_tflops,
                machine.matmul_tflops,
                "largest matrix product",
            ),
            "hbm_gib": _constant(
                machine.memory_gib,
                machine.memory_gib,
                machine.memory_gib,
                "what the device reports",
            ),
            "hbm_gbps": _constant(
                (copy * added) ** 0.5,
                min(copy, added),
                max(copy, added),
                f"copy {copy:.4g}, addition {added:.4g} GB/s",
            ),
            "launch_us": _constant(likely, low, high, "host time of one small operation"),
        },
        "links": {link: links[link] for link in (INNER, OUTER) if link in links},
    }


def _link(
    link: str, fitted: Mapping[str, LinkFit], times: Sequence[LinkTime], ranks: int, virtual: bool
) -> dict[str, Any]:
    hop, together, two = fitted[HOP], fitted["collectives"], fitted.get(TWO_HOPS)
    said = f"{ranks} ranks{', nodes are parts of one host' if virtual else ''}"
    of_hop = (
        f"ring of batch_isend_irecv, {said}; mean error of the fit {hop.error:.0%}, worst "
        f"{hop.worst:.0%}"
    )
    of_all = (
        f"all-gather and reduce-scatter, {said}; mean error of the fit {together.error:.0%}, worst "
        f"{together.worst:.0%}"
    )
    # What two messages at once reach together; never below one alone, which a noisy measurement may say.
    capacity = max(hop.gbps, 2 * two.gbps if two is not None else hop.gbps)
    taking_part = max(
        (t.ranks for t in times if t.link == link and t.what in COLLECTIVES), default=ranks
    )
    low, share, high = slowdowns(times, link)
    note = "slowdown of matrix products while hops of 1 MiB and more are under way"
    return {
        "latency_us": _latency(hop, of_hop),
        "bandwidth_gbps": _bandwidth(hop, hop.gbps, of_hop),
        "capacity_gbps": _bandwidth(
            hop, capacity, "two rings at once" if two is not None else of_hop
        ),
        "collective_latency_us": _latency(together, of_all),
        "collective_bandwidth_gbps": _bandwidth(together, together.gbps, of_all),
        "collective_ranks": _constant(
            taking_part, taking_part, taking_part, "ranks of each collective that was measured"
        ),
        "gpu_share": _constant(share, low, high, note),
    }


def _latency(fit: LinkFit, note: str) -> dict[str, Any]:
    return _constant(fit.latency_us, *fit.latency, note)


def _bandwidth(fit: LinkFit, gbps: float, note: str) -> dict[str, Any]:
    low, high = (bound * gbps / fit.gbps for bound in fit.bandwidth)
    return _constant(gbps, low, high, note)


def _constant(value: float, low: float, high: float, note: str) -> dict[str, Any]:
    low, high = min(low, value), max(high, value)
    return {
        "value": _short(value),
        "source": "measured",
        "note": note,
        "low": _short(low, -1),
        "high": _short(high, 1),
    }


def _short(value: float, towards: int = 0) -> float:
    """Four digits; bounds are never rounded inwards."""
    if not value:
        return 0.0
    digits = 3 - int(np.floor(np.log10(abs(value))))
    scaled = value * 10.0**digits
    rounded = {-1: np.floor(scaled + 1e-9), 0: np.rint(scaled), 1: np.ceil(scaled - 1e-9)}[towards]
    return float(rounded / 10.0**digits) if digits > 0 else float(rounded * 10.0**-digits)
