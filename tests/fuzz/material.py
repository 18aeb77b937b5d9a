"""Files for the commands to read, some of them damaged: a run, a measurement, a cluster, ..."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mtrain_cli

HERE = Path(__file__).resolve().parent
ROOT = Path(mtrain_cli.__file__).resolve().parents[1]


def make(folder: Path) -> Path:
    """Create the files by running commands, which takes a minute."""
    folder.mkdir(parents=True)
    (folder / "text").mkdir()
    for number in range(3):
        (folder / "text" / f"{number}.txt").write_text(f"hello {number} world " * 300)
    records = [{"ids": [72] * 90, "mask": [[0, 90, 0, 90, 3]], "at": [*range(90)]}] * 9
    (folder / "ids.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tiny = ["topology.device=cpu", "seq=256"]
    for words in (
        ["train", *tiny, "topology.workers=1", "run.dir=run", "model.num_layers=2", "train.steps=3",
         "profile.every=2", "train.checkpoint_every=2", "data.eval_sequences=2"],
        ["profile", "imbalance", "--attention-only", *tiny, "topology.workers=2",
         "sparsity=vertical_slash", "--steps", "1", "run.dir=meas"],
        ["profile", "kernels", "--seq", "256", "--density", "20%,5%", "--columns", "8",
         "--heads", "4/2", "--head-dim", "32", "--repeats", "1", "--out", "kernels.json"],
        ["profile", "non-attention", "model=tiny", "--seq", "64,128,256", "--repeats", "1",
         "--out", "non-attention.json"],
        ["data", "prepare", "text", "tokens"],
        ["data", "prepare", "ids.jsonl", "masked", "--tokens-key", "ids", "--mask-key", "mask",
         "--positions-key", "at"],
        ["checkpoint", "export", "run", "hf"],
    ):  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [sys.executable, "-m", "mtrain_cli", *words],
            cwd=folder,
            env=environment,
            check=True,
            capture_output=True,
        )
    return complete(folder)


def complete(folder: Path) -> Path:
    """Add the files that no command needs to create."""
    shutil.copy(ROOT / "conf/cluster/a100_4x8.yaml", folder / "cluster.yaml")
    shards = next(path for path in sorted((HERE.parent / "mds/shards").iterdir()) if path.is_dir())
    shutil.copytree(shards, folder / "mds", dirs_exist_ok=True)
    (folder / "run/.lock").write_text("process 1 on elsewhere\n")
    restart = (
        '{"time": 1.7e9, "reason": "rank 1 died", "rank": 1, "reached": 2, "step": 2, "workers": 2}'
    )
    (folder / "run/restarts.jsonl").write_text(f"{restart}\n" * 2)
    (folder / "weights.yaml").write_text("text: 1.0\n")
    return folder


def names() -> list[str]:
    """Return paths to give as arguments."""
    return [
        "run", "run/checkpoints/step-3", "meas", "meas/index.npz", "kernels.json",
        "non-attention.json", "cluster.yaml", "hf", "tokens", "text", "mds", "text/0.txt",
        "nowhere", "nowhere/out", "run/resolved.yaml", "weights.yaml", "run/profile",
    ]  # fmt: skip


def commands_for(material: Path) -> Iterator[tuple[Path, list[str], list[list[str]]]]:
    """Yield a source, its files to damage, and commands that read it; THIS is the damaged copy."""

    def inside(name: str, *patterns: str) -> list[str]:
        root = material / name
        paths = {path for pattern in patterns for path in root.glob(pattern) if path.is_file()}
        return sorted(str(path.relative_to(root)) for path in paths)

    tiny = ["model=tiny", "seq=256", "--no-files"]
    stand = [
        ".lock", "restarts.jsonl", "resolved.yaml", "state.json", "metrics.jsonl",
        "environment.json", "evaluations.jsonl", "overrides.txt",
    ]  # fmt: skip
    shown = [
        *inside("run", "profile/*", "profile/records/*", "checkpoints/*/manifest.json"),
        *stand,
    ]
    yield material / "run", [name for name in stand if (material / "run" / name).is_file()], [
        ["status", "THIS"], ["status", "THIS", "--json"], ["train", "--resume", "THIS", "--cfg"],
        ["train", "--resume", "THIS", "train.steps=9"],
        ["report", "THIS", "--json"],
    ]  # fmt: skip
    yield material / "run", [name for name in shown if (material / "run" / name).is_file()], [
        ["report", "THIS"], ["report", "THIS", "--json"], ["report", "THIS", "--no-html"],
        ["status", "THIS"], ["profile", "what-if", "THIS"],
    ]  # fmt: skip
    yield (
        material / "run",
        inside("run", "checkpoints/*/*", "resolved.yaml"),
        [
            ["checkpoint", "export", "THIS", "OUT"],
            ["generate", "THIS", "--prompt", "a", "--max-new", "2", "topology.device=cpu"],
            ["status", "THIS"],
        ],
    )
    yield material / "meas", inside("meas", "*.json", "*.npz", "*.parquet", "*.yaml"), [
        ["report", "THIS"], ["report", "THIS", "--json"], ["profile", "what-if", "THIS"],
        ["simulate", "--index", "THIS", "--no-files"],
        ["simulate", "validate", "THIS", "--no-files"],
    ]  # fmt: skip
    yield (
        material / "cluster.yaml",
        [""],
        [["simulate", *tiny, "--cluster", "THIS", "--layout", "striped", "--exchange", "ring"]],
    )
    words = "--calibration THIS --layout striped --exchange ring"
    calibration = ["simulate", *tiny, *words.split()]
    yield material / "kernels.json", [""], [calibration]
    yield material / "non-attention.json", [""], [calibration]
    yield material / "hf", ["config.json"], [
        ["checkpoint", "import", "THIS", "OUT"],
        ["train", "train.init_from=THIS", "--cfg"], ["train", "train.init_from=THIS", "--dry-run"],
    ]  # fmt: skip
    yield material / "hf", inside("hf", "*"), [
        ["checkpoint", "import", "THIS", "OUT"],
        ["generate", "THIS", "--prompt", "a", "--max-new", "2", "topology.device=cpu"],
    ]  # fmt: skip
    yield (
        material / "tokens",
        inside("tokens", "*"),
        [["data", "show", "THIS"], ["data", "prepare", str(material / "text"), "THIS"]],
    )
    keys = ["--tokens-key", "ids", "--mask-key", "mask", "--positions-key", "at"]
    yield material / "masked", inside("masked", "*"), [["data", "show", "THIS", "--check"]]
    yield material / "ids.jsonl", [""], [["data", "prepare", "THIS", "OUT", *keys]]
    yield (
        material / "mds",
        inside("mds", "*"),
        [["data", "show", "THIS"], ["data", "show", "THIS", "--check"]],
    )
    yield (
        material / "weights.yaml",
        [""],
        [["train", "data=text", f"data.path={material}", "data.mix=THIS", "--cfg"]],
    )
