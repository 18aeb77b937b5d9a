"""Packages import downward only, no files import each other in a circle, and no code is dead."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Called by a library, by name, or by the shell; or part of a contract that a library prescribes.
CALLED_FROM_OUTSIDE = {
    "mtrain_cli/commands": "commands that Typer registers",
    "mtrain_cli/config/compose.py": "Hydra's search path plugin",
    "mtrain_cli/launch/agent.py": "torch's elastic agent",
    "mtrain_cli/launch/rendezvous.py": "torch's rendezvous",
    "mtrain_cli/launch/safe_pickle.py": "pickle",
    "mtrain_cli/training/checkpoint_files.py": "torch's DCP and file objects",
}


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return groups of modules that import each other (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = lowest[module] = len(index)
        stack.append(module)
        for other in imports[module]:
            if other not in index:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], index[other])
        if lowest[module] == index[module]:
            at = stack.index(module)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1:
                found.append(sorted(group))

    for module in imports:
        if module not in index:
            visit(module)
    return found


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_no_files_import_each_other_in_a_circle():
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph("mtrain_cli", exclude_type_checking_imports=True, cache_dir=None)
    assert circles({m: graph.find_modules_directly_imported_by(m) for m in graph.modules}) == []


def test_packages_import_downward_only():
    pytest.importorskip("importlinter")
    result = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports; exit(lint_imports())"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_no_code_is_dead():
    """vulture finds functions, methods, classes and properties that nothing in the package uses."""
    pytest.importorskip("vulture")
    result = subprocess.run(
        [sys.executable, "-m", "vulture", "mtrain_cli", "kernels", "--exclude", "plotly"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    dead = [
        line
        for line in result.stdout.splitlines()
        if any(f"unused {kind} " in line for kind in ("function", "method", "class", "property"))
        and not line.startswith(tuple(CALLED_FROM_OUTSIDE))
    ]
    assert dead == []
