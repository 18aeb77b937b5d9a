"""The dry run: every number of a plan, also on a machine other than the planned one."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from attention.missing_packages import hide_packages
from commands.typed_line import simulate
from masked_documents import masked_store
from rich.console import Console
from training.test_run_plan import LARGE, dry_run, without_gpu

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.launch.environment import Environment, resolve_environment
from mtrain_cli.model.tokenizer_files import of_bytes
from mtrain_cli.parallel.program import Program
from mtrain_cli.training import attention_memory
from mtrain_cli.training import dry_run as module
from mtrain_cli.training.dry_run import (
    banner,
    beyond_reach,
    describe_sparsity,
    expert_rows,
    kernel_rows,
    pipeline_rows,
    position_rows,
    render,
    tensor_rows,
    weights_rows,
)
from mtrain_cli.training.hardware import Hardware
from mtrain_cli.training.planning import longest_seq, make_plan
from mtrain_cli.training.resolution import resolve_run
from mtrain_cli.training.run_plan import RunPlan


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


ELSEWHERE = [
    "topology.device=cuda",
    "topology.workers=2",
    "seq=8k",
    "sparsity=vertical_slash",
    "sparsity.dense_steps=3",
    "model=qwen3b",
]


def test_the_kernel_of_dense_steps_is_shown_with_its_reason():
    sparse, dense = kernel_rows(make_plan(compose([*ELSEWHERE, "train.kernel=triton"])))
    assert sparse[1].startswith("triton: as configured")
    assert dense[1].startswith("flash4 for the first 3 steps, which are dense: ")
    assert len(kernel_rows(make_plan(compose([*ELSEWHERE, "sparsity.dense_steps=0"])))) == 1


def test_the_kernel_of_dense_layers_is_shown_with_its_reason():
    words = ["train.kernel=triton", "sparsity.dense_layers=2"]
    plan = make_plan(compose([*ELSEWHERE, *words]))
    (_, (_, dense)) = kernel_rows(plan)
    expected = "flash4 for the first 3 steps and the last 2 layers, which are dense: "
    assert dense.startswith(expected)
    assert describe_sparsity(plan).endswith("; the first 3 steps and the last 2 layers dense")
    only = make_plan(compose([*ELSEWHERE, *words, "sparsity.dense_steps=0"]))
    assert kernel_rows(only)[1][1].startswith("flash4 for the last 2 layers, which are dense: ")
    one = make_plan(compose([*ELSEWHERE, "sparsity.dense_layers=1", "sparsity.dense_steps=0"]))
    assert kernel_rows(one)[1][1].startswith("flash4 for the last layer, which are dense: ")
    assert describe_sparsity(one).endswith("; the last layer dense")


def test_dense_layers_keep_no_index():
    layers = compose(ELSEWHERE).model.num_layers
    plans = [
        make_plan(compose([*ELSEWHERE, f"sparsity.dense_layers={n}"])) for n in (0, layers // 2)
    ]
    whole, half = (max(m.parts["index"] for m in plan.memory.moments) for plan in plans)
    assert 0 < half < 0.6 * whole


def test_dense_steps_that_must_be_repeatable_run_on_triton():
    plan = make_plan(compose([*ELSEWHERE, "train.kernel=triton", "train.deterministic=true"]))
    assert kernel_rows(plan)[1][1].startswith("triton for the first 3 steps, which are dense: ")


WORDS = [
    "model=qwen3b", "seq=32k", "topology=h200_1x8", "train.global_batch=16",
    "topology.exchange=all_gather",
]  # fmt: skip


def test_runs_without_them_have_no_rows():
    plan = make_plan(compose(WORDS))
    assert (tensor_rows(plan), pipeline_rows(plan)) == ([], [])


def test_a_tensor_group_says_what_a_worker_computes():
    rows = tensor_rows(make_plan(compose([*WORDS, "topology.tensor_parallel=2"])))
    what = "a worker computes 8 of 16 heads and 5,504 of 11,008 columns of the MLP"
    assert rows == [("tensor", what)]


def test_auto_shows_the_predicted_time_of_each_degree_of_experts():
    words = "model=tiny_moe", "topology=h200_1x8", "train.global_batch=8", "seq=8k"
    shown = expert_rows(make_plan(compose([*words, "topology.expert_parallel=auto"])))
    (_, chosen), (_, costs) = shown
    head, _, degrees = costs.partition(": ")
    assert head.endswith("per layer and step by degree, predicted for h200_1x8")
    times = {n: float(ms) for n, ms in re.findall(r"(\d): ([\d.]+) ms, [\d.]+ [MG]iB", degrees)}
    assert list(times) == ["1", "2", "4", "8"]
    assert f"; degree {min(times, key=times.get)} was chosen by auto" in chosen
    given = expert_rows(make_plan(compose([*words, "topology.expert_parallel=2"])))
    assert given == [("experts", "a worker computes 4 of 8"), ("", costs)]


def test_times_of_experts_on_a_cpu_are_those_of_gpus():
    words = "model=tiny_moe", "topology.device=cpu", "topology.workers=2"
    for degree in ("auto", "2"):
        rows = expert_rows(make_plan(compose([*words, f"topology.expert_parallel={degree}"])))
        text = "predicted for H200s (topology.cluster=auto), not for CPU processes: "
        assert text in rows[1][1]


def test_a_pipeline_says_its_stages_idle_time_and_messages():
    words = [*WORDS, "topology.pipeline_parallel=4", "train.shard=gradients"]
    (name, text), (_, cost) = pipeline_rows(make_plan(compose(words)))
    assert name == "pipeline"
    assert text == (
        "4 stages of [10,9,10,7] layers; 1f1b, 16 micro-batches per step: stages idle 19% of the "
        "time"
    )
    assert cost == (
        "a message has 64.0 MiB of hidden states; a stage between others receives 2.00 GiB per step"
    )


QWEN = {
    "model_type": "qwen2", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96, "max_position_embeddings": 2048, "rope_theta": 1e6,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def banner_lines(folder: Path, *words: str, **changes: Any) -> list[str]:
    (folder / "config.json").write_text(json.dumps(QWEN | changes))
    return encoding(compose([f"train.init_from={folder}", "seq=2k", *words]))


def encoding(config: Config) -> list[str]:
    (_, *rows) = weights_rows(config)
    return [text for _, text in rows if "the run needs" not in text]


def test_positions_beyond_the_folders_reach_are_reported(folder: Path) -> None:
    def line(*words: str, **changes: Any) -> str:
        banner_lines(folder, **changes)
        return beyond_reach(compose([f"train.init_from={folder}", "seq=8k", *words]))

    exceeds = "seq=8k exceeds the 2k tokens that the model's rotary positions cover. Give "
    remedy = "model.rope.scaling=yarn model.rope.factor=4"
    assert line() == f"{exceeds}{remedy}."
    assert line(*remedy.split()) == line("model.rope.theta=2e6") == line("seq=2k") == ""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert line(rope_scaling=yarn) == f"{exceeds}model.rope.factor=16."
    assert line("model.rope.factor=16", rope_scaling=yarn) == ""
    (row,) = position_rows(compose([f"train.init_from={folder}", "seq=8k"]))
    assert row[0] == "warning"


@pytest.mark.parametrize(
    ("words", "covered", "remedy"),
    [
        (["model=llama8b", "seq=1m"], "128k", "model.rope.scaling=yarn model.rope.factor=128"),
        (["model=llama1b", "seq=1m"], "128k", "model.rope.scaling=yarn model.rope.factor=128"),
        (["model=llama14b", "seq=10k"], "4k", "model.rope.scaling=yarn model.rope.factor=3"),
        (["model=qwen3b", "seq=512k", "model.rope.factor=4"], "128k", "model.rope.factor=16"),
        (["model=llama8b", "seq=128k"], None, ""),
        (["model=qwen3b", "seq=512k"], None, ""),
        ([], None, ""),
        (["seq=16k"], None, ""),  # the default model has no released weights
    ],
)
def test_a_preset_gets_a_note_on_the_positions_that_it_covers(words, covered, remedy):
    config = compose(words)
    rows = position_rows(config)
    if covered is None:
        assert rows == []
        return
    ((label, line),) = rows
    assert label == "note"
    assert f" exceeds the {covered} tokens that the rotary positions of model=" in line
    assert line.endswith(f"; released weights need {remedy}.")
    assert position_rows(compose([*words, *remedy.split()])) == [], "the remedy helps"


def test_plan_banner_and_simulation_show_the_line():
    plan = make_plan(compose(["model=llama8b", "seq=1m", "topology=h100_4x8"]))
    line = beyond_reach(plan.config)
    for shown in (render(plan), banner(plan, Path("runs/x"), "stdlib")):
        console = Console(file=io.StringIO(), width=400, color_system=None)
        console.print(shown)
        assert line in console.file.getvalue()
    shown = simulate("model=llama8b seq=1m --no-files --layout zigzag --exchange ring")
    assert f"note   {line[:60]}" in shown.stdout


EXAMPLES = re.compile(r"mtrain train ([^`\n\[]*?seq=[^`\n\[]*)")


def test_no_example_exceeds_the_positions_of_its_model():
    root = Path(__file__).parents[2]
    pages = [*root.glob("docs/*.md"), root / "README.md", *root.glob("mtrain_cli/commands/*.py")]
    texts = [page.read_text(encoding="utf-8").replace("\\\n", " ") for page in pages]
    found = [words for text in texts for words in EXAMPLES.findall(text)]
    assert len(found) > 20
    for words in found:
        if "model.family=transformers" in words:  # its folder is not there
            continue
        kept = [
            w for w in words.split("#")[0].split() if re.match(r"(model|seq|recipe)[\w.]*=\S", w)
        ]
        assert beyond_reach(compose([*kept, "mask=causal"], plan=True)) == "", words
    for recipe in root.glob("conf/recipe/*.yaml"):
        assert beyond_reach(compose([f"recipe={recipe.stem}"], plan=True)) == "", recipe


def test_bytes_for_another_tokenizers_model_are_reported(folder: Path) -> None:
    lines = banner_lines(folder, "data.tokenizer=bytes")
    assert lines[0].startswith(
        "text is encoded as bytes, but the weights expect the ids of their own tokenizer."
    )
    (folder / "tokenizer.json").unlink()
    assert "since it has no tokenizer.json" in banner_lines(folder)[0]


def test_bytes_for_a_model_of_bytes_are_no_mistake(folder: Path) -> None:
    of_bytes().write(folder)
    assert banner_lines(folder, "data.tokenizer=bytes", vocab_size=264) == []


def test_a_resumed_run_does_not_need_the_folder_of_its_weights(folder: Path) -> None:
    banner_lines(folder)
    config = compose([f"train.init_from={folder}"])
    (folder / "config.json").unlink()
    assert encoding(config) == []


def test_the_banner_says_what_runs_and_why_in_80_columns():
    config = compose(["topology.device=cpu"])
    environment = make_plan(config).environment
    printed = text(
        banner(plan_here(config, environment), Path("runs/tiny-4k"), "stdlib: 212 documents")
    )
    for word in (
        "tiny (qwen2), 822 K parameters",
        "2 CPU processes",
        "all_gather: ",
        "sdpa: ",
        "striped",
        "stdlib: 212 documents",
        "runs/tiny-4k",
    ):
        assert word in printed, word
    assert max(len(line.rstrip()) for line in printed.splitlines()) <= 80
    assert len(printed.splitlines()) <= 24


def test_the_banner_shows_weights_schedule_seed_compilation_and_layout_reason(tmp_path):
    assert "weights random, seed 7" in banner_of("seed=7")
    assert "212 documents; order from seed 7" in banner_of("seed=7")
    shape = {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 384,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen2", "vocab_size": 264, "head_dim": 32, **shape})
    )
    begun = banner_of(f"train.init_from={tmp_path}").replace(" ", "")  # a long path is folded
    assert f"weights{tmp_path}(train.init_from)" in begun
    assert (
        "weights from the checkpoint of step 40; the run started from random, seed 0"
        in banner_of(resumed=40)
    )
    plain = banner_of("train.steps=100", "optim.lr=1e-3")
    assert (
        "schedule cosine: warm up over 10 steps to a peak of 1.00e-03, "
        "decay to 1.00e-04 from step 11 to step 100" in plain
    )
    short = banner_of("train.steps=5", "optim.lr=1e-3")
    assert "to a peak of 1.00e-03; train.steps=5 ends the run at 5.00e-04" in short
    assert "compile off (train.compile=auto)" in plain
    assert (
        "compile on (train.compile=true): the first step also compiles, which can take minutes"
        in banner_of("train.compile=true")
    )
    reasons = {
        "data.document_mask=true": "auto: striping balances the uneven work of packed documents",
        "data.document_mask=false": "auto: zigzag balances dense attention without documents",
        "sparsity=moba": "auto: striping balances the uneven work of the index of moba",
        "topology.layout=contiguous": "tokens per worker; as configured",
        "topology.workers=1": "auto: each worker holds whole sequences, so layouts do not differ",
    }
    for word, reason in reasons.items():
        assert reason in banner_of(word), word


def test_the_banner_names_the_mask_and_its_pairs():
    words = ["mask=sliding_window", "mask.window=64", "seq=4k", "topology.workers=1"]
    pairs = sum(min(position + 1, 64) for position in range(4096))
    share = f"{100 * pairs / (4096 * 4097 / 2):.3g}% of the pairs of a causal mask"
    mask = "mask sliding_window, window 64"
    assert f"{mask}, inside each document; {share}" in banner_of(*words)
    assert f"{mask}; {share}" in banner_of(*words, "data.document_mask=false")
    assert "of a causal mask" not in banner_of("topology.workers=1")


def plan_here(config: Config, environment: Environment) -> RunPlan:
    hardware = Hardware.here(environment.device)
    return RunPlan.of(config, environment, hardware, resolve_run(config, environment))


def banner_of(
    *words: str, resumed: int | None = None, device: str = "cpu", run_dir: Path = Path("runs/x")
) -> str:
    config = compose([f"topology.device={device}", *words])
    environment = resolve_environment(config)
    plan = plan_here(config, environment)
    return " ".join(text(banner(plan, run_dir, "stdlib: 212 documents", resumed=resumed)).split())


@pytest.mark.parametrize(
    ("kind", "said"), [("mlp", "; MLP products in fp8"), ("all", "; products of layers in fp8")]
)
def test_the_plan_says_which_products_are_in_fp8(kind, said):
    gpu = ("topology.device=cuda", "topology.workers=1", "topology.gpu_memory_gib=80")
    plan = make_plan(compose(["model=qwen0.5b", *gpu, f"train.fp8={kind}"]))
    assert f"{said}, except gradients of weights" in module.describe_dtype(plan)
