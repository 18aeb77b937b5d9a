"""Render the plan of a run, for `mtrain train --dry-run` and for the banner of a run that starts.

Planning needs no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from mtrain_cli import __version__
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.composition.derived import folder_of
from mtrain_cli.config.data_kinds import KINDS
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.config.sizes import count, format_size, with_count
from mtrain_cli.console import grid
from mtrain_cli.data.open_dataset import most_intervals
from mtrain_cli.model.huggingface import SINGLE, has_weights
from mtrain_cli.model.huggingface_config import max_position, read_config
from mtrain_cli.model.rope import rope_factor
from mtrain_cli.model.tiling import layers_with_products
from mtrain_cli.model.tokenizer_files import TOKENIZER, encodes_bytes
from mtrain_cli.parallel.activation_offload import layers_on_host
from mtrain_cli.sparsity.pattern import display_name, make_pattern, remarks
from mtrain_cli.training.expert_traffic import ExpertRun
from mtrain_cli.training.flops import causal_pairs
from mtrain_cli.training.layout_choice import named_on
from mtrain_cli.training.memory import GIB, size
from mtrain_cli.training.optimizer import LearningRateSchedule
from mtrain_cli.training.planning import longest_seq, refusal, search
from mtrain_cli.training.progress import StepEstimate
from mtrain_cli.training.resolution import compiles
from mtrain_cli.training.run_plan import FITS, FirstMasks, RunPlan

Rows = list[tuple[str, str]]  # (topic or "", text)

UNESTIMATED = "not estimated: transformers computes the model"

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


def render(
    plan: RunPlan,
    estimate: StepEstimate | None = None,
    data: Sequence[tuple[str, str]] = (),
) -> RenderableType:
    """Render a plan as a table of facts, a table of a worker's memory, and a verdict on the fit.

    estimate: of a step; None leaves the time out.
    data: rows on the data of the run.
    """
    config, model = plan.config, plan.config.model
    heads = f"{model.num_heads}/{model.num_kv_heads} heads of {model.head_dim}"
    shape = f"{model.num_layers} layers, hidden {model.hidden_size}, {heads}"
    tied = " (and LM head, tied)" if model.tie_word_embeddings else ""
    own, kept = not model.is_foreign, f"{config.train.keep_checkpoints}"
    if every := config.train.keep_every:
        kept += f" and those of every {every} steps"
    read = plan.data_masks
    documents = DOCUMENTS[config.data.document_mask]
    documents = documents if own else documents.partition("; FLOP")[0]
    if read is not None and read.masks:
        documents = "a sequence may hold several, each with its own mask"
    rows = [
        ("machine", plan.machine),
        ("model", describe_model(plan)),
        ("", f"{shape}, vocabulary {model.vocab_size:,}"),
        *([("", f"{count(plan.parameters.embedding)} in the embedding{tied}")] if own else []),
        ("positions", describe_rope(plan)),
        *position_rows(config),
        *weights_rows(config),
        *flop_rows(plan, estimate),
        *time_rows(estimate),
        *data,
        ("documents", documents),
        *parallel_rows(plan),
        *mask_rows(config, read),
        *sparsity_rows(plan),
        ("dtype", describe_dtype(plan)),
        ("traffic", describe_traffic(plan)),
        ("checkpoint", f"{size(plan.checkpoint)} on disk, {kept} kept" if own else UNESTIMATED),
    ]
    title = f"Dry run: {model.name}, seq {format_size(config.seq)}; nothing is trained"
    if model.is_foreign:
        return Group(Text(title, "bold"), grid([*rows, ("memory", _memory(plan))]))
    choice = [Text(f"{line}.") for line in describe_choice(plan)]
    return Group(
        Text(title, "bold"), grid(rows), Text(""), memory_table(plan), *choice, *verdict(plan)
    )


def banner(
    plan: RunPlan,
    run_dir: Path,
    data: str,
    targets: str = "",
    *,
    resumed: int | None = None,
    estimate: StepEstimate | None = None,
) -> RenderableType:
    """Return the banner: the version, then a table with one row per topic.

    Args:
        data: one line that describes the corpus, from `PackedDataset.describe`.
        targets: one line from `batch.describe_targets`; "" leaves it out.
        resumed: step of the checkpoint that the run resumes from. None for a new run.
        estimate: of a step. None leaves the time out.
    """
    config = plan.config
    recomputation = f"recomputation: {describe_activations(config)}"
    rows = [
        ("model", f"{describe_model(plan)}, {describe_rope(plan)}"),
        *position_rows(config),
        ("weights", _weights(config, resumed)),
        *weights_rows(config)[1:],
        ("sequence", f"{format_size(config.seq)}; a step is {describe_step(plan)}"),
        *time_rows(estimate),
        *parallel_rows(plan, f", started by {plan.environment.launcher}"),
        *mask_rows(config),
        *sparsity_rows(plan),
        ("dtype", f"{describe_dtype(plan)}; {recomputation}"),
        ("schedule", LearningRateSchedule.of(config).describe(config.train.steps)),
        ("compile", describe_compile(plan)),
        ("memory", _memory(plan)),
        *(("", line) for line in describe_choice(plan)),
        ("data", f"{data}; order from seed {config.seed}"),
        *([("targets", targets)] if targets else []),
        ("run", str(run_dir)),
    ]
    return Group(Text(f"mtrain {__version__}", style="bold"), grid(rows))


def _memory(plan: RunPlan) -> str:
    if plan.config.model.is_foreign:
        return UNESTIMATED
    total, capacity = plan.memory.total, plan.hardware.memory
    share = f", {total / capacity:.0%} of {size(capacity)}" if capacity else ""
    text = f"estimated peak {size(total)} {'' if capacity else 'of tensors '}per worker{share}"
    if plan.config.data.mask_key is not None:
        text += ", for causal documents"
    return f"{text}; plus {size(plan.memory.host)} of host memory" if plan.memory.host else text


def _weights(config: Config, resumed: int | None) -> str:
    """Describe where the weights come from."""
    origin = f"random, seed {config.seed}"
    if config.train.init_from:
        origin = f"{config.train.init_from} (train.init_from)"
    if resumed is None:
        return origin
    return f"from the checkpoint of step {resumed}; the run started from {origin}"


def parallel_rows(plan: RunPlan, launcher: str = "") -> Rows:
    """Return rows on workers, layout, exchange, tensor, expert and pipeline parallelism."""
    return [
        ("workers", describe_workers(plan) + launcher),
        ("layout", describe_layout(plan)),
        ("exchange", f"{plan.exchange.label}: {plan.exchange.reason}"),
        *tensor_rows(plan),
        *expert_rows(plan),
        *pipeline_rows(plan),
    ]


def sparsity_rows(plan: RunPlan) -> Rows:
    """Return rows on sparsity and kernels."""
    lines = [("", line) for line in remarks(plan.config)]
    return [("sparsity", describe_sparsity(plan)), *lines, *kernel_rows(plan)]


def describe_choice(plan: RunPlan) -> list[str]:
    """Return a line on the setting that `train.memory=auto` chose."""
    if plan.search is None or plan.search.chosen is None:
        return []
    overrides, number = plan.search.chosen.overrides or "the defaults", len(plan.search.settings)
    return [f"train.memory=auto takes {overrides}, of {number} settings the fastest one that fits"]


def fits(plan: RunPlan) -> bool:
    """Return whether the plan fits the memory of its machine, or of the GPUs in the plan."""
    return plan.fits if plan.search is None else plan.search.chosen is not None


def verdict(plan: RunPlan) -> list[RenderableType]:
    """Return lines on changes that make a plan fit, and on the longest sequence that fits."""
    lines: list[RenderableType] = []
    if not fits(plan):
        result = search(plan) if plan.search is None else plan.search
        lines.append(Text(f"Does not fit: {refusal(plan, result)}.", style="red"))
    if plan.environment.device == "cpu":
        return lines
    if not lines or plan.search is None:  # else the refusal has tried all lengths
        seq = longest_seq(plan)
        longest = "none" if seq is None else f"at least {format_size(seq)}"
        these = "these settings" if plan.search is None else "train.memory=auto"
        lines.append(Text(f"Longest sequence that fits with {these}: {longest}.", style="dim"))
    return [*lines, Text(f"{FITS}.", style="dim")]


def flop_rows(plan: RunPlan, estimate: StepEstimate | None) -> Rows:
    """Return rows on the FLOP of a token and of a step, dense and at the estimate's density."""
    config, tokens, read = plan.config, plan.tokens_per_step, plan.data_masks
    if config.model.is_foreign:
        return [("FLOP", UNESTIMATED), ("step", describe_step(plan))]
    flops = plan.flops
    own = read is not None and read.masks
    pairs = "masks of the data" if own else f"{config.mask.kind}, whole sequence"
    attention = 1 - 6 * plan.parameters.matmul / flops.model
    model = f"{flop(flops.model)} model, {attention:.0%} of it attention ({pairs})"
    executed = f"{flop(flops.executed)} executed"
    step = f"{flop(flops.model * tokens)} model"
    sparsity = config.sparsity
    if sparsity.pattern != "dense" and sparsity.dense_steps < config.train.steps:
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


def time_rows(estimate: StepEstimate | None) -> Rows:
    line = "" if estimate is None else estimate.describe()
    return [("time", line)] if line else []


def kernel_rows(plan: RunPlan) -> Rows:
    rows = [("kernel", f"{plan.kernel}: {plan.kernel_reason}")]
    if plan.dense_kernel is not None:
        name, reason = plan.dense_kernel
        rows.append(("", f"{name} for {_dense_parts(plan.config)}, which are dense: {reason}"))
    return rows


def _dense_parts(config: Config) -> str:
    """Return ``the first 10 steps and the last 2 layers``: what is dense in a sparse run."""
    steps = config.sparsity.dense_steps
    first = "" if not steps else "the first step" if steps == 1 else f"the first {steps} steps"
    return " and ".join(text for text in (first, config.sparsity.dense_text) if text)


def _of_causal(pairs: float, seq: int) -> str:
    return f"{100 * pairs / causal_pairs(seq):.3g}% of the pairs of a causal mask"


def mask_rows(config: Config, read: FirstMasks | None = None) -> Rows:
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
    # Token ids may hold one document per sequence, such as a video.
    if config.mask.counts_from_start and config.data.document_mask and config.data.kind != "tokens":
        rows.append(("warning", _PACKED))
    if config.mask.is_mixed:
        layers = config.model.num_layers
        full = sum(map(config.mask.is_full, range(layers)))
        rows.append(("", f"in {full} of {layers} layers, all earlier tokens instead"))
    if shown := int(mask.shows_later_keys().sum()):
        counted = f"{config.seq - shown:,} of {config.seq:,} labels count"
        why = "a label that a query may see is ignored"
        rows.append(("", f"{counted} in a sequence of one document: {why}"))
    return rows


def tensor_rows(plan: RunPlan) -> Rows:
    whole, part = plan.config.model, plan.config.of_worker.model
    if plan.dims.tp == 1:
        return []
    heads = f"{part.num_heads} of {whole.num_heads} heads"
    width = f"{part.intermediate_size:,} of {whole.intermediate_size:,} columns of the MLP"
    return [("tensor", f"a worker computes {heads} and {width}")]


def pipeline_rows(plan: RunPlan) -> Rows:
    """Return rows on pipeline parallelism: the stages, and what their messages cost."""
    pipeline = plan.pipeline
    if pipeline is None:
        return []
    message, step = size(pipeline.hidden), size(pipeline.received)
    moved = f"a message has {message} of hidden states; a stage between others receives {step}"
    return [("pipeline", pipeline.describe()), ("", f"{moved} per step")]


def expert_rows(plan: RunPlan) -> Rows:
    """Return rows on the experts of a layer: who holds them, and what each degree costs."""
    config, dims, experts = plan.config, plan.dims, plan.config.model.moe.experts
    if not experts:
        return []
    per_node = plan.environment.workers_per_node
    run = ExpertRun(config, dims, plan.layout, plan.dtype_bytes, per_node)
    degree = run.degree
    held = f"a worker computes {experts // degree} of {experts}"
    if dims.dp * dims.cp * dims.tp == 1:
        return [("experts", held)]
    cluster = config.topology.cluster
    hardware = "H200s (topology.cluster=auto)" if cluster == "auto" else cluster
    by_degree = "; ".join(
        f"{price.degree}: {1e3 * price.seconds:.3g} ms, {size(price.traffic.total)}"
        for price in run.prices()
    )
    if (plan.requested or config).topology.expert_parallel == "auto":
        together = " together with the memory setting" if plan.search is not None else ""
        held += f"; degree {degree} was chosen by auto{together}"
    on = named_on(plan.environment.device, hardware)
    costs = f"per layer and step by degree, predicted for {on}: {by_degree}"
    return [("experts", held), ("", f"time and bytes received {costs}")]


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
    workers = plan.environment.local_workers
    host = [
        Text(f"{when}: {size(held)} {kind} per worker, {size(held * workers)} per machine.")
        for when, held, kind in (
            ("Offloaded", memory.host, "pinned host memory"),
            ("While a checkpoint is written", memory.saving, "more host memory"),
        )
        if held
    ]
    return Group(
        Text.assemble(("Peak memory of a worker", "bold"), f", at the {peak.name}"),
        grid([*rows, last], ("dim", "", "")),
        Text(f"At other moments: {', '.join(moments)}.", style="dim"),
        *host,
    )


def describe_activations(config: Config) -> str:
    """Describe what layers keep for the backward pass, and where."""
    train, layers = config.train, config.model.num_layers
    text = train.activation_checkpoint
    if text == "sequence_selective":
        text += f" (last {train.checkpoint_keep:.0%} kept)"
    if on_host := layers_on_host(train.offload_activations, layers):
        text += ", " if on_host == layers - 1 else f", {on_host} of {layers} layers "
        text += "offloaded"
    if kept := layers_with_products(train.keep_mlp, layers):
        which = "all" if kept == layers else f"{kept} of {layers}"
        text += f", MLP products of {which} layers kept"
    return text


def describe_fit(plan: RunPlan) -> Text:
    """Return a short text on whether the peak fits, and on the memory that it must fit."""
    word, style = ("fits", "green") if plan.fits else ("does not fit", "red")
    if plan.environment.device == "cpu":
        if not plan.fits:
            return Text(word, style=style)  # the verdict below has the numbers
        workers = with_count(plan.environment.local_workers, "worker")
        available = plan.hardware.host_memory / GIB
        return Text(f"{word}: {workers}, {size(plan.host_bytes)} of {available:,.0f} GiB", style)
    hardware = plan.hardware
    given = plan.config.topology.gpu_memory_gib != "auto"
    gpu = "a GPU" if hardware.is_guess and given else hardware.gpu
    share = f"{plan.memory.total / hardware.memory:.0%} of the {size(hardware.memory)} of {gpu}"
    return Text(f"{word}: {share}", style=style)


def describe_model(plan: RunPlan) -> str:
    model = plan.config.model
    text = f"{model.name} ({model.family})"
    return text if model.is_foreign else f"{text}, {plan.parameters.described}"


def describe_rope(plan: RunPlan) -> str:
    rope = plan.config.model.rope
    if plan.config.model.is_foreign:
        return "positions of config.json"
    if rope.scaling == "none":
        return f"rotary, theta {rope.theta:,.0f}, no scaling"
    reach = f"from {format_size(rope.original_max_position)} tokens"
    factor = rope_factor(rope, plan.config.seq)
    return f"rotary, theta {rope.theta:,.0f}, {rope.scaling} by {factor:g} {reach}"


def position_rows(config: Config) -> Rows:
    """Return a row if the sequence exceeds the positions that the model covers."""
    line = beyond_reach(config)
    return [("warning" if config.train.init_from else "note", line)] if line else []


def weights_rows(config: Config) -> Rows:
    """Return rows on the folder of `train.init_from`, if any, and what it lacks or contradicts."""
    if config.train.init_from is None:
        return []
    rows, data, lora = (
        [("weights", f"from {config.train.init_from}")],
        config.data,
        config.train.lora,
    )
    if lora.rank:
        which = "all linear layers" if lora.targets == "auto" else ", ".join(lora.targets)
        kept = f"frozen{'' if lora.quantize == 'none' else f' in {lora.quantize}'}"
        rows.append(("", f"{kept}; adapters of rank {lora.rank} in {which} train"))
    if (folder := folder_of(config.train.init_from)) is None:
        return rows
    file = folder / TOKENIZER
    as_bytes = KINDS[data.kind].tokenizes and data.tokenizer == "bytes"
    if as_bytes and (folder / "config.json").is_file() and not encodes_bytes(file):
        has = "" if file.is_file() else ", since it has no tokenizer.json"
        text = f"text is encoded as bytes{has}, but the weights expect the ids of their own"
        rows.append(("", f"{text} tokenizer. Set data.tokenizer=FILE."))
    if not has_weights(folder):
        random = f"so they are random, seed {config.seed}"
        then = random if config.model.is_foreign else "which the run needs"
        rows.append(("", f"the folder has no {SINGLE} yet, {then}"))
    return rows


def describe_step(plan: RunPlan) -> str:
    train = plan.config.train
    if train.global_batch == 1:
        return f"{plan.tokens_per_step:,} tokens, 1 sequence"
    split = f"{plan.dims.dp} x {train.micro_batch} x {plan.micro_batches} accumulated"
    return f"{plan.tokens_per_step:,} tokens, {train.global_batch} sequences = {split}"


def describe_workers(plan: RunPlan) -> str:
    environment, dims, hardware = plan.environment, plan.dims, plan.hardware
    on_gpu = environment.device == "cuda"
    units = f"{dims.workers} x {hardware.gpu}"
    if not on_gpu or hardware.is_guess:
        cpus = f"{dims.workers:,} CPU process{'' if dims.workers == 1 else 'es'}"
        units = with_count(dims.workers, "GPU") if on_gpu else cpus
    text = f"{units} = {dims}"
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
    if plan.layout_reason or plan.config.topology.layout != "auto":
        return plan.layout_reason or "as configured"
    if plan.dims.cp == 1:
        return "auto: each worker holds whole sequences, so layouts do not differ"
    if plan.layout.name == "zigzag":
        return "auto: zigzag balances dense attention without documents, in two pieces per worker"
    pattern = plan.config.sparsity.pattern
    uneven = "packed documents" if pattern == "dense" else f"the index of {pattern}"
    return f"auto: striping balances the uneven work of {uneven}"


def describe_compile(plan: RunPlan) -> str:
    given = f"train.compile={str(plan.config.train.compile).lower()}"
    if not compiles(plan.config, plan.environment.device):
        return f"off ({given})"
    return f"on ({given}): the first step also compiles, which can take minutes"


def describe_dtype(plan: RunPlan) -> str:
    train, text = plan.config.train, plan.dtype
    if plan.config.optim.offload:
        states = "float32 parameters and AdamW states in host memory"
        text = f"{plan.dtype} compute and weights, float32 gradients; {states}"
        text += "; gradients move there as they are reduced" * plan.config.optim.offload_gradients
    elif plan.dtype != "float32":
        text += " compute; float32 parameters, gradients and AdamW states"
    if train.fp8 != "none":
        of = "MLP products" if train.fp8 == "mlp" else "products of layers"
        text += f"; {of} in fp8, except gradients of weights"
    if train.reduce_dtype != "float32":
        text += f"; gradients reduced in {train.reduce_dtype}"
    return text


def describe_traffic(plan: RunPlan) -> str:
    """Describe how much data reaches a worker: KV, weights, gradients and host transfers."""
    if plan.config.model.is_foreign:
        return UNESTIMATED
    received, n, shard = plan.received, plan.micro_batches, plan.config.train.shard
    on_gpu = plan.environment.device == "cuda"
    link = f"{size(received.host)} between GPU and host per step"
    link = link if received.host and on_gpu else ""
    if plan.dims.workers == 1:
        return link or "none, one worker"
    keys, hidden = (
        f"{name} {size(forward)} forward and {size(backward)} backward per layer"
        for name, forward, backward in (
            ("KV", received.forward, received.backward),
            ("hidden states", received.tensor_forward, received.tensor_backward),
        )
    )
    each = "" if n == 1 or shard == "optimizer" else f" in each of {n} micro-batches"
    gathered = "gathered twice and" if shard == "full" else "gathered once a step,"
    weights = f"weights and gradients {size(received.weights)} per step ({gathered} reduced{each})"
    keys = f"{keys} and pass" if plan.dims.cp > 1 else "no KV"
    return "; ".join(part for part in (keys, hidden * (plan.dims.tp > 1), weights, link) if part)


def flop(number: float) -> str:
    """Format FLOP, for example as 1.34 TFLOP."""
    for unit, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}FLOP"
    return f"{number / 1e6:.3g} MFLOP"


# Llama 3.1 and 3.2 were trained on to 16 times their original length, whatever their factor.
_LLAMA3 = 16
_UNRELEASED = ("tiny", "tiny_moe")  # presets without released weights


def beyond_reach(config: Config) -> str:
    """Return a line if the sequence is longer than the rotary positions cover, else ""."""
    rope, model = config.model.rope, config.model.name
    trained = rope.original_max_position
    if config.model.is_foreign:
        most = f"max_position_embeddings={format_size(trained)} of the model"
        return f"seq={format_size(config.seq)} exceeds {most}" if config.seq > trained else ""
    if rope.scaling == "llama3":
        trained *= _LLAMA3
    if (folder := folder_of(config.train.init_from)) is not None:
        try:
            theirs, trained = read_config(folder)
        except ConfigError:
            return ""  # loading the weights reports the problem
        if rope.theta > theirs.rope.theta:
            return ""  # a larger theta stretches the positions, by an unknown factor
    reach = max_position(rope, rope_factor(rope, config.seq), trained)
    if config.seq <= reach or (folder is None and model in _UNRELEASED):
        return ""
    factor = f"model.rope.factor={math.ceil(config.seq / rope.original_max_position)}"
    remedy = factor if rope.scaling == "yarn" else f"model.rope.scaling=yarn {factor}"
    exceeds = f"seq={format_size(config.seq)} exceeds the {format_size(reach)} tokens that the"
    if folder is not None:
        return f"{exceeds} model's rotary positions cover. Give {remedy}."
    return (
        f"{exceeds} rotary positions of model={model} cover. Random weights learn the positions "
        f"of this length; released weights need {remedy}."
    )
