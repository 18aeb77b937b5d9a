"""Commands and reports of other packages, which are installed into a folder for the test."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mtrain_cli.commands.app import app
from mtrain_cli.commands.report import FolderReport
from mtrain_cli.config import plugins


def install(folder: Path, name: str, version: str, **project: Any) -> None:
    """Write what pip writes for a package whose modules are in the folder."""
    about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = (
        "\n".join((f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())))
        for group, entries in project["entry-points"].items()
    )
    (about / "entry_points.txt").write_text("\n".join(groups) + "\n")


def mtrain_with(folder: Path, *words: str, first: str = "") -> subprocess.CompletedProcess[str]:
    """Run mtrain in a new interpreter that finds the packages of a folder, after a line of code."""
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    code = f"{first}\nfrom mtrain_cli.__main__ import main; main()"
    environment = {**os.environ}
    environment.pop("TRITON_INTERPRET", None)  # `auto` would pick Triton's slow interpreter
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**environment, "PYTHONPATH": path, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_package_that_cannot_be_used_costs_a_line(tmp_path):
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    (tmp_path / "sound.py").write_text(
        "import typer\n"
        "several = typer.Typer()\n"
        "@several.command()\n"
        "def one(): print('one')\n"
        "@several.command()\n"
        "def two(): print('two')\n"
        "def strange(what: int | str): pass\n"
        "number = 1\n"
    )
    entries = {
        "broken": "broken:command",
        "missing": "sound:missing",
        "number": "sound:number",
        "strange": "sound:strange",
        "study": "sound:several",
        "train": "sound:several",
        "several": "sound:several",
    }
    install(tmp_path, "others", "1.0", **{"entry-points": {plugins.COMMANDS: entries}})
    found = mtrain_with(tmp_path, "several", "two")
    assert (found.returncode, found.stdout) == (0, "two\n")
    begin, lines = f"mtrain: warning: {plugins.COMMANDS}: ", found.stderr.splitlines()
    assert all(line.startswith(begin) for line in lines), found.stderr
    told = {line.removeprefix(begin).split()[0]: line for line in lines}
    assert sorted(told) == sorted(name for name in entries if name != "several")
    assert len(lines) == len(told)
    assert told["broken"].endswith(
        "broken = broken:command of others 1.0 cannot be loaded, so it is left out "
        "(ModuleNotFoundError: No module named 'no_such_module')"
    )
    for name in ("train", "study"):
        assert "mtrain has a command of this name" in told[name]


def test_a_package_that_fails_in_use_costs_a_line(tmp_path):
    (tmp_path / "leaves.py").write_text("import sys; sys.exit(3)\n")
    (tmp_path / "fails.py").write_text("def opened(folder): raise KeyError('boom')\n")
    entries = {
        plugins.COMMANDS: {"leaving": "leaves:command"},
        plugins.REPORTS: {"failing": "fails:opened"},
        "mtrain.analyzers": {"second": "fails:opened"},
    }
    install(tmp_path, "others", "1.0", **{"entry-points": entries})
    found = mtrain_with(tmp_path, "report", "step-128k-4xh200", "--no-html", "--no-csv")
    assert found.returncode == 0, found.stderr
    lines = found.stderr.splitlines()
    for name, problem in (
        ("leaving", "cannot be loaded, so it is left out (SystemExit: 3)"),
        ("failing", "cannot be used, so it is left out (KeyError: 'boom')"),
        ("second", "(ValueError: another package analyzes attention, and mtrain uses one)"),
    ):
        (line,) = (line for line in lines if f": {name} = " in line)
        assert line.endswith(problem)


@pytest.mark.slow
def test_the_first_package_keeps_a_name(tmp_path):
    install(
        tmp_path, "others", "1.0", **{"entry-points": {"mtrain.evaluations": {"lm-eval": "os:sep"}}}
    )
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from mtrain_cli.evaluation.runner import find; print(type(find('lm-eval')).__name__)"
    )
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True
    )
    assert found.stdout == "LmEval\n", found.stderr


def test_an_installation_without_the_studies_measures_patterns(tmp_path):
    none = (
        "from importlib import metadata; metadata.entry_points = lambda **_: metadata.EntryPoints()"
    )
    words = ("seq=256", "sparsity.block=16", "topology.device=cpu", "--rows", "8", "--steps", "1")
    found = mtrain_with(
        tmp_path, "profile", "sparsity", *words, f"run.dir={tmp_path}/heads", first=none
    )
    assert found.returncode == 0, found.stderr
    assert (tmp_path / "heads/summary.json").is_file()
    refused = mtrain_with(tmp_path, "profile", "sparsity", "--maps", "0:0", first=none)
    assert "No such option: --maps" in refused.stderr


def test_a_checkout_with_older_metadata_says_how_to_get_its_commands(monkeypatch):
    run = CliRunner().invoke
    hint = " This checkout has more: run `pip install --no-deps -e .` in it. See "
    for is_older in (False, True):
        if is_older:
            monkeypatch.setattr(plugins, "_all_installed", metadata.EntryPoints)
        refused = run(app, ["eval", "no-such"])
        assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
        assert (hint in refused.stderr) == is_older


def own_folder(folder: Path) -> FolderReport | None:
    def show(*, as_json: bool, html: bool) -> None:
        print(folder.name, as_json, html)

    return FolderReport("a book", "mtrain write", show) if folder.name == "book" else None


def test_a_package_shows_its_folders_in_a_report(tmp_path, monkeypatch):
    entry = metadata.EntryPoint("book", f"{__name__}:own_folder", plugins.REPORTS)
    monkeypatch.setattr(plugins, "_all_installed", lambda: metadata.EntryPoints([entry]))
    folder = tmp_path / "book"
    folder.mkdir()
    run = CliRunner().invoke
    assert run(app, ["report", str(folder), "--no-html"]).stdout == "book False False\n"
    assert run(app, ["report", str(folder), "--json"]).stdout == "book True True\n"
    for words, problem in (
        (["--out", "x"], "--out x: the page of a book is in its folder"),
        ([str(tmp_path)], f"{folder}: a report shows a book of `mtrain write` alone"),
    ):
        refused = run(app, ["report", str(folder), *words])
        assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
        assert problem in refused.stderr
