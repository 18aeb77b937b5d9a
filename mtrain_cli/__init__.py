"""mtrain: train language models on very long sequences, and see who computes, who waits and why."""

import shlex
from pathlib import Path

__version__ = "0.1.0"

# In a wheel conf/, kernels/ and profiles/ lie inside this package. In a source checkout they lie beside it, so that they are easy to find;
# adding the checkout to this package's path makes `mtrain_cli.kernels` work there too, and never a top-level `kernels`.
_checkout = Path(__file__).resolve().parent.parent
if not (Path(__file__).parent / "kernels").is_dir() and (_checkout / "pyproject.toml").is_file():
    __path__.append(str(_checkout))


def install_command(extra: str) -> str:
    """What brings the packages of an extra, for the way in which this mtrain is installed: from a clone, or as a package."""
    if not (_checkout / "pyproject.toml").is_file():
        return f"pip install 'mtrain[{extra}]'"
    clone = "." if Path.cwd() == _checkout else _checkout
    return f"pip install -e {shlex.quote(f'{clone}[{extra}]')}"


def resource_dir(name: str) -> Path:
    """The folder of files that ship with mtrain: ``conf``, ``kernels`` or ``profiles``, in a wheel or a source checkout."""
    for base in (Path(__file__).resolve().parent, _checkout):
        if (base / name).is_dir():
            return base / name
    raise FileNotFoundError(
        f"mtrain's own folder '{name}' is missing; the installation is incomplete."
    )
