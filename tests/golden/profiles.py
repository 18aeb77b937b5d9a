"""The rows of profiles of CPU workers, with their work and bytes, without their times."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from golden import corpus, reach, workers

SMALL = (
    "data=text data.path=corpus/text.jsonl seq=512 topology.device=cpu "
    "topology.block_size=32 model.num_layers=2"
)
LINES = (
    "sparsity.block=32 sparsity.last_q=32 sparsity.min_slashes=3 sparsity.max_slashes=3 "
    "sparsity.min_columns=8 sparsity.max_columns=64"
)


@dataclass(frozen=True)
class Case:
    """A profile of several patterns, layouts and exchanges."""

    workers: int
    words: str
    patterns: str
    layouts: str
    exchanges: str

    @property
    def names(self) -> list[str]:
        """Names of the compared results, in the order of the files."""
        return [
            " ".join(computed)
            for computed in product(
                *(text.split(",") for text in (self.patterns, self.layouts, self.exchanges))
            )
        ]


CASES: dict[str, Case] = {
    "2 workers": Case(
        2, f"--steps 1 {SMALL} {LINES}", "dense,vertical_slash", "zigzag,striped", "ring,all_gather"
    ),
    "4 workers": Case(
        4,
        f"--steps 1 {SMALL} {LINES} topology.gpus_per_node=2",
        "vertical_slash",
        "striped",
        "ring,hierarchical_ring,ulysses",
    ),
    "2 workers, bitmaps": Case(
        2,
        f"--steps 1 {SMALL} sparsity.block=32 sparsity.dense_steps=0 "
        "train.activation_checkpoint=full",
        "xattention,moba",
        "striped",
        "ring",
    ),
    "2 workers, queries": Case(
        2,
        f"--steps 1 {SMALL} {LINES} topology.circulates=queries",
        "vertical_slash",
        "zigzag",
        "ring",
    ),
    "attention alone": Case(
        2,
        f"--steps 1 {SMALL.replace('seq=512 ', '')} --attention-only --seq 512",
        "dense,fixed",
        "zigzag",
        "ring,all_gather",
    ),
}
NAMES: dict[str, str] = {
    f"{case}: {name}": case for case, made in CASES.items() for name in made.names
}


def compute(only: Collection[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Profile the named cases, and replay their work on another cluster."""
    wanted = set(only)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus.write(folder / "corpus")
        for number, case in enumerate(dict.fromkeys(NAMES[name] for name in only)):
            there = folder / f"profile-{number}"
            yield from ((one, row) for one, row in _profiled(case, folder, there) if one in wanted)


def make(asked: Case, folder: Path, there: Path) -> None:
    """Profile a case into the folder `there`."""
    compared = f"--pattern {asked.patterns} --layout {asked.layouts} --exchange {asked.exchanges}"
    words = ["profile", "imbalance", *compared.split(), *asked.words.split(), f"run.dir={there}"]
    workers.server().run(words, asked.workers, folder)


def _profiled(case: str, folder: Path, there: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    asked = CASES[case]
    make(asked, folder, there)
    rows, summary = reach.records(there), reach.summary(there)
    for number, name in enumerate(asked.names):
        yield (
            f"{case}: {name}",
            {
                "rows": reach.structure(rows, number),
                "counts": reach.work(rows, number),
                "bytes": reach.traffic(rows, number),
                "density": summary["cases"][number]["density"],
            },
        )
