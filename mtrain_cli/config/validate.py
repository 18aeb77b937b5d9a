"""Check a configuration for conflicts between its keys. This needs no GPU and no process group.

Each section has a module with its own checks. They yield lines with fields such as ``{seq}``, which
`keys.conflict` fills. `launch/environment.py` checks whether the sizes fit the GPUs. The kernel
registry checks whether a kernel supports what the configuration asks for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mtrain_cli.config import (
    data_checks,
    eval_tasks,
    expert_checks,
    keys,
    optim_checks,
    pipeline_parallel,
    sparsity_checks,
    tensor_parallel,
    topology_checks,
)
from mtrain_cli.config.foreign_words import hub_hint
from mtrain_cli.config.keys import conflict
from mtrain_cli.config.plugins import callback_names
from mtrain_cli.config.problem import Problem
from mtrain_cli.config.schema import CHECKPOINTS, Config
from mtrain_cli.config.sizes import divisors
from mtrain_cli.config.suggest import adapter_hint, no_such


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
        yield (
            "{model.head_dim}: must be even, since the rotary embedding rotates pairs of dimensions"
        )
    if rope.scaling == "yarn" and rope.beta_fast <= rope.beta_slow:
        yield "{model.rope.beta_fast}: must be above {model.rope.beta_slow}"
    if rope.scaling == "llama3":
        if rope.factor == "auto":
            yield (
                "{model.rope.factor}: is derived for scaling=yarn only; {model.rope.scaling} needs "
                "a number such as 8"
            )
        if rope.high_freq_factor <= rope.low_freq_factor:
            yield "{model.rope.high_freq_factor}: must be above {model.rope.low_freq_factor}"


def _train(config: Config) -> Iterator[str]:
    train, layers = config.train, config.model.num_layers
    if train.kernel == "flash4":
        if config.topology.device == "cpu":
            yield (
                "{train.kernel}: runs on GPUs only, not with {topology.device}; allowed on a CPU: "
                "auto, reference, sdpa"
            )
        if train.dtype == "float32":
            yield (
                "{train.kernel}: computes in bfloat16, not {train.dtype}; allowed with float32: "
                "auto, reference, sdpa"
            )
    if train.shard == "optimizer" and train.reduce_dtype == "bfloat16":
        yield (
            "{train.reduce_dtype}: {train.shard} would sum the gradients of micro-batches in "
            "bfloat16; give float32, which is sent only once per step"
        )
    too_many = f"exceeds {{model.num_layers}}; allowed: true, false or 0 to {layers}"
    if train.keep_mlp > layers >= 1:
        yield f"{{train.keep_mlp}}: {too_many}"
    if train.offload_activations > layers >= 1:
        yield f"{{train.offload_activations}}: {too_many}"
    elif train.offload_activations and train.activation_checkpoint == "none":
        others = ", ".join(kind for kind in CHECKPOINTS if kind != "none")
        yield (
            "{train.offload_activations}: {train.activation_checkpoint} keeps too much to move; "
            f"allowed values of that key: {others}"
        )
    if train.init_from is None:
        return
    folder = Path(train.init_from).expanduser()
    if not folder.is_dir():
        yield conflict(
            config,
            "{train.init_from}: {reason}; give a Hugging Face folder with config.json and "
            ".safetensors files{hint}",
            reason="is a file" if folder.exists() else "no such folder",
            hint=hub_hint(train.init_from),
        )
    elif not (folder / "config.json").is_file():
        hint = adapter_hint(folder)
        yield f"{{train.init_from}}: has no config.json; give a Hugging Face folder{hint}"


def _callbacks(config: Config) -> Iterator[Problem]:
    for name in dict.fromkeys(config.train.callbacks):
        if name not in (names := callback_names()):
            reason = "no such callback: no installed package has one"
            if names:
                reason = no_such("callback", name, names)
            text = "{train.callbacks}: {name}: {reason}"
            yield conflict(config, text, name=name, reason=reason)


def _run(config: Config) -> Iterator[str]:
    train, run = config.train, config.run
    if train.eval_every > 0 and config.data.eval_sequences == 0 and not train.eval_tasks:
        yield (
            "{train.eval_every}: no held-out sequences to evaluate on; add "
            "{data.eval_sequences!s}=4, for example, or {train.eval_tasks!s}=[niah]"
        )
    if not re.fullmatch(r"[\w.+=-]+", run.name) or run.name in (".", ".."):
        yield (
            "{run.name}: may only contain letters, digits and . _ - + =, since it names a folder; "
            "run.dir takes any path"
        )
    if run.dir != run.dir.strip():
        lost = "begins or ends with a space, which is easily lost; leave the space out"
        yield Problem(f"run.dir='{run.dir}': {lost}", "run.dir", value=run.dir)
    if run.dir == "":
        yield "{run.dir}: give a folder, or auto for runs/<name>"


_CHECKS = (
    _model,
    expert_checks.problems,
    topology_checks.problems,
    tensor_parallel.problems,
    pipeline_parallel.problems,
    sparsity_checks.problems,
    data_checks.problems,
    optim_checks.problems,
    _train,
    eval_tasks.problems,
    _callbacks,
    _run,
)
