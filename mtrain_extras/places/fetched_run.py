"""Get a run from the place to which `run.remote` copied it."""

from __future__ import annotations

import functools
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mtrain_cli.config import documents, resolved_file
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch.job import decide_on_rank_zero
from mtrain_cli.launch.manifest import NAME as MANIFEST
from mtrain_cli.launch.manifest import Manifest, ManifestError, committed_steps
from mtrain_cli.launch.run_dir import RUNS
from mtrain_extras.places import names
from mtrain_extras.places.files import THREADS, format_bytes, say, why
from mtrain_extras.places.kinds import KEYS, with_adapters
from mtrain_extras.places.run_place import ID, PlaceError, RunPlace, is_small_file, steps

_RESOLVED = "resolved.yaml"


def folder_of(run: str) -> Path:
    """Return the folder of a run, given by the folder or by its name under runs/."""
    folder = Path(run).expanduser()
    is_name = folder.name == run and not (folder / _RESOLVED).is_file()
    return RUNS / run if is_name else folder


def fetch(remote: str, folder: Path, *, starts: bool = False) -> bool:
    """Get a run with its newest intact checkpoint. In a job of several processes, rank 0 does.

    remote: `run.remote`. folder: of the run here; one with that checkpoint or a newer one stays.
    starts: whether a run may start in its place if that has no checkpoint. Return whether it has.

    Raises ConfigError if the place cannot be read or no checkpoint is intact.
    """
    found = decide_on_rank_zero(lambda: str(_fetch_here(remote, folder.absolute(), starts)))
    return found == str(True)


def _fetch_here(remote: str, folder: Path, starts: bool) -> bool:
    subject = f"run.remote={remote}"
    place = RunPlace(remote, folder)
    try:
        files = place.files()
        is_here = (folder / _RESOLVED).is_file()
        if _RESOLVED not in files or not steps(files):
            if starts and ID in files and not is_here:
                place.remove(ID)  # a run that was lost so early must not block its name
                say(f"{subject}: {place.url} has no complete checkpoint; the run starts again")
            return False
        if is_here and not _is_newer(place, folder, files):
            return True
        _fetch(subject, place, folder, files, is_here)
    except (PlaceError, OSError) as error:
        raise ConfigError(f"{subject}: {place.url} cannot be read ({why(error)})") from error
    return True


def _is_newer(place: RunPlace, folder: Path, files: dict[str, int]) -> bool:
    """Return whether the copy of the same run has a newer checkpoint than the run here."""
    own = folder / ID
    if not own.is_file() or place.read(ID) != own.read_bytes():
        return False  # the run never had a copy, or the copy is another run's, which training says
    return steps(files)[0] > max(committed_steps(folder / "checkpoints"), default=-1)


def _fetch(
    subject: str, place: RunPlace, folder: Path, files: dict[str, int], is_here: bool
) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.fetch-", dir=folder.parent))
    try:
        step = _checkpoint(subject, place, partial, files)
        for name in filter(is_small_file, files):
            place.get(name, partial / name)
        _make_data_local(partial / _RESOLVED)
        if not is_here:
            if folder.is_dir() and not [*folder.iterdir()]:
                folder.rmdir()
            partial.rename(folder)
        else:
            target = folder / "checkpoints" / f"step-{step}"
            shutil.rmtree(target, ignore_errors=True)  # has no manifest
            target.parent.mkdir(exist_ok=True)
            (partial / "checkpoints" / f"step-{step}").rename(target)
            for name in filter(is_small_file, files):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (partial / name).replace(folder / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    say(f"{subject}: fetched the checkpoint of step {step} of {place.url} into {folder}")


def _checkpoint(subject: str, place: RunPlace, partial: Path, files: dict[str, int]) -> int:
    """Get the newest checkpoint whose files have their checksums, and return its step."""
    problems = []
    for step in steps(files):
        target = partial / "checkpoints" / f"step-{step}"
        prefix = f"checkpoints/step-{step}/"
        try:
            place.get(prefix + MANIFEST, target / MANIFEST)
            manifest = Manifest.read(target)
            size = sum(entry.bytes for entry in manifest.files.values())
            say(f"{subject}: fetching step {step} of {place.url}, {format_bytes(size)}")
            with ThreadPoolExecutor(THREADS) as pool:
                jobs = [pool.submit(place.get, prefix + n, target / n) for n in manifest.files]
            for job in jobs:
                job.result()
            damage = manifest.problems(target)
        except ManifestError as error:
            damage = [str(error)]
        except FileNotFoundError as error:
            damage = [f"{Path(str(error.filename or error)).name} is missing"]
        if not damage:
            return step
        problems.append(f"{place.url}/{prefix[:-1]}: {damage[0]}")
        say(f"warning: {problems[-1]}")
        shutil.rmtree(target, ignore_errors=True)
    raise ConfigError(f"{subject}: no intact checkpoint; {'; '.join(problems)}")


def _make_data_local(file: Path) -> None:
    """Fetch the data that the run had fetched, and write their paths here into its settings."""
    raw = documents.read_yaml(file)
    changed = False

    def saved(*path: str) -> Any:
        return functools.reduce(
            lambda at, k: at.get(k) if isinstance(at, dict) else None, path, raw
        )

    for key, kind in KEYS.items():
        group, _, name = key.partition(".")
        value, kind = saved(group, name), with_adapters(kind, saved("train", "lora", "rank"))
        if isinstance(value, str) and value.startswith("/"):
            path = names.local(f"{key}=", value, kind)
            changed |= path != value
            raw[group][name] = path
    if changed:
        import yaml

        resolved_file.load(file)  # refuse a wrong file before it is written again
        documents.replace_text(file, yaml.safe_dump(raw, sort_keys=False, allow_unicode=True))
