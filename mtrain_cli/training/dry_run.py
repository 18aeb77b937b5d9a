"""Render the plan of a run, for `mtrain train --dry-run`. Planning needs no GPU."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.composition.derived import folder_of
from mtrain_cli.config.dense_layers import last_layers
from mtrain_cli.config.schema import CHECKPOINTS, Config, ConfigError
from mtrain_cli.config.sizes import count, format_size, with_count
from mtrain_cli.console import grid
from mtrain_cli.data.open_dataset import most_intervals
from mtrain_cli.model.huggingface import SINGLE, has_weights
from mtrain_cli.model.rope import rope_factor
from mtrain_cli.model.tiling import layers_with_products
from mtrain_cli.parallel.activation_offload import layers_on_host
from mtrain_cli.parallel.cast_rows import too_many_to_count
from mtrain_cli.parallel.layout import Balanced, Placement
from mtrain_cli.parallel.traffic import count_traffic
from mtrain_cli.sparsity.pattern import computes_everything, display_name, make_pattern, remarks
from mtrain_cli.training import initial_weights
from mtrain_cli.training.first_masks import FirstMasks
from mtrain_cli.training.flops import causal_pairs
from mtrain_cli.training.layout_choice import layout_advice, make_balancer
from mtrain_cli.training.memory import GIB, size
from mtrain_cli.training.memory_remedies import SHORTEST_SEQ, longest_seq, refusal
from mtrain_cli.training.memory_search import KEPT, search
from mtrain_cli.training.parallelism_rows import expert_rows, pipeline_rows, tensor_rows
from mtrain_cli.training.planning import make_plan
from mtrain_cli.training.resolution import compiles
from mtrain_cli.training.run_plan import FITS, USABLE, RunPlan
from mtrain_cli.training.step_estimate import StepEstimate

# Memory of common GPUs in GiB, as CUDA reports it, smallest first. A plan for absent GPUs names the
# smallest one that it fits.
GPU_MEMORY = (
    ("40 GB (A100)", 39.4),
    ("80 GB (A100, H100)", 79.2),
    ("141 GB (H200)", 139.8),
    ("180 GB (B200)", 178.3),
)
_PACKED = (
    "data.document_mask=true packs documents, but this mask counts positions from the start of the "
    "sequence, not of a document; give data.document_mask=false"
)
# What attention does with packed documents, by data.document_mask.
DOCUMENTS = {
    True: "a sequence may hold several (data.document_mask=true); FLOP are those of one, as in "
    "mtrain simulate",
    False: "attention crosses documents (data.document_mask=false)",
}
FEW_LABELS = 0.1  # share of the labels below which a plan warns


def dry_run(config: Config) -> RenderableType:
    """Plan a run. Return the rendered plan, which needs a terminal of at least 80 columns."""
    return render(make_plan(config))


def render(
    plan: RunPlan,
    estimate: StepEstimate | None = None,
    data: Sequence[tuple[str, str]] = (),
    free_disk: int | None = None,
) -> RenderableType:
    """Render a plan as a table of facts, a table of a worker's memory, and a verdict on the fit.

    Args:
        estimate: of a step; None leaves the time out.
        data: rows on the data of the run.
        free_disk: free bytes for checkpoints. None if unknown.
    """
    config, model = plan.config, plan.config.model
    heads = f"{model.num_heads}/{model.num_kv_heads} heads of {model.head_dim}"
    shape = f"{model.num_layers} layers, hidden {model.hidden_size}, {heads}"
    tied = " (and LM head, tied)" if model.tie_word_embeddings else ""
    rows = [
        ("machine", plan.machine),
        ("model", describe_model(plan)),
        ("", f"{shape}, vocabulary {model.vocab_size:,}"),
        ("", f"{count(plan.parameters.embedding)} in the embedding{tied}"),
        ("positions", describe_rope(plan)),
        *position_rows(config),
        *weights_rows(config),
        *flop_rows(plan, estimate),
        *time_rows(estimate),
        *data,
        ("documents", _documents(plan)),
        ("workers", describe_workers(plan)),
        ("layout", describe_layout(plan)),
        *_layout_advice(plan),
        *exchange_rows(plan, read_data=True),
        *tensor_rows(plan),
        *expert_rows(plan),
        *pipeline_rows(plan),
        *mask_rows(config, plan.data_masks),
        ("sparsity", describe_sparsity(plan)),
        *(("", line) for line in remarks(config)),
        *kernel_rows(plan),
        ("dtype", describe_dtype(plan)),
        ("traffic", describe_traffic(plan)),
        *checkpoint_rows(plan, free_disk),
    ]
    title = Text(
        f"Dry run: {model.name}, seq {format_size(config.seq)}; nothing is trained", style="bold"
    )
    return Group(
        title, grid(rows), Text(""), memory_table(plan), *search_rows(plan), *verdict(plan)
    )


def search_rows(plan: RunPlan) -> list[RenderableType]:
    """Return a line on the setting that `train.memory=auto` chose, and one on rejected settings.

    Return no line on rejected settings if there are none, and no lines if `train.memory=auto` chose
    nothing.
    """
    if plan.search is None or plan.search.chosen is None:
        return []
    rejected = describe_rejected(plan)
    lines: list[RenderableType] = [Text(f"{describe_choice(plan)}.")]
    if rejected:
        lines.append(Text(f"Rejected, fastest setting of each kind: {rejected}.", style="dim"))
    return lines


def describe_choice(plan: RunPlan) -> str:
    """Return one line on the setting that `train.memory=auto` chose."""
    assert plan.search is not None
    assert plan.search.chosen is not None
    chosen = plan.search.chosen
    reason = f"of {len(plan.search.settings)} settings the fastest one that fits"
    return f"train.memory=auto takes {chosen.overrides or 'the defaults'}, {reason}"


def describe_rejected(plan: RunPlan) -> str:
    """Return one line with each setting that `train.memory=auto` rejected, with its reason."""
    assert plan.search is not None
    return "; ".join(f"{setting}: {reason}" for setting, reason in plan.search.rejected())


def verdict(plan: RunPlan) -> list[RenderableType]:
    """Return lines on changes that make a plan fit, and on the longest sequence that fits."""
    if plan.environment.device == "cpu":
        lines = [] if fits(plan) else [f"Does not fit this machine: {advice(plan)}"]
        return [Text(line, style="red") for line in lines]
    requested = plan.requested.train.keep_mlp if plan.requested is not None else True
    chosen = plan.search is not None and plan.config.train.keep_mlp and not requested
    kept = f"; {KEPT}" if chosen else ""
    return [*_gpu_verdict(plan), Text(f"{FITS}{kept}.", style="dim")]


def fits(plan: RunPlan) -> bool:
    """Return whether the plan fits the memory of its machine, or of the GPUs in the plan."""
    if plan.environment.device == "cpu":
        return bool(plan.fits)
    return plan.has_room_for(plan.memory) if plan.search is None else plan.search.chosen is not None


def _gpu_verdict(plan: RunPlan) -> list[RenderableType]:
    lines: list[RenderableType] = []
    if not fits(plan):
        found = search(plan) if plan.search is None else plan.search
        lines.append(Text(f"Does not fit: {refusal(plan, found)}.", style="red"))
    if plan.search is None:
        config = plan.config.changed(train={"memory": "auto"})
        automatic = _longest(dataclasses.replace(plan, config=config))
        on = f"on {plan.hardware.gpu}" if plan.hardware.absent else "here"
        lengths = f"{_longest(plan)} with these settings, {automatic} with train.memory=auto"
        lines.append(Text(f"Longest sequence that fits {on}: {lengths}.", style="dim"))
    elif not lines:
        longest = _longest(plan)
        lines.append(Text(f"Longest sequence that fits with train.memory=auto: {longest}."))
    return lines


def _longest(plan: RunPlan) -> str:
    """Format the longest sequence that the search found to fit. A longer sequence may fit, too."""
    seq = longest_seq(plan)
    return "none" if seq is None else f"at least {format_size(seq)}"


def flop_rows(plan: RunPlan, estimate: StepEstimate | None) -> list[tuple[str, str]]:
    """Return rows on the FLOP of a token and of a step.

    For a pattern that leaves pairs out, they have the FLOP of dense attention, and those at the
    density of the estimate.
    """
    config, flops, tokens = plan.config, plan.flops, plan.tokens_per_step
    attention = 1 - 6 * plan.parameters.matmul / flops.model
    model = f"{flop(flops.model)} model, {attention:.0%} of it attention ({_which_pairs(plan)})"
    executed = f"{flop(flops.executed)} executed"
    step = f"{flop(flops.model * tokens)} model"
    sparsity = config.sparsity
    sparse = sparsity.pattern != "dense" and sparsity.dense_steps < config.train.steps
    if sparse and not computes_everything(config):
        model, executed, step = f"dense: {model}", f"dense: {executed}", f"dense: {step}"
        if estimate is None or estimate.density is None:
            executed += f"; {sparsity.pattern} executes less"
        else:
            at = plan.flops_at(estimate.density).executed
            executed += f"; at {estimate.density:.1%}: {flop(at)}"
            step += f"; at {estimate.density:.1%}: {flop(at * tokens)} executed"
    return [
        ("per token", model),
        ("", f"{executed}; recomputation: {describe_activations(config)}"),
        ("step", describe_step(plan)),
        ("", step),
    ]


def checkpoint_rows(plan: RunPlan, free_disk: int | None) -> list[tuple[str, str]]:
    """Return a row on the size of checkpoints, and a warning if the disk has no room for them."""
    kept = plan.config.train.keep_checkpoints
    rows = [("checkpoint", f"{size(plan.checkpoint)} on disk, {kept} kept")]
    train, every = plan.config.train, plan.config.train.checkpoint_every
    saved = (train.steps - 1) // every if every else 0
    # The oldest one is deleted only after the next one is complete.
    needed = plan.checkpoint * min(kept + 1, saved + train.checkpoint_at_end)
    if free_disk is not None and free_disk < needed:
        text = f"the disk of the run has {size(free_disk)} free, but checkpoints take up to "
        rows.append(("warning", f"{text}{size(needed)}; give another run.dir"))
    return rows


def time_rows(estimate: StepEstimate | None) -> list[tuple[str, str]]:
    """Return a row on the predicted time of a step; none if nothing is known about it."""
    line = "" if estimate is None else estimate.describe()
    return [("time", line)] if line else []


def _which_pairs(plan: RunPlan) -> str:
    read = plan.data_masks
    if read is None or not read.masks:
        return f"{plan.config.mask.kind}, whole sequence"
    return "masks of the data"


def _documents(plan: RunPlan) -> str:
    read = plan.data_masks
    if read is not None and read.masks:
        return "a sequence may hold several, each with its own mask"
    return DOCUMENTS[plan.config.data.document_mask]


def _layout_advice(plan: RunPlan) -> list[tuple[str, str]]:
    """Return a row if the balanced layout suits the masks of the data better; none if unknown."""
    read, environment = plan.data_masks, plan.environment
    if read is None or not read.masks or too_many_to_count(plan.layout):
        return []
    config, workers = plan.config.of_worker, plan.dims.cp
    padded = [[mask.repadded(plan.layout.padded_seq) for mask in read.masks[: read.micro_batch]]]
    advice = layout_advice(config, workers, environment.context_per_node, padded)
    return [("", advice)] if advice else []


def exchange_rows(plan: RunPlan, *, read_data: bool = False) -> list[tuple[str, str]]:
    """Return a row on the exchange and, for a group cast, a row on the keys that it moves.

    read_data: count the keys under masks from the data. Otherwise these are unknown.
    """
    config, layout = plan.config, plan.layout
    rows = [("exchange", f"{plan.exchange.label}: {plan.exchange.reason}")]
    if not plan.exchange.traits.by_mask or plan.dims.cp == plan.exchange.heads:
        return rows
    from_data = config.data.mask_key is not None
    read = plan.data_masks if from_data and read_data else None
    if too_many_to_count(layout) or (from_data and (read is None or not read.masks)):
        return rows  # the masks are unknown, or take long to count
    rules = MaskRule.of(config).by_layers(config.model.num_layers)
    masks = [[rule.undivided(layout.seq, layout.padded_seq)] for rule, _ in rules]
    layers, inside_documents = [count for _, count in rules], ""
    if read is not None:
        masks = [[mask.repadded(layout.padded_seq) for mask in read.typical]]
        if layout.name == Balanced.name:
            balancer = make_balancer(
                config.of_worker, plan.dims.cp, plan.environment.context_per_node
            )
            layout = balancer.layout(masks)
    elif config.data.document_mask:
        inside_documents = ", or fewer if a sequence holds several documents"
    inside = Placement(layout, plan.exchange.heads).inside
    shards = [inside.positions(rank) for rank in range(inside.workers)]
    moved = count_traffic(masks, shards, layers=layers).share_moved(layout.padded_seq * sum(layers))
    share = "none" if not moved else f"{moved:.1%}" if moved >= 0.001 else "less than 0.1%"
    text = f"a worker receives {share} of the keys of the other workers"
    return [*rows, ("", text + inside_documents * bool(moved))]


def kernel_rows(plan: RunPlan) -> list[tuple[str, str]]:
    """Return a row on the kernel, and a row on that of dense first steps and layers if any."""
    rows = [("kernel", f"{plan.kernel}: {plan.kernel_reason}")]
    if plan.dense_kernel is not None:
        name, reason = plan.dense_kernel
        sparsity = plan.config.sparsity
        are = "is" if sparsity.dense_steps + sparsity.dense_layers == 1 else "are"
        rows.append(("", f"{name} for {_dense_parts(plan.config)}, which {are} dense: {reason}"))
    return rows


def _dense_parts(config: Config) -> str:
    """Return ``the first 10 steps and the last 2 layers``: what is dense in a sparse run."""
    steps = config.sparsity.dense_steps
    first = "" if not steps else "the first step" if steps == 1 else f"the first {steps} steps"
    return " and ".join(text for text in (first, last_layers(config)) if text)


def _of_causal(pairs: float, seq: int) -> str:
    """Return ``3.1% of the pairs of a causal mask``."""
    return f"{100 * pairs / causal_pairs(seq):.3g}% of the pairs of a causal mask"


def mask_rows(config: Config, read: FirstMasks | None = None) -> list[tuple[str, str]]:
    """Return a row on the mask, and a row on the labels that it shows; no rows if it is causal.

    read: masks of the data. A row says how many pairs they allow; None leaves this row out.
    """
    if (name := config.data.mask_key) is not None:
        own = f"from the data (data.mask_key={name})"
        if config.data.path is not None:
            intervals = with_count(most_intervals(config), "interval")
            own += f", at most {intervals} of keys per query"
        if read is None:
            return [("mask", own)]
        if read.masks:
            own += f"; {_of_causal(read.pairs, config.seq)}"
        return [("mask", own), ("", read.describe())]
    if config.mask.kind == "causal":
        return []
    mask = MaskRule.of(config).undivided(config.seq, config.seq)
    inside = ", inside each document" if config.data.document_mask else ""
    share = _of_causal(mask.pairs, config.seq)
    rows = [("mask", f"{config.mask.describe()}{inside}; {share}")]
    if remark := config.mask.remark(config.seq):
        rows.append(("note", remark))
    # Token ids may hold one document per sequence, such as a video.
    if config.mask.counts_from_start and config.data.document_mask and config.data.kind != "tokens":
        rows.append(("warning", _PACKED))
    if config.mask.is_mixed:
        layers = config.model.num_layers
        full = sum(map(config.mask.is_full, range(layers)))
        see = "sees" if full == 1 else "see"
        rows.append(("", f"{full} of {layers} layers {see} all earlier tokens instead"))
    if shown := int(mask.shows_later_keys().sum()):
        counted = f"{config.seq - shown:,} of {config.seq:,} labels count"
        why = "a label that a query may see is ignored"
        rows.append(("", f"{counted} in a sequence of one document: {why}"))
        if config.seq - shown < FEW_LABELS * config.seq:
            rows.append(("warning", _few_labels(config, 1 - shown / config.seq)))
    return rows


def _few_labels(config: Config, share: float) -> str:
    key = config.mask.size_that_hides_labels
    remedy = f"a smaller mask.{key}" if key else "another mask"
    return f"only {share:.2%} of the labels count, so a step trains on few tokens; give {remedy}"


def memory_table(plan: RunPlan) -> RenderableType:
    """Render the peak memory of a worker by part, its fit, and the memory at other moments."""
    memory, peak = plan.memory, plan.memory.peak
    parts = {**peak.parts, "CUDA and NCCL": memory.reserve}
    width = max(len(size(part)) for part in (*parts.values(), memory.total))
    rows = [
        (
            name.replace("_", " "),
            size(part).rjust(width),
            Text("█" * round(30 * part / memory.total), style="cyan"),
        )
        for name, part in parts.items()
        if part
    ]
    total = Text("total", style="bold not dim")
    last = total, Text(size(memory.total).rjust(width), style="bold"), describe_fit(plan)
    moments = [f"{m.name} {size(m.allocated)}" for m in memory.moments if m is not peak]
    choices = [f"{name} {size(total)}" for name, total in totals_by_recomputation(plan).items()]
    workers = plan.environment.local_workers
    offloaded = _per_worker_and_machine(memory.host, workers, "pinned host memory")
    saving = _per_worker_and_machine(memory.saving, workers, "more host memory")
    # On a CPU, the totals include the copy that a checkpoint makes in host memory.
    copies = plan.environment.device == "cpu" and memory.host_peak
    note = " (while a checkpoint is written)" if copies else ""
    return Group(
        Text.assemble(("Peak memory of a worker", "bold"), f", at the {peak.name}"),
        grid([*rows, last], ("dim", "", "")),
        Text(f"At other moments: {', '.join(moments)}.", style="dim"),
        *([Text(f"Offloaded: {offloaded}.")] if memory.host else []),
        *([Text(f"While a checkpoint is written: {saving}.")] if memory.saving else []),
        Text(f"With train.activation_checkpoint{note}: {', '.join(choices)}.", style="dim"),
    )


def _per_worker_and_machine(number: int, workers: int, memory: str) -> str:
    return f"{size(number)} {memory} per worker, {size(number * workers)} per machine"


def describe_activations(config: Config) -> str:
    """Describe what layers keep for the backward pass, and where."""
    train = config.train
    partial = train.activation_checkpoint == "sequence_selective"
    kept = f" (last {train.checkpoint_keep:.0%} kept)" if partial else ""
    layers = config.model.num_layers
    on_host = layers_on_host(train.offload_activations, layers)
    part = "" if on_host == layers - 1 else f"{on_host} of {layers} layers "
    offloaded = f", {part}offloaded" if on_host else ""
    layers_kept = layers_with_products(train.keep_mlp, layers)
    which = "all" if layers_kept == layers else f"{layers_kept} of {layers}"
    products = f", MLP products of {which} layers kept" if layers_kept else ""
    if 0 < layers_kept < layers and train.activation_checkpoint == "none":
        products += " if the MLP is tiled, otherwise of all layers"
    return f"{train.activation_checkpoint}{kept}{offloaded}{products}"


def totals_by_recomputation(plan: RunPlan) -> dict[str, int]:
    """Return the device memory of a worker in bytes, by value of train.activation_checkpoint."""
    totals = {}
    for kind in CHECKPOINTS:
        offload = plan.config.train.offload_activations if kind != "none" else False
        train = {"activation_checkpoint": kind, "offload_activations": offload}
        totals[kind] = plan.device_bytes(plan.estimate(plan.config.changed(train=train)))
    return totals


def describe_fit(plan: RunPlan) -> Text:
    """Return a short text on whether the peak fits, and on the memory that it must fit."""
    word, style = ("fits", "green") if plan.fits else ("does not fit", "red")
    if plan.environment.device == "cpu":
        if not plan.fits:
            return Text(word, style=style)  # the verdict below has the numbers
        workers = plan.environment.local_workers
        need = f"{with_count(workers, 'worker')} need{'s' * (workers == 1)} {size(plan.host_bytes)}"
        available = plan.hardware.host_memory
        return Text(f"{word}: {need} of {available / GIB:,.0f} GiB", style=style)
    if plan.knows_memory:
        share = plan.memory.total / plan.hardware.memory
        gpu = "a GPU" if plan.hardware.is_guess else plan.hardware.gpu
        of = f"{size(plan.hardware.memory)} of {gpu}"
        return Text(f"{word}: {share:.0%} of the {of}", style=style)
    total = plan.memory.total
    large_enough = [name for name, gib in GPU_MEMORY if total <= USABLE * gib * GIB]
    if not large_enough:
        return Text("fits no current GPU", style="red")
    if not plan.has_room_for(plan.memory, float("inf")):
        return Text("does not fit the memory of the host", style="red")
    return Text(f"fits GPUs of {large_enough[0]} and larger", style="green")


def advice(plan: RunPlan) -> str:
    """Return a line on the memory that CPU workers need, on remedies, and on planning for GPUs."""
    workers = plan.dims.workers
    helps = [
        f"train.activation_checkpoint={kind}"
        for kind, total in totals_by_recomputation(plan).items()
        if total * plan.environment.local_workers <= plan.hardware.host_memory
    ][:1]
    config = plan.config
    seq = _largest_that_fits(
        plan, config.seq, SHORTEST_SEQ, lambda n: dataclasses.replace(config, seq=n)
    )
    if seq is not None:
        helps.append(f"seq={format_size(seq)}")
    fewer = _largest_that_fits(plan, workers, 1, lambda n: config.changed(topology={"workers": n}))
    if fewer is not None:
        helps.append(f"topology.workers={fewer}")
    would = f"{' or '.join(helps)} would fit" if helps else "here, only a smaller model would fit"
    given = plan.config.topology.workers
    gpus = given if isinstance(given, int) and workers > 1 else 8
    elsewhere = f"To plan for {gpus} GPUs instead, add topology.device=cuda topology.workers={gpus}"
    need = f"{workers} worker{'s' * (workers > 1)} need{'s' * (workers == 1)}"
    return f"{need} {plan.needed_here}; {would}. {elsewhere}."


def _largest_that_fits(
    plan: RunPlan, number: int, least: int, config_with: Callable[[int], Config]
) -> int | None:
    """Halve ``number`` until an allowed configuration with it fits. Return None below ``least``."""
    while (number := number // 2) >= least:
        with contextlib.suppress(ConfigError):
            if plan.with_config(config_with(number)).fits:
                return number
    return None


def describe_model(plan: RunPlan) -> str:
    name = f"{plan.config.model.name} ({plan.config.model.family})"
    return f"{name}, {plan.parameters.described}"


def describe_rope(plan: RunPlan) -> str:
    rope = plan.config.model.rope
    if rope.scaling == "none":
        return f"rotary, theta {rope.theta:,.0f}, no scaling"
    reach = f"from {format_size(rope.original_max_position)} tokens"
    factor = rope_factor(rope, plan.config.seq)
    return f"rotary, theta {rope.theta:,.0f}, {rope.scaling} by {factor:g} {reach}"


def position_rows(config: Config) -> list[tuple[str, str]]:
    """Return a row if the sequence exceeds the positions that the model covers: a warning if the
    run starts from released weights, else a note.
    """
    line = initial_weights.beyond_reach(config)
    return [("warning" if config.train.init_from else "note", line)] if line else []


def weights_rows(config: Config) -> list[tuple[str, str]]:
    """Return rows on the folder of `train.init_from` and on how the run differs from the folder.

    Return no rows if `train.init_from` is null.
    """
    if config.train.init_from is None:
        return []
    notes = [("", line) for line in initial_weights.remarks(config)]
    folder = folder_of(config.train.init_from)
    if folder is not None and not has_weights(folder):
        notes.append(("", f"the folder has no {SINGLE} yet, which the run needs"))
    return [("weights", f"from {config.train.init_from}"), *notes]


def describe_step(plan: RunPlan) -> str:
    train = plan.config.train
    if train.global_batch == 1:
        return f"{plan.tokens_per_step:,} tokens, 1 sequence"
    split = f"{plan.dims.dp} x {train.micro_batch} x {plan.micro_batches} accumulated"
    return f"{plan.tokens_per_step:,} tokens, {train.global_batch} sequences = {split}"


def describe_workers(plan: RunPlan) -> str:
    environment, dims = plan.environment, plan.dims
    unit = "GPU" if environment.device == "cuda" else "CPU process"
    plural = "" if dims.workers == 1 else "s" if environment.device == "cuda" else "es"
    hardware = plan.hardware
    named = environment.device == "cuda" and not hardware.is_guess
    text = f"{dims.workers} {f'x {hardware.gpu}' if named else unit + plural} = {dims}"
    if environment.nodes > 1:
        text += f", {environment.nodes} nodes of {environment.workers_per_node}"
    if hardware.absent and plan.config.topology.workers == "auto":
        text += ", assumed; set topology.workers to your number of GPUs"
    return text


def describe_sparsity(plan: RunPlan) -> str:
    pattern = make_pattern(plan.config.sparsity, plan.config.seed)
    if pattern is None:
        return "dense: every pair that the mask allows"
    dense = _dense_parts(plan.config)
    return f"{display_name(pattern)}: {pattern.describe()}{f'; {dense} dense' if dense else ''}"


def describe_layout(plan: RunPlan) -> str:
    layout = plan.layout
    blocks = f", blocks of {layout.block_size}" if layout.name == "striped" else ""
    if layout.name == "balanced":
        blocks = f", chunks of {layout.block_size:,} assigned for each batch"
    pads = layout.padded_seq - layout.seq
    padding = f", {pads:,} of {layout.padded_seq:,} are padding" if pads else ""
    holder = "worker" if plan.dims.tp == 1 else f"tensor group of {plan.dims.tp}"
    tokens = f"{layout.tokens_per_worker:,} tokens per {holder}{padding}"
    return f"{layout.name}{blocks}: {tokens}; {_layout_reason(plan)}"


def _layout_reason(plan: RunPlan) -> str:
    """Return why `Config.layout` chose the layout."""
    config = plan.config
    if plan.layout_reason:
        return plan.layout_reason
    if config.topology.layout != "auto":
        return "as configured"
    if plan.dims.cp == 1:
        return "auto: each worker holds whole sequences, so layouts do not differ"
    if plan.layout.name == "zigzag":
        return "auto: zigzag balances dense attention without documents, in two pieces per worker"
    pattern = config.sparsity.pattern
    uneven = "packed documents" if pattern == "dense" else f"the index of {pattern}"
    return f"auto: striping balances the uneven work of {uneven}"


def describe_compile(plan: RunPlan) -> str:
    auto = plan.config.train.compile == "auto"
    if not compiles(plan.config, plan.environment.device):
        why = "; train.compile=auto compiles only on GPUs" if auto else " (train.compile=false)"
        return f"off{why}"
    reason = "train.compile=auto, on GPUs" if auto else "train.compile=true"
    return f"on ({reason}): the first step also compiles, which can take minutes"


def describe_dtype(plan: RunPlan) -> str:
    train = plan.config.train
    text = plan.dtype
    if plan.dtype != "float32":
        text += " compute; float32 parameters, gradients and AdamW states"
    if plan.config.optim.offload:
        states = "float32 parameters and AdamW states in host memory"
        text = f"{plan.dtype} compute and weights, float32 gradients; {states}"
        text += "; gradients move there as they are reduced" * plan.config.optim.offload_gradients
    if train.reduce_dtype != "float32":
        text += f"; gradients reduced in {train.reduce_dtype}"
    return text


def describe_traffic(plan: RunPlan) -> str:
    """Describe how much data reaches a worker: KV, weights, gradients and host transfers."""
    host, n = plan.received.host, plan.micro_batches
    on_gpu = plan.environment.device == "cuda"
    link = f"{size(host)} between GPU and host per step" if host and on_gpu else ""
    if plan.dims.workers == 1:
        return link or "none, one worker"
    forward, backward = size(plan.received.forward), size(plan.received.backward)
    exchange = f"KV {forward} forward and {backward} backward per layer and pass"
    shard = plan.config.train.shard
    times = {"full": "twice", "gradients": "once a step", "optimizer": "once a step"}[shard]
    each = "" if n == 1 or shard == "optimizer" else f" in each of {n} micro-batches"
    schedule = f"gathered {times}{' and' if shard == 'full' else ','} reduced{each}"
    weights = f"weights and gradients {size(plan.received.weights)} per step ({schedule})"
    shared = ""
    if plan.dims.tp > 1:
        received = plan.received.tensor_forward, plan.received.tensor_backward
        shared = "hidden states {} forward and {} backward per layer".format(*map(size, received))
    parts = (exchange if plan.dims.cp > 1 else "no KV", shared, weights, link)
    return "; ".join(part for part in parts if part)


def flop(number: float) -> str:
    """Format FLOP, for example as 1.34 TFLOP."""
    for unit, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}FLOP"
    return f"{number / 1e6:.3g} MFLOP"
