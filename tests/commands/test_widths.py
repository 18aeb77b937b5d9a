"""What ships, as it is shown in a terminal of 80 and of 120 columns: no word is broken, and each ms has the name of its definition."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from mtrain_cli.commands import app as command_line
from mtrain_cli.reporting import tables

NAMES = {"hierarchical_ring", "hierarchical_all_gather", "vertical_slash", "context_parallel", "all_gather"}
VALIDATE = ("simulate", "--validate", "predicted-4xh200", "--prediction", "predicted-4xh200/predictions", "--no-files")
CASES = {"table": ("report", "layer-4xh200"), "profile": ("report", "real-512k-4xh200"), "validation": VALIDATE}
WHOLE = ("recorded by ", "sha256 ", "figures ")  # to be copied


def shown(*words: str, columns: int) -> str:
    found = CliRunner(env={"COLUMNS": str(columns), "TERM": "dumb"}).invoke(command_line.app, list(words), prog_name="mtrain")
    assert found.exit_code == 0, found.output
    return found.stdout


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", [*(f"{name}-{columns}" for name in CASES for columns in (80, 120)), "sentences-100"])
def test_words_stay_whole(name):
    what, _, columns = name.partition("-")
    columns = int(columns)
    # At 100 columns names of this one would have to be broken in a table.
    words = CASES.get(what, ("report", "predicted-4xh200"))
    text = shown(*words, columns=columns)
    lines = [line for line in text.splitlines() if not line.startswith(WHOLE)]
    assert max(map(len, lines)) <= columns or words[1] == "real-512k-4xh200"  # whose first line says what it is
    assert "…" not in text
    found = set(re.findall(r"\b(?:hierarchical|vertical|context|all)_\w*|\w*_(?:gather|ring|slash|parallel)\b", text))
    assert found <= NAMES
    assert "hierarchical_ring" in found
    if what == "sentences":
        assert "128k, 2 samples" in text, "a table would lose its last column"
    # Nothing of a name on a line of its own.
    assert not re.search(r"\bhierarchica(?!l_)|\bvertical_sl(?!ash)|\bcontext_par(?!allel)", text)


def test_the_same_ms_have_the_same_name_in_a_report_and_in_a_validation():
    said = json.loads(shown(*VALIDATE, "--json", columns=80))
    text = " ".join(shown("report", "predicted-4xh200", columns=80).split())
    for case in said["cases"]:
        forward, backward = (case["passes"][name] for name in ("forward", "backward"))
        assert forward["measured_without_records"]
        assert backward["measured_without_records"]
        # With records, and in brackets without: what was compared.
        ms = [tables.ms(of[name]) for of in (forward, backward) for name in ("recorded_ms", "measured_ms")]
        line = f"ms of a layer's pass: forward {ms[0]} ({ms[1]}), backward {ms[2]} ({ms[3]})"
        assert line in text.partition(f" {case['case']}, 2 samples ")[2][:400], case["case"]
        assert ms[0] != ms[1]
    assert "pass ms: of recorded iterations, the mean; in brackets bare: without records, the median" in text
    page = " ".join(shown(*VALIDATE, columns=80).split())
    assert "measured without records, the median (`mtrain report`: bare); ±: spread of recorded iterations" in page
    # Of several layers there is one of the two alone.
    several = " ".join(shown("report", "real-512k-4xh200", columns=80).split())
    assert "bare" not in several
