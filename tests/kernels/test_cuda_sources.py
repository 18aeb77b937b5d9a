"""mtrain's CUDA kernels compile for their target GPUs, if CUDA's compiler is installed."""

import shutil
import subprocess
from pathlib import Path

import pytest

from mtrain_cli import resource_dir

NVCC = shutil.which("nvcc")
SOURCES = sorted(resource_dir("kernels").glob("cuda/*.cu"))


def test_all_sources_are_present():
    assert [path.name for path in SOURCES] == ["block_lists.cu", "columns.cu", "merge.cu"]


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_source_compiles_without_warnings(tmp_path: Path, source, architecture):
    options = f"-arch={architecture} -std=c++17 -cubin -o".split()
    command = [str(NVCC), *options, str(tmp_path / "out.cubin"), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
