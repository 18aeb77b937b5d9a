"""All that the golden traces know of mtrain: its command line, some imports, names in its files.

Only this module knows names of modules, columns and keys. The recorded files keep these names: if
mtrain renames one, this module translates.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Strings that mtrain has renamed since the files were recorded (new -> old): phases, passes, links,
# payloads, parts of a step, keys of JSON documents.
_RENAMED: dict[str, str] = {}
# Names in metrics.jsonl, columns of records.parquet, and parts of a memory estimate.
_STEP = ["loss", "grad_norm", "lr", "density", "tokens", "consumed"]
_COLUMNS = [
    "case",
    "iteration",
    "micro",
    "layer",
    "direction",
    "step",
    "rank",
    "phase",
    "link",
    "payload",
    "shard",
    "peer",
    "blocks",
    "columns",
    "pairs",
    "flop",
    "bytes",
    "dur_us",
]
_PARTS = [
    "parameters",
    "optimizer",
    "gradients",
    "working_weights",
    "activations",
    "layer",
    "index",
    "exchange",
    "loss",
    "inputs",
]
_EXCHANGE = ["name", "heads", "chunks", "prefetch", "circulates", "shared_columns"]
_MOVED = ["forward", "backward", "weights", "host"]
_TRAIN = [
    "activation_checkpoint",
    "checkpoint_keep",
    "keep_mlp",
    "offload_activations",
    "tile_mib",
    "loss_chunk_mib",
    "shard",
]
_DEGREES = ["worker_time", "step_time", "worker_work", "step_work"]
_WORK = ("attention", "columns")
_MESSAGES = ("send", "receive")
_GAP, _WAIT = "gap", "wait"


PROFILES = Path(__file__).parents[2] / "profiles"


class CommandError(RuntimeError):
    """A command ended with an unexpected exit code."""


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def run(words: Sequence[str], folder: Path, code: int = 0) -> str:
    """Run `mtrain WORDS` in this process, in `folder`, and return what it prints.

    Raises:
        CommandError: its exit code is not `code`.
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
        message = (
            result.stderr + errors.getvalue() + (result.stdout if not result.stderr else "")
        )[-2000:]
        reason = message or repr(result.exception)
        raise CommandError(f"mtrain {' '.join(words)}: exit code {result.exit_code}: {reason}")
    return result.stdout


def warm_up() -> None:
    """Import what a training imports, so that processes forked from this one start fast."""
    import torch
    import torch._dynamo
    import torch.distributed.fsdp

    import mtrain_cli.commands.app
    import mtrain_cli.training.loop

    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):
        mtrain_cli.commands.app.app(["train", "--cfg"], prog_name="mtrain", standalone_mode=False)


def slow_down(seconds: float) -> None:
    """Make this process sleep in the part of each layer after attention."""
    from mtrain_cli.model import parallelize

    whole = parallelize.feed_forward

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return whole(*arguments, **options)

    parallelize.feed_forward = slow


def main(words: Sequence[str]) -> None:
    """Run `mtrain WORDS` as this process, and exit."""
    from mtrain_cli.__main__ import main as product

    sys.argv = ["mtrain", *words]
    product()
    sys.exit(0)


def steps(run_dir: Path) -> dict[str, list[Any]]:
    """Return the metrics of each step of a run, by name."""
    rows = _lines(run_dir / "metrics.jsonl")
    return {name: [row[name] for row in rows] for name in _STEP}


def evaluations(run_dir: Path) -> list[Any]:
    """Return held-out losses, total and by context."""
    result = _lines(run_dir / "evaluations.jsonl")
    return [
        [row["step"], row["loss"], row["tokens"], *(bucket["loss"] for bucket in row["buckets"])]
        for row in result
    ]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def memory(words: Sequence[str]) -> dict[str, Any]:
    """Return the exact bytes that `mtrain train WORDS --dry-run` prints rounded."""
    from mtrain_cli.composition.compose import compose
    from mtrain_cli.training.planning import make_plan

    result = make_plan(compose(list(words), plan=True))
    estimate, exchange = result.memory, result.exchange
    return {
        "peak": estimate.allocated,
        # Of each moment, in the order of _PARTS.
        "moments": [[moment.parts[name] for name in _PARTS] for moment in estimate.moments],
        "reserve": estimate.reserve,
        "host": estimate.host,
        "saving": estimate.saving,
        "exchange": [getattr(exchange, name) for name in _EXCHANGE],
        "kernel": result.kernel,
        "layout": [result.layout.name, result.layout.padded_seq],
        "moved": [getattr(result.received, name) for name in _MOVED],
        "checkpoint": result.checkpoint,
        "model_flop": result.flops.model,
        "executed_flop": result.flops.executed,
        "settings": _memory_settings(result.config),
    }


def _memory_settings(config: Any) -> list[Any]:
    """Return the settings that train.memory=auto may choose."""
    train = [getattr(config.train, name) for name in _TRAIN]
    return [*train, config.optim.offload, config.optim.offload_gradients]


def records(folder: Path) -> dict[str, np.ndarray]:
    """Return the rows of a profile or simulation as arrays, strings as text."""
    import pyarrow.parquet as pq

    table = pq.read_table(folder / "records.parquet", columns=_COLUMNS)
    result = {name: table.column(name).to_numpy(zero_copy_only=False) for name in _COLUMNS}
    return {
        name: np.array([_ours(word) for word in values]) if values.dtype == object else values
        for name, values in result.items()
    }


def _ours(word: str) -> str:
    return _RENAMED.get(word, word)


def numbers(document: Any) -> Any:
    """Return a JSON document without its strings."""
    if isinstance(document, dict):
        kept = {_ours(name): numbers(value) for name, value in document.items()}
        return {name: value for name, value in kept.items() if value is not None}
    if isinstance(document, list):
        kept_list = [result for value in document if (result := numbers(value)) is not None]
        return kept_list or None
    return document if isinstance(document, int | float) else None


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def work(rows: Mapping[str, np.ndarray], case: int) -> dict[str, Any]:
    """Return the exact work of a case: totals by pass, and a digest by pass, layer, step, rank."""
    key, counted = ["direction", "layer", "step", "rank"], ["pairs", "blocks", "columns", "flop"]
    return _counted(rows, case, _WORK, key, counted, ("direction",))


def traffic(rows: Mapping[str, np.ndarray], case: int) -> dict[str, Any]:
    """Return the exact bytes of a case: totals by (pass, queue, payload, phase), and a digest."""
    key = ["direction", "link", "payload", "phase", "layer", "step", "rank", "shard", "peer"]
    return _counted(rows, case, _MESSAGES, key, ("bytes",), key[:4])


def spent(rows: Mapping[str, np.ndarray], case: int) -> dict[str, float]:
    """Return the milliseconds of a case by pass and phase, over ranks, steps and layers."""
    selected = rows["case"] == case
    result: dict[str, float] = {}
    for direction, phase, us in zip(
        *(rows[name][selected].tolist() for name in ("direction", "phase", "dur_us")), strict=True
    ):
        name = f"{direction} {phase}".strip()
        result[name] = result.get(name, 0.0) + us / 1e3
    return dict(sorted(result.items()))


def predicted(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the prediction of `simulate --json` for each configuration, in order."""
    result = []
    for entry, facts in zip(document["predicted"], document["cases"], strict=True):
        row: dict[str, Any] = {
            "ms": _bounds(entry["ms"]),
            "density": facts["density"],
            "flop": facts["flop"],
            "kernel": facts["kernel"],
        }
        for name, of_pass in entry["passes"].items():
            row[name] = {
                "ms": _bounds(of_pass["ms"]),
                "time": _degrees(of_pass["time"]),
                "work": _degrees(of_pass["work"]),
                "computed": of_pass["computed"],
                "late": of_pass["late_ms"],
                "exposed": {_ours(name): value for name, value in of_pass["exposed_ms"].items()},
            }
        if "step" in entry:
            row["step"] = step_row(entry["step"])
        result.append(row)
    return result


def swept(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a sweep, including configurations that are impossible."""
    return [
        {"point": row["point"], **({"cannot": True} if "cannot" in row else step_row(row))}
        for row in document["sweep"]
    ]


def recommended(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the configurations of `simulate recommend`, best first."""
    return [step_row(row) for row in document["recommended"]["ranked"]] + [
        {"rejected": len(document["recommended"]["rejected"])}
    ]


def step_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a predicted step."""
    return {
        "layout": row["layout"],
        "kernel": row["kernel"],
        "cp": row["cp"],
        "dp": row["dp"],
        "recompute": row["activation_checkpoint"],
        "seconds": _bounds(row["seconds"]),
        "rate": _bounds(row["tokens_per_second_per_gpu"]),
        "mfu": row["mfu_as_dense"],
        "hfu": row["hfu"],
        "memory": row["memory_bytes"],
        "fits": row["fits"],
        "hidden": row["hidden_weights_s"],
        "parts": {_ours(name): value for name, value in row["parts_s"].items()},
        "degrees": [row["degrees"][name] for name in _DEGREES],
    }


def _bounds(result: Mapping[str, float]) -> list[float]:
    return [result["low"], result["value"], result["high"]]


def _degrees(result: Mapping[str, float]) -> list[float]:
    return [result[name] for name in ("worker", "step", "total", "critical")]


def structure(rows: Mapping[str, np.ndarray], case: int) -> dict[str, Any]:
    """Return the rows of a profile without times: their number by (pass, phase), and a digest.

    Leaves out rows that depend on times: gaps, and whom a collective waited for.
    """
    key = [
        "direction",
        "phase",
        "link",
        "payload",
        "iteration",
        "micro",
        "layer",
        "step",
        "rank",
        "shard",
        "peer",
    ]
    phases = sorted(set(rows["phase"].tolist()) - {_GAP})
    rows = {**rows, "peer": np.where(rows["phase"] == _WAIT, -1, rows["peer"])}
    counted = ["rows", "pairs", "blocks", "columns", "bytes"]
    return _counted(rows, case, phases, key, counted, ("direction", "phase"))


def _counted(
    rows: Mapping[str, np.ndarray],
    case: int,
    phases: Iterable[str],
    key: Sequence[str],
    numbers: Sequence[str],
    by: Sequence[str],
) -> dict[str, Any]:
    selected = (rows["case"] == case) & np.isin(rows["phase"].astype(str), list(phases))
    columns = [rows[name][selected].tolist() for name in key]
    values = [
        ([1] * int(selected.sum()))
        if name == "rows"
        else rows[name][selected].astype(np.int64).tolist()
        for name in numbers
    ]
    sums: dict[tuple, list[int]] = {}
    for place, counts in zip(zip(*columns, strict=True), zip(*values, strict=True), strict=True):
        known = sums.setdefault(place, [0] * len(numbers))
        for number, count in enumerate(counts):
            known[number] += count
    if len(numbers) > 1:  # a step without work may or may not have a row
        sums = {place: counts for place, counts in sums.items() if any(counts)}
    totals: dict[str, list[int]] = {}
    for place, counts in sums.items():
        name = " ".join(str(place[key.index(part)]) for part in by if place[key.index(part)] != "")
        known = totals.setdefault(name, [0] * (1 + len(numbers)))
        known[0] += 1
        for number, count in enumerate(counts):
            known[1 + number] += count
    digest = hashlib.sha256(
        json.dumps(sorted([*map(str, place), counts] for place, counts in sums.items())).encode()
    ).hexdigest()[:16]
    return {"digest": digest, "of": ["places", *numbers], **dict(sorted(totals.items()))}
