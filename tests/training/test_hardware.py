"""The devices that a plan is for, here or absent."""

import dataclasses
from types import SimpleNamespace

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.cluster import load_cluster
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.training.hardware import ASSUMED_GPU, ASSUMED_GPU_BYTES, Hardware
from mtrain_cli.training.memory import GIB


@pytest.mark.parametrize(
    ("launcher", "workers", "gpus", "expected"),
    [("mtrain", 8, 2, 2), ("torchrun", 2, 8, 2), ("slurm", 8, 1, 8), ("mtrain", 1, 0, 1)],
)
def test_workers_of_a_machine_share_its_memory(launcher, workers, gpus, expected):
    place = SimpleNamespace(launcher=launcher, local_workers=workers)
    machine = Hardware(device="cuda", count=gpus, host_memory=GIB)
    assert machine.workers_sharing_host(place) == expected
    assert dataclasses.replace(machine, absent=True).workers_sharing_host(place) == 1


def test_a_cpu_has_no_numbers_that_settings_of_gpus_change():
    asked = Hardware.here("cpu")
    assert (asked.device, asked.gpu, asked.count, asked.memory) == ("cpu", None, 0, 0)
    assert asked.source == "the CPU of this machine"
    assert asked.host_memory > GIB
    config = compose(["topology.gpu_memory_gib=20"])
    assert asked.limited(config.topology) == asked
    assert asked.complete(config) is config


def test_absent_gpus_are_assumed_unless_a_cluster_is_named():
    topology = compose(["topology.device=cuda"]).topology
    guess = Hardware.assumed(topology, "no GPU")
    assert (guess.gpu, guess.memory, guess.is_guess) == (ASSUMED_GPU, ASSUMED_GPU_BYTES, True)
    assert guess.source.endswith("(set topology.cluster to plan for others): no GPU")
    named = Hardware.assumed(dataclasses.replace(topology, cluster="a100_4x8"), "no GPU")
    assert (named.is_guess, named.absent, named.count) == (False, True, 32)
    assert named.source.endswith("GPUs of topology.cluster=a100_4x8: no GPU")
    limited = named.limited(dataclasses.replace(topology, gpu_memory_gib=20))
    assert limited == dataclasses.replace(named, memory=20 * GIB)


def test_a_cluster_completes_the_numbers_of_workers_and_nodes():
    hardware = Hardware.of_cluster(load_cluster("a100_4x8"))

    def completed(*words: str) -> tuple[str, int | str, int | str]:
        topology = hardware.complete(compose(list(words))).topology
        return topology.device, topology.workers, topology.gpus_per_node

    assert completed() == ("cuda", 32, 8)
    assert completed("topology.workers=4") == ("cuda", 4, 4)
    assert completed("topology.workers=12", "topology.gpus_per_node=4") == ("cuda", 12, 4)
    with pytest.raises(ConfigError, match=r"^topology\.workers=12: a100_4x8 has nodes of 8 GPUs"):
        completed("topology.workers=12")
