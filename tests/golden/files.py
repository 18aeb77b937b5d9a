"""Files of an earlier mtrain: a checkpoint that resumes, and profiles that read as before."""

from __future__ import annotations

import io
import json
import socket
import tarfile
import tempfile
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from golden import corpus, profiles, reach, workers

FOLDER = Path(__file__).parent / "files"
CHECKPOINT, PROFILE = FOLDER / "checkpoint.tar.xz", FOLDER / "profile.tar.xz"
_MODEL = (
    "model.hidden_size=16 model.num_layers=2 model.num_heads=2 model.num_kv_heads=1 "
    "model.head_dim=8 model.intermediate_size=32 "
    "model.vocab_size=264"
)
_TRAINING = (
    "data=text data.path=corpus/text.jsonl seq=256 topology.device=cpu topology.block_size=32 "
    f"{_MODEL} train.steps=2 optim.schedule_steps=5 "
    "optim.warmup_steps=1 topology.exchange=ring sparsity=vertical_slash sparsity.block=32 "
    "sparsity.last_q=32 sparsity.min_columns=8 "
    "sparsity.max_columns=32 sparsity.p_v=0.6 sparsity.p_s=0.6 run.dir=run"
)
_KEPT = (
    "resolved.yaml",
    "metrics.jsonl",
    "overrides.txt",
    "checkpoints",
    "records.parquet",
    "summary.json",
    "index.npz",
)
_VALIDATE = "simulate validate --json --no-files"
# Name -> a command that prints JSON. This package's profile is in the working directory, the ones
# that ship with mtrain are in PROFILES.
_READ: dict[str, str] = {
    "report of a profile": "report profile --json",
    "what-if of a profile": "profile what-if profile --json --exchange ring,all_gather "
    "--workers 2,4",
    "validation of a profile": f"{_VALIDATE} profile",
    "report of recorded steps on GPUs": "report PROFILES/fixed-512k-4xh200 --json",
    "report of a recorded whole step": "report PROFILES/step-256k-4xh200 --json",
    "report of real indices on GPUs": "report PROFILES/real-512k-4xh200 --json",
    "what-if of real indices": "profile what-if PROFILES/real-512k-4xh200 --json --workers 4,8 "
    "--per-node 4 --exchange ring,hierarchical_ring",
    "what-if of fixed indices": "profile what-if PROFILES/fixed-512k-4xh200 --json --workers 4 "
    "--exchange ring,all_gather,ulysses",
    "validation against 4 H200": f"{_VALIDATE} PROFILES/predicted-4xh200 --prediction "
    "PROFILES/predicted-4xh200/predictions",
}
# The same profile on other clusters; its sequences pack several documents.
_ELSEWHERE: dict[str, str] = {
    "profile of documents on H100s": "--cluster h100_4x8 --nodes 1 --workers 4 --layout "
    "zigzag,striped --exchange ring,all_gather,ulysses",
    "profile of documents on 2 nodes": "--cluster a100_4x8 --workers 16 --layout striped "
    "--exchange ring,hierarchical_ring",
}
_RESUMED, _CONTINUED = "checkpoint resumed", "checkpoint resumed on 1 worker"
NAMES = (_RESUMED, _CONTINUED, *_READ, *_ELSEWHERE)


def make() -> None:
    """Recreate the checkpoint and the profile.

    Do so only if their format changes on purpose: being old is their purpose.
    """
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus.write(folder / "corpus")
        workers.server().run(["train", *_TRAINING.split()], 2, folder)
        _pack(folder / "run", CHECKPOINT)
        asked = profiles.Case(
            2,
            f"--steps 2 {profiles.SMALL} {profiles.LINES}",
            "dense,vertical_slash",
            "striped",
            "ring,all_gather",
        )
        profiles.make(asked, folder, folder / "profile")
        _pack(folder / "profile", PROFILE)


def compute(only: Collection[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read the old files with the current mtrain."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _unpack(PROFILE, folder)
        reads: dict[str, Callable[[], dict[str, Any]]] = {
            **{one: partial(_printed, words, folder) for one, words in _READ.items()},
            **{one: partial(_elsewhere, words, folder, one) for one, words in _ELSEWHERE.items()},
            _RESUMED: lambda: _resumed(folder / "2", 2),
            _CONTINUED: lambda: _resumed(folder / "1", 1),
        }
        yield from ((one, reads[one]()) for one in only)


def _printed(words: str, folder: Path) -> dict[str, Any]:
    output = reach.run(words.replace("PROFILES", str(reach.PROFILES)).split(), folder)
    return reach.numbers(json.loads(output.replace(str(reach.PROFILES), "PROFILES")))


def _elsewhere(words: str, folder: Path, name: str) -> dict[str, Any]:
    out = folder / name.replace(" ", "-")
    output = reach.run(
        ["simulate", "--index", "profile", *words.split(), "--json", "--out", str(out)], folder
    )
    rows = reach.records(out)
    return {
        str(number): {
            **row,
            "spent": reach.spent(rows, number),
            "counts": reach.work(rows, number),
            "bytes": reach.traffic(rows, number),
        }
        for number, row in enumerate(reach.predicted(json.loads(output)))
    }


def _resumed(folder: Path, count: int) -> dict[str, Any]:
    folder.mkdir()
    corpus.write(folder / "corpus")
    _unpack(CHECKPOINT, folder)
    workers.server().run(["train", "--resume", "run", "train.steps=5"], count, folder)
    return reach.steps(folder / "run")


def _pack(folder: Path, archive: Path) -> None:
    """Archive a folder without paths and the name of this machine."""
    with tarfile.open(archive, "w:xz") as file:
        for path in sorted(
            path
            for name in _KEPT
            for path in (folder / name, *(folder / name).rglob("*"))
            if path.is_file()
        ):
            content = path.read_bytes()
            if path.suffix in (".yaml", ".json", ".jsonl", ".txt"):
                content = content.replace(f"{folder.parent}/".encode(), b"").replace(
                    json.dumps(socket.gethostname()).encode(), b'"host"'
                )
            entry = tarfile.TarInfo(str(path.relative_to(folder.parent)))
            entry.size = len(content)
            file.addfile(entry, io.BytesIO(content))


def _unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(archive.read_bytes())) as file:
        file.extractall(folder, filter="data")
