"""An installation contains the shipped files and makes only mtrain's two packages importable."""

import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import mtrain_cli
from mtrain_cli import install_command, resource_dir

REPOSITORY = Path(__file__).resolve().parents[1]
SHIPPED = ("conf", "kernels", "profiles")
PACKAGES = ("mtrain_cli", "mtrain_studies")

# Run by a new interpreter outside the repository, which ignores PYTHONPATH.
PROBE = """
import importlib.util, sys
for name in ("conf", "kernels", "profiles", "tests"):
    assert importlib.util.find_spec(name) is None, f"{name} is a top-level import"
from mtrain_cli import resource_dir
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.groups import open_groups
import mtrain_cli.kernels
for name in ("conf", "kernels", "profiles"):
    print(name, resource_dir(name))
for group, options in open_groups().options.items():
    for option in options:
        if (group, option) == ("model", "auto"):
            continue  # needs the folder of train.init_from
        more = ["data.path=/",
            "data.mix={usr: 1}"] if group == "data" and option != "stdlib" else []
        compose([f"{group}={option}", *more], plan=True)
print("composed", compose(["model=qwen3b"]).model.name)
from mtrain_cli.commands.app import app
from mtrain_studies.outcomes import predictions_file
print("studies", predictions_file(), [group.name for group in app.registered_groups])
"""


def test_shipped_folders_are_found_in_the_checkout():
    assert [resource_dir(name) for name in SHIPPED] == [REPOSITORY / name for name in SHIPPED]
    with pytest.raises(FileNotFoundError, match="'nosuch' is missing"):
        resource_dir("nosuch")


def test_the_install_command_for_an_extra_works_here(monkeypatch, tmp_path):
    monkeypatch.chdir(REPOSITORY)
    assert install_command("cuda") == "pip install -e '.[cuda]'"
    monkeypatch.chdir(tmp_path)
    assert shlex.split(install_command("cuda")) == ["pip", "install", "-e", f"{REPOSITORY}[cuda]"]
    monkeypatch.setattr(mtrain_cli, "_checkout", tmp_path)
    assert install_command("cuda") == "pip install 'mtrain[cuda]'"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the sources, so that building does not write into the checkout."""
    folder = tmp_path_factory.mktemp("source")
    for name in (*PACKAGES, *SHIPPED, "tests"):
        shutil.copytree(
            REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "hatch_build.py", "LICENSE"):
        shutil.copy(REPOSITORY / name, folder / name)
    readme = REPOSITORY / "README.md"
    (folder / "README.md").write_text(readme.read_text() if readme.is_file() else "mtrain\n")
    return folder


def build(source: Path, out: Path, kind: str) -> Path:
    """Build a wheel with pyproject.toml's backend.

    kind: ``build_wheel`` or ``build_editable``.
    """
    code = f"import hatchling.build as backend; print(backend.{kind}({str(out)!r}))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return out / result.stdout.split()[-1]


def install(wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)


def probe(target: Path, cwd: Path) -> str:
    """Return the output of PROBE with ``target`` as a site folder, in which .pth files count."""
    # An editable install of mtrain in this interpreter must not hide the one under test.
    prelude = (
        "import site, sys; sys.modules.pop('_editable_impl_mtrain', None); "
        f"sys.path.insert(0, {str(target)!r})"
    )
    code = f"{prelude}; site.addsitedir({str(target)!r})\n{PROBE}"
    result = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_wheel_carries_its_resources_inside_the_package(source, tmp_path):
    pytest.importorskip("hatchling")
    wheel = build(source, tmp_path, "build_wheel")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == set(PACKAGES)
    for folder in SHIPPED:
        shipped = {
            str(path.relative_to(source)) for path in (source / folder).rglob("*") if path.is_file()
        }
        packed = {
            name.removeprefix("mtrain_cli/")
            for name in names
            if name.startswith(f"mtrain_cli/{folder}/")
        }
        assert {name for name in shipped if not Path(name).name.startswith(".")} <= packed
    for name in ("plotly/plotly-cartesian.min.js.gz", "plotly/LICENSE", "page/page.html"):
        assert f"mtrain_cli/reporting/{name}" in names
    assert "mtrain_studies/predictions.yaml" in names
    assert any("dist-info/licenses/" in name and "plotly" in name for name in names)
    metadata = next(name for name in names if name.endswith("entry_points.txt"))
    assert "mtrain = mtrain_cli.__main__:main" in zipfile.ZipFile(wheel).read(metadata).decode()

    site = tmp_path / "site"
    install(wheel, site)
    text = probe(site, tmp_path)
    assert all(f"{name} {site}/mtrain_cli/{name}\n" in text for name in SHIPPED)
    assert "composed qwen3b" in text
    assert f"studies {site}/mtrain_studies/predictions.yaml" in text
    assert "'study'" in text


@pytest.mark.slow
def test_an_editable_install_finds_the_resources_in_the_checkout(source, tmp_path):
    pytest.importorskip("hatchling")
    site = tmp_path / "site"
    install(build(source, tmp_path, "build_editable"), site)
    text = probe(site, tmp_path)
    assert all(f"{name} {source}/{name}\n" in text for name in SHIPPED)
    assert "composed qwen3b" in text
    assert f"studies {source}/mtrain_studies/predictions.yaml" in text
    assert "'study'" in text
