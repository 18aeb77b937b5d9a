"""The settings of a cell, its files, and its measurement.

A finished cell has `DONE`, and is never computed again. The folder of a study:

- `ABOUT`: what the folder is
- ``corpus/``: the texts
- ``NAME/seed-N/``: a cell: ``run/``, ``evaluation/``, `DONE`; of a base also ``hf/`` and
  ``stretched/``, the weights that the other cells of the seed begin with
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain_cli.composition.compose import compose
from mtrain_cli.config import documents, resolved_file
from mtrain_cli.config.documents import replace_text
from mtrain_cli.config.schema import NIAH, PERPLEXITY, Config, ConfigError
from mtrain_cli.evaluation.results import RESULTS, SAMPLES, Result, read_results
from mtrain_cli.launch.environment import resolve_environment
from mtrain_cli.launch.run_dir import COMMAND, LOCK, RUN, STUDY, RunDir, RunLock
from mtrain_cli.records.metrics import METRICS_FILE, WARM_UP_STEPS, read_readable_metrics
from mtrain_extras.studies import package_corpus
from mtrain_extras.studies.tiers import BASE, DENSE, OTHER_ORDER, TIERS, Cell, Tier, digest

if TYPE_CHECKING:
    from mtrain_cli.inference.model_source import ModelSource

DONE, HF, STRETCHED, EVALUATION = "done.json", "hf", "stretched", "evaluation"
CORPUS, ABOUT = "corpus", STUDY
_KIND = "learning"
_QUESTIONS_SEED = 1000  # of the needles to measure, which no training document has
_CHECKPOINTS = 5  # of a training, for one that is interrupted


@dataclass(frozen=True)
class Done:
    """What a finished cell leaves besides its evaluation.

    digest: of the cell's settings (`tiers.digest`).
    corpus: SHA-256 of the texts.
    step_seconds: median time of a step.
    density: mean share of causal pairs that the training computed.
    gate: percent of needles that a base finds at its length; None for other cells.
    base: SHA-256 of the weights that the cell began with; "" for a base, and if it is not known.
    """

    digest: str
    corpus: str
    steps: int
    seconds: float
    step_seconds: float
    density: float
    gate: float | None = None
    command: tuple[str, ...] = ()
    base: str = ""


class DamagedCellError(ConfigError):
    """The file `DONE` of a cell cannot be read, or the cell has lost results or samples."""


@dataclass(frozen=True)
class Study:
    """A tier in a folder.

    sha256: of the texts.
    """

    folder: Path
    tier: Tier
    sha256: str = ""

    @staticmethod
    def open(folder: Path) -> Study | None:
        """Open a folder that `save` marked; None if it is no study."""
        file = folder / ABOUT
        if not file.exists() and not all((folder / name).is_dir() for name in (BASE, CORPUS)):
            return None
        try:
            about = documents.read_json(file)
            why = "" if isinstance(about, dict) else "it is not a JSON object"
        except (OSError, ValueError) as error:
            about, why = None, documents.reason(error)
        if isinstance(about, dict):
            if about.get("study") != _KIND:
                return None
            if (tier := TIERS.get(str(about.get("tier")))) is None:
                raise ConfigError(
                    f"{file}: tier={about.get('tier')}: no such tier; allowed: {', '.join(TIERS)}"
                )
            if documents.is_number(steps := about.get("base_steps")) and isinstance(steps, int):
                return Study(folder, replace(tier, base_steps=steps))
            why = f"base_steps={steps}: expected a whole number"
        state = f"damaged ({why})" if file.exists() else "missing"
        raise ConfigError(
            f"{file}: {state}. The command of the study writes it again and keeps finished "
            f"cells: mtrain study learning --tier NAME --out {folder}"
        )

    def save(self, command: Sequence[str] = ()) -> None:
        """Mark the folder as a study of this tier. command: what goes on with the study."""
        about = {"study": _KIND, "tier": self.tier.name, "base_steps": self.tier.base_steps}
        about |= {COMMAND: list(command)} if command else {}
        replace_text(self.folder / ABOUT, json.dumps(about) + "\n")

    def path(self, cell: Cell) -> Path:
        return self.folder / cell.key

    def base(self, cell: Cell) -> Path:
        """Return the folder of the base of a cell."""
        return self.folder / Cell(cell.seed).key

    def other(self, cell: Cell, name: str) -> Cell:
        """Return the cell of another name with the same seed."""
        return Cell(cell.seed, self.tier.variant(name))

    def done(self, cell: Cell) -> Done | None:
        """Return what a finished cell left; None if it is not finished.

        Raises:
            DamagedCellError: the file cannot be read, results are missing or damaged, or the
                samples are missing.
            ConfigError: the folder has results of other settings.
        """
        file = self.path(cell) / DONE
        if not file.exists():
            return None
        try:
            found = documents.checked(Done, documents.read_json(file))
        except (OSError, ValueError) as error:
            state = f"damaged ({documents.reason(error)})"
            raise DamagedCellError(self._unfinished(file, state, cell)) from None
        if found.digest != digest(self.tier, cell):
            raise ConfigError(
                f"--out {self.folder}: holds {cell.key} of other settings of tier "
                f"{self.tier.name}; give another folder"
            )
        if self.sha256 and found.corpus != self.sha256:
            raise ConfigError(
                f"--out {self.folder}: {cell.key} was trained on other texts; give another folder"
            )
        evaluation = self.path(cell) / EVALUATION
        # Nothing reads the samples of a base, which would have to be trained again.
        for name in (RESULTS,) if cell.variant is None else (RESULTS, SAMPLES):
            if not (file := evaluation / name).is_file():
                raise DamagedCellError(self._unfinished(file, "missing", cell))
        if not _has_results(cell, read_results(evaluation)):
            raise DamagedCellError(self._unfinished(evaluation / RESULTS, "damaged", cell))
        return found

    def _unfinished(self, file: Path, state: str, cell: Cell) -> str:
        return f"{file}: {state}, so {cell.key} does not count as finished. {self.repair(cell)}"

    def repair(self, cell: Cell) -> str:
        """Return how to compute a damaged cell again."""
        # The other cells of the seed began with the weights in the folder of a base.
        lost = self.path(cell) / DONE if cell.variant is None else self.path(cell)
        return f"Delete {lost} and run the study again"

    @property
    def texts(self) -> Path:
        return self.folder / CORPUS


def _has_results(cell: Cell, results: Iterable[Result]) -> bool:
    tasks: dict[str, set[str]] = {}
    for result in results:
        tasks.setdefault(result.attention, set()).add(result.task)
    wanted = {NIAH} if cell.variant is None else {NIAH, PERPLEXITY}
    count = 1 if cell.variant is None or not cell.variant.words else 2
    return DENSE in tasks and len(tasks) == count and all(wanted <= own for own in tasks.values())


def training_words(study: Study, cell: Cell) -> list[str]:
    """Return the settings of a cell's training, as `mtrain train` takes them."""
    tier, variant = study.tier, cell.variant
    is_base = variant is None
    seed = cell.seed + (OTHER_ORDER if variant is not None and variant.other_order else 0)
    steps = _steps(study, cell)
    batch = tier.base_batch if is_base else tier.batch
    replicas, workers = _replicas(tier, batch)
    words = [
        *tier.machine,
        "data=text",
        f"data.path={study.texts.resolve()}",
        f"data.mix={_mix(is_base=is_base)}",
        f"data.tokenizer={package_corpus.tokenizer_path(study.texts, tier)}",
        "data.document_mask=false",
        f"seq={tier.base_seq if is_base else tier.long_seq}",
        f"seed={seed}",
        f"train.steps={steps}",
        f"train.global_batch={batch}",
        f"train.micro_batch={batch // replicas}",
        f"train.checkpoint_every={max(1, steps // _CHECKPOINTS)}",
        "train.keep_checkpoints=1",
        f"optim.lr={tier.base_lr if is_base else tier.lr}",
        f"optim.warmup_steps={max(1, steps // 15)}",
        f"run.dir={(study.path(cell) / RUN).resolve()}",
        f"run.name={tier.name}-{cell.name}-{cell.seed}",
    ]
    if variant is None:
        # Always given: a base that resumes on other GPUs must not keep the number of before.
        shared = f"topology.context_parallel={workers // replicas}"
        return [*words, shared, *tier.model, f"model.rope.original_max_position={tier.base_seq}"]
    return [
        *words,
        f"train.init_from={(study.base(cell) / HF).resolve()}",
        "model.rope.scaling=yarn",
        f"model.rope.original_max_position={tier.base_seq}",
        *variant.words,
        *_density_words(study, cell),
    ]


def _replicas(tier: Tier, batch: int) -> tuple[int, int]:
    """Return the number of context groups that share the sequences of a step, and all workers."""
    workers = resolve_environment(compose(list(tier.machine))).dims.workers
    return math.gcd(workers, batch), workers


def _mix(*, is_base: bool) -> str:
    shares = package_corpus.mix(is_base=is_base)
    return "{" + ", ".join(f"{name}: {weight:g}" for name, weight in shares.items()) + "}"


def _steps(study: Study, cell: Cell) -> int:
    """Return the steps of a cell: those of the tier, or as many as fit the time of another cell."""
    variant = cell.variant
    if variant is None:
        return study.tier.base_steps
    if not variant.time_of:
        return study.tier.steps
    time, pace = (
        _required(study, study.other(cell, name)) for name in (variant.time_of, variant.pace_of)
    )
    return max(1, round(time.steps * time.step_seconds / pace.step_seconds))


def _density_words(study: Study, cell: Cell) -> list[str]:
    """Return the settings of `fixed` that compute as many pairs as another cell."""
    variant = cell.variant
    if variant is None or not variant.density_of:
        return []
    tier = study.tier
    model = compose([*tier.model, *tier.variant(variant.density_of).words])
    layers, dense = model.model.num_layers, len(model.sparsity.dense_of(model.model.num_layers))
    whole = _required(study, study.other(cell, variant.density_of)).density
    density = (whole * layers - dense) / (layers - dense)
    share = 1 - math.sqrt(max(0.0, 1 - density))
    return [
        f"sparsity.density={share:.6g}",
        f"sparsity.columns={max(1, round(share * tier.long_seq))}",
        f"sparsity.block={model.sparsity.block}",
    ]


def _required(study: Study, cell: Cell) -> Done:
    found = study.done(cell)
    assert found is not None, f"{cell.key} comes first (`tiers.cells_of`)"
    return found


def unfinished(study: Study, cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells that are not finished, and before them the bases that they need again.

    A base that has lost its weights is trained again if a cell must begin with them, and no
    finished cell did.
    """
    missing = [cell for cell in cells if study.done(cell) is None]
    again = []
    for base in dict.fromkeys(Cell(cell.seed) for cell in missing):
        if damage := damage_of_base(study, base):
            raise ConfigError(damage)
        if weights_of_base(study, base):
            continue
        if begun := _begun(study, base):
            # Weights that are trained again differ, by more than what the study measures.
            raise ConfigError(
                f"{study.path(base) / HF}: has no weights, and {begun[0]} began with them. Put "
                f"them back, or delete {study.folder}/*/seed-{base.seed} to compute the seed again"
            )
        if base not in missing:
            again.append(base)
    return [*again, *missing]


def _begun(study: Study, base: Cell) -> list[str]:
    of_seed = (Cell(base.seed, variant) for variant in study.tier.variants)
    return [cell.key for cell in of_seed if (study.path(cell) / DONE).is_file()]


def damage_of_base(study: Study, base: Cell) -> str:
    """Return a line on a truncated or damaged file of weights, with what to do; "" for none."""
    from safetensors import SafetensorError, safe_open

    # Without weights, a base is trained again (`unfinished`), and then stretched again.
    names = (HF, STRETCHED) if weights_of_base(study, base) else ()
    for folder in (study.path(base) / name for name in names):
        for file in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(file, "numpy"):
                    continue
            except (OSError, SafetensorError) as error:
                damage = f"{file}: truncated or damaged ({documents.reason(error)})"
            begun = _begun(study, base)
            if folder.name == HF and begun:
                return (
                    f"{damage}, and {begun[0]} began with these weights. Put the file back, or "
                    f"delete {study.folder}/*/seed-{base.seed} and run the same command again, "
                    "which computes the seed again"
                )
            is_trained = folder.name == HF and (study.path(base) / DONE).is_file()
            again = f"trains {base.key} again" if is_trained else "writes the weights again"
            # The files of both folders are the same (hard links).
            lost = f"{folder} and {study.path(base) / STRETCHED}" if folder.name == HF else folder
            return f"{damage}. Delete {lost} and run the same command again, which {again}"
    return ""


def weights_of_base(study: Study, cell: Cell) -> list[Path]:
    """Return the files of weights that a cell begins with; [] before its base is finished."""
    return sorted((study.base(cell) / HF).glob("*.safetensors"))


def _digest_of_base(study: Study, cell: Cell) -> str:
    found = hashlib.sha256()
    for path in weights_of_base(study, cell):
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


def compute(
    study: Study, cell: Cell, train: Callable[[list[str]], None], *, below_gate: bool = False
) -> Done:
    """Train and measure a cell. A stopped one continues where it was.

    Args:
        below_gate: whether a base may miss the gate.

    Raises:
        ConfigError: a setting is wrong, the base misses the gate, or another process computes the
            cell.
        RunError: training failed or was stopped.
    """
    folder = study.path(cell)
    folder.mkdir(parents=True, exist_ok=True)
    lock = RunLock(
        folder, f"--out {study.folder}: {cell.key}",
        "Wait until it has finished, stop it, or name other cells with --only",
    )  # fmt: skip
    try:
        found = study.done(cell)
        if found is not None and (cell.variant is not None or weights_of_base(study, cell)):
            return found  # another process has computed it meanwhile
        return _compute(study, cell, train, below_gate=below_gate)
    finally:
        lock.release()


def _compute(
    study: Study, cell: Cell, train: Callable[[list[str]], None], *, below_gate: bool
) -> Done:
    folder = study.path(cell)
    run = folder / RUN
    steps, seconds, pace, density = 0, 0.0, 0.0, 1.0
    words: list[str] = []
    if cell.variant is None and study.done(cell) is not None:
        _empty(folder)  # it has lost its weights (`unfinished`)
    if cell.variant is None or cell.variant.is_trained:
        words = training_words(study, cell)
        _drop_lost_run(run)
        train(words)
        steps = _steps(study, cell)
        seconds, pace, density = _trained(run, steps)
    gate = None
    if cell.variant is None:
        export_base(study, cell)
        gate = _measure_base(study, cell, below_gate=below_gate)
    else:
        measure(study, cell)
    found = Done(
        digest(study.tier, cell), study.sha256, steps, seconds, pace, density, gate,
        ("mtrain", "train", *words) if words else (),
        "" if cell.variant is None else _digest_of_base(study, cell),
    )  # fmt: skip
    replace_text(folder / DONE, json.dumps(asdict(found), indent=1) + "\n")
    # The weights of a base are in its folder hf; those of a cell have been measured.
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    return found


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != LOCK:
            entry.unlink()


def _trained(run: Path, steps: int) -> tuple[float, float, float]:
    """Return the seconds of a training, the median seconds of a step, and the mean density."""
    metrics, _ = read_readable_metrics(run / METRICS_FILE)
    whole = [row for row in metrics if None not in (row.seconds, row.density)]
    if not whole:
        raise ConfigError(f"{run / METRICS_FILE}: no step can be read")
    timed = [row.seconds for row in whole if row.step > WARM_UP_STEPS] or [whole[-1].seconds]
    pace = statistics.median(timed)
    seconds = sum(row.seconds for row in whole) + pace * (steps - len(whole))
    return seconds, pace, statistics.fmean(row.density for row in whole)


def _drop_lost_run(run: Path) -> None:
    """Delete a run that cannot be resumed: one without checkpoint, or from another folder."""
    if not (file := run / "resolved.yaml").is_file():
        shutil.rmtree(run, ignore_errors=True)  # what an interrupted deletion has left
        return
    moved = Path(resolved_file.load(file).run.dir) != run.resolve()
    if moved or RunDir(run).last_step() is None:
        shutil.rmtree(run)


def export_base(study: Study, cell: Cell) -> None:
    """Write the weights of a base, as trained and with positions stretched by YaRN."""
    import torch

    from mtrain_cli.model.huggingface import SUMS, writing
    from mtrain_cli.model.huggingface_config import config_json
    from mtrain_cli.training.conversion import export_checkpoint

    folder = study.path(cell)
    hf, stretched = folder / HF, folder / STRETCHED
    if not hf.exists():
        # All cells begin with the rounded weights, so that half of the bytes are all of a base.
        export_checkpoint(folder / RUN, hf, dtype=torch.bfloat16)
    if stretched.exists():
        return
    tier = study.tier
    config = resolved_file.load(folder / RUN / "resolved.yaml")
    rope = replace(
        config.model.rope, scaling="yarn", original_max_position=tier.base_seq, factor="auto"
    )
    model = replace(config.model, rope=rope)
    factor = tier.long_seq / tier.base_seq
    keys = config_json(model, rope_factor=factor, seq=tier.long_seq, dtype="bfloat16")
    names = ("max_position_embeddings", "rope_scaling", "rope_parameters")
    values = json.loads((hf / "config.json").read_text())
    new = {**values, **{name: keys[name] for name in names}}
    changed = shutil.ignore_patterns("config.json", SUMS)
    with writing(stretched) as draft:
        shutil.copytree(hf, draft, copy_function=os.link, ignore=changed, dirs_exist_ok=True)
        (draft / "config.json").write_text(json.dumps(new, indent=2) + "\n")


def _measure_base(study: Study, cell: Cell, *, below_gate: bool) -> float | None:
    """Measure needles of a base at its length. Return the percent found."""
    tier, folder = study.tier, study.path(cell)
    source = _source(study, folder / HF)
    _evaluate(study, folder, NIAH, folder / HF, {DENSE: source.config}, tier.base_seq)
    (result,) = (r for r in read_results(folder / EVALUATION) if r.task == NIAH)
    if not below_gate and tier.gate is not None and (result.score or 0.0) < tier.gate:
        raise ConfigError(
            f"{cell.key}: the base finds {result.score or 0.0:.1f} % of the needles at "
            f"{tier.base_seq:,} tokens, and the gate is {tier.gate:g} %. What it cannot find, no "
            "attention can lose. Train it for longer: --base-steps N, with another --out. Or go on "
            "with --below-gate"
        )
    return result.score


def measure(study: Study, cell: Cell) -> None:
    """Measure a cell with dense attention, and with that of its training."""
    variant = cell.variant
    assert variant is not None
    folder = study.path(cell)
    if not variant.is_trained:
        export_base(study, Cell(cell.seed))  # unless it has all weights
    model = folder / RUN if variant.is_trained else study.base(cell) / STRETCHED
    source = _source(study, model)
    configs = {DENSE: source.config}
    if variant.is_trained:
        sparsity = resolved_file.load(model / "resolved.yaml").sparsity
        if sparsity.pattern != DENSE:
            # Also `fixed`, which `mtrain eval` refuses: it is a control here.
            configs[sparsity.pattern] = replace(source.config, sparsity=sparsity)
    dense = study.path(study.other(cell, DENSE)) / EVALUATION
    keys = None if variant.name == DENSE else dense
    length = study.tier.long_seq
    _evaluate(study, folder, PERPLEXITY, source.path, configs, length, keys)
    _evaluate(study, folder, NIAH, source.path, configs, length)


def _source(study: Study, model: Path) -> ModelSource:
    from mtrain_cli.inference.model_source import open_source

    # A share of a sequence would not be faster: one worker measures.
    device = [word for word in study.tier.machine if word.startswith("topology.device=")]
    return open_source(model, [*device, "sparsity=dense", "topology.workers=1"])


def _evaluate(
    study: Study,
    folder: Path,
    kind: str,
    model: Path,
    configs: dict[str, Config],
    length: int,
    keys: Path | None = None,
) -> None:
    from mtrain_cli.evaluation.request import (
        EvaluationRequest,
        NeedleOptions,
        PerplexityOptions,
        Weights,
    )
    from mtrain_cli.evaluation.retrieval import PYTHON
    from mtrain_cli.evaluation.runner import Runner, evaluate
    from mtrain_cli.launch.run_dir import checkpoints_of

    tier, out = study.tier, folder / EVALUATION
    is_folder = (model / "config.json").is_file()
    weights = Weights.of_folder(model) if is_folder else Weights.of_checkpoint(
        checkpoints_of(model)[0]
    )  # fmt: skip
    held_out = str((study.texts / package_corpus.HELD_OUT).resolve())
    pairs = tier.base_pairs if length == tier.base_seq else tier.long_pairs
    request = EvaluationRequest(
        kind=kind,
        out=str(out.resolve()),
        model=f"{study.tier.name} {folder.parent.name}/{folder.name}",  # a study can move
        weights=(weights,),
        attentions=tuple(configs),
        lengths=(length,),
        samples=tier.texts if kind == PERPLEXITY else tier.documents,
        perplexity=PerplexityOptions(
            held_out, short=tier.short, keys_from=None if keys is None else str(keys.resolve())
        ),
        niah=NeedleOptions(PYTHON, held_out, pairs, package_corpus.CHAINS, _QUESTIONS_SEED),
    )
    environment = resolve_environment(next(iter(configs.values())))
    evaluate(Runner(request, tuple(configs.values()), environment), environment)


def estimated_seconds(tier: Tier, cell: Cell) -> float:
    """Return the seconds of a cell at the speed that its tier assumes for one worker.

    Workers that deal the sequences of a base's step share its time. A cell counts as on one worker.
    """
    training, measuring = estimated_flop(tier, cell)
    if cell.variant is None:
        return (training / _replicas(tier, tier.base_batch)[0] + measuring) / tier.base_flops
    return (training + measuring) / tier.flops


def estimated_flop(tier: Tier, cell: Cell) -> tuple[float, float]:
    """Return the FLOP of a cell's training and of its measurement, if all attention were dense."""
    from mtrain_cli.evaluation.cost import forward_flop
    from mtrain_cli.evaluation.perplexity import STRIDES
    from mtrain_cli.training.flops import flops_per_token

    seq = tier.base_seq if cell.variant is None else tier.long_seq
    config = compose([*tier.model, f"seq={seq}"])
    forward = forward_flop(config, seq)
    if cell.variant is None:
        tokens = float(tier.base_steps * tier.base_batch * seq)
        return tokens * flops_per_token(config.model, seq).executed, tier.documents * forward
    trains = cell.variant.is_trained
    tokens = float(tier.steps * tier.batch * seq) if trains else 0.0
    attentions = 2 if cell.variant.words else 1
    again = (STRIDES + 1) * tier.texts * forward if cell.name == DENSE else 0.0
    measured = attentions * (tier.texts + tier.documents) * forward + again
    return tokens * flops_per_token(config.model, seq, recomputed=True).executed, measured
