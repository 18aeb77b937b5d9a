"""Describe clusters: the number of GPUs, their speed and their links.

Every constant states its source. The presets in ``conf/cluster/*.yaml`` ship with mtrain. Users can
also give the path of a YAML file with the same keys.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtrain_cli import resource_dir
from mtrain_cli.config.documents import is_number, read_yaml, reason
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.sizes import divisors
from mtrain_cli.config.suggest import did_you_mean, no_such

FOLDER = "cluster"  # under conf/
CUDA, CPU = "cuda", "cpu"
# If a file gives no range for a constant, its range is the value times these factors. Programs
# reach only a part of the rates in datasheets and papers.
_SPREAD = {
    "measured": (0.9, 1.1),
    "datasheet": (0.6, 1.0),
    "paper": (0.6, 1.0),
    "guess": (0.5, 2.0),
}
SOURCES = tuple(_SPREAD)


@dataclass(frozen=True)
class Constant:
    """A number with its range, ``low`` to ``high``.

    source: one of `SOURCES`.
    note: text for users that says how the number was found.
    """

    value: float
    source: str
    note: str
    low: float
    high: float

    @staticmethod
    def of(
        value: float,
        source: str,
        note: str = "",
        low: float | None = None,
        high: float | None = None,
    ) -> Constant:
        low = value * _SPREAD[source][0] if low is None else low
        high = value * _SPREAD[source][1] if high is None else high
        return Constant(value, source, note, low, high)

    def scaled(self, by: float) -> Constant:
        return replace(self, value=self.value * by, low=self.low * by, high=self.high * by)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU, or a CPU whose processes are the workers.

    name: name of the GPU, as CUDA reports it, or of the CPU.
    device: ``cuda`` or ``cpu``.
    peak_tflops, gemm_tflops: dense bf16 peak, and rate of large matrix products, in 1e12 FLOP/s.
    hbm_gbps: device memory bandwidth of a copy, reads plus writes, in GB/s.
    launch_us: host time to launch one kernel, in microseconds.
    step_ms: time of an optimizer step that is neither computation nor communication, such as
        loading the batch and host syncs, in milliseconds.
    host_gib: host memory per GPU.
    host_link_gbps: bandwidth between one GPU and the host, in one direction, while all GPUs copy.
    host_memory_gbps: host memory bandwidth of one GPU's optimizer while those of all GPUs run.
    """

    name: str
    peak_tflops: Constant
    gemm_tflops: Constant
    hbm_gib: Constant
    hbm_gbps: Constant
    launch_us: Constant
    step_ms: Constant
    host_gib: Constant
    host_link_gbps: Constant
    host_memory_gbps: Constant
    device: str = CUDA

    @property
    def is_cpu(self) -> bool:
        """Whether workers are processes on a CPU."""
        return self.device == CPU

    @property
    def capability(self) -> tuple[int, int]:
        """CUDA compute capability (major, minor). An unknown GPU counts as an Ampere GPU."""
        if re.search(r"\b(GB|B)[23]00\b", self.name):
            return (10, 0)
        return (9, 0) if re.search(r"\bG?H(20|100|200|800)\b", self.name) else (8, 0)


@dataclass(frozen=True, kw_only=True)
class Link:
    """Links between the GPUs of a node (inner) or of different nodes (outer), GB/s one way.

    latency_us, bandwidth_gbps: of one message between two GPUs on an idle link.
    capacity_gbps: total bandwidth of all messages that a GPU receives at once.
    collective_latency_us: latency of a collective over ``collective_ranks`` ranks.
    collective_bandwidth_gbps: bandwidth of each link during a collective.
    shared_by: number of GPUs that share one network card and its capacity; 1 for inner links.
    gpu_share: share of a GPU's computing power, 0 to 1, that is lost while a message is in flight.
    reduce_factor: time of a reduce-scatter / that of an all-gather; None for 1. With gloo it is 2,
        because gloo sums everything before it keeps a part.
    all_to_all_factor: time of an all-to-all's bytes / that of an all-gather's; None for 1.
    """

    latency_us: Constant
    bandwidth_gbps: Constant
    capacity_gbps: Constant
    collective_latency_us: Constant
    collective_bandwidth_gbps: Constant
    collective_ranks: Constant
    shared_by: Constant
    gpu_share: Constant
    reduce_factor: Constant | None = None
    all_to_all_factor: Constant | None = None


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes of equal GPUs, and their links inside and between nodes; one node has none of these."""

    name: str
    nodes: int
    gpus_per_node: int
    gpu: Gpu
    inner: Link
    outer: Link | None = None

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def link(self, *, outer: bool) -> Link:
        if not outer:
            return self.inner
        assert self.outer is not None, "one node has no links to others"
        return self.outer

    def constants(self) -> dict[str, Constant]:
        """Return all constants by name, such as ``links.inner.latency_us``."""
        parts = {"gpu": self.gpu, "links.inner": self.inner, "links.outer": self.outer}
        return {
            f"{prefix}.{name}": value
            for prefix, part in parts.items()
            if part is not None
            for name, value in vars(part).items()
            if isinstance(value, Constant)
        }


def uneven_nodes(cluster: Cluster, workers: int) -> str | None:
    """Return an error if the workers need several nodes but leave one partly empty; else None."""
    per_node = cluster.gpus_per_node
    if workers <= per_node or workers % per_node == 0:
        return None
    allowed = f"allowed: 1 to {per_node}, or a multiple of {per_node}"
    return f"{cluster.name} has nodes of {per_node} GPUs, all of which a run must use; {allowed}"


def shipped() -> dict[str, Path]:
    """Return the file of each preset, by name."""
    return {file.stem: file for file in sorted((resource_dir("conf") / FOLDER).glob("*.yaml"))}


def file_of(name: str) -> Path:
    """Return the file of a cluster. name: name of a preset, or path of a YAML file.

    Raises:
        ValueError: there is no such cluster. The message continues the text ``key=value: ``.
    """
    presets = shipped()
    path = presets.get(name, Path(name).expanduser())
    if os.path.isfile(path):  # unlike Path.is_file, also False for a name that is too long
        return path
    if path.suffix in (".yaml", ".yml") or "/" in name:
        raise ValueError("no such file")
    raise ValueError(no_such("cluster", name, presets, "the path of a YAML file"))


def load_cluster(
    name: str, typed: str = "", *, nodes: int | None = None, typed_nodes: str = ""
) -> Cluster:
    """Load a cluster.

    name: name of a preset, or path of a YAML file.
    nodes: number of nodes; None for the number in the file.
    typed, typed_nodes: how the user gave ``name`` and ``nodes``, for messages; "" for
        ``--cluster NAME`` and ``--nodes N``.

    Raises:
        ConfigError: there is no such cluster, or the file is wrong.
    """
    try:
        path = file_of(name)
    except ValueError as error:
        raise ConfigError(f"{typed or f'--cluster {name}'}: {error}") from None
    content = _content(path)
    if nodes is not None and nodes > 1 and name in shipped() and "outer" not in content["links"]:
        allowed = "allowed: 1, or a cluster with links.outer, such as h100_4x8"
        typed_nodes = typed_nodes or f"--nodes {nodes}"
        raise ConfigError(f"{typed_nodes}: {name} does not describe links between nodes; {allowed}")
    try:
        given = content if nodes is None else {**content, "nodes": nodes}
        return _read({"name": path.stem, **given})
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


@functools.lru_cache(maxsize=4)  # a search prices thousands of settings on the same cluster
def cluster_of(name: str) -> Cluster | None:
    """Return the cluster that ``topology.cluster`` names; None for auto."""
    return None if name == "auto" else load_cluster(name, f"topology.cluster={name}")


def _content(path: Path) -> dict[str, Any]:
    try:
        content = read_yaml(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as YAML ({reason(error)})") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: not a cluster file; expected keys such as nodes, gpus_per_node, gpu and links"
        )
    return content


_Check = tuple[str, Callable[[float], bool]]
# Largest allowed constant, whatever its unit. Sums over a real cluster are 1,000 times smaller.
_MOST = 1e12
_MOST_NODES = 2**14  # limit on nodes and on GPUs per node; topology.workers has the same limit
_ABOVE: _Check = (f"a number above 0 and at most {_MOST:g}", lambda v: 0 < v <= _MOST)
_AT_LEAST: _Check = (f"a number of at least 0 and at most {_MOST:g}", lambda v: 0 <= v <= _MOST)
_COUNT: _Check = (
    f"a whole number of at least 1 and at most {_MOST_NODES:,}",
    lambda v: 1 <= v <= _MOST_NODES and v == int(v),
)
_SHARE: _Check = ("a share, at least 0 and below 1", lambda v: 0 <= v < 1)
_GPU_CHECKS = {
    **dict.fromkeys(("peak_tflops", "gemm_tflops", "hbm_gib", "hbm_gbps"), _ABOVE),
    **dict.fromkeys(("launch_us", "step_ms"), _AT_LEAST),
    **dict.fromkeys(("host_gib", "host_link_gbps", "host_memory_gbps"), _ABOVE),
}
_FACTORS = "reduce_factor", "all_to_all_factor"
_LINK_CHECKS = {
    **dict.fromkeys(("latency_us", "collective_latency_us"), _AT_LEAST),
    **dict.fromkeys(("bandwidth_gbps", "capacity_gbps", "collective_bandwidth_gbps"), _ABOVE),
    **dict.fromkeys(_FACTORS, _ABOVE),
    **dict.fromkeys(("collective_ranks", "shared_by"), _COUNT),
    "gpu_share": _SHARE,
}


def _guess(value: float, note: str, low: float | None = None, high: float | None = None) -> dict:
    return {"value": value, "source": "guess", "note": note, "low": low, "high": high}


# If a file omits the constant on the left, it takes the value of the constant on the right.
_DEFAULTS = {
    "capacity_gbps": "bandwidth_gbps",
    "collective_latency_us": "latency_us",
    "collective_bandwidth_gbps": "capacity_gbps",
}
# If a file omits gemm_tflops, these shares of the peak replace it: low, expected, high. An H200
# reaches 0.77; other GPUs reach 0.5 to nearly 1.
_GEMM_SHARES = 0.5, 0.77, 0.95
_GPU_DEFAULTS = {
    "step_ms": _guess(10, "data loading and host syncs of a step, not measured", 0, 60),
    "host_gib": _guess(128, "hosts with eight GPUs have 1 to 2 TiB", 64, 256),
    "host_link_gbps": _guess(
        50, "copies from pinned memory over PCIe 5.0 x16 (64 GB/s by datasheet)", 20, 60
    ),
    "host_memory_gbps": _guess(
        19, "AdamW on two CPU sockets reached 150 GB/s for eight GPUs together", 8, 60
    ),
}
_RANKS = _guess(8, "assumed number of ranks to which the collective latency applies")
_OWN_LINKS = {
    "value": 1,
    "source": "datasheet",
    "note": "every GPU has its own links inside a node",
}
# The keys that each section must have.
_NEEDED_OF_LINK = ("latency_us", "bandwidth_gbps", "gpu_share")
_NEEDED = {
    "gpu": ("name", "peak_tflops", "hbm_gib", "hbm_gbps", "launch_us"),
    "links": ("inner", "outer for several nodes"),
    "inner": _NEEDED_OF_LINK,
    "outer": (*_NEEDED_OF_LINK, "shared_by"),
}
_NAME_OF_CPU = re.compile(r"\b(CPU|EPYC|Xeon|Ryzen|Neoverse|Graviton)\b", re.IGNORECASE)
_KEYS = ("name", "nodes", "gpus_per_node", "gpu", "links")
_PARTS = ("value", "source", "note", "low", "high")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST_NODES


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _read(content: Mapping[str, Any]) -> Cluster:
    """Read a cluster. ValueError: a key is wrong or missing."""
    _require_known(content, _KEYS, "")
    name = _get(content, "name", "a name", _is_name)
    count = _get(content, "nodes", _COUNT[0], _is_count)
    per_node = _get(content, "gpus_per_node", _COUNT[0], _is_count)
    section = _section(content, "gpu")
    gpu_name = _get(section, "name", "a name", _is_name, "gpu.")
    device = str(section.get("device", CPU if _NAME_OF_CPU.search(gpu_name) else CUDA))
    if device not in (CUDA, CPU):
        raise ValueError(f"gpu.device={device}: allowed: {CUDA}, {CPU}")
    gpu = _constants(_with_defaults(section), _GPU_CHECKS, "gpu.", ("name", "device"))
    gemm, peak = gpu["gemm_tflops"], gpu["peak_tflops"].high
    gpu["gemm_tflops"] = replace(gemm, high=min(gemm.high, max(gemm.value, peak)))
    links = _section(content, "links")
    _require_known(links, ("inner", "outer"), "links.")
    inner, outer = _link(links, "inner"), None
    if count > 1 or links.get("outer") is not None:
        outer = _link(links, "outer")
        if per_node % (shared := int(outer.shared_by.value)):
            why = f"does not divide gpus_per_node={per_node}; allowed: {divisors(per_node)}"
            raise ValueError(f"links.outer.shared_by={shared}: {why}")
    return Cluster(
        name=name,
        nodes=count,
        gpus_per_node=per_node,
        gpu=Gpu(name=gpu_name, device=device, **gpu),
        inner=inner,
        outer=outer,
    )


def _link(links: Mapping[str, Any], name: str) -> Link:
    section = _section(links, name, "links.")
    given = {key: value for key, value in section.items() if value is not None}
    left_out = [key for key in (*_DEFAULTS, *_FACTORS) if key not in given]
    given.setdefault("collective_ranks", _RANKS)
    if name == "inner":
        given.setdefault("shared_by", _OWN_LINKS)
    checks = {key: check for key, check in _LINK_CHECKS.items() if key not in left_out}
    constants = _constants(given, checks, f"links.{name}.", tuple(left_out))
    for key, other in _DEFAULTS.items():  # a default's own default comes first
        if key in left_out:
            constants[key] = constants[other]
    return Link(**constants)


def _constants(
    section: Mapping[str, Any], checks: Mapping[str, _Check], prefix: str, more: tuple[str, ...]
) -> dict[str, Constant]:
    _require_known(section, (*checks, *more), prefix)
    for key, check in checks.items():
        if section.get(key) is None and key != "gemm_tflops":  # derived from the peak
            form = f"{check[0]} as {_form(None)}"
            raise ValueError(f"{prefix}{key}: is missing; expected {form}")
    given = [key for key in checks if section.get(key) is not None]
    return {key: _constant(section[key], checks[key], f"{prefix}{key}") for key in given}


def _constant(content: Any, check: _Check, key: str) -> Constant:
    expected, allows = check
    if not isinstance(content, Mapping):
        form = f"{expected} with its source, as {_form(content)}"
        raise ValueError(f"{key}={content}: expected {form}")
    _require_known(content, _PARTS, f"{key}.")

    def fits(raw: Any) -> bool:
        return math.isfinite(value := _as_number(raw)) and allows(value)

    values = {
        name: _as_number(_get(content, name, expected, fits, f"{key}."))
        for name in ("value", "low", "high")
        if name == "value" or content.get(name) is not None
    }
    allowed = f"one of {', '.join(SOURCES)}"
    source = _get(content, "source", allowed, lambda name: name in SOURCES, f"{key}.")
    value = values["value"]
    if check is _COUNT:
        values = {"low": value, "high": value, **values}
    constant = Constant.of(source=source, note=str(content.get("note") or ""), **values)
    if not constant.low <= value <= constant.high:
        raise ValueError(
            f"{key}: value={value:g} must lie between low={constant.low:g} and "
            f"high={constant.high:g}"
        )
    return constant


def _section(content: Mapping[str, Any], key: str, prefix: str = "") -> Mapping[str, Any]:
    expected = f"a section with {', '.join(_NEEDED[key])}"
    section: Mapping[str, Any] = _get(
        content, key, expected, lambda raw: isinstance(raw, Mapping), prefix
    )
    return section


def _get(
    content: Mapping[str, Any],
    key: str,
    expected: str,
    fits: Callable[[Any], bool],
    prefix: str = "",
) -> Any:
    if (raw := content.get(key)) is not None and fits(raw):
        return raw
    given = ": is missing;" if raw is None else f"={raw}:"
    raise ValueError(f"{prefix}{key}{given} expected {expected}")


def _require_known(content: Mapping[str, Any], allowed: tuple[str, ...], prefix: str) -> None:
    for key in content:
        if key not in allowed:
            hint = did_you_mean(str(key), allowed)
            given = f"{prefix}{key}={content[key]}"
            raise ValueError(f"{given}: unknown key{hint}; allowed: {', '.join(allowed)}")


def _as_number(raw: Any) -> float:
    """Return a number, also of a text, since YAML reads 1e3 as one; NaN for anything else."""
    try:
        return math.nan if isinstance(raw, bool) else float(raw)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _with_defaults(gpu: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a GPU section with default values for optional keys that the file omits."""
    given = _GPU_DEFAULTS | dict(gpu)
    peak = gpu.get("peak_tflops")
    value = _as_number(peak.get("value")) if isinstance(peak, Mapping) else 0.0
    if given.get("gemm_tflops") is None and value > 0:
        note = "not in the file; an H200 reaches this share of its peak"
        low, likely, high = (share * value for share in _GEMM_SHARES)
        given["gemm_tflops"] = _guess(likely, note, low, high)
    return given


def _form(value: Any) -> str:
    number = value if is_number(value) else "N"
    return f"{{value: {number}, source: {'|'.join(SOURCES)}, note: ...}}"
