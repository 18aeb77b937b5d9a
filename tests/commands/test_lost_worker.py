"""`mtrain train` ends soon and names the worker and place when one dies or hangs within a ring."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import warm
from commands.typed_line import split
from launch.faulty_train import HANGS, Fault

import mtrain_cli

LAUNCH = Path(__file__).parents[1] / "launch"
TIMEOUT_S = 6
# Includes finding the cause, ending the workers, and a busy machine.
MARGIN_S = 12
RUN = [
    *split(
        "seq=192 topology.block_size=16 model.hidden_size=32 model.num_layers=2",
        "model.head_dim=8 model.intermediate_size=48 train.steps=50",
        "sparsity=vertical_slash sparsity.block=16 sparsity.last_q=16",
        "sparsity.p_v=0.3 sparsity.p_s=0.3 sparsity.min_columns=4",
        "topology.device=cpu",
    ),
    f"topology.timeout_s={TIMEOUT_S}",
    "run.dir=run",
    "run.restarts=0",
]


@dataclass(frozen=True)
class End:
    """How the command ended, and the seconds since the fault. pids: of the workers."""

    code: int
    stderr: str
    seconds: float
    pids: tuple[int, ...]

    @property
    def lines(self) -> list[str]:
        return self.stderr.splitlines()

    def worker(self, rank: int) -> str:
        """Return the reported place of a worker, without the time since then."""
        (line,) = (line for line in self.lines if line.startswith(f"  rank {rank}: "))
        return re.sub(r" \(\d+ s ago\)$", "", line.removeprefix(f"  rank {rank}: "))


def train(fault: Fault, *words: str) -> End:
    """Run the command in the current folder until the fault ends it."""
    paths = os.pathsep.join([str(Path(mtrain_cli.__file__).parents[1]), str(LAUNCH)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **fault.variable()}
    launcher = warm.Command("faulty_train", ["train", *RUN, *words], Path.cwd(), environment)
    try:
        stderr = launcher.communicate(timeout=120)[1]
    finally:
        launcher.kill()
    ended = time.time()
    pids = tuple(int(path.read_text()) for path in sorted(Path("run").glob("pid-?")))
    return End(launcher.returncode, stderr, ended - Path("run/fault").stat().st_mtime, pids)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


RING = ["topology.workers=3", "topology.exchange=ring"]
NODES = ["topology.workers=4", "topology.gpus_per_node=2", "topology.exchange=hierarchical_ring"]


def check(end: End, ranks: int, within: float) -> None:
    assert end.code == 1
    assert end.seconds < within
    assert len(end.pids) == ranks
    assert not any(map(alive, end.pids))
    assert "Traceback" not in end.stderr
    assert len(end.lines) <= ranks + 4
    assert end.lines[1] == "Where each worker was:"


def test_a_worker_killed_in_a_ring_is_named_with_step_and_resume_command():
    fault = Fault(1, signal.SIGKILL, 5, "ring, layer 1, forward", "step 2 of 3")
    end = train(fault, *RING, "train.checkpoint_every=2")
    check(end, 3, within=MARGIN_S)
    assert end.lines[0] == "error: rank 1 was killed by SIGKILL (host out of memory? see dmesg)"
    assert end.worker(1) == "training step 5, ring, layer 1, forward, step 2 of 3"
    # The others stop where they need the lost worker's shard.
    assert re.fullmatch(
        r"training step 5, ring, layer 1, forward, step [23] of 3: waits for .*kv.*", end.worker(2)
    )
    assert re.fullmatch(
        r"resume from the checkpoint of step [24]: mtrain train --resume .*/run", end.lines[-1]
    )


TENSORS = ["topology.workers=2", "topology.tensor_parallel=2"]
STAGES = ["topology.workers=2", "topology.pipeline_parallel=2", "train.global_batch=4"]


@pytest.mark.parametrize(
    "signum",
    [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)],
    ids=["killed", "stopped"],
)
def test_a_stage_lost_in_a_hop_is_named_with_stage_and_micro_batch(signum):
    hop = "pipeline, stage 1, micro-batch 1", "sends gradients to rank 0"
    end = train(Fault(1, signum, 3, *hop), *STAGES)
    check(end, 2, within=TIMEOUT_S + MARGIN_S)
    assert "rank 1" in end.lines[0]
    assert end.worker(1) == f"training step 3, {': '.join(hop)}"
    waits = "waits for gradients from rank 1"
    assert end.worker(0) == f"training step 3, pipeline, stage 0, micro-batch 1: {waits}"


def test_a_worker_killed_in_a_message_of_its_tensor_group_is_named():
    """A tensor group gathers once before q, k and v: its third message is that of layer 1."""
    end = train(Fault(1, signal.SIGKILL, 3, "", "message 3"), *TENSORS)
    check(end, 2, within=TIMEOUT_S + MARGIN_S)
    assert end.lines[0] == "error: rank 1 was killed by SIGKILL (host out of memory? see dmesg)"
    assert end.worker(1).startswith("training step 3")
    assert end.worker(0) == "training step 3, tensor parallelism: waits for rank 1"


EXPERTS = ["model=tiny_moe", "topology.workers=2", "topology.expert_parallel=2"]


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_worker_lost_while_rows_travel_to_experts_is_named(signum):
    place = "expert parallelism", "sends rows"
    end = train(Fault(1, signum, 3, *place), *EXPERTS)
    check(end, 2, within=TIMEOUT_S + MARGIN_S)
    assert "rank 1" in end.lines[0]
    assert end.worker(1).startswith("training step 3, ")
    assert end.worker(0) == "training step 3, expert parallelism: waits for rows from rank 1"


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_worker_lost_in_a_tensor_group_of_a_stage_is_named_with_stage_and_micro_batch(signum):
    words = ["topology.workers=4", *TENSORS[1:], *STAGES[1:]]
    end = train(Fault(3, signum, 2, "", "message 1"), *words)
    check(end, 4, within=TIMEOUT_S + MARGIN_S)
    assert "rank 3" in end.lines[0]
    place = "training step 2, pipeline, stage 1, micro-batch 0, forward: "
    assert end.worker(2) == f"{place}tensor parallelism: waits for rank 3"


@pytest.mark.parametrize(
    "signum",
    [signal.SIGSTOP, pytest.param(HANGS, marks=pytest.mark.slow)],
    ids=["stopped", "hangs"],
)
def test_a_stuck_worker_is_blamed_instead_of_those_that_wait(signum):
    end = train(Fault(1, signum, 2, "ring, layer 0, forward", "step 2 of 3"), *RING)
    check(end, 3, within=TIMEOUT_S + MARGIN_S)
    assert end.lines[0].startswith(
        f"error: topology.timeout_s={TIMEOUT_S}: rank 1 kept the others waiting longer than this"
    )
    assert ("its process is stopped" if signum else "it hangs or is slow") in end.lines[0]
    assert end.worker(1) == "training step 2, ring, layer 0, forward, step 2 of 3"
    # A shard sent in one step is needed in the next.
    assert re.fullmatch(
        "training step 2, ring, layer 0, forward, step [23] of 3: waits for kv from rank 1",
        end.worker(2),
    )
    assert end.worker(0).startswith(
        "training step 2, ring, layer 0, forward, step 3 of 3: waits for "
    )
    assert "--resume" not in end.stderr, "there is no checkpoint"
    if signum == HANGS:
        assert "in faulty" in Path("run/logs/rank-1.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "what", "step"),
    [
        (RING, "ring, layer 1, backward", "step 2 of 3"),
        (NODES, "hierarchical_ring, layer 1, forward", "step 3 of 4"),
        (
            [*NODES, "topology.circulates=queries"],
            "hierarchical_ring, layer 0, backward",
            "step 4 of 6",
        ),
    ],
    ids=["backward", "nodes", "nodes, backward"],
)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_every_ring_reports_a_lost_worker(words, what, step, signum):
    ranks = 3 if words is RING else 4
    end = train(Fault(2, signum, 2, what, step), *words)
    check(end, ranks, within=TIMEOUT_S + MARGIN_S)
    assert (
        "rank 2 was killed by SIGKILL"
        if signum == signal.SIGKILL
        else "rank 2 kept the others waiting"
    ) in end.lines[0]
    assert end.worker(2) == f"training step 2, {what}, {step}"
    others = [end.worker(rank) for rank in range(ranks) if rank != 2]
    assert any("rank 2" in other and what in other for other in others)
    # In the hierarchical ring, two ranks need no more of its shards: they wait later, for weights.
    later = rf"after {what}$|FSDP, layers\.\d: waits for (weights|gradients) among 4 ranks$"
    assert all(re.search(f"{what}, step .*: waits for|{later}", other) for other in others)
