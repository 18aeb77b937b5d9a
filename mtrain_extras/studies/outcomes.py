"""What the cells of a study give together: means over seeds, differences from dense, predictions.

Differences are paired: of two cells with one seed, which share base, order of data and texts. The
noise of training is the largest difference of `dense-again` and `dense` of any seed. "Loses
nothing" needs the whole interval of a difference within it, and a control with random keys that is
seen to lose: an experiment in which nothing can lose shows nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mtrain_cli.config import documents
from mtrain_cli.config.schema import NIAH, PERPLEXITY, ConfigError
from mtrain_cli.evaluation.results import SAMPLES, Result, read_results, read_sample_rows
from mtrain_extras.studies.cells import EVALUATION, DamagedCellError, Done, Study
from mtrain_extras.studies.t_interval import Interval, interval
from mtrain_extras.studies.tiers import AGAIN, BASE, DENSE, FIXED, Cell, Tier, Variant

LOSS, LONG_LOSS, KEY_LOSS = "loss", "long_loss", "key_loss"
WORST_BUCKET = "worst_long_bucket"
NEEDLES, INSIDE, TAIL, ELSEWHERE = "needles", "inside", "tail", "elsewhere"
PLACES = (INSIDE, TAIL, ELSEWHERE)
OUTSIDE = "outside"  # in the tail or elsewhere
MEASURES = {
    LOSS: "loss",
    LONG_LOSS: "loss, long context",
    KEY_LOSS: "loss, key tokens",
    NEEDLES: "needles",
    INSIDE: "asked in probed rows",
    TAIL: "asked in the tail",
    ELSEWHERE: "asked elsewhere",
    OUTSIDE: "asked outside the probed rows",
}
OWN = "own"
_KNOWN_TIER = "a"  # `Prediction.seeds` are its seeds
NOTHING, WORSE, BETTER, OPEN, CONTROL = "loses nothing", "worse", "better", "not decided", "-"
HELD, FAILED, UNKNOWN = "held", "failed", "not measured"
DEPTHS = 10
LEAST_TO_LOSE = 50.0  # percent of needles that dense must find for a prediction about needles


@dataclass(frozen=True)
class Measured:
    """One cell with one attention.

    seconds: of the training, by its median step.
    values: by name of `MEASURES`. Losses are in nats a token, needles in percent.
    buckets: loss by range of context, (begin, end).
    depths: percent found by (place, tenth of depth).
    """

    cell: Cell
    attention: str
    seconds: float
    density: float
    values: dict[str, float]
    buckets: dict[tuple[int, int], float]
    depths: dict[tuple[str, int], float]


@dataclass(frozen=True)
class Compared:
    """A variant with one attention, over seeds, beside dense.

    mean, difference: by name of a measure. The difference is from dense of the same seed.
    verdict: by name of a measure.
    """

    variant: Variant
    attention: str
    seeds: tuple[int, ...]
    mean: dict[str, Interval]
    difference: dict[str, Interval]
    verdict: dict[str, str]
    seconds: float
    density: float


@dataclass(frozen=True)
class Prediction:
    """What we expected before the runs. See ``predictions.yaml``.

    limit: of the rule; 0 for a rule without one.
    seeds: those of tier a that judge it; () for all. A prediction that was written after some seeds
        of tier a had run names the other ones. All seeds of other tiers judge it.
    beside: the cell that the rule ``below_cell`` compares with.
    """

    id: str
    written: str
    text: str
    cell: str
    attention: str
    measure: str
    rule: str
    limit: float = 0.0
    seeds: tuple[int, ...] = ()
    beside: str = ""

    def judged_by(self, tier: Tier) -> tuple[int, ...]:
        """Return the seeds of a tier that judge the prediction."""
        return self.seeds if self.seeds and tier.name == _KNOWN_TIER else tier.seeds

    def is_about(self, tier: Tier) -> bool:
        """Return whether a tier has the cells that the prediction names."""
        names = {variant.name for variant in tier.variants}
        return self.cell in names and self.beside in ("", *names)


@dataclass(frozen=True)
class Outcome:
    """A prediction with what happened: `HELD`, `FAILED` or `UNKNOWN`, and the numbers."""

    prediction: Prediction
    state: str
    found: str


@dataclass(frozen=True)
class Summary:
    """The results of a study.

    spread: largest difference of two dense cells of one seed, by measure; empty if not measured.
    outcomes: of the predictions about cells of the tier.
    damage: a line on each cell with files that cannot all be read, or that began with
        other weights than dense or has other texts.
    """

    tier: Tier
    measured: tuple[Measured, ...]
    compared: tuple[Compared, ...]
    spread: dict[str, float]
    outcomes: tuple[Outcome, ...]
    gates: dict[int, float | None] = field(default_factory=dict)
    done: dict[str, Done] = field(default_factory=dict)
    damage: tuple[str, ...] = ()


def summarize(study: Study) -> Summary:
    """Read the finished cells of a study."""
    done: dict[str, Done] = {}
    measured: list[Measured] = []
    gates: dict[int, float | None] = {}
    damage: list[str] = []
    for seed in study.tier.seeds:
        for variant in (None, *study.tier.variants):
            cell = Cell(seed, variant)
            try:
                found = study.done(cell)
            except DamagedCellError as error:
                damage += error.problems
                continue
            if found is None:
                continue
            done[cell.key] = found
            if variant is None:
                gates[seed] = found.gate
            else:
                files = Evaluated.read(study.path(cell) / EVALUATION)
                measured += read_cell(files, study.tier, cell, found)
                damage += damage_of(files, study, cell)
    apart = set[str]()
    for fact, words in (("base", "began with other weights"), ("corpus", "has other texts")):
        for name, keys in unlike_dense(done, fact).items():
            damage.append(
                f"{', '.join(keys)}: {words} than {DENSE}/{name}, so the numbers are left out."
            )
            apart.update(keys)
    measured = [each for each in measured if each.cell.key not in apart]
    done = {key: found for key, found in done.items() if key not in apart}
    spread = spread_of(measured)
    compared = compare(study.tier, measured, spread)
    outcomes = [
        outcome(prediction, measured, study.tier)
        for prediction in read_predictions()
        if prediction.is_about(study.tier)
    ]
    outcomes.sort(key=lambda each: (FAILED, HELD, UNKNOWN).index(each.state))
    return Summary(
        study.tier, tuple(measured), tuple(compared), spread, tuple(outcomes), gates, done,
        tuple(damage),
    )  # fmt: skip


@dataclass(frozen=True)
class Evaluated:
    """The files of an evaluation. rows: of the samples."""

    results: list[Result]
    rows: list[dict[str, Any]]

    @staticmethod
    def read(folder: Path) -> Evaluated:
        """Read the files. Damaged rows are left out: `damage_of` names the file."""
        rows: list[dict[str, Any]] = []
        with contextlib.suppress(ConfigError):  # there is no such file
            rows = [row for row in read_sample_rows(folder) if _is_sample(row)]
        return Evaluated(list(read_results(folder)), rows)


def _is_sample(row: dict[str, Any]) -> bool:
    hits, places = row.get("hits", []), row.get("places", [])
    if not (isinstance(hits, list) and isinstance(places, list)):
        return False
    pairs = all(isinstance(hit, list) and len(hit) == 2 for hit in hits)
    numbers = [*(value for hit in hits for value in hit), *places] if pairs else [None]
    return isinstance(row.get("key"), str) and all(map(documents.is_number, numbers))


def unlike_dense(done: Mapping[str, Done], fact: str) -> dict[str, list[str]]:
    """Return the keys of cells that differ from dense in a field of `Done`, by ``seed-N``."""
    found: dict[str, list[str]] = {}
    for key, cell in done.items():
        name, _, seed = key.partition("/")
        dense = done.get(f"{DENSE}/{seed}")
        wanted = "" if dense is None or name == BASE else getattr(dense, fact)
        if wanted and getattr(cell, fact) not in ("", wanted):
            found.setdefault(seed, []).append(key)
    return found


def read_cell(files: Evaluated, tier: Tier, cell: Cell, done: Done) -> list[Measured]:
    """Return the measurements of a finished cell, dense inference first."""
    results = files.results
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in files.rows:
        rows.setdefault(row["key"], []).append(row)
    found = []
    for attention in dict.fromkeys(result.attention for result in results):
        own = {r.task: r for r in results if r.attention == attention}
        if not {PERPLEXITY, NIAH} <= set(own):
            continue
        text = own[PERPLEXITY]
        values, buckets = losses(text, tier.base_seq)
        scores, depths = needles(rows.get(own[NIAH].key, ()), tier)
        seconds = done.steps * done.step_seconds
        found.append(
            Measured(cell, attention, seconds, done.density, values | scores, buckets, depths)
        )
    return found


def damage_of(files: Evaluated, study: Study, cell: Cell) -> list[str]:
    """Return a line if a finished cell lacks samples of its results."""
    rows = Counter(str(row.get("key")) for row in files.rows)
    if all(rows[result.key] >= result.samples for result in files.results):
        return []
    file = study.path(cell) / EVALUATION / SAMPLES
    return [f"{file}: damaged, so numbers of this cell are missing. {study.repair(cell)}."]


def losses(result: Result, long: int) -> tuple[dict[str, float], dict[tuple[int, int], float]]:
    """Return the losses of a result of perplexity by measure, and by range of context.

    long: earlier tokens from which on the context counts as long.
    """
    buckets = {(p.begin, p.end): p.score for p in result.parts if p.score is not None}
    values = {} if result.score is None else {LOSS: result.score}
    far = [p for p in result.parts if p.begin >= long and p.score is not None]
    if tokens := sum(part.count for part in far):
        values[LONG_LOSS] = sum((part.score or 0.0) * part.count for part in far) / tokens
    if result.key_tokens is not None and result.key_tokens.score is not None:
        values[KEY_LOSS] = result.key_tokens.score
    return values, buckets


def place_of(answer: int, length: int, tier: Tier) -> str:
    """Return where a question is asked. answer: position of its first answer token."""
    if answer >= length - tier.probe:
        return INSIDE
    return TAIL if answer >= length - _tail(length, tier.long_pairs) else ELSEWHERE


@functools.cache
def _tail(length: int, pairs: int) -> int:
    from mtrain_cli.data.needles import NeedleSettings

    return NeedleSettings(length, pairs, 0.0, 0).tail


def needles(
    rows: Sequence[dict[str, Any]], tier: Tier
) -> tuple[dict[str, float], dict[tuple[str, int], float]]:
    """Return percent found by measure, and by place and tenth of depth."""
    hits: dict[str, list[int]] = {}
    by_depth: dict[tuple[str, int], list[int]] = {}
    for row in rows:
        for (depth, hit), answer in zip(row.get("hits", ()), row.get("places", ()), strict=False):
            place = place_of(answer, tier.long_seq, tier)
            hits.setdefault(NEEDLES, []).append(hit)
            hits.setdefault(place, []).append(hit)
            if place != INSIDE:
                hits.setdefault(OUTSIDE, []).append(hit)
            at = min(DEPTHS - 1, int(depth * DEPTHS))
            by_depth.setdefault((place, at), []).append(hit)
    return (
        {name: 100.0 * sum(found) / len(found) for name, found in hits.items()},
        {key: 100.0 * sum(found) / len(found) for key, found in by_depth.items()},
    )


def dense_of(measured: Sequence[Measured], seed: int) -> Measured | None:
    """Return the dense cell of a seed."""
    wanted = DENSE, seed, DENSE
    cells = (one for one in measured if (one.cell.name, one.cell.seed, one.attention) == wanted)
    return next(cells, None)


def spread_of(measured: Sequence[Measured]) -> dict[str, float]:
    """Return the largest difference of two dense cells of one seed, by measure."""
    spread: dict[str, float] = {}
    for again in (one for one in measured if one.cell.name == AGAIN):
        dense = dense_of(measured, again.cell.seed)
        for name, value in again.values.items():
            if dense is not None and name in dense.values:
                difference = abs(value - dense.values[name])
                spread[name] = max(spread.get(name, 0.0), difference)
    return spread


def compare(tier: Tier, measured: Sequence[Measured], spread: dict[str, float]) -> list[Compared]:
    """Return each variant with each attention, over the seeds that have it and dense."""
    found = []
    for variant in tier.variants:
        own = [one for one in measured if one.cell.name == variant.name]
        for attention in dict.fromkeys(one.attention for one in own):
            each = [one for one in own if one.attention == attention]
            mean, difference = {}, {}
            for name in MEASURES:
                values = [one.values[name] for one in each if name in one.values]
                pairs = [
                    one.values[name] - dense.values[name]
                    for one in each
                    if (dense := dense_of(measured, one.cell.seed)) is not None
                    and name in one.values and name in dense.values
                ]  # fmt: skip
                if (over := interval(values)) is not None:
                    mean[name] = over
                if (paired := interval(pairs)) is not None and variant.name != DENSE:
                    difference[name] = paired
            found.append(
                Compared(
                    variant, attention, tuple(one.cell.seed for one in each), mean, difference,
                    {}, _mean([o.seconds for o in each]), _mean([o.density for o in each]),
                )
            )  # fmt: skip
    return judged(found, spread)


def judged(compared: Sequence[Compared], spread: Mapping[str, float]) -> list[Compared]:
    """Return the variants with the verdicts of their differences. spread: see `spread_of`."""
    found = []
    for each in compared:
        verdict = {}
        for name, difference in each.difference.items():
            noise = None if each.variant.name == AGAIN else spread.get(name)
            rule = judge_key_tokens if name == KEY_LOSS else judge
            verdict[name] = rule(difference, noise, lower=_is_loss(name))
        found.append(replace(each, verdict=verdict))
    return [_without_blind_claims(each, found) for each in found]


def control_loses(compared: Sequence[Compared], name: str, *, dense: bool) -> bool:
    """Return whether random keys lose by this measure, so that others could be seen to lose.

    dense: measured with dense attention.
    """
    return any(
        each.variant.name == FIXED
        and (each.attention == DENSE) == dense
        and each.verdict.get(name) == WORSE
        for each in compared
    )


def _without_blind_claims(each: Compared, compared: Sequence[Compared]) -> Compared:
    verdict = {
        name: OPEN
        if words == NOTHING and not control_loses(compared, name, dense=each.attention == DENSE)
        else words
        for name, words in each.verdict.items()
    }
    return replace(each, verdict=verdict)


def judge(difference: Interval, spread: float | None, *, lower: bool) -> str:
    """Return the words for a difference from dense.

    Args:
        spread: noise of two dense trainings; None if there is none to compare with.
        lower: whether lower values are better.
    """
    if spread is None:
        return CONTROL
    if difference.low is None or difference.high is None:
        return OPEN
    if difference.is_inside(spread):
        return NOTHING
    above, below = difference.low > 0, difference.high < 0
    if above or below:
        return BETTER if below == lower else WORSE
    return OPEN


def judge_key_tokens(difference: Interval, spread: float | None, *, lower: bool) -> str:
    """Return the words for a difference of the loss of key tokens. See `judge`.

    Dense chooses these tokens, some of which it predicts well by chance: any other training is
    worse on them. So they say what is worse for sure, and never what loses nothing.
    """
    words = judge(difference, spread, lower=lower)
    beyond = spread is not None and difference.low is not None and difference.low > spread
    if words == NOTHING or (words == WORSE and not beyond):
        return OPEN
    return words


def read_predictions() -> list[Prediction]:
    """Return the predictions of the repository."""
    return [
        documents.checked(Prediction, {**row, "written": str(row["written"])})
        for row in documents.read_yaml(predictions_file())
    ]


def predictions_file() -> Path:
    return Path(__file__).with_name("predictions.yaml")


def outcome(prediction: Prediction, measured: Sequence[Measured], tier: Tier) -> Outcome:
    """Compare a prediction with the mean over its seeds of the paired differences."""
    seeds = prediction.judged_by(tier)
    measured = [one for one in measured if one.cell.seed in seeds]
    pairs = []
    for one in _with(measured, prediction.cell, prediction.attention):
        if (dense := dense_of(measured, one.cell.seed)) is not None:
            pairs.append((one, dense))
    if not pairs:
        of = f" of the seeds {', '.join(map(str, seeds))}" if seeds != tier.seeds else ""
        return Outcome(prediction, UNKNOWN, f"no such cell{of} is finished")
    reference = [dense.values.get(prediction.measure, 100.0) for _, dense in pairs]
    if prediction.measure in (NEEDLES, OUTSIDE, *PLACES) and _mean(reference) < LEAST_TO_LOSE:
        found = f"dense finds only {_mean(reference):.1f} %, so there is nothing to lose"
        return Outcome(prediction, UNKNOWN, found)
    values = [v for one, dense in pairs if (v := _value(prediction, one, dense, measured, tier))]
    over = interval([value[0] for value in values])
    limit, spread = prediction.limit, spread_of(measured).get(prediction.measure)
    if prediction.beside and not _with(measured, prediction.beside, prediction.attention):
        return Outcome(prediction, UNKNOWN, f"no cell {prediction.beside} is finished")
    if over is None:
        return Outcome(prediction, UNKNOWN, "the measurement has no such part")
    if prediction.rule == "within_spread" and spread is None:
        return Outcome(prediction, UNKNOWN, f"{AGAIN} of no such seed is finished")
    holds = {
        "at_most_percent": over.mean <= limit,
        "above_percent": over.mean > limit,
        "loses_at_most": over.mean <= limit,
        "loses_more_than": over.mean > limit,
        "recovers_half": over.mean >= limit,
        "below_dense": over.mean < limit,
        "below_cell": over.mean < limit,
        "within_spread": spread is not None and abs(over.mean) <= spread,
    }[prediction.rule]
    text = f"{over.mean:+.3g}"
    if over.low is not None and over.high is not None:
        text += f" [{over.low:+.3g}, {over.high:+.3g}]"
    text += f" {values[0][1]}"
    if prediction.rule == "within_spread":
        text += f" (spread {spread:.3g})"
    if prediction.rule == "below_cell":
        text += f" ({prediction.cell} minus {prediction.beside})"
    seeds_with = f"{len(values)} seed{'s' * (len(values) != 1)}"
    return Outcome(prediction, HELD if holds else FAILED, f"{text}, {seeds_with}")


def _with(measured: Sequence[Measured], name: str, attention: str) -> list[Measured]:
    return [
        one
        for one in measured
        if one.cell.name == name and (one.attention == DENSE) == (attention == DENSE)
    ]


def _value(
    prediction: Prediction, one: Measured, dense: Measured, measured: Sequence[Measured], tier: Tier
) -> tuple[float, str] | None:
    """Return the number that a rule judges, and its unit; None if a part is missing."""
    if prediction.measure == WORST_BUCKET:
        shares = [
            100 * (loss / dense.buckets[span] - 1)
            for span, loss in one.buckets.items()
            if span[0] >= tier.base_seq and span in dense.buckets
        ]
        return (max(shares), "% in the worst range") if shares else None
    name, unit = prediction.measure, "nats" if _is_loss(prediction.measure) else "points"
    if name not in one.values or name not in dense.values:
        return None
    own, reference = one.values[name], dense.values[name]
    if prediction.rule in ("at_most_percent", "above_percent"):
        return 100 * (own / reference - 1), "% of the dense loss"
    if prediction.rule in ("below_dense", "within_spread"):
        return own - reference, unit
    if prediction.rule == "below_cell":
        others = _with(measured, prediction.beside, prediction.attention)
        other = next((m for m in others if m.cell.seed == one.cell.seed), None)
        if other is None or name not in other.values:
            return None
        return own - other.values[name], unit
    if prediction.rule == "recovers_half":
        sparse = next((m for m in measured if m.cell == one.cell and m.attention != DENSE), None)
        if sparse is None or sparse.values.get(name, reference) >= reference:
            return None  # nothing was lost
        lost = reference - sparse.values[name]
        return 100 * (own - sparse.values[name]) / lost, "% of the lost points"
    return reference - own, "points lost"


def _is_loss(name: str) -> bool:
    return name in (LOSS, LONG_LOSS, KEY_LOSS)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
