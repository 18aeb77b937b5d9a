"""Memory settings of a run: the keys that `train.memory=auto` may change, and what it tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mtrain_cli.config.schema import Config
from mtrain_cli.training.memory import GIB, MemoryEstimate

_AS_FAST = "equally fast"

# Keys that `auto` may change, with the default first, then the alternatives. If the user set a key
# to another value than the default, `auto` leaves it. `auto` offloads the activations of as few
# layers as necessary, and keeps the MLP products of as many layers as there is room for.
CHOICES: dict[str, tuple[Any, ...]] = {
    "train.activation_checkpoint": ("selective", "none", "sequence_selective", "full"),
    "train.checkpoint_keep": (0.5, 0.75, 0.25),
    "train.offload_activations": (False, True),
    "train.keep_mlp": (False, True),
    "train.tile_mib": (4096, 1024, 256),
    "train.loss_chunk_mib": (2048, 512, 128),
    "train.shard": ("full", "gradients", "optimizer"),
    "optim.offload": (False, True),
    "optim.offload_gradients": (False, True),
}
DEGREE = "topology.expert_parallel"  # chosen by `auto` together with the memory setting
# A configuration, and its `MemorySetting.changes`.
Variant = tuple[Config, dict[str, Any]]


@dataclass(frozen=True)
class MemorySetting:
    """A configuration with its estimated memory and step time.

    changes: new values by key, for the keys of `CHOICES` that the setting changes, and the degree
        that ``topology.expert_parallel=auto`` takes.
    memory: estimated memory of one worker.
    seconds: estimated duration of an optimizer step.
    fits: whether the worker has room for `memory`.
    """

    config: Config
    changes: dict[str, Any]
    memory: MemoryEstimate
    seconds: float
    fits: bool

    @property
    def overrides(self) -> str:
        """The changes as command-line overrides."""
        return as_overrides(self.changes)


@dataclass(frozen=True)
class MemorySearch:
    """The result of a search.

    settings: all settings, fastest first.
    chosen: the fastest setting that fits. None if no setting fits.
    """

    settings: tuple[MemorySetting, ...]
    chosen: MemorySetting | None

    def rejected(self) -> list[tuple[str, str]]:
        """Return a label and the reason of the rejection for settings that were not chosen.

        Return only the fastest such setting for each value of train.activation_checkpoint. Leave
        out settings that fit and, as displayed, take as long as the chosen one. Of every other
        expert-parallel degree, return only the setting that would be chosen for it.
        """
        assert self.chosen is not None
        best = self.chosen.seconds
        rows: dict[str, tuple[str, str]] = {}
        by_degree = self._by_degree()
        for setting in by_degree.pop(_degree(self.chosen.config)):
            kind, memory = setting.config.train.activation_checkpoint, setting.memory
            reason = _compared(setting.seconds, best)
            equal = setting.fits and reason == _AS_FAST
            if setting is self.chosen or equal or kind in rows:
                continue
            if not setting.fits:
                reason += f", but needs {in_gib(memory.total)}"
                if memory.host_peak:
                    reason += f" and {in_gib(memory.host_peak)} of host memory"
            rows[kind] = (_label(setting.config, self.chosen.config), reason)
        others = (next((s for s in each if s.fits), each[0]) for each in by_degree.values())
        return [*rows.values(), *((_label_of_degree(s), _figures(s, best)) for s in others)]

    def _by_degree(self) -> dict[int | str, list[MemorySetting]]:
        """Return the settings of each expert-parallel degree, fastest first."""
        found: dict[int | str, list[MemorySetting]] = {}
        for setting in self.settings:
            found.setdefault(_degree(setting.config), []).append(setting)
        return dict(sorted(found.items()))


def _label(config: Config, chosen: Config) -> str:
    """Return overrides: how a setting keeps activations, and how it differs from the chosen one."""
    values = {key: get_setting(config, key) for key in CHOICES}
    kind, share = "train.activation_checkpoint", "train.checkpoint_keep"
    always = {kind, share} if values[kind] == "sequence_selective" else {kind}
    if values[kind] != "sequence_selective":
        del values[share]  # has no effect
    return as_overrides(
        {k: v for k, v in values.items() if k in always or v != get_setting(chosen, k)}
    )


def _label_of_degree(setting: MemorySetting) -> str:
    """Return a setting of another expert-parallel degree as overrides."""
    kind = "train.activation_checkpoint"
    changes = {DEGREE: _degree(setting.config), kind: get_setting(setting.config, kind)}
    return as_overrides(changes | setting.changes)


def _figures(setting: MemorySetting, best: float) -> str:
    """Return a setting's step time, compared with ``best`` seconds, and its memory."""
    word = "and" if setting.fits else "but needs"
    return f"{_compared(setting.seconds, best)} {word} {in_gib(setting.memory.total)}"


def _compared(seconds: float, best: float) -> str:
    """Compare an estimated step time with that of the chosen setting, in whole percent."""
    if not (more := round(100 * (seconds / best - 1))):
        return _AS_FAST
    return f"steps take {abs(more)}% {'longer' if more > 0 else 'less time'}"


def _degree(config: Config) -> int | str:
    return config.topology.expert_parallel


def get_setting(config: Config, key: str) -> Any:
    """Return the value of a key such as "train.shard"."""
    group, _, name = key.partition(".")
    return getattr(getattr(config, group), name)


def with_values(config: Config, changes: dict[str, Any]) -> Config:
    """Return `config` with other values of keys such as "train.shard"."""
    groups: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = value
    return config.changed(**groups)


def as_overrides(changes: dict[str, Any]) -> str:
    """Return changes as command-line overrides."""
    return " ".join(f"{key}={format_value(value)}" for key, value in changes.items())


def format_value(value: Any) -> str:
    """Format a setting's value as in an override: true, 0.5, full."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def in_gib(number: int) -> str:
    return f"{number / GIB:,.1f} GiB"


def duration(seconds: float) -> str:
    """Format seconds, for example as 41 s, 9.2 min or 2.5 h."""
    unit, scale = ("s", 1) if seconds < 120 else ("min", 60) if seconds < 7200 else ("h", 3600)
    return f"{seconds / scale:,.3g} {unit}"
