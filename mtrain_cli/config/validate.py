"""Check a configuration for conflicts between its keys. This needs no GPU and no process group.

Each check yields lines with fields such as ``{seq}``, which `keys.conflict` fills.
`launch/environment.py` checks whether the sizes fit the GPUs, and the kernel registry whether a
kernel supports what the configuration asks for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtrain_cli.config import keys, parallel_checks
from mtrain_cli.config.data_kinds import KINDS
from mtrain_cli.config.keys import conflict
from mtrain_cli.config.mask_settings import mask_problems
from mtrain_cli.config.option import MOST_TOKENS, Variant
from mtrain_cli.config.parallel_checks import NEED_WHOLE_MODEL, unsupported
from mtrain_cli.config.pattern_settings import PATTERNS, PatternSettings
from mtrain_cli.config.plugins import ADAPTERS, TRACKERS, callback_names, installed
from mtrain_cli.config.problem import Problem
from mtrain_cli.config.schema import (
    CHECKPOINTS,
    EVAL_TASKS,
    FP8_ALIGNMENT,
    PERPLEXITY,
    Config,
    ConfigError,
    DataConfig,
)
from mtrain_cli.config.sizes import divisors, format_size
from mtrain_cli.config.suggest import adapter_hint, no_such

BYTE_VOCABULARY = 264  # 256 bytes, begin, end and padding, rounded up to a multiple of 8
# Settings that a model of transformers does not support, and the value that turns each off.
_FOREIGN = NEED_WHOLE_MODEL | {"train.memory": "manual", "train.keep_mlp": False}
_FOREIGN |= {"train.fp8": "none"}
_FOREIGN |= dict.fromkeys(("topology.tensor_parallel", "topology.pipeline_parallel"), 1)
# If the user sets one of these keys, the resumed run gets a new schedule.
_SCHEDULE_KEYS = ("optim.schedule", "optim.decay_steps", "optim.schedule_steps", "optim.rewarm")


def problems(config: Config) -> list[Problem]:
    """Return a line ``key=value: reason`` for each conflict in ``config``."""
    ranges, is_vast = [], False
    for name, value in keys.values(config).items():
        key = keys.all_keys()[name]
        is_vast |= key.range is not None and key.range.is_beyond(value)
        if (wrong := key.out_of_range(value)) is not None:
            ranges.append(conflict(config, f"{{{name}}}: {{wrong}}", wrong=wrong))
    if is_vast:
        return ranges  # the checks below contain loops whose length is one of these numbers
    return [*ranges, *(conflict(config, line) for check in _CHECKS for line in check(config))]


def _model(config: Config) -> Iterator[str]:
    model, rope = config.model, config.model.rope
    heads, kv_heads = model.num_heads, model.num_kv_heads
    if heads >= 1 and kv_heads >= 1 and heads % kv_heads:
        allowed = f"allowed: {divisors(heads)}"
        yield f"{{model.num_kv_heads}}: does not divide {{model.num_heads}}; {allowed}"
    if model.head_dim % 2:
        yield "{model.head_dim}: must be even, since the rotary embedding rotates pairs"
    if rope.scaling == "yarn" and rope.beta_fast <= rope.beta_slow:
        yield "{model.rope.beta_fast}: must be above {model.rope.beta_slow}"
    if rope.scaling == "llama3":
        if rope.factor == "auto":
            yield "{model.rope.factor}: {model.rope.scaling} needs a number such as 8"
        if rope.high_freq_factor <= rope.low_freq_factor:
            yield "{model.rope.high_freq_factor}: must be above {model.rope.low_freq_factor}"


def variant_keys(leaves: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a line for each null key that the pattern or mask needs, and each set key of others.

    leaves: value of every key, by dotted name.
    """
    for section, variants in keys.VARIANTS.items():
        selector = f"{section}.{variants.selector}"
        chosen = leaves[selector]
        own = {f"{section}.{key}" for key in variants.own_keys(chosen)}
        names = [name for name in keys.all_keys() if name.startswith(f"{section}.")]
        absent = [name for name in names if name in own and leaves[name] is None]
        foreign = [n for n in names if n not in (*own, selector) and leaves[n] is not None]
        if len(absent) > 1 or {"sparsity.block", "sparsity.dense_steps"} <= {*foreign}:
            # The user set the selector without its group. One line for this cause is enough.
            line = f"{selector}={chosen}: give {section}={chosen}, which sets all its keys"
            yield Problem(line, selector, *absent)
            continue
        for name in absent:
            needs = f"{selector}={chosen} needs a value; {section}={chosen} gives a default"
            yield Problem(f"{name}=null: {needs}", name, selector)
        for name in foreign:
            key = name.removeprefix(f"{section}.")
            users = [f"{section}={k}" for k in variants.kinds if key in variants.own_keys(k)]
            why = f"is not a key of {selector}={chosen}; allowed with {', '.join(users)}"
            yield Problem(f"{name}={keys.show(leaves[name])}: {why}", name, selector)


def _sparsity(config: Config) -> Iterator[str]:
    settings, mask, layers = config.sparsity, config.mask, config.model.num_layers
    if _is_complete(settings):
        for line in settings.problems(config.seq):
            yield Problem(line, "sparsity.", "seq")
        yield from settings.conflicts(config.model.head_dim, config.topology.tensor_parallel)
    if _is_complete(mask):
        for line in mask_problems(mask, config.seq, settings.pattern):
            yield Problem(line, "mask.", "seq", "sparsity.pattern")
        if mask.is_mixed and layers >= 1:
            if mask.full_first and all(map(mask.is_full, range(layers))):
                yield "{mask.full_first}: leaves no layer of {model.num_layers} with the window"
            if mask.full_every > layers:
                yield "{mask.full_every}: must be at most {model.num_layers}"
    if layers >= 1:
        yield from _dense_layers(settings, layers)


def _dense_layers(settings: PatternSettings, layers: int) -> Iterator[str]:
    dense = settings.dense_layers
    numbers = Counter(dense) if isinstance(dense, tuple) else {}
    absent = [n for n in numbers if not 0 <= n < layers]
    twice = [n for n, times in numbers.items() if times > 1]
    if absent:
        yield (
            f"{{sparsity.dense_layers}}: {{model.num_layers}} has no layer {absent[0]}; allowed: 0 "
            f"to {layers - 1}"
        )
    elif twice:
        yield f"{{sparsity.dense_layers}}: has layer {twice[0]} twice; give each layer once"
    elif isinstance(dense, str) and not 1 <= settings.dense_rule[1] <= layers:
        yield "{sparsity.dense_layers}: n must be at least 1 and at most {model.num_layers}"
    elif len(settings.dense_of(layers)) == layers:
        less = "give fewer, or sparsity=dense"
        yield f"{{sparsity.dense_layers}}: leaves no sparse layer of {{model.num_layers}}; {less}"


def _is_complete(settings: Variant) -> bool:
    """Return whether all keys of a kind have a value. `variant_keys` reports null keys."""
    return None not in (getattr(settings, name) for name in settings.own_keys())


def require_manifest(data: DataConfig) -> None:
    """Check that data.path is a folder with the file that its kind demands, or an array of ids.

    A plan needs no data. Opening the dataset checks the content of the file.

    Raises:
        ConfigError: the file is missing, or data.path is a file of another kind.
    """
    name = KINDS[data.kind].manifest
    folder = Path(data.path or "").expanduser()
    if not name or data.path is None or data.mix is not None:
        return
    is_array = data.kind == "tokens" and folder.suffix in (".npy", ".bin")
    if folder.is_file() and not is_array:
        wrong = "is another kind of file"
    elif folder.is_dir() and not (folder / name).is_file():
        wrong = f"no {name} in it"
        if inside := sorted(path.parent.name for path in folder.glob(f"*/{name}")):
            wrong += f", but in its folders {', '.join(inside[:8])} (name them in data.mix)"
    else:
        return
    raise ConfigError(f"data.path={data.path}: {wrong}; give {KINDS[data.kind].expected}")


def _data(config: Config) -> Iterator[str]:
    data, kind = config.data, KINDS.get(config.data.kind)
    if kind is None:
        yield "{data.kind}: its package cannot be loaded; a line above says why"
        return
    expected = kind.expected
    if data.kind == "stdlib":
        for name in ("path", "mix"):
            if getattr(data, name) is not None:
                yield f"{{data.{name}}}: data=stdlib has no {name}; add data=text, tokens or mds"
    elif data.mix is not None:
        yield from _mix(config, expected)
    elif data.path is None:
        line = f"data.path is not set: data={data.kind} needs it, or data.mix; give {expected}"
        yield Problem(line, "data.path", "data.mix")
    elif not Path(data.path).expanduser().exists():
        yield f"{{data.path}}: no such file or folder; give {expected}"
    yield from kind.problems(config)
    if not kind.tokenizes:
        return  # already tokenized; the vocabulary is checked when the data are opened
    if data.tokenizer == "bytes":
        if 2 <= config.model.vocab_size < BYTE_VOCABULARY:
            yield f"{{model.vocab_size}}: {{data.tokenizer}} needs at least {BYTE_VOCABULARY}"
    elif not (tokenizer := Path(data.tokenizer).expanduser()).is_file():
        wrong = "is a folder" if tokenizer.is_dir() else "no such file"
        yield f"{{data.tokenizer}}: {wrong}; give a Hugging Face tokenizer.json, or bytes"


def _mix(config: Config, expected: str) -> Iterator[str]:
    """Yield what is wrong with ``data.mix``. Opening the data checks the content of its file."""
    mix, path = config.data.mix, config.data.path
    example = "give weights such as {code: 0.3, book: 0.7}"
    if not isinstance(mix, dict):
        if not Path(str(mix)).expanduser().is_file():
            yield f"{{data.mix}}: no such file; {example}, or a YAML file of them"
        return
    if not mix:
        yield f"{{data.mix}}: names no corpus; {example}, or null"
    for name, weight in mix.items():
        if weight <= 0:
            yield conflict(config, "{data.mix}: the weight of {n} must be above 0", n=name)
    missing = [name for name in mix if not Path(path or ".", name).expanduser().exists()]
    if missing:
        place = f"in data.path={path}" if path else "here (add data.path=FOLDER?)"
        line = f"data.mix: {keys.first_few(missing)}: no such folder or file {place}"
        yield Problem(f"{line}; each name must be {expected}", "data.mix", "data.path")


def _columns(config: Config) -> Iterator[str]:
    """Yield the conflicts of masks and positions that come from the data."""
    data = config.data
    for name in ("mask_key", "positions_key"):
        if getattr(data, name) is None:
            continue
        if data.kind != "tokens":
            option = f"--{name.replace('_', '-')}"
            wrote = f"`mtrain data prepare --tokens-key {option}` wrote"
            yield f"{{data.{name}}}: data={data.kind} has no such column; give tokens that {wrote}"
        if not data.document_mask:
            yield f"{{data.document_mask}}: {{data.{name}}} needs data.document_mask=true"
    if data.mask_key is None:
        return
    if config.mask.kind != "causal":
        yield "{mask.kind}: {data.mask_key} takes the mask from the data; give mask=causal"
    if config.sparsity.pattern != "dense":
        yield (
            "{sparsity.pattern}: needs a mask in which each query sees one contiguous range of "
            "keys that ends at the query, which {data.mask_key} does not promise; "
            "give sparsity=dense"
        )


def _optim(config: Config) -> Iterator[str]:
    optim = config.optim
    if optim.skip_spikes and not config.run.spike_sigma:
        yield "{optim.skip_spikes}: needs {run.spike_sigma!s} of at least 3, such as 8"
    if not all(0 <= beta < 1 for beta in optim.betas):
        yield "{optim.betas}: each must be at least 0 and below 1"
    if optim.offload_gradients and not optim.offload:
        yield "{optim.offload_gradients}: needs {optim.offload!s}=true"
    if config.train.epochs is None:  # they give the steps later
        yield from _schedule(config)


def _schedule(config: Config) -> Iterator[str]:
    optim = config.optim
    if optim.decay_steps != "auto" and optim.schedule == "constant":
        yield "{optim.decay_steps}: {optim.schedule} never decays; give optim.decay_steps=auto"
    begin = 0 if optim.rewarm is True else int(optim.rewarm)
    span = config.train.steps - begin
    if isinstance(optim.schedule_steps, int):
        span = optim.schedule_steps
        if optim.schedule != "constant" and span <= optim.warmup_steps:
            yield "{optim.schedule_steps}: must be above {optim.warmup_steps}, to leave a decay"
            return
    # The last warm-up step is the first at the peak.
    most = span - 1 - optim.warmup_steps
    if optim.schedule == "wsd" and isinstance(optim.decay_steps, int) and optim.decay_steps > most:
        advice = f"allowed: 1 to {most}, which leaves at least 1 at the peak rate"
        yield (
            f"{{optim.decay_steps}}: the schedule has {span} steps with {{optim.warmup_steps}}; "
            + (advice if most >= 1 else "give fewer optim.warmup_steps")
        )


def keep_schedule(
    saved: Config, config: Config, words: Sequence[str], step: int, *, again: bool = False
) -> Config:
    """Return ``config`` with the schedule with which the run continues.

    If ``words`` sets no key of `_SCHEDULE_KEYS`, the schedule keeps its length, even if
    ``train.steps`` changes, and the learning rate is constant after its end. If the run stopped
    during warm-up, however, the schedule ends at the new ``train.steps``.

    Args:
        saved: configuration of the run so far; ``config`` has the overrides ``words``, too.
        step: step of the checkpoint.
        again: whether a restarted job repeats this resume, and so has carried out
            ``optim.rewarm=true`` before.

    Raises:
        ConfigError: the words or the settings of the schedule contradict each other.
    """
    typed = {word.partition("=")[0] for word in words}
    given = [key for key in _SCHEDULE_KEYS if key in typed or "optim" in typed]
    begin, steps = int(saved.optim.rewarm), saved.optim.schedule_steps
    is_other = config.train.steps != saved.train.steps
    if "optim.rewarm" in given and not isinstance(config.optim.rewarm, bool):
        allowed = "give true to restart the schedule at the checkpoint, or false to keep it"
        raise ConfigError(f"optim.rewarm={config.optim.rewarm}: {allowed}")
    if config.optim.rewarm is True:
        if again and saved.optim.rewarm is not False:
            begin = int(saved.optim.rewarm)
        elif step >= config.train.steps:
            last = f"the run is at its last step, {step}; raise train.steps"
            raise ConfigError(f"optim.rewarm=true: {last}")
        else:
            begin = step
    elif "optim.rewarm" in given:
        begin = 0
    if given:
        steps = config.optim.schedule_steps if "optim.schedule_steps" in typed else "auto"
    elif step - begin <= saved.optim.warmup_steps:
        pass  # the run stopped before any decay, so the schedule spans the new train.steps
    elif steps == "auto" and is_other and config.optim.schedule != "constant":
        steps = saved.train.steps - begin
    resumed = config.changed(optim={"rewarm": begin or False, "schedule_steps": steps})
    if lines := [conflict(resumed, line) for line in _schedule(resumed)]:
        raise ConfigError(*lines)
    return resumed


def _fp8(config: Config) -> Iterator[str]:
    model, train, degree = config.model, config.train, config.topology.tensor_parallel
    if train.dtype == "float32" or (train.dtype == "auto" and config.topology.device == "cpu"):
        yield "{train.fp8}: needs bfloat16; give train.dtype=bfloat16"
    if model.moe.experts:
        yield "{train.fp8}: does not support experts; give train.fp8=none"
    if model.hidden_size % FP8_ALIGNMENT:
        yield f"{{model.hidden_size}}: must be a multiple of {FP8_ALIGNMENT} for {{train.fp8}}"
    # `_degrees` refuses a tensor group that cannot cut the MLP.
    if model.intermediate_size % degree == 0 != model.intermediate_size // degree % FP8_ALIGNMENT:
        multiple = f"must be a multiple of {FP8_ALIGNMENT * degree} for {{train.fp8}}"
        yield f"{{model.intermediate_size}}: {multiple}"
    width = max(1, model.num_kv_heads // degree) * model.head_dim
    if train.fp8 == "all" and width % FP8_ALIGNMENT:
        yield (
            f"{{model.head_dim}}: {{train.fp8}} needs keys whose width is a multiple of "
            f"{FP8_ALIGNMENT} on each worker, not {width}"
        )


def _train(config: Config) -> Iterator[str]:
    train, layers = config.train, config.model.num_layers
    if train.kernel == "flash4" and config.topology.device == "cpu":
        yield "{train.kernel}: runs on GPUs only; allowed on a CPU: auto, reference, sdpa"
    if train.kernel == "flash4" and train.dtype == "float32":
        yield "{train.kernel}: needs bfloat16; allowed with float32: auto, reference, sdpa"
    if train.fp8 != "none":
        yield from _fp8(config)
    if train.shard == "optimizer" and train.reduce_dtype == "bfloat16":
        yield "{train.reduce_dtype}: {train.shard} sums micro-batches, too, so give float32"
    every = train.checkpoint_every
    if train.keep_every > 0 == every:
        yield "{train.keep_every}: needs {train.checkpoint_every!s} of at least 1, such as 50"
    elif train.keep_every > 0 and train.keep_every % every:
        yield "{train.keep_every}: must be a multiple of {train.checkpoint_every}"
    if train.rollback.limit > 0 == every:
        yield "{train.rollback.limit}: needs {train.checkpoint_every!s} of at least 1, such as 50"
    if train.skip_nonfinite > 0 and config.sparsity.has_learned_state:
        yield "{train.skip_nonfinite}: {sparsity.score} learns before the check; give 0"
    too_many = f"exceeds {{model.num_layers}}; allowed: true, false or 0 to {layers}"
    if train.keep_mlp > layers >= 1:
        yield f"{{train.keep_mlp}}: {too_many}"
    if train.offload_activations > layers >= 1:
        yield f"{{train.offload_activations}}: {too_many}"
    elif train.offload_activations and train.activation_checkpoint == "none":
        others = ", ".join(kind for kind in CHECKPOINTS if kind != "none")
        keeps = f"{{train.activation_checkpoint}} keeps too much to move; allowed: {others}"
        yield f"{{train.offload_activations}}: {keeps}"
    if train.init_from is not None:
        folder = Path(train.init_from).expanduser()
        if not folder.is_dir():
            wrong = "is a file" if folder.exists() else "no such folder"
            yield f"{{train.init_from}}: {wrong}; give a Hugging Face folder"
        elif not (folder / "config.json").is_file():
            hint = adapter_hint(folder)
            yield f"{{train.init_from}}: has no config.json; give a Hugging Face folder{hint}"
    for name in dict.fromkeys(train.callbacks):
        if name not in (names := callback_names()):
            why = no_such("callback", name, names) if names else "no installed package has one"
            yield conflict(config, "{train.callbacks}: {name}: {why}", name=name, why=why)


def _eval_tasks(config: Config) -> Iterator[str]:
    tasks = config.train.eval_tasks
    for task in tasks:
        if task not in EVAL_TASKS:
            why = no_such("task", task, EVAL_TASKS)
            yield conflict(config, "{train.eval_tasks}: {task}: {why}", task=task, why=why)
    if not tasks:
        return
    lengths = config.eval.lengths(config.seq)
    if not lengths or not all(2 <= length <= MOST_TOKENS for length in lengths):
        yield f"{{eval.length}}: must be from 2 to {format_size(MOST_TOKENS)} tokens"
    if PERPLEXITY in tasks and not config.data.eval_sequences:
        yield f"{{train.eval_tasks}}: {PERPLEXITY} needs {{data.eval_sequences!s}}, such as 4"
    if PATTERNS[config.sparsity.pattern].synthetic:
        yield "{train.eval_tasks}: {sparsity.pattern} chooses keys without regard to the text"


def _run(config: Config) -> Iterator[str]:
    if config.run.leave_out_stragglers and not config.run.straggler:
        yield "{run.leave_out_stragglers}: needs {run.straggler!s} above 0, such as 0.2"
    train, run = config.train, config.run
    if train.eval_every > 0 and config.data.eval_sequences == 0 and not train.eval_tasks:
        yield (
            "{train.eval_every}: has nothing to evaluate; set {data.eval_sequences!s} (such as 4) "
            "or {train.eval_tasks!s} (such as [niah])"
        )
    trackers = [entry.name for entry in installed(TRACKERS)] if run.loggers else []
    for name in run.loggers:
        if name not in trackers:
            why = no_such("tracker", name, trackers)
            yield conflict(config, "{run.loggers}: {name}: {why}", name=name, why=why)
    if not run.project.strip():
        yield "{run.project}: give a name"
    if run.remote is not None and "://" not in run.remote:
        yield "{run.remote}: give a URL, such as s3://bucket/runs, or null"
    if not re.fullmatch(r"[\w.+=-]+", run.name) or run.name in (".", ".."):
        yield "{run.name}: may only contain letters, digits and . _ - + =, since it names a folder"
    if run.dir == "" or run.dir != run.dir.strip():
        yield "{run.dir}: give a folder without spaces around it, or auto for runs/<name>"


def _foreign(config: Config) -> Iterator[str]:
    """Yield the settings that a model of transformers does not support."""
    yield from unsupported(config, "model.family", _FOREIGN if config.model.is_foreign else {})
    if config.train.lora.rank and not config.model.is_foreign:
        yield "{train.lora.rank}: needs model.family=transformers, whose layers peft can adapt"
    if config.train.lora.rank and not installed(ADAPTERS):
        yield "{train.lora.rank}: no installed package has adapters; install mtrain again"


_CHECKS = (
    _model,
    _foreign,
    parallel_checks.problems,
    _sparsity,
    _data,
    _columns,
    _optim,
    _train,
    _eval_tasks,
    _run,
)
