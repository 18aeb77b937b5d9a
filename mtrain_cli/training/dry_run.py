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
from mtrain_cli.sparsity.pattern import display_name
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
    needed_here,
    plan,
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
    return render(plan(config))


def render(found: RunPlan) -> RenderableType:
    """The table of a plan, and the memory of a worker by part."""
    config, model = found.config, found.config.model
    heads = f"{model.num_heads}/{model.num_kv_heads} heads of {model.head_dim}"
    attention = 1 - 6 * found.parameters.matmul / found.flops.model
    recomputation = f"recomputation {describe_activations(config)}"
    # How much a pattern leaves depends on the data.
    less = (
        config.sparsity.pattern != "dense"
        and not computes_everything(config)
        and (config.sparsity.dense_steps or 0) < config.train.steps
    )
    sparsely = f" were it dense, {config.sparsity.pattern} computes less" if less else ""
    rows = [
        ("machine", found.machine),
        ("model", describe_model(found)),
        (
            "",
            f"{model.num_layers} layers, hidden {model.hidden_size}, {heads}, vocabulary {model.vocab_size:,}",
        ),
        (
            "",
            f"{count(found.parameters.embedding)} in the embedding{' (and LM head, tied)' if model.tie_word_embeddings else ''}",
        ),
        ("positions", describe_rope(found)),
        *weights_rows(config),
        (
            "per token",
            f"{flop(found.flops.model)} model, {attention:.0%} of it attention (causal, whole sequence)",
        ),
        ("", f"{flop(found.flops.executed)} executed{sparsely}, with {recomputation}"),
        ("step", describe_step(found)),
        ("", describe_time(found)),
        ("workers", describe_workers(found)),
        ("layout", describe_layout(found)),
        ("exchange", f"{found.exchange.label}: {found.exchange.reason}"),
        ("sparsity", describe_sparsity(found)),
        *(("", line) for line in remarks(config)),
        *kernel_rows(found),
        ("dtype", describe_dtype(found)),
        ("moved", describe_moved(found)),
        ("checkpoint", f"{size(found.checkpoint)} on disk, {config.train.keep_checkpoints} kept"),
    ]
    title = Text(
        f"Dry run: {model.name}, seq {format_size(config.seq)}, nothing is trained", style="bold"
    )
    return Group(
        title, facts(rows), Text(""), memory_table(found), *search_rows(found), *verdict(found)
    )


def search_rows(found: RunPlan) -> list[RenderableType]:
    """What ``train.memory=auto`` chose, and what it rejected and why."""
    if found.search is None or found.search.chosen is None:
        return []
    rejected = "; ".join(f"{way}: {reason}" for way, reason in found.search.rejected())
    return [
        Text(f"{describe_choice(found)}."),
        Text(
            f"Rejected, as slower by the model or as too large, the fastest setting of each way: {rejected}.",
            style="dim",
        ),
    ]


def describe_choice(found: RunPlan) -> str:
    assert found.search is not None
    assert found.search.chosen is not None
    chosen = found.search.chosen
    how = f"the fastest of {len(found.search.settings)} settings that fits"
    return f"train.memory=auto takes {chosen.words or 'the defaults'}, {how}: {duration(chosen.seconds)} a step by the model"


def verdict(found: RunPlan) -> list[RenderableType]:
    """What would help where a plan does not fit, and how long a sequence may be."""
    chosen = (
        found.search is not None
        and found.config.train.keep_mlp
        and found.asked is not None
        and not found.asked.train.keep_mlp
    )
    kept = f"; {KEPT}" if chosen else ""
    return [
        *_verdict(found),
        *(
            []
            if found.environment.device == "cpu"
            else [Text(f"{FITS[0].upper()}{FITS[1:]}{kept}.", style="dim")]
        ),
    ]


def fits(found: RunPlan) -> bool:
    """Whether the machine of a plan has the memory that a worker needs; for GPUs that are not here, the machine that is assumed."""
    if found.environment.device == "cpu":
        return bool(found.fits)
    return found.takes(found.memory) if found.search is None else found.search.chosen is not None


def _verdict(found: RunPlan) -> list[RenderableType]:
    config = found.config
    on_cpu = found.environment.device == "cpu"
    if on_cpu and not fits(found):
        return [Text(f"Does not fit this machine: {advice(found)}", style="red")]
    if on_cpu:
        return []
    if found.search is not None:
        if found.search.chosen is None:
            return [Text(f"Does not fit: {refusal(found, found.search)}.", style="red")]
        longest = longest_seq(found)
        return [
            Text(
                f"Longest sequence that fits with train.memory=auto: {'none' if longest is None else _at_least(longest)}."
            )
        ]
    lines: list[RenderableType] = []
    if not fits(found):
        lines.append(Text(f"Does not fit: {refusal(found, search(found))}.", style="red"))
    longest = longest_seq(found)
    automatic = longest_seq(dataclasses.replace(found, config=with_memory(config, "auto")))
    shown = ["none" if seq is None else _at_least(seq) for seq in (longest, automatic)]
    on = f"on {found.gpu_name}" if found.elsewhere else "here"
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


def kernel_rows(found: RunPlan) -> list[tuple[str, str]]:
    """The kernel, and that of dense first steps where there are some."""
    rows = [("kernel", f"{found.kernel}: {found.kernel_reason}")]
    if found.dense_kernel is not None:
        name, reason = found.dense_kernel
        rows.append(
            (
                "",
                f"{name} in the first {found.config.sparsity.dense_steps} steps, which are dense: {reason}",
            )
        )
    return rows


def facts(rows: list[tuple[str, str]]) -> Table:
    """Two columns: a dim label and its text."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(label, Text(text))
    return table


def memory_table(found: RunPlan) -> RenderableType:
    """Memory of a worker at its peak by part, and whether it fits."""
    memory, peak = found.memory, found.memory.peak
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
        Text("total", style="bold not dim"), Text(size(memory.total), style="bold"), fitting(found)
    )
    moments = [
        f"{moment.name} {size(moment.allocated)}" for moment in memory.moments if moment is not peak
    ]
    choices = [f"{name} {size(total)}" for name, total in alternatives(found).items()]
    workers = found.environment.local_workers
    waiting = f"Offloaded: {size(memory.host)} of pinned host memory a worker, {size(memory.host * workers)} a machine."
    saving = f"While a checkpoint is written: {size(memory.saving)} more of host memory a worker, {size(memory.saving * workers)} a machine."
    return Group(
        Text.assemble(("Memory of a worker", "bold"), f" at its peak, the {peak.name}"),
        table,
        Text(f"At other moments: {', '.join(moments)}.", style="dim"),
        *([Text(waiting)] if memory.host else []),
        *([Text(saving)] if memory.saving else []),
        Text(
            f"With train.activation_checkpoint{_in_all(found)}: {', '.join(choices)}.", style="dim"
        ),
    )


def _in_all(found: RunPlan) -> str:
    """On a CPU alternatives are told with what the host holds besides."""
    return (
        " (and a checkpoint under way)"
        if found.environment.device == "cpu" and found.memory.host_peak
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
    whole = layers_with_products(train.keep_mlp, layers)
    products = (
        f", MLP products of {'all' if whole == layers else f'{whole} of {layers}'} layers kept"
        if whole
        else ""
    )
    if products and train.activation_checkpoint == "none":
        products += " where the MLP is in tiles, all otherwise"
    return f"{train.activation_checkpoint}{kept}{offloaded}{products}"


def alternatives(found: RunPlan) -> dict[str, int]:
    """Total bytes of a worker for each kind of activation checkpointing."""
    totals = {}
    for kind in CHECKPOINTS:
        offload = found.config.train.offload_activations if kind != "none" else False
        train = dataclasses.replace(
            found.config.train, activation_checkpoint=kind, offload_activations=offload
        )
        other = estimate_memory(
            dataclasses.replace(found.config, train=train),
            workers=found.environment.workers,
            layout=found.layout,
            exchange=found.exchange,
            kernel=found.kernel,
            dtype_bytes=getattr(torch, found.dtype).itemsize,
            cuda=found.environment.device == "cuda",
        )
        totals[kind] = found.load(other)
    return totals


def fitting(found: RunPlan) -> Text:
    """Whether the peak fits, and on what."""
    word, style = ("fits", "green") if found.fits else ("does not fit", "red")
    if found.environment.device == "cpu":
        workers = found.environment.local_workers
        share = found.host_bytes / host_memory()
        percent = f"{share:.0%}" if share >= 0.01 else "less than 1%"
        # The bytes before it are without what a checkpoint takes while it is written; 80 columns hold both.
        saving = ", saving," if found.memory.host_peak else " of them"
        them = (
            f"{workers}{saving} take "
            if workers > 1
            else "saving, it takes "
            if found.memory.host_peak
            else ""
        )
        return Text(f"{word}: {them}{percent} of {size(host_memory())}", style=style)
    if found.capacity is not None:
        share = found.memory.total / found.capacity
        return Text(
            f"{word}: {share:.0%} of the {size(found.capacity)} of {found.gpu or 'a GPU'}",
            style=style,
        )
    if not found.takes(found.memory, float("inf")):
        return Text("does not fit the memory of the host", style="red")
    large_enough = [name for name, gib in GPU_MEMORY if found.memory.total <= USABLE * gib * GIB]
    return (
        Text(f"fits GPUs of {large_enough[0]} and more", style="green")
        if large_enough
        else Text("fits no GPU of today", style="red")
    )


def advice(found: RunPlan) -> str:
    """What CPU workers need, and what would help, for a plan that does not fit this machine."""
    workers = found.environment.workers
    fewer = _fewer_workers(found)
    helps = [
        f"train.activation_checkpoint={kind}"
        for kind, total in alternatives(found).items()
        if total * found.environment.local_workers <= host_memory()
    ][:1]
    if (seq := _longest_seq(found)) is not None:
        helps.append(f"seq={format_size(seq)}")
    if fewer is not None:
        helps.append(f"topology.workers={fewer}")
    would = f"{' or '.join(helps)} would fit" if helps else "only a smaller model would fit"
    device = "" if found.config.topology.device == "auto" else "topology.device=cuda "
    plans = f"{device}topology.workers=8 plans for eight GPUs"
    if isinstance(found.config.topology.workers, int) and workers > 1:
        plans = f"topology.device=cuda plans for {workers} GPUs"
    need = f"{workers} worker{'s' * (workers > 1)} need{'s' * (workers == 1)} {needed_here(found)}"
    return f"{need}; {would}. {plans}."


def _fewer_workers(found: RunPlan) -> int | None:
    """The most workers, halved again and again, that would fit this machine."""
    workers = found.environment.workers // 2
    while workers:
        topology = dataclasses.replace(found.config.topology, workers=workers)
        with contextlib.suppress(ConfigError):
            if found.again(dataclasses.replace(found.config, topology=topology)).fits:
                return workers
        workers //= 2
    return None


def _longest_seq(found: RunPlan) -> int | None:
    """The length that fits this machine when that of the plan is halved again and again; None where the weights alone are too much."""
    seq = found.config.seq // 2
    while seq >= SHORTEST_SEQ:
        if found.again(dataclasses.replace(found.config, seq=seq)).fits:
            return seq
        seq //= 2
    return None


def describe_model(found: RunPlan) -> str:
    return f"{found.config.model.name} ({found.config.model.family}), {count(found.parameters.total)} parameters"


def describe_rope(found: RunPlan) -> str:
    rope = found.config.model.rope
    if rope.scaling == "none":
        return f"rotary, theta {rope.theta:,.0f}, not stretched"
    reach = f"from {format_size(rope.original_max_position)} tokens"
    return f"rotary, theta {rope.theta:,.0f}, {rope.scaling} by {found.rope_factor:g} {reach}"


def weights_rows(config: Config) -> list[tuple[str, str]]:
    """Where the weights come from, and what the run does otherwise than their folder."""
    if config.train.init_from is None:
        return []
    return [
        ("weights", f"of {config.train.init_from}"),
        *(("", line) for line in initial_weights.remarks(config)),
    ]


def describe_step(found: RunPlan) -> str:
    train, environment = found.config.train, found.environment
    batch = "1 sequence" if train.global_batch == 1 else f"{train.global_batch} sequences"
    split = (
        ""
        if train.global_batch == 1
        else f" = {environment.dp} x {train.micro_batch} x {found.micro_batches} accumulated"
    )
    return f"{found.tokens_per_step:,} tokens, {batch}{split}"


def describe_time(found: RunPlan) -> str:
    """FLOP of a step and how long they take at a usual share of the peak; that of the GPU assumed where none is known."""
    text = f"{flop(found.flops.model * found.tokens_per_step)} model"
    if found.environment.device == "cpu":
        return text
    name = found.gpu or ASSUMED_GPU
    peak = peak_flops(name)
    if peak is None:
        return text
    seconds = (
        found.flops.model * found.tokens_per_step / (USUAL_MFU * peak * found.environment.workers)
    )
    return f"{text}: {duration(seconds)} at {USUAL_MFU:.0%} of the {flop(peak)}/s of {name}"


def describe_workers(found: RunPlan) -> str:
    environment = found.environment
    what = found.gpu or ("GPU" if environment.device == "cuda" else "CPU process")
    if environment.workers > 1 and not found.gpu:
        what += "es" if what.endswith("s") else "s"
    nodes = (
        f", {environment.nodes} nodes of {environment.workers_per_node}"
        if environment.nodes > 1
        else ""
    )
    taken = (
        ", taken for topology.workers=auto: give how many there are"
        if found.elsewhere and found.config.topology.workers == "auto"
        else ""
    )
    return f"{environment.workers} {'x ' if found.gpu else ''}{what} = {environment.dp} data x {environment.cp} context{nodes}{taken}"


def describe_sparsity(found: RunPlan) -> str:
    pattern = make_pattern(found.config.sparsity, found.config.seed)
    if pattern is None:
        return "dense: every pair that the mask allows"
    dense = found.config.sparsity.dense_steps
    return f"{display_name(pattern)}: {pattern.describe()}" + (
        f"; the first {dense} steps dense" if dense else ""
    )


def describe_layout(found: RunPlan) -> str:
    layout = found.layout
    name = (
        f"{layout.name}, blocks of {layout.block_size}" if layout.name == "striped" else layout.name
    )
    pads = layout.padded_seq - layout.seq
    padding = f", {pads:,} of {layout.padded_seq:,} are padding" if pads else ""
    return f"{name}: {layout.tokens_per_worker:,} tokens a worker{padding}; {_layout_reason(found)}"


def _layout_reason(found: RunPlan) -> str:
    """Why `Config.layout` is what it is."""
    config = found.config
    if config.topology.layout != "auto":
        return "as configured"
    if found.environment.cp == 1:
        return "auto: a worker holds whole sequences, so that layouts do not differ"
    if found.layout.name == "zigzag":
        return "auto: dense attention without documents, whose work zigzag divides evenly in the largest pieces"
    uneven = (
        "packed documents"
        if config.sparsity.pattern == "dense"
        else f"the index of {config.sparsity.pattern}"
    )
    return f"auto: stripes divide the work of {uneven} evenly"


def describe_compile(found: RunPlan) -> str:
    asked = found.config.train.compile
    if not compiles(found.config, found.environment.device):
        return "off" + (
            "; train.compile=auto compiles on GPUs alone"
            if asked == "auto"
            else " (train.compile=false)"
        )
    how = "train.compile=auto, on GPUs" if asked == "auto" else "train.compile=true"
    return f"on ({how}): the first step compiles before it computes, which can take minutes"


def describe_dtype(found: RunPlan) -> str:
    train = found.config.train
    text = (
        found.dtype
        if found.dtype == "float32"
        else f"{found.dtype} compute; float32 parameters, gradients and AdamW states"
    )
    if found.config.optim.offload:
        text = f"{found.dtype} compute and weights, float32 gradients; float32 parameters and AdamW states on the host"
        text += ", where gradients go as they come" * found.config.optim.offload_gradients
    return (
        f"{text}, gradients reduced in {train.reduce_dtype}"
        if train.reduce_dtype != "float32"
        else text
    )


def describe_moved(found: RunPlan) -> str:
    host = found.moved.host
    link = (
        f"{size(host)} between GPU and host a step"
        if host and found.environment.device == "cuda"
        else ""
    )
    if found.environment.workers == 1:
        return link or "nothing, one worker"
    exchange = f"{size(found.moved.forward)} forward and {size(found.moved.backward)} backward a layer and pass"
    n = found.micro_batches
    often = {"full": "twice", "gradients": "once a step", "optimizer": "once a step"}[
        found.config.train.shard
    ]
    each = (
        ""
        if n == 1 or found.config.train.shard == "optimizer"
        else f" in each of {n} micro-batches"
    )
    how = (
        f"gathered {often}, reduced{each}"
        if found.config.train.shard != "full"
        else f"gathered {often} and reduced{each}"
    )
    weights = f"weights and gradients {size(found.moved.weights)} a step ({how})"
    return "; ".join(
        part
        for part in (exchange if found.environment.cp > 1 else "no keys or values", weights, link)
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
