"""A plan of a run: its machine, its memory, and what its workers receive."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from masked_documents import masked_store, prepared, question_record, write_jsonl
from rich.console import RenderableType

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.cluster import shipped
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.data.open_dataset import open_dataset
from mtrain_cli.parallel.schedule import ScheduleOptions, make_schedule
from mtrain_cli.training.dry_run import describe_fit, render
from mtrain_cli.training.hardware import Hardware
from mtrain_cli.training.memory import GIB
from mtrain_cli.training.planning import make_plan
from mtrain_cli.training.resolution import resolve_run
from mtrain_cli.training.run_plan import FirstMasks, ReceivedBytes, RunPlan, first_masks

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


WORDS = [
    "seq=4k", "model.num_layers=4", "model.hidden_size=64", "model.vocab_size=264",
    "topology.device=cpu", "topology.exchange=all_gather", "train.global_batch=4",
]  # fmt: skip


def received(*words: str) -> ReceivedBytes:
    return make_plan(compose([*WORDS, *words])).received


def test_one_worker_receives_nothing():
    assert received("topology.workers=1") == ReceivedBytes(forward=0, backward=0, weights=0)


def test_an_all_gather_brings_the_keys_of_the_other_workers_and_their_gradients():
    found, model = received("topology.workers=4"), compose(WORDS).model
    kv = 2 * 4 * model.num_kv_heads * model.head_dim * 4096
    assert found.forward == kv * 3 // 4
    assert found.backward == 2 * found.forward


def test_a_stage_gathers_the_weights_of_its_own_layers():
    untied = "model.tie_word_embeddings=false"
    words = "topology.workers=4", "topology.pipeline_parallel=2", "topology.context_parallel=2"
    staged = received(*words, "topology.stage_layers=[2,2]", untied)
    alone = received("topology.workers=2", "model.num_layers=2", untied)
    # The last stage has a norm and a head, but no embedding.
    assert 0.8 < staged.weights / alone.weights < 1
    assert (staged.forward, staged.backward) == (alone.forward, alone.backward)


SEQ = 60


def configured(store, *words: str) -> Config:
    return compose(
        ["data=tokens", f"data.path={store}", "data.mask_key=mask", f"seq={SEQ}",
         "model.vocab_size=264", "topology.device=cpu", *words]
    )  # fmt: skip


@pytest.fixture
def store(tmp_path):
    """Questions of different sizes, so that sequences have different numbers of pairs."""
    records = [question_record(5 + n % 7, 2 + n % 3, 4 + n % 5) for n in range(60)]
    prepared(write_jsonl(tmp_path / "documents.jsonl", records), tmp_path / "store")
    return tmp_path / "store"


def pairs_of(config: Config, number: int) -> int:
    """Count the pairs of a sequence cell by cell."""
    seen = np.zeros((SEQ, SEQ), bool)
    for q0, q1, k0, k1, kind in open_dataset(config)[number].slices:
        q, k = np.arange(q0, q1)[:, None], np.arange(k0, k1)
        own = np.ones((q1 - q0, k1 - k0), bool)
        if kind & 1:
            own &= k < k1 - (q1 - 1 - q)
        if kind & 2:
            own &= k >= k0 + (q - q0)
        seen[q0:q1, k0:k1] |= own
    return int(seen.sum())


def test_the_masks_are_those_of_the_first_sequences(store):
    config = configured(store)
    read = first_masks(config)
    pairs = [pairs_of(config, number) for number in range(8)]
    assert len(set(pairs)) > 3
    assert [mask.pairs for mask in read.masks] == pairs
    assert read.pairs == np.mean(pairs)
    assert read.describe().startswith("masks of the first 8 sequences were read; memory and stages")
    assert first_masks(config.changed(data={"mask_key": None})) is None
    mixed = config.changed(data={"path": str(store.parent), "mix": {store.name: 1.0}})
    assert len(first_masks(mixed).masks) == 8


def test_a_plan_prices_the_masks_of_the_data(store):
    config = configured(store)
    plan = make_plan(config)
    causal = make_plan(config.changed(data={"mask_key": None}))
    model, pairs = config.model, np.mean([pairs_of(config, number) for number in range(8)])
    width = 12 * model.num_layers * model.num_heads * model.head_dim
    fewer = width * (SEQ * (SEQ + 1) / 2 - pairs) / SEQ
    assert causal.flops.model - plan.flops.model == pytest.approx(fewer)


def test_whole_micro_batches_are_read_and_the_median_one_is_typical(store):
    config = configured(store, "train.micro_batch=3", "train.global_batch=6")
    read = first_masks(config)
    totals = [sum(mask.pairs for mask in read.masks[n : n + 3]) for n in (0, 3)]
    assert len(read.masks) == 6
    assert sum(mask.pairs for mask in read.typical) == min(totals)
    large = configured(store, "train.micro_batch=50", "train.global_batch=50")
    read = first_masks(large)
    assert len(read.masks) == 50 > len(open_dataset(large)), "the data repeat"
    masks = tuple(SequenceMask.causal(n, 9) for n in (9, 1, 5, 7))
    assert FirstMasks("mask", masks, 1).typical == masks[2:3]


def test_data_that_cannot_be_read_are_one_line(tmp_path):
    store = masked_store(tmp_path)
    short = first_masks(dataclasses.replace(configured(store), seq=10**6))
    assert short.masks == ()
    assert short.describe().startswith("the masks cannot be read (seq=1000000: data.path=")
    assert short.describe().endswith("smaller seq), so causal documents are assumed")
    missing = first_masks(configured(store).changed(data={"path": None}))
    assert "cannot be read (data.path is not set), so" in missing.describe()
    plan = make_plan(configured(store).changed(data={"path": None}))
    causal = make_plan(configured(store).changed(data={"mask_key": None}))
    assert plan.flops == causal.flops
