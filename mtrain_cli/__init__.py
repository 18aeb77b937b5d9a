"""mtrain: train language models on very long sequences, and see who computes, who waits and why."""

import shlex
from pathlib import Path

__version__ = "0.2.0"

# A wheel holds conf/, kernels/ and profiles/ inside this package; a source checkout holds them next
# to it. Add the checkout to this package's path so that `mtrain_cli.kernels` imports in both cases
# and no top-level `kernels` package exists.
_checkout = Path(__file__).resolve().parent.parent
if not (Path(__file__).parent / "kernels").is_dir() and (_checkout / "pyproject.toml").is_file():
    __path__.append(str(_checkout))


def install_command(extra: str) -> str:
    """Return the pip command that adds an extra to this installation of mtrain."""
    if not (_checkout / "pyproject.toml").is_file():
        return f"pip install 'mtrain[{extra}]'"
    clone = "." if Path.cwd() == _checkout else _checkout
    return f"pip install -e {shlex.quote(f'{clone}[{extra}]')}"


def resource_dir(name: str) -> Path:
    """Return the folder `conf`, `kernels` or `profiles` that ships with mtrain.

    Raises:
        FileNotFoundError: the installation lacks the folder.
    """
    for base in (Path(__file__).resolve().parent, _checkout):
        if (base / name).is_dir():
            return base / name
    raise FileNotFoundError(f"mtrain's own folder '{name}' is missing. Reinstall mtrain.")
