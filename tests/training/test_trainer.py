"""Optimizer steps on real processes do not depend on how workers and micro-batches split them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import gloo
import numpy as np
import pytest
import torch
from slow_cases import mostly_slow
from torch.distributed.tensor import DTensor

from mtrain_cli.attention.index import VerticalSlash
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch.failures import RunError
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.parallel.context_attention import DynamicIndex
from mtrain_cli.parallel.dispatch import Balancer
from mtrain_cli.parallel.layout import Balanced
from mtrain_cli.parallel.traffic import LayerMasks
from mtrain_cli.training.checkpointer import Checkpointer
from mtrain_cli.training.loop import train
from mtrain_cli.training.optimizer import local_gradients, squared_norm
from mtrain_cli.training.step import NonFiniteError, StepReport, StepResult, check_finite
from mtrain_cli.training.trainer import TrainData, Trainer

SMALL = [
    "seq=160",
    "topology.block_size=16",
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.head_dim=8",
    "model.intermediate_size=48",
    "optim.warmup_steps=2",
    "train.steps=6",
    "train.global_batch=4",
]


def make(rank: int, world: int, cp: int, overrides: tuple[str, ...]) -> Trainer:
    environment = gloo.environment(rank, world, cp)
    return Trainer(compose([*SMALL, *overrides]), environment)


def steps(
    rank: int,
    world: int,
    cp: int,
    overrides: tuple[str, ...],
    count: int,
    folder: str | None = None,
) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of `count` steps; a folder resumes and leaves a checkpoint."""
    trainer = make(rank, world, cp, overrides)
    checkpointer = Checkpointer(folder, 2) if folder else None
    if checkpointer and checkpointer.latest() is not None:
        trainer.resume(checkpointer)
    results = [trainer.train_step(False) for _ in range(count)]
    if checkpointer:
        checkpointer.save(trainer.step, trainer.state())
        checkpointer.wait()
    return [(result.loss, result.grad_norm) for result in results]


def close(a: list[tuple[float, float]], b: list[tuple[float, float]], tolerance: float) -> bool:
    return all(
        abs(x - y) <= tolerance * max(1.0, abs(y))
        for p, q in zip(a, b, strict=True)
        for x, y in zip(p, q, strict=True)
    )


@pytest.fixture(scope="module")
def alone() -> list[tuple[float, float]]:
    return gloo.run(1, steps, 1, (), 4)[0]


def test_the_loss_falls_and_the_gradient_is_not_zero(alone):
    assert alone[0][0] == pytest.approx(5.6, abs=0.5), "about ln 264 at random"
    assert alone[-1][0] < alone[0][0]
    assert all(norm > 0.1 for _, norm in alone)


@mostly_slow(
    ("world", "cp", "overrides"),
    [
        (1, 1, ("train.micro_batch=4",)),
        (2, 2, ("train.micro_batch=2", "topology.layout=zigzag")),
        (2, 1, ()),
        (
            4,
            2,
            (
                "topology.exchange=ring",
                "train.activation_checkpoint=sequence_selective",
                "train.offload_activations=true",
            ),
        ),
        (3, 3, ("topology.layout=contiguous", "train.activation_checkpoint=none")),
    ],
    keep=(1, 4),
)
def test_a_step_does_not_depend_on_how_it_is_split(alone, world, cp, overrides):
    for rank, got in enumerate(gloo.run(world, steps, cp, overrides, 4)):
        assert close(got, alone, 1e-5), f"rank {rank}: {got} instead of {alone}"


def test_resumed_training_is_bitwise_the_uninterrupted_one(tmp_path):
    whole = gloo.run(2, steps, 2, (), 4)
    first = gloo.run(2, steps, 2, (), 2, str(tmp_path))
    second = gloo.run(2, steps, 2, (), 2, str(tmp_path))
    assert [a + b for a, b in zip(first, second, strict=True)] == whole


def test_training_resumes_on_a_different_number_of_workers(tmp_path, alone):
    first = gloo.run(3, steps, 3, (), 2, str(tmp_path))[0]
    second = gloo.run(2, steps, 1, (), 2, str(tmp_path))[0]
    assert close(first + second, alone, 1e-5)


def hyperparameters(rank: int, world: int, folder: str) -> list[dict[str, Any]]:
    """Return the parameter groups of a run resumed with different hyperparameters."""
    trainer = make(rank, world, world, ("optim.weight_decay=0.1",))
    trainer.train_step(False)
    checkpointer = Checkpointer(folder, 2)
    checkpointer.save(trainer.step, trainer.state(), asynchronous=False)
    changed = make(
        rank, world, world, ("optim.weight_decay=0.5", "optim.betas=[0.8,0.9]", "optim.eps=1e-5")
    )
    changed.resume(checkpointer)
    results = [
        {"ndim": group["params"][0].ndim, **group} for group in changed.optimizer.param_groups
    ]
    return [
        {name: group[name] for name in ("ndim", "weight_decay", "betas", "eps")}
        for group in results
    ]


def test_a_resume_with_other_hyperparameters_uses_them(tmp_path):
    (results,) = gloo.run(1, hyperparameters, str(tmp_path))
    others = {"betas": (0.8, 0.9), "eps": 1e-5}
    assert results == [
        {"ndim": 2, "weight_decay": 0.5, **others},
        {"ndim": 1, "weight_decay": 0.0, **others},
    ]


def without_labels(trainer: Trainer, *steps: int) -> None:
    """Ignore all labels in the given steps, counted from 0."""
    make, seen = trainer.loader._make_batch, iter(range(10**6))
    local = trainer.config.train.global_batch // trainer.environment.dims.dp

    def made(samples):
        kept = [
            sample
            if next(seen) // local not in steps
            else replace(sample, labels=np.full_like(sample.labels, -100))
            for sample in samples
        ]
        return make(kept)

    trainer.loader._make_batch = made


def updated_tensors(trainer: Trainer) -> list[torch.Tensor]:
    """Return all that an update changes: both copies of the weights, moments and step counts."""
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    results = [*trainer.decoder.parameters(), *trainer.states.masters.parameters(), *states]
    return [(t.to_local() if isinstance(t, DTensor) else t).detach().clone() for t in results]


def unlabelled(
    rank: int, world: int, settings: list[tuple[int, tuple[str, ...]]]
) -> list[dict[str, Any]]:
    """Train four steps, the second without labels, and the same data without that step."""
    results = []
    for cp, overrides in settings:
        trainer = make(rank, world, cp, (*overrides, "optim.weight_decay=0.5"))
        without_labels(trainer, 1)
        first = trainer.train_step(False)
        before = updated_tensors(trainer)
        result = trainer.train_step(False)
        same = all(torch.equal(a, b) for a, b in zip(before, updated_tensors(trainer), strict=True))
        line = trainer.metrics(result, 1.0)
        after = [trainer.train_step(False).loss for _ in range(2)]
        results.append(
            {
                "same": same,
                "losses": [first.loss, result.loss],
                "norm": result.grad_norm,
                "skipped": (first.skipped, result.skipped),
                "warnings": result.warnings,
                "line": (line.step, line.loss, line.skipped),
                "after": after,
                "changed": not all(
                    torch.equal(a, b) for a, b in zip(before, updated_tensors(trainer), strict=True)
                ),
                "step": trainer.step,
            }
        )
    return results


def test_a_step_without_labels_changes_nothing_and_warns():
    settings = [
        (2, ()),
        (1, ("optim.offload=true",)),
        (2, ("optim.offload=true", "optim.offload_gradients=true", "train.z_loss=1e-4")),
    ]
    for results in gloo.run(2, unlabelled, settings):
        for setting, one in zip(settings, results, strict=True):
            assert one["same"], f"{setting}: weights, moments or counts of steps changed"
            assert one["losses"][0] > 5
            assert (one["losses"][1], one["norm"], one["skipped"]) == (None, 0.0, ("", "no label"))
            assert one["line"] == (2, None, True)
            assert one["warnings"] == ("step 2: no token has a label; the update is skipped",)
            assert one["changed"]
            assert one["step"] == 4
            assert all(loss > 1 for loss in one["after"])


def saved_early(rank: int, world: int, folder: str, save: bool) -> list[float | None]:
    """Return losses of a run whose first step has no label; `save` saves and resumes after it."""
    trainer = make(rank, world, world, ())
    without_labels(trainer, 0)
    losses = [trainer.train_step(False).loss]
    if save:
        checkpointer = Checkpointer(folder, 2)
        checkpointer.save(trainer.step, trainer.state(), asynchronous=False)
        trainer = make(rank, world, world, ())
        trainer.resume(checkpointer)
    return losses + [trainer.train_step(False).loss for _ in range(3)]


def both_ways(rank: int, world: int, folder: str) -> list[list[float | None]]:
    return [saved_early(rank, world, folder, save) for save in (False, True)]


def test_a_run_saved_before_its_first_update_resumes_exactly(tmp_path):
    ((whole, resumed),) = gloo.run(1, both_ways, str(tmp_path))
    assert whole[0] is None
    assert whole == resumed


def poisoned(rank: int, world: int, folder: str) -> tuple[str, bool, int | None]:
    """Rank 1's loss becomes NaN in the third step."""
    trainer = make(rank, world, world, ())
    checkpointer = Checkpointer(folder, 2)
    for _ in range(2):
        trainer.train_step(False)
    checkpointer.save(trainer.step, trainer.state())
    checkpointer.wait()
    before = [p.detach().to_local().clone() for p in trainer.decoder.parameters()]
    if rank == 1:
        decoder, forward = trainer.decoder, trainer.decoder.forward
        decoder.forward = lambda *args: forward(*args) * math.nan  # type: ignore[method-assign]
    with pytest.raises(NonFiniteError) as caught:
        trainer.train_step(False)
    same = all(
        torch.equal(a, p.detach().to_local())
        for a, p in zip(before, trainer.decoder.parameters(), strict=True)
    )
    return str(caught.value), same, checkpointer.latest()


def test_a_non_finite_step_names_step_and_rank_and_changes_nothing(tmp_path):
    for message, unchanged, saved in gloo.run(2, poisoned, str(tmp_path)):
        assert message.startswith("step 3: the loss is not finite on rank 1;")
        assert unchanged
        assert saved == 2


def poisoned_run(rank: int, _world: int, folder: str) -> list[str]:
    """Return the errors of a run with a non-finite third step, and of one whose last save fails."""
    words = [*SMALL, "topology.device=cpu", "topology.workers=2", "train.checkpoint_every=2"]
    run_dir = RunDir(Path(folder))
    errors = []
    healthy = Trainer.train_step

    def poisoned_step(self: Trainer, stop: bool, save: bool) -> StepResult:
        if self.step == 2:
            check_finite([StepReport(float("nan"), 1.0, 0.0, 0.0, 0.0, 0.0)], self.step + 1)
        return healthy(self, stop, save)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for owner, name, replacement in (
        (Trainer, "train_step", poisoned_step),
        (Checkpointer, "_publish", refuse),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, replacement)
            with pytest.raises(RunError) as caught:
                train(compose(words), run_dir, gloo.environment(rank, 2), False)
        errors.append(str(caught.value))
    return errors


def test_a_failed_run_says_whether_there_is_a_checkpoint_to_resume_from(tmp_path):
    remains = "the previous checkpoint is intact"
    for not_finite, not_saved in gloo.run(2, poisoned_run, str(tmp_path)):
        assert not_finite == (
            f"step 3: the loss is not finite on rank 0; the step was not applied; {remains}. "
            "Try a lower optim.lr or more optim.warmup_steps."
        )
        assert not_saved == f"could not save the state of step 6; {remains}"


def asked(rank: int, world: int) -> list[tuple[bool, bool]]:
    """Request a stop and then a save, only from rank 1. Return what each step says of both."""
    trainer = make(rank, world, world, ())
    steps = [trainer.train_step(rank == 1), trainer.train_step(False, rank == 1)]
    return [(step.stop, step.save) for step in steps]


def test_all_workers_stop_or_save_if_one_is_asked_to():
    assert gloo.run(2, asked) == [[(True, False), (False, True)]] * 2


def not_finite(rank: int, world: int) -> str:
    """Make rank 1's part of the gradient NaN."""
    trainer = make(rank, world, world, ())
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(
                "mtrain_cli.training.optimizer.squared_norm", lambda *_: torch.tensor(float("nan"))
            )
        with pytest.raises(NonFiniteError) as caught:
            trainer.train_step(False)
    assert trainer.step == 0
    return str(caught.value)


def test_a_gradient_that_is_not_finite_is_not_applied():
    for message in gloo.run(2, not_finite):
        assert message.startswith("step 1: the gradient is not finite on rank 1; the step was not")


def clipped(rank: int, world: int, clip: float) -> tuple[float, float]:
    """Return the reported norm, and this rank's part of the squared norm that is applied."""
    trainer = make(rank, world, world, (f"optim.clip_norm={clip}",))
    given: list[float] = []
    step = trainer.optimizer.step

    def spy() -> None:
        given.append(
            squared_norm(local_gradients(trainer.decoder.parameters()), torch.device("cpu")).item()
        )
        step()

    trainer.optimizer.step = spy  # type: ignore[method-assign]
    return trainer.train_step(False).grad_norm, given[0]


@mostly_slow("clip", [0.01, 1e6], keep=(0,))
def test_gradients_are_clipped_by_their_norm_over_all_workers(clip):
    results = gloo.run(2, clipped, clip)
    (norm,) = {norm for norm, _ in results}
    assert 0.1 < norm < 100
    assert sum(part for _, part in results) ** 0.5 == pytest.approx(
        clip if 0 < clip < norm else norm, rel=1e-4
    )


def counts(rank: int, world: int) -> dict[str, Any]:
    trainer = make(rank, world, world, ("data.document_mask=false",))
    metrics = trainer.metrics(trainer.train_step(False), 2.0)
    return {
        "density": metrics.density,
        "rate": metrics.tokens_per_second_per_gpu,
        "tokens": metrics.tokens,
        "consumed": metrics.consumed,
    }


def test_metrics_count_tokens_of_the_whole_step():
    for got in gloo.run(2, counts):
        assert got == {"density": 1.0, "rate": 4 * 160 / 2.0 / 2, "tokens": 4 * 160, "consumed": 4}


def test_the_auto_learning_rate_falls_with_width_and_is_low_for_given_weights(tmp_path: Path):
    from mtrain_cli.training.optimizer import peak_learning_rate

    assert peak_learning_rate(compose([])) == pytest.approx(2e-3)
    assert peak_learning_rate(compose(["model=qwen3b"])) == pytest.approx(1.25e-4)
    shape = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96}
    shape |= {"num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **shape}))
    assert peak_learning_rate(compose([f"train.init_from={tmp_path}"])) == pytest.approx(2e-5)


def trained(rank: int, _world: int, folder: str, overrides: tuple[str, ...], resume: bool) -> str:
    """Train a whole run and return its log."""
    run_dir = RunDir(Path(folder))
    run_dir.path.mkdir(exist_ok=True)
    config = compose([*SMALL, "train.steps=2", f"run.dir={folder}", *overrides])
    train(config, run_dir, gloo.environment(rank, 1), resume)
    return run_dir.log.read_text()


def test_the_summary_ends_with_commands_that_a_shell_can_run(tmp_path):
    folder = tmp_path / "my runs"
    (log,) = gloo.run(1, trained, str(folder), (), False)
    assert "trained to step 2" in log
    assert f"resume      mtrain train --resume '{folder}' train.steps=4\n" in log
    assert f"export      mtrain checkpoint export '{folder}' 'my runs-hf'\n" in log

    (log,) = gloo.run(1, trained, str(folder), (), True)
    last = log[log.index("resumed from") :]
    assert (
        "nothing left to train: step 2 has reached train.steps=2. "
        "Set a larger train.steps to continue." in last
    )
    assert "trained to step" not in last


@pytest.mark.parametrize(
    ("verify", "tokens", "resumed", "restarts", "read"),
    [
        ("auto", 2**28 - 1, False, 0, True),
        ("auto", 2**28, False, 0, False),
        ("auto", 2**28, True, 0, True),
        ("auto", 1, True, 1, False),
        ("sampled", 1, True, 0, False),
        ("full", 2**28, False, 1, True),
    ],
)
def test_auto_reads_small_data_at_each_start_and_large_data_when_resuming(
    verify, tokens, resumed, restarts, read
):
    data = mock.Mock()
    data._worker.config = compose([f"data.verify={verify}"])
    data._worker.environment.restarts, data.dataset.num_tokens = restarts, tokens
    TrainData.check(data, resumed=resumed)
    assert data.dataset.verify.called is read


def group_timeouts(rank: int, world: int) -> list[float]:
    trainer = make(rank, world, world, ("topology.timeout_s=45",))
    group = trainer.exchange.group
    groups = [*group.channels.values(), trainer.host_group]
    return [g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups]


def test_every_group_of_a_trainer_has_the_configured_timeout():
    assert gloo.run(2, group_timeouts) == [[45.0] * 4] * 2


def too_large(rank: int, world: int) -> str:
    try:
        make(rank, world, world, ("model.hidden_size=65536", "model.intermediate_size=262144"))
    except ConfigError as error:
        return str(error)
    return ""


def test_cpu_workers_that_need_too_much_memory_are_refused_at_once():
    message = gloo.run(1, too_large)[0]
    assert message.startswith("seq=160: a worker needs about ")
    assert "shared by 1 CPU worker of this machine" in message
    assert message.endswith("add --dry-run topology=h200_1x8 to plan for eight GPUs")


def counted(rank: int, world: int) -> tuple[int, list[tuple[str, int]]]:
    """Return the number of layers and the events of a step: forward passes and index counts."""
    trainer = make(
        rank, world, world, ("train.global_batch=3", "sparsity=vertical_slash", "sparsity.block=16")
    )
    seen: list[tuple[str, int]] = []
    forward, count = Decoder.forward, DynamicIndex.count

    def counting(index: DynamicIndex) -> None:
        assert not index.kept, "its backward pass has run"
        kinds = [isinstance(record.counts_or_index, VerticalSlash) for record in index.records]
        seen.append(("count", sum(kinds)))
        count(index)

    def counted_forward(*arguments, **options):
        seen.append(("forward", 0))
        return forward(*arguments, **options)

    with (
        mock.patch.object(Decoder, "forward", counted_forward),
        mock.patch.object(DynamicIndex, "count", counting),
    ):
        assert trainer.train_step(False).index is not None
    return trainer.config.model.num_layers, seen


def test_indices_are_counted_once_per_micro_batch_after_its_backward_pass():
    """Counting later keeps the indices of all micro-batches; counting per layer synchronises."""
    ((layers, seen),) = gloo.run(1, counted)
    assert layers == 2
    assert seen[:6] == [("forward", 0), ("count", layers)] * 3
    # Later calls find nothing left to count.
    assert all(entry == ("count", 0) for entry in seen[6:])


def layouts_differ(rank: int, world: int, differing: str) -> str:
    """Return the error about layouts that differ between groups, or between ranks of a group."""
    window = ("mask=sliding_window", "mask.window=16", "topology.layout=balanced")
    trainer = make(rank, world, 2, (*window, "topology.exchange=all_gather"))
    layout = Balancer.layout

    def reversed_layout(self: Balancer, masks: LayerMasks) -> Balanced:
        found = layout(self, masks)
        return replace(found, owner=found.owner[::-1])

    if rank // 2 if differing == "groups" else rank % 2:
        Balancer.layout = reversed_layout
    try:
        trainer.train_step(False)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_only_ranks_that_share_a_sequence_must_find_the_same_layout():
    assert gloo.run(4, layouts_differ, "groups") == [""] * 4
    for rank, error in enumerate(gloo.run(4, layouts_differ, "ranks")):
        assert error.startswith("topology.layout=balanced: ranks")
        assert f"ranks {rank} and {rank ^ 1} balance the same batch differently" in error
