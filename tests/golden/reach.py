"""Everything of mtrain that the golden traces touch: its command line, two imports, and the names in the files that it leaves.

Names of modules, columns and keys stand here and nowhere else in this package. What a rename changes is put right here; the recorded
files have the names on the right-hand side below, which stay.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Names in metrics.jsonl and evaluations.jsonl -> names in the recorded files.
_STEP = {"loss": "loss", "grad_norm": "grad_norm", "lr": "lr", "density": "density", "tokens": "tokens", "consumed": "consumed"}
# Columns of records.parquet -> names in the recorded files, and the phases that hold work or messages.
_COLUMNS = {
    name: name
    for name in (
        "case", "iteration", "micro", "layer", "direction", "step", "rank", "phase", "link", "payload", "shard", "peer",
        "blocks", "columns", "pairs", "flop", "bytes", "dur_us",
    )
}  # fmt: skip
_WORK = ("attention", "columns")
_MESSAGES = ("send", "receive")


class CommandError(RuntimeError):
    """A command ended with another exit code than expected."""


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def run(words: Sequence[str], folder: Path, code: int = 0) -> str:
    """`mtrain WORDS` in this process, with ``folder`` as its working directory -> what it prints.

    Raises:
        CommandError: it ends with another exit code than ``code``.
    """
    from typer.testing import CliRunner

    from mtrain_cli.commands.app import app

    argv, errors = sys.argv, io.StringIO()
    sys.argv = ["mtrain", *words]
    try:
        with contextlib.chdir(folder), contextlib.redirect_stderr(errors):
            result = CliRunner().invoke(app, list(words), prog_name="mtrain")
    finally:
        sys.argv = argv
    if result.exit_code != code:
        said = (result.stderr + errors.getvalue() + (result.stdout if not result.stderr else ""))[-2000:]
        raise CommandError(f"mtrain {' '.join(words)}: exit code {result.exit_code}: {said or result.exception!r}")
    return result.stdout


def warm_up() -> None:
    """Import what a training on a CPU imports, so that processes forked from this one start in a moment."""
    import torch
    import torch._dynamo
    import torch.distributed.fsdp

    import mtrain_cli.commands.app
    import mtrain_cli.training.loop  # noqa: F401

    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):
        mtrain_cli.commands.app.app(["train", "--cfg"], prog_name="mtrain", standalone_mode=False)


def main(words: Sequence[str]) -> None:
    """`mtrain WORDS` as the process that this one is; ends it."""
    from mtrain_cli.__main__ import main as product

    sys.argv = ["mtrain", *words]
    product()
    sys.exit(0)


def steps(run_dir: Path) -> dict[str, list[Any]]:
    """What metrics.jsonl of a run says of each step, by name."""
    rows = _lines(run_dir / "metrics.jsonl")
    return {ours: [row[theirs] for row in rows] for theirs, ours in _STEP.items()}


def evaluations(run_dir: Path) -> list[Any]:
    """Held-out losses, whole and by position."""
    found = _lines(run_dir / "evaluations.jsonl")
    return [[row["step"], row["loss"], row["tokens"], *(bucket["loss"] for bucket in row["buckets"])] for row in found]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def memory(words: Sequence[str]) -> dict[str, Any]:
    """Bytes of a worker as `mtrain train WORDS --dry-run` estimates them, which prints them rounded."""
    from mtrain_cli.config.compose import compose
    from mtrain_cli.training.planning import plan

    found = plan(compose(list(words), plan=True))
    estimate = found.memory
    return {
        "peak": estimate.allocated,
        "parts": {name: value for name, value in estimate.peak.parts.items() if value},
        "moments": [moment.allocated for moment in estimate.moments],
        "reserve": estimate.reserve,
        "host": estimate.host,
        "saving": estimate.saving,
        "exchange": found.exchange.label,
        "kernel": found.kernel,
        "layout": found.layout.name,
        "moved": [found.moved.forward, found.moved.backward, found.moved.weights, found.moved.host],
        "checkpoint": found.checkpoint,
        "model_flop": found.flops.model,
        "executed_flop": found.flops.executed,
    }


def records(folder: Path) -> dict[str, np.ndarray]:
    """Rows of a profile or simulation as arrays, words as text."""
    import pyarrow.parquet as pq

    table = pq.read_table(folder / "records.parquet", columns=list(_COLUMNS))
    return {ours: table.column(theirs).to_numpy(zero_copy_only=False) for theirs, ours in _COLUMNS.items()}


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def work(rows: Mapping[str, np.ndarray], case: int) -> dict[str, Any]:
    """Exact work of a case: totals by pass, and a digest of every (pass, layer, step, rank)."""
    return _counted(rows, case, _WORK, ("direction", "layer", "step", "rank"), ("pairs", "blocks", "columns", "flop"), ("direction",))


def traffic(rows: Mapping[str, np.ndarray], case: int) -> dict[str, Any]:
    """Exact bytes of a case: totals by (pass, queue, payload, sent or received), and a digest of every message."""
    key = ("direction", "link", "payload", "phase", "layer", "step", "rank", "shard", "peer")
    return _counted(rows, case, _MESSAGES, key, ("bytes",), ("direction", "link", "payload", "phase"))


def structure(rows: Mapping[str, np.ndarray], case: int) -> dict[str, Any]:
    """Which rows a profile has, without their times: how many by (pass, phase), and a digest of all."""
    key = ("direction", "phase", "link", "payload", "iteration", "micro", "layer", "step", "rank", "shard", "peer")
    phases = tuple(sorted(set(rows["phase"].tolist())))
    return _counted(rows, case, phases, key, ("rows", "pairs", "blocks", "columns", "bytes"), ("direction", "phase"))


def _counted(
    rows: Mapping[str, np.ndarray], case: int, phases: Iterable[str], key: Sequence[str], numbers: Sequence[str], by: Sequence[str]
) -> dict[str, Any]:
    mine = (rows["case"] == case) & np.isin(rows["phase"].astype(str), list(phases))
    columns = [rows[name][mine].tolist() for name in key]
    values = [([1] * int(mine.sum())) if name == "rows" else rows[name][mine].astype(np.int64).tolist() for name in numbers]
    sums: dict[tuple, list[int]] = {}
    for place, counts in zip(zip(*columns, strict=True), zip(*values, strict=True), strict=True):
        known = sums.setdefault(place, [0] * len(numbers))
        for number, count in enumerate(counts):
            known[number] += count
    if len(numbers) > 1:  # steps without work are told in one way or another
        sums = {place: counts for place, counts in sums.items() if any(counts)}
    totals: dict[str, list[int]] = {}
    for place, counts in sums.items():
        name = " ".join(str(place[key.index(part)]) for part in by if place[key.index(part)] != "")
        known = totals.setdefault(name, [0] * (1 + len(numbers)))
        known[0] += 1
        for number, count in enumerate(counts):
            known[1 + number] += count
    digest = hashlib.sha256(json.dumps(sorted([*map(str, place), counts] for place, counts in sums.items())).encode()).hexdigest()[:16]
    return {"digest": digest, "of": ["places", *numbers], **dict(sorted(totals.items()))}
