"""A plan of a run: its machine, its memory, and what its workers receive."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import yaml
from rich.console import RenderableType

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.cluster import shipped
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.parallel.schedule import ScheduleOptions, make_schedule
from mtrain_cli.training.dry_run import describe_fit, render
from mtrain_cli.training.hardware import Hardware
from mtrain_cli.training.memory import GIB
from mtrain_cli.training.planning import make_plan
from mtrain_cli.training.resolution import resolve_run
from mtrain_cli.training.run_plan import RunPlan

LARGE = ["model=llama8b", "seq=4m", "topology.workers=64", "topology.device=cuda"]


without_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="plans for GPUs on a machine without"
)


def dry_run(config: Config) -> RenderableType:
    return render(make_plan(config))


def test_the_default_plan_is_for_this_machine():
    plan = make_plan(compose(["topology.device=cpu"]))
    assert (plan.environment.device, plan.dims.workers, plan.dtype, plan.hardware.gpu) == (
        "cpu",
        2,
        "float32",
        None,
    )
    assert (plan.layout.name, plan.layout.tokens_per_worker, plan.exchange.name, plan.kernel) == (
        "striped",
        2048,
        "all_gather",
        "sdpa",
    )
    assert plan.chosen == {
        "topology.layout": "striped",
        "topology.exchange": "all_gather",
        "train.kernel": "sdpa",
    }
    assert plan.tokens_per_step == 4096
    assert plan.checkpoint == 12 * plan.parameters.total


@without_gpu
@pytest.mark.usefixtures("with_24_gib")
@pytest.mark.parametrize("workers", [1, 3, 16])
def test_a_run_that_fits_here_is_planned_for_here(workers):
    plan = make_plan(compose([f"topology.workers={workers}"]))
    assert (plan.environment.device, plan.dims.workers, plan.dtype, plan.fits) == (
        "cpu",
        workers,
        "float32",
        True,
    )
    assert plan.machine.startswith("the CPU of this machine, which has no GPU")


def test_workers_of_virtual_nodes_share_this_machines_memory():
    words = ["topology.device=cpu", "topology.workers=4"]
    one, virtual = (make_plan(compose([*words, f"topology.gpus_per_node={n}"])) for n in (4, 1))
    assert virtual.environment.nodes == 4
    assert virtual.host_bytes == one.host_bytes == 4 * (one.memory.total + one.memory.saving)


def test_a_worker_plans_for_the_gpu_that_it_uses(monkeypatch):
    config = compose(["topology.device=cpu", "topology.host_memory_gib=100"])
    here = make_plan(config).environment
    choices = resolve_run(config, here)
    properties = SimpleNamespace(name="NVIDIA H200", total_memory=140 * GIB, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {5: properties}.__getitem__)
    plan = RunPlan.of(config, dataclasses.replace(here, device="cuda"), Hardware.here(), choices)
    assert (plan.hardware.gpu, plan.hardware.memory) == ("NVIDIA H200", 140 * GIB)
    assert plan.host_share == 90 * GIB
    assert plan.machine == "the GPUs of this machine"
    crowd = dataclasses.replace(plan, hardware=dataclasses.replace(plan.hardware, count=1))
    assert crowd.machine == "GPUs like the 1 x NVIDIA H200 of this machine"


@without_gpu
def test_a_kernel_that_no_gpu_supports_is_refused():
    with pytest.raises(ConfigError, match=r"train\.kernel=flash4"):
        make_plan(compose([*LARGE, "train.kernel=flash4", "train.dtype=float32"]))
    assert make_plan(compose([*LARGE, "train.kernel=sdpa"])).kernel == "sdpa"
    assert "no GPU here to check" in make_plan(compose([*LARGE, "train.kernel=sdpa"])).kernel_reason


@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
@pytest.mark.parametrize(("workers", "cp"), [(1, 1), (3, 3), (8, 2), (4, 4)])
def test_traffic_equals_that_of_the_schedule(workers, cp, exchange):
    sizes = [
        f"topology.workers={workers}",
        f"topology.context_parallel={cp}",
        f"train.global_batch={workers // cp}",
    ]
    plan = make_plan(compose(["topology.device=cpu", *sizes]))
    shard = 2 * plan.layout.tokens_per_worker * 2 * 32
    schedule = make_schedule(exchange, ScheduleOptions(cp, cp))
    for rank in range(cp):
        for steps, moved in (
            (schedule.forward[rank], plan.received.forward),
            (schedule.backward[rank], plan.received.backward),
        ):
            transfers = [transfer for step in steps for transfer in step.transfers]
            keys = sum(len(transfer.receives) for transfer in transfers if transfer.payload == "kv")
            gradients = sum(
                len(transfer.sends) for transfer in transfers if transfer.payload == "dkv"
            )
            assert moved == (keys * 4 + gradients * 4) * shard
    # The embedding and the last norm are gathered once.
    layers = plan.config.model.num_layers * plan.parameters.layer
    sharded = (2 * 4 + 4) * layers + (4 + 4) * (plan.parameters.total - layers)
    assert plan.received.weights == pytest.approx(
        sharded * (workers - 1) / workers, rel=1e-2
    )  # 3 divides few rows


@without_gpu
def test_a_named_cluster_gives_the_numbers_of_gpus_and_the_memory_of_the_plan(tmp_path):
    mine = yaml.safe_load(shipped()["a100_4x8"].read_text())
    mine["nodes"] = 2
    mine["gpu"] |= {
        "hbm_gib": {"value": 20, "source": "guess"},
        "host_gib": {"value": 33, "source": "guess"},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(mine))
    plan = make_plan(compose(["model=qwen3b", f"topology.cluster={tmp_path}/mine.yaml"]))
    assert (plan.dims.workers, plan.environment.nodes, plan.hardware.absent) == (16, 2, True)
    assert (plan.hardware.gpu, plan.hardware.memory) == ("NVIDIA A100-SXM4-40GB", 20 * GIB)
    assert plan.host_share == round(0.9 * 33 * GIB)
    assert plan.with_config(plan.config).hardware.memory == 20 * GIB
    less = make_plan(compose(["topology.cluster=a100_4x8", "topology.gpu_memory_gib=30"]))
    assert less.hardware.memory == 30 * GIB
    least = make_plan(compose(["topology.cluster=a100_4x8", "topology.gpu_memory_gib=1e-12"]))
    assert "does not fit" in describe_fit(least).plain
    with pytest.raises(ConfigError, match=r"^topology.workers=12: a100_4x8 has nodes of 8 GPUs"):
        make_plan(compose(["topology.cluster=a100_4x8", "topology.workers=12"]))
    mine["gpu"]["name"] = "AMD EPYC 9654"
    (tmp_path / "cpu.yaml").write_text(yaml.safe_dump(mine))
    with pytest.raises(ConfigError, match=r"topology.cluster=.*: has AMD EPYC 9654, a CPU; give"):
        make_plan(compose([f"topology.cluster={tmp_path}/cpu.yaml"]))
    cpu = make_plan(compose(["topology.cluster=a100_4x8", "topology.device=cpu"]))
    assert cpu.hardware.gpu is None
