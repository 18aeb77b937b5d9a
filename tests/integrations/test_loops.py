"""Loops of other libraries train over several processes what they train in one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gloo
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mtrain_cli import api
from mtrain_cli.integrations.trainer import INDEX
from mtrain_cli.library.context_parallel import ContextParallel
from mtrain_cli.library.settings import Processes, compose_settings

for package in ("transformers", "trl", "peft", "accelerate", "datasets"):
    pytest.importorskip(package)

from integrations import loops  # noqa: E402

LOOPS = {
    "DDP": loops.ddp,
    "FSDP2": loops.fsdp2,
    "accelerate": loops.accelerated,
    "Trainer": loops.hf_trainer,
    "Trainer, rows that are padded": loops.unpacked,
    "Trainer, rows that do not divide": loops.of_three_rows,
    "Trainer fsdp": loops.fsdp,
    "Trainer resumed": loops.resumed,
    "SFTTrainer": loops.sft,
    "SFTTrainer LoRA": loops.lora,
    "SFTTrainer LoRA sparse": loops.sparse_lora,
}


def run_all(rank: int, world: int, folder: str) -> dict[str, loops.Steps]:
    made = {}
    for name, loop in LOOPS.items():
        loops.start(rank, world)
        made[name] = loop(Path(folder, name), False)
    return made


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    """Share the start of the processes, in which imports take most of the time."""
    return gloo.run(2, run_all, str(tmp_path_factory.mktemp("runs")))


def assert_equal(found: loops.Steps, expected: loops.Steps) -> None:
    assert len(expected) >= loops.STEPS
    assert found == [pytest.approx(step, rel=1e-6, abs=1e-6) for step in expected]


@pytest.mark.parametrize("name", LOOPS)
def test_two_processes_train_what_one_does(name, on_two, tmp_path):
    loops.start(0, 1)
    expected = LOOPS[name](tmp_path, True)
    for found in on_two:
        assert_equal(found[name], expected)


def refused(folder: Path, **changed: Any) -> str:
    loops.start(0, 1)
    with pytest.raises(api.ConfigError) as raised:
        loops.trainer_of(folder, False, **changed)
    (problem,) = raised.value.problems
    return problem


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (
            {"average_tokens_across_devices": False},
            "average_tokens_across_devices=False: processes have unequal labels; give True",
        ),
        (
            {"label_smoothing_factor": 0.1},
            "label_smoothing_factor=0.1: would shift the labels of a process again; give 0",
        ),
        (
            {"train_sampling_strategy": "batch_rebalance"},
            "train_sampling_strategy=batch_rebalance: deals rows by process; give random",
        ),
    ],
)
def test_settings_with_which_the_loss_would_be_wrong_are_refused(changed, problem, tmp_path):
    assert refused(tmp_path, **changed) == problem


def test_functions_that_would_see_a_part_of_the_logits_are_refused(tmp_path):
    loops.start(0, 1)
    trainer = loops.trainer_of(tmp_path, False)
    trainer.compute_metrics = trainer.compute_loss_func = len
    trainer.model_accepts_loss_kwargs = False
    trainer.get_cp_size = lambda: 2
    assert list(trainer._problems()) == [
        "compute_metrics: would see the logits of one process's tokens; give None",
        "compute_loss_func: would see the logits of one process's tokens; give None",
        "LlamaForCausalLM: does not take num_items_in_batch",
        "parallelism_config.cp_size=2: does not work with mtrain; give 1",
    ]


Learned = tuple[loops.Steps, dict[str, torch.Tensor]]


def learned_and_resumed(rank: int, world: int, folder: str) -> tuple[Learned, Learned, str]:
    """Four steps, the last two of them again from a checkpoint, and the error without its index."""

    def made(**changed: Any) -> Any:
        loops.start(rank, world)
        settings = {"save_strategy": "steps", "save_steps": 2, "eval_steps": 2, **changed}
        return loops.trainer_of(Path(folder), False, learned=True, **settings)

    def result(trainer: Any) -> Learned:
        learned = {name: tensor.clone() for name, tensor in trainer.cp.state_dict().items()}
        return loops.log_of(trainer), learned

    trainer = made()
    trainer.train()
    whole, middle = result(trainer), Path(folder, "checkpoint-2")
    trainer = made(save_strategy="no")
    trainer.train(resume_from_checkpoint=str(middle))
    trainer.save_model(str(Path(folder, "model")))
    resumed = result(trainer)
    dist.barrier()
    if rank == 0:
        (middle / INDEX).unlink()
    dist.barrier()
    with pytest.raises(api.ConfigError) as raised:
        made().train(resume_from_checkpoint=str(middle))
    return whole, resumed, str(raised.value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:sparsity.score=learned")
def test_learned_scores_are_saved_and_continued(tmp_path):
    found = gloo.run(2, learned_and_resumed, str(tmp_path))
    saved = [load_file(tmp_path / name / INDEX) for name in ("checkpoint-4", "model")]
    for (steps, state), (resumed, continued), problem in found:
        assert_equal(resumed, steps)
        assert int(state["1.updates"]) == 128 + 13 * 8  # an epoch has 4, 4 and 2 rows
        for other in (continued, *saved):
            assert other.keys() == state.keys()
            for name, tensor in state.items():
                # The last bits depend on the machine's load, and Adam enlarges them.
                torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=1e-4)
        assert problem == (
            f"{tmp_path}/checkpoint-2/mtrain_index.safetensors: no such file; resume from a "
            "checkpoint that a Trainer saved with sparsity.score=learned, or give "
            "sparsity.score=exact"
        )


def learned_in_replicas(
    rank: int, world: int, folder: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], str]:
    loops.start(rank, world)
    trainer = loops.trainer_of(
        Path(folder), False, 1, replicas=2, learned=True, max_steps=2, load_best_model_at_end=True,
        greater_is_better=True, save_strategy="steps", save_steps=1, eval_steps=1,
    )  # fmt: skip
    last, load = {}, trainer._load_best_model

    def load_after_the_last_step() -> None:
        last.update({name: tensor.clone() for name, tensor in trainer.cp.state_dict().items()})
        load()

    trainer._load_best_model = load_after_the_last_step
    trainer.train()
    return last, trainer.cp.state_dict(), trainer.state.best_model_checkpoint


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:sparsity.score=learned")
def test_replicas_learn_the_same_scores(tmp_path):
    (last, state, best), (other, _, _) = gloo.run(2, learned_in_replicas, str(tmp_path))
    assert best.endswith("checkpoint-1")  # the larger loss, so that loading it again shows
    expected = load_file(Path(best) / INDEX)
    assert {"0.query", "1.key"} < state.keys() == other.keys() == expected.keys()
    for name, tensor in state.items():
        assert torch.equal(last[name], other[name])  # each has learned from its own rows
        assert torch.equal(tensor, expected[name])


def test_the_model_is_checked(tmp_path, monkeypatch):
    made = loops.model_of
    monkeypatch.setattr(loops, "model_of", lambda family, _: made(family, True))
    assert refused(tmp_path).startswith("attn_implementation=sdpa: load the model with")


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        ({"input_ids": torch.ones(1, 4)}, "the batch has input_ids; give input_ids and labels"),
        ({"pixel_values": torch.ones(1)}, "the batch has input_ids, labels, pixel_values; give"),
        (
            {"attention_mask": torch.tensor([[0, 1, 1, 1]])},
            "attention_mask: hides tokens before the end; pad on the right",
        ),
        ({"input_ids": torch.ones(1, 129)}, "a batch has 129 tokens a row; give at most seq=128"),
    ],
)
def test_batches_that_cannot_be_dealt_are_refused(batch, problem, tmp_path):
    loops.start(0, 1)
    trainer = loops.trainer_of(tmp_path, False)
    ids = torch.ones(1, 4, dtype=torch.int64)
    whole = batch if [*batch] == ["input_ids"] else {"input_ids": ids, "labels": ids, **batch}
    if batch.get("input_ids", ids).shape[1] > 4:
        whole["labels"] = whole["input_ids"]
    with pytest.raises(api.ConfigError, match=problem):
        trainer._dealt(whole)


def test_the_numbers_that_packers_give_documents_are_no_lengths(tmp_path):
    loops.start(0, 1)
    trainer, ids = loops.trainer_of(tmp_path, False), torch.arange(1, 5)[None]
    mask = torch.tensor([[1, 1, 2, 0]])
    dealt = trainer._dealt({"input_ids": ids, "labels": ids, "attention_mask": mask})
    assert trainer.cp.gather(dealt["shift_labels"])[0, :4].tolist() == [2, 3, -100, -100]
    assert trainer.cp.gather(dealt["position_ids"])[0, :5].tolist() == [0, 1, 2, 0, 1]


def test_batches_are_dealt_on_the_cpu_where_nothing_waits(tmp_path, monkeypatch):
    loops.start(0, 1)
    trainer, device = loops.trainer_of(tmp_path, False), torch.device("meta")
    monkeypatch.setattr(trainer.accelerator.state, "device", device)
    monkeypatch.setattr(type(trainer.args), "device", device)
    for loader in (trainer.get_train_dataloader(), trainer.get_eval_dataloader()):
        batch = next(iter(loader))
        assert {tensor.device.type for tensor in batch.values()} == {"cpu"}
        dealt = trainer._dealt(batch)
        for name in ("input_ids", "position_ids", "labels", "shift_labels"):
            assert dealt[name].device == device


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(loops.rows(8))


def streamed(rank: int, world: int, folder: str) -> Any:
    loops.start(rank, world)
    trainer = loops.trainer_of(
        Path(folder), False, accelerator_config={"dispatch_batches": False},
        per_device_eval_batch_size=2,
    )  # fmt: skip
    # As TRL counts tokens: of both batches of three rows, the parts of both processes.
    own = torch.tensor([rank])
    gathered = [
        trainer.accelerator.gather_for_metrics(own).tolist() for _ in trainer.get_eval_dataloader()
    ]
    assert gathered == [[0, 1], [0, 1]]
    trainer.train_dataset = Stream()
    dealt = [batch["input_ids"] for batch in trainer.get_train_dataloader()]
    loops.start(rank, world)
    trainer = loops.trainer_of(Path(folder), False)
    trainer.train_dataset = Stream()
    with pytest.raises(api.ConfigError) as raised:
        trainer.get_train_dataloader()
    trainer.cp = ContextParallel(compose_settings(1, (), seq="128"), Processes(0, [(0,)]))
    return torch.cat(dealt).tolist(), str(raised.value), [*trainer._problems()]


def test_a_stream_gives_both_processes_the_same_rows(tmp_path):
    expected = [row["input_ids"] for row in loops.rows(8)]
    for rows, refusal, problems in gloo.run(2, streamed, str(tmp_path)):
        assert rows == expected
        assert refusal == "accelerator_config.dispatch_batches: deals rows by process; give False"
        assert problems == [
            "cp: its number of processes is 1, the trainer's 2; call context_parallel after "
            "TrainingArguments(...), with use_cpu=True without GPUs"
        ]


def test_the_mixin_imports_no_other_library():
    code = "import sys, mtrain_cli.api, mtrain_cli.integrations.trainer; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert not {"transformers", "trl", "accelerate", "peft"} & set(result.stdout.split())


def replicas(rank: int, world: int, folder: str) -> list[loops.Steps]:
    made = []
    for shard in ({}, loops.SHARDED):
        loops.start(rank, world)
        made.append(loops.hf_trainer(Path(folder), False, 2, replicas=2, **shard))
    return made


@pytest.mark.slow
def test_two_replicas_of_two_processes_train_what_one_process_does(tmp_path):
    loops.start(0, 1)
    expected = loops.hf_trainer(tmp_path, True)
    for found in gloo.run(4, replicas, str(tmp_path)):
        for steps in found:
            # Trainer's evaluation is a mean over batches, which depends on their size.
            assert_equal(steps[: loops.STEPS], expected[: loops.STEPS])


def quantized(rank: int, world: int, folder: str) -> loops.Steps:
    loops.start(rank, world)
    return loops.qlora(Path(folder), False)


@pytest.mark.slow
def test_two_processes_train_lora_on_4_bits_as_one_does(tmp_path):
    pytest.importorskip("bitsandbytes")
    loops.start(0, 1)
    expected = loops.qlora(tmp_path, True)
    for found in gloo.run(2, quantized, str(tmp_path)):
        assert_equal(found, expected)
