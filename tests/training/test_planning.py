"""`train.memory=auto` chooses the fastest setting that fits."""

from __future__ import annotations

import dataclasses
import io
import re

import gloo
import pytest
import torch
from rich.console import Console
from slow_cases import mostly_slow
from test_trainer import make
from training.test_run_plan import dry_run

from mtrain_cli.composition.compose import compose
from mtrain_cli.config import keys
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.model.tiling import layers_with_products
from mtrain_cli.parallel.activation_offload import layers_on_host
from mtrain_cli.training import expert_traffic, planning, run_plan
from mtrain_cli.training.memory import GIB, MemoryEstimate
from mtrain_cli.training.planning import checked_plan, make_plan, require_fit
from mtrain_cli.training.resolution import resolve_run

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="plans for GPUs that are not here"
)

RUN = ["model=llama8b", "seq=512k", "topology.workers=8", "topology.device=cuda"]


def planned(*words):
    return make_plan(compose([*RUN, *words]))


def test_auto_may_change_only_keys_with_their_default():
    values = keys.values(compose([]))
    assert {key: values[key] for key in planning.CHOICES} == {
        key: choices[0] for key, choices in planning.CHOICES.items()
    }


@pytest.mark.slow
def test_auto_chooses_the_fastest_setting_that_fits_each_gpu():
    chosen = []
    for gib in (24, 40, 64, 80, 141, 280):
        chosen_plan = planned("train.memory=auto", f"topology.gpu_memory_gib={gib}")
        search = chosen_plan.search
        assert search.chosen is not None
        assert chosen_plan.memory.total <= 0.95 * gib * GIB
        assert chosen_plan.config.train == search.chosen.config.train
        faster = [
            setting for setting in search.settings if setting.seconds < search.chosen.seconds - 1e-6
        ]
        assert not any(setting.fits for setting in faster)
        # A run with that setting has the same plan.
        words = [*search.chosen.overrides.split(), f"topology.gpu_memory_gib={gib}"]
        alone = planned(*words)
        assert (alone.memory, alone.received, alone.flops) == (
            chosen_plan.memory,
            chosen_plan.received,
            chosen_plan.flops,
        )
        chosen.append(search.chosen)
    again = planned("train.memory=auto", f"topology.gpu_memory_gib={gib}")
    assert again.search.chosen == chosen[-1]
    seconds = [setting.seconds for setting in chosen]
    assert seconds == sorted(seconds, reverse=True), "more memory is never slower"
    assert len({setting.overrides for setting in chosen}) >= 4


def test_the_fewest_layers_are_offloaded_and_the_host_holds_them():
    words = [
        "model=qwen3b",
        "seq=6m",
        "sparsity=vertical_slash",
        "sparsity.max_columns=2048",
        "train.activation_checkpoint=full",
    ]
    base = dataclasses.replace(planned(*words), host_share=70 * GIB)
    chosen_plan = planning.search(base)
    number = chosen_plan.chosen.changes["train.offload_activations"]
    assert 1 < number < 35
    assert chosen_plan.chosen.memory.host == number * 3 * GIB <= 70 * GIB
    train = dataclasses.replace(chosen_plan.chosen.config.train, offload_activations=number - 1)
    fewer = base.estimate(dataclasses.replace(chosen_plan.chosen.config, train=train))
    assert not base.has_room_for(fewer)
    # With less room, no other number fits, either.
    crowded = dataclasses.replace(base, host_share=(number - 1) * 3 * GIB)
    refused = planning.search(crowded)
    assert not any(
        s.fits
        for s in refused.settings
        if s.config.optim == base.config.optim and s.config.train.tile_mib == train.tile_mib
    )


def test_a_checkpoints_host_memory_counts_if_the_run_saves():
    words = [
        "topology.workers=1",
        "seq=64k",
        "train.activation_checkpoint=full",
        "optim.offload=true",
    ]
    never = [*words, "train.checkpoint_every=0", "train.checkpoint_at_end=false"]
    saves, silent = planned(*words), planned(*never)
    copy = 12 * saves.parameters.total
    assert (saves.memory.saving, silent.memory.saving) == (copy, 0)
    # Gradients and rounded weights of embedding, LM head and last norm, two of each.
    assert saves.memory.host == copy + 2 * (4 + 2) * (2 * 128256 * 4096 + 4096)
    assert planned(*never, "train.checkpoint_every=50").memory.saving == copy
    assert planned(*never, "train.checkpoint_every=50", "train.steps=50").memory.saving == 0, (
        "the run ends with the step"
    )
    assert silent.has_room_for(silent.memory)
    with pytest.raises(
        ConfigError,
        match=r"and 19\d\.\d\d GiB of host memory "
        r"\(89\.75 GiB of it while a checkpoint is written\), but has ",
    ):
        require_fit(saves)
    # What auto offloads leaves room for it.
    chosen_plan = planned("topology.workers=1", "seq=128k", "train.memory=auto")
    assert all(
        setting.memory.host + copy <= chosen_plan.host_share
        for setting in chosen_plan.search.settings
        if setting.fits
    )
    processes = [planned("model=tiny", "topology.device=cpu", *more) for more in ((), never[-2:])]
    each = processes[0].memory.saving
    assert each >= 12 * processes[0].parameters.total // 8
    assert processes[0].host_bytes - processes[1].host_bytes == 8 * each


def test_host_memory_may_be_set():
    words = [
        "topology.workers=1",
        "seq=128k",
        "optim.offload=true",
        "train.activation_checkpoint=full",
        "train.offload_activations=true",
        "train.checkpoint_every=0",
        "train.checkpoint_at_end=false",
    ]
    with pytest.raises(
        ConfigError, match=r"and 115\.20 GiB of host memory \(90% of an assumed amount; "
    ):
        require_fit(planned(*words))
    roomy = planned(*words, "topology.host_memory_gib=200")
    assert roomy.host_share == 180 * GIB
    require_fit(roomy)
    with pytest.raises(ConfigError, match=r"and 126\.00 GiB of host memory;"):
        require_fit(planned(*words, "topology.host_memory_gib=140"))


@pytest.mark.slow
def test_the_output_shows_the_choice_and_the_longest_sequence():
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(dry_run(compose([*RUN, "train.memory=auto", "topology.gpu_memory_gib=50"])))
    page = console.file.getvalue()
    assert max(len(line.rstrip()) for line in page.splitlines()) <= 80
    flat = " ".join(page.split())
    longest = re.search(
        r"Longest sequence that fits with train\.memory=auto: at least (\d+[km])\.", flat
    )[1]
    for seq, fits in (
        (compose([f"seq={longest}"]).seq, True),
        (compose([f"seq={longest}"]).seq * 9 // 8, False),
    ):
        chosen_plan = planned("train.memory=auto", "topology.gpu_memory_gib=50", f"seq={seq}")
        assert (chosen_plan.search.chosen is not None) is fits
    assert " of a GPU " in flat
    assert re.search(
        r"train\.memory=auto takes train\.\S+=.*, of \d+ settings the fastest one that fits\.", flat
    )
    assert "per step, estimated" not in flat, "the simulator predicts the time of a step"
    assert (
        "While a checkpoint is written: 11.22 GiB more host memory per worker, "
        "89.75 GiB per machine." in flat
    )


def decided(rank: int, world: int, *words: str) -> tuple[dict[str, object], float]:
    expert_traffic.HOST_WAIT_US = -1e3  # on one host, auto would deal no experts
    trainer = make(rank, world, world, ("train.memory=auto", *words))
    assert trainer.plan.search is not None
    return keys.values(trainer.config), trainer.train_step(False).loss


@mostly_slow(
    ("words", "degree"),
    [((), 1), (("model=tiny_moe", "topology.expert_parallel=auto", "model.moe.experts=64"), 2)],
    keep=(1,),
)
def test_all_ranks_of_a_run_decide_alike_and_train(words, degree):
    (first, loss), (second, same) = gloo.run(2, decided, *words)
    assert first == second
    assert first["topology.expert_parallel"] == degree
    assert loss == same == pytest.approx(5.6, abs=0.5)


def tried(*words: str) -> list[dict[str, object]]:
    variants = list(planning.variants_of_plan(planned(*words)))
    chosen_plan = [
        {key: planning.get_setting(config, key) for key in planning.CHOICES}
        for config, _ in variants
    ]
    base = compose([*RUN, *words])
    for setting, (_, changes) in zip(chosen_plan, variants, strict=True):
        assert changes == {
            key: value for key, value in setting.items() if value != planning.get_setting(base, key)
        }
    assert len({tuple(setting.values()) for setting in chosen_plan}) == len(chosen_plan), (
        "each once"
    )
    return chosen_plan


def test_exactly_the_useful_settings_are_tried():
    every = tried()
    # No checkpointing with and without MLP products (2); selective also with offloading (3); the
    # three shares of sequence_selective and full, each with and without offloading (8); each with
    # all tiles, chunks and shards.
    assert len(every) == (2 + 3 + 8) * 3 * 3 * 3 * 3
    states = {(setting["optim.offload"], setting["optim.offload_gradients"]) for setting in every}
    assert states == {(False, False), (True, False), (True, True)}
    # Gradients of several micro-batches accumulate on the device.
    assert not any(setting["optim.offload_gradients"] for setting in tried("train.global_batch=2"))
    given = tried("train.global_batch=2", "optim.offload=true", "optim.offload_gradients=true")
    assert {setting["optim.offload_gradients"] for setting in given} == {True}, (
        "who asks for it has it"
    )
    ways = {tuple(list(setting.values())[:4]) for setting in every}
    assert ways == {
        ("none", 0.5, False, False), ("none", 0.5, False, True),
        ("selective", 0.5, False, False), ("selective", 0.5, False, True),
        ("selective", 0.5, True, False),
        *(("sequence_selective", share, False, False) for share in (0.25, 0.5, 0.75)),
        *(("sequence_selective", share, True, False) for share in (0.25, 0.5, 0.75)),
        ("full", 0.5, False, False), ("full", 0.5, True, False),
    }  # fmt: skip
    # Unsharded float32 gradients are not for a different reduce dtype.
    rounded = tried("train.reduce_dtype=bfloat16")
    assert {setting["train.shard"] for setting in rounded} == {"full", "gradients"}
    assert len(rounded) == len(every) * 2 // 3


@pytest.mark.parametrize(
    ("word", "key", "ways"),
    [
        ("train.checkpoint_keep=0.75", "train.checkpoint_keep", 2 + 3 + 2 + 2),
        ("train.keep_mlp=true", "train.keep_mlp", 1 + 2 + 6 + 2),
        ("train.offload_activations=true", "train.offload_activations", 0 + 1 + 3 + 1),
        ("train.activation_checkpoint=full", "train.activation_checkpoint", 2),
        ("train.activation_checkpoint=none", "train.activation_checkpoint", 2),
    ],
)
def test_a_key_that_the_user_set_is_tried_with_everything_else(word, key, ways):
    chosen_plan = tried(word)
    assert {setting[key] for setting in chosen_plan} == {
        planning.get_setting(compose([*RUN, word]), key)
    }
    assert len(chosen_plan) == ways * 3 * 3 * 3 * 3


class Counted:
    """A plan whose memory is a number of layers; `limit` layers fit."""

    environment = type("Environment", (), {"device": "cuda"})

    def __init__(self, limit: int, device: str = "cuda") -> None:
        self.limit, self.environment = limit, type("Environment", (), {"device": device})

    def has_room_for(self, memory: MemoryEstimate, usable: float = 0.0) -> bool:
        assert memory.host == memory.saving == 0
        return memory.reserve <= self.limit * (1 if usable in (0.0, planning.ROOMY) else 0)


def test_the_fewest_layers_are_offloaded_and_the_most_products_kept(monkeypatch):
    base = compose([*RUN])
    layers = base.model.num_layers
    away, kept = {"train.offload_activations": True}, {"train.keep_mlp": True}

    def on_device(plan, config):  # noqa: ARG001
        return MemoryEstimate(
            moments=(),
            reserve=layers - layers_on_host(config.train.offload_activations, layers),
            host=7,
            saving=7,
        )

    def products(plan, config):  # noqa: ARG001
        return MemoryEstimate(
            moments=(), reserve=layers_with_products(config.train.keep_mlp, layers)
        )

    monkeypatch.setattr(Counted, "estimate", on_device, raising=False)
    # At most all layers but one are offloaded; if that does not fit, no number is tried.
    expected = {0: True, 1: True, 2: layers - 2, 3: layers - 3, layers - 1: 1, layers: 1}
    for limit, number in expected.items():
        config, changes = planning.with_fewest_offloaded(
            Counted(limit), planning.with_values(base, away), away
        )
        # 1 and True are equal, and mean one layer and all.
        assert repr(
            [changes["train.offload_activations"], config.train.offload_activations]
        ) == repr([number, number]), limit
    assert repr(
        planning.with_fewest_offloaded(
            Counted(layers, "cpu"), planning.with_values(base, away), away
        )[1]
    ) == repr(away)
    # A key that is not among the changes was set by the user.
    given = planning.with_values(base, away)
    assert planning.with_fewest_offloaded(Counted(2), given, {}) == (given, {})
    monkeypatch.setattr(Counted, "estimate", products, raising=False)
    for limit, number in {0: False, 1: 1, 2: 2, layers - 1: layers - 1, layers: True}.items():
        config, changes = planning._with_most_products(
            Counted(limit), planning.with_values(base, kept), kept | {"train.shard": "full"}
        )
        assert repr(config.train.keep_mlp) == repr(number), limit
        assert changes == {"train.shard": "full"} | ({"train.keep_mlp": number} if number else {})
    given = planning.with_values(base, kept)
    assert planning._with_most_products(Counted(2), given, {}) == (given, {})


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("train.activation_checkpoint=selective", True),
        ("train.activation_checkpoint=none train.tile_mib=64", True),
        # Everything is kept anyway.
        ("train.activation_checkpoint=none train.tile_mib=0", None),
        ("train.activation_checkpoint=full", None),
        ("train.activation_checkpoint=sequence_selective", None),
        ("train.offload_activations=2", None),
        ("train.keep_mlp=3", None),
        ("topology.gpu_memory_gib=6", None),
    ],
)
def test_products_are_kept_if_that_saves_time_and_there_is_room(words, kept):
    chosen_plan = planning.with_products(planned("model=qwen0.5b", "seq=32k", *words.split()))
    assert (chosen_plan and chosen_plan.config.train.keep_mlp) is kept


def test_fp8_keeps_twice_the_layers_and_saves_less_with_each():
    words = ["model=qwen3b", "seq=512k", "topology.workers=4", "topology.gpu_memory_gib=141"]
    saved, kept = [], []
    for kind in ("none", "mlp"):
        plan = planned(*words, f"train.fp8={kind}")
        seconds = [
            planning.step_seconds(plan, config, plan.estimate(config))
            for config in (plan.config.changed(train={"keep_mlp": n}) for n in (0, 10))
        ]
        saved.append(seconds[0] - seconds[1])
        chosen = planned(*words, f"train.fp8={kind}", "train.memory=auto").config.train
        kept.append(chosen.keep_mlp)
    # Milliseconds of gate and up in fp8 and bf16 (profiles/fp8_speed.py). Keeping spares o, too.
    output = 2048 / (2 * 11008)
    assert saved[1] / saved[0] == pytest.approx((output + 2.01 / 4.12) / (output + 1))
    assert 1.6 < kept[1] / kept[0] < 2.1, kept


@mostly_slow(
    "words",
    [
        [],
        ["topology.exchange=ring", "sparsity=vertical_slash", "train.global_batch=2"],
        ["model=tiny", "seq=4m", "sparsity=moba", "topology.workers=1"],
        ["topology.pipeline_parallel=2", "train.global_batch=4"],
        ["train.activation_checkpoint=sequence_selective", "train.loss_chunk_mib=512"],
    ],
    ids=str,
    keep=(3,),
)
def test_a_least_variant_needs_no_more_memory_than_the_others(words):
    """So a search for anything that fits may leave the others out."""
    plan = planned("train.memory=auto", *words)
    config = plan.requested or plan.config
    variants = [variant for variant, _ in planning.variants_of_plan(plan.with_config(config))]
    least = [variant for variant in variants if planning.is_least(config, variant)]
    assert 0 < 5 * len(least) < len(variants)
    others = [key for key in planning.CHOICES if key not in planning.LEAST]
    by_others = {tuple(planning.get_setting(v, key) for key in others): v for v in least}
    assert len(by_others) == len(least)
    for variant in variants:
        same = by_others[tuple(planning.get_setting(variant, key) for key in others)]
        small, large = plan.estimate(same), plan.estimate(variant)
        assert small.total <= large.total, variant.train
        assert small.host_peak <= large.host_peak, variant.train


def test_the_longest_sequence_is_found_with_few_plans(monkeypatch):
    """The planned length and seven lengths above it: 1m, 2m, three eighths, and the shortest."""
    plan = planned("topology.gpu_memory_gib=141")
    tried, counted = [], []
    with_config, attention = run_plan.RunPlan.with_config, run_plan.AttentionMemory

    def recorded(self, config):
        tried.append(config.seq)
        return with_config(self, config)

    monkeypatch.setattr(run_plan.RunPlan, "with_config", recorded)
    monkeypatch.setattr(
        run_plan, "AttentionMemory", lambda *args: counted.append(1) or attention(*args)
    )
    plan = dataclasses.replace(plan, config=plan.config.changed(train={"memory": "auto"}))
    longest = planning.longest_seq(plan)
    assert longest > plan.config.seq
    first_too_long = 1 << longest.bit_length()
    assert [seq for seq in tried if seq < plan.config.seq] == [1024]
    assert set(tried) >= {1024, plan.config.seq, first_too_long}
    assert len(tried) <= 2 + (first_too_long // plan.config.seq).bit_length() - 1 + 3
    assert len(counted) == len(tried), "all memory settings share the memory of attention"
    monkeypatch.undo()
    eighth = first_too_long // 16
    for seq, fits in ((longest, True), (longest + eighth, False)):
        other = plan.with_config(dataclasses.replace(plan.config, seq=seq))
        assert planning._can_fit(other) == fits


def test_layers_with_experts_are_not_asked_to_keep_their_products():
    words = ["model=qwen3_30b_a3b", "seq=128k", "topology=h200_1x8", "topology.device=cuda"]
    plan = make_plan(compose([*words, "train.memory=auto"]))
    assert plan.search is not None
    assert all("train.keep_mlp" not in setting.changes for setting in plan.search.settings)
    assert planning.with_products(plan) is None


EXPERTS = ["model=qwen3_30b_a3b", "topology=h200_1x8", "topology.device=cuda", "train.memory=auto"]
# Keys that differ from their default stay, so fewer settings are tried.
EXPERTS += ["train.loss_chunk_mib=512", "train.tile_mib=1024"]
DEALT = "topology.expert_parallel=auto"


def setting_of(*words: str) -> planning.MemorySetting:
    found = make_plan(compose([*EXPERTS, *words])).search
    assert found is not None
    assert found.chosen is not None
    return found.chosen


@mostly_slow(("seq", "degree"), [("8k", 8), ("1m", 1)], keep=(0,))
def test_degree_and_memory_setting_are_chosen_together(seq, degree):
    plan = make_plan(compose([*EXPERTS, f"seq={seq}", DEALT]))
    assert plan.search is not None
    chosen = plan.search.chosen
    assert chosen is not None
    alone = [setting_of(f"seq={seq}", f"topology.expert_parallel={n}") for n in (1, 2, 4, 8)]
    fastest = min(alone, key=lambda setting: setting.seconds)
    assert (chosen.seconds, chosen.memory) == (fastest.seconds, fastest.memory)
    assert plan.config.topology.expert_parallel == degree == chosen.changes[planning.DEGREE]
    # A run with these words has the same plan, so all ranks and later runs do the same.
    again = make_plan(compose([*EXPERTS, f"seq={seq}", *chosen.overrides.split()]))
    assert again.memory == plan.memory


def test_offloaded_optimizers_are_tried_only_with_all_experts_on_each_worker():
    plan = make_plan(compose([*EXPERTS, "seq=8k", DEALT, "train.memory=manual"]))
    degrees = {
        config.topology.expert_parallel
        for config, _ in planning.variants_of_plan(plan)
        if config.optim.offload
    }
    assert degrees == {1}


def test_a_run_that_the_machine_cannot_hold_is_refused_in_one_line():
    config = compose(["model=qwen7b", "seq=1m", "topology.device=cpu", "topology.workers=1"])
    environment = gloo.environment(0, 1)
    with pytest.raises(ConfigError) as error:
        checked_plan(config, environment, resolve_run(config, environment))
    (line,) = error.value.problems
    assert re.match(r"seq=1m: a worker needs about [\d.,]+ GiB, but has .* --dry-run", line), line


def test_a_small_run_gets_its_plan():
    config = compose(["seq=256", "topology.device=cpu"])
    environment = gloo.environment(0, 1)
    plan = checked_plan(config, environment, resolve_run(config, environment))
    assert plan.fits
    assert plan.environment == environment
