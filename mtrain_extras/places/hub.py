"""Repositories of the Hugging Face Hub. Nothing that is fetched from them is executed.

huggingface_hub reads HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE, and caches each commit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path

from mtrain_cli import install_command
from mtrain_cli.config.schema import ConfigError
from mtrain_extras.places.files import cache_root, locked, say, why
from mtrain_extras.places.kinds import FOLDER, MODEL

_SMALL = ["*.json", "tokenizer*", "*.jinja"]
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SNAPSHOT = re.compile(r"/models--([^/]+)/snapshots/([^/]+)/?(.*)")


def snapshot(subject: str, name: str, kind: str) -> Path:
    """Return the folder of ``org/name[@revision]`` in the cache of the Hub.

    The first process of a node fetches what is missing. kind: ``model`` has weights, others not.
    Of the weights, only the files that transformers loads are fetched.

    Raises ConfigError if it cannot be fetched, or a model has no safetensors.
    """
    repo, _, revision = name.partition("@")
    with explained(subject, repo, revision):
        import huggingface_hub

        def fetched(revision: str | None, wanted: list[str]) -> Path:
            folder = huggingface_hub.snapshot_download(
                repo, revision=revision, allow_patterns=wanted
            )
            return Path(folder)

        cache_root().mkdir(parents=True, exist_ok=True)
        with locked(cache_root() / ".hub.lock"):
            folder = fetched(revision or None, _SMALL)
            if kind == MODEL and lacking_weights(folder):
                # Others, such as fp16/model.safetensors, repeat these weights.
                fetched(folder.name, [escape(name) for name in _weights(folder)])
    if kind in (MODEL, FOLDER) and not (folder / "config.json").is_file():
        raise ConfigError(f"{subject}: the repository has no config.json, so it holds no model")
    if kind == MODEL and (lacking := lacking_weights(folder)):
        if lacking == [_SINGLE]:
            offline = " in the cache, and HF_HUB_OFFLINE is set" if _offline() else ""
            what = f"has no safetensors{offline}; mtrain reads no other format of weights"
        else:
            what = f"{lacking[0]}, which its index names, could not be fetched"
        raise ConfigError(f"{subject}: {what}")
    say(f"{subject}: commit {folder.name} of the Hub")
    return folder


def commit_of(path: str) -> tuple[str, str, str] | None:
    """Return the name, the commit and the file of a path that `snapshot` returned, or None."""
    found = _SNAPSHOT.search(path)
    return (found[1].replace("--", "/"), found[2], found[3]) if found else None


def lacking_weights(folder: Path) -> list[str]:
    """Return the files of the weights of a model that its folder lacks."""
    return [name for name in _weights(folder) if not (folder / name).is_file()]


def _weights(folder: Path) -> list[str]:
    """Return the files that the index of the weights names, or the one file without an index."""
    try:
        index = json.loads((folder / _INDEX).read_bytes())["weight_map"]
        return sorted({*map(str, index.values())})
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return [_SINGLE]  # no index, or a damaged one, which reading the weights reports


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


@contextmanager
def explained(subject: str, repo: str, revision: str = "") -> Iterator[None]:
    """Raise ConfigError with one line in place of an error of huggingface_hub."""
    try:
        from huggingface_hub import constants, errors, get_token
    except ImportError as error:
        here = "no such folder here, and the Hub needs huggingface_hub"
        raise ConfigError(f"{subject}: {here}; {install_command('hub')}") from error
    page = f"{constants.ENDPOINT}/{repo}"
    token = "" if get_token() else "; no token is set (HF_TOKEN, or `hf auth login`)"
    try:
        yield
    except errors.GatedRepoError as error:
        what = f"a gated repository; accept its terms at {page} with the account of your token"
        raise ConfigError(f"{subject}: {what}{token}") from error
    except errors.RevisionNotFoundError as error:
        what = f"the repository has no revision {revision!r}; see {page}/tree/main"
        raise ConfigError(f"{subject}: {what}") from error
    except errors.RepositoryNotFoundError as error:
        what = "no such folder here and no such repository on the Hub, or a private one"
        raise ConfigError(f"{subject}: {what}{token}") from error
    except errors.LocalTokenNotFoundError as error:
        raise ConfigError(f"{subject}: needs a token: HF_TOKEN, or `hf auth login`") from error
    except errors.HFValidationError as error:
        raise ConfigError(f"{subject}: no name of a repository ({why(error)})") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        if _offline():
            what = "no such folder here, nor in the cache of the Hub (HF_HOME), and HF_HUB_OFFLINE"
            raise ConfigError(f"{subject}: {what} forbids to fetch it") from error
        what = f"no such folder here, and {constants.ENDPOINT} cannot be reached"
        raise ConfigError(f"{subject}: {what} ({why(error.__cause__ or error)})") from error
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            what = f"the Hub refuses access ({status}); check your token and its rights"
            raise ConfigError(f"{subject}: {what}{token}") from error
        raise ConfigError(f"{subject}: the Hub failed ({why(error)})") from error
    except ConfigError:
        raise
    except Exception as error:  # of a proxy, a disk, or a server that is none of the Hub's
        raise ConfigError(f"{subject}: the Hub cannot be used ({why(error)}){token}") from error
