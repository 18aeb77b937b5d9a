"""`train` from banner to summary: when it saves and stops, what it leaves, and what it refuses."""

from __future__ import annotations

import errno
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gloo
import numpy as np
import pytest
from masked_documents import prepared, without_checksums, write_jsonl
from mds.test_mds import write_mds
from slow_cases import mostly_slow

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.loader import Loader
from mtrain_cli.data.open_dataset import open_dataset
from mtrain_cli.data.token_documents import RecordKey, TokenFields
from mtrain_cli.launch.environment import Environment
from mtrain_cli.launch.failures import PeerLostError, RunError, read_failure
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.launch.run_status import read_state
from mtrain_cli.training import loop
from mtrain_cli.training.checkpointer import Checkpointer, load_model_state, write_model_state
from mtrain_cli.training.loop import train
from mtrain_cli.training.progress import TrainingProgress
from mtrain_cli.training.step import NonFiniteError, StepReport, check_finite
from mtrain_cli.training.trainer import Trainer

SMALL = [
    "seq=96",
    "topology.block_size=16",
    "model.hidden_size=32",
    "model.num_layers=1",
    "model.head_dim=8",
    "model.intermediate_size=48",
    "optim.warmup_steps=2",
]


def place(rank: int, world: int) -> Environment:
    """Return one of `world` CPU processes that share every sequence."""
    return gloo.environment(rank, world)


def run(
    rank: int,
    world: int,
    folder: str,
    overrides: list[str],
    resume: bool = False,
    stop_after: int | None = None,
) -> list[int]:
    """Train; return the steps of the checkpoints that were started."""
    run_dir = RunDir(Path(folder))
    run_dir.path.mkdir(exist_ok=True)
    begun: list[int] = []
    save, step = Checkpointer.save, Trainer.train_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Checkpointer,
            "save",
            lambda self, number, state: (begun.append(number), save(self, number, state))[1],
        )
        if stop_after is not None:
            patch.setattr(
                Trainer,
                "train_step",
                lambda self, stop, save: step(self, stop or self.step + 1 >= stop_after, save),
            )
        train(compose([*SMALL, *overrides]), run_dir, place(rank, world), resume)
    return begun


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_run_saves_periodically_and_at_the_end_and_keeps_the_newest(tmp_path):
    words = ["train.steps=5", "train.checkpoint_every=2", "train.keep_checkpoints=2"]
    assert gloo.run(2, run, str(tmp_path), words) == [[2, 4, 5], [2, 4, 5]]
    assert checkpoints(tmp_path) == ["step-4", "step-5"]
    assert [m["step"] for m in metrics(tmp_path)] == [1, 2, 3, 4, 5]
    state = read_state(RunDir(tmp_path))
    assert state is not None
    assert state.chosen["topology.layout"] == "striped", "topology.layout=auto"


def test_every_mth_checkpoint_stays_when_the_run_resumes_too(tmp_path):
    words = ["train.checkpoint_every=1", "train.keep_checkpoints=1", "train.keep_every=2"]
    gloo.run(2, run, str(tmp_path), ["train.steps=3", *words])
    assert checkpoints(tmp_path) == ["step-2", "step-3"]
    gloo.run(2, run, str(tmp_path), ["train.steps=5", *words], True)
    assert checkpoints(tmp_path) == ["step-2", "step-4", "step-5"]


def test_a_last_step_that_was_just_saved_is_not_saved_twice(tmp_path):
    assert gloo.run(1, run, str(tmp_path), ["train.steps=4", "train.checkpoint_every=2"]) == [
        [2, 4]
    ]


def test_a_run_configured_to_save_nothing_saves_nothing(tmp_path):
    assert gloo.run(
        1,
        run,
        str(tmp_path),
        ["train.steps=2", "train.checkpoint_every=0", "train.checkpoint_at_end=false"],
    ) == [[]]


def test_a_stop_saves_at_once_and_resuming_gives_the_same_losses(tmp_path):
    words = ["train.steps=6", "train.checkpoint_every=0"]
    gloo.run(2, run, str(tmp_path / "whole"), words)
    assert gloo.run(2, run, str(tmp_path / "parts"), words, False, 3) == [[3], [3]]
    file = tmp_path / "parts" / "metrics.jsonl"
    second = file.read_text().splitlines(keepends=True)[1]
    file.write_text(file.read_text().replace(second, "oops\n"))
    assert gloo.run(2, run, str(tmp_path / "parts"), words, True) == [[6], [6]]
    text = file.read_text()
    assert text.count("oops\n") == 1
    file.write_text(text.replace("oops\n", second))
    whole, parts = (
        [(m["step"], m["loss"], m["grad_norm"], m["lr"]) for m in metrics(tmp_path / name)]
        for name in ("whole", "parts")
    )
    assert whole == parts
    log = (tmp_path / "parts" / "log.txt").read_text()
    assert "stopped on request after step 3, saved" in log
    assert "resumed from the checkpoint of step 3" in log


def test_a_run_goes_on_with_another_fp8_and_says_so(tmp_path):
    words = ["train.dtype=bfloat16", "train.steps=2"]
    gloo.run(1, run, str(tmp_path), words)
    gloo.run(1, run, str(tmp_path), [*words, "train.fp8=mlp", "train.steps=3"], True)
    gloo.run(1, run, str(tmp_path), [*words, "train.fp8=mlp", "train.steps=4"], True)
    lines = [n for n in (tmp_path / "log.txt").read_text().splitlines() if "resumed" in n]
    changed = "of step 2; train.fp8=mlp from here on, train.fp8=none before"
    assert [n.partition("checkpoint ")[2] for n in lines] == [changed, "of step 3"]
    assert [m["step"] for m in metrics(tmp_path)] == [1, 2, 3, 4]


def test_the_fp8_that_a_checkpoint_names_reaches_the_log_on_one_line(tmp_path):
    trainer = SimpleNamespace(
        config=compose(SMALL),
        environment=replace(place(0, 1), restarts=1),  # which shows no banner
        step=2,
        train_state=SimpleNamespace(earlier_fp8="\x1b[2Jmlp\nerror: x"),
    )
    with TrainingProgress(3, 2, True, log=tmp_path / "log.txt") as progress:
        loop._announce(trainer, RunDir(tmp_path), progress, True, [], None)
    (line,) = [n for n in (tmp_path / "log.txt").read_text().splitlines() if "resumed" in n]
    assert line.endswith(r"train.fp8=none from here on, train.fp8=\x1b[2Jmlp\nerror: x before")


def test_a_stop_saves_even_if_the_end_would_not(tmp_path):
    words = ["train.steps=6", "train.checkpoint_every=0", "train.checkpoint_at_end=false"]
    assert gloo.run(2, run, str(tmp_path), words, False, 3) == [[3], [3]]


def test_imported_weights_are_trained_from_step_0(tmp_path):
    words = ["train.steps=2", "optim.lr=1e-9", "optim.weight_decay=0", "train.checkpoint_every=0"]
    words += ["data.bos=true"]
    gloo.run(1, run, str(tmp_path / "first"), words)
    weights = load_model_state(tmp_path / "first")[1]
    (tmp_path / "imported" / "tokenizer").mkdir(parents=True)
    write_model_state(tmp_path / "imported" / "checkpoints", 0, weights)
    assert gloo.run(2, run, str(tmp_path / "imported"), words, True) == [[2], [2]]
    begin = json.loads((tmp_path / "imported" / "tokenizer" / "begin.json").read_text())
    assert begin == {"ids": [256], "name": "<|mtrain:begin|>"}
    assert [m["step"] for m in metrics(tmp_path / "imported")] == [1, 2]
    first, imported = (metrics(tmp_path / name)[0]["loss"] for name in ("first", "imported"))
    assert imported == pytest.approx(first, abs=1e-4), (
        "the weights have barely moved in two steps of 1e-9"
    )
    other = gloo.run(1, run, str(tmp_path / "other"), [*words, "seed=7"])
    assert other
    assert abs(metrics(tmp_path / "other")[0]["loss"] - first) > 1e-3, "and others would show"


def other_data(rank: int, world: int) -> str:
    config = compose(SMALL)
    dataset = open_dataset(config)
    dataset.fingerprint = f"of machine {rank // 2}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtrain_cli.training.trainer.open_dataset", lambda _: dataset)
        with pytest.raises(ConfigError) as caught:
            Trainer(config, place(rank, world))
    return str(caught.value)


def test_machines_with_different_data_are_refused():
    for message in gloo.run(3, other_data):
        assert (
            message == "data.kind=stdlib: rank 2 reads a different corpus than rank 0. "
            "Give all machines the same data."
        )


def fails_while_saving(rank: int, world: int, folder: str) -> bool:
    """The third step is not finite while the second one's checkpoint is still being written."""
    publish, step = Checkpointer._publish, Trainer.train_step

    def slowly(self: Checkpointer, *arguments) -> None:
        time.sleep(1.0)
        publish(self, *arguments)

    def poisoned(self: Trainer, stop: bool, save: bool):
        if self.step == 2:
            check_finite([StepReport(float("nan"), 1.0, 0.0, 0.0, 0.0, 0.0)], self.step + 1)
        return step(self, stop, save)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpointer, "_publish", slowly)
        patch.setattr(Trainer, "train_step", poisoned)
        run_dir = RunDir(Path(folder))
        with pytest.raises(NonFiniteError, match="the previous checkpoint is intact"):
            train(
                compose([*SMALL, "train.steps=4", "train.checkpoint_every=2"]),
                run_dir,
                place(rank, world),
                False,
            )
    return (Path(folder) / "checkpoints" / "step-2").is_dir()


def test_a_non_finite_step_waits_for_the_save_in_progress(tmp_path):
    assert gloo.run(1, fails_while_saving, str(tmp_path)) == [True]


def lacks_data_while_saving(rank: int, world: int, folder: str) -> list[tuple[str, str, bool]]:
    """Rank 1 cannot read the third step's data while the second one's checkpoint is being written.

    Once by a user's mistake, once by a disk failure.
    """
    publish, read = Checkpointer._publish, Loader._read

    def slowly(self: Checkpointer, *arguments) -> None:
        time.sleep(0.5)
        publish(self, *arguments)

    results = []
    for error in (
        ConfigError("data.path=x: sequence 2 is broken"),
        read_failure(OSError(errno.EIO, ""), "Input/output error"),
    ):

        def broken(self: Loader, consumed: int, error: Exception = error):
            if rank == 1 and consumed >= 2:
                raise error
            return read(self, consumed)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Checkpointer, "_publish", slowly)
            patch.setattr(Loader, "_read", broken)
            run_dir = RunDir(Path(folder) / type(error).__name__)
            run_dir.path.mkdir(exist_ok=True)
            words = [
                "train.steps=4",
                "train.checkpoint_every=2",
                "train.global_batch=1",
                "train.micro_batch=1",
            ]
            with pytest.raises((ConfigError, RunError)) as caught:
                train(compose([*SMALL, *words]), run_dir, place(rank, world), False)
            results.append(
                (
                    type(caught.value).__name__,
                    str(caught.value),
                    (run_dir.checkpoints / "step-2").is_dir(),
                )
            )
    return results


def test_a_worker_without_data_ends_all_workers_after_the_save_in_progress(tmp_path):
    others, its = gloo.run(2, lacks_data_while_saving, str(tmp_path))
    assert its == [
        ("ConfigError", "data.path=x: sequence 2 is broken", True),
        ("RunError", "Input/output error", True),
    ]
    assert others == [(PeerLostError.__name__, "rank 1 has no data for step 3", True)] * 2


@mostly_slow(
    ("words", "counted"),
    [
        (["mask=block_causal", "mask.block=32"], 2 * 3),
        (["mask=prefix_lm", "mask.prefix=65"], 2 * 32),
        ([], 2 * 96),
    ],
    keep=(0, 1),
)
def test_targets_are_counted_apart_from_tokens(tmp_path, words, counted):
    one = ["data.document_mask=false", "train.global_batch=2", "train.steps=1"]
    gloo.run(2, run, str(tmp_path), [*one, *words])
    (step,) = metrics(tmp_path)
    assert (step["targets"], step["tokens"]) == (counted, 2 * 96)
    rate = step["tokens_per_second_per_gpu"]
    assert rate == pytest.approx(step["tokens"] / step["seconds"] / 2)
    rate = step["targets_per_second_per_gpu"]
    assert rate == pytest.approx(step["targets"] / step["seconds"] / 2)
    log = (tmp_path / "log.txt").read_text()
    assert f"  targets {counted}  " in log
    assert f"targets   {counted // 2} of the 96 tokens of the first sequence count" in log
    state = read_state(RunDir(tmp_path))
    assert state is not None
    assert state.targets == counted


def test_targets_leave_out_masked_labels_and_padding(tmp_path):
    ids = np.arange(140, dtype=np.uint32) + 1  # one sequence, and one with 52 tokens of padding
    mask = np.ones(140, np.uint8)
    mask[20:30] = 0
    sample = {"input_ids": ids, "indices": [[0, 140]], "mask": mask}
    columns = {"input_ids": "ndarray:uint32", "indices": "json", "mask": "ndarray"}
    write_mds(tmp_path / "mds", columns, [sample])
    words = ["data=mds", f"data.path={tmp_path / 'mds'}", "train.steps=2", "train.global_batch=1"]
    gloo.run(1, run, str(tmp_path / "run"), words)
    first, second = metrics(tmp_path / "run")
    assert first["targets"] + second["targets"] == 140 - 1 - 10
    assert second["tokens"] == 2 * 96


def _zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _flip(path: Path) -> None:
    """Change one bit that no sample of the file has."""
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4 + 5000] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    """A token store of 600,000 tokens with positions, which no sample covers."""
    folder = tmp_path_factory.mktemp("data")
    records = [{"ids": [n % 97] * 2000, "at": [*range(90)] * 22 + [*range(20)]} for n in range(300)]
    source = write_jsonl(folder / "documents.jsonl", records)
    fields = TokenFields(RecordKey("ids", "-"), positions=RecordKey("at", "-"))
    return prepared(source, folder / "store", fields).folder


def _trained(tmp_path: Path, store: Path, *words: str) -> tuple[Path, list[str]]:
    """Copy the store, and train two steps on the copy. Return the copy and the words."""
    copy = Path(shutil.copytree(store, tmp_path / "store"))
    words = ("data=tokens", f"data.path={copy}", "data.positions_key=at", *words)
    gloo.run(1, run, str(tmp_path / "run"), [*words, "train.steps=2"])
    return copy, [*words, "train.steps=3"]


@pytest.mark.parametrize(
    ("damage", "name"),
    [(_zero, "tokens.bin"), (_flip, "positions.bin")],
)
def test_a_store_that_changed_under_a_run_is_refused_at_resume(tmp_path, store, damage, name):
    copy, words = _trained(tmp_path, store)
    damage(copy / name)
    with pytest.raises(Exception, match=rf"store: {name} has changed since it was written"):
        gloo.run(1, run, str(tmp_path / "run"), words, True)
    assert len(metrics(tmp_path / "run")) == 2
    shutil.copy(store / name, copy / name)
    gloo.run(1, run, str(tmp_path / "run"), words, True)
    assert len(metrics(tmp_path / "run")) == 3


def test_a_change_of_a_store_without_checksums_is_found_by_what_the_run_saw(tmp_path, store):
    old = without_checksums(Path(shutil.copytree(store, tmp_path / "old")))
    copy, words = _trained(tmp_path, old, "data.verify=sampled")
    _zero(copy / "tokens.bin")
    with pytest.raises(Exception, match=r"changed since the checkpoint: tokens\.bin has other byt"):
        gloo.run(1, run, str(tmp_path / "run"), words, True)
