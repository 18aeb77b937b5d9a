"""The dry run: every number of a plan, also on a machine other than the planned one."""

import dataclasses
import io
import re
from collections import Counter

import pytest
import torch
from attention.missing_packages import hide_packages
from masked_documents import masked_store
from rich.console import Console
from training.test_run_plan import LARGE, without_gpu

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.parallel.program import Program
from mtrain_cli.training import attention_memory
from mtrain_cli.training import dry_run as module
from mtrain_cli.training.dry_run import dry_run
from mtrain_cli.training.planning import longest_seq, make_plan


def text(renderable, width=80):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(renderable)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def large():
    """The dry run of the largest plan, to print at several widths."""
    return dry_run(compose(LARGE))


@without_gpu
def test_a_plan_for_absent_gpus_says_what_it_assumes():
    plan = make_plan(compose(LARGE))
    assert (plan.dims.workers, plan.dims.cp, plan.dtype, plan.layout.tokens_per_worker) == (
        64,
        64,
        "bfloat16",
        65536,
    )
    assert plan.kernel == "flash4"
    assert "assumed without a GPU" in plan.kernel_reason
    assert (plan.exchange.name, plan.exchange.chunks) == ("all_gather", 8)
    assert "gathered KV and dKV take 10.0 GiB at once" in plan.exchange.reason
    longer = make_plan(compose([*LARGE, "seq=16m"])).exchange
    assert longer.name == "ring"
    assert "gathered KV and dKV would take 40.0 GiB at once, over 10% of " in longer.reason
    assert " by 8 from " in module.describe_rope(plan)
    assert plan.parameters.total == 8_030_261_248
    assert plan.fits == (plan.memory.total <= 0.95 * plan.hardware.memory)


@without_gpu
def test_a_plan_for_absent_gpus_ignores_which_packages_this_machine_has(monkeypatch):
    config = compose(["model=qwen3b", "seq=256k", "sparsity=vertical_slash", "topology=h200_1x8"])
    with_packages = text(dry_run(config))
    hide_packages(monkeypatch)
    assert text(dry_run(config)) == with_packages
    assert "all packages, auto takes this kernel, else triton" in " ".join(with_packages.split())
    assert make_plan(config).kernel == "flash4"
    assert make_plan(config.changed(train={"kernel": "flash4"})).kernel == "flash4"


@without_gpu
@pytest.mark.usefixtures("with_24_gib")
def test_workers_that_this_machine_refuses_are_planned_as_gpus_with_the_reason():
    plan = make_plan(compose(LARGE[:3]))
    assert (plan.environment.device, plan.dims.workers, plan.dtype) == ("cuda", 64, "bfloat16")
    assert re.fullmatch(
        r"assumed NVIDIA H200 GPUs \(set topology.cluster to plan for others\): this machine has "
        r"no GPU, and 64 CPU workers would need [\d,.]+ GiB, but this machine has 24 GiB for this "
        r"process",
        plan.machine,
    )
    assert (
        " ".join(text(module.render(plan), 1000).splitlines()[1].split())
        == f"machine {plan.machine}"
    )
    kernel = make_plan(
        compose(
            [
                "model=qwen3b",
                "seq=1k",
                "topology.workers=1",
                "train.kernel=flash4",
                "train.dtype=bfloat16",
            ]
        )
    )
    assert kernel.machine.startswith(
        "assumed NVIDIA H200 GPUs (set topology.cluster to plan for others): this machine has "
        "no GPU, and its CPU refuses train.kernel=flash4: "
    )
    assert make_plan(compose([*LARGE[:3], "topology.device=cpu"])).environment.device == "cpu"


@without_gpu
@pytest.mark.usefixtures("with_24_gib")
def test_a_plan_that_does_not_fit_this_machine_says_what_would_help():
    last = text(dry_run(compose(["model=qwen3b", "seq=256k"])), 1000).splitlines()[-1]
    assert re.fullmatch(
        r"Does not fit: seq=256k: a worker needs about [\d.]+ GiB, but has 24.00 GiB, shared by 2 "
        r"CPU workers of this machine; only a smaller model would fit; "
        r"add --dry-run topology=h200_1x8 to plan for eight GPUs\. *",
        last,
    )
    words = [
        "seq=1m",
        "topology.device=cpu",
        "train.activation_checkpoint=none",
        "train.tile_mib=0",
    ]
    helps = text(dry_run(compose(words)), 1000).splitlines()[-1]
    seq = re.search(r"; fits with (seq=\w+);", helps)[1]
    for proposal, fits in (
        ((words[0],), False),
        ((seq,), True),
        ((f"seq={2 * compose([seq]).seq}",), False),
    ):
        assert make_plan(compose([*words[1:], *proposal])).fits is fits
    assert "Does not fit" not in text(dry_run(compose(["topology.device=cpu"])))


@without_gpu
@pytest.mark.parametrize("exchange", ["ring", "group_cast"])
def test_a_search_skips_lengths_that_the_mask_does_not_allow(exchange):
    sizes = ["mask.frames=8", "mask.height=16", "mask.width=32", "mask.window=[3,5,7]", "seq=4k"]
    for mask in (["mask=video", *sizes], ["mask=prefix_lm", "mask.prefix=2k", "seq=4k"]):
        words = ["topology=h200_1x8", f"topology.exchange={exchange}", *mask]
        plan = make_plan(compose(["model=qwen3b", *words]))
        video = "mask=video" in mask
        assert longest_seq(plan, shortest=1024, most=8192) == (4096 if video else 15360)
        with pytest.raises(ConfigError, match=r"mask\."):
            plan.with_config(dataclasses.replace(plan.config, seq=1024))


def test_the_largest_plan_walks_each_program_once_per_size(monkeypatch):
    walks = Counter()
    for name in ("peak_bytes", "pooled_at_once"):
        walked = getattr(Program, name)

        def counted(program, *sizes, _name=name, _walked=walked):
            walks[_name] += 1
            return _walked(program, *sizes)

        monkeypatch.setattr(Program, name, counted)
    # Plans of other tests must not have walked these programs before.
    for cached in (attention_memory._pool, attention_memory._peak_of_backward):
        cached.cache_clear()
    text(dry_run(compose(LARGE)))
    # The search estimates more than 20,000 settings at 46 lengths; each estimate asks for several.
    assert 0 < walks["peak_bytes"] < 200
    assert 0 < walks["pooled_at_once"] < 200


def test_traffic_of_weights_and_gradients_depends_on_sharding_and_is_shown():
    words = ["topology.device=cpu", "topology.workers=2", "train.global_batch=64", "train.shard="]
    full, gradients, optimizer = (
        make_plan(compose([*words[:3], words[3] + kind]))
        for kind in ("full", "gradients", "optimizer")
    )
    one = make_plan(compose([*words[:2], "train.shard=optimizer"]))
    assert full.received.weights > 2 * gradients.received.weights > 60 * optimizer.received.weights
    assert optimizer.received.weights == one.received.weights == 8 * optimizer.parameters.total // 2
    printed = [
        " ".join(text(module.render(plan), 1000).split()) for plan in (full, gradients, optimizer)
    ]
    assert "(gathered twice and reduced in each of 64 micro-batches)" in printed[0]
    assert "(gathered once a step, reduced in each of 64 micro-batches)" in printed[1]
    assert "(gathered once a step, reduced) checkpoint" in printed[2]
    assert one.memory.host == 0
    offloaded = make_plan(compose([*words[:2], "optim.offload=true"]))
    assert offloaded.memory.host > 12 * offloaded.parameters.total // 2
    assert offloaded.received.host == 8 * offloaded.parameters.total // 2


def test_accumulation_and_data_parallel_groups_split_the_global_batch():
    plan = make_plan(
        compose(
            [
                "topology.device=cpu",
                "topology.workers=4",
                "topology.context_parallel=2",
                "train.global_batch=12",
                "train.micro_batch=2",
            ]
        )
    )
    assert (plan.dims.dp, plan.micro_batches, plan.tokens_per_step) == (2, 3, 12 * 4096)
    assert "12 sequences = 2 x 2 x 3 accumulated" in text(module.render(plan))


@pytest.mark.parametrize("width", [80, 120])
def test_the_output_fits_the_terminal_and_names_every_part(large, width):
    printed = text(large, width)
    assert max(len(line.rstrip()) for line in printed.splitlines()) <= width
    for word in (
        "8.03 B parameters",
        "3.34 TFLOP",
        "64 GPU",
        "striped",
        "all_gather (8 parts of the heads)",
        "flash4",
        "bfloat16",
        "parameters",
        "optimizer",
        "activations",
        "total",
    ):
        assert word in printed, word


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        ("h200_1x8", ["8 x NVIDIA H200 = 1 data x 8 context", "of the 139.80 GiB of NVIDIA H200"]),
        (
            "a100_4x8",
            [
                "assumed NVIDIA A100-SXM4-40GB GPUs of topology.cluster=a100_4x8: ",
                "32 x NVIDIA A100-SXM4-40GB = 1 data x 32 context, 4 nodes of 8",
                "39.40 GiB",
                "kernel sdpa: assumed without a GPU: on NVIDIA A100-SXM4-40GB",
            ],
        ),
        ("b200_4x8", ["32 x NVIDIA B200"]),
        ("hierarchical", ["hierarchical_ring: "]),
        ("ulysses", ["ulysses"]),
    ],
)
def test_every_topology_has_a_plan(topology, words):
    if torch.cuda.is_available():
        pytest.skip("plans for this machine's GPUs")
    printed = " ".join(text(dry_run(compose([f"topology={topology}"]))).split())
    for word in words:
        assert word in printed, word


@without_gpu
def test_the_output_defines_what_fits_means():
    words = ["model=qwen0.5b", "seq=32k", "topology.workers=2", "topology.device=cuda"]
    page = " ".join(text(dry_run(compose(words))).split())
    assert page.endswith(
        "To \"fit\" means to use at most 95% of a GPU's memory and 90% of the host's; "
        "gaps and other processes take the rest."
    )


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        (["recipe=video", "data=stdlib"], True),
        (["recipe=video", "data=stdlib", "data.document_mask=false"], False),
        (["recipe=video"], False),
        (["recipe=video", "data.document_mask=true"], False),  # a document may be a video
        (["mask=prefix_lm"], True),
        (["mask=sliding_window"], False),
        (["mask=sliding_window", "mask.global_tokens=8"], True),
    ],
)
def test_a_mask_of_the_whole_sequence_with_packed_documents_is_a_warning(words, warned):
    rows = module.mask_rows(compose(words, plan=True))
    found = [text for label, text in rows if label == "warning" and "packs documents" in text]
    assert len(found) == warned
    assert all(text.endswith("give data.document_mask=false") for text in found)


def test_a_plan_shows_the_masks_of_the_data(tmp_path):
    words = ["data=tokens", f"data.path={masked_store(tmp_path)}", "topology.device=cpu"]
    plain = compose([*words, "model.vocab_size=264"])
    assert module.mask_rows(plain) == []
    masked = plain.changed(data={"mask_key": "mask"})
    shown = text(dry_run(dataclasses.replace(masked, seq=128)), 200)
    assert "from the data (data.mask_key=mask), at most 2 intervals of keys per query; " in shown
    assert "% of the pairs of a causal mask" in shown
    assert "masks of the first 6 sequences were read; memory and stages assume causal" in shown
    assert "% of it attention (masks of the data)" in shown
    assert "a sequence may hold several, each with its own mask" in shown
    unread = text(dry_run(masked), 200)
    assert "the masks cannot be read (seq=4096: data.path=" in unread
    assert "(causal, whole sequence)" in unread
    (banner,) = module.mask_rows(masked)
    assert banner[1].endswith("intervals of keys per query"), "a banner does not read the data"
