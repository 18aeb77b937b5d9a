"""What a finished cell leaves, for tests that compute nothing."""

from __future__ import annotations

from mtrain_cli.evaluation.results import NATS, PERCENT, Result, ResultsFolder
from mtrain_extras.studies.cells import EVALUATION, Study
from mtrain_extras.studies.tiers import DENSE, Cell


def write_results(study: Study, cell: Cell, samples: int = 1) -> ResultsFolder:
    """Write the results of a cell. Each has ``samples`` samples, without hits and places."""
    folder = ResultsFolder.open(study.path(cell) / EVALUATION, "..")
    own = ["own"] if cell.variant is not None and cell.variant.words else []
    for attention in (DENSE, *own):
        for task, unit in (("perplexity", NATS), ("niah", PERCENT)):
            key = f"{task}-{attention}"
            folder.add_result(
                Result(key, task, study.tier.long_seq, attention, "", 1, samples, 4.0, None, unit)
            )
            for index in range(samples):
                folder.add_sample({"key": key, "index": index})
    return folder
