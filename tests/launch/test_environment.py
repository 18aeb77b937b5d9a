"""`auto` in the topology, and the variables of torchrun and srun."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from mtrain_cli.composition import compose
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.launch import environment
from mtrain_cli.launch.environment import gpu_index, memory_limits, resolve_environment
from mtrain_cli.launch.job import Job, current_job, first_host

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


@pytest.fixture(scope="module")
def default() -> Config:
    return compose.compose([])


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch):
    """Pretend that this machine has ``gpus`` GPUs and this process has ``variables``."""

    def pretend(gpus: int = 0, variables: dict[str, str] | None = None, cores: int = 8) -> None:
        monkeypatch.setattr(environment, "_visible_gpus", lambda: gpus)
        monkeypatch.setattr(environment, "cpu_cores", lambda: cores)
        for name in {*TORCHRUN, *SRUN}:
            monkeypatch.delenv(name, raising=False)
        for name, value in (variables or {}).items():
            monkeypatch.setenv(name, value)

    pretend()
    return pretend


def having(
    config: Config, global_batch: int = 1, micro_batch: int = 1, **topology: object
) -> Config:
    return dataclasses.replace(
        config,
        topology=dataclasses.replace(config.topology, **topology),
        train=dataclasses.replace(config.train, global_batch=global_batch, micro_batch=micro_batch),
    )


def test_auto_is_two_cpu_workers_in_one_context_group_without_gpus(default):
    resolved = resolve_environment(default)
    assert (resolved.device, resolved.nodes, resolved.launcher) == ("cpu", 1, "mtrain")
    assert (resolved.dims.workers, resolved.dims.cp, resolved.dims.dp) == (2, 2, 1)


def test_auto_is_all_visible_gpus(default, machine):
    machine(gpus=4)
    resolved = resolve_environment(default)
    assert (resolved.device, resolved.workers_per_node) == ("cuda", 4)
    assert (resolved.dims.workers, resolved.dims.cp) == (4, 4)


def test_workers_divide_into_data_and_context_and_virtual_nodes(default, machine):
    machine(gpus=8)
    resolved = resolve_environment(
        having(default, workers=8, context_parallel=4, gpus_per_node=2, global_batch=2)
    )
    assert (resolved.dims.dp, resolved.dims.cp) == (2, 4)
    assert (resolved.workers_per_node, resolved.nodes) == (2, 4)
    assert str(resolved.dims) == "2 data x 4 context"


@pytest.mark.parametrize(
    ("gpus", "changes", "line"),
    [
        (
            0,
            {"device": "cuda"},
            "topology.device=cuda: torch sees no GPU on this machine. Set topology.device",
        ),
        (4, {"workers": 8}, "topology.workers=8: this machine has 4 GPUs. Use at most 4, or auto."),
        (
            0,
            {"workers": 4, "context_parallel": 3},
            "topology.context_parallel=3: must divide the 4 workers. Use auto or one of 1, 2, 4.",
        ),
        (
            0,
            {"workers": 4, "gpus_per_node": 3},
            "topology.gpus_per_node=3: must divide the 4 workers. Use auto or one of 1, 2, 4.",
        ),
        (
            0,
            {"workers": 4, "context_parallel": 2, "global_batch": 3},
            "train.global_batch=3: must be a multiple of 2",
        ),
        (
            0,
            {"workers": 40, "context_parallel": 20, "gpus_per_node": 8, "global_batch": 2},
            "topology.context_parallel=20: must divide the 8 workers of a node or fill whole "
            "nodes. Use auto or one of 1, 2, 4, 8, 40.",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_possible_values(
    default, machine, gpus, changes, line
):
    machine(gpus=gpus)
    with pytest.raises(ConfigError) as caught:
        resolve_environment(having(default, **changes))
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(line)


@pytest.mark.parametrize(("cores", "most"), [(1, 16), (2, 16), (4, 32)])
def test_more_workers_than_a_cpu_can_serve_are_refused(default, machine, cores, most):
    machine(cores=cores)
    assert resolve_environment(having(default, workers=most)).dims.workers == most
    with pytest.raises(ConfigError) as caught:
        resolve_environment(having(default, workers=most + 1))
    has = f"{cores} CPU core{'s' * (cores > 1)}"
    assert caught.value.problems == (
        f"topology.workers={most + 1}: this machine has {has}. Use at most {most}, or auto.",
    )
    planned = resolve_environment(having(default, workers=100), planning=True)
    assert planned.dims.workers == 100


def test_workers_without_a_chunk_are_refused_once_their_number_is_known(machine):
    words = ["seq=8k", "topology.layout=balanced", "topology.balanced_chunk=2k"]
    machine(4)
    assert resolve_environment(compose.compose(words)).dims.cp == 4
    machine(8)
    with pytest.raises(ConfigError) as caught:
        resolve_environment(compose.compose(words))
    (problem,) = caught.value.problems
    assert problem.startswith("topology.balanced_chunk=2048: seq=8192 has 4 such chunks")
    halves = [*words, "topology.context_parallel=4", "train.global_batch=2"]
    assert resolve_environment(compose.compose(halves)).dims.dp == 2


def test_all_problems_are_reported_together(default):
    with pytest.raises(ConfigError) as caught:
        resolve_environment(
            having(default, device="cuda", workers=4, context_parallel=3, gpus_per_node=3)
        )
    assert len(caught.value.problems) == 3


def test_planning_needs_neither_the_gpus_nor_the_job(default, machine):
    machine(gpus=0, variables=TORCHRUN)
    resolved = resolve_environment(having(default, device="cuda", workers=64), planning=True)
    assert (resolved.device, resolved.dims.workers, resolved.rank) == ("cuda", 64, 0)


@pytest.mark.parametrize(
    ("variables", "launcher", "rank", "workers"),
    [(TORCHRUN, "torchrun", 5, 8), (SRUN, "slurm", 9, 16)],
)
def test_a_job_decides_the_number_of_workers(default, machine, variables, launcher, rank, workers):
    machine(gpus=8, variables=variables)
    resolved = resolve_environment(default)
    assert (resolved.launcher, resolved.rank, resolved.local_rank) == (launcher, rank, 1)
    assert (resolved.dims.workers, resolved.nodes) == (workers, 2)
    # Counted on a machine, whatever nodes the topology defines.
    virtual = resolve_environment(having(default, gpus_per_node=2))
    assert resolved.local_workers == virtual.local_workers == workers // 2
    line = f"topology.workers=6: {launcher} started {workers} processes. Use auto or {workers}."
    with pytest.raises(ConfigError) as refused:
        resolve_environment(having(default, workers=6))
    assert refused.value.problems == (line,)


@pytest.mark.parametrize(
    ("variables", "changes", "line"),
    [
        ({"LOCAL_WORLD_SIZE": "3"}, {}, "LOCAL_WORLD_SIZE=3: this is process 1 of its node, and "),
        ({"LOCAL_WORLD_SIZE": "8"}, {}, "LOCAL_WORLD_SIZE=8: this is process 1 of its node, and "),
        (
            {},
            {"gpus_per_node": 8},
            "topology.gpus_per_node=8: torchrun started 4 on each node. Use auto or one of 1, 2, 4",
        ),
    ],
)
def test_nodes_that_contradict_the_job_are_refused(default, machine, variables, changes, line):
    machine(gpus=8, variables=TORCHRUN | variables)
    with pytest.raises(ConfigError, match=line):
        resolve_environment(having(default, **changes))
    alone = {"RANK": "1", "WORLD_SIZE": "4"}
    machine(gpus=8, variables=TORCHRUN | alone)
    assert resolve_environment(having(default, gpus_per_node=2)).nodes == 2


def test_srun_variables_give_the_address_of_rank_zero():
    assert current_job(SRUN) == Job(
        "slurm", 9, 16, 1, 8, "gpu07", 20000 + (16 * 1234 + 2) % 20000, name="slurm  1234.2"
    )
    assert (
        current_job(SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"}).master_port == 4000
    )


@pytest.mark.parametrize(
    "variables",
    [
        {},
        SRUN | {"SLURM_NTASKS": "1"},
        {name: value for name, value in SRUN.items() if "STEP_ID" not in name},
    ],
    ids=["nothing", "one task", "batch script outside srun"],
)
def test_no_job_where_mtrain_starts_its_own_workers(variables):
    assert current_job(variables) is None


def test_a_rank_without_the_number_of_ranks_is_refused_unless_srun_says_it():
    with pytest.raises(ConfigError) as error:
        current_job({"RANK": "0"})
    assert str(error.value) == (
        "RANK=0: the environment sets a rank but not WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, "
        "MASTER_ADDR, MASTER_PORT. torchrun sets all of these; without a launcher, unset RANK."
    )
    assert current_job(SRUN | {"RANK": "0"}) == current_job(SRUN)
    assert current_job({"WORLD_SIZE": "4"}) is None, "a job's other commands have no rank"


def test_contradictory_job_variables_are_a_clear_error():
    with pytest.raises(ConfigError, match="RANK=5: the environment sets a rank but not LOCAL_RANK"):
        current_job({name: value for name, value in TORCHRUN.items() if name != "LOCAL_RANK"})
    with pytest.raises(
        ConfigError, match=r"8\(x2\),4: every node must run the same number of workers"
    ):
        current_job(SRUN | {"SLURM_STEP_TASKS_PER_NODE": "8(x2),4"})
    with pytest.raises(
        ConfigError, match="MASTER_PORT=http: the environment variable must be a whole number"
    ):
        current_job(TORCHRUN | {"MASTER_PORT": "http"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu7", "gpu7"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("a-[3,5]-ib,b", "a-3-ib"),
        ("n1,n2", "n1"),
        ("127.0.0.1", "127.0.0.1"),
    ],
)
def test_first_host_of_a_node_list(nodes, first):
    assert first_host(nodes) == first


def test_a_worker_without_a_gpu_of_its_own_is_an_error(default, machine):
    machine(gpus=1, variables=SRUN)
    assert gpu_index(resolve_environment(default)) == 0  # SLURM may show each task only its own GPU
    machine(gpus=1, variables=TORCHRUN)
    with pytest.raises(ConfigError, match=r"no GPU\. Start one worker per visible GPU \(1\)"):
        gpu_index(resolve_environment(default))


def test_a_hang_in_nccl_ends_soon_after_detection(tmp_path):
    """PyTorch waits four times the dump time before it ends a process that hangs, and a second
    watchdog watches the first.
    """
    for timeout_s, heartbeat in ((20.0, "120"), (1800.0, "1800")):
        resolved = environment.nccl_variables(tmp_path, timeout_s)
        assert resolved["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == heartbeat
        assert 4 * int(resolved["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"]) <= 10_000
        assert (
            resolved["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"]
            == resolved["TORCH_FR_DUMP_TEMP_FILE"]
            == str(tmp_path / "nccl-rank-")
        )


def cgroups(root: Path, own: str, **limits: str) -> Path:
    """Make a file system for a process in the cgroups of ``own``; limits by path, with _ for /."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(own)
    for path, limit in limits.items():
        names = {"LIMIT": "memory.limit_in_bytes", "MAX": "memory.max"}
        *folders, name = path.split("_")
        file = Path(root, "sys/fs/cgroup", *folders, names[name])
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{limit}\n")
    return root


def test_memory_limits_come_from_cgroups(tmp_path):
    v2 = cgroups(
        tmp_path / "v2",
        "0::/slurm/job7/step0\n",
        slurm_MAX="900",
        slurm_job7_MAX="300",
        slurm_job7_step0_MAX="max",
        other_MAX="1",
    )
    assert sorted(memory_limits(v2)) == [300, 900]
    v1 = cgroups(
        tmp_path / "v1",
        "5:cpu,cpuacct:/a\n4:memory:/a/b\n0::/\n",
        memory_LIMIT="9223372036854771712",
        memory_a_b_LIMIT="77",
        cpu_a_LIMIT="1",
    )
    assert sorted(memory_limits(v1)) == [77, 9223372036854771712]
    several = "1:name=hugememory:/h\n4:cpu,memory:/kubepods/cri-containerd:0f\n0::/a\n"
    hybrid = cgroups(
        tmp_path / "hybrid",
        several,
        a_MAX="20",
        **{"memory_kubepods_cri-containerd:0f_LIMIT": "30", "memory_h_LIMIT": "1"},
    )
    assert sorted(memory_limits(hybrid)) == [20, 30]
    inside = cgroups(tmp_path / "inside", "4:memory:/docker/0123\n", memory_LIMIT="5000")
    assert memory_limits(inside) == [5000]
    assert memory_limits(cgroups(tmp_path / "none", "0::/\n")) == []
    assert memory_limits(tmp_path / "nothing") == []


def test_host_memory_is_the_least_of_the_machine_and_its_limits(monkeypatch):
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limits, expected in (([], machine), ([1 << 62], machine), ([1 << 62, 4096, 8192], 4096)):
        monkeypatch.setattr(environment, "memory_limits", lambda limits=limits: limits)
        assert environment.host_memory() == expected


def test_tensor_groups_divide_the_context_and_share_a_node(default, machine):
    machine(gpus=8)
    resolved = resolve_environment(having(default, workers=8, tensor_parallel=2, gpus_per_node=4))
    assert (resolved.dims.dp, resolved.dims.cp, resolved.dims.tp) == (1, 4, 2)
    assert (resolved.workers_per_node, resolved.context_per_node, resolved.nodes) == (4, 2, 2)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"tensor_parallel": 4, "gpus_per_node": 2},
            "topology.tensor_parallel=4: must divide the 2 workers of a node. Use one of 1, 2.",
        ),
        (
            {"tensor_parallel": 2, "context_parallel": 8},
            "topology.context_parallel=8: must divide the 4 tensor groups "
            "(topology.tensor_parallel=2). Use auto or one of 1, 2, 4.",
        ),
        (
            {"tensor_parallel": 2, "context_parallel": 2},
            "train.global_batch=1: must be a multiple of 2 = 2 context groups (topology.workers=8 "
            "/ context_parallel=2 / tensor_parallel=2) x train.micro_batch=1",
        ),
    ],
)
def test_a_tensor_parallel_degree_that_does_not_fit_is_one_line(default, machine, changes, line):
    machine(gpus=8)
    with pytest.raises(ConfigError) as error:
        resolve_environment(having(default, workers=8, **changes))
    assert error.value.problems == (line,)
