"""A file or a name that does not exist is refused before torch, which takes seconds to import."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = None; "
    "from mtrain_cli.commands.app import app; app(sys.argv[1:], prog_name='mtrain')"
)


REFUSED = [
    ("simulate --index text", "text: not an index file of mtrain"),
    ("simulate --index nope model=tiny seq=4k,8k", "index=nope: no such index"),
    ("simulate --calibration text", "--calibration text: not readable as JSON"),
    ("simulate recommend --calibration empty", "--calibration empty: holds no times"),
    ("simulate validate x --calibration nope", "--calibration nope: no such calibration"),
    ("profile non-attention modl=x", "modl=x: no key or group is called modl"),
    ("profile sparsity modl=x", "modl=x: no key or group is called modl"),
    ("checkpoint export run out", "run: holds no checkpoint"),
    ("checkpoint import nope out", "nope/config.json: no such file"),
    ("checkpoint verify nope", "nope: not a run or a run's checkpoint"),
    ("generate nope --prompt a", "nope: no such folder"),
]
MORE = [  # other commands and options whose checks the same functions make
    ("simulate --index nope", "index=nope: no such index"),
    ("simulate recommend --index nope model=tiny", "index=nope: no such index"),
    ("simulate --calibration nope.json", "--calibration nope.json: no such calibration"),
    ("simulate modl=x seq=4k,8k", "modl=x: no key or group is called modl"),
    ("checkpoint export nope out", "nope: not a run or a run's checkpoint"),
    ("checkpoint export nope .", ".: already exists"),
    ("generate nope --prompt-file nope.txt", "--prompt-file nope.txt: no such file"),
    ("generate nope --prompt a --top-p 2", "--top-p 2: must be above 0 and at most 1"),
]


@pytest.mark.parametrize(
    ("command", "problem"),
    [*REFUSED, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)],
)
def test_a_wrong_name_is_refused_before_slow_imports(tmp_path, command, problem):
    (tmp_path / "text").write_text("no file of mtrain")
    (tmp_path / "empty").write_text("{}")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "resolved.yaml").write_text("")
    words = [sys.executable, "-c", WITHOUT_TORCH, *command.split()]
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert result.stderr.startswith(f"mtrain: {problem}")


def test_data_are_prepared_and_shown_without_torch(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    for command in ("data prepare a.txt out", "data show out --check"):
        words = [sys.executable, "-c", WITHOUT_TORCH, *command.split()]
        result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr
