"""Write the tables of the experiment, and all figures: `python docs/study_tables.py [FOLDER]`.

The tables of studies.md and sparse-attention.md come from profiles/learning: tier-a.json,
tier-b.json, tier-b-again.json and the samples of tier-a-again.tar.xz. A table stands between
`<!-- begin NAME -->` and `<!-- end NAME -->`. With a FOLDER of a study, its results are written
first, as `mtrain report FOLDER --json` prints them. For tier a, they are those of the second run,
and tier-a.json pools both runs.
"""

from __future__ import annotations

import json
import re
import sys
import tarfile
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE, METHOD = ROOT / "docs/studies.md", ROOT / "docs/sparse-attention.md"
RESULTS = ROOT / "profiles/learning"
LOSS, KEYS, NEEDLES = "long_loss", "key_loss", "needles"
PLACES = {"inside": "probed rows", "tail": "tail", "elsewhere": "elsewhere"}
MEASURES = {LOSS: "loss", KEYS: "key tokens", NEEDLES: "needles", "inside": "in probed rows"}
SPARSE = "vertical_slash-0.6"
WITH_DENSE_LAYERS = f"{SPARSE}-dense-layers"
# Cells of the tables about the two uses of a trained model, with words for them.
USED = {
    "dense": "dense",
    "vertical_slash-0.9": "`vertical_slash`, p = 0.9",
    SPARSE: "`vertical_slash`, p = 0.6",
    "fixed": "random keys, same density",
    WITH_DENSE_LAYERS: "p = 0.6, two dense layers of 8",
}
LEARNED = ("untrained", "dense", WITH_DENSE_LAYERS, "fixed-dense-layers", "vertical_slash-0.9",
           "xattention", SPARSE, "fixed", "moba")  # fmt: skip
SEQ, AGAIN_SEEDS = 65536, (0, 1)  # of the second run
EDGES = (0, 1, 2, 4, 8, 16, 32, 64)  # of distances, in K tokens
Row = dict[str, Any]


def read(tier: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"tier-{tier}.json").read_text())


def rows_of(data: dict[str, Any], *, own: bool) -> list[Row]:
    """Return the cells with the attention of their training, or the sparse ones with dense."""
    sparse = {row["variant"] for row in data["compared"] if row["attention"] != "dense"}
    return [
        row
        for row in data["compared"]
        if (row["attention"] == "dense") != (own and row["variant"] in sparse)
        and (own or row["variant"] in sparse)
    ]


def finished(data: dict[str, Any]) -> list[int]:
    """Return the seeds whose dense cell is finished, once for each run."""
    return next((row["seeds"] for row in data["compared"] if row["variant"] == "dense"), [])


def name(row: Row, data: dict[str, Any]) -> str:
    """Return a short name, with the number of trainings if some are missing.

    `-windows` stands for `vertical_slash-0.6-windows`.
    """
    long, count = row["variant"], len(row["seeds"])
    few = f" (n = {count})" if count < len(finished(data)) else ""
    return f"`{long.removeprefix(SPARSE) or long}`{few}"


def number(value: float, measure: str, sign: str = "") -> str:
    return f"{value:{sign}.{4 if measure in (LOSS, KEYS) else 1}f}"


def over_seeds(found: Row | None, measure: str, sign: str = "+") -> str:
    """Return a mean, and half of its 95 % interval if there are several seeds."""
    if found is None:
        return "-"
    text = number(found["mean"], measure, sign)
    if found["high"] is None:
        return text
    return f"{text} ± {number(found['high'] - found['mean'], measure)}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |".replace("| --- ", "|---") for cells in lines)


def listed(items: Sequence[Any]) -> str:
    *first, last = map(str, items)
    return f"{', '.join(first)} and {last}" if first else last


def summary(data: dict[str, Any]) -> str:
    """Return what has run, in sentences."""
    done = sorted(set(finished(data)))
    total, many = len(data["seeds"]), len(done) > 1
    share = (
        f"All {total} seeds"
        if len(done) == total and many
        else f"{len(done)} of {total} seed{'s' * (total > 1)}"
    )
    state = f"{share} ({listed(done)}) {'are' if many else 'is'}"
    found = _found(data["gates"], done)
    text = f"{state} complete. {'Their bases find' if many else 'Its base finds'} {found} of the "
    text += f"needles at {'their' if many else 'its'} own length. "
    if again := data.get("again"):
        seeds = sorted(map(int, again["gates"]))
        text += f"Seeds {listed(seeds)} ran a second time, with new bases, which find "
        text += f"{_found(again['gates'], seeds)}. "
    states = [prediction["state"] for prediction in data["predictions"]]
    words = {"failed": "failed", "held": "held", "not measured": "not judged yet"}
    counts = [f"{states.count(key)} {word}" for key, word in words.items() if key in states]
    text += f"Of {len(states)} predictions, {listed(counts)}."
    if not many:
        text += " One seed decides nothing: there are no intervals and no verdicts."
    return textwrap.fill(text, 100)


def _found(gates: dict[str, float], seeds: Sequence[int]) -> str:
    return listed([f"{gates[str(seed)]:.1f} %" for seed in seeds])


def prices(data: dict[str, Any]) -> str:
    """Return what a step costs, and the means of loss and needles."""
    beside = {row["variant"]: row for row in rows_of(data, own=False)}
    dense = next(row for row in data["compared"] if row["variant"] == "dense")
    rows = []
    for row in rows_of(data, own=True):
        pace, other = row["step_seconds"], beside.get(row["variant"])
        faster = f"{dense['step_seconds'] / pace:.2f}x" if pace else "-"
        cells = [
            name(row, data), f"{100 * row['density']:.1f} %" if pace else "-",
            f"{pace:.3f}" if pace else "-", faster,
        ]  # fmt: skip
        for each in (row, other):
            for measure in (LOSS, NEEDLES):
                cells.append(number(each["mean"][measure]["mean"], measure) if each else "-")
        rows.append(cells)
    heads = ("trained with", "density", "s / step", "dense / it", "loss", "needles")
    return table((*heads, "loss, dense", "needles, dense"), rows)


def measures(data: dict[str, Any]) -> str:
    """Return each measure of each model, used with its own attention or with dense."""
    rows = [
        (
            name(row, data), "own" if row["attention"] != "dense" else "dense",
            f"{100 * row['density']:.1f} %", f"{row['step_seconds']:.3f}",
            *(number(row["mean"][each]["mean"], each) for each in MEASURES),
        )
        for row in data["compared"]
    ]  # fmt: skip
    heads = ("trained with", "used with", "density", "s / step")
    return table((*heads, *MEASURES.values()), rows)


def differences(data: dict[str, Any]) -> str:
    """Return differences from dense with their verdicts."""
    rows = [
        [name(row, data)]
        + [
            text
            for measure in (LOSS, NEEDLES)
            for text in (
                over_seeds(row["difference"].get(measure), measure),
                row["verdict"].get(measure, "-"),
            )
        ]
        for row in rows_of(data, own=True)
        if row["difference"]
    ]
    return table(("trained with", "loss", "", "needles", ""), rows)


def regimes(data: dict[str, Any]) -> str:
    """Return loss and needles of models that are used with their own and with dense attention."""
    dense = next(row for row in data["compared"] if row["variant"] == "dense")
    rows = [
        [
            words, "dense" if row["attention"] == "dense" else "own",
            "" if row is dense
            else f"{100 * (row['mean'][LOSS]['mean'] / dense['mean'][LOSS]['mean'] - 1):+.1f} %",
            *(f"{number(row['mean'][place]['mean'], place)} %" for place in (NEEDLES, "inside")),
        ]
        for variant, words in USED.items()
        for own in (True, False)
        for row in rows_of(data, own=own)
        if row["variant"] == variant
    ]  # fmt: skip
    return table(("trained with", "used with", "loss", "needles", "asked at the end"), rows)


@cache
def asked(variant: str, seed: int) -> dict[str, list[tuple[float, int]]]:
    """Return the distances of the second run's needles in tokens, each with whether it was found.

    By attention. The distance is that from a needle to the answer that repeats it.
    """
    found: dict[str, list[tuple[float, int]]] = {}
    for row in map(json.loads, _samples().get(f"{variant}/seed-{seed}", ())):
        pairs = zip(row.get("hits", ()), row.get("places", ()), strict=True)
        each = ((answer - depth * SEQ, hit) for (depth, hit), answer in pairs)
        found.setdefault(row["attention"], []).extend(each)
    return found


@cache
def _samples() -> dict[str, list[bytes]]:
    """Return the lines of each file of samples in the archive, by the name of the cell."""
    found = {}
    with tarfile.open(RESULTS / "tier-a-again.tar.xz") as archive:
        for member in archive:
            if member.name.endswith("/evaluation/samples.jsonl"):
                file = archive.extractfile(member)
                assert file is not None
                found["/".join(member.name.split("/")[-4:-2])] = file.read().splitlines()
    return found


def _share(hits: Iterable[int]) -> float:
    """Return percent found."""
    found = list(hits)
    return 100 * sum(found) / len(found)


def distances(data: dict[str, Any]) -> str:  # noqa: ARG001 - the archive has the samples
    """Return percent of needles found by distance, the mean of the second run's trainings."""
    rows = []
    for variant, words in USED.items():
        for attention in sorted(asked(variant, 0), key="dense".__eq__):  # the own one first
            found = [asked(variant, seed)[attention] for seed in AGAIN_SEEDS]
            shares = [
                [_share(hit for far, hit in each if low <= far / 1024 < high) for each in found]
                for low, high in pairwise(EDGES)
            ]
            means = [number(sum(each) / len(each), NEEDLES) for each in shares]
            rows.append([words, "dense" if attention == "dense" else "own", *means])
    heads = [f"{low}-{high}K" if low else f"below {high}K" for low, high in pairwise(EDGES)]
    return table(("trained with", "used with", *heads), rows)


def learned(data: dict[str, Any]) -> str:  # noqa: ARG001 - the archive has the samples
    """Return percent of needles found by each training of the second run, with both attentions."""
    rows = []
    for variant in LEARNED:
        cells = [f"`{variant.removeprefix(SPARSE) or variant}`"]
        for dense in (True, False):
            for seed in AGAIN_SEEDS:
                hits = [
                    hit
                    for attention, found in asked(variant, seed).items()
                    if (attention == "dense") == dense
                    for _, hit in found
                ]
                cells.append(number(_share(hits), NEEDLES) if hits else "-")
        rows.append(cells)
    bases = [f"base of {float(cell):.0f} %" for cell in rows[0][1:3]]
    heads = [f"{use}, {base}" for use in ("dense", "own") for base in bases]
    return table(("trained with", *heads), rows)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "summary": summary,
    "prices": prices,
    "own": differences,
    "learned": learned,
}
TABLES_OF_METHOD = {"regimes": regimes, "distances": distances}
TABLES_OF_B = ("summary", "prices")  # one seed has no intervals and no verdicts


def fill(page: Path) -> str:
    """Return the text of a page with its tables written again."""
    text = page.read_text()
    if page == METHOD:
        return _filled(text, read("a"), TABLES_OF_METHOD)
    text = _filled(text, read("a"), TABLES)
    text = _filled(text, read("b"), {f"{name} of b": TABLES[name] for name in TABLES_OF_B})
    return _filled(text, read("b-again"), {"measures of b": measures})


def _filled(
    page: str, data: dict[str, Any], tables: dict[str, Callable[[dict[str, Any]], str]]
) -> str:
    for each, make in tables.items():
        begin, end = f"<!-- begin {each} -->", f"<!-- end {each} -->"
        whole = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if not whole.search(page):
            raise SystemExit(f"no {begin}")
        text = f"{begin}\n\n{make(data)}\n\n{end}"
        page = whole.sub(lambda _, text=text: text, page)
    return page


def _write(name: str, found: dict[str, Any]) -> None:
    text = json.dumps(found, indent=1)
    (RESULTS / f"tier-{name}.json").write_text(text + "\n", encoding="utf-8")


def main(words: Sequence[str]) -> None:
    if words:
        from mtrain_extras.studies.cells import Study
        from mtrain_extras.studies.learning_tables import document
        from mtrain_extras.studies.outcomes import summarize

        if (study := Study.open(Path(words[0]))) is None:
            raise SystemExit(f"{words[0]}: is no folder of a study")
        found = json.loads(json.dumps(document(summarize(study))))
        name = study.tier.name
        if name == "a":
            _write("a-again", found)
            sys.path.append(str(ROOT / "profiles"))
            from pool_studies import pool

            found = pool(read("a-first"), found)
        _write(name, found)
    for page in (PAGE, METHOD):
        page.write_text(fill(page), encoding="utf-8")
    import figures  # beside this file

    figures.write(Path(__file__).parent / "figures")


if __name__ == "__main__":
    main(sys.argv[1:])
