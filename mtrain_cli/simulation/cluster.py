"""Clusters: how many GPUs, how fast they compute and how they are linked, each constant with where it comes from.

``conf/cluster/*.yaml`` ship; any other file of that form is given by its path.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtrain_cli import resource_dir
from mtrain_cli.config.documents import read_yaml, reason
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.suggest import did_you_mean

FOLDER = "cluster"  # under conf/
CUDA, CPU = "cuda", "cpu"
SOURCES = ("measured", "datasheet", "paper", "guess")
# What a constant may really be, as shares of it, where a file does not say. Of the rates on a datasheet a program gets a part.
_SPREAD = {
    "measured": (0.9, 1.1),
    "datasheet": (0.6, 1.0),
    "paper": (0.6, 1.0),
    "guess": (0.5, 2.0),
}


@dataclass(frozen=True)
class Constant:
    """A number, what it may really be, and where it comes from: `SOURCES`. note: says more."""

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
        below, above = _SPREAD[source]
        return Constant(
            value,
            source,
            note,
            value * below if low is None else low,
            value * above if high is None else high,
        )

    def scaled(self, by: float) -> Constant:
        return replace(self, value=self.value * by, low=self.low * by, high=self.high * by)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """name: as CUDA has it, or of a CPU; device: which of both. peak_tflops: dense bf16. gemm_tflops: what large matrix products reach of
    it. hbm_gib: memory. hbm_gbps: of a copy, reads and writes together. launch_us: of the host, to launch one kernel. step_ms: of an
    optimizer step, what is neither computed nor sent: the batch, sums that the host waits for. Of the host, for each GPU while all are at
    it: host_gib of memory, host_link_gbps from and to it, one direction, host_memory_gbps that an optimizer on the host reads and writes.
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
        """Whether workers are processes of a CPU."""
        return self.device == CPU


@dataclass(frozen=True, kw_only=True)
class Link:
    """Between GPUs of a node (inner) or of different nodes (outer). Bandwidths in GB/s, one direction.

    latency_us, bandwidth_gbps: of one message between two GPUs that nothing else disturbs. capacity_gbps: of the link of a GPU, which
    several messages share. collective_latency_us, collective_bandwidth_gbps: of collectives over collective_ranks ranks, by the bandwidth
    that a ring has on every link. shared_by: GPUs behind one network card, whose capacity they share; 1 for inner. gpu_share: of a GPU's
    computing power, taken by a message that is under way.
    """

    latency_us: Constant
    bandwidth_gbps: Constant
    capacity_gbps: Constant
    collective_latency_us: Constant
    collective_bandwidth_gbps: Constant
    collective_ranks: Constant
    shared_by: Constant
    gpu_share: Constant


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """dollars_per_gpu_hour: None where unknown. outer: None for one node."""

    name: str
    nodes: int
    gpus_per_node: int
    gpu: Gpu
    inner: Link
    outer: Link | None = None
    dollars_per_gpu_hour: Constant | None = None

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def link(self, *, outer: bool) -> Link:
        if not outer:
            return self.inner
        assert self.outer is not None, "one node has no links to others"
        return self.outer

    def constants(self) -> dict[str, Constant]:
        """All by name, such as ``links.inner.latency_us``."""
        found: dict[str, Constant] = {}
        for prefix, part in (
            ("gpu", self.gpu),
            ("links.inner", self.inner),
            ("links.outer", self.outer),
        ):
            if part is not None:
                values = {
                    field.name: getattr(part, field.name) for field in dataclasses.fields(part)
                }
                found |= {
                    f"{prefix}.{name}": value
                    for name, value in values.items()
                    if isinstance(value, Constant)
                }
        return (
            found
            if self.dollars_per_gpu_hour is None
            else {**found, "dollars_per_gpu_hour": self.dollars_per_gpu_hour}
        )


def uneven(cluster: Cluster, workers: int) -> str | None:
    """Why so many workers leave a node half empty; None where they do not, or are all in one."""
    each = cluster.gpus_per_node
    if workers <= each or workers % each == 0:
        return None
    near = " or ".join(
        str(n) for n in (workers // each * each, -(-workers // each) * each) if n <= cluster.gpus
    )
    return f"{cluster.name} has nodes of {each} GPUs, of which several are filled; allowed: 1 to {each}, or multiples of {each} such as {near}"


def shipped() -> dict[str, Path]:
    """Presets by name."""
    return {file.stem: file for file in sorted((resource_dir("conf") / FOLDER).glob("*.yaml"))}


def load_cluster(
    name: str, *, nodes: int | None = None, gpus_per_node: int | None = None
) -> Cluster:
    """A preset by its name, or a YAML file by its path. nodes, gpus_per_node: instead of those of the file.

    Raises:
        ConfigError: there is no such cluster, or the file does not say all that it should; all problems together, each with the file.
    """
    presets = shipped()
    path = presets.get(name, Path(name).expanduser())
    if not path.is_file():
        if path.suffix in (".yaml", ".yml") or "/" in name:
            raise ConfigError(f"--cluster {name}: there is no such file")
        known = ", ".join(presets)
        raise ConfigError(
            f"--cluster {name}: no such cluster{did_you_mean(name, presets)}; allowed: {known}, or the path of a YAML file"
        )
    content = _content(path)
    if nodes is not None and nodes > 1 and name in presets and not _links_nodes(content):
        others = ", ".join(other for other, file in presets.items() if _links_nodes(_content(file)))
        raise ConfigError(
            f"nodes={nodes}: {name} does not say how nodes are linked; allowed: 1, or --cluster {others} or a file with links.outer"
        )
    reader = _Reader(path, content)
    found = reader.cluster(nodes, gpus_per_node)
    if reader.problems or found is None:
        raise ConfigError(*(f"{path}: {problem}" for problem in reader.problems))
    return found


def _links_nodes(content: Mapping[str, Any]) -> bool:
    links = content.get("links")
    return isinstance(links, Mapping) and links.get("outer") is not None


def _content(path: Path) -> dict[str, Any]:
    try:
        content = read_yaml(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: is no readable YAML ({reason(error)})") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: describes no cluster; expected keys such as nodes, gpus_per_node, gpu and links"
        )
    return content


_Check = tuple[str, Callable[[float], bool]]
_MOST = 1e12  # of any constant, in its unit: a thousand times what a whole cluster has
_MOST_NODES = 2**14  # and GPUs of a node: as topology.workers
_ABOVE: _Check = (f"a number above 0 and at most {_MOST:g}", lambda v: 0 < v <= _MOST)
_AT_LEAST: _Check = (f"a number of at least 0 and at most {_MOST:g}", lambda v: 0 <= v <= _MOST)
_COUNT: _Check = (
    f"a whole number of at least 1 and at most {_MOST_NODES:,}",
    lambda v: 1 <= v <= _MOST_NODES and v == int(v),
)
_SHARE: _Check = ("a share, at least 0 and below 1", lambda v: 0 <= v < 1)
_OF_GPU = {
    "peak_tflops": _ABOVE, "gemm_tflops": _ABOVE, "hbm_gib": _ABOVE, "hbm_gbps": _ABOVE, "launch_us": _AT_LEAST, "step_ms": _AT_LEAST,
    "host_gib": _ABOVE, "host_link_gbps": _ABOVE, "host_memory_gbps": _ABOVE,
}  # fmt: skip
_OF_LINK = {
    "latency_us": _AT_LEAST, "bandwidth_gbps": _ABOVE, "capacity_gbps": _ABOVE, "collective_latency_us": _AT_LEAST,
    "collective_bandwidth_gbps": _ABOVE, "collective_ranks": _COUNT, "shared_by": _COUNT, "gpu_share": _SHARE,
}  # fmt: skip
# What stands for a constant of a link that a file leaves out.
_DEFAULTS = {
    "capacity_gbps": "bandwidth_gbps",
    "collective_latency_us": "latency_us",
    "collective_bandwidth_gbps": "capacity_gbps",
}
# Where a file does not say: matrix products of a H200 reach 0.77 of its peak, and of others from a half to nearly all.
_GEMM_SHARES = {"low": 0.5, "value": 0.77, "high": 0.95}
_STEP_MS = {"value": 10, "low": 0, "high": 60, "source": "guess", "note": "not measured apart"}
_HOST = {
    "host_gib": {"value": 128, "low": 64, "high": 256, "source": "guess", "note": "1 to 2 TiB in a host of eight GPUs"},
    "host_link_gbps": {"value": 50, "low": 20, "high": 60, "source": "guess", "note": "pinned copies over PCIe 5 x16, 64 on paper"},
    "host_memory_gbps": {
        "value": 19, "low": 8, "high": 60, "source": "guess", "note": "AdamW on two sockets, of 150 for eight GPUs; 600 and more on paper",
    },
}  # fmt: skip
_RANKS = {
    "value": 8,
    "source": "guess",
    "note": "ranks that the latency of collectives is taken to be of",
}
# What a section cannot do without.
_OF_ANY_LINK = tuple(
    key for key in _OF_LINK if key not in (*_DEFAULTS, "shared_by", "collective_ranks")
)
_NEEDED = {
    "gpu": ("name", *(key for key in _OF_GPU if key not in ("gemm_tflops", "step_ms", *_HOST))),
    "links": ("inner", "outer for several nodes"), "inner": _OF_ANY_LINK, "outer": (*_OF_ANY_LINK, "shared_by"),
}  # fmt: skip
_NAME_OF_CPU = re.compile(r"\b(CPU|EPYC|Xeon|Ryzen|Neoverse|Graviton)\b", re.IGNORECASE)
_KEYS = ("name", "nodes", "gpus_per_node", "gpu", "links", "dollars_per_gpu_hour")
_PARTS = ("value", "source", "note", "low", "high")


class _Reader:
    """Reads one document and collects everything that is wrong with it."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path, self.content = path, content
        self.problems: list[str] = []

    def cluster(self, nodes: int | None, gpus_per_node: int | None) -> Cluster | None:
        content = self.content
        self._unknown(content, _KEYS, "")
        name = self._text(content, "name", "", default=self.path.stem)
        counts = [
            self._count(key, given)
            for key, given in (("nodes", nodes), ("gpus_per_node", gpus_per_node))
        ]
        of_gpu = self._section(content, "gpu", "")
        gpu_name = self._text(of_gpu, "name", "gpu.") if of_gpu is not None else ""
        gpu = self._constants(_with_defaults(of_gpu), _OF_GPU, "gpu.", ("name", "device"))
        device = self._device(of_gpu, gpu_name)
        links = self._section(content, "links", "")
        if links is not None:
            self._unknown(links, ("inner", "outer"), "links.")
        inner = self._link(links, "inner")
        outer = (
            self._link(links, "outer")
            if (counts[0] or 1) > 1 or (links or {}).get("outer") is not None
            else {}
        )
        price = content.get("dollars_per_gpu_hour")
        cost = None if price is None else self._constant(price, _AT_LEAST, "dollars_per_gpu_hour")
        per_node, shared = counts[1], outer.get("shared_by")
        if per_node and shared and per_node % int(shared.value):
            divisors = ", ".join(str(n) for n in range(1, per_node + 1) if per_node % n == 0)
            self.problems.append(
                f"links.outer.shared_by={int(shared.value)}: does not divide gpus_per_node={per_node}; allowed: {divisors}"
            )
        if self.problems:
            return None
        assert counts[0] is not None
        assert counts[1] is not None
        return Cluster(
            name=name,
            nodes=counts[0],
            gpus_per_node=counts[1],
            gpu=Gpu(name=gpu_name, device=device, **gpu),
            inner=Link(**inner),
            outer=Link(**outer) if outer else None,
            dollars_per_gpu_hour=cost,
        )

    def _link(self, links: Mapping[str, Any] | None, name: str) -> dict[str, Constant]:
        content = self._section(links, name, "links.") if links is not None else None
        if content is None:
            return {}
        given = {key: value for key, value in content.items() if value is not None}
        left_out = [key for key in _DEFAULTS if key not in given]
        given.setdefault("collective_ranks", _RANKS)
        if name == "inner":
            given.setdefault(
                "shared_by",
                {
                    "value": 1,
                    "source": "datasheet",
                    "note": "every GPU has its own links in a node",
                },
            )
        # What stands for another constant is checked, and blamed, under its own name alone.
        asked = {key: check for key, check in _OF_LINK.items() if key not in left_out}
        found = self._constants(given, asked, f"links.{name}.", tuple(left_out))
        return found | {
            key: found[stands] for key in left_out if (stands := _standing(key, left_out)) in found
        }

    def _constants(
        self,
        content: Mapping[str, Any] | None,
        checks: Mapping[str, _Check],
        prefix: str,
        more: tuple[str, ...],
    ) -> dict[str, Constant]:
        if content is None:
            return {}
        self._unknown(content, (*checks, *more), prefix)
        found = {}
        for key, check in checks.items():
            if content.get(key) is None:
                if f"{prefix}{key}" == "gpu.gemm_tflops":
                    continue  # the peak that it follows from has been told
                self.problems.append(
                    f"{prefix}{key}: is missing; expected {check[0]} as {_form(None)}"
                )
                continue
            constant = self._constant(content[key], check, f"{prefix}{key}")
            if constant is not None:
                found[key] = constant
        return found

    def _constant(self, content: Any, check: _Check, key: str) -> Constant | None:
        if not isinstance(content, Mapping):
            self.problems.append(
                f"{key}={content}: expected {check[0]} with its source, as {_form(content)}"
            )
            return None
        before = len(self.problems)
        self._unknown(content, _PARTS, f"{key}.")
        value = self._number(content, "value", key, check)
        source = content.get("source")
        if source not in SOURCES:
            said = (
                f"{key}.source: is missing"
                if source is None
                else f"{key}.source={source}: is no source"
            )
            self.problems.append(f"{said}; allowed: {', '.join(SOURCES)}")
        bounds = [
            self._number(content, name, key, check) if content.get(name) is not None else None
            for name in ("low", "high")
        ]
        if len(self.problems) > before or value is None:
            return None
        if check is _COUNT:
            bounds = [value if bound is None else bound for bound in bounds]
        found = Constant.of(value, str(source), str(content.get("note") or ""), *bounds)
        if not found.low <= value <= found.high:
            self.problems.append(
                f"{key}: low={found.low:g} and high={found.high:g} must stand on either side of value={value:g}"
            )
            return None
        return found

    def _number(
        self, content: Mapping[str, Any], name: str, key: str, check: _Check
    ) -> float | None:
        raw = content.get(name)
        if raw is None:
            self.problems.append(f"{key}.{name}: is missing; expected {check[0]}")
            return None
        try:
            # YAML takes 1e3 for a word.
            value = math.nan if isinstance(raw, bool) else float(raw)
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        if not math.isfinite(value) or not check[1](value):
            self.problems.append(f"{key}.{name}={raw}: expected {check[0]}")
            return None
        return value

    def _count(self, key: str, given: int | None) -> int | None:
        raw = self.content.get(key) if given is None else given
        if isinstance(raw, int) and not isinstance(raw, bool) and 1 <= raw <= _MOST_NODES:
            return raw
        said = f"{key}: is missing" if raw is None else f"{key}={raw}: is no cluster"
        self.problems.append(f"{said}; expected {_COUNT[0]}")
        return None

    def _text(
        self, content: Mapping[str, Any], key: str, prefix: str, default: str | None = None
    ) -> str:
        raw = content.get(key, default)
        if not isinstance(raw, str) or not raw:
            self.problems.append(
                f"{prefix}{key}: is missing; expected a name"
                if raw is None
                else f"{prefix}{key}={raw}: expected a name"
            )
            return ""
        return raw

    def _device(self, gpu: Mapping[str, Any] | None, name: str) -> str:
        """Files that do not say it tell by the name."""
        given = (gpu or {}).get("device", CPU if _NAME_OF_CPU.search(name) else CUDA)
        if given not in (CUDA, CPU):
            self.problems.append(f"gpu.device={given}: allowed: {CUDA}, {CPU}")
        return str(given)

    def _section(
        self, content: Mapping[str, Any], key: str, prefix: str
    ) -> Mapping[str, Any] | None:
        raw = content.get(key)
        if isinstance(raw, Mapping):
            return raw
        expected = f"expected a section with {', '.join(_NEEDED[key])}"
        self.problems.append(
            f"{prefix}{key}: is missing; {expected}"
            if raw is None
            else f"{prefix}{key}={raw}: {expected}"
        )
        return None

    def _unknown(self, content: Mapping[str, Any], allowed: tuple[str, ...], prefix: str) -> None:
        for key in content:
            if key not in allowed:
                hint = did_you_mean(str(key), allowed)
                self.problems.append(
                    f"{prefix}{key}={content[key]}: unknown key{hint}; allowed: {', '.join(allowed)}"
                )


def _standing(key: str, left_out: Sequence[str]) -> str:
    """The constant of a link that stands for ``key``, which a file leaves out."""
    stands = _DEFAULTS[key]
    return _standing(stands, left_out) if stands in left_out else stands


def _with_defaults(gpu: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A GPU with what its file may leave out."""
    if gpu is None:
        return None
    given: dict[str, Any] = {"step_ms": _STEP_MS, **_HOST, **gpu}
    peak = gpu.get("peak_tflops")
    value = peak.get("value") if isinstance(peak, Mapping) else None
    if (
        "gemm_tflops" not in given
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and value > 0
    ):
        shares = {name: share * value for name, share in _GEMM_SHARES.items()}
        given["gemm_tflops"] = {
            **shares,
            "source": "guess",
            "note": "the file does not say: the share of its peak that a H200 reaches",
        }
    return given


def _form(value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{{value: {value if number else 'N'}, source: {'|'.join(SOURCES)}, note: ...}}"
