"""What mtrain promises: one row per promise, with a command that shows it and what must be seen.

A command is a line of bash, run in an empty folder by `test_mission.py` with the helpers of
`prelude.sh`: `$one` (a short exact training), `equal A B` (two runs have the same losses),
`degrees` (the counted imbalance of the newest profile) and `checks FILE` (tests of the checkout).

What must be seen, in the output of the command, is a regular expression or a function that returns
whether the output shows it. A row may get a shorter command, never a weaker one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

Seen = str | Callable[[str], bool]


@dataclass(frozen=True)
class Row:
    """A promise.

    exit: the exit code of the command.
    fast: whether the row runs by default; the others have the marker `slow`.
    not_yet: why the product does not keep the promise; "" if it does.
    elsewhere: the part of the promise that needs GPUs, containers or several hosts.
    """

    id: str
    promise: str
    command: str
    seen: tuple[Seen, ...]
    exit: int = 0
    fast: bool = False
    not_yet: str = ""
    elsewhere: str = ""


def numbers(pattern: str, text: str) -> list[tuple[float, ...]]:
    """Return the groups of each match as numbers."""
    found = re.finditer(pattern, text, re.MULTILINE)
    return [tuple(float(group.replace(",", "")) for group in match.groups()) for match in found]


def every(pattern: str, holds: Callable[..., bool], count: int = 1) -> Callable[[str], bool]:
    """Return whether the output has `count` matches or more, whose numbers all satisfy `holds`."""

    def check(text: str) -> bool:
        found = numbers(pattern, text)
        return len(found) >= count and all(holds(*groups) for groups in found)

    check.__name__ = f"every {pattern!r}"
    return check


def ordered(better: str, worse: str) -> Callable[[str], bool]:
    """Return whether every number that `better` finds is below every one that `worse` finds."""

    def check(text: str) -> bool:
        low, high = ([n for (n,) in numbers(each, text)] for each in (better, worse))
        return bool(low and high) and max(low) < min(high)

    check.__name__ = f"{better!r} below {worse!r}"
    return check


def lines(pattern: str, count: int) -> Callable[[str], bool]:
    """Return whether the pattern is seen `count` times or more."""

    def check(text: str) -> bool:
        return len(re.findall(pattern, text, re.MULTILINE)) >= count

    check.__name__ = f"{count} of {pattern!r}"
    return check


def equal_runs(count: int) -> Callable[[str], bool]:
    """Return whether `equal` found `count` pairs of runs equal; its exit code says so as well."""
    return lines(r"^[1-9]\d* steps, largest difference of loss \S+$", count)


PASSED = r"^=+ [1-9]\d* passed"
PAIR = "mtrain train $one topology.workers=1 run.name=a >log; mtrain train $one {} run.name=b >log"

CARD = (
    Row(
        "C1a",
        "`mtrain train` without options trains on real text with two CPU workers; the loss falls.",
        "mtrain train run.name=c1 seq=512 train.steps=20; mtrain status c1",
        (
            r"^workers +2 CPU processes",
            every(r"^loss +([\d.]+) at step 1, ([\d.]+) at step 20 ", lambda a, b: b < 0.75 * a),
            r"^run +runs/c1\b",
            r"^step +20 of 20",
            r"^checkpoint +step 20",
        ),
        fast=True,
    ),
    Row(
        "C1b",
        "The card's first command plans Qwen2.5-3B at 512K without a GPU.",
        "mtrain train model=qwen3b seq=512k topology=h200_1x8 --dry-run",
        (
            *(r"PFLOP", r"^layout +striped", r"^exchange ", r"^kernel +flash4"),
            r"^total +[\d.]+ GiB  fits: \d+% of ",
        ),
        fast=True,
    ),
    Row(
        "C1c",
        "A machine that is too small gets one line with a way out.",
        "mtrain train model=qwen3b seq=512k",
        (r"\Amtrain: [^\n]*--dry-run[^\n]*\n\Z",),
        exit=2,
        fast=True,
    ),
    Row(
        "C2a",
        "The card's second command shows imbalance of workers and of steps, sparse and dense.",
        "mtrain profile imbalance --layout zigzag; degrees",
        (
            r"worker +step +computation[^\n]*\n +imbalance +imbalance",
            lines(r"steps 0-1 across", 2),
            r"^dense zigzag ring: work 1\.00 of workers, 1\.00 of steps, 2 steps$",
            r"^vertical_slash zigzag ring: work 1\.\d\d of workers, 1\.[2-9]\d of steps, 2 steps$",
        ),
    ),
    Row(
        "C2b",
        "The card's name `profile-balance` is a command, the same as `profile imbalance`.",
        "mtrain profile-balance --layout zigzag seq=1k --steps 1; degrees",
        (
            r"worker +step +computation[^\n]*\n +imbalance +imbalance",
            r"^dense zigzag ring: .* 2 steps$",
            r"^vertical_slash zigzag ring: work 1\.\d\d of workers, 1\.[2-9]\d of steps, 2 steps$",
        ),
    ),
    Row(
        "C2c",
        "A sparse ring with two layouts shows which worker waits in which step, and why.",
        "mtrain profile imbalance --layout zigzag,striped --exchange ring --steps 1 seq=1k "
        "topology.workers=4 sparsity=vertical_slash sparsity.block=16 run.name=c2; degrees",
        (
            lines(r"^vertical_slash (zigzag|striped) ring: .* 4 steps$", 2),
            lines("why workers wait", 2),
            r"\d\. (forward|backward) step \d: rank \d waits",
        ),
    ),
    Row(
        "C2d",
        "NVTX ranges name layer, pass and step, on CPU too.",
        "checks parallel/test_nvtx_ranges.py",
        (PASSED,),
        elsewhere="an Nsight capture on a GPU",
    ),
    Row(
        "C3",
        "`mtrain simulate` predicts steps on clusters that one does not have.",
        "mtrain simulate; mtrain simulate model=qwen3b seq=512k --cluster a100_4x8 --density 5% "
        "--no-files",
        (lines(r"(?m)^ *(zigzag|striped|balanced) ", 4), lines(r"^best ", 2), lines("^memory ", 2)),
    ),
    Row(
        "C4",
        "`mtrain report` shows the newest measurement, or a run, as text, CSV and an offline page.",
        "mtrain train run.name=r seq=512 train.steps=4 profile.every=2 >log; mtrain report; "
        "mtrain report r; test -s runs/r/report.html; ls runs/r/tables/*.csv; "
        "! grep -oE '(src|href)=\"?(https?:)?//[^ >]*' runs/r/report.html",
        (lines("Load balance", 2), r"\.csv$"),
    ),
    Row(
        "C5a",
        "Hydra groups compose model, topology and sparsity; Typer shows help and typed errors.",
        "mtrain train model=llama8b topology=a100_4x8 sparsity=moba mask=causal --cfg; "
        "mtrain config list; mtrain --show-completion bash | head -3; "
        "! mtrain train topology.layuot=zigzag",
        (
            r"name: llama8b",
            r"pattern: moba",
            r"cluster: a100_4x8",
            r"mtrain_completion",
            r"^mtrain: topology\.layuot=zigzag: .*topology\.layout",
        ),
        fast=True,
    ),
    Row(
        "C5b",
        "Own option files compose like the shipped ones.",
        "mkdir -p mine/model; mtrain config show model/tiny >/dev/null; "
        "sed 's/num_layers: .*/num_layers: 3/' $CHECKOUT/conf/model/tiny.yaml "
        ">mine/model/short.yaml; "
        "mtrain train --config-dir mine model=short seq=512 train.steps=2 --dry-run",
        (r"\b3 layers",),
    ),
    Row(
        "C6",
        "The package declares its dependencies; the wheel holds conf, kernels and profiles.",
        'python -c \'import importlib.metadata as m; print(*m.requires("mtrain"), sep="\\n")\'; '
        "ls -d $(dirname $(python -c 'import mtrain_cli; print(mtrain_cli.__file__)'))/*/; "
        "checks test_packaging.py",
        (
            *(rf"^{name}\b" for name in ("torch", "hydra-core", "omegaconf", "rich", "typer")),
            *(r"^nvtx\b", r"^pandas\b", r"^cupy.*extra == .cuda"),
            *(rf"/mtrain_cli/{name}/$" for name in ("conf", "kernels", "profiles")),
            PASSED,
        ),
        elsewhere="building the image of the Dockerfile, with an engine for containers",
    ),
)

MTRAINING = (
    Row(
        "M1a",
        "`vertical_slash` chooses lines online, in every layer and step; a slash is found at any "
        "offset.",
        "checks sparsity/test_probe.py -k 'slash_at_any_offset or first_rows_of_a_block'; "
        "mtrain train sparsity=vertical_slash sparsity.block=16 seq=512 train.steps=2",
        (PASSED, every(r"^step +\d/2 .*density +([\d.]+) ?%", lambda share: 0 < share < 100, 2)),
    ),
    Row(
        "M1b",
        "The columns of an answer that is asked at the end of a prompt are kept at the defaults.",
        "python planted_end.py",
        (every(r"kept (\d+) % .* density of ([\d.]+) %", lambda kept, _: kept >= 95),),
        not_yet="every one of the last 128 queries is probed, and 84 % of the columns are kept",
    ),
    Row(
        "M1c",
        "Some setting keeps columns that are asked anywhere, at a density of at most 15 %.",
        "python planted_anywhere.py sparsity=block_topk sparsity.block=32 sparsity.density=0.12 "
        "sparsity.score=exact",
        (every(r"kept (\d+) % .* density of ([\d.]+) %", lambda kept, d: kept >= 95 and d <= 15),),
    ),
    Row(
        "M2",
        "All workers choose the same index as one worker, without rank 0.",
        'one="$one sparsity=vertical_slash sparsity.block=16"; '
        + PAIR.format("topology.workers=3 topology.exchange=ring topology.layout=striped")
        + "; equal a b; equal a b density 1e-9",
        (equal_runs(1), r"^3 steps, largest difference of density "),
    ),
    Row(
        "M3",
        "Striped blocks balance a sparse index that zigzag does not.",
        "mtrain profile what-if real-512k-4xh200 --layout zigzag,striped --workers 4 --layers 0",
        (ordered(r"^ *striped +ring +\S+ +([\d.]+)", r"^ *zigzag +ring +\S+ +([\d.]+)"),),
    ),
    Row(
        "M4",
        "The hierarchical ring gives the losses of one worker.",
        PAIR.format(
            "topology.workers=4 topology.gpus_per_node=2 topology.exchange=hierarchical_ring"
        )
        + "; equal a b",
        (equal_runs(1),),
        elsewhere="several real hosts",
    ),
    Row(
        "M5",
        "Every kernel gives output and gradients of the float64 oracle, dense and sparse.",
        "checks attention/test_reference.py attention/test_sdpa.py",
        (PASSED,),
        elsewhere="flash4 and triton on a GPU: tests/gpu",
    ),
    Row(
        "M6",
        "MoBA, XAttention and fixed lines train as baselines.",
        "for p in moba xattention fixed; do mtrain train sparsity=$p sparsity.block=16 seq=512 "
        "train.steps=2 run.name=$p; done",
        (
            *(rf"^sparsity +{name}\b" for name in ("moba", "xattention", "fixed")),
            every(r"^step +2/2 .*density +([\d.]+) ?%", lambda share: 0 < share <= 100, 3),
        ),
    ),
    Row(
        "M7",
        "The paper's recipe is one word: blocks of 64, hierarchical ring, ZeRO-2, YaRN by 32.",
        "mtrain train recipe=mtraining_qwen3b_512k topology.workers=32 topology.gpus_per_node=8 "
        "topology.gpu_memory_gib=39.4 --dry-run",
        (r"striped, blocks of 64", r"hierarchical_ring", r"(?i)yarn.*32", r"39\.4"),
        elsewhere="training the recipe, and its trained weights",
    ),
    Row(
        "M8",
        "Published values beside predicted ones: table 3 and figures 6b, 7, 12 and 13.",
        "for t in table3 fig6b fig7 fig12 fig13; do mtrain study $t --no-files; done",
        (
            *(rf"^{t}: " for t in ("table3", "fig6b", "fig7", "fig12", "fig13")),
            lines(r"(worker degree|step degree|computation ratio) +[\d.]+ +[\d.]+ ", 12),
        ),
    ),
    Row(
        "M9",
        "Recall, top-k shares, maps and the score's dependence on distance are measured.",
        "mtrain profile sparsity seq=512 --steps 1 --pattern vertical_slash,moba --top-k 16,64 "
        "--maps 0:0 --rope sparsity.block=16",
        (
            *(r"^vertical_slash, step 1", r"^moba, step 1"),
            lines(r"^ +all +[01]\.\d{4} +[01]\.\d", 2),  # recall
            r"^ +1 +all +0\.\d{4} +0\.\d{4} *$",  # shares of the top k
            r"^ step 1, layer 0, head 0 +0\.\d{4}",  # a map
            r"^ step +layer +R² +slash +vertical +both",
            r"distance",
        ),
    ),
    Row(
        "M10",
        "Loss by length, needles, RULER and generation, with dense and with sparse prompts.",
        "mtrain train run.name=m seq=1k train.steps=4 >log; "
        "mtrain generate m --prompt 'def main' --max-new 8; "
        "mtrain eval perplexity m --text $CHECKOUT/README.md --length 256,512 --samples 1 "
        "--attention dense,vertical_slash sparsity.block=16; "
        "mtrain eval niah m --length 512 --samples 1 --needles 2; "
        "mtrain eval ruler m --length 1k --tasks fwe --samples 1",
        (
            r"^8 prompt tokens in .* per generated token",
            r"^ length +dense +vertical_slash +samples",
            lines(r"^ +(256|512) +\d+\.\d+ +\d+\.\d+ +1 *$", 2),
            r"(?s)niah by depth.* 90-100% +\d",
            r"^ 1k +dense +\d+\.\d +\d+\.\d *$",
        ),
        elsewhere="scores of a trained model at 128K and more",
    ),
)

BURST = (
    Row(
        "B1",
        "Queries can circulate instead of keys and values: fewer bytes, the same losses.",
        PAIR.format("topology.workers=3 topology.exchange=ring topology.circulates=queries")
        + "; equal a b; for c in kv queries; do mtrain train model=llama14b seq=1m "
        "topology=a800_4x8 topology.gpu_memory_gib=99 topology.exchange=ring "
        "topology.circulates=$c --dry-run | "
        "sed -n s/^traffic/$c/p; done",
        (
            equal_runs(1),
            ordered(r"^queries .* ([\d.]+) GiB backward", r"^kv .* ([\d.]+) GiB backward"),
        ),
    ),
    Row(
        "B2",
        "The topology-aware ring hides slow hops, and delays gradients by one hop.",
        "mtrain simulate model=llama14b seq=1m --cluster a800_4x8 "
        "--exchange ring,hierarchical_ring --layout zigzag --no-files",
        (
            ordered(
                r"^ *zigzag +hierarchical_ring\D*? ([\d.]+) ",
                r"^ *zigzag +ring\D*? ([\d.]+) ",
            ),
        ),
        elsewhere="real links",
    ),
    Row(
        "B3",
        "Checkpoints by part of the sequence save memory with the same losses.",
        "mtrain train $one run.name=a >log; mtrain train $one "
        "train.activation_checkpoint=sequence_selective train.checkpoint_keep=0.5 run.name=b >log; "
        "equal a b",
        (equal_runs(1),),
    ),
    Row(
        "B4",
        "The LM head and the loss never hold all logits.",
        "mtrain train $one run.name=a >log; "
        "mtrain train $one train.loss_gradients=recompute run.name=b >log; equal a b; "
        "mtrain train model=qwen3b seq=512k topology=h200_1x8 --dry-run",
        (equal_runs(1), every(r"^loss +([\d.]+) GiB", lambda gib: gib < 8)),  # all: 37 GiB
    ),
    Row(
        "B5",
        "Sliding windows, dilated and block masks train alike on one and several workers.",
        "for m in 'sliding_window mask.window=100' 'dilated' 'block_causal mask.block=64'; do "
        + PAIR.format(
            "mask=$m topology.workers=3 topology.layout=balanced topology.exchange=group_cast"
        ).replace("topology.workers=1", "mask=$m topology.workers=1")
        + "; equal a b; rm -r runs; done",
        (equal_runs(3),),
    ),
    Row(
        "B6",
        "FSDP in three degrees and a host optimizer change memory, not losses.",
        "mtrain train $one topology.workers=1 run.name=a >log; for s in optimizer gradients full; "
        "do mtrain train $one topology.workers=2 train.shard=$s optim.offload=true run.name=$s "
        ">log; equal a $s; done",
        (equal_runs(3),),
    ),
    Row(
        "B7",
        "The paper's tables of rates and memory: published beside predicted, with bounds.",
        "mtrain study burst-table4 --no-files; mtrain study burst --no-files",
        (*(rf"^burst-table{n}: " for n in range(1, 6)), r"best - worst"),
    ),
)

MAGI = (
    Row(
        "G1",
        "A document brings its own mask of slices, exact on any number of workers.",
        "python slices.py >q.jsonl; mtrain data prepare q.jsonl q --tokens-key ids --mask-key mask "
        "--tokenizer bytes >log; for w in 1 3; do mtrain train $one data=tokens data.path=q "
        "data.mask_key=mask topology.workers=$w run.name=w$w >log; done; equal w1 w3",
        (equal_runs(1),),
    ),
    Row(
        "G2",
        "The kernel of masks is timed for all masks.",
        "mtrain profile kernels --mask all --seq 1k --repeats 1 --heads 4/2 --head-dim 32",
        (lines(r"^\w+ +1024 .* [\d.]+ ms +[\d.]+ ms$", 8),),
        elsewhere="FlexAttention beside it, on a GPU: --compare flex",
    ),
    Row(
        "G3",
        "Dispatch balances any mask: the cost of the balanced layout is the lowest.",
        "mtrain mask show mask=sliding_window mask.window=256 seq=8k topology.workers=4",
        (ordered(r"^ *balanced .* ([\d.]+) *$", r"^ *(?:zigzag|striped) .* ([\d.]+) *$"),),
    ),
    Row(
        "G4a",
        "Group cast sends only the keys that a worker needs, with the losses of one worker.",
        'one="$one mask=sliding_window mask.window=64"; '
        + PAIR.format(
            "topology.workers=4 topology.gpus_per_node=2 topology.layout=balanced "
            "topology.exchange=hierarchical_group_cast"
        )
        + "; equal a b",
        (equal_runs(1),),
    ),
    Row(
        "G4b",
        "Group cast works inside Ulysses groups.",
        "mtrain train $one model=tiny topology.workers=4 topology.ulysses=2 "
        "topology.exchange=group_cast topology.layout=zigzag data.document_mask=false "
        "mask=prefix_lm mask.prefix=50",
        (r"^step +3/3 ",),
    ),
    Row(
        "G5",
        "Group cast runs in stages that overlap with attention, chosen by price or set.",
        PAIR.format("topology.workers=4 topology.exchange=group_cast topology.stages=1")
        + "; equal a b; mtrain train model=qwen3b seq=128k topology=h200_1x8 "
        "topology.exchange=group_cast --dry-run | grep -i stage",
        (equal_runs(1), r"(?i)\d stages?\b.* m?s"),
    ),
    Row(
        "G6",
        "Packed documents and video masks: planned, priced and drawn.",
        "mtrain mask show mask=video seq=4k --plot v.html; test -s v.html; "
        "mtrain simulate run recipe=video mask.causal=false data=stdlib data.document_mask=false "
        "--no-files --exchange group_cast,all_gather",
        (r"v\.html", r"^ *\w+ +group_cast", r"^ *\w+ +all_gather"),
    ),
)

LECTURE = (
    Row(
        "L1",
        "Tensor parallelism with sequence parallelism gives the losses of one worker.",
        'one="$one train.global_batch=2"; '
        + PAIR.format("topology.workers=4 topology.tensor_parallel=2")
        + "; equal a b",
        (equal_runs(1),),
    ),
    Row(
        "L2",
        "Bytes and memory of each method of parallelism stand in one table.",
        "mtrain simulate methods model=qwen7b seq=32k --cluster h100_4x8 --nodes 1",
        (r"GiB", r"(?i)idle", r"(?i)ulysses", r"(?i)ring", r"(?i)tensor", r"(?i)pipeline"),
    ),
    Row(
        "L3",
        "A mixture of experts trains with expert parallelism, and the loads are shown.",
        'one="$one model=tiny_moe"; '
        + PAIR.format("topology.workers=2 topology.expert_parallel=2")
        + "; equal a b; mtrain report b | grep -i expert",
        (equal_runs(1), r"(?i)largest load|experts"),
    ),
    Row(
        "L4",
        "Ulysses, alone and around rings (USP), gives the losses of one worker.",
        PAIR.format("topology.workers=2 topology.exchange=ulysses")
        + "; mtrain train $one topology.workers=4 topology.ulysses=2 topology.exchange=ring "
        "run.name=c >log; equal a b; equal a c",
        (equal_runs(2),),
    ),
    Row(
        "L5",
        "Ring and zigzag give the losses of one worker.",
        PAIR.format("topology.workers=3 topology.exchange=ring topology.layout=zigzag")
        + "; equal a b",
        (equal_runs(1),),
    ),
    Row(
        "L6",
        "Pipelines (gpipe, 1f1b, interleaved) give the losses of one worker.",
        'one="$one train.global_batch=4"; mtrain train $one topology.workers=1 run.name=a >log; '
        "for s in gpipe 1f1b 'interleaved topology.virtual_stages=2'; do mtrain train $one "
        "topology.workers=2 topology.pipeline_parallel=2 topology.schedule=$s run.name=b >log; "
        "equal a b; rm -r runs/b; "
        "done",
        (equal_runs(3),),
        elsewhere="several real hosts",
    ),
)

OWN = (
    Row(
        "X1",
        "The bytes and pairs that the plan, the simulator and a profile count are equal.",
        "mtrain profile imbalance --exchange ring --layout striped --steps 1 seq=512 "
        "topology.workers=3 run.name=p >log; mtrain simulate validate measurements/p --no-files "
        "| tail -30",
        (r"\b(?P<all>[1-9]\d*) of (?P=all) counts equal",),
    ),
    Row(
        "X2",
        "Predictions stand beside measurements, for every step and worker.",
        "mtrain simulate validate predicted-4xh200 --prediction predicted-4xh200/predictions "
        "--no-files",
        (
            lines(r" all +[\d.]+ +[\d.]+ +[+-][\d.]+%", 24),
            every(r"^time +mean absolute error ([\d.]+)%", lambda percent: percent <= 6),
            r"\b(?P<all>[1-9]\d*) of (?P=all) counts equal",
        ),
    ),
    Row(
        "X3a",
        "`recommend` names the fastest configuration that fits, and why.",
        "mtrain simulate recommend model=qwen3b seq=1m --cluster h200_1x8 --no-files",
        (lines(r"^ \S+ .* yes *$", 3), r"^best ", r"^why "),
    ),
    Row(
        "X3b",
        "A recorded index is replayed with other layouts, exchanges and workers.",
        "mtrain profile what-if real-512k-4xh200 --layout zigzag,striped --workers 4,8 --layers 0",
        (lines(r"^ *(zigzag|striped) +\w+ +\d\S* +(\d+\.\d\d +){4}.*[KMG]iB", 8),),
    ),
)

FIGURES = (
    Row(
        "N1",
        "Blocks of 64, as in the paper, from the plan to the index.",
        "mtrain train sparsity=vertical_slash sparsity.block=64 topology.block_size=64 seq=1k "
        "train.steps=2 topology.workers=2",
        (r"blocks of 64", every(r"^step +2/2 .*density +([\d.]+) ?%", lambda d: 0 < d <= 100)),
    ),
    Row(
        "N2",
        "The share of attention in a step, measured and predicted.",
        "mtrain profile step model=tiny seq=1k topology.workers=2 --steps 1; "
        "mtrain simulate model=qwen3b seq=64k --cluster h200_1x8 --no-files",
        (
            every(r"^ attention +[\d.,]+ +([\d.]+)%", lambda share: 0 < share < 100),
            r"^ step +[\d,.]+ +100\.0%",
            r"^time .*\battention [\d.]+%",
        ),
    ),
    Row(
        "N3",
        "Pictures of schedules: which worker holds and computes what in each step.",
        "mtrain profile imbalance --exchange ring --layout zigzag --steps 1 seq=1k "
        "topology.workers=4 run.name=s >log; mtrain report s >log; "
        "grep -cE '<svg|plotly' measurements/s/report.html; "
        "mtrain report s | grep -iA14 'sends meanwhile'",
        (r"^[1-9]\d*$", lines(r"^ *forward +\d+ ", 4), lines(r"^ *backward +\d+ ", 4)),
    ),
    Row(
        "N4",
        "Learning with sparse attention: several seeds, curves and needles.",
        "mtrain study learning --tier a --dry-run",
        (lines(r" 0, 1, 2 .* [PT]FLOP +\d", 10), r"seeds to compute\. .* left, \d+ minutes"),
        elsewhere="training the cells",
    ),
    Row(
        "N7",
        "Ablations: each optimization switched off by one key.",
        "mtrain study burst-table2 --no-files",
        (r"^burst-table2: ", r"published +predicted", lines(r"\d+\.\d+ - \d+", 4)),
    ),
    Row(
        "N13",
        "Kernel rates of six masks.",
        "mtrain profile kernels --mask full,causal,documents,documents_full,"
        "documents_block_causal,video --seq 1k --repeats 1 --heads 4/2 --head-dim 32",
        (
            *(rf"^{name} +1024 .* [\d.]+ ms +[\d.]+ ms$" for name in ("full", "causal", "video")),
            *(rf"^documents{kind} +1024 .* ms$" for kind in ("", "_full", "_block_causal")),
        ),
        elsewhere="the rates of a GPU",
    ),
    Row(
        "N14",
        "Scaling of a module while length and workers grow; no bound above the GPU's peak.",
        "mtrain study magi-scaling --no-files",
        (every(r"CP \d+ +TFLOP.* ([\d,.]+) +- +([\d,.]+) ", lambda a, b: max(a, b) <= 989, 4),),
    ),
    Row(
        "N15",
        "Published values beside predicted ones, from one list.",
        "mtrain study list",
        (lines("BurstEngine|MTraining|MagiAttention", 14),),
    ),
)

ROWS = (*CARD, *MTRAINING, *BURST, *MAGI, *LECTURE, *OWN, *FIGURES)
