"""Record steps of another training loop, as `mtrain train` with `profile.every` records its own."""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mtrain_cli.attention.mask_rule import FullLayers
from mtrain_cli.config.keys import first_few
from mtrain_cli.config.mask_settings import LAYER_KINDS
from mtrain_cli.config.pattern_settings import SPARSE_KINDS
from mtrain_cli.config.problem import ConfigError
from mtrain_cli.config.sizes import with_count
from mtrain_cli.launch.environment import ParallelDims
from mtrain_cli.launch.failures import not_written
from mtrain_cli.launch.run_dir import RunDir, environment_facts
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.profiling.measurement import TRAINING, Bench, MeasurementCase, MeasurementPlan
from mtrain_cli.profiling.profile_writer import ProfileWriter
from mtrain_cli.profiling.record_collector import Estimated

if TYPE_CHECKING:
    from mtrain_cli.library.context_batch import ContextBatch, Kind
    from mtrain_cli.library.context_parallel import ContextParallel

    # The attention of each kind of layers of a batch, and the numbers of the layers.
    Kinds = dict[Kind, tuple[ContextAttention, set[int]]]


class Profile:
    """Records the steps of a ``with`` block. Make it with `ContextParallel.profile`."""

    def __init__(self, owner: ContextParallel, folder: Path, steps: frozenset[int] | None) -> None:
        if steps is not None and not (steps and all(type(n) is int and n > 0 for n in steps)):
            raise ConfigError(
                f"steps={sorted(steps, key=str)}: give the numbers of the steps to record, from 1; "
                "None records all"
            )
        self._owner, self._folder, self._steps = owner, folder, steps
        self._step, self._recording = 0, False
        self._batches: dict[ContextBatch, Kinds] = {}  # of this step, in the order of their use
        self._plain: list[float] = []
        self._recorded: list[float] = []
        self._writer: ProfileWriter | None = None

    def __enter__(self) -> Profile:
        owner, processes = self._owner, self._owner.processes
        if owner.profiling is not None:
            raise ConfigError("profile: another profile of the same object has not ended")
        device = next((kind.device.type for kind in owner.kinds), owner.environment.device)
        ranks = [rank for group in processes.groups for rank in group]
        self._bench = bench = Bench(
            owner.config,
            RunDir(self._folder),
            replace(
                owner.environment,
                device=device,
                dims=ParallelDims(dp=len(processes.groups), cp=len(processes.ranks)),
                rank=ranks.index(processes.rank),
            ),
            ranks,
        )
        if problem := bench.share(self._open_folder):
            raise ConfigError(problem)
        owner.profiling = self
        self._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._owner.profiling = None
        if kind is None and self._step == 1:
            self._end()  # the block is one step
        self._stop()
        if kind is not None:  # the other processes may not come here
            return
        if self._writer is not None:
            steady = self._plain[1:]  # The first step also makes communicators.
            for plain, recorded in zip(steady[::-1], self._recorded[::-1], strict=False):
                self._writer.timed(self._writer.cases[0], plain, recorded)
            self._written(self._writer.finish)
        if self._bench.host_group is not None:
            dist.destroy_process_group(self._bench.host_group)
        missed = [str(n) for n in sorted(self._steps or ()) if n > self._step - (self._step > 1)]
        if missed and self._bench.first:
            warnings.warn(
                f"profile: the loop ended before steps {first_few(missed)}, so {self._folder} "
                "lacks them",
                stacklevel=2,
            )

    def step(self) -> None:
        """End a training step. All processes of the job call this together."""
        if self._owner.profiling is not self:
            raise ConfigError("profile: step() was called outside of the `with` block")
        self._end()
        self._begin()

    def seen(
        self, batch: ContextBatch, kind: Kind, layer: int, attend: ContextAttention
    ) -> ContextAttention:
        """Note that a layer calls attention. Return the attention, recorded if the step is."""
        if not self._recording:
            return attend
        if kind.device.type != self._bench.device.type:
            raise ConfigError(
                f"profile: attention runs on {kind.device.type}, and this process sees a GPU; hide "
                "it (CUDA_VISIBLE_DEVICES=), or compute a batch before the profile"
            )
        kinds = self._batches.setdefault(batch, {})
        if kind not in kinds:
            attend.exchange.set_recorder(self._bench.collector.recorder)
            number = list(self._batches).index(batch)
            attend = replace(attend.with_kept_indices(), micro=number)
            kinds[kind] = attend, set()
        kinds[kind][1].add(layer)
        return attend

    def _open_folder(self) -> str:
        """Return what is wrong with the folder, or ""."""
        facts = environment_facts() | {"command": sys.argv}
        file = self._bench.run_dir.environment
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if any(self._folder.iterdir()):
                return f"profile: {self._folder} is not empty; give a new or an empty folder"
            file.write_text(json.dumps(facts, indent=2) + "\n")
        except OSError as error:
            return f"profile: {not_written(error, file)}"
        return ""

    def _begin(self) -> None:
        self._step += 1
        self._recording = self._steps is None or self._step in self._steps
        self._batches.clear()
        if self._recording:
            self._bench.collector.start()
            self._span: AbstractContextManager[None] = self._bench.collector.recorder.iteration()
            self._span.__enter__()
        self._began = time.perf_counter()

    def _end(self) -> None:
        if not self._recording:
            # After the last recorded step, the loop runs undisturbed.
            if self._step < max(self._steps or ()):
                self._plain.append(self._elapsed())
            return
        self._span.__exit__(None, None, None)
        self._recorded.append(self._elapsed())
        batches = dict(self._batches)
        self._stop()
        self._write(batches)

    def _elapsed(self) -> float:
        if self._bench.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - self._began

    def _stop(self) -> None:
        for kinds in self._batches.values():
            for attend, _ in kinds.values():
                attend.exchange.set_recorder(None)
        self._batches.clear()
        self._recording = False

    def _write(self, batches: Mapping[ContextBatch, Kinds]) -> None:
        case, layer_kinds = self._case(batches)
        if self._writer is None:
            plan = MeasurementPlan(TRAINING, [(case.label, case.config)], len(self._steps or ()))
            facts = case.facts(self._bench.environment) | {"layers": len(case.layers or ())}
            if len(layer_kinds) > 1:
                dense = case.choices.dense_kernel
                facts |= {"dense_kernel": dense[0].name} if dense else {}
                facts |= {"layer_kinds": layer_kinds}
            if self._bench.first:
                plan.save(self._bench.run_dir)  # the settings, for reports and predictions
            self._writer = ProfileWriter(plan, self._bench, [case], entries=[facts])
        writer = self._writer
        writer.cases = [case]  # steps may have other numbers of sequences
        of = case.config.model.num_layers
        computed = [_estimated(batch.layout, kinds, of) for batch, kinds in batches.items()]
        writer.recorded(case, self._step, computed)
        self._written(lambda: writer.sampled(self._step, len(self._recorded)))

    def _written(self, write: Callable[[], None]) -> None:
        """Write files. If that fails, the training goes on."""
        try:
            write()
        except OSError as error:
            warnings.warn(f"profile: {not_written(error, self._folder)}", stacklevel=4)

    def _case(
        self, batches: Mapping[ContextBatch, Kinds]
    ) -> tuple[MeasurementCase, dict[str, list[int]]]:
        """Return what the step computed, and its layers by kind."""
        kinds = [kind for of_batch in batches.values() for kind in of_batch]
        if not kinds:
            raise ConfigError(f"profile: step {self._step} called no attention of this object")
        engines = list(dict.fromkeys(kind.engine for kind in kinds))
        if len(engines) > 1:
            shapes = (engine.config.model for engine in engines)
            heads = "; ".join(f"{m.num_heads} of {m.head_dim}" for m in shapes)
            raise ConfigError(
                f"profile: the layers have different heads ({heads}); one shape can be recorded"
            )
        (engine,) = engines
        by_kind: dict[str, set[int]] = {}
        for of_batch in batches.values():
            for kind, (attend, numbers) in of_batch.items():
                by_kind.setdefault(_name(kind, attend), set()).update(numbers)
        layers = sorted(set().union(*by_kind.values()))
        sequences = max(len(batch.masks) for batch in batches)
        environment, choices = self._bench.environment, engine.choices
        # The engine's settings name a dense layer, for a kernel without an index.
        config = replace(engine.config, sparsity=self._owner.config.sparsity).changed(
            model={"name": self._owner.model, "num_layers": layers[-1] + 1},
            topology={"workers": environment.dims.workers, "context_parallel": environment.dims.cp},
            train={
                "micro_batch": sequences,
                "global_batch": sum(len(b.masks) for b in batches) * environment.dims.dp,
            },
        )
        label = f"{config.sparsity.pattern} {choices.layout.name} {choices.exchange.label}"
        case = MeasurementCase(0, label, config, choices, engine.exchange, layers=layers)
        return case, {name: sorted(numbers) for name, numbers in by_kind.items()}


def _name(kind: Kind, attend: ContextAttention) -> str:
    window, full = LAYER_KINDS
    if attend.index is not None:
        return SPARSE_KINDS[0]
    full = full if kind.mask is None else kind.mask
    return full if kind.window is None else f"{window} of {with_count(kind.window, 'token')}"


def _estimated(layout: Layout, kinds: Kinds, of: int) -> Estimated:
    """Return what a batch computed. Layers with an index come first, then those with windows."""

    def order(kind: Kind) -> tuple[bool, float]:
        return kinds[kind][0].index is None, math.inf if kind.window is None else kind.window

    (first, _), *others = (kinds[kind] for kind in sorted(kinds, key=order))
    if any(attend.index is not None for attend, _ in others):
        raise ConfigError(
            "profile: layers under different masks choose keys in the same step; one such mask can "
            "be recorded"
        )
    rest = tuple(FullLayers(a.plan.masks, frozenset(layers), of) for a, layers in others)
    indices = None if first.index is None else first.index.estimated
    return Estimated(layout, first.plan.masks, indices, rest)
