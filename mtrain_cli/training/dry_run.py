"""`mtrain train --dry-run`: the plan of a run as a person reads it, on any machine, in seconds."""

from __future__ import annotations

import contextlib
import dataclasses

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mtrain_cli.config.schema import CHECKPOINTS, Config, ConfigError
from mtrain_cli.config.sizes import format_size
from mtrain_cli.launch.environment import host_memory
from mtrain_cli.model.tiling import layers_with_products
from mtrain_cli.parallel.activation_offload import layers_on_host
from mtrain_cli.sparsity.pattern import shown_name
from mtrain_cli.sparsity.pattern_registry import make_pattern
from mtrain_cli.sparsity.pattern_remarks import computes_everything, remarks
from mtrain_cli.training import initial_weights
from mtrain_cli.training.flops import peak_flops
from mtrain_cli.training.memory import GIB, estimate_memory
from mtrain_cli.training.memory_search import longest_seq, refusal, search
from mtrain_cli.training.resolution import compiles
from mtrain_cli.training.run_plan import (
    ASSUMED_GPU,
    FITS,
    KEPT,
    SHORTEST_SEQ,
    USABLE,
    RunPlan,
    make_plan,
    needed_here,
    size,
)

# GiB that CUDA reports for common GPUs, smallest first; a plan for a machine that is not here is held against them.
GPU_MEMORY = (
    ("40 GB (A100)", 39.4),
    ("80 GB (A100, H100)", 79.2),
    ("141 GB (H200)", 139.8),
    ("180 GB (B200)", 178.3),
)
USUAL_MFU = 0.4  # what a well-tuned dense run reaches; only for the time of a step in a plan


def dry_run(config: Config) -> RenderableType:
    """The plan of a run as a person reads it, 80 columns wide or more."""
    return render(make_plan(config))


def render(plan: RunPlan) -> RenderableType:
    """The table of a plan, and the memory of a worker by part."""
    config, model = plan.config, plan.config.model
    heads = f"{model.num_heads}/{model.num_kv_heads} heads of {model.head_dim}"
    attention = 1 - 6 * plan.parameters.matmul / plan.flops.model
    recomputation = f"recomputation {describe_activations(config)}"
    # How much a pattern leaves depends on the data.
    computes_less = (
        config.sparsity.pattern != "dense"
        and not computes_everything(config)
        and (config.sparsity.dense_steps or 0) < config.train.steps
    )
    sparse_note = f" were it dense, {config.sparsity.pattern} computes less" if computes_less else ""
    rows = [
        ("machine", plan.machine),
        ("model", describe_model(plan)),
        (
            "",
            f"{model.num_layers} layers, hidden {model.hidden_size}, {heads}, vocabulary {model.vocab_size:,}",
        ),
        (
            "",
            f"{count(plan.parameters.embedding)} in the embedding{' (and LM head, tied)' if model.tie_word_embeddings else ''}",
        ),
        ("positions", describe_rope(plan)),
        *weights_rows(config),
        (
            "per token",
            f"{flop(plan.flops.model)} model, {attention:.0%} of it attention (causal, whole sequence)",
        ),
        ("", f"{flop(plan.flops.executed)} executed{sparse_note}, with {recomputation}"),
        ("step", describe_step(plan)),
        ("", describe_time(plan)),
        ("workers", describe_workers(plan)),
        ("layout", describe_layout(plan)),
        ("exchange", f"{plan.exchange.label}: {plan.exchange.reason}"),
        ("sparsity", describe_sparsity(plan)),
        *(("", line) for line in remarks(config)),
        *kernel_rows(plan),
        ("dtype", describe_dtype(plan)),
        ("moved", describe_moved(plan)),
        ("checkpoint", f"{size(plan.checkpoint)} on disk, {config.train.keep_checkpoints} kept"),
    ]
    title = Text(
        f"Dry run: {model.name}, seq {format_size(config.seq)}, nothing is trained", style="bold"
    )
    return Group(
        title, two_columns(rows), Text(""), memory_table(plan), *search_rows(plan), *verdict(plan)
    )


def search_rows(plan: RunPlan) -> list[RenderableType]:
    """What ``train.memory=auto`` chose, and what it rejected and why."""
    if plan.search is None or plan.search.chosen is None:
        return []
    rejected = "; ".join(f"{way}: {reason}" for way, reason in plan.search.rejected())
    return [
        Text(f"{describe_choice(plan)}."),
        Text(
            f"Rejected, as slower by the model or as too large, the fastest setting of each way: {rejected}.",
            style="dim",
        ),
    ]


def describe_choice(plan: RunPlan) -> str:
    assert plan.search is not None
    assert plan.search.chosen is not None
    chosen = plan.search.chosen
    reason = f"the fastest of {len(plan.search.settings)} settings that fits"
    return f"train.memory=auto takes {chosen.overrides or 'the defaults'}, {reason}: {duration(chosen.seconds)} a step by the model"


def verdict(plan: RunPlan) -> list[RenderableType]:
    """What would help where a plan does not fit, and how long a sequence may be."""
    chosen = (
        plan.search is not None
        and plan.config.train.keep_mlp
        and plan.requested is not None
        and not plan.requested.train.keep_mlp
    )
    kept = f"; {KEPT}" if chosen else ""
    return [
        *_verdict(plan),
        *(
            []
            if plan.environment.device == "cpu"
            else [Text(f"{FITS[0].upper()}{FITS[1:]}{kept}.", style="dim")]
        ),
    ]


def fits(plan: RunPlan) -> bool:
    """Whether the machine of a plan has the memory that a worker needs; for GPUs that are not here, the machine that is assumed."""
    if plan.environment.device == "cpu":
        return bool(plan.fits)
    return plan.has_room_for(plan.memory) if plan.search is None else plan.search.chosen is not None


def _verdict(plan: RunPlan) -> list[RenderableType]:
    config = plan.config
    on_cpu = plan.environment.device == "cpu"
    if on_cpu and not fits(plan):
        return [Text(f"Does not fit this machine: {advice(plan)}", style="red")]
    if on_cpu:
        return []
    if plan.search is not None:
        if plan.search.chosen is None:
            return [Text(f"Does not fit: {refusal(plan, plan.search)}.", style="red")]
        longest = longest_seq(plan)
        return [
            Text(
                f"Longest sequence that fits with train.memory=auto: {'none' if longest is None else _at_least(longest)}."
            )
        ]
    lines: list[RenderableType] = []
    if not fits(plan):
        lines.append(Text(f"Does not fit: {refusal(plan, search(plan))}.", style="red"))
    longest = longest_seq(plan)
    automatic = longest_seq(dataclasses.replace(plan, config=with_memory(config, "auto")))
    shown = ["none" if seq is None else _at_least(seq) for seq in (longest, automatic)]
    on = f"on {plan.gpu_name}" if plan.elsewhere else "here"
    lines.append(
        Text(
            f"Longest sequence that fits {on}: {shown[0]} with these settings, {shown[1]} with train.memory=auto.",
            style="dim",
        )
    )
    return lines


def _at_least(seq: int) -> str:
    """As it is searched for: in a few steps between powers of two."""
    return f"at least {format_size(seq)}"


def with_memory(config: Config, memory: str) -> Config:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, memory=memory))


def kernel_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """The kernel, and that of dense first steps where there are some."""
    rows = [("kernel", f"{plan.kernel}: {plan.kernel_reason}")]
    if plan.dense_kernel is not None:
        name, reason = plan.dense_kernel
        rows.append(
            (
                "",
                f"{name} in the first {plan.config.sparsity.dense_steps} steps, which are dense: {reason}",
            )
        )
    return rows


def two_columns(rows: list[tuple[str, str]]) -> Table:
    """Two columns: a dim label and its text."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(label, Text(text))
    return table


def memory_table(plan: RunPlan) -> RenderableType:
    """Memory of a worker at its peak by part, and whether it fits."""
    memory, peak = plan.memory, plan.memory.peak
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    rows = {
        **{name.replace("_", " "): part for name, part in peak.parts.items()},
        "CUDA and NCCL": memory.reserve,
    }
    for name, part in rows.items():
        if part:
            table.add_row(
                name, size(part), Text("█" * round(30 * part / memory.total), style="cyan")
            )
    table.add_row(
        Text("total", style="bold not dim"), Text(size(memory.total), style="bold"), describe_fit(plan)
    )
    moments = [
        f"{moment.name} {size(moment.allocated)}" for moment in memory.moments if moment is not peak
    ]
    choices = [f"{name} {size(total)}" for name, total in totals_by_recomputation(plan).items()]
    workers = plan.environment.local_workers
    waiting = f"Offloaded: {size(memory.host)} of pinned host memory a worker, {size(memory.host * workers)} a machine."
    saving = f"While a checkpoint is written: {size(memory.saving)} more of host memory a worker, {size(memory.saving * workers)} a machine."
    return Group(
        Text.assemble(("Memory of a worker", "bold"), f" at its peak, the {peak.name}"),
        table,
        Text(f"At other moments: {', '.join(moments)}.", style="dim"),
        *([Text(waiting)] if memory.host else []),
        *([Text(saving)] if memory.saving else []),
        Text(
            f"With train.activation_checkpoint{_checkpoint_note(plan)}: {', '.join(choices)}.", style="dim"
        ),
    )


def _checkpoint_note(plan: RunPlan) -> str:
    """On a CPU alternatives are told with what the host holds besides."""
    return (
        " (and a checkpoint under way)"
        if plan.environment.device == "cpu" and plan.memory.host_peak
        else ""
    )


def describe_activations(config: Config) -> str:
    """What layers keep, and where."""
    train = config.train
    kept = (
        f" (last {train.checkpoint_keep:.0%} kept)"
        if train.activation_checkpoint == "sequence_selective"
        else ""
    )
    on_host, layers = (
        layers_on_host(train.offload_activations, config.model.num_layers),
        config.model.num_layers,
    )
    offloaded = (
        f", {'' if on_host == layers - 1 else f'{on_host} of {layers} layers '}offloaded"
        if on_host
        else ""
    )
    layers_kept = layers_with_products(train.keep_mlp, layers)
    products = (
        f", MLP products of {'all' if layers_kept == layers else f'{layers_kept} of {layers}'} layers kept"
        if layers_kept
        else ""
    )
    if products and train.activation_checkpoint == "none":
        products += " where the MLP is in tiles, all otherwise"
    return f"{train.activation_checkpoint}{kept}{offloaded}{products}"


def totals_by_recomputation(plan: RunPlan) -> dict[str, int]:
    """Total bytes of a worker for each kind of activation checkpointing."""
    totals = {}
    for kind in CHECKPOINTS:
        offload = plan.config.train.offload_activations if kind != "none" else False
        train = dataclasses.replace(
            plan.config.train, activation_checkpoint=kind, offload_activations=offload
        )
        other = estimate_memory(
            dataclasses.replace(plan.config, train=train),
            workers=plan.environment.workers,
            layout=plan.layout,
            exchange=plan.exchange,
            kernel=plan.kernel,
            dtype_bytes=getattr(torch, plan.dtype).itemsize,
            cuda=plan.environment.device == "cuda",
        )
        totals[kind] = plan.device_bytes(other)
    return totals


def describe_fit(plan: RunPlan) -> Text:
    """Whether the peak fits, and on what."""
    word, style = ("fits", "green") if plan.fits else ("does not fit", "red")
    if plan.environment.device == "cpu":
        workers = plan.environment.local_workers
        share = plan.host_bytes / host_memory()
        percent = f"{share:.0%}" if share >= 0.01 else "less than 1%"
        # The bytes before it are without what a checkpoint takes while it is written; 80 columns hold both.
        saving = ", saving," if plan.memory.host_peak else " of them"
        workers_note = (
            f"{workers}{saving} take "
            if workers > 1
            else "saving, it takes "
            if plan.memory.host_peak
            else ""
        )
        return Text(f"{word}: {workers_note}{percent} of {size(host_memory())}", style=style)
    if plan.capacity is not None:
        share = plan.memory.total / plan.capacity
        return Text(
            f"{word}: {share:.0%} of the {size(plan.capacity)} of {plan.gpu or 'a GPU'}",
            style=style,
        )
    if not plan.has_room_for(plan.memory, float("inf")):
        return Text("does not fit the memory of the host", style="red")
    large_enough = [name for name, gib in GPU_MEMORY if plan.memory.total <= USABLE * gib * GIB]
    return (
        Text(f"fits GPUs of {large_enough[0]} and more", style="green")
        if large_enough
        else Text("fits no GPU of today", style="red")
    )


def advice(plan: RunPlan) -> str:
    """What CPU workers need, and what would help, for a plan that does not fit this machine."""
    workers = plan.environment.workers
    fewer = _fewer_workers(plan)
    helps = [
        f"train.activation_checkpoint={kind}"
        for kind, total in totals_by_recomputation(plan).items()
        if total * plan.environment.local_workers <= host_memory()
    ][:1]
    if (seq := _longest_seq(plan)) is not None:
        helps.append(f"seq={format_size(seq)}")
    if fewer is not None:
        helps.append(f"topology.workers={fewer}")
    would = f"{' or '.join(helps)} would fit" if helps else "only a smaller model would fit"
    device = "" if plan.config.topology.device == "auto" else "topology.device=cuda "
    plans = f"{device}topology.workers=8 plans for eight GPUs"
    if isinstance(plan.config.topology.workers, int) and workers > 1:
        plans = f"topology.device=cuda plans for {workers} GPUs"
    need = f"{workers} worker{'s' * (workers > 1)} need{'s' * (workers == 1)} {needed_here(plan)}"
    return f"{need}; {would}. {plans}."


def _fewer_workers(plan: RunPlan) -> int | None:
    """The most workers, halved again and again, that would fit this machine."""
    workers = plan.environment.workers // 2
    while workers:
        topology = dataclasses.replace(plan.config.topology, workers=workers)
        with contextlib.suppress(ConfigError):
            if plan.replan(dataclasses.replace(plan.config, topology=topology)).fits:
                return workers
        workers //= 2
    return None


def _longest_seq(plan: RunPlan) -> int | None:
    """The length that fits this machine when that of the plan is halved again and again; None where the weights alone are too much."""
    seq = plan.config.seq // 2
    while seq >= SHORTEST_SEQ:
        if plan.replan(dataclasses.replace(plan.config, seq=seq)).fits:
            return seq
        seq //= 2
    return None


def describe_model(plan: RunPlan) -> str:
    return f"{plan.config.model.name} ({plan.config.model.family}), {count(plan.parameters.total)} parameters"


def describe_rope(plan: RunPlan) -> str:
    rope = plan.config.model.rope
    if rope.scaling == "none":
        return f"rotary, theta {rope.theta:,.0f}, not stretched"
    reach = f"from {format_size(rope.original_max_position)} tokens"
    return f"rotary, theta {rope.theta:,.0f}, {rope.scaling} by {plan.rope_factor:g} {reach}"


def weights_rows(config: Config) -> list[tuple[str, str]]:
    """Where the weights come from, and what the run does otherwise than their folder."""
    if config.train.init_from is None:
        return []
    return [
        ("weights", f"of {config.train.init_from}"),
        *(("", line) for line in initial_weights.remarks(config)),
    ]


def describe_step(plan: RunPlan) -> str:
    train, environment = plan.config.train, plan.environment
    batch = "1 sequence" if train.global_batch == 1 else f"{train.global_batch} sequences"
    split = (
        ""
        if train.global_batch == 1
        else f" = {environment.dp} x {train.micro_batch} x {plan.micro_batches} accumulated"
    )
    return f"{plan.tokens_per_step:,} tokens, {batch}{split}"


def describe_time(plan: RunPlan) -> str:
    """FLOP of a step and how long they take at a usual share of the peak; that of the GPU assumed where none is known."""
    text = f"{flop(plan.flops.model * plan.tokens_per_step)} model"
    if plan.environment.device == "cpu":
        return text
    name = plan.gpu or ASSUMED_GPU
    peak = peak_flops(name)
    if peak is None:
        return text
    seconds = (
        plan.flops.model * plan.tokens_per_step / (USUAL_MFU * peak * plan.environment.workers)
    )
    return f"{text}: {duration(seconds)} at {USUAL_MFU:.0%} of the {flop(peak)}/s of {name}"


def describe_workers(plan: RunPlan) -> str:
    environment = plan.environment
    unit = plan.gpu or ("GPU" if environment.device == "cuda" else "CPU process")
    if environment.workers > 1 and not plan.gpu:
        unit += "es" if unit.endswith("s") else "s"
    nodes = (
        f", {environment.nodes} nodes of {environment.workers_per_node}"
        if environment.nodes > 1
        else ""
    )
    assumed = (
        ", taken for topology.workers=auto: give how many there are"
        if plan.elsewhere and plan.config.topology.workers == "auto"
        else ""
    )
    return f"{environment.workers} {'x ' if plan.gpu else ''}{unit} = {environment.dp} data x {environment.cp} context{nodes}{assumed}"


def describe_sparsity(plan: RunPlan) -> str:
    pattern = make_pattern(plan.config.sparsity, plan.config.seed)
    if pattern is None:
        return "dense: every pair that the mask allows"
    dense = plan.config.sparsity.dense_steps
    return f"{shown_name(pattern)}: {pattern.describe()}" + (
        f"; the first {dense} steps dense" if dense else ""
    )


def describe_layout(plan: RunPlan) -> str:
    layout = plan.layout
    name = (
        f"{layout.name}, blocks of {layout.block_size}" if layout.name == "striped" else layout.name
    )
    pads = layout.padded_seq - layout.seq
    padding = f", {pads:,} of {layout.padded_seq:,} are padding" if pads else ""
    return f"{name}: {layout.tokens_per_worker:,} tokens a worker{padding}; {_layout_reason(plan)}"


def _layout_reason(plan: RunPlan) -> str:
    """Why `Config.layout` is what it is."""
    config = plan.config
    if config.topology.layout != "auto":
        return "as configured"
    if plan.environment.cp == 1:
        return "auto: a worker holds whole sequences, so that layouts do not differ"
    if plan.layout.name == "zigzag":
        return "auto: dense attention without documents, whose work zigzag divides evenly in the largest pieces"
    uneven = (
        "packed documents"
        if config.sparsity.pattern == "dense"
        else f"the index of {config.sparsity.pattern}"
    )
    return f"auto: stripes divide the work of {uneven} evenly"


def describe_compile(plan: RunPlan) -> str:
    asked = plan.config.train.compile
    if not compiles(plan.config, plan.environment.device):
        return "off" + (
            "; train.compile=auto compiles on GPUs alone"
            if asked == "auto"
            else " (train.compile=false)"
        )
    reason = "train.compile=auto, on GPUs" if asked == "auto" else "train.compile=true"
    return f"on ({reason}): the first step compiles before it computes, which can take minutes"


def describe_dtype(plan: RunPlan) -> str:
    train = plan.config.train
    text = (
        plan.dtype
        if plan.dtype == "float32"
        else f"{plan.dtype} compute; float32 parameters, gradients and AdamW states"
    )
    if plan.config.optim.offload:
        text = f"{plan.dtype} compute and weights, float32 gradients; float32 parameters and AdamW states on the host"
        text += ", where gradients go as they come" * plan.config.optim.offload_gradients
    return (
        f"{text}, gradients reduced in {train.reduce_dtype}"
        if train.reduce_dtype != "float32"
        else text
    )


def describe_moved(plan: RunPlan) -> str:
    host = plan.received.host
    link = (
        f"{size(host)} between GPU and host a step"
        if host and plan.environment.device == "cuda"
        else ""
    )
    if plan.environment.workers == 1:
        return link or "nothing, one worker"
    exchange = f"{size(plan.received.forward)} forward and {size(plan.received.backward)} backward a layer and pass"
    n = plan.micro_batches
    gathered = {"full": "twice", "gradients": "once a step", "optimizer": "once a step"}[
        plan.config.train.shard
    ]
    reduced = (
        ""
        if n == 1 or plan.config.train.shard == "optimizer"
        else f" in each of {n} micro-batches"
    )
    reason = (
        f"gathered {gathered}, reduced{reduced}"
        if plan.config.train.shard != "full"
        else f"gathered {gathered} and reduced{reduced}"
    )
    weights = f"weights and gradients {size(plan.received.weights)} a step ({reason})"
    return "; ".join(
        part
        for part in (exchange if plan.environment.cp > 1 else "no keys or values", weights, link)
        if part
    )


def count(number: int) -> str:
    """3.09 B, 494 M or 874 K."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return str(number)


def flop(number: float) -> str:
    """1.34 TFLOP."""
    for unit, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}FLOP"
    return f"{number / 1e6:.3g} MFLOP"


def duration(seconds: float) -> str:
    """41 s, 9.2 min or 2.5 h."""
    unit, scale = ("s", 1) if seconds < 120 else ("min", 60) if seconds < 7200 else ("h", 3600)
    return f"{seconds / scale:,.3g} {unit}"
