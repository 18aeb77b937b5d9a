"""Write the tables of studies.md, and all figures: `python docs/study_tables.py [FOLDER]`.

They come from profiles/learning/tier-a.json and tier-b.json. A table stands between
`<!-- begin NAME -->` and `<!-- end NAME -->`. With a FOLDER of a study, its results are written
first, as `mtrain report FOLDER --json` prints them. For tier a, they are those of the second run,
and tier-a.json pools both runs.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/studies.md"
RESULTS = ROOT / "profiles/learning"
LOSS, KEYS, NEEDLES = "long_loss", "key_loss", "needles"
PLACES = {"inside": "probed rows", "tail": "tail", "elsewhere": "elsewhere"}
MEASURES = {LOSS: "loss", KEYS: "loss of key tokens", NEEDLES: "needles", **PLACES}
SPARSE = "vertical_slash-0.6"
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
    total = len(data["seeds"])
    many = len(done) > 1
    text = f"Of {total} seed{'s' * (total > 1)}, {len(done)} {'have' if many else 'has'} run "
    text += f"({listed(done)}). {'Their bases find' if many else 'Its base finds'} "
    text += f"{_found(data['gates'], done)} of the needles at {'their' if many else 'its'} own "
    text += "length. "
    if again := data.get("again"):
        seeds = sorted(map(int, again["gates"]))
        text += f"Seeds {listed(seeds)} ran a second time, with new bases, which find "
        text += f"{_found(again['gates'], seeds)}. "
    states = [each["state"] for each in data["predictions"]]
    words = {"failed": "failed", "held": "held", "not measured": "not judged yet"}
    counts = [f"{states.count(key)} {word}" for key, word in words.items() if key in states]
    text += f"Of {len(states)} predictions: {listed(counts)}."
    if not many:
        text += " One seed decides nothing: there are no intervals yet, and no verdicts."
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


def differences(data: dict[str, Any], *, own: bool) -> str:
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
        for row in rows_of(data, own=own)
        if row["difference"]
    ]
    return table(("trained with", "loss", "", "needles", ""), rows)


def places(data: dict[str, Any]) -> str:
    """Return needles by place of the question: percent for dense, differences for others."""
    rows = []
    for own, word in ((True, "own"), (False, "dense")):
        for row in rows_of(data, own=own):
            found = row["difference"] or row["mean"]
            sign = "+" if row["difference"] else ""
            texts = [over_seeds(found.get(place), place, sign) for place in PLACES]
            rows.append([name(row, data), word if row["variant"] != "dense" else "dense", *texts])
    return table(("trained with", "attention", *PLACES.values()), rows)


def keys(data: dict[str, Any]) -> str:
    """Return the loss of key tokens beside dense."""
    beside = {row["variant"]: row for row in rows_of(data, own=False)}
    rows = [
        [
            name(row, data), over_seeds(row["difference"].get(KEYS), KEYS),
            over_seeds(beside[row["variant"]]["difference"].get(KEYS), KEYS)
            if row["variant"] in beside else "-",
        ]
        for row in rows_of(data, own=True)
        if row["difference"]
    ]  # fmt: skip
    return table(("trained with", "own attention", "dense attention"), rows)


def noise(data: dict[str, Any]) -> str:
    """Return how much two dense trainings differ."""
    (again,) = (row for row in data["compared"] if row["variant"] == "dense-again")
    rows = [
        [text, number(data["spread"][measure], measure),
         over_seeds(again["difference"].get(measure), measure)]
        for measure, text in MEASURES.items()
        if measure in data["spread"]
    ]  # fmt: skip
    return table(("measure", "spread: largest of any training", "mean of the trainings"), rows)


def predictions(data: dict[str, Any]) -> str:
    """Return the predictions with an outcome as a list, those that failed first."""
    lines = []
    for each in data["predictions"]:
        if each["state"] == "not measured" and each["found"].startswith("no such cell"):
            continue
        seeds = each["prediction"]["seeds"]
        by = f" (seeds {listed(seeds)} judge it)" if seeds else ""
        text = f"- **{each['state']}**: {each['prediction']['text']}{by} Found: {each['found']}."
        text = text.replace(f".{by}", f"{by}.") if by else text
        lines.append(textwrap.fill(text, 100, subsequent_indent="  "))
    return "\n".join(lines)


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "summary": summary,
    "prices": prices,
    "own": lambda data: differences(data, own=True),
    "dense": lambda data: differences(data, own=False),
    "noise": noise,
    "places": places,
    "keys": keys,
    "predictions": predictions,
}
TABLES_OF_B = ("summary", "prices", "places")  # one seed has no intervals and no verdicts


def fill(page: str) -> str:
    """Return the page with its tables written again."""
    page = _filled(page, read("a"), TABLES)
    return _filled(page, read("b"), {f"{name} of b": TABLES[name] for name in TABLES_OF_B})


def _filled(
    page: str, data: dict[str, Any], tables: dict[str, Callable[[dict[str, Any]], str]]
) -> str:
    for each, make in tables.items():
        begin, end = f"<!-- begin {each} -->", f"<!-- end {each} -->"
        whole = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if not whole.search(page):
            raise SystemExit(f"{PAGE}: no {begin}")
        text = f"{begin}\n\n{make(data)}\n\n{end}"
        page = whole.sub(lambda _, text=text: text, page)
    return page


def _write(name: str, found: dict[str, Any]) -> None:
    text = json.dumps(found, indent=1)
    (RESULTS / f"tier-{name}.json").write_text(text + "\n", encoding="utf-8")


def main(words: Sequence[str]) -> None:
    if words:
        from mtrain_studies.cells import Study
        from mtrain_studies.learning_tables import document
        from mtrain_studies.outcomes import summarize

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
    PAGE.write_text(fill(PAGE.read_text()), encoding="utf-8")
    import figures  # beside this file

    figures.write(Path(__file__).parent / "figures")


if __name__ == "__main__":
    main(sys.argv[1:])
