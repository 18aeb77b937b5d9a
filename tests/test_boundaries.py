"""Packages import downward only, no files import each other in a circle, and no code is dead."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from built_wheel import PACKAGES

ROOT = Path(__file__).parents[1]
# Called by a library, by name, or by the shell; or part of a contract that a library prescribes.
CALLED_FROM_OUTSIDE = {
    "mtrain_cli/api.py": "Python code of users",
    "mtrain_cli/commands": "commands that Typer registers",
    "mtrain_cli/composition/yaml_groups.py": "Hydra's search path plugin",
    "mtrain_cli/data/text_files.py": "io.BufferedReader",
    "mtrain_cli/evaluation/retrieval.py": "the Python interface of docs/evaluation.md",
    "mtrain_cli/integrations": "Python code of users, the Trainers and axolotl",
    "mtrain_cli/launch/safe_pickle.py": "pickle",
    "mtrain_cli/library": "Python code of users",
    "mtrain_cli/parallel/gather.py": "config.exchanges names the functions",
    "mtrain_cli/profiling/imbalance_benchmark.py": "measurement.TARGETS names the functions",
    "mtrain_cli/parallel/fsdp.py": "FSDP2's interface of collectives",
    "mtrain_cli/parallel/ring.py": "config.exchanges names the functions",
    "mtrain_cli/training/checkpoint_files.py": "torch's DCP and file objects",
    "mtrain_extras/lm_eval": "lm-eval's interface of models, and entry points",
    "mtrain_extras/ruler": "the Python interface of docs/evaluation.md, and entry points",
    "mtrain_extras/chat": "the entry points of pyproject.toml",
    "mtrain_extras/masks": "the entry points of pyproject.toml",
    "mtrain_extras/mds": "the entry points of pyproject.toml",
    "mtrain_extras/bench": "entry points, measurement.entry_point and `derived`",
    "mtrain_extras/live": "the entry points of pyproject.toml, and http.server",
    "mtrain_extras/start": "the entry points of pyproject.toml",
    "mtrain_extras/trackers": "the entry points of pyproject.toml",
    "mtrain_extras/methods": "the entry points of pyproject.toml",
    "mtrain_extras/validate": "the entry points of pyproject.toml",
    "mtrain_extras/watch": "the entry points of pyproject.toml",
    "mtrain_extras/places": "the entry points of pyproject.toml",
    "mtrain_extras/lora": "the entry points of pyproject.toml",
    "mtrain_extras/studies/study.py": "Typer, and the entry points of pyproject.toml",
}


def test_no_files_import_each_other_in_a_circle():
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph(
        *PACKAGES,
        exclude_type_checking_imports=True,
        cache_dir=None,
    )
    imports = {m: graph.find_modules_directly_imported_by(m) for m in graph.modules}
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the modules


def test_no_test_files_share_a_name():
    # pytest would refuse the second, and a spawned process would import the first.
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


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
    """vulture finds functions, methods, classes and properties that no package or script uses."""
    pytest.importorskip("vulture")
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "vulture",
            *PACKAGES,
            "kernels",
            "profiles",
            "--exclude",
            "plotly",
        ],
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
