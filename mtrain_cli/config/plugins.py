"""Masks, patterns, exchanges and callbacks by name: mtrain's own, and those of other packages.

Another installed package names what it adds as entry points; `docs/extending.md` shows such a
package. What mtrain has itself is in tables of its modules, so a checkout needs no metadata.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from mtrain_cli.config.problem import ConfigError

T = TypeVar("T")
OWN_DISTRIBUTION = "mtrain"
COMMANDS, REPORTS, CALLBACKS = "mtrain.commands", "mtrain.reports", "mtrain.callbacks"
TRACKERS, ADAPTERS = "mtrain.trackers", "mtrain.adapters"
DATA, PAGES = "mtrain.data", "mtrain.pages"

# Receives the line on an entry point that cannot be loaded. A command line prints it, and workers
# that mtrain starts stay silent, since the command has printed it.
on_broken: Callable[[str], object] = functools.partial(warnings.warn, stacklevel=2)


@functools.cache
def _all_installed() -> Any:
    return metadata.entry_points()  # reads the metadata of every package, which takes 20 ms


def distribution(entry: metadata.EntryPoint) -> str:
    """Return the name of the installed package that has an entry point."""
    return entry.dist.name if entry.dist is not None else "an unknown package"


def installed(group: str) -> list[metadata.EntryPoint]:
    """Return the entry points of a group, such as ``mtrain.masks``, mtrain's own first."""
    return sorted(
        _all_installed().select(group=group),
        key=lambda entry: distribution(entry) != OWN_DISTRIBUTION,
    )


def lacks_own() -> bool:
    """Return whether this is a checkout with an entry point that its metadata lack."""
    project = Path(__file__).parents[2] / "pyproject.toml"
    if not project.is_file():
        return False
    about = tomllib.loads(project.read_text(encoding="utf-8"))
    groups = about.get("project", {}).get("entry-points", {})
    return any(
        not entries.keys() <= {entry.name for entry in installed(group)}
        for group, entries in groups.items()
    )


def load(group: str, use: Callable[[str, Any], T]) -> list[T]:
    """Load the entry points of a group, and return what ``use`` makes of each name and object.

    An entry point that fails is left out, and a line that names its package goes to `on_broken`.

    Raises:
        ConfigError: from ``use``, which may find a mistake of the user.
    """
    results = []
    for entry in installed(group):
        step = "loaded"
        try:
            loaded = entry.load()
            step = "used"
            results.append(use(entry.name, loaded))
        except (Exception, SystemExit) as error:
            if isinstance(error, ConfigError) and step == "used":
                raise
            on_broken(f"{what(entry)} cannot be {step}, so it is left out ({reason(error)})")
    return results


def load_by_name(
    group: str,
    own: Mapping[str, T] | None = None,
    check: Callable[[str, T, Mapping[str, T]], None] = lambda *_: None,
) -> dict[str, T]:
    """Load the entry points of a group by name, after ``own``. A name that is taken is left out.

    check: raises ValueError if an object does not fit to those before it, {name: object}.
    """
    everything = dict(own or {})

    def add(name: str, value: T) -> None:
        if name in everything:
            raise ValueError("this name is taken")
        check(name, value, everything)
        everything[name] = value

    load(group, add)
    return everything


def what(entry: metadata.EntryPoint) -> str:
    """Return what an entry point is and the package that has it, for messages."""
    version = f" {entry.dist.version}" if entry.dist is not None else ""
    return f"{entry.group}: {entry.name} = {entry.value} of {distribution(entry)}{version}"


def reason(error: BaseException) -> str:
    """Return why an entry point cannot be loaded, for messages."""
    return f"{type(error).__name__}: {error}"


def data_kinds() -> tuple[str, ...]:
    """Return the values of ``data.kind``, without loading those of packages."""
    return ("stdlib", "text", "tokens", *(entry.name for entry in installed(DATA)))


def data_kinds_expected() -> str:
    """Return the values of ``data.kind``, as a text that continues "expected"."""
    more = "; this checkout has more: run `pip install --no-deps -e .` in it" * lacks_own()
    return f"one of {', '.join(data_kinds())}{more}"


def places() -> list[Any]:
    """Return the module that knows names and URLs, or nothing: see the group in extending.md."""
    return load("mtrain.places", lambda _, module: module)[:1]


def watches() -> list[Any]:
    """Return the modules that watch over runs: see the group in extending.md."""
    return load("mtrain.watch", lambda _, module: module)


def callback_names() -> tuple[str, ...]:
    """Return the names of the callbacks of installed packages, without loading them."""
    return tuple(entry.name for entry in installed(CALLBACKS))


def callbacks_expected() -> str:
    """Return the allowed values of ``train.callbacks``, as a text that continues "expected"."""
    names = callback_names()
    return f"a list of callbacks: {', '.join(names) if names else 'no installed package has one'}"


@functools.cache
def config_folders() -> tuple[Path, ...]:
    """Return the folders ``conf`` inside packages that add masks, patterns, exchanges or data."""
    tops = {
        entry.value.partition(":")[0].partition(".")[0]: None
        for group in ("mtrain.masks", "mtrain.patterns", "mtrain.exchanges", DATA)
        for entry in installed(group)
        if distribution(entry) != OWN_DISTRIBUTION
    }
    folders = []
    for top in tops:
        spec = importlib.util.find_spec(top)  # imports nothing, because the name has no dot
        for place in (spec and spec.submodule_search_locations) or ():
            folders.append(Path(place) / "conf")
    return tuple(folder for folder in folders if folder.is_dir())


class Plugins(Mapping[str, T]):
    """What mtrain and other packages offer in one group, by name. The first reading loads it all.

    own: ``module:table``, where the table is mtrain's own {name: object}.
    check: as in `load_by_name`.
    """

    def __init__(
        self, group: str, own: str, check: Callable[[str, T, Mapping[str, T]], None]
    ) -> None:
        self.group = group
        self._own, self._check = own, check

    @functools.cached_property
    def own(self) -> dict[str, T]:
        """What mtrain has itself."""
        module, _, table = self._own.partition(":")
        return dict(getattr(importlib.import_module(module), table))

    @functools.cached_property
    def _all(self) -> dict[str, T]:
        return load_by_name(self.group, self.own, self._check)

    def __getitem__(self, name: str) -> T:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)
