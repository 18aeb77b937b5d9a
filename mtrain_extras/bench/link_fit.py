"""Fit latency and bandwidth of links to measured messages, and describe the measured cluster.

As in `simulation.costs`, a message takes ``latency + bytes / bandwidth``; for a collective, the
bytes that one rank receives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mtrain_cli.config.cluster import CUDA

INNER, OUTER = "inner", "outer"
# Measured operations: a hop of one ring, of all rings between nodes at once, and of two rings at
# once; collectives.
HOP, HOPS_AT_ONCE, TWO_HOPS = "hop", "hops at once", "two hops"
GATHER, SCATTER, ALL_TO_ALL = "all-gather", "reduce-scatter", "all-to-all"
COLLECTIVES = (GATHER, SCATTER)  # the constants of all collectives are fitted to these two
_ROUNDS = 50
_NEGLIGIBLE = 0.01  # relative residuals below this are noise and get the same weight
_LARGE = 1 << 20  # bytes from which on bandwidth dominates a message's time


@dataclass(frozen=True)
class LinkTime:
    """The measured time of one operation at one size on one class of links, in microseconds.

    link: `INNER` or `OUTER`.
    size: number of bytes that each rank sends and receives.
    us: of the slowest rank, median over repeats; low, high: the 10th and the 90th percentile.
    loaded_us, slowdown: median while a matrix product runs, and how much longer that takes; None if
        not measured.
    """

    derived: ClassVar = ("gbps",)
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
    """The constants of ``us = latency_us + size / bandwidth``, fitted to measurements.

    error, worst: mean and largest relative error of the fit.
    latency, bandwidth: (low, high) bounds in microseconds and GB/s. Small messages bound the
        latency, large ones the bandwidth.
    """

    latency_us: float
    gbps: float
    error: float
    worst: float
    latency: tuple[float, float]
    bandwidth: tuple[float, float]
    points: int


def fit_link(times: Sequence[LinkTime]) -> LinkFit:
    """Fit latency and bandwidth, neither negative, to minimize absolute relative errors.

    Raises:
        ValueError: fewer than two sizes.
    """
    if len({t.size for t in times}) < 2:
        raise ValueError("A latency and a bandwidth need messages of at least two sizes.")
    us, size = np.array([t.us for t in times]), np.array([t.size for t in times], np.float64)
    table = np.stack([1 / us, size / us], 1)
    weights = np.ones(len(us))
    constants = np.zeros(2)
    for _ in range(_ROUNDS):
        constants = _fit_not_negative(table, weights)
        weights = 1 / np.maximum(np.abs(table @ constants - 1), _NEGLIGIBLE)
    latency, per_byte = (float(v) for v in constants)
    moving = [per_byte * t.size for t in times]
    errors = np.abs((latency + np.array(moving)) / us - 1)
    large = [us >= min(latency, max(moving)) for us in moving]
    least = min(t.size for t in times)
    small = [t.size == least for t in times] if all(large) else [not one for one in large]
    rate = 1e-3 / per_byte
    latencies, rates = [latency], [rate]
    for at, entry in enumerate(times):
        for t in (entry.low, entry.high, entry.loaded_us):
            if t is not None and small[at]:
                latencies.append(max(t - moving[at], 0.0))
            if t is not None and large[at]:
                rates.append(rate * moving[at] / max(t - latency, 0.5 * moving[at]))
    return LinkFit(
        latency_us=latency,
        gbps=rate,
        error=float(errors.mean()),
        worst=float(errors.max()),
        latency=(min(latencies), max(latencies)),
        bandwidth=(min(rates), max(rates)),
        points=len(times),
    )


def _fit_not_negative(table: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Solve table @ [latency, microseconds per byte] = 1 by weighted least squares.

    If large messages are not slower, bandwidth alone gives the time of the largest message.
    """
    root = np.sqrt(weights)
    constants = np.linalg.lstsq(table * root[:, None], root, rcond=None)[0]
    if constants[0] < 0:
        only = table[:, 1]
        constants = np.array([0.0, float((weights * only).sum() / (weights * only**2).sum())])
    if constants[1] <= 0:
        constants = np.array([0.0, float(1 / table[:, 1].max())])
    return constants


@dataclass(frozen=True)
class MeasuredMachine:
    """The measured properties of a machine, except its links.

    peak_tflops, matmul_tflops: dense peak and rate of a large matrix product, in 1e12 FLOP/s.
    copy_gbps, added_gbps: of a copy and of an addition, reads plus writes, in GB/s.
    launch_us: host's microseconds for a small operation: 10th, 50th and 90th percentile.
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


def fit_links(times: Sequence[LinkTime]) -> dict[str, dict[str, LinkFit]]:
    """Fit each operation of each link class, and `COLLECTIVES` together as ``collectives``."""
    by_link: dict[str, dict[str, LinkFit]] = {}
    for link in dict.fromkeys(t.link for t in times):
        link_times = [t for t in times if t.link == link]
        for what in dict.fromkeys(t.what for t in link_times):
            by_link.setdefault(link, {})[what] = fit_link([t for t in link_times if t.what == what])
        if collectives := [t for t in link_times if t.what in COLLECTIVES]:
            by_link[link]["collectives"] = fit_link(collectives)
    return by_link


def slowdowns(times: Sequence[LinkTime], link: str) -> tuple[float, float, float]:
    """Return the lowest, median and highest share of computing power lost to messages."""
    known = [(t, t.slowdown) for t in times if t.link == link and t.slowdown is not None]
    large = [(t, slowdown) for t, slowdown in known if t.what == HOP and t.size >= _LARGE]
    shares = [min(max(1 - 1 / slowdown, 0.0), 0.95) for _, slowdown in large or known]
    if not shares:
        return 0.0, 0.0, 0.0
    return float(min(shares)), float(np.median(shares)), float(max(shares))


def gpus_per_card(per_node: int, alone: LinkFit, at_once: LinkFit) -> tuple[int, float]:
    """Return how many GPUs share a network card, and how much slower all rings are than one.

    alone, at_once: fits of hops while one ring runs, and all rings.
    """
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
    """Make a cluster file (`cluster.load_cluster`) from measurements.

    Args:
        nodes, per_node: size of the cluster. It may have more GPUs than were measured.
        measured_ranks: number of ranks that took part in the measurement.
        virtual: whether all nodes of the measurement were parts of the same host.
    """
    fitted = fit_links(times)
    classes, count = [link for link in (INNER, OUTER) if link in fitted], 1
    if OUTER in fitted and per_node > 1 and HOPS_AT_ONCE in fitted[OUTER]:
        count, slower = gpus_per_card(per_node, fitted[OUTER][HOP], fitted[OUTER][HOPS_AT_ONCE])
    gloo = machine.device != CUDA
    links = {
        link: _link(link, fitted[link], times, measured_ranks, virtual, at_once, gloo)
        for link, at_once in zip(classes, (1, count)[-len(classes) :], strict=True)
    }
    if INNER not in links:  # one GPU per node
        links[INNER] = {**links[OUTER]}
        links[INNER].pop("shared_by", None)
    if OUTER in links and per_node > 1 and HOPS_AT_ONCE in fitted[OUTER]:
        note = f"all rings between nodes at once took {slower:.2f}x as long as one"
        links[OUTER]["shared_by"] = _exactly(count, note)
    elif OUTER in links:
        links[OUTER]["shared_by"] = _exactly(1, "only one GPU per node took part")
    low, likely, high = machine.launch_us
    copy, added = machine.copy_gbps, machine.added_gbps
    bandwidths = f"copy {copy:.4g}, addition {added:.4g} GB/s"
    rate, note = machine.matmul_tflops, "largest matrix product"
    peak = _constant(machine.peak_tflops, 0.75 * machine.peak_tflops, machine.peak_tflops, note)
    if machine.peak_source != "measured":
        peak |= {"source": machine.peak_source, "note": "dense bf16"}
    return {
        "name": name,
        "nodes": nodes,
        "gpus_per_node": per_node,
        "gpu": {
            "name": machine.gpu,
            **({"device": machine.device} if machine.device != CUDA else {}),
            "peak_tflops": peak,
            "gemm_tflops": _constant(rate, 0.75 * rate, rate, note),
            "hbm_gib": _exactly(machine.memory_gib, "what the device reports"),
            "hbm_gbps": _constant(
                (copy * added) ** 0.5, min(copy, added), max(copy, added), bandwidths
            ),
            "launch_us": _constant(likely, low, high, "host time of one small operation"),
        },
        "links": {link: links[link] for link in (INNER, OUTER) if link in links},
    }


def _link(
    link: str,
    fitted: Mapping[str, LinkFit],
    times: Sequence[LinkTime],
    ranks: int,
    virtual: bool,
    at_once: int,
    gloo: bool,
) -> dict[str, Any]:
    """Describe a link. at_once: number of measured collectives that shared its network card."""
    hop, two = fitted[HOP], fitted.get(TWO_HOPS)
    collectives = fitted[GATHER if gloo else "collectives"]
    ranks_text = f"{ranks} ranks{', nodes are parts of one host' if virtual else ''}"

    def note(how: str, fit: LinkFit) -> str:
        error = f"mean error of the fit {fit.error:.0%}, worst {fit.worst:.0%}"
        return f"{how}, {ranks_text}; {error}"

    hop_note = note("ring of batch_isend_irecv", hop)
    collective_note = note("all-gather" + " and reduce-scatter" * (not gloo), collectives)
    factors = {"reduce_factor": SCATTER, "all_to_all_factor": ALL_TO_ALL}
    more = {
        key: _exactly(
            collectives.gbps / fitted[what].gbps, note(f"all-gather / {what}", fitted[what])
        )
        for key, what in factors.items()
        if gloo and what in fitted
    }
    # Total bandwidth of two concurrent messages, but at least that of one message: noise may make
    # the total smaller.
    capacity = max(hop.gbps, 2 * two.gbps if two is not None else hop.gbps)
    took_part = [t.ranks for t in times if t.link == link and t.what in COLLECTIVES]
    share_note = "slowdown of matrix products while hops of 1 MiB and more are under way"
    low, share, high = slowdowns(times, link)
    return {
        "latency_us": _latency(hop, hop_note),
        "bandwidth_gbps": _bandwidth(hop, hop.gbps, hop_note),
        "capacity_gbps": _bandwidth(hop, capacity, "two rings at once" if two else hop_note),
        "collective_latency_us": _latency(collectives, collective_note),
        "collective_bandwidth_gbps": _bandwidth(
            collectives, at_once * collectives.gbps, collective_note
        ),
        "collective_ranks": _exactly(
            max(took_part, default=ranks), "ranks of each collective that was measured"
        ),
        "gpu_share": _constant(share, low, high, share_note),
        **more,
    }


def _latency(fit: LinkFit, note: str) -> dict[str, Any]:
    return _constant(fit.latency_us, *fit.latency, note)


def _bandwidth(fit: LinkFit, gbps: float, note: str) -> dict[str, Any]:
    low, high = (bound * gbps / fit.gbps for bound in fit.bandwidth)
    return _constant(gbps, low, high, note)


def _exactly(value: float, note: str) -> dict[str, Any]:
    return _constant(value, value, value, note)


def _constant(value: float, low: float, high: float, note: str) -> dict[str, Any]:
    low, high = min(low, value), max(high, value)
    return {
        "value": _round_digits(value),
        "source": "measured",
        "note": note,
        "low": _round_digits(low, -1),
        "high": _round_digits(high, 1),
    }


def _round_digits(value: float, towards: int = 0) -> float:
    """Round to four digits. towards: -1 rounds a low bound down, 1 a high bound up."""
    if not value:
        return 0.0
    digits = 3 - int(np.floor(np.log10(abs(value))))
    scaled = value * 10.0**digits
    rounded = {-1: np.floor(scaled + 1e-9), 0: np.rint(scaled), 1: np.ceil(scaled - 1e-9)}[towards]
    return float(rounded / 10.0**digits) if digits > 0 else float(rounded * 10.0**-digits)
