"""`mtrain profile imbalance --attention-only`: one layer's attention, forward and backward, on random queries, keys and values."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import torch

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.config.schema import Config
from mtrain_cli.launch.environment import Environment
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.launch.stop import StopFlag
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.profiling.leave import Leaving
from mtrain_cli.profiling.measure import Bench, Case, Plan, Progress, slowest
from mtrain_cli.profiling.peers import torch_context_parallel
from mtrain_cli.training.plan import compute_dtype

TARGET = "mtrain_cli.profiling.layer:run"
PEER = "torch context_parallel, cuDNN"
HEADER = f"{'case':48s} {'density':>7s} {'forward':>9s} {'backward':>9s} {'total ms':>9s} {'spread':>7s}"


def run(config: Config, run_dir: RunDir, environment: Environment, resume: bool) -> bool:  # noqa: ARG001 - a measurement starts afresh
    """Worker: measures every case that lies in the folder of the run. Returns whether it was stopped before the last."""
    bench = Bench(environment, timedelta(seconds=config.topology.timeout_s))
    plan: Plan = bench.everyone(Plan.load(run_dir) if environment.rank == 0 else None)[0]
    stop = StopFlag(run_dir, environment)
    with Progress(environment.rank == 0 and not plan.quiet, plan.samples * len(plan.cases)) as progress:
        cases = [bench.case(number, label, case) for number, (label, case) in enumerate(plan.cases)]
        leaving = Leaving(run_dir, plan, bench, cases)
        progress.say(HEADER, "bold")
        # One case after the other: at the longest sequences two do not fit at once.
        for case in cases:
            progress.now(case.label)
            times = _measure(case, bench, leaving, progress, stop)
            if times is None:
                break
            found = slowest(bench.everyone(times)) * 1e3
            leaving.case_done(
                case, forward_ms=float(np.median(found[:, 0])), backward_ms=float(np.median(found[:, 1])), spread=_spread(found)
            )
            if environment.rank == 0:
                progress.say(_line(case, leaving))
            bench.clean()
        for config in {case.config.seq: case.config for case in cases}.values() if plan.peer else ():
            peer = _measure_peer(config, bench, plan.samples)
            if peer is not None:
                leaving.peer(peer)
                progress.say(_row(PEER, config.seq, 1.0, peer))
    leaving.finish()
    if not plan.quiet:
        leaving.show()
    return leaving.samples < plan.samples


def _measure(case: Case, bench: Bench, leaving: Leaving, progress: Progress, stop: StopFlag) -> list[tuple[float, float]] | None:
    """-> seconds of both passes of every iteration that was not recorded, on this worker; None if it was stopped."""
    masks = [SequenceMask.causal(case.config.seq, case.choices.layout.padded_seq)] * case.config.train.micro_batch
    attend = ContextAttention.make(case.exchange, case.choices.kernel, masks, bench.device, case.choices.pattern)
    tensors = _inputs(case, bench)
    recorder = bench.collector.recorder
    times = []

    def once(recorded: bool) -> tuple[tuple[float, float], ContextAttention]:
        """-> seconds of both passes on this worker, which all begin together."""
        batch = attend.again().keeping()
        q, k, v, dout = tensors
        case.exchange.record(recorder if recorded else None)
        bench.together()
        if recorded:
            bench.collector.start()
        with recorder.iteration():
            began = recorder.now()
            out = batch(q, k, v, 0)
            between = recorder.now()
            torch.autograd.grad(out, (q, k, v), dout)
            ended = recorder.now()
        case.exchange.record(None)
        return (recorder.seconds(began, between), recorder.seconds(between, ended)), batch

    once(False)
    for sample in range(leaving.plan.samples):
        if any(bench.everyone(stop.requested())):
            return None
        seconds: dict[bool, tuple[float, float]] = {}
        for recorded in (False, True) if sample % 2 == 0 else (True, False):
            seconds[recorded], batch = once(recorded)
            if recorded:
                estimated = batch.index.estimated if batch.index is not None else None
                leaving.recorded(case, sample + 1, [(masks, estimated)])
        times.append(seconds[False])
        leaving.timed(case, sum(seconds[False]), sum(seconds[True]))
        leaving.sampled_case()
        progress.done()
    return times


def _inputs(case: Case, bench: Bench) -> list[torch.Tensor]:
    model, tokens = case.config.model, case.choices.layout.tokens_per_worker
    generator = torch.Generator(bench.device).manual_seed(case.config.seed + bench.environment.rank)
    heads = (model.num_heads, model.num_kv_heads, model.num_kv_heads, model.num_heads)
    shapes = [(case.config.train.micro_batch, tokens, h, model.head_dim) for h in heads]
    made = [torch.randn(shape, device=bench.device, dtype=case.choices.dtype, generator=generator) for shape in shapes]
    for t in made[:3]:
        t.requires_grad_()
    return made


def _measure_peer(config: Config, bench: Bench, repeats: int) -> dict[str, Any] | None:
    """What PyTorch itself offers, on the same shapes: dense, bfloat16, on GPUs, one context group of all workers; None elsewhere."""
    if bench.device.type != "cuda":
        return None
    model, world = config.model, bench.environment.cp
    if world != bench.environment.workers or compute_dtype(config, "cuda") != torch.bfloat16:
        return None
    call = torch_context_parallel(world, model.num_heads // model.num_kv_heads)
    tokens = config.seq // world
    generator = torch.Generator(bench.device).manual_seed(bench.environment.rank)
    heads = (model.num_heads, model.num_kv_heads, model.num_kv_heads, model.num_heads)
    shapes = [(config.train.micro_batch, h, tokens, model.head_dim) for h in heads]
    q, k, v, dout = (torch.randn(s, device=bench.device, dtype=torch.bfloat16, generator=generator) for s in shapes)
    for t in (q, k, v):
        t.requires_grad_()
    clock = bench.collector.recorder
    times = []
    for i in range(repeats + 1):
        bench.together()
        a = clock.now()
        out = call(q, k, v)
        b = clock.now()
        torch.autograd.grad(out, (q, k, v), dout)
        c = clock.now()
        if i:
            times.append((clock.seconds(a, b), clock.seconds(b, c)))
    found = slowest(bench.everyone(times)) * 1e3
    bench.clean()
    forward, backward = (float(ms) for ms in np.median(found, 0))
    return {"label": PEER, "seq": config.seq, "workers": world, "forward_ms": forward, "backward_ms": backward, "spread": _spread(found)}


def _spread(found: np.ndarray) -> float:
    """(max - min) / median of the sum of both passes."""
    both = found.sum(1)
    return float((both.max() - both.min()) / np.median(both))


def _line(case: Case, leaving: Leaving) -> str:
    facts = leaving.facts(case)
    return _row(case.label, case.config.seq, facts["density"], facts)


def _row(label: str, seq: int, density: float, times: dict[str, Any]) -> str:
    """One case under `HEADER`."""
    name = f"{seq // 1024}K {label}" if seq % 1024 == 0 else f"{seq} {label}"
    forward, backward = times["forward_ms"], times["backward_ms"]
    return f"{name:48s} {density:7.2%} {forward:9.2f} {backward:9.2f} {forward + backward:9.2f} {times['spread']:7.1%}"
