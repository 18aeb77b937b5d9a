"""Read tables that others published, and the settings with which mtrain predicts each row.

The files are `profiles/published/NAME.yaml`. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mtrain_cli import resource_dir
from mtrain_cli.config.cluster import Cluster, load_cluster
from mtrain_cli.config.documents import checked, read_yaml, reason
from mtrain_cli.config.exchanges import OURS, RingVariant, exchange_name
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.suggest import no_such

FOLDER = "published"
PAPERS = {"burst": "BurstEngine", "mtraining": "MTraining", "magi": "MagiAttention"}
# Quantities whose published value compares a row with another row.
RATE, MFU, MEMORY, SPEED_UP = "tokens/s/GPU", "MFU %", "GiB", "speed-up"
WORKER, STEP, COMPUTED, WORK = "worker degree", "step degree", "computation ratio", "work degree"
LESS = " lower"  # WORKER + LESS: the degree of another row, divided by this row's degree
REDUNDANT, MESSAGES, SPEED = "redundant messages %", "ms of messages", "TFLOP/s/GPU"
QUANTITIES = (
    *(RATE, MFU, MEMORY, SPEED_UP, WORKER, STEP, COMPUTED, WORK),
    *(WORKER + LESS, STEP + LESS, REDUNDANT, MESSAGES, SPEED),
)
RING = exchange_name(gathers=False, hierarchical=False)
_SETTINGS = (
    *("words", "layout", "exchange", "index", "density", "columns"),
    *("nodes", "per_node", "attention_only"),
)


@dataclass(frozen=True)
class PublishedValue:
    """A number of a row.

    value: None if the paper has it in a figure only, or gives a formula.
    over: name of the row with which the number compares this row.
    formula: the formula that gives the value; "" if the paper gives a number.
    """

    quantity: str
    value: float | None
    over: str = ""
    formula: str = ""


@dataclass(frozen=True)
class PublishedRow:
    """A row of a published table, and the settings of its prediction.

    index: recorded pairs, as for `mtrain simulate --index`; "clustered" for drawn pairs, "dense"
        for all.
    nodes, per_node: size of the cluster; None for that of its file.
    attention_only: whether the row is about one layer's attention instead of steps.
    counts: whether the mean errors count the row.
    redundancy: workers and layout of a count of messages; empty if the row counts none.
    measured: shipped profile, layout and exchange of a measured value; empty if there is none.
    attention: pattern with which the model of a score reads its prompts.
    hops: how the paper's rings run, with the keys of `RingVariant`.
    """

    name: str
    values: tuple[PublishedValue, ...]
    words: tuple[str, ...] = ()
    layout: str = "zigzag"
    exchange: str = RING
    index: str = "dense"
    density: float | None = None
    columns: int | None = None
    nodes: int | None = None
    per_node: int | None = None
    attention_only: bool = False
    note: str = ""
    counts: bool = True
    redundancy: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, str] = field(default_factory=dict)
    attention: str = "dense"
    hops: RingVariant = OURS

    def on(self, cluster: str) -> Cluster:
        """Return the cluster of the row."""
        found = load_cluster(cluster, nodes=self.nodes)
        return found if self.per_node is None else replace(found, gpus_per_node=self.per_node)


@dataclass(frozen=True)
class ScoreColumn:
    """The results of `mtrain eval` whose mean a column of scores is.

    length, tasks: of the results; None and () for all.
    results: number of results if all are there.
    """

    results: int
    length: int | None = None
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True)
class PublishedTable:
    """A published table. The fields are those of `published_tables.StudyTable`, and:

    evaluation: the `mtrain eval` that gives such scores; "" for a table that mtrain predicts.
    scores: the results that each quantity of a table of scores is the mean of.
    """

    name: str
    title: str
    paper: str
    where: str
    cluster: str
    rows: tuple[PublishedRow, ...]
    remarks: tuple[str, ...] = ()
    evaluation: str = ""
    scores: Mapping[str, ScoreColumn] = field(default_factory=dict)


def names() -> list[str]:
    """Return the names of all published tables."""
    return sorted(path.stem for path in (resource_dir("profiles") / FOLDER).glob("*.yaml"))


def choices() -> list[str]:
    """Return the words that `chosen` takes."""
    return [*names(), *PAPERS, "all"]


def chosen(words: Sequence[str]) -> list[str]:
    """Return the names of the tables that words choose: a name, a paper of `PAPERS`, or all."""
    known, found = names(), []
    for word in words:
        of_paper = [name for name in known if read(name).paper.startswith(PAPERS.get(word, "\0"))]
        if word == "all":
            of_paper = known
        elif word in known:
            of_paper = [word]
        if not of_paper:
            why = no_such("published table", word, choices())
            raise ConfigError(f"{word or repr(word)}: {why}")
        found += of_paper
    return list(dict.fromkeys(found))


def read(name: str) -> PublishedTable:
    """Read a table by its name."""
    return read_file(resource_dir("profiles") / FOLDER / f"{name}.yaml")


def read_file(path: Path) -> PublishedTable:
    """Read a table."""
    try:
        content = {"cluster": "", **read_yaml(path)}
        shared = {key: content.pop(key) for key in _SETTINGS if key in content}
        scores = {
            name: checked(ScoreColumn, column) for name, column in content.pop("scores", {}).items()
        }
        quantities = scores or QUANTITIES
        rows = tuple(_row(each, shared, quantities) for each in content.pop("rows"))
        remarks = tuple(content.pop("remarks", ()))
        return PublishedTable(path.stem, **content, rows=rows, remarks=remarks, scores=scores)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: not a published table ({reason(error)})") from None


def _row(
    content: Mapping[str, Any], shared: Mapping[str, Any], quantities: Container[str]
) -> PublishedRow:
    given = {**shared, **content}
    words = [*shared.get("words", ()), *content.get("words", ())]
    # A row's own setting replaces that of the table.
    given["words"] = tuple({str(word).partition("=")[0]: str(word) for word in words}.values())
    name, values = str(given.pop("row")), given.pop("values")
    if other := [quantity for quantity in values if quantity not in quantities]:
        raise ValueError(f"{other[0]}: no such quantity")
    given["hops"] = checked(RingVariant, given.get("hops", {}))
    return PublishedRow(name, tuple(_value(*item) for item in values.items()), **given)


def _value(quantity: str, content: Any) -> PublishedValue:
    content = content if isinstance(content, Mapping) else {"value": content}
    return PublishedValue(quantity, **{"value": None, **content})
