"""An installation contains the shipped files and makes only mtrain's two packages importable."""

import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from built_wheel import PACKAGES, REPOSITORY, SHIPPED, build, copy_sources
from packaging.specifiers import SpecifierSet

import mtrain_cli
from mtrain_cli import install_command, resource_dir

in_checkout = pytest.mark.skipif(
    not (REPOSITORY / ".github").is_dir(), reason="an sdist or an image, without the files"
)

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
from mtrain_extras.studies.outcomes import predictions_file
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
    return copy_sources(tmp_path_factory.mktemp("source"))


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
        unread = {name for name in shipped if name.endswith((".png", ".tar.xz", ".gitkeep"))}
        assert packed == shipped - unread
    assert not [name for name in names if name.endswith((".png", ".tar.xz", ".pyc"))]
    assert "mtrain_cli/profiles/learning/tier-a.json" in names
    assert "mtrain_cli/py.typed" in names
    for name in ("plotly/plotly-cartesian.min.js.gz", "plotly/LICENSE", "page/page.html"):
        assert f"mtrain_cli/reporting/{name}" in names
    assert "mtrain_extras/studies/predictions.yaml" in names
    assert any("dist-info/licenses/" in name and "plotly" in name for name in names)
    metadata = next(name for name in names if name.endswith("entry_points.txt"))
    assert "mtrain = mtrain_cli.__main__:main" in zipfile.ZipFile(wheel).read(metadata).decode()

    site = tmp_path / "site"
    install(wheel, site)
    text = probe(site, tmp_path)
    assert all(f"{name} {site}/mtrain_cli/{name}\n" in text for name in SHIPPED)
    assert "composed qwen3b" in text
    assert f"studies {site}/mtrain_extras/studies/predictions.yaml" in text
    assert "'study'" in text


@in_checkout
def test_metadata_names_what_the_documents_name():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    page = (REPOSITORY / "docs/install.md").read_text()
    for extra in extras:
        assert f"`{extra}`" in page, extra
    (torch,) = (each for each in project["dependencies"] if each.startswith("torch"))
    allowed = SpecifierSet(torch.removeprefix("torch"))
    assert all(version in allowed for version in ("2.11.0", "2.13.0", "2.14.1"))
    assert torch in (REPOSITORY / "Dockerfile").read_text()
    for text in ("CITATION.cff", ".github/workflows/release.yml"):
        assert (
            project["urls"]["Homepage"].removeprefix("https://github.com/")
            in (REPOSITORY / text).read_text()
        )
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert citation["version"] == project["version"] == mtrain_cli.__version__


@in_checkout
def test_the_image_has_every_file_that_its_installation_needs():
    """It copies what the sdist has, which .dockerignore must not leave out, and adds the extras."""
    lines = (REPOSITORY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    copied = {word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}
    copied = {word for word in copied if not word.startswith("--")}
    build = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    wanted = {*build["targets"]["sdist"]["include"], "pyproject.toml"}
    wanted -= {"Dockerfile", ".dockerignore"}
    assert wanted <= copied
    assert all((REPOSITORY / name).exists() for name in copied)
    kept = (REPOSITORY / ".dockerignore").read_text().splitlines()
    assert {line.removeprefix("!") for line in kept if line.startswith("!")} == copied
    installs = " ".join(line for line in lines if "pip install" in line)
    assert {"cuda", "hopper", "hf", "eval", "data"} <= set(re.split(r"[\[\],]", installs))
    assert any(line.startswith("USER ") and line.split()[1] != "root" for line in lines)


@pytest.mark.slow
def test_an_editable_install_finds_the_resources_in_the_checkout(source, tmp_path):
    pytest.importorskip("hatchling")
    site = tmp_path / "site"
    install(build(source, tmp_path, "build_editable"), site)
    text = probe(site, tmp_path)
    assert all(f"{name} {source}/{name}\n" in text for name in SHIPPED)
    assert "composed qwen3b" in text
    assert f"studies {source}/mtrain_extras/studies/predictions.yaml" in text
    assert "'study'" in text
