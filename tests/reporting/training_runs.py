"""Training runs with known steps and held-out losses."""

from __future__ import annotations

from pathlib import Path

from mtrain_cli.records.metrics import StepMetrics
from mtrain_cli.reporting.report_source import ReportSource
from mtrain_cli.training.evaluation import ContextBucket, Evaluation


def step(number: int, **more) -> StepMetrics:
    values = {
        "loss": 3.0,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": number,
        "tokens_per_second_per_gpu": 10.0,
        "mfu_model": None,
    }
    values |= {
        "mfu_executed": None,
        "density": 1.0,
        "peak_memory_gib": None,
        "seconds": 1.0,
        "epoch": 0.1,
        "consumed": number,
    }
    return StepMetrics(step=number, **{**values, **more})


def evaluation(number: int, loss: float) -> Evaluation:
    buckets = (
        ContextBucket(0, 128, 10, loss),
        ContextBucket(128, 1024, 20, loss - 0.5),
        ContextBucket(1024, 2048, 0, None),
    )
    return Evaluation(number, loss, 30, 2, 0.1, "dense", buckets)


def trained(name: str, folder: Path, **more) -> ReportSource:
    metrics = tuple(
        step(n, lr=1e-3 * (1 - n / 50 if n < 30 else 1.5 - n / 50), loss=4 - n / 40)
        for n in range(1, 41)
    )
    evaluations = (evaluation(0, 4.0), evaluation(40, 3.0))
    settings = {"seq": 4096, "optim.lr": 1e-3, "topology.workers": 2, "run.name": name}
    facts = {"host": "one", "gpus": []}
    return ReportSource(
        name,
        folder,
        facts,
        **{"metrics": metrics, "evaluations": evaluations, "settings": settings, **more},
    )
